"""Residual networks for small images such as CIFAR: the first layers keep the full resolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant import arguments
from calibrant.training.models.layers import batch_norm, initialise


class _PaddedShortcut(nn.Module):
    """A shortcut without parameters: skips pixels, and adds channels of zeros."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.added, self.stride = out - channels, stride

    def forward(self, images: Tensor) -> Tensor:
        before = self.added // 2
        skipped = images[:, :, :: self.stride, :: self.stride]
        return F.pad(skipped, (0, 0, 0, 0, before, self.added - before))


def _projected(channels: int, out: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), batch_norm(out, relu=False))


Shortcut = Callable[[int, int, int], nn.Module]


class StochasticDepth(nn.Module):
    """Sets its input to zero for a whole batch at random, in training only (Huang et al., 2016).

    The input survives with the probability ``survival``; in evaluation it is multiplied by it. The choice is
    a tensor operation, so that a step with it can be compiled and recorded as a CUDA graph. Layers before it
    are computed in any case: no time is saved, and their batch normalisation sees every batch.

    >>> StochasticDepth(0.25).eval()(torch.tensor([4.0]))
    tensor([1.])
    """

    def __init__(self, survival: float) -> None:
        super().__init__()
        self.survival = survival

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return self.survival * images
        return torch.where(torch.rand((), device=images.device) < self.survival, images, 0.0)


class _Residual(nn.Module):
    """ReLU of the normalised output of some layers, which may be dropped at random, plus the shortcut."""

    def __init__(
        self,
        layers: nn.Module,
        channels: int,
        out: int,
        stride: int,
        shortcut: Shortcut,
        survival: float = 1.0,
    ) -> None:
        super().__init__()
        self.layers, self.norm = layers, batch_norm(out, relu=False)
        self.gate = StochasticDepth(survival) if survival < 1 else nn.Identity()
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else shortcut(channels, out, stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.gate(self.norm(self.layers(images))) + self.shortcut(images), inplace=True)


def basic_block(
    channels: int,
    width: int,
    stride: int,
    *,
    shortcut: Shortcut = _projected,
    dropout: float = 0.0,
    survival: float = 1.0,
) -> nn.Module:
    """Two 3×3 convolutions beside a shortcut, with dropout between them if ``dropout`` is positive.

    ``survival`` is the probability with which `StochasticDepth` keeps them.
    """
    layers = [
        nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
        batch_norm(width),
        *([nn.Dropout(dropout)] if dropout > 0 else []),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
    ]
    return _Residual(nn.Sequential(*layers), channels, width, stride, shortcut, survival)


def bottleneck_block(channels: int, width: int, stride: int) -> nn.Module:
    """1×1, 3×3 and 1×1 convolutions beside a shortcut; the output has four times the width."""
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

    Every stage but the first halves the resolution. The mean over the remaining pixels makes the network
    independent of the image size.

    ``block`` is a function of input channels, width and stride; its output has ``expansion`` times the width.
    ``depths`` are the blocks in each stage. ``width`` is that of the first stage, and doubles from stage to
    stage. ``stem`` are the output channels of the stem; by default the width.
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
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return logits


def cifar_resnet_18(num_classes: int, *, channels: int = 3) -> CifarResNet:
    """ResNet-18: two blocks of two 3×3 convolutions in each of four stages.

    Args:
        num_classes: K.
        channels: the channels of the images ``(B, channels, H, W)``.

    >>> sum(parameter.numel() for parameter in cifar_resnet_18(10).parameters())
    11173962
    """
    return CifarResNet(num_classes, basic_block, 1, (2, 2, 2, 2), width=64, channels=channels)


def cifar_resnet_32(num_classes: int, *, channels: int = 3) -> CifarResNet:
    """The ResNet-32 for CIFAR of He et al. (2016): three stages of 16, 32 and 64 channels.

    Its shortcuts have no parameters: new channels are zeros. See `cifar_resnet_18` for the arguments.

    >>> sum(parameter.numel() for parameter in cifar_resnet_32(10).parameters())
    464154
    """
    block = partial(basic_block, shortcut=_PaddedShortcut)
    return CifarResNet(num_classes, block, 1, (5, 5, 5), width=16, channels=channels)


def cifar_resnet_50(num_classes: int, *, channels: int = 3) -> CifarResNet:
    """ResNet-50 with bottlenecks 3-4-6-3, as the calibration papers train it on CIFAR.

    On Tiny-ImageNet their releases keep 2 × 2 regions before the last layer; here it is the mean over all.

    See `cifar_resnet_18` for the arguments.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in cifar_resnet_50(100).parameters())
    23705252
    """
    return CifarResNet(num_classes, bottleneck_block, 4, (3, 4, 6, 3), width=64, channels=channels)


def cifar_resnet_110(num_classes: int, *, channels: int = 3) -> CifarResNet:
    """The ResNet-110 of the calibration papers, with bottlenecks 3-4-26-3 and 46 million parameters.

    The ResNet-110 for CIFAR of He et al. (2016) is a different network with 1.7 million parameters: see
    `cifar_resnet_110_sd`. See `cifar_resnet_18` for the arguments.

    >>> with torch.device("meta"):
    ...     len(cifar_resnet_110(100).stages[2])
    26
    """
    return CifarResNet(num_classes, bottleneck_block, 4, (3, 4, 26, 3), width=64, channels=channels)


def cifar_resnet_110_sd(num_classes: int, *, channels: int = 3, survival: float = 0.5) -> CifarResNet:
    """The ResNet-110 for CIFAR of He et al. (2016) with stochastic depth (Huang et al., 2016).

    Three stages of 18 blocks. Block l of L = 54 survives with the probability ``1 - (1 - survival) l / L``,
    drawn once for each batch. ``survival`` is in (0, 1]. See `cifar_resnet_18` for the other arguments.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in cifar_resnet_110_sd(10).parameters())
    1727962
    """
    arguments.in_range("survival", survival, 0, 1, open_low=True)
    numbers = count(1)

    def block(channels: int, width: int, stride: int) -> nn.Module:
        kept = 1 - (1 - survival) * next(numbers) / 54
        return basic_block(channels, width, stride, shortcut=_PaddedShortcut, survival=kept)

    return CifarResNet(num_classes, block, 1, (18, 18, 18), width=16, channels=channels)


def wide_resnet(
    num_classes: int, *, channels: int = 3, depth: int = 26, width: int = 10, dropout: float = 0.0
) -> CifarResNet:
    """Wide-ResNet-26-10, three stages of 160, 320 and 640 channels (Zagoruyko and Komodakis, 2016).

    As in the calibration papers, normalisation follows each convolution, and the depth counts the layers on
    the longest path. The authors of the network call it WRN-28-10: they put normalisation first, and count
    the three convolutions of the shortcuts instead of the last layer.

    ``depth`` is ``6 n + 2`` for n blocks in each stage, which have 16, 32 and 64 times ``width`` channels.
    ``dropout`` is its probability between the two convolutions of a block. See `cifar_resnet_18` for the
    other arguments.

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
