"""Evaluations as one page that opens anywhere: no network, no other files, readable without colour."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import matplotlib.style
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from calibrant.atomic import replace_file
from calibrant.evaluation import ClassFigures, Difference, Evaluation, Reliability
from calibrant.metrics import METRICS, Description
from calibrant.metrics.uncertainty import Interval
from calibrant.reports.plots import reliability_diagram

_SCORES = (
    "nll",
    "nll_calibration",
    "nll_refinement",
    "brier",
    "root_brier",
    "brier_calibration",
    "brier_refinement",
)
_RECOGNITION = ("accuracy", "balanced_accuracy", "mean_iou", "mean_iou_foreground")
_ON_REQUEST = ("kde_ece", "mean_iou_foreground")

_TABLES = {
    "Calibration": tuple(name for name in METRICS if name not in _SCORES + _RECOGNITION),
    "Scores of the probabilities": _SCORES,
    "Recognition": _RECOGNITION,
}
"""The tables of the summary; a figure that is new in `METRICS` joins the first."""

_WORST_CLASSES = 15

_P_VALUE = Description(
    "p-value",
    "How probable an ECE at least as large is, were the model calibrated; a small one rejects that it is.",
    higher_is_better=True,
    percent=False,
)

MARKS = {"best": "★", "equal": "≈", "better": "△", "worse": "▽", "": ""}


@dataclass(frozen=True)
class Cell:
    """One figure of one model, ready to print.

    Attributes:
        text: the figure, or a dash.
        key: what it sorts by; empty where the figure is missing.
        interval: in brackets, or empty.
        mark: "best", "equal" (not distinguishable from the best), "better" or "worse" (significantly), or "".
        note: the mark or the dash in words.
    """

    text: str
    key: str
    interval: str = ""
    mark: str = ""
    note: str = ""

    @property
    def symbol(self) -> str:
        """The mark as one character."""
        return MARKS[self.mark]


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Attributes:
        caption: what it shows, in words.
        svg: the picture.
    """

    caption: str
    svg: bytes

    @property
    def address(self) -> str:
        """An address that holds the whole picture."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode("ascii")


@dataclass(frozen=True)
class Summary:
    """What a page says first, where it is about more than the evaluations on it.

    Attributes:
        heading: of the section.
        note: below the heading.
        columns: headings of the table.
        rows: the models, each with a cell per column.
        pictures: below the table.
    """

    heading: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class _Column:
    """One figure of every model.

    Attributes:
        name: its key in `METRICS`.
        description: what it is.
        cells: one per model.
    """

    name: str
    description: Description
    cells: tuple[Cell, ...]


def write_report(
    evaluations: Sequence[Evaluation],
    path: str | os.PathLike[str],
    *,
    title: str = "Calibration report",
    summary: Summary | None = None,
) -> None:
    """Write a page about one or several models, or replace it in one step.

    Equal evaluations give equal bytes.

    Args:
        evaluations: at least one; models of the same name are numbered.
        path: the HTML file, in a folder that exists.
        title: its heading.
        summary: what to say before the evaluations.

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
    # A name may hold half of a surrogate pair, which UTF-8 cannot.
    replace_file(target, render_report(evaluations, title=title, summary=summary).encode("utf-8", "replace"))


