"""Data sets that come as arrays: embedded digits, a problem with a known posterior, and any ``.npz`` file."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from calibrant.arguments import in_range, one_of, whole_number
from calibrant.training.data.augmentation import NORMALISATIONS, Normalisation
from calibrant.training.data.in_memory import Augmentation, ImageSplit
from calibrant.training.data.shares import drawn_sizes
from calibrant.training.data.sources import Array, present
from calibrant.training.data.split import DataSets, Split, TensorSplit, long_tail, stratified


def digits(
    root: Path | None = None,
    *,
    imbalance: float = 1.0,
    head: int = 80,
    validation_per_class: int = 40,
    test_per_class: int = 54,
    flat: bool = True,
    split_seed: int = 0,
) -> DataSets:
    """Handwritten digits of 8 × 8 pixels, embedded in scikit-learn; the rarest digit has 174 images.

    Digit k has ``head · imbalance^(−k / 9)`` training images, rounded.

    >>> digits(imbalance=80).class_counts
    (80, 49, 30, 19, 11, 7, 4, 3, 2, 1)

    Args:
        root: not used.
        imbalance: how many times more training images digit 0 has than digit 9.
        head: the training images of digit 0.
        validation_per_class: the validation images of each digit.
        test_per_class: the test images of each digit.
        flat: give 64 features; else images of shape ``(1, 8, 8)``.
        split_seed: of the draw of the parts.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    in_range("imbalance", imbalance, 1)
    whole_number("head", head)
    content = load_digits()
    images = torch.tensor(content.data, dtype=torch.float32) / 16
    labels = torch.tensor(content.target)
    generator = torch.Generator().manual_seed(split_seed)
    train, validation, test = [], [], []
    held_out = test_per_class + validation_per_class
    for digit in range(10):
        indices = (labels == digit).nonzero().flatten()
        indices = indices[torch.randperm(len(indices), generator=generator)]
        size = max(1, round(head * imbalance ** (-digit / 9)))
        if min(test_per_class, validation_per_class) < 0 or held_out + size > len(indices):
            raise ValueError(
                f"digit {digit} has {len(indices)} images, too few for {size} to train, "
                f"{validation_per_class} to validate and {test_per_class} to test with"
            )
        test.append(indices[:test_per_class])
        validation.append(indices[test_per_class:held_out])
        train.append(indices[held_out : held_out + size])
    if not flat:
        images = images.view(-1, 1, 8, 8)
    return _joined(
        {
            name: TensorSplit(images[torch.cat(pieces)], labels[torch.cat(pieces)])
            for name, pieces in (("train", train), ("validation", validation), ("test", test))
        },
        tuple(map(str, range(10))),
        {"features": 64} if flat else {"channels": 1, "image_size": 8},
    )


def synthetic(
    root: Path | None = None,
    *,
    classes: int = 10,
    features: int = 16,
    train_size: int = 2000,
    validation_size: int = 1000,
    test_size: int = 5000,
    separation: float = 3.0,
    imbalance: float = 1.0,
    split_seed: int = 0,
) -> DataSets:
    """A mixture of Gaussians, one per class: the true posterior of every input is known.

    Class k has unit covariance, a random mean of length ``separation``, and a prior in proportion to
    ``imbalance^(−k / (K − 1))``, in all three parts, so that they share one posterior: see
    `synthetic_posterior`.

    >>> data = synthetic(classes=3, test_size=10)
    >>> len(data.test), data.num_classes, data.about
    (10, 3, {'features': 16})

    Args:
        root: not used.
        classes: K.
        features: the number of dimensions.
        train_size: the number of training elements.
        validation_size: the number of validation elements.
        test_size: the number of test elements.
        separation: the distance of the means from the origin, in standard deviations.
        imbalance: how many times more probable the first class is than the last.
        split_seed: of the means and of all draws.
    """
    means, log_prior = _mixture(classes, features, separation, imbalance, split_seed)
    parts = {}
    sizes = {"train": train_size, "validation": validation_size, "test": test_size}
    for number, (name, size) in enumerate(sizes.items(), start=1):
        # A stream for each part: a larger training part leaves the test part as it was.
        generator = torch.Generator().manual_seed(4 * split_seed + number)
        labels = torch.multinomial(
            log_prior.exp(), whole_number(f"{name}_size", size), True, generator=generator
        )
        noise = torch.randn(size, features, generator=generator, dtype=torch.float64)
        parts[name] = TensorSplit((means[labels] + noise).float(), labels)
    names = tuple(f"class {label}" for label in range(classes))
    return _joined(parts, names, {"features": features})


