"""The registry of metrics: how each is computed, named and printed.

A new metric is one function and one record in `METRICS`. `evaluate`, the streamed `Evaluator`, intervals,
JSON, tables and reports follow from the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrant.arguments import Registry, nearest
from calibrant.histogram import ConfidenceHistogram
from calibrant.metrics.accuracy import in_top_k, mean_of_ious
from calibrant.metrics.calibration import (
    Confidences,
    adaptive_ece_of,
    debiased_ece_of,
    ece_l2_of,
    ece_of,
    mce_of,
    smooth_ece_of,
    sweep_ece_of,
)
from calibrant.metrics.predictions import Predictions
from calibrant.metrics.scores import kde_ece, split_parts, tempered_brier, tempered_nll
from calibrant.metrics.selective import (
    RiskCoverage,
    augrc_of,
    aurc_of,
    coverage_at_risk_of,
    risk_at_coverage_of,
)
from calibrant.metrics.uncertainty import Interval, chance_classwise, chance_mce

DEFINITIONS = 3
"""The number of the definitions of all metrics, stored with the results of runs.

Raise it when a metric keeps its name but gives other values. Stored results with another number are computed
anew. A calibrator has a number of its own, `Calibrator.definition`.
"""


class Options(NamedTuple):
    """The options of `evaluate` that metrics depend on."""

    bins: int = 15
    background: int | None = None
    kde: bool = False
    binary: bool = False


@dataclass(frozen=True)
class Description:
    """The name of a figure, its meaning and its format.

    Attributes:
        label: a heading.
        sentence: the meaning, in one sentence.
        higher_is_better: whether larger values are better.
        percent: whether the figure is a fraction, printed in percent.
    """

    label: str
    sentence: str
    higher_is_better: bool = False
    percent: bool = True

    def text(self, value: float) -> str:
        """The printed value.

        >>> METRICS["ece"].text(0.0412), METRICS["nll"].text(1.25)
        ('4.12 %', '1.2500')
        """
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4f}"


@dataclass(frozen=True, kw_only=True)
class Metric(Description):
    """A metric: how it is computed and described. Values are at least 0.

    ``function(source, options)`` returns a tensor. The ``source`` decides its argument:

    ===========  ========================================================================================
    ``source``   argument of the function
    ===========  ========================================================================================
    confidences  `Confidences`
    ranking      `Confidences` of the predicted class, also if binary, or `RankedSums`
    counts       `ClassCounts`
    gaps         `ClassGaps`
    elements     `Predictions`. The function returns one value per element, ``(N,)``; the metric is their
                 mean. If it is not streamed, it may also return a scalar, the metric itself, which gets no
                 interval.
    a metric     the value of the metric with this name. The function must be increasing.
    ===========  ========================================================================================

    The bootstrap evaluates many resamples at once: confidences, counts and gaps then have a leading axis,
    and so has the result.

    Attributes:
        function: see above.
        source: see above.
        group: "recognition", "scores", "calibration" or "selective". Metrics of the group "calibration" are
            errors that are 0 for a calibrated model.
        streamed: whether the metric can be computed in a stream. False for a function of elements that needs
            all predictions at once.
        requires: the option of `evaluate` without which the metric is None.
        why_missing: why the metric is None without that option or with fewer classes, in words.
        fewest_classes: with fewer classes the metric would be the same for every model, and is None.
        binomial: whether the metric is the fraction of elements with some property. Its interval is then
            Clopper and Pearson's.
        curve_interval: the interval of the metric as a function of the risk-coverage curve, if it has one.
        debiased: true for an estimate without bias; its interval is not corrected for bias.
        chance: the mean value that a calibrated model gets by chance, as a function of the source of the
            confidences, bins and seed. It is subtracted from the lower end of the interval, because the
            bootstrap underestimates this bias.
        maximum: true for the largest error of several bins. A few elements decide it, so two models differ
            significantly in it only where the quantiles of the resampled differences agree, and means over
            seeds are not tested.
        since: the format of stored evaluations that first has the metric. For a new metric, one more than the
            highest so far: evaluations that were stored before are then read without it.

    >>> mean_gap = Metric(
    ...     "Mean gap",
    ...     "Mean confidence minus accuracy, as an absolute value.",
    ...     function=lambda confidences, options: confidences.equal_width(1).gap.abs().sum(-1),
    ...     source="confidences",
    ... )
    >>> mean_gap.streamed
    True
    """

    function: Callable[[Any, Options], Tensor]
    source: str
    group: str = "calibration"
    streamed: bool = True
    requires: str | None = None
    why_missing: str = ""
    fewest_classes: int = 2
    binomial: bool = False
    curve_interval: Callable[[RiskCoverage], Interval] | None = None
    debiased: bool = False
    chance: Callable[[Predictions | ConfidenceHistogram, int, int], float] | None = None
    maximum: bool = False
    since: int = 1

    def wanted(self, options: Options) -> bool:
        """Whether the options ask for the metric."""
        value = True if self.requires is None else getattr(options, self.requires)
        return value is not None and value is not False


def compute(parts: Mapping[str, Any], options: Options) -> dict[str, Tensor]:
    """All metrics that can be computed from the parts: scalars, or ``(R,)`` for parts with a leading axis.

    The parts are the sources of `Metric` by name, always with "counts". For "elements": the means, by the
    name of the metric.
    """
    found: dict[str, Tensor] = {}
    shape = tuple(parts["counts"].samples.shape)
    if "confidences" in parts:
        known = parts["confidences"]
        folded = options.binary and not isinstance(known, Predictions)  # which fold and keep their own sums
        parts = {**parts, "ranking": known.ranked.folded() if folded else known}
    for name, metric in METRICS.items():
        if not metric.wanted(options):
            continue
        if metric.source in found:
            found[name] = _value(name, found[metric.source], options, shape)
        elif metric.source == "elements":
            if name in parts.get("elements", ()):
                found[name] = parts["elements"][name]
        elif metric.source in parts:
            found[name] = _value(name, parts[metric.source], options, shape)
    return found


def _value(name: str, source: Any, options: Options, shape: tuple[int, ...]) -> Tensor:
    """The value of a metric; an error that names it if the function returns anything else."""
    metric = METRICS[name]
    found = metric.function(source, options)
    shapes = (shape,) if metric.streamed else (shape, ())
    if not isinstance(found, Tensor) or found.shape not in shapes:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"the function of the metric {name!r} must return a tensor of shape "
            f"{' or '.join(map(str, shapes))} here, got {got}; see calibrant.metrics.Metric"
        )
    return found


def element_metrics(options: Options, *, streamed: bool) -> dict[str, Metric]:
    """The metrics that are means over elements; only the streamed ones if asked for."""
    return {
        name: metric
        for name, metric in METRICS.items()
        if metric.source == "elements" and metric.wanted(options) and (metric.streamed or not streamed)
    }


def element_values(
    predictions: Predictions, options: Options, *, streamed: bool = False
) -> dict[str, Tensor]:
    """The values of the metrics that are means over elements: ``(N,)``, or a scalar."""
    found = element_metrics(options, streamed=streamed)
    return {name: _value(name, predictions, options, (predictions.samples,)).double() for name in found}


def calibration_errors(*sources: str) -> list[str]:
    """The names of the calibration errors with one of these sources."""
    return [name for name, each in METRICS.items() if each.group == "calibration" and each.source in sources]


def _error(
    label: str, sentence: str, function: Callable[[Confidences, int], Tensor], **properties: Any
) -> Metric:
    """An error of the top class's confidence, as a function of confidences and bins."""
    return Metric(
        label,
        sentence,
        source="confidences",
        function=lambda confidences, options: function(confidences, options.bins),
        **properties,
    )


