"""Reliability diagrams and gaps of classes show the numbers they are given."""

from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from calibrant.evaluation import evaluate
from calibrant.reports import plots
from tests.reports.plots.drawn import NAN, bars, classes, legend, line, reliability, texts


def test_reliability_diagram_draws_its_bins(ax):
    plots.reliability_diagram(reliability(), ax)
    left, width = [0.25, 0.5, 0.75], [0.25] * 3
    zero = [0.0] * 3
    expected = {
        "Accuracy": (left, zero, width, [0.275, 0.525, 0.775]),
        "Gap": (left, [0.275, 0.525, 0.775], width, [0.1] * 3),
        "If calibrated": (left, [0.335, 0.585, 0.835], width, [0.09] * 3),
    }
    for label, columns in expected.items():
        np.testing.assert_allclose(bars(ax, label), np.array(columns).T)
    (error_bars,) = [c for c in ax.containers if isinstance(c, matplotlib.container.ErrorbarContainer)]
    ends = [segment.tolist() for segment in error_bars[2][0].get_segments()]
    x = [0.375, 0.625, 0.875]
    np.testing.assert_allclose(ends, [[[c, c - 0.15], [c, c - 0.08]] for c in x])
    assert [[0, 0], [1, 1]] in [line.get_xydata().tolist() for line in ax.lines]
    drawn = ["Accuracy", "Gap", "If calibrated"]
    assert legend(ax.figure.axes[-1]) == [*drawn, "Mean accuracy", "Mean confidence"]


def test_reliability_diagram_has_the_histogram_below_in_the_place_of_the_axes(ax):
    figure = ax.figure
    before = ax.get_position()
    plots.reliability_diagram(reliability(), ax)
    upper, below = figure.axes
    assert upper is ax
    heights = [bar.get_height() for bar in below.containers[0]]
    np.testing.assert_allclose(heights, [100 / 6, 200 / 6, 300 / 6])
    confidence = (0.375 + 2 * 0.625 + 3 * 0.875) / 6
    np.testing.assert_allclose(line(below, "Mean confidence")[0], confidence)
    np.testing.assert_allclose(line(below, "Mean accuracy")[0], confidence - 0.1)
    assert below.get_position().y1 < ax.get_position().y0
    np.testing.assert_allclose(below.get_position().y0, before.y0)
    np.testing.assert_allclose(ax.get_position().y1, before.y1)
    assert below.get_xlim() == ax.get_xlim() == (0, 1)
    assert (ax.get_xlabel(), below.get_xlabel()) == ("", "Confidence")


def test_reliability_diagram_divides_axes_placed_by_hand_too():
    figure = Figure()
    ax = figure.add_axes((0.2, 0.2, 0.6, 0.6))
    plots.reliability_diagram(reliability(), ax)
    below = figure.axes[1].get_position()
    np.testing.assert_allclose([below.x0, below.y0, below.x1], [0.2, 0.2, 0.8])
    assert below.y1 < ax.get_position().y0
    np.testing.assert_allclose(ax.get_position().y1, 0.8)


def test_reliability_diagram_alone_has_one_axes(ax):
    plots.reliability_diagram(reliability(), ax, histogram=False)
    assert ax.figure.axes == [ax]
    assert ax.get_xlabel() == "Confidence"


def test_a_binary_reliability_diagram_speaks_of_probabilities_and_frequencies_of_yes(ax):
    plots.reliability_diagram(reliability(), ax, binary=True)
    below = ax.figure.axes[-1]
    assert (ax.get_ylabel(), below.get_xlabel()) == ("Frequency of yes", "Probability of yes")
    drawn = ["Frequency of yes", "Gap", "If calibrated"]
    assert legend(below) == [*drawn, "Mean frequency of yes", "Mean probability of yes"]
    alone = plots.reliability_diagram(reliability(), histogram=False, binary=True)
    assert (alone.get_xlabel(), alone.get_ylabel()) == ("Probability of yes", "Frequency of yes")


@pytest.mark.parametrize(
    ("ece", "text"), [(None, "ECE 10.00 %"), (0.0, "ECE 0.00 %"), (0.0349, "ECE 3.49 %")]
)
def test_reliability_diagram_prints_the_error(ece, text, ax):
    assert texts(plots.reliability_diagram(reliability(), ax, ece=ece)) == [text]


