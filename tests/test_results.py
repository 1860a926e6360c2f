"""Tables in README and the guide have the figures of the stored results."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from calibrant import LOSSES
from calibrant.training.leaderboard import Leaderboard

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

BOARD = json.loads((RESULTS / "leaderboard" / "leaderboard.json").read_text())

# How a row of a table begins, and the experiment of the leaderboard with its figures.
EXPERIMENTS = {
    "CIFAR-100 with a long tail": "Long-tailed CIFAR-100, ResNet-32, 100 epochs",
    "digits with a long tail": "Long-tailed digits",
    **{name.removesuffix(", 50 epochs"): name for name in BOARD["experiments"]},
}
# What stands in each column after the first: a loss, or "best" for the published one with the lowest NLL.
TABLES = {
    "README.md": ["ce before", "ce after", "ada-scale before", "best before", "best after"],
    "docs/choosing.md": [
        "ce after", "ce before", "ada-scale before", "ada-scale after", "best before", "best after",
    ],
}  # fmt: skip


def nll(row):
    """The NLL of every loss before and after temperature scaling."""
    name = next(name for name in EXPERIMENTS if row.startswith(name))
    results = BOARD["experiments"][EXPERIMENTS[name]]["results"]
    return {
        state: {loss: round(each["nll"]["mean"], 3) for loss, each in results[state].items()}
        for state in ("before", "after")
    }


def rows(document):
    text = (ROOT / document).read_text()
    table = max(
        re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE), key=lambda part: part.count("best published")
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("document", TABLES)
def test_nll_is_that_of_the_results(document):
    table = rows(document)
    assert len(table) == len(BOARD["experiments"])
    for name, *cells in table:
        found = nll(name)
        for cell, column in zip(cells, TABLES[document], strict=True):
            loss, state = column.split()
            figures = found[state]
            if loss == "best":
                published = {key: value for key, value in figures.items() if key not in ("ce", "ada-scale")}
                best = min(published.values())
                figures = {"best": best}
                named = set(re.findall("`(.*?)`", cell))
                assert named == {key for key, value in published.items() if value == best}, (name, column)
            number = re.search(r"\d\.\d+", cell)
            if number is None:
                assert cell.startswith("not "), (name, column)
                assert loss not in figures, (name, column)
            else:
                assert float(number[0]) == figures[loss], (name, column)


def test_the_grid_of_the_leaderboard_has_every_loss():
    board = Leaderboard.load(ROOT / "benchmarks" / "leaderboard.toml")
    assert set(LOSSES) - set(board.experiments[0].losses) == {"nacl"}  # which needs labels of pixels


@pytest.mark.parametrize(("number", "key"), [(1, "ranks"), (2, "ranks-of-more")])
def test_the_ranks_of_the_leaderboard_are_those_of_the_results(number, key):
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    table = text.split("| loss | NLL + T |")[number].partition("\n\n")[0].splitlines()[2:]
    ranks = BOARD[key]
    columns = ["nll-after-temperature", "nll", "ece-after-temperature", "ece", "accuracy"]
    assert len(table) == len(ranks["nll"]["mean"])
    for row in table:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for column, cell in zip(columns, cells, strict=True):
            mean, (low, high) = (ranks[column][key][name.strip("`")] for key in ("mean", "intervals"))
            assert cell.replace("*", "") == f"{mean:.1f} [{low:.1f}, {high:.1f}]", (name, column)
    if key != "ranks":
        assert f"must be {ranks['nll']['critical_difference']:.1f} apart" in text
        assert not any(ranks[column]["significant"] for column in columns)
        return
    for column in columns[:2]:
        assert f"p = {ranks[column]['p_value']:.{3 if ranks[column]['p_value'] < 0.1 else 2}f}" in text
    assert f"critical difference is {ranks['nll']['critical_difference']:.1f}" in text


def test_the_tables_of_the_leaderboard_are_those_of_its_figures(monkeypatch, tmp_path, capsys):
    program = runpy.run_path(str(ROOT / "benchmarks" / "leaderboard_tables.py"))
    published = shutil.copytree(RESULTS / "leaderboard", tmp_path / "published")
    (published / "leaderboard.md").unlink()
    monkeypatch.setitem(program["main"].__globals__, "PUBLISHED", published)
    monkeypatch.setattr(sys, "argv", ["leaderboard_tables.py", str(tmp_path / "no-runs")])
    program["main"]()
    for name in ("leaderboard.md", "leaderboard.json"):
        assert (published / name).read_text() == (RESULTS / "leaderboard" / name).read_text()
    assert "digits: 78 runs, 0 missing" in capsys.readouterr().out
