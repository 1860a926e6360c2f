"""Texts and labels in CSV, TSV and JSON Lines files, and in data sets of Hugging Face."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from calibrant.extras import optional_package
from calibrant.predictions.tables import delimiter_of
from calibrant.training.data.part_checks import warn_about_parts
from calibrant.training.data.safe_readers import check_suffix, expecting_utf8, present
from calibrant.training.data.split import DataSets
from calibrant.training.data.text.documents import (
    Documents,
    check_several,
    class_positions,
    draw_missing,
    label_positions,
    sorted_classes,
    yes_or_no,
)
from calibrant.training.data.text.encoding import encode

Label = str | int | list[str | int]


def text_table(
    root: Path,
    *,
    file: str,
    validation_file: str = "",
    test_file: str = "",
    text: str = "text",
    label: str | tuple[str, ...] = "label",
    split_seed: int = 0,
    validation: float = 0.1,
    test: float = 0.2,
    length: int = 256,
    test_length: int | None = None,
    vocabulary: int = 20000,
    embedding: str = "",
    tokenizer: str = "",
) -> DataSets:
    """Texts and labels in the columns of a CSV, TSV or JSON Lines file.

    The classes are the labels in ``file``: sorted by value if all are integers, else by name. The other files
    may have no other labels. A text has several labels if its column holds a list of them, which may be
    empty, or if there is a column of 0 and 1 for each label.

    Args:
        root: the data folder.
        file: the training data, relative to ``root``: ``.csv`` or ``.tsv`` with column names in the first
            line (see `delimiter_of`), or ``.jsonl`` with an object in each line; UTF-8.
        validation_file: the validation data; by default drawn from ``file``.
        test_file: the test data; by default drawn from ``file``.
        text: the column of the text.
        label: the column of the label, a string or an integer, or in JSON Lines a list of them; or a list of
            columns, each a label of its own with 0 for no and 1 for yes.
        split_seed: the seed of the draws, which are stratified by class. With several labels they are random.
        validation: the fraction of ``file`` to draw for validation, if there is no file for it.
        test: the fraction of ``file`` to draw for the test, if there is no file for it.
        length: how many words of a text to keep; see `encode`, also for the options below.
        test_length: the same for validation and test.
        vocabulary: the size of the vocabulary.
        embedding: a file of GloVe vectors, or ``""`` for none.
        tokenizer: a tokenizer of ``transformers``, or ``""`` for none.
    """
    classes: list[str | int] = []
    given: dict[str, Documents] = {}
    files = {"train": file, "validation": validation_file, "test": test_file}
    for part, name in files.items():
        if given and not name:
            continue
        path = root / name
        rows = list(_rows(path, text, label))
        if not classes and isinstance(label, tuple):
            check_several(label)
            classes = list(label)
        several = any(isinstance(value, list) for _, _, value in rows)
        found = [each for _, _, value in rows for each in (value if isinstance(value, list) else [value])]
        classes = classes or sorted_classes(found, path)
        if not rows:
            raise ValueError(f"{path} has no rows: expected at least one")
        lines, texts, labels = zip(*rows, strict=True)
        positions = label_positions if several else class_positions
        targets = positions(labels, classes, partial(_place, f"{path}, line", lines), file)
        if given and given["train"].targets.ndim != targets.ndim:
            raise ValueError(
                f"only one of {path} and {file} has lists of labels: expected both or none to have them"
            )
        given[part] = Documents(list(texts), targets)
    documents = draw_missing(given, split_seed, validation=validation, test=test)
    names, encoded = tuple(map(str, classes)), (length, test_length, vocabulary, embedding, tokenizer)
    target = label if isinstance(label, tuple) else (label,)
    data = encode(root, documents, names, *encoded, column=text, target=target)
    warn_about_parts(root / file, data)
    return data


def huggingface(
    root: Path,
    *,
    path: str,
    name: str | None = None,
    text: str = "text",
    label: str = "label",
    train_split: str = "train",
    validation_split: str = "",
    test_split: str = "test",
    split_seed: int = 0,
    validation: float = 0.1,
    test: float = 0.2,
    length: int = 256,
    test_length: int | None = None,
    vocabulary: int = 20000,
    embedding: str = "",
    tokenizer: str = "",
) -> DataSets:
    """Texts and labels of a Hugging Face data set on disk; needs the package ``datasets``.

    Nothing is downloaded. To save a data set from the hub, run
    ``datasets.load_dataset("ag_news").save_to_disk("DATA_ROOT/ag_news")``.

    ``path`` is the folder of the data set, relative to ``root``: written by ``save_to_disk``, or in a form
    that ``load_dataset`` understands. ``name`` is the configuration, if the data set has several. The parts
    are ``train_split``, ``validation_split`` and ``test_split``; ``""`` draws one of the last two from the
    training part. A label is a class label, a string or an integer. The other options are those of
    `text_table`.
    """
    library = optional_package("datasets", "datasets", purpose="the data set huggingface")
    folder = root / path
    present(
        folder, f"it with datasets.load_dataset({path!r}) from the Hugging Face hub", folder, "save_to_disk"
    )
    programs = sorted(file.name for file in folder.glob("*.py"))
    if programs:  # the package would run it
        raise ValueError(f"{folder} has the program {programs[0]}: expected files of data only")
    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    tables = library.load_from_disk(str(folder)) if saved else library.load_dataset(str(folder), name)
    if not hasattr(tables, "keys"):
        tables = {train_split: tables}
    names: list[str] | None = None
    classes: list[str | int] = []
    given: dict[str, Documents] = {}
    splits = {"train": train_split, "validation": validation_split, "test": test_split}
    for purpose, part in splits.items():
        if given and not part:
            continue
        if part not in tables:
            raise ValueError(
                f"{folder} has no part {part!r}: expected one of {', '.join(map(repr, tables.keys()))}, or "
                "for validation and test '' to draw them from the training part"
            )
        table = tables[part]
        for column in (text, label):
            if column not in table.column_names:
                raise ValueError(
                    f"{folder}, part {part!r}, has no column {column!r}: expected one of "
                    f"{', '.join(map(repr, table.column_names))}"
                )
        texts, labels = list(table[text]), list(map(_named, table[label]))
        place = partial(_place, f"{folder}, part {part!r}, row", range(1, len(texts) + 1))
        for index, content in enumerate(texts):
            if not isinstance(content, str):
                raise ValueError(f"{place(index)}: column {text!r} has {content!r}, expected a string")
        if not classes:
            names = getattr(table.features[label], "names", None)
            classes = list(range(len(names))) if names else sorted_classes(labels, folder)
        targets = class_positions(labels, classes, place, f"part {train_split!r}")
        given[purpose] = Documents(texts, targets)
    documents = draw_missing(given, split_seed, validation=validation, test=test)
    class_names = tuple(map(str, names or classes))
    encoded = length, test_length, vocabulary, embedding, tokenizer
    data = encode(root, documents, class_names, *encoded, column=text, target=(label,))
    warn_about_parts(folder, data)
    return data


def _place(where: str, numbers: Sequence[int], index: int) -> str:
    return f"{where} {numbers[index]}"


def read_texts(file: Path, column: str) -> list[str]:
    """The texts in a column of a table."""
    return [_text(row, column, f"{file}, line {line}", "") for line, row in _table(file)]


def read_others(file: Path, known: Collection[str]) -> dict[str, list[Any]]:
    """The columns of a table but those that are known; None where a row has no value."""
    rows = [row for _, row in _table(file)]
    names = dict.fromkeys(name for row in rows for name in row if name not in known)
    return {name: [row.get(name) for row in rows] for name in names}


def _rows(file: Path, text: str, label: str | tuple[str, ...]) -> Iterator[tuple[int, str, Label]]:
    """The line, text and label of each row of a table, or its list of labels, checked one by one."""
    if file.suffix.lower() in _READERS:
        present(file, f"a table with the columns {text!r} and {label!r}")
    lists: bool | None = None
    for line, row in _table(file):
        where = f"{file}, line {line}"
        content = _text(row, text, where, "text")
        if isinstance(label, tuple):
            cells = {name: _value(row, name, where, "label") for name in label}
            place = partial(str, where)
            yield line, content, [name for name, cell in cells.items() if yes_or_no(cell, place, name)]
            continue
        value = _value(row, label, where, "label")
        lists = isinstance(value, list) if lists is None else lists
        values = value if isinstance(value, list) else [value]
        valid = all(isinstance(each, str | int) and each != "" for each in values)
        if isinstance(value, list) != lists or not valid:
            expected = "a list of labels, as before" if lists else "a string or an integer"
            raise ValueError(f"{where}: column {label!r} has {value!r}, expected {expected}")
        found = [_number(_named(each)) for each in values]
        yield line, content, found if lists else found[0]


def _table(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line number and the values of each row."""
    check_suffix(file, _READERS)
    with expecting_utf8(file):
        yield from _READERS[file.suffix.lower()](file)


