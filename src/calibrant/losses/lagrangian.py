"""Class-adaptive label smoothing by an augmented Lagrangian: one multiplier per class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range, one_of, ordered_pair, whole_number
from calibrant.kernels import (
    Fused,
    LogLikelihood,
    MarginPenalty,
    WeightedSum,
    can_measure,
    margin_sums,
    reduce_classes,
    sum_by_class,
)
from calibrant.layout import Elements, along_classes
from calibrant.losses.base import AdaptiveLoss, Shared
from calibrant.losses.penalties import PENALTIES
from calibrant.statistics import Statistics


@dataclass(frozen=True, eq=False)
class MarginStatistics(Statistics):
    """Sums over elements of what happens at the margin, per class.

    Attributes:
        slope: ``(K,)``, summed slope of the penalty.
        violation: ``(K,)``, summed violation ``z``.
    """

    slope: Tensor
    violation: Tensor


class AugmentedLagrangian(AdaptiveLoss):
    """Class-adaptive label smoothing by an augmented Lagrangian, CALS-ALM (key ``cals-alm``).

    ``-log p + 1/K Σ_k P(z_k, ρ_k, λ_k)``, ``z_k = (max_j l_j - l_k) / m - 1``: cross-entropy under the
    constraint that no logit lies more than the margin m below the largest, with a Lagrange multiplier
    λ (`multiplier`) and a penalty weight ρ (`penalty_weight`) per class, learned on validation data.

    A pass sets ``λ_k`` to the mean slope of the penalty, clipped to ``multiplier_range``. Every so many
    passes ``ρ_k`` grows where the mean violation has not fallen below ``required_decrease`` times
    that of the pass before.

    Liu et al., *Class Adaptive Network Calibration*, CVPR 2023.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        margin: m (the paper takes 6 for text).
        penalty: ``"phr"``, ``"p2"`` or ``"p3"``.
        growth: γ of the paper, the factor by which ρ grows.
        required_decrease: τ of the paper.
        every: how many passes lie between two looks at ρ; the first pass is never one.
        multiplier_range: bounds of λ.
        penalty_weight_max: bound of ρ (from the paper's code, not its text); None for no bound.
        initial_multiplier: λ at the start.
        initial_penalty_weight: ρ at the start.
        **shared: see `Loss`.

    >>> import torch
    >>> loss = AugmentedLagrangian(2, margin=5)
    >>> logits, target = torch.tensor([[20.0, 0.0]]), torch.tensor([0])
    >>> loss.observe(logits, target)
    >>> loss.adapt().violation.tolist()
    [-1.0, 3.0]
    >>> [round(value, 6) for value in loss.multiplier.tolist()]
    [1e-06, 3.000001]
    """

    accepts_probabilities = True
    measure_finds_flaws = True

    multiplier: Tensor
    penalty_weight: Tensor
    previous_violation: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        margin: float = 10.0,
        penalty: str = "phr",
        growth: float = 1.2,
        required_decrease: float = 0.9,
        every: int = 10,
        multiplier_range: tuple[float, float] = (1e-6, 1e6),
        penalty_weight_max: float | None = 10.0,
        initial_multiplier: float = 1e-6,
        initial_penalty_weight: float = 1.0,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.margin = in_range("margin", margin, open_low=True)
        self.penalty = one_of("penalty", penalty, list(PENALTIES))
        self.growth = in_range("growth", growth, 1)
        self.required_decrease = in_range("required_decrease", required_decrease)
        self.every = whole_number("every", every)
        self.multiplier_range = ordered_pair("multiplier_range", multiplier_range)
        self.penalty_weight_max = (
            None
            if penalty_weight_max is None
            else in_range("penalty_weight_max", penalty_weight_max, open_low=True)
        )
        self.initial_multiplier = in_range("initial_multiplier", initial_multiplier)
        self.initial_penalty_weight = in_range(
            "initial_penalty_weight", initial_penalty_weight, open_low=True
        )
        if self.penalty_weight_max is not None and self.initial_penalty_weight > self.penalty_weight_max:
            raise ValueError(
                f"initial_penalty_weight={initial_penalty_weight} must not exceed "
                f"penalty_weight_max={penalty_weight_max}"
            )
        self.register_learned("multiplier", [self.initial_multiplier] * num_classes)
        self.register_learned("penalty_weight", [self.initial_penalty_weight] * num_classes)
        self.register_learned("previous_violation", [0.0] * num_classes, worth_a_look=False)

    def _term(self, logits: Tensor) -> MarginPenalty:
        return PENALTIES[self.penalty].on_margin(
            self.margin,
            unit=self.margin,
            weight=along_classes(self.penalty_weight, logits),
            multiplier=along_classes(self.multiplier, logits),
        )

    def fused(self) -> Fused:
        return Fused(
            self.penalty,
            amount=1 / self.num_classes,
            margin=self.margin,
            unit=self.margin,
            multiplier=self.multiplier,
            penalty_weight=self.penalty_weight,
        )

    def per_sample(self, elements: Elements) -> Tensor:
        penalty = (1 / self.num_classes, self._term(elements.logits))
        return reduce_classes(elements, WeightedSum((-1.0, LogLikelihood()), penalty))

    def measure(self, logits: Tensor, target: Tensor) -> MarginStatistics:
        elements = self.elements(logits, target)
        if can_measure(logits):
            return MarginStatistics(*margin_sums(elements, self.fused()))
        term = self._term(elements.logits)
        return MarginStatistics(*sum_by_class(elements, term.slope_and_violation))

    def update(self, statistics: Statistics) -> None:
        assert isinstance(statistics, MarginStatistics)
        violation = statistics.violation / statistics.samples
        number = int(self.passes) + 1
        if number > 1 and number % self.every == 0:
            stuck = violation > self.required_decrease * self.previous_violation.clamp_min(0)
            grown = (self.growth * self.penalty_weight).clamp_max(self.penalty_weight_max or torch.inf)
            self.penalty_weight.copy_(torch.where(stuck, grown, self.penalty_weight))
        self.previous_violation.copy_(violation)
        self.multiplier.copy_((statistics.slope / statistics.samples).clamp(*self.multiplier_range))
