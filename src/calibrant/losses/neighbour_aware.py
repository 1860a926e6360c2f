"""Neighbour-aware calibration of segmentation: logits near the class proportions around each pixel."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import in_range, whole_number
from calibrant.kernels import Composition
from calibrant.layout import Elements, computing_dtype, unflatten
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy

_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


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
        logits = unflatten(elements.logits, elements.batch_shape).to(computing_dtype(elements.logits))
        distance = (logits - self._proportions(elements, logits)).abs().mean(1)
        first = Composition(cross_entropy()).per_sample(elements)
        return first + self.weight * distance.reshape(first.shape)

    def _proportions(self, elements: Elements, logits: Tensor) -> Tensor:
        """τ, of the logits' shape."""
        valid = elements.valid.reshape(elements.shape).unsqueeze(1).to(logits.dtype)
        target = elements.target.reshape(elements.shape).unsqueeze(1)
        present = torch.zeros_like(logits).scatter(1, target, valid)
        axes = logits.ndim - 2
        if not axes or not logits.numel():
            return present
        if axes not in _POOLS:
            raise ValueError(
                f"nacl takes logits with up to 3 spatial axes, got {axes}: {tuple(logits.shape)}"
            )

        def mean(values: Tensor) -> Tensor:  # of the window, where pixels outside the image count as 0
            return _POOLS[axes](values, self.window, stride=1, padding=self.window // 2)

        # A window with nothing that counts lies around an ignored pixel, whose loss is not used.
        return mean(present) / mean(valid).clamp_min(torch.finfo(logits.dtype).tiny)
