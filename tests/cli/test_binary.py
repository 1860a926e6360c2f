"""The commands evaluate, calibrate and apply with --binary: single logits and several labels."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from calibrant.calibrators import Temperature, create_calibrator, load_calibrator
from calibrant.evaluation import Evaluation, evaluate
from calibrant.predictions import open_predictions

from .commands import fail, fail_at_once, printed, succeed

ROWS, LABELS = 120, 3


def decisions(*shape: int) -> tuple[Tensor, Tensor]:
    """Logits that are three times too large."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    target = (torch.rand(*shape, generator=generator, dtype=torch.float64) < logits.sigmoid()).long()
    return 3 * logits, target


def save(path: Path, logits: Tensor, target: Tensor, kind: str = "logits", **more: object) -> Path:
    np.savez(path, **{kind: logits.numpy(), "labels": target.numpy(), **more})
    return path


def evaluated(*arguments: object) -> Evaluation:
    printed("evaluate", "--resamples", 0, "--json", "e.json", "--binary", *arguments)
    (plain,) = json.loads(Path("e.json").read_text())
    return Evaluation.from_dict(plain)


def assert_same(found: Evaluation, expected: Evaluation) -> None:
    for name, value in expected.metrics.items():
        close = value if value is None else pytest.approx(value, rel=1e-6, abs=1e-9)
        assert found.metrics[name] == close, name


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, LABELS)])
def test_evaluate_is_that_of_python(shape: tuple[int, ...]) -> None:
    logits, target = decisions(*shape)
    target.view(-1)[7] = -100
    expected = evaluate(logits, target, binary=True, resamples=0)
    found = evaluated(save(Path("p.npz"), logits, target))
    assert_same(found, expected)
    assert len(found.labels) == (LABELS if shape[1:] == (LABELS,) else 0)
    assert_same(evaluated(save(Path("q.npz"), logits.sigmoid(), target, "probabilities")), expected)
    streamed = evaluated("--stream", "p.npz")
    assert streamed.ece == pytest.approx(expected.ece, abs=1e-12)
    assert streamed.macro.get("ece") == pytest.approx(expected.macro.get("ece"), abs=1e-12)


@pytest.mark.parametrize("column", ["logit", "logit_spam", "probability"])
def test_tables_of_single_logits(column: str) -> None:
    logits, target = decisions(50)
    scores = logits.sigmoid() if column == "probability" else logits
    rows = [f"{score!r},{label}" for score, label in zip(scores.tolist(), target.tolist(), strict=True)]
    Path("t.csv").write_text("\n".join([f"{column},label", *rows]))
    found = evaluated("t.csv")
    assert_same(found, evaluate(logits, target, binary=True, resamples=0))
    names = ["not spam", "spam"] if column == "logit_spam" else ["no", "yes"]
    assert [each.name for each in found.classes] == names
    assert "pass --binary" in fail("evaluate", "t.csv")


@pytest.mark.parametrize("method", ["temperature", "platt", "isotonic", "beta"])
def test_several_labels_are_calibrated_reported_and_applied(method: str) -> None:
    logits, target = decisions(ROWS, LABELS)
    file = save(Path("held-out.npz"), logits, target, class_names=np.array(["cat", "dog", "bird"]))
    report = ["--report", "r.html"] if method == "temperature" else []  # to save time
    output = printed(
        *("calibrate", file, "--binary", "--method", method, "--resamples", 0, *report),
        *("--output", "c.safetensors", "--json", "e.json"),
    )
    assert f"{method} of each label, fitted to held-out.npz" in output
    calibrator = load_calibrator("c.safetensors")
    assert calibrator.class_names == ("cat", "dog", "bird")
    expected = create_calibrator(method).fit(logits, target, binary=True)(logits)
    assert torch.equal(calibrator(logits), expected)
    before, after = map(Evaluation.from_dict, json.loads(Path("e.json").read_text()))
    assert after.ece < before.ece
    assert [label.name for label in after.labels] == ["cat", "dog", "bird"]
    printed("apply", "c.safetensors", file, "--output", "calibrated.npz")
    assert torch.equal(open_predictions("calibrated.npz", binary=True).load()[0], expected)
    if method == "temperature":  # how figures are computed does not depend on the method
        assert_same(after, evaluate(expected, target, binary=True, resamples=0))
        assert_same(evaluated("calibrated.npz"), after)
        for text in ("3 labels", "probability of yes", "bird"):
            assert text in Path("r.html").read_text()


@pytest.mark.parametrize(
    ("method", "names", "label"),
    [
        ("temperature", ["cat", "dog", "bird"], "dog"),
        ("temperature", None, "1"),
        ("auto", ["cat", "dog", "bird"], "dog"),
    ],
)
def test_a_label_with_one_answer_is_named(method: str, names: list[str] | None, label: str) -> None:
    logits, target = decisions(ROWS, LABELS)
    target[:, 1] = 0
    told = "the same answer in all of these data, so the logits are left as they are"
    more = {} if names is None else {"class_names": np.array(names)}
    file = save(Path("held-out.npz"), logits, target, **more)
    result = succeed("calibrate", file, "--binary", "--method", method, "--resamples", 0)
    assert f"held-out.npz: label {label}: {told}" in result.stderr


