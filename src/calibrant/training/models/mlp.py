"""Small networks that train on the embedded data in seconds."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from calibrant.training.models.layers import initialise


def mlp(
    num_classes: int,
    *,
    features: int | None = None,
    channels: int | None = None,
    image_size: int | None = None,
    hidden: tuple[int, ...] = (256, 256),
) -> nn.Sequential:
    """Linear layers with ReLU between them, with PyTorch's initial weights.

    Args:
        num_classes: K.
        features: the number of features; inputs are flattened to ``(B, features)``.
        channels: the channels of square images, given instead of features.
        image_size: the height and width of these images.
        hidden: the widths of the hidden layers; ``()`` for a linear classifier.

    >>> import torch
    >>> mlp(10, features=64)(torch.zeros(2, 64)).shape
    torch.Size([2, 10])
    """
    if features is None:
        if channels is None or image_size is None:
            raise ValueError("mlp needs features, or channels and image_size, got neither")
        features = channels * image_size**2
    widths = (features, *hidden)
    if min(widths) < 1:
        raise ValueError(f"features and the widths in hidden must be at least 1, got {list(widths)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


class _SmallCNN(nn.Module):
    def __init__(self, num_classes: int, channels: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for out, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            # Group normalisation does not depend on how a batch is divided among processes.
            layers += [nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)]
            layers += [nn.GroupNorm(8, out), nn.ReLU()]
            channels = out
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).mean((2, 3)))
        return logits


def cnn(num_classes: int, *, channels: int = 1, width: int = 32) -> nn.Module:
    """Three 3×3 convolutions with group normalisation, the mean over all pixels, a linear layer.

    Args:
        num_classes: K.
        channels: the channels of the images ``(B, channels, H, W)``.
        width: the output channels of the first convolution, a multiple of 8; they double twice.

    >>> import torch
    >>> cnn(10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    if width < 8 or width % 8:
        raise ValueError(f"width must be a multiple of 8, got {width!r}")
    return _SmallCNN(num_classes, channels, width)
