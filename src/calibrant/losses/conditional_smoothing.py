"""Adaptive and conditional label smoothing: squared penalties on logit distances beyond a margin."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from calibrant.arguments import in_range, true_or_false
from calibrant.kernels import Composition
from calibrant.layout import Elements, computing_dtype
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy


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

    def per_sample(self, elements: Elements) -> Tensor:
        logits = elements.logits.to(computing_dtype(elements.logits))
        high = logits.amax(1)
        distance, reference = (high, high.detach()) if self.as_released else (high - logits.amin(1), high)
        top = (distance - self.margin).clamp_min(0).square()
        others = (reference.unsqueeze(1) - logits - self.margin).clamp_min(0).square().sum(1)
        share = self.weight_of_others / (self.num_classes - 1)
        first = Composition(cross_entropy()).per_sample(elements)
        return first + self.weight_of_top * top + share * others