def synthetic_posterior(
    inputs: Tensor,
    *,
    classes: int = 10,
    features: int = 16,
    separation: float = 3.0,
    imbalance: float = 1.0,
    split_seed: int = 0,
) -> Tensor:
    """What the best of all models would say about inputs of `synthetic` with the same options.

    Args:
        inputs: ``(N, features)``.
        classes: as for `synthetic`, like the options below.
        features: as there.
        separation: as there.
        imbalance: as there.
        split_seed: as there.

    Returns:
        ``(N, K)`` exact log-probabilities, float64.

    >>> inputs, _ = synthetic().test.batch(torch.arange(4))
    >>> torch.allclose(synthetic_posterior(inputs).exp().sum(1), torch.ones(4, dtype=torch.float64))
    True
    """
    means, log_prior = _mixture(classes, features, separation, imbalance, split_seed)
    means, log_prior = means.to(inputs.device), log_prior.to(inputs.device)
    # Terms that all classes share cancel in the posterior.
    joint = inputs.double() @ means.T - means.square().sum(1) / 2 + log_prior
    return joint.log_softmax(1)


def _joined(parts: Mapping[str, Split], names: tuple[str, ...], about: Mapping[str, int]) -> DataSets:
    return DataSets(parts["train"], parts["validation"], parts["test"], names, about)


