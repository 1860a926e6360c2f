"""Write predictions to disk, one batch at a time."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from calibrant.atomic import replacing
from calibrant.extras import require
from calibrant.predictions.file import PredictionFile
from calibrant.predictions.tables import delimiter_of, rewritten

Arrays = dict[str, tuple[tuple[int, ...], Iterable[Tensor]]]
"""For each array its shape and its parts in order; at least one part."""


def write_predictions(
    path: Path,
    batches: Iterable[tuple[Tensor, Tensor]],
    rows: int,
    class_names: Sequence[str] | None = None,
    *,
    labelled: bool = True,
) -> None:
    """Write logits and labels to a file that `open_predictions` reads.

    The file is replaced in one step. Only the labels and one batch of logits are in memory.

    Args:
        path: the file to write; its suffix is a key of `WRITERS`.
        batches: pairs ``(logits, labels)`` of shapes ``(n, K, *S)`` and ``(n, *S)``.
        rows: the number of rows of all batches together.
        class_names: one name for each class.
        labelled: whether to write the labels.
    """
    labels: list[Tensor] = []

    def logits() -> Iterator[Tensor]:
        start = 0
        for batch_logits, batch_labels in batches:
            if not labels:  # in one piece: small pieces between large batches would scatter the memory
                shape = rows, *batch_labels.shape[1:]
                labels.append(torch.empty(shape, dtype=batch_labels.dtype, device="cpu"))
            labels[0][start : start + len(batch_labels)] = batch_labels
            start += len(batch_labels)
            yield batch_logits

    first, parts = _first(logits())
    arrays: Arrays = {"logits": ((rows, *first.shape[1:]), parts)}
    if labelled:
        arrays |= {"labels": (tuple(labels[0].shape), labels)}
    with replacing(path) as stream:
        WRITERS[path.suffix.lower()](stream, arrays, class_names)


def rewrite_table(path: Path, source: PredictionFile, batches: Iterable[Tensor]) -> None:
    """Write a CSV file of predictions again, with other scores; the other columns keep their cells.

    The file is replaced in one step. Probabilities stay probabilities, and logits logits.

    Args:
        path: the file to write.
        source: the CSV file.
        batches: the other logits, in the order of the rows, as `PredictionFile.batches` has them.
    """

    def scores() -> Iterator[Tensor]:
        for logits in batches:
            if source.kind == "probabilities":
                logits = logits.sigmoid() if source.binary else logits.softmax(1)
            yield logits

    with source.path.open("rb") as old:
        end = "\r\n" if old.readline(1 << 20).endswith(b"\r\n") else "\n"
    with replacing(path) as stream, TextIOWrapper(stream, "utf-8", newline="") as text:
        writer = csv.writer(text, delimiter=delimiter_of(source.path), lineterminator=end)
        writer.writerows(rewritten(source.path, scores()))


def write_probabilities(
    path: Path,
    batches: Iterable[Tensor],
    names: Sequence[str],
    class_names: Sequence[str],
    *,
    several_labels: bool = False,
    beside: Mapping[str, Sequence[Any]] = {},
) -> list[str]:
    """Write probabilities of inputs without labels, with the name and the predicted class of each input.

    A ``.csv`` or ``.parquet`` file has the columns ``name``, those of ``beside``, ``prediction`` and
    ``probability_<class>``. A column of ``beside`` that is called as one of these becomes ``input_<column>``.
    A ``.npz`` file has ``probabilities``, ``names``, ``predictions`` and ``class_names``. If an input has
    many predictions, as an image with one for each pixel, or if each of several labels has its own
    probability, there are no predictions.
    The file is replaced in one step.

    Bytes of a file name that are not UTF-8 are written as backslash escapes.

    Args:
        path: the file to write; its suffix is one of `PROBABILITY_SUFFIXES`.
        batches: probabilities ``(n, K, *S)``, float32; one batch or more.
        names: a name for each input, in the order of the batches.
        class_names: one name for each class or label.
        several_labels: whether each probability is that of a label of its own.
        beside: other columns, with a cell for each input.

    Returns:
        The columns of ``beside`` that the file does not have: all of them in an ``.npz`` file.

    Raises:
        ValueError: a ``.csv`` or ``.parquet`` file cannot have several predictions for an input.
    """
    writer = _TABLE_WRITERS.get(path.suffix.lower())
    names, class_names = (
        [text.encode("utf-8", "backslashreplace").decode("utf-8") for text in texts]
        for texts in (names, class_names)
    )
    first, parts = _first(batches)
    if writer is not None:
        if first.ndim > 2:
            raise ValueError(f"{path} cannot hold probabilities of every pixel; expected a name with .npz")
        prediction = [] if several_labels else ["prediction"]
        own = ["name", *prediction, *(f"probability_{name}" for name in class_names)]
        table = {"name": names, **_renamed(beside, own)}
        with replacing(path) as stream:
            writer(stream, table, parts, own[1:], None if several_labels else class_names)
        return []
    predictions: list[str] = []
    predicted = first.ndim == 2 and not several_labels

    def noted() -> Iterator[Tensor]:
        for part in parts:
            if predicted:
                predictions.extend(class_names[label] for label in part.argmax(1).tolist())
            yield part

    texts = {"names": names} | ({"predictions": predictions} if predicted else {})
    with replacing(path) as stream:
        arrays: Arrays = {"probabilities": ((len(names), *first.shape[1:]), noted())}
        _write_npz(stream, arrays, class_names, texts)
    return list(beside)


def _renamed(columns: Mapping[str, Sequence[Any]], own: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The columns, each under a name that is not one of the file's own."""
    renamed = {}
    for name, cells in columns.items():
        free = name
        while free in own or (free != name and free in columns):
            free = f"input_{free}"
        renamed[free] = cells
    return renamed


