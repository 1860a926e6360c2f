"""Runs with one logit for each decision: a single logit of two classes, and several labels."""

import csv
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import Tensor

import calibrant
from calibrant.calibrators import Identity, Temperature, load_calibrator
from calibrant.evaluation import Evaluation, evaluate
from calibrant.layout import Elements
from calibrant.losses.cross_entropy import CrossEntropy
from calibrant.options import Choice
from calibrant.predictions import open_predictions
from calibrant.reports.table_builders import comparison_note
from calibrant.training import Recipe, RecipeError, Run, compare, loop, train
from calibrant.training.data import load_data
from calibrant.training.own_data import choose_recipe
from calibrant.training.tuning import tune
from tests.cli.commands import fail, printed, succeed
from tests.onnx_exporter import operators_listed_once

LABELS = ("cat", "dog", "bird")


def features(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers ``(N, 4)``, and three labels that depend on them."""
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(rows, 4)).round(4)
    return inputs, (inputs[:, :3] + inputs[:, 1:] + generator.normal(size=(rows, 3)) > 0).astype(int)


def write_table(path: Path, rows: int, seed: int, labels: tuple[str, ...]) -> list[dict[str, Any]]:
    """A table with columns of labels; with one label, its cells are no and yes. Returns the rows without."""
    inputs, answers = features(rows, seed)
    cells = answers.tolist() if len(labels) > 1 else [[("no", "yes")[row[0]]] for row in answers.tolist()]
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow([*"abcd", *labels])
        table.writerows([*row, *some] for row, some in zip(inputs.tolist(), cells, strict=True))
    return [dict(zip("abcd", row, strict=True)) for row in inputs.tolist()]


def single() -> tuple[Any, Path, list[str]]:
    Path("data").mkdir()
    write_table(Path("data/train.csv"), 120, 0, ("label",))
    return write_table(Path("data/test.csv"), 30, 1, ("label",)), Path("data/test.csv"), []


def table() -> tuple[Any, Path, list[str]]:
    Path("data").mkdir()
    write_table(Path("data/train.csv"), 120, 0, LABELS)
    raw = write_table(Path("data/test.csv"), 30, 1, LABELS)
    return raw, Path("data/test.csv"), ["--target", ",".join(LABELS)]


def arrays() -> tuple[Any, Path, list[str]]:
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (80, 8, 8), dtype=np.uint8), features(80, 0)[1]
    images[labels[:, 0] == 1] //= 3
    named = {"images": images[:60], "labels": labels[:60].astype(bool), "class_names": np.array(LABELS)}
    np.savez("data.npz", **named, test_images=images[60:], test_labels=labels[60:].astype(bool))
    np.savez("new.npz", images=images[60:])
    return images[60:], Path("new.npz"), []


def texts() -> tuple[Any, Path, list[str]]:
    """Texts, each with a list of labels, which may be empty."""
    Path("data").mkdir()
    found = []
    for name, rows in (("train", 90), ("test", 20)):
        lines = []
        for number, answers in enumerate(features(rows, len(name))[1].tolist()):
            some = [label for label, answer in zip(LABELS, answers, strict=True) if answer]
            lines.append({"text": f"Picture {number} shows {' and '.join(some) or 'a tree'}.", "label": some})
        Path("data", f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = [line["text"] for line in lines]
    return found, Path("data/test.jsonl"), []


Writer = Callable[[], tuple[Any, Path, list[str]]]
"""Writes data to train with; returns raw test inputs, a file of them, and options that describe the data."""

QUICK = ("--set", "epochs=2", "--accelerator", "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("write", "loss"), [(single, "adafocal"), (table, "cals-alm"), (arrays, "focal"), (texts, "ce")]
)
@pytest.mark.usefixtures("blank_pictures")
def test_trained_evaluated_calibrated_and_reported(write: Writer, loss: str) -> None:
    raw, new, options = write()
    names = ("no", "yes") if write is single else tuple(sorted(LABELS)) if write is texts else LABELS
    data = "data.npz" if write is arrays else "data"
    options += ["--set", "binary=true"] if write is single else []
    if write is not single:  # the search for the best calibrator takes most of the time
        options += ["--calibrate", "platt"]
    output = printed("train", "--data", data, *options, "--loss", loss, *QUICK, "--output", "run")
    *applying, evaluating, _ = [
        shlex.split(line)[1:] for line in output.partition("\nNext:\n")[2].splitlines()
    ]
    for command in applying:
        printed(*command)
    files = ["run/test.npz", *(command[-1] for command in applying)]
    assert evaluating == ["evaluate", *files, "--binary", "--report", "report.html"]
    printed(*evaluating, "--resamples", "0")

    # The predictions of the run, of its bundle for the raw inputs, and of the graph are the same.
    run, bundle = Run(Path("run")), calibrant.load("run", device="cpu")
    ((logits, labels),) = run.predictions("test")
    outputs = 1 if write is single else 3
    assert logits.shape == labels.shape == (len(raw), outputs)
    assert [each.shape for each in run.as_classes(logits, labels)] == [(len(raw), 2, outputs), labels.shape]
    assert bundle.classes == names
    assert bundle.several_labels == (outputs > 1)
    np.testing.assert_allclose(bundle.logits(raw), logits, atol=1e-5)
    yes = bundle.calibrator(logits).sigmoid()
    expected = yes if outputs > 1 else torch.cat([1 - yes, yes], 1)
    np.testing.assert_allclose(bundle.predict_proba(raw, batch_size=7), expected, atol=1e-6)
    chosen = (yes > 0.5).long().numpy() if outputs > 1 else np.array(names)[expected.argmax(1)]
    np.testing.assert_array_equal(bundle.predict(raw), chosen)

    printed("predict", "run", "--input", new, "--output", "p.csv")
    with Path("p.csv").open(newline="") as stream:
        header, *rows = list(csv.reader(stream))
    first = ["name"] if outputs > 1 else ["name", "prediction"]
    assert header == [*first, *(f"probability_{name}" for name in names)]
    written = np.array([[float(cell) for cell in row[len(first) :]] for row in rows])
    np.testing.assert_allclose(written, expected, atol=1e-6)
    if write not in (single, table):  # the rest does not depend on the kind of data
        return

    # Evaluation and calibration on the command line.
    printed(
        "evaluate", "run/test.npz", "--binary", "--resamples", 0, "--json", "e.json", "--report", "e.html"
    )
    (plain,) = json.loads(Path("e.json").read_text())
    wanted = evaluate(logits, labels, binary=True, resamples=0)
    found = Evaluation.from_dict(plain)
    assert (found.ece, found.macro) == (pytest.approx(wanted.ece), pytest.approx(wanted.macro))
    assert [label.name for label in found.labels] == ([] if outputs == 1 else list(names))
    before = run.results([], resamples=0)[""].evaluation
    assert before.ece == pytest.approx(wanted.ece)
    row = run.history[run.epoch - 1]
    ((held_out, answers),) = run.predictions("validation")
    assert row["validation_ece"] == pytest.approx(evaluate(held_out, answers, binary=True, resamples=0).ece)
    printed("calibrate", "run/validation.npz", "--binary", "--resamples", 0, "--output", "c.safetensors")
    assert len(load_calibrator("c.safetensors", class_names=names).labels) == outputs
    printed("predict", "run", "--split", "validation", "--output", "v.npz")
    assert open_predictions("v.npz", binary=True).shape == held_out.shape


@pytest.mark.parametrize("write", [single, table])
@operators_listed_once()
def test_onnxruntime_gives_the_same_probabilities(write: Writer) -> None:
    runtime = pytest.importorskip("onnxruntime")
    raw, _, options = write()
    options += ["--set", "binary=true"] if write is single else []
    printed("train", "--data", "data", *options, *QUICK, "--calibrate", "temperature", "--output", "run")
    described = printed("export", "run", "--output", "run.onnx")
    assert f"to probabilities of {'2 classes' if write is single else '3 labels'}" in described
    bundle = calibrant.load("run", device="cpu")
    inputs = bundle.preparation(raw).numpy()
    (found,) = runtime.InferenceSession("run.onnx").run(None, {"inputs": inputs})
    np.testing.assert_allclose(found, bundle.predict_proba(raw), atol=1e-5)
    assert bundle.calibrator.key == "temperature"


def recipe_of(write: Writer, **changes: Any) -> Recipe:
    _, _, options = write()
    recipe = choose_recipe(Path("data"), options[1] if options else None)
    return replace(recipe, binary=True, epochs=2, precision="32-true", **changes)


@pytest.mark.parametrize("write", [single, table])
def test_a_run_that_was_stopped_goes_on_exactly(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(write, loss="cals-alm", checkpoint_batches=1, select="nll-after-temperature")
    whole = train(recipe, "whole")
    plain, steps = loop.Loop._train_step, [0]

    def step(training: loop.Loop, batch: Any) -> None:
        steps[0] += 1
        if steps[0] == 6:
            raise KeyboardInterrupt
        plain(training, batch)

    monkeypatch.setattr(loop.Loop, "_train_step", step)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, "stopped")
    resumed = train(recipe, "stopped")
    for name in ("model.safetensors", "loss.safetensors", "bins.safetensors"):
        one, other = load_file(whole / name), load_file(resumed / name)
        assert all(torch.equal(one[key], other[key]) for key in one), name
    assert "validation_nll_after_temperature" in Run(whole).history[0]


@pytest.mark.parametrize("write", [single, table])
def test_losses_are_compared_and_tuned(write: Writer) -> None:
    recipe = recipe_of(write)
    outside = [Choice("table", {"file": "x.csv", "target": "label"})]
    comparison = compare(recipe, ["ce", "focal"], [0], "compared", resamples=5)
    assert comparison is not None
    for loss, method in zip(("ce", "focal"), comparison.methods, strict=True):
        run = Run(Path(f"compared/runs/{loss}-seed0"))
        ((logits, labels),), (held_out,) = run.predictions("test"), run.predictions("validation")
        calibrator = Temperature().fit(*held_out, binary=True)
        temperatures = [float(each.get_buffer("temperature")) for each in calibrator.labels]
        assert method.temperatures == pytest.approx((np.mean(temperatures),))
        for found, given in ((method.before, logits), (method.after, calibrator(logits))):
            wanted = calibrant.evaluate(given, labels, binary=True, resamples=0)
            assert found[0].ece == pytest.approx(wanted.ece)
        assert all(each.binary for each in (*method.before, *method.after))
        assert len(method.before[0].labels) == (0 if write is single else 3)
    meaning = "T is the mean over labels, not counting those with one answer in all of the validation data"
    assert (meaning in comparison_note(comparison)) == (write is table)
    if write is table:
        with pytest.raises(RecipeError, match="these data have several labels"):
            compare(recipe, ["ce"], [0], "compared", outside=outside)
    chosen = tune(replace(recipe, loss="focal"), "tuned", trials=1, resamples=5)
    assert chosen is not None


def test_a_single_logit_is_told_from_other_data_by_its_entropy() -> None:
    write_npz("in.npz", 1.0)
    write_npz("out.npz", 2.0)
    recipe = Recipe(
        data=Choice("npz", {"file": str(Path("in.npz").absolute()), "normalisation": "none"}),
        model=Choice("mlp"),
        optimizer=Choice("sgd", {"lr": 0.1}),
        binary=True,
        epochs=5,
        precision="32-true",
    )
    outside = Choice("npz", {"file": str(Path("out.npz").absolute()), "normalisation": "none", "test": 0.5})
    comparison = compare(recipe, ["ce"], [0], "compared", outside=[outside], resamples=0)
    assert comparison is not None
    run, scores, other = Run(Path("compared/runs/ce-seed0")), [], []
    run.predict("test", Path("outside.npz"), on=outside)
    for file in (run.folder / "test.npz", Path("outside.npz")):
        logits = np.load(file)["logits"].astype(float)
        yes = 1 / (1 + np.exp(-logits.ravel()))
        scores.append(-yes * np.log(yes) - (1 - yes) * np.log(1 - yes))
        other.append(np.full(len(yes), file.name == "outside.npz"))
    expected = roc_auc_score(np.concatenate(other), np.concatenate(scores))
    assert 0.1 < expected < 0.45  # far from what scores without a meaning would give
    ((area,),) = comparison.methods[0].detection.values()
    assert area == pytest.approx(expected)


def write_npz(name: str, scale: float) -> None:
    inputs, answers = features(300, 0)
    np.savez(name, features=scale * inputs, labels=answers[:, 0])


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits-lt", "--set", "binary=true"), "data 'digits' have 10 classes"),
        (("--data", "many.csv", "--target", "cat,dog", "--set", "binary=false"), "set binary = true"),
        (("--data", "many.csv", "--target", "cat,fish"), "many.csv has no column 'fish'"),
        (("--data", "many.csv", "--target", "cat,cat"), "has the column 'cat' twice"),
        (
            ("--data", "many.csv", "--target", "cat,rooms"),
            "many.csv, row 3 (line 4 of the file): column 'rooms' has '2', expected 0 or 1",
        ),
        (
            ("--data", "many.csv", "--target", "cat,dog", "--loss", "mmce"),
            "loss mmce compares the elements of a batch and takes a single label; the data have 2",
        ),
        (
            ("--data", "many.csv", "--target", "cat,dog", "--loss", "nacl"),
            "loss nacl takes no single logits: expected binary = false",
        ),
        (
            ("--data", "many.csv", "--target", "cat,dog", "--set", "data.imbalance=2"),
            "imbalance must be 1 for several labels",
        ),
        (
            ("--data", "many.csv", "--target", "cat,dog", "--set", "data.validation_imbalance=2"),
            "validation_imbalance needs data with one label for each element",
        ),
        (("--data", "wrong.npz"), "has 2 in labels of shape (60, 2), expected 0 or 1"),
        (("--data", "names.npz"), "has class_names of shape (3,), expected 2 for its labels"),
        (("--data", "mixed.jsonl"), "line 2: column 'label' has 'dog', expected a list of labels, as before"),
    ],
)
def test_one_line_and_nothing_written(arguments: tuple[str, ...], message: str) -> None:
    lines = [f"{n * n},{n % 2},{n // 2 % 2},{n % 3}" for n in range(60)]
    Path("many.csv").write_text("\n".join(["x,cat,dog,rooms", *lines]))
    inputs, labels = features(60, 0)
    np.savez("wrong.npz", features=inputs, labels=labels[:, :2] * 2)
    np.savez("names.npz", features=inputs, labels=labels[:, :2], class_names=np.array(LABELS))
    rows = [{"text": f"a text of {n} words", "label": ["cat"] if n % 2 else "dog"} for n in range(1, 60)]
    Path("mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert message in fail("train", *arguments, "--accelerator", "cpu", "--output", "a")
    assert not (Path("a").exists() and [file for file in Path("a").iterdir() if file.name != ".lock"])


def test_a_network_with_another_number_of_outputs_is_refused() -> None:
    recipe = recipe_of(table, model=Choice("tests.training.test_binary:two_outputs"))
    with pytest.raises(RecipeError, match=r"gives 2 outputs; binary = true needs 3"):
        train(recipe, "a")


class Failing(CrossEntropy):
    """A loss with an error of its own."""

    def per_sample(self, elements: Elements) -> Tensor:
        raise ValueError("an error of the loss itself")


def test_an_error_of_the_loss_is_not_put_down_to_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calibrant.LOSSES, "failing", Failing)
    with pytest.raises(ValueError, match="an error of the loss itself"):
        train(recipe_of(table, loss="failing"), "a")


def two_outputs(num_classes: int) -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def test_a_label_with_one_answer_only_is_told() -> None:
    lines = [f"{n * n},{n % 2},1" for n in range(60)]
    Path("many.csv").write_text("\n".join(["x,cat,dog", *lines]))
    with pytest.warns(UserWarning, match=r"1 of 2 labels are always 0 or always 1 in the \w+ part \('dog'\)"):
        load_data(Choice("table", {"file": "many.csv", "target": ["cat", "dog"]}), ".")


@pytest.mark.filterwarnings("ignore:.*are always 0 or always 1", "ignore:label dog")
def test_a_label_with_one_answer_does_not_spoil_the_calibrator_of_the_others() -> None:
    inputs, answers = features(300, 0)
    answers[:, 1] = 0
    np.savez("data.npz", features=inputs.astype(np.float32), labels=answers, class_names=np.array(LABELS))
    data = ["--data", "data.npz", "--set", "epochs=20", "--set", "optimizer.lr=0.1"]
    output = succeed("train", *data, "--output", "auto")
    assert "every better calibrator" not in output.stdout + output.stderr
    assert ", not counting 1 label with one answer in all data) ECE" in output.stdout
    assert not isinstance(calibrant.load("auto").calibrator, Identity)
    succeed("train", *data, "--output", "auto", "--calibrate", "temperature")
    first, constant, last = calibrant.load("auto").calibrator.labels
    assert not list(constant.buffers())
    mean = (float(first.temperature) + float(last.temperature)) / 2
    assert Run(Path("auto")).results(["temperature"], resamples=2)["temperature"].temperature == mean


def test_texts_with_a_column_for_each_label() -> None:
    rows = [f"the {'cat' if n % 2 else 'bird'} no. {n},{n % 2},{(n + 1) % 2}" for n in range(60)]
    Path("texts.csv").write_text("\n".join(["text,cat,bird", *rows]))
    result = succeed(
        "train",
        "--data",
        "texts.csv",
        "--target",
        "cat,bird",
        *QUICK,
        "--calibrate",
        "none",
        "--output",
        "run",
    )
    assert "target 'cat', 'bird', several labels for each (binary)" in result.stderr
    assert Recipe.load("run/recipe.toml").data.options["label"] == ("cat", "bird")
    assert Run(Path("run")).data.class_names == ("cat", "bird")


@pytest.mark.filterwarnings("ignore:.*are always 0 or always 1")
def test_labels_with_one_answer_in_all_data_are_not_calibrated() -> None:
    inputs, answers = features(300, 0)
    np.savez("data.npz", features=inputs.astype(np.float32), labels=0 * answers)
    output = succeed("train", "--data", "data.npz", "--set", "epochs=1", "--calibrate", "none")
    assert "; not calibrated, because the validation data have only one answer" in output.stdout
