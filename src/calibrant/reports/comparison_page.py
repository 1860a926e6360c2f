"""The files of a comparison of methods: tables for papers, plots, and one HTML page with everything."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from calibrant.extras import require

require("report", "matplotlib", purpose=__name__)

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from calibrant.atomic import replace_files
from calibrant.evaluation.comparison import Comparison
from calibrant.losses.adaptive import SYMBOLS
from calibrant.metrics import METRICS
from calibrant.printable import counted
from calibrant.reports import charts, plots
from calibrant.reports.page import Summary, write_report
from calibrant.reports.plots.calibration import reliability_grid
from calibrant.reports.plots.drawing import default_style, figure_of, png, rows_height, svg
from calibrant.reports.plots.losses import quantity_label
from calibrant.reports.table_builders import (
    comparison_note,
    comparison_table,
    data_labels,
    level_label,
    shift_tables,
    state_words,
)
from calibrant.reports.tables import means_in_markdown, plain_markdown, tex, to_latex, to_markdown

_CURVES = {"validation_accuracy": "accuracy", "validation_nll": "nll", "validation_ece": "ece"}
_ERRORS = ("ece", "adaptive_ece", "classwise_ece")

_PICTURES = (
    "ece.png",
    "reliability.png",
    *(f"accuracy-against-{metric.replace('_', '-')}.png" for metric in _ERRORS),
    *(f"training-{metric}.png" for metric in _CURVES.values()),
    *("roc-*-before.png", "roc-*-after.png", "roc-*-after-*.png"),
    *("shift-*-accuracy.png", "shift-*-ece.png", "shift-*-ece-*.png"),
)
"""Patterns of the names of pictures, without those of learned quantities."""

_DRAWN_IN_PAGE = ("ece", "accuracy-against-ece")
"""The pictures whose charts the page draws itself."""

History = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
Learned = Mapping[str, Mapping[str, Tensor]]


def markdown(comparison: Comparison) -> str:
    """The table of a comparison in Markdown.

    Figures that differ significantly from those of the first method are marked as better or worse.

    >>> import torch
    >>> from calibrant.evaluation.comparison import Method
    >>> from calibrant.evaluation import evaluate
    >>> evaluation = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    >>> print(markdown(Comparison("toy", (0,), (Method("ce", (evaluation,)),))).splitlines()[4])
    | ce | 100.00 | 0.013 | 1.33 | 1.33 | 0.89 |
    """
    means = means_in_markdown(comparison_table(comparison), comparison_note(comparison), "loss")
    lines = [f"# {plain_markdown(comparison.title)}", "", *means]
    for title, shifted in shift_tables(comparison).items():
        lines += [f"## {plain_markdown(title)}", "", to_markdown(shifted, "loss"), ""]
    return "\n".join(lines)


def latex(comparison: Comparison) -> str:
    """The tables of a comparison in LaTeX, for the package booktabs."""
    parts = [f"% {tex(comparison_note(comparison))}\n{to_latex(comparison_table(comparison), 'Loss')}\n"]
    for title, shifted in shift_tables(comparison).items():
        parts.append(f"% {tex(title)}\n{to_latex(shifted, 'Loss')}\n")
    return "\n".join(parts)


FILES = _JSON, _MARKDOWN, _LATEX, _PAGE = ("results.json", "results.md", "results.tex", "report.html")
"""The files that `write_comparison` writes beside the plots."""


def write_comparison(
    comparison: Comparison,
    folder: str | os.PathLike[str],
    history: History | None = None,
    learned: Learned | None = None,
) -> None:
    """Write `FILES` and ``plots/*.png``.

    Pictures of an earlier comparison in the folder are removed; other files are left alone.

    Args:
        comparison: the comparison to write.
        folder: the folder to write to; it is created if necessary, and existing files are replaced.
        history: by method, one list per seed with the figures after each epoch.
        learned: by method, what its loss learned with the first seed: tensors ``(epochs, …)`` by name.
    """
    target = Path(folder)
    with default_style():
        drawn = _pictures(comparison, history or {}, learned or {})
        images = {f"{name}.png": png(figure) for name, (figure, _) in drawn.items()}
        images["reliability.png"] = png(_diagrams(comparison))
        pictures = [
            (caption, svg(figure)) for name, (figure, caption) in drawn.items() if name not in _DRAWN_IN_PAGE
        ]
    for stale in _own_pictures(target, learned or {}) - images.keys():
        (target / "plots" / stale).unlink(missing_ok=True)
    tables = {
        _JSON: f"{comparison.to_json()}\n",
        _MARKDOWN: markdown(comparison),
        _LATEX: latex(comparison),
    }
    replace_files(target, {**tables, **{f"plots/{name}": image for name, image in images.items()}})
    summary = Summary(
        "Comparison",
        comparison_note(comparison),
        comparison_table(comparison),
        comparison,
        pictures,
        list(shift_tables(comparison).items()),
        charts.accuracy_against_error(comparison),
    )
    states = "", *comparison.calibrators
    evaluations = [method.evaluations(state)[0] for state in states for method in comparison.methods]
    write_report(
        evaluations,
        target / _PAGE,
        title=comparison.title,
        summary=summary,
        segmentation=comparison.dense,
    )


def methods_in(folder: Path) -> list[str]:
    """The names of the methods in ``results.json``, in their order; none if it is missing or damaged."""
    try:
        return list(map(str, json.loads((folder / _JSON).read_text(encoding="utf-8"))["runs"]))
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _own_pictures(folder: Path, learned: Learned) -> set[str]:
    """The names of pictures in the folder that `write_comparison` wrote."""
    patterns = list(_PICTURES)
    quantities = {*SYMBOLS, *(name for each in learned.values() for name in each)}
    for name, method in product(quantities, methods_in(folder)):
        patterns.append(glob.escape(f"{_learned_file(name, method)}.png"))
    return {path.name for pattern in patterns for path in (folder / "plots").glob(pattern)}


def _pictures(comparison: Comparison, history: History, learned: Learned) -> dict[str, tuple[Figure, str]]:
    """Figures and their captions by file name."""
    found: dict[str, tuple[Figure, str]] = {}

    def add(file: str, caption: str, plot: Callable[..., Axes], data: object, **options: Any) -> None:
        found[file] = figure_of(plot, data, **options), caption

    several = len(comparison.seeds) > 1
    states = {"before": comparison.figures("ece")}
    for calibrator in comparison.calibrators:
        states[state_words(calibrator)] = comparison.figures("ece", after=calibrator)
    caption = "Expected calibration error: mean over seeds and its 95 % interval"
    height = 1.5 + rows_height(states["before"])
    heading = f"Calibration error on the test data, {counted(len(comparison.seeds), 'seed')}"
    add("ece", caption, plots.methods_side_by_side, states, height=height, title=heading)
    bars = "; bars are standard deviations over seeds" if several else ""
    for metric in _ERRORS:
        points = {
            method.name: [(each.accuracy, each.metrics[metric]) for each in method.before]
            for method in comparison.methods
        }
        if all(error is not None for seeds in points.values() for _, error in seeds):
            caption = f"Accuracy against {METRICS[metric].label}: methods at the upper left are best{bars}"
            file = f"accuracy-against-{metric.replace('_', '-')}"
            title = "Means and standard deviations over seeds" if several else None
            add(file, caption, plots.accuracy_against_ece, points, metric=metric, height=3.6, title=title)
    outside = data_labels(comparison.methods[0].curves)
    for data, by_calibrator in comparison.methods[0].curves.items():
        for calibrator in by_calibrator:
            rates = {
                method.name: (method.curves[data][calibrator], fmean(method.detected[calibrator][data]))
                for method in comparison.methods
            }
            state = state_words(calibrator) if calibrator else "before temperature scaling"
            caption = f"ROC curves of telling {outside[data]} from the test data, {state}"
            caption += "; means over seeds" if several else ""
            names = {"": "before", "temperature": "after"}
            file = f"roc-{_letters(data)}-{names.get(calibrator, f'after-{_letters(calibrator)}')}"
            add(file, caption, plots.mean_roc_curve, rates, height=3.8)
    for shift, short in data_labels(comparison.methods[0].shifted).items():
        drawn = [("accuracy", "Accuracy", "accuracy", "")]
        for key in ("", *comparison.calibrators):
            drawn.append((f"ece-{_letters(key)}".rstrip("-"), f"ECE {state_words(key)}", "ece", key))
        for file, caption, metric, calibrator in drawn:
            levels = comparison.severities(shift)
            by_seed = {
                method.name: [
                    [method.shifted[shift][level][calibrator][seed][metric] for level in levels]
                    for seed in range(len(comparison.seeds))
                ]
                for method in comparison.methods
            }
            against = ", against the severity of the shift" if levels[-1].isdecimal() else ""
            caption = f"{caption} on {short}{against}{bars}"
            labels = levels if levels[-1].isdecimal() else [level_label(level) for level in levels]
            add(
                f"shift-{_letters(shift)}-{file}",
                caption,
                plots.severity_curves,
                by_seed,
                severities=labels,
                metric=metric,
                height=3.6,
                title=f"{short}, {state_words(calibrator)}",
            )
    for column, metric in _CURVES.items():
        curves = {
            name: [[row[column] for row in rows] for rows in seeds]
            for name, seeds in history.items()
            if seeds and all(column in row for rows in seeds for row in rows)
        }
        if any(len(rows) > 1 for seeds in curves.values() for rows in seeds):
            caption = f"{METRICS[metric].label} on the validation data after each epoch"
            caption += "; bands are standard deviations over seeds" if several else ""
            add(
                f"training-{metric}", caption, plots.training_curves, curves, metric=metric, part="validation"
            )
    for method, quantities in learned.items():
        for name, values in quantities.items():
            if len(values) > 1 and values.numel() and values.isfinite().all():
                rows = values.reshape(len(values), -1)
                caption = f"{quantity_label(name)} after each epoch, learned by {method} with the first seed"
                file = _learned_file(name, method)
                title = f"{method}, seed {comparison.seeds[0]}"
                add(file, caption, plots.learned_quantity, rows, name=name, title=title)
    return found


def _learned_file(quantity: str, method: str) -> str:
    return f"{quantity}-{_letters(method)}"


def _letters(name: str) -> str:
    """A name as a part of the name of a file."""
    return "".join(letter if letter.isalnum() or letter in "-=." else "-" for letter in name).strip("-")


def _diagrams(comparison: Comparison) -> Figure:
    """Reliability diagrams of the first seed: a row for each calibrator, a column for each method."""
    data = {
        state_words(state)[0].upper() + state_words(state)[1:]: {
            method.name: method.evaluations(state)[0] for method in comparison.methods
        }
        for state in ("", *comparison.calibrators)
    }
    first = ", the first seed" if len(comparison.seeds) > 1 else ""
    return reliability_grid(data, f"{comparison.title}, seed {comparison.seeds[0]}{first}")
