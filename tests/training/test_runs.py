from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrant.calibrators import Temperature
from calibrant.evaluation import Evaluation, evaluate
from calibrant.metrics.ood import detection, entropy
from calibrant.options import Choice, RecipeError
from calibrant.predictions import open_predictions
from calibrant.training import loop, run_folder, runs
from calibrant.training.data import load_data
from calibrant.training.loop import train
from calibrant.training.recipe import Recipe
from calibrant.training.runs import Run, folder_of
from tests.evaluations import assert_same

RECIPE = Recipe.load("digits-lt").override(
    [
        "epochs=3",
        "data=synthetic[classes=4,features=5,train_size=100,validation_size=60,test_size=81,imbalance=8]",
        "model.hidden=[8]",
        "optimizer.lr=0.02",
        "average=0.5",
        "select=accuracy",
    ]
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(train(RECIPE, tmp_path_factory.mktemp("run")))


def test_the_model_is_the_one_that_predicted(run: Run) -> None:
    ((stored, labels),) = run.predictions("test")
    inputs, expected = run.data.test.batch(torch.arange(81))
    assert not run.model.training
    torch.testing.assert_close(run.model(inputs), stored)
    assert torch.equal(labels, expected)
    assert run.recipe == RECIPE


def test_without_stored_predictions_the_model_predicts_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loop.run_folder, "STORED", 0)
    bare = Run(train(RECIPE, tmp_path))
    assert not (tmp_path / "test.npz").exists()
    for _ in range(2):  # a Predicted can be read again
        parts = list(bare.predictions("test"))
        assert [len(labels) for _, labels in parts] == [32, 32, 17]
        ((stored, labels),) = run.predictions("test")
        torch.testing.assert_close(torch.cat([logits for logits, _ in parts]), stored)
        assert torch.equal(torch.cat([target for _, target in parts]), labels)
    again = bare.results(["temperature"], resamples=10)
    expected = run.results(["temperature"], resamples=10)
    assert again["temperature"].temperature == pytest.approx(expected["temperature"].temperature, rel=1e-4)
    assert again.keys() == expected.keys()
    for key, result in again.items():
        assert result.evaluation.nll == pytest.approx(expected[key].evaluation.nll, rel=1e-4)
        assert result.evaluation.ece == pytest.approx(expected[key].evaluation.ece, abs=1e-4)


def test_results_are_of_the_test_data_before_and_after_scaling(run: Run) -> None:
    plain, scaled = run.results(["temperature"], resamples=20).values()
    before, after, temperature = plain.evaluation, scaled.evaluation, scaled.temperature
    ((logits, labels),) = run.predictions("test")
    expected = evaluate(
        logits,
        labels,
        name="ce",
        class_names=run.data.class_names,
        class_counts=run.data.class_counts,
        resamples=20,
    )
    assert_same(before, expected)
    assert before.groups
    calibrator = Temperature().fit(*run.predictions("validation")[0])  # type: ignore[index]
    assert temperature == pytest.approx(float(calibrator.temperature))
    assert temperature != pytest.approx(1, abs=0.01)
    assert after.nll == pytest.approx(evaluate(calibrator(logits), labels, resamples=0).nll)
    assert after.accuracy == before.accuracy
    assert after.name == "ce + temperature"


def test_results_are_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run.results(["temperature"], resamples=20)
    json.loads((run.folder / "evaluation.json").read_text(), parse_constant=pytest.fail)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "evaluate", lambda *_, **__: pytest.fail("evaluated again"))
        assert Run(run.folder).results(["temperature"], resamples=20) == found
    assert len(run.results([], resamples=30)[""].evaluation.replicates["nll"]) == 30


@pytest.mark.filterwarnings("ignore:the temperature stopped at its bound")
def test_only_calibrators_that_are_missing_are_computed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "evaluation.json").unlink(missing_ok=True)
    computed: list[str] = []

    def noting(*arguments: Any, **options: Any) -> Evaluation:
        computed.append(options["name"])
        return evaluate(*arguments, **options)

    monkeypatch.setattr(runs, "evaluate", noting)
    first = Run(tmp_path).results(["temperature"], resamples=5)
    assert computed == ["ce", "ce + temperature"]
    computed.clear()
    other = "temperature[objective=adaptive-ece]"
    second = Run(tmp_path).results(["spline", other, "temperature"], resamples=5)
    assert computed == ["ce + spline", f"ce + {other}"]
    assert list(second) == ["", "spline", other, "temperature"]
    assert second["temperature"] == first["temperature"]
    assert second[""] == first[""]
    assert second["spline"].temperature is None
    calibrator = Temperature(objective="adaptive-ece").fit(*run.predictions("validation")[0])  # type: ignore[index]
    assert second[other].temperature == pytest.approx(float(calibrator.temperature))
    ((logits, labels),) = run.predictions("test")
    expected = evaluate(calibrator(logits), labels, resamples=0)
    assert second[other].evaluation.ece == pytest.approx(expected.ece)
    computed.clear()
    again = Run(tmp_path).results(["spline", "temperature"], resamples=5)
    assert (computed, again["spline"]) == ([], second["spline"])


