"""Label smoothing: cross-entropy against a target mixed with the uniform distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Composition, MeanLogLikelihood, Part, PenaltyTerm, device_function
from calibrant.layout import Elements, along_classes
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy

if TYPE_CHECKING:
    import triton.language as tl


@device_function
def _sums(tile, top, parameters, VARIANT, SOFT, ALONE):
    zero = tl.zeros_like(tile.shifted)
    return tl.where(tile.inside, tile.shifted, 0.0), zero, zero


@device_function
def _value(shifted, _, __, element, K, SOFT, ALONE):
    return shifted / K - element.log_total, -1.0, -element.p, 0.0


@device_function
def _rest(tile, top, parameters, element, aside, K, VARIANT, SOFT, ALONE):
    return tl.zeros_like(tile.shifted) + 1 / K


MEAN_LOG_LIKELIHOOD = PenaltyTerm(_sums, _value, _rest)


class LabelSmoothing(Loss):
    """Label smoothing ``-(1-a) log p - a mean_k log s_k`` (key ``ls``).

    Equal to `torch.nn.CrossEntropyLoss` with ``label_smoothing=a``, also with class weights, which
    then weigh every class's part of the smoothed target.

    Szegedy et al., *Rethinking the Inception Architecture for Computer Vision*, CVPR 2016.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        smoothing: a, the weight of the uniform distribution in the target.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(LabelSmoothing(2, smoothing=0.1)(logits, target).item(), 4)
    0.2269
    """

    accepts_probabilities = True
    search_space = (Range("smoothing", 0.005, 0.3, log=True),)

    def __init__(self, num_classes: int, *, smoothing: float = 0.05, **shared: Unpack[LossOptions]) -> None:
        super().__init__(num_classes, **shared)
        self.smoothing = in_range("smoothing", smoothing, 0, 1)

    def composition(self, weight: Tensor | None = None) -> Composition:
        uniform = Part(
            lambda logits: MeanLogLikelihood(weight),
            None if self.class_weight is not None else MEAN_LOG_LIKELIHOOD,
            factor=-self.smoothing,
        )
        return Composition(cross_entropy(1 - self.smoothing), uniform)

    def _weighted(self, elements: Elements) -> tuple[Tensor, Tensor | None]:
        if self.class_weight is None:
            return super()._weighted(elements)
        # The weights apply to the classes of the smoothed target, not to the element as a whole.
        weight = along_classes(self.class_weight, elements.logits)
        target = elements.target
        if not elements.soft:
            zeros = torch.zeros_like(elements.logits, dtype=weight.dtype)
            target = zeros.scatter(1, target.unsqueeze(1), 1)
        target = target * weight
        smoothed = self.composition(weight).per_sample(elements.with_target(target))
        return smoothed, target.sum(1)
