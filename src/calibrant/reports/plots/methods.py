"""Plots that compare methods or settings: one metric, ranks, accuracy against ECE, risk against coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from calibrant.arguments import instance_of
from calibrant.evaluation.comparison import MeanFigure
from calibrant.evaluation.ranks import Ranks
from calibrant.metrics import METRICS, RiskCoverage
from calibrant.reports.plots import checks, drawing
from calibrant.reports.plots.checks import Numbers

_LOGARITHMIC = 30  # the ratio of the largest to the smallest value from which on the axis is logarithmic
_NAMED = 8  # more values do not all get a tick


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
        metric: the kind of calibration error, a key of `calibrant.metrics.METRICS`.

    >>> ax = accuracy_against_ece({"ce": [(0.9, 0.05), (0.92, 0.07)]})
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
    drawing.add_grid(ax)
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

    >>> data = {"before": {"ce": MeanFigure(0.05, None, (0.04, 0.06)), "ls": MeanFigure(0.02, None, None)}}
    >>> ax = methods_side_by_side(data)
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
    drawing.add_grid(ax, "x")
    if any(figure.interval is not None for figures in data.values() for figure in figures.values()):
        label += ", mean and 95 % interval"
    drawing.finish(ax, label, "", title)
    return drawing.legend_below(ax, points)


BANDS = "mean over seeds, with a band of one standard deviation"
"""What `training_curves` draws for several seeds."""


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
            band of one standard deviation; the legend says so.
        part: the part of the data, such as "validation", for the label of the axis.
        legend: whether to draw a legend.

    >>> ax = training_curves({"ce": [[0.25, 0.5], [0.75, 0.5]]}, metric="accuracy")
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
    bands = any(len(seeds) > 1 for seeds in checked.values())
    return drawing.legend_below(ax, title=BANDS if bands else None) if legend else ax


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
        severities: a label for each severity, the clean data first.

    >>> ax = severity_curves({"ce": [0.25, 0.5]}, severities=["0", "1"])
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
    drawing.add_grid(ax, "y")
    drawing.finish(ax, "Severity" if severities[-1].isdecimal() else "", label, title)
    return drawing.legend_below(ax, lines)


def sensitivity(
    data: Mapping[str, Mapping[Any, MeanFigure]],
    ax: Axes | None = None,
    *,
    option: str = "value",
    metric: str = "ece",
    after: bool = False,
    chosen: tuple[str, Any] | None = None,
    legend: bool = True,
    title: str | None = None,
) -> Axes:
    """Plot a metric against the values of an option, with standard deviations over seeds.

    Numbers are at their place on the axis, which is logarithmic if they span a wide range. Other values are
    evenly spaced in their order.

    Args:
        data: by line, such as a value of a second option, the figures by value of the first option.
        option: the name of the first option.
        after: whether the metric is measured after temperature scaling; for the label.
        chosen: the line and the value to mark.
        legend: whether several lines get a legend below.

    >>> figures = {4: MeanFigure(0.02, 0.01, None), 6: MeanFigure(0.01, 0.0, None)}
    >>> ax = sensitivity({"": figures}, option="margin", chosen=("", 6))
    >>> ax.get_xlabel(), ax.lines[0].get_xydata().tolist()
    ('margin', [[4.0, 2.0], [6.0, 1.0]])
    """
    label, scale = checks.metric_axis(metric)
    checks.check_filled(data, "a mapping from line to figures by value")
    for name, figures in data.items():
        checks.check_filled(figures, f"a mapping from line to figures by value, with values for {name!r}")
    if chosen is not None and chosen[1] not in data.get(chosen[0], {}):
        raise ValueError(f"chosen must be a line and one of its values, got {chosen}")
    values = list(dict.fromkeys(value for figures in data.values() for value in figures))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if numeric:
        values.sort()
    places = {value: float(value if numeric else place) for place, value in enumerate(values)}

    legend = legend and len(data) > 1
    ax = drawing.given_or_new(ax, 2.2 + (drawing.legend_height(data) if legend else 0))
    if numeric and values[0] > 0 and values[-1] >= _LOGARITHMIC * values[0]:
        ax.set_xscale("log")
    lines = []
    for number, (name, figures) in enumerate(data.items()):
        drawn = [value for value in values if value in figures]
        several = any(figures[value].std is not None for value in drawn)
        bars = [scale * (figures[value].std or 0.0) for value in drawn] if several else None
        heights = [scale * figures[value].mean for value in drawn]
        at = [places[value] for value in drawn]
        lines.append(drawing.line_with_bars(ax, number, name, at, heights, bars))
    if chosen is not None:
        line, value = chosen
        place, height = places[value], scale * data[line][value].mean
        ax.plot(place, height, "o", markersize=9, fillstyle="none", color="black", markeredgewidth=0.9)
    if not numeric:
        ax.set_xlim(-0.5, len(values) - 0.5)
    drawing.add_grid(ax)
    drawing.finish(ax, option, label + (", after temperature scaling" if after else ""), title)
    ax.xaxis.label.set_parse_math(False)
    _set_ticks(ax, values, numeric)
    return drawing.legend_below(ax, lines) if legend else ax


def _set_ticks(ax: Axes, values: list[Any], numeric: bool) -> None:
    if not numeric:
        ax.set_xticks(range(len(values)), [drawing.shortened(str(value)) for value in values])
        for text in ax.get_xticklabels():
            text.set_parse_math(False)
    elif len(values) <= _NAMED:
        ax.set_xticks(values, [f"{value:g}" for value in values])
        ax.xaxis.set_minor_locator(NullLocator())
    elif ax.get_xscale() == "log":
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def mean_ranks(ranks: Ranks, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Plot the mean rank of every method with its 95 % interval, the best at the top.

    A bar at the right connects methods that do not differ significantly (Nemenyi's test at 5 %).

    Args:
        ranks: the ranks, as `calibrant.evaluation.ranks.rank_methods` returns them.

    >>> from calibrant.evaluation.ranks import rank_methods
    >>> values = {name: {"ce": [0.2], "ls": [0.1]} for name in ("digits", "cifar10")}
    >>> ax = mean_ranks(rank_methods(values, higher_is_better=False))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['ls', 'ce']
    """
    names = list(ranks.mean)
    ax = drawing.given_or_new(ax, 1.3 + drawing.rows_height(names))
    for row, name in enumerate(names):
        ax.plot(ranks.intervals[name], [row, row], color=drawing.BLUE, linewidth=1.0)
        ax.plot(ranks.mean[name], row, "o", color=drawing.BLUE, markersize=4.5)
    bars = []
    for number, group in enumerate(ranks.groups()):
        if len(group) > 1:
            place = len(names) + 0.6 + 0.35 * number
            rows = [names.index(group[0]) - 0.25, names.index(group[-1]) + 0.25]
            bars += ax.plot([place, place], rows, color="#555555", linewidth=2.5, solid_capstyle="butt")
    drawing.name_rows(ax, names)
    ax.set_xlim(left=0.5)
    ax.set_xticks([1, *(tick for tick in ax.get_xticks() if 1 < tick <= len(names) and tick == int(tick))])
    data = f"{len(ranks.data)} data sets" if len(ranks.data) > 1 else ranks.data[0]
    drawing.add_grid(ax, "x")
    drawing.finish(ax, f"Mean rank over {data} (1 is best)", "", title)
    if bars:
        bars[0].set_label("no significant difference")
        drawing.legend_below(ax, bars[:1])
    return ax


