"""Methods that were each trained from several seeds, on one test set: means, uncertainty, significance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import torch
from scipy import stats  # type: ignore[import-untyped]

from calibrant.evaluation import Evaluation
from calibrant.metrics.catalogue import METRICS
from calibrant.metrics.uncertainty import Interval

_FORMAT = 1


@dataclass(frozen=True)
class Method:
    """What was measured of one method.

    Attributes:
        name: of the method, such as a loss with its hyper-parameters.
        before: an evaluation per seed, of the models as they were trained.
        after: likewise, after temperature scaling.
        temperatures: per seed.
        detection: AUROC of finding another data set's elements by the entropy, per seed, by its name.
    """

    name: str
    before: tuple[Evaluation, ...]
    after: tuple[Evaluation, ...] = ()
    temperatures: tuple[float, ...] = ()
    detection: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def evaluations(self, after: bool) -> tuple[Evaluation, ...]:
        """Those after temperature scaling, or those before."""
        return self.after if after else self.before


@dataclass(frozen=True)
class MeanFigure:
    """One figure of one method over the seeds.

    Attributes:
        mean: over the seeds.
        std: standard deviation over the seeds; None for one seed.
        interval: of the mean, over other seeds (where there are several) and other test data; None where the
            figure was not resampled.
        p_value: of no difference from the first method, corrected for the number of methods (Holm, 1979);
            None for the first, for one seed, and where the figure was not resampled.
        better: whether it is better than the first method's.
    """

    mean: float
    std: float | None
    interval: Interval | None
    p_value: float | None = None
    better: bool = False

    @property
    def significant(self) -> bool:
        """Whether the difference from the first method is more than chance, at 5 %."""
        return self.p_value is not None and self.p_value < 0.05


@dataclass(frozen=True)
class Comparison:
    """Methods side by side; the first is what the others are tested against.

    Attributes:
        title: what was trained on what.
        seeds: of the runs, the same for every method.
        methods: at least one.
        dense: whether every element of an input has a label of its own, as in segmentation.

    >>> from calibrant.evaluation import evaluate
    >>> logits = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    >>> flat, other, sharp = (evaluate(scale * logits, logits.argmax(1)) for scale in (1, 1.01, 5))
    >>> methods = Method("flat", (flat, other)), Method("sharp", (sharp, sharp))
    >>> comparison = Comparison("toy", (0, 1), methods)
    >>> comparison.figures("nll")["sharp"].significant, comparison.figures("nll")["sharp"].better
    (True, True)
    """

    title: str
    seeds: tuple[int, ...]
    methods: tuple[Method, ...]
    dense: bool = False

    def figures(self, metric: str, *, after: bool = False) -> dict[str, MeanFigure]:
        """One metric of every method that has it, by the methods' names."""
        found: dict[str, MeanFigure] = {}
        first: tuple[Evaluation, ...] | None = None
        tested: dict[str, float] = {}
        for method in self.methods:
            evaluations = method.evaluations(after)
            values = [each.metrics[metric] for each in evaluations]
            known = [value for value in values if value is not None]
            if not known or len(known) < len(values):
                continue
            estimate = _estimate(evaluations, None, metric)
            better = False
            if first is None:
                first = evaluations
            else:
                difference = _estimate(evaluations, first, metric)
                better = difference.mean != 0 and (difference.mean > 0) == METRICS[metric].higher_is_better
                p_value = difference.p_value()
                if p_value is not None:
                    tested[method.name] = p_value
            found[method.name] = MeanFigure(
                estimate.mean,
                stdev(known) if len(known) > 1 else None,
                estimate.interval(METRICS[metric].percent),
                better=better,
            )
        for name, p_value in _holm(tested).items():
            figure = found[name]
            found[name] = MeanFigure(figure.mean, figure.std, figure.interval, p_value, figure.better)
        return found

    def to_json(self) -> str:
        """Every figure of every run, and their summaries."""

        def summary(after: bool) -> dict[str, Any]:
            tables = {metric: self.figures(metric, after=after) for metric in METRICS}
            return {
                method.name: {
                    metric: {
                        "mean": table[method.name].mean,
                        "std": table[method.name].std,
                        "interval": table[method.name].interval,
                        "p_value": table[method.name].p_value,
                    }
                    for metric, table in tables.items()
                    if method.name in table
                }
                for method in self.methods
            }

        plain = {
            "format": _FORMAT,
            "title": self.title,
            "seeds": self.seeds,
            "dense": self.dense,
            "first": self.methods[0].name,
            "before": summary(False),
            "after": summary(True),
            "runs": {
                method.name: {
                    "before": [each.metrics for each in method.before],
                    "after": [each.metrics for each in method.after],
                    "temperature": method.temperatures,
                    "detection": method.detection,
                }
                for method in self.methods
            },
        }
        return json.dumps(plain, indent=1, allow_nan=False)


