"""The command conformal: same results as in Python, one-line errors."""

import json
import shutil
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch

from calibrant.calibrators import Temperature, save_calibrator
from calibrant.conformal import APS, LAC, RAPS, evaluate_sets, expected_coverage, load_conformal
from calibrant.predictions import PredictionFile
from tests.cli.commands import fail_at_once, printed, succeed


def data(seed, size=400):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(size, 3, generator=generator)
    labels = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    labels[5] = -100
    return 3 * logits, labels


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(["held-out", "test"]):
        logits, labels = data(seed)
        np.savez(
            f"{name}.npz", logits=logits.numpy(), labels=labels.numpy(), class_names=["cat", "dog", "owl"]
        )


def test_the_same_figures_as_in_python():
    output = printed(
        *("conformal", "held-out.npz", "--test", "test.npz", "--method", "raps[weight=0.05,size=2]"),
        *("--alpha", 0.2, "--output", "sets.safetensors", "--json", "figures.json"),
    )
    sets = RAPS(alpha=0.2, weight=0.05, size=2).fit(*data(0))
    logits, labels = data(1)
    expected = evaluate_sets(sets(logits), labels)
    written = json.loads(Path("figures.json").read_text())
    assert written["coverage"] == expected.coverage
    assert written["size"] == expected.size
    assert written["options"]["weight"] == 0.05
    assert [each["coverage"] for each in written["classes"]] == [each.coverage for each in expected.classes]
    assert [each["name"] for each in written["classes"]] == ["cat", "dog", "owl"]
    assert f"{100 * expected.coverage:.2f} %" in output
    assert "raps, fitted to 399 elements of held-out.npz" in output
    for name in ("all classes", "cat", "dog", "owl"):
        assert name in output
    loaded = load_conformal("sets.safetensors")
    assert torch.equal(loaded(logits), sets(logits))
    assert loaded.class_names == ("cat", "dog", "owl")


def test_sets_that_are_evaluated_on_the_data_of_their_fit_are_told():
    flattered = "fitted to these same data, so the figures flatter them"
    shutil.copy("held-out.npz", "copy.npz")
    names = ["held-out.npz", "copy.npz", "test.npz"]
    told = [
        flattered in " ".join(printed("conformal", "held-out.npz", "--test", name).split()) for name in names
    ]
    assert told == [True, True, False]


def test_a_calibrator_comes_first():
    temperature = Temperature().fit(*data(2))
    save_calibrator(temperature, "temperature.safetensors")
    printed(
        *("conformal", "held-out.npz", "--test", "test.npz", "--calibrator", "temperature.safetensors"),
        *("--method", "lac[class_conditional=true]", "--json", "figures.json"),
    )
    logits, labels = data(0)
    sets = LAC(class_conditional=True).fit(temperature(logits), labels)
    logits, labels = data(1)
    found = json.loads(Path("figures.json").read_text())
    assert found["coverage"] == evaluate_sets(sets(temperature(logits)), labels).coverage


def test_a_calibrator_of_other_classes_is_refused():
    for names, words in ((["dog", "cat", "owl"], "in another order"), (["cat", "dog", "emu"], "owl")):
        save_calibrator(Temperature().fit(*data(2)), "other.safetensors", class_names=names)
        line = fail_at_once("conformal", "held-out.npz", "--calibrator", "other.safetensors")
        assert "held-out.npz: has other classes than other.safetensors" in line
        assert words in line


def test_a_calibrator_of_decisions_is_refused():
    logits, labels = data(2)
    target = (labels == 0).long()
    save_calibrator(Temperature().fit(logits[:, 0], target, binary=True), "binary.safetensors")
    np.savez("two.npz", logits=logits[:, :2].numpy(), labels=target.numpy())
    line = fail_at_once("conformal", "two.npz", "--calibrator", "binary.safetensors")
    assert "binary.safetensors was fitted with --binary; conformal sets need a calibrator of classes" in line


def test_single_scores_are_refused_with_an_advice_that_works():
    logits, labels = data(0)
    np.savez("single.npz", logits=logits[:, 0].numpy(), labels=(labels > 0).long().numpy())
    line = fail_at_once("conformal", "single.npz")
    assert "pass --binary to evaluate or calibrate" in line
    assert "elsewhere two scores are needed: (0, logit) or (1 - p, p)" in line


def test_probabilities_of_labels_are_refused_with_an_advice_that_works():
    logits, labels = data(0)
    np.savez("labels.npz", probabilities=logits.sigmoid().numpy(), labels=labels.numpy())
    line = fail_at_once("conformal", "labels.npz")
    assert "a label of its own, pass --binary to evaluate or calibrate, in Python binary=True" in line


