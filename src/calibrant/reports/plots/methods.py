"""Plots that compare methods: accuracy against ECE, one metric side by side, over epochs, over severities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from calibrant.evaluation.comparison import MeanFigure
from calibrant.metrics import METRICS
from calibrant.reports.plots import checks, drawing
from calibrant.reports.plots.checks import Numbers


def accuracy_against_ece(
    data: Mapping[str, Sequence[tuple[float, float]]],
    ax: Axes | None = None,
    *,
    metric: str = "ece",
    title: str | None = None,
) -> Axes:
    """Plot accuracy against ECE: one point per method, the mean over seeds, with standard deviations.

    Args:
        data: by method, ``(accuracy, ece)`` of each seed, as fractions.
        ax: the axes to draw on; None for a new figure.
        metric: the kind of calibration error, a key of `calibrant.metrics.METRICS`.
        title: the title.

    >>> from matplotlib.figure import Figure
    >>> ax = accuracy_against_ece({"ce": [(0.9, 0.05), (0.92, 0.07)]}, Figure().subplots())
    >>> [round(float(number), 6) for number in ax.lines[0].get_xydata()[0]]
    [6.0, 91.0]
    """
    label, scale = checks.metric_axis(metric)
    checks.check_filled(data, "a mapping from method to (accuracy, ece) of each seed")
    checked = {name: checks.array(f"data[{name!r}]", each, "(seeds, 2)") for name, each in data.items()}
    for name, seeds in checked.items():
        if seeds.shape[1] != 2:
            raise ValueError(
                f"data[{name!r}] must hold (accuracy, ece) of each seed, got rows of {seeds.shape[1]} numbers"
            )

    ax = drawing.given_or_new(ax, 2.4 + drawing.legend_height(data))
    look: dict[str, Any] = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.4}
    points = []
    for number, (name, fractions) in enumerate(checked.items()):
        seeds = fractions * (100, scale)
        accuracy, ece = seeds.mean(0)
        dy, dx = seeds.std(0, ddof=1) if len(seeds) > 1 else (None, None)
        style = look | drawing.point_style(number)
        point, *_ = ax.errorbar(ece, accuracy, dy, dx, elinewidth=0.8, capsize=1.5, linestyle="none", **style)
        point.set_label(name)
        points.append(point)
    ax.grid(linewidth=0.3, color="#CCCCCC")
    ax.set_axisbelow(True)
    drawing.finish(ax, label, "Accuracy (%)", title)
    return drawing.legend_below(ax, points)


def methods_side_by_side(
    data: Mapping[str, Mapping[str, MeanFigure]],
    ax: Axes | None = None,
    *,
    metric: str = "ece",
    title: str | None = None,
) -> Axes:
    """Plot one metric of several methods with intervals, for example before and after temperature scaling.

    Args:
        data: by state, such as "before" and "after", the methods' figures from `Comparison.figures`.
        ax: the axes to draw on; None for a new figure.
        metric: the key of the metric in `calibrant.metrics.METRICS`.
        title: the title.

    >>> from matplotlib.figure import Figure
    >>> data = {"before": {"ce": MeanFigure(0.05, None, (0.04, 0.06)), "ls": MeanFigure(0.02, None, None)}}
    >>> ax = methods_side_by_side(data, Figure().subplots())
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['ce', 'ls']
    """
    label, scale = checks.metric_axis(metric)
    checks.check_filled(data, "a mapping from state to figures by method")
    names = list(dict.fromkeys(name for figures in data.values() for name in figures))
    ax = drawing.given_or_new(ax, 1.7 + drawing.rows_height(names) + drawing.legend_height(data))
    points = []
    for number, (state, figures) in enumerate(data.items()):
        style = drawing.point_style(number)
        rows = {name: names.index(name) + 0.16 * (number - (len(data) - 1) / 2) for name in figures}
        for name, figure in figures.items():
            ends = np.array(figure.interval or (figure.mean, figure.mean))
            ax.plot(scale * ends, [rows[name]] * 2, color=style["color"], linewidth=1.0)
        means = [scale * figure.mean for figure in figures.values()]
        points += ax.plot(means, list(rows.values()), **style, linestyle="none", markersize=4.5, label=state)
    drawing.name_rows(ax, names)
    if METRICS[metric].percent:
        ax.set_xlim(left=0)
    ax.grid(axis="x", linewidth=0.3, color="#CCCCCC")
    ax.set_axisbelow(True)
    drawing.finish(ax, label, "", title)
    return drawing.legend_below(ax, points)


def training_curves(
    data: Mapping[str, Numbers],
    ax: Axes | None = None,
    *,
    metric: str = "ece",
    part: str = "",
    legend: bool = True,
    title: str | None = None,
) -> Axes:
    """Plot one metric over the epochs for several methods.

    Args:
        data: by method, ``(epochs,)`` or ``(seeds, epochs)``. For several seeds, the mean is drawn with a
            band of one standard deviation.
        ax: the axes to draw on; None for a new figure.
        metric: the key of the metric in `calibrant.metrics.METRICS`, such as "ece" or "accuracy".
        part: the part of the data, such as "validation", for the label of the axis.
        legend: whether to draw a legend.
        title: the title.

    >>> from matplotlib.figure import Figure
    >>> ax = training_curves({"ce": [[0.25, 0.5], [0.75, 0.5]]}, Figure().subplots(), metric="accuracy")
    >>> ax.get_ylabel(), ax.lines[0].get_ydata().tolist()  # the mean of two seeds
    ('Accuracy (%)', [50.0, 50.0])
    """
    label, scale = checks.metric_axis(metric)
    checks.check_filled(data, "a mapping from method to a number per epoch")
    checked = {
        name: scale * np.atleast_2d(checks.array(f"data[{name!r}]", values, "(epochs,)", "(seeds, epochs)"))
        for name, values in data.items()
    }
    ax = drawing.given_or_new(ax, 2.0 + drawing.legend_height(data))
    for number, (name, seeds) in enumerate(checked.items()):
        epoch, mean = range(1, seeds.shape[1] + 1), seeds.mean(0)
        style = drawing.line_style(number)
        ax.plot(epoch, mean, label=name, linewidth=1.2, **style)
        if len(seeds) > 1:
            deviation = seeds.std(0, ddof=1)
            low, high = mean - deviation, mean + deviation
            ax.fill_between(epoch, low, high, color=style["color"], alpha=0.2, linewidth=0)
    drawing.finish(ax, "Epoch", f"{part.capitalize()} {label}".lstrip(), title, whole=True)
    return drawing.legend_below(ax) if legend else ax


def severity_curves(
    data: Mapping[str, Numbers],
    ax: Axes | None = None,
    *,
    severities: Sequence[str],
    metric: str = "ece",
    title: str | None = None,
) -> Axes:
    """Plot one metric on shifted data against the severity of the shift, for several methods.

    Args:
        data: by method, ``(severities,)`` or ``(seeds, severities)``. For several seeds, the mean is drawn
            with bars of one standard deviation.
        ax: the axes to draw on; None for a new figure.
        severities: a label for each severity, the clean data first.
        metric: the key of the metric in `calibrant.metrics.METRICS`, such as "ece" or "accuracy".
        title: the title.

    >>> from matplotlib.figure import Figure
    >>> ax = severity_curves({"ce": [0.25, 0.5]}, Figure().subplots(), severities=["0", "1"])
    >>> ax.get_ylabel(), ax.lines[0].get_ydata().tolist()
    ('ECE (%)', [25.0, 50.0])
    """
    label, scale = checks.metric_axis(metric)
    checks.check_filled(data, "a mapping from method to a number per severity")
    shapes = "(severities,)", "(seeds, severities)"
    checked = {
        name: scale * np.atleast_2d(checks.array(f"data[{name!r}]", values, *shapes))
        for name, values in data.items()
    }
    for name, seeds in checked.items():
        if seeds.shape[1] != len(severities):
            raise ValueError(
                f"data[{name!r}] must have {len(severities)} severities, got {seeds.shape[1]} numbers"
            )
    ax = drawing.given_or_new(ax, 2.0 + drawing.legend_height(data))
    places = np.arange(len(severities))
    lines = []
    for number, (name, seeds) in enumerate(checked.items()):
        deviation = seeds.std(0, ddof=1) if len(seeds) > 1 else None
        lines.append(drawing.line_with_bars(ax, number, name, places, seeds.mean(0), deviation))
    ax.set_xticks(places, list(severities))
    if METRICS[metric].percent and not METRICS[metric].higher_is_better:
        ax.set_ylim(bottom=0)
    ax.grid(axis="y", linewidth=0.3, color="#CCCCCC")
    ax.set_axisbelow(True)
    drawing.finish(ax, "Severity" if severities[-1].isdecimal() else "", label, title)
    return drawing.legend_below(ax, lines)