def _write_csv(
    stream: IO[bytes],
    table: Mapping[str, Sequence[Any]],
    parts: Iterable[Tensor],
    results: Sequence[str],
    predicted: Sequence[str] | None,
) -> None:
    """Write a table, with columns ``results`` of probabilities and, before them, of the class predicted."""
    with TextIOWrapper(stream, "utf-8", newline="") as text:
        writer = csv.writer(text)
        writer.writerow([*table, *results])
        rows = zip(*table.values(), strict=True)
        for part in parts:
            for row in part.tolist():
                best = [] if predicted is None else [predicted[max(range(len(row)), key=row.__getitem__)]]
                writer.writerow([*next(rows), *best, *(f"{value:.9g}" for value in row)])


def _write_parquet(
    stream: IO[bytes],
    table: Mapping[str, Sequence[Any]],
    parts: Iterable[Tensor],
    results: Sequence[str],
    predicted: Sequence[str] | None,
) -> None:
    """As `_write_csv`; everything is in memory at once."""
    require("parquet", "pyarrow", purpose="writing Parquet")
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    probabilities = torch.cat(list(parts))
    best = [] if predicted is None else [[predicted[label] for label in probabilities.argmax(1).tolist()]]
    columns = [*table.values(), *best, *probabilities.T.contiguous().numpy()]
    arrays = []
    for cells in columns:
        try:
            arrays.append(pyarrow.array(cells))
        except (pyarrow.ArrowException, OverflowError):  # several types, or very large numbers
            arrays.append(pyarrow.array([None if cell is None else str(cell) for cell in cells]))
    pyarrow.parquet.write_table(pyarrow.table(arrays, [*table, *results]), stream)


def _write_npz(
    stream: IO[bytes],
    arrays: Arrays,
    class_names: Sequence[str] | None,
    texts: Mapping[str, Sequence[str]] = {},
) -> None:
    # NumPy itself writes only whole arrays.
    with zipfile.ZipFile(stream, "w") as archive:
        for name, (shape, parts) in arrays.items():
            first, parts = _first(parts)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                description = np.lib.format.dtype_to_descr(first.numpy().dtype.newbyteorder("<"))
                header = {"descr": description, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                for part in parts:
                    member.write(_bytes_of(part))
        named = texts if class_names is None else {**texts, "class_names": class_names}
        for name, values in named.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.array(values, dtype=str), allow_pickle=False)


def _write_safetensors(stream: IO[bytes], arrays: Arrays, class_names: Sequence[str] | None) -> None:
    # The safetensors library itself writes only whole tensors.
    header: dict[str, Any] = {}
    if class_names is not None:
        header["__metadata__"] = {"class_names": json.dumps(class_names)}
    contents, end = [], 0
    for name, (shape, parts) in arrays.items():
        first, parts = _first(parts)
        start, end = end, end + prod(shape) * first.itemsize
        dtype = f"{'F' if first.is_floating_point() else 'I'}{8 * first.itemsize}"
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        contents.append(parts)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for parts in contents:
        for part in parts:
            stream.write(_bytes_of(part))


def _first(parts: Iterable[Tensor]) -> tuple[Tensor, Iterator[Tensor]]:
    """The first part, and an iterator over all parts."""
    rest = iter(parts)
    first = next(rest).detach().cpu()
    return first, chain([first], rest)


def _bytes_of(part: Tensor) -> bytes:
    """The numbers of a tensor, little-endian, in C order."""
    array = part.detach().cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


WRITERS: dict[str, Callable[[IO[bytes], Arrays, Sequence[str] | None], None]] = {
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
}
"""For each suffix the function that writes such a file to a stream."""

_TABLE_WRITERS = {".csv": _write_csv, ".parquet": _write_parquet}

PROBABILITY_SUFFIXES = tuple(sorted([".npz", *_TABLE_WRITERS]))
"""The suffixes of the files that `write_probabilities` writes."""
