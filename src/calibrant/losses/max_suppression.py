"""Max suppression: a penalty on the distance of the largest logit from the mean logit."""

from __future__ import annotations

from typing import Unpack

from calibrant.arguments import in_range
from calibrant.kernels import Composition
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy
from calibrant.losses.margin import margin_penalty


class MaxSuppression(Loss):
    """Max suppression ``-log p + w (max_k l_k - mean_k l_k)`` (key ``maxsup``).

    Label smoothing is cross-entropy plus ``w (l_y - mean_k l_k)``. MaxSup replaces the logit of the true
    class by the largest one, so that the penalty also acts on wrong predictions. It equals ``mbls`` with a
    margin of 0.

    Zhou et al., *MaxSup: Overcoming Representation Collapse in Label Smoothing*, NeurIPS 2025. The released
    code is the same. It raises w linearly from 0.1 to 0.2 during training; here w is fixed, but the attribute
    may be changed at any time.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        weight: w (α of the paper).
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.tensor([[20.0, 0.0]]), torch.tensor([0])
    >>> round(MaxSuppression(2, weight=0.1)(logits, target).item(), 4)
    1.0
    """

    accepts_probabilities = True
    search_space = (Range("weight", 0.005, 1, log=True),)

    def __init__(self, num_classes: int, *, weight: float = 0.1, **shared: Unpack[LossOptions]) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)

    def composition(self) -> Composition:
        factor = self.weight / self.num_classes
        return Composition(cross_entropy(), margin_penalty("hinge", margin=0.0, factor=factor))
