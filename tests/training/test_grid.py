from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from calibrant.evaluation.comparison import Comparison
from calibrant.losses import AdaptationWarning
from calibrant.metrics import METRICS
from calibrant.options import Choice, RecipeError, split_outside_brackets
from calibrant.training import DivergedError, grid, loop
from calibrant.training.data import load_data
from calibrant.training.data.augmentation import NORMALISATIONS
from calibrant.training.grid import compare
from calibrant.training.loop import train
from calibrant.training.other_data import load_other
from calibrant.training.recipe import Recipe
from calibrant.training.runs import folder_of
from calibrant.training.setup import make_fabric
from tests.programs import started_by

RECIPE = Recipe.load("digits-lt").override(
    [
        "epochs=2",
        "data=synthetic[classes=3,features=4,train_size=60,validation_size=40,test_size=41]",
        "model.hidden=[4]",
        "optimizer.lr=0.05",
    ]
)
LOSSES = ["ce", "cals-alm[margin=6, penalty=p2]"]
WRITTEN = ["ce", "cals-alm[margin=6,penalty=p2]"]


def test_every_loss_is_trained_from_every_seed(trained: list[tuple[str, int]], tmp_path: Path) -> None:
    lines: list[str] = []
    comparison = compare(
        RECIPE,
        LOSSES,
        [0, 4],
        tmp_path,
        resamples=20,
        outside=[Choice("synthetic", {"classes": 3, "features": 4, "separation": 0.0, "test_size": 30})],
        report=lines.append,
    )
    assert comparison is not None
    expected = [(loss, seed) for loss in WRITTEN for seed in (0, 4)]
    assert trained == expected
    assert lines == [f"{loss}, seed {seed}: evaluating" for loss, seed in expected]
    assert [method.name for method in comparison.methods] == WRITTEN
    assert comparison.seeds == (0, 4)
    for method in comparison.methods:
        assert [len(each) for each in (method.before, method.after, method.temperatures)] == [2, 2, 2]
        assert method.before[0] != method.before[1]
        for found in (method.detection, method.detection_after):
            ((name, values),) = found.items()
            assert name.startswith("synthetic[")
            assert len(values) == 2
        (curves,) = method.curves.values()
        assert list(curves) == ["", "temperature"]
        assert all(len(each) == 201 and each[-1] == 1 for each in curves.values())
    json.loads(comparison.to_json())
    run = Recipe.load(folder_of(tmp_path, WRITTEN[1], 4) / "recipe.toml")
    assert (run.loss, run.seed) == (WRITTEN[1], 4)


class Done(NamedTuple):
    """What a comparison found, and its folder, which no test changes."""

    folder: Path
    comparison: Comparison


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("done")
    comparison = compare(RECIPE, LOSSES, [0, 1], folder, resamples=20)
    assert comparison is not None
    return Done(folder, comparison)


def test_jobs_do_every_run_once_and_give_the_same_figures(done: Done, programs: Path, tmp_path: Path) -> None:
    train(replace(RECIPE, loss=LOSSES[1], seed=0), folder_of(tmp_path / "two", WRITTEN[1], 0))
    finished = (folder_of(tmp_path / "two", WRITTEN[1], 0) / "result.json").stat().st_mtime_ns
    lines: list[str] = []
    evaluated: set[tuple[Path, int]] = set()

    def files() -> set[tuple[Path, int]]:
        return {(path, path.stat().st_mtime_ns) for path in (tmp_path / "two").rglob("evaluation.json")}

    def report(line: str) -> None:
        lines.append(line)
        if len(lines) == 4:
            evaluated.update(files())

    with started_by(programs / "python"):
        found = compare(RECIPE, LOSSES, [0, 1], tmp_path / "two", resamples=20, jobs=2, report=report)
    assert found == done.comparison
    assert sorted(lines) == sorted(f"{loss}, seed {seed}: done" for loss in WRITTEN for seed in (0, 1))
    assert (folder_of(tmp_path / "two", WRITTEN[1], 0) / "result.json").stat().st_mtime_ns == finished
    assert len(evaluated) == 4  # by the jobs,
    assert files() == evaluated  # and not again


@pytest.mark.usefixtures("jobs_in_a_thread")
def test_an_error_in_a_job_is_raised(tmp_path: Path) -> None:
    diverging = RECIPE.override(["optimizer.lr=1e30"])
    with pytest.raises(DivergedError, match=r"ce, seed [01]: .*became"):
        compare(diverging, ["ce"], [0, 1], tmp_path, resamples=20, jobs=2)
    with pytest.raises(ValueError, match="jobs must be a whole number of at least 1, got 0"):
        compare(RECIPE, ["ce"], [0], tmp_path, jobs=0)


