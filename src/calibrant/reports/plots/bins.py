"""Panels of bins: what happens in each bin of confidence over the epochs, for several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from calibrant.reports.plots import drawing
from calibrant.reports.plots.checks import Array

_COLUMNS = 5

# Inches: the size of a panel, and the space around it for labels.
_WIDTH, _HEIGHT = 1.5, 1.1
_BESIDE, _ABOVE, _BETWEEN, _BELOW, _MARGIN = 0.62, 0.42, 0.08, 0.55, 0.1
_LINE = 0.16  # of a label


@dataclass(frozen=True)
class Row:
    """A kind of panel, of which every bin has one.

    The curves are pairs of the name of a run and its values ``(epochs, bins)``, by the name of the line. NaN
    stands for an empty bin and interrupts the line.
    """

    label: str  # of the vertical axis
    curves: Mapping[str, Sequence[tuple[str, Array]]]
    height: float = 1.0  # relative to other rows
    zero: bool = False  # whether to draw a line at 0


def panels(rows: Sequence[Row], bins: Sequence[int]) -> Figure:
    """Draw a block for every bin, counted from 0: one panel above the other for each row, over the epochs.

    Runs have colours and dashes. If a row has several lines for each run, dashes tell these apart instead.
    """
    names = list(dict.fromkeys(name for row in rows for runs in row.curves.values() for name, _ in runs))
    looks = {name: drawing.line_style(number) for number, name in enumerate(names)}
    if any(len(row.curves) > 1 for row in rows):
        looks = {name: {"color": look["color"]} for name, look in looks.items()}
    across = min(_COLUMNS, len(bins))
    down = -(-len(bins) // across)
    entries = _legend_entries(rows, looks)
    # About 4 points for each letter and ten letters for the line and the space around it.
    entry = 4.2 / 72 * (10 + max(len(str(each.get_label())) for each in entries))
    outside = _LINE * max(row.label.count("\n") + 1 for row in rows)
    width = max(entry, outside + across * (_WIDTH + _BESIDE) + _MARGIN)
    columns = min(len(entries), int(width / entry))
    below = _BELOW + 0.16 * -(-len(entries) // columns)
    block = _ABOVE + sum(_HEIGHT * row.height + _BETWEEN for row in rows)
    height = down * block + below
    figure = Figure(figsize=(width, height))
    for number, b in enumerate(bins):
        left = outside + number % across * (_WIDTH + _BESIDE) + _BESIDE
        top = height - number // across * block - _ABOVE
        first: Axes | None = None
        for place, row in enumerate(rows):
            tall = _HEIGHT * row.height
            # Places in inches: a layout engine takes seconds for so many axes.
            corner = left / width, (top - tall) / height, _WIDTH / width, tall / height
            ax = figure.add_axes(corner, sharex=first)
            top, first = top - tall - _BETWEEN, first or ax
            _draw(ax, row, b, looks)
            last = place == len(rows) - 1
            lowest = number + across >= len(bins)
            title = f"Bin {b + 1}" if place == 0 else None
            ylabel = row.label if number % across == 0 else ""
            drawing.finish(ax, "Epoch" if last and lowest else "", ylabel, title, whole=True)
            ax.tick_params(labelbottom=last)
            ax.yaxis.set_major_locator(MaxNLocator(4))
            ax.ticklabel_format(axis="y", useOffset=False)
    look: dict[str, Any] = {"loc": "lower center", "frameon": False, "fontsize": drawing.SMALL}
    drawing.without_formulas(figure.legend(handles=entries, ncols=columns, **look))
    return figure


_STYLES: tuple[dict[str, Any], ...] = (
    {"linestyle": "-"},
    {"linestyle": ":", "marker": "*", "markersize": 3.0},
    {"linestyle": "--"},
)


def _draw(ax: Axes, row: Row, b: int, looks: Mapping[str, dict[str, Any]]) -> None:
    if row.zero:
        ax.axhline(0, color="black", linewidth=0.6, linestyle="--")
    for style, runs in zip(_STYLES, row.curves.values(), strict=False):
        for name, values in runs:
            curve = values[:, b]
            shown = {**style, "markevery": max(1, len(curve) // 12), **looks[name]}
            if len(curve) == 1:
                shown["marker"] = style.get("marker", ".")
            ax.plot(range(1, len(curve) + 1), curve, linewidth=0.9, **shown)


def _legend_entries(rows: Sequence[Row], looks: Mapping[str, dict[str, Any]]) -> list[Line2D]:
    """An entry for each run, and one for each of its lines if there are several."""
    entries = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    lines = next((list(row.curves) for row in rows if len(row.curves) > 1), [])
    for style, name in zip(_STYLES, lines, strict=False):
        entries.append(Line2D([], [], color=drawing.GREY, label=name, **style))
    return entries
