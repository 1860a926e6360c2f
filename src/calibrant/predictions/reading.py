"""Open a file of predictions in any format, or a folder of such files.

A file declares its content by names; nothing is guessed from values. Files of arrays have ``logits`` or
``probabilities`` of shape ``(N, K, *S)``, ``labels`` of shape ``(N, *S)`` and, optionally, ``class_names``.
Where ``binary`` says so, each score is a yes-or-no decision of its own: scores and labels have the shape
``(N,)``, or ``(N, L, *S)`` for L labels.
Tables have a column ``label`` and columns ``logit_<class>`` or ``probability_<class>``, or a column of lists
named ``logits`` or ``probabilities``.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch

from calibrant.arguments import label
from calibrant.layout import look_one_hot
from calibrant.predictions.arrays import open_npy, open_npz, open_pt, open_safetensors
from calibrant.predictions.file import CHUNK, BadFileError, Batches, PredictionFile, file_errors
from calibrant.predictions.tables import open_csv, open_jsonl, open_parquet
from calibrant.sizes import MAX_AXES, MAX_CLASSES, MAX_TEXT

_SINGLE = (
    "if each score is a yes-or-no decision of its own, pass --binary to evaluate or calibrate; elsewhere two "
    "scores are needed: (0, logit) or (1 - p, p)"
)

FORMATS: dict[str, Callable[[Path], PredictionFile]] = {
    ".npz": open_npz,
    ".npy": open_npy,
    ".pt": open_pt,
    ".safetensors": open_safetensors,
    ".csv": open_csv,
    ".parquet": open_parquet,
    ".jsonl": open_jsonl,
}
"""For each suffix the function that opens such a file."""


def open_predictions(
    path: Path | str, *, ignore_index: int = -100, binary: bool = False, labelled: bool = True
) -> PredictionFile:
    """Open a file of predictions, or a folder of them: read and check the descriptions.

    The files of a folder are one set of data. They have the same suffix, the same classes and the same kind
    of scores. They are read in the order of their names, where numbers count as numbers. Files without rows,
    files with other suffixes, and names that begin with a dot or an underscore are left out.

    Args:
        path: the file to read; its suffix is a key of `FORMATS`. For a pair ``NAME.logits.npy`` and
            ``NAME.labels.npy``, either of the two. Or a folder of such files.
        ignore_index: the label of elements to leave out.
        binary: whether each score is a yes-or-no decision of its own.
        labelled: whether a file without labels is refused; see `PredictionFile.no_labels`.

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
    file = _opened(Path(path), ignore_index, binary, labelled)
    words = sorted({word for part in file.parts for word in part.words})
    yes = file.class_names[1] if file.class_names else ""
    if words and yes.lower() not in words:  # then another word may have been meant by it
        raise BadFileError(
            file.path,
            f"has no label {yes!r}, the word in the name of its scores, which may be misspelt; if no element "
            f"is {yes}, write the labels as 0 and 1",
        )
    if len(words) > 2:
        listed = ", ".join(words)
        raise BadFileError(file.path, f"has the labels {listed}; expected {yes} and one other in all files")
    return file


def _opened(path: Path, ignore_index: int, binary: bool, labelled: bool = True) -> PredictionFile:
    label("ignore_index", ignore_index)
    with file_errors(path):
        if path.is_dir():
            return _open_folder(path, ignore_index, binary, labelled)
    return _checked(_open_file(path, ignore_index, binary, labelled))


def batches_of(path: Path | str, ignore_index: int = -100, binary: bool = False) -> Batches:
    """The batches of a file or folder, which is opened when the first one is asked for.

    The file may be part of a larger set: it may lack the word for yes, and all its elements may be ignored.

    Args:
        path: the file or folder; see `open_predictions`.
        ignore_index: the label of elements to leave out.
        binary: whether each score is a yes-or-no decision of its own.
    """
    yield from _opened(Path(path), ignore_index, binary).batches(all_ignored=True)


