"""Data sets by name, each read from the files that its publishers distribute."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from calibrant.arguments import nearest
from calibrant.options import Choice, RecipeError, check_options
from calibrant.training.data.arrays import digits, npz, synthetic, synthetic_posterior
from calibrant.training.data.in_memory import cifar10, cifar10_c, cifar100, svhn
from calibrant.training.data.on_disk import image_folder, imagenet, imagenet_lt, tiny_imagenet
from calibrant.training.data.segmentation import camvid, voc2012
from calibrant.training.data.sources import MissingDataError
from calibrant.training.data.split import DataSets, Inputs, Split, TensorSplit, random_numbers, shuffled
from calibrant.training.data.text import huggingface, newsgroups, text_table

__all__ = [
    "DATA_SETS",
    "DataSets",
    "Inputs",
    "MissingDataError",
    "Split",
    "TensorSplit",
    "load_data",
    "random_numbers",
    "shuffled",
    "synthetic_posterior",
]

DATA_SETS: dict[str, Callable[..., DataSets]] = {
    "digits": digits,
    "synthetic": synthetic,
    "npz": npz,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar10-c": cifar10_c,
    "svhn": svhn,
    "tiny-imagenet": tiny_imagenet,
    "imagenet": imagenet,
    "imagenet-lt": imagenet_lt,
    "image-folder": image_folder,
    "voc2012": voc2012,
    "camvid": camvid,
    "newsgroups": newsgroups,
    "text-table": text_table,
    "huggingface": huggingface,
}
"""Every data set: functions of the folder with its files and of options."""


def load_data(choice: Choice, root: str | os.PathLike[str] | None = None) -> DataSets:
    """The data set of that name and with those options.

    Args:
        choice: one of `DATA_SETS`.
        root: the folder with the files that were downloaded; by default the one that the environment
            variable ``CALIBRANT_DATA`` names, or else ``data``.

    Raises:
        RecipeError: an unknown name or option.
        MissingDataError: a file is not there; the message says what to download and where to put it.
        ValueError: a file is damaged, or the options ask for more than there is.

    >>> load_data(Choice("digits", {"imbalance": 80, "head": 80})).class_counts[::9]
    (80, 1)
    """
    if choice.name not in DATA_SETS:
        known = ", ".join(DATA_SETS)
        raise RecipeError(f"unknown data {choice.name!r}{nearest(choice.name, DATA_SETS)}; known: {known}")
    function = DATA_SETS[choice.name]
    folder = Path(root if root is not None else os.environ.get("CALIBRANT_DATA", "data"))
    return function(folder, **check_options(f"data {choice.name!r}", choice.options, function))
