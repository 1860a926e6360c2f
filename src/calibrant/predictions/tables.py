"""Readers for tables of predictions: csv, json lines and parquet.

The scores of a table are either one column for each class, or one column of lists.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from calibrant.extras import MissingPackageError, require
from calibrant.predictions.arrays import to_labels, to_tensor
from calibrant.predictions.file import BadFileError, Batch, Batches, PredictionFile
from calibrant.predictions.names import Answers, Names, is_finite_number, is_number, numbers_in
from calibrant.printable import row_of
from calibrant.sizes import MAX_TEXT

_PREFIXES = {"logits": "logit_", "probabilities": "probability_"}
_LABELS = ("label", "labels")
_NO_NAMES = Names(())

Row = tuple[float, list[float]]
"""A label, and the scores of all classes."""


class _Columns(NamedTuple):
    """The columns of a table that are read."""

    kind: str
    labels: list[str]  # one column, or none
    scores: list[str]
    class_names: tuple[str, ...] | None  # None if the scores are one column of lists
    beside: tuple[str, ...]  # the other columns
    no_labels: str  # as in `PredictionFile`

    @property
    def lists(self) -> bool:
        """Whether the scores are one column of lists."""
        return self.class_names is None

    @property
    def about(self) -> dict[str, Any]:
        """What a `PredictionFile` says of the columns."""
        columns = () if self.lists else tuple(self.scores)
        return {"beside": self.beside, "columns": columns, "no_labels": self.no_labels}

    def names(self) -> Names:
        """What labels that are words stand for."""
        names = self.class_names or ("",)
        if len(names) == 1:  # the column of yes, or lists that may have a single number
            return Answers("" if names[0] in ("logit", "probability") else names[0])
        return Names(() if any(map(is_finite_number, names)) else names, ", as in the names of the columns")


def _columns(path: Path, columns: Sequence[str]) -> _Columns:
    """Find the columns with labels and scores, and check the names of all columns."""
    if len(set(columns)) != len(columns):
        repeated = next(name for name in columns if list(columns).count(name) > 1)
        raise BadFileError(path, f"has the column {repeated!r} twice; expected different names")
    scores = {
        kind: [name for name in columns if name.startswith(prefix) and name != prefix]
        or [name for name in columns if name == prefix[:-1]]  # of single logits
        for kind, prefix in _PREFIXES.items()
    }
    lists = [kind for kind in _PREFIXES if kind in columns]
    kinds = [kind for kind, names in scores.items() if names]
    shown = ", ".join(columns[:8]) + (", ..." if len(columns) > 8 else "")
    if len(kinds) == 2:
        raise BadFileError(path, "has both logit_ and probability_ columns; expected exactly one kind")
    if len(lists) == 2:
        raise BadFileError(path, "has both logits and probabilities; expected exactly one of them")
    if not kinds and not lists:
        raise BadFileError(
            path,
            "has no scores; expected columns logit_<class> or probability_<class>, or a column of lists "
            f"named logits or probabilities, found {shown}",
        )
    (kind,) = kinds or lists
    found = scores[kind] if kinds else [kind]
    # Leaving out a class because of a misspelt column would make every figure wrong.
    for name in columns:
        if name not in found and re.match(r"(logits?|probs?|probabilit(y|ies))([\W\d_]|$)", name, re.I):
            expected = f"{_PREFIXES[kind]}<class> for every class" if kinds else f"no scores beside {kind}"
            raise BadFileError(path, f"has a column {name!r}; expected {expected}")
    labels = [name for name in _LABELS if name in columns]
    no_labels = "" if labels else f"has no labels; expected a column named label, found {shown}"
    if len(labels) == 2:
        raise BadFileError(path, "has columns label and labels; expected exactly one of them")
    beside = tuple(name for name in columns if name not in (*labels, *found))
    if not kinds:
        return _Columns(kind, labels, found, None, beside, no_labels)
    names = tuple(name.removeprefix(_PREFIXES[kind]) for name in found)
    # If a name is a number, labels count columns; but a single column is not counted: `probability_1` is yes.
    for place, name in enumerate(names if len(names) > 1 else ()):
        if is_finite_number(name) and name != str(place):
            prefix = _PREFIXES[kind]
            raise BadFileError(
                path,
                f"has the column {found[place]} where {prefix}{place} is expected; labels count columns from "
                f"0, so numbered ones must be {prefix}0 to {prefix}{len(names) - 1} in this order",
            )
    return _Columns(kind, labels, found, names, beside, no_labels)


def open_csv(path: Path) -> PredictionFile:
    """Columns ``label`` and ``logit_<class>`` or ``probability_<class>``, or lists; read as float64.

    `delimiter_of` tells what separates the columns.
    """
    delimiter = delimiter_of(path)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        columns = [name.strip() for name in _cells(path, stream, delimiter)]
        rows = sum(not line.isspace() for line in stream)
    if len(columns) == 1 and "\t" in columns[0]:
        raise BadFileError(path, "has columns separated by tabs; expected commas or semicolons")
    found = _columns(path, columns)
    labels = found.names()
    careful = replace(
        _untyped(path, found, rows, labels, lambda: _csv_rows(path, columns, found, labels)),
        _line=lambda row: next(islice(_filled(path, found), row, None))[0],
    )
    if found.lists or not found.labels or columns != [*found.labels, *found.scores]:
        return careful

    def chunks(size: int) -> Batches:
        start = 0
        with path.open(encoding="utf-8-sig", newline="") as stream:
            _cells(path, stream, delimiter)
            lines = (line for line in stream if not line.isspace())
            for first in lines:
                # NumPy takes memory for all rows as soon as it has counted the cells of the first one.
                if len(_cells(path, [first], delimiter)) != len(columns):
                    break
                try:
                    # NumPy parses in C, twice as fast as the csv module.
                    table = np.loadtxt(
                        chain([first], lines),
                        dtype=np.float64,
                        comments=None,
                        delimiter=delimiter,
                        quotechar='"',
                        max_rows=min(size, rows - start),
                        ndmin=2,
                    )
                except ValueError:
                    break
                if not np.isfinite(table[:, 0]).all():  # perhaps the name of a class
                    break
                yield _batch(path, table[:, 0], table[:, 1:], start)
                start += len(table)
            else:
                return
        # A label that is a name, or an error, which is found cell by cell.
        remaining = islice(_csv_rows(path, columns, found, labels), start, None)
        yield from _in_batches(path, found.kind, len(found.scores), remaining, size, start)

    return replace(careful, _chunks=chunks)


def _untyped(
    path: Path, columns: _Columns, rows: int, labels: Names, read: Callable[[], Iterator[Row]]
) -> PredictionFile:
    """A table without types, whose rows ``read`` yields; lists are as long as the first one."""
    kind, classes = columns.kind, len(columns.scores)
    words: tuple[str, ...] = ()
    if isinstance(labels, Answers):
        if columns.lists:
            classes = len(next(read(), (0, ()))[1])
        words = labels.settle(label for label, _ in read())

    def chunks(size: int) -> Batches:
        return _in_batches(path, kind, classes, read(), size)

    shape, names = (rows, classes), columns.class_names
    return PredictionFile(path, kind, shape, torch.float64, names, chunks, words=words, **columns.about)


def _in_batches(
    path: Path, kind: str, classes: int, rows: Iterator[Row], size: int, start: int = 0
) -> Batches:
    """Batches of ``size`` rows. ``start`` is the number of the first row."""
    while part := list(islice(rows, size)):
        for row, (_, scores) in enumerate(part, start):
            if len(scores) != classes:
                raise BadFileError(
                    path,
                    f"{row_of(path, row)} has {len(scores)} {kind}; expected {classes}, as in the first row",
                )
        yield _batch(path, np.array([label for label, _ in part]), [scores for _, scores in part], start)
        start += len(part)


def _batch(path: Path, labels: np.ndarray[Any, Any], scores: ArrayLike, start: int) -> Batch:
    """Scores and labels as tensors. ``start`` is the number of the first row."""
    return to_tensor(np.array(scores, np.float64), torch.float64), to_labels(path, labels, start)


def _csv_rows(path: Path, columns: Sequence[str], wanted: _Columns, words: Names) -> Iterator[Row]:
    """The rows of a CSV file, cell by cell. Only columns that are not read may be missing at the end."""
    needed = [columns.index(name) for name in (*wanted.labels, *wanted.scores)]
    fewest = 1 + max(needed) if len(needed) < len(columns) else len(columns)
    for number, (line, row) in enumerate(_filled(path, wanted), 1):
        where = f"row {number} (line {line} of the file)"
        if not fewest <= len(row) <= len(columns):
            raise BadFileError(path, f"{where} has {len(row)} cells; expected {len(columns)}")
        scores = [row[place].strip() for place in needed]
        label = scores.pop(0) if wanted.labels else "0"
        if wanted.lists:
            (text,) = scores
            inner = text[1:-1]
            # JSON and Python separate numbers by commas, NumPy by spaces.
            scores = inner.split(",") if "," in inner else inner.split()
        values = numbers_in(scores)
        if wanted.lists and (values is None or (text[:1], text[-1:]) != ("[", "]")):
            start = text if len(text) < 40 else f"{text[:40]}..."
            raise BadFileError(
                path, f"has {start!r} at {where}; expected a list of numbers such as [1.5, -0.3]"
            )
        names = words if len(scores) == 1 or not wanted.lists else _NO_NAMES
        meant = names.meaning(label)
        if values is None or meant is None:
            name, cell = "".join(wanted.labels), label
            if meant is not None:
                named = zip(wanted.scores, scores, strict=True)
                name, cell = next((name, cell) for name, cell in named if not is_number(cell))
            shown = f"has {cell!r} in" if cell else "has an empty cell in"
            expected = names.expected if meant is None else "a number"
            if meant is not None and is_number(cell.replace(",", ".")):
                expected += " with a decimal point"
            raise BadFileError(path, f"{shown} column {name!r} at {where}; expected {expected}")
        yield meant, values


def _filled(path: Path, wanted: _Columns) -> Iterator[tuple[int, list[str]]]:
    """The line number and cells of each row.

    Blank lines are skipped; so are rows of empty cells if scores are lists.
    """
    strict = not wanted.lists
    with path.open(encoding="utf-8-sig", newline="") as stream:
        cells = csv.reader(stream, delimiter=delimiter_of(path))
        next(cells)
        for row in cells:
            if any(cell.strip() for cell in row) or (strict and len(row) > 1):
                yield cells.line_num, row


def rewritten(path: Path, batches: Iterable[Tensor]) -> Iterator[list[str]]:
    """The heading and the rows of a CSV file of predictions, with these scores in place of its own."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        heading = _cells(path, stream, delimiter_of(path))
    yield heading
    columns = [name.strip() for name in heading]
    wanted = _columns(path, columns)
    places = [columns.index(name) for name in wanted.scores]
    rows = _filled(path, wanted)
    for batch in batches:
        for scores in batch.tolist():
            _, row = next(rows)
            for place, cell in zip(places, [scores] if wanted.lists else scores, strict=True):
                row[place] = str(cell)
            yield row


