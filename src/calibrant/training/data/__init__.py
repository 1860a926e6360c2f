"""Data sets by name, read from the files that their authors publish.

To add a data set, write a function of the data folder and of keyword-only options that returns `DataSets`,
and add one line to `DATA_SETS`. Recipes, the command line and the checks of options follow from that.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from calibrant.arguments import unknown
from calibrant.options import Choice, RecipeError, check_options, options_of
from calibrant.training.data import built_in, in_memory, npz, on_disk, segmentation, table, text
from calibrant.training.data.built_in import synthetic_posterior
from calibrant.training.data.preparation import Preparation
from calibrant.training.data.raw_arrays import ArrayPreparation
from calibrant.training.data.raw_images import CentreCropPreparation, ImagePreparation
from calibrant.training.data.raw_rows import Rows
from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.sampling import random_numbers, shuffled
from calibrant.training.data.skew import skewed
from calibrant.training.data.split import DataSets, Inputs, Split, TensorSplit, map_inputs, tensors_of

__all__ = [
    "DATA_SETS",
    "PREPARATIONS",
    "DataSets",
    "Inputs",
    "MissingDataError",
    "Preparation",
    "Split",
    "TensorSplit",
    "files_of",
    "load_data",
    "load_data_once",
    "map_inputs",
    "random_numbers",
    "shuffled",
    "skewed",
    "synthetic_posterior",
    "tensors_of",
]

DATA_SETS: dict[str, Callable[..., DataSets]] = {
    "digits": built_in.digits,
    "synthetic": built_in.synthetic,
    "npz": npz.npz,
    "cifar10": in_memory.cifar10,
    "cifar100": in_memory.cifar100,
    "cifar10-c": in_memory.cifar10_c,
    "cifar100-c": in_memory.cifar100_c,
    "svhn": in_memory.svhn,
    "tiny-imagenet": on_disk.tiny_imagenet,
    "imagenet": on_disk.imagenet,
    "imagenet-lt": on_disk.imagenet_lt,
    "image-folder": on_disk.image_folder,
    "voc2012": segmentation.voc2012,
    "camvid": segmentation.camvid,
    "newsgroups": text.newsgroups,
    "table": table.table,
    "text-table": text.text_table,
    "huggingface": text.huggingface,
}
"""Every data set: a function of the data folder, whose keyword-only arguments are the options in recipes."""

_KINDS: tuple[type[Preparation], ...] = (
    *(ArrayPreparation, ImagePreparation, CentreCropPreparation, segmentation.PaddedPreparation),
    *(Rows, text.WordPreparation, text.TokenPreparation),
)
PREPARATIONS: dict[str, type[Preparation]] = {kind.kind: kind for kind in _KINDS}
"""Every preparation by its kind."""


def load_data(choice: Choice, root: str | os.PathLike[str] | None = None) -> DataSets:
    """Load a data set by name.

    Args:
        choice: a name in `DATA_SETS`, with options of its function, and those of `skewed`.
        root: the data folder, with the downloaded files; by default the environment variable
            ``CALIBRANT_DATA``, or else ``data``.

    Raises:
        RecipeError: the name or an option is unknown.
        MissingDataError: a file is missing; the message says what to download and where to put it.
        ValueError: a file is damaged, or the options do not fit the data.
        ImportError: a package that reads the data is not installed.

    >>> load_data(Choice("digits", {"imbalance": 80, "head": 80})).class_counts[::9]
    (80, 1)
    """
    if choice.name not in DATA_SETS:
        raise RecipeError(unknown("data", choice.name, DATA_SETS))
    function = DATA_SETS[choice.name]
    options = check_options(f"data {choice.name!r}", choice.options, function, skewed)
    skew = {name: options.pop(name) for name in options_of(skewed) if name in options}
    return skewed(function(_folder(root), **options), options.get("split_seed", 0), **skew)


@lru_cache(maxsize=1)
def load_data_once(choice: str, root: str | os.PathLike[str] | None = None) -> DataSets:
    """`load_data` of a choice in writing. The data are kept for runs on the same data that follow."""
    return load_data(Choice.parse(choice), root)


def files_of(choice: Choice, root: str | os.PathLike[str] | None = None) -> list[Path]:
    """The existing files that the options of a data set name, such as ``file`` of ``npz``."""
    parameters = inspect.signature(DATA_SETS[choice.name]).parameters if choice.name in DATA_SETS else {}
    values = {**{name: each.default for name, each in parameters.items()}, **choice.options}
    paths = [_folder(root) / value for value in values.values() if isinstance(value, str) and value]
    return [path for path in paths if path.is_file()]


def _folder(root: str | os.PathLike[str] | None) -> Path:
    return Path(root if root is not None else os.environ.get("CALIBRANT_DATA", "data"))
