"""Residual networks for small images: they keep the resolution that networks for large images give away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from calibrant import arguments
from calibrant.training.models.layers import batch_norm, initialised


class _PaddedShortcut(nn.Module):
    """Every other pixel, and channels of zeros for those that are new: no parameters."""

    def __init__(self, added: int, stride: int) -> None:
        super().__init__()
        self.added, self.stride = added, stride

    def forward(self, images: Tensor) -> Tensor:
        before = self.added // 2
        thinned = images[:, :, :: self.stride, :: self.stride]
        return F.pad(thinned, (0, 0, 0, 0, before, self.added - before))


def _projected(channels: int, out: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), batch_norm(out, relu=False))


def _padded(channels: int, out: int, stride: int) -> nn.Module:
    return _PaddedShortcut(out - channels, stride)


Shortcut = Callable[[int, int, int], nn.Module]


class _Residual(nn.Module):
    """ReLU of the layers' result, normalised, plus the input, brought to the same shape by the shortcut."""

    def __init__(self, layers: nn.Module, channels: int, out: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.layers, self.norm = layers, batch_norm(out, relu=False)
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else shortcut(channels, out, stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.norm(self.layers(images)) + self.shortcut(images), inplace=True)


def basic_block(
    channels: int, width: int, stride: int, *, shortcut: Shortcut = _projected, dropout: float = 0.0
) -> nn.Module:
    """Two 3×3 convolutions beside a shortcut, with dropout between them if there is any.

    >>> import torch
    >>> basic_block(16, 32, 2)(torch.zeros(2, 16, 8, 8)).shape
    torch.Size([2, 32, 4, 4])
    """
    layers = [
        nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
        batch_norm(width),
        *([nn.Dropout(dropout)] if dropout > 0 else []),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
    ]
    return _Residual(nn.Sequential(*layers), channels, width, stride, shortcut)


def bottleneck_block(channels: int, width: int, stride: int) -> nn.Module:
    """A 3×3 convolution between two of 1×1, the last to four times the width, beside a shortcut.

    >>> import torch
    >>> bottleneck_block(16, 16, 2)(torch.zeros(2, 16, 8, 8)).shape
    torch.Size([2, 64, 4, 4])
    """
    out = 4 * width
    layers = nn.Sequential(
        nn.Conv2d(channels, width, 1, bias=False),
        batch_norm(width),
        nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
        batch_norm(width),
        nn.Conv2d(width, out, 1, bias=False),
    )
    return _Residual(layers, channels, out, stride, _projected)


class CifarResNet(nn.Module):
    """A residual network (He et al., 2016) with a 3×3 stem of stride 1 and without the max-pool after it.

    Every stage but the first halves the resolution; the mean over what is left makes the network
    independent of the size of the images.

    Args:
        num_classes: K.
        block: makes a block from channels in, width and stride.
        expansion: channels that a block gives for each one of its width.
        depths: number of blocks of each stage.
        width: of the first stage; it doubles from stage to stage.
        channels: of the images.
        stem: channels that the stem gives; by default the width.

    >>> import torch
    >>> CifarResNet(10, basic_block, 1, (1, 1), width=8, channels=3)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int,
        block: Callable[[int, int, int], nn.Module],
        expansion: int,
        depths: Sequence[int],
        *,
        width: int,
        channels: int,
        stem: int | None = None,
    ) -> None:
        super().__init__()
        arguments.whole_number("channels", channels)
        features = width if stem is None else stem
        self.stem = nn.Sequential(
            nn.Conv2d(channels, features, 3, padding=1, bias=False), batch_norm(features)
        )
        stages = []
        for number, depth in enumerate(depths):
            blocks = []
            for position in range(depth):
                stride = 2 if number > 0 and position == 0 else 1
                blocks.append(block(features, width << number, stride))
                features = expansion * (width << number)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(features, num_classes)
        initialised(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return logits


def cifar_resnet_18(num_classes: int, *, channels: int = 3) -> CifarResNet:
    """ResNet-18, two blocks of two 3×3 convolutions in each of four stages.

    Args:
        num_classes: K.
        channels: of the images ``(B, channels, H, W)``.

    >>> sum(parameter.numel() for parameter in cifar_resnet_18(10).parameters())
    11173962
    """
    return CifarResNet(num_classes, basic_block, 1, (2, 2, 2, 2), width=64, channels=channels)


def cifar_resnet_32(num_classes: int, *, channels: int = 3) -> CifarResNet:
    """The ResNet-32 that He et al. (2016) made for CIFAR: three stages of 16, 32 and 64 channels.

    Its shortcuts have no parameters: new channels are zeros.

    Args:
        num_classes: K.
        channels: of the images ``(B, channels, H, W)``.

    >>> sum(parameter.numel() for parameter in cifar_resnet_32(10).parameters())
    464154
    """
    block = partial(basic_block, shortcut=_padded)
    return CifarResNet(num_classes, block, 1, (5, 5, 5), width=16, channels=channels)


def cifar_resnet_50(num_classes: int, *, channels: int = 3) -> CifarResNet:
    """ResNet-50, bottlenecks 3-4-6-3: what the calibration papers train on CIFAR and Tiny-ImageNet.

    Args:
        num_classes: K.
        channels: of the images ``(B, channels, H, W)``.

    >>> import torch
    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in cifar_resnet_50(100).parameters())
    23705252
    """
    return CifarResNet(num_classes, bottleneck_block, 4, (3, 4, 6, 3), width=64, channels=channels)


def cifar_resnet_110(num_classes: int, *, channels: int = 3) -> CifarResNet:
    """What the calibration papers call ResNet-110: bottlenecks 3-4-26-3.

    It is another network than the ResNet-110 that He et al. (2016) made for CIFAR, which is `cifar_resnet_32`
    with 18 blocks in a stage: 46 million parameters and not 1.7.

    Args:
        num_classes: K.
        channels: of the images ``(B, channels, H, W)``.

    >>> import torch
    >>> with torch.device("meta"):
    ...     len(cifar_resnet_110(100).stages[2])
    26
    """
    return CifarResNet(num_classes, bottleneck_block, 4, (3, 4, 26, 3), width=64, channels=channels)
