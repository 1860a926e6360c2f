"""The command evaluate: same results as in Python, complete output files, one-line errors."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

import calibrant
from calibrant import cli
from calibrant.arguments import whole_number
from calibrant.atomic import replace_file
from calibrant.cli import prediction_files, terminal
from calibrant.ensembles import pool
from calibrant.evaluation import Evaluation, evaluate
from calibrant.metrics import METRICS

ROWS, CLASSES = 300, 4
PROGRAM = Path(sys.executable).with_name("calibrant")


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


def run_evaluate(*arguments, resamples=0):
    """The command with few resamples, to save time."""
    return run("evaluate", "--resamples", resamples, *arguments)


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(0).normal(size=(ROWS, CLASSES)) * 2


@pytest.fixture(scope="module")
def labels(logits):
    generator = np.random.default_rng(1)
    labels = np.where(generator.random(ROWS) < 0.7, logits.argmax(1), generator.integers(0, CLASSES, ROWS))
    labels[5] = -100
    return labels


@pytest.fixture
def file(tmp_path, logits, labels):
    np.savez(tmp_path / "model.npz", logits=logits, labels=labels)
    return tmp_path / "model.npz"


def evaluations(path):
    return [Evaluation.from_dict(each) for each in json.loads(path.read_text())]


def test_figures_are_those_of_the_function(tmp_path, file, logits, labels):
    result = run_evaluate(file, "--json", tmp_path / "out.json", resamples=20)
    assert result.exit_code == 0
    expected = evaluate(torch.from_numpy(logits), torch.from_numpy(labels), name="model", resamples=20)
    (evaluation,) = evaluations(tmp_path / "out.json")
    assert evaluation.exact
    assert evaluation == expected
    assert METRICS["accuracy"].label in result.output
    assert f"{100 * expected.ece:.2f}" in result.output


def test_every_format_gives_identical_figures(tmp_path, file, logits, labels):
    np.savez_compressed(tmp_path / "a.npz", logits=logits, labels=labels)
    np.save(tmp_path / "b.logits.npy", logits)
    np.save(tmp_path / "b.labels.npy", labels)
    tensors = {"logits": torch.from_numpy(logits), "labels": torch.from_numpy(labels)}
    torch.save(tensors, tmp_path / "c.pt")
    save_file(tensors, tmp_path / "d.safetensors")
    header = ",".join(["label", *(f"logit_{index}" for index in range(CLASSES))])
    rows = [
        ",".join(map(repr, [int(label), *row.tolist()])) for label, row in zip(labels, logits, strict=True)
    ]
    (tmp_path / "e.csv").write_text("\n".join([header, *rows]))
    names = ["model.npz", "a.npz", "b.labels.npy", "c.pt", "d.safetensors", "e.csv"]
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        pass
    else:
        columns = {f"logit_{index}": logits[:, index] for index in range(CLASSES)}
        parquet.write_table(pyarrow.table({"label": labels, **columns}), tmp_path / "f.parquet")
        names.append("f.parquet")
    result = run_evaluate(*(tmp_path / name for name in names), "--json", tmp_path / "out.json")
    assert result.exit_code == 0
    first, *others = evaluations(tmp_path / "out.json")
    assert [each.name for each in others] == ["a", "b", "c", "d", "e", "f"][: len(others)]
    for other in others:
        assert other.metrics == first.metrics
        assert other.fingerprint == first.fingerprint


def test_options_reach_the_evaluation(tmp_path, file, logits, labels):
    options = ["--bins", 10, "--ignore-index", 2, "--background", 0, "--level", 0.9, "--seed", 3]
    labels = np.where(labels == -100, 2, labels)
    np.savez(file, logits=logits, labels=labels, class_names=np.array(list("abcd")))
    result = run_evaluate(file, *options, "--class-counts", "900,200,50,3", "--json", tmp_path / "out.json")
    assert result.exit_code == 0
    expected = evaluate(
        torch.from_numpy(logits),
        torch.from_numpy(labels),
        name="model",
        bins=10,
        ignore_index=2,
        class_names=list("abcd"),
        class_counts=[900, 200, 50, 3],
        background=0,
        resamples=0,
        level=0.9,
        seed=3,
    )
    assert evaluations(tmp_path / "out.json") == [expected]
    (tmp_path / "counts.txt").write_text("900\n200\n50\n3\n")
    run_evaluate(file, *options, "--class-counts", tmp_path / "counts.txt", "--json", tmp_path / "out.json")
    assert evaluations(tmp_path / "out.json") == [expected]


def test_probabilities_give_the_figures_of_their_logits(tmp_path, file, logits, labels):
    probabilities = torch.from_numpy(logits).softmax(1).numpy()
    np.savez(tmp_path / "other.npz", probabilities=probabilities, labels=labels)
    assert run_evaluate(file, tmp_path / "other.npz", "--json", tmp_path / "out.json").exit_code == 0
    first, second = evaluations(tmp_path / "out.json")
    assert second.metrics == pytest.approx(first.metrics, abs=1e-6)


def test_a_stream_gives_the_figures_that_a_stream_can_give(tmp_path, file):
    assert run_evaluate(file, "--stream", "--json", tmp_path / "stream.json").exit_code == 0
    assert run_evaluate(file, "--exact", "--json", tmp_path / "exact.json").exit_code == 0
    (stream,), (exact,) = evaluations(tmp_path / "stream.json"), evaluations(tmp_path / "exact.json")
    assert (stream.exact, exact.exact) == (False, True)
    for name in ("accuracy", "nll", "brier", "ece", "mce", "classwise_ece"):
        assert stream.metrics[name] == pytest.approx(exact.metrics[name], abs=1e-6)


@pytest.mark.parametrize("mode", ["--stream", "--exact"])
def test_images(tmp_path, mode):
    logits = torch.randn(6, CLASSES, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = logits.argmax(1).where(logits[:, 0] > 0, 0)
    labels[:, 0] = 255
    np.savez(tmp_path / "m.npz", logits=logits, labels=labels.to(torch.uint8))
    options = ["--ignore-index", 255, "--per-image", mode, "--json", tmp_path / "out.json"]
    assert run_evaluate(tmp_path / "m.npz", *options).exit_code == 0
    expected = evaluate(logits, labels, ignore_index=255, per_image=True, resamples=0)
    (evaluation,) = evaluations(tmp_path / "out.json")
    assert evaluation.metrics["ece"] == pytest.approx(expected.metrics["ece"])
    assert evaluation.metrics["accuracy"] == pytest.approx(expected.metrics["accuracy"])


def test_a_note_says_that_pixels_are_not_independent(tmp_path, file):
    logits = torch.randn(6, CLASSES, 5, 4, generator=torch.Generator().manual_seed(0))
    np.savez(tmp_path / "images.npz", logits=logits, labels=logits.argmax(1))
    np.savez(tmp_path / "twice.npz", logits=2 * logits, labels=logits.argmax(1))
    images, page = tmp_path / "images.npz", tmp_path / "page.html"
    some = ("--resamples", 20)
    why = "pixels or tokens as independent, but those of one image or text are not:"
    cases = [
        ([images, *some], f"Intervals and p-values take {why} intervals are too narrow, p-values too small."),
        ([images, tmp_path / "twice.npz", *some], "and differences are called significant too easily."),
        ([images, "--per-image", *some], f"The p-value takes {why} it is too small."),
    ]
    for arguments, note in cases:
        assert f"{note}\n" in run_evaluate(*arguments, "--report", page).stdout
        assert note in page.read_text()
    for without in (images, file):  # neither intervals nor a p-value, or no pixels
        assert "independent" not in run_evaluate(without, "--report", page).stdout
        assert "as independent" not in page.read_text()


def test_a_note_says_that_true_classes_have_a_probability_of_0(tmp_path, file):
    forest, page = tmp_path / "forest.csv", tmp_path / "page.html"
    forest.write_text("label,probability_0,probability_1\n" + 9 * "0,0.8,0.2\n" + "1,1,0\n")
    other = shutil.copy(forest, tmp_path / "other.csv")
    note = "1 of 10 true classes have a probability of 0"
    for files in ([forest], [forest, other]):  # equal notes of two files are one
        assert run_evaluate(*files, "--report", page).stdout.count(note) == 1
        assert page.read_text().count(note) == 1
    assert f"forest, other: {note}" in page.read_text()
    assert "probability of 0" not in run_evaluate(file, "--report", page).stdout
    assert "probability of 0" not in page.read_text()


def test_large_files_are_streamed(tmp_path, file, monkeypatch):
    monkeypatch.setattr(prediction_files, "EXACT_LIMIT", ROWS * CLASSES * 8 - 1)
    assert run_evaluate(file, "--json", tmp_path / "out.json").exit_code == 0
    assert not evaluations(tmp_path / "out.json")[0].exact
    assert run_evaluate(file, "--exact", "--json", tmp_path / "out.json").exit_code == 0
    assert evaluations(tmp_path / "out.json")[0].exact


# ---------------------------------------------------------------------------------------------- comparison


def test_several_files_are_compared(tmp_path, file, logits, labels):
    np.savez(tmp_path / "worse.npz", logits=logits / 50, labels=labels)
    result = run_evaluate(file, tmp_path / "worse.npz", "--json", tmp_path / "out.json", resamples=40)
    assert result.exit_code == 0
    first, second = evaluations(tmp_path / "out.json")
    heading = next(line for line in result.output.splitlines() if "worse" in line)
    assert heading.split() == ["model", "worse"]
    row = next(line for line in result.output.splitlines() if line.split()[:1] == ["ECE"])
    assert row.split() == ["ECE", f"{100 * first.ece:.2f}", "%", "*", f"{100 * second.ece:.2f}", "%", "worse"]
    row = next(line for line in result.output.splitlines() if line.split()[:1] == ["Accuracy"])
    assert "*" not in row  # both are equal
    assert not re.search("better|worse", row)
    assert "a significant difference from model" in result.output


def test_different_data_have_no_best_values(tmp_path, file, logits, labels):
    np.savez(tmp_path / "other.npz", logits=logits[:200] / 50, labels=labels[:200])
    page = tmp_path / "page.html"
    options = ("--class-counts", "900,200,50,3", "--report", page)
    result = run_evaluate(file, tmp_path / "other.npz", *options, resamples=40)
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert re.search("other has other labels than model, .* compared as independent data", text)
    assert "*" not in text
    assert 'class="best"' not in page.read_text()
    assert "No value is marked as the best of its column: these models were" in page.read_text()
    result = run_evaluate(file, tmp_path / "other.npz")
    assert result.exit_code == 0
    assert "differences are not tested: there are no resamples. other has other labels" in result.output
    assert "*" not in result.output
    assert not re.search("better|worse", result.output)


def test_unpaired_predictions_of_the_same_data(tmp_path, file, logits, labels):
    np.savez(tmp_path / "other.npz", logits=logits / 50, labels=labels)
    result = run_evaluate(file, tmp_path / "other.npz", "--stream", resamples=40)
    text = " ".join(result.output.split())
    assert "other and model are compared as independent data, so only larger differences are found" in text
    assert "* best" in text


@pytest.mark.parametrize("few", [1, 39])
def test_few_resamples_give_no_verdict(tmp_path, file, logits, labels, few):
    np.savez(tmp_path / "worse.npz", logits=logits / 50, labels=labels)
    page = tmp_path / "page.html"
    result = run_evaluate(file, tmp_path / "worse.npz", "--report", page, resamples=few)
    assert re.search(f"differences are not tested: {few} resamples? (is|are) too few", result.output)
    assert not re.search("better|significant", result.output)
    assert "could not be tested" in page.read_text()
    assert "significantly lower" not in page.read_text()


def test_without_resamples_nothing_is_tested(tmp_path, file):
    page = tmp_path / "page.html"
    result = run_evaluate(file, "--report", page, "--json", tmp_path / "out.json", resamples=0)
    assert "p-value" not in result.output
    assert not re.search("p-value|p_value|rejected", page.read_text())
    assert evaluations(tmp_path / "out.json")[0].p_value is None


def test_equal_names_are_told_apart_by_their_paths(tmp_path, file, logits, labels):
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / "model.npz"
    np.savez(other, logits=logits, labels=labels)
    np.savez(tmp_path / "third.npz", logits=logits, labels=labels)
    assert run_evaluate(file, other, tmp_path / "third.npz", "--json", tmp_path / "out.json").exit_code == 0
    assert [each.name for each in evaluations(tmp_path / "out.json")] == [str(file), str(other), "third"]


def test_a_pair_given_by_both_files_is_evaluated_once(tmp_path, file, logits, labels):
    for role, array in (("logits", logits), ("labels", labels)):
        np.save(tmp_path / f"pair.{role}.npy", array)
    pair = [tmp_path / "pair.labels.npy", tmp_path / "pair.logits.npy"]
    result = run_evaluate(pair[0], file, pair[1], "--json", tmp_path / "out.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [each.name for each in evaluations(tmp_path / "out.json")] == ["pair", "model"]


def test_a_file_that_is_given_twice_is_evaluated_once_with_a_warning(tmp_path, file):
    same = tmp_path / "same.npz"
    same.symlink_to(file)
    result = run_evaluate(file, same, file, "--json", tmp_path / "out.json")
    assert result.stderr == f"calibrant: warning: {file}, {same}: given more than once, evaluated once\n"
    assert len(evaluations(tmp_path / "out.json")) == 1


# ------------------------------------------------------------------------------------------------- outputs


def test_the_report_is_written(tmp_path, file):
    assert run_evaluate(file, "--report", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "model" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.npz", "page.html"]


def test_the_report_has_the_mean_iou_of_images_only(tmp_path, file):
    logits = torch.randn(6, CLASSES, 5, 4, generator=torch.Generator().manual_seed(0))
    np.savez(tmp_path / "images.npz", logits=logits, labels=logits.argmax(1))
    for predictions, found in ((file, False), (tmp_path / "images.npz", True)):
        assert run_evaluate(predictions, "--report", tmp_path / "page.html").exit_code == 0
        assert ("Mean IoU" in (tmp_path / "page.html").read_text()) is found


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            replace_file(path, b"after")
    assert path.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    replace_file(path, b"after")
    assert path.read_text() == "after"


def test_a_disk_that_is_full_is_one_line(tmp_path, file, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    fails(run_evaluate(file, "--json", tmp_path / "out.json"), "disk full")


# ------------------------------------------------------------------------------------------------ failures


def fails(result, *words):
    assert result.exit_code == 2
    assert result.stderr.startswith("calibrant: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.fixture
def no_work(monkeypatch):
    def work(*_):
        raise AssertionError("work began before what can be known was checked")

    monkeypatch.setattr(prediction_files, "evaluate_file", work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("option", ["report", "json"])
@pytest.mark.parametrize("stream", ["/dev/stdout", "/proc/self/fd/1"])
def test_an_output_may_go_to_a_stream(monkeypatch, stream, option):
    monkeypatch.setattr(Path, "is_file", lambda self: True)  # as /dev/stdout where it is redirected to a file
    terminal.check_names(**{option: Path(stream)})
    with pytest.raises(typer.Exit):
        terminal.check_names(**{option: Path("page")})


def test_what_cannot_be_done_is_refused_before_the_work(tmp_path, file):
    out = tmp_path / "no" / "out"
    fails(run_evaluate(file, "--json", out), "--json", f"no folder {out.parent}")
    fails(run_evaluate(file, "--report", out), "--report", f"no folder {out.parent}")
    fails(run_evaluate(file, "--json", tmp_path), "is a folder")
    fails(run_evaluate(file, "--json", file), "one of the files to read")
    fails(run_evaluate(file, "--json", tmp_path / "a", "--report", tmp_path / "a"), "the same file")
    fails(run_evaluate(file, "--report", tmp_path / "a.txt"), "a.txt: expected a name that ends in .html or")
    for name in ("a.csv", "a.jsonl", "a"):
        fails(run_evaluate(file, "--json", tmp_path / name), f"--json {tmp_path / name}: expected", ".json")
    fails(run_evaluate(file, tmp_path / "none.npz"), "none.npz: does not exist")
    fails(run_evaluate(file, "--background", 4), "has 4 classes")
    fails(run_evaluate(file, "--class-counts", "1,2"), "has 4 classes", "2 numbers")
    fails(run_evaluate(file, "--per-image"), "--per-image needs logits of shape (N, K, *S)")
    fails(run_evaluate(file, "--class-counts", "1,b"), "--class-counts 1,b: expected whole numbers separated")
    fails(run_evaluate(file, "--class-counts", "counts.txt"), "counts.txt: does not exist")
    fails(run_evaluate(file, "--class-counts", "9" * 5000), "File name too long")


def test_bins_that_a_stream_cannot_have(file):
    fails(run_evaluate(file, "--stream", "--bins", 7), "divisor of 300")
    assert run_evaluate(file, "--bins", 7).exit_code == 0


def test_bad_data_are_one_line(tmp_path, logits, labels):
    np.savez(tmp_path / "m.npz", logits=logits * np.nan, labels=labels)
    for mode in ("--exact", "--stream"):
        fails(run_evaluate(tmp_path / "m.npz", mode, "--json", tmp_path / "out.json"), "m.npz", "NaN")
    assert not (tmp_path / "out.json").exists()


def test_what_the_evaluation_refuses_is_one_line(file, monkeypatch):
    def refuse(*_, **__):
        whole_number("no,\nnot this", -1)

    monkeypatch.setattr("calibrant.evaluation.evaluate", refuse)
    fails(run_evaluate(file), str(file), "no, not this")


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["--bins", "0"],
            ["--level", "1"],
            ["--resamples", "-1"],
            ["--background", "-1"],
            ["--nonsense"],
            [],
        ),
        *([option, str(2**70)] for option in ("--bins", "--ignore-index", "--resamples", "--seed")),
        *(["--ignore-index", str(-(2**70))], ["--level", "nan"]),
    ],
)
def test_wrong_usage(file, arguments):
    assert run("evaluate", *arguments, *([file] if arguments else [])).exit_code == 2


# ---------------------------------------------------------------------------------------------- the program


def program(path, folder, *arguments):
    command = [path, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_program_starts_from_any_folder(tmp_path, file):
    """The installed program, in a new interpreter."""
    result = program(PROGRAM, tmp_path, "evaluate", file, "--resamples", 0, "--json", tmp_path / "out.json")
    assert (result.returncode, result.stderr) == (0, "")
    assert "Accuracy" in result.stdout
    assert len(evaluations(tmp_path / "out.json")) == 1


def test_the_program_fails_in_one_line(tmp_path, programs):
    (tmp_path / "m.npz").write_text("text")
    result = program(programs / "calibrant", tmp_path, "evaluate", tmp_path / "m.npz")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "m.npz: cannot be read as .npz" in result.stderr


def test_version_and_help():
    assert run("--version").output == f"calibrant {calibrant.__version__}\n"
    assert "evaluate" in run("--help").output
    help_text = run("evaluate", "--help").output
    for option in ("--report", "--json", "--bins", "--ignore-index", "--class-counts", "--stream", "--exact"):
        assert option in help_text


def test_asking_for_help_computes_nothing():
    code = "import sys, calibrant.cli; print(list(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("calibrant.predictions", "calibrant.reports", "matplotlib"):
        assert f"'{name}'" not in loaded


def test_an_ensemble_and_its_members(tmp_path, file, logits, labels):
    other = logits + np.random.default_rng(7).normal(size=logits.shape)
    np.savez(tmp_path / "other.npz", logits=other, labels=labels)
    files = file, tmp_path / "other.npz"
    pooled = pool(torch.from_numpy(np.stack([logits, other])))
    expected = evaluate(pooled, torch.from_numpy(labels), resamples=0)
    for stream in ("--exact", "--stream"):
        result = run_evaluate("--ensemble", *files, stream, "--json", tmp_path / "out.json")
        assert result.exit_code == 0
        ensemble, first, second = evaluations(tmp_path / "out.json")
        assert [each.name for each in (ensemble, first, second)] == ["ensemble of 2", "model", "other"]
        assert ensemble.nll == pytest.approx(expected.nll, abs=1e-12)
        assert ensemble.ece == pytest.approx(expected.ece, abs=1e-12)
        apart = 100 * (logits.argmax(1) != other.argmax(1))[labels != -100].mean()
        assert f"disagree in {apart:.2f} % of all pairs; mutual information 0." in result.stdout
    assert run_evaluate("--ensemble", file).exit_code == 2
    assert "two members" in run_evaluate("--ensemble", file).stderr
    assert "side by side" in run_evaluate("--ensemble", *files, "--jobs", "2").stderr