@pytest.mark.usefixtures("jobs_in_a_thread")
def test_warnings_of_jobs_are_given(tmp_path: Path) -> None:
    longer = RECIPE.override(["epochs=10"])
    with pytest.warns(AdaptationWarning, match="seed 0: ") as caught:
        compare(longer, ["cals-alm[margin=1000]"], [0], tmp_path, resamples=20, jobs=2)
    assert len(caught) == 1


@pytest.mark.usefixtures("jobs_in_a_thread")
def test_a_warning_of_the_data_is_given_once(tmp_path: Path) -> None:
    rows = "".join(f"2024-01-{row % 28 + 1:02},{row % 7},{row % 2}\n" for row in range(120))
    (tmp_path / "sales.csv").write_text(f"day,amount,sold\n{rows}")
    recipe = replace(RECIPE, data=Choice("table", {"file": "sales.csv", "target": "sold"}), epochs=1)
    with pytest.warns(UserWarning, match="they look like dates") as caught:
        compare(recipe, ["ce"], [0], tmp_path / "runs", data_root=tmp_path, resamples=20, jobs=2)
    assert len(caught) == 1


def test_jobs_need_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fabric = make_fabric(RECIPE)
    monkeypatch.setattr(type(fabric), "world_size", 2)
    with pytest.raises(RecipeError, match="3 jobs need one device, and there are 2: choose one "):
        compare(RECIPE, ["ce"], [0], tmp_path, jobs=3, fabric=fabric)
    assert not list(tmp_path.iterdir())


def test_only_what_is_missing_is_trained(done: Done, trained: list[tuple[str, int]], tmp_path: Path) -> None:
    shutil.copytree(folder_of(done.folder, "ce", 0), folder_of(tmp_path, "ce", 0))
    for _ in range(2):
        assert compare(RECIPE, LOSSES, [0, 1], tmp_path, resamples=20) == done.comparison
        assert trained == [("ce", 1), (WRITTEN[1], 0), (WRITTEN[1], 1)]


def test_a_run_that_was_stopped_is_finished(
    trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = folder_of(tmp_path, "ce", 0)
    with monkeypatch.context() as patch:

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(loop.Loop, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            train(RECIPE, place)
    monkeypatch.setattr(loop.Loop, "_train_step", lambda *_: pytest.fail("trained anew"))
    assert compare(RECIPE, ["ce"], [0], tmp_path, resamples=20) is not None
    assert trained == [("ce", 0), ("ce", 0)]


def test_data_that_have_changed_are_noticed_before_anything_is_trained(
    trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)

    def write() -> None:
        features, labels = generator.normal(size=(90, 4)), np.arange(90) % 3
        np.savez(tmp_path / "mine.npz", features=features, labels=labels)

    recipe = RECIPE.override([f"data=npz[file={tmp_path / 'mine.npz'}]"])
    write()
    compare(recipe, ["ce"], [0], tmp_path / "runs", resamples=20)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compare(recipe, ["focal"], [0], tmp_path / "runs", resamples=20)
    write()
    for known in ("ce", "focal"):  # finished, and only begun
        trained.clear()
        with pytest.raises(RecipeError, match="the data have changed since"):
            compare(recipe, ["ls", known], [0], tmp_path / "runs", resamples=20)
        assert trained == []
    with pytest.raises(RecipeError, match="the data have changed since"):
        train(recipe, folder_of(tmp_path / "runs", "ce", 0), data=grid.load_data(recipe.data))


def test_a_damaged_checkpoint_is_spoken_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compare(RECIPE, ["ce"], [0], tmp_path, resamples=20)
    last = folder_of(tmp_path, "ce", 0) / "checkpoints" / "last.pt"
    last.write_bytes(last.read_bytes()[:100])
    with pytest.warns(UserWarning, match="damaged"):
        assert compare(RECIPE, ["ce"], [0], tmp_path, resamples=20) is not None


@pytest.mark.parametrize(
    ("losses", "seeds", "said"),
    [
        (["ce", "cee"], [0], "unknown loss 'cee'"),
        (["ce", "cals-alm[margn=3]"], [0], "margn"),
        ([], [0], "needs at least one loss and one seed"),
        (["ce"], [], "needs at least one loss and one seed"),
        (["ce", " ce"], [0], "loss ce is there twice"),
        (["ls[smoothing=0.1]", "ls[ smoothing=0.1 ]"], [0], r"loss ls\[smoothing=0.1\] is there twice"),
        (["ce"], [1, 1], "seed 1 is there twice"),
    ],
)
def test_refused_before_anything_is_trained(
    losses: list[str], seeds: list[int], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grid, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(RecipeError, match=said):
        compare(RECIPE, losses, seeds, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"calibrators": "splines"}, "unknown calibrator 'splines' [(]did you mean 'spline'"),
        ({"calibrators": "spline[knot=3]"}, "did you mean 'knots'"),
        ({"calibrators": "temperature[objective=accuracy]"}, "must be one of 'nll', 'ece', 'adaptive-ece'"),
        ({"calibrators": "spline,spline"}, "calibrator spline is there twice"),
        ({"columns": "adaptive-ece"}, "unknown metric 'adaptive-ece' [(]did you mean 'adaptive_ece'"),
        ({"columns": "ece,ece"}, "column ece is there twice"),
        ({"columns": "mean_iou_foreground"}, "no background class was named"),
        (
            {"shifted": "synthetic[classes=4,features=4]"},
            r"have the classes class 0, .* \(4\); the models know",
        ),
        ({"outside": "synthetic,synthetic"}, "out-of-distribution data synthetic is there twice"),
        (
            {"shifted": "synthetic[classes=3],synthetic[ classes=3]"},
            "shifted data synthetic.* is there twice",
        ),
        ({"shifted": "synthetic[classes=3,features=5]"}, r"of shape \(5,\); the models take \(4,\)"),
    ],
)
def test_options_are_refused_before_anything_is_trained(
    options: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grid, "train", lambda *_, **__: pytest.fail("trained"))
    parsed: dict[str, Any] = {
        name: text.split(",")
        if name == "columns"
        else [Choice.parse(each) for each in split_outside_brackets(text)]
        for name, text in options.items()
    }
    with pytest.raises(RecipeError, match=said):
        compare(RECIPE, ["ce"], [0], tmp_path, **parsed)
    assert not list(tmp_path.iterdir())


