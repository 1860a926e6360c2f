"""One model on one data set: every metric, its uncertainty, and what diagrams are drawn from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import torch

from calibrant.metrics.catalogue import METRICS

Interval = tuple[float, float]


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram in numbers: M bins ``(edges[b], edges[b+1]]`` of confidence.

    Attributes:
        edges: M + 1 of them.
        count: elements per bin.
        confidence: mean confidence per bin; None where it is empty, as below.
        accuracy: fraction correct per bin.
        accuracy_interval: Clopper-Pearson interval of the accuracy.
        consistency: where the accuracy of this bin would fall, were the model calibrated.
    """

    edges: tuple[float, ...]
    count: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    accuracy_interval: tuple[Interval | None, ...]
    consistency: tuple[Interval | None, ...]


@dataclass(frozen=True)
class ClassFigures:
    """One class.

    Attributes:
        name: its name, or its number.
        count: elements of this class.
        accuracy: the fraction of them that were recognised; None where there are none.
        iou: intersection over union; None where the class neither occurs nor is predicted.
        gap: mean probability given to the class minus its frequency; above 0: given too often.
        ece: calibration error of the class's probability.
    """

    name: str
    count: int
    accuracy: float | None
    iou: float | None
    gap: float
    ece: float


@dataclass(frozen=True)
class GroupFigures:
    """The elements of several classes together: the head, middle or tail of long-tailed data.

    Attributes:
        classes: how many classes are in the group.
        count: elements of these classes.
        accuracy: fraction correct.
        confidence: mean confidence.
        ece: calibration error of the confidence; None, as the others, where there are no elements.
    """

    classes: int
    count: int
    accuracy: float | None
    confidence: float | None
    ece: float | None


@dataclass(frozen=True)
class Difference:
    """How two evaluations differ in one metric.

    Attributes:
        value: first minus second.
        interval: of the difference, at the evaluations' level.
        significant: whether the interval leaves out 0.
        better: which of the two is better, "first" or "second", where significant; else None.
    """

    value: float
    interval: Interval
    significant: bool
    better: str | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Plain numbers about one model on one data set; made by `evaluate` or an `Evaluator`.

    Figures are fractions, not percent. A figure that could not be computed is None: from a stream,
    those that need every prediction at once.
    """

    name: str
    samples: int
    num_classes: int
    bins: int
    exact: bool
    accuracy: float
    balanced_accuracy: float
    mean_iou: float
    mean_iou_foreground: float | None = None
    nll: float
    nll_calibration: float | None = None
    nll_refinement: float | None = None
    brier: float
    root_brier: float
    brier_calibration: float | None = None
    brier_refinement: float | None = None
    ece: float
    mce: float
    ece_l2: float
    adaptive_ece: float
    classwise_ece: float
    debiased_ece: float
    sweep_ece: float
    smooth_ece: float
    kde_ece: float | None = None
    p_value: float
    reliability: Reliability
    classes: tuple[ClassFigures, ...]
    groups: Mapping[str, GroupFigures] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    level: float = 0.95
    seed: int = 0
    replicates: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    fingerprint: str | None = None

    @property
    def metrics(self) -> dict[str, float | None]:
        """Every figure by name, in the order of `calibrant.metrics.METRICS`."""
        return {name: getattr(self, name) for name in METRICS}
