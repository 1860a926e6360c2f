"""Readers for tables of predictions: csv and parquet."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from calibrant.extras import MissingPackageError, require
from calibrant.predictions.arrays import to_labels, to_tensor
from calibrant.predictions.file import BadFileError, Batches, PredictionFile

_PREFIXES = {"logits": "logit_", "probabilities": "probability_"}


def _columns(path: Path, columns: Sequence[str]) -> tuple[str, list[str], tuple[str, ...]]:
    """The kind of a table's scores, the columns with scores, and the names of the classes."""
    if len(set(columns)) != len(columns):
        repeated = next(name for name in columns if list(columns).count(name) > 1)
        raise BadFileError(path, f"has the column {repeated!r} twice; expected different names")
    scores = {
        kind: [name for name in columns if name.startswith(prefix) and name != prefix]
        for kind, prefix in _PREFIXES.items()
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
    # Leaving out a class because of a misspelt column would make every figure wrong.
    for name in columns:
        if name not in scores[kind] and re.match(
            r"(logits?|probs?|probabilit(y|ies))([\W\d_]|$)", name, re.I
        ):
            raise BadFileError(
                path, f"has a column {name!r}; expected {_PREFIXES[kind]}<class> for every class"
            )
    if "label" not in columns:
        raise BadFileError(path, f"has no labels; expected a column named label, found {shown}")
    names = tuple(name.removeprefix(_PREFIXES[kind]) for name in scores[kind])
    numbers = [str(number) for number in range(len(names))]
    if all(re.fullmatch(r"\d+", name) for name in names) and list(names) != numbers:
        first, last, final = scores[kind][0], scores[kind][-1], f"{_PREFIXES[kind]}{numbers[-1]}"
        raise BadFileError(
            path,
            f"has columns {first} to {last} in this order; labels count columns from 0, so numbered ones "
            f"must be {_PREFIXES[kind]}0 to {final}",
        )
    return kind, scores[kind], names


def open_csv(path: Path) -> PredictionFile:
    """Columns ``label`` and ``logit_<class>`` or ``probability_<class>``, read as float64."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        columns = [name.strip() for name in _cells(path, stream)]
        rows = sum(not line.isspace() for line in stream)
    kind, scores, names = _columns(path, columns)
    order = [columns.index(name) for name in ("label", *scores)]
    selected = None if order == list(range(len(columns))) else order

    def chunks(size: int) -> Batches:
        start = 0
        with path.open(encoding="utf-8-sig", newline="") as stream:
            _cells(path, stream)
            lines = (line for line in stream if not line.isspace())
            while (first := next(lines, None)) is not None:
                # NumPy takes memory for all rows as soon as it has counted the cells of the first one.
                cells = len(_cells(path, [first]))
                if selected is None and cells != len(columns):
                    raise BadFileError(path, f"row {start} has {cells} cells; expected {len(columns)}")
                try:
                    # NumPy parses in C, twice as fast as the csv module.
                    table = np.loadtxt(
                        chain([first], lines),
                        dtype=np.float64,
                        comments=None,
                        delimiter=",",
                        quotechar='"',
                        usecols=selected,
                        max_rows=min(size, rows - start),
                        ndmin=2,
                    )
                except ValueError as error:
                    raise BadFileError(path, _csv_problem(str(error), start)) from error
                labels = table[:, 0]
                if (labels % 1 != 0).any():
                    row = int((labels % 1 != 0).argmax())
                    raise BadFileError(
                        path, f"has label {labels[row]} at row {start + row}; expected integer class numbers"
                    )
                yield to_tensor(table[:, 1:], torch.float64), to_labels(path, labels, start)
                start += len(table)

    return PredictionFile(path, kind, (rows, len(names)), torch.float64, names, chunks)


def _cells(path: Path, lines: Iterable[str]) -> list[str]:
    """The cells of the first row."""
    try:
        return next(csv.reader(lines), [])
    except csv.Error as error:  # such as a cell of more than 131,072 characters
        raise BadFileError(path, f"cannot be read as CSV: {error}") from error


def _csv_problem(message: str, start: int) -> str:
    """NumPy's message, with the row counted from the start of the file instead of the chunk."""
    # NumPy counts from 0 where a cell is not a number, and from 1 where cells are missing.
    start -= not message.startswith("could not convert")
    message = message.partition(";")[0].rstrip(".").replace("float64", "a number")
    return re.sub(r"at row (\d+)", lambda match: f"at row {start + int(match[1])}", message)


def open_parquet(path: Path) -> PredictionFile:
    """The columns of a csv file, with types; needs pyarrow."""
    try:
        require("parquet", "pyarrow", purpose="reading it")
    except MissingPackageError as error:
        raise BadFileError(path, str(error)) from error
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

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
        # The buffer makes pyarrow read columns as needed instead of whole groups of rows.
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
                yield torch.from_numpy(table), to_labels(path, labels, start)
                start += len(batch)

    return PredictionFile(
        path, kind, (rows, len(names)), torch.float64 if double else torch.float32, names, chunks
    )
