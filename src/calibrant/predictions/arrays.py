"""Readers for files of arrays: npz, npy, pt and safetensors."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from calibrant.predictions.file import BadFileError, Batches, PredictionFile, file_errors
from calibrant.predictions.names import Names
from calibrant.printable import row_of
from calibrant.sizes import MAX_CLASSES, MAX_TEXT, check_member, check_memory, check_torch_file, npy_header

_SCORES = ("logits", "probabilities")
_ARRAYS = (*_SCORES, "labels")


@dataclass(frozen=True)
class _Array:
    """The description of an array in a file."""

    shape: tuple[int, ...]
    stored: str  # the name of its type in the file, for messages
    dtype: torch.dtype | None  # its type in a batch: floating point, int64, or None if it is neither
    open: Callable[[], AbstractContextManager[Any]]  # to be sliced from the first to the last row


def _predictions(
    path: Path,
    arrays: Mapping[str, _Array],
    class_names: tuple[str, ...] | None,
    found: str,
    no_labels: str = "",
) -> PredictionFile:
    """Check that the arrays fit together.

    ``found`` lists all names in the file, and ``no_labels`` says where labels are expected, for messages.
    """
    found = found or "nothing"
    kinds = [name for name in _SCORES if name in arrays]
    if len(kinds) == 2:
        raise BadFileError(path, "holds both logits and probabilities; expected exactly one of them")
    if not kinds:
        raise BadFileError(path, f"has neither logits nor probabilities; expected one of them, found {found}")
    (kind,) = kinds
    scores = arrays[kind]
    if scores.dtype is None or not scores.dtype.is_floating_point:
        raise BadFileError(path, f"{kind} are {scores.stored}; expected floating point")
    if "labels" in arrays:
        labels = arrays["labels"]
    else:
        no_labels = no_labels or f"has no labels; expected an integer array named labels, found {found}"
        zeros = torch.zeros(scores.shape[:1], dtype=torch.long, device="cpu")
        labels = _Array(scores.shape, "int64", torch.long, lambda: nullcontext(zeros))
    # Booleans are answers: of a single score, or in the shape of the scores.
    several, same = prod(scores.shape[1:2]) > 1, labels.shape == scores.shape
    words = Names(() if several and same else class_names or ())  # names of labels are not those of answers
    texts = labels.stored[1:2] == "U" and len(words.numbers) > 1  # such as <U5
    if labels.dtype is None and not texts and ((several and not same) or labels.stored.lower() != "bool"):
        names = "class_names, the names of all classes in the order of the scores"
        expected = "0 and 1" if several and same else f"integer class numbers, or strings beside {names}"
        raise BadFileError(path, f"labels are {labels.stored}; expected {expected}")
    if texts:
        check_memory(prod(labels.shape) * np.dtype(labels.stored).itemsize, "labels as strings")

    def chunks(rows: int) -> Batches:
        with scores.open() as all_scores, labels.open() as all_labels:
            for start in range(0, scores.shape[0], rows):
                part = slice(start, start + rows)
                found = all_labels[part]
                if texts:
                    found = words.numbers_of(path, found, start)
                yield to_tensor(all_scores[part], scores.dtype), to_labels(path, found, start)

    return PredictionFile(
        path,
        kind,
        scores.shape,
        scores.dtype,
        class_names,
        chunks,
        stored_labels=labels.shape,
        no_labels=no_labels,
    )


def to_tensor(array: np.ndarray[Any, Any] | Tensor, dtype: torch.dtype | None) -> Tensor:
    """The array as a tensor that owns its memory, in native byte order."""
    if isinstance(array, np.ndarray):  # copied, because torch needs aligned, writable memory
        array = torch.from_numpy(np.array(array, str(dtype).removeprefix("torch."), order="C"))
    return array.to(dtype)


def to_labels(path: Path, array: np.ndarray[Any, Any] | Tensor, start: int) -> Tensor:
    """Labels as int64, unless one is not whole or may be another one, rounded. ``start`` is the first row."""
    limit = _limit(array.dtype)
    if limit is not None:
        numbers = np.asarray(array.double() if isinstance(array, Tensor) and limit < 2.0**63 else array)
        values = numbers.astype(np.float64)
        wrong = ~(abs(values) < limit) | (values != np.rint(values))
        if wrong.any():
            row = row_of(path, start + int(wrong.reshape(len(wrong), -1).any(1).argmax()))
            label, stored = numbers[wrong][0], str(array.dtype).removeprefix("torch.")
            large = limit < 2.0**63 and abs(label) >= limit
            reason = f", so large that {stored} rounds it" if large else ""
            raise BadFileError(path, f"has label {label} at {row}{reason}; expected integer class numbers")
    return to_tensor(array, torch.long)


def _limit(dtype: np.dtype[Any] | torch.dtype) -> float | None:
    """Labels of a type are exact below this size; None if all are."""
    if isinstance(dtype, torch.dtype):
        if dtype.is_floating_point:
            return 2 / torch.finfo(dtype).eps
        return 2.0**63 if dtype == torch.uint64 else None
    if dtype.kind == "f":
        return min(2 / float(np.finfo(dtype).eps), 2.0**53)
    return 2.0**63 if dtype.kind == "u" else None


def _strings(path: Path, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise BadFileError(path, "class_names are not a list of strings; expected one name for each class")
    return tuple(value)


def _numpy_array(shape: tuple[int, ...], dtype: np.dtype[Any], opened: Any) -> _Array:
    floating = torch.float32 if dtype.itemsize <= 4 else torch.float64
    kinds = {"i": torch.long, "u": torch.long, "f": floating}
    return _Array(shape, str(dtype), kinds.get(dtype.kind), opened)


def open_npz(path: Path) -> PredictionFile:
    """Arrays ``logits`` or ``probabilities``, ``labels`` and, optionally, ``class_names``."""
    arrays, names = {}, None
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name == "class_names":
                names = _npz_names(path, archive, member)
            elif name in _ARRAYS:
                arrays[name] = _npz_array(path, archive, member, name)
        found = ", ".join(sorted(name.removesuffix(".npy") for name in archive.namelist()))
    return _predictions(path, arrays, names, found)


def _npz_names(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[str, ...]:
    check_member(member)
    with archive.open(member) as stream:
        shape, _, dtype = npy_header(stream, member.file_size, "class_names")
    if len(shape) != 1 or shape[0] > MAX_CLASSES or member.file_size > MAX_TEXT:
        raise BadFileError(
            path, f"class_names have shape {shape} and type {dtype}; expected a list of strings"
        )
    with archive.open(member) as stream:
        return _strings(path, np.lib.format.read_array(stream).astype(str).tolist())


def _npz_array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> _Array:
    check_member(member)
    with archive.open(member) as stream:
        shape, fortran, dtype = npy_header(stream, member.file_size, name)

    @contextmanager
    def opened() -> Iterator[Any]:
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            if fortran:  # the first row is complete only at the end
                check_memory(member.file_size, f"{name} in Fortran order")
                yield np.lib.format.read_array(stream)
            else:
                npy_header(stream, member.file_size, name)
                yield _Stream(stream, shape, dtype)

    return _numpy_array(shape, dtype, opened)


class _Stream:
    """An array in a stream; its slices must be read one after another."""

    def __init__(self, stream: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.stream, self.shape, self.dtype = stream, shape, dtype

    def __getitem__(self, part: slice) -> np.ndarray[Any, Any]:
        shape = (min(part.stop, self.shape[0]) - part.start, *self.shape[1:])
        # zipfile decompresses only what is read, and checks a member's checksum at its end
        return np.frombuffer(self.stream.read(prod(shape) * self.dtype.itemsize), self.dtype).reshape(shape)


def open_npy(path: Path) -> PredictionFile:
    """A pair of files ``NAME.logits.npy`` (or ``NAME.probabilities.npy``) and ``NAME.labels.npy``."""
    stem, _, role = path.stem.rpartition(".")
    if not stem or role not in _ARRAYS:
        raise BadFileError(
            path, "is one array; expected NAME.logits.npy (or NAME.probabilities.npy) and NAME.labels.npy"
        )
    # If a file of scores was given, it counts even where the other kind lies beside it.
    wanted = _ARRAYS if role == "labels" else (role, "labels")
    files = {name: path.with_name(f"{stem}.{name}{path.suffix}") for name in wanted}
    present = {name: file for name, file in files.items() if file.is_file()}
    expected = " or ".join(file.name for name, file in files.items() if name not in present)
    alone = f"is one of a pair; expected {expected} beside it" if len(present) < 2 else ""
    if alone and "labels" in present:
        raise BadFileError(path, alone)
    arrays = {name: _npy_array(file, name) for name, file in present.items()}
    listing = path.with_name(f"{stem}.class_names.txt")
    names = _listed_names(listing) if listing.is_file() else None
    file = _predictions(path, arrays, names, ", ".join(sorted(arrays)), alone)
    others = [*([] if alone else [present["labels"]]), *([] if names is None else [listing])]
    return replace(file, path=present[file.kind], others=tuple(others))


def _listed_names(listing: Path) -> tuple[str, ...]:
    with file_errors(listing):
        if listing.stat().st_size > MAX_TEXT:
            raise BadFileError(listing, f"is larger than {MAX_TEXT >> 20} MiB; expected a name in each line")
        return tuple(listing.read_text(encoding="utf-8-sig").splitlines())


def _npy_array(path: Path, name: str) -> _Array:
    with file_errors(path), path.open("rb") as stream:
        shape, _, dtype = npy_header(stream, path.stat().st_size, name)
    return _numpy_array(shape, dtype, lambda: nullcontext(np.load(path, mmap_mode="r")))


def open_pt(path: Path) -> PredictionFile:
    """A dict of tensors, saved by `torch.save`. Pickled objects are refused."""
    from pickle import UnpicklingError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about how the file was written
            # Files from before torch 1.6 are not zip archives and cannot be mapped into memory. They are
            # read first, because torch would allocate as many bytes as a damaged file asks for.
            check_torch_file(path)
            new = zipfile.is_zipfile(path)
            source = path if new else io.BytesIO(path.read_bytes())
            data = torch.load(source, "cpu", weights_only=True, mmap=new)
    except (UnpicklingError, LookupError, EOFError) as error:  # by what a file that is no pickle begins with
        raise BadFileError(
            path,
            "holds pickled objects, or is damaged; expected a dict of tensors saved by torch.save (made of "
            "NumPy arrays by torch.from_numpy)",
        ) from error
    if not isinstance(data, dict):
        raise BadFileError(path, f"holds a {type(data).__name__}; expected a dict of tensors")
    arrays = {}
    for name in _ARRAYS:
        if (value := data.get(name)) is None:
            continue
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            found = value.layout if isinstance(value, Tensor) else type(value).__name__
            raise BadFileError(path, f"{name}: expected a dense tensor, got {found}")
        arrays[name] = _tensor_array(path, name, value.detach())
    names = _strings(path, data["class_names"]) if "class_names" in data else None
    return _predictions(path, arrays, names, ", ".join(map(str, data)))


def _tensor_array(path: Path, name: str, tensor: Tensor) -> _Array:
    if tensor.is_meta:
        raise BadFileError(path, f"{name} are meta tensors, which hold no values; expected stored values")
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise BadFileError(
            path, f"{name} of shape {tuple(tensor.shape)} repeat their numbers; expected .contiguous() ones"
        )
    stored, dtype = tensor.dtype, None
    if stored.is_floating_point:
        dtype = torch.float64 if stored == torch.float64 else torch.float32
    elif stored != torch.bool and not stored.is_complex:
        dtype = torch.long
    kind = str(stored).removeprefix("torch.")
    return _Array(tuple(tensor.shape), kind, dtype, lambda: nullcontext(tensor))


def open_safetensors(path: Path) -> PredictionFile:
    """Tensors ``logits`` or ``probabilities``, and ``labels``; class names as JSON in the metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata, found = file.metadata() or {}, sorted(file.keys())
        if (saved := metadata.get("format", "")).startswith("calibrant-"):  # such as calibrant-calibrator-1
            raise BadFileError(path, f"is a {' '.join(saved.split('-')[1:-1])} file; expected predictions")
        headers = {name: file.get_slice(name) for name in found if name in _ARRAYS}
        arrays = {name: _safetensors_array(path, name, header) for name, header in headers.items()}
    names = None
    if "class_names" in metadata:
        try:
            names = _strings(path, json.loads(metadata["class_names"]))
        except json.JSONDecodeError as error:
            raise BadFileError(
                path, "class_names in the metadata are not JSON; expected a JSON list of strings"
            ) from error
    return _predictions(path, arrays, names, ", ".join(found))


class _OnCpu:
    """A slice of a safetensors file whose parts are on the CPU, not on torch's default device."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getitem__(self, part: slice) -> Tensor:
        with torch.device("cpu"):
            rows: Tensor = self._found[part]
        return rows


def _safetensors_array(path: Path, name: str, header: Any) -> _Array:
    from safetensors import safe_open

    shape, stored = tuple(header.get_shape()), str(header.get_dtype())
    types = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float32, "BF16": torch.float32}
    dtype = torch.long if stored[0] in "IU" else types.get(stored)

    @contextmanager
    def opened() -> Iterator[Any]:
        with safe_open(path, framework="pt") as file:
            yield _OnCpu(file.get_slice(name))

    return _Array(shape, stored, dtype, opened)