def _open_file(path: Path, ignore_index: int, binary: bool, labelled: bool) -> PredictionFile:
    open_format = FORMATS.get(path.suffix.lower())
    if open_format is None:
        if not path.suffix:  # more likely a mistyped folder
            with file_errors(path):
                path.stat()
        raise BadFileError(path, f"has an unknown suffix; expected one of {', '.join(FORMATS)}")
    with file_errors(path):
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise BadFileError(path, "is a device; expected a file")
        if not about.st_size:
            raise BadFileError(path, "is empty; expected predictions")
        file = replace(open_format(path), ignore_index=ignore_index)
    if labelled and file.no_labels:
        raise BadFileError(path, file.no_labels)
    return _as_decisions(file) if binary else _as_classes(file)


def _as_classes(file: PredictionFile) -> PredictionFile:
    """Check the axes of scores and labels."""
    kind, shape, labels = file.kind, file.shape, file.stored_labels
    if not 2 <= len(shape) <= MAX_AXES:
        hint = f"; {_SINGLE}" if len(shape) == 1 else ""
        raise BadFileError(
            file.path, f"{kind} have shape {shape}; expected (N, K) or (N, K, *S) for K classes{hint}"
        )
    expected = shape[:1] + shape[2:]
    if labels not in (None, expected) and not file.no_labels:
        hint = "; the class axis comes second" if labels == shape[:-1] else ""
        if len(shape) > 2 and labels == shape[1:2] + shape[3:]:
            hint = "; store each member of an ensemble in a file of its own, and use --ensemble"
        if labels == shape:
            one_hot = "; labels look one-hot: store their argmax over axis 1"
            hint = f"{one_hot * _one_hot(file)}; {_SINGLE}"
        raise BadFileError(
            file.path, f"labels have shape {labels}; expected {expected} for {kind} of shape {shape}{hint}"
        )
    return file


