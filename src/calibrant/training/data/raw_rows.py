"""Rows of a table as the argument of a model."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant.arguments import nearest
from calibrant.options import check_type, to_toml_value
from calibrant.printable import first_few
from calibrant.training.data.columns import (
    BadCellError,
    Columns,
    FileColumns,
    arrow_columns,
    as_numbers,
    as_texts,
    is_numeric,
    looks_like,
    place_of,
    read_columns,
    too_many_categories,
)
from calibrant.training.data.preparation import Preparation
from calibrant.warning import warn


def how_to_drop(names: Sequence[str], dropped: Sequence[str]) -> str:
    """How to leave out further columns. The list has all of them, because it replaces the one before.

    >>> print(how_to_drop(["since"], ["id"]))
    leave it out with --set 'data.drop=["id", "since"]' or, in a recipe, drop = ["id", "since"] under [data]
    """
    every = to_toml_value([*dropped, *names])
    option, them = shlex.quote(f"data.drop={every}"), "it" if len(names) == 1 else "them"
    return f"leave {them} out with --set {option} or, in a recipe, drop = {every} under [data]"


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, standardised; with ``missing``, a further input tells missing values."""

    name: str
    mean: float
    std: float
    missing: bool

    @property
    def width(self) -> int:
        """The number of inputs."""
        return 2 if self.missing else 1

    def fill(self, inputs: NDArray[np.float32], values: Sequence[Any]) -> None:
        """Write the inputs ``(N, width)`` for these cells, or raise a `BadCellError`."""
        numbers = _finite(values)
        missing = np.isnan(numbers)
        with np.errstate(over="ignore"):
            standardised = np.where(missing, 0.0, (numbers - self.mean) / self.std).astype(np.float32)
        if not np.isfinite(standardised).all():
            row = int((~np.isfinite(standardised)).argmax())
            raise BadCellError(row, f"has {values[row]}, which is too large")
        inputs[:, 0] = standardised
        if self.missing:
            inputs[:, 1] = missing

    @classmethod
    def fit(cls, name: str, values: Sequence[Any]) -> Self:
        """The column with mean and standard deviation of these cells."""
        numbers = as_numbers(values)
        known = numbers[~np.isnan(numbers)]
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = (float(known.mean()), float(known.std())) if len(known) else (0.0, 1.0)
        if not isfinite(mean) or not isfinite(std):
            raise ValueError("its numbers are infinite or too large")
        if len(known) == 0 or known.min() == known.max():  # rounding may make the deviation more than 0
            std = 1.0
        return cls(name, mean, std, len(known) < len(numbers))


@dataclass(frozen=True)
class Categories:
    """A column of categories, with one input for each; "" is a missing value."""

    name: str
    categories: tuple[str, ...]

    @property
    def width(self) -> int:
        """The number of inputs."""
        return len(self.categories)

    def fill(self, inputs: NDArray[np.float32], values: Sequence[Any]) -> None:
        """Write the inputs ``(N, width)`` for these cells; they are 0 before."""
        places = {category: place for place, category in enumerate(as_texts(self.categories))}
        for row, text in enumerate(as_texts(values)):
            if text in places:
                inputs[row, places[text]] = 1

    @classmethod
    def fit(cls, name: str, values: Sequence[Any]) -> Self:
        """The column with the categories of these cells."""
        return cls(name, tuple(sorted(set(as_texts(values)))))


Column = Numbers | Categories


