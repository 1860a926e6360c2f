"""Multi-class difference between confidence and accuracy: mean probabilities against class frequencies."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Composition
from calibrant.layout import Elements, computing_dtype
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.focal import FOCAL, focal
from calibrant.statistics import sum_dtype


class ClassFrequencyPenalty(Loss):
    """Focal loss plus the multi-class difference between confidence and accuracy (key ``mdca``).

    ``-(1-p)^γ log p + w/K Σ_k |mean s_k - mean 1[y=k]|``, with means over the batch.

    Hebbalaguppe et al., *A Stitch in Time Saves Nine: A Train-Time Regularizing Loss for Improved Neural
    Network Calibration*, CVPR 2022. The released code is the same.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        weight: w (β of the paper).
        gamma: γ of the focal loss, at least 0; 0 is cross-entropy.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(2, 2), torch.tensor([0, 0])
    >>> round(ClassFrequencyPenalty(2, weight=1.0, gamma=0)(logits, target).item(), 4)  # log 2 + 1/2
    1.1931
    """

    search_space = (Range("weight", 0.1, 50, log=True), Range("gamma", 0, 5))

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 1.0,
        gamma: float = 1.0,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)
        self.gamma = in_range("gamma", gamma)

    def composition(self) -> Composition:
        return Composition(focal(FOCAL, {"gamma": self.gamma}, self.gamma))

    def over_batch(self, elements: Elements) -> Tensor:
        valid, target = elements.valid, elements.target.unsqueeze(1)
        probability = elements.logits.to(computing_dtype(elements.logits)).softmax(1)
        excess = probability.scatter_add(1, target, -torch.ones_like(probability[:, :1]))
        excess = torch.where(valid.unsqueeze(1), excess, 0)
        others = [axis for axis in range(excess.ndim) if axis != 1]
        gap = excess.sum(others, dtype=sum_dtype(excess.device)) / valid.sum().clamp_min(1)
        return (self.weight * gap.abs().mean()).to(excess.dtype)
