"""Multi-class difference between confidence and accuracy: mean probabilities against class frequencies."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Block, Composition, Factor, Gradient, Linearization, Term, visit
from calibrant.layout import Elements, Index, along_classes, computing_dtype
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.batch import BatchLoss, in_type_of_sums
from calibrant.losses.focal import FOCAL, focal
from calibrant.statistics import sum_dtype


class _Excess:
    """``Σ_k a_k (s_k - 1[y=k])`` with constant ``a``; gradient ``s_k (a_k - Σ_j a_j s_j)``.

    Args:
        slope: a, shaped like a class axis.
    """

    def __init__(self, slope: Tensor) -> None:
        self.slope = slope

    def value(self, block: Block) -> Tensor:
        return self._mean(block, block.exponential * self.slope) - self._at_target(block)

    def linearize(self, block: Block) -> Linearization:
        product = torch.mul(block.exponential, self.slope, out=block.new())
        mean = self._mean(block, product)

        def gradient(factor: Factor) -> Gradient:
            return Gradient(-factor * mean, dense=lambda: product.mul_(factor / block.total))

        return Linearization(mean - self._at_target(block), gradient)

    def _mean(self, block: Block, product: Tensor) -> Tensor:
        return product.sum(1, keepdim=True) / block.total

    def _at_target(self, block: Block) -> Tensor:
        return self.slope.expand_as(block.exponential).gather(1, block.target)


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

    def numbers(self, elements: Elements) -> tuple[Term, ...]:
        slope = (self.weight / self.num_classes) * self._gap(elements).sign()
        return (_Excess(along_classes(slope, elements.logits)),)

    def over_numbers(self, elements: Elements, *numbers: Tensor) -> Tensor:
        # Only now divided by the count: in float32 the slopes could become 0 in a large batch.
        (excess,) = in_type_of_sums(elements, *numbers)[1:]
        return (excess.sum() / elements.valid.sum().clamp_min(1)).to(computing_dtype(elements.logits))

    def _gap(self, elements: Elements) -> Tensor:
        """For each class, how far the sum of its probabilities exceeds its number of elements, ``(K,)``."""

        def sums(index: Index, block: Block) -> list[Tensor]:
            excess = torch.div(block.exponential, block.total, out=block.new())
            excess = excess.scatter_add(1, block.target, -torch.ones_like(block.total))
            if not elements.all_valid:
                excess = torch.where(elements.valid.unsqueeze(1)[index], excess, 0)
            axes = [axis for axis in range(excess.ndim) if axis != 1]
            return [excess.sum(axes).to(sum_dtype(excess.device))]

        return visit(elements, sums)[0]
