"""Figures of runs show the numbers of their logs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from calibrant.reports.run_figures import RunRecord, drawings_of_formulas, drawings_of_runs, left_out
from tests.reports.plots.drawn import legend

EPOCHS, BINS = 3, 15


def record(label="ce", seed=0, *, test=False, gamma=False):
    random = np.random.default_rng(seed)
    parts = ("validation", "test") if test else ("validation",)
    history = [
        {
            f"{part}_{metric}": float(random.uniform())
            for part in parts
            for metric in ("accuracy", "nll", "ece", "adaptive_ece")
        }
        for _ in range(EPOCHS)
    ]
    bins = {}
    for name in ("validation", "train_top", "train_true", "train_own"):
        count = torch.from_numpy(random.integers(0, 3, (EPOCHS, BINS))).double()
        bins |= {
            f"{name}_count": count,
            f"{name}_confidence": torch.from_numpy(random.uniform(size=(EPOCHS, BINS))),
        }
        bins[f"{name}_edges"] = torch.from_numpy(np.sort(random.uniform(size=(EPOCHS, BINS + 1))))
    bins["validation_accuracy"] = torch.from_numpy(random.uniform(size=(EPOCHS, BINS)))
    learned = {"gamma": torch.from_numpy(random.uniform(size=(EPOCHS, BINS)))} if gamma else {}
    logits = torch.from_numpy(random.normal(size=(20, 4)))
    return RunRecord(label, f"{label}-seed{seed}", history, bins, learned, (logits, torch.arange(20) % 4))


def drawn(name, runs, **options):
    (draw,) = [draw for found, draw in drawings_of_runs(runs, **options) if found == name]
    return draw()


def line(ax, number):
    return np.asarray(ax.lines[number].get_ydata(), dtype=float)


def test_curves_are_the_log_and_can_be_smoothed():
    run = record()
    ece = [row["validation_ece"] for row in run.history]
    for smooth in (0.0, 0.5):
        figure = drawn("curves-validation", [run], smooth=smooth)
        (ax,) = [ax for ax in figure.axes if ax.get_ylabel() == "ECE (%)"]
        second = smooth * ece[0] + (1 - smooth) * ece[1]
        np.testing.assert_allclose(line(ax, 0)[:2], [100 * ece[0], 100 * second])


def test_curves_have_one_legend():
    figure = drawn("curves-validation", [record(), record("ls", 1), record("ls", 2)])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ce", "ls"]
    assert legend.get_title().get_text() == "mean over seeds, with a band of one standard deviation"
    assert drawn("curves-validation", [record(), record("ls", 1)]).legends[0].get_title().get_text() == ""
    assert not any(ax.get_legend() for ax in figure.axes)


def test_learned_quantities_name_loss_and_seed():
    figure = drawn("learned-gamma-ls-seed3", [replace(record("ls", 3, gamma=True), seed=3)])
    assert figure.axes[0].get_title() == "ls, seed 3"


def test_test_curves_are_drawn_if_every_run_has_them_and_say_so():
    names = [name for name, _ in drawings_of_runs([record(test=True), record("ls", 1)])]
    assert "curves-test" not in names
    figure = drawn("curves-test", [record(test=True)])
    assert [ax.get_title() for ax in figure.axes] == [
        *("Accuracy, test data", "NLL, test data", "ECE, test data", "Adaptive ECE, test data")
    ]


def test_gaps_exponents_and_edges_are_those_of_the_bin():
    run = record(gamma=True)
    gap, exponent, edges = drawn("bins", [run], bins=[4]).axes
    expected = 100 * (run.bins["validation_confidence"] - run.bins["validation_accuracy"])[:, 4]
    expected[run.bins["validation_count"][:, 4] == 0] = torch.nan
    np.testing.assert_allclose(line(gap, -1), expected)
    np.testing.assert_allclose(line(exponent, 0), run.learned["gamma"][:, 4])
    for number in (0, 1):
        np.testing.assert_allclose(line(edges, number), run.bins["validation_edges"][:, 4 + number])


def test_other_numbers_of_exponents_have_no_panel_which_is_said():
    run = replace(record(), learned={"gamma": torch.ones(EPOCHS, 20)})
    assert len(drawn("bins", [run], bins=[4]).axes) == 2
    (line,) = left_out([run, record("ls", gamma=True)])
    assert line == (
        "bins: no γ of ce-seed0, whose loss has 20 values of it for 15 bins; "
        "learned-gamma-ce-seed0 shows them"
    )


def test_metrics_that_some_logs_lack_are_named_with_their_runs():
    old = record("old")
    old = replace(old, history=[{k: v for k, v in row.items() if "adaptive" not in k} for row in old.history])
    new = record("new", 1, test=True)
    assert len(drawn("curves-validation", [old, new]).axes) == 3
    assert left_out([old, new]) == [
        "curves-validation: no Adaptive ECE, which is not in the log of old-seed0",
        "curves-test: no Accuracy, NLL, ECE, Adaptive ECE, which are not in the log of old-seed0",
    ]
    assert left_out([old]) == left_out([new]) == []
    bare = replace(record(), bins={})
    assert left_out([bare, record("ls", 1)]) == ["bins, confidences: without ce-seed0, which has no bins"]


def test_binary_runs_have_no_maximum_logits_which_is_said():
    binary, other = replace(record("bce"), binary=True), record("ce", 1)
    sentence = (
        "maximum-logits: without bce-seed0; a binary run has one logit for each decision, so none is the "
        "largest"
    )
    assert left_out([binary]) == left_out([binary, other]) == [sentence]
    names = [name for name, _ in drawings_of_runs([binary])]
    assert "maximum-logits" not in names
    assert "lower-probability" in names
    assert legend(drawn("maximum-logits", [binary, other]).axes[0]) == ["ce"]
    assert left_out([replace(binary, test=None)]) == []  # no run without predictions has this figure


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("confidences", ["train_true", "validation"]),
        ("confidences-own-bins", ["train_own", "validation"]),
        ("confidences-true-and-top", ["train_true", "train_top"]),
    ],
)
def test_confidences_are_those_of_the_bin(name, expected):
    run = record()
    ax = drawn(name, [run], bins=[2]).axes[0]
    for number, part in enumerate(expected):
        values = run.bins[f"{part}_confidence"][:, 2].clone()
        values[run.bins[f"{part}_count"][:, 2] == 0] = torch.nan
        np.testing.assert_allclose(line(ax, number), values)


def test_formulas_are_drawn():
    assert all(draw().axes for _, draw in drawings_of_formulas())
