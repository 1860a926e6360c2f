"""The columns of a table: read from CSV, TSV and Parquet files, as numbers, texts or categories."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrant.extras import require
from calibrant.predictions.tables import delimiter_of
from calibrant.printable import one_line
from calibrant.sizes import check_memory
from calibrant.training.data.safe_readers import check_suffix, expecting_utf8, present
from calibrant.training.data.text.tables import separated

Columns = Mapping[str, Sequence[Any]]
"""The cells of a table by the names of its columns: texts, numbers, or None where there is nothing."""


class FileColumns(dict[str, Sequence[Any]]):
    """`Columns` of a file."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(columns)
        self.path = path


class BadCellError(ValueError):
    """A cell of a column cannot be used; the message is its content. ``index`` is its row."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index


def place_of(columns: Columns, index: int) -> str:
    """A row, counted from 1, for messages; of columns of a file also the file, of a text file the line."""
    row = f"row {index + 1}"
    if not isinstance(columns, FileColumns):
        return row
    if columns.path.suffix.lower() == ".parquet":
        return f"{columns.path}, {row}"
    line, _ = next(islice(separated(columns.path), index, None))
    return f"{columns.path}, {row} (line {line} of the file)"


SUFFIXES = (".csv", ".tsv", ".parquet")
"""The suffixes of files with tables, in lower case."""

_MISSING = frozenset(("", "?", "na", "n/a", "nan", "none", "null"))
"""Texts, in lower case, that stand for a missing value."""

_BYTES = 64
"""The memory of a short text in Python, and of its place in a list."""


MAX_CATEGORIES = 1000
"""The most different texts of a column."""

_ALWAYS_ALLOWED = 20
"""Different values that a column may have, however few its rows are."""


def read_columns(path: Path) -> FileColumns:
    """The columns of a CSV, TSV or Parquet file.

    CSV and TSV files have column names in the first line, and are in UTF-8; `delimiter_of` tells what
    separates their values.
    """
    check_suffix(path, SUFFIXES)
    present(path, "a table")
    columns = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_separated(path)
    if not columns or not len(next(iter(columns.values()))):
        raise ValueError(f"{path} has no rows: expected column names, and at least one row")
    return FileColumns(path, columns)


def _read_separated(path: Path) -> Columns:
    # Cells of two characters and a separator take the most memory for their bytes.
    check_memory(_BYTES * path.stat().st_size // 3, f"the table {path}")
    try:
        with expecting_utf8(path):
            with path.open(encoding="utf-8-sig", newline="") as stream:
                names = next(csv.reader(stream, delimiter=delimiter_of(path)), [])
            _check_names(path, names)
            columns: dict[str, list[str]] = {name: [] for name in names}
            for line, row in separated(path):
                for name, cells in columns.items():
                    cell = row[name]
                    if cell is None:
                        count = sum(value is not None for value in row.values())
                        raise ValueError(f"{path}, line {line}: {count} values, expected {len(row)}")
                    cells.append(cell)
    except csv.Error as error:
        raise ValueError(f"{path}, line 1: {error}") from error
    return columns


def _read_parquet(path: Path) -> Columns:
    require("parquet", "pyarrow", purpose=f"reading {path}")
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            _check_names(path, schema.names)
            check_memory(_size(file.metadata, schema), f"the table {path}")
        # Texts that repeat are in the file once, and once in memory.
        texts = [field.name for field in schema if pyarrow.types.is_string(field.type)]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            table = file.read()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(one_line(f"{path} cannot be read as a Parquet table: {error}")) from error
    return arrow_columns(table)


def _size(metadata: Any, schema: Any) -> int:
    """The memory that a table takes in bytes: 8 for each number; for texts, what they decode to, and more."""
    numbers = sum(_is_number(field.type) for field in schema)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    texts = sum(each.total_uncompressed_size for each in chunks if each.physical_type == "BYTE_ARRAY")
    return int(metadata.num_rows * (8 * numbers + _BYTES * (len(schema) - numbers)) + texts)


def arrow_columns(table: Any) -> Columns:
    """The columns of a table of pyarrow: arrays of numbers, and lists of everything else."""
    require("parquet", "pyarrow", purpose="a table of pyarrow")
    from pyarrow import types

    columns: dict[str, Any] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        # As an array, integers with missing ones among them would be rounded to floating point.
        if _is_number(field.type) and not (types.is_integer(field.type) and column.null_count):
            columns[field.name] = column.to_numpy()
        elif types.is_dictionary(field.type):
            cells = columns[field.name] = []
            for chunk in column.chunks:
                values = [*chunk.dictionary.to_pylist(), None]  # equal texts are the same object
                cells += [values[-1 if place is None else place] for place in chunk.indices.to_pylist()]
        else:
            columns[field.name] = column.to_pylist()
    return columns


def _is_number(kind: Any) -> bool:
    """Whether a type of pyarrow is one of numbers."""
    require("parquet", "pyarrow", purpose="a table of pyarrow")
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind))


def _check_names(path: Path, names: Sequence[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"{path} has the column {repeated[0]!r} twice: expected different names")


def is_missing(value: Any) -> bool:
    """Whether a cell has no value: None, NaN, or one of the usual texts such as ``NA``.

    >>> [is_missing(value) for value in (None, float("nan"), " NA", "", "?", 0, "no")]
    [True, True, True, True, True, False, False]
    """
    if isinstance(value, str):
        return value.strip().lower() in _MISSING
    if isinstance(value, float | np.floating):
        return bool(value != value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")  # those of pandas


def as_numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """The cells of a column as numbers, NaN for missing values.

    Raises:
        BadCellError: a cell is not a number.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        return values.astype(np.float64)
    numbers = []
    for row, value in enumerate(values):
        try:
            number = float(value)
            if isinstance(value, str) and "_" in value:  # Python allows underscores between digits
                raise ValueError(value)
        except (TypeError, ValueError, OverflowError) as error:
            if not is_missing(value):
                raise BadCellError(row, f"has {str(value)[:40]!r}") from error
            number = nan
        numbers.append(number)
    return np.array(numbers, np.float64)


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether a column has only numbers and missing values; booleans are no numbers.

    >>> is_numeric(["1", "2.5e3", "", "NA"]), is_numeric(["1", "one"]), is_numeric([True, False])
    (True, False, False)
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        return True
    if any(isinstance(value, bool | np.bool_) for value in values):
        return False
    try:
        as_numbers(values)
    except ValueError:
        return False
    return True


