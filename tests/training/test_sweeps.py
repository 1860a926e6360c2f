from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrant.evaluation.comparison import Comparison
from calibrant.options import RecipeError
from calibrant.training import loop, sweeps
from calibrant.training.grid import compare
from calibrant.training.recipe import Recipe
from calibrant.training.runs import Run
from calibrant.training.sweeps import settings_of, sweep

RECIPE = Recipe.load("digits-lt").override(
    [
        "epochs=1",
        "data=synthetic[classes=3,features=4,train_size=60,validation_size=40,test_size=41]",
        "batch_size=8",
        "model.hidden=[16]",
        "optimizer.lr=0.05",
        "loss=mbls",
    ]
)
MARGINS = {"margin": [0.5, 6]}
RATES = {"optimizer.lr": [0.01, 0.2, 0.05]}


def means(comparison: Comparison, metric: str, *, after: bool = False) -> dict[str, float]:
    return {name: figure.mean for name, figure in comparison.figures(metric, after=after).items()}


def test_every_setting_is_trained_and_only_the_chosen_one_is_tested(
    trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    said: list[str] = []
    result = sweep(RECIPE, MARGINS, tmp_path, seeds=[0, 3], resamples=20, report=said.append)
    assert result is not None
    losses = ["mbls[margin=0.5]", "mbls[margin=6]"]
    assert trained == [(loss, seed) for loss in losses for seed in (0, 3)]
    assert said[1] == "run 2 of 4: margin=0.5, seed 3"
    assert result.validation.seeds == result.test.seeds == (0, 3)
    found = means(result.validation, "nll")
    assert list(found) == ["margin=0.5", "margin=6"]
    assert result.chosen == min(found, key=lambda name: found[name])
    (method,) = result.test.methods
    assert method.name == f"mbls[{result.chosen}]"
    assert [len(each) for each in (method.before, method.after, method.temperatures)] == [2, 2, 2]
    # Validation and test data have different sizes here, so that neither can stand in for the other.
    assert {each.samples for each in method.before + method.after} == {41}
    assert {each.samples for each in result.validation.methods[0].before} == {40}
    folders = {path.parent.name for path in tmp_path.rglob("evaluation.json")}
    assert folders == {f"mbls-{result.chosen}-seed{seed}" for seed in (0, 3)}
    others = json.loads(result.to_json())["validation"]["runs"]
    assert {run["accuracy"] * 40 % 1 for runs in others.values() for run in runs["before"]} == {0.0}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of these data and fits
def test_labels_that_all_have_one_answer_have_no_temperature(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(60, 4))
    answers = (features[:, :2] > 0).astype(int)
    validation = {"validation_features": features[:20], "validation_labels": np.ones((20, 2), int)}
    np.savez(tmp_path / "data.npz", features=features, labels=answers, **validation)
    data = f"data=npz[file={tmp_path / 'data.npz'}]"
    recipe = RECIPE.override([data, "binary=true", "loss=focal"])
    result = sweep(recipe, {"gamma": [1, 2]}, tmp_path / "runs", resamples=0)
    assert result is not None
    (method,) = result.test.methods
    assert method.temperatures == ()
    assert method.after[0].metrics == method.before[0].metrics


def test_no_setting_but_the_chosen_one_is_evaluated_on_test_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[tuple[str, str]] = []
    plain = Run.predictions

    def noting(run: Run, part: Any) -> Any:
        read.append((run.recipe.loss, part))
        return plain(run, part)

    monkeypatch.setattr(Run, "predictions", noting)
    result = sweep(RECIPE, MARGINS, tmp_path, resamples=0)
    assert result is not None
    assert {loss for loss, part in read if part == "test"} == {f"mbls[{result.chosen}]"}
    assert {loss for loss, part in read if part == "validation"} == {"mbls[margin=0.5]", "mbls[margin=6]"}
    for setting, method in zip(
        settings_of(RECIPE, MARGINS, tmp_path), result.validation.methods, strict=True
    ):
        last = Run(setting.folder(0)).history[-1]
        assert method.name == setting.name
        assert method.before[0].nll == pytest.approx(last["validation_nll"], rel=1e-5)
        assert method.before[0].ece == pytest.approx(last["validation_ece"], abs=1e-6)


def test_runs_are_those_of_a_comparison(trained: list[tuple[str, int]], tmp_path: Path) -> None:
    compare(RECIPE, ["mbls[margin=6]"], [0], tmp_path, resamples=0)
    sweep(RECIPE, MARGINS, tmp_path, resamples=0)
    assert trained == [("mbls[margin=6]", 0), ("mbls[margin=0.5]", 0)]
    compare(RECIPE, ["mbls[margin=0.5]", "mbls[margin=6]"], [0], tmp_path, resamples=0)
    changed = {"optimizer.lr": [0.05, 0.1]}
    sweep(RECIPE, changed, tmp_path, resamples=0)
    assert len(trained) == 4
    recipe = RECIPE.override(["optimizer.lr=0.1"])
    compare(recipe, ["mbls"], [0], tmp_path / "optimizer.lr=0.1", resamples=0)
    sweep(RECIPE, changed, tmp_path, by="accuracy", resamples=0)
    assert len(trained) == 4


def test_a_stopped_sweep_goes_on(
    trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = RECIPE.override(["epochs=2"])
    whole = sweep(recipe, MARGINS, tmp_path / "whole", resamples=0)
    trained.clear()
    with monkeypatch.context() as patch:
        plain = loop.Loop._end_epoch

        def stop(training: loop.Loop, *arguments: Any, **options: Any) -> None:
            plain(training, *arguments, **options)
            if training.parts.recipe.loss == "mbls[margin=6]":
                raise KeyboardInterrupt

        patch.setattr(loop.Loop, "_end_epoch", stop)
        with pytest.raises(KeyboardInterrupt):
            sweep(recipe, MARGINS, tmp_path / "again", resamples=0)
    resumed = sweep(recipe, MARGINS, tmp_path / "again", resamples=0)
    assert trained == [("mbls[margin=0.5]", 0), ("mbls[margin=6]", 0), ("mbls[margin=6]", 0)]
    assert resumed == whole


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of three learning rates."""
    folder = tmp_path_factory.mktemp("rates")
    sweep(RECIPE, RATES, folder, resamples=0)
    return folder


@pytest.mark.parametrize(
    ("by", "metric", "after", "choose"),
    [
        ("accuracy", "accuracy", False, max),
        ("adaptive-ece", "adaptive_ece", False, min),
        ("nll-after-temperature", "nll", True, min),
    ],
)
def test_the_criterion_decides(
    by: str, metric: str, after: bool, choose: Any, rates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Loop, "run", lambda _: pytest.fail("trained anew"))
    result = sweep(RECIPE, RATES, rates, by=by, resamples=0)
    assert result is not None
    found = means(result.validation, metric, after=after)
    assert len(set(found.values())) > 1
    assert result.chosen == choose(found, key=lambda name: found[name])


def test_settings_are_the_product_of_the_values() -> None:
    recipe = RECIPE.override(["loss=cals-alm[penalty=p2]"])
    over: dict[str, Sequence[Any]] = {"data.separation": [1, 2.5], "margin": [4, 6]}
    settings = settings_of(recipe, over, Path("out"))
    assert [setting.name for setting in settings] == [
        "data.separation=1, margin=4",
        "data.separation=1, margin=6",
        "data.separation=2.5, margin=4",
        "data.separation=2.5, margin=6",
    ]
    last = settings[-1]
    assert (last.recipe.loss, last.recipe.data.options["separation"]) == (
        "cals-alm[penalty=p2,margin=6]",
        2.5,
    )
    assert last.full_name == "cals-alm[penalty=p2,margin=6], data.separation=2.5"
    assert last.folder(1).as_posix() == "out/data.separation=2.5/runs/cals-alm-penalty=p2-margin=6-seed1"
    assert last.with_seed(1) == recipe.override(
        ["data.separation=2.5", "loss=cals-alm[penalty=p2,margin=6]", "seed=1"]
    )


def test_any_kind_of_value_can_be_varied() -> None:
    recipe = RECIPE.override(["loss=adafocal"])
    over: dict[str, Sequence[Any]] = {
        "adapt": ["epoch", 10],  # of the loss, as compare writes it
        "model.hidden": [[4], [8, 8]],
        "drop_last": [True],
        "model": ["mlp[hidden=[5]]"],
        "select": ["nll"],
    }
    with pytest.raises(RecipeError, match="the same folder"):
        settings_of(recipe, {"name": ["a b", "a:b"]}, Path("out"))
    del over["model"]
    last = settings_of(recipe, over, Path("out"))[-1]
    assert last.recipe.loss == "adafocal[adapt=10]"
    assert last.recipe.model.options["hidden"] == (8, 8)
    assert (last.recipe.drop_last, last.recipe.select) == (True, "nll")
    assert last.name == "adapt=10, model.hidden=[8, 8], drop_last=true, select=nll"
    (other,) = settings_of(recipe, {"model": ["mlp[hidden=[5]]"]}, Path("out"))
    assert other.recipe.model.options["hidden"] == (5,)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({}, "at least one option"),
        (
            {"margn": [4]},
            r"unknown option 'margn' \(did you mean 'margin'\?\); loss mbls has: margin, .*epochs",
        ),
        ({"adapt": [3, "often"]}, "adapt must be"),  # mbls does not adapt, so this is the recipe's
        ({"optimizer.rl": [0.1]}, "'rl'"),
        ({"margin": [4, -1]}, "margin must lie in"),
        ({"margin": [4, "wide"]}, "margin must be a number"),
        ({"epochs": [2, 2.5]}, "epochs must be a whole number"),
        ({"margin": []}, "margin needs a list of one or more values"),
        ({"margin": "4,6"}, "margin needs a list of one or more values"),
        ({"margin": [4, 6, 4.0]}, "value 4.0 of margin is there twice"),
        ({"seed": [0, 1]}, "does not vary seed: give several seeds"),
        ({"loss": ["ce"]}, "does not vary loss"),
        ({"precision": ["32-true"]}, "does not vary precision"),
        # These are noticed only when data, network and optimizer are built.
        ({"data.train_size": [60, -1]}, "train_size"),
        ({"optimizer.lr": [0.1, -1]}, "Invalid learning rate"),
        ({"model.hidden": [[4], [-4]]}, "model mlp"),
        ({"data": ["digits[test_per_class=0]"]}, "no test part"),
    ],
)
def test_refused_before_anything_is_trained(
    over: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sweeps, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(ValueError, match=said):
        sweep(RECIPE, over, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_option_in_the_brackets_of_the_loss_is_not_varied() -> None:
    with pytest.raises(RecipeError, match=r"margin is given twice: in the loss mbls\[margin=6\]"):
        settings_of(RECIPE.override(["loss=mbls[margin=6]"]), MARGINS, Path("out"))


def test_test_figures_of_every_epoch_are_refused() -> None:
    recipe = Recipe.load("digits")
    object.__setattr__(recipe, "log_test", True)
    with pytest.raises(RecipeError, match="only the chosen setting is evaluated on the test data"):
        settings_of(recipe, {"epochs": [1, 2]}, Path("out"))


@pytest.mark.parametrize("seeds", [[], [1, 1]])
def test_seeds_are_refused(seeds: list[int], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="one or more seeds, each once"):
        sweep(RECIPE, MARGINS, tmp_path, seeds=seeds)


def test_the_folder_of_another_recipe_is_refused_before_anything_is_trained(
    trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    compare(RECIPE.override(["epochs=2"]), ["mbls[margin=6]"], [0], tmp_path, resamples=0)
    trained.clear()
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        sweep(RECIPE, MARGINS, tmp_path)
    assert trained == []


def test_equal_data_are_loaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[str] = []
    plain = sweeps.load_data

    def noting(choice: Any, root: Any) -> Any:
        loaded.append(str(choice.options["train_size"]))
        return plain(choice, root)

    monkeypatch.setattr(sweeps, "load_data", noting)
    result = sweep(RECIPE, {"margin": [5, 6], "data.train_size": [60, 64]}, tmp_path, resamples=0)
    assert loaded == ["60", "64"]
    assert result is not None
    assert result.remarks()[-1].startswith("The settings differ in their data")
