"""A comparison of methods as files: tables for papers, pictures, and one page that holds everything."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import matplotlib.style
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from calibrant.atomic import replace_file
from calibrant.evaluation.comparison import Comparison, MeanFigure, Method
from calibrant.metrics.catalogue import METRICS
from calibrant.reports.html import MARKS, Cell, Picture, Summary, write_report
from calibrant.reports.plots import (
    accuracy_against_ece,
    gammas,
    methods_side_by_side,
    multipliers,
    reliability_diagram,
    training_curves,
)

_BEFORE_AND_AFTER = ("nll", "ece", "adaptive_ece", "classwise_ece")
_CURVES = {"validation_accuracy": "accuracy", "validation_nll": "nll", "validation_ece": "ece"}


@dataclass(frozen=True)
class Traces:
    """What a comparison's pictures of training are drawn from.

    Attributes:
        history: by method, a list of rows per seed: the figures after each epoch.
        learned: by method, of the first seed: what its loss had learned after each epoch, ``(epochs, …)``.
    """

    history: Mapping[str, Sequence[Sequence[Mapping[str, float]]]] = field(default_factory=dict)
    learned: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """One column of the table: a heading, and by method a figure.

    Attributes:
        heading: in words.
        percent: whether the figures are fractions.
        best: the method with the best mean.
        figures: by method.
    """

    heading: str
    percent: bool
    best: str | None
    figures: Mapping[str, MeanFigure]

    def text(self, name: str, times: str = "±") -> str:
        """Mean and standard deviation, in percent where that reads best."""
        figure = self.figures.get(name)
        if figure is None:
            return "–"
        scale, digits = (100, 2) if self.percent else (1, 3)
        spread = "" if figure.std is None else f" {times} {scale * figure.std:.{digits}f}"
        return f"{scale * figure.mean:.{digits}f}{spread}"

    def between(self, name: str) -> str:
        """The interval in brackets."""
        figure = self.figures.get(name)
        if figure is None or figure.interval is None:
            return ""
        scale, digits = (100, 2) if self.percent else (1, 3)
        low, high = (f"{scale * end:.{digits}f}" for end in figure.interval)
        return f"[{low}, {high}]"

    def verdict(self, name: str) -> str:
        """Whether a method is significantly better or worse than the first."""
        figure = self.figures.get(name)
        if figure is None or not figure.significant:
            return ""
        return "better" if figure.better else "worse"


def columns(comparison: Comparison) -> list[Column]:
    """The columns of the tables."""
    found = [_column(comparison, "accuracy", False)]
    if comparison.dense:
        found.append(_column(comparison, "mean_iou", False))
    for metric in _BEFORE_AND_AFTER:
        found.append(_column(comparison, metric, False))
        if all(method.after for method in comparison.methods):
            found.append(_column(comparison, metric, True))
    if all(method.temperatures for method in comparison.methods):
        temperatures = {method.name: _over_seeds(method.temperatures) for method in comparison.methods}
        found.append(Column("T", False, None, temperatures))
    for other in comparison.methods[0].detection:
        figures = {method.name: _over_seeds(method.detection[other]) for method in comparison.methods}
        best = max(figures, key=lambda name: figures[name].mean)
        found.append(Column(f"AUROC, {other}", True, best, figures))
    return [column for column in found if column.figures]


def _column(comparison: Comparison, metric: str, after: bool) -> Column:
    figures = comparison.figures(metric, after=after)
    description = METRICS[metric]
    choose = max if description.higher_is_better else min
    best = choose(figures, key=lambda name: figures[name].mean) if len(figures) > 1 else None
    heading = description.label + (" + T" if after else "")
    return Column(heading, description.percent, best, figures)


def _over_seeds(values: Sequence[float]) -> MeanFigure:
    return MeanFigure(fmean(values), stdev(values) if len(values) > 1 else None, None)


def notes(comparison: Comparison, *, better: str = "↑", worse: str = "↓") -> str:
    """What the tables show.

    Args:
        comparison: of the tables.
        better: the mark of what is significantly better than the first method.
        worse: likewise.
    """
    seeds, first = len(comparison.seeds), comparison.methods[0].name
    spread = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    if comparison.dense:
        tested = "No intervals and no significance: pixels of an image are not independent of one another."
    elif seeds == 1:
        tested = (
            "Intervals are over other test data only; with one seed nothing is known about other seeds, and "
        )
        tested += "significance is not tested."
    else:
        tested = f"Significance at 5 % against {first}, by seeds and resampled test data together, corrected "
        tested += f"for the number of methods (Holm): {better} better, {worse} worse."
    return (
        f"Test set of {comparison.methods[0].before[0].samples:,} elements, {spread}; percent but for NLL "
        "and T. + T: after temperature scaling, fitted to the validation data. Best mean in bold. " + tested
    )


def markdown(comparison: Comparison) -> str:
    """The table for a README.

    ``↑`` and ``↓`` mark what is significantly better and worse than the first method.

    >>> import torch
    >>> from calibrant.evaluation import evaluate
    >>> evaluation = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    >>> print(markdown(Comparison("toy", (0,), (Method("ce", (evaluation,)),))).splitlines()[4])
    | ce | 100.00 | 0.013 | 1.33 | 1.33 | 0.89 |
    """
    shown = columns(comparison)
    marks = {"better": " ↑", "worse": " ↓", "": ""}
    lines = [
        f"# {comparison.title}",
        "",
        "| loss | " + " | ".join(column.heading for column in shown) + " |",
        "| --- |" + " ---: |" * len(shown),
    ]
    for method in comparison.methods:
        cells = []
        for column in shown:
            text = column.text(method.name)
            text = f"**{text}**" if column.best == method.name else text
            cells.append(text + marks[column.verdict(method.name)])
        lines.append(f"| {_escaped(method.name)} | " + " | ".join(cells) + " |")
    lines += ["", notes(comparison), ""]
    with_intervals = [each for each in shown if any(figure.interval for figure in each.figures.values())]
    if not with_intervals:
        return "\n".join(lines)
    lines += [
        "95 % intervals of the means:",
        "",
        "| loss | " + " | ".join(column.heading for column in with_intervals) + " |",
        "| --- |" + " ---: |" * len(with_intervals),
    ]
    for method in comparison.methods:
        cells = [column.between(method.name) or "–" for column in with_intervals]
        lines.append(f"| {_escaped(method.name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def latex(comparison: Comparison) -> str:
    """The table for a paper, to be used with the package booktabs."""
    shown = columns(comparison)
    marks = {"better": r"$^{\uparrow}$", "worse": r"$^{\downarrow}$", "": ""}
    lines = [
        r"\begin{tabular}{l" + "r" * len(shown) + "}",
        r"\toprule",
        "Loss & " + " & ".join(_tex(column.heading) for column in shown) + r" \\",
        r"\midrule",
    ]
    for method in comparison.methods:
        cells = []
        for column in shown:
            text = column.text(method.name, r"$\pm$").replace("–", "--")
            text = rf"\textbf{{{text}}}" if column.best == method.name else text
            cells.append(text + marks[column.verdict(method.name)])
        lines.append(f"{_tex(method.name)} & " + " & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    note = _tex(notes(comparison, better="up", worse="down")).replace("±", r"$\pm$")
    return "\n".join([f"% {note}", *lines]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


def _tex(text: str) -> str:
    escaped = text.replace("\\", r"\textbackslash ")
    for character in "&%$#_{}":
        escaped = escaped.replace(character, rf"\{character}")
    return escaped


def write_comparison(
    comparison: Comparison, folder: str | os.PathLike[str], traces: Traces | None = None
) -> None:
    """Write ``results.json``, ``results.md``, ``results.tex``, ``plots/*.png`` and ``report.html``.

    Args:
        comparison: what to write.
        folder: where to, made if need be; files of these names are replaced.
        traces: for pictures of training.
    """
    traces = traces or Traces()
    target = Path(folder)
    (target / "plots").mkdir(parents=True, exist_ok=True)
    replace_file(target / "results.json", (comparison.to_json() + "\n").encode())
    replace_file(target / "results.md", markdown(comparison).encode())
    replace_file(target / "results.tex", latex(comparison).encode())
    pictures = []
    for name, (canvas, caption) in _pictures(comparison, traces).items():
        pictures.append(_drawn(canvas, caption, target / "plots" / f"{name}.png"))
    replace_file(target / "plots" / "reliability.png", _png(_diagrams(comparison)))
    shown = columns(comparison)
    rows = tuple(
        (method.name, tuple(_cell(column, method) for column in shown)) for method in comparison.methods
    )
    summary = Summary(
        "Comparison",
        notes(comparison, better=MARKS["better"], worse=MARKS["worse"]),
        tuple(column.heading for column in shown),
        rows,
        tuple(pictures),
    )
    evaluations = [method.before[0] for method in comparison.methods]
    evaluations += [method.after[0] for method in comparison.methods if method.after]
    write_report(evaluations, target / "report.html", title=comparison.title, summary=summary)


def _cell(column: Column, method: Method) -> Cell:
    text, mark, note = column.text(method.name), column.verdict(method.name), ""
    if mark:
        note = f"significantly {mark} than the first (p = {column.figures[method.name].p_value:.2g})"
    if column.best == method.name:
        text, mark = f"{text} {MARKS[mark]}".rstrip(), "best"
    return Cell(text, "", column.between(method.name), mark, note)


def _pictures(comparison: Comparison, traces: Traces) -> dict[str, tuple[Canvas, str]]:
    """Pictures by file name, with what they show in words."""
    found: dict[str, tuple[Canvas, str]] = {}
    with _own_style():
        before = comparison.figures("ece")
        after = comparison.figures("ece", after=True)
        canvas = Canvas(figsize=(4.2, 1.3 + 0.28 * len(before)), layout="constrained")
        methods_side_by_side(
            {"before": before, **({"after temperature scaling": after} if after else {})},
            canvas.subplots(),
            metric="ece",
        )
        found["ece"] = canvas, "Expected calibration error: mean over seeds and its 95 % interval"
        points = {
            method.name: [(each.accuracy, each.ece) for each in method.before]
            for method in comparison.methods
        }
        canvas = Canvas(figsize=(4.2, 3.6), layout="constrained")
        accuracy_against_ece(points, canvas.subplots())
        several = len(comparison.seeds) > 1
        words = "Accuracy against ECE: right and honest is upper left"
        words += "; bars are standard deviations over seeds" if several else ""
        found["accuracy-against-ece"] = canvas, words
        for column, metric in _CURVES.items():
            curves = {
                name: [[row[column] for row in rows] for rows in seeds]
                for name, seeds in traces.history.items()
                if seeds and all(column in row for rows in seeds for row in rows)
            }
            if curves and max(len(rows) for seeds in curves.values() for rows in seeds) > 1:
                canvas = Canvas(figsize=(4.2, 3.4), layout="constrained")
                training_curves(curves, canvas.subplots(), metric=metric)
                label = METRICS[metric].label
                words = f"{label} on the validation data after each epoch"
                words += "; bands are standard deviations over seeds" if several else ""
                found[f"training-{metric}"] = canvas, words
        for name, learned in traces.learned.items():
            for state, draw, words in (
                ("multiplier", multipliers, "Multipliers of the classes"),
                ("gamma", gammas, "Exponents of the confidence bins"),
            ):
                if state in learned and len(learned[state]) > 1:
                    canvas = Canvas(figsize=(4.2, 3.4), layout="constrained")
                    draw(learned[state], canvas.subplots(), title=name)
                    file = "".join(letter if letter.isalnum() or letter in "-=." else "-" for letter in name)
                    found[f"{state}-{file.strip('-')}"] = (
                        canvas,
                        f"{words} after each epoch, {name}, first seed",
                    )
    return found


def _diagrams(comparison: Comparison) -> Canvas:
    """Reliability diagrams of the first seed, before and after temperature scaling."""
    both = [method.before[:1] + method.after[:1] for method in comparison.methods]
    across, down = len(both), max(len(column) for column in both)
    with _own_style():
        canvas = Canvas(figsize=(2.9 * across, 3.3 * down), layout="constrained")
        axes = canvas.subplots(down, across, squeeze=False)
        for number, column in enumerate(both):
            for row, evaluation in enumerate(column):
                reliability_diagram(
                    evaluation.reliability, axes[row][number], title=evaluation.name, ece=evaluation.ece
                )
    return canvas


def _own_style() -> AbstractContextManager[None]:
    # Whatever the session has set: the page must not depend on it.
    return matplotlib.style.context(["default", {"svg.fonttype": "path", "svg.hashsalt": "calibrant"}])


def _drawn(canvas: Canvas, caption: str, path: Path) -> Picture:
    """Write a picture as PNG, and return it for the page."""
    replace_file(path, _png(canvas))
    buffer = io.BytesIO()
    with _own_style():
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Picture(caption, buffer.getvalue())


def _png(canvas: Canvas) -> bytes:
    buffer = io.BytesIO()
    with _own_style():
        canvas.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