@dataclass(frozen=True)
class _Estimate:
    """A mean over seeds, and what it would vary by.

    Two things could have come out otherwise: the test data, whose variance the bootstrap gives, and the
    seeds, of which there are few. The reaches of both, normal and Student's t, add up in quadrature:
    rejections of a true null then stay below 5 % however the two variances compare, where degrees of
    freedom after Satterthwaite let through up to 13 % with two seeds.

    Attributes:
        mean: over the seeds.
        of_test_data: variance of the mean over other test data; None where the figure was not resampled.
        of_seeds: variance of the mean over other seeds.
        seeds: how many there are.
    """

    mean: float
    of_test_data: float | None
    of_seeds: float
    seeds: int

    def reach(self, level: float) -> float:
        """How far the mean may lie from the truth, at that level of confidence."""
        assert self.of_test_data is not None
        tail = (1 - level) / 2
        normal = float(stats.norm.isf(tail))
        student = float(stats.t.isf(tail, self.seeds - 1)) if self.of_seeds > 0 else 0.0
        return math.sqrt(normal**2 * self.of_test_data + student**2 * self.of_seeds)

    def interval(self, fraction: bool) -> Interval | None:
        """Of the mean, at 95 %; nothing here is below 0, and no fraction above 1."""
        if self.of_test_data is None:
            return None
        reach = self.reach(0.95)
        return max(0.0, self.mean - reach), min(1.0, self.mean + reach) if fraction else self.mean + reach

    def p_value(self) -> float | None:
        """The level at which the reach just leaves out 0; None where a variance is not known."""
        if self.of_test_data is None or self.seeds < 2:
            return None
        low, high = _LEAST_P_VALUE, 1.0
        if self.of_test_data + self.of_seeds == 0 or self.reach(1 - low) <= abs(self.mean):
            return 1.0 if self.mean == 0 else low
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.reach(1 - middle) > abs(self.mean) else (low, middle)
        return high


_LEAST_P_VALUE = 1e-12


def _estimate(ours: Sequence[Evaluation], theirs: Sequence[Evaluation] | None, metric: str) -> _Estimate:
    """The mean over seeds, or the mean difference."""
    values = [float(each.metrics[metric] or 0.0) for each in ours]
    replicates = _mean_replicates(ours, metric)
    if theirs is not None:
        others = [float(each.metrics[metric] or 0.0) for each in theirs]
        other_replicates = _mean_replicates(theirs, metric)
        if len(others) != len(values):  # seeds cannot be paired
            values, others = [fmean(values)], [fmean(others)]
        values = [value - other for value, other in zip(values, others, strict=True)]
        if replicates is not None and other_replicates is not None:
            size = min(len(replicates), len(other_replicates))
            # Where not paired, the same numbers may have been drawn for both: take them in another order.
            paired = ours[0].is_paired_with(theirs[0])
            replicates = replicates[:size] - (other_replicates if paired else other_replicates.flip(0))[:size]
        else:
            replicates = None
    return _Estimate(
        fmean(values),
        None if replicates is None else float(replicates.var()),
        stdev(values) ** 2 / len(values) if len(values) > 1 else 0.0,
        len(values),
    )


def _mean_replicates(evaluations: Sequence[Evaluation], metric: str) -> torch.Tensor | None:
    """Resamples of the mean over seeds: each drew the same test data for every seed."""
    if not all(metric in each.replicates for each in evaluations):
        return None
    size = min(len(each.replicates[metric]) for each in evaluations)
    rows = [torch.tensor(each.replicates[metric][:size], dtype=torch.float64) for each in evaluations]
    return torch.stack(rows).mean(0)


def _holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p-values, each raised so that any false rejection among all is as improbable as it says."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p_values) - number)))
        adjusted[name] = largest
    return adjusted
