"""Normalisation and augmentation of images; random numbers are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import exp, log, sqrt
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.nn import functional as F

Range = tuple[float, float]


@dataclass(frozen=True)
class Normalisation:
    """Conversion of pixels (uint8) to float32 with zero mean and unit standard deviation per channel.

    >>> Normalisation((0.5,), (0.25,))(torch.tensor([[[0, 255]]], dtype=torch.uint8)).round()
    tensor([[[-2.,  2.]]])

    The constants of each channel are those of pixels in [0, 1].
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised float32 images of pixels ``(..., C, H, W)``."""
        if images.dtype != torch.uint8:
            raise TypeError(
                f"images are {images.dtype}, expected bytes (uint8) for constants of pixels in [0, 1]"
            )
        if images.shape[-3] != len(self.mean):
            raise ValueError(
                f"images have {images.shape[-3]} channels, expected {len(self.mean)} for this normalisation"
            )
        shift, scale = shift_and_scale(self, images.device)
        return torch.addcmul(shift, images.float(), scale)

    @classmethod
    def of(cls, images: Tensor) -> Normalisation:
        """The normalisation by the mean and standard deviation of these pixels ``(N, C, H, W)``.

        The standard deviation of a constant channel is taken as 1.
        """
        # Counting the 256 values of a byte is exact, and needs no copy of the images in floating point.
        levels = torch.arange(256, dtype=torch.float64, device="cpu") / 255
        means, deviations = [], []
        for channel in images.unbind(1):
            counts = torch.bincount(channel.flatten().long(), minlength=256).cpu().double()
            frequencies = counts / channel.numel()
            mean = float(frequencies @ levels)
            means.append(mean)
            deviations.append(sqrt(float(frequencies @ (levels - mean).square())) or 1.0)
        return cls(tuple(means), tuple(deviations))


@lru_cache(maxsize=64)  # copying the constants to a GPU with every batch would make the CPU wait
def shift_and_scale(normalisation: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    """The constants by which bytes become normalised pixels: ``shift + scale · bytes``."""
    mean = torch.tensor(normalisation.mean, dtype=torch.float64, device="cpu").view(-1, 1, 1)
    std = torch.tensor(normalisation.std, dtype=torch.float64, device="cpu").view(-1, 1, 1)
    return (-mean / std).float().to(device), (1 / (255 * std)).float().to(device)


@dataclass(frozen=True)
class Standardisation:
    """Conversion of features to zero mean and unit standard deviation, along axis 1.

    >>> Standardisation((1.0, 0.0), (2.0, 1.0))(torch.tensor([[5.0, 5.0]]))
    tensor([[2., 5.]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Standardised inputs ``(N, C, ...)``, float32."""
        shape = (-1, *(1,) * (inputs.ndim - 2))
        mean, std = (
            torch.tensor(each, dtype=torch.float32, device=inputs.device).view(shape)
            for each in (self.mean, self.std)
        )
        return (inputs - mean) / std

    @classmethod
    def of(cls, inputs: Tensor) -> Standardisation:
        """The standardisation by the mean and standard deviation of these inputs; 1 for constant features."""
        axes = [axis for axis in range(inputs.ndim) if axis != 1]
        std, mean = torch.std_mean(inputs.double(), axes, correction=0)
        return cls(tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist()))


Normalising = Normalisation | Standardisation

Published = Literal["cifar10", "cifar100", "svhn", "tiny-imagenet", "imagenet"]
"""Data sets whose constants are in `NORMALISATIONS`."""

NORMALISATIONS: dict[Published, Normalisation] = {
    "cifar10": Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": Normalisation((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "tiny-imagenet": Normalisation((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
    "imagenet": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Means and standard deviations of the training images of well-known data sets."""


def crop_flip(images: Tensor, draws: Tensor, padding: int = 4) -> Tensor:
    """Random shifts by up to ``padding`` pixels, filled with black, and random mirror images.

    The images ``(n, C, H, W)`` may be on any device. ``draws`` are ``(n, 3 or more)`` random numbers, for
    row, column and mirror image.

    >>> image = torch.arange(1, 5).reshape(1, 1, 2, 2)
    >>> crop_flip(image, torch.tensor([[0.0, 0.5, 0.9]]), padding=1)  # moved down by one row
    tensor([[[[0, 0],
              [1, 2]]]])
    """
    _, channels, height, width = images.shape
    draws = draws.to(images.device)
    shifts = (draws[:, :2] * (2 * padding + 1)).long().clamp_(max=2 * padding)
    rows = torch.arange(height, device=images.device) + shifts[:, :1]
    columns = torch.arange(width, device=images.device)
    columns = torch.where(draws[:, 2:3] < 0.5, columns.flip(0), columns) + shifts[:, 1:]
    # The source of each pixel in the flattened padded image: one look-up both shifts and mirrors.
    sources = rows.unsqueeze(2) * (width + 2 * padding) + columns.unsqueeze(1)
    padded = F.pad(images, (padding,) * 4).flatten(2)
    return padded.gather(2, sources.flatten(1).unsqueeze(1).expand(-1, channels, -1)).view(images.shape)


def pixels(image: Image.Image) -> Tensor:
    """The pixels of a Pillow image, ``(C, H, W)``, uint8.

    >>> pixels(Image.new("RGB", (5, 2))).shape
    torch.Size([3, 2, 5])
    """
    array = np.array(image)
    return torch.from_numpy(
        array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))
    )


