"""Raw images (files, Pillow images and arrays of bytes) as the argument of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from calibrant.training.data.augmentation import Normalisation, centre_crop, pixels
from calibrant.training.data.preparation import Preparation
from calibrant.training.data.safe_readers import SUFFIXES, Array, converted, is_image, read_image, read_inputs

RawImage = Path | str | Image.Image | Array

_EXPECTED = (
    "paths of images, Pillow images, or bytes (uint8) of shape (H, W), (H, W, C), (N, H, W, C) or "
    "(N, C, H, W)"
)


@dataclass(frozen=True)
class ImagePreparation(Preparation):
    """Images of one size, normalised; images of another size are scaled.

    Raw inputs are one image or a list of images: paths, Pillow images, or arrays of bytes ``(H, W)`` or
    ``(H, W, C)``. A batch of images may also be one array ``(N, H, W, C)``, ``(N, C, H, W)`` or, for a single
    channel, ``(N, H, W)``. Images are converted to grey or to colours as the model needs it.

    >>> preparation = ImagePreparation(Normalisation((0.5,), (0.25,)), 8, 8)
    >>> preparation([np.zeros((8, 8), np.uint8), Image.new("RGB", (90, 60))]).shape
    torch.Size([2, 1, 8, 8])
    """

    kind: ClassVar[str] = "images"
    example = ("new-images", "predictions.csv")
    graph_inputs = "the pixels that calibrant.load(RUN).preparation.bytes_of(images) returns"
    normalisation: Normalisation = field()
    height: int
    width: int

    @classmethod
    def of(cls, images: Tensor, normalisation: Normalisation) -> Self:
        """The preparation for a model of images like these, ``(N, C, H, W)``."""
        return cls(normalisation, images.shape[2], images.shape[3])

    @property
    def channels(self) -> int:
        """The channels of the prepared images: 1 or 3."""
        return len(self.normalisation.mean)

    def fitted(self, image: Image.Image) -> Image.Image:
        """An image of the size that the model needs."""
        return image.resize((self.width, self.height), Image.Resampling.BILINEAR)

    def __call__(self, raw: Any) -> Tensor:
        return self.normalisation(self.bytes_of(raw))

    def bytes_of(self, raw: Any) -> Tensor:
        """The images before their normalisation, ``(N, C, H, W)``, uint8."""
        images = [pixels(self.fitted(self._image(each))) for each in self.listed(raw)]
        empty = torch.empty(0, self.channels, self.height, self.width, dtype=torch.uint8, device="cpu")
        return torch.stack(images) if images else empty

    def batches(self, raw: Any, size: int) -> Iterator[Tensor]:
        images = self.listed(raw)
        for start in range(0, len(images), size):
            yield self(images[start : start + size])

    def listed(self, raw: Any) -> list[RawImage]:
        """Raw images one by one."""
        if isinstance(raw, Tensor):
            raw = raw.numpy(force=True)
        if isinstance(raw, str | Path | Image.Image):
            return [raw]
        if isinstance(raw, np.ndarray):
            return list(self._images(raw))
        if not isinstance(raw, Iterable) or isinstance(raw, Mapping | bytes):
            raise ValueError(f"got a {type(raw).__name__}, expected {_EXPECTED}")
        return list(raw)

    def _images(self, array: Array) -> Array:
        """The images in an array, one by one along axis 0."""
        shape, channels = array.shape, self.channels
        _check_bytes(array)
        if len(shape) == 4 and shape[3] in (1, 3):
            return array
        if len(shape) == 4 and shape[1] in (1, 3):
            return array.transpose(0, 2, 3, 1)
        if len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
            return array[None]
        if shape == (channels, self.height, self.width) and channels > 1:
            return array.transpose(1, 2, 0)[None]
        if len(shape) == 3 and channels == 1:
            return array
        raise ValueError(f"got an array of shape {shape}, expected {_EXPECTED}")

    def _image(self, raw: RawImage) -> Image.Image:
        mode = "L" if self.channels == 1 else "RGB"
        if isinstance(raw, str | Path):
            return read_image(Path(raw), mode)
        if isinstance(raw, Image.Image):
            return converted(raw, mode)
        array = raw.numpy(force=True) if isinstance(raw, Tensor) else raw
        if not isinstance(array, np.ndarray):
            raise ValueError(f"got a list with a {type(raw).__name__}, expected {_EXPECTED}")
        _check_bytes(array)
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[:, :, 0]
        if 0 in array.shape or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
            raise ValueError(f"got an image of shape {array.shape}, expected {_EXPECTED}")
        return Image.fromarray(np.ascontiguousarray(array)).convert(mode)

    def read(self, path: Path) -> tuple[Any, list[str]]:
        """The images in a folder, also in folders inside of it, in an image file, or in an archive."""
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if is_image(file.name) and file.is_file())
            if not found:
                raise ValueError(f"{path} has no images, expected files like *{SUFFIXES[1]}")
            return found, [file.relative_to(path).as_posix() for file in found]
        if is_image(path.name):
            return [path], [path.name]
        if path.suffix.lower() not in (".npz", ".npy"):
            raise ValueError(f"{path} is neither a folder of images nor an image, .npz or .npy file")
        array = read_inputs(path)
        try:
            images = self.listed(array)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return images, [str(number) for number in range(len(images))]

    def state(self) -> dict[str, Any]:
        return {**asdict(self.normalisation), "height": self.height, "width": self.width}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        constants = Normalisation(*(tuple(map(float, state[name])) for name in ("mean", "std")))
        if len(constants.mean) not in (1, 3):
            raise ValueError(f"it has constants of {len(constants.mean)} channels, expected 1 or 3")
        return cls(constants, int(state["height"]), int(state["width"]))


@dataclass(frozen=True)
class CentreCropPreparation(ImagePreparation):
    """The centre of each image, as in the evaluation of ImageNet; see `centre_crop`."""

    kind: ClassVar[str] = "centre-crop"

    def fitted(self, image: Image.Image) -> Image.Image:
        return centre_crop(image, self.height)


def _check_bytes(array: Array) -> None:
    if array.dtype != np.uint8:
        raise ValueError(f"got an array of type {array.dtype}, expected {_EXPECTED}")
