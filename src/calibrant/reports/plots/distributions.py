"""Plots of distributions: logits, confidences, probabilities below the true class, and ROC curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cbook import boxplot_stats
from torch import Tensor

from calibrant.arguments import whole_number
from calibrant.layout import arrange
from calibrant.metrics.ood import detection, rates
from calibrant.reports.plots import checks, drawing
from calibrant.reports.plots.checks import Array, Numbers


def maximum_logits(
    data: Mapping[str, Tensor], ax: Axes | None = None, *, bins: int = 50, title: str | None = None
) -> Axes:
    """Plot histograms of the largest logit.

    Args:
        data: by method or data set, logits ``(N, K, *S)``.
        bins: the number of bins, of equal width and the same for all.

    >>> logits = torch.tensor([[0.0, 1.0], [0.0, 3.0], [5.0, 0.0], [0.0, 5.0]])
    >>> ax = maximum_logits({"ce": logits}, bins=2)
    >>> ax.patches[0].get_data().values.tolist()  # percentages in [1, 3) and in [3, 5]
    [25.0, 75.0]
    """
    largest = _per_element(data, bins, lambda logits: logits.amax(1))
    limits = np.histogram_bin_edges(np.concatenate(list(largest.values())), bins)
    return _histograms(largest, limits, ax, "Maximum logit", title)


def confidences(
    data: Mapping[str, Tensor], ax: Axes | None = None, *, bins: int = 25, title: str | None = None
) -> Axes:
    """Plot histograms of the confidence, the largest probability.

    Args:
        data: by method or data set, logits ``(N, K, *S)``.
        bins: the number of bins, of equal width on [0, 1].

    >>> logits = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.2, 0.8], [0.6, 0.4]]).log()
    >>> ax = confidences({"ce": logits}, bins=4)
    >>> ax.patches[0].get_data().values.tolist()  # percentages in each quarter
    [0.0, 0.0, 50.0, 50.0]
    """
    largest = _per_element(data, bins, lambda logits: logits.softmax(1).amax(1))
    ax = _histograms(largest, np.linspace(0, 1, bins + 1), ax, "Confidence", title)
    ax.set_xlim(0, 1)
    return ax


def _per_element(
    data: Mapping[str, Tensor], bins: int, value: Callable[[Tensor], Tensor]
) -> dict[str, Array]:
    """Check the logits, and compute one number per element."""
    whole_number("bins", bins)
    checks.check_filled(data, "a mapping from name to logits")
    found = {}
    for name, logits in data.items():
        _check_logits(name, logits)
        found[name] = value(logits.detach().double().cpu()).flatten().numpy()
    return found


def _check_logits(name: str, logits: Tensor) -> None:
    if not isinstance(logits, Tensor) or logits.ndim < 2 or not logits.numel():
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"data[{name!r}] must be a tensor of logits (N, K, *S), got {given}")
    if not logits.isfinite().all():
        raise ValueError(f"data[{name!r}] must be finite, but some logits are NaN or infinite")


def lower_probabilities(
    data: Mapping[str, tuple[Tensor, Tensor]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Plot boxes of q, the largest probability below that of the true class, without outliers.

    Boxes span the quartiles, with a line at the median. Whiskers reach to the last element within 1.5 times
    the length of the box. q is 0 where the true class has the smallest probability.

    Args:
        data: by method, logits ``(N, K, *S)`` and labels ``(N, *S)``; the label -100 is ignored.

    >>> logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log()
    >>> ax = lower_probabilities({"ce": (logits, torch.tensor([0, 1, 2]))})
    >>> [round(float(number), 3) for number in ax.lines[2].get_xdata()]  # the median of 0.3, 0.2 and 0
    [0.2, 0.2]
    """
    checks.check_filled(data, "a mapping from name to logits and labels")
    largest = {}
    for name, pair in data.items():
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"data[{name!r}] must be logits and labels, got {type(pair).__name__}")
        logits, labels = pair
        _check_logits(name, logits)
        try:
            elements = arrange(logits, labels, look_at_labels=True)
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"data[{name!r}]: {problem}") from None
        rows = elements.rows.double().softmax(1)
        if not len(rows):
            raise ValueError(f"data[{name!r}] must have an element that counts, but all labels are -100")
        own = rows.gather(1, elements.labels.unsqueeze(1))
        largest[name] = torch.where(rows < own, rows, 0).amax(1).cpu().numpy()
    ax = drawing.given_or_new(ax, 1.7 + drawing.rows_height(data))
    look: dict[str, Any] = {"facecolor": "none", "edgecolor": drawing.BLUE, "linewidth": 0.9}
    for row, box in enumerate(boxplot_stats(list(largest.values()))):
        ax.barh(row, box["q3"] - box["q1"], 0.5, box["q1"], **look)
        for end, quartile in (("whislo", "q1"), ("whishi", "q3")):
            ax.plot([box[end], box[quartile]], [row, row], color=drawing.BLUE, linewidth=0.9)
        ax.plot([box["med"]] * 2, [row - 0.25, row + 0.25], color=drawing.VERMILLION, linewidth=1.4)
    drawing.name_rows(ax, list(largest))
    ax.set_xlim(left=0)
    return drawing.finish(ax, "Largest probability below that of the true class, q", "", title)


