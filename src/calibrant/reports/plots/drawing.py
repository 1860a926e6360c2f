"""The common look of all plots: sizes, colours, axes, legends and image formats."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import matplotlib.style
import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike

from calibrant.printable import wrapped

# Sizes are passed to every artist, in points at the width of a paper's column. Setting rcParams would change
# the caller's other plots too.
WIDTH = 3.4
SMALL, MEDIUM, LARGE = 7, 8, 9

# Okabe and Ito's colours, which colour-blind readers can distinguish, without the yellow, too pale on white.
BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
# The second line is for plots with more than seven methods; dashes help where colours look alike.
COLOURS = (
    *(BLUE, VERMILLION, GREEN, ORANGE, "#56B4E9", "#CC79A7", "#000000"),
    *("#7F3F00", "#6F2DA8", "#9BC400", "#8C8C8C", "#A50044", "#00C5B5"),
)
GREY, PALE = "#777777", "#AAAAAA"

# The numbers of colours, lines and markers share no divisor, so combinations repeat as late as possible.
LINES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
MARKERS = "osD^vPX<>"

UPPER_PART = 0.73
"""The part of the height that `axes_below` leaves to axes that are not in a grid of subplots."""

_LONGEST_NAME = 18  # letters; longer names would leave too little of the width to the bars
_ROW_LETTERS, _TITLE_LETTERS = 24, 44  # of a line, for names and titles that are wrapped


def default_style() -> AbstractContextManager[None]:
    """A style that does not depend on the session's settings, so that equal data give equal bytes."""
    return matplotlib.style.context(["default", {"svg.fonttype": "path", "svg.hashsalt": "calibrant"}])


