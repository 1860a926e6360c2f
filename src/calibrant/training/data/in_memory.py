"""Data sets of small images in memory: CIFAR-10, CIFAR-100, their corrupted versions, and SVHN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from calibrant.arguments import one_of
from calibrant.sizes import MAX_CLASSES
from calibrant.training.data.augmentation import NORMALISATIONS, Normalisation, Normalising, crop_flip
from calibrant.training.data.raw_images import ImagePreparation
from calibrant.training.data.safe_readers import present, read_mat, read_npy, read_pickle, whole_labels
from calibrant.training.data.sampling import draw_parts
from calibrant.training.data.split import DataSets, Split, TensorSplit

Augmentation = Literal["crop-flip", "none"]

Corruption = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
    "speckle_noise",
    "gaussian_blur",
    "spatter",
    "saturate",
]
"""The fifteen corruptions of CIFAR-10-C, and the four additional ones."""


@dataclass(eq=False, repr=False)
class ImageSplit(TensorSplit):
    """Images in memory, one byte per pixel; batches are normalised and may be augmented.

    >>> part = ImageSplit(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]),
    ...                   NORMALISATIONS["cifar10"])
    >>> inputs, targets = part.batch(torch.tensor([1]))
    >>> inputs.shape, inputs.dtype
    (torch.Size([1, 3, 8, 8]), torch.float32)
    """

    inputs: Tensor
    normalisation: Normalisation = field()
    augmentation: Augmentation = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("augmentation", self.augmentation, ("crop-flip", "none"))

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        images = self.inputs[indices]
        if draws is not None and self.augmentation == "crop-flip":
            images = crop_flip(images, draws)
        return self.normalisation(images), self.targets[indices]

    def normalised_by(self, normalisation: Normalising) -> ImageSplit:
        if not isinstance(normalisation, Normalisation):
            raise TypeError("bytes of images cannot be normalised by constants of other numbers")
        return replace(self, normalisation=normalisation)


def cifar10(
    root: Path,
    *,
    validation: int = 5000,
    imbalance: float = 1.0,
    augmentation: Augmentation = "crop-flip",
    split_seed: int = 0,
) -> DataSets:
    """CIFAR-10: 60,000 colour images of 32 × 32 pixels in 10 classes (Krizhevsky, 2009).

    >>> cifar10(Path("nowhere"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    calibrant.training.data.safe_readers.MissingDataError: nowhere/cifar-10-batches-py/... is missing: ...

    Args:
        root: the folder that has ``cifar-10-batches-py``, the version for Python.
        validation: how many training images to draw for validation, stratified by class.
        imbalance: the ratio of the first class's training images to the last one's; see `long_tail`.
        augmentation: "crop-flip" for random shifts of up to four pixels and mirror images, or "none".
        split_seed: the seed of the validation images and of the long tail.
    """
    folder = root / "cifar-10-batches-py"
    batches = [folder / f"data_batch_{number}" for number in range(1, 6)]
    names = _cifar_names(folder / "batches.meta", "label_names")
    parts = [_cifar_part(path, "labels", len(names)) for path in [*batches, folder / "test_batch"]]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    drawn = validation, imbalance, split_seed
    return _data_sets((images, labels), parts[-1], names, NORMALISATIONS["cifar10"], augmentation, *drawn)


def cifar100(
    root: Path,
    *,
    validation: int = 5000,
    imbalance: float = 1.0,
    augmentation: Augmentation = "crop-flip",
    split_seed: int = 0,
) -> DataSets:
    """CIFAR-100: 60,000 colour images of 32 × 32 pixels in 100 classes (Krizhevsky, 2009).

    Reads the folder ``cifar-100-python``, the version for Python. The options are those of `cifar10`.
    """
    folder = root / "cifar-100-python"
    names = _cifar_names(folder / "meta", "fine_label_names")
    train, test = (_cifar_part(folder / part, "fine_labels", len(names)) for part in ("train", "test"))
    drawn = validation, imbalance, split_seed
    return _data_sets(train, test, names, NORMALISATIONS["cifar100"], augmentation, *drawn)


def cifar10_c(
    root: Path,
    *,
    corruption: Corruption = "gaussian_noise",
    severity: int = 5,
    validation: int = 5000,
    imbalance: float = 1.0,
    augmentation: Augmentation = "crop-flip",
    split_seed: int = 0,
) -> DataSets:
    """CIFAR-10-C: the test images of CIFAR-10, corrupted (Hendrycks and Dietterich, ICLR 2019).

    ``corruption`` is the name of a file in the folder ``CIFAR-10-C``, and ``severity`` is 1 to 5. If the
    folder of `cifar10` exists too, training and validation images are its clean ones, and the other options
    are described there. Otherwise both parts are empty.
    """
    names = CIFAR10_CLASSES
    test = _corrupted(
        root / "CIFAR-10-C", "2535967", corruption, severity, len(names), NORMALISATIONS["cifar10"]
    )
    if not (root / "cifar-10-batches-py").exists():
        return _only_tested(test, names)
    clean = cifar10(
        root, validation=validation, imbalance=imbalance, augmentation=augmentation, split_seed=split_seed
    )
    return replace(clean, test=test)


def cifar100_c(
    root: Path,
    *,
    corruption: Corruption = "gaussian_noise",
    severity: int = 5,
    validation: int = 5000,
    imbalance: float = 1.0,
    augmentation: Augmentation = "crop-flip",
    split_seed: int = 0,
) -> DataSets:
    """CIFAR-100-C: the test images of CIFAR-100, corrupted (Hendrycks and Dietterich, ICLR 2019).

    Reads the folder ``CIFAR-100-C``. Without the folder of `cifar100`, the names of the classes are numbers.
    The options are those of `cifar10_c`.
    """
    names = tuple(map(str, range(100)))
    test = _corrupted(
        root / "CIFAR-100-C", "3555552", corruption, severity, len(names), NORMALISATIONS["cifar100"]
    )
    if not (root / "cifar-100-python").exists():
        return _only_tested(test, names)
    clean = cifar100(
        root, validation=validation, imbalance=imbalance, augmentation=augmentation, split_seed=split_seed
    )
    return replace(clean, test=test)


def svhn(
    root: Path,
    *,
    validation: int = 5000,
    imbalance: float = 1.0,
    augmentation: Augmentation = "none",
    normalisation: Literal["svhn", "cifar10", "cifar100"] = "svhn",
    split_seed: int = 0,
) -> DataSets:
    """SVHN: 99,289 colour images of 32 × 32 pixels, digits of house numbers (Netzer et al., 2011).

    Reads ``train_32x32.mat`` and ``test_32x32.mat``. If only the test file exists, the training and the
    validation part are empty. ``normalisation`` says whose constants to use; a model trained on CIFAR needs
    CIFAR's. The other options are those of `cifar10`; "crop-flip" also mirrors the digits.
    """
    chosen = NORMALISATIONS[one_of("normalisation", normalisation, ("svhn", "cifar10", "cifar100"))]
    names = tuple(map(str, range(10)))
    download = "{} from http://ufldl.stanford.edu/housenumbers"
    test_path, train_path = root / "test_32x32.mat", root / "train_32x32.mat"
    test = _svhn_part(present(test_path, download.format(test_path.name), root, "put"))
    if not train_path.exists():
        return _only_tested(ImageSplit(*test, chosen), names)
    drawn = validation, imbalance, split_seed
    return _data_sets(_svhn_part(train_path), test, names, chosen, augmentation, *drawn)


CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)


def _data_sets(
    whole: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    names: tuple[str, ...],
    normalisation: Normalisation,
    augmentation: Augmentation,
    validation: int,
    imbalance: float,
    split_seed: int,
) -> DataSets:
    """A data set of training and test images, with validation images drawn from the training images."""
    sizes = {"validation": validation}
    parts = draw_parts(whole[1], sizes, imbalance=imbalance, num_classes=len(names), seed=split_seed)
    train = ImageSplit(*whole, normalisation, augmentation).subset(parts["train"])
    held_out = ImageSplit(*whole, normalisation).subset(parts["validation"])
    return _with_facts(train, held_out, ImageSplit(*test, normalisation), names)


def _corrupted(
    folder: Path, record: str, corruption: str, severity: int, classes: int, normalisation: Normalisation
) -> ImageSplit:
    """The images of one corruption at one severity; ``record`` is the number of the files on Zenodo."""
    one_of("corruption", corruption, get_args(Corruption))
    one_of("severity", severity, (1, 2, 3, 4, 5))
    download = f"{folder.name}.tar from https://zenodo.org/records/{record}"
    images = read_npy(present(folder / f"{corruption}.npy", download, folder.parent))
    labels = read_npy(present(folder / "labels.npy", download, folder.parent))
    # A file holds the five severities one after the other. Only one of them is read from disk.
    size, rest = divmod(len(images), 5) if images.ndim else (0, 1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or rest:
        raise ValueError(
            f"{folder / corruption}.npy has {images.dtype} of shape {images.shape}, expected uint8 of shape "
            "(5 · N, height, width, 3)"
        )
    if labels.shape not in ((size,), (5 * size,)):
        raise ValueError(
            f"{folder / 'labels.npy'} has shape {labels.shape}, expected ({5 * size},) for {corruption}.npy"
        )
    rows = slice((severity - 1) * size, severity * size)
    chosen = torch.from_numpy(np.ascontiguousarray(images[rows].transpose(0, 3, 1, 2)))
    part = labels[rows if len(labels) > size else slice(None)]
    targets = torch.from_numpy(whole_labels(folder / "labels.npy", part, classes))
    return ImageSplit(chosen, targets, normalisation)


def _only_tested(test: ImageSplit, names: tuple[str, ...]) -> DataSets:
    """Test images without any for training and validation."""
    empty = test.subset(torch.arange(0, device="cpu"))
    return _with_facts(empty, empty, test, names)


def _with_facts(train: Split, validation: Split, test: ImageSplit, names: tuple[str, ...]) -> DataSets:
    images = test.inputs
    about = {"channels": images.shape[1], "image_size": images.shape[-1]}
    preparation = ImagePreparation.of(images, test.normalisation)
    return DataSets(train, validation, test, names, about, preparation=preparation)


def _cifar_names(path: Path, field: str) -> tuple[str, ...]:
    names = read_pickle(_cifar_file(path)).get(field)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} has no list {field!r} of texts, expected the names of the classes")
    if len(names) > MAX_CLASSES:
        raise ValueError(f"{path} has {len(names):,} class names, expected at most {MAX_CLASSES:,}")
    return tuple(names)


def _cifar_part(path: Path, field: str, classes: int) -> tuple[Tensor, Tensor]:
    content = read_pickle(_cifar_file(path))
    rows, labels = content.get("data"), content.get(field)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072:
        found = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else "no array"
        raise ValueError(f"{path} has {found} under 'data', expected uint8 of shape (N, 3072)")
    if not isinstance(labels, list | np.ndarray) or len(labels) != len(rows):
        raise ValueError(f"{path} has no {len(rows)} labels under {field!r}, one for each row of 'data'")
    targets = torch.from_numpy(whole_labels(path, labels, classes))
    # The array is read-only, and tensors must be writable: hence the copy.
    return torch.from_numpy(rows.reshape(-1, 3, 32, 32).copy()), targets


def _cifar_file(path: Path) -> Path:
    archive = "-".join(path.parent.name.split("-")[:2])
    return present(path, f"https://www.cs.toronto.edu/~kriz/{archive}-python.tar.gz", path.parents[1])


def _svhn_part(path: Path) -> tuple[Tensor, Tensor]:
    images, labels = read_mat(path, ("X", "y"))
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != labels.size:
        raise ValueError(
            f"{path} has {images.dtype} of shape {images.shape} and {labels.size} labels, expected uint8 of "
            "shape (height, width, 3, N) and N labels"
        )
    if labels.dtype.kind == "f" and (labels % 1 == 0).all():  # MATLAB's own kind of number
        labels = labels.astype(np.int64)
    targets = torch.from_numpy(whole_labels(path, labels.ravel(), 11)) % 10  # digit 0 has the label 10
    return torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), targets
