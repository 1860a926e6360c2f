"""The files of a comparison of methods: tables for papers, plots, and one HTML page with everything."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from calibrant.atomic import replace_file
from calibrant.evaluation.comparison import Comparison
from calibrant.metrics import METRICS
from calibrant.reports import plots
from calibrant.reports.page import Summary, write_report
from calibrant.reports.plots.drawing import default_style, png, svg
from calibrant.reports.plots.losses import quantity_label
from calibrant.reports.table_builders import comparison_note, comparison_table
from calibrant.reports.tables import HTML, plain_markdown, tex, to_latex, to_markdown

_CURVES = {"validation_accuracy": "accuracy", "validation_nll": "nll", "validation_ece": "ece"}


History = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
Learned = Mapping[str, Mapping[str, Tensor]]


def markdown(comparison: Comparison) -> str:
    """The table of a comparison in Markdown.

    ``↑`` and ``↓`` mark figures that are significantly better and worse than those of the first method.

    >>> import torch
    >>> from calibrant.evaluation.comparison import Method
    >>> from calibrant.evaluation import evaluate
    >>> evaluation = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    >>> print(markdown(Comparison("toy", (0,), (Method("ce", (evaluation,)),))).splitlines()[4])
    | ce | 100.00 | 0.013 | 1.33 | 1.33 | 0.89 |
    """
    table = comparison_table(comparison)
    heading, note = plain_markdown(comparison.title), plain_markdown(comparison_note(comparison))
    lines = [f"# {heading}", "", to_markdown(table, "loss"), "", note, ""]
    intervals = table.intervals()
    if intervals.columns:
        lines += ["95 % intervals of the means:", "", to_markdown(intervals, "loss"), ""]
    return "\n".join(lines)


def latex(comparison: Comparison) -> str:
    """The table of a comparison in LaTeX, for the package booktabs."""
    return f"% {tex(comparison_note(comparison))}\n{to_latex(comparison_table(comparison), 'Loss')}\n"


FILES = ("results.json", "results.md", "results.tex", "report.html")
"""The files that `write_comparison` writes beside the plots."""


def write_comparison(
    comparison: Comparison,
    folder: str | os.PathLike[str],
    history: History | None = None,
    learned: Learned | None = None,
) -> None:
    """Write ``results.json``, ``results.md``, ``results.tex``, ``plots/*.png`` and ``report.html``.

    Args:
        comparison: the comparison to write.
        folder: the folder to write to; it is created if necessary, and existing files are replaced.
        history: by method, one list per seed with the figures after each epoch.
        learned: by method, what its loss learned with the first seed: tensors ``(epochs, …)`` by name.
    """
    target = Path(folder)
    (target / "plots").mkdir(parents=True, exist_ok=True)
    replace_file(target / "results.json", (comparison.to_json() + "\n").encode())
    replace_file(target / "results.md", markdown(comparison).encode())
    replace_file(target / "results.tex", latex(comparison).encode())
    pictures = []
    with default_style():
        for name, (figure, caption) in _pictures(comparison, history or {}, learned or {}).items():
            replace_file(target / "plots" / f"{name}.png", png(figure))
            pictures.append((caption, svg(figure)))
        replace_file(target / "plots" / "reliability.png", png(_diagrams(comparison)))
    note = comparison_note(comparison, HTML)
    summary = Summary("Comparison", note, comparison_table(comparison), tuple(pictures))
    evaluations = [method.before[0] for method in comparison.methods]
    evaluations += [method.after[0] for method in comparison.methods if method.after]
    write_report(evaluations, target / "report.html", title=comparison.title, summary=summary)


def _pictures(comparison: Comparison, history: History, learned: Learned) -> dict[str, tuple[Figure, str]]:
    """Figures and their captions by file name."""
    found: dict[str, tuple[Figure, str]] = {}

    def add(file: str, caption: str, plot: Callable[..., Axes], data: object, **options: Any) -> None:
        figure = Figure(figsize=(4.2, options.pop("height", 3.4)), layout="constrained")
        plot(data, figure.subplots(), **options)
        found[file] = figure, caption

    several = len(comparison.seeds) > 1
    states = {"before": comparison.figures("ece")}
    if after := comparison.figures("ece", after=True):
        states["after temperature scaling"] = after
    caption = "Expected calibration error: mean over seeds and its 95 % interval"
    height = 1.3 + 0.28 * len(states["before"])
    add("ece", caption, plots.methods_side_by_side, states, height=height)
    points = {
        method.name: [(each.accuracy, each.ece) for each in method.before] for method in comparison.methods
    }
    caption = "Accuracy against ECE: methods at the upper left are best"
    caption += "; bars are standard deviations over seeds" if several else ""
    add("accuracy-against-ece", caption, plots.accuracy_against_ece, points, height=3.6)
    for column, metric in _CURVES.items():
        curves = {
            name: [[row[column] for row in rows] for rows in seeds]
            for name, seeds in history.items()
            if seeds and all(column in row for rows in seeds for row in rows)
        }
        if any(len(rows) > 1 for seeds in curves.values() for rows in seeds):
            caption = f"{METRICS[metric].label} on the validation data after each epoch"
            caption += "; bands are standard deviations over seeds" if several else ""
            add(f"training-{metric}", caption, plots.training_curves, curves, metric=metric)
    for method, quantities in learned.items():
        letters = "".join(letter if letter.isalnum() or letter in "-=." else "-" for letter in method)
        for name, values in quantities.items():
            if len(values) > 1 and values.numel() and values.isfinite().all():
                rows = values.reshape(len(values), -1)
                caption = f"{quantity_label(name)} after each epoch, learned by {method} with the first seed"
                file = f"{name}-{letters.strip('-')}"
                add(file, caption, plots.learned_quantity, rows, name=name, title=method)
    return found


def _diagrams(comparison: Comparison) -> Figure:
    """Reliability diagrams of the first seed, before and after temperature scaling."""
    both = [method.before[:1] + method.after[:1] for method in comparison.methods]
    across, down = len(both), max(len(column) for column in both)
    figure = Figure(figsize=(2.9 * across, 3.3 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for number, column in enumerate(both):
        for row, evaluation in enumerate(column):
            plots.reliability_diagram(
                evaluation.reliability, axes[row][number], title=evaluation.name, ece=evaluation.ece
            )
    return figure
