"""Data sets of image files: ImageNet, Tiny-ImageNet, ImageNet-LT, and any folder of images."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from calibrant.arguments import in_range, one_of, whole_number
from calibrant.sizes import MAX_CLASSES
from calibrant.training.data.augmentation import (
    NORMALISATIONS,
    Normalisation,
    Normalising,
    Published,
    colour_jitter,
    crop_flip,
    pixels,
    random_erasing,
    random_resized_crop,
)
from calibrant.training.data.part_checks import warn_about_parts
from calibrant.training.data.raw_images import CentreCropPreparation, ImagePreparation
from calibrant.training.data.safe_readers import SUFFIXES, is_image, present, read_image, read_lines
from calibrant.training.data.sampling import draw_parts, long_tail, part_sizes, stratified
from calibrant.training.data.split import DataSets, Split

Paths = NDArray[np.bytes_]

Augment = Callable[[Image.Image, Tensor, ImagePreparation], Tensor]
"""A function of a training image, its random numbers and the preparation; it returns a normalised image."""

Transform = tuple[ImagePreparation, Augment | None]
"""What is done to images for evaluation, and for training if it is something else."""

_IMAGENET = "ILSVRC2012 (train and val, each with one folder per class) from https://image-net.org/download"
_TINY_IMAGENET = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


def shifted_and_mirrored(image: Image.Image, draws: Tensor, preparation: ImagePreparation) -> Tensor:
    """The augmentation `crop_flip` of small images."""
    content = pixels(preparation.fitted(image))
    return preparation.normalisation(crop_flip(content[None], draws[None])[0])


@dataclass(frozen=True)
class ResizedCrop:
    """The augmentation `random_resized_crop` with mirror images, of images of any size.

    ``jitter`` is the strength of `colour_jitter`, and ``erasing`` the probability of `random_erasing`.
    """

    jitter: float = 0.0
    erasing: float = 0.0

    def __call__(self, image: Image.Image, draws: Tensor, preparation: ImagePreparation) -> Tensor:
        numbers: list[float] = draws.tolist()
        image = random_resized_crop(image, numbers[:4], preparation.height)
        if numbers[4] < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = colour_jitter(image, numbers[5:9], self.jitter)
        return random_erasing(preparation.normalisation(pixels(image)), numbers[9:16], self.erasing)


@dataclass(eq=False, repr=False)
class ImageFileSplit(Split):
    """Images on disk, decoded with each batch. The paths are relative to ``folder``."""

    folder: Path
    paths: Paths
    targets: Tensor
    preparation: ImagePreparation
    augmentation: Augment | None = None

    def __post_init__(self) -> None:
        self.normalisation = self.preparation.normalisation

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        paths = [self.folder / os.fsdecode(path) for path in self.paths[indices.numpy()]]
        augment, targets = self.augmentation, self.targets[indices]
        if draws is None or augment is None or not paths:
            return self.preparation(paths), targets
        numbered = zip(paths, draws, strict=True)
        images = [augment(read_image(path, "RGB"), row, self.preparation) for path, row in numbered]
        return torch.stack(images), targets

    def normalised_by(self, normalisation: Normalising) -> ImageFileSplit:
        if not isinstance(normalisation, Normalisation):
            raise TypeError("images cannot be normalised by constants of features")
        return replace(self, preparation=replace(self.preparation, normalisation=normalisation))

    def subset(self, indices: Tensor) -> ImageFileSplit:
        return replace(self, paths=self.paths[indices.numpy()], targets=self.targets[indices])


def tiny_imagenet(
    root: Path,
    *,
    validation_per_class: int = 50,
    imbalance: float = 1.0,
    augmentation: Literal["crop-flip", "none"] = "crop-flip",
    split_seed: int = 0,
) -> DataSets:
    """Tiny-ImageNet: 110,000 colour images of 64 × 64 pixels in 200 classes; its ``val`` is the test part.

    Reads the folder ``tiny-imagenet-200``. ``validation_per_class`` is how many training images of each class
    to draw for validation. The other options are those of `image_folder`.
    """
    one_of("augmentation", augmentation, ("crop-flip", "none"))
    folder = root / "tiny-imagenet-200"
    for name in ("wnids.txt", "train", "val/val_annotations.txt", "val/images"):
        present(folder / name, _TINY_IMAGENET, root)
    classes = sorted(" ".join(read_lines(folder / "wnids.txt")).split())
    labels = {name: label for label, name in enumerate(classes)}
    paths, targets = _listed(folder, [f"train/{name}/images" for name in classes])
    test_paths, test_targets = [], []
    for number, line in enumerate(read_lines(folder / "val/val_annotations.txt"), start=1):
        file, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in labels:
            raise ValueError(
                f"{folder}/val/val_annotations.txt, line {number}, has class {wnid!r}, expected one of "
                "those in wnids.txt"
            )
        test_paths.append(f"val/images/{file}")
        test_targets.append(labels[wnid])
    sizes = {"validation": validation_per_class * len(classes)}
    drawn = draw_parts(targets, sizes, imbalance=imbalance, num_classes=len(classes), seed=split_seed)
    preparation = ImagePreparation(NORMALISATIONS["tiny-imagenet"], 64, 64)
    augment = shifted_and_mirrored if augmentation == "crop-flip" else None
    whole = ImageFileSplit(folder, paths, targets, preparation, augment)
    train, validation = (whole.subset(part) for part in drawn.values())
    test = ImageFileSplit(folder, *_packed(test_paths, test_targets), preparation)
    return _data_sets(train, validation, test, _wordnet_names(folder / "words.txt", "\t", classes))


def image_folder(
    root: Path,
    *,
    folder: str = ".",
    image_size: int = 224,
    validation: float = 0.1,
    test: float = 0.2,
    augmentation: Literal["resized-crop", "crop-flip", "none"] = "resized-crop",
    colour_jitter: float = 0.0,
    erasing: float = 0.0,
    normalisation: Published = "imagenet",
    imbalance: float = 1.0,
    split_seed: int = 0,
) -> DataSets:
    """Images in one folder for each class: ``train/<class>/…``, or just ``<class>/…``.

    ``validation`` (or ``val``) and ``test`` may have the same form beside ``train``. A part without a folder
    is drawn from the training images, stratified by class.

    Args:
        root: the data folder.
        folder: the folder with ``train`` or with the classes, relative to ``root``.
        image_size: the side of the square images that the model gets.
        validation: the fraction of the training images to draw for validation, if it has no folder.
        test: the fraction of the training images to draw for the test, if it has no folder.
        augmentation: the augmentation of the training images, with mirror images: "resized-crop" for random
            rectangles, "crop-flip" for shifts of up to four pixels.
        colour_jitter: the strength of random changes of colour; for "resized-crop".
        erasing: the probability of filling a random rectangle with noise; for "resized-crop".
        normalisation: whose constants to use.
        imbalance: the ratio of the first class's training images to the last one's; see `long_tail`.
        split_seed: the seed of the parts and of the long tail.
    """
    base = root / folder
    top = base if not base.exists() or _has_only_classes(base) else base / "train"
    present(top, "images with one folder for each class")
    one_of("augmentation", augmentation, ("resized-crop", "crop-flip", "none"))
    constants = NORMALISATIONS[one_of("normalisation", normalisation, tuple(NORMALISATIONS))]
    whole_number("image_size", image_size)
    transform: Transform = (
        (ImagePreparation(constants, image_size, image_size), shifted_and_mirrored)
        if augmentation == "crop-flip"
        else _resized_crop(image_size, colour_jitter, erasing, augmentation, constants)
    )
    classes = _class_folders(top)
    paths, targets = _listed(top, classes)
    whole = ImageFileSplit(top, paths, targets, *transform)
    empty = sorted(set(range(len(classes))) - set(targets.tolist()))
    if top == base and empty:
        raise ValueError(
            f"{base / classes[empty[0]]} has no images, expected some in the folder of each class"
        )
    folders = {"validation": "validation" if (base / "validation").is_dir() else "val", "test": "test"}
    parts = {
        part: _folder_part(base, name, classes, transform)
        for part, name in folders.items()
        if (base / name).is_dir()
    }
    sizes = part_sizes(len(targets), parts, validation=validation, test=test)
    drawn = draw_parts(targets, sizes, imbalance=imbalance, num_classes=len(classes), seed=split_seed)
    parts |= {name: whole.subset(indices) for name, indices in drawn.items()}
    data = _data_sets(**parts, names=tuple(classes))
    warn_about_parts(base, data)
    return data


def imagenet(
    root: Path,
    *,
    folder: str = "imagenet",
    image_size: int = 224,
    validation: float = 0.2,
    augmentation: Literal["resized-crop", "none"] = "resized-crop",
    colour_jitter: float = 0.4,
    erasing: float = 0.25,
    imbalance: float = 1.0,
    split_seed: int = 0,
) -> DataSets:
    """ImageNet (ILSVRC 2012): 1.28 million training images in 1,000 classes.

    Reads ``train/<wnid>/…`` and ``val/<wnid>/…`` in ``folder``. If it has ``LOC_synset_mapping.txt``, the
    names of the classes are read from there. The fraction ``validation`` of the official validation images,
    stratified by class, is for validation, and the rest is the test. The other options are those of
    `image_folder`.
    """
    base = root / folder
    for name in ("train", "val"):
        present(base / name, _IMAGENET, base)
    transform = _resized_crop(image_size, colour_jitter, erasing, augmentation)
    classes = _class_folders(base / "train")
    paths, targets = _listed(base, [f"train/{name}" for name in classes])
    kept = long_tail(targets, imbalance, split_seed, len(classes))
    train = ImageFileSplit(base, paths, targets, *transform).subset(kept)
    official = _folder_part(base, "val", classes, transform)
    size = round(in_range("validation", validation, 0, 1) * len(official))
    drawn = stratified(official.targets, (size, len(official) - size), split_seed)
    names = _wordnet_names(base / "LOC_synset_mapping.txt", " ", classes)
    held_out, test = (official.subset(part) for part in drawn)
    return _data_sets(train, held_out, test, names)


def imagenet_lt(
    root: Path,
    *,
    folder: str = "imagenet",
    image_size: int = 224,
    augmentation: Literal["resized-crop", "none"] = "resized-crop",
    colour_jitter: float = 0.4,
    erasing: float = 0.25,
) -> DataSets:
    """ImageNet-LT: a long-tailed subset of ImageNet, by its published lists (Liu et al., CVPR 2019).

    ``folder`` is that of ImageNet. It also has ``ImageNet_LT_train.txt``, ``ImageNet_LT_val.txt`` (20 images
    of each class) and ``ImageNet_LT_test.txt``. Each line of these is a path relative to ``folder``, and a
    label. The options are those of `imagenet`.
    """
    base = root / folder
    transform = _resized_crop(image_size, colour_jitter, erasing, augmentation)
    lists = [_list_file(base, f"ImageNet_LT_{name}.txt") for name in ("train", "val", "test")]
    train, validation, test = (ImageFileSplit(base, *listed, *transform) for listed in lists)
    size = 1 + max(int(targets.max()) for _, targets in lists)
    folders = dict.fromkeys(range(size), "")
    for path, label in zip(train.paths, train.targets.tolist(), strict=True):
        folders[label] = folders[label] or Path(os.fsdecode(path)).parent.name
    classes = [name or str(label) for label, name in folders.items()]
    names = _wordnet_names(base / "LOC_synset_mapping.txt", " ", classes)
    return _data_sets(train, validation, test, names)


def _data_sets(train: ImageFileSplit, validation: Split, test: Split, names: tuple[str, ...]) -> DataSets:
    about = {"channels": 3, "image_size": train.preparation.height}
    return DataSets(train, validation, test, names, about, preparation=train.preparation)


def _resized_crop(
    image_size: int,
    jitter: float,
    erasing: float,
    augmentation: str,
    constants: Normalisation = NORMALISATIONS["imagenet"],
) -> Transform:
    size = whole_number("image_size", image_size)
    augment = ResizedCrop(in_range("colour_jitter", jitter), in_range("erasing", erasing, 0, 1))
    one_of("augmentation", augmentation, ("resized-crop", "none"))
    return CentreCropPreparation(constants, size, size), None if augmentation == "none" else augment


def _has_only_classes(folder: Path) -> bool:
    """Whether a folder has folders, none of which is named after a part of the data."""
    found = {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()
    return any(name[0] != "." for name in found) and not found & {"train", "validation", "val", "test"}


def _class_folders(folder: Path) -> list[str]:
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    if not classes:
        raise ValueError(f"{folder} has no folders, expected one for each class")
    return classes


def _packed(paths: Iterable[str], labels: Sequence[int]) -> tuple[Paths, Tensor]:
    """Arrays, whose memory worker processes share. They would copy a million strings."""
    places = torch.tensor(labels, dtype=torch.long, device="cpu")
    return np.array([os.fsencode(path) for path in paths], np.bytes_), places


def _listed(base: Path, folders: Iterable[str]) -> tuple[Paths, Tensor]:
    """The images in these folders, as paths relative to ``base``, with the folder's position as label."""
    paths: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        if not (base / folder).is_dir():
            raise ValueError(f"{base / folder} is missing, expected a folder for each class")
        found = sorted(entry.name for entry in os.scandir(base / folder) if is_image(entry.name))
        paths += [f"{folder}/{name}" for name in found]
        labels += [label] * len(found)
    if not paths:
        raise ValueError(f"{base} has no images in its class folders, expected files like *{SUFFIXES[1]}")
    return _packed(paths, labels)