def centre_crop(image: Image.Image, size: int, fraction: float = 0.875) -> Image.Image:
    """The central square of an image whose short side is scaled to ``size / fraction``.

    >>> centre_crop(Image.new("RGB", (90, 60)), 28).size
    (28, 28)
    """
    scale = round(size / fraction) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def random_resized_crop(image: Image.Image, draws: Sequence[float], size: int) -> Image.Image:
    """A random rectangle of an image, scaled to a square (Szegedy et al., *Going Deeper*, CVPR 2015).

    It has 8 % to 100 % of the area, and an aspect ratio of 3:4 to 4:3. The four random numbers are for area,
    shape, row and column.

    >>> random_resized_crop(Image.new("RGB", (90, 60)), [0.5, 0.5, 0.5, 0.5], 28).size
    (28, 28)
    """
    box = _rectangle(*image.size, draws, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


_ORDERS = tuple(permutations(range(3)))


def colour_jitter(image: Image.Image, draws: Sequence[float], strength: float) -> Image.Image:
    """Random changes of brightness, contrast and saturation, in random order.

    Each factor is drawn from ``1 ± strength``. The four random numbers are for brightness, contrast,
    saturation and order.

    >>> colour_jitter(Image.new("RGB", (1, 1), (100, 100, 100)), [0.0, 0.5, 0.5, 0.0], 0.4).getpixel((0, 0))
    (60, 60, 60)
    """
    if strength == 0:
        return image
    enhancements = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for index in _ORDERS[int(draws[3] * len(_ORDERS))]:
        factor = max(0.0, 1 + strength * (2 * draws[index] - 1))
        image = enhancements[index](image).enhance(factor)
    return image


def random_erasing(image: Tensor, draws: Sequence[float], probability: float) -> Tensor:
    """Random erasing: with some probability, fills a random rectangle with noise (Zhong et al., AAAI 2020).

    The image ``(C, H, W)`` is normalised, and every number in the rectangle is drawn from the standard normal
    distribution, as timm does in its mode "pixel". The rectangle has 2 % to 33 % of the area, and an aspect
    ratio of 3:10 to 10:3. The seven random numbers are for whether to erase, area, shape, row, column, and
    two for the noise.

    >>> int((random_erasing(torch.ones(1, 10, 10), [0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], 0.25) != 1).sum())
    16
    """
    if draws[0] >= probability:
        return image
    height, width = image.shape[-2:]
    left, top, right, bottom = _rectangle(width, height, draws[1:5], scale=(0.02, 1 / 3), ratio=(0.3, 10 / 3))
    # The generator takes 32 bits of its seed, and a number has 24.
    seed = int(draws[5] * (1 << 16)) << 16 | int(draws[6] * (1 << 16))
    erased = image.clone()
    erased[:, top:bottom, left:right].normal_(generator=torch.Generator().manual_seed(seed))
    return erased


def _rectangle(
    width: int, height: int, draws: Sequence[float], *, scale: Range, ratio: Range
) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random rectangle in an image; its aspect ratio is drawn log-uniformly.

    The shape is drawn only from rectangles that fit. No draw is rejected, so the number of draws is fixed.
    """
    area = width * height * (scale[0] + (scale[1] - scale[0]) * draws[0])
    narrowest, widest = area / height**2, width**2 / area
    low, high = min(max(ratio[0], narrowest), widest), max(min(ratio[1], widest), narrowest)
    shape = exp(log(low) + (log(high) - log(low)) * draws[1])
    across = min(width, max(1, round(sqrt(area * shape))))
    down = min(height, max(1, round(sqrt(area / shape))))
    top, left = int(draws[2] * (height - down + 1)), int(draws[3] * (width - across + 1))
    return left, top, left + across, top + down
