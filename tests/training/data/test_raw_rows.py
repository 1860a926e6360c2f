"""The preparation of rows of tables."""

import json
import warnings

import numpy as np
import pytest
import torch

from calibrant.training.data import PREPARATIONS
from calibrant.training.data.raw_rows import Categories, Numbers, Rows
from calibrant.training.data.table import table
from tests.training.data.test_table import OPTIONS, people, varied, write, write_csv

pyarrow = pytest.importorskip("pyarrow")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_raw_rows_become_the_inputs_of_the_test_part(tmp_path, suffix):
    train, test = people(60), people(40, seed=1)
    write(tmp_path / f"a.{suffix}", train)
    write(tmp_path / f"test.{suffix}", test)
    data = table(tmp_path, file=f"a.{suffix}", test_file=f"test.{suffix}", **OPTIONS)
    state = json.loads(json.dumps(data.preparation.state(), allow_nan=False))
    rows = PREPARATIONS["rows"].from_state(state)
    assert rows.state() == data.preparation.state()
    raw, names = rows.read(tmp_path / f"test.{suffix}")
    assert names == [str(number) for number in range(1, 41)]
    without = [{name: value for name, value in row.items() if name not in ("id", "label")} for row in test]
    columns = {name: [row[name] for row in test] for name in test[0]}
    for given in (raw, test, without, columns, pyarrow.Table.from_pylist(test), Frame(columns)):
        assert torch.equal(rows(given), data.test.inputs)
    for place in (0, 17):
        assert torch.equal(rows([test[place]])[0], data.test.inputs[place])


class Frame:
    """What is used of a DataFrame; that of pandas has NaN for missing numbers."""

    def __init__(self, columns):
        self.columns = list(columns)
        self.values = {
            name: [float("nan") if value is None else value for value in values]
            for name, values in columns.items()
        }

    def __len__(self):
        return len(next(iter(self.values.values())))

    def __getitem__(self, name):
        return iter(self.values[name])


ROWS = Rows([Numbers("age", 40.0, 10.0, False), Categories("colour", ("blue", "red"))], ["label"])


def test_names_of_columns_that_are_no_texts():
    rows = Rows([Numbers("0", 1.0, 2.0, False), Categories("1", ("a", "b"))], ["2"])
    columns = {0: [3, 5], 1: ["b", "a"], 2: [0, 0]}
    for raw in (columns, Frame(columns), [{0: 3, 1: "b"}, {0: 5, 1: "a", 2: 0}]):
        assert rows(raw).tolist() == [[1, 0, 1], [2, 1, 0]]
    for raw in ({**columns, "0": [1, 2]}, Frame({**columns, "0": [1, 2]}), [{0: 3, "0": 1, 1: "b"}]):
        with pytest.raises(ValueError, match="the rows have the column '0' twice"):
            rows(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([{"age": 1}], "the rows have no column 'colour'; expected 'age', 'colour'"),
        ([{"age": 1, "color": "red"}], "no column 'colour' [(]did you mean 'color'"),
        ([{"age": "old", "colour": ""}], "^row 1: column 'age' has 'old', expected a finite number$"),
        ([{"age": float("inf"), "colour": ""}], "row 1: column 'age' has an infinite number"),
        ([{"age": 1e300, "colour": ""}], "row 1: column 'age' has 1e\\+300, which is too large"),
        ({"age": 1, "colour": "red"}, r"got a dictionary of single values, .*: pass \[row\] for one"),
        ({"age": [1, 2], "colour": ["red"]}, "columns of one length"),
        (np.zeros((2, 2)), "got ndarray, expected rows of a table"),
        ("age", "got str, expected rows of a table"),
        ([1, 2], "got list, expected rows of a table"),
    ],
)
def test_other_rows_are_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        ROWS(raw)


def test_columns_that_the_model_does_not_use():
    expected = ROWS([{"age": 50, "colour": "red"}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ROWS([{"label": "yes", "colour": "red", "age": "50"}]), expected)
    with pytest.warns(UserWarning, match="the model does not use the columns 'shoe', 'hat'"):
        assert torch.equal(ROWS([{"shoe": 1, "colour": "red", "age": 50, "hat": 2}]), expected)


@pytest.mark.filterwarnings("ignore:.*column 'x' counts the rows")
@pytest.mark.parametrize("words", [("true", "false"), ("True", "False"), ("TRUE", "FALSE"), (True, False)])
def test_true_and_false_agree_whatever_their_source(tmp_path, words):
    file = "a.parquet" if words[0] is True else "a.csv"
    write(tmp_path / file, varied(flag=lambda n: words[n % 3 == 0]))
    rows = table(tmp_path, file=file, target="y").preparation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in ("true", "True", "TRUE", True, np.True_):
            assert rows([{"x": 0, "flag": given}])[0, 1:].tolist() == [0, 1]
    older = Rows([Categories("flag", ("False", "True"))])
    assert older([{"flag": True}, {"flag": "false"}]).tolist() == [[0, 1], [1, 0]]


def test_values_that_the_model_does_not_know():
    colours = ["red", "green", None, "violet", "blue"]
    message = (
        "^column 'colour': 2 of 5 values are unknown to the model, such as 'green'; they count as no "
        "category$"
    )
    with pytest.warns(UserWarning, match=message) as told:
        inputs = ROWS([{"age": 40, "colour": colour} for colour in colours])
    assert len(told) == 1
    assert inputs[:, 1:].tolist() == [[0, 1], [0, 0], [0, 0], [0, 0], [1, 0]]


def test_no_rows():
    assert ROWS([]).shape == ROWS({"age": [], "colour": []}).shape == (0, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"columns": None},
        {"columns": [{"name": "x"}]},
        {"columns": [{"name": "x", "mean": 0.0, "std": 0.0, "missing": False}]},
        {"columns": [{"name": "x", "mean": float("nan"), "std": 1.0, "missing": False}]},
        {"columns": [{"name": 3, "categories": ["a"]}]},
        {"columns": [{"name": "x", "categories": "ab"}]},
        {"columns": ["x"]},
        {"ignored": 3},
    ],
)
def test_a_state_that_is_none(change):
    with pytest.raises(ValueError, match="this is no state of prepared rows"):
        Rows.from_state({**ROWS.state(), **change})


def test_a_row_without_a_key_is_refused_and_none_is_a_missing_value(tmp_path):
    write_csv(tmp_path / "a.csv", people())
    rows = table(tmp_path, file="a.csv", target="label", drop=("id",)).preparation
    new = [{name: row[name] for name in ("age", "income", "colour", "rooms")} for row in people(3)]
    expected = rows(new)
    del new[1]["age"]
    with pytest.raises(ValueError, match=r"row 2 has no 'age', expected every row to have it; None stands"):
        rows(new)
    new[1]["age"] = None
    assert rows(new)[1, 0] == 0 != expected[1, 0]
    new[2]["label"] = "yes"  # what the model does not use may be anywhere
    rows(new)


def test_warnings_about_rows_point_to_the_line_that_predicts():
    rows = Rows([Categories("colour", ("blue", "red"))])
    with pytest.warns(UserWarning, match="the model") as caught:
        list(rows.batches([{"colour": "green", "ages": 1}], 10))
    assert len(caught) == 2
    assert {each.filename for each in caught} == {__file__}
