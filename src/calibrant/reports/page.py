"""A report on evaluations: one HTML page without any other file, readable without colour or network."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

from calibrant.extras import require

require("report", "jinja2", "matplotlib", purpose=__name__)

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from calibrant.atomic import replace_file
from calibrant.evaluation import ClassFigures, Evaluation, Reliability
from calibrant.metrics import METRICS
from calibrant.printable import printable
from calibrant.reports.plots import reliability_diagram
from calibrant.reports.plots.drawing import default_style, svg
from calibrant.reports.table_builders import evaluation_table
from calibrant.reports.tables import HTML, Table, interval_text, number_text

# The tables of the summary, by the group of their metrics.
_TABLES = {
    "calibration": "Calibration",
    "scores": "Scores of the probabilities",
    "recognition": "Recognition",
}
_WORST_CLASSES = 15

_percent = partial(number_text, unit="%")


@dataclass(frozen=True)
class Summary:
    """A section before the evaluations, with a table and pictures."""

    heading: str
    note: str  # below the heading
    table: Table
    pictures: tuple[tuple[str, bytes], ...] = ()  # captions and SVG images, below the tables
    others: tuple[tuple[str, Table], ...] = ()  # further tables with their headings


def write_report(
    evaluations: Sequence[Evaluation],
    path: str | os.PathLike[str],
    *,
    title: str = "Calibration report",
    summary: Summary | None = None,
) -> None:
    """Write an HTML page about one or several models.

    An existing file is replaced in one step. Equal evaluations give equal bytes.

    Args:
        evaluations: at least one evaluation; models of the same name are numbered.
        path: the HTML file to write, in a folder that exists.
        title: the heading of the page.
        summary: a section to put before the evaluations.

    >>> import tempfile, torch
    >>> from calibrant.evaluation import evaluate
    >>> evaluation = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report([evaluation], Path(folder, "report.html"))
    ...     os.listdir(folder)
    ['report.html']
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target.name}: there is no folder {target.parent}")
    replace_file(target, render_report(evaluations, title=title, summary=summary).encode())


def render_report(
    evaluations: Sequence[Evaluation], *, title: str = "Calibration report", summary: Summary | None = None
) -> str:
    """Return the page of `write_report` as text. Arguments as there.

    >>> import torch
    >>> from calibrant.evaluation import evaluate
    >>> evaluation = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    >>> "<h1>Three classes</h1>" in render_report([evaluation], title="Three classes")
    True
    """
    if not evaluations:
        raise ValueError("a report needs at least one evaluation")
    names = _distinct_names([evaluation.name for evaluation in evaluations])
    table = evaluation_table(evaluations, names)
    # Metrics that an option asks for are shown only if at least one model has them.
    groups = {
        column.key: METRICS[column.key].group
        for column in table.columns
        if column.key in METRICS and not (METRICS[column.key].requires and column.empty)
    }
    groups["p_value"] = "calibration"
    tables = {
        heading: table.select(key for key in groups if groups[key] == group)
        for group, heading in _TABLES.items()
    }
    worst = [_worst_classes(evaluation.classes) for evaluation in evaluations]
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters.update(
        figure=_percent,
        signed=partial(_percent, signed=True),
        bracket=lambda interval: interval_text(interval) or "–",
        count="{:,}".format,
        data_url=_data_url,
        sha256=_sha256,
    )
    template = resources.files("calibrant.reports").joinpath("report.html.jinja").read_text("utf-8")
    return environment.from_string(template).render(
        title=title,
        summary=summary,
        names=names,
        evaluations=evaluations,
        facts=_facts(evaluations),
        warning=_warning(evaluations),
        table=table,
        tables=tables,
        direction=_direction,
        missing=_missing_reasons(tables.values()),
        marks=HTML,
        level=_levels(evaluations),
        has_intervals=any(evaluation.intervals for evaluation in evaluations),
        diagrams=[_diagram(evaluation) for evaluation in evaluations],
        descriptions=[
            _in_words(name, each.reliability) for name, each in zip(names, evaluations, strict=True)
        ],
        worst=worst,
        largest=max((each.ece for classes in worst for each in classes), default=0.0) or 1.0,
    )


def _distinct_names(names: Sequence[str]) -> list[str]:
    """Number names that repeat, and call empty ones "unnamed".

    >>> _distinct_names(["net", "net", "net (2)", ""])
    ['net', 'net (3)', 'net (2)', 'unnamed']
    """
    names = [name.strip() or "unnamed" for name in names]
    result: list[str] = []
    for name in names:
        candidate, number = name, 2
        while candidate in result or (candidate != name and candidate in names):
            candidate, number = f"{name} ({number})", number + 1
        result.append(candidate)
    return result