def test_calibrators_and_shifted_data_of_every_seed(tmp_path: Path) -> None:
    shift = Choice("synthetic", {"classes": 3, "features": 4, "separation": 0.5, "test_size": 50})
    calibrators = [Choice("spline"), Choice("temperature"), Choice("temperature", {"objective": "ece"})]
    comparison = compare(
        RECIPE,
        ["ce"],
        [0, 1],
        tmp_path,
        resamples=5,
        calibrators=calibrators,
        shifted=[shift],
        outside=[shift],
        columns=["ece", "kde_ece"],
    )
    assert comparison is not None
    (method,) = comparison.methods
    assert comparison.columns == ("ece", "kde_ece")
    assert comparison.calibrators == ("temperature", "spline", "temperature[objective=ece]")
    assert all(len(each) == 2 for each in method.calibrated.values())
    assert list(method.chosen) == ["temperature[objective=ece]"]
    assert len(comparison.figures("kde_ece", after="spline")) == 1
    assert list(method.detection_chosen) == [
        "temperature[objective=ece]"
    ]  # each calibrator with a temperature
    assert [len(each) for each in method.detection_chosen["temperature[objective=ece]"].values()] == [2]
    assert list(method.curves[str(shift)]) == ["", "temperature", "temperature[objective=ece]"]
    ((name, levels),) = method.shifted.items()
    assert name == str(shift)
    assert list(levels) == ["0", "shifted"]
    for states in levels.values():
        assert list(states) == ["", *comparison.calibrators]
        assert all(len(seeds) == 2 for seeds in states.values())
    assert levels["0"]["temperature"][1]["ece"] == method.after[1].ece
    found = json.loads(comparison.to_json())
    assert found["calibrated"]["spline"]["ce"]["ece"]["mean"] == pytest.approx(
        sum(each.ece for each in method.calibrated["spline"]) / 2
    )
    shifted = found["runs"]["ce"]["shifted"][name]["shifted"][""]
    assert shifted[0]["accuracy"] < levels["0"][""][0]["accuracy"]


def test_several_corruptions_are_averaged() -> None:
    def metrics(ece: float | None) -> dict[str, float | None]:
        return {name: ece if name == "ece" else None for name in METRICS}

    fog, snow = (Choice("cifar10-c", {"corruption": name}) for name in ("fog", "snow"))
    found: dict[str, Any] = {
        str(fog): {"0": {"": metrics(0.1)}, "1": {"": metrics(0.2)}},
        str(snow): {"0": {"": metrics(0.1)}, "1": {"": metrics(0.4)}},
        "svhn": {"0": {"": metrics(0.1)}, "shifted": {"": metrics(0.9)}},
    }
    ((name, mean),) = grid._means([fog, Choice("svhn"), snow], found).items()
    assert name == "cifar10-c, mean of 2"
    assert [mean[level][""]["ece"] for level in ("0", "1")] == pytest.approx([0.1, 0.3])
    assert mean["1"][""]["nll"] is None
    assert grid._means([fog], found) == {}


def test_calibrators_that_need_memory_are_refused_for_dense_data() -> None:
    with pytest.raises(RecipeError, match=r"calibrator spline needs all predictions .*: temperature"):
        grid._check_dense([Choice("temperature"), Choice("spline")], [])
    with pytest.raises(RecipeError, match="column kde_ece needs all predictions in memory"):
        grid._check_dense([], ["ece", "kde_ece"])


