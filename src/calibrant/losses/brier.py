"""The Brier score as a loss."""

from __future__ import annotations

from torch import Tensor

from calibrant.kernels import Fused, SquaredError, reduce_classes
from calibrant.layout import Elements
from calibrant.losses.base import Loss


class Brier(Loss):
    """Brier score ``Σ_k (s_k - 1[k=y])²`` (key ``brier``).

    Brier, *Verification of Forecasts Expressed in Terms of Probability*, 1950.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    >>> import torch
    >>> Brier(2)(torch.zeros(1, 2), torch.tensor([0])).item()
    0.5
    """

    accepts_probabilities = True
    linear_in_target = False

    def fused(self) -> Fused:
        return Fused("squared")

    def per_sample(self, elements: Elements) -> Tensor:
        return reduce_classes(elements, SquaredError())
