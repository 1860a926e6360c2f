"""Tables on a terminal: they fit its width, a line names hidden columns, and --wide shows all."""

import re

import numpy as np
import pytest
import typer.main

from calibrant import LOSSES, cli
from calibrant.evaluation.comparison import Comparison
from calibrant.reports.table_builders import comparison_table, shift_tables
from calibrant.reports.tables import print_table
from calibrant.training.recipe import shipped_recipes
from tests.cli.commands import printed
from tests.reports.test_comparison_page import with_everything


@pytest.fixture
def shown(monkeypatch, capsys):
    """What a terminal of a given width shows of a command, or of a function that prints."""

    def run(width, *arguments):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        if callable(arguments[0]):
            arguments[0]()
        else:
            cli.app([str(argument) for argument in arguments], standalone_mode=False)
        text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        lines = text.splitlines()
        if width < 1000 and "--wide" not in arguments:
            # Sentences about a fit are no table.
            assert max(len(line) for line in lines if "fitted to" not in line) <= width, text
        return " ".join(text.split()), lines

    return run


def test_every_command_that_prints_a_table_has_wide():
    commands = typer.main.get_command(cli.app).commands
    wide = {name for name, command in commands.items() if any(each.name == "wide" for each in command.params)}
    expected = {
        "evaluate",
        "calibrate",
        "conformal",
        "compare",
        "leaderboard",
        "sweep",
        "tune",
        "losses",
        "recipes",
    }
    assert wide == expected


@pytest.mark.parametrize("width", [50, 60, 80])
def test_descriptions_of_recipes_are_readable(shown, width):
    text, lines = shown(width, "recipes")
    assert "CIFAR-10: 350 epochs" in text
    assert "…" not in text
    hidden = {80: "model"}.get(width, "data, model")
    assert f"Hidden, to fit {width} columns: {hidden}. --wide shows all." in text
    assert sum(line.split()[:1] == [name] for line in lines for name in shipped_recipes()) == len(
        shipped_recipes()
    )


@pytest.mark.parametrize("command", ["losses", "recipes"])
def test_wide_lists_everything_on_one_line_each(shown, command):
    text, lines = shown(60, command, "--wide")
    assert "Hidden" not in text
    names = LOSSES if command == "losses" else shipped_recipes()
    assert sum(line.split()[:1] == [name] for line in lines for name in names) == len(names)
    assert [line.rstrip() for line in lines if line.strip()] == [
        line.rstrip() for line in printed(command).splitlines() if line.strip()
    ]  # the same in a pipe


def comparison(**options):
    methods = (with_everything("ce", 1.2, 2), with_everything("cals-alm[margin=6]", 12.0, 2))
    return Comparison("toy", (0, 1), methods, **options)


@pytest.mark.parametrize(
    ("width", "leading", "kept"),
    [
        (80, "", ["Accuracy", "ECE", "ECE + T"]),
        (60, "", ["Accuracy", "ECE"]),
        (60, "adaptive_ece", ["Adaptive ECE", "Adaptive ECE + T"]),
    ],
)
def test_a_comparison_keeps_the_figures_that_matter(shown, width, leading, kept):
    table = comparison_table(comparison(), leading)
    text, _ = shown(width, lambda: print_table(table))
    hidden = [column.label for column in table.columns if column.label not in kept]
    assert f"Hidden, to fit {width} columns: {', '.join(hidden)}. --wide" in text


def test_shifted_data_keep_the_clean_and_the_most_severe(shown):
    table = shift_tables(comparison())["ECE on fog[x=1]"]
    text, _ = shown(60, lambda: print_table(table))
    assert "Hidden, to fit 60 columns: severity 1, severity 2, severity 3, severity 4. --wide" in text


@pytest.fixture
def files(tmp_path):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 4, 300)
    folder = tmp_path / "a-long-name-for-a-folder"
    folder.mkdir()
    for number in range(3):
        logits = generator.normal(size=(300, 4)) + 2 * np.eye(4)[labels]
        np.savez(folder / f"predictions-of-model-{number}.npz", logits=logits, labels=labels)
    return sorted(folder.iterdir())


def test_several_files_fit_the_terminal(shown, files):
    text, lines = shown(50, "evaluate", *files, "--resamples", 0)
    assert "the columns are printed in 3 parts" in text
    assert sum(line.startswith("ECE  ") for line in lines) == 3
    text, lines = shown(50, "evaluate", *files, "--resamples", 0, "--wide")
    assert sum(line.startswith("ECE  ") for line in lines) == 1


def test_groups_are_shown_for_several_files(shown, files):
    counts = ("--class-counts", "900,200,50,3")
    alone, _ = shown(80, "evaluate", files[0], "--resamples", 0, *counts)
    _, lines = shown(140, "evaluate", *files[:2], "--resamples", 40, *counts)
    for group in ("head", "tail"):
        for figure in ("Accuracy", "ECE"):
            (row,) = [line for line in lines if line.startswith(f"{figure}, {group} ")]
            value = re.search(rf"{figure}, {group} +([\d.]+ %)", alone)[1]
            assert value in row
            assert row.count("*") >= 1
    assert "figures of groups of classes are not tested" in " ".join(" ".join(lines).split())


def test_the_ranking_of_calibrators_is_not_cut(shown, files):
    text, lines = shown(40, "calibrate", files[0], "--method", "auto", "--resamples", 0, "--folds", 2)
    assert [line.split() for line in lines[:2]] == [["Held-out"], ["calibrator", "NLL"]]
    assert "Hidden, to fit 40 columns: against doing nothing, seconds. --wide shows all." in text
    assert any(line.startswith("structured-vector  ") for line in lines)
