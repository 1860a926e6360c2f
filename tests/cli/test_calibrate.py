"""The commands calibrate and apply: same results as in Python for all formats and sizes, one-line errors."""

import csv
import json
import re
import shutil
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from calibrant import cli
from calibrant.calibrators import (
    CALIBRATORS,
    Calibrator,
    choose,
    create_calibrator,
    load_calibrator,
    save_calibrator,
)
from calibrant.calibrators.streaming import Scaling
from calibrant.cli import prediction_files
from calibrant.evaluation import Evaluation, evaluate
from calibrant.predictions import FORMATS, WRITERS, PredictionFile, open_predictions

ROWS, CLASSES = 240, 3
PROGRAM = Path(sys.executable).with_name("calibrant")
SCALING = [key for key, kind in CALIBRATORS.items() if issubclass(kind, Scaling)]


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


def run_calibrate(*arguments, resamples=0):
    """The command with few resamples, to save time."""
    return run("calibrate", "--resamples", resamples, *arguments)


def fails(result, *words):
    assert result.exit_code == 2
    assert result.stderr.startswith("calibrant: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def data(seed):
    """Float64 logits that are three times too large, and labels, one of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64)
    labels = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    labels[5] = -100
    return 3 * logits, labels


def save(path, logits, labels, **more):
    np.savez(path, logits=logits.numpy(), labels=labels.numpy(), **more)
    return path


@pytest.fixture
def file(tmp_path):
    return save(tmp_path / "validation.npz", *data(0))


@pytest.fixture
def judged(tmp_path):
    return save(tmp_path / "test.npz", *data(1))


def evaluations(path):
    return [Evaluation.from_dict(each) for each in json.loads(path.read_text())]


@pytest.fixture(scope="module")
def known():
    return evaluate(*data(0), resamples=0)


@pytest.fixture
def evaluated_once(known, monkeypatch):
    """Predictions are calibrated, and their figures are taken from others, which saves most of the time."""

    def evaluate_file(file, name, loaded, options, calibrator=None):
        assert prediction_files.calibrate_batch(calibrator, file, *loaded).isfinite().all()
        return replace(known, name=name)

    monkeypatch.setattr(prediction_files, "evaluate_file", evaluate_file)


# ----------------------------------------------------------------------------------------------- calibrate


@pytest.mark.parametrize("command", ["calibrate", "evaluate"])
def test_files_are_written_even_if_nobody_reads_the_table(tmp_path, file, command, monkeypatch):
    def nobody(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(prediction_files, "print_evaluations", nobody)
    written = [tmp_path / name for name in ("report.html", "figures.json")]
    result = run(command, file, "--resamples", 0, "--report", written[0], "--json", written[1])
    assert (result.exit_code, result.stderr) == (141, "")
    assert all(path.is_file() for path in written)


@pytest.mark.usefixtures("evaluated_once")
@pytest.mark.parametrize("method", CALIBRATORS)
def test_every_method_is_fitted_and_written(tmp_path, file, method):
    output = tmp_path / "calibrator.safetensors"
    result = run_calibrate(file, "--method", method, "--output", output)
    assert (result.exit_code, result.stderr) == (0, "")
    logits, labels = data(0)
    expected = create_calibrator(method).fit(logits, labels)(logits)
    torch.testing.assert_close(load_calibrator(output)(logits), expected)
    assert method in result.stdout
    assert "fitted to these same data, so the figures flatter it" in result.stdout


def test_temperature_is_the_default_and_printed(tmp_path, file):
    output = tmp_path / "calibrator.safetensors"
    result = run_calibrate(file, "--output", output)
    temperature = float(load_calibrator(output).temperature)
    assert 2 < temperature < 4.5
    assert f"temperature (T = {temperature:.4g}), fitted to validation.npz" in result.stdout


def test_before_and_after_are_those_of_the_judged(tmp_path, file, judged):
    options = ["--bins", 10, "--seed", 3, "--json", tmp_path / "out.json", "--report", tmp_path / "page.html"]
    result = run_calibrate(file, "--test", judged, *options, resamples=40)
    assert result.exit_code == 0
    calibrator = create_calibrator("temperature").fit(*data(0))
    logits, labels = data(1)
    before, after = evaluations(tmp_path / "out.json")
    assert before == evaluate(logits, labels, name="before", bins=10, resamples=40, seed=3)
    assert after == evaluate(calibrator(logits), labels, name="after", bins=10, resamples=40, seed=3)
    heading = next(line for line in result.stdout.splitlines() if "before" in line)
    assert heading.split() == ["before", "after"]
    row = next(line for line in result.stdout.splitlines() if line.split()[:1] == ["NLL"])
    assert row.split()[-2:] == ["*", "better"]
    assert "difference from before (the 95 % interval of the paired bootstrap leaves out 0)" in result.stdout
    assert "flatter" not in result.stdout
    page = (tmp_path / "page.html").read_text()
    temperature = float(calibrator.temperature)
    assert f"Calibrator: temperature (T = {temperature:.4g}), fitted to validation.npz.<" in page
    assert "1 model before and after calibration" in page
    assert "Mean IoU" not in page


def test_a_copy_of_the_file_is_the_same_data(tmp_path, file):
    copy = shutil.copy(file, tmp_path / "copy.npz")
    assert (
        "fitted to these same data, so the figures flatter it" in run_calibrate(file, "--test", copy).stdout
    )


def test_rows_that_the_calibrator_was_fitted_to_are_counted(tmp_path, file):
    logits, labels = data(0)
    order = np.random.default_rng(0).permutation(len(labels))[: len(labels) // 2]
    np.savez(tmp_path / "half.npz", logits=logits[order], labels=labels[order])
    page, rows = tmp_path / "page.html", f"{len(order)} of the {len(order)} rows"
    said = run_calibrate(file, "--test", tmp_path / "half.npz", "--report", page).stdout
    assert f"also fitted to {rows} of half.npz, so the figures flatter it" in " ".join(said.split())
    assert f"({rows} are the same, so the figures flatter it)." in page.read_text()
    for seed in (1, 2):  # independent single logits of few digits, of which some are equal by chance
        scores = np.random.default_rng(seed).normal(size=8000).round(4)
        np.savez(
            tmp_path / f"{seed}.npz", logits=scores, labels=(scores > 0).astype(int) ^ (scores.round(1) > 1)
        )
    single = tmp_path / "1.npz", "--test", tmp_path / "2.npz", "--binary"
    assert "flatter" not in run_calibrate(*single).stdout
    few = torch.arange(20).repeat(10)  # rows that are equal anyway
    np.savez(tmp_path / "few.npz", logits=logits[few], labels=labels[few])
    assert "flatter" not in run_calibrate(file, "--test", tmp_path / "few.npz").stdout


def test_the_page_says_if_the_calibrator_was_fitted_to_the_evaluated_data(tmp_path, file):
    run_calibrate(file, "--report", tmp_path / "page.html", resamples=0)
    page = (tmp_path / "page.html").read_text()
    assert "fitted to validation.npz (the same data, so the figures flatter it)." in page


def test_auto_takes_the_best_and_prints_the_ranking(tmp_path, file):
    output = tmp_path / "calibrator.safetensors"
    result = run_calibrate(file, "--method", "auto", "--folds", 3, "--seed", 2, "--output", output)
    assert result.exit_code == 0
    rankings = []
    expected = choose(*data(0), folds=3, seed=2, show=rankings.append)
    assert load_calibrator(output).key == expected.key
    lines = result.stdout.splitlines()
    table = lines[: next(number for number, line in enumerate(lines) if "fitted to" in line)]
    listed = [line for line in table for word in line.split()[:1] if word in CALIBRATORS]
    assert [line.split()[0] for line in listed] == [each.key for each in rankings[0].candidates]
    assert all(f"{each.nll:.4f}" in line for each, line in zip(rankings[0].candidates, listed, strict=True))


def test_images_with_ignored_pixels(tmp_path):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, CLASSES, 5, 4, generator=generator)
    labels = logits.argmax(1).where(logits[:, 0] > 0, 0)
    labels[:, 0] = 255
    path = save(tmp_path / "images.npz", logits, labels)
    for method in ("temperature", "local-temperature"):
        output = tmp_path / f"{method}.safetensors"
        options = ["--ignore-index", 255, "--method", method, "--output", output]
        result = run_calibrate(path, *options, resamples=20)
        assert result.exit_code == 0
        assert "pixels or tokens as independent, but those of one image or text are not" in result.stdout
        expected = create_calibrator(method).fit(logits, labels, ignore_index=255)(logits)
        torch.testing.assert_close(load_calibrator(output)(logits), expected)
        options = ["--ignore-index", 255, "--output", tmp_path / "out.npz"]
        assert run("apply", output, path, *options).exit_code == 0
        found = open_predictions(tmp_path / "out.npz", ignore_index=255).load()
        torch.testing.assert_close(found[0], expected)
        assert torch.equal(found[1], labels)


@pytest.fixture
def all_is_large(monkeypatch):
    """Treat every file as too large to load, and read it in several batches."""
    monkeypatch.setattr(prediction_files, "EXACT_LIMIT", 100)
    defaults = PredictionFile.batches.__kwdefaults__ | {"chunk": 120 * CLASSES}
    monkeypatch.setattr(PredictionFile.batches, "__kwdefaults__", defaults)


@pytest.mark.usefixtures("all_is_large")
@pytest.mark.parametrize("method", SCALING)
def test_large_files_are_fitted_in_passes(tmp_path, file, judged, method):
    output = tmp_path / "calibrator.safetensors"
    options = ["--method", method, "--output", output, "--json", tmp_path / "out.json"]
    result = run_calibrate(file, "--test", judged, *options)
    assert result.exit_code == 0
    logits, labels = data(0)
    expected = create_calibrator(method).fit(logits, labels)(logits)
    torch.testing.assert_close(load_calibrator(output)(logits), expected, rtol=1e-4, atol=1e-4)
    assert [each.exact for each in evaluations(tmp_path / "out.json")] == [False, False]


@pytest.mark.usefixtures("all_is_large")
def test_what_needs_all_data_at_once_refuses_large_files(file):
    for method in ("auto", "isotonic"):
        fails(run_calibrate(file, "--method", method), "validation.npz", method, "temperature, local-temp")


def test_a_warning_is_one_line(tmp_path, file):
    logits, _ = data(0)
    path = save(tmp_path / "perfect.npz", logits, logits.argmax(1))
    result = run_calibrate(path)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"calibrant: warning: {path}: the temperature stopped at its bound")
    assert result.stderr.count("\n") == 1


def test_labels_of_a_single_class_are_warned_of(tmp_path):
    logits, labels = data(0)
    path = save(tmp_path / "one.npz", logits, torch.ones_like(labels), class_names=np.array(["a", "b", "c"]))
    for method in ("temperature", "auto"):
        result = run_calibrate(path, "--method", method)
        assert (
            f"calibrant: warning: {path}: all labels are of one class (b), so this fit means" in result.stderr
        )
        assert result.stderr.count("all labels are of one class") == 1


# --------------------------------------------------------------------------------------------------- apply


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted")
    path = folder / "calibrator.safetensors"
    file = save(folder / "validation.npz", *data(0))
    assert run_calibrate(file, "--method", "vector", "--output", path).exit_code == 0
    return path


@pytest.fixture
def calibrator(tmp_path, fitted):
    return Path(shutil.copy(fitted, tmp_path))


def applied(calibrator, path, output):
    result = run("apply", calibrator, path, "--output", output)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{ROWS} rows of {path.name}, calibrated by vector" in result.stdout
    return open_predictions(output)


def unlabelled(folder, suffix, scores, **more):
    """A file with logits and without labels."""
    path, lists = folder / f"new{suffix}", [row.tolist() for row in scores]
    head, columns = [f"logit_{name}" for name in "abc"[: scores.shape[1]]], list(zip(*lists, strict=True))
    if suffix == ".npz":
        np.savez(path, logits=scores.numpy(), **more)
    elif suffix == ".npy":
        path = folder / "new.logits.npy"
        np.save(path, scores.numpy())
    elif suffix == ".pt":
        torch.save({"logits": scores}, path)
    elif suffix == ".safetensors":
        save_file({"logits": scores}, path)
    elif suffix == ".csv":
        rows = [[f"id {number}", *row] for number, row in enumerate(lists)]
        path.write_text("\n".join(",".join(map(str, row)) for row in [["id", *head], *rows]))
    elif suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"logits": row}) for row in lists))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(dict(zip(head, columns, strict=True))), path)
    return path


def test_apply_recognises_swapped_arguments(tmp_path, calibrator):
    path, output = save(tmp_path / "new.npz", *data(1)), tmp_path / "out.npz"
    fails(run("apply", path, calibrator, "--output", output), str(path), "expected the calibrator first")
    fails(run("apply", path, path, "--output", output), "new.npz is no safetensors file")
    fails(run("apply", tmp_path, calibrator, "--output", output), "expected the calibrator first")
    assert not output.exists()


@pytest.mark.parametrize("suffix", FORMATS)
def test_apply_needs_no_labels(tmp_path, calibrator, suffix):
    logits, _ = data(1)
    path = unlabelled(tmp_path, suffix, logits)
    for output in (tmp_path / "out.npz", tmp_path / "out.safetensors"):
        result = run("apply", calibrator, path, "--ignore-index", 0, "--output", output)
        assert (result.exit_code, result.stderr) == (0, "")
        found = dict(np.load(output)) if output.suffix == ".npz" else load_file(output)
        assert "labels" not in found
        assert np.array_equal(found["logits"], load_calibrator(calibrator)(logits).numpy())
    for command in (["evaluate"], ["calibrate"], ["conformal", "--alpha", "0.1"]):
        fails(run(*command, path), "labels", "expected")
        fails(run(*command, tmp_path / "out.npz"), "out.npz: has no labels")


def test_apply_keeps_the_columns_of_a_table_without_labels(tmp_path, calibrator):
    logits, _ = data(1)
    path, output = unlabelled(tmp_path, ".csv", logits), tmp_path / "out.csv"
    assert run("apply", calibrator, path, "--output", output).exit_code == 0
    with output.open(newline="") as stream:
        head, *rows = csv.reader(stream)
    assert head == ["id", "logit_a", "logit_b", "logit_c"]
    assert rows[7][0] == "id 7"
    found = torch.tensor([[float(cell) for cell in row[1:]] for row in rows], dtype=torch.float64)
    assert torch.equal(found, load_calibrator(calibrator)(logits))


@pytest.mark.parametrize(("labels", "suffix"), [(1, ".npz"), (1, ".csv"), (3, ".npz"), (3, ".safetensors")])
def test_apply_needs_no_labels_of_decisions(tmp_path, labels, suffix):
    logits = data(1)[0][:, :labels]
    layer = create_calibrator("platt").fit(logits, (logits > torch.randn_like(logits)).long(), binary=True)
    save_calibrator(layer, tmp_path / "c.safetensors")
    path, output = unlabelled(tmp_path, suffix, logits), tmp_path / f"out{suffix}"
    assert run("apply", tmp_path / "c.safetensors", path, "--output", output).exit_code == 0
    found = open_predictions(output, binary=True, labelled=False)
    assert torch.equal(found.load()[0], layer(logits))
    fails(run("evaluate", "--binary", output), "has no labels")


def test_apply_names_the_row_of_a_bad_score_without_labels(tmp_path, calibrator):
    logits, _ = data(1)
    logits[4, 1] = torch.nan
    path = unlabelled(tmp_path, ".npz", logits)
    fails(run("apply", calibrator, path, "--output", tmp_path / "out.npz"), "NaN or infinite at row 5")


def test_a_folder_of_parts_needs_no_labels(tmp_path, calibrator):
    (tmp_path / "parts").mkdir()
    for part in range(2):
        np.savez(tmp_path / "parts" / f"{part}.npz", logits=data(part)[0].numpy())
    result = run("apply", calibrator, tmp_path / "parts", "--output", tmp_path / "out.npz")
    assert (result.exit_code, result.stderr) == (0, "")
    assert np.load(tmp_path / "out.npz")["logits"].shape == (2 * ROWS, CLASSES)
    fails(run("evaluate", tmp_path / "parts"), "0.npz: has no labels")


def test_apply_does_not_write_into_the_folder_that_it_reads(tmp_path):
    (tmp_path / "parts").mkdir()
    for part in range(2):
        logits, labels = data(part)
        np.savez(tmp_path / "parts" / f"{part}.npz", logits=logits.numpy(), labels=labels.numpy())
    save_calibrator(create_calibrator("temperature").fit(*data(0)), tmp_path / "c.safetensors")
    result = run(
        "apply", tmp_path / "c.safetensors", tmp_path / "parts", "--output", tmp_path / "parts" / "new.npz"
    )
    fails(result, "lies in the folder to read", "expected another folder")
    assert len(list((tmp_path / "parts").iterdir())) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_apply_gives_what_the_calibrator_gives(tmp_path, calibrator, suffix, dtype):
    logits, labels = data(1)
    logits = logits.to(dtype)
    names = ["cat", "perro grande", "馬"]
    path = save(tmp_path / "more.npz", logits, labels, class_names=np.array(names))
    written = applied(calibrator, path, tmp_path / f"out{suffix}")
    assert written.class_names == tuple(names)
    found_logits, found_labels = written.load()
    assert found_logits.dtype == dtype
    assert torch.equal(found_logits, load_calibrator(calibrator)(logits))
    assert torch.equal(found_labels, labels)


def test_what_is_written_is_read_by_others(tmp_path, calibrator, judged):
    logits, labels = data(1)
    expected = load_calibrator(calibrator)(logits).numpy()
    applied(calibrator, judged, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as arrays:
        assert sorted(arrays) == ["labels", "logits"]
        assert np.array_equal(arrays["logits"], expected)
        assert np.array_equal(arrays["labels"], labels.numpy())
    applied(calibrator, judged, tmp_path / "out.safetensors")
    tensors = load_file(tmp_path / "out.safetensors")
    assert np.array_equal(tensors["logits"].numpy(), expected)
    assert torch.equal(tensors["labels"], labels)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_are_read_once_and_written_in_batches(tmp_path, calibrator, judged, suffix, monkeypatch):
    logits, labels = data(1)
    read, alive = [], []

    def batches(self, original=PredictionFile.batches):
        for batch in original(self, chunk=5 * CLASSES):
            read.append(weakref.ref(batch[0]))
            alive.append(sum(each() is not None for each in read))
            yield batch

    monkeypatch.setattr(PredictionFile, "batches", batches)
    applied(calibrator, judged, tmp_path / f"out{suffix}")
    monkeypatch.undo()
    assert len(read) == ROWS // 5
    assert max(alive) <= 3
    found = open_predictions(tmp_path / f"out{suffix}").load()
    torch.testing.assert_close(found[0], load_calibrator(calibrator)(logits))
    assert torch.equal(found[1], labels)


@pytest.mark.usefixtures("all_is_large")
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_large_files_are_written_in_batches(tmp_path, calibrator, judged, suffix):
    logits, labels = data(1)
    found = applied(calibrator, judged, tmp_path / f"out{suffix}").load()
    torch.testing.assert_close(found[0], load_calibrator(calibrator)(logits))
    assert torch.equal(found[1], labels)


def test_a_table_with_line_breaks_has_fewer_rows_than_lines(tmp_path, calibrator):
    logits, labels = data(1)
    rows = [",".join(map(repr, row)) for row in logits.tolist()]
    lines = [f'"a\nb",{label},{row}' for label, row in zip(labels.tolist(), rows, strict=True)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["note,label,logit_a,logit_b,logit_c", *lines]))
    for suffix in (".npz", ".safetensors"):
        found = applied(calibrator, path, tmp_path / f"out{suffix}").load()
        assert torch.equal(found[0], load_calibrator(calibrator)(logits))


def test_probabilities_come_out_as_logits(tmp_path, calibrator):
    logits, labels = data(1)
    probabilities = (logits / 4).softmax(1)
    np.savez(tmp_path / "p.npz", probabilities=probabilities.numpy(), labels=labels.numpy())
    written = applied(calibrator, tmp_path / "p.npz", tmp_path / "out.npz")
    assert written.kind == "logits"
    torch.testing.assert_close(written.load()[0], load_calibrator(calibrator)(probabilities.log()))


# ------------------------------------------------------------------------------------------------ failures


@pytest.fixture
def no_work(monkeypatch):
    def work(*_, **__):
        raise AssertionError("work began before what can be known was checked")

    monkeypatch.setattr(prediction_files, "load", work)
    monkeypatch.setattr(prediction_files, "evaluate_file", work)
    monkeypatch.setattr(prediction_files, "Passes", work)


@pytest.mark.usefixtures("no_work")
def test_what_cannot_be_fitted_is_refused_before_the_work(tmp_path, file):
    out = tmp_path / "no" / "out.safetensors"
    for option in ("--output", "--report", "--json"):
        fails(run_calibrate(file, option, out), option, f"no folder {out.parent}")
        fails(run_calibrate(file, option, tmp_path), "is a folder")
        fails(run_calibrate(file, option, file), "one of the files to read")
    fails(run_calibrate(file, "--output", tmp_path / "c.pt"), "ends in .safetensors")
    fails(run_calibrate(file, "--report", tmp_path / "a.txt"), "a.txt: expected a name that ends in .html or")
    fails(run_calibrate(file, "--json", tmp_path / "a.csv"), "a.csv: expected a name that ends in .json")
    same = tmp_path / "a.safetensors"
    fails(run_calibrate(file, "--output", same, "--json", same), "--output and --json are the same file")
    fails(run_calibrate(file, "--test", tmp_path / "none.npz"), "none.npz: does not exist")
    fails(run_calibrate(tmp_path / "none.npz"), "none.npz: does not exist")


@pytest.mark.usefixtures("no_work")
def test_an_unknown_method_is_guessed(file):
    result = run_calibrate(file, "--method", "Temprature")
    fails(result, "Temprature", "did you mean 'temperature'?", "auto", *CALIBRATORS)
    result = run_calibrate(file, "--method", "xyz")
    fails(result, "xyz", *CALIBRATORS)
    assert "did you mean" not in result.stderr


@pytest.mark.usefixtures("no_work")
def test_data_with_other_classes_are_refused(tmp_path):
    logits, labels = data(0)
    file = save(tmp_path / "a.npz", logits, labels, class_names=np.array(list("abc")))
    other = save(tmp_path / "b.npz", logits, labels, class_names=np.array(list("bac")))
    fails(run_calibrate(file, "--test", other), "b.npz", "in another order")
    other = save(tmp_path / "b.npz", logits, labels, class_names=np.array(list("abd")))
    fails(run_calibrate(file, "--test", other), "b.npz", "class 2 is 'd', expected 'c'")
    other = save(tmp_path / "c.npz", torch.cat([logits, logits], 1), labels)
    fails(run_calibrate(file, "--test", other), "c.npz: has 6 classes, but a.npz has 3")


def test_a_calibrator_keeps_the_names_of_its_classes(tmp_path):
    logits, labels = data(0)
    file = save(tmp_path / "a.npz", logits, labels, class_names=np.array(list("abc")))
    calibrator, out = tmp_path / "calibrator.safetensors", tmp_path / "out.npz"
    assert run_calibrate(file, "--method", "vector", "--output", calibrator).exit_code == 0
    assert load_calibrator(calibrator).class_names == ("a", "b", "c")
    for names, problem in (("bac", "'b', expected 'a': the same classes in another order"), ("abd", "'d'")):
        other = save(tmp_path / "b.npz", logits, labels, class_names=np.array(list(names)))
        fails(run("apply", calibrator, other, "--output", out), "b.npz", "calibrator.safetensors", problem)
        assert not out.exists()
    # Without names, or with numbers for names, other classes cannot be recognised.
    table = tmp_path / "table.csv"
    numbers = torch.cat([labels[:, None], logits], 1).tolist()
    rows = [f"{int(label)},{','.join(map(repr, row))}" for label, *row in numbers]
    table.write_text("\n".join(["label,logit_0,logit_1,logit_2", *rows]))
    for path in (file, table, save(tmp_path / "b.npz", logits, labels)):
        applied(calibrator, path, out)


@pytest.mark.usefixtures("evaluated_once")
@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("histogram-binning", ["bins=20", "binning=equal-mass"], {"bins": 20, "binning": "equal-mass"}),
        ("temperature", ["objective=ece"], {"objective": "ece"}),
        ("vector", ["ridge = 1e-3"], {"ridge": 1e-3}),
        ("platt", ["smooth_targets=false"], {"smooth_targets": False}),
        ("bayesian-binning", ["bins=[3,5]", "prior_samples=4"], {"bins": [3, 5], "prior_samples": 4.0}),
    ],
)
def test_options_of_the_method(tmp_path, file, method, given, expected):
    output = tmp_path / "calibrator.safetensors"
    result = run_calibrate(file, "--method", f"{method}[{','.join(given)}]", "--output", output)
    assert (result.exit_code, result.stderr) == (0, "")
    found = load_calibrator(output).options()
    assert {name: found[name] for name in expected} == expected


@pytest.mark.usefixtures("all_is_large")
def test_options_of_the_method_for_large_files(tmp_path, file):
    output = tmp_path / "calibrator.safetensors"
    options = ["--method", "vector[ridge=0.5]", "--output", output]
    assert run_calibrate(file, *options).exit_code == 0
    assert load_calibrator(output).ridge == 0.5


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("histogram-binning", ["bin=20"], ["no option 'bin' (did you mean 'bins'?)"]),
        ("histogram-binning", ["bins=many"], ["bins must be a whole number, got 'many'"]),
        ("histogram-binning", ["bins=0"], ["bins must be a whole number of at least 1"]),
        ("histogram-binning", ["bins"], ["expected option=value"]),
        ("histogram-binning", ["bins=2", "bins=3"], ["bins is given twice"]),
        ("histogram-binning", ["variant=toplabel"], ["variant must be one of", "'top-label'"]),
        ("bayesian-binning", ['bins=[3,"x"]'], ["bins must be a list, each a whole number"]),
        ("platt", ["smooth_targets=maybe"], ["smooth_targets must be true or false, got 'maybe'"]),
        ("vector", ["ridge=-1"], ["ridge must lie in"]),
        ("vector", ["ridge=x"], ["ridge must be a number, got 'x'"]),
        ("beta", ["bins=3"], ["beta has no option 'bins'; its options: none"]),
        ("temperature", ["return=3"], ["no option 'return'"]),
        ("auto", ["bins=3"], ["auto takes no options"]),
    ],
)
def test_options_that_a_method_does_not_take(file, method, given, words):
    fails(run_calibrate(file, "--method", f"{method}[{','.join(given)}]"), "--method", *words)


def test_a_warning_names_an_absent_class(tmp_path):
    logits, labels = data(0)
    names = np.array(["cat", "dog", "owl"])
    path = save(tmp_path / "absent.npz", logits, labels.where(labels != 1, 0), class_names=names)
    result = run_calibrate(path, "--method", "isotonic")
    assert "of 3 classes the data lack 1 (dog): " in result.stderr


def test_an_absent_class_is_a_warning(tmp_path):
    logits, labels = data(0)
    path = save(tmp_path / "absent.npz", logits, labels.where(labels != 1, 0))
    result = run_calibrate(path, "--method", "isotonic")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"calibrant: warning: {path}: of 3 classes the data lack 1 (1): ")
    assert result.stderr.count("\n") == 1


def test_data_that_cannot_be_fitted_are_one_line(tmp_path, file):
    logits, labels = data(0)
    nan = save(tmp_path / "nan.npz", logits * torch.nan, labels)
    infinite = logits.clone()
    infinite[3, 1] = -torch.inf
    infinite = save(tmp_path / "infinite.npz", infinite, labels)
    few = save(tmp_path / "few.npz", logits[:3], labels[:3])
    output = tmp_path / "calibrator.safetensors"
    fails(run_calibrate(nan, "--output", output), "nan.npz", "NaN")
    fails(run_calibrate(file, "--test", nan, "--output", output), "nan.npz", "NaN")
    fails(run_calibrate(infinite, "--test", file, "--output", output), "infinite.npz", "finite logits")
    fails(run_calibrate(few, "--method", "auto", "--output", output), "few.npz: 3 elements cannot be divided")
    assert not output.exists()


@pytest.mark.usefixtures("no_work")
def test_what_cannot_be_applied_is_refused_before_the_work(tmp_path, judged):
    calibrator = tmp_path / "calibrator.safetensors"
    logits, labels = data(0)
    save_calibrator(create_calibrator("temperature").fit(logits, labels), calibrator)
    out = tmp_path / "out.npz"
    fails(run("apply", calibrator, judged, "--output", tmp_path / "no" / "out.npz"), "there is no folder")
    fails(run("apply", calibrator, judged, "--output", judged), "one of the files to read")
    fails(run("apply", calibrator, judged, "--output", calibrator), "one of the files to read")
    fails(
        run("apply", calibrator, judged, "--output", tmp_path / "out.csv"),
        "test.npz is not a .csv file; expected .npz or .safetensors",
    )
    fails(run("apply", calibrator, judged, "--output", tmp_path / "out.txt"), ".npz or .safetensors")
    fails(run("apply", tmp_path / "none", judged, "--output", out), "there is no calibrator")
    fails(run("apply", calibrator, tmp_path / "none.npz", "--output", out), "none.npz: does not exist")
    fails(run("apply", judged, judged, "--output", out), "test.npz is no safetensors file, or damaged")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(calibrator.read_bytes()[:-3])
    fails(run("apply", damaged, judged, "--output", out), "damaged")
    save_file({"logits": logits, "labels": labels}, damaged)
    fails(run("apply", damaged, judged, "--output", out), "not a calibrator")
    fails(run("apply", calibrator, calibrator, "--output", out), "is a calibrator file; expected predictions")
    four = save(tmp_path / "four.npz", torch.cat([logits, logits[:, :1]], 1), labels)
    fails(run("apply", calibrator, four, "--output", out), "has 4 classes, but", "was fitted to 3 classes")
    assert not out.exists()


@pytest.mark.parametrize("kind", ["logits", "probabilities", "lists", "binary"])
def test_a_table_stays_a_table(tmp_path, kind):
    """The output was an archive without the other columns, and nobody was told."""
    logits, labels = data(0)
    labels[3] = -100
    binary, scores = kind == "binary", logits
    calibrator, path, out = tmp_path / "c.safetensors", tmp_path / "m.csv", tmp_path / "out.csv"
    if binary:
        scores, labels = logits[:, :1].sigmoid(), labels.clamp_max(1)
        save_calibrator(create_calibrator("beta").fit(logits[:, 0], labels, binary=True), calibrator)
    else:
        save_calibrator(create_calibrator("vector").fit(logits, labels), calibrator)
    if kind == "probabilities":
        scores = logits.double().softmax(1)
    heading = {"lists": "logits", "binary": "probability_yes"}.get(kind)
    heading = heading or ";".join(
        f"{'logit' if kind == 'logits' else 'probability'}_{name}" for name in "abc"
    )
    lines = [f"id ;{heading};label; note"]
    for number, (row, label) in enumerate(zip(scores.tolist(), labels.tolist(), strict=True)):
        cells = [str(row)] if kind == "lists" else map(str, row)
        lines.append(";".join([f'"id; {number}"', *cells, str(label), "ä\n" if number == 9 else ""]))
        lines += [""] * (number == 5)
    path.write_text("\n".join(lines), "utf-8-sig")
    told = run("apply", calibrator, path, "--output", out).output
    assert re.search(f"out.csv: {ROWS} rows of m.csv, calibrated by [a-z]+$", told)
    with path.open(encoding="utf-8-sig", newline="") as old, out.open(encoding="utf-8", newline="") as new:
        (head, *rows), (written, *others) = ([*csv.reader(each, delimiter=";")] for each in (old, new))
    assert head == written
    rows = [row for row in rows if row]
    assert [(row[0], *row[-2:]) for row in rows] == [(row[0], *row[-2:]) for row in others]
    archive = tmp_path / "out.npz"
    told = run("apply", calibrator, path, "--output", archive).output
    assert told.endswith("; without its other columns 'id', 'note'\n")
    found, expected = (open_predictions(file, binary=binary).load() for file in (out, archive))
    assert torch.equal(found[1].flatten(), expected[1].flatten())
    torch.testing.assert_close(found[0].diff(dim=1), expected[0].diff(dim=1).double())
    if binary:
        torch.testing.assert_close(found[0], expected[0].double())


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_table_keeps_the_ends_of_its_lines(tmp_path, end):
    calibrator, path, out = tmp_path / "c.safetensors", tmp_path / "m.csv", tmp_path / "out.csv"
    save_calibrator(create_calibrator("temperature").fit(*data(0)), calibrator)
    path.write_text(end.join(["logit_a,logit_b,logit_c,label", "1,2,3,0", ""]), newline="")
    assert run("apply", calibrator, path, "--output", out).exit_code == 0
    assert re.findall(r"\r?\n", out.read_bytes().decode()) == [end, end]


def test_half_a_file_is_never_left(tmp_path, calibrator, judged, monkeypatch):
    before = sorted(tmp_path.iterdir())
    logits, labels = data(1)
    labels[-1] = 7
    wrong = save(judged, logits, labels)
    fails(run("apply", calibrator, wrong, "--output", tmp_path / "out.npz"), "has label 7")
    labels[-1] = 0
    logits[-1] = -torch.inf
    save_calibrator(create_calibrator("matrix").fit(*data(0)), calibrator)
    infinite = save(judged, logits, labels)
    fails(
        run("apply", calibrator, infinite, "--output", tmp_path / "out.npz"),
        "matrix cannot turn them into prob",
    )
    save(judged, *data(1))
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    fails(run("apply", calibrator, judged, "--output", tmp_path / "out.npz"), "disk full")
    fails(run_calibrate(judged, "--output", tmp_path / "other.safetensors"), "disk full")
    assert sorted(tmp_path.iterdir()) == before


# ---------------------------------------------------------------------------------------------- the program


def test_the_help_lists_every_method():
    commands = typer.main.get_command(cli.app).commands
    assert {"evaluate", "calibrate", "apply"} <= set(commands)
    (method,) = [option for option in commands["calibrate"].params if option.name == "method"]
    assert re.findall(r"[a-z-]+", method.help.partition("one of ")[2].partition(";")[0]) == list(CALIBRATORS)


@pytest.mark.parametrize(
    ("command", "parameter", "suffixes"),
    [
        ("evaluate", "files", FORMATS),
        ("apply", "output", [*WRITERS, ".csv"]),
        ("predict", "output", [*WRITERS, ".csv", ".npz", ".parquet"]),  # the last three with --input
    ],
)
def test_the_help_lists_every_format(command, parameter, suffixes):
    commands = typer.main.get_command(cli.app).commands
    (found,) = [each for each in commands[command].params if each.name == parameter]
    assert re.findall(r"\.[a-z]+", found.help) == list(suffixes)


PAGE = (Path(__file__).parents[2] / "docs" / "calibrate-command.md").read_text(encoding="utf-8")


def test_the_page_lists_every_method():
    marks = re.findall(r"^\| `([a-z][a-z-]*)`( †)?( ∞)? \|", PAGE, re.MULTILINE)
    assert [key for key, _, _ in marks] == list(CALIBRATORS)
    for key, preserves_order, passes in marks:
        assert bool(preserves_order) == create_calibrator(key).preserves_order
        assert bool(passes) == (key in SCALING)


def test_calibrators_from_outside_may_learn_anything():
    class Own(Calibrator):
        key = "own"

        def fit_rows(self, rows, labels):
            self.learn("weights", torch.eye(rows.shape[1]))
            self.learn("temperature", torch.ones(rows.shape[1]))

        def transform(self, rows):
            return rows

    logits, target = 3 * torch.eye(3).repeat(2, 1), torch.tensor([0, 1, 2, 0, 1, 0])
    assert prediction_files.in_words(Own().fit(logits, target)) == "own"
    ensemble = create_calibrator("ensemble-temperature").fit(logits, target)
    assert re.fullmatch(
        r"ensemble-temperature \(T = [\d.e+]+; weights( [\d.e-]+,?){3}\)", prediction_files.in_words(ensemble)
    )
