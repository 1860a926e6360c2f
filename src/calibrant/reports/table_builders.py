"""The tables of evaluations and of comparisons, with their best values and significant differences marked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

from calibrant.evaluation import Difference, Evaluation
from calibrant.evaluation.comparison import CLEAN, Comparison, MeanFigure, mean_figure
from calibrant.evaluation.figures import of_same_data
from calibrant.metrics import METRICS
from calibrant.options import Choice, RecipeError
from calibrant.printable import NOT_INDEPENDENT, counted
from calibrant.reports.tables import (
    BEST_IN_BOLD,
    Cell,
    Column,
    Table,
    Verdict,
    interval_text,
    number_text,
)


def _best(
    values: Sequence[float | None], printed: Sequence[str], higher_is_better: bool | None
) -> tuple[int | None, list[bool]]:
    """The position of the best value, and which values print like it; none if all values print alike."""
    known = [index for index, value in enumerate(values) if value is not None]
    if higher_is_better is None or len({printed[index] for index in known}) < 2:
        return None, [False] * len(values)
    best = (max if higher_is_better else min)(known, key=lambda index: values[index] or 0.0)
    return best, [
        value is not None and text == printed[best] for value, text in zip(values, printed, strict=True)
    ]


def evaluation_table(
    evaluations: Sequence[Evaluation], names: Sequence[str], *, against: Literal["best", "first"] = "best"
) -> Table:
    """Every figure of several evaluations.

    The columns are "samples", the metrics in the order of `calibrant.metrics.METRICS`, and "p_value". Each
    value is tested ``against`` the best of its column, or the first model. If the models were evaluated on
    different data, none is the best.
    """
    known: dict[tuple[int, int], dict[str, Difference]] = {}
    counts = tuple(Cell(each.samples, f"{each.samples:,}") for each in evaluations)
    columns = [Column("samples", "Elements", counts)]
    ranked = of_same_data(evaluations)
    for key, metric in METRICS.items():
        values = [_known(evaluation.metrics[key]) for evaluation in evaluations]
        printed = [number_text(value, metric.percent, unit=" %") for value in values]
        winner, best = _best(values, printed, metric.higher_is_better if ranked else None)
        reference = winner if against == "best" else 0
        cells = []
        for index, (evaluation, value) in enumerate(zip(evaluations, values, strict=True)):
            if value is None:
                why = metric.why_missing or "not computed"
                if not evaluation.exact and not metric.streamed:
                    why = "needs every prediction at once, which a streamed evaluation does not keep"
                cells.append(Cell(None, "–", note=why))
                continue
            verdict: Verdict = ""
            note = ""
            # Values that print alike count as equal, even if later digits differ significantly.
            if reference is not None and printed[index] != printed[reference]:
                pair = reference, index
                if pair not in known:
                    known[pair] = differences(evaluations[reference], evaluation)
                if (difference := known[pair].get(key)) is not None:
                    low, high = difference.interval
                    distance = number_text(-difference.value, metric.percent, unit=" %", signed=True)
                    distance += " " + interval_text((-high, -low), metric.percent)
                    verdict, note = _verdict(difference, against, names[reference], distance)
            interval = interval_text(evaluation.intervals.get(key), metric.percent)
            cells.append(Cell(value, printed[index], interval, best[index], verdict, note))
        columns.append(Column(key, metric.label, tuple(cells), metric.sentence, metric.higher_is_better))
    columns.append(_p_values(evaluations))
    untested = sorted({second for (_, second), found in known.items() if not found})
    tested = any(known.values())
    return Table(tuple(names), tuple(columns), tested, tuple(names[index] for index in untested))


def with_groups(table: Table, evaluations: Sequence[Evaluation]) -> Table:
    """An `evaluation_table` with accuracy and ECE of the head, middle and tail classes before its p-values.

    Differences between the figures of groups are not tested.
    """
    columns = []
    ranked = of_same_data(evaluations)
    for group in dict.fromkeys(name for evaluation in evaluations for name in evaluation.groups):
        for key in ("accuracy", "ece"):
            metric = METRICS[key]
            found = [evaluation.groups.get(group) for evaluation in evaluations]
            values: list[float | None] = [None if each is None else getattr(each, key) for each in found]
            printed = [number_text(value, metric.percent, unit=" %") for value in values]
            _, best = _best(values, printed, metric.higher_is_better if ranked else None)
            cells = (
                Cell(value, text, best=is_best)
                for value, text, is_best in zip(values, printed, best, strict=True)
            )
            label = f"{metric.label}, {group}"
            columns.append(Column(f"{key}_{group}", label, tuple(cells), "", metric.higher_is_better))
    *figures, p_value = table.columns
    return replace(table, columns=(*figures, *columns, p_value))


def evaluation_note(evaluations: Sequence[Evaluation]) -> str:
    """The meaning of the marks in a table of evaluations tested against the first."""
    first, *others = evaluations
    elsewhere = [other.name for other in others if not of_same_data([first, other])]
    best = "" if elsewhere else "* best; "
    independent = ""
    if elsewhere:
        have = "has" if len(elsewhere) == 1 else "have"
        independent = (
            f"{', '.join(elsewhere)} {have} other labels than {first.name}, or the same in another order: no "
            "value is marked as the best"
        )
    if reason := next(filter(None, map(first.why_untested, others)), ""):
        untested = f"{best}differences are not tested: {reason}"
        return f"{untested}. {independent}" if independent else untested
    unpaired = [other.name for other in others if not first.is_paired_with(other)]
    meaning = (
        f"{best}better, worse: a significant difference from {first.name} (the {100 * first.level:g} % "
        f"interval of {'the bootstrap' if unpaired else 'the paired bootstrap'} leaves out 0)"
    )
    if first.groups:
        meaning += "; figures of groups of classes are not tested"
    if independent:
        return f"{meaning}. {independent}, and they are compared as independent data"
    if not unpaired:
        return meaning
    return (
        f"{meaning}. {', '.join(unpaired)} and {first.name} are compared as independent data, so only larger "
        "differences are found. Pairing needs the same labels in the same order, files in memory (evaluate "
        "--exact), and at most 200 million elements times resamples"
    )


def differences(first: Evaluation, second: Evaluation) -> dict[str, Difference]:
    """First minus second, by metric; empty if the two cannot be compared."""
    return {} if first.why_untested(second) else first.compare(second)


def _verdict(difference: Difference, against: str, reference: str, distance: str) -> tuple[Verdict, str]:
    if not difference.significant:
        return "equal", f"not distinguishable from {reference}: {distance}"
    if difference.better == "first":
        return "worse", f"significantly worse than {reference}: {distance}"
    if against == "best":  # the resamples contradict the value
        return "", f"against {reference}: {distance}"
    return "better", f"significantly better than {reference}: {distance}"


def _p_values(evaluations: Sequence[Evaluation]) -> Column:
    """The test of calibration. It has no best value: a large p-value proves nothing."""
    cells = []
    for evaluation in evaluations:
        value = _known(evaluation.p_value)
        if value is None:
            cells.append(Cell(None, "–", note="not computed"))
            continue
        text = "<0.001" if value < 0.001 else f"{value:.3f}"
        result = "rejected" if value < 1 - evaluation.level else "not rejected"
        note = f"calibration is {result} at the {100 * (1 - evaluation.level):g} % level"
        cells.append(Cell(value, text, result, note=note))
    sentence = "The probability of an ECE at least this large if the model were calibrated. A small value "
    return Column("p_value", "p-value of calibration", tuple(cells), sentence + "rejects calibration.")


def _known(value: float | None) -> float | None:
    """The number; None for NaN."""
    return None if value is None or math.isnan(value) else float(value)


# The figures of a comparison that a narrow terminal keeps longest, before and after temperature scaling.
_IMPORTANCE = {"accuracy": 5, "ece": 4, "nll": 3}
_ASKED_FOR = 2  # other calibrators, and data that are out of distribution


def comparison_table(comparison: Comparison, leading: str = "") -> Table:
    """Means over seeds with their standard deviations; "+ T" marks figures after temperature scaling.

    ``leading`` is the key of the most important metric.
    """
    methods = comparison.methods
    names = tuple(method.name for method in methods)
    columns = []
    for key in comparison.columns:
        metric = METRICS[key]
        before = comparison.figures(key)
        importance = 1 + max(_IMPORTANCE.values()) if key == leading else _IMPORTANCE.get(key, 1)
        for calibrator in ("", *comparison.calibrators):
            figures = comparison.figures(key, after=calibrator)
            # Calibrators that keep the order of the classes do not change what is recognised.
            if calibrator and metric.group == "recognition" and _same_means(figures, before):
                continue
            columns.append(
                _mean_column(
                    metric.label + state_label(calibrator),
                    [figures.get(name) for name in names],
                    metric.percent,
                    metric.higher_is_better,
                    metric.sentence,
                    importance if calibrator in ("", "temperature") else min(importance, _ASKED_FOR),
                    names[0],
                )
            )
    temperatures = {"T": [method.temperatures for method in methods]}
    for calibrator in methods[0].chosen:
        temperatures[f"T, {calibrator}"] = [method.chosen[calibrator] for method in methods]
    for label, found in temperatures.items():
        if all(found):
            columns.append(_mean_column(label, list(map(mean_figure, found)), False, None))
    for other, short in data_labels(methods[0].detection).items():
        for calibrator in methods[0].detected:
            if all(other in method.detected.get(calibrator, ()) for method in methods):
                means = [mean_figure(method.detected[calibrator][other]) for method in methods]
                label = f"AUROC{state_label(calibrator)}, {short}"
                sentence = f"How well the entropy tells {other} from the test data."
                columns.append(_mean_column(label, means, True, True, sentence, _ASKED_FOR))
    return Table(names, tuple(column for column in columns if not column.empty))


def data_labels(names: Iterable[str]) -> dict[str, str]:
    """Short labels of data sets: a file or folder stands for all options, if that keeps labels apart.

    >>> data_labels(["svhn", "npz[file=tiny-imagenet-32.npz,test=1]"])
    {'svhn': 'svhn', 'npz[file=tiny-imagenet-32.npz,test=1]': 'npz tiny-imagenet-32'}
    """
    labels = {name: _data_label(name) for name in names}
    number = Counter(labels.values())
    return {name: label if number[label] == 1 else name for name, label in labels.items()}


def _data_label(name: str) -> str:
    try:
        choice = Choice.parse(name)
    except RecipeError:  # not a specification
        return name
    place = Path(str(choice.options.get("file", ""))).stem or Path(str(choice.options.get("folder", ""))).name
    return f"{choice.name} {place}" if place else name


def state_label(calibrator: str) -> str:
    """The ending of a label for figures after a calibrator.

    >>> state_label(""), state_label("temperature"), state_label("spline")
    ('', ' + T', ' + spline')
    """
    return f" + {'T' if calibrator == 'temperature' else calibrator}" if calibrator else ""


def state_words(calibrator: str) -> str:
    """The words for figures after a calibrator.

    >>> state_words(""), state_words("temperature"), state_words("spline")
    ('before calibration', 'after temperature scaling', 'after spline')
    """
    if not calibrator:
        return "before calibration"
    return f"after {'temperature scaling' if calibrator == 'temperature' else calibrator}"


def shift_tables(comparison: Comparison) -> dict[str, Table]:
    """Accuracy and ECE against the severity of each shift, by heading.

    Each method has a row before and after calibration.
    """
    tables = {}
    labels = data_labels(comparison.methods[0].shifted)
    for shift, key in product(labels, ("accuracy", "ece")):
        metric = METRICS[key]
        levels = comparison.severities(shift)
        found = {
            (level, calibrator): comparison.shifted_figures(shift, key, level, calibrator)
            for level in levels
            for calibrator in ("", *comparison.calibrators)
        }
        # As in the main table: a calibrator without effect on the accuracy has no rows there.
        states = [
            calibrator
            for calibrator in ("", *comparison.calibrators)
            if not (
                calibrator
                and metric.group == "recognition"
                and all(_same_means(found[level, calibrator], found[level, ""]) for level in levels)
            )
        ]
        rows = [(method.name, calibrator) for method in comparison.methods for calibrator in states]
        columns = []
        for level in levels:
            figures = [found[level, calibrator].get(name) for name, calibrator in rows]
            importance = 2 if level == levels[0] else 1 if level == levels[-1] else 0
            label, better = level_label(level), metric.higher_is_better
            columns.append(_mean_column(label, figures, metric.percent, better, metric.sentence, importance))
        names = tuple(name + state_label(calibrator) for name, calibrator in rows)
        tables[f"{metric.label} on {labels[shift]}"] = Table(names, tuple(columns))
    return tables


def level_label(level: str) -> str:
    """The heading for a severity.

    >>> level_label("0"), level_label("3"), level_label("shifted")
    ('clean', 'severity 3', 'shifted')
    """
    if level == CLEAN:
        return "clean"
    return f"severity {level}" if level.isdecimal() else level


def _same_means(figures: Mapping[str, MeanFigure], others: Mapping[str, MeanFigure]) -> bool:
    return {name: each.mean for name, each in figures.items()} == {
        name: each.mean for name, each in others.items()
    }


def comparison_note(comparison: Comparison) -> str:
    """What the figures and marks of a `comparison_table` mean."""
    seeds, first = len(comparison.seeds), comparison.methods[0].name
    if comparison.dense:
        tested = f"No intervals and no significance: {NOT_INDEPENDENT}."
    elif seeds == 1:
        tested = "The intervals cover other test data, but not other seeds. One seed is too few to test "
        tested += "significance."
    elif not any(
        figure.p_value is not None
        for key in comparison.columns
        for figure in comparison.figures(key).values()
    ):
        tested = "Too few resamples to test significance."
    else:
        tested = f"Better or worse: a significant difference from {first} at 5 %, over seeds and resampled "
        tested += "test data together, corrected for the number of methods (Holm)."
    figures = figures_note(comparison, "Test set", "the validation data")
    if len(comparison.methods) == 1 and seeds > 1 and not comparison.dense:
        return figures  # nothing to compare
    return f"{figures} {BEST_IN_BOLD} {tested}"


def figures_note(comparison: Comparison, data: str, fitted: str) -> str:
    """What the figures of a `comparison_table` are.

    ``data`` says what the methods were evaluated on, ``fitted`` what the calibrators were fitted to.
    """
    seeds = len(comparison.seeds)
    spread = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    first = comparison.methods[0].before[0]
    numbers = [METRICS[key].label for key in comparison.columns if not METRICS[key].percent]
    plain = f"All figures but {', '.join(numbers)} and T" if numbers else "All figures but T"
    beside = [key for key in comparison.calibrators if key != "temperature"]
    others = f", {', '.join(f'+ {key}' for key in beside)}: after this calibrator" if beside else ""
    labels = f" T is the mean over labels, not counting those with one answer in all of {fitted}."
    return (
        f"{data} of {counted(first.samples, 'element')}, {spread}. {plain} are in percent. + T: after "
        f"temperature scaling{others}, fitted to {fitted}.{labels if first.labels else ''}"
    )


def _mean_column(
    label: str,
    figures: Sequence[MeanFigure | None],
    percent: bool,
    higher_is_better: bool | None,
    sentence: str = "",
    importance: int = 0,
    first: str = "",
) -> Column:
    """Means over seeds with standard deviations; ``first`` is the method that others are tested against."""
    values = [None if figure is None else figure.mean for figure in figures]
    printed = [number_text(value, percent, decimals=3) for value in values]
    _, best = _best(values, printed, higher_is_better)
    cells = []
    for figure, text, is_best in zip(figures, printed, best, strict=True):
        if figure is None:
            cells.append(Cell(None, text, note="not computed for every seed"))
            continue
        spread = "" if figure.std is None else f" ± {number_text(figure.std, percent, decimals=3)}"
        verdict: Verdict = ("better" if figure.better else "worse") if figure.significant else ""
        note = f"significantly {verdict} than {first} (p = {figure.p_value:.2g})" if verdict else ""
        interval = interval_text(figure.interval, percent, decimals=3)
        cells.append(Cell(figure.mean, text + spread, interval, is_best, verdict, note))
    return Column(label, label, tuple(cells), sentence, higher_is_better, importance)