_recognition = partial(Metric, group="recognition", higher_is_better=True, source="counts")
_score = partial(Metric, group="scores", percent=False, source="elements")
_COVERAGE, _RISK = 0.8, 0.05  # of the metrics risk_at_coverage and coverage_at_risk
_selective = partial(Metric, group="selective", source="ranking", since=3)

_METRICS: dict[str, Metric] = {
    "accuracy": _recognition(
        "Accuracy",
        "The fraction of elements whose most probable class is the true one.",
        function=lambda counts, options: counts.recognised.sum(-1) / counts.samples,
        binomial=True,
    ),
    "balanced_accuracy": _recognition(
        "Balanced accuracy",
        "The accuracy of each class, averaged over the classes that occur.",
        function=lambda counts, options: counts.accuracy.nanmean(-1),
    ),
    "top_k_accuracy": _recognition(
        "Top-5 accuracy",
        "The fraction of elements whose true class is among the five most probable.",
        source="elements",
        function=lambda predictions, options: in_top_k(predictions, 5),
        fewest_classes=6,
        why_missing="always 100 % with at most five classes",
        binomial=True,
        since=3,
    ),
    "mean_iou": _recognition(
        "Mean IoU",
        "The overlap of predicted and true elements of a class over their union, averaged.",
        function=lambda counts, options: mean_of_ious(counts, None),
    ),
    "mean_iou_foreground": _recognition(
        "Mean IoU, foreground",
        "Mean IoU without the background class.",
        function=lambda counts, options: mean_of_ious(counts, options.background),
        requires="background",
        why_missing="no background class was named",
    ),
    "nll": _score(
        "NLL",
        "The mean negative logarithm of the probability given to the true class.",
        function=lambda predictions, options: -predictions.log_likelihood,
    ),
    "nll_calibration": _score(
        "NLL, calibration part",
        "How much NLL one temperature for all logits would save.",
        streamed=False,
        function=lambda predictions, options: split_parts(predictions, tempered_nll)[0],
    ),
    "nll_refinement": _score(
        "NLL, refinement part",
        "The NLL that is left with the best temperature.",
        streamed=False,
        function=lambda predictions, options: split_parts(predictions, tempered_nll)[1],
    ),
    "brier": _score(
        "Brier",
        "The mean squared distance between probabilities and truth; of several classes, their sum.",
        function=lambda predictions, options: predictions.squared_error,
    ),
    "root_brier": _score(
        "Root Brier",
        "The square root of the Brier score, an upper bound of calibration errors.",
        source="brier",
        function=lambda brier, options: brier.sqrt(),
    ),
    "brier_calibration": _score(
        "Brier, calibration part",
        "How much Brier score one temperature for all logits would save.",
        streamed=False,
        function=lambda predictions, options: split_parts(predictions, tempered_brier)[0],
    ),
    "brier_refinement": _score(
        "Brier, refinement part",
        "The Brier score that is left with the best temperature.",
        streamed=False,
        function=lambda predictions, options: split_parts(predictions, tempered_brier)[1],
    ),
    "ece": _error(
        "ECE", "The mean gap between confidence and accuracy over equally wide bins of confidence.", ece_of
    ),
    "mce": _error(
        "MCE",
        "The largest gap between confidence and accuracy in any bin.",
        mce_of,
        chance=chance_mce,
        maximum=True,
    ),
    "ece_l2": _error(
        "ECE, L2", "The root mean square gap over equally wide bins: large gaps weigh more.", ece_l2_of
    ),
    "adaptive_ece": _error("Adaptive ECE", "ECE over bins that hold equally many elements.", adaptive_ece_of),
    "classwise_ece": Metric(
        "Class-wise ECE",
        "ECE of each class's probability against its frequency, averaged over classes.",
        source="gaps",
        function=lambda gaps, options: gaps.error,
        chance=lambda *given: chance_classwise(*given)[0],
    ),
    "classwise_mce": Metric(
        "Class-wise MCE",
        "MCE of each class's probability against its frequency, averaged over classes.",
        source="gaps",
        function=lambda gaps, options: gaps.largest_error,
        chance=lambda *given: chance_classwise(*given)[1],
        maximum=True,
        since=3,
    ),
    "debiased_ece": _error(
        "Debiased ECE",
        "ECE with squared gaps, less what chance alone would contribute.",
        debiased_ece_of,
        debiased=True,
    ),
    "debiased_ece_l1": _error(
        "Debiased ECE, L1",
        "Adaptive ECE, less what chance alone would contribute.",
        lambda confidences, bins: debiased_ece_of(confidences, bins, 1),
        debiased=True,
        since=2,
    ),
    "sweep_ece": _error(
        "Sweep ECE",
        "ECE with squared gaps over as many equally full bins as keep the accuracy rising with confidence.",
        lambda confidences, bins: sweep_ece_of(confidences),
    ),
    "sweep_ece_l1": _error(
        "Sweep ECE, L1",
        "ECE over as many equally full bins as keep the accuracy rising with confidence.",
        lambda confidences, bins: sweep_ece_of(confidences, 1),
        since=2,
    ),
    "sweep_ece_width": _error(
        "Sweep ECE, equal width",
        "ECE with squared gaps over as many equally wide bins as keep the accuracy rising with confidence.",
        lambda confidences, bins: sweep_ece_of(confidences, 2, "equal-width"),
        since=2,
    ),
    "sweep_ece_width_l1": _error(
        "Sweep ECE, equal width, L1",
        "ECE over as many equally wide bins as keep the accuracy rising with confidence.",
        lambda confidences, bins: sweep_ece_of(confidences, 1, "equal-width"),
        since=2,
    ),
    "smooth_ece": _error(
        "Smooth ECE",
        "The gap smoothed by a kernel instead of bins, whose width the data choose.",
        lambda confidences, bins: smooth_ece_of(confidences),
    ),
    "kde_ece": Metric(
        "KDE-ECE",
        "The distance between all class probabilities and the frequencies seen at similar predictions.",
        percent=False,
        source="elements",
        streamed=False,
        function=lambda predictions, options: torch.tensor(
            kde_ece(predictions), dtype=torch.float64, device="cpu"
        ),
        requires="kde",
        why_missing="slow, because it visits all pairs of elements; calibrant.metrics.kde_ece computes it",
    ),
    "aurc": _selective(
        "AURC",
        "The error rate of the most confident elements, averaged over all numbers of accepted elements.",
        function=lambda confidences, options: aurc_of(confidences),
    ),
    "augrc": _selective(
        "AUGRC",
        "The rate of errors that are accepted, averaged over all numbers of accepted elements.",
        function=lambda confidences, options: augrc_of(confidences),
    ),
    "risk_at_coverage": _selective(
        "Risk at 80 % coverage",
        "The error rate of the 80 % most confident elements.",
        function=lambda confidences, options: risk_at_coverage_of(confidences, _COVERAGE),
        curve_interval=lambda curve: curve.risk_interval(_COVERAGE),
    ),
    "coverage_at_risk": _selective(
        "Coverage at 5 % risk",
        "The largest fraction of elements, by falling confidence, whose error rate is at most 5 %.",
        function=lambda confidences, options: coverage_at_risk_of(confidences, _RISK),
        curve_interval=lambda curve: curve.coverage_interval(_RISK),
        higher_is_better=True,
    ),
}