def render_report(
    evaluations: Sequence[Evaluation], *, title: str = "Calibration report", summary: Summary | None = None
) -> str:
    """Return the page of `write_report` as text.

    Args:
        evaluations: at least one; models of the same name are numbered.
        title: its heading.
        summary: what to say before the evaluations.

    >>> import torch
    >>> from calibrant.evaluation import evaluate
    >>> evaluation = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    >>> "<h1>Three classes</h1>" in render_report([evaluation], title="Three classes")
    True
    """
    if not evaluations:
        raise ValueError("a report needs at least one evaluation")
    names = _distinct_names([evaluation.name for evaluation in evaluations])
    comparisons = _Comparisons(evaluations)
    # Figures that must be asked for are shown where somebody did.
    asked = [name for name in _ON_REQUEST if any(each.metrics[name] is not None for each in evaluations)]
    tables = {
        heading: [
            _column(name, evaluations, names, comparisons)
            for name in figures
            if name in asked or name not in _ON_REQUEST
        ]
        for heading, figures in _TABLES.items()
    }
    tables["Calibration"].append(_p_values(evaluations))
    worst = [_worst_classes(evaluation.classes) for evaluation in evaluations]
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters.update(figure=_figure, signed=_signed, bracket=_bracket, count=_count, sha256=_sha256)
    template = resources.files("calibrant.reports").joinpath("report.html.jinja").read_text("utf-8")
    return environment.from_string(template).render(
        title=title,
        summary=summary,
        names=names,
        evaluations=evaluations,
        facts=_facts(evaluations),
        warning=_warning(evaluations),
        tables=tables,
        direction=_direction,
        missing=_missing_reasons(tables.values()),
        marks=MARKS,
        compared=comparisons.found,
        uncompared=[names[index] for index in sorted(comparisons.refused)],
        level=_levels(evaluations),
        has_intervals=any(evaluation.intervals for evaluation in evaluations),
        diagrams=[_diagram(evaluation) for evaluation in evaluations],
        descriptions=[
            _in_words(name, evaluation) for name, evaluation in zip(names, evaluations, strict=True)
        ],
        worst=worst,
        largest=max((each.ece for classes in worst for each in classes), default=0.0) or 1.0,
    )


def _distinct_names(names: Sequence[str]) -> list[str]:
    """Number what occurs again, and name what has no name.

    >>> _distinct_names(["net", "net", "net (2)", ""])
    ['net', 'net (3)', 'net (2)', 'unnamed']
    """
    names = [name.strip() or "unnamed" for name in names]
    taken = set(names)
    seen: set[str] = set()
    result = []
    for name in names:
        candidate, number = name, 2
        while candidate in seen or (candidate != name and candidate in taken):
            candidate, number = f"{name} ({number})", number + 1
        seen.add(candidate)
        result.append(candidate)
    return result


class _Comparisons:
    """Differences between pairs of evaluations, where both have what that takes.

    Attributes:
        found: whether any pair could be compared.
        refused: the numbers of the evaluations that could not be compared with a best one.
    """

    def __init__(self, evaluations: Sequence[Evaluation]) -> None:
        self._evaluations = evaluations
        self._known: dict[tuple[int, int], dict[str, Difference]] = {}
        self.found = False
        self.refused: set[int] = set()

    def difference(self, name: str, first: int, second: int) -> Difference | None:
        """Return how two evaluations, given by number, differ in one figure."""
        if (first, second) not in self._known:
            self._known[first, second] = self._compare(first, second)
        return self._known[first, second].get(name)

    def _compare(self, first: int, second: int) -> dict[str, Difference]:
        one, other = self._evaluations[first], self._evaluations[second]
        differences: dict[str, Difference] = {}
        if one.replicates and other.replicates:
            try:
                differences = one.compare(other)
            except ValueError:  # no figure that both have resampled
                differences = {}
        if differences:
            self.found = True
        else:
            self.refused.add(second)
        return differences


def _column(
    name: str, evaluations: Sequence[Evaluation], names: Sequence[str], comparisons: _Comparisons
) -> _Column:
    """Return one figure of every model, the best one marked where there are several."""
    description = METRICS[name]
    values = [_known(evaluation.metrics[name]) for evaluation in evaluations]
    present = [value for value in values if value is not None]
    best = (max if description.higher_is_better else min)(present) if len(present) > 1 else None
    winner = None if best is None else values.index(best)
    cells = []
    for index, (evaluation, value) in enumerate(zip(evaluations, values, strict=True)):
        if value is None:
            cells.append(Cell("–", "", note=_why_missing(name, evaluation)))
            continue
        mark = note = ""
        if value == best:
            mark, note = "best", "best"
        elif winner is not None:
            difference = comparisons.difference(name, winner, index)
            if difference is not None:
                mark, note = _against_best(difference, description, names[winner])
        interval = evaluation.intervals.get(name)
        cells.append(
            Cell(
                _figure(value, description.percent),
                repr(value).replace("inf", "Infinity"),
                "" if interval is None else _bracket(interval, description.percent),
                mark,
                note,
            )
        )
    return _Column(name, description, tuple(cells))


