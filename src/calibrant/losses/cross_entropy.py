"""Cross-entropy, the loss every other one is measured against."""

from __future__ import annotations

from torch import Tensor

from calibrant.kernels import Fused, LogLikelihood, WeightedSum, reduce_classes
from calibrant.layout import Elements
from calibrant.losses.base import Loss


class CrossEntropy(Loss):
    """Cross-entropy ``-log p`` (key ``ce``), equal to `torch.nn.CrossEntropyLoss`.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    >>> import torch
    >>> round(CrossEntropy(3)(torch.zeros(2, 3), torch.tensor([0, 2])).item(), 4)
    1.0986
    """

    accepts_probabilities = True

    def fused(self) -> Fused:
        return Fused()

    def per_sample(self, elements: Elements) -> Tensor:
        return reduce_classes(elements, WeightedSum((-1.0, LogLikelihood())))
