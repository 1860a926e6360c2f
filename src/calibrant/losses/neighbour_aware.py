"""Neighbour-aware calibration of segmentation: logits near the class proportions around each pixel."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import in_range, whole_number
from calibrant.kernels import (
    Block,
    Factor,
    Gradient,
    Linearization,
    LogLikelihood,
    WeightedSum,
    reduce_classes,
)
from calibrant.layout import Elements
from calibrant.losses.base import Loss, LossOptions, Range

_NO_LABEL = -1  # of an ignored pixel, or outside the image


class _NeighbourDistance:
    """``mean_k |l_k - τ_k|``, with τ_k the proportion of class k among the labels around the element.

    Args:
        elements: the batch.
        window: the width of the window in pixels, an odd number.
    """

    def __init__(self, elements: Elements, window: int) -> None:
        labels = torch.where(elements.valid, elements.target, _NO_LABEL).reshape(elements.shape)
        axes = range(1, labels.ndim)
        small = torch.int16 if elements.logits.shape[1] <= torch.iinfo(torch.int16).max else torch.int32
        around = F.pad(labels.to(small), (window // 2,) * (2 * len(axes)), value=_NO_LABEL)
        for axis in axes:
            around = around.unfold(axis, window, 1)
        around = around.flatten(labels.ndim) if axes else around.unsqueeze(-1)
        # For each element the labels around it, (A, window size[, S]).
        shape = (*elements.target.shape, around.shape[-1])
        self.around = around.reshape(shape).movedim(-1, 1).contiguous()

    def value(self, block: Block) -> Tensor:
        return (block.logits - self._proportions(block)).abs().mean(1, keepdim=True)

    def linearize(self, block: Block) -> Linearization:
        proportions = self._proportions(block)
        distance = torch.sub(block.logits, proportions, out=proportions)
        value = torch.linalg.vector_norm(distance, 1, 1, keepdim=True) / distance.shape[1]

        def dense(factor: Factor) -> Tensor:
            return distance.sign_().mul_(factor / distance.shape[1])

        return Linearization(value, lambda factor: Gradient(dense=lambda: dense(factor)))

    def _proportions(self, block: Block) -> Tensor:
        """τ, ``(A, K[, S])``."""
        around = (self.around if block.index is None else self.around[block.index]).long()
        counts = (around != _NO_LABEL).to(block.logits.dtype)
        out = block.new()
        found = torch.zeros_like(block.logits) if out is None else out.zero_()
        found = found.scatter_add_(1, around.clamp_min_(0), counts)
        # A window with nothing that counts lies around an ignored pixel, whose loss is not used.
        return found.div_(counts.sum(1, keepdim=True).clamp_min(1))


class NeighbourAware(Loss):
    """Neighbour-aware calibration ``-log p + w mean_k |l_k - τ_k|`` (key ``nacl``), for segmentation.

    ``τ_k`` is the share of class k among the labels of the pixels in a window around the pixel, itself
    included. Pixels that are ignored or outside the image do not count. Without spatial axes, τ is 1 for the
    true class and 0 for the others. The penalty is on the logits themselves, so a constant added to all of
    them changes it.

    Murugesan et al., *Neighbor-Aware Calibration of Segmentation Networks with Penalty-Based Constraints*,
    2024, with equal weights in the window. The released code counts pixels outside the image as class 0.

    There is no ``binary=True``: the penalty depends on both logits of a pair, and the second axis would count
    as a spatial one.

    Shape: logits ``(B, K, *S)`` with up to three spatial axes; labels ``(B, *S)``.

    Args:
        num_classes: K.
        weight: w.
        window: the width of the window in pixels, an odd number.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(1, 2, 1, 3), torch.tensor([[[0, 0, 1]]])
    >>> NeighbourAware(2, weight=1.0, reduction="none")(logits, target) - 0.5  # |0 - τ|: all have mean 1/2
    tensor([[[0.6931, 0.6931, 0.6931]]])
    """

    accepts_binary = False  # labels would be neighbours of one another, as pixels are
    search_space = (Range("weight", 0.005, 1, log=True),)

    def __init__(
        self, num_classes: int, *, weight: float = 0.1, window: int = 3, **shared: Unpack[LossOptions]
    ) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)
        self.window = whole_number("window", window)
        if window % 2 == 0:
            raise ValueError(f"window must be odd, so that a pixel is in its middle, got {window}")

    def per_sample(self, elements: Elements) -> Tensor:
        axes = len(elements.batch_shape) - 2
        if axes > 3:
            raise ValueError(
                f"nacl takes logits with up to 3 spatial axes, got {axes}: {tuple(elements.batch_shape)}"
            )
        distance = _NeighbourDistance(elements, self.window)
        return reduce_classes(elements, WeightedSum((-1.0, LogLikelihood()), (self.weight, distance)))
