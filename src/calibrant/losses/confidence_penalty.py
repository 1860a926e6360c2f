"""Explicit confidence penalty: cross-entropy minus a multiple of the entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from calibrant.arguments import in_range
from calibrant.kernels import Composition, Entropy, Part, PenaltyTerm, device_function
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy

if TYPE_CHECKING:
    import triton.language as tl


@device_function
def _products(tile):
    return tile.exponential * tl.maximum(tile.shifted, -1e30)


@device_function
def _sums(tile, top, parameters, VARIANT, SOFT, ALONE):
    zero = tl.zeros_like(tile.shifted)
    return _products(tile), zero, zero


@device_function
def _value(products, _, __, element, K, SOFT, ALONE):
    mean = products / element.total
    return element.log_total - mean, mean, mean * element.p, -1 / element.total


@device_function
def _rest(tile, top, parameters, element, aside, K, VARIANT, SOFT, ALONE):
    return aside[:, None] * _products(tile)


ENTROPY = PenaltyTerm(_sums, _value, _rest)


class ConfidencePenalty(Loss):
    """Explicit confidence penalty ``-log p - w H(s)`` (key ``ecp``), entropy summed over classes.

    Pereyra et al., *Regularizing Neural Networks by Penalizing Confident Output Distributions*,
    ICLR workshop 2017. The release of CALS divides the entropy by K, as a mean over classes: pass
    ``weight=w/K`` for that.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        weight: w, the reward per nat of entropy.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(1, 2), torch.tensor([0])
    >>> round(ConfidencePenalty(2, weight=0.5)(logits, target).item(), 4)
    0.3466
    """

    accepts_probabilities = True
    search_space = (Range("weight", 0.01, 1, log=True),)

    def __init__(self, num_classes: int, *, weight: float = 0.1, **shared: Unpack[LossOptions]) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)

    def composition(self) -> Composition:
        entropy = Part(lambda logits: Entropy(), ENTROPY, factor=-self.weight)
        return Composition(cross_entropy(), entropy)
