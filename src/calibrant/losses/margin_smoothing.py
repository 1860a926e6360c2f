"""Margin-based label smoothing: a fixed price on logit distances beyond a margin."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Fused, LogLikelihood, MarginPenalty, WeightedSum, reduce_classes
from calibrant.layout import Elements
from calibrant.losses.base import Loss, Shared
from calibrant.losses.penalties import hinge


class MarginSmoothing(Loss):
    """Margin-based label smoothing ``-log p + w mean_k max(0, max_j l_j - l_k - m)`` (key ``mbls``).

    Liu et al., *The Devil is in the Margin: Margin-based Label Smoothing for Network Calibration*,
    CVPR 2022.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        margin: m, the logit distance that costs nothing (the paper takes 6 for text).
        weight: w, the price of a unit of distance beyond it.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.tensor([[20.0, 0.0]]), torch.tensor([0])
    >>> round(MarginSmoothing(2, margin=10, weight=0.1)(logits, target).item(), 4)
    0.5
    """

    accepts_probabilities = True

    def __init__(
        self,
        num_classes: int,
        *,
        margin: float = 10.0,
        weight: float = 0.1,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.margin = in_range("margin", margin)
        self.weight = in_range("weight", weight)

    def fused(self) -> Fused:
        return Fused("hinge", amount=self.weight / self.num_classes, margin=self.margin)

    def per_sample(self, elements: Elements) -> Tensor:
        excess = MarginPenalty(hinge(self.margin), margin=self.margin, unit=1.0)
        loss = WeightedSum((-1.0, LogLikelihood()), (self.weight / self.num_classes, excess))
        return reduce_classes(elements, loss)
