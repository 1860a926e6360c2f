from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from calibrant import metrics
from calibrant.calibrators import Temperature
from calibrant.calibrators.temperature import ChanceBoundWarning, ChanceWarning
from calibrant.evaluation import evaluate
from calibrant.losses import AdaptationWarning, AdaptiveLoss, create_loss
from calibrant.options import RecipeError
from calibrant.training import checkpoint, logs, loop, setup, validation
from calibrant.training.data import DATA_SETS, DataSets, MissingDataError, TensorSplit, load_data, shuffled
from calibrant.training.loop import TrainingError, train
from calibrant.training.models import create_model
from calibrant.training.optimization import SCHEDULES
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import is_finished
from calibrant.training.setup import make_fabric, set_up
from tests.programs import PREPARED

from . import program
from .run_folders import assert_close, assert_identical, result, rows, tensors

ROOT = Path(__file__).parents[2]

SMALL = [
    "epochs=3",
    "batch_size=32",
    "data=synthetic[classes=4,features=5,train_size=100,validation_size=60,test_size=31]",
    "model=mlp",
    "model.hidden=[8]",
    "optimizer.lr=0.01",
]
ADAPTIVE = "loss=cals-alm[margin=2]"


@cache
def small(*changes: str) -> Recipe:
    return Recipe.load("digits-lt").override([*SMALL, *changes])


def small_of(changes: list[str]) -> Recipe:
    """The same with another model, which has no hidden layers to choose."""
    return Recipe.load("digits-lt").override([*(each for each in SMALL if "model" not in each), *changes])


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Only there are runs promised to be the same bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_fabric", partial(make_fabric, accelerator="cpu"))
        yield


@pytest.fixture
def spotted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Changes to a recipe for data with void pixels."""
    monkeypatch.setitem(DATA_SETS, "spotted", program.spotted)
    return ["data=spotted", "model=tests.training.program:pixelwise", "epochs=2"]


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


# ---- What a run leaves behind ---------------------------------------------------------------------


def test_a_run_learns_and_leaves_everything_behind(tmp_path: Path) -> None:
    recipe = small(ADAPTIVE, "epochs=12")
    folder = train(recipe, tmp_path / "deep" / "run")
    assert Recipe.load(folder / "recipe.toml") == recipe
    history = rows(folder)
    assert [row["epoch"] for row in history] == list(range(1, 13))
    assert history[-1]["train_loss"] < 0.8 * history[0]["train_loss"]
    about = {"data": load_data(recipe.data).fingerprint, "normalisation": None, "recipe": recipe.to_toml()}
    found = result(folder)
    names = {f"{name}.safetensors" for name in ("model", "loss", "learned", "bins")}
    assert found.pop("files").keys() == names | {"validation.npz", "test.npz"}
    assert found == {"format": 2, "epoch": 12, "epochs": 12, **about, "history": history}
    assert list((folder / "tensorboard").iterdir())
    found = tensors(folder)
    assert found["learned.safetensors/multiplier"].shape == (12, 4)
    assert torch.equal(found["learned.safetensors/multiplier"][-1], found["loss.safetensors/multiplier"])
    assert found["test/logits"].shape == (31, 4)
    assert torch.equal(found["test/labels"], load_data(recipe.data).test.targets)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which no test changes."""
    return train(small(), tmp_path_factory.mktemp("plain"))


def test_what_is_logged_is_what_was_predicted(plain: Path) -> None:
    found = tensors(plain)
    expected = evaluate(found["validation/logits"], found["validation/labels"], resamples=0)
    row = rows(plain)[-1]
    for name in ("accuracy", "nll", "ece"):
        assert row[f"validation_{name}"] == pytest.approx(getattr(expected, name), rel=1e-5)
    assert row["validation_adaptive_ece"] == pytest.approx(
        expected.adaptive_ece, abs=5e-3
    )  # from whole cells


def test_seeds_differ_and_repeat(plain: Path, tmp_path: Path) -> None:
    again, other = (train(small(f"seed={seed}"), tmp_path / str(seed)) for seed in (0, 1))
    assert_identical(plain, again)
    assert not torch.equal(
        tensors(plain)["model.safetensors/1.weight"], tensors(other)["model.safetensors/1.weight"]
    )


def test_a_recipe_by_its_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"recipe must be a Recipe, got 'digits'; Recipe.load"):
        train("digits", tmp_path / "run")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_last_smaller_batch_counts_unless_dropped(tmp_path: Path) -> None:
    kept = train(small("drop_last=false"), tmp_path / "kept")
    dropped = train(small("drop_last=true"), tmp_path / "dropped")
    assert rows(kept)[0]["train_loss"] != rows(dropped)[0]["train_loss"]


def test_a_batch_larger_than_the_data_is_all_of_them(tmp_path: Path) -> None:
    large = train(small("batch_size=4096", "drop_last=true"), tmp_path / "large")
    exact = train(small("batch_size=100", "drop_last=true"), tmp_path / "exact")
    assert tensors(large).keys() == tensors(exact).keys()
    assert rows(large) == rows(exact)


def test_workers_change_nothing(tmp_path: Path) -> None:
    assert_identical(
        train(small("workers=2", "epochs=2"), tmp_path / "two"),
        train(small("epochs=2"), tmp_path / "none"),
    )


def test_dropout_is_the_same_with_workers(tmp_path: Path) -> None:
    model = "model=tests.training.program:forgetful"
    assert_identical(
        train(small("workers=2", "epochs=2", model), tmp_path / "two"),
        train(small("epochs=2", model), tmp_path / "none"),
    )