def test_the_printed_range_is_that_of_one_fit():
    low, high = (100 * end for end in expected_coverage(399, 0.1))
    assert (
        "held-out.npz. At least 90 % of the sets of new elements hold the true class, on average over many "
        "fits; a single fit reaches "
        f"{low:.1f} to {high:.1f} % in 95 % of cases" in printed("conformal", "held-out.npz")
    )


@pytest.mark.parametrize("options", ["", "[class_conditional=true]"])
def test_images_have_no_range_and_no_intervals(options):
    """Pixels are not independent: a range that counts them is too narrow, and "at least" does not hold."""
    for seed, name in enumerate(["images", "other"]):
        logits, labels = data(seed)
        images = logits.view(4, 10, 10, 3).permute(0, 3, 1, 2)
        np.savez(f"{name}.npz", logits=images.numpy(), labels=labels.view(4, 10, 10).numpy())
    output = printed("conformal", "images.npz", "--test", "other.npz", "--method", f"lac{options}")
    assert "About 90 % of the sets of new elements" in output
    assert (
        "a single fit to few images or texts (here 4) may reach far more or less, because the pixels of an "
        "image or the tokens of a text are not independent" in output
    )
    assert "No intervals: the pixels of an image or the tokens of a text are not independent." in output
    assert "at least" not in output.lower()
    assert "95 %" not in output
    assert "[" not in output


def test_thresholds_of_each_class_promise_the_coverage_of_each_class():
    output = printed("conformal", "held-out.npz", "--method", "lac[class_conditional=true]")
    assert (
        "At least 90 % of the sets of new elements of each class hold the true class, on average over"
        in output
    )
    assert "a single fit" not in output  # the range is not that of all elements together


def test_a_warning_names_the_classes_that_are_in_every_set():
    logits, labels = data(0)
    labels[labels == 1] = 0
    np.savez("few.npz", logits=logits.numpy(), labels=labels.numpy(), class_names=["cat", "dog", "owl"])
    result = succeed("conformal", "few.npz", "--method", "lac[class_conditional=true]")
    assert "1 of 3 classes are in every set (dog); at least 9 elements of each class" in result.stderr


def test_the_help_says_what_reads_the_sets():
    assert "load_conformal" in printed("conformal", "--help")


def test_files_are_never_loaded_as_a_whole(monkeypatch):
    monkeypatch.setattr(PredictionFile, "load", None)
    monkeypatch.setattr(PredictionFile, "batches", partialmethod(PredictionFile.batches, chunk=30))
    save_calibrator(Temperature().fit(*data(2)), "temperature.safetensors")
    printed(
        *("conformal", "held-out.npz", "--test", "test.npz", "--calibrator", "temperature.safetensors"),
        *("--method", "aps", "--output", "sets.safetensors"),
    )
    logits, labels = data(0)
    expected = APS().fit(Temperature().fit(*data(2))(logits), labels)
    assert torch.equal(load_conformal("sets.safetensors").threshold, expected.threshold)


def test_without_test_data_the_sets_are_only_fitted():
    output = printed("conformal", "held-out.npz", "--output", "sets.safetensors")
    assert "lac, fitted to 399 elements" in output
    assert "mean size" not in output
    assert torch.equal(load_conformal("sets.safetensors").threshold, LAC().fit(*data(0)).threshold)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "asp"], "unknown method 'asp' (did you mean 'aps'?)"),
        (["--method", "lac[weight=1]"], "weight"),
        (["--method", "lac[alpha=0.2]"], "--alpha"),
        (["--method", "raps[size=0]"], "size must"),
        (["--json", "figures.json"], "--test FILE"),
        (["--output", "sets.pt"], "ends in .safetensors"),
        (["--test", "none.npz"], "none.npz"),
        (["--calibrator", "held-out.npz"], "held-out.npz"),
        (["--test", "test.npz", "--json", "test.npz"], "one of the files to read"),
        (["--test", "test.npz", "--json", "figures.csv"], "figures.csv: expected a name that ends in .json"),
    ],
)
def test_one_line_errors(arguments, words):
    assert words in fail_at_once("conformal", "held-out.npz", *arguments)


def test_other_classes_are_refused():
    logits, labels = data(1)
    np.savez("two.npz", logits=logits[:, :2].numpy(), labels=(labels % 2).numpy())
    assert "has 2 classes, but held-out.npz has 3" in fail_at_once(
        "conformal", "held-out.npz", "--test", "two.npz"
    )