def open_jsonl(path: Path) -> PredictionFile:
    """One JSON object in each line, with the columns of a csv file; read as float64."""
    with path.open(encoding="utf-8-sig") as stream:
        lines = _lines(path, stream)
        first = next(lines, None)
        rows = sum(1 for _ in lines) + (first is not None)
    columns = _columns(path, list(_object(path, first, 0)) if first is not None else [])
    labels = columns.names()
    return _untyped(path, columns, rows, labels, lambda: _json_rows(path, columns, labels))


def _lines(path: Path, stream: IO[str]) -> Iterator[str]:
    """The lines that are not blank. Long lines are refused before they fill the memory."""
    while line := stream.readline(MAX_TEXT + 1):
        if len(line) > MAX_TEXT:
            raise BadFileError(path, f"has a line of more than {MAX_TEXT >> 20} MiB; expected an object")
        if not line.isspace():
            yield line


def _object(path: Path, line: str, row: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadFileError(
            path, f"is not JSON at {row_of(path, row)}: {error}; expected one object per line"
        ) from error
    if not isinstance(value, dict):
        found = type(value).__name__
        raise BadFileError(path, f"has a {found} at {row_of(path, row)}; expected an object")
    return value


def _json_rows(path: Path, columns: _Columns, words: Names) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(_lines(path, stream)):
            row = _object(path, line, number)
            for name in (*columns.labels, *columns.scores):
                if name not in row:
                    where = row_of(path, number)
                    raise BadFileError(path, f"has no {name!r} at {where}; the first row has it")
            label = row[columns.labels[0]] if columns.labels else 0
            scores = row[columns.kind] if columns.lists else [row[name] for name in columns.scores]
            if not isinstance(scores, list) or not set(map(type, scores)) <= {int, float}:
                found = f"{columns.kind} at {row_of(path, number)}"
                raise BadFileError(path, f"{found} are not a list of numbers; expected one per class")
            names = words if len(scores) == 1 or not columns.lists else _NO_NAMES
            meant: Any = label if names.takes(label) else None
            if isinstance(label, bool | str):
                meant = names.number(str(label))
            if type(meant) not in (int, float):
                found = f"has label {label!r} at {row_of(path, number)}"
                raise BadFileError(path, f"{found}; expected {names.expected}")
            yield meant, scores


def delimiter_of(file: Path) -> str:
    """What separates the values of a CSV or TSV file.

    Tabs for ``.tsv``. Else commas, or semicolons if the first line has semicolons and no comma.
    """
    if file.suffix.lower() == ".tsv":
        return "\t"
    with file.open(encoding="utf-8-sig", newline="") as stream:
        first = stream.readline(1 << 20)
    return ";" if ";" in first and "," not in first else ","


def _cells(path: Path, lines: Iterable[str], delimiter: str) -> list[str]:
    """The cells of the first row."""
    try:
        return next(csv.reader(lines, delimiter=delimiter), [])
    except csv.Error as error:  # such as a cell of more than 131,072 characters
        raise BadFileError(path, f"cannot be read as CSV: {error}") from error


def open_parquet(path: Path) -> PredictionFile:
    """The columns of a csv file, with types; needs pyarrow.

    Class names of a column of lists are those of the label, if Hugging Face's ``datasets`` wrote them.
    """
    try:
        require("parquet", "pyarrow", purpose="reading it")
    except MissingPackageError as error:
        raise BadFileError(path, str(error)) from error
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    types = pyarrow.types
    with pyarrow.parquet.ParquetFile(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
        columns = _columns(path, schema.names)
        kind, labels, scores, names, *_ = columns
        kept = {name: schema.field(name).type for name in scores}
        given = schema.field(labels[0]).type if labels else pyarrow.int64()
        strings = ("string", "large_string", "string_view")
        texts = str(given) in strings or types.is_dictionary(given)
        classes = len(scores)
        if columns.lists:
            found, expected = kept[kind], "a list of floating-point numbers in every row"
            if not (types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found)):
                raise BadFileError(path, f"column {kind!r} is {found}; expected {expected}")
            kept[kind] = found.value_type
            first = next(file.iter_batches(batch_size=1, columns=[kind]), None) if rows else None
            classes = 0 if first is None else len(first.column(kind)[0].as_py() or ())
            names = _class_labels(schema, labels[0]) if labels else None
        words = columns.names() if classes == 1 or not columns.lists else _NO_NAMES
        numeric = types.is_integer(given) or types.is_floating(given)
        if not (numeric or (words.numbers and (texts or types.is_boolean(given)))):
            raise BadFileError(path, f"labels are {given}; expected integer class numbers")
        seen: tuple[str, ...] = ()
        if isinstance(words, Answers) and texts:
            cells = (cell for batch in file.iter_batches(columns=labels) for cell in batch.column(0))
            seen = words.settle(words.meaning(cell.as_py() or "") for cell in cells)
        for name in scores:
            if not types.is_floating(kept[name]):
                raise BadFileError(
                    path,
                    f"column {name!r} is {schema.field(name).type}; expected "
                    + (expected if columns.lists else "floating point"),
                )
    double = any(types.is_float64(kept[name]) for name in scores)
    dtype = np.dtype(np.float64 if double else np.float32)

    def chunks(size: int) -> Batches:
        # The buffer makes pyarrow read columns as needed instead of whole groups of rows.
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 16) as file:
            start = 0
            for batch in file.iter_batches(batch_size=size, columns=[*labels, *scores]):
                for name in (*labels, *scores):
                    if batch.column(name).null_count:
                        row = row_of(path, start + batch.column(name).is_null().index(True).as_py())
                        raise BadFileError(path, f"column {name!r} is empty at {row}; expected a number")
                if columns.lists:
                    table = _lists(path, batch.column(kind), kind, classes, start).astype(dtype)
                else:
                    table = np.empty((len(batch), len(scores)), dtype)
                    for position, name in enumerate(scores):
                        table[:, position] = batch.column(name).to_numpy(zero_copy_only=False)
                numbers = np.zeros(len(batch))
                if labels:
                    numbers = batch.column(labels[0]).to_numpy(zero_copy_only=False)
                if not numeric:
                    numbers = words.numbers_of(path, numbers, start)
                yield torch.from_numpy(table), to_labels(path, numbers, start)
                start += len(batch)

    stored = torch.float64 if double else torch.float32
    return PredictionFile(path, kind, (rows, classes), stored, names, chunks, words=seen, **columns.about)


def _lists(path: Path, column: Any, kind: str, classes: int, start: int) -> np.ndarray[Any, Any]:
    """The numbers in a column of lists, ``(n, K)``. ``start`` is the row of the first."""
    # Lists of a fixed size have no offsets.
    offsets = np.array([0, classes]) if not hasattr(column, "offsets") else column.offsets.to_numpy()
    lengths = np.diff(offsets)
    if (lengths != classes).any():
        place = int((lengths != classes).argmax())
        row = row_of(path, start + place)
        raise BadFileError(
            path, f"{row} has {lengths[place]} {kind}; expected {classes}, as in the first row"
        )
    values = column.flatten()
    if values.null_count:
        row = row_of(path, start + values.is_null().index(True).as_py() // classes)
        raise BadFileError(path, f"{kind} are empty at {row}; expected a number for every class")
    numbers: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    return numbers.reshape(-1, classes)


def _class_labels(schema: Any, label: str) -> tuple[str, ...] | None:
    """The names in a label's ``ClassLabel``, if ``datasets`` wrote the file."""
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        names = about["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names)
