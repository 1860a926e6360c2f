"""The densely connected networks of the calibration papers, for small images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from calibrant import arguments
from calibrant.training.models.layers import batch_norm, initialise


class _DenseLayer(nn.Module):
    """Adds ``growth`` channels to its input, with or without a 1×1 convolution before the 3×3 one."""

    def __init__(self, channels: int, growth: int, bottleneck: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [batch_norm(channels)]
        if bottleneck:
            layers += [nn.Conv2d(channels, 4 * growth, 1, bias=False), batch_norm(4 * growth)]
            channels = 4 * growth
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, growth, 3, padding=1, bias=False))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images, self.layers(images)], 1)


class CifarDenseNet(nn.Module):
    """A densely connected network (Huang et al., 2017).

    The stem is a 3×3 convolution of stride 1. The mean over all pixels makes the network independent of the
    image size. ``depths`` are the layers in each block, and ``growth`` the channels that a layer adds.

    ``compact`` is the variant "BC": layers with bottlenecks, transitions that halve the channels, and a stem
    of ``2 · growth`` channels. Otherwise the stem has 16.
    """

    def __init__(
        self, num_classes: int, depths: Sequence[int], *, growth: int, channels: int, compact: bool = True
    ) -> None:
        super().__init__()
        arguments.whole_number("channels", channels)
        arguments.whole_number("growth", growth)
        features = 2 * growth if compact else 16
        layers: list[nn.Module] = [nn.Conv2d(channels, features, 3, padding=1, bias=False)]
        for number, depth in enumerate(depths):
            if number > 0:
                kept = features // 2 if compact else features
                transition = nn.Conv2d(features, kept, 1, bias=False)
                layers.append(nn.Sequential(batch_norm(features), transition, nn.AvgPool2d(2)))
                features = kept
            block = [_DenseLayer(features + position * growth, growth, compact) for position in range(depth)]
            layers.append(nn.Sequential(*block))
            features += depth * growth
        self.layers = nn.Sequential(*layers, batch_norm(features))
        self.head = nn.Linear(features, num_classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).mean((2, 3)))
        return logits


def cifar_densenet_40(num_classes: int, *, channels: int = 3, growth: int = 12) -> CifarDenseNet:
    """DenseNet-40: three dense blocks of 12 layers without bottlenecks; see `CifarDenseNet`.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in cifar_densenet_40(10).parameters())
    1019722
    """
    return CifarDenseNet(num_classes, (12, 12, 12), growth=growth, channels=channels, compact=False)


def cifar_densenet_121(num_classes: int, *, channels: int = 3, growth: int = 32) -> CifarDenseNet:
    """DenseNet-121: dense blocks of 6, 12, 24 and 16 layers; see `CifarDenseNet` for the arguments.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in cifar_densenet_121(10).parameters())
    6956298
    """
    return CifarDenseNet(num_classes, (6, 12, 24, 16), growth=growth, channels=channels)
