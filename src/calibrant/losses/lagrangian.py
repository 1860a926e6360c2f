"""Class-adaptive label smoothing by an augmented Lagrangian: one multiplier per class, or one for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range, one_of, whole_number
from calibrant.kernels import MarginPenalty, Part, sum_by_class
from calibrant.layout import Elements, along_classes
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.evidence import beyond, error_of_mean
from calibrant.losses.margin import ClassAdaptiveSmoothing, margin_penalty
from calibrant.losses.penalties import PENALTIES
from calibrant.statistics import Statistics, sum_dtype

_NEGLIGIBLE = 1e-3
"""A multiplier up to this size has no visible effect: the gradient of the penalty has a factor λ / (K m)."""


@dataclass(frozen=True, eq=False)
class MarginStatistics(Statistics):
    """Sums over elements of the penalty's slope and of the violation, per class.

    Attributes:
        slope: ``(K,)``, summed slope of the penalty.
        violation: ``(K,)``, summed violation ``z``.
        squares: only with ``evidence``: the summed squares of the slope minus the current λ, and of the
            violation, ``(K,)`` each, for standard errors.
    """

    slope: Tensor
    violation: Tensor
    squares: tuple[Tensor, ...] = ()


class AugmentedLagrangian(ClassAdaptiveSmoothing):
    """Class-adaptive label smoothing by an augmented Lagrangian, CALS-ALM (key ``cals-alm``).

    ``-log p + 1/K Σ_k P(z_k, ρ_k, λ_k)``, ``z_k = (max_j l_j - l_k) / m - 1``: cross-entropy under the
    constraint that no logit lies more than the margin m below the largest, with a Lagrange multiplier
    λ (`multiplier`) and a penalty weight ρ (`penalty_weight`) per class, learned on validation data.

    A pass sets ``λ_k`` to the mean slope of the penalty, clipped to ``multiplier_range``. (The released code
    clips the slope of each element before the mean: ``clip="each"``.) Once in ``every``
    passes ``ρ_k`` grows where the mean violation exceeds ``required_decrease`` times that of the pass before
    (or 0, if that was negative). The means are over validation elements, of whatever class.

    With ``per="all"``, λ and ρ are one number each for all classes. The rules are the same, with means over
    validation elements and classes. The paper has no such variant; compare it with the default to see what a
    multiplier per class adds.

    With ``evidence`` above 0, small differences do not count. λ moves towards the mean slope by the part of
    their difference that exceeds ``evidence`` standard errors. ρ grows only if the mean violation exceeds its
    limit by ``evidence`` standard errors. With ``per="all"``, the standard error is the mean of those of the
    classes, an upper bound, because the classes of an element depend on each other.

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
        evidence: the number of standard errors that a change of λ must exceed; 0 is the paper's rule.
        clip: ``"mean"`` to clip the mean slope, as in the paper, or ``"each"`` to clip the slope of each
            element before the mean, as in the released code.
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
        evidence: float = 0.0,
        clip: str = "mean",
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, margin, multiplier_range, initial_multiplier, evidence, per, **shared)
        in_range("margin", margin, open_low=True)
        self.penalty = one_of("penalty", penalty, list(PENALTIES))
        self.clip = one_of("clip", clip, ["mean", "each"])
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

    def idle(self) -> str | None:
        violation = float(self.previous_violation.max())
        # Beyond the margin, even small multipliers are at work: those of P3 begin to grow slowly.
        if violation > 0 or self.multiplier.max() > _NEGLIGIBLE:
            return None
        # Not above the largest mean distance, also after rounding.
        margin = 0.95 * self.margin * (1 + violation)
        return self.lower_margin(margin, f"a margin of {margin:.2g} or less")

    def advice(self) -> str | None:
        found, largest = super().advice(), self.penalty_weight_max
        if found is not None or largest is None or self.initial_penalty_weight == largest:
            return found
        stuck = (self.penalty_weight >= largest) & (self.previous_violation > 0)
        if 2 * int(stuck.sum()) <= stuck.numel():
            return None
        return (
            f"{int(stuck.sum())} of {stuck.numel()} penalty weights are at penalty_weight_max={largest:g}, "
            f"and the logits still lie further apart than the margin of {self.margin:g} on average. Try a "
            "larger margin, or a larger penalty_weight_max"
        )

    def measure(self, elements: Elements) -> MarginStatistics:
        term = self.margin_term().term(elements.logits)
        assert isinstance(term, MarginPenalty)

        # Not in float32: the variance is a small difference of squares.
        dtype = sum_dtype(elements.logits.device)
        multiplier = self.multiplier if self.per == "all" else along_classes(self.multiplier, elements.logits)

        def sums(shifted: Tensor) -> tuple[Tensor, ...]:
            slope, violation = term.slope_and_violation(shifted)
            if self.clip == "each":
                slope = slope.clamp(*self.multiplier_range)
            if not self.evidence:
                return slope, violation
            change = slope.to(dtype) - multiplier.to(dtype)
            return slope, violation, change.square(), violation.to(dtype).square()

        samples, slope, violation, *squares = sum_by_class(elements, sums)
        return MarginStatistics(samples, slope, violation, tuple(squares))

    def update(self, statistics: Statistics) -> None:
        assert isinstance(statistics, MarginStatistics)
        slope, violation = statistics.slope / statistics.samples, statistics.violation / statistics.samples
        if self.per == "all":
            slope, violation = slope.mean(), violation.mean()
        limit = self.required_decrease * self.previous_violation.clamp_min(0)
        if statistics.squares:
            error_of_slope, error_of_violation = self._errors(statistics)
            slope = self.multiplier + beyond(slope - self.multiplier, error_of_slope, self.evidence)
            limit = limit + self.evidence * error_of_violation
        number = int(self.passes) + 1
        if number > 1 and number % self.every == 0:
            grown = (self.growth * self.penalty_weight).clamp_max(self.penalty_weight_max or torch.inf)
            self.penalty_weight.copy_(torch.where(violation > limit, grown, self.penalty_weight))
        self.previous_violation.copy_(violation)
        self.multiplier.copy_(slope.clamp(*self.multiplier_range))

    def _errors(self, statistics: MarginStatistics) -> tuple[Tensor, Tensor]:
        """The standard errors of the mean slope and of the mean violation."""
        count, (change_square, violation_square) = statistics.samples, statistics.squares
        slope = error_of_mean(statistics.slope - count * self.multiplier, change_square, count)
        violation = error_of_mean(statistics.violation, violation_square, count)
        return (slope, violation) if self.per == "class" else (slope.mean(), violation.mean())
