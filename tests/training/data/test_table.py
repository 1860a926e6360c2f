"""The data set of tables."""

import random
import warnings

import numpy as np
import pytest
import torch

from calibrant.options import Choice
from calibrant.training.data import load_data
from calibrant.training.data.table import table

pyarrow = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.filterwarnings("ignore:.*counts the rows")  # many tables here need no other column

COLOURS = ("blue", "green", "red")


def people(count=60, seed=0):
    """Rows with numbers, missing numbers, texts, missing texts and whole numbers."""
    draw = random.Random(seed)
    return [
        {
            "id": number,
            "age": round(draw.uniform(20, 60), 1),
            "income": None if number % 7 == 0 else draw.randrange(1000, 9000),
            "colour": None if number % 11 == 0 else draw.choice(COLOURS),
            "rooms": draw.randrange(1, 4),
            "label": "yes" if number % 3 else "no",
        }
        for number in range(count)
    ]


def write_csv(path, rows, delimiter=","):
    lines = [list(rows[0]), *([("" if value is None else value) for value in row.values()] for row in rows)]
    path.write_text("".join(delimiter.join(map(str, line)) + "\n" for line in lines))
    return path


def write_parquet(path, rows):
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write(path, rows):
    return {"parquet": write_parquet}.get(path.suffix[1:], write_csv)(path, rows)


OPTIONS = {"target": "label", "drop": ("id",), "categorical": ("rooms",)}


def everything(data):
    """All inputs, in the order of the file, by the parts."""
    return [part.inputs for part in (data.train, data.validation, data.test)]


def test_numbers_are_standardised_and_categories_one_hot(tmp_path):
    rows = people()
    write_csv(tmp_path / "a.csv", rows)
    data = table(tmp_path, file="a.csv", **OPTIONS)
    assert [len(data.train), len(data.validation), len(data.test)] == [42, 6, 12]
    assert data.class_names == ("no", "yes")
    assert data.class_counts == (14, 28)
    train = data.train.inputs
    # age, income and whether it is missing, four colours with the missing one, three numbers of rooms
    assert data.about == {"features": 10}
    assert train.shape == (42, 10)
    assert train.dtype == torch.float32
    for column in (0, 1):
        assert abs(float(train[:, column].mean())) < 1e-6
    assert float(train[:, 0].std(correction=0)) == pytest.approx(1)
    missing = train[:, 2] == 1
    assert 0 < missing.sum() < 10
    assert (train[missing, 1] == 0).all()
    assert (train[:, 3:7].sum(1) == 1).all()
    assert (train[:, 7:].sum(1) == 1).all()


def test_a_row_is_what_its_cells_are(tmp_path):
    rows = people()
    write_csv(tmp_path / "a.csv", rows)
    data = table(tmp_path, file="a.csv", validation=0, test=0, **OPTIONS)
    ages = np.array([row["age"] for row in rows])
    incomes = np.array([row["income"] or np.nan for row in rows])
    for row, inputs in zip(rows, data.train.inputs, strict=True):
        assert float(inputs[0]) == pytest.approx((row["age"] - ages.mean()) / ages.std(), abs=1e-5)
        income = 0 if row["income"] is None else (row["income"] - np.nanmean(incomes)) / np.nanstd(incomes)
        assert inputs[1:3].tolist() == pytest.approx([income, float(row["income"] is None)], abs=1e-5)
        assert inputs[3:7].tolist() == [row["colour"] == name for name in (None, *COLOURS)]
        assert inputs[7:].tolist() == [row["rooms"] == number for number in (1, 2, 3)]
    assert data.train.targets.tolist() == [row["label"] == "yes" for row in rows]


@pytest.mark.parametrize("name", ["a.tsv", "a.parquet"])
def test_other_files_hold_the_same(tmp_path, name):
    rows = people()
    write_csv(tmp_path / "a.csv", rows)
    write_csv(tmp_path / name, rows, "\t") if name == "a.tsv" else write_parquet(tmp_path / name, rows)
    expected, found = (table(tmp_path, file=file, **OPTIONS) for file in ("a.csv", name))
    assert found.class_names == expected.class_names
    for one, other in zip(everything(found), everything(expected), strict=True):
        assert torch.equal(one, other)
    assert found.preparation.state() == expected.preparation.state()


def test_constants_and_categories_are_those_of_the_training_part(tmp_path):
    rows = people()
    write_csv(tmp_path / "a.csv", rows)
    others = [{**row, "colour": "violet", "age": 1000.0, "rooms": 9} for row in rows[:10]]
    write_csv(tmp_path / "b.csv", others)
    plain = table(tmp_path, file="a.csv", validation=0, test=0, **OPTIONS)
    data = table(tmp_path, file="a.csv", validation_file="b.csv", test_file="b.csv", **OPTIONS)
    assert torch.equal(data.train.inputs, plain.train.inputs)
    assert [len(data.train), len(data.validation), len(data.test)] == [60, 10, 10]
    assert (data.test.inputs[:, 0] > 10).all()
    assert (data.test.inputs[:, 3:] == 0).all()