def risk_coverage(
    data: Mapping[str, RiskCoverage], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Plot the error rate of the most confident elements against their share, with intervals as bands.

    Args:
        data: by method, the curve, such as `Evaluation.risk_coverage`.

    >>> curve = RiskCoverage((0.5, 1.0), (0.0, 0.2), ((0.0, 0.3), (0.1, 0.4)))
    >>> ax = risk_coverage({"ce": curve})
    >>> ax.lines[0].get_ydata().tolist()
    [0.0, 20.0]
    """
    checks.check_filled(data, "a mapping from name to RiskCoverage")
    for name, curve in data.items():
        instance_of(f"data[{name!r}]", curve, RiskCoverage)
    ax = drawing.given_or_new(ax, 2.3 + drawing.legend_height(data))
    for number, (name, curve) in enumerate(data.items()):
        coverage, risk = (
            100 * checks.array(f"{what} of {name!r}", values, "(points,)")
            for what, values in (("coverage", curve.coverage), ("risk", curve.risk))
        )
        ends = 100 * checks.array(f"interval of {name!r}", curve.interval, "(points, 2)")
        if not len(coverage) == len(risk) == len(ends):
            raise ValueError(
                f"the curve of {name!r} has {len(coverage)} coverages, {len(risk)} risks and "
                f"{len(ends)} intervals"
            )
        style = drawing.line_style(number)
        ax.plot(coverage, risk, label=name, linewidth=1.2, **style)
        ax.fill_between(coverage, *ends.T, color=style["color"], alpha=0.15, linewidth=0)
    # Intervals of the first few elements reach far up. They must not flatten the curves.
    highest = max(100 * max(curve.risk) for curve in data.values())
    ends_at_all = max(100 * curve.interval[-1][1] for curve in data.values())
    ax.set(xlim=(0, 100), ylim=(0, 1.15 * max(highest, ends_at_all, 0.1)))
    drawing.finish(ax, "Coverage (%)", "Risk: error rate (%)", title)
    return drawing.legend_below(ax) if len(data) > 1 else ax
