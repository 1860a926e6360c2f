"""A report on evaluations: one HTML page without any other file, readable without colour or network."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from calibrant.extras import require

require("report", "jinja2", "matplotlib", purpose=__name__)

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from calibrant.arguments import instance_of
from calibrant.atomic import replace_file
from calibrant.evaluation import ClassFigures, Evaluation
from calibrant.evaluation.comparison import Comparison
from calibrant.evaluation.figures import of_same_data
from calibrant.evaluation.notes import data_notes, intervals_note, pixels_note
from calibrant.evaluation.sums import GROUPS
from calibrant.metrics import METRICS
from calibrant.printable import counted, printable
from calibrant.reports import charts, verdict
from calibrant.reports.table_builders import evaluation_table, state_words
from calibrant.reports.tables import HTML, Table, in_percent, interval_text, without_bold

# The tables of the summary, by the group of their metrics.
_TABLES = {
    "calibration": "Calibration",
    "scores": "Scores of the probabilities",
    "recognition": "Recognition",
    "selective": "Selective prediction",
}
_WORST_CLASSES = 15
_MOST_DOTS = 8  # models with a colour of their own

# The figures that matter most, in this order. The others are folded away.
_KEY_FIGURES = ("ece", "adaptive_ece", "classwise_ece", "nll", "brier", "accuracy", "mean_iou", "p_value")
_SEGMENTATION = ("mean_iou", "mean_iou_foreground")


@dataclass(frozen=True)
class Summary:
    """A section on a comparison of methods before the evaluations, with a table and pictures."""

    heading: str
    note: str  # below the heading
    table: Table
    comparison: Comparison  # what the page says first, and the methods to count as models
    pictures: Sequence[tuple[str, bytes]] = ()  # captions and SVG images, below the tables
    others: Sequence[tuple[str, Table]] = ()  # further tables with their headings
    scatter: charts.Chart | None = None
    pictured: str = "other errors, training, what the losses learn"  # what the pictures show


def write_report(
    evaluations: Evaluation | Sequence[Evaluation],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    summary: Summary | None = None,
    fitted: str = "",
    segmentation: bool | None = None,
) -> None:
    """Write an HTML page about one or several models.

    An existing file is replaced in one step. Equal evaluations give equal bytes.

    Args:
        evaluations: one evaluation or several; models of the same name are numbered.
        path: the HTML file to write, in a folder that exists.
        title: the heading of the page; by default, "Calibration of" a single model or "Calibration report".
        summary: a section to put before the evaluations.
        fitted: for two evaluations of one model, before and after a calibrator: the calibrator and what it
            was fitted to, such as "temperature (T = 1.9), fitted to validation.npz".
        segmentation: whether the elements are pixels, for which the mean IoU is shown; None if the
            evaluations know it.

    >>> import tempfile, torch
    >>> from calibrant.evaluation import evaluate
    >>> evaluation = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report([evaluation], Path(folder, "report.html"))
    ...     os.listdir(folder)
    ['report.html']
    """
    instance_of("path", path, str, os.PathLike)
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target.name}: there is no folder {target.parent}")
    text = render_report(evaluations, title=title, summary=summary, fitted=fitted, segmentation=segmentation)
    replace_file(target, text.encode())


def render_report(
    evaluations: Evaluation | Sequence[Evaluation],
    *,
    title: str | None = None,
    summary: Summary | None = None,
    fitted: str = "",
    segmentation: bool | None = None,
) -> str:
    """Return the page of `write_report` as text. Arguments as there.

    >>> import torch
    >>> from calibrant.evaluation import evaluate
    >>> evaluation = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    >>> "<h1>Three classes</h1>" in render_report([evaluation], title="Three classes")
    True
    """
    evaluations = list(evaluations) if isinstance(evaluations, Iterable) else [evaluations]
    for each in evaluations:
        instance_of("evaluations", each, Evaluation)
    if not evaluations:
        raise ValueError("a report needs at least one evaluation")
    if fitted and len(evaluations) != 2:
        raise ValueError(f"fitted needs an evaluation before and one after, got {len(evaluations)}")
    dense = any(each.dense or each.per_image for each in evaluations)
    pixels = segmentation or dense
    if segmentation is None:
        segmentation = dense or any(each.mean_iou_foreground is not None for each in evaluations)
    names = _distinct_names([evaluation.name for evaluation in evaluations])
    if title is None:
        title = f"Calibration of {names[0]}" if len(names) == 1 else "Calibration report"
    table = evaluation_table(evaluations, names)
    # Metrics that need an option or many classes are shown only if at least one model has them.
    groups = {
        column.key: METRICS[column.key].group
        for column in table.columns
        if column.key in METRICS
        and not (column.empty and METRICS[column.key].why_missing)
        and (segmentation or column.key not in _SEGMENTATION)
    }
    if not table.columns[-1].empty:
        groups["p_value"] = "calibration"
    tables = {
        heading: table.select(key for key in groups if groups[key] == group)
        for group, heading in _TABLES.items()
    }
    warning = _warning(evaluations)
    across = _shared_classes(evaluations)
    worst = [_worst_classes(evaluation.classes) for evaluation in evaluations]
    shown = [each for parts in worst for part in parts for each in part]
    shown += [evaluation.classes[k] for evaluation in evaluations for k in across]
    models = [] if fitted else names
    plotted = len(names)
    picture = charts.error_of_models(evaluations, names) if len(names) > 1 else None
    if summary:
        models = [method.name for method in summary.comparison.methods]
        plotted = len(models)  # those before calibration
        picture = charts.error_of_methods(summary.comparison)
    risks = charts.risks(evaluations[:plotted], names[:plotted]) if plotted <= _MOST_DOTS else None
    groups_of_classes = [
        {name: group for name, group in evaluation.groups.items() if group.count}
        for evaluation in evaluations
    ]
    binary = all(evaluation.binary for evaluation in evaluations)
    labels = any(evaluation.labels for evaluation in evaluations)
    said = _verdict(evaluations, table, warning, summary, fitted)
    notes = [pixels_note(evaluations)] if pixels else []
    notes = [*filter(None, notes), *data_notes(evaluations, names)]
    page = template("report.html.jinja")
    return page.render(
        title=title,
        summary=summary,
        models=models,
        names=names,
        evaluations=evaluations,
        sections={
            "verdict": "Verdict",
            **({"comparison": summary.heading} if summary else {}),
            "summary": "Figures",
            **({"reliability": "Reliability"} if picture else {}),  # otherwise in the verdict
            **({"selective": "Selective prediction"} if risks else {}),
            **({"classes": "Labels" if labels else "Classes"} if shown else {}),
            **({"groups": "Groups"} if any(groups_of_classes) else {}),
        },
        verdict=said,
        picture=picture,
        facts=_facts(evaluations, summary, fitted),
        warning=warning,
        ranked=of_same_data(evaluations),
        table=table,
        key=table.select(key for key in _KEY_FIGURES if key in groups),
        tables=tables,
        direction=_direction,
        untested=next(filter(None, map(evaluations[0].why_untested, evaluations[1:])), ""),
        missing=_missing_reasons(tables.values()),
        marks=HTML,
        level=_levels(evaluations),
        has_intervals=any(evaluation.intervals for evaluation in evaluations),
        error_has_interval=any("ece" in evaluation.intervals for evaluation in evaluations),
        intervals_note=intervals_note(evaluations),
        binary=binary,
        labels=labels,
        notes=[note for note in notes if note not in said.sentences],
        axes=charts.axes(binary),
        diagrams=[charts.reliability_bins(each.reliability, each.binary) for each in evaluations],
        descriptions=[_in_words(name, each) for name, each in zip(names, evaluations, strict=True)],
        risks=risks,
        groups_of_classes=groups_of_classes,
        group_limits={
            name: limit for name, limit in GROUPS.items() if any(name in each for each in groups_of_classes)
        },
        worst=worst,
        plotted=plotted,
        across=across if plotted > 1 else [],
        gaps=charts.gaps_of_classes(evaluations[:plotted], names[:plotted], across)
        if across and plotted <= _MOST_DOTS
        else None,
        # The diagram of a single decision is that of its class "yes" already.
        class_diagrams=charts.class_diagrams(evaluations, names)
        if across and all(each.labels or not each.binary for each in evaluations)
        else None,
        largest=max((each.ece for each in shown), default=0.0) or 1.0,
    )


@cache
def template(name: str) -> Template:
    """A page of ``reports/templates``."""
    environment = Environment(
        loader=PackageLoader("calibrant.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        figure=in_percent,
        signed=partial(in_percent, signed=True),
        plain=lambda value: "" if value is None or value != value else repr(value),
        bracket=lambda interval: interval_text(interval) or "–",
        count="{:,}".format,
        short=lambda value: f"{value:.4g}",
        percent=lambda place: f"{100 * place:.4g}%",
        breakable=_breakable,
        without_bold=without_bold,
        lines=lambda text: Markup("&#10;").join(printable(line) for line in text.split("\n")),
        data_url=lambda image: f"data:image/svg+xml;base64,{base64.b64encode(image).decode('ascii')}",
        # The hash by which the page's security policy allows its own script and no other.
        sha256=lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii"),
    )
    return environment.get_template(name)


def _verdict(
    evaluations: Sequence[Evaluation], table: Table, warning: str, summary: Summary | None, fitted: str
) -> verdict.Verdict:
    if summary:
        return verdict.methods(summary.comparison)
    if fitted:
        return verdict.before_and_after(evaluations[0], evaluations[1], fitted)
    if len(evaluations) == 1:
        return verdict.one_model(evaluations[0])
    return verdict.several_models(evaluations, table, warning)


def _breakable(text: str) -> Markup:
    """Text in which a name such as ``adafocal[evidence=2]`` breaks only before its bracket and after commas.

    >>> print(_breakable("cals-alm[margin=6,rate=2]"))
    <span class="piece">cals-alm</span><wbr>[margin=6,<wbr>rate=2]
    """

    def piece(part: str) -> Markup:
        short = "-" in part and len(part) <= 24
        return Markup('<span class="piece">{}</span>').format(part) if short else escape(part)

    words = re.split(r"(\s+)", printable(text).replace("+ ", "+\u00a0"))  # a plus sign stays with its word
    return Markup("").join(
        Markup("<wbr>").join(map(piece, re.split(r"(?<=[^\s])(?=\[)|(?<=,)(?=\S)", word))) for word in words
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
    if len(higher) == len(figures):
        return "Higher is better."
    return f"Lower is better; higher for {', '.join(higher)}."


def _facts(evaluations: Sequence[Evaluation], summary: Summary | None, fitted: str) -> list[str]:
    """What was evaluated, and how, in a few words each."""
    models = len(evaluations)
    labels = all(each.labels for each in evaluations)
    what = [counted(models, "model")]
    if fitted:
        what = ["1 model before and after calibration"]
    elif summary:
        comparison = summary.comparison
        what = [
            counted(len(comparison.methods), "loss", "losses"),
            counted(len(comparison.seeds), "seed"),
            *(f"before and {state_words(calibrator)}" for calibrator in comparison.calibrators),
        ]
    parts = [
        *what,
        _span((each.samples for each in evaluations), "decision" if labels else "element"),
        _span((each.num_classes for each in evaluations), *(("label",) if labels else ("class", "classes"))),
        _span((each.bins for each in evaluations), "bin"),
    ]
    if any(each.binary for each in evaluations):
        parts.append("ECE and the diagrams compare the probability of yes with the frequency of yes")
    meanings = {each.classes[1].name for each in evaluations if each.binary and not each.labels} - {"yes"}
    if meanings:
        parts.append(f"yes means {' or '.join(map(repr, sorted(meanings)))}")
    if labels:
        parts.append("figures are of all decisions together; means over classes are over labels")
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
    return " and ".join(f"{100 * level:g} %" for level in sorted({each.level for each in evaluations}))


def _span(values: Iterable[int], one: str, several: str = "") -> str:
    """One number, or the smallest and the largest of several, with their noun as in `counted`."""
    ordered = sorted(set(values))
    last = counted(ordered[-1], one, several)
    return last if len(ordered) == 1 else f"{ordered[0]:,} to {last}"


def _warning(evaluations: Sequence[Evaluation]) -> str:
    """Why the models' figures should not be compared, or ""."""
    if not of_same_data(evaluations):
        return "These models were evaluated on different data. Their figures do not show which is better."
    if len({each.bins for each in evaluations}) > 1:
        return (
            "These models were evaluated with different numbers of bins. Binned errors grow with that number."
        )
    return ""


