"""Open a file of predictions in any format.

A file declares its content by names; nothing is guessed from values. Files of arrays have ``logits`` or
``probabilities`` of shape ``(N, K, *S)``, ``labels`` of shape ``(N, *S)`` and, optionally, ``class_names``.
Tables have a column ``label`` and columns ``logit_<class>`` or ``probability_<class>``.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

from calibrant.arguments import label
from calibrant.predictions.arrays import open_npy, open_npz, open_pt, open_safetensors
from calibrant.predictions.file import BadFileError, PredictionFile, file_errors
from calibrant.predictions.tables import open_csv, open_parquet
from calibrant.sizes import MAX_CLASSES, MAX_TEXT

FORMATS: dict[str, Callable[[Path], PredictionFile]] = {
    ".npz": open_npz,
    ".npy": open_npy,
    ".pt": open_pt,
    ".safetensors": open_safetensors,
    ".csv": open_csv,
    ".parquet": open_parquet,
}
"""For each suffix the function that opens such a file."""


def open_predictions(path: Path | str, *, ignore_index: int = -100) -> PredictionFile:
    """Open a file of predictions: read and check its description.

    Args:
        path: the file to read; its suffix is a key of `FORMATS`. For a pair ``NAME.logits.npy`` and
            ``NAME.labels.npy``, either of the two.
        ignore_index: the label of elements to leave out.

    Raises:
        BadFileError: the file does not exist, is damaged, or lacks something.
        ValueError: ``ignore_index`` is not an integer of 64 bits.

    >>> import tempfile
    >>> import numpy as np
    >>> path = Path(tempfile.mkdtemp(), "model.npz")
    >>> np.savez(path, logits=np.zeros((5, 3), np.float32), labels=np.arange(5) % 3)
    >>> file = open_predictions(path)
    >>> file.name, file.kind, file.rows, file.num_classes
    ('model', 'logits', 5, 3)
    >>> [tuple(logits.shape) for logits, labels in file.batches(chunk=6)]
    [(2, 3), (2, 3), (1, 3)]
    """
    path = Path(path)
    open_format = FORMATS.get(path.suffix.lower())
    if open_format is None:
        raise BadFileError(path, f"has an unknown suffix; expected one of {', '.join(FORMATS)}")
    label("ignore_index", ignore_index)
    with file_errors(path):
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind):
            raise BadFileError(path, f"is a {'folder' if stat.S_ISDIR(kind) else 'device'}; expected a file")
        file = replace(open_format(path), ignore_index=ignore_index)
    path, classes, names = file.path, file.num_classes, file.class_names
    if classes > MAX_CLASSES:
        raise BadFileError(path, f"{file.kind} have {classes:,} classes; expected at most {MAX_CLASSES:,}")
    if classes < 2:
        raise BadFileError(path, f"{file.kind} have {classes} class on axis 1; expected at least 2")
    if not prod(file.shape):
        raise BadFileError(path, f"holds no predictions: {file.kind} have shape {file.shape}")
    if names is not None and len(names) != classes:
        raise BadFileError(path, f"has {len(names)} class_names; expected one for each of {classes} classes")
    if names is not None and len(set(names)) != classes:
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadFileError(path, f"has the class name {repeated!r} twice; expected different names")
    return file


def read_class_counts(path: Path | str) -> list[int]:
    """Read the number of training samples of each class: a JSON list, or text with one number per line."""
    path = Path(path)
    with file_errors(path):
        if path.stat().st_size > MAX_TEXT:
            raise BadFileError(path, f"is larger than {MAX_TEXT >> 20} MiB; expected a number for each class")
        text = path.read_text(encoding="utf-8-sig")
    try:
        counts = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
    except (ValueError, RecursionError):
        counts = None
    if not counts or not all(type(count) is int and 0 <= count < 2**53 for count in counts):
        raise BadFileError(
            path, "does not hold class counts; expected a JSON list or lines of numbers from 0 up"
        )
    return list(counts)
