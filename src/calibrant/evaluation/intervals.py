"""Confidence intervals of all metrics, from replicates or from sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from calibrant.evaluation.figures import Figure
from calibrant.evaluation.sums import EvaluationSums
from calibrant.histogram import ConfidenceHistogram, RankedSums
from calibrant.metrics.catalogue import METRICS, Metric, Options
from calibrant.metrics.predictions import Predictions
from calibrant.metrics.selective import risk_coverage
from calibrant.metrics.uncertainty import (
    Interval,
    binomial_interval,
    error_interval,
    interval,
    normal_interval,
    percentile_interval,
    student_interval,
)

# Points of the risk-coverage curve that intervals are read off.
_POINTS = 1000


def figures_of(
    estimates: Mapping[str, float | None],
    replicates: Mapping[str, Tensor],
    sums: EvaluationSums,
    options: Options,
    *,
    level: float | None,
    rejected: bool,
    chance: Callable[[Any], float],
    ranked: Predictions | ConfidenceHistogram | RankedSums,
) -> dict[str, Figure]:
    """The figures of all metrics: values with intervals and replicates.

    Without a ``level`` there are no intervals. ``rejected`` is the result of the test of calibration;
    ``chance`` calls `Metric.chance` with the data. ``ranked`` are the confidences of the predicted classes.

    A single element has no spread: all its resamples are equal, and an interval without width would pass for
    certainty. Only proportions have intervals then, those of the binomial distribution.
    """
    figures: dict[str, Figure] = {}
    if single := bool(sums.samples < 2):
        replicates = {}
    curve = None if level is None else risk_coverage(ranked, points=_POINTS, level=level)
    for name, value in estimates.items():
        metric, drawn = METRICS[name], replicates.get(name)
        ends: Interval | None = None
        if value is not None and level is not None:
            if metric.source in METRICS:
                inner = figures[metric.source].interval  # the metric is an increasing function of another
                if inner is not None:
                    both = torch.tensor(inner, dtype=torch.float64, device="cpu")
                    low, high = metric.function(both, options).tolist()
                    ends = low, high
            elif metric.binomial:
                found = binomial_interval((value * sums.samples).round(), sums.samples, level)
                ends = float(found[0]), float(found[1])
            elif metric.curve_interval is not None and curve is not None:
                ends = metric.curve_interval(curve)
            elif drawn is not None:
                ends = _bootstrap(metric, value, drawn, level, rejected, chance)
            elif metric.source == "elements" and metric.streamed and not single:
                ends = normal_interval(*sums.element_moments(name, options), level)
            if ends is not None:  # corrections for bias and steps of the curve may leave the value outside
                ends = min(ends[0], value), max(ends[1], value)
        # Seven digits are far more precise than a resample. They halve the JSON.
        rounded = () if drawn is None else tuple(float(f"{each:.7g}") for each in drawn.tolist())
        figures[name] = Figure(value, ends and _clipped(metric, *ends), rounded)
    return figures


def image_figures(images: Tensor, level: float | None) -> dict[str, Figure]:
    """Means over images, from the sums of `EvaluationSums`, with intervals from their spread."""
    figures = {}
    for (name, metric), (count, total, squares) in zip(METRICS.items(), images.T.tolist(), strict=True):
        if count:
            mean, ends = total / count, None
            if level is not None and count > 1:
                variance = max(0.0, squares / count - mean**2) / (count - 1)
                ends = student_interval(mean, math.sqrt(variance), count, level)
            figures[name] = Figure(mean, ends and _clipped(metric, *ends))
    return figures


def _bootstrap(
    metric: Metric, value: float, drawn: Tensor, level: float, rejected: bool, chance: Callable[[Any], float]
) -> Interval:
    if metric.group == "selective":
        return percentile_interval(drawn, level)
    if metric.chance is not None:  # the bootstrap sees little of the bias of these errors
        low, high = interval(value, drawn, level)
        low = min(low, interval(value, drawn, level, debiased=True)[0] - chance(metric.chance))
    elif metric.group == "calibration" and not metric.debiased:
        low, high = error_interval(value, drawn, level)
    else:
        low, high = interval(value, drawn, level, debiased=metric.debiased)
    if metric.group == "calibration" and metric.source == "confidences" and not rejected:
        low = 0.0  # the bootstrap never sees an error of 0, but the test allows it
    return low, high


def _clipped(metric: Metric, low: float, high: float) -> Interval:
    """The interval inside the range of the metric."""
    most = 1.0 if metric.percent else math.inf
    return min(max(low, 0.0), most), min(max(high, 0.0), most)
