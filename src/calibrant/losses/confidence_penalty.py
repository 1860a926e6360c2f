"""Explicit confidence penalty: cross-entropy that pays for low entropy."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Entropy, Fused, LogLikelihood, WeightedSum, reduce_classes
from calibrant.layout import Elements
from calibrant.losses.base import Loss, Shared


class ConfidencePenalty(Loss):
    """Explicit confidence penalty ``-log p - w H(s)`` (key ``ecp``), entropy summed over classes.

    Pereyra et al., *Regularizing Neural Networks by Penalizing Confident Output Distributions*,
    ICLR workshop 2017. (A public release averages the entropy over K: pass ``weight=w/K`` for that.)

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        weight: w, the worth of a nat of entropy.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(1, 2), torch.tensor([0])
    >>> round(ConfidencePenalty(2, weight=0.5)(logits, target).item(), 4)
    0.3466
    """

    accepts_probabilities = True

    def __init__(self, num_classes: int, *, weight: float = 0.1, **shared: Unpack[Shared]) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)

    def fused(self) -> Fused:
        return Fused("entropy", amount=self.weight)

    def per_sample(self, elements: Elements) -> Tensor:
        loss = WeightedSum((-1.0, LogLikelihood()), (-self.weight, Entropy()))
        return reduce_classes(elements, loss)