def _histograms(
    data: Mapping[str, Array], limits: Array, ax: Axes | None, xlabel: str, title: str | None
) -> Axes:
    ax = drawing.given_or_new(ax, 2.0 + drawing.legend_height(data))
    for number, (name, values) in enumerate(data.items()):
        percent = 100 * np.histogram(values, limits)[0] / len(values)
        style = drawing.line_style(number)
        ax.stairs(percent, limits, label=name, linewidth=1.2, **style)
        ax.stairs(percent, limits, fill=True, alpha=0.12, color=style["color"])
    ax.set_ylim(bottom=0)
    drawing.finish(ax, xlabel, "Elements (%)", title)
    return drawing.legend_below(ax)


def roc_curve(
    data: Mapping[str, tuple[Numbers, Numbers]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Plot ROC curves of scores that detect out-of-distribution data, with the areas under them.

    Args:
        data: by method, the scores ``(N,)`` of data in the distribution and ``(M,)`` of data outside; high
            scores mean outside.

    >>> ax = roc_curve({"entropy": ([0.1, 0.2, 0.3], [0.3, 0.4])})
    >>> ax.get_legend().get_texts()[0].get_text()  # one of 6 pairs is tied
    'entropy: 91.67'
    """
    checks.check_filled(data, "a mapping from method to (in_scores, out_scores)")
    curves, areas = {}, {}
    for name, scores in data.items():
        if len(scores) != 2:
            raise ValueError(f"data[{name!r}] must be (in_scores, out_scores), got {len(scores)} items")
        inside, outside = (
            torch.from_numpy(checks.array(f"{which} of {name!r}", part, "(N,)", infinite=True))
            for which, part in zip(("in_scores", "out_scores"), scores, strict=True)
        )
        false, true = rates(inside, outside)
        curves[name] = false.numpy(), true.numpy()
        areas[name] = detection(inside, outside).auroc
    return _roc_curves(curves, areas, ax, title)


def mean_roc_curve(
    data: Mapping[str, tuple[Numbers, float]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Plot ROC curves that are means over seeds, with the mean areas under them.

    Args:
        data: by method, the true positive rates at evenly spaced false positive rates from 0 to 1, as
            `calibrant.metrics.ood.roc` returns them, and the area, as fractions.

    >>> ax = mean_roc_curve({"ce": ([0.0, 0.8, 1.0], 0.65)})
    >>> ax.get_legend().get_texts()[0].get_text()
    'ce: 65.00'
    """
    checks.check_filled(data, "a mapping from method to (true positive rates, area)")
    curves = {}
    for name, (given, _) in data.items():
        true = checks.array(f"data[{name!r}]", given, "(points,)")
        # The curve begins at the origin. A first rate above 0 is found without a false positive.
        curves[name] = np.insert(np.linspace(0, 1, len(true)), 0, 0.0), np.insert(true, 0, 0.0)
    return _roc_curves(curves, {name: area for name, (_, area) in data.items()}, ax, title)


def _roc_curves(
    curves: Mapping[str, tuple[Array, Array]],
    areas: Mapping[str, float],
    ax: Axes | None,
    title: str | None,
) -> Axes:
    """Draw false and true positive rates by method."""
    few = len(curves) <= 6
    height = 2.9 if few else 2.7 + drawing.legend_height([f"{name}: 99.99" for name in curves])
    ax = drawing.given_or_new(ax, height)
    ax.plot([0, 100], [0, 100], color=drawing.GREY, linestyle=":", linewidth=0.8)
    for number, (name, (false, true)) in enumerate(curves.items()):
        label = f"{name}: {100 * areas[name]:.2f}"
        ax.plot(100 * false, 100 * true, label=label, linewidth=1.2, **drawing.line_style(number))
    ax.set(xlim=(-1, 101), ylim=(-1, 101))
    drawing.finish(ax, "False positive rate (%)", "True positive rate (%)", title)
    if few:
        return drawing.legend_inside(ax, "lower right", "AUROC (%)")
    return drawing.legend_below(ax, title="AUROC (%)")