def _one_hot(file: PredictionFile) -> bool:
    """Whether the first labels of a file, which have the shape of its scores, look one-hot."""
    rows = max(1, CHUNK // max(1, prod(file.shape[1:])))
    with file_errors(file.path), closing(file._chunks(rows)) as chunks:
        return any(look_one_hot(labels) for _, labels in islice(chunks, 1))


def _as_decisions(file: PredictionFile) -> PredictionFile:
    """The file with its scores as decisions, in axes ``(N, L, *S)``."""
    shape = (*file.shape, 1) if len(file.shape) == 1 else file.shape
    labels = file.stored_labels or file.shape[:1]
    allowed = [file.shape, shape]
    if shape[1:2] == (1,):
        allowed.append(shape[:1] + shape[2:])
    if labels not in allowed or not 2 <= len(shape) <= MAX_AXES:
        scores = prod(shape[1:2])  # of a row; an array may also be a single number
        leave_out = f"; leave out --binary if these are those of {scores} classes" * (scores > 1)
        if not file.stored_labels:
            raise BadFileError(
                file.path,
                f"has {scores} {file.kind} and one label in a row; --binary, and calibrators fitted with it, "
                f"need a single score{leave_out} (several labels need a file of arrays, such as .npz)",
            )
        raise BadFileError(
            file.path,
            f"labels have shape {labels}; expected {file.shape}, that of the {file.kind}, because --binary "
            f"takes each of these as a decision of its own{leave_out}",
        )
    names = file.class_names
    if names is not None and len(names) == 1:  # of a table with one column of scores, mostly
        if names[0].lower() in ("no", "false", "neg", "negative", "0") and not file.words:
            column, opposite = {"logits": ("logit", "-logit")}.get(file.kind, ("probability", "1 - p"))
            found, place = f"the column {column}_{names[0]}", f", in a column called {column}"
            if file.stored_labels:  # arrays
                found, place = f"the class name {names[0]!r}", ""
            raise BadFileError(
                file.path,
                f"has only {found}; expected the {column} of yes{place} (if it is that of no, write "
                f"{opposite})",
            )
        names = None if names[0] in ("logit", "probability", "1") else (f"not {names[0]}", names[0])
    return replace(file, shape=shape, class_names=names, binary=True)


def _checked(file: PredictionFile) -> PredictionFile:
    """Check numbers and names of classes."""
    path, classes, names = file.path, file.num_classes, file.class_names
    if not file.rows:
        raise BadFileError(path, f"holds no predictions: {file.kind} have shape {file.shape}")
    if classes > MAX_CLASSES:
        raise BadFileError(path, f"{file.kind} have {classes:,} classes; expected at most {MAX_CLASSES:,}")
    if classes < 2 and not file.binary:
        found = f"{file.kind} have {classes} class on axis 1; expected at least 2"
        if file.stored_labels is None:
            found = "has a single score in each row; expected one for each class"
        raise BadFileError(path, f"{found}; {_SINGLE}")
    if not prod(file.shape):
        raise BadFileError(path, f"holds no predictions: {file.kind} have shape {file.shape}")
    classes = max(2, classes)  # a single decision has the names of no and yes
    if names is not None and len(names) != classes:
        raise BadFileError(path, f"has {len(names)} class_names; expected one for each of {classes} classes")
    if names is not None and len(set(names)) != classes:
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadFileError(path, f"has the class name {repeated!r} twice; expected different names")
    return file


def _open_folder(folder: Path, ignore_index: int, binary: bool, labelled: bool) -> PredictionFile:
    """Open all files of a folder, and check that they belong together."""
    paths = [path for path in folder.iterdir() if path.suffix.lower() in FORMATS and path.name[0] not in "._"]
    if not paths:
        raise BadFileError(
            folder, f"is a folder without predictions; expected files with one of {', '.join(FORMATS)}"
        )
    suffixes = sorted({path.suffix.lower() for path in paths})
    if len(suffixes) > 1 and (folder / "recipe.toml").is_file():
        raise BadFileError(
            folder,
            f"is the folder of a run; expected a file of its predictions, such as {folder / 'test.npz'}",
        )
    if len(suffixes) > 1:
        raise BadFileError(folder, f"has files with {' and '.join(suffixes)}; expected one kind of files")
    paths.sort(key=_natural_order)
    _check_numbered(folder, [path.stem for path in paths])
    # Both files of a pair of .npy files open the same predictions.
    opened = {
        file.path: file for file in (_open_file(path, ignore_index, binary, labelled) for path in paths)
    }
    shards = tuple(_checked(file) for file in opened.values() if file.rows)
    if not shards:
        raise BadFileError(folder, f"holds no predictions: all {len(opened)} files are without rows")
    first = shards[0]

    def described(file: PredictionFile) -> dict[str, Any]:
        return {"scores": file.kind, "axes": ("N", *file.shape[1:]), "class names": file.class_names}

    for shard in shards:
        for name, found in described(shard).items():
            expected = described(first)[name]
            if found != expected:
                raise BadFileError(
                    shard.path,
                    f"its {name} {found} differ from {expected} in {first.path.name}; "
                    "expected files of one set",
                )
    shape = (sum(shard.rows for shard in shards), *first.shape[1:])
    dtype = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
    return PredictionFile(
        folder,
        first.kind,
        shape,
        dtype,
        first.class_names,
        first._chunks,
        ignore_index,
        shards=shards,
        binary=binary,
        no_labels=next((shard.no_labels for shard in shards if shard.no_labels), ""),
    )


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """A key by which ``part-2`` comes before ``part-10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _check_numbered(folder: Path, names: Sequence[str]) -> None:
    """Raise an error if files called ``test-00000-of-00010`` are of two sets, or if some are missing."""
    numbered = [re.fullmatch(r"(.*)-(\d+)-of-(\d+)", name) for name in names]
    found = [(match[1], int(match[2]), int(match[3])) for match in numbered if match]
    sets = sorted({name for name, _, _ in found})
    if len(sets) > 1:
        raise BadFileError(
            folder, f"holds files of several sets: {', '.join(sets)}; expected a folder for each of them"
        )
    total = max((total for _, _, total in found), default=0)
    missing = set(range(min(total, len(names) + 1))) - {number for _, number, _ in found}
    if found and missing:
        raise BadFileError(
            folder, f"has {len(found)} of {total} files; {sets[0]}-{min(missing):05}-of-{total:05} is missing"
        )


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
