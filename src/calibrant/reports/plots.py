"""Pictures for papers and reports, each a function from data and axes to the axes it has drawn on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from typing import Any, Literal

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgba
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant.evaluation import ClassFigures, Reliability
from calibrant.evaluation.comparison import MeanFigure
from calibrant.losses import PENALTIES, Penalty
from calibrant.metrics.catalogue import METRICS
from calibrant.metrics.ood import detection

Array = NDArray[np.float64]
Numbers = ArrayLike | Tensor | Sequence[Tensor]

# Sizes are given to every artist, in points at the width of a paper's column: setting rcParams would
# change the caller's other pictures too.
_WIDTH = 3.4
_SMALL, _MEDIUM, _LARGE = 7, 8, 9

# Okabe and Ito's colours, which colour-blind readers tell apart, less the yellow that white paper swallows.
_BLUE, _VERMILLION, _GREEN, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
_COLOURS = (_BLUE, _VERMILLION, _GREEN, _ORANGE, "#56B4E9", "#CC79A7", "#000000")
_GREY = "#777777"

# Lengths without a divisor in common with that of the colours: combinations repeat as late as they can.
_LINES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
_MARKERS = "osD^vPX<>"

_NAMED_ROW = 8.0  # points of height that a name needs
_LONGEST_NAME = 18  # letters, beyond which names would leave too little of a column's width to the bars
_CROWD = 50  # lines, beyond which a vector file grows large and nobody picks out one of them
_BINS_COMPARED = 4  # as many pairs of lines as can be told apart


# ------------------------------------------------------------------------------------------ calibration


def reliability_diagram(
    data: Reliability,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    ece: float | None = None,
    histogram: bool = True,
) -> Axes:
    """Accuracy per bin of confidence, and how far from the confidence it is.

    Bars are the accuracy with its interval, hatched bars the gap to the mean confidence; dotted boxes are
    where the accuracy of a calibrated model would fall.

    Args:
        data: of an `Evaluation`.
        ax: where to draw; None for a new figure.
        title: above the diagram.
        ece: the calibration error to print; None to compute it from the bins.
        histogram: whether to give the lower part of the axes to a histogram of the confidence, which
            becomes the last axes of the figure.

    >>> from matplotlib.figure import Figure
    >>> intervals = (None, (0.1, 0.9)), (None, (0.25, 1.0))
    >>> bins = Reliability((0.0, 0.5, 1.0), (0, 4), (None, 0.8), (None, 0.5), *intervals)
    >>> ax = reliability_diagram(bins, Figure().subplots(), histogram=False)
    >>> ax.texts[0].get_text()
    'ECE 30.00 %'
    """
    edges, count = _check_reliability(data)
    filled = np.flatnonzero(count)
    width, centre = np.diff(edges)[filled], ((edges[:-1] + edges[1:]) / 2)[filled]
    confidence = np.array([data.confidence[b] for b in filled], dtype=np.float64)
    accuracy = np.array([data.accuracy[b] for b in filled], dtype=np.float64)
    share = count[filled] / count.sum()
    if ece is None:
        ece = float(share @ np.abs(accuracy - confidence))
    if not 0 <= ece <= 1:
        raise ValueError(f"ece must lie in [0, 1], got {ece}")

    ax = _axes(ax, 4.1 if histogram else 3.2)
    ax.bar(
        centre,
        accuracy,
        width,
        facecolor=to_rgba(_BLUE, 0.35),
        edgecolor=_BLUE,
        linewidth=0.6,
        label="Accuracy",
    )
    ax.bar(
        centre,
        confidence - accuracy,
        width,
        accuracy,
        facecolor="none",
        edgecolor=_VERMILLION,
        hatch="/////",
        linewidth=0.6,
        label="Gap",
    )
    # An outline: a filled band would mix with the colours of the bars.
    low, high, known = _intervals(data.consistency, filled)
    ax.bar(
        centre[known],
        high - low,
        width[known],
        low,
        facecolor="none",
        edgecolor="#444444",
        linestyle=":",
        linewidth=0.9,
        label="If calibrated",
    )
    low, high, known = _intervals(data.accuracy_interval, filled)
    middle = accuracy[known]
    spread = np.clip([middle - low, high - middle], 0, None)  # rounding must not make it negative
    ax.errorbar(
        centre[known], middle, spread, fmt="none", ecolor="black", elinewidth=0.9, capsize=1.5, capthick=0.9
    )
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=0.8)
    ax.text(
        0.97,
        0.04,
        f"ECE {100 * ece:.2f} %",
        transform=ax.transAxes,
        ha="right",
        va="bottom",
        fontsize=_MEDIUM,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": _GREY, "linewidth": 0.5},
    )
    ax.set(xlim=(0, 1), ylim=(0, 1))
    if not histogram:
        _legend_below(ax)
        return _dress(ax, "Confidence", "Accuracy", title)

    below = _axes_below(ax)
    below.bar(centre, 100 * share, width, color="#BBBBBB", edgecolor="white", linewidth=0.5)
    below.axvline(float(share @ accuracy), color=_BLUE, linewidth=1.2, label="Mean accuracy")
    below.axvline(
        float(share @ confidence), color=_VERMILLION, linewidth=1.2, linestyle="--", label="Mean confidence"
    )
    _dress(below, "Confidence", "Share (%)", None)
    _legend_below(below, [*ax.get_legend_handles_labels()[0], *below.get_legend_handles_labels()[0]])
    ax.tick_params(labelbottom=False)
    return _dress(ax, "", "Accuracy", title)


def class_gaps(
    data: Sequence[ClassFigures], ax: Axes | None = None, *, title: str | None = None, named: int = 5
) -> Axes:
    """The signed gap of each class, sorted: which are given too often, which too rarely.

    Where the names do not all fit, the worst are listed beside the bars.

    Args:
        data: one entry per class, those of an `Evaluation`, in any order.
        ax: where to draw; None for a new figure.
        title: above the chart.
        named: how many to list of those given too often, and of those given too rarely.

    >>> from matplotlib.figure import Figure
    >>> classes = [ClassFigures("cat", 2, 1.0, 1.0, 0.1, 0.1), ClassFigures("dog", 2, 0.5, 0.5, -0.1, 0.1)]
    >>> ax = class_gaps(classes, Figure().subplots())
    >>> [label.get_text() for label in ax.get_yticklabels()]  # from the bottom
    ['dog', 'cat']
    """
    _check_filled("data", data, "a sequence of ClassFigures")
    for figures in data:
        if not np.isfinite(figures.gap):
            raise ValueError(f"the gap of class {figures.name!r} must be finite, got {figures.gap}")
    ordered = sorted(data, key=lambda figures: figures.gap)
    gap = 100 * np.array([figures.gap for figures in ordered])
    names = [_shortened(figures.name) for figures in ordered]
    largest = float(np.abs(gap).max()) or 1.0

    ax = _axes(ax, max(2.0, 0.6 + 0.14 * len(data)) if len(data) <= 30 else 3.0)
    height = ax.get_window_extent().height / ax.figure.dpi * 72
    all_named = len(data) * _NAMED_ROW <= height
    rank = np.arange(len(data))
    for colour, part in ((_BLUE, np.minimum(gap, 0)), (_VERMILLION, np.maximum(gap, 0))):
        if all_named:
            ax.barh(rank, part, 0.8, color=colour)
        else:  # one outline: a thousand bars would make a slow picture and a large file
            outline = np.arange(len(data) + 1) - 0.5
            ax.stairs(part, outline, orientation="horizontal", fill=True, color=colour)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set(xlim=(-1.08 * largest, 1.08 * largest), ylim=(-0.6, len(data) - 0.4))
    _dress(ax, "Mean probability − frequency (%)", "" if all_named else "Classes, by gap", title)
    if all_named:
        ax.set_yticks(rank, names, parse_math=False)
        ax.tick_params(axis="y", length=0)
        return ax

    ax.set_yticks([])
    decimals = max(0, 1 - floor(log10(largest)))
    amounts = [f"{value:+.{decimals}f}".replace("-", "−") for value in gap]
    lines = [f"{name} {amount}" for name, amount in zip(names, amounts, strict=True)]
    text: dict[str, Any] = {"transform": ax.transAxes, "fontsize": _SMALL, "parse_math": False}
    # The gaps of all classes cancel, so that sorted bars leave two corners of the symmetric axes free.
    if too_often := lines[::-1][: min(named, int((gap > 0).sum()))]:
        ax.text(0.02, 0.98, "\n".join(["Given too often:", *too_often]), ha="left", va="top", **text)
    if too_rarely := lines[: min(named, int((gap < 0).sum()))]:
        ax.text(0.98, 0.02, "\n".join(["Given too rarely:", *too_rarely]), ha="right", va="bottom", **text)
    return ax


def accuracy_against_ece(
    data: Mapping[str, Sequence[tuple[float, float]]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """One point per method, mean over seeds, with the standard deviation as error bars.

    Args:
        data: by method, ``(accuracy, ece)`` of each seed, as fractions.
        ax: where to draw; None for a new figure.
        title: above the chart.

    >>> from matplotlib.figure import Figure
    >>> ax = accuracy_against_ece({"ce": [(0.9, 0.05), (0.92, 0.07)]}, Figure().subplots())
    >>> [round(float(number), 6) for number in ax.lines[0].get_xydata()[0]]
    [6.0, 91.0]
    """
    _check_filled("data", data, "a mapping from method to (accuracy, ece) of each seed")
    checked = {name: 100 * _array(f"data[{name!r}]", seeds, "(seeds, 2)") for name, seeds in data.items()}
    for name, seeds in checked.items():
        if seeds.shape[1] != 2:
            raise ValueError(
                f"data[{name!r}] must hold (accuracy, ece) of each seed, got rows of {seeds.shape[1]} numbers"
            )

    ax = _axes(ax, 2.4 + _legend_height(data))
    points = []
    for number, (name, seeds) in enumerate(checked.items()):
        accuracy, ece = seeds.mean(0)
        deviation = seeds.std(0, ddof=1) if len(seeds) > 1 else (None, None)
        point, *_ = ax.errorbar(
            ece,
            accuracy,
            deviation[0],
            deviation[1],
            fmt=_MARKERS[number % len(_MARKERS)],
            color=_COLOURS[number % len(_COLOURS)],
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.4,
            elinewidth=0.8,
            capsize=1.5,
        )
        point.set_label(name)
        points.append(point)
    ax.grid(linewidth=0.3, color="#CCCCCC")
    ax.set_axisbelow(True)
    _dress(ax, "ECE (%)", "Accuracy (%)", title)
    _legend_below(ax, points)
    return ax


def methods_side_by_side(
    data: Mapping[str, Mapping[str, MeanFigure]],
    ax: Axes | None = None,
    *,
    metric: str = "ece",
    title: str | None = None,
) -> Axes:
    """One figure of several methods, a row for each, with intervals: before and after something was done.

    Args:
        data: by state, such as "before" and "after", the methods' figures as `Comparison.figures` gives them.
        ax: where to draw; None for a new figure.
        metric: which of `calibrant.metrics.METRICS` it is.
        title: above the chart.

    >>> from matplotlib.figure import Figure
    >>> data = {"before": {"ce": MeanFigure(0.05, None, (0.04, 0.06)), "ls": MeanFigure(0.02, None, None)}}
    >>> ax = methods_side_by_side(data, Figure().subplots())
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['ce', 'ls']
    """
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}")
    _check_filled("data", data, "a mapping from state to figures by method")
    description = METRICS[metric]
    scale = 100 if description.percent else 1
    names = list(dict.fromkeys(name for figures in data.values() for name in figures))
    ax = _axes(ax, 1.7 + 0.22 * len(names) + _legend_height(data))
    points = []
    for number, (state, figures) in enumerate(data.items()):
        shift = 0.16 * (number - (len(data) - 1) / 2)
        for row, name in enumerate(names):
            figure = figures.get(name)
            if figure is None:
                continue
            low, high = figure.interval or (figure.mean, figure.mean)
            ax.plot(
                [scale * low, scale * high],
                [row + shift, row + shift],
                color=_COLOURS[number % len(_COLOURS)],
                linewidth=1.0,
            )
        shown = [
            (scale * figures[name].mean, row + shift) for row, name in enumerate(names) if name in figures
        ]
        points += ax.plot(
            *zip(*shown, strict=True),
            _MARKERS[number % len(_MARKERS)],
            color=_COLOURS[number % len(_COLOURS)],
            markersize=4.5,
            label=state,
        )
    ax.set_yticks(range(len(names)), [_shortened(name) for name in names])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    ax.invert_yaxis()
    if description.percent:
        ax.set_xlim(left=0)
    ax.grid(axis="x", linewidth=0.3, color="#CCCCCC")
    ax.set_axisbelow(True)
    _dress(ax, description.label + (" (%)" if description.percent else ""), "", title)
    _legend_below(ax, points)
    return ax


# --------------------------------------------------------------------------------------------- training


def training_curves(
    data: Mapping[str, Numbers], ax: Axes | None = None, *, metric: str = "ece", title: str | None = None
) -> Axes:
    """One figure over the epochs, for several methods.

    One figure at a time: with two scales in one picture nobody knows which curve belongs to which.

    Args:
        data: by method, ``(epochs,)`` or ``(seeds, epochs)``; of seeds the mean is drawn, with
            a band of one standard deviation.
        ax: where to draw; None for a new figure.
        metric: which of `calibrant.metrics.METRICS` it is: "ece", "accuracy" and so on.
        title: above the curves.

    >>> from matplotlib.figure import Figure
    >>> ax = training_curves({"ce": [[0.25, 0.5], [0.75, 0.5]]}, Figure().subplots(), metric="accuracy")
    >>> ax.get_ylabel(), ax.lines[0].get_ydata().tolist()  # the mean of two seeds
    ('Accuracy (%)', [50.0, 50.0])
    """
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}")
    _check_filled("data", data, "a mapping from method to a number per epoch")
    description = METRICS[metric]
    scale = 100 if description.percent else 1
    checked = {
        name: scale * np.atleast_2d(_array(f"data[{name!r}]", values, "(epochs,)", "(seeds, epochs)"))
        for name, values in data.items()
    }

    ax = _axes(ax, 2.0 + _legend_height(data))
    for number, (name, seeds) in enumerate(checked.items()):
        epoch, mean = _counted(seeds.shape[1]), seeds.mean(0)
        ax.plot(epoch, mean, label=name, linewidth=1.2, **_line_style(number))
        if len(seeds) > 1:
            deviation = seeds.std(0, ddof=1)
            colour = _line_style(number)["color"]
            ax.fill_between(epoch, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _dress(ax, "Epoch", description.label + (" (%)" if description.percent else ""), title)
    _legend_below(ax)
    return ax


def multipliers(
    data: Numbers, ax: Axes | None = None, *, title: str | None = None, ylabel: str = "Multiplier λ"
) -> Axes:
    """What each class's multiplier has been over the passes, with their largest, mean and smallest.

    Args:
        data: ``(passes, K)``, such as a copy of the loss's `multiplier` after each pass.
        ax: where to draw; None for a new figure.
        title: above the curves.
        ylabel: what the numbers are; penalty weights can be drawn likewise.

    >>> from matplotlib.figure import Figure
    >>> ax = multipliers([[1.0, 1.0], [0.5, 2.0]], Figure().subplots())
    >>> {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    {'Max': [1.0, 2.0], 'Mean': [1.0, 1.25], 'Min': [1.0, 0.5]}
    """
    values = _array("data", data, "(passes, K)")
    passes = _counted(len(values))
    crowd = values.shape[1] > _CROWD

    ax = _axes(ax, 2.4)
    ax.add_collection(
        LineCollection(
            [np.column_stack([passes, column]) for column in values.T],
            colors="#AAAAAA",
            linewidths=0.3 if crowd else 0.6,
            alpha=0.4 if crowd else 0.8,
            rasterized=crowd,
        )
    )
    summaries = {"Max": values.max(1), "Mean": values.mean(1), "Min": values.min(1)}
    lines = [
        ax.plot(passes, curve, label=label, linewidth=1.4, **_line_style(number))[0]
        for number, (label, curve) in enumerate(summaries.items())
    ]
    ax.autoscale_view()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _dress(ax, "Pass", ylabel, title)
    _legend_below(ax, [*lines, Line2D([], [], color="#AAAAAA", linewidth=0.8, label="Per class")])
    return ax


def gammas(data: Numbers, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """AdaFocal's exponent γ of each bin over the passes.

    Args:
        data: ``(passes, bins)``, such as a copy of the loss's `gamma` after each pass.
        ax: where to draw; None for a new figure.
        title: above the curves.

    >>> from matplotlib.figure import Figure
    >>> ax = gammas([[1.0, 1.0], [0.5, 2.0], [0.25, 4.0]], Figure().subplots())
    >>> ax.lines[-1].get_ydata().tolist()  # of the last bin
    [1.0, 2.0, 4.0]
    """
    return _per_bin(_array("data", data, "(passes, bins)"), ax, "Exponent γ", title, "Bin", zero=True)


def gaps(data: Numbers, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Confidence minus accuracy of each bin over the passes; above 0: over-confident.

    Args:
        data: ``(passes, bins)``, as fractions; NaN where a bin was empty, which interrupts its line.
        ax: where to draw; None for a new figure.
        title: above the curves.

    >>> from matplotlib.figure import Figure
    >>> ax = gaps([[0.0, 0.5], [float("nan"), 0.25]], Figure().subplots())
    >>> ax.lines[-1].get_ydata().tolist()  # of the last bin
    [50.0, 25.0]
    """
    values = 100 * _array("data", data, "(passes, bins)", missing=True)
    return _per_bin(values, ax, "Confidence − accuracy (%)", title, "Bin", zero=True)


def edges(data: Numbers, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """The edges of the bins of confidence over the passes.

    Args:
        data: ``(passes, bins + 1)``, such as a copy of the loss's `edges` after each pass.
        ax: where to draw; None for a new figure.
        title: above the curves.

    >>> from matplotlib.figure import Figure
    >>> ax = edges([[0.0, 0.5, 1.0], [0.0, 0.75, 1.0]], Figure().subplots())
    >>> ax.lines[1].get_ydata().tolist()  # of the edge between two bins
    [0.5, 0.75]
    """
    return _per_bin(_array("data", data, "(passes, bins + 1)"), ax, "Confidence", title, "Edge", first=0)


def bin_confidences(
    data: Mapping[str, Numbers],
    ax: Axes | None = None,
    *,
    bins: Sequence[int] | None = None,
    title: str | None = None,
) -> Axes:
    """The mean confidence of some bins over the passes, on training beside validation data.

    Args:
        data: ``(passes, bins)`` of each data set, such as "training" and "validation"; NaN where a bin
            was empty, which interrupts its line.
        ax: where to draw; None for a new figure.
        bins: which to draw, from 0; None for at most four, evenly spread.
        title: above the curves.

    >>> from matplotlib.figure import Figure
    >>> passes = {"training": [[0.4, 0.9], [0.3, 0.9]], "validation": [[0.4, 0.8], [0.4, 0.7]]}
    >>> ax = bin_confidences(passes, Figure().subplots(), bins=[1])
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['training', 'validation', 'Bin 2']
    """
    _check_filled("data", data, "a mapping from data set to the confidence per pass and bin")
    checked = {
        name: _array(f"data[{name!r}]", values, "(passes, bins)", missing=True)
        for name, values in data.items()
    }
    shapes = {name: values.shape for name, values in checked.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"all data sets must have the same passes and bins, got {shapes}")
    if len(checked) > len(_LINES):
        raise ValueError(f"at most {len(_LINES)} data sets can be told apart, got {len(checked)}")
    passes, total = next(iter(shapes.values()))
    if bins is None:
        bins = sorted({round(b) for b in np.linspace(0, total - 1, min(total, _BINS_COMPARED)).tolist()})
    if not bins or not all(0 <= b < total for b in bins):
        raise ValueError(f"bins must be some of 0 to {total - 1}, got {list(bins)}")

    ax = _axes(ax, 2.6)
    colours = _shades(len(bins))
    for (name, values), line in zip(checked.items(), _LINES, strict=False):
        for b, colour in zip(bins, colours, strict=True):
            label = f"{name}, bin {b + 1}"
            ax.plot(_counted(passes), values[:, b], color=colour, linestyle=line, linewidth=1.2, label=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _dress(ax, "Pass", "Confidence", title)
    styles = [
        Line2D([], [], color=_GREY, linestyle=line, label=name)
        for name, line in zip(checked, _LINES, strict=False)
    ]
    chosen = [
        Line2D([], [], color=colour, label=f"Bin {b + 1}") for b, colour in zip(bins, colours, strict=True)
    ]
    _legend_below(ax, styles + chosen)
    return ax


def _per_bin(
    values: Array,
    ax: Axes | None,
    ylabel: str,
    title: str | None,
    what: str,
    *,
    first: int = 1,
    zero: bool = False,
) -> Axes:
    """One line per bin, from dark to light as the confidence rises."""
    ax = _axes(ax, 2.4)
    number = values.shape[1]
    colours = _shades(number)
    if zero:
        ax.axhline(0, color="black", linewidth=0.6)
    for column, colour in zip(values.T, colours, strict=True):
        ax.plot(_counted(len(values)), column, color=colour, linewidth=1.0)
    limits = np.arange(number + 1) + first - 0.5
    scale = ScalarMappable(BoundaryNorm(limits.tolist(), number), ListedColormap(colours))
    bar = ax.figure.colorbar(scale, ax=ax, pad=0.02, aspect=30)
    step = -(-number // 15)
    bar.set_ticks(list(range(first, number + first, step)))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=_SMALL, length=0)
    bar.set_label(what, fontsize=_MEDIUM)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return _dress(ax, "Pass", ylabel, title)


def penalties(
    data: Mapping[str, Penalty] = PENALTIES,
    ax: Axes | None = None,
    *,
    multiplier: float = 1.0,
    penalty_weight: float = 1.0,
    violations: tuple[float, float] = (-2.0, 2.0),
    title: str | None = None,
) -> Axes:
    """Penalties as functions of the violation ``z``.

    Args:
        data: by name.
        ax: where to draw; None for a new figure.
        multiplier: λ.
        penalty_weight: ρ.
        violations: the range of z.
        title: above the curves.

    >>> from matplotlib.figure import Figure
    >>> ax = penalties(ax=Figure().subplots(), penalty_weight=2.0)
    >>> ax.get_ylabel(), [text.get_text() for text in ax.get_legend().get_texts()]
    ('Penalty, λ = 1, ρ = 2', ['PHR', 'P2', 'P3'])
    """
    _check_filled("data", data, "a mapping from name to Penalty")
    for name, value in (("multiplier", multiplier), ("penalty_weight", penalty_weight)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    low, high = violations
    if not -float("inf") < low < high < float("inf"):
        raise ValueError(f"violations must be a range (low, high) of finite numbers, got {violations}")
    violation = torch.linspace(low, high, 401, dtype=torch.float64)
    weight, factor = violation.new_tensor(penalty_weight), violation.new_tensor(multiplier)

    ax = _axes(ax, 2.4)
    ax.axhline(0, color=_GREY, linewidth=0.5)
    ax.axvline(0, color=_GREY, linewidth=0.5)
    for number, (name, penalty) in enumerate(data.items()):
        curve = penalty.value(violation, weight, factor)
        ax.plot(violation.numpy(), curve.numpy(), label=name.upper(), linewidth=1.2, **_line_style(number))
    ax.set_xlim(low, high)
    _dress(ax, "Violation z", f"Penalty, λ = {multiplier:g}, ρ = {penalty_weight:g}", title)
    _legend_inside(ax, "upper left")  # a penalty never falls: this corner is free
    return ax


# ---------------------------------------------------------------------------------------- distributions


def roc_curve(
    data: Mapping[str, tuple[Numbers, Numbers]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """How well scores tell data out of the distribution from data in it: exact curves, and their areas.

    Args:
        data: by method, the scores ``(N,)`` in and ``(M,)`` out of the distribution; the higher, the
            further out.
        ax: where to draw; None for a new figure.
        title: above the curves.

    >>> from matplotlib.figure import Figure
    >>> ax = roc_curve({"entropy": ([0.1, 0.2, 0.3], [0.3, 0.4])}, Figure().subplots())
    >>> ax.get_legend().get_texts()[0].get_text()  # of 6 pairs one is tied
    'entropy: 91.67'
    """
    _check_filled("data", data, "a mapping from method to (in_scores, out_scores)")
    curves, areas = {}, {}
    for name, scores in data.items():
        if len(scores) != 2:
            raise ValueError(f"data[{name!r}] must be (in_scores, out_scores), got {len(scores)} items")
        inside, outside = (
            _array(f"{which} of {name!r}", part, "(N,)", infinite=True)
            for which, part in zip(("in_scores", "out_scores"), scores, strict=True)
        )
        curves[name] = _rates(inside, outside)
        areas[name] = detection(torch.from_numpy(inside), torch.from_numpy(outside)).auroc

    few = len(data) <= 6
    ax = _axes(ax, 2.9 if few else 2.7 + _legend_height([f"{name}: 99.99" for name in data]))
    ax.plot([0, 100], [0, 100], color=_GREY, linestyle=":", linewidth=0.8)
    for number, (name, (false, true)) in enumerate(curves.items()):
        label = f"{name}: {100 * areas[name]:.2f}"
        ax.plot(100 * false, 100 * true, label=label, linewidth=1.2, **_line_style(number))
    ax.set(xlim=(-1, 101), ylim=(-1, 101))
    _dress(ax, "False positive rate (%)", "True positive rate (%)", title)
    if few:
        _legend_inside(ax, "lower right", title="AUROC (%)")
    else:
        _legend_below(ax, title="AUROC (%)")
    return ax


def maximum_logits(
    data: Mapping[str, Tensor], ax: Axes | None = None, *, bins: int = 50, title: str | None = None
) -> Axes:
    """Histograms of the largest logit.

    Args:
        data: by method or data set, logits ``(N, K, *S)``.
        ax: where to draw; None for a new figure.
        bins: of equal width, the same for all.
        title: above the histograms.

    >>> from matplotlib.figure import Figure
    >>> logits = torch.tensor([[0.0, 1.0], [0.0, 3.0], [5.0, 0.0], [0.0, 5.0]])
    >>> ax = maximum_logits({"ce": logits}, Figure().subplots(), bins=2)
    >>> ax.patches[0].get_data().values.tolist()  # the share of [1, 3) and of [3, 5], in percent
    [25.0, 75.0]
    """
    largest = {name: logits.amax(1).flatten().numpy() for name, logits in _check_logits(data, bins).items()}
    limits = np.histogram_bin_edges(np.concatenate(list(largest.values())), bins)
    return _histograms(largest, limits, ax, "Maximum logit", title)


def confidences(
    data: Mapping[str, Tensor], ax: Axes | None = None, *, bins: int = 25, title: str | None = None
) -> Axes:
    """Histograms of the confidence, the largest probability.

    Args:
        data: by method or data set, logits ``(N, K, *S)``.
        ax: where to draw; None for a new figure.
        bins: of equal width on [0, 1].
        title: above the histograms.

    >>> from matplotlib.figure import Figure
    >>> logits = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.2, 0.8], [0.6, 0.4]]).log()
    >>> ax = confidences({"ce": logits}, Figure().subplots(), bins=4)
    >>> ax.patches[0].get_data().values.tolist()  # the share of each quarter, in percent
    [0.0, 0.0, 50.0, 50.0]
    """
    largest = {
        name: logits.softmax(1).amax(1).flatten().numpy()
        for name, logits in _check_logits(data, bins).items()
    }
    ax = _histograms(largest, np.linspace(0, 1, bins + 1), ax, "Confidence", title)
    ax.set_xlim(0, 1)
    return ax


def _histograms(
    data: Mapping[str, Array], limits: Array, ax: Axes | None, xlabel: str, title: str | None
) -> Axes:
    ax = _axes(ax, 2.0 + _legend_height(data))
    for number, (name, values) in enumerate(data.items()):
        share = 100 * np.histogram(values, limits)[0] / len(values)
        style = _line_style(number)
        ax.stairs(share, limits, label=name, linewidth=1.2, **style)
        ax.stairs(share, limits, fill=True, alpha=0.12, color=style["color"])
    ax.set_ylim(bottom=0)
    _dress(ax, xlabel, "Elements (%)", title)
    _legend_below(ax)
    return ax


def _rates(inside: Array, outside: Array) -> tuple[Array, Array]:
    """False and true positive rate at every threshold, from none to all flagged; ties move together."""
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]

    def flagged(scores: Array) -> Array:
        below = np.searchsorted(np.sort(scores), thresholds, side="left")
        return np.concatenate([[0.0], 1 - below / len(scores)])

    return flagged(inside), flagged(outside)


# --------------------------------------------------------------------------------------- how it is drawn


def _axes(ax: Axes | None, height: float) -> Axes:
    if ax is not None:
        return ax
    # pyplot, and not a bare Figure, so that notebooks and plt.show() show it. It keeps every figure until
    # it is closed: who draws many passes axes of a Figure, and then no backend is chosen either.
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(_WIDTH, height), layout="constrained")[1]


def _axes_below(ax: Axes) -> Axes:
    """Axes that share the abscissa and take the lower quarter of the place ``ax`` had."""
    place = ax.get_subplotspec()
    if place is not None:  # a split that every layout engine understands
        halves = place.subgridspec(2, 1, height_ratios=(3, 1), hspace=0.1)
        ax.set_subplotspec(halves[0])
        return ax.figure.add_subplot(halves[1], sharex=ax)
    left, bottom, width, height = ax.get_position().bounds
    ax.set_position((left, bottom + 0.27 * height, width, 0.73 * height))
    return ax.figure.add_axes((left, bottom, width, 0.24 * height), sharex=ax)


def _dress(ax: Axes, xlabel: str, ylabel: str, title: str | None) -> Axes:
    ax.set_xlabel(xlabel, fontsize=_MEDIUM)
    ax.set_ylabel(ylabel, fontsize=_MEDIUM)
    if title is not None:
        ax.set_title(title, fontsize=_LARGE)
    ax.tick_params(labelsize=_SMALL)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


_COMPACT: dict[str, Any] = {
    "fontsize": _SMALL,
    "title_fontsize": _SMALL,
    "handlelength": 1.8,
    "handletextpad": 0.5,
    "columnspacing": 1.0,
    "labelspacing": 0.35,
}


def _legend_inside(
    ax: Axes, corner: Literal["upper left", "lower right"], *, title: str | None = None
) -> None:
    legend = ax.legend(loc=corner, title=title, framealpha=0.8, borderpad=0.3, **_COMPACT)
    legend.get_frame().set_linewidth(0.5)
    _take_literally(legend)


def _legend_below(ax: Axes, handles: Sequence[Artist] | None = None, *, title: str | None = None) -> None:
    """A legend where it hides no data."""
    entries = ax.get_legend_handles_labels()[0] if handles is None else handles
    labels = [str(entry.get_label()) for entry in entries]
    width = ax.get_window_extent().width / ax.figure.dpi * 72
    legend = ax.legend(
        entries,
        labels,
        title=title,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        # As far below as the labels of the abscissa reach, whatever the height of the axes.
        bbox_transform=ax.transAxes + ScaledTranslation(0, -28 / 72, ax.figure.dpi_scale_trans),
        ncols=_columns(labels, width),
        frameon=False,
        borderaxespad=0,
        **_COMPACT,
    )
    _take_literally(legend)


def _take_literally(legend: Legend) -> None:
    for text in legend.get_texts():
        text.set_parse_math(False)  # a method's name with dollars in it is no formula


def _columns(labels: Sequence[str], width: float) -> int:
    """Columns of a legend for axes of so many points' width."""
    most = max(1, int(width / (3.1 * (6 + max(len(label) for label in labels)))))
    rows = -(-len(labels) // most)
    return -(-len(labels) // rows)  # no more than these rows need: they are then equally full


def _legend_height(labels: Iterable[str]) -> float:
    """Inches that the legend below will take in a new figure."""
    names = list(labels)
    return 0.15 * -(-len(names) // _columns(names, 0.775 * 72 * _WIDTH)) + 0.1


def _line_style(number: int) -> dict[str, Any]:
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _LINES[number % len(_LINES)]}


def _shades(number: int) -> list[tuple[float, float, float, float]]:
    """From dark to light, so that their order shows without colour too; white paper hides the lightest."""
    return [tuple(colour) for colour in colormaps["viridis"](np.linspace(0, 0.92, number)).tolist()]


def _counted(number: int) -> NDArray[np.int64]:
    return np.arange(1, number + 1)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


# ----------------------------------------------------------------------------------------------- checks


def _check_filled(what: str, data: Sequence[Any] | Mapping[str, Any], expected: str) -> None:
    if not len(data):
        raise ValueError(f"{what} must be {expected}, got none")


def _array(what: str, data: Numbers, *shapes: str, missing: bool = False, infinite: bool = False) -> Array:
    """The numbers as float64, with one of the shapes, each written like ``"(passes, K)"``."""
    expected = f"{what} must have shape {' or '.join(shapes)}"
    try:
        if isinstance(data, Sequence) and any(isinstance(part, Tensor) for part in data):
            data = torch.stack([torch.as_tensor(part) for part in data])
        if isinstance(data, Tensor):
            data = data.detach().double().cpu().numpy()
        values = np.asarray(data, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{expected}, and hold numbers: {error}") from error
    if values.ndim not in {shape.count(",") + (not shape.endswith(",)")) for shape in shapes}:
        raise ValueError(f"{expected}, got {values.shape}")
    if not values.size:
        raise ValueError(f"{expected}, with nothing empty, got {values.shape}")
    absent = np.isnan(values)
    if absent.all() or (absent.any() and not missing):
        raise ValueError(f"{what} must not be NaN, but {int(absent.sum())} of {values.size} numbers are")
    if not infinite and np.isinf(values).any():
        raise ValueError(
            f"{what} must be finite, but {int(np.isinf(values).sum())} of {values.size} numbers are infinite"
        )
    return values


def _check_logits(data: Mapping[str, Tensor], bins: int) -> dict[str, Tensor]:
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    _check_filled("data", data, "a mapping from name to logits")
    checked = {}
    for name, logits in data.items():
        if not isinstance(logits, Tensor) or logits.ndim < 2 or not logits.numel():
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"data[{name!r}] must be a tensor of logits (N, K, *S), got {found}")
        if not logits.isfinite().all():
            raise ValueError(f"data[{name!r}] must be finite, but some logits are NaN or infinite")
        checked[name] = logits.detach().double().cpu()
    return checked


def _check_reliability(data: Reliability) -> tuple[Array, Array]:
    """Edges and counts, once everything is known to fit."""
    edges = _array("edges", data.edges, "(bins + 1,)")
    count = _array("count", data.count, "(bins,)")
    if (np.diff(edges) < 0).any():
        raise ValueError(f"edges must not fall, got {data.edges}")
    for name in ("count", "confidence", "accuracy", "accuracy_interval", "consistency"):
        found = len(getattr(data, name))
        if found != len(edges) - 1:
            raise ValueError(f"{len(edges)} edges make {len(edges) - 1} bins, but {name} has {found}")
    if (count < 0).any() or not count.sum():
        raise ValueError(f"count must be at least 0, and not everywhere 0, got {data.count}")
    for b in np.flatnonzero(count):
        for name, value in (("confidence", data.confidence[b]), ("accuracy", data.accuracy[b])):
            if value is None or not 0 <= value <= 1:
                raise ValueError(f"{name} of bin {b}, which is not empty, must lie in [0, 1], got {value}")
    return edges, count


def _intervals(
    data: Sequence[tuple[float, float] | None], filled: NDArray[np.int64]
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Lower ends, upper ends, and which of the filled bins have them."""
    inside = np.array([data[b] is not None for b in filled])
    low, high = np.array([data[b] for b in filled[inside]], dtype=np.float64).reshape(-1, 2).T
    return low, high, inside
