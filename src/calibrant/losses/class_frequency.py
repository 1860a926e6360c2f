"""Multi-class difference between confidence and accuracy: mean probabilities against class frequencies."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Block, Composition, Gradient, SumTerm
from calibrant.layout import Elements, along_classes, computing_dtype
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.batch import BatchLoss
from calibrant.losses.focal import FOCAL, focal
from calibrant.statistics import sum_dtype


class _Excess:
    """``Σ (s_k - 1[y=k])`` for each class k; gradient of ``s_k``: ``s_k (1_k - s)``."""

    def __init__(self, elements: Elements) -> None:
        self.valid = None if elements.all_valid else elements.valid.unsqueeze(1)

    def value(self, block: Block) -> Tensor:
        excess = torch.div(block.exponential, block.total, out=block.new())
        excess = excess.scatter_add(1, block.target, -torch.ones_like(block.total))
        if self.valid is not None:
            excess = torch.where(self._valid(block), excess, 0)
        axes = [axis for axis in range(excess.ndim) if axis != 1]
        return excess.sum(axes).to(sum_dtype(excess.device))

    def gradient(self, block: Block, factor: Tensor) -> Gradient:
        product = torch.mul(block.exponential, along_classes(factor, block.exponential), out=block.new())
        scale = block.total.reciprocal()
        if self.valid is not None:
            scale = torch.where(self._valid(block), scale, 0)
        mean = product.sum(1, keepdim=True) * scale
        return Gradient(-mean, dense=lambda: product.mul_(scale))

    def _valid(self, block: Block) -> Tensor:
        assert self.valid is not None
        return self.valid if block.index is None else self.valid[block.index]


class ClassFrequencyPenalty(BatchLoss):
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

    def numbers(self, elements: Elements) -> tuple[SumTerm]:
        return (_Excess(elements),)

    def over_numbers(self, elements: Elements, *numbers: Tensor) -> Tensor:
        gap = numbers[0] / elements.valid.sum().clamp_min(1)
        return (self.weight * gap.abs().mean()).to(computing_dtype(elements.logits))