def colours(folder: Path, count: int, seed: int) -> None:
    """Images in folders, and the same in an archive."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(count) % 2
    np.savez(folder / f"{seed}.npz", images=pixels, labels=labels)
    for number, image in enumerate(pixels):
        path = folder / f"images{seed}" / "train" / str(labels[number]) / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


OWN = "npz[file=0.npz]"
ON_DISK = "image-folder[folder=images0,image_size=8,augmentation=none,normalisation=svhn]"


@pytest.mark.parametrize("ours", [OWN, ON_DISK])
@pytest.mark.parametrize(
    "theirs",
    [
        "npz[file=1.npz,test=1,validation=0]",
        "image-folder[folder=images1,image_size=8,augmentation=crop-flip,test=1,validation=0]",
    ],
)
def test_images_from_outside_are_normalised_as_those_inside(ours: str, theirs: str, tmp_path: Path) -> None:
    for seed in range(2):
        colours(tmp_path, 20, seed)
    recipe = RECIPE.override([f"data={ours}", "model=cnn"])
    data = load_data(recipe.data, tmp_path)
    other = load_other(Choice.parse(theirs), recipe, data, tmp_path)
    found, _ = other.batch(torch.arange(20))
    assert data.test.normalisation is not None
    with np.load(tmp_path / "1.npz") as archive:
        raw = torch.from_numpy(archive["images"]).permute(0, 3, 1, 2)
    wanted = data.test.normalisation(raw)
    assert torch.allclose(found.sum((1, 2, 3)).sort()[0], wanted.sum((1, 2, 3)).sort()[0], atol=1e-3)
    kept = load_other(Choice.parse(theirs[:-1] + ",normalisation=imagenet]"), recipe, data, tmp_path)
    assert kept.normalisation == NORMALISATIONS["imagenet"]


def test_inputs_of_another_kind_from_outside_are_refused(tmp_path: Path) -> None:
    colours(tmp_path, 20, 0)
    numbers = np.random.default_rng(1).normal(size=(20, 3, 8, 8))
    np.savez(tmp_path / "numbers.npz", images=numbers, labels=np.arange(20) % 2)
    recipe = RECIPE.override([f"data={OWN}", "model=cnn"])
    data = load_data(recipe.data, tmp_path)
    with pytest.raises(RecipeError, match=r"images are torch\.float32, expected bytes \(uint8\)"):
        load_other(Choice("npz", {"file": "numbers.npz"}), recipe, data, tmp_path)
    recipe = RECIPE.override(["data=npz[file=numbers.npz]", "model=cnn"])
    data = load_data(recipe.data, tmp_path)
    with pytest.raises(RecipeError, match=r"bytes of images cannot be normalised by constants of other"):
        load_other(Choice("npz", {"file": "0.npz"}), recipe, data, tmp_path)
    with pytest.raises(RecipeError, match="would be normalised by their own mean"):
        load_other(Choice("npz", {"file": "0.npz", "normalisation": "own"}), recipe, data, tmp_path)
    np.savez(tmp_path / "labels.npz", images=numbers, labels=np.arange(60).reshape(20, 3) % 2)
    with pytest.raises(RecipeError, match="have several labels for each element, unlike npz"):
        load_other(Choice("npz", {"file": "labels.npz"}), recipe, data, tmp_path)


def test_data_from_outside_are_read_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that cannot read them must not leave the others waiting."""
    done: list[str] = []

    def noting(action: Any, what: str) -> Any:
        done.append(what)
        return action()

    monkeypatch.setattr(grid, "together", noting)
    with pytest.raises(RecipeError, match="the models take"):
        compare(RECIPE, ["ce"], [0], tmp_path, outside=[Choice("synthetic", {"features": 5})])
    assert done == ["reading the data", "reading the data synthetic[features=5]"]


def test_the_folder_of_another_recipe_is_refused(tmp_path: Path) -> None:
    compare(RECIPE, ["ce"], [0], tmp_path, resamples=10)
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        compare(RECIPE.override(["epochs=3"]), ["ce"], [0], tmp_path, resamples=10)


def test_the_recipes_own_loss_and_seed_do_not_count(trained: list[tuple[str, int]], tmp_path: Path) -> None:
    compare(RECIPE, ["ce"], [0], tmp_path, resamples=10)
    compare(RECIPE.override(["loss=ls", "seed=7"]), ["ce"], [0], tmp_path, resamples=10)
    assert trained == [("ce", 0)]


def test_the_folder_of_a_run_is_no_place_for_a_comparison(tmp_path: Path) -> None:
    train(RECIPE, tmp_path)
    with pytest.raises(RecipeError, match="holds a training run of its own"):
        compare(RECIPE, ["ce"], [0], tmp_path, resamples=10)
    assert not (tmp_path / "runs").exists()
