"""The choice of a recipe for data of one's own, by what a file or folder holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrant.arguments import nearest
from calibrant.options import Choice, RecipeError
from calibrant.training.data import columns, load_data
from calibrant.training.data.columns import Columns, as_numbers, is_numeric, read_columns
from calibrant.training.data.on_disk import SUFFIXES as IMAGES
from calibrant.training.data.on_disk import ImageFileSplit
from calibrant.training.data.safe_readers import read_image
from calibrant.training.data.table import too_many_categories
from calibrant.training.data.text.tables import json_lines
from calibrant.training.recipe import Recipe

LOSS = "ce"
"""The loss of the recipes that are chosen here."""

TARGETS = ("label", "target", "class")
"""Names of columns, in lower case, that are taken for the target if none is named."""

_PARTS = {"validation": 0.2, "test": 0.2}
"""Fractions of the data. Validation data also serve adaptive losses and calibrators, which need many."""

_LENGTHS = ((1_000, 32, 100), (10_000, 64, 50), (50_000, 128, 30), (inf, 256, 20))
"""Batch size and epochs for up to so many training elements."""

_TABLES = (*columns.SUFFIXES, ".jsonl")


def choose_recipe(path: Path, target: str | None = None) -> Recipe:
    """A recipe for the data in a file or folder; its description says what was found and chosen.

    | found | data set | network |
    | --- | --- | --- |
    | folders of images | `image-folder` | `cifar-resnet-32` |
    | a table of numbers and categories | `table` | `mlp` |
    | a table with one column of texts besides the target | `text-table` | `text-cnn` |
    | an ``.npz`` with images or features | `npz` | `cifar-resnet-32`, `cnn` or `mlp` |

    A folder with ``train.csv`` (or another table), and perhaps ``validation.csv`` and ``test.csv``, is a table
    in parts. The recipe holds the absolute path of the data, so that it can be followed in any folder.

    Args:
        path: a folder of images, a ``.csv``, ``.tsv``, ``.parquet``, ``.jsonl`` or ``.npz`` file, or a folder
            of tables.
        target: the column of the class in a table; by default one of `TARGETS`.

    Raises:
        RecipeError: the data are of no known kind, or the target is not known.
        FileNotFoundError: there is no such file or folder.
        ValueError: a file is malformed.
    """
    path = path.absolute()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    files = _files(path)
    suffix = files["file"].suffix.lower() if files else ""
    if suffix in _TABLES:
        return _table(files, target)
    if target is not None:
        raise RecipeError(f"--target names a column of a table, and {path} is none")
    if suffix == ".npz":
        return _arrays(path)
    if path.is_dir():
        return _images(path)
    raise RecipeError(
        f"{path} is of no known kind: expected a folder with a folder of images for each class, a "
        f"{', '.join(_TABLES)} table, or an .npz file"
    )


def _files(path: Path) -> dict[str, Path]:
    """The file by the name of its option in data sets; of a folder, its tables for each part."""
    if path.is_file():
        return {"file": path}
    options = {"file": ("train",), "validation_file": ("validation", "val"), "test_file": ("test",)}
    found = {
        option: path / f"{name}{suffix}"
        for option, names in options.items()
        for name in names
        for suffix in _TABLES
        if (path / f"{name}{suffix}").is_file()
    }
    return found if "file" in found else {}


def _recipe(path: Path, found: str, size: int, data: Choice, model: Choice, **settings: Any) -> Recipe:
    batch_size, epochs = next((batch, epochs) for most, batch, epochs in _LENGTHS if size <= most)
    lengths = {"batch_size": batch_size, "epochs": epochs}
    return Recipe(
        name=path.stem if path.is_file() else path.name,
        description=f"{found}: data {data.name}, network {model.name}",
        loss=LOSS,
        data=data,
        model=model,
        drop_last=False,
        select="nll",
        **{**lengths, **settings},
    )
