"""Soft-binned expected calibration error of the batch, as a penalty beside cross-entropy."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range, whole_number
from calibrant.kernels import Correctness, Term, TopProbability
from calibrant.layout import Elements
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.batch import BatchLoss, flattened, root, sum_of_parts
from calibrant.statistics import sum_dtype

# Bins with less than this share of the batch are left out: they add less than its root, and their quotients
# might overflow.
_EMPTY = 1e-30


class SoftBinning(BatchLoss):
    """Soft-binned expected calibration error beside cross-entropy, ``ce + w SB-ECE`` (key ``sb-ece``).

    ``SB-ECE = √(Σ_b S_b/N (A_b - C_b)²)`` over the batch. Every element belongs to every bin b, by the share
    ``u_b = softmax_b(-(r - x_b)² / T)`` for its confidence r and the middle ``x_b`` of the bin. ``S_b`` is
    the sum of the shares, and ``A_b`` and ``C_b`` are the mean correctness and the mean confidence, weighted
    by them. Memory grows with N times the number of bins.

    Karandikar et al., *Soft Calibration Objectives for Neural Networks*, NeurIPS 2021, equation 11 with the
    L2 norm. The released code divides by at least 1e-5 instead of ``S_b``, which matters for empty bins only.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        weight: w (β of the paper).
        bins: the number of bins.
        temperature: T; at 0 the bins would be those of the usual ECE.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(1, 2), torch.tensor([0])
    >>> round(SoftBinning(2, weight=1.0)(logits, target).item(), 4)  # log 2 + |1 - 1/2|
    1.1931
    """

    search_space = (Range("weight", 0.01, 10, log=True), Range("temperature", 0.0001, 0.1, log=True))

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 0.5,
        bins: int = 15,
        temperature: float = 0.01,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)
        self.bins = whole_number("bins", bins)
        self.temperature = in_range("temperature", temperature, 1e-6)

    def numbers(self, elements: Elements) -> tuple[Term, ...]:
        return TopProbability(), Correctness()

    def over_numbers(self, elements: Elements, *numbers: Tensor) -> Tensor:
        sums = sum_of_parts(self._sums, *flattened(elements, *numbers))
        size, gap = sums.to(sum_dtype(sums.device)) / elements.valid.sum().clamp_min(1)
        present = size > _EMPTY
        squared = torch.where(present, gap * (gap / torch.where(present, size, 1)), 0).sum()
        return (self.weight * root(squared)).to(sums.dtype)

    def _sums(self, counted: Tensor, confidence: Tensor, correct: Tensor) -> Tensor:
        """The size of each bin, and its size times its gap, ``(2, bins)``."""
        bins = torch.arange(self.bins, dtype=confidence.dtype, device=confidence.device)
        distance = ((bins + 0.5) / self.bins).unsqueeze(1) - confidence
        # The bins come first, because torch's softmax is several times slower along a short last axis.
        share = (distance * (distance * (-1 / self.temperature))).softmax(0)
        return torch.stack([counted, counted * (correct - confidence)]) @ share.T
