"""Comparison of methods over several seeds on one test set: means, intervals and significance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from scipy import special  # type: ignore[import-untyped]
from torch import Tensor

from calibrant.arguments import unknown
from calibrant.evaluation.figures import Evaluation
from calibrant.metrics.catalogue import METRICS
from calibrant.metrics.uncertainty import Interval, least_resamples

_FORMAT = 1
_LEAST_P_VALUE = 1e-12
_LEVEL = 0.95


Metrics = Mapping[str, float | None]
"""The values of metrics, by their keys in `METRICS`."""

CLEAN = "0"
"""The severity of test data that are not shifted."""


def default_columns(dense: bool) -> tuple[str, ...]:
    """The metrics in the table of a comparison, if no others are asked for.

    >>> default_columns(dense=True)
    ('accuracy', 'mean_iou', 'nll', 'ece', 'adaptive_ece', 'classwise_ece')
    """
    return ("accuracy", *(["mean_iou"] if dense else []), "nll", "ece", "adaptive_ece", "classwise_ece")


@dataclass(frozen=True)
class Method:
    """The results of one method.

    Attributes:
        name: the name of the method, such as a loss with its hyper-parameters.
        before: one evaluation per seed, before temperature scaling.
        after: one evaluation per seed, after temperature scaling.
        temperatures: one temperature per seed.
        detection: out-of-distribution detection by the entropy, before temperature scaling: one AUROC per
            seed, by the name of the other data set.
        detection_after: the same after temperature scaling.
        detection_chosen: the same by the name of another calibrator that is a temperature.
        curves: by the name of the other data set and by calibrator ("" for none), an ROC curve: the means
            over seeds of the true positive rates at evenly spaced false positive rates.
        calibrated: one evaluation per seed after other calibrators, by the name of the calibrator.
        chosen: one temperature per seed, by the name of another calibrator that has one.
        shifted: figures on shifted test data, by the name of the data set, by severity, and by calibrator
            ("" for none): the metrics of each seed. The severity `CLEAN` stands for the test data.
    """

    name: str
    before: tuple[Evaluation, ...]
    after: tuple[Evaluation, ...] = ()
    temperatures: tuple[float, ...] = ()
    detection: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    detection_after: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    detection_chosen: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    calibrated: Mapping[str, tuple[Evaluation, ...]] = field(default_factory=dict)
    chosen: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    shifted: Mapping[str, Mapping[str, Mapping[str, tuple[Metrics, ...]]]] = field(default_factory=dict)

    def evaluations(self, calibrator: str) -> tuple[Evaluation, ...]:
        """One evaluation per seed after a calibrator, or before calibration for ``""``."""
        known = {"": self.before, "temperature": self.after, **self.calibrated}
        return known.get(calibrator, ())

    @property
    def detected(self) -> dict[str, Mapping[str, tuple[float, ...]]]:
        """One AUROC per seed, by calibrator (``""`` for none) and by the name of the other data set."""
        return {"": self.detection, "temperature": self.detection_after, **self.detection_chosen}


@dataclass(frozen=True)
class MeanFigure:
    """One metric of one method over all seeds.

    Attributes:
        mean: the mean over seeds.
        std: the standard deviation over seeds; None for one seed.
        interval: the 95 % interval of the mean over test data and seeds, or for one seed that of its
            evaluation; None if the metric was not resampled.
        p_value: the p-value of the difference from the first method, corrected for the number of methods
            (Holm, 1979); None for the first method, for one seed, for the largest error of several bins, and
            if the metric was not resampled or the first method does not have it.
        better: whether the mean is better than that of the first method.
    """

    mean: float
    std: float | None
    interval: Interval | None
    p_value: float | None = None
    better: bool = False

    @property
    def significant(self) -> bool:
        """Whether the difference from the first method is significant at 5 %."""
        return self.p_value is not None and self.p_value < 0.05


@dataclass(frozen=True)
class Comparison:
    """Several methods on one test set. Each is tested against the first.

    Attributes:
        title: what was trained on which data.
        seeds: the seeds of the runs, the same for every method.
        methods: at least one method.
        dense: whether an input has many labels, as in segmentation.
        columns: the metrics in tables, keys of `METRICS`; by default those of `default_columns`.

    Raises:
        ValueError: two methods have one name, or a method has more evaluations than there are seeds.

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
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", default_columns(self.dense))
        names = [method.name for method in self.methods]
        for method in self.methods:
            if names.count(method.name) > 1:
                raise ValueError(f"two methods have the name {method.name!r}, expected a name for each")
            if len(method.before) > len(self.seeds):
                raise ValueError(
                    f"method {method.name!r} has {len(method.before)} evaluations, expected one for each of "
                    f"the {len(self.seeds)} seeds"
                )

    @property
    def calibrators(self) -> tuple[str, ...]:
        """The calibrators whose results every method has; temperature scaling is the first."""
        known = ("temperature", *self.methods[0].calibrated)
        return tuple(key for key in known if all(method.evaluations(key) for method in self.methods))

    def figures(self, metric: str, *, after: bool | str = False) -> dict[str, MeanFigure]:
        """One metric of every method that has it, by the name of the method.

        Args:
            metric: a key of `METRICS`.
            after: a calibrator; True for temperature scaling, False for the figures before calibration.

        Raises:
            ValueError: the metric is unknown.
        """
        if metric not in METRICS:
            raise ValueError(unknown("metric", metric, METRICS))
        calibrator = after if isinstance(after, str) else "temperature" if after else ""
        found: dict[str, MeanFigure] = {}
        first: _Runs | None = None
        tested: dict[str, float] = {}
        for method in self.methods:
            evaluations = method.evaluations(calibrator)
            if not evaluations or any(each.figures[metric].value is None for each in evaluations):
                continue
            runs = _runs(evaluations, metric)
            of_test_data = None if runs.replicates is None else _variance(runs.replicates, evaluations)
            estimate = _of_seeds(runs.values, of_test_data)
            interval = estimate.interval(METRICS[metric].percent)
            if len(evaluations) == 1 and interval is not None and evaluations[0].level == _LEVEL:
                interval = evaluations[0].figures[metric].interval or interval
            better = False
            if method is self.methods[0]:
                first = runs
            elif first is not None:
                difference = _difference(runs, first)
                better = difference.mean != 0 and (difference.mean > 0) == METRICS[metric].higher_is_better
                p_value = None if METRICS[metric].maximum else difference.p_value()
                if p_value is not None:
                    tested[method.name] = p_value
            found[method.name] = MeanFigure(
                estimate.mean,
                stdev(runs.values) if len(runs.values) > 1 else None,
                interval,
                better=better,
            )
        corrected = _holm(tested)
        return {name: replace(figure, p_value=corrected.get(name)) for name, figure in found.items()}

    def severities(self, shift: str) -> tuple[str, ...]:
        """The severities of shifted data, from clean test data on."""
        return tuple(self.methods[0].shifted[shift])

    def shifted_figures(
        self, shift: str, metric: str, severity: str, calibrator: str = ""
    ) -> dict[str, MeanFigure]:
        """One metric on shifted data of every method that has it, without intervals.

        Args:
            shift: the name of the shifted data.
            metric: a key of `METRICS`.
            severity: one of `severities`.
            calibrator: a calibrator, or ``""`` for none.
        """
        found = {}
        for method in self.methods:
            values = [each[metric] for each in method.shifted[shift][severity].get(calibrator, ())]
            known = [value for value in values if value is not None]
            if known and len(known) == len(values):
                found[method.name] = mean_figure(known)
        return found

    def to_json(self) -> str:
        """The metrics of every run, and their summaries."""

        def summary(calibrator: str) -> dict[str, Any]:
            summaries: dict[str, Any] = {method.name: {} for method in self.methods}
            for metric in METRICS:
                for name, figure in self.figures(metric, after=calibrator).items():
                    entries = vars(figure).items()
                    summaries[name][metric] = {key: value for key, value in entries if key != "better"}
            return summaries

        def metrics(evaluations: Sequence[Evaluation]) -> list[Metrics]:
            return [each.metrics for each in evaluations]

        plain = {
            "format": _FORMAT,
            "title": self.title,
            "seeds": self.seeds,
            "samples": self.methods[0].before[0].samples,
            "dense": self.dense,
            "columns": self.columns,
            "first": self.methods[0].name,
            "before": summary(""),
            "after": summary("temperature"),
            "calibrated": {key: summary(key) for key in self.calibrators if key != "temperature"},
            "runs": {
                method.name: {
                    "before": metrics(method.before),
                    "after": metrics(method.after),
                    "temperature": method.temperatures,
                    "calibrated": {key: metrics(each) for key, each in method.calibrated.items()},
                    "chosen_temperature": method.chosen,
                    "detection": method.detection,
                    "detection_after": method.detection_after,
                    "detection_chosen": method.detection_chosen,
                    "shifted": method.shifted,
                }
                for method in self.methods
            },
        }
        return json.dumps(plain, indent=1, allow_nan=False)