def _mixture(
    classes: int, features: int, separation: float, imbalance: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Means ``(K, features)`` and logarithms of the prior ``(K,)``."""
    whole_number("classes", classes)
    whole_number("features", features)
    in_range("separation", separation)
    in_range("imbalance", imbalance, 1)
    generator = torch.Generator().manual_seed(4 * seed)
    directions = torch.randn(classes, features, generator=generator, dtype=torch.float64)
    weights = -torch.arange(classes, dtype=torch.float64) / max(1, classes - 1) * np.log(imbalance)
    return separation * torch.nn.functional.normalize(directions), weights.log_softmax(0)


_INPUTS = ("images", "inputs", "features")
_PREFIXES = {"train": ("", "train_"), "validation": ("validation_", "val_"), "test": ("test_",)}


def npz(
    root: Path,
    *,
    file: str = "data.npz",
    validation: float = 0.1,
    test: float = 0.2,
    imbalance: float = 1.0,
    augmentation: Augmentation = "none",
    normalisation: Literal["own", "none", "cifar10", "cifar100", "svhn", "tiny-imagenet", "imagenet"] = "own",
    split_seed: int = 0,
) -> DataSets:
    """Any NumPy archive that has ``images``, ``inputs`` or ``features``, and ``labels``.

    ``validation_images`` and ``validation_labels``, ``test_images`` and ``test_labels`` (or with the other
    names) are those parts; a part that is not there is drawn from the rest, stratified by class. Bytes of
    shape ``(N, H, W)``, ``(N, H, W, C)`` or ``(N, C, H, W)`` with 1 or 3 channels are images. All else is
    given as float32. ``class_names`` is optional.

    Args:
        root: the folder of all data.
        file: the archive, relative to it.
        validation: the share to set apart where the file has no validation part.
        test: the same for the test part; 1 with ``validation=0`` for data that are only for testing.
        imbalance: how many times more training elements the first class has than the last; see `long_tail`.
        augmentation: of training images.
        normalisation: "own" for zero mean and unit deviation of each channel, or feature, of the training
            part (of all that is there, where that is empty); the name of a data set for its constants;
            "none" for pixels in [0, 1], and features as they are.
        split_seed: of the draw of the parts and of the long tail.
    """
    one_of("normalisation", normalisation, ("own", "none", *NORMALISATIONS))
    path = root / file
    if not path.exists() and Path(file).exists():
        raise FileNotFoundError(
            f"{path} is missing, but {file} is there: file is relative to the data root {root}"
        )
    given, names = _npz_content(present(path, "such an archive, or make it with numpy.savez,", root, "put"))
    inputs, labels = given["train"]
    drawn = drawn_sizes(len(labels), given, validation=validation, test=test)
    kept, *indices = stratified(labels, (len(labels) - sum(drawn.values()), *drawn.values()), split_seed)
    if len(kept):
        kept = kept[long_tail(labels[kept], imbalance, split_seed, len(names))]
    parts = {
        **given,
        "train": (inputs[kept], labels[kept]),
        **{name: (inputs[part], labels[part]) for name, part in zip(drawn, indices, strict=True)},
    }
    reference = parts["train"][0] if len(kept) else inputs
    about = (
        {"channels": inputs.shape[1], "image_size": inputs.shape[-1]}
        if inputs.ndim == 4
        else {"features": inputs.shape[1]}
        if inputs.ndim == 2
        else {}
    )
    if inputs.dtype == torch.uint8:
        channels = inputs.shape[1]
        constants = (
            Normalisation.of(reference)
            if normalisation == "own"
            else Normalisation((0.0,) * channels, (1.0,) * channels)
            if normalisation == "none"
            else NORMALISATIONS[normalisation]
        )
        if channels != len(constants.mean):
            raise ValueError(f"{path} has images of {channels} channel, expected 3 for {normalisation!r}")
        splits: dict[str, Split] = {
            name: ImageSplit(*part, constants, augmentation if name == "train" else "none")
            for name, part in parts.items()
        }
        return _joined(splits, names, about)
    if augmentation != "none" or normalisation not in ("own", "none"):
        raise ValueError(
            f"{path} has {inputs.ndim - 1}-dimensional numbers, expected images (uint8) for augmentation "
            f"{augmentation!r} with normalisation {normalisation!r}"
        )
    if normalisation == "none":
        return _joined({name: TensorSplit(*part) for name, part in parts.items()}, names, about)
    standardised = Standardisation.of(reference)
    splits = {
        name: TensorSplit(standardised(part), target, standardised) for name, (part, target) in parts.items()
    }
    return _joined(splits, names, about)


@dataclass(frozen=True)
class Standardisation:
    """Numbers of about zero mean and unit deviation along the second axis.

    >>> Standardisation((1.0, 0.0), (2.0, 1.0))(torch.tensor([[5.0, 5.0]]))
    tensor([[2., 5.]])

    Args:
        mean: of each feature or channel.
        std: the standard deviation of each.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        """``(N, C, ...)`` as float32."""
        shape = (-1, *(1,) * (inputs.ndim - 2))
        mean, std = (torch.tensor(each, dtype=torch.float32).view(shape) for each in (self.mean, self.std))
        return (inputs - mean) / std

    @classmethod
    def of(cls, inputs: Tensor) -> Standardisation:
        """The one that gives these inputs zero mean and unit deviation; what is constant keeps its scale."""
        axes = [axis for axis in range(inputs.ndim) if axis != 1]
        std, mean = torch.std_mean(inputs.double(), axes, correction=0)
        return cls(tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist()))


Part = tuple[Tensor, Tensor]


