"""The numbers of the charts that a page draws itself; ``charts.jinja`` turns them into SVG.

A chart, and each of its parts, is a dictionary of what the template needs. Places are fractions of the width
or height of a chart. ``series`` is the number of a colour and a shape. Colours are in ``report.css``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from calibrant.extras import require

require("report", "matplotlib", purpose=__name__)

from matplotlib.ticker import MaxNLocator

from calibrant.evaluation import ClassFigures, Evaluation, Reliability
from calibrant.evaluation.comparison import Comparison, MeanFigure
from calibrant.metrics import METRICS, RiskCoverage
from calibrant.metrics.uncertainty import Interval, binomial_interval
from calibrant.printable import counted, printable
from calibrant.reports.table_builders import state_words
from calibrant.reports.tables import in_percent, interval_text

Chart = dict[str, Any]

_TIPS = 10  # points of a risk-coverage curve with numbers

_MOST_DIAGRAMS = 3000
"""The most reliability diagrams of classes in a page, one for each class and model: about 0.5 MB."""


def axes(binary: bool) -> tuple[str, str]:
    """What a reliability diagram shows against what, in words."""
    return ("probability of yes", "frequency of yes") if binary else ("confidence", "accuracy")


def reliability_bins(data: Reliability, binary: bool = False) -> list[dict[str, Any]]:
    """The bars of a reliability diagram, without empty bins.

    The share of all elements is relative to the fullest bin. The certainty is 1 minus the width of the
    interval: bars of few elements are drawn pale.
    """
    x, y = axes(binary)
    found = []
    for number, count in enumerate(data.count):
        left, right = data.edges[number : number + 2]
        confidence, accuracy = data.confidence[number], data.accuracy[number]
        if not count or confidence is None or accuracy is None:
            continue
        interval = data.accuracy_interval[number] or (0.0, 1.0)
        expected = data.consistency[number] or (confidence, confidence)
        tip = (
            f"{x.capitalize()} {left:.2f} to {right:.2f}: {counted(count, 'element')}\n"
            f"mean {x} {in_percent(confidence)}\n"
            f"{y} {in_percent(accuracy)} {interval_text(interval)}\n"
            f"if calibrated {interval_text(expected)}"
        )
        found.append(
            {
                "left": left,
                "width": right - left,
                "lower": min(accuracy, confidence),
                "share": count / max(data.count),
                "confidence": confidence,
                "accuracy": accuracy,
                "interval": interval,
                "certainty": 1 - (interval[1] - interval[0]),
                "expected": expected,  # the accuracy of a calibrated model
                "tip": tip,
            }
        )
    return found


def class_diagrams(evaluations: Sequence[Evaluation], names: Sequence[str]) -> dict[str, Any]:
    """The reliability diagrams of single classes, for the script of the page; the worst classes first.

    Numbers are rounded to 1/1000, and classes left out, to keep the page small.

    Returns:
        The models' names, the width of a bin, the number of all classes, and a list of classes: the name, and
        for each model the filled bins, each as (bin, count, confidence, accuracy, lower end, upper end).
    """
    if not any(each.bins for evaluation in evaluations for each in evaluation.classes):
        return {}
    if len({evaluation.bins for evaluation in evaluations}) > 1:
        return {}  # the diagrams share their bins
    number = min(len(evaluation.classes) for evaluation in evaluations)
    order = worst_classes([evaluation.classes for evaluation in evaluations])
    diagrams = [_diagrams(evaluation) for evaluation in evaluations]
    chosen = order[: max(1, _MOST_DIAGRAMS // len(evaluations))]
    return {
        "models": [printable(name) for name in names],
        "width": 1 / evaluations[0].bins,
        "total": number,
        "classes": [
            [printable(evaluations[0].classes[k].name), [each[k] for each in diagrams]] for k in chosen
        ],
    }


def worst_classes(models: Sequence[Sequence[ClassFigures]]) -> list[int]:
    """The positions of the classes that all models have, by the largest calibration error of any model.

    Classes that no model ever predicts correctly come last: their error is small because they get no
    probability.
    """
    number = min(len(classes) for classes in models)

    def key(k: int) -> tuple[bool, float]:
        return not any(classes[k].accuracy for classes in models), -max(each[k].ece for each in models)

    return sorted(range(number), key=key)


def _diagrams(evaluation: Evaluation) -> list[list[tuple[int, ...]]]:
    bins = [each for figures in evaluation.classes for each in figures.bins]
    correct, count = (
        torch.tensor([getattr(each, key) for each in bins], device="cpu") for key in ("correct", "elements")
    )
    low, high = (ends.tolist() for ends in binomial_interval(correct, count, evaluation.level))
    rows = iter(
        (
            each.bin,
            each.elements,
            *(round(1000 * value) for value in (each.confidence, each.correct / each.elements, *ends)),
        )
        for each, *ends in zip(bins, low, high, strict=True)
    )
    return [[next(rows) for _ in figures.bins] for figures in evaluation.classes]


def dots(
    label: str,
    rows: Sequence[tuple[str, Sequence[tuple[float | None, Interval | None]]]],
    series: Sequence[str],
    *,
    signed: bool = False,
) -> Chart:
    """A chart of values with intervals in rows, on one axis. The values are fractions, printed in percent.

    Args:
        label: the label of the axis.
        rows: the name of each row, and a value and its interval for each series.
        series: the names of the series.
        signed: whether signs matter: the axis then shows 0 and positive values have a sign.
    """
    known = [
        100 * end
        for _, row in rows
        for value, interval in row
        if value is not None
        for end in (value, *(interval or ()))
    ]
    ticks = _ticks(min([*known, 0.0]), max([*known, 1e-9]))

    def place(value: float) -> float:
        return _place(100 * value, ticks)

    def dot(name: str, number: int, value: float, interval: Interval | None) -> dict[str, Any]:
        text = in_percent(value, signed=signed)
        what = f"{name}, {series[number]}" if series[number] else name
        low, high = interval or (value, value)
        tip = f"{what}: {text} {interval_text(interval)}".rstrip()
        return {"place": place(value), "low": place(low), "high": place(high), "series": number, "tip": tip}

    return {
        "label": label,
        "rows": [
            (name, [dot(name, n, value, ends) for n, (value, ends) in enumerate(row) if value is not None])
            for name, row in rows
        ],
        "ticks": _labelled(ticks),
        "series": series,
        "zero": place(0.0) if signed else None,
    }


def error_of_methods(comparison: Comparison) -> Chart:
    """The ECE of every method before and after each calibrator, with intervals."""
    states = {key: state_words(key) for key in ("", *comparison.calibrators)}
    found = [comparison.figures("ece", after=key) for key in states]
    rows = [
        (name, [(each[name].mean, each[name].interval) if name in each else (None, None) for each in found])
        for name in (method.name for method in comparison.methods)
    ]
    return dots("ECE (%)", rows, list(states.values()))


def error_of_models(evaluations: Sequence[Evaluation], names: Sequence[str]) -> Chart:
    """The ECE of every model, with intervals."""
    pairs = zip(names, evaluations, strict=True)
    return dots("ECE (%)", [(name, [(each.ece, each.intervals.get("ece"))]) for name, each in pairs], [""])


def gaps_of_classes(evaluations: Sequence[Evaluation], names: Sequence[str], classes: Sequence[int]) -> Chart:
    """Mean probability minus frequency of some classes, a dot for each model."""
    first = evaluations[0].classes
    rows = [
        (first[k].name, [(evaluation.classes[k].gap, None) for evaluation in evaluations]) for k in classes
    ]
    label = "Mean probability minus frequency (points)"
    return dots(label, rows, list(names) if len(names) > 1 else [""], signed=True)


def accuracy_against_error(comparison: Comparison) -> Chart:
    """Accuracy against ECE, means over seeds, before and after temperature scaling: points by method."""
    states = [key for key in ("", "temperature") if not key or key in comparison.calibrators]
    figures = [[comparison.figures(metric, after=key) for metric in ("ece", "accuracy")] for key in states]
    found = {
        method.name: [(ece[method.name], accuracy[method.name]) for ece, accuracy in figures]
        for method in comparison.methods
    }
    errors, accuracies = (
        [100 * figure.mean for figure in axis]
        for axis in zip(*(state for each in found.values() for state in each), strict=True)
    )
    largest, low, high = max(errors), min(accuracies), max(accuracies)
    x_ticks = _ticks(0.0, min(100.0, largest + (0.08 * largest or 1.0)))
    # A point long, or half of one near 100 %: less is chance, and the labels would not fit.
    edge = max(0.08 * (high - low) or 1.0, (1 - (high - low)) / 2)
    y_ticks = _ticks(max(0.0, low - edge), min(100.0, high + edge))

    def point(series: int, state: int, name: str, ece: MeanFigure, accuracy: MeanFigure) -> dict[str, Any]:
        lines = [f"{name}, {state_words(states[state])}"]
        for metric, figure in (("ece", ece), ("accuracy", accuracy)):
            lines.append(
                f"{METRICS[metric].label} {in_percent(figure.mean)} {interval_text(figure.interval)}"
            )
        x, y = _place(100 * ece.mean, x_ticks), _place(100 * accuracy.mean, y_ticks)
        return {"x": x, "y": y, "series": series, "state": state, "tip": "\n".join(lines)}

    points = [
        [point(series, state, name, *figures) for state, figures in enumerate(each)]
        for series, (name, each) in enumerate(found.items())
    ]
    ticks = {"x_ticks": _labelled(x_ticks), "y_ticks": _labelled(y_ticks)}
    return {"points": points, **ticks, "names": list(found)}


def risks(evaluations: Sequence[Evaluation], names: Sequence[str]) -> Chart | None:
    """Risk against coverage, a line with a band for each model; None if an evaluation has no curve."""
    found = [each.risk_coverage for each in evaluations if each.risk_coverage is not None]
    if len(found) < len(evaluations):
        return None
    # Intervals of the first few elements reach far up. They must not flatten the curves.
    ticks = _ticks(0.0, max(100 * max(*each.risk, each.interval[-1][1], 1e-3) for each in found))

    def place(risk: float) -> float:
        return min(1.0, _place(100 * risk, ticks))

    def joined(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x:.4g},{place(y):.4g}" for x, y in points)

    def curve(name: str, data: RiskCoverage) -> dict[str, Any]:
        low, high = zip(*data.interval, strict=True)
        step = max(1, len(data.coverage) // _TIPS)
        tips = [
            (
                data.coverage[n],
                place(data.risk[n]),
                f"{name}: the {in_percent(data.coverage[n])} most confident elements\n"
                f"error rate {in_percent(data.risk[n])} {interval_text(data.interval[n])}",
            )
            for n in range(step - 1, len(data.coverage), step)
        ]
        band = [*zip(data.coverage, high, strict=True), *zip(data.coverage[::-1], low[::-1], strict=True)]
        line = joined(zip(data.coverage, data.risk, strict=True))
        return {"line": line, "band": joined(band), "points": tips}

    return {
        "curves": [curve(name, data) for name, data in zip(names, found, strict=True)],
        "y_ticks": _labelled(ticks),
        "names": names,
    }


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below ``low`` to above ``high``."""
    return [float(tick) for tick in MaxNLocator(5).tick_values(low, high)]


def _place(value: float, ticks: Sequence[float]) -> float:
    """Where a value lies between the first tick and the last one, from 0 to 1."""
    return (value - ticks[0]) / (ticks[-1] - ticks[0])


def _labelled(ticks: Sequence[float]) -> list[tuple[float, str]]:
    return [(_place(tick, ticks), f"{tick:g}".replace("-", "−")) for tick in ticks]
