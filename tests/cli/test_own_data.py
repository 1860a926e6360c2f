"""`calibrant train --data`, as a user types it."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from calibrant.training.recipe import Recipe
from calibrant.training.runs import Run
from tests.training.data.test_on_disk import write_folders
from tests.training.data.test_table import people, write_csv

from .commands import fail, invoke, printed
from .test_train import FAST, QUICK, commands_after


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_table_is_trained_and_used():
    write_csv(Path("people.csv"), people())
    result = invoke("train", "--data", "people.csv", *QUICK, "--loss", "cals-alm")
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("people.csv: ")]
    assert line == (
        "people.csv: a table of 60 rows, target 'label' (by its name), 3 numeric and 1 categorical columns, "
        "without 'id': data set table, network mlp. calibrant recipes --data people.csv --set epochs=2 "
        "prints the recipe, --set KEY=VALUE changes it."
    )
    assert re.search(r"36 training, 12 validation, 12 test; \d classes: ", result.stderr)
    folder = Path("runs/people/runs/cals-alm-seed0")
    assert re.search(
        rf"{folder}: people, cals-alm, seed 0, 2 epochs, epoch [12] kept; validation accuracy", result.stdout
    )
    assert commands_after(result.stdout)[1][2:] == ["--input", "new.csv", "--output", "predictions.csv"]
    run = Run(folder)
    assert run.data.preparation is not None
    raw, names = run.data.preparation.read(Path("people.csv"))
    inputs = run.data.preparation(raw)
    assert inputs.shape == (60, run.data.about["features"]) == (len(names), 8)
    assert torch.isfinite(run.model(inputs)).all()
    header, first, *_ = Path("people.csv").read_text().splitlines()
    Path("new.csv").write_text(f"{header}\n{first}\n")
    output = printed("predict", str(folder), "--input", "new.csv", "--output", "predictions.csv")
    assert output == "predictions.csv: 1 input of new.csv\n"
    (row,) = csv.DictReader(Path("predictions.csv").read_text().splitlines())
    number = dict(zip(header.split(","), first.split(","), strict=True))["id"]
    assert list(row)[:3] == ["name", "id", "prediction"]
    assert (row["name"], row["id"], "label" in row) == ("1", number, False)
    output = printed("predict", str(folder), "--input", "new.csv", "--output", "predictions.npz")
    assert output == "predictions.npz: 1 input of new.csv, without its other columns 'id'\n"
    Path("new.csv").write_text(f"{header}\n{first}\n{re.sub('[0-9.]+', 'many', first)}\n")
    error = fail("predict", str(folder), "--input", "new.csv", "--output", "predictions.csv")
    assert re.match(r"calibrant: new\.csv, row 2 \(line 3 of the file\): column 'age' has 'many', exp", error)


def test_a_name_is_kept_even_if_the_model_uses_it():
    """The output has a column of this name with the number of the row."""
    write_csv(Path("people.csv"), [{"name": "ab"[row["id"] % 2], **row} for row in people()])
    assert invoke("train", "--data", "people.csv", *QUICK, "--output", "run").exit_code == 0
    printed("predict", "run", "--input", "people.csv", "--output", "predictions.csv")
    first, *_ = csv.DictReader(Path("predictions.csv").read_text().splitlines())
    assert (first["name"], first["input_name"], "age" in first) == ("1", "ab"[int(first["id"]) % 2], False)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_other_columns_of_texts_are_kept_beside_the_predictions(suffix):
    texts = [f"a {word} film {number}" for number in range(20) for word in ("bad", "good")]
    rows = [{"id": n, "text": text, "label": n % 2} for n, text in enumerate(texts)]
    Path("texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    printed("train", "--data", "texts.jsonl", *FAST, "--output", "a")
    new = Path(f"new{suffix}")
    if suffix == ".csv":
        new.write_text("name;id;text;label\nAnn;7;a good film;1\nBob;8;a bad film;0\n")
    else:
        lines = [{"name": "Ann", "id": 7, "text": "a good film"}, {"text": "a bad film"}]
        new.write_text("\n".join(map(json.dumps, lines)))
    output = printed("predict", "a", "--input", new, "--output", "out.csv")
    assert output == f"out.csv: 2 inputs of {new}\n"
    found = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    assert [row["id"] for row in found] == ["7", "8" if suffix == ".csv" else ""]
    assert [row["name"] for row in found] == ["1", "2"]
    assert [row["input_name"] for row in found] == ["Ann", "Bob" if suffix == ".csv" else ""]
    assert list(found[0]) == ["name", "input_name", "id", "prediction", "probability_0", "probability_1"]


def test_the_target_and_changes():
    write_csv(Path("people.csv"), people())
    printed(
        "train",
        "--data",
        "people.csv",
        "--target",
        "rooms",
        "--set",
        "data.test=0.5",
        *FAST,
        "--output",
        "a",
    )
    recipe = Recipe.load("a/recipe.toml")
    assert (recipe.data.options["target"], recipe.data.options["test"], recipe.epochs) == ("rooms", 0.5, 2)


def test_the_recipe_is_described_as_it_is_changed():
    write_csv(Path("people.csv"), people())
    changes = ("--set", 'data.categorical=["rooms"]', "--set", 'data.drop=["id", "income"]')
    result = invoke("train", "--data", "people.csv", *changes, *FAST, "--output", "a")
    assert result.exit_code == 0, result.output
    found = (
        "a table of 60 rows, target 'label' (by its name), 1 numeric and 2 categorical columns, without "
        "'id', 'income': data set table, network mlp"
    )
    assert Recipe.load("a/recipe.toml").description == found
    assert f"people.csv: {found}. calibrant recipes --data people.csv" in result.stderr
    (same,) = re.findall(r"calibrant (recipes .*) prints the recipe", result.stderr)
    assert invoke(*shlex.split(same)).stdout == Path("a/recipe.toml").read_text()


def test_the_recipe_can_be_printed_and_followed_elsewhere(monkeypatch):
    write_csv(Path("people.csv"), people())
    result = invoke("recipes", "--data", "people.csv", "--target", "rooms")
    assert result.exit_code == 0, result.output
    Path("mine.toml").write_text(result.stdout)
    assert Recipe.load("mine.toml").name == "people"
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert "runs/people/runs/ls-seed0: people, ls" in printed("train", "../mine.toml", "--loss", "ls", *FAST)


def test_a_run_goes_on_with_the_same_command():
    write_csv(Path("people.csv"), people())
    command = ("train", "--data", "people.csv", *FAST, "--output", "a")
    printed(*command)
    assert "nothing was trained" in printed(*command)
    write_csv(Path("people.csv"), people(seed=1))
    assert "the data have changed since the run in a began" in fail(*command)
    write_csv(Path("people.csv"), people(), ";")
    assert "nothing was trained" in printed(*command)
    write_csv(Path("people.csv"), people()[1:])  # the description of the recipe has the number of rows
    assert "the data have changed since the run in a began: inputs, labels or their split" in fail(*command)
    assert "another recipe (there: epochs = 2)" in fail(*command, "--set", "epochs=3")


@pytest.mark.parametrize("name", ["people.csv", "insects"])
def test_data_of_a_run_that_are_gone_are_named(name):
    if name == "insects":
        write_folders(Path(name), parts=("",))
    else:
        write_csv(Path(name), people())
    printed("train", "--data", name, *FAST, "--output", "a")
    Path(name).rename("elsewhere")
    what = {"insects": "images with one folder for each class"}.get(name, "a table")
    expected = f"calibrant: the run in a needs its data: {Path(name).absolute()} is missing: expected {what}"
    assert fail("predict", "a", "--output", "p.npz") == expected


def test_images_are_trained():
    write_folders(Path("insects"), parts=("",))
    output = printed("train", "--data", "insects", *FAST, "--set", "model.width=8")
    assert "runs/insects/runs/ce-seed0: insects, ce" in output
    assert commands_after(output)[1][2:4] == ["--input", "new-images"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["insects", "a.npz", "texts.csv", "numbers.csv"])
def test_a_class_that_a_part_has_no_element_of_is_told_once(name):
    labels = np.repeat(["ant", "bee", "rare"], [20, 20, 1])
    if name == "insects":
        write_folders(Path(name), parts=("",), per_class=20)
        write_folders(Path(name), parts=("",), per_class=1, classes=("rare",))
    elif name == "a.npz":
        classes, codes = np.unique(labels, return_inverse=True)
        np.savez(name, features=np.ones((41, 2)), labels=codes, class_names=classes)
    else:
        inputs = [f"{n} words in a row" if name == "texts.csv" else n * n for n in range(41)]
        write_csv(Path(name), [{"x": x, "label": y} for x, y in zip(inputs, labels, strict=True)])
    result = invoke("train", "--data", name, *FAST, "--output", "a")
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if "element of" in line]
    assert told == [
        f"calibrant: warning: {Path(name).absolute()} has no {part} element of 1 of 3 classes ('rare' with 1 "
        "in all): expected at least a few of each class"
        for part in ("validation", "test")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a RECIPE (calibrant recipes lists them), or --data PATH"),
        (("digits", "--data", "a.csv"), "expected a recipe or --data PATH, got digits and --data a.csv"),
        (("digits", "--target", "y"), "--target is for a table of --data"),
        (("--target", "y"), "expected a RECIPE (calibrant recipes lists them), or --data PATH"),
        (("--data", "nowhere"), "there is no file or folder"),
        (
            ("--data", "a.csv"),
            "a.csv has the columns 'x', 'y': name the one with the classes by --target COLUMN",
        ),
        (
            ("--data", "two.csv"),
            "two.csv has the columns 'label', 'Class': name the one with the classes by --target COLUMN",
        ),
        (("--data", "a.csv", "--target", "z"), "a.csv has no column 'z'"),
        (("--data", "a.csv", "--target", "y", "--set", "data.dropp=[]"), "no option 'dropp'"),
        (("--data", "a.csv", "--target", "y", "--set", 'data.drop=["z"]'), "a.csv has no column 'z'"),
        (("--data", "a.csv", "--target", "x"), "column 'x' has 40 different values in 40 rows"),
        (("--data", "one.csv", "--target", "y"), "labels of 1 class"),
        (
            ("--data", "nan.csv", "--target", "y"),
            "row 3 (line 4 of the file): column 'y' has nothing",
        ),
    ],
)
def test_one_line_and_nothing_written(arguments, message):
    Path("a.csv").write_text("x,y\n" + "".join(f"{n * n},{n % 2}\n" for n in range(40)))
    Path("one.csv").write_text("x,y\n" + "".join(f"{n * n},1\n" for n in range(40)))
    Path("two.csv").write_text("label,Class,x\n0,1,2\n1,0,5\n")
    Path("nan.csv").write_text("x,y\n1,a\n2,b\n5,\n7,a\n")
    assert message in fail("train", *arguments, "--accelerator", "cpu", "--output", "a")
    assert not (Path("a").exists() and [file for file in Path("a").iterdir() if file.name != ".lock"])


def test_a_run_does_not_write_over_its_data():
    write_csv(Path("log.csv"), people())
    assert "is one of the files to read" in fail("train", "--data", "log.csv", *QUICK, "--output", ".")


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (["compare", "--losses", "ce", "--seeds", "0"], "results.json"),
        (["sweep", "--loss", "cals-alm", "--over", "margin=2,4"], "sweep.json"),
        (["tune", "--loss", "cals-alm", "--trials", "1"], "tune.json"),
    ],
    ids=["compare", "sweep", "tune"],
)
@pytest.mark.usefixtures("blank_pictures")
def test_other_commands_take_own_data_too(command, written):
    write_csv(Path("people.csv"), people())
    own = ("--data", "people.csv", "--target", "rooms", "--resamples", "10", "--output", "a")
    result = invoke(*command, *own, *QUICK)
    assert result.exit_code == 0, result.output
    assert "people.csv: a table of 60 rows, target 'rooms'" in result.stderr
    assert (Path("a") / written).is_file()
    recipes = [Recipe.load(path) for path in Path("a").rglob("recipe.toml")]
    assert {recipe.data.options["target"] for recipe in recipes} == {"rooms"}
    assert "expected a recipe or --data PATH, got digits" in fail(command[0], "digits", *command[1:], *own)
    assert "expected a RECIPE (calibrant recipes lists them), or --data PATH" in fail(*command)


@pytest.mark.filterwarnings("default")
def test_the_advice_to_leave_out_a_column_keeps_those_that_are_left_out():
    """A list on the command line replaces the one that was chosen."""
    rows = [{**row, "since": f"2024-01-{number % 28 + 1:02}"} for number, row in enumerate(people())]
    write_csv(Path("people.csv"), rows)
    command = ("train", "--data", "people.csv", *FAST)
    (warning,) = [line for line in invoke(*command).stderr.splitlines() if "look like dates" in line]
    assert 'in a recipe, drop = ["id", "since"] under [data]' in warning
    (advised,) = re.findall(r"leave it out with (--set '.*?')", warning)
    result = invoke(*command, *shlex.split(advised), "--output", "b")
    assert result.exit_code == 0, result.output
    assert "leave it out" not in result.stderr
    assert Recipe.load("b/recipe.toml").data.options["drop"] == ("id", "since")
    result = invoke(*command, "--set", 'data.drop=["since"]', "--output", "c")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("people.csv: column 'id' counts the rows and is an input: where the rows") == 1
    assert (
        """leave it out with --set 'data.drop=["since", "id"]' or, in a recipe, drop = [""" in result.stderr
    )
    result = invoke("train", "c/recipe.toml", "--output", "d")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("counts the rows") == 1
