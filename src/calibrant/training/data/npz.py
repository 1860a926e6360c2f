"""Images or features in a NumPy archive (``.npz``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant.arguments import one_of
from calibrant.printable import first_few, printable
from calibrant.sizes import MAX_CLASSES
from calibrant.training.data.augmentation import NORMALISATIONS, Normalisation, Published, Standardisation
from calibrant.training.data.in_memory import Augmentation, ImageSplit
from calibrant.training.data.part_checks import warn_about_parts
from calibrant.training.data.preparation import Preparation
from calibrant.training.data.raw_arrays import ArrayPreparation
from calibrant.training.data.raw_images import ImagePreparation
from calibrant.training.data.safe_readers import ARRAYS, Array, present, read_npz, whole_labels
from calibrant.training.data.sampling import draw_parts, part_sizes
from calibrant.training.data.split import DataSets, TensorSplit
from calibrant.warning import warn

Constants = Literal["own", "none", Published]

_PREFIXES = {"train": ("", "train_"), "validation": ("validation_", "val_"), "test": ("test_",)}


def npz(
    root: Path,
    *,
    file: str = "data.npz",
    validation: float = 0.1,
    test: float = 0.2,
    imbalance: float = 1.0,
    augmentation: Augmentation = "none",
    normalisation: Constants = "own",
    split_seed: int = 0,
) -> DataSets:
    """Images or features from a NumPy archive with ``images``, ``inputs`` or ``features``, and ``labels``.

    The archive may have parts of its own: ``validation_images`` and ``validation_labels``, ``test_images``
    and ``test_labels``, or with the other names. A part that it does not have is drawn from the rest,
    stratified by class. ``class_names`` is optional.

    Arrays of uint8 with shape ``(N, H, W)``, ``(N, H, W, C)`` or ``(N, C, H, W)`` are images if C is 1 or 3.
    All other arrays become float32.

    Labels of shape ``(N, L)``, of 0 and 1 or booleans, are L labels of their own. ``class_names`` are then
    theirs, and parts are drawn at random.

    Args:
        root: the data folder.
        file: the archive, relative to ``root``.
        validation: the fraction to draw for validation, if the archive has no validation part.
        test: the fraction to draw for the test, if the archive has no test part. Data for testing only have
            ``validation=0`` and ``test=1``.
        imbalance: the ratio of the first class's training elements to the last one's; see `long_tail`.
        augmentation: the augmentation of training images.
        normalisation: "own" for the mean and standard deviation of the training part (of the whole archive
            if that part is empty); the name of a data set for its constants; "none" for pixels in [0, 1] and
            features as they are.
        split_seed: the seed of the parts and of the long tail.
    """
    one_of("normalisation", normalisation, ("own", "none", *NORMALISATIONS))
    path = root / file
    if not path.exists() and Path(file).exists():
        raise FileNotFoundError(
            f"{path} is missing, but {file} exists: file is relative to the data root {root}"
        )
    parts, names = _read(present(path, "an archive of numpy.savez"))
    inputs, labels = parts["train"]
    sizes = part_sizes(len(labels), parts, validation=validation, test=test)
    drawn = draw_parts(labels, sizes, imbalance=imbalance, num_classes=len(names), seed=split_seed)
    parts |= {name: (inputs[indices], labels[indices]) for name, indices in drawn.items()}
    reference = parts["train"][0] if len(drawn["train"]) else inputs
    splits: dict[str, TensorSplit]
    preparation: Preparation
    if inputs.dtype == torch.uint8:
        constants = _pixel_constants(path, normalisation, reference)
        splits = {name: ImageSplit(*part, constants) for name, part in parts.items()}
        splits["train"] = ImageSplit(*parts["train"], constants, augmentation)
        preparation = ImagePreparation.of(inputs, constants)
    elif augmentation != "none" or normalisation not in ("own", "none"):
        raise ValueError(
            f"{path} has {inputs.ndim - 1}-dimensional numbers, expected images (uint8) for augmentation "
            f"{augmentation!r} with normalisation {normalisation!r}"
        )
    else:
        splits = {name: TensorSplit(*part) for name, part in parts.items()}
        standardisation = Standardisation.of(reference) if normalisation == "own" else None
        if standardisation is not None:
            splits = {name: split.normalised_by(standardisation) for name, split in splits.items()}
        preparation = ArrayPreparation(tuple(inputs.shape[1:]), standardisation)
    about = {"features": inputs.shape[1]} if inputs.ndim == 2 else {}
    if inputs.ndim == 4:
        about = {"channels": inputs.shape[1], "image_size": inputs.shape[-1]}
    train, held_out, tested = (splits[name] for name in ("train", "validation", "test"))
    several = labels.ndim > 1
    data = DataSets(train, held_out, tested, names, about, preparation=preparation, several_labels=several)
    warn_about_parts(path, data)
    return data


def _pixel_constants(path: Path, name: Constants, reference: Tensor) -> Normalisation:
    channels = reference.shape[1]
    if name == "own":
        return Normalisation.of(reference)
    if name == "none":
        return Normalisation((0.0,) * channels, (1.0,) * channels)
    constants = NORMALISATIONS[name]
    if channels != len(constants.mean):
        raise ValueError(f"{path} has images of {channels} channel, expected 3 for {name!r}")
    return constants


Part = tuple[Tensor, Tensor]


def _read(path: Path) -> tuple[dict[str, Part], tuple[str, ...]]:
    """The parts in an archive, and the names of the classes."""
    arrays = read_npz(path)
    found = {name: _read_part(path, arrays, prefixes) for name, prefixes in _PREFIXES.items()}
    parts = {name: part for name, part in found.items() if part is not None}
    if "train" not in parts:
        raise ValueError(
            f"{path} has {', '.join(arrays) or 'nothing'}, expected labels and exactly one of "
            f"{', '.join(ARRAYS)}"
        )
    if parts["train"][0].numel() == 0:
        shape = tuple(parts["train"][0].shape)
        raise ValueError(f"{path} has inputs of shape {shape} to train with, expected at least one number")
    shapes = {name: (part[0].shape[1:], part[0].dtype) for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{path} has parts of different shapes or types: {shapes}")
    for name, (inputs, _) in parts.items():
        if not (inputs.dtype == torch.uint8 or bool(inputs.isfinite().all())):
            raise ValueError(f"{path} has numbers in its {name} part that are too large for float32")
    several = {name: labels.shape[1:] for name, (_, labels) in parts.items()}
    if len(set(several.values())) > 1:
        raise ValueError(f"{path} has parts with labels of different shapes: {several}")
    if several["train"]:
        (number,) = several["train"]
        names = arrays.get("class_names", np.arange(number))
        if names.shape != (number,):
            raise ValueError(
                f"{path} has class_names of shape {names.shape}, expected {number} for its labels"
            )
        return parts, tuple(map(str, names.tolist()))
    largest = max((int(labels.max()) for _, labels in parts.values() if len(labels)), default=0)
    names = arrays.get("class_names", np.array([str(label) for label in range(largest + 1)]))
    if names.ndim != 1 or not largest < len(names) <= MAX_CLASSES:
        raise ValueError(
            f"{path} has class_names of shape {names.shape}, expected {largest + 1} or more names"
        )
    unseen = sorted(set(range(largest + 1)) - set(parts["train"][1].tolist()))
    if unseen and "class_names" not in arrays:
        warn(
            f"{path} has no training element of {len(unseen)} of {largest + 1} classes "
            f"(labels {first_few(unseen)}): labels should count from 0 without gaps, unless "
            "there are class_names"
        )
    return parts, tuple(map(str, names.tolist()))


def _read_part(path: Path, arrays: Mapping[str, Array], prefixes: Sequence[str]) -> Part | None:
    for prefix in prefixes:
        found = [prefix + name for name in ARRAYS if prefix + name in arrays]
        if not found and prefix + "labels" not in arrays:
            continue
        if len(found) != 1 or prefix + "labels" not in arrays:
            raise ValueError(
                f"{path} has {printable(', '.join(arrays))}, expected {prefix}labels and exactly one of "
                f"{', '.join(prefix + name for name in ARRAYS)}"
            )
        inputs, labels = arrays[found[0]], _labels(path, prefix + "labels", arrays[prefix + "labels"])
        empty = 0 in inputs.shape[1:]
        if inputs.ndim < 2 or len(inputs) != len(labels) or inputs.dtype.kind not in "biuf" or empty:
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
        return _as_inputs(inputs), torch.from_numpy(labels)
    return None


def _labels(path: Path, name: str, labels: Array) -> NDArray[np.int64]:
    """Labels ``(N,)`` from 0, or ``(N, L)`` of 0 and 1."""
    if labels.dtype.kind == "b":  # false is class 0, true is class 1
        labels = labels.astype(np.uint8)
    elif labels.dtype.kind == "f" and (np.abs(labels) < 2**53).all() and (labels % 1 == 0).all():
        labels = labels.astype(np.int64)  # whole numbers; whether they are classes is checked below
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 2 or labels.dtype.kind not in "iu":
        return whole_labels(path, labels, MAX_CLASSES, name)
    found = f"{name} of shape {labels.shape}"
    if not labels.shape[1]:
        raise ValueError(f"{path} has {found}, expected at least one label")
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise ValueError(
            f"{path} has {wrong[0]} in {found}, expected 0 or 1 for each of several labels, or (N,) whole "
            "numbers of one class"
        )
    if len(labels) and (labels.sum(1) == 1).all():
        raise ValueError(
            f"{path} has {found} with exactly one 1 in every row: for one class each, save labels.argmax(1)"
        )
    return labels.astype(np.int64)


def _as_inputs(array: Array) -> Tensor:
    """Images as ``(N, C, H, W)``, uint8; all else as float32."""
    if array.dtype == np.uint8 and array.ndim == 3:
        return torch.from_numpy(array[:, None])
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] in (1, 3):
        return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[1] in (1, 3):
        return torch.from_numpy(array)
    with np.errstate(over="ignore"):  # infinite numbers are reported later, with the name of the file
        return torch.from_numpy(array.astype(np.float32))