def _worst_classes(classes: Sequence[ClassFigures]) -> tuple[list[ClassFigures], list[ClassFigures]]:
    """The classes with the largest calibration error, and those without a correct prediction apart.

    The error of a class that gets no probability is small, which does not make it well calibrated.
    """
    ordered = [classes[k] for k in charts.worst_classes([classes])]
    right = [each for each in ordered if each.accuracy][:_WORST_CLASSES]
    return right, [each for each in ordered if not each.accuracy][:_WORST_CLASSES]


def _shared_classes(evaluations: Sequence[Evaluation]) -> list[int]:
    """The positions of the worst classes of all models together; none if the models have other classes."""
    if len({tuple(each.name for each in evaluation.classes) for evaluation in evaluations}) > 1:
        return []
    return charts.worst_classes([evaluation.classes for evaluation in evaluations])[:_WORST_CLASSES]


def _in_words(name: str, evaluation: Evaluation) -> str:
    """What the reliability diagram shows, for readers who cannot see it."""
    bins = charts.reliability_bins(evaluation.reliability, evaluation.binary)
    if not bins:
        return f"Reliability diagram of {name}, without data."
    confidence, accuracy = verdict.mean_confidence_and_accuracy(evaluation.reliability)
    below = sum(each["accuracy"] < each["confidence"] for each in bins)
    x, y = charts.axes(evaluation.binary)
    widest = max(bins, key=lambda each: abs(each["confidence"] - each["accuracy"]))
    return (
        f"Reliability diagram of {name}: {y} is below {x} in {below} of {len(bins)} bins with data. Overall, "
        f"mean {x} is {in_percent(confidence)} and {y} {in_percent(accuracy)}: "
        f"{verdict.reliability_words(evaluation)}. The widest gap is at "
        f"{x} {in_percent(widest['confidence'])}, where {y} is {in_percent(widest['accuracy'])}."
    )
