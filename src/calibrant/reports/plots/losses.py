"""Plots of the quantities that adaptive losses learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.lines import Line2D

from calibrant.losses.adaptive import SYMBOLS
from calibrant.reports.plots import checks, drawing
from calibrant.reports.plots.checks import Array, Numbers

_CROWD = 50  # more lines are rasterised: nobody can pick one out, and a vector file would be large
_BINS_COMPARED = 4  # pairs of lines that readers can distinguish
_WORDS = {"gamma": "exponent"}  # where the name of a quantity is not its word


def learned_quantity(
    data: Numbers, ax: Axes | None = None, *, name: str = "value", title: str | None = None
) -> Axes:
    """Plot any quantity that a loss learns, over the epochs.

    A scalar is one line. Of a vector, every entry is a thin line, with the largest, mean and smallest on top.
    Exponents of bins are drawn as by `gammas`. Where all values are equal, the plot says "constant".

    Args:
        data: ``(epochs,)``, or ``(epochs, n)`` for a vector.
        name: the name of the quantity, such as "multiplier" or "scale".

    >>> ax = learned_quantity([1.0, 1.5, 1.75], name="logit_scale")
    >>> ax.get_ylabel(), ax.lines[0].get_ydata().tolist()
    ('Logit scale', [1.0, 1.5, 1.75])
    """
    values = checks.array("data", data, "(epochs,)", "(epochs, n)")
    label = quantity_label(name)
    if len(values) > 1 and np.ptp(values) == 0:
        return _constant(values, ax, label, title)
    if values.ndim == 2 and values.shape[1] > 1:
        if name == "gamma":
            return _per_bin(values, ax, label, title, "Bin", zero=True, xlabel="Epoch")
        return _range(values, ax, label, title, "Epoch", "Each value")
    ax = drawing.given_or_new(ax, 2.4)
    ax.plot(range(1, len(values) + 1), values.reshape(-1), linewidth=1.4, color=drawing.BLUE)
    return drawing.finish(ax, "Epoch", label, title, whole=True)


def quantity_label(name: str) -> str:
    """The name of a learned quantity in print."""
    words = _WORDS.get(name, name).replace("_", " ").capitalize()
    return f"{words} {SYMBOLS.get(name, '')}".rstrip()


def multipliers(
    data: Numbers, ax: Axes | None = None, *, title: str | None = None, ylabel: str = "Multiplier λ"
) -> Axes:
    """Plot the multiplier of each class over the passes, with the largest, mean and smallest.

    Args:
        data: ``(passes, K)``, such as a copy of the loss's `multiplier` after each pass.
        ylabel: the name of the numbers, for penalty weights and the like.

    >>> ax = multipliers([[1.0, 1.0], [0.5, 2.0]])
    >>> {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    {'Max': [1.0, 2.0], 'Mean': [1.0, 1.25], 'Min': [1.0, 0.5]}
    """
    return _range(checks.array("data", data, "(passes, K)"), ax, ylabel, title, "Pass", "Per class")


def gammas(data: Numbers, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Plot AdaFocal's exponent γ of each bin over the passes.

    Args:
        data: ``(passes, bins)``, such as a copy of the loss's `gamma` after each pass.

    >>> ax = gammas([[1.0, 1.0], [0.5, 2.0], [0.25, 4.0]])
    >>> ax.lines[-1].get_ydata().tolist()  # the last bin
    [1.0, 2.0, 4.0]
    """
    values = checks.array("data", data, "(passes, bins)")
    return _per_bin(values, ax, quantity_label("gamma"), title, "Bin", zero=True)


def gaps(data: Numbers, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Plot confidence minus accuracy of each bin over the passes; positive gaps are over-confidence.

    Args:
        data: ``(passes, bins)``, as fractions. NaN stands for an empty bin and interrupts its line.

    >>> ax = gaps([[0.0, 0.5], [float("nan"), 0.25]])
    >>> ax.lines[-1].get_ydata().tolist()  # the last bin
    [50.0, 25.0]
    """
    values = 100 * checks.array("data", data, "(passes, bins)", missing=True)
    return _per_bin(values, ax, "Confidence − accuracy (%)", title, "Bin", zero=True)


def edges(data: Numbers, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Plot the edges of the bins of confidence over the passes.

    Args:
        data: ``(passes, bins + 1)``, such as a copy of the loss's `edges` after each pass.

    >>> ax = edges([[0.0, 0.5, 1.0], [0.0, 0.75, 1.0]])
    >>> ax.lines[1].get_ydata().tolist()  # the edge between two bins
    [0.5, 0.75]
    """
    values = checks.array("data", data, "(passes, bins + 1)")
    return _per_bin(values, ax, "Confidence", title, "Edge", first=0)


def bin_confidences(
    data: Mapping[str, Numbers],
    ax: Axes | None = None,
    *,
    bins: Sequence[int] | None = None,
    title: str | None = None,
) -> Axes:
    """Plot the mean confidence of some bins over the passes, for example on training and validation data.

    Args:
        data: ``(passes, bins)`` by data set, such as "training" and "validation". NaN stands for an empty bin
            and interrupts its line.
        bins: the bins to draw, counted from 0; None for at most four, evenly spread.

    >>> passes = {"training": [[0.4, 0.9], [0.3, 0.9]], "validation": [[0.4, 0.8], [0.4, 0.7]]}
    >>> ax = bin_confidences(passes, bins=[1])
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['training', 'validation', 'Bin 2']
    """
    checks.check_filled(data, "a mapping from data set to the confidence per pass and bin")
    checked = {
        name: checks.array(f"data[{name!r}]", values, "(passes, bins)", missing=True)
        for name, values in data.items()
    }
    shapes = {name: values.shape for name, values in checked.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"all data sets must have the same passes and bins, got {shapes}")
    lines = drawing.LINES[: len(checked)]
    if len(checked) > len(lines):
        raise ValueError(f"at most {len(lines)} data sets can be told apart, got {len(checked)}")
    passes, total = next(iter(shapes.values()))
    if bins is None:
        bins = sorted({round(b) for b in np.linspace(0, total - 1, min(total, _BINS_COMPARED)).tolist()})
    if not bins or not all(0 <= b < total for b in bins):
        raise ValueError(f"bins must be some of 0 to {total - 1}, got {list(bins)}")

    ax = drawing.given_or_new(ax, 2.6)
    colours = dict(zip(bins, drawing.shades(len(bins)), strict=True))
    for (name, values), line in zip(checked.items(), lines, strict=True):
        for b, colour in colours.items():
            label = f"{name}, bin {b + 1}"
            x, y = range(1, passes + 1), values[:, b]
            ax.plot(x, y, color=colour, linestyle=line, linewidth=1.2, label=label)
    drawing.finish(ax, "Pass", "Confidence", title, whole=True)
    entries = [
        Line2D([], [], color=drawing.GREY, linestyle=line, label=name)
        for name, line in zip(checked, lines, strict=True)
    ]
    entries += [Line2D([], [], color=colour, label=f"Bin {b + 1}") for b, colour in colours.items()]
    return drawing.legend_below(ax, entries)


def _constant(values: Array, ax: Axes | None, ylabel: str, title: str | None) -> Axes:
    """One line for values that are all equal, on an axis that begins at 0."""
    value = float(values.flat[0])
    ax = drawing.given_or_new(ax, 2.4)
    ax.plot([1, len(values)], [value, value], linewidth=1.4, color=drawing.BLUE)
    ax.set_ylim((-1.0, 1.0) if value == 0 else (min(0.0, 2 * value), max(0.0, 2 * value)))
    look: dict[str, Any] = {
        "ha": "center",
        "va": "bottom",
        "textcoords": "offset points",
        "fontsize": drawing.MEDIUM,
    }
    ax.annotate(f"constant: {value:g}", ((1 + len(values)) / 2, value), (0, 3), **look)
    return drawing.finish(ax, "Epoch", ylabel, title, whole=True)


def _range(values: Array, ax: Axes | None, ylabel: str, title: str | None, xlabel: str, each: str) -> Axes:
    """A thin line per column, with the largest, mean and smallest on top."""
    x = range(1, len(values) + 1)
    crowd = values.shape[1] > _CROWD
    ax = drawing.given_or_new(ax, 2.4)
    ax.add_collection(
        LineCollection(
            [np.column_stack([x, column]) for column in values.T],
            colors=drawing.PALE,
            linewidths=0.3 if crowd else 0.6,
            alpha=0.4 if crowd else 0.8,
            rasterized=crowd,
        )
    )
    summaries = {"Max": values.max(1), "Mean": values.mean(1), "Min": values.min(1)}
    lines = [
        ax.plot(x, curve, label=label, linewidth=1.4, **drawing.line_style(number))[0]
        for number, (label, curve) in enumerate(summaries.items())
    ]
    ax.autoscale_view()
    drawing.finish(ax, xlabel, ylabel, title, whole=True)
    return drawing.legend_below(ax, [*lines, Line2D([], [], color=drawing.PALE, linewidth=0.8, label=each)])


def _per_bin(
    values: Array,
    ax: Axes | None,
    ylabel: str,
    title: str | None,
    what: str,
    *,
    xlabel: str = "Pass",
    first: int = 1,
    zero: bool = False,
) -> Axes:
    """A line per bin, from dark to light with rising confidence."""
    ax = drawing.given_or_new(ax, 2.4)
    number = values.shape[1]
    colours = drawing.shades(number)
    if zero:
        ax.axhline(0, color="black", linewidth=0.6)
    for column, colour in zip(values.T, colours, strict=True):
        ax.plot(range(1, len(values) + 1), column, color=colour, linewidth=1.0)
    limits = np.arange(number + 1) + first - 0.5
    scale = ScalarMappable(BoundaryNorm(limits.tolist(), number), ListedColormap(colours))
    bar = ax.figure.colorbar(scale, ax=ax, pad=0.02, aspect=30)
    bar.set_ticks(list(range(first, number + first, -(-number // 15))))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=drawing.SMALL, length=0)
    bar.set_label(what, fontsize=drawing.MEDIUM)
    return drawing.finish(ax, xlabel, ylabel, title, whole=True)
