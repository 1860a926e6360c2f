"""Warnings about the parts of a data set: classes that a part lacks, elements that are in two parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from calibrant.printable import first_few
from calibrant.training.data.split import DataSets, Split, TensorSplit, tensors_of
from calibrant.warning import warn

_MANY_COPIES, _FEWEST_COPIES = 0.2, 10
"""The fraction and number of different elements of a part that must be in another part for a warning."""

_MORE_THAN_CHANCE = 10
"""How many times as many there must be as by chance: some tables have few different rows."""


def warn_about_parts(path: Path, data: DataSets) -> None:
    """Warn of classes that differ only in case or that a part lacks, and of elements in two parts."""
    _warn_of_similar_names(path, data)
    _warn_of_missing_classes(path, data)
    _warn_of_copies(path, data)


def _warn_of_similar_names(path: Path, data: DataSets) -> None:
    spellings: dict[str, list[str]] = {}
    for name in data.class_names:
        spellings.setdefault(" ".join(name.casefold().split()), []).append(name)
    # Single letters are characters to recognise, and differ.
    several = (names for key, names in spellings.items() if len(key) > 1 and len(names) > 1)
    similar = [" and ".join(map(repr, names)) for names in several]
    if similar:
        what = "labels" if data.several_labels else "classes"
        warn(f"{path} has {what} that differ only in case or spaces: {first_few(similar)}")


def _warn_of_missing_classes(path: Path, data: DataSets) -> None:
    """Warn of classes that a part has no element of, and of labels that have only one answer in a part.

    Classes without any element in the data are left out.
    """
    names = data.class_names
    targets = [part.targets for part in data.parts if part.targets is not None]
    if len(targets) < len(data.parts) or any(each.ndim > 1 for each in targets) != data.several_labels:
        return  # maps of labels, or none
    # A label needs elements with it and elements without it.
    counts = [
        torch.minimum(each.sum(0), (1 - each).sum(0))
        if data.several_labels
        else torch.bincount(each, minlength=len(names))
        for each in targets
    ]
    total = torch.stack(counts).sum(0).tolist()
    for part, elements, found in zip(("training", "validation", "test"), targets, counts, strict=True):
        missing = (found == 0).nonzero().flatten().tolist() if len(elements) else []
        rare = [f"{names[label]!r} with {total[label]} in all" for label in missing if total[label]]
        if data.several_labels and missing:
            warn(
                f"{path}: {len(missing)} of {len(names)} labels are always 0 or always 1 in the {part} part "
                f"({first_few(repr(names[label]) for label in missing)}); expected at least a few elements "
                "with each label, and a few without"
            )
        elif rare:
            warn(
                f"{path} has no {part} element of {len(rare)} of {len(names)} classes ({first_few(rare)}): "
                "expected at least a few of each class"
            )


def _warn_of_copies(path: Path, data: DataSets) -> None:
    """Warn if many different elements are in two parts. Images on disk are not compared."""
    parts = dict(zip(("training", "validation", "test"), data.parts, strict=True))
    rows = {name: _hashes(part) for name, part in parts.items()}

    def warned(name: str, other: str) -> bool:
        known = {row: index for index, row in enumerate(rows[other])}
        equal = [row for row in rows[name] if row in known]
        different, total = len(set(equal)), len(rows[name])
        if different < max(_FEWEST_COPIES, _MANY_COPIES * total):
            return False
        if _is_chance(parts[other], list(known.values()), different / total):
            return False
        warn(
            f"{path}: {len(equal):,} of {total:,} {name} elements equal a {other} element in all inputs and "
            "the label; if they are copies, the figures flatter the model: remove them, or put all copies of "
            "an element into the same part"
        )
        return True

    warned("validation", "training")
    if not warned("test", "training"):
        warned("test", "validation")


def _hashes(part: Split) -> list[int]:
    """A hash of each element with its label; none for images on disk."""
    if not isinstance(part, TensorSplit) or not len(part):
        return []
    contents = []
    for tensor in part.content():
        rows = tensor.cpu().reshape(len(part), -1).contiguous().view(torch.uint8)
        content, width = rows.numpy().tobytes(), rows.shape[1]
        # Without the zeros at the end: texts may be filled up to different lengths.
        contents.append([content[at : at + width].rstrip(b"\0") for at in range(0, len(content), width)])
    return [hash(row) for row in zip(*contents, strict=True)]


def _is_chance(part: Split, distinct: Sequence[int], share: float) -> bool:
    """Whether so large a share of equal elements could be chance, if columns were independent.

    Columns with two values count half, because both columns of a category with two values say the same.
    """
    assert isinstance(part, TensorSplit)
    some = distinct[:1_000]
    equal = float(len(distinct))  # expected for one element
    for tensor in tensors_of(part.inputs):
        for column in tensor[some].reshape(len(some), -1).T:
            counts = column.unique(return_counts=True)[1].double()
            pairs = (counts * (counts - 1)).sum().item() / max(1, len(some) * (len(some) - 1))
            equal *= math.sqrt(pairs) if len(counts) == 2 else pairs
            if share > _MORE_THAN_CHANCE * equal:
                return False
    return True
