"""Class-adaptive label smoothing by an augmented Lagrangian: one multiplier per class, or one for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range, one_of, whole_number
from calibrant.kernels import MarginPenalty, Part, sum_by_class
from calibrant.layout import Elements
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.margin import ClassAdaptiveSmoothing, margin_penalty
from calibrant.losses.penalties import PENALTIES
from calibrant.statistics import Statistics


@dataclass(frozen=True, eq=False)
class MarginStatistics(Statistics):
    """Sums over elements of the penalty's slope and of the violation, per class.

    Attributes:
        slope: ``(K,)``, summed slope of the penalty.
        violation: ``(K,)``, summed violation ``z``.
    """

    slope: Tensor
    violation: Tensor


class AugmentedLagrangian(ClassAdaptiveSmoothing):
    """Class-adaptive label smoothing by an augmented Lagrangian, CALS-ALM (key ``cals-alm``).

    ``-log p + 1/K Σ_k P(z_k, ρ_k, λ_k)``, ``z_k = (max_j l_j - l_k) / m - 1``: cross-entropy under the
    constraint that no logit lies more than the margin m below the largest, with a Lagrange multiplier
    λ (`multiplier`) and a penalty weight ρ (`penalty_weight`) per class, learned on validation data.

    A pass sets ``λ_k`` to the mean slope of the penalty, clipped to ``multiplier_range``. Once in ``every``
    passes ``ρ_k`` grows where the mean violation exceeds ``required_decrease`` times that of the pass before
    (or 0, if that was negative). The means are over validation elements, of whatever class.

    With ``per="all"``, λ and ρ are single numbers. Their rules are the same, and both means, of the slope
    ``P'(z_k, ρ, λ)`` and of the violation ``z_k``, are over validation elements and classes k. The paper has
    no such variant. Against the default it shows what a multiplier per class adds.

    Liu et al., *Class Adaptive Network Calibration*, CVPR 2023.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        margin: m; distances between logits up to this size are not penalised (the paper takes 6 for text).
        penalty: ``"phr"``, ``"p2"`` or ``"p3"``.
        growth: γ of the paper, the factor by which ρ grows.
        required_decrease: τ of the paper; ρ grows unless the violation fell below this fraction of the
            previous one.
        every: ρ may grow once in so many passes; never on the first.
        multiplier_range: bounds of λ.
        penalty_weight_max: bound of ρ (from the paper's code, not its text); None for no bound.
        initial_multiplier: the initial λ.
        initial_penalty_weight: the initial ρ.
        per: ``"class"``, or ``"all"`` for one λ and one ρ for all classes.
        **shared: see `Loss`.

    Attributes:
        penalty_weight: ρ, of the shape of `multiplier`.
        previous_violation: the mean violation in the last pass, of the same shape.

    >>> import torch
    >>> loss = AugmentedLagrangian(2, margin=5)
    >>> logits, target = torch.tensor([[20.0, 0.0]]), torch.tensor([0])
    >>> loss.observe(logits, target)
    >>> loss.adapt().violation.tolist()
    [-1.0, 3.0]
    >>> [round(value, 6) for value in loss.multiplier.tolist()]
    [1e-06, 3.000001]
    """

    penalty_weight: Tensor
    previous_violation: Tensor

    search_space = (Range("margin", 1, 30, log=True), Range("initial_penalty_weight", 0.1, 10, log=True))

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
        per: str = "class",
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, margin, multiplier_range, initial_multiplier, per, **shared)
        in_range("margin", margin, open_low=True)
        self.penalty = one_of("penalty", penalty, list(PENALTIES))
        self.growth = in_range("growth", growth, 1)
        self.required_decrease = in_range("required_decrease", required_decrease)
        self.every = whole_number("every", every)
        self.penalty_weight_max = (
            None
            if penalty_weight_max is None
            else in_range("penalty_weight_max", penalty_weight_max, open_low=True)
        )
        self.initial_penalty_weight = in_range(
            "initial_penalty_weight", initial_penalty_weight, open_low=True
        )
        if self.penalty_weight_max is not None and self.initial_penalty_weight > self.penalty_weight_max:
            raise ValueError(
                f"initial_penalty_weight={initial_penalty_weight} must not exceed "
                f"penalty_weight_max={penalty_weight_max}"
            )
        self.register_learned("penalty_weight", self.initial(self.initial_penalty_weight))
        self.register_learned("previous_violation", self.initial(0.0), reported=False)

    def margin_term(self) -> Part:
        return margin_penalty(
            self.penalty,
            margin=self.margin,
            unit=self.margin,
            weight=self.penalty_weight,
            multiplier=self.multiplier,
            factor=1 / self.num_classes,
        )

    def measure(self, elements: Elements) -> MarginStatistics:
        term = self.margin_term().term(elements.logits)
        assert isinstance(term, MarginPenalty)
        return MarginStatistics(*sum_by_class(elements, term.slope_and_violation))

    def update(self, statistics: Statistics) -> None:
        assert isinstance(statistics, MarginStatistics)
        slope, violation = statistics.slope / statistics.samples, statistics.violation / statistics.samples
        if self.per == "all":
            slope, violation = slope.mean(), violation.mean()
        number = int(self.passes) + 1
        if number > 1 and number % self.every == 0:
            stuck = violation > self.required_decrease * self.previous_violation.clamp_min(0)
            grown = (self.growth * self.penalty_weight).clamp_max(self.penalty_weight_max or torch.inf)
            self.penalty_weight.copy_(torch.where(stuck, grown, self.penalty_weight))
        self.previous_violation.copy_(violation)
        self.multiplier.copy_(slope.clamp(*self.multiplier_range))
