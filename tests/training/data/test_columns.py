"""Tables in files: their columns as numbers and as texts."""

import csv
import sys
from contextlib import suppress
from decimal import Decimal

import numpy as np
import pytest

from calibrant import sizes
from calibrant.training.data.columns import (
    BadCellError,
    as_numbers,
    as_texts,
    is_numeric,
    place_of,
    read_columns,
)
from calibrant.training.data.safe_readers import MissingDataError

pyarrow = pytest.importorskip("pyarrow")


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_parquet(path, columns):
    from pyarrow import parquet

    parquet.write_table(columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'age,"eye, colour"\n41,"blue, or so"\n,brown\n'),
        ("a.csv", '\ufeffage,"eye, colour"\r\n41,"blue, or so"\r\n,brown\r\n'),
        ("a.TSV", "age\teye, colour\n41\tblue, or so\n\n\tbrown\n"),
    ],
)
def test_separated_values(tmp_path, name, content):
    columns = read_columns(write(tmp_path / name, content))
    assert columns == {"age": ["41", ""], "eye, colour": ["blue, or so", "brown"]}


def test_semicolons_where_the_first_line_has_no_commas(tmp_path):
    assert read_columns(write(tmp_path / "a.csv", "a;b\n1;2,5\n")) == {"a": ["1"], "b": ["2,5"]}
    assert read_columns(write(tmp_path / "a.csv", "a;b,c\n1;2,5\n")) == {"a;b": ["1;2"], "c": ["5"]}


def test_names_and_cells_over_several_lines(tmp_path):
    path = write(tmp_path / "a.csv", 'a,"b\nc"\n1,"x\ny"\n\n2,z\n')
    columns = read_columns(path)
    assert columns == {"a": ["1", "2"], "b\nc": ["x\ny", "z"]}
    assert place_of(columns, 1) == f"{path}, row 2 (line 6 of the file)"


def test_parquet(tmp_path):
    columns = {
        "whole": pyarrow.array([1, None, 3]),
        "real": pyarrow.array([0.5, None, 2.0], pyarrow.float32()),
        "exact": pyarrow.array([Decimal("1.50"), None, Decimal("2.25")]),
        "text": pyarrow.array(["a", None, "b"]).dictionary_encode(),
        "yes": pyarrow.array([True, False, None]),
        "nothing": pyarrow.nulls(3),
    }
    found = read_columns(write_parquet(tmp_path / "a.parquet", columns))
    assert list(found) == list(columns)
    numeric = [name for name, values in found.items() if is_numeric(values)]
    assert numeric == ["whole", "real", "exact", "nothing"]
    np.testing.assert_array_equal(as_numbers(found["whole"]), [1, np.nan, 3])
    np.testing.assert_array_equal(as_numbers(found["exact"]), [1.5, np.nan, 2.25])
    assert as_texts(found["text"]) == ["a", "", "b"]
    assert as_texts(found["yes"]) == ["true", "false", ""]
    assert as_texts(found["whole"]) == ["1", "", "3"]