def _missing_reasons(tables: Iterable[Table]) -> dict[str, list[str]]:
    """Labels of the figures that some model lacks, by reason."""
    reasons: dict[str, list[str]] = {}
    for column in (column for table in tables for column in table.columns):
        for note in dict.fromkeys(cell.note for cell in column.cells if cell.value is None):
            reasons.setdefault(note, []).append(column.label)
    return reasons


def _direction(table: Table) -> str:
    """Whether higher or lower figures are better, in words."""
    figures = [column for column in table.columns if column.higher_is_better is not None]
    higher = [column.label for column in figures if column.higher_is_better]
    if not higher:
        return "Lower is better."
    return "Higher is better." + ("" if len(higher) == len(figures) else f" (Only: {'; '.join(higher)}.)")


def _facts(evaluations: Sequence[Evaluation]) -> list[str]:
    """What was evaluated, and how, in a few words each."""
    models = len(evaluations)
    parts = [
        "1 model" if models == 1 else f"{models} models",
        f"{_span(each.samples for each in evaluations)} elements",
        f"{_span(each.num_classes for each in evaluations)} classes",
        f"{_span(each.bins for each in evaluations)} bins",
    ]
    exact = sum(each.exact for each in evaluations)
    if exact == models:
        parts.append("exact, from every prediction")
    else:
        parts.append(
            f"{exact} exact, {models - exact} streamed" if exact else "streamed, from sums over the data"
        )
    has_intervals = any(each.intervals for each in evaluations)
    return [*parts, f"{_levels(evaluations)} intervals" if has_intervals else "no intervals"]


def _levels(evaluations: Sequence[Evaluation]) -> str:
    """The levels of the intervals."""
    return " and ".join(f"{100 * level:g}%" for level in sorted({each.level for each in evaluations}))


def _span(values: Iterable[int]) -> str:
    """One number, or the smallest and the largest of several."""
    ordered = sorted(set(values))
    return f"{ordered[0]:,}" if len(ordered) == 1 else f"{ordered[0]:,} to {ordered[-1]:,}"


def _warning(evaluations: Sequence[Evaluation]) -> str:
    """Why the models' figures should not be compared, or ""."""
    fingerprints = {each.fingerprint for each in evaluations if each.fingerprint is not None}
    if len(fingerprints) > 1 or len({(each.samples, each.num_classes) for each in evaluations}) > 1:
        return "These models were evaluated on different data. Their figures do not show which is better."
    if len({each.bins for each in evaluations}) > 1:
        return (
            "These models were evaluated with different numbers of bins. Binned errors grow with that number."
        )
    return ""


def _worst_classes(classes: Sequence[ClassFigures]) -> list[ClassFigures]:
    """The classes with the largest calibration error, the largest first."""
    known = (each for each in classes if each.ece == each.ece)  # not NaN
    return sorted(known, key=lambda each: each.ece, reverse=True)[:_WORST_CLASSES]


def _diagram(evaluation: Evaluation) -> str:
    """The reliability diagram as a data URL."""
    with default_style():
        figure = Figure(figsize=(4.2, 4.2), layout="constrained")
        reliability_diagram(evaluation.reliability, figure.add_subplot(), ece=evaluation.ece)
    return _data_url(svg(figure))


def _data_url(image: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(image).decode("ascii")


def _in_words(name: str, reliability: Reliability) -> str:
    """What the reliability diagram shows, for readers who cannot see it."""
    bins = [
        (number, confidence, accuracy)
        for number, confidence, accuracy in zip(
            reliability.count, reliability.confidence, reliability.accuracy, strict=True
        )
        if confidence is not None and accuracy is not None
    ]
    total = sum(number for number, _, _ in bins)
    if not total:
        return f"Reliability diagram of {name}, without data."
    confidence = sum(number * each for number, each, _ in bins) / total
    accuracy = sum(number * each for number, _, each in bins) / total
    below = sum(right < confident for _, confident, right in bins)
    _, at, right = max(bins, key=lambda each: abs(each[1] - each[2]))
    gap = (
        f"{'over' if confidence > accuracy else 'under'}-confident by {_percent(abs(confidence - accuracy))}"
    )
    return (
        f"Reliability diagram of {name}: accuracy is below confidence in {below} of {len(bins)} bins with "
        f"data. Overall, mean confidence is {_percent(confidence)} and accuracy {_percent(accuracy)}: {gap}. "
        f"The widest gap is at confidence {_percent(at)}, where accuracy is {_percent(right)}."
    )


def _sha256(text: str) -> str:
    """The hash by which the page's security policy allows its own script and no other."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