def _against_best(difference: Difference, description: Description, best: str) -> tuple[str, str]:
    """Return a mark for a figure that is not the best, and the mark in words."""
    low, high = difference.interval
    distance = (
        f"{_signed(-difference.value, description.percent)} {_bracket((-high, -low), description.percent)}"
    )
    if not difference.significant:
        return "equal", f"not distinguishable from {best}: {distance}"
    if difference.better == "first":
        return "worse", f"significantly worse than {best}: {distance}"
    return "", f"against {best}: {distance}"


def _p_values(evaluations: Sequence[Evaluation]) -> _Column:
    """Return the test of calibration; it has no best, for a large p-value proves nothing."""
    cells = []
    for evaluation in evaluations:
        value = _known(evaluation.p_value)
        if value is None:
            cells.append(Cell("–", "", note="not computed"))
        else:
            text = "<0.001" if value < 0.001 else f"{value:.3f}"
            verdict = "rejected" if value < 1 - evaluation.level else "not rejected"
            note = f"calibration is {verdict} at the {100 * (1 - evaluation.level):g}% level"
            cells.append(Cell(text, repr(value), verdict, note=note))
    return _Column("p_value", _P_VALUE, tuple(cells))


def _known(value: float | None) -> float | None:
    """Return a number, or None for what is none."""
    return None if value is None or math.isnan(value) else float(value)


def _why_missing(name: str, evaluation: Evaluation) -> str:
    """Return why an evaluation has no such figure."""
    if name == "mean_iou_foreground":
        return "no background class was named"
    if not evaluation.exact:
        return "needs every prediction at once, which a streamed evaluation does not keep"
    if name == "kde_ece":
        return (
            "takes long for so many elements, all pairs of which it visits; calibrant.metrics.kde_ece does it"
        )
    return "not computed"


def _missing_reasons(tables: Iterable[Sequence[_Column]]) -> dict[str, list[str]]:
    """Return the labels of figures that some model lacks, by reason."""
    reasons: dict[str, list[str]] = {}
    for each in (column for table in tables for column in table):
        for note in dict.fromkeys(cell.note for cell in each.cells if not cell.key):
            reasons.setdefault(note, []).append(each.description.label)
    return reasons


def _direction(columns: Sequence[_Column]) -> str:
    """Return which way is good in a table, in words; the p-value has no such way."""
    figures = [each.description for each in columns if each.name in METRICS]
    higher = [each.label for each in figures if each.higher_is_better]
    if not higher:
        return "Lower is better."
    return "Higher is better." + ("" if len(higher) == len(figures) else f" (Only: {'; '.join(higher)}.)")