def test_whole_numbers_in_parquet_beside_missing_ones_keep_their_digits(tmp_path):
    columns = {"id": pyarrow.array([2**53 + 1, None, 3])}
    assert read_columns(write_parquet(tmp_path / "a.parquet", columns)) == {"id": [2**53 + 1, None, 3]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", r"a\.csv has no rows"),
        ("a.csv", "a,b\n", r"a\.csv has no rows"),
        ("a.csv", "\n\n", r"a\.csv has no rows"),
        ("a.csv", "a,b,a\n1,2,3\n", r"a\.csv has the column 'a' twice"),
        ("a.csv", "a,b\n1,2\n3\n", r"a\.csv, line 3: 1 values, expected 2"),
        ("a.csv", "a,b\n1,2,3\n", r"a\.csv, line 2: 3 values, expected 2"),
        ("a.csv", 'a,b\n"1"2,3\n', r"a\.csv, line 2: "),
        ("a.csv", b"a,b\n\xe9,3\n", r"a\.csv has bytes that are not UTF-8"),
        ("a.csv", b"\xff\xfea\0,\0b\0\n\0", r"a\.csv has bytes that are not UTF-8"),
        ("a.parquet", "a,b\n1,2\n", r"a\.parquet cannot be read as a Parquet table"),
        ("a.parquet", "", r"a\.parquet cannot be read as a Parquet table"),
        ("a.xlsx", "", r"a\.xlsx ends in '\.xlsx': expected one of '\.csv', '\.tsv', '\.parquet'"),
    ],
)
def test_files_that_are_no_tables(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        read_columns(write(tmp_path / name, content))


def test_a_missing_file_and_a_header_that_is_too_long(tmp_path):
    with pytest.raises(MissingDataError, match=r"a\.csv is missing: "):
        read_columns(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"a\.csv, line 1: field larger than"):
        read_columns(write(tmp_path / "a.csv", "a" * (csv.field_size_limit() + 1)))


def test_columns_of_parquet_with_one_name(tmp_path):
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    with pytest.raises(ValueError, match=r"a\.parquet has the column 'a' twice"):
        read_columns(write_parquet(tmp_path / "a.parquet", twice))


@pytest.mark.parametrize("damage", [20, 60, 120, -40, -12, -6])
def test_a_damaged_parquet_file(tmp_path, damage):
    path = write_parquet(tmp_path / "a.parquet", {"a": list(range(50)), "b": ["x"] * 50})
    content = bytearray(path.read_bytes())
    content[damage] ^= 255
    path.write_bytes(content)
    with suppress(ValueError):  # any other error fails; some bytes do not matter
        read_columns(path)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_tables_larger_than_memory(tmp_path, monkeypatch, name):
    path = tmp_path / name
    if name == "a.csv":
        write(path, "a,b\n" + "12,34\n" * 2000)
    else:  # equal values take no room in the file
        write_parquet(path, {"a": np.zeros(20_000), "b": np.zeros(20_000)})
    monkeypatch.setattr(sizes, "memory", lambda: 200_000.0)
    with pytest.raises(ValueError, match=r"the table .* takes .* GiB; this machine has"):
        read_columns(path)


def test_texts_of_parquet_that_take_more_memory_than_the_file(tmp_path, monkeypatch):
    different = [f"{n:05}" + "a" * 10_000 for n in range(300)]  # 3 MB that compress well
    path = write_parquet(tmp_path / "a.parquet", {"a": different})
    assert path.stat().st_size < 300_000
    assert read_columns(path)["a"] == different
    monkeypatch.setattr(sizes, "memory", lambda: 1e6)
    with pytest.raises(ValueError, match=r"the table .* takes .* GiB; this machine has"):
        read_columns(path)


def test_equal_texts_of_parquet_are_in_memory_once(tmp_path, monkeypatch):
    values = ["b" * 10_000, None, "c"] * 1000  # 10 MB decoded
    path = write_parquet(tmp_path / "a.parquet", {"a": values, "b": range(3000)})
    monkeypatch.setattr(sizes, "memory", lambda: 1e6)
    found = read_columns(path)["a"]
    assert found == values
    assert found[0] is found[3] is found[2997]


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", {"a": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'parquet needs pyarrow, .*: pip install "calibrant\[parquet\]"'):
        read_columns(path)


def test_numbers():
    np.testing.assert_array_equal(
        as_numbers(["1", " 2.5 ", "-3e2", "", "NA", "?", None, 4, np.float32(5)]),
        [1, 2.5, -300, np.nan, np.nan, np.nan, np.nan, 4, 5],
    )
    for text in ("1_000", "1,5", "one", [1]):
        with pytest.raises(BadCellError, match=r"^has ") as found:
            as_numbers(["1", text])
        assert found.value.index == 1
    assert not is_numeric(["1", "1_000"])


def test_true_and_false_in_any_case():
    assert as_texts([True, np.True_, "TRUE", "True ", "true", "truE"]) == ["true"] * 6
    assert as_texts([False, "False", "Truer", "T", "0"]) == ["false", "false", "Truer", "T", "0"]


def test_a_folder_is_no_table(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder: expected one of '\.csv', '\.tsv', '\.parquet'$"):
        read_columns(tmp_path)
