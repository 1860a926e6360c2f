"""Class-adaptive label smoothing by a heuristic rule: multipliers that follow their penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Part, sum_by_class
from calibrant.layout import Elements
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.evidence import error_of_mean
from calibrant.losses.margin import ClassAdaptiveSmoothing, margin_penalty
from calibrant.statistics import Statistics, sum_dtype

# After a raise with an unchanged excess the ratio is exactly the factor, and so by default the threshold:
# rounding must not decide.
_EQUAL_WITHIN = 1e-9

_NEGLIGIBLE = 1e-4
"""A mean penalty up to this size, in nats, has no visible effect."""


@dataclass(frozen=True, eq=False)
class ExcessStatistics(Statistics):
    """Sums over elements of the logit distance beyond the margin.

    Attributes:
        excess: ``(K,)``, summed ``max(0, max_j l_j - l_k - m)``.
        squares: only with ``evidence``: the summed square of this distance, ``(K,)``, for standard errors.
    """

    excess: Tensor
    squares: tuple[Tensor, ...] = ()


class HeuristicMultipliers(ClassAdaptiveSmoothing):
    """Class-adaptive label smoothing by a heuristic rule, CALS-HR (key ``cals-hr``).

    ``-log p + mean_k λ_k max(0, max_j l_j - l_k - m)``. After each pass over the validation data the
    mean penalty of a class, ``c_k = λ_k mean max(0, max_j l_j - l_k - m)``, is compared with the previous
    pass: λ is multiplied by ``factor`` where ``c`` grew by more than ``threshold``, and divided by
    ``factor`` where ``c`` shrank by more than ``threshold``. With ``evidence`` above 0, the whole interval of
    so many standard errors around the new ``c`` must lie beyond the threshold.

    Liu et al., *Class Adaptive Network Calibration*, CVPR 2023. The mean over classes is that of the released
    code. The paper's formula is a sum over classes: multiply λ by ``num_classes`` for it.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        margin: m; distances between logits up to this size are not penalised (the paper takes 6 for text).
        factor: μ of the paper, above 1: the factor by which λ moves.
        threshold: τ of the paper, at least 1: the change of ``c``, as a factor, beyond which λ moves. None
            for that of ``factor``, since the paper sets both to 1.1. With a threshold below ``factor``, a
            raise of λ is itself a growth of ``c`` that raises λ again.
        multiplier_range: bounds of λ (from the released code).
        initial_multiplier: λ at the start (from the released code).
        evidence: the number of standard errors by which ``c`` must pass the threshold; 0 is the paper's rule.
        **shared: see `Loss`.

    >>> import torch
    >>> loss, target = HeuristicMultipliers(2, margin=5), torch.tensor([0])
    >>> for scale in (10.0, 20.0):
    ...     loss.observe(torch.tensor([[scale, 0.0]]), target)
    ...     _ = loss.adapt()
    >>> [round(value, 4) for value in loss.multiplier.tolist()]
    [0.1, 0.11]
    """

    previous_penalty: Tensor

    search_space = (Range("margin", 1, 30, log=True), Range("initial_multiplier", 0.01, 1, log=True))

    def __init__(
        self,
        num_classes: int,
        *,
        margin: float = 10.0,
        factor: float = 1.1,
        threshold: float | None = None,
        multiplier_range: tuple[float, float] = (1e-6, 1e6),
        initial_multiplier: float = 0.1,
        evidence: float = 0.0,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, margin, multiplier_range, initial_multiplier, evidence, **shared)
        self.factor = in_range("factor", factor, 1, open_low=True)
        self.threshold = None if threshold is None else in_range("threshold", threshold, 1)
        self.register_learned("previous_penalty", [0.0] * num_classes, reported=False)

    def margin_term(self) -> Part:
        return margin_penalty(
            "hinge", margin=self.margin, multiplier=self.multiplier, factor=1 / self.num_classes
        )

    def idle(self) -> str | None:
        if self.previous_penalty.max() > _NEGLIGIBLE:
            return None
        return self.lower_margin(self.margin / 2, f"a lower margin, such as {self.margin / 2:g}")

    def measure(self, elements: Elements) -> ExcessStatistics:
        # Not in float32: the variance is a small difference of squares.
        dtype = sum_dtype(elements.logits.device)

        def sums(shifted: Tensor) -> tuple[Tensor, ...]:
            distance = torch.rsub(shifted, -self.margin).relu()
            return (distance, distance.to(dtype).square()) if self.evidence else (distance,)

        samples, excess, *squares = sum_by_class(elements, sums)
        return ExcessStatistics(samples, excess, tuple(squares))

    def update(self, statistics: Statistics) -> None:
        assert isinstance(statistics, ExcessStatistics)
        penalty = self.multiplier * statistics.excess / statistics.samples
        least = most = penalty
        if statistics.squares:
            error = error_of_mean(statistics.excess, statistics.squares[0], statistics.samples)
            reach = self.evidence * self.multiplier * error
            least, most = penalty - reach, penalty + reach
        before = self.previous_penalty
        threshold = (self.factor if self.threshold is None else self.threshold) * (1 + _EQUAL_WITHIN)
        step = torch.ones_like(penalty)
        step = torch.where(least > threshold * before, self.factor, step)
        step = torch.where(before > threshold * most, 1 / self.factor, step)
        if self.passes > 0:
            self.multiplier.copy_((self.multiplier * step).clamp(*self.multiplier_range))
        self.previous_penalty.copy_(penalty)
