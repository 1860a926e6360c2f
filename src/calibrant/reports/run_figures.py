"""The figures of finished runs, and of the formulas of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from calibrant.extras import require

require("report", "matplotlib", purpose=__name__)

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from calibrant.metrics import METRICS
from calibrant.reports import plots
from calibrant.reports.plots.bins import Row, panels
from calibrant.reports.plots.checks import Array
from calibrant.reports.plots.drawing import figure_of, legend_of_figure, rows_height
from calibrant.reports.plots.methods import BANDS

_PARTS = ("validation", "test")
_CURVES = ("accuracy", "nll", "ece", "adaptive_ece")

Drawing = tuple[str, Callable[[], Figure]]
"""A file name without its ending, and a function that draws the figure."""


@dataclass(frozen=True)
class RunRecord:
    """What a finished run holds for its figures."""

    label: str  # the name in legends; runs with one label differ in their seed only
    file: str  # the name as a part of file names; another for each run
    history: Sequence[Mapping[str, float]]  # a log row for each epoch
    bins: Mapping[str, Tensor]  # bins of confidence after each epoch, by name
    learned: Mapping[str, Tensor]  # the learned state of the loss after each epoch, by name
    test: tuple[Tensor, Tensor] | None  # logits and labels of the test data; None if they are not stored
    seed: int = 0  # the seed of the run
    binary: bool = False  # whether it has one logit for each yes-or-no decision; ``test`` holds two


def drawings_of_runs(
    runs: Sequence[RunRecord], *, bins: Sequence[int] | None = None, smooth: float = 0.0
) -> list[Drawing]:
    """The figures that runs have the data for.

    Args:
        runs: the runs to draw.
        bins: the bins to draw, counted from 0; None for all.
        smooth: the factor of an exponential moving average of the curves over the epochs; 0 for none.
    """
    found: list[Drawing] = []
    for part in _PARTS:
        metrics = [name for name in _CURVES if not _lacking(runs, part, name)]
        if metrics:
            found.append((f"curves-{part}", partial(_curves, runs, part, metrics, smooth)))
    binned = [run for run in runs if run.bins]
    if binned:
        chosen = list(range(binned[0].bins["validation_count"].shape[1])) if bins is None else list(bins)
        found += [
            ("bins", partial(_gaps, binned, chosen)),
            ("confidences", partial(_confidences, binned, chosen, "train_true", "validation")),
            ("confidences-own-bins", partial(_confidences, binned, chosen, "train_own", "train_own")),
            ("confidences-true-and-top", partial(_true_and_top, binned, chosen)),
        ]
    for run in runs:
        for name, values in run.learned.items():
            if values.numel() and values.isfinite().all():
                found.append((f"learned-{name}-{run.file}", partial(_learned, run, name, values)))
    tested = [run for run in runs if run.test is not None]
    if several := _by_label([run for run in tested if not run.binary]):
        found.append(("maximum-logits", partial(_maximum_logits, several)))
    if by_label := _by_label(tested):
        found.append(("lower-probability", partial(_lower_probabilities, by_label)))
    return found


def left_out(runs: Sequence[RunRecord]) -> list[str]:
    """What the figures of `drawings_of_runs` leave out of some runs, and why, a line for each."""
    lines = []
    for part in _PARTS:
        by_runs: dict[str, list[str]] = {}
        for metric in _CURVES:
            lacking = _lacking(runs, part, metric)
            if 0 < len(lacking) < len(runs):
                by_runs.setdefault(_names(lacking), []).append(METRICS[metric].label)
        for names, labels in by_runs.items():
            verb = "is" if len(labels) == 1 else "are"
            lines.append(
                f"curves-{part}: no {', '.join(labels)}, which {verb} not in the log of {names}",
            )
    without = [run for run in runs if not run.bins]
    if 0 < len(without) < len(runs):
        verb = "has" if len(without) == 1 else "have"
        lines.append(f"bins, confidences: without {_names(without)}, which {verb} no bins")
    for run in runs:
        gamma = run.learned.get("gamma")
        if run.bins and gamma is not None and not _fits(run):
            bins = run.bins["validation_count"].shape[1]
            lines.append(
                f"bins: no γ of {run.file}, whose loss has {gamma[0].numel()} values of it for {bins} bins; "
                f"learned-gamma-{run.file} shows them"
            )
    if binary := [run for run in runs if run.binary and run.test is not None]:
        lines.append(
            f"maximum-logits: without {_names(binary)}; a binary run has one logit for each decision, so "
            "none is the largest"
        )
    return lines


def _lacking(runs: Sequence[RunRecord], part: str, metric: str) -> list[RunRecord]:
    """The runs whose log does not have the metric of a part of the data."""
    return [run for run in runs if f"{part}_{metric}" not in run.history[0]]


def _names(runs: Sequence[RunRecord]) -> str:
    return ", ".join(run.file for run in runs)


def _fits(run: RunRecord) -> bool:
    """Whether the loss learns an exponent for each of the logged bins."""
    gamma = run.learned.get("gamma")
    return gamma is not None and gamma.shape == run.bins["validation_count"].shape


def drawings_of_formulas() -> list[Drawing]:
    """The figures of formulas: penalties, focal losses and their exponents, and φ of the dual focal loss."""
    functions: dict[str, Callable[..., Axes]] = {
        "penalties": plots.penalties,
        "penalty-weights": plots.penalty_weights,
        "focal-losses": plots.focal_losses,
        "exponents": plots.exponents,
        "dual-focal-phi": plots.dual_focal_phi,
    }
    return [(name, partial(figure_of, plot, height=3.2)) for name, plot in functions.items()]


def smoothed(values: Sequence[float], factor: float) -> list[float]:
    """The exponential moving average: each value is ``factor`` of the one before and the rest of its own.

    >>> smoothed([4.0, 2.0, 2.0], 0.5)
    [4.0, 3.0, 2.5]
    """
    return list(accumulate(values, lambda before, value: factor * before + (1 - factor) * value))


def _by_label(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def _curves(runs: Sequence[RunRecord], part: str, metrics: Sequence[str], smooth: float) -> Figure:
    across = min(2, len(metrics))
    down = -(-len(metrics) // across)
    figure = Figure(figsize=(3.6 * across, 2.3 * down + 0.5), layout="constrained")
    axes = np.atleast_1d(figure.subplots(down, across)).flatten()
    groups = _by_label(runs)
    for ax, metric in zip(axes, metrics, strict=False):
        data = {
            label: [smoothed([row[f"{part}_{metric}"] for row in run.history], smooth) for run in group]
            for label, group in groups.items()
        }
        title = f"{METRICS[metric].label}, {part} data"
        plots.training_curves(data, ax, metric=metric, legend=False, title=title)
    for ax in axes[len(metrics) :]:
        ax.remove()
    legend_of_figure(figure, axes[0], title=BANDS if len(runs) > len(groups) else None)
    return figure


def _means(runs: Sequence[RunRecord], name: str, figure: str) -> list[tuple[str, Array]]:
    """The mean of each run in every bin after each epoch, NaN where it is empty."""
    found = []
    for run in runs:
        values = run.bins[f"{name}_{figure}"].masked_fill(run.bins[f"{name}_count"] == 0, torch.nan)
        found.append((run.label, values.double().numpy()))
    return found


def _edges(runs: Sequence[RunRecord], name: str) -> Row:
    """The lower and upper edges of the bins."""
    edges = [(run.label, run.bins[f"{name}_edges"].double().numpy()) for run in runs]
    both = [(label, each) for label, found in edges for each in (found[:, :-1], found[:, 1:])]
    label = "Edges" if name == "validation" else "Edges,\ntraining"
    return Row(label, {"Edges": both}, height=0.6)


def _gaps(runs: Sequence[RunRecord], bins: Sequence[int]) -> Figure:
    confidences, accuracies = (_means(runs, "validation", figure) for figure in ("confidence", "accuracy"))
    pairs = zip(confidences, accuracies, strict=True)
    gaps = [(label, 100 * (confidence - accuracy)) for (label, confidence), (_, accuracy) in pairs]
    rows = [Row("Gap (%)", {"Gap": gaps}, zero=True)]
    exponents = [(run.label, run.learned["gamma"].double().numpy()) for run in runs if _fits(run)]
    if exponents:
        rows.append(Row("Exponent γ", {"γ": exponents}, height=0.8))
    return panels([*rows, _edges(runs, "validation")], bins)


def _confidences(runs: Sequence[RunRecord], bins: Sequence[int], training: str, edges: str) -> Figure:
    curves = {
        "Training, true class": _means(runs, training, "confidence"),
        "Validation, predicted class": _means(runs, "validation", "confidence"),
        "Validation accuracy": _means(runs, "validation", "accuracy"),
    }
    return panels([Row("Confidence", curves), _edges(runs, edges)], bins)


def _true_and_top(runs: Sequence[RunRecord], bins: Sequence[int]) -> Figure:
    curves = {
        "Training, true class": _means(runs, "train_true", "confidence"),
        "Training, predicted class": _means(runs, "train_top", "confidence"),
    }
    return panels([Row("Confidence", curves)], bins)


def _learned(run: RunRecord, name: str, values: Tensor) -> Figure:
    rows = values.reshape(len(values), -1)
    return figure_of(plots.learned_quantity, rows, name=name, title=f"{run.label}, seed {run.seed}")


def _maximum_logits(by_label: Mapping[str, Sequence[RunRecord]]) -> Figure:
    data = {label: torch.cat([logits for logits, _ in _tests(runs)]) for label, runs in by_label.items()}
    return figure_of(plots.maximum_logits, data)


def _lower_probabilities(by_label: Mapping[str, Sequence[RunRecord]]) -> Figure:
    data = {}
    for label, runs in by_label.items():
        logits, labels = zip(*_tests(runs), strict=True)
        data[label] = torch.cat(logits), torch.cat(labels)
    return figure_of(plots.lower_probabilities, data, height=1.2 + rows_height(by_label))


def _tests(runs: Sequence[RunRecord]) -> Iterator[tuple[Tensor, Tensor]]:
    return (run.test for run in runs if run.test is not None)