def test_reliability_diagram_weighs_bins_by_their_elements(ax):
    data = replace(
        reliability(), accuracy=(None, 0.375, 0.625, 0.575)
    )  # right in all but the last: 3/6 · 0.3
    assert texts(plots.reliability_diagram(data, ax)) == ["ECE 15.00 %"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": (0.0, 1.0)}, "2 edges make 1 bins, but count has 4"),
        ({"accuracy": (None, 0.5)}, "4 bins, but accuracy has 2"),
        ({"edges": (0.0, 0.5, 0.25, 0.75, 1.0)}, "edges must not fall"),
        ({"edges": (0.0, NAN, 0.25, 0.75, 1.0)}, "edges must not be NaN, but 1 of 5"),
        ({"count": (0, 0, 0, 0)}, "count must be at least 0, and not everywhere 0"),
        ({"count": (1, 1, 1, -1)}, "count must be at least 0"),
        ({"count": (1, 1, 1, 1)}, "confidence of bin 0, which is not empty, must lie in .*got None"),
        ({"accuracy": (None, 0.5, NAN, 0.5)}, "accuracy of bin 2, .*got nan"),
        ({"confidence": (None, 0.5, 0.5, 1.5)}, "confidence of bin 3, .*got 1.5"),
    ],
)
def test_reliability_diagram_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        plots.reliability_diagram(replace(reliability(), **changes))
    assert pyplot.get_fignums() == []


def test_reliability_diagram_of_an_evaluation():
    logits = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    evaluation = evaluate(logits[:, 0], logits.argmax(1), binary=True, resamples=0)
    ax = plots.reliability_diagram(evaluation, histogram=False)
    bins = plots.reliability_diagram(evaluation.reliability, ece=evaluation.ece, histogram=False, binary=True)
    assert texts(ax) == texts(bins)
    assert ax.get_ylabel() == bins.get_ylabel() == "Frequency of yes"
    np.testing.assert_array_equal(bars(ax, "Gap"), bars(bins, "Gap"))
    assert texts(plots.reliability_diagram(evaluation, ece=0.25)) == ["ECE 25.00 %"]


def test_reliability_diagram_refuses_an_impossible_error():
    with pytest.raises(ValueError, match=r"ece must lie in \[0, 1\], got 7.5"):
        plots.reliability_diagram(reliability(), ece=7.5)


@pytest.mark.parametrize("number", [1, 10, 30])
def test_few_classes_are_all_named_in_order(number):
    ax = plots.class_gaps(classes(number))
    expected = 2 * np.arange(number) - number + 1
    below, above = (np.array([bar.get_width() for bar in bars]) for bars in ax.containers)
    np.testing.assert_allclose(below + above, expected / 10, atol=1e-6)
    assert (below <= 0).all()
    assert (above >= 0).all()
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"class {gap:g}" for gap in expected]
    assert texts(ax) == []


@pytest.mark.parametrize("number", [100, 1000])
def test_of_many_classes_the_worst_are_named(number):
    ax = plots.class_gaps(classes(number), named=2)
    assert list(ax.get_yticks()) == []
    below, above = (patch.get_data().values for patch in ax.patches)
    np.testing.assert_allclose(below + above, (2 * np.arange(number) - number + 1) / 10, atol=1e-5)
    often, rarely = texts(ax)
    most = number - 1
    digits = 1 if number == 100 else 0
    first, second = f"{most / 10:.{digits}f}", f"{(most - 2) / 10:.{digits}f}"
    assert often.splitlines() == [
        "Given too often:",
        f"class {most:g} +{first}",
        f"class {most - 2:g} +{second}",
    ]
    assert rarely.splitlines() == [
        "Given too rarely:",
        f"class -{most:g} −{first}",
        f"class -{most - 2:g} −{second}",
    ]


@pytest.mark.parametrize("number", [100, 1000])
def test_the_names_of_the_worst_lie_beside_the_bars(number):
    ax = plots.class_gaps(classes(number))
    ax.figure.draw_without_rendering()
    below, above = (patch.get_data().values for patch in ax.patches)
    for text in ax.texts:
        box = text.get_window_extent().transformed(ax.transData.inverted())
        beside = slice(max(0, int(box.y0)), int(box.y1) + 1)
        assert box.x0 > above[beside].max() or box.x1 < below[beside].min()


def test_names_that_fit_larger_axes_are_shown():
    ax = plots.class_gaps(classes(100), Figure(figsize=(3.4, 16)).subplots())
    assert len(ax.get_yticklabels()) == 100


def test_the_sign_of_a_gap_has_its_colour(ax):
    plots.class_gaps(classes(2), ax)
    shown = [bar for bar in ax.patches if bar.get_width()]
    assert [to_hex(bar.get_facecolor()) for bar in shown] == ["#0072b2", "#d55e00"]


def test_long_names_are_shortened_and_equal_classes_drawn(ax):
    figures = replace(classes(1)[0], name="great white shark, white shark, man-eater", gap=0.0)
    plots.class_gaps([figures], ax)
    assert ax.get_yticklabels()[0].get_text() == "great white shark…"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data must be a sequence of ClassFigures, got none"),
        ([replace(classes(1)[0], name="cat", gap=NAN)], "gap of class 'cat' must be finite, got nan"),
    ],
)
def test_class_gaps_refuses(data, message):
    with pytest.raises(ValueError, match=message):
        plots.class_gaps(data)
