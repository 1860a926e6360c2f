"""Predictions on disk: reads what other programs wrote, checks it, and hands it out in batches.

What a file holds is declared by names, never guessed from values. The array formats have ``logits`` or
``probabilities`` of shape ``(N, K, *S)``, ``labels`` of shape ``(N, *S)`` and, optionally,
``class_names``; the tables have columns ``label`` and ``logit_<class>`` or ``probability_<class>``.
"""

from __future__ import annotations

import csv
import json
import re
import secrets
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import inf, isinf, isnan, prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from calibrant.layout import SUM_TOLERANCE, as_logits

CHUNK = 1 << 22
"""Numbers in one batch, unless a single row has more: 16 MiB of float32."""

Batch = tuple[Tensor, Tensor]
Batches = Generator[Batch, None, None]

_SCORES = ("logits", "probabilities")
_COLUMNS = {"logits": "logit_", "probabilities": "probability_"}


class BadFileError(ValueError):
    """A file that cannot be evaluated, in one line: which file, what is wrong, and what was expected."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {' '.join(problem.split())}")


@dataclass(frozen=True)
class PredictionFile:
    """Predictions in a file, of which nothing but the description has been read yet.

    Attributes:
        path: the file; of a pair of ``.npy`` files, the one with the scores.
        name: the file's name without its suffixes.
        kind: "logits" or "probabilities".
        rows: N. For a CSV file the number of lines, which is more where texts have line breaks.
        num_classes: K.
        spatial: the shape S of what is classified in each row, ``()`` for one element.
        dtype: of the logits in a batch.
        class_names: of all classes, where the file has them.
        ignore_index: the label of elements to leave out.
    """

    path: Path
    name: str
    kind: str
    rows: int
    num_classes: int
    spatial: tuple[int, ...]
    dtype: torch.dtype
    class_names: tuple[str, ...] | None
    ignore_index: int
    _chunks: Callable[[int], Batches] = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Bytes that all logits take in memory."""
        return self.rows * self.num_classes * prod(self.spatial) * self.dtype.itemsize

    def batches(self, *, chunk: int = CHUNK) -> Batches:
        """The predictions in order as ``(logits, labels)``, of at most ``chunk`` numbers or one row each.

        Shapes: ``(n, K, *S)`` and ``(n, *S)``. Probabilities arrive as their logarithms.

        Raises:
            BadFileError: data that are damaged or not what they were declared to be.
        """
        rows = max(1, chunk // (self.num_classes * prod(self.spatial)))
        start, valid = 0, 0
        with closing(self._chunks(rows)) as chunks:
            while True:
                with _reading(self.path):
                    pair = next(chunks, None)
                if pair is None:
                    break
                scores, labels = pair
                valid += self._check_labels(labels, start)
                yield self._logits(scores, labels, start), labels
                start += len(labels)
        if not valid:
            raise BadFileError(self.path, f"has no element to evaluate: every label is {self.ignore_index}")

    def load(self, advance: Callable[[int], object] | None = None) -> Batch:
        """All of it at once, as ``(logits, labels)``.

        Args:
            advance: called with the number of rows after each batch, for a progress bar.
        """
        logits = torch.empty(self.rows, self.num_classes, *self.spatial, dtype=self.dtype)
        labels = torch.empty(self.rows, *self.spatial, dtype=torch.long)
        start = 0
        with closing(self.batches()) as batches:
            for batch_logits, batch_labels in batches:
                end = start + len(batch_labels)
                logits[start:end], labels[start:end] = batch_logits, batch_labels
                if advance is not None:
                    advance(end - start)
                start = end
        return logits[:start], labels[:start]

    def _check_labels(self, labels: Tensor, start: int) -> int:
        """Raise for the first label out of range; return how many elements are to be evaluated."""
        valid = labels != self.ignore_index
        wrong = valid & ((labels < 0) | (labels >= self.num_classes))
        if wrong.any():
            row = _first_row(wrong)
            raise BadFileError(
                self.path,
                f"has label {int(labels[wrong][0])} at row {start + row}; expected 0 to "
                f"{self.num_classes - 1}, or ignore_index={self.ignore_index} for elements to leave out "
                "(--ignore-index)",
            )
        return int(valid.sum())

    def _logits(self, scores: Tensor, labels: Tensor, start: int) -> Tensor:
        counted = (labels != self.ignore_index).unsqueeze(1)
        judged = scores
        if not counted.all():  # what stands at ignored elements may be anything
            judged = torch.where(counted, scores, 1 / self.num_classes)
        low, high = (float(bound) for bound in torch.aminmax(judged))  # NaN where there is any
        ruled_out = self.kind == "logits" and low == -inf  # a class may be, by a logit of minus infinity
        if isnan(low) or isinf(high) or (isinf(low) and not ruled_out):
            wrong = judged.isnan() | (judged == inf) | (judged.isinf() if not ruled_out else False)
            row = start + _first_row(wrong)
            raise BadFileError(
                self.path, f"{self.kind} are NaN or infinite at row {row}; expected finite numbers"
            )
        if self.kind == "logits":
            return scores
        if low < 0 or high > 1 + SUM_TOLERANCE:
            outside = (judged < 0) | (judged > 1 + SUM_TOLERANCE)
            raise BadFileError(
                self.path,
                f"probabilities range from {low:.4g} to {high:.4g} at row {start + _first_row(outside)}; "
                "expected 0 to 1 (if these are logits, name them logits)",
            )
        total = judged.sum(1)
        wrong = (total - 1).abs() > SUM_TOLERANCE
        if wrong.any():
            raise BadFileError(
                self.path,
                f"probabilities sum to {float(total[wrong][0]):.4g} over the classes at row "
                f"{start + _first_row(wrong)}; expected 1 within {SUM_TOLERANCE}",
            )
        return as_logits(scores)


def open_predictions(path: Path | str, *, ignore_index: int = -100) -> PredictionFile:
    """Read the description of a file of predictions and check it.

    Args:
        path: ``.npz``, ``.npy`` (either of a pair ``NAME.logits.npy`` and ``NAME.labels.npy``), ``.pt``,
            ``.safetensors``, ``.csv`` or ``.parquet``.
        ignore_index: the label of elements to leave out.

    Raises:
        BadFileError: a file that does not exist, is damaged, or lacks what is needed.

    >>> import tempfile
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
    if not path.is_file():
        raise BadFileError(path, "is a folder; expected a file" if path.is_dir() else "does not exist")
    with _reading(path):
        content = open_format(path)
    path = content.path or path
    rows, num_classes, *spatial = content.shape
    if num_classes < 2:
        raise BadFileError(path, f"{content.kind} have {num_classes} class on axis 1; expected at least 2")
    if not rows or not prod(spatial):
        raise BadFileError(path, f"holds no predictions: {content.kind} have shape {content.shape}")
    names = content.class_names
    if names is not None and len(names) != num_classes:
        raise BadFileError(
            path, f"has {len(names)} class_names; expected one for each of {num_classes} classes"
        )
    if names is not None and len(set(names)) != num_classes:
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadFileError(path, f"has the class name {repeated!r} twice; expected different names")
    name = path.stem
    if path.suffix.lower() == ".npy":
        name = name.rpartition(".")[0]
    return PredictionFile(
        path=path,
        name=name,
        kind=content.kind,
        rows=rows,
        num_classes=num_classes,
        spatial=tuple(spatial),
        dtype=content.dtype,
        class_names=names,
        ignore_index=ignore_index,
        _chunks=content.chunks,
    )


def read_class_counts(path: Path | str) -> list[int]:
    """The number of training samples of each class, in the order of the classes.

    The file is a JSON list, or text with a number in each line.

    Raises:
        BadFileError: a file that holds anything else.
    """
    path = Path(path)
    with _reading(path):
        text = path.read_text(encoding="utf-8-sig")
    try:
        counts = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
    except ValueError:
        counts = None
    if not counts or not all(type(count) is int and count >= 0 for count in counts):
        raise BadFileError(
            path, "does not hold class counts; expected a JSON list or lines of numbers from 0 up"
        )
    return list(counts)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a parser makes of a damaged file is reported as a bad file."""
    try:
        yield
    except (BadFileError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise BadFileError(path, "does not exist") from error
    except Exception as error:  # zlib.error, struct.error, SyntaxError, ...: every format has its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise BadFileError(path, f"cannot be read as {path.suffix.lower()}: {reason[0]}") from error


def _first_row(mask: Tensor) -> int:
    return int(mask.flatten(1).any(1).int().argmax() if mask.ndim > 1 else mask.int().argmax())


# ------------------------------------------------------------------------------------------- array formats


@dataclass(frozen=True)
class _Content:
    """What a format found: the description, and a function from rows per chunk to the chunks."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    class_names: tuple[str, ...] | None
    chunks: Callable[[int], Batches]
    path: Path | None = None


@dataclass(frozen=True)
class _Array:
    """An array that is read in chunks of rows, whatever it is stored in.

    Attributes:
        dtype: as messages call it.
        computing: the type its chunks have: a floating-point one, int64, or None if it is neither.
    """

    shape: tuple[int, ...]
    dtype: str
    computing: torch.dtype | None
    chunks: Callable[[int], Generator[Tensor, None, None]]


def _predictions(
    path: Path, arrays: Mapping[str, _Array], class_names: tuple[str, ...] | None = None, found: str = ""
) -> _Content:
    """The arrays by their names, checked to fit each other."""
    found = found or ", ".join(sorted(arrays)) or "nothing"
    kinds = [name for name in _SCORES if name in arrays]
    if len(kinds) == 2:
        raise BadFileError(path, "holds both logits and probabilities; expected exactly one of them")
    if not kinds:
        raise BadFileError(path, f"has neither logits nor probabilities; expected one of them, found {found}")
    if "labels" not in arrays:
        raise BadFileError(path, f"has no labels; expected an integer array named labels, found {found}")
    (kind,) = kinds
    scores, labels = arrays[kind], arrays["labels"]
    if scores.computing is None or not scores.computing.is_floating_point:
        raise BadFileError(path, f"{kind} are {scores.dtype}; expected floating point")
    if labels.computing != torch.long:
        raise BadFileError(path, f"labels are {labels.dtype}; expected integer class numbers")
    if len(scores.shape) < 2:
        raise BadFileError(
            path, f"{kind} have shape {scores.shape}; expected (N, K) or (N, K, *S) for K classes"
        )
    expected = scores.shape[:1] + scores.shape[2:]
    if labels.shape != expected:
        hint = "; the class axis comes second" if labels.shape == scores.shape[:-1] else ""
        raise BadFileError(
            path,
            f"labels have shape {labels.shape}; expected {expected} for {kind} of shape {scores.shape}{hint}",
        )

    def chunks(rows: int) -> Batches:
        with closing(scores.chunks(rows)) as some_scores, closing(labels.chunks(rows)) as some_labels:
            yield from zip(some_scores, some_labels, strict=True)

    return _Content(kind, scores.shape, scores.computing, class_names, chunks)


def _numpy_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    if dtype.kind in "iu":
        return torch.long
    if dtype.kind == "f":
        return torch.float32 if dtype.itemsize <= 4 else torch.float64
    return None


def _to_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """A copy in native byte order: torch wants aligned memory it may write to."""
    types = {"f": np.float32 if array.dtype.itemsize <= 4 else np.float64}
    return torch.from_numpy(np.array(array, dtype=types.get(array.dtype.kind, np.int64), order="C"))


def _tensor_array(tensor: Tensor) -> _Array:
    def chunks(rows: int) -> Generator[Tensor, None, None]:
        for start in range(0, len(tensor), rows):
            yield tensor[start : start + rows].to(computing)

    computing = _torch_dtype(tensor.dtype)
    return _Array(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), computing, chunks)


def _torch_dtype(dtype: torch.dtype) -> torch.dtype | None:
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return None if dtype == torch.bool or dtype.is_complex else torch.long


def _strings(path: Path, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise BadFileError(path, "class_names are not a list of strings; expected one name for each class")
    return tuple(value)


def _npy_header(path: Path, name: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and type, leaving the stream where the data begin."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        header = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        header = np.lib.format.read_array_header_2_0(stream)
    else:
        raise BadFileError(path, f"{name} is stored in version {version} of .npy; expected version 1 or 2")
    shape, fortran, dtype = header
    if dtype.hasobject:
        raise BadFileError(
            path, f"{name} holds pickled objects, which could run code; expected a plain array"
        )
    return shape, fortran, dtype


def _open_npz(path: Path) -> _Content:
    arrays, names = {}, None
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name == "class_names":
                with archive.open(member) as stream:
                    _npy_header(path, name, stream)
                with archive.open(member) as stream:
                    names = _strings(path, np.lib.format.read_array(stream).astype(str).tolist())
            elif name in (*_SCORES, "labels"):
                arrays[name] = _npz_array(path, archive, member, name)
        found = ", ".join(sorted(name.removesuffix(".npy") for name in archive.namelist())) or "nothing"
    return _predictions(path, arrays, names, found)


def _npz_array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> _Array:
    with archive.open(member) as stream:
        shape, fortran, dtype = _npy_header(path, name, stream)
        length = member.file_size - stream.tell()
    if length != prod(shape) * dtype.itemsize:
        raise BadFileError(
            path, f"{name} of shape {shape} and type {dtype} has {length} bytes; it is damaged"
        )

    def chunks(rows: int) -> Generator[Tensor, None, None]:
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            if fortran:  # the first row is complete only at the end
                whole = np.lib.format.read_array(stream)
                for start in range(0, shape[0], rows):
                    yield _to_tensor(whole[start : start + rows])
                return
            _npy_header(path, name, stream)
            for start in range(0, shape[0], rows):
                part = (min(rows, shape[0] - start), *shape[1:])
                # zipfile decompresses as far as is asked for, and checks the sum of a member at its end
                data = stream.read(prod(part) * dtype.itemsize)
                yield _to_tensor(np.frombuffer(data, dtype).reshape(part))

    return _Array(shape, str(dtype), _numpy_dtype(dtype), chunks)


def _open_npy(path: Path) -> _Content:
    stem, _, role = path.stem.rpartition(".")
    if not stem or role not in (*_SCORES, "labels"):
        raise BadFileError(
            path, "is one array; expected NAME.logits.npy (or NAME.probabilities.npy) and NAME.labels.npy"
        )
    files = {name: path.with_name(f"{stem}.{name}{path.suffix}") for name in (*_SCORES, "labels")}
    if role in _SCORES:  # the one that was named, even if both are there
        files = {name: file for name, file in files.items() if name in (role, "labels")}
    present = {name: file for name, file in files.items() if file.is_file()}
    for name in set(files) - set(present):
        if name == "labels" or not set(_SCORES) & set(present):
            expected = " or ".join(file.name for key, file in files.items() if key not in present)
            raise BadFileError(path, f"is one of a pair; expected {expected} beside it")
    arrays = {name: _npy_array(file, name) for name, file in present.items()}
    listing = path.with_name(f"{stem}.class_names.txt")
    names = tuple(listing.read_text(encoding="utf-8-sig").splitlines()) if listing.is_file() else None
    content = _predictions(path, arrays, names)
    return _Content(
        content.kind, content.shape, content.dtype, names, content.chunks, path=present[content.kind]
    )


def _npy_array(path: Path, name: str) -> _Array:
    with _reading(path), path.open("rb") as stream:
        shape, fortran, dtype = _npy_header(path, name, stream)
        offset = stream.tell()
    length = path.stat().st_size - offset
    if length != prod(shape) * dtype.itemsize:
        raise BadFileError(
            path, f"{name} of shape {shape} and type {dtype} has {length} bytes; it is damaged"
        )

    def chunks(rows: int) -> Generator[Tensor, None, None]:
        data = np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")
        for start in range(0, shape[0], rows):
            yield _to_tensor(data[start : start + rows])

    return _Array(shape, str(dtype), _numpy_dtype(dtype), chunks)


def _open_pt(path: Path) -> _Content:
    from pickle import UnpicklingError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how the file was written, which its reader cannot change
            # The format before torch 1.6 is no archive and cannot be mapped into memory.
            data = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError as error:
        raise BadFileError(
            path, "holds pickled objects, or is damaged; expected what torch.save makes of a dict of tensors"
        ) from error
    if not isinstance(data, dict):
        raise BadFileError(path, f"holds a {type(data).__name__}; expected a dict of tensors")
    tensors = {
        name: value.detach()
        for name, value in data.items()
        if isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
    }
    names = _strings(path, data["class_names"]) if "class_names" in data else None
    arrays = {name: _tensor_array(tensor) for name, tensor in tensors.items()}
    return _predictions(path, arrays, names, ", ".join(map(str, data)) or "nothing")


def _open_safetensors(path: Path) -> _Content:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        found = sorted(file.keys())
        arrays = {
            name: _safetensors_array(path, name, file.get_slice(name))
            for name in found
            if name in (*_SCORES, "labels")
        }
    names = None
    if "class_names" in metadata:
        try:
            names = _strings(path, json.loads(metadata["class_names"]))
        except json.JSONDecodeError as error:
            raise BadFileError(
                path, "class_names in the metadata are not JSON; expected a JSON list of strings"
            ) from error
    return _predictions(path, arrays, names, ", ".join(found) or "nothing")


def _safetensors_array(path: Path, name: str, header: Any) -> _Array:
    from safetensors import safe_open

    shape, stored = tuple(header.get_shape()), str(header.get_dtype())
    if stored[0] in "IU":
        computing: torch.dtype | None = torch.long
    else:
        computing = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float32}.get(stored)
        computing = torch.float32 if stored == "BF16" else computing

    def chunks(rows: int) -> Generator[Tensor, None, None]:
        with safe_open(path, framework="pt") as file:
            data = file.get_slice(name)
            for start in range(0, shape[0], rows):
                yield data[start : start + rows].to(computing)

    return _Array(shape, stored, computing, chunks)


# -------------------------------------------------------------------------------------------------- tables


def _columns(path: Path, columns: Sequence[str]) -> tuple[str, list[str], tuple[str, ...]]:
    """From all columns of a table: the kind of its scores, the columns of the classes, and their names."""
    if len(set(columns)) != len(columns):
        repeated = next(name for name in columns if list(columns).count(name) > 1)
        raise BadFileError(path, f"has the column {repeated!r} twice; expected different names")
    scores = {
        kind: [name for name in columns if name.startswith(prefix) and name != prefix]
        for kind, prefix in _COLUMNS.items()
    }
    kinds = [kind for kind, names in scores.items() if names]
    shown = ", ".join(columns[:8]) + (", ..." if len(columns) > 8 else "")
    if len(kinds) == 2:
        raise BadFileError(path, "has both logit_ and probability_ columns; expected exactly one kind")
    if not kinds:
        raise BadFileError(
            path, f"has no scores; expected columns logit_<class> or probability_<class>, found {shown}"
        )
    (kind,) = kinds
    # A class whose column is misspelt would be left out, and every figure would be wrong.
    for name in columns:
        if name not in scores[kind] and re.match(
            r"(logits?|probs?|probabilit(y|ies))([\W\d_]|$)", name, re.I
        ):
            raise BadFileError(
                path, f"has a column {name!r}; expected {_COLUMNS[kind]}<class> for every class"
            )
    if "label" not in columns:
        raise BadFileError(path, f"has no labels; expected a column named label, found {shown}")
    names = tuple(name.removeprefix(_COLUMNS[kind]) for name in scores[kind])
    numbers = [str(number) for number in range(len(names))]
    if all(re.fullmatch(r"\d+", name) for name in names) and list(names) != numbers:
        first, last, final = scores[kind][0], scores[kind][-1], f"{_COLUMNS[kind]}{numbers[-1]}"
        raise BadFileError(
            path,
            f"has columns {first} to {last} in this order; labels count columns from 0, so numbered ones "
            f"must be {_COLUMNS[kind]}0 to {final}",
        )
    return kind, scores[kind], names


def _open_csv(path: Path) -> _Content:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        columns = [name.strip() for name in next(csv.reader(stream), [])]
        rows = sum(not line.isspace() for line in stream)
    kind, scores, names = _columns(path, columns)
    order = [columns.index(name) for name in ("label", *scores)]
    selected = None if order == list(range(len(columns))) else order

    def chunks(size: int) -> Batches:
        start = 0
        with path.open(encoding="utf-8-sig", newline="") as stream:
            next(csv.reader(stream))
            lines = (line for line in stream if not line.isspace())
            while (first := next(lines, None)) is not None:
                try:
                    # A C parser: in one trial 59 MB/s, against 27 of the csv module and 70 of Arrow.
                    table = np.loadtxt(
                        chain([first], lines),
                        dtype=np.float64,
                        comments=None,
                        delimiter=",",
                        quotechar='"',
                        usecols=selected,
                        max_rows=size,
                        ndmin=2,
                    )
                except ValueError as error:
                    raise BadFileError(path, _csv_problem(str(error), start)) from error
                if table.shape[1] != len(order):
                    raise BadFileError(
                        path, f"row {start} has {table.shape[1]} cells; expected {len(columns)}"
                    )
                labels = table[:, 0]
                if (labels % 1 != 0).any():
                    row = int((labels % 1 != 0).argmax())
                    raise BadFileError(
                        path, f"has label {labels[row]} at row {start + row}; expected integer class numbers"
                    )
                yield _to_tensor(table[:, 1:]), torch.from_numpy(labels.astype(np.int64))
                start += len(table)

    return _Content(kind, (rows, len(names)), torch.float64, names, chunks)


def _csv_problem(message: str, start: int) -> str:
    """NumPy's message, with the row counted from the first of the file and not of the chunk."""
    # NumPy counts from 0 where a cell is not a number, and from 1 where cells are missing.
    start -= not message.startswith("could not convert")
    message = message.partition(";")[0].rstrip(".").replace("float64", "a number")
    return re.sub(r"at row (\d+)", lambda match: f"at row {start + int(match[1])}", message)


def _open_parquet(path: Path) -> _Content:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise BadFileError(path, "needs pyarrow to be read: pip install 'calibrant[parquet]'") from error

    with pyarrow.parquet.ParquetFile(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
    kind, scores, names = _columns(path, schema.names)
    if not pyarrow.types.is_integer(schema.field("label").type):
        raise BadFileError(path, f"labels are {schema.field('label').type}; expected integer class numbers")
    for name in scores:
        kept = schema.field(name).type
        if not pyarrow.types.is_floating(kept):
            raise BadFileError(path, f"column {name!r} is {kept}; expected floating point")
    double = any(pyarrow.types.is_float64(schema.field(name).type) for name in scores)
    dtype = np.dtype(np.float64 if double else np.float32)

    def chunks(size: int) -> Batches:
        # With a buffer, columns are read as they are needed and not by whole groups of rows.
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 16) as file:
            start = 0
            for batch in file.iter_batches(batch_size=size, columns=["label", *scores]):
                for name in ("label", *scores):
                    if batch.column(name).null_count:
                        row = start + batch.column(name).is_null().index(True).as_py()
                        raise BadFileError(path, f"column {name!r} is empty at row {row}; expected a number")
                table = np.empty((len(batch), len(scores)), dtype)
                for position, name in enumerate(scores):
                    table[:, position] = batch.column(name).to_numpy(zero_copy_only=False)
                labels = batch.column("label").to_numpy(zero_copy_only=False)
                yield torch.from_numpy(table), _to_tensor(labels)
                start += len(batch)

    return _Content(kind, (rows, len(names)), torch.float64 if double else torch.float32, names, chunks)


FORMATS: dict[str, Callable[[Path], _Content]] = {
    ".npz": _open_npz,
    ".npy": _open_npy,
    ".pt": _open_pt,
    ".safetensors": _open_safetensors,
    ".csv": _open_csv,
    ".parquet": _open_parquet,
}
"""What reads a file, by its suffix."""


# ------------------------------------------------------------------------------------------------- writing

Arrays = Mapping[str, tuple[tuple[int, ...], Iterable[Tensor]]]
"""Arrays by name: the shape of each, and its parts in order, of which there is at least one."""


@contextmanager
def replacing(path: Path | str) -> Iterator[IO[bytes]]:
    """A stream into a file that takes its place when it is complete, so that nobody ever sees half of it.

    Raises:
        OSError: of the kind that prevented it, naming the file.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as stream:
            yield stream
        partial.replace(path)
    except OSError as error:
        raise type(error)(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def replace_file(path: Path | str, content: bytes) -> None:
    """Write a file, or replace it in one step; see `replacing`."""
    with replacing(path) as stream:
        stream.write(content)


def _write_npz(stream: IO[bytes], arrays: Arrays, class_names: Sequence[str] | None) -> None:
    """Write arrays part by part, which NumPy does only with whole ones."""
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
    """Write tensors part by part, which safetensors does only with whole ones."""
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
    """The first part, for its type, and all of them."""
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
"""How predictions are written to a stream, by the suffix of the file; `open_predictions` reads them."""
