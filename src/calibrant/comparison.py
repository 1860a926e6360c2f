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

FIGURES = ("accuracy", "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "smooth_ece", "mce")
"""What a comparison shows of every method; `Evaluation` has more."""

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
class Figure:
    """One figure of one method over the seeds.

    Attributes:
        mean: over the seeds.
        std: standard deviation over the seeds; None for one seed.
        interval: of the mean, over other seeds and other test data; None where the figure was not resampled.
        p_value: of no difference from the first method, corrected for the number of methods (Holm, 1979);
            None for the first, and where it cannot be tested.
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

    >>> from calibrant.evaluation import evaluate
    >>> logits = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    >>> sharp, flat = (evaluate(scale * logits, logits.argmax(1), seed=0) for scale in (5, 1))
    >>> comparison = Comparison("toy", (0,), (Method("flat", (flat,)), Method("sharp", (sharp,))))
    >>> comparison.figures("nll")["sharp"].significant, comparison.figures("nll")["sharp"].better
    (True, True)
    """

    title: str
    seeds: tuple[int, ...]
    methods: tuple[Method, ...]

    def figures(self, metric: str, *, after: bool = False) -> dict[str, Figure]:
        """One metric of every method that has it, by the methods' names."""
        found: dict[str, Figure] = {}
        first: tuple[Evaluation, ...] | None = None
        tested: dict[str, float] = {}
        for method in self.methods:
            evaluations = method.evaluations(after)
            values = [each.metrics[metric] for each in evaluations]
            known = [value for value in values if value is not None]
            if not known or len(known) < len(values):
                continue
            mean, error, freedom = _estimate(evaluations, None, metric)
            better = False
            if first is None:
                first = evaluations
            else:
                difference, spread, degrees = _estimate(evaluations, first, metric)
                better = difference != 0 and (difference > 0) == METRICS[metric].higher_is_better
                if spread is not None:
                    tested[method.name] = _p_value(difference, spread, degrees)
            found[method.name] = Figure(
                mean,
                stdev(known) if len(known) > 1 else None,
                None if error is None else _interval(mean, error, freedom, METRICS[metric].percent),
                better=better,
            )
        for name, p_value in _holm(tested).items():
            figure = found[name]
            found[name] = Figure(figure.mean, figure.std, figure.interval, p_value, figure.better)
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


def _estimate(
    ours: Sequence[Evaluation], theirs: Sequence[Evaluation] | None, metric: str
) -> tuple[float, float | None, float]:
    """The mean over seeds, or the mean difference; its standard error; and the degrees of freedom.

    Two things would change the mean: other test data, whose share the bootstrap gives, and other seeds.
    Both variances add up; the degrees of freedom are Satterthwaite's, the bootstrap's taken as infinite.
    """
    values = [float(each.metrics[metric] or 0.0) for each in ours]
    replicates = _mean_replicates(ours, metric)
    if theirs is not None:
        others = [float(each.metrics[metric] or 0.0) for each in theirs]
        other_replicates = _mean_replicates(theirs, metric)
        both = replicates is not None and other_replicates is not None
        if len(others) != len(values):  # seeds cannot be paired
            values, others = [fmean(values)], [fmean(others)]
            both = False
        values = [value - other for value, other in zip(values, others, strict=True)]
        if both and replicates is not None and other_replicates is not None:
            size = min(len(replicates), len(other_replicates))
            paired = ours[0].is_paired_with(theirs[0])
            subtracted = other_replicates[:size] if paired else other_replicates[:size].flip(0)
            replicates = replicates[:size] - subtracted
        else:
            replicates = None
    mean = fmean(values)
    if replicates is None:
        return mean, None, math.inf
    of_test_data = float(replicates.var())
    of_seeds = stdev(values) ** 2 / len(values) if len(values) > 1 else 0.0
    total = of_test_data + of_seeds
    freedom = total**2 * (len(values) - 1) / of_seeds**2 if of_seeds > 0 else math.inf
    return mean, math.sqrt(total), freedom


def _mean_replicates(evaluations: Sequence[Evaluation], metric: str) -> torch.Tensor | None:
    """Resamples of the mean over seeds: each drew the same test data for every seed."""
    if not all(metric in each.replicates for each in evaluations):
        return None
    size = min(len(each.replicates[metric]) for each in evaluations)
    rows = [torch.tensor(each.replicates[metric][:size], dtype=torch.float64) for each in evaluations]
    return torch.stack(rows).mean(0)


def _p_value(difference: float, error: float, freedom: float) -> float:
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * stats.t.sf(abs(difference) / error, min(freedom, 1e9)))


def _interval(mean: float, error: float, freedom: float, fraction: bool) -> Interval:
    reach = float(stats.t.ppf(0.975, min(freedom, 1e9))) * error
    return max(0.0, mean - reach), min(1.0, mean + reach) if fraction else mean + reach


def _holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p-values, each raised so that any false rejection among all is as improbable as it says."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p_values) - number)))
        adjusted[name] = largest
    return adjusted