def as_texts(values: Sequence[Any]) -> list[str]:
    """The cells of a column as texts, "" for missing values.

    A whole number is written without decimals, whatever its type: a column of whole numbers becomes one of
    floating-point numbers as soon as a value is missing. True and false are written in lower case: in files
    they may have any.

    >>> as_texts(["red ", None, 3, 3.0, "3.0", 2.5, True, "TRUE"])
    ['red', '', '3', '3', '3', '2.5', 'true', 'true']
    """
    return ["" if is_missing(value) else _uniform(str(value).strip()) for value in values]


def _uniform(text: str) -> str:
    if text.endswith("0"):
        return re.sub(r"^([+-]?\d+)\.0+$", r"\1", text)
    lower = text.lower() if len(text) in (4, 5) else ""
    return lower if lower in ("true", "false") else text


_YEAR, _MONTH, _DAY = r"(19|20)\d\d", r"(0?[1-9]|1[0-2])", r"(0?[1-9]|[12]\d|3[01])"
_NOT_CATEGORIES = {
    "numbers with commas: write 1.5 for 1,5 and 1234 for 1,234": (
        r"[+-]?(\d+(,\d+)?|\d{1,3}(,\d{3})*(\.\d+)?)"
    ),
    "dates: make numbers of them, such as the month or the days since a day": (
        rf"({_YEAR}[-/.]{_MONTH}[-/.]{_DAY}|({_DAY}[-/.]{_MONTH}|{_MONTH}/{_DAY})[-/.]{_YEAR})([ T].*)?"
    ),
}
"""What columns of texts can be that are not meant as categories, and the form of such texts."""


def looks_like(texts: Sequence[str]) -> str:
    """What a column of texts seems to be instead of categories, and what to do about it; "" if nothing.

    >>> looks_like(["2020-01-31", "2020-02-01", "2020-02-02"])
    'they look like dates: make numbers of them, such as the month or the days since a day'
    """
    distinct = {text: None for text in texts if text}
    for what, form in _NOT_CATEGORIES.items():
        if len(distinct) > 2 and all(re.fullmatch(form, text) for text in distinct):
            return f"they look like {what}"
    odd = [text for text in distinct if not is_numeric([text])]
    words = [text for text in odd if not is_numeric([re.sub("[,%$€£]", "", text)])]
    if odd and len(distinct) > _ALWAYS_ALLOWED and 2 * len(words) < len(distinct):
        return (
            f"{len(distinct) - len(words)} of them look like numbers, but texts such as {odd[0][:40]!r} "
            "are not plain numbers: write 1234.5, and leave cells without a number empty"
        )
    return ""


def repeats(different: int, rows: int) -> bool:
    """Whether so many different values of so many rows can be classes or categories."""
    return different <= max(_ALWAYS_ALLOWED, rows // 2)


def too_many_categories(values: Sequence[Any]) -> bool:
    """Whether a column of texts has too many different ones to be categorical, as names or comments have."""
    different = len(set(as_texts(values)))
    return different > MAX_CATEGORIES or not repeats(different, len(values))


def counts_rows(values: Sequence[Any]) -> bool:
    """Whether a column has the number of the row, from any start."""
    if len(values) < 3:
        return False
    # The first rows decide for most columns.
    return all(is_numeric(some) and (np.diff(as_numbers(some)) == 1).all() for some in (values[:9], values))