def test_a_single_logit_is_calibrated_reported_and_applied() -> None:
    logits, target = decisions(ROWS)
    file = save(Path("held-out.npz"), logits, target)
    arguments = ("--binary", "--resamples", 0, "--output", "c.safetensors", "--report", "r.html")
    temperature = float(Temperature().fit(logits, target, binary=True).labels[0].temperature)
    assert f"temperature (T = {temperature:.4g})" in printed("calibrate", file, *arguments)
    assert "probability of yes" in Path("r.html").read_text()
    printed("apply", "c.safetensors", file, "--output", "calibrated.npz")
    assert evaluated("calibrated.npz").ece < evaluated(file).ece
    assert "auto" not in printed("calibrate", file, "--binary", "--method", "auto", "--resamples", 0)


def test_wrong_input_gets_one_line() -> None:
    logits, target = decisions(20, 2)
    single = save(Path("single.npz"), logits[:, 0], target[:, 0])
    column = save(Path("column.npz"), logits[:, :1], target[:, :1])
    several = save(Path("several.npz"), logits, target)
    classes = save(Path("classes.npz"), logits, target[:, 0])
    for file in (single, column, several):
        assert "if each score is a yes-or-no decision of its own, pass --binary" in fail_at_once(
            "evaluate", file
        )
    assert "labels have shape (20,); expected (20, 2), that of the logits" in fail_at_once(
        "evaluate", "--binary", classes
    )
    wrong = save(Path("wrong.npz"), logits, target + 1)
    assert "has label 2 at row" in fail("evaluate", "--binary", wrong)
    assert "expected 0 to 1" in fail("evaluate", "--binary", wrong)
    printed("calibrate", several, "--binary", "--resamples", 0, "--output", "c.safetensors")
    assert "has 1 labels, but c.safetensors was fitted to 2" in fail(
        "apply", "c.safetensors", single, "--output", "o.npz"
    )
    Path("two.csv").write_text("label,logit_cat,logit_dog\n0,1,2\n")
    assert "--binary, and calibrators fitted with it, need a single score; leave out" in fail(
        "apply", "c.safetensors", "two.csv", "--output", "o.npz"
    )


SWAPPED = "scores or labels may be swapped"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("classes", [1, 2])
@pytest.mark.parametrize("rare", [False, True])
def test_scores_or_labels_that_are_swapped_are_told_once(classes: int, stream: bool, rare: bool) -> None:
    """A table with the probability of ham, and 1 for spam: only the name of the column said so.

    If ham is rare, it is never predicted, and only its mean probabilities show it.
    """
    logits, target = decisions(ROWS)
    ham = (-logits / 10 - 2 if rare else -logits).sigmoid().tolist()
    for labels, told in ((target, True), (1 - target, False)):
        rows = [f"{p},{1 - p},{label}" for p, label in zip(ham, labels.tolist(), strict=True)]
        lines = ["probability_ham,probability_spam,label", *rows]
        if classes == 1:
            lines = [",".join(line.split(",")[::2]) for line in lines]
        else:
            lines = [",".join(line.split(",")[order] for order in (1, 0, 2)) for line in lines]
        Path("t.csv").write_text("\n".join(lines))
        command = ["evaluate", "--stream"] if stream else ["calibrate"]
        result = succeed(*command, *["--binary"] * (classes == 1), "t.csv", "--resamples", 0)
        assert (result.stdout + result.stderr).count(SWAPPED) == told
        if told:
            other = "not ham" if classes == 1 else "spam"
            said = f"t.csv: elements labelled '{other}' have a higher mean probability of 'ham' than those "
            assert (f"{said}labelled 'ham'" in result.stderr) == rare


@pytest.mark.parametrize(
    ("binary", "message"),
    [
        (True, "elements labelled 'no' have a higher mean probability of 'yes' than those labelled 'yes'"),
        (
            False,
            "labelled 'class 0' have a higher mean probability of 'class 1' than those labelled 'class 1'",
        ),
    ],
)
def test_swapped_scores_in_a_file_without_names_are_told(binary: bool, message: str) -> None:
    logits, target = decisions(ROWS)
    logits = logits / 10 + 2  # so that no is always predicted
    scores = -logits if binary else torch.stack([logits, 0 * logits], 1)
    file = save(Path("p.npz"), scores, target)
    options = ["--binary"] * binary + ["--resamples", 0]
    assert message in succeed("evaluate", *options, file).stderr
    assert SWAPPED not in succeed("evaluate", *options, file, "--ignore-index", 0).stderr


def test_equal_scores_are_not_taken_for_swapped() -> None:
    """Their means over the elements of each label differ by rounding."""
    _, target = decisions(2000)
    file = save(Path("p.npz"), torch.full((2000,), -2.4, dtype=torch.float64), target)
    assert SWAPPED not in succeed("evaluate", "--binary", "--resamples", 0, file).stderr