def _npz_content(path: Path) -> tuple[dict[str, Part], tuple[str, ...]]:
    """The parts that an archive has, and the names of the classes."""
    try:
        with path.open("rb") as file:  # NumPy leaves a damaged file open
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it has a single array, expected an archive of several")
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        # NumPy's own message on other files advises to allow pickles.
        why = "it holds something else" if "pickle" in str(error) else str(error)
        raise ValueError(f"{path} cannot be read as a NumPy archive of numbers: {why}") from error
    parts = {}
    for name, prefixes in _PREFIXES.items():
        part = _npz_part(path, arrays, prefixes)
        if part is not None:
            parts[name] = part
    if "train" not in parts:
        raise ValueError(f"{path} has {', '.join(arrays) or 'nothing'}, expected images and labels")
    shapes = {name: (part[0].shape[1:], part[0].dtype) for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{path} has parts of different shapes or types: {shapes}")
    for name, (inputs, _) in parts.items():
        if not (inputs.dtype == torch.uint8 or bool(inputs.isfinite().all())):
            raise ValueError(f"{path} has numbers in its {name} part that are too large for float32")
    largest = max((int(labels.max()) for _, labels in parts.values() if len(labels)), default=0)
    names = arrays.get("class_names", np.array([str(label) for label in range(largest + 1)]))
    if names.ndim != 1 or len(names) <= largest:
        raise ValueError(
            f"{path} has class_names of shape {names.shape}, expected {largest + 1} or more names"
        )
    unseen = sorted(set(range(largest + 1)) - set(parts["train"][1].tolist()))
    if unseen and "class_names" not in arrays:
        some = ", ".join(map(str, unseen[:5])) + (", …" if len(unseen) > 5 else "")
        warnings.warn(
            f"{path} has no training element of {len(unseen)} of {largest + 1} classes (labels {some}): "
            "labels should count from 0 without gaps, unless there are class_names",
            stacklevel=3,
        )
    return parts, tuple(map(str, names.tolist()))


def _npz_part(path: Path, arrays: Mapping[str, Array], prefixes: Sequence[str]) -> Part | None:
    for prefix in prefixes:
        found = [prefix + name for name in _INPUTS if prefix + name in arrays]
        if not found and prefix + "labels" not in arrays:
            continue
        if len(found) != 1 or prefix + "labels" not in arrays:
            raise ValueError(
                f"{path} has {', '.join(arrays)}, expected {prefix}labels and exactly one of "
                f"{', '.join(prefix + name for name in _INPUTS)}"
            )
        inputs, labels = arrays[found[0]], arrays[prefix + "labels"]
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels) and labels.min() < 0:
            raise ValueError(
                f"{path} has the label {labels.min()} in {prefix}labels, expected whole numbers from 0"
            )
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(
                f"{path} has {prefix}labels of type {labels.dtype} and shape {labels.shape}, expected (N,) "
                "whole numbers from 0"
            )
        if inputs.ndim < 2 or len(inputs) != len(labels) or inputs.dtype.kind not in "biuf":
            raise ValueError(
                f"{path} has {found[0]} of type {inputs.dtype} and shape {inputs.shape} for {len(labels)} "
                f"{prefix}labels, expected ({len(labels)}, ...) numbers"
            )
        if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
            raise ValueError(f"{path} has NaN or infinite numbers in {found[0]}, expected finite ones")
        if inputs.ndim == 4 and inputs.shape[3] in (1, 3, 4) and inputs.shape[1] not in (1, 3, 4):
            advice = ""
            if inputs.dtype != np.uint8:
                advice = "pixels as bytes (uint8), or floating-point ones as (N, C, H, W)"
            elif inputs.shape[3] == 4:
                advice = f"1 or 3 channels: leave out the transparency, {found[0]}[..., :3]"
            if advice:
                raise ValueError(
                    f"{path} has {found[0]} of type {inputs.dtype} and shape {inputs.shape}, which look like "
                    f"images with their channels last; expected {advice}"
                )
        return _as_inputs(inputs), torch.from_numpy(labels.astype(np.int64))
    return None


def _as_inputs(array: Array) -> Tensor:
    """Images as ``(N, C, H, W)`` bytes, all else as float32."""
    if array.dtype == np.uint8 and array.ndim == 3:
        return torch.from_numpy(array[:, None])
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] in (1, 3):
        return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[1] in (1, 3):
        return torch.from_numpy(array)
    with np.errstate(over="ignore"):  # what becomes infinite is told of with the file's name
        return torch.from_numpy(array.astype(np.float32))
