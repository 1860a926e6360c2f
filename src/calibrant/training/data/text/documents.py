"""Texts with labels, and their parts for training, validation and test."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.printable import counted
from calibrant.training.data.sampling import draw_parts


@dataclass(frozen=True)
class Documents:
    """Texts and their labels ``(N,)``; ``(N, L)`` of 0 and 1 for several labels."""

    texts: list[str]
    targets: Tensor

    def subset(self, indices: Tensor) -> Documents:
        """The documents with these indices."""
        return Documents([self.texts[index] for index in indices.tolist()], self.targets[indices])


def sorted_classes(labels: Iterable[Any], source: Path) -> list[str | int]:
    """The distinct labels, of which there must be two or more: integers by value, then strings by name."""
    distinct = dict.fromkeys(labels)
    for label in distinct:
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise ValueError(f"{source} has the label {label!r}: expected strings or integers")
    if len(distinct) < 2:
        raise ValueError(
            f"{source} has labels of {counted(len(distinct), 'class', 'classes')}: expected at least 2"
        )
    return sorted(distinct, key=lambda label: (isinstance(label, str), label))


def class_positions(
    labels: Sequence[Hashable], classes: Sequence[Hashable], place: Callable[[int], str], training: str
) -> Tensor:
    """The positions ``(N,)`` of labels in ``classes``; the other arguments are for the error message.

    ``place`` says where the label with an index is, and ``training`` is the file of the classes.
    """
    positions = {value: position for position, value in enumerate(classes)}
    for index, label in enumerate(labels):
        if label not in positions:
            raise ValueError(f"{place(index)}: label {label!r}, expected one of the labels of {training}")
    return torch.tensor([positions[label] for label in labels], dtype=torch.long, device="cpu")


_ANSWERS = {"0": 0, "1": 1, "false": 0, "true": 1}


def check_several(names: Sequence[str]) -> None:
    """Raise an error unless these are the names of several labels."""
    if len(set(names)) < max(2, len(names)):
        raise ValueError(
            f"the target is a list of {', '.join(map(repr, names)) or 'nothing'}: expected two or more "
            "different columns, or the name of one"
        )


def yes_or_no(cell: Any, place: Callable[[], str], column: str) -> int:
    """The label in a cell, 0 or 1; an error if it holds something else. ``place`` says where it is.

    >>> yes_or_no("1", lambda: "row 1", "cat"), yes_or_no(False, lambda: "row 1", "cat")
    (1, 0)
    """
    answer = _ANSWERS.get(str(cell).strip().lower())
    if answer is None:
        found = f"has {cell!r}" if cell not in ("", None) else "has nothing"
        raise ValueError(
            f"{place()}: column {column!r} {found}, expected 0 or 1, because several target columns are named"
        )
    return answer


def label_positions(
    labels: Sequence[Sequence[Hashable]],
    classes: Sequence[Hashable],
    place: Callable[[int], str],
    training: str,
) -> Tensor:
    """Lists of labels as ``(N, L)`` of 0 and 1; the arguments are those of `class_positions`."""
    found = torch.zeros(len(labels), len(classes), dtype=torch.long, device="cpu")
    rows = [row for row, some in enumerate(labels) for _ in some]
    joined = [label for some in labels for label in some]
    found[rows, class_positions(joined, classes, lambda index: place(rows[index]), training)] = 1
    return found


def draw_missing(
    given: Mapping[str, Documents], seed: int, *, validation: float, test: float
) -> list[Documents]:
    """The three parts; those for validation and test are drawn from ``train`` if they are not given."""
    whole, sizes = given["train"], {}
    for name, fraction in (("validation", validation), ("test", test)):
        in_range(name, fraction, 0, 1, open_low=True)
        if name not in given:
            sizes[name] = max(1, round(fraction * len(whole.texts)))
    if sum(sizes.values()) >= len(whole.texts):
        raise ValueError(
            f"cannot draw {' and '.join(map(str, sizes.values()))} of {len(whole.texts)} documents: none "
            "would be left to train on; expected fractions validation and test that add up to less than 1, "
            "or more documents"
        )
    drawn = draw_parts(whole.targets, sizes, seed=seed)
    parts = {**given, **{name: whole.subset(indices) for name, indices in drawn.items()}}
    return [parts[name] for name in ("train", "validation", "test")]