def _facts(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return what was evaluated, and how, in a few words each."""
    models = len(evaluations)
    parts = [
        "1 model" if models == 1 else f"{models} models",
        f"{_span(each.samples for each in evaluations)} samples",
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
    """Return the level of the intervals, or all that occur."""
    return " and ".join(f"{100 * level:g}%" for level in sorted({each.level for each in evaluations}))


def _span(values: Iterable[int]) -> str:
    """Return one number, or the smallest and largest of several."""
    ordered = sorted(set(values))
    return _count(ordered[0]) if len(ordered) == 1 else f"{_count(ordered[0])} to {_count(ordered[-1])}"


def _warning(evaluations: Sequence[Evaluation]) -> str:
    """Return why the models' figures should not be held against each other, or nothing."""
    fingerprints = {each.fingerprint for each in evaluations if each.fingerprint is not None}
    if len(fingerprints) > 1 or len({(each.samples, each.num_classes) for each in evaluations}) > 1:
        return (
            "These models were evaluated on different data: their figures say little about which is better."
        )
    if len({each.bins for each in evaluations}) > 1:
        return "These models were evaluated with different numbers of bins, with which errors over bins grow."
    return ""


def _worst_classes(classes: Sequence[ClassFigures]) -> list[ClassFigures]:
    """Return the classes whose calibration error is largest, the largest first."""
    return sorted(
        (each for each in classes if _known(each.ece) is not None), key=lambda each: each.ece, reverse=True
    )[:_WORST_CLASSES]


def _diagram(evaluation: Evaluation) -> str:
    """Return a reliability diagram as the address of an image that holds all of it."""
    # Its own style, whatever the session has set: the page must not depend on it.
    with matplotlib.style.context(["default", {"svg.fonttype": "path", "svg.hashsalt": "calibrant"}]):
        canvas = Figure(figsize=(4.2, 4.2), layout="constrained")
        reliability_diagram(evaluation.reliability, canvas.add_subplot(), ece=evaluation.ece)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Picture("", buffer.getvalue()).address


def _in_words(name: str, evaluation: Evaluation) -> str:
    """Return what a reliability diagram shows to who cannot see it."""
    bins = _filled_bins(evaluation.reliability)
    total = sum(number for number, _, _ in bins)
    if not total:
        return f"Reliability diagram of {name}, without data."
    confidence = sum(number * each for number, each, _ in bins) / total
    accuracy = sum(number * each for number, _, each in bins) / total
    below = sum(each_accuracy < each_confidence for _, each_confidence, each_accuracy in bins)
    _, widest_confidence, widest_accuracy = max(bins, key=lambda each: abs(each[1] - each[2]))
    return (
        f"Reliability diagram of {name}: "
        f"accuracy lies below confidence in {below} of {len(bins)} bins that hold data. "
        f"Overall, mean confidence is {_figure(confidence)} and accuracy {_figure(accuracy)}: "
        f"{'over' if confidence > accuracy else 'under'}-confident by {_figure(abs(confidence - accuracy))}. "
        f"The gap is widest at confidence {_figure(widest_confidence)}, "
        f"where accuracy is {_figure(widest_accuracy)}."
    )


def _filled_bins(reliability: Reliability) -> list[tuple[int, float, float]]:
    """Return count, confidence and accuracy of the bins that hold data."""
    return [
        (number, confidence, accuracy)
        for number, confidence, accuracy in zip(
            reliability.count, reliability.confidence, reliability.accuracy, strict=True
        )
        if confidence is not None and accuracy is not None
    ]


def _figure(value: float | None, percent: bool = True) -> str:
    """Return a figure in print.

    >>> _figure(0.0412), _figure(1.25, percent=False), _figure(None)
    ('4.12%', '1.2500', '–')
    """
    value = _known(value)
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return (f"{100 * value:z.2f}%" if percent else f"{value:z.4f}").replace("-", "−")


def _signed(value: float | None, percent: bool = True) -> str:
    """Return a figure with its sign.

    >>> _signed(0.0412), _signed(-0.0412)
    ('+4.12%', '−4.12%')
    """
    return ("+" if value is not None and value > 0 else "") + _figure(value, percent)


def _bracket(interval: Interval | None, percent: bool = True) -> str:
    """Return an interval in print, without the unit.

    >>> _bracket((0.01, 0.02))
    '[1.00, 2.00]'
    """
    if interval is None:
        return "–"
    return "[" + ", ".join(_figure(each, percent).removesuffix("%") for each in interval) + "]"


def _count(value: int) -> str:
    """Return a whole number in print.

    >>> _count(10000)
    '10,000'
    """
    return f"{value:,}"


def _sha256(text: str) -> str:
    """Return the hash by which the page's policy admits its own script and no other."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
