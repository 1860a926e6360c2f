"""Adaptive and conditional label smoothing: squared penalties on logit distances beyond a margin."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import in_range, true_or_false
from calibrant.kernels import Block, Composition, Factor, Gradient, Linearization, Part, add_at_maximum
from calibrant.layout import Elements, computing_dtype
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy


class _SquaredDistances:
    """``a d(max_j l_j - min_j l_j)² + b Σ_k d(max_j l_j - l_k)²``, ``d(x) = max(0, x - margin)``.

    Args:
        margin: distances between logits up to this size count as 0.
        top: a.
        others: b.
    """

    def __init__(self, margin: float, *, top: float, others: float) -> None:
        self.margin = margin
        self.top = top
        self.others = others

    def value(self, block: Block) -> Tensor:
        low, excess = block.shifted.amin(1, keepdim=True), F.softshrink(block.shifted, self.margin)
        return self._value(low, excess.square().sum(1, keepdim=True))

    def linearize(self, block: Block) -> Linearization:
        low = block.shifted.amin(1, keepdim=True)
        # Minus the distances beyond the margin.
        excess = torch.ops.aten.softshrink.out(block.shifted, self.margin, out=block.new())
        square = torch.mul(excess, excess, out=block.new())
        value = self._value(low, square.sum(1, keepdim=True))
        lowest = torch.eq(block.shifted, low, out=square)

        def dense(factor: Factor) -> Tensor:
            outer = F.softshrink(low, self.margin) * (2 * self.top * factor)
            slope = excess.mul_(2 * self.others * factor)
            slope.addcmul_(lowest, outer / lowest.sum(1, keepdim=True))
            return add_at_maximum(block, -slope.sum(1, keepdim=True), slope)

        return Linearization(value, lambda factor: Gradient(dense=lambda: dense(factor)))

    def _value(self, low: Tensor, sum_of_squares: Tensor) -> Tensor:
        return self.top * F.softshrink(low, self.margin).square() + self.others * sum_of_squares


class ConditionalSmoothing(Loss):
    """Adaptive and conditional label smoothing (key ``acls``).

    ``-log p + w1 d(max_j l_j - min_j l_j)² + w2/(K-1) Σ_k d(max_j l_j - l_k)²``, ``d(x) = max(0, x - m)``.
    The first penalty lowers the largest logit, and the second raises those far below it.

    Park et al., *ACLS: Adaptive and Conditional Label Smoothing for Network Calibration*, ICCV 2023. The
    released code has ``d(max_j l_j)`` in the first penalty, so that it depends on a constant added to all
    logits, and holds the maximum in the second penalty fixed. ``as_released`` does the same.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        margin: m; distances between logits up to this size are not penalised.
        weight_of_top: w1, the weight of the largest logit.
        weight_of_others: w2, the weight of the other logits together.
        as_released: whether to compute what the released code does instead of the formula.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.tensor([[20.0, 0.0]]), torch.tensor([0])
    >>> round(ConditionalSmoothing(2, margin=10)(logits, target).item(), 4)  # (0.1 + 0.01) · 10²
    11.0
    """

    accepts_probabilities = True
    search_space = (
        Range("margin", 1, 30, log=True),
        Range("weight_of_top", 0.005, 1, log=True),
        Range("weight_of_others", 0.0005, 0.1, log=True),
    )

    def __init__(
        self,
        num_classes: int,
        *,
        margin: float = 10.0,
        weight_of_top: float = 0.1,
        weight_of_others: float = 0.01,
        as_released: bool = False,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.margin = in_range("margin", margin)
        self.weight_of_top = in_range("weight_of_top", weight_of_top)
        self.weight_of_others = in_range("weight_of_others", weight_of_others)
        self.as_released = true_or_false("as_released", as_released)

    def composition(self) -> Composition:
        distances = _SquaredDistances(
            self.margin, top=self.weight_of_top, others=self.weight_of_others / (self.num_classes - 1)
        )
        return Composition(cross_entropy(), Part(lambda logits: distances))

    def per_sample(self, elements: Elements) -> Tensor:
        if not self.as_released:
            return super().per_sample(elements)
        logits = elements.logits.to(computing_dtype(elements.logits))
        high = logits.amax(1)
        top = (high - self.margin).clamp_min(0).square()
        others = (high.detach().unsqueeze(1) - logits - self.margin).clamp_min(0).square().sum(1)
        first = Composition(cross_entropy()).per_sample(elements)
        return first + self.weight_of_top * top + self.weight_of_others / (self.num_classes - 1) * others
