"""Label smoothing: cross-entropy against a target mixed with the uniform distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Fused, LogLikelihood, MeanLogLikelihood, WeightedSum, reduce_classes
from calibrant.layout import Elements, along_classes
from calibrant.losses.base import Loss, Shared


class LabelSmoothing(Loss):
    """Label smoothing ``-(1-a) log p - a mean_k log s_k`` (key ``ls``).

    Equal to `torch.nn.CrossEntropyLoss` with ``label_smoothing=a``, also with class weights, which
    then weigh every class's part of the smoothed target.

    Szegedy et al., *Rethinking the Inception Architecture for Computer Vision*, CVPR 2016.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        smoothing: a, the share of the uniform distribution.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(LabelSmoothing(2, smoothing=0.1)(logits, target).item(), 4)
    0.2269
    """

    accepts_probabilities = True

    def __init__(self, num_classes: int, *, smoothing: float = 0.05, **shared: Unpack[Shared]) -> None:
        super().__init__(num_classes, **shared)
        self.smoothing = in_range("smoothing", smoothing, 0, 1)

    def fused(self) -> Fused | None:
        if self.class_weight is not None:
            return None
        return Fused("uniform", likelihood=1 - self.smoothing, amount=self.smoothing)

    def per_sample(self, elements: Elements) -> Tensor:
        return reduce_classes(elements, self._smoothed(MeanLogLikelihood()))

    def _smoothed(self, uniform: MeanLogLikelihood) -> WeightedSum:
        return WeightedSum((self.smoothing - 1, LogLikelihood()), (-self.smoothing, uniform))

    def _weighted(self, elements: Elements) -> tuple[Tensor, Tensor | None]:
        if self.class_weight is None:
            return super()._weighted(elements)
        # Not the elements but the classes of their smoothed targets are weighted.
        weight = along_classes(self.class_weight, elements.logits)
        target = elements.target
        if not elements.soft:
            zeros = torch.zeros_like(elements.logits, dtype=weight.dtype)
            target = zeros.scatter(1, target.unsqueeze(1), 1)
        target = target * weight
        smoothed = self._smoothed(MeanLogLikelihood(weight))
        return reduce_classes(replace(elements, target=target), smoothed), target.sum(1)
