"""Tables of numbers and categories with a target column, in CSV, TSV and Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from calibrant.arguments import nearest
from calibrant.printable import first_few
from calibrant.sizes import MAX_CLASSES, check_memory
from calibrant.training.data.columns import (
    FileColumns,
    as_numbers,
    as_texts,
    counts_rows,
    is_missing,
    is_numeric,
    place_of,
    read_columns,
    repeats,
)
from calibrant.training.data.part_checks import warn_about_parts
from calibrant.training.data.raw_rows import Rows, how_to_drop
from calibrant.training.data.sampling import draw_parts, part_sizes
from calibrant.training.data.split import DataSets, TensorSplit
from calibrant.training.data.text.documents import check_several, class_positions, sorted_classes, yes_or_no
from calibrant.warning import warn

_MANY_NUMBERS = 30
"""More different whole numbers than this may be a quantity, unless they count classes from 0 or 1."""


def table(
    root: Path,
    *,
    file: str,
    target: str | tuple[str, ...],
    validation_file: str = "",
    test_file: str = "",
    categorical: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    validation: float = 0.1,
    test: float = 0.2,
    imbalance: float = 1.0,
    split_seed: int = 0,
) -> DataSets:
    """A table of numbers and categories, one column of which is the class, or several of which are labels.

    A column of numbers is standardised to zero mean and unit standard deviation. Missing values become the
    mean. If the training part has some, a further input is 1 for them. Every other column is categorical: it
    becomes one input of 0 or 1 for each category, and a missing value is a category of its own. Means,
    standard deviations and categories are those of the training part. An unknown category has all inputs 0.

    Empty cells, ``NA``, ``N/A``, ``NaN``, ``None``, ``null`` and ``?`` are missing values, in upper or lower
    case. The classes are the different values of the target column in ``file``: sorted by value if they are
    whole numbers, else by name.

    Args:
        root: the data folder.
        file: the training data, relative to ``root``: ``.csv`` or ``.tsv`` in UTF-8 with column names in the
            first line, or ``.parquet``.
        target: the column of the class; or a list of columns, each a label of its own with 0 for no and 1
            for yes (or false and true).
        validation_file: the validation data; by default drawn from ``file``.
        test_file: the test data; by default drawn from ``file``.
        categorical: columns of numbers that are categories.
        drop: columns to leave out, such as the number of a row.
        validation: the fraction of ``file`` to draw for validation, if there is no file for it.
        test: the fraction of ``file`` to draw for the test, if there is no file for it.
        imbalance: the ratio of the first class's training rows to the last one's; see `long_tail`.
        split_seed: the seed of the parts, which are stratified by class, and of the long tail. With several
            labels the parts are random.
    """
    path = root / file
    columns = read_columns(path)
    wanted = (target,) if isinstance(target, str) else target
    for name in (*wanted, *categorical, *drop):
        if name not in columns:
            listed = ", ".join(map(repr, columns))
            raise ValueError(
                f"{path} has no column {name!r}{nearest(name, columns)}; its columns are {listed}"
            )
    for name in wanted:
        if name in (*categorical, *drop):
            raise ValueError(f"{name!r} is the target: expected other columns in categorical and drop")
    names, read = _target(columns, target, file)
    targets = read(columns)
    given = {
        part: read_columns(root / name)
        for part, name in (("validation", validation_file), ("test", test_file))
        if name
    }
    sizes = part_sizes(len(targets), given, validation=validation, test=test)
    drawn = draw_parts(targets, sizes, imbalance=imbalance, num_classes=len(names), seed=split_seed)
    reference = drawn["train"] if len(drawn["train"]) else torch.arange(len(targets), device="cpu")
    used = {name: cells for name, cells in columns.items() if name not in (*wanted, *drop)}
    _warn_of_counted(path, [name for name, cells in used.items() if counts_rows(cells)], drop)
    rows = Rows.fit(FileColumns(path, used), reference, categorical, ignored=(*wanted, *drop), target=wanted)
    check_memory(4 * rows.features * len(targets), f"the prepared table {path}")
    whole = TensorSplit(rows.prepared(columns), targets)
    splits = {part: whole.subset(indices) for part, indices in drawn.items()}
    for part, other in given.items():
        for name in wanted:
            if name not in other:
                raise ValueError(f"{other.path} has no column {name!r}: expected the target of {file}")
        splits[part] = TensorSplit(rows.prepared(other), read(other))
    train, held_out, tested = (splits[name] for name in ("train", "validation", "test"))
    about, several = {"features": rows.features}, targets.ndim > 1
    data = DataSets(train, held_out, tested, names, about, preparation=rows, several_labels=several)
    warn_about_parts(path, data)
    return data


def _target(
    columns: FileColumns, target: str | tuple[str, ...], file: str
) -> tuple[tuple[str, ...], Callable[[FileColumns], Tensor]]:
    """The names of the classes or labels, and a function that reads the targets of a file."""
    if not isinstance(target, str):
        check_several(target)
        return target, lambda table: _decisions(table, target)
    labels = _labels(columns, target)
    words = _spellings(labels)
    labels = [words.get(str(label).lower(), label) for label in labels]
    classes = sorted_classes(labels, columns.path)
    if len(classes) > MAX_CLASSES or not repeats(len(classes), len(labels)):
        raise ValueError(
            f"{columns.path}: column {target!r} has {len(classes)} different values in {len(labels)} rows, "
            "expected classes that repeat"
        )

    counted = any(classes == list(range(first, first + len(classes))) for first in (0, 1))
    if len(classes) > _MANY_NUMBERS and isinstance(classes[0], int) and not counted:
        warn(
            f"{columns.path}: column {target!r} has {len(classes)} different whole numbers in {len(labels)} "
            "rows, each of which becomes a class: if it is a quantity, divide it into ranges first"
        )

    def read(table: FileColumns) -> Tensor:
        found = labels
        if table is not columns:
            found = [words.get(str(label).lower(), label) for label in _labels(table, target)]
        return class_positions(found, classes, partial(place_of, table), file)

    return tuple(map(str, classes)), read


def _decisions(columns: FileColumns, names: Sequence[str]) -> Tensor:
    """The labels ``(N, L)`` in these columns."""
    found = [
        [yes_or_no(text, partial(place_of, columns, row), name) for row, text in enumerate(as_texts(cells))]
        for name, cells in ((name, columns[name]) for name in names)
    ]
    return torch.tensor(found, dtype=torch.long, device="cpu").T.contiguous()


def _warn_of_counted(path: Path, names: Sequence[str], dropped: Sequence[str]) -> None:
    """Tell of inputs that count the rows: a file that is sorted by class gives the class away by them."""
    if names:
        several = len(names) > 1
        warn(
            f"{path}: column{'s' * several} {first_few(map(repr, names), 20)} count{'s' * (not several)} the "
            f"rows and {'are inputs' if several else 'is an input'}: where the rows are sorted, this tells "
            f"the class; {how_to_drop(names, dropped)}"
        )


def _spellings(labels: Sequence[str | int]) -> dict[str, str]:
    """How true and false are written, if these are the classes: in files they may have any case.

    >>> _spellings(["TRUE", "false", "true"]), _spellings(["true", "false"]), _spellings(["True", "maybe"])
    ({'true': 'True', 'false': 'False'}, {'true': 'true', 'false': 'false'}, {})
    """
    distinct = {str(label) for label in labels}
    if {label.lower() for label in distinct} != {"true", "false"}:
        return {}
    if len(distinct) > 2:
        return {"true": "True", "false": "False"}
    return {label.lower(): label for label in sorted(distinct, reverse=True)}


def _labels(columns: FileColumns, target: str) -> list[str | int]:
    """The cells of the target column: whole numbers if all are, else texts."""
    values = columns[target]
    for row, value in enumerate(values):
        # A class may be called none, so fewer texts stand for a missing value here.
        if (value.strip().lower() in ("", "nan")) if isinstance(value, str) else is_missing(value):
            raise ValueError(
                f"{place_of(columns, row)}: column {target!r} has nothing, expected a class; leave out rows "
                "without one"
            )
    numbers = as_numbers(values) if is_numeric(values) else None
    if numbers is None or np.isnan(numbers).any():
        return [str(value).strip() for value in values]
    fractions = ~np.isfinite(numbers) | (numbers % 1 != 0)
    if fractions.any():
        row = int(fractions.argmax())
        raise ValueError(
            f"{place_of(columns, row)}: column {target!r} has {values[row]}, expected a class: a text or a "
            "whole number"
        )
    return [int(number) for number in numbers.tolist()]
