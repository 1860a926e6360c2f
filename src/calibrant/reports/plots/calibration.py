"""Plots of calibration: reliability diagrams, and the gaps of the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from numpy.typing import NDArray

from calibrant.arguments import instance_of
from calibrant.evaluation import ClassFigures, Evaluation, Reliability
from calibrant.printable import wrapped
from calibrant.reports import charts
from calibrant.reports.plots import checks, drawing
from calibrant.reports.plots.checks import Array
from calibrant.reports.plots.drawing import BLUE, VERMILLION

_NAMED_ROW = 8.0  # points of height that a name needs

# Inches of a grid of diagrams: the side of a panel, and the space around it for labels.
_GRID_PANEL, _GRID_LEFT, _GRID_BESIDE, _GRID_BETWEEN = 2.1, 0.95, 0.4, 0.42
_GRID_LETTERS = 30  # that fit beside a panel


def reliability_diagram(
    data: Reliability | Evaluation,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    ece: float | None = None,
    histogram: bool = True,
    legend: bool = True,
    binary: bool = False,
) -> Axes:
    """Plot a reliability diagram: the accuracy in each bin of confidence, and its gap to the confidence.

    Bars show the accuracy with its interval, hatched bars the gap to the mean confidence. Dotted boxes show
    where the accuracy of a calibrated model would be. For yes-or-no decisions these are the frequency and the
    probability of yes.

    Args:
        data: an evaluation, or bins as in `Evaluation.reliability`.
        ece: the calibration error to print; None for that of the evaluation, or to compute it from the bins.
        histogram: whether to draw a histogram of the confidence in the lower part. Its axes become the last
            of the figure.
        legend: whether to draw a legend.
        binary: whether the bins are those of yes-or-no decisions, as in `Evaluation.binary`. An evaluation
            knows it.

    >>> intervals = (None, (0.1, 0.9)), (None, (0.25, 1.0))
    >>> bins = Reliability((0.0, 0.5, 1.0), (0, 4), (None, 0.8), (None, 0.5), *intervals)
    >>> ax = reliability_diagram(bins, histogram=False)
    >>> ax.texts[0].get_text()
    'ECE 30.00 %'
    """
    instance_of("data", data, Reliability, Evaluation)
    if isinstance(data, Evaluation):
        ece, binary = data.ece if ece is None else ece, data.binary
        data = data.reliability
    edges, count = _check_reliability(data)
    filled = np.flatnonzero(count)
    width, centre = np.diff(edges)[filled], ((edges[:-1] + edges[1:]) / 2)[filled]
    confidence = np.array([data.confidence[b] for b in filled], dtype=np.float64)
    accuracy = np.array([data.accuracy[b] for b in filled], dtype=np.float64)
    weight = count[filled] / count.sum()
    if ece is None:
        ece = float(weight @ np.abs(accuracy - confidence))
    if not 0 <= ece <= 1:
        raise ValueError(f"ece must lie in [0, 1], got {ece}")

    x, y = charts.axes(binary)
    ax = drawing.given_or_new(ax, 4.1 if histogram else 3.2)
    look: dict[str, Any] = {"facecolor": to_rgba(BLUE, 0.35), "edgecolor": BLUE, "linewidth": 0.6}
    ax.bar(centre, accuracy, width, **look, label=y.capitalize())
    look = {"facecolor": "none", "edgecolor": VERMILLION, "linewidth": 0.6, "hatch": "/////"}
    ax.bar(centre, confidence - accuracy, width, accuracy, **look, label="Gap")
    # Outlines, because a filled band would mix with the colours of the bars.
    low, high, known = _intervals(data.consistency, filled)
    look = {"facecolor": "none", "edgecolor": "#444444", "linewidth": 0.9, "linestyle": ":"}
    ax.bar(centre[known], high - low, width[known], low, **look, label="If calibrated")
    low, high, known = _intervals(data.accuracy_interval, filled)
    middle = accuracy[known]
    spread = np.clip([middle - low, high - middle], 0, None)  # rounding must not make it negative
    look = {"ecolor": "black", "elinewidth": 0.9, "capsize": 1.5, "capthick": 0.9}
    ax.errorbar(centre[known], middle, spread, fmt="none", **look)
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=0.8)
    box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": drawing.GREY, "linewidth": 0.5}
    look = {"ha": "right", "va": "bottom", "fontsize": drawing.MEDIUM, "bbox": box}
    ax.text(0.97, 0.04, f"ECE {100 * ece:.2f} %", transform=ax.transAxes, **look)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    if not histogram:
        if legend:
            drawing.legend_below(ax)
        return drawing.finish(ax, x.capitalize(), y.capitalize(), title)

    below = drawing.axes_below(ax)
    below.bar(centre, 100 * weight, width, color="#BBBBBB", edgecolor="white", linewidth=0.5)
    below.axvline(float(weight @ accuracy), color=BLUE, linewidth=1.2, label=f"Mean {y}")
    look = {"color": VERMILLION, "linewidth": 1.2, "linestyle": "--"}
    below.axvline(float(weight @ confidence), **look, label=f"Mean {x}")
    drawing.finish(below, x.capitalize(), "Share (%)", None)
    if legend:
        handles = [*ax.get_legend_handles_labels()[0], *below.get_legend_handles_labels()[0]]
        drawing.legend_below(below, handles)
    ax.tick_params(labelbottom=False)
    return drawing.finish(ax, "", y.capitalize(), title)


def reliability_grid(data: Mapping[str, Mapping[str, Evaluation]], title: str) -> Figure:
    """Draw a grid of reliability diagrams with one legend.

    The data are evaluations by row, such as a calibrator, and by column, such as a loss.
    """
    columns = list(next(iter(data.values())))
    headings = [wrapped(name, _GRID_LETTERS) for name in columns]
    heading = wrapped(title, _GRID_LETTERS * len(columns))
    # Places in inches: a layout engine takes seconds for so many axes, and squeezes the panels.
    whole = _GRID_PANEL / drawing.UPPER_PART
    lines = heading.count("\n") + max(name.count("\n") for name in headings) + 2
    above, under = 0.25 + lines * 1.35 * drawing.LARGE / 72, 0.3 if len(columns) > 1 else 0.6
    width = _GRID_LEFT + len(columns) * (_GRID_PANEL + _GRID_BESIDE)
    height = above + len(data) * (whole + _GRID_BETWEEN) + under
    figure = Figure(figsize=(width, height))
    text: dict[str, Any] = {"fontsize": drawing.LARGE, "multialignment": "center", "parse_math": False}
    figure.text(0.5, 1 - 0.08 / height, heading, ha="center", va="top", **text)
    text |= {"rotation": 90, "ha": "left", "va": "center", "weight": "bold"}
    for number, (row, evaluations) in enumerate(data.items()):
        bottom = height - above - whole - number * (whole + _GRID_BETWEEN)
        name = wrapped(row, _GRID_LETTERS)
        figure.text(0.06 / width, (bottom + whole / 2) / height, name, **text)
        for place, (column, label) in enumerate(zip(columns, headings, strict=True)):
            left = _GRID_LEFT + place * (_GRID_PANEL + _GRID_BESIDE)
            ax = figure.add_axes((left / width, bottom / height, _GRID_PANEL / width, whole / height))
            reliability_diagram(evaluations[column], ax, title=None if number else label, legend=False)
            ax.title.set_parse_math(False)
            below = figure.axes[-1]
            if place:
                ax.set_ylabel("")
                below.set_ylabel("")
            if number < len(data) - 1:
                below.set_xlabel("")
    drawing.legend_of_figure(figure, *figure.axes[:2])
    return figure


def class_gaps(
    data: Sequence[ClassFigures], ax: Axes | None = None, *, title: str | None = None, named: int = 5
) -> Axes:
    """Plot the gap of each class, sorted: mean probability minus frequency.

    If the names do not all fit, the classes with the largest gaps are listed beside the bars.

    Args:
        data: the classes in any order, such as `Evaluation.classes`.
        named: the number of classes to list with positive gaps, and with negative ones.

    >>> classes = [ClassFigures("cat", 2, 1.0, 1.0, 0.1, 0.1), ClassFigures("dog", 2, 0.5, 0.5, -0.1, 0.1)]
    >>> ax = class_gaps(classes)
    >>> [label.get_text() for label in ax.get_yticklabels()]  # from the bottom
    ['dog', 'cat']
    """
    checks.check_filled(data, "a sequence of ClassFigures", Sequence)
    for figures in data:
        instance_of("data", figures, ClassFigures)
        if not np.isfinite(figures.gap):
            raise ValueError(f"the gap of class {figures.name!r} must be finite, got {figures.gap}")
    ordered = sorted(data, key=lambda figures: figures.gap)
    gap = 100 * np.array([figures.gap for figures in ordered])
    names = [drawing.shortened(figures.name) for figures in ordered]
    largest = float(np.abs(gap).max()) or 1.0

    ax = drawing.given_or_new(ax, max(2.0, 0.6 + 0.14 * len(data)) if len(data) <= 30 else 3.0)
    height = ax.get_window_extent().height / ax.figure.dpi * 72
    all_named = len(data) * _NAMED_ROW <= height
    rank = np.arange(len(data))
    for colour, part in ((BLUE, np.minimum(gap, 0)), (VERMILLION, np.maximum(gap, 0))):
        if all_named:
            ax.barh(rank, part, 0.8, color=colour)
        else:  # one outline: a thousand bars would be slow and make a large file
            outline = np.arange(len(data) + 1) - 0.5
            ax.stairs(part, outline, orientation="horizontal", fill=True, color=colour)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set(xlim=(-1.08 * largest, 1.08 * largest), ylim=(-0.6, len(data) - 0.4))
    ylabel = "" if all_named else "Classes, by gap"
    drawing.finish(ax, "Mean probability − frequency (%)", ylabel, title)
    if all_named:
        ax.set_yticks(rank, names, parse_math=False)
        ax.tick_params(axis="y", length=0)
        return ax

    ax.set_yticks([])
    decimals = max(0, 1 - floor(log10(largest)))
    amounts = [f"{value:+.{decimals}f}".replace("-", "−") for value in gap]
    lines = [f"{name} {amount}" for name, amount in zip(names, amounts, strict=True)]
    text: dict[str, Any] = {"transform": ax.transAxes, "fontsize": drawing.SMALL, "parse_math": False}
    # The gaps of all classes sum to 0, so the sorted bars leave two corners of the symmetric axes free.
    if too_often := lines[::-1][: min(named, int((gap > 0).sum()))]:
        ax.text(0.02, 0.98, "\n".join(["Given too often:", *too_often]), ha="left", va="top", **text)
    if too_rarely := lines[: min(named, int((gap < 0).sum()))]:
        ax.text(0.98, 0.02, "\n".join(["Given too rarely:", *too_rarely]), ha="right", va="bottom", **text)
    return ax


def _check_reliability(data: Reliability) -> tuple[Array, Array]:
    """Check the bins, and return their edges and counts."""
    edges = checks.array("edges", data.edges, "(bins + 1,)")
    count = checks.array("count", data.count, "(bins,)")
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
    """Lower ends, upper ends, and which of the filled bins have an interval."""
    known = np.array([data[b] is not None for b in filled])
    low, high = np.array([data[b] for b in filled[known]], dtype=np.float64).reshape(-1, 2).T
    return low, high, known