def _folder_part(base: Path, name: str, classes: Sequence[str], transform: Transform) -> ImageFileSplit:
    """The images of one part, whose class folders must be among ``classes``."""
    found = _class_folders(base / name)
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise ValueError(f"{base / name} has a class {unknown[0]!r} that {base / 'train'} does not have")
    paths, places = _listed(base, [f"{name}/{label}" for label in found])
    labels = {label: number for number, label in enumerate(classes)}
    targets = torch.tensor([labels[label] for label in found], device="cpu")[places]
    return ImageFileSplit(base, paths, targets, *transform)


def _list_file(base: Path, name: str) -> tuple[Paths, Tensor]:
    path = base / name
    download = f"{name} from https://liuziwei7.github.io/projects/LongTail.html"
    paths, labels = [], []
    for number, line in enumerate(read_lines(present(path, download, base, "put")), start=1):
        file, _, label = line.strip().rpartition(" ")
        if not file or not label.isdecimal() or len(label) > 6:
            raise ValueError(
                f"{path}, line {number}, is {line[:200]!r}, expected a path and a label below {MAX_CLASSES:,}"
            )
        paths.append(file)
        labels.append(int(label))
    if not paths:
        raise ValueError(f"{path} is empty, expected lines of a path and a label")
    present(base / paths[0], _IMAGENET, base)
    return _packed(paths, labels)


def _wordnet_names(path: Path, separator: str, classes: Sequence[str]) -> tuple[str, ...]:
    """The first word for each class in a list of WordNet, or its WordNet number if there is no list."""
    words = {}
    if path.exists():
        for line in read_lines(path):
            wnid, _, synonyms = line.partition(separator)
            words[wnid] = synonyms.partition(",")[0].strip()
    names = [words.get(wnid) or wnid for wnid in classes]
    counts = Counter(names)
    return tuple(
        f"{name} ({wnid})" if counts[name] > 1 else name for name, wnid in zip(names, classes, strict=True)
    )
