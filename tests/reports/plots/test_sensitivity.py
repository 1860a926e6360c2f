"""The plot of a metric against an option shows every value at its place."""

import numpy as np
import pytest

from calibrant.evaluation.comparison import MeanFigure
from calibrant.reports import plots
from tests.reports.plots.drawn import SENSITIVITY, legend


def ticks(ax):
    return [text.get_text() for text in ax.get_xticklabels()]


def alike(*values):
    return dict.fromkeys(values, MeanFigure(0.1, None, None))


def test_numbers_are_in_order_with_deviations_and_the_chosen_one_is_marked(ax):
    plots.sensitivity({"": SENSITIVITY}, ax, option="margin", chosen=("", 6))
    (container,) = ax.containers
    np.testing.assert_allclose(container[0].get_xydata(), [[4, 4], [6, 1], [10, 2]])
    (bars,) = container[2]
    np.testing.assert_allclose(bars.get_segments()[2], [[10, 0], [10, 4]])
    np.testing.assert_allclose(ax.lines[-1].get_xydata(), [[6, 1]])
    assert ticks(ax) == ["4", "6", "10"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()) == ("margin", "ECE (%)", "linear")
    assert ax.get_legend() is None


def test_one_seed_has_no_bars(ax):
    plots.sensitivity({"": alike(1, 2)}, ax, metric="nll", after=True)
    assert ax.containers[0][2] == ()
    assert ax.get_ylabel() == "NLL, after temperature scaling"


def test_a_wide_range_is_logarithmic(ax):
    plots.sensitivity({"": alike(0.001, 0.1)}, ax)
    assert ax.get_xscale() == "log"
    assert ticks(ax) == ["0.001", "0.1"]
    assert list(ax.get_xticks(minor=True)) == []


def test_other_values_are_spaced_evenly_in_their_order(ax):
    plots.sensitivity({"": alike("phr", "p2", "$_{")}, ax)
    np.testing.assert_allclose(ax.lines[0].get_xydata()[:, 0], [0, 1, 2])
    assert ticks(ax) == ["phr", "p2", "$_{"]
    ax.figure.draw_without_rendering()  # a name is no formula


def test_lines_have_a_legend_if_wanted(ax):
    lines = {"rate=1": alike(4, 6), "rate=2": alike(6)}
    assert legend(plots.sensitivity(lines, ax)) == ["rate=1", "rate=2"]
    assert plots.sensitivity(lines, legend=False).get_legend() is None
    assert plots.sensitivity({"": alike(*range(20))}).get_xticks().size < 20


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({}, {}, "got none"),
        ({"": {}}, {}, "with values for '', got none"),
        ({"": SENSITIVITY}, {"metric": "eec"}, "unknown metric 'eec'"),
        ({"": SENSITIVITY}, {"chosen": ("", 5)}, "chosen must be a line and one of its values"),
    ],
)
def test_refuses(data, options, message):
    with pytest.raises(ValueError, match=message):
        plots.sensitivity(data, **options)
