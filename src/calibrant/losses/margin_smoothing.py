"""Margin-based label smoothing: a fixed penalty on logit distances beyond a margin."""

from __future__ import annotations

from typing import Unpack

from calibrant.arguments import in_range
from calibrant.kernels import Composition
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy
from calibrant.losses.margin import margin_penalty


class MarginSmoothing(Loss):
    """Margin-based label smoothing ``-log p + w mean_k max(0, max_j l_j - l_k - m)`` (key ``mbls``).

    Liu et al., *The Devil is in the Margin: Margin-based Label Smoothing for Network Calibration*,
    CVPR 2022. The mean over classes is that of the released code. The paper's formula is a sum over
    classes: pass ``weight=w * num_classes`` for it.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        margin: m; distances between logits up to this size are not penalised (the paper takes 6 for text).
        weight: w, the penalty per unit of distance beyond the margin.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.tensor([[20.0, 0.0]]), torch.tensor([0])
    >>> round(MarginSmoothing(2, margin=10, weight=0.1)(logits, target).item(), 4)
    0.5
    """

    accepts_probabilities = True
    search_space = (Range("margin", 1, 30, log=True), Range("weight", 0.01, 1, log=True))

    def __init__(
        self,
        num_classes: int,
        *,
        margin: float = 10.0,
        weight: float = 0.1,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.margin = in_range("margin", margin)
        self.weight = in_range("weight", weight)

    def composition(self) -> Composition:
        factor = self.weight / self.num_classes
        return Composition(cross_entropy(), margin_penalty("hinge", margin=self.margin, factor=factor))
