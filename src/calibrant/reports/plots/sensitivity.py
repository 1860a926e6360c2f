"""Plot of the sensitivity to an option: one metric against the values of the option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from calibrant.evaluation.comparison import MeanFigure
from calibrant.reports.plots import checks, drawing

_LOGARITHMIC = 30  # the ratio of the largest to the smallest value from which on the axis is logarithmic
_NAMED = 8  # more values do not all get a tick


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
        ax: the axes to draw on; None for a new figure.
        option: the name of the first option.
        metric: the key of the metric in `calibrant.metrics.METRICS`.
        after: whether the metric is measured after temperature scaling; for the label.
        chosen: the line and the value to mark.
        legend: whether several lines get a legend below.
        title: the title.

    >>> from matplotlib.figure import Figure
    >>> figures = {4: MeanFigure(0.02, 0.01, None), 6: MeanFigure(0.01, 0.0, None)}
    >>> ax = sensitivity({"": figures}, Figure().subplots(), option="margin", chosen=("", 6))
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
    ax.grid(linewidth=0.3, color="#CCCCCC")
    ax.set_axisbelow(True)
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