def svg(figure: Figure) -> bytes:
    """The figure as SVG, without a date."""
    return _saved(figure, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    return _saved(figure, format="png", dpi=160, metadata={"Software": None})


def _saved(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with default_style():
        figure.savefig(buffer, **options)
    return buffer.getvalue()


def given_or_new(ax: Axes | None, height: float) -> Axes:
    """The given axes, or those of a new figure of this height in inches."""
    if ax is not None:
        return ax
    # pyplot instead of a bare Figure, so that notebooks and plt.show() show it. pyplot keeps every figure
    # until it is closed: callers who draw many pass axes of a Figure.
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(WIDTH, height), layout="constrained")[1]


def figure_of(plot: Callable[..., Axes], *data: object, height: float = 3.4, **options: Any) -> Figure:
    """A figure for a file, with one plot: ``plot(*data, ax=…, **options)``."""
    figure = Figure(figsize=(4.2, height), layout="constrained")
    plot(*data, ax=figure.subplots(), **options)
    return figure


def axes_below(ax: Axes) -> Axes:
    """New axes with the same horizontal axis, in the lower quarter of the space of ``ax``."""
    place = ax.get_subplotspec()
    if place is not None:  # every layout engine understands this split
        halves = place.subgridspec(2, 1, height_ratios=(3, 1), hspace=0.1)
        ax.set_subplotspec(halves[0])
        return ax.figure.add_subplot(halves[1], sharex=ax)
    left, bottom, width, height = ax.get_position().bounds
    ax.set_position((left, bottom + (1 - UPPER_PART) * height, width, UPPER_PART * height))
    return ax.figure.add_axes((left, bottom, width, 0.24 * height), sharex=ax)


def finish(ax: Axes, xlabel: str, ylabel: str, title: str | None, *, whole: bool = False) -> Axes:
    """Set labels, title and ticks; with `whole`, ticks of the horizontal axis are whole numbers."""
    ax.set_xlabel(xlabel, fontsize=MEDIUM)
    ax.set_ylabel(ylabel, fontsize=MEDIUM)
    if title is not None:
        ax.set_title(wrapped(title, _TITLE_LETTERS), fontsize=LARGE)
    ax.tick_params(labelsize=SMALL)
    ax.spines[["top", "right"]].set_visible(False)
    if whole:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return ax


def add_grid(ax: Axes, axis: Literal["x", "y", "both"] = "both") -> None:
    """Draw the lines of a grid behind the data."""
    ax.grid(axis=axis, linewidth=0.3, color="#CCCCCC")
    ax.set_axisbelow(True)


_COMPACT: dict[str, Any] = {
    "fontsize": SMALL,
    "title_fontsize": SMALL,
    "handlelength": 1.8,
    "handletextpad": 0.5,
    "columnspacing": 1.0,
    "labelspacing": 0.35,
}


def legend_inside(ax: Axes, corner: Literal["upper left", "lower right"], title: str | None = None) -> Axes:
    """A legend in a corner of the axes."""
    legend = ax.legend(loc=corner, title=title, framealpha=0.8, borderpad=0.3, **_COMPACT)
    legend.get_frame().set_linewidth(0.5)
    return without_formulas(legend)


def legend_below(ax: Axes, handles: Sequence[Artist] | None = None, *, title: str | None = None) -> Axes:
    """A legend below the axes, where it hides no data."""
    entries = ax.get_legend_handles_labels()[0] if handles is None else handles
    labels = [str(entry.get_label()) for entry in entries]
    width = ax.get_window_extent().width / ax.figure.dpi * 72
    legend = ax.legend(
        entries,
        labels,
        title=title,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        # Just below the labels of the horizontal axis, whatever the height of the axes.
        bbox_transform=ax.transAxes + ScaledTranslation(0, -28 / 72, ax.figure.dpi_scale_trans),
        ncols=_columns(labels, width),
        frameon=False,
        borderaxespad=0,
        **_COMPACT,
    )
    return without_formulas(legend)


def legend_of_figure(figure: Figure, *axes: Axes, title: str | None = None) -> None:
    """One legend below all axes of a figure, with what is drawn in these axes.

    Without a layout engine, the figure must have room for it.
    """
    handles = [handle for ax in axes for handle in ax.get_legend_handles_labels()[0]]
    labels = [str(handle.get_label()) for handle in handles]
    columns = _columns(labels, 72 * figure.get_figwidth())
    place: dict[str, Any] = {"loc": "outside lower center" if figure.get_layout_engine() else "lower center"}
    options: dict[str, Any] = {"title": title, "ncols": columns, "frameon": False, **place, **_COMPACT}
    without_formulas(figure.legend(handles, labels, **options))


def without_formulas(legend: Legend) -> Axes:
    """Let the texts of a legend be plain; return its axes."""
    for text in legend.get_texts():
        text.set_parse_math(False)  # names may contain dollar signs
    return legend.axes


def _columns(labels: Sequence[str], width: float) -> int:
    """The number of columns of a legend below axes of this width in points."""
    most = max(1, int(width / (3.1 * (6 + max(len(label) for label in labels)))))
    rows = -(-len(labels) // most)
    return -(-len(labels) // rows)  # as few as these rows need, so that the rows are equally full


def legend_height(labels: Iterable[str]) -> float:
    """Inches that `legend_below` takes in a new figure."""
    names = list(labels)
    return 0.15 * -(-len(names) // _columns(names, 0.775 * 72 * WIDTH)) + 0.1


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of the line with this number."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)]}


def point_style(number: int) -> dict[str, Any]:
    """Colour and marker of the points with this number."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def line_with_bars(
    ax: Axes, number: int, name: str, x: ArrayLike, y: ArrayLike, bars: ArrayLike | None
) -> Artist:
    """Draw the line with this number through points with vertical bars, and return what its legend shows."""
    style = line_style(number) | point_style(number)
    drawn = ax.errorbar(x, y, bars, linewidth=1.2, elinewidth=0.8, capsize=2, markersize=3.5, **style)
    line: Artist = drawn[0]
    line.set_label(name)
    return line


def shades(number: int) -> list[tuple[float, float, float, float]]:
    """Colours from dark to light, so that their order is visible without hue; not as light as the paper."""
    return [tuple(colour) for colour in colormaps["viridis"](np.linspace(0, 0.92, number)).tolist()]


def shortened(name: str) -> str:
    """The name, cut off if it is long."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Write names at the rows 0, 1, … of the vertical axis, from the top; long names on several lines."""
    ax.set_yticks(range(len(names)), [wrapped(name, _ROW_LETTERS) for name in names], parse_math=False)
    ax.invert_yaxis()


def rows_height(names: Iterable[str]) -> float:
    """Inches that the rows of these names need."""
    lines = [wrapped(name, _ROW_LETTERS).count("\n") + 1 for name in names]
    return len(lines) * max(0.26, 0.05 + 0.13 * max(lines))
