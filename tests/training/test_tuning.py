"""Tuning: trials on the validation data, in one process or several, killed and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from calibrant.evaluation.chosen import Tuning
from calibrant.evaluation.criterion import Criterion
from calibrant.losses import MarginSmoothing
from calibrant.losses.base import Range
from calibrant.options import RecipeError
from calibrant.training import DivergedError, TrainingError, loop, study, tuning
from calibrant.training.grid import compare
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import is_finished
from calibrant.training.runs import Run
from calibrant.training.study import Study
from calibrant.training.tuning import space_of, tune
from tests.training.interruptions import killed_in_step, side_by_side

RECIPE = Recipe.load("digits-lt").override(
    [
        "epochs=2",
        "data=synthetic[classes=3,features=4,train_size=60,validation_size=40,test_size=41]",
        "batch_size=20",
        "model.hidden=[16]",
        "optimizer.lr=0.05",
        "loss=mbls[weight=0.2]",
    ]
)


def tuned(folder: Path, trials: int = 3, recipe: Recipe = RECIPE, **options: Any) -> Tuning:
    result = tune(recipe, folder, trials=trials, **{"resamples": 0, **options})
    assert result is not None
    return result


def test_trials_are_chosen_on_validation_data_and_only_the_choice_is_tested(
    trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[tuple[str, str]] = []
    plain = Run.predictions

    def noting(run: Run, part: Any) -> Any:
        read.append((run.recipe.loss, part))
        return plain(run, part)

    monkeypatch.setattr(Run, "predictions", noting)
    said: list[str] = []
    result = tuned(tmp_path, 4, report=said.append)
    assert [trial.number for trial in result.trials] == [0, 1, 2, 3]
    assert [loss for loss, _ in trained] == [trial.loss for trial in result.trials]
    first = result.trials[0]
    assert (first.loss, first.values) == ("mbls[weight=0.2]", {"margin": 8.0})  # of the recipe digits-lt
    for trial in result.trials[1:]:
        assert trial.loss == f"mbls[weight=0.2,margin={trial.values['margin']}]"
        assert 1 <= trial.values["margin"] <= 30
    found = {trial.name: trial.value for trial in result.trials}
    assert result.chosen == min(found, key=lambda name: found[name] or 0.0)
    assert {part: {loss for loss, each in read if each == part} for part in ("test", "validation")} == {
        "test": {result.chosen_trial.loss},
        "validation": {trial.loss for trial in result.trials},
    }
    assert {each.samples for each in result.test.methods[0].before} == {41}
    for trial in result.trials:
        run = Run(tmp_path / "runs" / f"{tuning.Setting('', '', _of(trial.loss), tmp_path).folder(0).name}")
        assert trial.value == pytest.approx(run.history[-1]["validation_nll"])
        assert list(trial.epochs) == [row["validation_nll"] for row in run.history]
    assert said[0] == "trial 0: margin=8 (1 of 4)"
    assert said[1].startswith("trial 0: NLL 0.")


def _of(loss: str) -> Recipe:
    return RECIPE.override([f"loss={loss}"])


class Finished(NamedTuple):
    """A study of three trials, which no test changes."""

    folder: Path
    result: Tuning


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    return Finished(folder, tuned(folder))


def test_a_finished_study_is_only_read_and_more_trials_are_added(
    finished: Finished, trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    first = finished.result
    shutil.copytree(finished.folder, tmp_path, dirs_exist_ok=True)
    assert tuned(tmp_path).to_json() == first.to_json()
    assert tuned(tmp_path, 1).to_json() == first.to_json()  # the study has three already
    assert trained == []
    more = tuned(tmp_path, 4)
    assert more.trials[:3] == first.trials
    assert trained == [(more.trials[3].loss, 0)]


def test_the_same_study_gives_the_same_trials_and_another_seed_others(
    finished: Finished, tmp_path: Path
) -> None:
    once, again = finished.result, tuned(tmp_path / "again")
    assert once.to_json() == again.to_json()
    other = tuned(tmp_path / "other", 2, RECIPE.override(["seed=1"]))
    assert other.trials[1].values != once.trials[1].values


def test_runs_of_other_commands_are_used_and_the_other_way_round(
    trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    compare(RECIPE, [RECIPE.loss], [0], tmp_path, resamples=0)
    result = tuned(tmp_path, 2)
    assert len(trained) == 2
    compare(RECIPE, [trial.loss for trial in result.trials], [0], tmp_path, resamples=0)
    assert len(trained) == 2


def worse_and_worse(monkeypatch: pytest.MonkeyPatch, spoil: Sequence[int]) -> None:
    """Let the NLL of some trials, by number, be worse from the first epoch on."""
    plain = loop.validate
    losses: list[str] = []

    def validate(parts: Any, **options: Any) -> Any:
        if parts.recipe.loss not in losses:
            losses.append(parts.recipe.loss)
        figures, bins = plain(parts, **options)
        worse = losses.index(parts.recipe.loss) in spoil
        return ({**figures, "nll": figures["nll"] + 10} if worse else figures), bins

    monkeypatch.setattr(loop, "validate", validate)


def test_poor_trials_are_stopped_early_and_are_not_finished_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(study, "TRIALS_BEFORE_PRUNING", 2)
    worse_and_worse(monkeypatch, spoil=[0, 3])  # the first has nothing to be compared with
    result = tuned(tmp_path, 4)
    assert [trial.outcome for trial in result.trials] == ["finished"] * 3 + ["stopped"]
    stopped = result.trials[-1]
    assert (len(stopped.epochs), stopped.value) == (1, None)
    assert stopped.name not in {method.name for method in result.validation.methods}
    folder = tuning.Setting("", "", _of(stopped.loss), tmp_path).folder(0)
    assert not is_finished(folder)
    with pytest.raises(RecipeError, match="is not finished; give the command that trains it again"):
        Run(folder)
    monkeypatch.undo()
    compare(RECIPE, [stopped.loss], [0], tmp_path, resamples=0)  # goes on with it
    assert Run(folder).history[0]["validation_nll"] > 10
    assert tuned(tmp_path, 4).to_json() == result.to_json()


def test_no_trial_is_stopped_early_if_not_wanted_or_not_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(study, "TRIALS_BEFORE_PRUNING", 1)
    worse_and_worse(monkeypatch, spoil=[1])
    assert {trial.outcome for trial in tuned(tmp_path / "a", 2, prune=False).trials} == {"finished"}
    said: list[str] = []
    result = tuned(tmp_path / "b", 2, by="brier", report=said.append)
    assert {(trial.outcome, trial.epochs) for trial in result.trials} == {("finished", ())}
    line = "brier is not logged after each epoch: no trial is stopped early"
    assert said.count(line) == 1
    said.clear()
    tuned(tmp_path / "b", 2, by="brier", prune=False, report=said.append)
    tuned(tmp_path / "a", 2, prune=True, report=said.append)
    assert not any("is not logged" in each for each in said)


def test_the_loss_without_tuning_is_never_stopped_early(tmp_path: Path) -> None:
    first, *_ = others = [opened(tmp_path) for _ in range(7)]
    for each in others:
        assert each.claim(7) is not None
    for each in others[1:-1]:
        each.report([0.1, 0.1])
        each.record("finished", 0.1)
    assert others[-1].report([9.0])
    assert not first.report([9.0])


def test_a_trial_that_diverges_does_not_end_the_study(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = loop.Loop.run
    failing = [1]

    def run(training: loop.Loop) -> None:
        failing[0] -= 1
        if failing[0] == -1:
            raise DivergedError("the training loss became nan in epoch 1")
        plain(training)

    monkeypatch.setattr(loop.Loop, "run", run)
    result = tuned(tmp_path, 3)
    assert [trial.outcome for trial in result.trials] == ["finished", "failed", "finished"]
    assert result.trials[1].reason == "the training loss became nan in epoch 1"
    assert tuned(tmp_path, 3).to_json() == result.to_json()
    monkeypatch.setattr(loop.Loop, "run", lambda _: (_ for _ in ()).throw(DivergedError("it burst")))
    with pytest.raises(TrainingError, match="no trial finished; trial 0 failed: it burst"):
        tuned(tmp_path / "other", 1)


# -------------------------------------------------------------------------------------------------- processes


def opened(folder: Path, by: str = "nll", recipe: Recipe = RECIPE, data: str = "data") -> Study:
    space, defaults = space_of(recipe)
    return Study(folder, recipe, Criterion.parse(by), space, defaults, data)


def test_a_trial_has_one_owner_and_is_left_to_others_when_it_is_given_up(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    claimed = first.claim(2)
    assert claimed == (0, {"margin": 8.0})
    other = second.claim(2)
    assert other is not None
    assert other[0] == 1
    third = opened(tmp_path)
    assert third.claim(2) is None
    assert third.unfinished(2) == [0, 1]
    second.give_up()  # as the system does for a process that is killed
    assert third.claim(2) == other
    third.record("finished", 0.5)
    first.record("finished", 0.4)
    assert third.claim(2) is None
    assert third.unfinished(2) == []
    assert [record.number for record in second.records()] == [0, 1]


def test_an_interrupted_trial_beyond_the_number_of_trials_is_left(tmp_path: Path) -> None:
    study = opened(tmp_path)
    for value in (0.5, 0.4, 0.3):
        study.claim(4)
        study.record("finished", value)
    last = study.claim(4)
    assert last is not None
    study.give_up()
    again = opened(tmp_path)
    assert again.claim(2) is None
    assert again.unfinished(2) == []
    assert again.claim(4) == last


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    before = opened(tmp_path)
    first = before.claim(2)
    before.give_up()
    journal = tmp_path / "study" / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 5, "work')
    again = opened(tmp_path)
    assert again.claim(2) == first
    again.record("finished", 0.5)
    assert journal.read_bytes().startswith(whole + b"{")
    assert [record.outcome for record in opened(tmp_path).records()] == ["finished"]


def three_trials(folder: Path) -> str:
    return tuned(folder).to_json()


def test_a_study_that_was_killed_goes_on_as_if_nothing_had_happened(
    finished: Finished, trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    killed_in_step(three_trials, tmp_path / "killed", 11)  # three steps in each epoch: epoch 2 of trial 1
    journal = (tmp_path / "killed" / "study" / "journal.log").read_text()
    assert journal.count('"op_code":4') == 2  # created: trials 0 and 1
    resumed = tuned(tmp_path / "killed")
    losses = [trial.loss for trial in resumed.trials]
    assert [loss for loss, _ in trained] == losses[1:]  # trial 1 is continued, trial 0 is not repeated
    assert (tmp_path / "killed" / "study" / "journal.log").read_text().count('"op_code":4') == 3
    assert resumed.to_json() == finished.result.to_json()


def five_trials(folder: Path) -> str:
    return tuned(folder, 5).to_json()


def test_two_processes_share_the_trials_of_a_study(tmp_path: Path) -> None:
    (first, one), (second, other) = side_by_side(five_trials, tmp_path)
    plain = json.loads(one)
    assert one == other
    losses = [Recipe.from_toml(text).loss for text in first + second]
    assert sorted(losses) == sorted(trial["loss"] for trial in plain["trials"])
    assert [trial["number"] for trial in plain["trials"]] == list(range(5))
    assert five_trials(tmp_path / "out") == one


# ----------------------------------------------------------------------------------------------------- errors


def test_options_of_the_loss_stay_fixed_and_a_value_of_the_recipe_widens_its_range() -> None:
    space, values = space_of(RECIPE.override(["loss=mbls", "losses.mbls.margin=50"]))
    assert space == (Range("margin", 1, 50, log=True), Range("weight", 0.01, 1, log=True))
    assert values == {"margin": 50.0, "weight": 0.1}
    space, values = space_of(RECIPE.override(["loss=mbls", "losses.mbls.margin=0"]))
    assert space[0] == Range("margin", 0, 30, log=False)
    assert space_of(RECIPE)[1] == {"margin": 8.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["loss=ce"], "loss ce has no hyper-parameters to tune; losses that have: ls, ecp, focal"),
        (["loss=mbls[margin=4,weight=0.1]"], "leaves nothing to tune"),
        (["log_test=true"], "only the chosen loss is evaluated on the test data"),
        (
            ["loss=cals-alm[penalty_weight_max=5]"],
            "cannot be tuned: with margin=1, initial_penalty_weight=10",
        ),
        (["model=lenet"], "unknown model 'lenet'"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_written(
    changes: list[str], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=expected.replace("[", r"\[")):
        tune(RECIPE.override(changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("trials", [0, -1, 2.5])
def test_the_number_of_trials_is_checked(trials: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trials must be a whole number of at least 1"):
        tune(RECIPE, tmp_path, trials=trials)


def test_a_study_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path)
    with pytest.raises(RecipeError, match=r"belongs to another recipe \(there: epochs = 2\)"):
        opened(tmp_path, recipe=RECIPE.override(["epochs=3"]))
    with pytest.raises(RecipeError, match="is chosen by nll, not ece; choose another output folder"):
        opened(tmp_path, by="ece")
    with pytest.raises(RecipeError, match="the data have changed since the run"):
        opened(tmp_path, data="others")
    monkeypatch.setattr(MarginSmoothing, "search_space", (Range("margin", 2, 30, log=True),))
    with pytest.raises(RecipeError, match="has the ranges"):
        opened(tmp_path)


@pytest.mark.parametrize("content", [b"no journal\n", b"{}\n", b"\x00\xff\n", b'{"op_code": 99}\n'])
def test_a_damaged_study_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "journal.log").write_bytes(content)
    with pytest.raises(RecipeError, match=r"journal\.log is damaged"):
        opened(tmp_path)