class Rows(Preparation):
    """From rows of a table to standardised numbers and one-hot categories ``(N, features)``, float32.

    The rows are a list of dictionaries, a DataFrame of pandas or polars, a table of pyarrow, or a dictionary
    of columns. Every dictionary has the same keys, with None for a missing value. Names of columns that are
    no texts, such as numbers, are taken as texts.

    Attributes:
        columns: the columns that the model uses, in the order of its inputs.
        ignored: columns that may be there, and are not used: the target, and those left out.
        target: the columns of the target; bundles of earlier versions do not tell.

    >>> rows = Rows([Numbers("age", 40.0, 10.0, False), Categories("colour", ("blue", "red"))])
    >>> rows([{"age": 50, "colour": "red"}, {"age": None, "colour": None}])
    tensor([[1., 0., 1.],
            [0., 0., 0.]])
    """

    kind: ClassVar[str] = "rows"
    graph_inputs = (
        "not the columns of the table, but the standardised numbers and encoded categories that "
        "calibrant.load(RUN).preparation(rows) returns"
    )

    def __init__(
        self, columns: Iterable[Column], ignored: Iterable[str] = (), target: Iterable[str] = ()
    ) -> None:
        self.columns, self.ignored, self.target = tuple(columns), tuple(ignored), tuple(target)

    @property
    def features(self) -> int:
        """The number of inputs of the model."""
        return sum(column.width for column in self.columns)

    @classmethod
    def fit(
        cls,
        columns: FileColumns,
        rows: Tensor,
        categorical: Sequence[str],
        ignored: Sequence[str],
        target: Sequence[str],
    ) -> Self:
        """The preparation by the training rows of a table.

        ``columns`` are without those that are ``ignored``, which new rows may have besides.
        """
        if not columns:
            listed = ", ".join(map(repr, ignored))
            raise ValueError(f"{columns.path} has no column besides {listed}: expected some")
        fitted: list[Column] = []
        dropped = [name for name in ignored if name not in target]
        for name, values in columns.items():
            where = f"{columns.path}, column {name!r}"
            if name not in categorical and is_numeric(values):
                with _naming_cells(columns, name):
                    numbers = _finite(values)
                try:
                    fitted.append(Numbers.fit(name, numbers[rows.numpy()]))
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
                continue
            advice, texts = how_to_drop([name], dropped), as_texts(values)
            meant = "" if name in categorical else looks_like(texts)
            if too_many_categories(values):
                different = len(set(texts) - {""})
                raise ValueError(
                    f"{where}: {different} different texts in {len(values)} rows are no categories; "
                    f"{meant and f'{meant}. Or '}{advice}"
                )
            if meant:
                warn(
                    f"{where}: its texts become categories; {meant}. Or {advice}. If they are meant as "
                    f'categories, set categorical = ["{name}"]'
                )
                dropped.append(name)  # in the advice about further columns
            fitted.append(Categories.fit(name, [values[row] for row in rows.tolist()]))
        return cls(fitted, ignored, target)

    def __call__(self, raw: Any) -> Tensor:
        columns = _columns_of(raw, [column.name for column in self.columns])
        inputs = self.prepared(columns)
        start = 0
        for column in self.columns if len(inputs) else ():
            if isinstance(column, Categories):
                _warn_of_unknown(column, columns[column.name], inputs[:, start : start + column.width])
            start += column.width
        return inputs

    def prepared(self, columns: Columns) -> Tensor:
        """The inputs ``(N, features)`` for these columns; unlike a call, without a word on unknown values."""
        names = [column.name for column in self.columns]
        unknown = [name for name in columns if name not in names and name not in self.ignored]
        lacking = [name for name in names if name not in columns]
        size = len(next(iter(columns.values()))) if columns else 0
        if lacking and columns:
            source = f"{columns.path}: " if isinstance(columns, FileColumns) else ""
            raise ValueError(
                f"{source}the rows have no column {first_few(map(repr, lacking))}"
                f"{nearest(lacking[0], unknown)}; expected {', '.join(map(repr, names))}"
            )
        if unknown:
            warn(f"the model does not use the columns {first_few(map(repr, unknown))}")
        inputs = np.zeros((size, self.features), np.float32)
        start = 0
        for column in self.columns if size else ():
            with _naming_cells(columns, column.name):
                column.fill(inputs[:, start : start + column.width], columns[column.name])
            start += column.width
        return torch.from_numpy(inputs)

    def read(self, path: Path) -> tuple[Columns, list[str]]:
        columns = read_columns(path)
        return columns, [str(row + 1) for row in range(len(next(iter(columns.values()))))]

    def beside(self, path: Path, raw: Columns) -> Columns:
        # The output has a column called name with other content, which would be taken for that of the table.
        used = {column.name for column in self.columns} - {"name"} | {*self.target}
        return {name: cells for name, cells in raw.items() if name not in used}

    def state(self) -> dict[str, Any]:
        columns = [asdict(column) for column in self.columns]
        return {"columns": columns, "ignored": list(self.ignored), "target": list(self.target)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        try:
            ignored = check_type("ignored", state["ignored"], tuple[str, ...])
            target = check_type("target", state.get("target", []), tuple[str, ...])
            return cls([_column(stored) for stored in state["columns"]], ignored, target)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of prepared rows: {error}") from error


def _finite(values: Sequence[Any]) -> NDArray[np.float64]:
    """The numbers in a column, or a `BadCellError` if one is infinite."""
    numbers = as_numbers(values)
    if np.isinf(numbers).any():
        raise BadCellError(int(np.isinf(numbers).argmax()), "has an infinite number")
    return numbers


@contextmanager
def _naming_cells(columns: Columns, name: str) -> Iterator[None]:
    """Let errors about a cell name its place and column."""
    try:
        yield
    except BadCellError as error:
        place = place_of(columns, error.index)
        raise ValueError(f"{place}: column {name!r} {error}, expected a finite number") from error


def _warn_of_unknown(column: Categories, values: Sequence[Any], inputs: Tensor) -> None:
    """Tell of values that are no category of the model; missing values are not meant."""
    rows = (~inputs.bool().any(1)).nonzero().flatten().tolist()
    unknown = [text for text in as_texts([values[row] for row in rows]) if text]
    if unknown:
        warn(
            f"column {column.name!r}: {len(unknown)} of {len(values)} values are unknown to the model, such "
            f"as {unknown[0][:40]!r}; they count as no category"
        )


def _column(stored: Mapping[str, Any]) -> Column:
    """The column with this state."""
    name = check_type("name", stored["name"], str)
    if "categories" in stored:
        return Categories(name, check_type("categories", stored["categories"], tuple[str, ...]))
    mean, std = (check_type(key, stored[key], float) for key in ("mean", "std"))
    if not isfinite(mean) or not 0 < std < inf:
        raise ValueError(f"mean {mean} and std {std} of column {name!r}, expected finite numbers")
    return Numbers(name, mean, std, check_type("missing", stored["missing"], bool))


def _by_text(names: Iterable[Any]) -> dict[str, Any]:
    """The names of columns by their texts: in a DataFrame they may be numbers."""
    found: dict[str, Any] = {}
    for name in names:
        if str(name) in found:
            raise ValueError(f"the rows have the column {str(name)!r} twice: expected different names")
        found[str(name)] = name
    return found


def _columns_of(raw: Any, used: Sequence[str]) -> Columns:
    """The columns of rows in any form that `Rows` takes; of dictionaries, each needs the ``used`` columns."""
    if hasattr(raw, "column_names") and hasattr(raw, "schema"):
        return arrow_columns(raw)
    if hasattr(raw, "columns") and hasattr(raw, "__len__"):  # a DataFrame of pandas or polars
        names = _by_text(raw.columns)
        return {text: list(raw[name]) for text, name in names.items()}
    if isinstance(raw, FileColumns):
        return raw
    if isinstance(raw, Mapping):
        lists = [isinstance(values, list | tuple | np.ndarray) for values in raw.values()]
        if all(lists) and len({len(values) for values in raw.values()}) <= 1:
            return {text: raw[name] for text, name in _by_text(raw).items()}
        if all(isinstance(value, str) or not hasattr(value, "__len__") for value in raw.values()):
            raise ValueError(
                "got a dictionary of single values, expected a list of rows: pass [row] for one row"
            )
    elif isinstance(raw, Sequence) and all(isinstance(row, Mapping) for row in raw):
        names = _by_text(dict.fromkeys(name for row in raw for name in row))
        for number, row in enumerate(raw, start=1):
            for text in used:
                # A misspelt name must not pass for a missing value.
                if text in names and names[text] not in row:
                    raise ValueError(
                        f"row {number} has no {text!r}, expected every row to have it; None stands for a "
                        "missing value"
                    )
        return {text: [row.get(name) for row in raw] for text, name in names.items()}
    raise ValueError(
        f"got {type(raw).__name__}, expected rows of a table as a list of dictionaries, a DataFrame, a table "
        "of pyarrow, or a dictionary of columns of one length"
    )