def mean_figure(values: Sequence[float]) -> MeanFigure:
    """Mean and standard deviation over seeds, without an interval.

    >>> mean_figure([0.5, 0.5]).std
    0.0
    """
    return MeanFigure(fmean(values), stdev(values) if len(values) > 1 else None, None)


@dataclass(frozen=True)
class _Estimate:
    """A mean over seeds with its two variances: over test data, and over seeds.

    The reaches of both, a normal and a Student's t quantile, are added in quadrature. Rejections of a true
    null hypothesis then stay below 5 % for every ratio of the two variances. With Satterthwaite's degrees of
    freedom they reach 13 % for two seeds.
    """

    mean: float
    of_test_data: float | None  # None if it is not known
    of_seeds: float
    seeds: int  # their number

    def reach(self, level: float) -> float:
        """Half the width of the confidence interval at this level."""
        assert self.of_test_data is not None
        tail = (1 - level) / 2
        normal = float(special.ndtri(tail))
        student = float(special.stdtrit(self.seeds - 1, tail)) if self.of_seeds > 0 else 0.0
        return math.sqrt(normal**2 * self.of_test_data + student**2 * self.of_seeds)

    def interval(self, fraction: bool) -> Interval | None:
        """The 95 % interval of the mean; at least 0, and at most 1 for fractions."""
        if self.of_test_data is None:
            return None
        reach = self.reach(_LEVEL)
        return max(0.0, self.mean - reach), min(1.0, self.mean + reach) if fraction else self.mean + reach

    def p_value(self) -> float | None:
        """The smallest p at which the interval of level 1 - p excludes 0; None if a variance is not known."""
        if self.of_test_data is None or self.seeds < 2:
            return None
        low, high = _LEAST_P_VALUE, 1.0
        if self.of_test_data + self.of_seeds == 0 or self.reach(1 - low) <= abs(self.mean):
            return 1.0 if self.mean == 0 else low
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.reach(1 - middle) > abs(self.mean) else (low, middle)
        return high