_SOURCES = ("confidences", "ranking", "counts", "gaps", "elements")

RESERVED = """
bins binary classes compare dense exact figures fingerprint format from_dict from_json groups intervals
is_paired_with labels level macro metrics name num_classes p_value per_image reliability replicates
risk_coverage ruled_out samples seed to_dict to_json why_untested
"""
"""What no metric may be called: the other attributes of an evaluation, and the other keys of its JSON."""


def _check(name: str, metric: Metric, others: Mapping[str, Metric]) -> None:
    """Refuse what is no metric, and metrics that could not be computed or stored."""
    if not isinstance(metric, Metric):
        raise TypeError(f"{name!r}: expected an instance of calibrant's Metric, got {metric!r}")
    if name in RESERVED.split():
        raise ValueError(f"{name!r}: evaluations have another attribute of this name; choose another")
    if not name.isidentifier() or iskeyword(name) or name.startswith("_"):
        raise ValueError(
            f"{name!r}: expected a Python name that begins with a letter, because evaluations get an "
            "attribute of this name"
        )
    label = metric.label.strip().lower()
    if any(other.label.strip().lower() == label for key, other in others.items() if key != name):
        raise ValueError(f"{name!r}: another metric has the label {metric.label!r}; choose another")
    if not callable(metric.function):
        raise TypeError(f"{name!r}: the function must be callable, got {metric.function!r}")
    known = [*_SOURCES, *(other for other in others if other != name)]
    if metric.source not in known:
        raise ValueError(
            f"{name!r}: the source must be {', '.join(_SOURCES)} or a metric that was added before, got "
            f"{metric.source!r}{nearest(metric.source, known)}"
        )


METRICS: Registry[Metric] = Registry(_METRICS, _check)
"""Every metric by name, in the order of the tables."""