def test_results_are_computed_anew_where_a_slow_metric_is_missing_or_metrics_were_added(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    bare = Run(tmp_path).results([], resamples=5)
    assert bare[""].evaluation.kde_ece is None
    asked = Run(tmp_path).results([], resamples=5, kde=True)
    assert asked[""].evaluation.kde_ece > 0
    assert Run(tmp_path).results([], resamples=5) == asked  # it is kept
    # a file of a version that did not know every metric yet
    path = tmp_path / "evaluation.json"
    plain = json.loads(path.read_text())
    del plain["sha256"]
    plain["metrics"].remove("sweep_ece")
    old = json.dumps({**plain, "sha256": runs.content_hash(plain)})
    path.write_text(old)
    assert Run(tmp_path).results([], resamples=5)[""].evaluation.kde_ece is None
    for name in ("test.npz", run_folder.WEIGHTS):
        (tmp_path / name).unlink()
    path.write_text(old)
    assert Run(tmp_path).results([], resamples=5) == asked  # nothing is left to compute them from
    with pytest.raises(RecipeError, match=r"evaluation\.json lacks figures with 6 resamples, and"):
        Run(tmp_path).results([], resamples=6)
    with pytest.raises(RecipeError, match=r"evaluation\.json lacks temperature with 5 resamples"):
        Run(tmp_path).results(["temperature"], resamples=5)
    # the same if the data are missing as well: they would not help
    monkeypatch.setattr(runs, "load_data", lambda *_: pytest.fail("looked for the data"))
    with pytest.raises(RecipeError, match=r"evaluation\.json lacks figures with 6 resamples, and"):
        Run(tmp_path).results([], resamples=6)


def test_results_are_computed_anew_where_a_metric_or_calibrator_was_defined_otherwise(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    found = Run(tmp_path).results([], resamples=5)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "evaluate", lambda *_, **__: pytest.fail("computed anew"))
        assert Run(tmp_path).results([], resamples=5) == found
    monkeypatch.setattr(runs, "evaluate", lambda *_, **__: (_ for _ in ()).throw(InterruptedError))
    monkeypatch.setattr(runs, "DEFINITIONS", runs.DEFINITIONS + 1)
    with pytest.raises(InterruptedError):
        Run(tmp_path).results([], resamples=5)


def test_only_results_of_a_calibrator_that_was_defined_otherwise_are_computed_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    keys = ["isotonic", "isotonic[variant=top-label]", "ensemble-temperature", "beta"]
    found = Run(tmp_path).results(keys, resamples=5)
    path = tmp_path / "evaluation.json"
    plain = json.loads(path.read_text())
    del plain["sha256"]
    for result in plain["results"].values():
        result.pop("definition", None)  # as before calibrators had a definition
    path.write_text(json.dumps({**plain, "sha256": runs.content_hash(plain)}))
    computed: list[str] = []

    def noting(*arguments: Any, **options: Any) -> Evaluation:
        computed.append(options["name"])
        return evaluate(*arguments, **options)

    monkeypatch.setattr(runs, "evaluate", noting)
    for expected in ([f"ce + {key}" for key in keys[:3]], []):
        assert Run(tmp_path).results(keys, resamples=5) == found
        assert computed == expected
        computed.clear()


def test_shifted_data_are_measured_after_calibrators_of_the_clean_validation_data(run: Run) -> None:
    choice = Choice("synthetic", {"classes": 4, "features": 5, "separation": 0.5, "test_size": 50})
    other = load_data(choice).test
    found = run.metrics_on(other, ["temperature", "spline"])
    logits = run.model(other.batch(torch.arange(50))[0]).detach()
    scaled = Temperature().fit(*run.predictions("validation")[0])  # type: ignore[index]
    for key, expected in (("", logits), ("temperature", scaled(logits))):
        figures = evaluate(expected, other.targets, resamples=0)
        assert found[key]["accuracy"] == pytest.approx(figures.accuracy)
        assert found[key]["ece"] == pytest.approx(figures.ece)
    assert found["spline"]["ece"] != found[""]["ece"]


def test_predictions_of_other_data_need_the_same_classes(run: Run, tmp_path: Path) -> None:
    choice = Choice("synthetic", {"classes": 4, "features": 5, "test_size": 30, "split_seed": 3})
    assert run.predict("test", tmp_path / "other.npz", on=choice) == 30
    logits, labels = open_predictions(tmp_path / "other.npz").load()
    other = load_data(choice).test
    assert torch.equal(labels, other.targets)
    torch.testing.assert_close(logits, run.model(other.batch(torch.arange(30))[0]))
    with pytest.raises(
        RecipeError, match=r"have the classes class 0, .* \(3\); the models know class 0, .* \(4\)"
    ):
        run.predict("test", tmp_path / "no.npz", on=Choice("synthetic", {"classes": 3, "features": 5}))
    with pytest.raises(RecipeError, match=r"inputs of shape \(6,\); the models take \(5,\)"):
        run.predict("test", tmp_path / "no.npz", on=Choice("synthetic", {"classes": 4, "features": 6}))
    assert not (tmp_path / "no.npz").exists()


def test_predictions_are_written_as_others_read_them(run: Run, tmp_path: Path) -> None:
    for part, size in (("train", 100), ("validation", 60), ("test", 81)):
        for suffix in (".npz", ".safetensors"):
            path = tmp_path / f"{part}{suffix}"
            assert run.predict(part, path) == size  # type: ignore[arg-type]
            logits, labels = open_predictions(path).load()
            split = getattr(load_data(RECIPE.data), part)
            assert torch.equal(labels, split.targets)
            torch.testing.assert_close(logits, run.model(split.batch(torch.arange(size))[0]))
    with np.load(tmp_path / "train.npz") as archive:
        assert list(archive["class_names"]) == list(run.data.class_names)


def test_a_part_that_is_empty_cannot_be_predicted(run: Run, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "data.npz",
        features=np.random.default_rng(0).normal(size=(40, 3)),
        labels=np.arange(40) % 2,
    )
    recipe = RECIPE.override(["data=npz[validation=0.5,test=0]"])
    bare = Run(train(recipe, tmp_path / "run", data_root=tmp_path), tmp_path)
    with pytest.raises(RecipeError, match="data 'npz' have no test part"):
        bare.predict("test", tmp_path / "test.npz")
    with pytest.raises(RecipeError, match="data 'npz' have no test part"):
        bare.results(["temperature"])


@pytest.mark.filterwarnings("ignore:the temperature stopped at its bound")
def test_other_data_are_told_by_their_entropy(run: Run) -> None:
    choice = Choice("synthetic", {"classes": 4, "features": 5, "separation": 0.0, "test_size": 50})
    other = load_data(choice).test
    ((inside, _),) = run.predictions("test")
    outside = run.model(other.batch(torch.arange(50))[0])
    expected = detection(entropy(inside), entropy(outside.detach())).auroc
    by_ece = "temperature[objective=ece]"
    found = run.detected(other, ["temperature", by_ece])
    assert list(found) == ["", "temperature", by_ece]
    before, after = found[""], found["temperature"]
    assert before.auroc == pytest.approx(expected)
    assert before.auroc > 0.55
    scaled = run.calibrator("temperature")
    assert scaled is not None
    expected = detection(entropy(scaled(inside)), entropy(scaled(outside.detach()))).auroc
    assert after.auroc == pytest.approx(expected)
    assert after.auroc != before.auroc
    other_scale = run.calibrator(by_ece)
    assert other_scale is not None
    expected = detection(entropy(other_scale(inside)), entropy(other_scale(outside.detach()))).auroc
    assert found[by_ece].auroc == pytest.approx(expected)
    assert found[by_ece].auroc != after.auroc
    for each in (before, after):  # the trapezoids under the curve
        area = sum(one + two for one, two in itertools.pairwise(each.curve)) / 2 / (len(each.curve) - 1)
        assert area == pytest.approx(each.auroc, abs=0.01)


def test_a_folder_may_be_a_text(run: Run) -> None:
    assert Run(str(run.folder)).recipe == run.recipe


def test_other_data_than_those_of_the_run_are_refused(run: Run, tmp_path: Path) -> None:
    others = load_data(Choice("synthetic", {"classes": 4, "features": 5, "split_seed": 1}))
    with pytest.raises(RecipeError, match="have changed since the run in"):
        Run(run.folder, loaded=others)
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    changed = run.recipe.override(["data.split_seed=1"])
    (folder / "recipe.toml").write_text(changed.to_toml())
    content = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**content, "recipe": changed.to_toml()}))
    with pytest.raises(RecipeError, match="have changed since the run in"):
        Run(folder).predict("train", tmp_path / "train.npz")


def test_folders_that_are_no_finished_runs_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"is not the folder of a run: it has no recipe\.toml"):
        Run(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.to_toml())
    with pytest.raises(RecipeError, match="is not finished; give the command that trains it again"):
        Run(tmp_path)


def test_folders_of_a_comparison_have_plain_names() -> None:
    names: list[Any] = [
        folder_of(Path("out"), loss, 3).name
        for loss in ("ce", "cals-alm[margin=6]", "cals-alm[margin=-6]", "x[adapt=0:epoch/2:3]", 'x[a="/../"]')
    ]
    assert names[0] == "ce-seed3"
    assert len(set(names)) == len(names)
    assert not any(set(name) & set('/\\:[]"*? ') for name in names)