def test_whole_numbers_are_classes_by_value(tmp_path):
    rows = [{"x": number, "y": (10, 9, -1)[number % 3]} for number in range(30)]
    for name in ("a.csv", "a.parquet"):
        write(tmp_path / name, rows)
        assert table(tmp_path, file=name, target="y").class_names == ("-1", "9", "10")
    write_parquet(tmp_path / "a.parquet", [{**row, "y": float(row["y"])} for row in rows])
    assert table(tmp_path, file="a.parquet", target="y").class_names == ("-1", "9", "10")
    write_parquet(tmp_path / "a.parquet", [{**row, "y": row["y"] > 0} for row in rows])
    assert table(tmp_path, file="a.parquet", target="y").class_names == ("False", "True")


def test_inputs_that_count_the_rows_are_told(tmp_path):
    path = write(tmp_path / "people.csv", [{**row, "line": row["id"] + 2} for row in people()])
    with pytest.warns(UserWarning, match="count the rows") as said:
        table(tmp_path, file=path.name, target="label")
    (both,) = [str(each.message) for each in said]
    assert f"{path}: columns 'id', 'line' count the rows and are inputs: where the rows are sorted" in both
    assert 'leave them out with --set \'data.drop=["id", "line"]\' or' in both
    with pytest.warns(UserWarning, match=r"column 'line' counts the rows .* drop = ..id., .line.. under"):
        table(tmp_path, file=path.name, target="label", drop=("id",))
    with warnings.catch_warnings(action="error"):
        table(tmp_path, file=path.name, target="label", drop=("id", "line"))


def test_a_class_may_be_called_none(tmp_path):
    write_csv(tmp_path / "a.csv", [{"x": n, "y": ("none", "1", "2")[n % 3]} for n in range(30)])
    assert table(tmp_path, file="a.csv", target="y").class_names == ("1", "2", "none")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (lambda number: f"{number % 30},5" if number % 3 else number % 30, "numbers with commas"),
        (lambda number: f"2024-01-{number % 28 + 1:02}", "dates"),
        (lambda number: f"{number % 28 + 1}.1.2024 12:30", "dates"),
        (lambda number: f"1/{number % 28 + 1}/2024", "dates"),
        (lambda number: f"2024/01/{number % 28 + 1}", "dates"),
        (lambda number: number % 30 or "unknown", "numbers, .* such as 'unknown'"),
    ],
)
def test_texts_that_are_no_categories_are_told(tmp_path, value, what):
    rows = [{**row, "at": value(number)} for number, row in enumerate(people())]
    write_csv(tmp_path / "a.csv", rows, ";")
    with pytest.warns(
        UserWarning, match=f"column 'at': its texts become categories; .*look like {what}.*: .*drop"
    ):
        table(tmp_path, file="a.csv", **OPTIONS)
    table(tmp_path, file="a.csv", **{**OPTIONS, "categorical": ("rooms", "at")})  # says so itself


def test_missing_values_are_no_texts_that_are_counted(tmp_path):
    write_csv(tmp_path / "a.csv", [{"at": f"N. {n}" if n else "", "y": n % 2} for n in range(40)])
    with pytest.raises(ValueError, match="column 'at': 39 different texts in 40 rows are no categories"):
        table(tmp_path, file="a.csv", target="y")


