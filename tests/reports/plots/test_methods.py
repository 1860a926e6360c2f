"""Plots that compare methods show means, deviations and intervals."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from calibrant.evaluation.ranks import rank_methods
from calibrant.reports import plots
from tests.reports.plots.drawn import FIGURES, INFINITY, NAN, legend, line


def test_accuracy_against_ece_draws_mean_and_deviation(ax):
    plots.accuracy_against_ece({"ce": [(0.8, 0.05), (0.9, 0.07)], "ls": [(0.7, 0.01)]}, ax)
    first, second = ax.containers
    np.testing.assert_allclose(first[0].get_xydata(), [[6, 85]])
    horizontal, vertical = (bar.get_segments()[0] for bar in first[2])
    np.testing.assert_allclose(horizontal, [[6 - 2**0.5, 85], [6 + 2**0.5, 85]])
    np.testing.assert_allclose(vertical, [[6, 85 - 50**0.5], [6, 85 + 50**0.5]])
    np.testing.assert_allclose(second[0].get_xydata(), [[1, 70]])
    assert second[2] == ()
    assert legend(ax) == ["ce", "ls"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("ECE (%)", "Accuracy (%)")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data must be a mapping from method .*got none"),
        ({"ce": []}, r"data\['ce'\] must have shape \(seeds, 2\), got \(0,\)"),
        ({"ce": [(0.9, 0.1, 0.2)]}, r"data\['ce'\] must hold \(accuracy, ece\) .* rows of 3 numbers"),
        ({"ce": [(0.9, NAN)]}, r"data\['ce'\] must not be NaN, but 1 of 2"),
        ({"ce": [(0.9, 0.1), (0.9,)]}, r"data\['ce'\] must have shape \(seeds, 2\), and hold numbers"),
    ],
)
def test_accuracy_against_ece_refuses(data, message):
    with pytest.raises(ValueError, match=message):
        plots.accuracy_against_ece(data)


def test_methods_side_by_side_draws_means_and_intervals(ax):
    plots.methods_side_by_side(FIGURES, ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ce", "$ls$"]
    points = {line.get_label(): line.get_xdata() for line in ax.lines if line.get_label() in FIGURES}
    assert points["before"] == pytest.approx([8, 4])
    assert points["after"] == pytest.approx([3])
    assert [6, 10] in [pytest.approx(line.get_xdata()) for line in ax.lines]
    assert ax.get_xlabel() == "ECE (%), mean and 95 % interval"
    with pytest.raises(ValueError, match="unknown metric 'speed'"):
        plots.methods_side_by_side(FIGURES, ax, metric="speed")


def test_training_curves_draw_the_mean_and_a_band(ax):
    plots.training_curves({"ce": torch.tensor([0.3, 0.2, 0.1]), "ls": [[0.1, 0.2], [0.3, 0.2]]}, ax)
    np.testing.assert_allclose(line(ax, "ce"), [[1, 2, 3], [30, 20, 10]], rtol=1e-6)
    np.testing.assert_allclose(line(ax, "ls"), [[1, 2], [20, 20]])
    (band,) = ax.collections
    low, high = band.get_paths()[0].get_extents().intervaly
    np.testing.assert_allclose([low, high], [20 - 200**0.5, 20 + 200**0.5])
    assert ax.get_ylabel() == "ECE (%)"
    assert ax.get_legend().get_title().get_text() == "mean over seeds, with a band of one standard deviation"


@pytest.mark.parametrize(
    ("metric", "label", "value"), [("accuracy", "Accuracy (%)", 50), ("nll", "NLL", 0.5)]
)
def test_training_curves_have_the_unit_of_the_metric(metric, label, value, ax):
    plots.training_curves({"ce": [0.5]}, ax, metric=metric)
    assert ax.get_legend().get_title().get_text() == ""  # one seed, no band
    assert ax.get_ylabel() == label
    assert line(ax, "ce")[1].tolist() == [value]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            {"ce": [0.1]},
            {"metric": "ece2"},
            "unknown metric 'ece2' [(]did you mean 'ece'[?][)]; known: accuracy, ",
        ),
        ({}, {}, "got none"),
        (
            {"ce": []},
            {},
            r"data\['ce'\] must have shape \(epochs,\) or \(seeds, epochs\), with nothing empty",
        ),
        ({"ce": [[[0.1]]]}, {}, r"\(epochs,\) or \(seeds, epochs\), got \(1, 1, 1\)"),
        ({"ce": [0.1, INFINITY]}, {}, "must be finite, but 1 of 2 numbers are infinite"),
        ({"ce": ["many"]}, {}, "hold numbers"),
    ],
)
def test_training_curves_refuse(data, options, message):
    with pytest.raises(ValueError, match=message):
        plots.training_curves(data, **options)


def test_accuracy_against_another_error_has_its_label(ax):
    plots.accuracy_against_ece({"ce": [(0.8, 0.05)]}, ax, metric="classwise_ece")
    assert ax.get_xlabel() == "Class-wise ECE (%)"
    with pytest.raises(ValueError, match="unknown metric 'cece'"):
        plots.accuracy_against_ece({"ce": [(0.8, 0.05)]}, metric="cece")


def test_severity_curves_draw_means_over_seeds(ax):
    plots.severity_curves({"ce": [[0.1, 0.2, 0.3], [0.3, 0.2, 0.5]]}, ax, severities=["0", "1", "2"])
    np.testing.assert_allclose(line(ax, "ce"), [[0, 1, 2], [20, 20, 40]])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2"]
    assert ax.get_xlabel() == "Severity"
    with pytest.raises(ValueError, match=r"data\['ce'\] must have 3 severities, got 2 numbers"):
        plots.severity_curves({"ce": [0.1, 0.2]}, severities=["0", "1", "2"])


def test_mean_ranks_say_what_their_bars_mean(ax):
    alike = {name: {"ce": [0.1 + 0.1 * number], "ls": [0.2]} for number, name in enumerate("abc")}
    plots.mean_ranks(rank_methods(alike, higher_is_better=False), ax)
    assert legend(ax) == ["no significant difference"]
    apart = {f"{number}": {"ce": [0.1], "ls": [0.2]} for number in range(12)}
    plots.mean_ranks(rank_methods(apart, higher_is_better=False), other := Figure().subplots())
    assert other.get_legend() is None