def _value(row: Mapping[str, Any], column: str, where: str, option: str) -> Any:
    if column not in row:
        raise ValueError(
            f"{where}: no column {column!r}, expected one of that name; the columns are "
            f"{', '.join(map(repr, row))}{option and f': say {option}=NAME for another'}"
        )
    if row[column] is None:
        raise ValueError(
            f"{where}: nothing in column {column!r}, expected a value; leave out rows without one"
        )
    return row[column]


def _text(row: Mapping[str, Any], column: str, where: str, option: str) -> str:
    content = _value(row, column, where, option)
    if not isinstance(content, str):
        raise ValueError(f"{where}: column {column!r} has {content!r}, expected a string")
    return content


def separated(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a CSV or TSV file, each with its line; a value is None if the line ends before it."""
    delimiter = delimiter_of(file)
    # Some documents are longer than the default limit of 131,072 characters.
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, delimiter=delimiter, strict=True)
            for row in reader:
                extra = row.pop(None, None)
                if extra is not None:
                    raise ValueError(
                        f"{file}, line {reader.line_num}: {len(row) + len(extra)} values, expected "
                        f"{len(row)}; a value that contains {delimiter!r} must be quoted"
                    )
                yield reader.line_num, row
    except csv.Error as error:
        problem = str(error)
        if "expected after" in problem:
            problem = (
                f"a value in quotation marks goes on after them: expected {delimiter!r}, which separates the "
                'columns as in the first line; a quotation mark within a value is written twice, ""'
            )
        elif "unexpected end of data" in problem:
            problem = "a quotation mark is not closed"
        raise ValueError(f"{file}, line {reader.reader.line_num}: {problem}") from error
    finally:
        csv.field_size_limit(limit)


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in the lines of a file, each with its line; a value that only rows before have is None."""
    names: dict[str, None] = {}
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{file}, line {number}: not JSON at character {error.colno} ({error.msg}), expected "
                    "an object"
                ) from error
            except (RecursionError, ValueError) as error:  # too many brackets, or a number of too many digits
                raise ValueError(f"{file}, line {number}: {error}, expected an object") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number}: {line.strip()[:40]!r}, expected an object")
            names |= dict.fromkeys(row)
            yield number, names | row


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]] = {
    ".csv": separated,
    ".tsv": separated,
    ".jsonl": json_lines,
}


def _named(value: Any) -> Any:
    """A label, with true and false as strings, which are names of classes."""
    return str(value).lower() if isinstance(value, bool) else value


def _number(value: str | int) -> str | int:
    """A string of digits as an integer."""
    is_number = isinstance(value, str) and re.fullmatch(r"-?(0|[1-9]\d{0,99})", value, re.ASCII)
    return int(value) if is_number else value