@pytest.mark.parametrize("form", ["1.{}.10", "555-12{}", "12-34-{}", "{}-5", "1999-{}99-01"])
def test_codes_are_categories(tmp_path, form):
    rows = [{**row, "at": form.format(number % 20)} for number, row in enumerate(people())]
    write_csv(tmp_path / "a.csv", rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table(tmp_path, file="a.csv", **OPTIONS)


def test_columns_without_information(tmp_path):
    rows = [{"same": 0.1, "empty": None, "x": n, "y": n % 2} for n in range(20)]
    write_csv(tmp_path / "a.csv", rows)
    data = table(tmp_path, file="a.csv", target="y", validation=0, test=0)
    assert (data.train.inputs[:, 0].abs() < 1e-6).all()
    assert data.train.inputs[:, 1:3].tolist() == [[0, 1]] * 20
    far = data.preparation([{"same": 0.2, "empty": 3, "x": 0}])
    assert far[0, :3].tolist() == pytest.approx([0.1, 3, 0], abs=1e-6)


def test_a_long_tail_and_the_options_of_every_data_set(tmp_path):
    write_csv(tmp_path / "a.csv", people(90))
    options = {"file": "a.csv", **OPTIONS, "imbalance": 4, "validation_noise": 1.0, "split_seed": 2}
    data = load_data(Choice("table", options), tmp_path)
    assert data.class_counts == (21, 5)
    assert data.preparation.kind == "rows"


# ------------------------------------------------------------------------------------------------- bad tables


def varied(**columns):
    """A table of 40 rows with a number, a class, and columns of functions of the row's number."""
    functions = {"x": float, "y": lambda n: "ab"[n % 2], **columns}
    return [{name: function(n) for name, function in functions.items()} for n in range(40)]


def test_a_quantity_as_the_target_is_told(tmp_path):
    lines = [f"{2 * n},{18 + n % 62},{n % 3},{n % 100},{1 + n % 31}" for n in range(3100)]
    (tmp_path / "a.csv").write_text("\n".join(["x,age,class,of a hundred,day", *lines]))
    with pytest.warns(UserWarning, match="'age' has 62 different whole numbers in 3100 rows.*quantity"):
        table(tmp_path, file="a.csv", target="age")
    for target in ("class", "of a hundred", "day"):  # numbers of classes
        with warnings.catch_warnings(action="error"):
            table(tmp_path, file="a.csv", target=target)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (varied(), {"target": "z"}, r"a\.csv has no column 'z'; its columns are 'x', 'y'"),
        (varied(), {"target": "y", "drop": ("xx",)}, r"no column 'xx' [(]did you mean 'x'"),
        (varied(), {"target": "y", "drop": ("y",)}, "'y' is the target"),
        (varied(), {"target": "y", "drop": ("x",)}, "has no column besides 'y', 'x'"),
        (varied(y=lambda n: "a"), {"target": "y"}, "labels of 1 class: expected at least 2"),
        (varied(y=lambda n: "a" if n else None), {"target": "y"}, r"a\.csv, row 1@: column 'y' has nothing"),
        (varied(y=lambda n: "nan" if n == 4 else n % 2), {"target": "y"}, "row 5@: column 'y' has nothing"),
        (varied(y=lambda n: n / 2), {"target": "y"}, r"row 2@: column 'y' has 0\.5, expected a class"),
        (varied(y=lambda n: n), {"target": "y"}, "'y' has 40 different values in 40 rows, expected classes"),
        (varied(name=lambda n: f"N. {n}"), {"target": "y"}, r'40 different texts .* drop = \["name"\] under'),
        (
            varied(x=lambda n: "inf" if n == 2 else n),
            {"target": "y"},
            r"a\.csv, row 3@: column 'x' has an",
        ),
        (
            varied(x=lambda n: "inf" if n == 3 else n),
            {"target": "y"},
            r"a\.csv, row 4@: column 'x' has an",
        ),
        (varied(x=lambda n: 1e308 * (n % 2)), {"target": "y"}, "column 'x': its numbers are infinite or too"),
        (varied(), {"target": "y", "validation": 0.7, "test": 0.7}, "must add up to at most 1"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_that_cannot_be_used(tmp_path, rows, options, message, suffix):
    if suffix == "parquet":
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        mixed = {
            name for name, values in columns.items() if len({type(v) for v in values if v is not None}) > 1
        }
        rows = [{name: str(v) if name in mixed else v for name, v in row.items()} for row in rows]
    write(tmp_path / f"a.{suffix}", rows)
    lines = "" if suffix == "parquet" else r" \(line \d+ of the file\)"
    with pytest.raises(ValueError, match=message.replace("csv", suffix).replace("@", lines)):
        table(tmp_path, file=f"a.{suffix}", **options)


def test_parts_that_do_not_fit(tmp_path):
    write_csv(tmp_path / "a.csv", varied())
    for rows, message in (
        ([{"x": 1, "z": "a"}], r"b\.csv has no column 'y': expected the target of a\.csv"),
        (
            [{"x": 1, "y": "c"}],
            r"b\.csv, row 1 \(line 2 of the file\): label 'c', expected one of the labels of a",
        ),
        ([{"z": 1, "y": "a"}], r"b\.csv: the rows have no column 'x'"),
        ([{"x": "one", "y": "a"}], r"b\.csv, row 1 \(line 2 of the file\): column 'x' has 'one'"),
    ):
        write_csv(tmp_path / "b.csv", rows)
        with pytest.raises(ValueError, match=message):
            table(tmp_path, file="a.csv", test_file="b.csv", target="y")


def test_a_class_with_one_row_is_learned_and_told(tmp_path):
    write_csv(tmp_path / "a.csv", varied(x=lambda n: 2 * n, y=lambda n: "c" if n == 5 else "ab"[n % 2]))
    with pytest.warns(
        UserWarning, match=r"no (validation|test) element of 1 of 3 classes \('c' with 1 in"
    ) as told:
        data = table(tmp_path, file="a.csv", target="y")
    assert data.class_counts[2] == 1
    assert len(told) == 2


def test_true_and_false_as_classes_may_be_in_upper_or_lower_case(tmp_path):
    def write(name, words, first=0):
        rows = "".join(f"{first + i},{words[i % len(words)]}\n" for i in range(60))
        (tmp_path / name).write_text(f"x,y\n{rows}")

    write("mixed.csv", ["TRUE", "false", "true", "False"])
    data = table(tmp_path, file="mixed.csv", target="y")
    assert data.class_names == ("False", "True")
    write("plain.csv", ["true", "false"])
    write("other.csv", ["TRUE", "FALSE"], 100)
    data = table(tmp_path, file="plain.csv", target="y", test_file="other.csv")
    assert data.class_names == ("false", "true")
    assert data.test.targets.tolist() == [1, 0] * 30
