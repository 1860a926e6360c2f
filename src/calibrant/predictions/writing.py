"""Write predictions to disk, one batch at a time."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from calibrant.atomic import replacing

Arrays = Mapping[str, tuple[tuple[int, ...], Iterable[Tensor]]]
"""For each array its shape and its parts in order; at least one part."""


def write_predictions(
    path: Path, batches: Iterable[tuple[Tensor, Tensor]], rows: int, class_names: Sequence[str] | None = None
) -> None:
    """Write logits and labels to a file that `open_predictions` reads.

    The file is replaced in one step. Only the labels and one batch of logits are in memory.

    Args:
        path: the file to write; its suffix is a key of `WRITERS`.
        batches: pairs ``(logits, labels)`` of shapes ``(n, K, *S)`` and ``(n, *S)``.
        rows: the number of rows of all batches together.
        class_names: one name for each class.
    """
    labels: list[Tensor] = []

    def logits() -> Iterator[Tensor]:
        for batch_logits, batch_labels in batches:
            labels.append(batch_labels.cpu())
            yield batch_logits

    first, parts = _first(logits())
    arrays: Arrays = {
        "logits": ((rows, *first.shape[1:]), parts),
        "labels": ((rows, *labels[0].shape[1:]), labels),
    }
    with replacing(path) as stream:
        WRITERS[path.suffix.lower()](stream, arrays, class_names)


def _write_npz(stream: IO[bytes], arrays: Arrays, class_names: Sequence[str] | None) -> None:
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
        if class_names is not None:
            with archive.open("class_names.npy", "w") as member:
                np.lib.format.write_array(member, np.array(class_names, dtype=str), allow_pickle=False)


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
