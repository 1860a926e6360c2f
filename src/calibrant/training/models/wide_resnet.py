"""The wide residual network of the calibration papers, for small images."""

from __future__ import annotations

from functools import partial

from calibrant import arguments
from calibrant.training.models.cifar_resnet import CifarResNet, basic_block


def wide_resnet(
    num_classes: int, *, channels: int = 3, depth: int = 26, width: int = 10, dropout: float = 0.0
) -> CifarResNet:
    """Wide-ResNet-26-10, three stages of 160, 320 and 640 channels (Zagoruyko and Komodakis, 2016).

    As in the calibration papers, normalisation follows each convolution, and the depth counts the layers on
    the longest path. The authors of the network call it WRN-28-10: they put normalisation first, and count
    the three convolutions of the shortcuts instead of the last layer.

    Args:
        num_classes: K.
        channels: the channels of the images ``(B, channels, H, W)``.
        depth: ``6 n + 2`` for n blocks in each stage.
        width: the stages have 16, 32 and 64 times this number of channels.
        dropout: the probability of dropout between the two convolutions of a block.

    Raises:
        ValueError: the depth has another form, or a number is out of range.

    >>> import torch
    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in wide_resnet(10).parameters())
    36481434
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth must be 6 n + 2 with n of at least 1, such as 14, 20 or 26, got {depth!r}")
    arguments.in_range("dropout", dropout, 0, 1)
    block, depths = partial(basic_block, dropout=dropout), ((depth - 2) // 6,) * 3
    first = 16 * arguments.whole_number("width", width)
    return CifarResNet(num_classes, block, 1, depths, width=first, channels=channels, stem=16)
