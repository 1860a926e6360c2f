"""`calibrant sweep`, as a user types it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer

from calibrant import cli
from calibrant.reports.chosen import SWEEP_FILES as FILES
from calibrant.training import sweeps
from tests.cli.commands import fail_at_once, invoke, succeed

DATA = "data=synthetic[classes=3,features=4,train_size=60,validation_size=40,test_size=41]"
SMALL = ("--set", "epochs=1", "--set", DATA, "--set", "batch_size=8", "--accelerator", "cpu")
SWEEP = ("sweep", "digits-lt", "--loss", "mbls", *SMALL, "--resamples", 10, "--output", "out")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("blank_pictures")
def test_a_sweep_writes_tables_and_curves_and_tests_only_its_choice():
    over = ("--over", "margin=0.5,6", "--over", "weight=0.1, 0.5")
    result = succeed(*SWEEP, *over, "--seeds", "1", "--by", "accuracy")
    assert "run 4 of 4: margin=6, weight=0.5, seed 1" in result.stderr
    output = result.stdout
    for row in ("margin=0.5, weight=0.1", "margin=6, weight=0.5"):
        assert re.search(rf"^ *{row} +\d", output, re.MULTILINE)
    (chosen,) = re.findall(r"Chosen on the validation data: (.*), with the highest Accuracy", output)
    assert "is at the edge of the range; try" in output
    assert "Only the chosen setting was evaluated on the test data." in output
    loss = f"mbls[{chosen.replace(', ', ',')}]"
    assert re.search(rf"^ *{re.escape(loss)} +\d", output, re.MULTILINE)
    plain = json.loads(Path("out/sweep.json").read_text())
    assert plain["chosen"] == chosen
    assert plain["options"] == {"margin": [0.5, 6], "weight": [0.1, 0.5]}
    assert list(plain["test"]["runs"]) == [loss]
    assert all(Path("out", name).is_file() for name in FILES)
    assert {path.name for path in Path("out").iterdir()} == {
        *(name.partition("/")[0] for name in FILES),
        "runs",
        ".lock",
    }
    tested = {path.parent.name for path in Path("out").rglob("evaluation.json")}
    assert tested == {f"mbls-{chosen.replace(', ', '-')}-seed1"}
    assert len(list(Path("out").rglob("result.json"))) == 4
    again = succeed(*SWEEP, *over, "--seeds", "1", "--by", "accuracy")
    assert again.stdout == output
    assert "epoch 1/1" not in again.stderr


@pytest.mark.usefixtures("blank_pictures")
def test_seed_and_loss_are_the_recipes_by_default():
    succeed(*SWEEP[:2], *SWEEP[4:], "--over", "optimizer.lr=0.1", "--set", "loss=ls", "--set", "seed=3")
    assert Path("out/optimizer.lr=0.1/runs/ls-seed3/result.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--over", "margin"), "--over margin: expected OPTION=VALUE,VALUE,…"),
        (("--over", ""), "--over : expected OPTION=VALUE"),
        (("--over", "margin="), "--over margin=: expected OPTION=VALUE"),
        (("--over", "=4"), "--over =4: expected OPTION=VALUE"),
        (("--over", "margin=4", "--over", "margin=6"), "--over margin: given twice"),
        (("--over", "margn=4,6"), "unknown option 'margn' (did you mean 'margin'?)"),
        (("--over", "margin=4,wide"), "margin must be a number, got 'wide'"),
        (("--over", "margin=4,4"), "value 4 of margin is there twice"),
        (("--over", "optimizer.lr=0.1,fast"), "optimizer.lr must be a number, got 'fast'"),
        (("--over", "optimizer.lr=0.1,-1"), "Invalid learning rate"),
        (("--over", "margin=4,6", "--by", "ecc"), "unknown criterion 'ecc' (did you mean 'ece'?)"),
        (("--over", "margin=4,6", "--seeds", "one"), "--seeds one: expected whole numbers"),
        (("--over", "margin=4,6", "--seeds", "1,1"), "one or more seeds, each once"),
        (("--over", "seed=0,1"), "does not vary seed"),
    ],
)
def test_errors_are_one_clear_line_before_anything_is_trained(arguments, expected, monkeypatch):
    monkeypatch.setattr(sweeps, "train", lambda *_, **__: pytest.fail("trained"))
    assert expected in fail_at_once(*SWEEP, *arguments)


def test_options_have_to_be_given():
    result = invoke(*SWEEP)
    assert result.exit_code == 2
    assert "--over" in result.stderr


@pytest.mark.parametrize("name", ["sweep.json", "runs/mbls-margin=6-seed0/test.npz"])
def test_a_sweep_does_not_write_over_its_data(name):
    file = Path("out", name)
    file.parent.mkdir(parents=True)
    with file.open("wb") as stream:
        np.savez(stream, features=np.zeros((60, 4), np.float32), labels=np.arange(60) % 3)
    data = ("--data-root", ".", "--set", f"data=npz[file={file}]")
    assert "is one of the files to read" in fail_at_once(*SWEEP, *data, "--over", "margin=4,6")


def test_a_sweep_does_not_write_over_its_recipe():
    Path("out").mkdir()
    Path("out/sweep.md").write_text('model = "mlp"\ndata = "digits"\n')
    arguments = ("sweep", "out/sweep.md", "--loss", "mbls", "--over", "margin=4,6", "--output", "out")
    assert "is one of the files to read" in fail_at_once(*arguments)


def test_values_may_be_lists_and_texts():
    found = cli.sweep._values(["a=[1,2],[3]", 'b="x,y",z', "c=p2, 0.1"])
    assert found == {"a": [[1, 2], [3]], "b": ["x,y", "z"], "c": ["p2", 0.1]}


def test_the_command_is_listed_after_compare():
    commands = list(typer.main.get_command(cli.app).commands)
    assert commands[commands.index("compare") + 1] == "sweep"