# ---- The arithmetic of a step ---------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ce", "cals-alm[margin=1]", "ce[class_weight=[1, 5]]"])
def test_accumulated_parts_equal_the_whole(loss: str, tmp_path: Path) -> None:
    changes = [f"loss={loss}", "optimizer=sgd[lr=0.1]", "drop_last=false", "data.classes=2"]
    whole = train(small(*changes), tmp_path / "whole")
    parts = train(small(*changes, "accumulate=4"), tmp_path / "parts")
    assert_close(parts, whole)


def test_accumulated_parts_equal_the_whole_with_void_pixels(spotted: list[str], tmp_path: Path) -> None:
    changes = [*spotted, ADAPTIVE, "optimizer=sgd[lr=0.1]"]
    whole = train(small(*changes), tmp_path / "whole")
    parts = train(small(*changes, "accumulate=4"), tmp_path / "parts")
    assert_close(parts, whole)
    labels = tensors(whole)["test/labels"]
    assert 0.2 < float((labels == -100).double().mean()) < 0.8


def steps(recipe: Recipe, count: int) -> torch.nn.Module:
    """The recipe's network after so many steps written out, with cross-entropy and all data in each."""
    torch.manual_seed(recipe.seed)
    data = load_data(recipe.data)
    model = create_model(recipe.model.name, 4, data.about, **recipe.model.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.optimizer.options["lr"])
    clip = recipe.gradient_clip
    for _ in range(count):
        inputs, target = data.train.batch(torch.arange(len(data.train)))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), target, reduction=recipe.batch_loss).backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > clip
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("clip", "batch_loss", "lr", "accumulate"),
    [
        *((0, "mean", 0.5, 4), (0, "sum", 0.005, 1), (0, "sum", 0.005, 4)),  # clipping hides a wrong factor
        *((0.05, "mean", 0.5, 1), (0.05, "sum", 0.005, 4)),
    ],
)
def test_a_run_of_whole_batches_is_gradient_descent(
    clip: float, batch_loss: str, lr: float, accumulate: int, tmp_path: Path
) -> None:
    recipe = small(
        "batch_size=100",
        f"batch_loss={batch_loss}",
        f"optimizer=sgd[lr={lr},momentum=0,weight_decay=0]",
        f"gradient_clip={clip}",
        f"accumulate={accumulate}",
    )
    found = load_file(train(recipe, tmp_path) / "model.safetensors")
    expected = steps(recipe, 3).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_the_average_of_weights_is_what_is_kept(tmp_path: Path) -> None:
    changes = ["batch_size=100", "optimizer=sgd[lr=0.5,momentum=0,weight_decay=0]"]
    found = load_file(train(small(*changes, "average=0.75"), tmp_path) / "model.safetensors")
    first, second, third = (steps(small(*changes), count).state_dict() for count in (1, 2, 3))
    for name, value in found.items():
        average = 0.75 * (0.75 * first[name] + 0.25 * second[name]) + 0.25 * third[name]
        torch.testing.assert_close(value, average)


def test_the_learning_rate_follows_the_schedule_within_epochs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def noting(epoch: float, epochs: int) -> float:
        asked.append((epoch, epochs))
        return 1 / (1 + epoch)

    monkeypatch.setitem(SCHEDULES, "noting", noting)
    folder = train(small("schedule=noting", "epochs=2", "batch_size=50"), tmp_path)
    assert asked == [(0.0, 2), (0.5, 2), (1.0, 2), (1.5, 2)]
    assert [row["lr"] for row in rows(folder)] == pytest.approx([0.01 / 1.5, 0.01 / 2.5])


# ---- Adaptation -----------------------------------------------------------------------------------