class _Runs(NamedTuple):
    """One metric of one method in every seed."""

    evaluations: Sequence[Evaluation]
    values: list[float]
    replicates: Tensor | None  # (seeds, resamples); None if the metric was resampled less than twice


def _runs(evaluations: Sequence[Evaluation], metric: str) -> _Runs:
    figures = [each.figures[metric] for each in evaluations]
    drawn = [each.replicates for each in figures]
    size = min(map(len, drawn))
    replicates = None
    if size > 1:
        replicates = torch.tensor([each[:size] for each in drawn], dtype=torch.float64, device="cpu")
    return _Runs(evaluations, [float(each.value or 0.0) for each in figures], replicates)


def _difference(ours: _Runs, theirs: _Runs) -> _Estimate:
    """The mean difference over seeds."""
    values, others = ours.values, theirs.values
    if len(others) != len(values):  # seeds cannot be paired
        values, others = [fmean(values)], [fmean(others)]
    drawn, others_drawn = ours.replicates, theirs.replicates
    few = least_resamples(0.95)
    if drawn is None or others_drawn is None or min(drawn.shape[1], others_drawn.shape[1]) < few:
        of_test_data = None
    elif len(drawn) == len(others_drawn) and all(
        map(Evaluation.is_paired_with, ours.evaluations, theirs.evaluations)
    ):
        size = min(drawn.shape[1], others_drawn.shape[1])
        of_test_data = _variance(drawn[:, :size] - others_drawn[:, :size], ours.evaluations)
    else:
        of_test_data = _variance(drawn, ours.evaluations) + _variance(others_drawn, theirs.evaluations)
    return _of_seeds([value - other for value, other in zip(values, others, strict=True)], of_test_data)


def _of_seeds(values: Sequence[float], of_test_data: float | None) -> _Estimate:
    return _Estimate(
        fmean(values),
        of_test_data,
        stdev(values) ** 2 / len(values) if len(values) > 1 else 0.0,
        len(values),
    )


def _variance(replicates: Tensor, evaluations: Sequence[Evaluation]) -> float:
    """The variance over test data of the mean over seeds, from the replicates of each seed.

    The test data are the same for all seeds. If the resamples are not, nothing tells how much the figures
    move together, so they count as moving in step. Averaging such resamples would divide the variance by the
    number of seeds.
    """
    if all(evaluations[0].is_paired_with(each) for each in evaluations[1:]):
        return float(replicates.mean(0).var())
    return float(replicates.std(1).mean().square())


def _holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: the probability of any false rejection among all tests stays below the level."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p_values) - number)))
        adjusted[name] = largest
    return adjusted
