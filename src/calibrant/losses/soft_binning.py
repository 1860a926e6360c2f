"""Soft-binned expected calibration error of the batch, as a penalty beside cross-entropy."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range, whole_number
from calibrant.kernels import Composition
from calibrant.layout import Elements, computing_dtype
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.batch import confidence_and_correctness, root
from calibrant.losses.cross_entropy import cross_entropy

# Bins with less than this share of the batch are left out: they add less than its root, and their quotients
# might overflow.
_EMPTY = 1e-30


class SoftBinning(Loss):
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

    def composition(self) -> Composition:
        return Composition(cross_entropy())

    def over_batch(self, elements: Elements) -> Tensor:
        confidence, correct, counted = confidence_and_correctness(elements)
        middles = (torch.arange(self.bins, dtype=counted.dtype, device=counted.device) + 0.5) / self.bins
        share = (-(confidence.unsqueeze(1) - middles).square() / self.temperature).softmax(1)
        share = share * (counted / counted.sum().clamp_min(1)).unsqueeze(1)
        size, gap = share.sum(0), (correct - confidence) @ share
        present = size > _EMPTY
        squared = torch.where(present, gap * (gap / torch.where(present, size, 1)), 0).sum()
        return (self.weight * root(squared)).to(computing_dtype(elements.logits))