def passes(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The epoch and the batches of it that were done whenever the loss adapted."""
    found: list[tuple[int, int]] = []
    validate = loop.Loop._validate

    def noting(training: loop.Loop, *, adapt: bool, select: str = "last") -> dict[str, float]:
        if adapt:
            found.append((training.epoch, training.step))
        return validate(training, adapt=adapt, select=select)

    monkeypatch.setattr(loop.Loop, "_validate", noting)
    train(recipe, folder)
    return found


def test_a_loss_without_effect_is_told_at_the_end_of_the_run(tmp_path: Path) -> None:
    recipe = small("loss=cals-alm[margin=1000]", "epochs=10")
    with pytest.warns(AdaptationWarning, match=r"cals-alm\[margin=1000\], seed 0: after 10 passes") as caught:
        train(recipe, tmp_path)
    assert [warning.filename for warning in caught] == [__file__]
    train(recipe, tmp_path)  # finished: no second warning


@pytest.mark.parametrize(
    ("key", "remedy"), [("cals-alm", "Train for longer: a margin of "), ("cals-hr", "Try a lower margin")]
)
def test_a_short_run_tells_of_a_loss_without_effect(key: str, remedy: str, tmp_path: Path) -> None:
    idle = rf"{key}\[margin=1000\], seed 0: its penalty had no effect in 3 passes: .* {remedy}"
    with pytest.warns(AdaptationWarning, match=idle):
        train(small(f"loss={key}[margin=1000]", "epochs=3"), tmp_path / "idle")
    with warnings.catch_warnings(action="error"):
        train(small(f"loss={key}[margin=0.5]", "epochs=3"), tmp_path / "at work")
        train(small("loss=ada-scale", "epochs=3"), tmp_path / "without a penalty")


def train_one_epoch(recipe: Recipe, folder: Path) -> Path:
    """Train with a loss that adapts only after the last step, which a warning says."""
    with pytest.warns(
        AdaptationWarning, match=r"seed 0: it adapted only after the last training step, .*\(adapt"
    ):
        return train(recipe.override(["epochs=1"]), folder)


def test_one_epoch_with_adaptations_within_it_gives_no_warning(tmp_path: Path) -> None:
    train(small(ADAPTIVE, "epochs=1", "adapt=3", "batch_size=25"), tmp_path / "a")  # after 3 of 4 batches
    train_one_epoch(small(ADAPTIVE, "adapt=4", "batch_size=25"), tmp_path / "b")
    train(small("loss=ce", "epochs=1"), tmp_path / "c")


def test_adaptation_follows_its_schedule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = small("loss=cals-alm[adapt=0:epoch/2:3/4:1]", "epochs=5", "batch_size=25")  # 4 batches an epoch
    expected = [(0, 4), (1, 4)]  # at the ends of epochs
    expected += [(2, 3), (3, 3)]  # counted anew in every epoch
    expected += [(4, 1), (4, 2), (4, 3), (4, 4)]
    assert passes(recipe, tmp_path, monkeypatch) == expected
    assert load_file(tmp_path / "loss.safetensors")["passes"] == len(expected)


@pytest.mark.parametrize(("adapt", "count"), [("epoch", 3), ("5", 3), ("3", 3), ("2", 6), ("1", 12)])
def test_adaptation_every_so_many_batches(
    adapt: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert len(passes(small(ADAPTIVE, f"adapt={adapt}", "batch_size=25"), tmp_path, monkeypatch)) == count


def test_a_loss_that_cannot_adapt_is_not_validated_for_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert passes(small("loss=ce", "adapt=1"), tmp_path, monkeypatch) == []


def test_the_loss_learns_from_the_validation_data_alone(tmp_path: Path) -> None:
    found = tensors(train_one_epoch(small("loss=cals-alm[margin=0.5]"), tmp_path))
    loss = create_loss("cals-alm", 4, margin=0.5)
    assert isinstance(loss, AdaptiveLoss)
    loss.observe(found["validation/logits"], found["validation/labels"])
    loss.adapt()
    fresh = create_loss("cals-alm", 4, margin=0.5).state_dict()
    assert not torch.equal(fresh["multiplier"], loss.state_dict()["multiplier"])
    for name, value in loss.state_dict().items():
        torch.testing.assert_close(found[f"loss.safetensors/{name}"], value, rtol=1e-5, atol=1e-9)


def test_the_loss_can_learn_from_a_part_of_the_training_data_instead(tmp_path: Path) -> None:
    recipe = small("loss=cals-alm[margin=0.5]", "adapt_on=train")
    found = tensors(train_one_epoch(recipe, tmp_path))
    data = load_data(recipe.data)
    inputs, target = data.train.batch(shuffled(100, recipe.seed, epoch=-1)[:60])  # as many as for validation
    model = create_model(recipe.model.name, 4, data.about, **recipe.model.options)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    loss = create_loss("cals-alm", 4, margin=0.5)
    assert isinstance(loss, AdaptiveLoss)
    loss.observe(model.eval()(inputs), target)
    loss.adapt()
    for name, value in loss.state_dict().items():
        torch.testing.assert_close(found[f"loss.safetensors/{name}"], value, rtol=1e-5, atol=1e-9)
    plain = tensors(train_one_epoch(small("loss=cals-alm[margin=0.5]"), tmp_path / "plain"))
    assert not torch.equal(plain["loss.safetensors/multiplier"], found["loss.safetensors/multiplier"])
    assert torch.equal(plain["test/logits"], found["test/logits"])  # the first epoch is the same


def test_adapting_to_training_data_within_epochs_needs_no_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = small(ADAPTIVE, "adapt=2", "adapt_on=train", "batch_size=25")  # 4 batches an epoch
    assert passes(recipe, tmp_path, monkeypatch) == []
    assert load_file(tmp_path / "loss.safetensors")["passes"] == 6


def test_training_data_fewer_than_the_validation_data_are_all_adapted_to(tmp_path: Path) -> None:
    recipe = small(ADAPTIVE, "adapt_on=train", "epochs=1", "data.train_size=40", "data.validation_size=60")
    parts = set_up(recipe, load_data(recipe.data), make_fabric(recipe, accelerator="cpu"))
    part = loop._training_part(parts)
    assert part is not None
    assert len(part) == 40


def test_options_in_brackets_reach_the_loss(plain: Path, tmp_path: Path) -> None:
    wide, narrow = (
        train(small(f"loss=cals-alm[margin={margin},penalty=p2]"), tmp_path / str(margin))
        for margin in (20, 0.1)
    )
    weights = "model.safetensors/1.weight"
    torch.testing.assert_close(tensors(wide)[weights], tensors(plain)[weights])
    assert not torch.allclose(tensors(narrow)[weights], tensors(plain)[weights])


# ---- Which weights are kept -----------------------------------------------------------------------


# A step that is far too large makes the later epochs worse than the first ones.
STUMBLING = "schedule=multistep[milestones=[5],factor=12]"


@pytest.mark.parametrize("criterion", ["accuracy", "nll", "ece", "nll-after-temperature"])
def test_the_best_epoch_is_kept(criterion: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights jump about, and each criterion has a best epoch of its own."""
    recipe = small(f"select={criterion}", "epochs=8", "optimizer=sgd[lr=0.3,momentum=0]", STUMBLING)
    logits: list[torch.Tensor] = []
    validate = loop.Loop._validate

    def noting(training: loop.Loop, *, adapt: bool, select: str = "last") -> dict[str, float]:
        logits.append(
            torch.cat(
                [part for part, _ in validation.predictions(training.parts, training.parts.data.validation)]
            )
        )
        return validate(training, adapt=adapt, select=select)

    monkeypatch.setattr(loop.Loop, "_validate", noting)
    folder = train(recipe, tmp_path)
    labels = tensors(folder)["validation/labels"]

    def value(scores: torch.Tensor) -> float:
        if criterion == "nll-after-temperature":
            return -metrics.nll(Temperature().fit(scores, labels)(scores), labels)
        figure: float = getattr(metrics, criterion)(scores, labels)
        return figure if criterion == "accuracy" else -figure

    values = [value(scores) for scores in logits]
    best = max(range(8), key=values.__getitem__)
    assert best < 7  # or it could as well have kept the last
    assert result(folder)["epoch"] == best + 1
    torch.testing.assert_close(tensors(folder)["validation/logits"], logits[best])
    logged = [row[f"validation_{criterion.replace('-', '_')}"] for row in rows(folder)]
    assert [abs(each) for each in logged] == pytest.approx([abs(each) for each in values], rel=1e-4)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("category", [ChanceWarning, ChanceBoundWarning])
def test_a_network_that_knows_nothing_yet_is_selected_by_without_a_warning(
    category: type[Warning], binary: bool
) -> None:
    logits = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    target = torch.arange(1200).view(400, 3) % 2 if binary else torch.arange(400) % 3
    if category is ChanceBoundWarning:  # worse than nothing
        target = (logits < 0).long() if binary else logits.argmin(1)
    with pytest.warns(category, match="check the order of both"):
        Temperature().fit(logits, target, binary=binary)
    # warnings are errors in the tests
    validation._nll_after_temperature([(logits, target)], -100, binary=binary)


@pytest.mark.parametrize("criterion", ["accuracy", "nll"])
def test_test_figures_are_logged_and_change_nothing(criterion: str, tmp_path: Path) -> None:
    """Neither the random numbers of dropout nor the choice of the best epoch."""
    changes = [f"select={criterion}", "epochs=6", ADAPTIVE, "model=tests.training.program:forgetful"]
    recipe, logging = small_of(changes), small_of([*changes, "log_test=true"])
    data = load_data(recipe.data)
    inputs, target = data.test.batch(torch.arange(31))
    data = replace(
        data, test=TensorSplit(inputs, (target + 1) % 4)
    )  # whoever is right elsewhere is wrong here
    plain = train(recipe, tmp_path / "plain", data=data)
    logged = train(logging, tmp_path / "logged", data=data)
    ours, theirs = tensors(logged), tensors(plain)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert {name.rpartition("/")[2] for name in ours.keys() - theirs.keys()} == {
        *("test_edges", "test_count", "test_confidence", "test_accuracy")
    }
    history, before = rows(logged), rows(plain)
    names = ["test_accuracy", "test_nll", "test_ece", "test_adaptive_ece"]
    assert [name for name in history[0] if name not in before[0]] == names
    assert [{name: value for name, value in row.items() if name not in names} for row in history] == before
    assert result(logged)["epoch"] == result(plain)["epoch"]
    # By the test data another epoch would have been the best.
    values = [row[f"test_{criterion}"] * (-1 if criterion == "accuracy" else 1) for row in history]
    assert result(logged)["epoch"] != 1 + min(range(6), key=values.__getitem__)
    kept = history[result(logged)["epoch"] - 1]
    expected = evaluate(ours["test/logits"], ours["test/labels"], resamples=0)
    for name in ("accuracy", "nll", "ece"):
        assert kept[f"test_{name}"] == pytest.approx(getattr(expected, name), rel=1e-5)


def test_test_figures_need_test_data(tmp_path: Path) -> None:
    recipe = small("log_test=true")
    data = load_data(recipe.data)
    data = replace(data, test=data.test.subset(torch.arange(0)))
    with pytest.raises(RecipeError, match="log_test needs test data; data 'synthetic' have none"):
        train(recipe, tmp_path / "run", data=data)
    assert not (tmp_path / "run" / "recipe.toml").exists()


# ---- Killed and resumed ---------------------------------------------------------------------------

EXACT = [
    *SMALL,
    "loss=cals-alm[margin=2]",
    "adapt=5",
    "drop_last=true",
    "average=0.9",
    "checkpoint_batches=3",
    "model=tests.training.program:forgetful",
    "optimizer=adam[lr=0.01]",
    "schedule=cosine[warmup=1]",
    "select=nll",
    "batch_size=12",
    "epochs=2",
]


@cache
def exact(*changes: str) -> Recipe:
    return Recipe.load("digits-lt").override(
        [*(each for each in EXACT if not each.startswith("model.")), *changes]
    )


def start(python: Path, output: Path, recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "tests.training.program", str(output), str(recipe), *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def lived(output: Path, recipe: Path, *arguments: str) -> int | None:
    """The same in a process that need not import anything, and how it ended."""
    process = PREPARED.Process(target=program.main, args=([str(output), str(recipe), *arguments],))
    process.start()
    process.join(120)
    ended = process.exitcode
    process.kill()  # if it has not
    return ended


def test_a_run_that_is_stopped_early_stays_unfinished_and_can_go_on(
    trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    asked: list[int] = []

    def after_two(history: Any) -> bool:
        asked.append(len(history))
        return len(history) == 2

    recipe = small(ADAPTIVE, "epochs=4")
    folder = train(recipe, tmp_path / "early", stop_early=after_two)
    assert asked == [1, 2]
    assert len(rows(folder)) == 2
    assert not is_finished(folder)
    assert not list(folder.glob("*.npz")) + list(folder.glob("*.safetensors"))
    train(recipe, folder, stop_early=after_two)  # asked again, so that a kill in between changes nothing
    assert asked == [1, 2, 2]
    assert_identical(train(recipe, folder), train(recipe, tmp_path / "undisturbed"))
    assert len(trained) == 4
    train(recipe, folder, stop_early=after_two)  # a finished run is left unchanged
    assert (len(trained), asked) == (4, [1, 2, 2])


def test_five_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    undisturbed = train(exact("epochs=4"), tmp_path / "undisturbed")
    path = tmp_path / "killed.toml"
    # 32 steps of at least 0.03 s take longer than the five lives together.
    path.write_text(exact("epochs=4", "model.pause=0.03").to_toml())
    moments, kills = random.Random(), 0
    checkpoint = tmp_path / "killed" / "checkpoints" / "last.pt"
    while kills < 5 or not checkpoint.exists():  # on a busy machine, five lives may be too short for one
        latest = 0.18 + max(0, kills - 4)
        assert lived(tmp_path, path, "--kill-after", str(moments.uniform(0.03, latest))) == -signal.SIGKILL
        kills += 1
    assert lived(tmp_path, path) == 0
    assert_identical(tmp_path / "killed", undisturbed)
    done = len((tmp_path / "killed.steps").read_text())
    assert 32 <= done <= 32 + kills * 4  # no kill threw it back by more than three steps and the one begun


class Killed(BaseException):
    """Nothing catches it on the way out, as nothing catches a kill."""


def die_at(call: int, place: Any, name: str, monkeypatch: pytest.MonkeyPatch, *, after: bool = False) -> None:
    """Make the so-many-th call of a function the last."""
    plain = getattr(place, name)
    calls = 0

    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        found = plain(*arguments, **named)
        if calls == call:
            raise Killed
        return found

    monkeypatch.setattr(place, name, dying)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(exact(), tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        pytest.param(loop.Loop, "_train_step", 13, id="step"),
        pytest.param(loop.Loop, "_validate", 3, id="validation"),
        pytest.param(loop.Loop, "_keep_best", 2, id="best"),
        pytest.param(checkpoint, "save_last", 5, id="checkpoint"),
        pytest.param(checkpoint, "save_last", 6, id="last-checkpoint"),
        pytest.param(checkpoint.torch, "save", 4, id="half-a-file"),
        pytest.param(Path, "replace", 9, id="rename"),
        pytest.param(Path, "replace", 10, id="rename-of-the-best"),
        pytest.param(Path, "replace", 11, id="rename-after-that"),
        pytest.param(logs.Logs, "write", 1, id="logs"),
        pytest.param(logs.Logs, "write", 2, id="last-logs"),
        pytest.param(loop.run_folder, "save_weights", 1, id="weights"),
        pytest.param(validation, "write_predictions", 2, id="predictions"),
    ],
)
def test_killed_at_any_place(
    place: Any,
    name: str,
    call: int,
    after: bool,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with monkeypatch.context() as patch:
        die_at(call, place, name, patch, after=after)
        with pytest.raises(Killed):
            train(exact(), tmp_path)
    assert not is_finished(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(exact(), tmp_path)
    assert_identical(tmp_path, undisturbed)


def test_resuming_does_not_start_anew(monkeypatch: pytest.MonkeyPatch, interrupted: Path) -> None:
    taken = []
    plain = loop.Loop._train_step

    def noting(training: loop.Loop, batch: Any) -> None:
        taken.append((training.epoch, training.step))
        plain(training, batch)

    monkeypatch.setattr(loop.Loop, "_train_step", noting)
    train(exact(), interrupted)
    # Eight batches an epoch and a checkpoint after each third: the 13th step was the fifth of its epoch.
    assert taken[0] == (1, 3)
    assert len(taken) == 16 - 11


def test_a_finished_run_is_left_alone(monkeypatch: pytest.MonkeyPatch, plain: Path) -> None:
    before = {path: path.read_bytes() for path in plain.rglob("*") if path.is_file()}
    die_at(1, loop, "load_data", monkeypatch)
    assert train(small(), plain) == plain
    assert {path: path.read_bytes() for path in plain.rglob("*") if path.is_file()} == before


# ---- Damage and full disks ------------------------------------------------------------------------


def killed_at(place: Any, name: str, call: int, folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        die_at(call, place, name, patch)
        with pytest.raises(Killed):
            train(exact(), folder)
    return folder


@pytest.fixture(scope="module")
def killed_in_epoch_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_at(loop.Loop, "_train_step", 14, tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def killed_at_the_end(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_at(loop.Loop, "_finish", 1, tmp_path_factory.mktemp("killed"))


@pytest.fixture
def interrupted(killed_in_epoch_2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_in_epoch_2, tmp_path / "interrupted"))


@pytest.fixture
def unfinished(killed_at_the_end: Path, tmp_path: Path) -> Path:
    """All epochs are trained, and nothing else is written."""
    return Path(shutil.copytree(killed_at_the_end, tmp_path / "unfinished"))


def test_a_checkpoint_of_version_0_1_is_resumed(undisturbed: Path, interrupted: Path) -> None:
    """It has a list of tensors where there is one tensor now."""
    path = interrupted / "checkpoints" / "last.pt"
    state = checkpoint.load(path)
    assert state["learned"]
    state["learned"] = {name: list(values) for name, values in state["learned"].items()}
    for each in state["randomness"]:
        each["python"] = each["python"].tolist()
    checkpoint.save(path, state)
    train(exact(), interrupted)
    assert_identical(interrupted, undisturbed)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "foreign"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    damage: str, undisturbed: Path, interrupted: Path
) -> None:
    path = interrupted / "checkpoints" / "last.pt"
    content = bytearray(path.read_bytes())
    weights = checkpoint.load(path)["model"]["layers.0.weight"].numpy().tobytes()
    content[content.index(weights) + 5] ^= 16
    path.write_bytes(
        {"flipped": bytes(content), "truncated": content[:-1000], "empty": b"", "foreign": b"a text"}[damage]
    )
    with pytest.warns(UserWarning, match=r"last\.pt is damaged; going back to the one before"):
        train(exact(), interrupted)
    assert_identical(interrupted, undisturbed)


def test_with_every_checkpoint_damaged_a_run_starts_anew(undisturbed: Path, interrupted: Path) -> None:
    for name in ("last.pt", "previous.pt"):
        (interrupted / "checkpoints" / name).write_bytes(b"")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(exact(), interrupted)
    said = [str(each.message) for each in caught]
    assert len(said) == 2
    assert "last.pt is damaged" in said[0]
    assert "previous.pt is damaged" in said[1]
    assert_identical(interrupted, undisturbed)


def test_damaged_best_weights_give_way_to_the_best_before(unfinished: Path) -> None:
    checkpoints = unfinished / "checkpoints"
    before = checkpoint.load(checkpoints / "second-best.pt")
    (checkpoints / "best.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"best\.pt is damaged; taking the best before it"):
        train(exact(), unfinished)
    assert json.loads((unfinished / "result.json").read_text())["epoch"] == before["epoch"]


def test_best_weights_that_are_all_damaged_say_what_to_do(unfinished: Path) -> None:
    for name in ("best.pt", "second-best.pt"):
        (unfinished / "checkpoints" / name).unlink()
    with pytest.raises(TrainingError, match=r"best weights are damaged; delete"):
        train(exact(), unfinished)


@pytest.mark.parametrize("call", [2, 6, 8])
def test_a_full_disk_loses_nothing(
    call: int, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        saved = 0
        plain = torch.save

        def full(state: Any, stream: Any) -> None:
            nonlocal saved
            saved += 1
            if saved >= call:
                stream.write(b"half of it")
                raise OSError(28, "No space left on device")
            plain(state, stream)

        patch.setattr(checkpoint.torch, "save", full)
        with pytest.raises(OSError, match=r"^cannot write .*\.pt: No space left on device$"):
            train(exact(), tmp_path)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names <= {"last.pt", "previous.pt", "best.pt", "second-best.pt"}
    assert "last.pt" in names
    kept = checkpoint.load(tmp_path / "checkpoints" / "last.pt")
    assert kept["epoch"] * 8 + kept["step"] >= {2: 3, 6: 11, 8: 14}[call]
    train(exact(), tmp_path)
    assert_identical(tmp_path, undisturbed)


def test_a_disk_that_really_is_too_small(undisturbed: Path, programs: Path, tmp_path: Path) -> None:
    path = tmp_path / "full.toml"
    path.write_text(exact().to_toml())
    # Checkpoints grow with the history: the first ones fit, the last ones do not.
    folder = tmp_path / "full"
    sizes = (undisturbed / "checkpoints" / "last.pt").stat().st_size
    refused = start(programs / "python", tmp_path, path, "--largest-file", str(sizes - 600))
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith(f"OSError: cannot write {folder / 'checkpoints'}")
    assert "File too large" in refused.stderr.splitlines()[-1]
    kept = checkpoint.load(folder / "checkpoints" / "last.pt")
    assert kept["epoch"] >= 1
    train(exact(), folder)
    assert_identical(folder, undisturbed)


# ---- Refusals -------------------------------------------------------------------------------------


def test_the_folder_of_another_recipe_is_refused(plain: Path) -> None:
    before = (plain / "recipe.toml").read_bytes()
    with pytest.raises(
        RecipeError, match=r"holds a run of another recipe \(there: epochs = 3\); choose another"
    ):
        train(small("epochs=4"), plain)
    with pytest.raises(RecipeError, match=r"there: loss = \"ce\""):
        train(small("loss=cals-alm[margin=6,penalty=p2]"), plain)
    assert (plain / "recipe.toml").read_bytes() == before


def test_a_folder_in_which_nothing_was_trained_is_free(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"nan in epoch 1\. A lower"):
        train(small("optimizer=sgd", "optimizer.lr=1e30"), tmp_path)
    train(small(), tmp_path)
    assert Recipe.load(tmp_path / "recipe.toml") == small()


def write_archive(folder: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    np.savez(folder / "data.npz", features=random.normal(size=(120, 5)), labels=np.arange(120) % 4)


def test_data_that_have_changed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("data=npz")
    write_archive(tmp_path, 0)

    def stop(self: object, *arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "run", data_root=tmp_path)
    write_archive(tmp_path, 1)
    with pytest.raises(RecipeError, match=r"data have changed since the run in .*run began"):
        train(recipe, tmp_path / "run", data_root=tmp_path)
    write_archive(tmp_path, 0)
    folder = train(recipe, tmp_path / "run", data_root=tmp_path)
    constants = result(folder)["normalisation"]
    assert len(constants["mean"]) == len(constants["std"]) == 5


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", features=np.eye(60, 5), labels=np.zeros(60, dtype=int))
    with pytest.raises(RecipeError, match="data 'npz' have the single class '0'; expected two or more"):
        train(small("data=npz"), tmp_path / "run", data_root=tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_network_that_ends_in_a_softmax_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"as_probabilities.* add up to 1, .*leave its softmax out"):
        train(small("epochs=1", "model=tests.training.program:as_probabilities"), tmp_path)


def test_a_file_is_no_output_folder(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(NotADirectoryError, match="file is a file; expected a folder"):
        train(small(), path)


@pytest.mark.parametrize("loss", ["ce", "cals-alm"])
@pytest.mark.parametrize("classes", [4, 10])
def test_a_model_of_another_class_count_is_refused(loss: str, classes: int, tmp_path: Path) -> None:
    recipe = small(f"loss={loss}", f"data.classes={classes}", "model=tests.training.program:of_seven")
    with pytest.raises(RecipeError, match=rf"of_seven' gives 7 classes; the data have {classes}"):
        train(recipe, tmp_path)


def test_missing_data_are_named(tmp_path: Path) -> None:
    recipe = small("data=cifar10", "model=cifar-resnet-18")
    with pytest.raises(MissingDataError, match="cifar-10"):
        train(recipe, tmp_path / "run", data_root=tmp_path)


@pytest.mark.parametrize("adapt", ["epoch", "1"])
@pytest.mark.parametrize("every", [0, 1])
def test_a_loss_that_is_not_finite_ends_training(
    adapt: str, every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The weights of the last checkpoint are finite, wherever in an epoch it was written."""
    plain = loop.Loop._train_step

    def spoiling(training: loop.Loop, batch: Any) -> None:
        if (training.epoch, training.step) == (1, 1):
            with torch.no_grad():
                next(training.parts.network.parameters()).fill_(math.nan)
        plain(training, batch)

    monkeypatch.setattr(loop.Loop, "_train_step", spoiling)
    recipe = small(ADAPTIVE, f"adapt={adapt}", f"checkpoint_batches={every}")
    with pytest.raises(TrainingError, match=r"loss became nan in epoch 2; .*optimizer\.lr"):
        train(recipe, tmp_path)
    kept = checkpoint.load(tmp_path / "checkpoints" / "last.pt")
    assert (kept["epoch"], kept["step"]) == (1, every)
    assert all(torch.isfinite(value).all() for value in kept["model"].values())


@pytest.mark.parametrize("loss", ["ce", "cals-alm"])
def test_weights_that_the_last_step_of_an_epoch_spoiled_end_training(
    loss: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = loop.Loop._train_step

    def spoiling(training: loop.Loop, batch: Any) -> None:
        plain(training, batch)
        if (training.epoch, training.step) == (1, training.parts.steps - 1):
            with torch.no_grad():
                next(training.parts.network.parameters()).fill_(math.nan)

    monkeypatch.setattr(loop.Loop, "_train_step", spoiling)
    with pytest.raises(TrainingError, match="in epoch 2"):
        train(small(f"loss={loss}"), tmp_path)
    assert checkpoint.load(tmp_path / "checkpoints" / "last.pt")["epoch"] == 1


def test_validation_data_that_are_all_void_are_refused(
    spotted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def void(root: Path, **options: Any) -> Any:
        data = program.spotted(root)
        assert data.validation.targets is not None
        data.validation.targets.fill_(255)
        return data

    monkeypatch.setitem(DATA_SETS, "spotted", void)
    with pytest.raises(TrainingError, match="validation data have no element that is not ignored"):
        train(small(*spotted), tmp_path)


def test_precision_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"cannot set up training: .*precision"):
        make_fabric(small("precision=17"))


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    class Three:
        world_size, global_rank = 3, 0

    recipe = small()
    with pytest.raises(RecipeError, match="batch_size 32 cannot be divided equally among 3 processes"):
        set_up(recipe, load_data(recipe.data), Three())  # type: ignore[arg-type]


def test_results_are_json_that_others_read(tmp_path: Path) -> None:
    train(small(ADAPTIVE), tmp_path)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    with np.load(tmp_path / "test.npz", allow_pickle=False) as archive:
        assert archive["logits"].dtype == np.float32


def test_precision_is_chosen_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def precision(accelerator: str, *, gpu: bool, native: bool = True) -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
        chosen = []
        monkeypatch.setattr(setup, "Fabric", lambda **options: chosen.append(options["precision"]))
        make_fabric(small(), accelerator=accelerator)
        return chosen[0]

    assert precision("auto", gpu=True) == "bf16-mixed"
    assert precision("auto", gpu=True, native=False) == "32-true"
    assert precision("cpu", gpu=True) == precision("auto", gpu=False) == "32-true"


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)]
)
def test_half_precision_trains_and_is_evaluated_as_the_weights_are(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = Recipe.load("digits-lt").override(
        ["epochs=1", "data.flat=false", "model=cnn[width=8]", f"precision={precision}", "average=0.5"]
    )
    contexts = []
    observe = validation.ValidationSums.of

    def noting(*arguments: Any, **options: Any) -> Any:
        contexts.append((torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
        return observe(*arguments, **options)

    monkeypatch.setattr(validation.ValidationSums, "of", noting)
    folder = train(recipe, tmp_path)
    assert set(contexts) == {(False, torch.float32)}
    assert math.isfinite(rows(folder)[0]["validation_nll"])
    weights = load_file(folder / "model.safetensors")
    assert weights["head.weight"].dtype == dtype
    data = load_data(recipe.data)
    network = create_model("cnn", 10, data.about, width=8).to(dtype).eval()
    network.load_state_dict(weights)
    inputs, _ = data.test.batch(torch.arange(len(data.test)))
    with torch.no_grad():
        expected = network(inputs.to(dtype)).float()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(tensors(folder)["test/logits"], expected, rtol=tolerance, atol=tolerance)


def test_gradients_do_not_live_through_validation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held: list[Any] = []
    validate = loop.Loop._validate

    def noting(training: loop.Loop, **options: Any) -> dict[str, float]:
        held.extend(weight.grad for weight in training.parts.network.parameters())
        return validate(training, **options)

    monkeypatch.setattr(loop.Loop, "_validate", noting)
    train(small("epochs=1"), tmp_path)
    assert set(held) == {None}


class Viewing(torch.nn.Module):
    """A network that relies on the channels being the outer axis."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(800, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(images).view(len(images), -1))


@pytest.mark.parametrize(
    ("network", "shape", "last"),
    [
        pytest.param(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten()), (3, 12, 12), True),
        pytest.param(Viewing(), (3, 12, 12), False),
        pytest.param(torch.nn.Linear(5, 4), (5,), False),
        pytest.param(torch.nn.Conv3d(3, 8, 3), (3, 5, 5, 5), False),
    ],
    ids=["flattening", "viewing", "vectors", "volumes"],
)
def test_channels_lie_last_where_the_network_takes_that(
    network: torch.nn.Module, shape: tuple[int, ...], last: bool
) -> None:
    inputs = torch.randn(1, *shape)
    expected = network(inputs)
    assert setup._lay_channels_last(network, inputs) == last
    assert all(
        weight.is_contiguous(memory_format=torch.channels_last) == last
        for weight in network.parameters()
        if weight.ndim == 4
    )
    torch.testing.assert_close(network(inputs), expected)


def test_what_cannot_be_followed_leaves_no_folder(tmp_path: Path) -> None:
    missing = small("data=npz[file=nope.npz]")
    with pytest.raises(FileNotFoundError):
        train(missing, tmp_path / "run", data_root=tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_network_that_does_not_take_the_data_is_refused_in_words(tmp_path: Path) -> None:
    recipe = small("model=mlp[features=7]")
    with pytest.raises(RecipeError, match=r"model mlp\[features=7\] does not take an input of these data"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("loss=ce[reduction=sum]", "reduction cannot be set here; the recipe"),
        ("loss=ce[ignore_index=0]", "ignore_index cannot be set here; the recipe"),
        ("loss=ce[adapt=3]", "ce does not adapt"),
        ("gradient_clip=nan", "gradient_clip must be at least 0"),
        ("schedule.warmup=-1", "warmup must be at least 0"),
    ],
)
def test_what_would_spoil_training_is_refused(change: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        small(change)


def test_a_learning_rate_below_0_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"optimizer .*lr=-1.*: Invalid learning rate"):
        train(small("optimizer.lr=-1"), tmp_path / "run")


def test_recipes_made_in_python_can_be_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = replace(small(), losses={"cals-alm": {"multiplier_range": (1e-3, 10.0)}})
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    train(recipe, tmp_path)
    train(recipe, tmp_path)


def test_a_compiled_model_trains_like_a_plain_one(
    plain: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The same graphs without a C++ compiler at work on them.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert_close(train(small("compile=true"), tmp_path), plain)


@pytest.mark.parametrize(
    ("changes", "variable", "threads"),
    [([], None, 1), (["model.hidden=[2048, 2048]"], None, 2), ([], "2", 2)],
    ids=["small", "large", "chosen by the user"],
)
def test_a_small_network_trains_with_one_thread(
    changes: list[str],
    variable: str | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        recipe = Recipe.load("digits-lt").override(["epochs=2", *changes])
        train(recipe, tmp_path / "run", stop_early=lambda rows: bool(seen.append(torch.get_num_threads())))
        assert seen == [threads]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class EightBits(TensorSplit):
    """Labels as the files of many data sets have them."""

    def batch(self, indices: torch.Tensor, draws: torch.Tensor | None = None) -> Any:
        inputs, targets = super().batch(indices, draws)
        return inputs, targets.to(torch.uint8)


def test_labels_of_8_bits_train_as_others(tmp_path: Path) -> None:
    # 156 is -100 in 8 bits.
    torch.manual_seed(0)
    inputs, targets = torch.randn(48, 5), torch.tensor([156, 156, 3, 4]).repeat(12)
    recipe = small("epochs=1", "accumulate=2", "batch_loss=sum")
    folders = []
    for kind in (TensorSplit, EightBits):
        part = kind(inputs, targets)
        data = DataSets(part, part, part, tuple(f"class {k}" for k in range(160)), {"features": 5})
        folders.append(train(recipe, tmp_path / kind.__name__, data=data))
    plain, eight = (tensors(folder) for folder in folders)
    assert all(torch.equal(eight[name], expected) for name, expected in plain.items())
