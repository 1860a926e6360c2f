from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from calibrant.training import display, train
from calibrant.training.display import Display
from calibrant.training.own_data import choose_recipe
from calibrant.training.recipe import Recipe

RECIPE = Recipe.load("digits-lt").override(["epochs=3", "loss=cals-alm[margin=6]", "seed=2"])


def row(epoch: int) -> dict[str, float]:
    return {"epoch": epoch, "train_loss": 1.2345, "validation_accuracy": 0.5, "validation_ece": 0.043}


def watched(monkeypatch: pytest.MonkeyPatch, terminal: bool, width: int = 200) -> io.StringIO:
    """What every display from now on writes to."""
    screen = io.StringIO()

    def console(**_: Any) -> Console:
        return Console(file=screen, force_terminal=terminal, width=width, color_system=None)

    monkeypatch.setattr(display, "Console", console)
    return screen


def shown(
    monkeypatch: pytest.MonkeyPatch, *, terminal: bool, visible: bool = True, start: int = 0, done: int = 0
) -> str:
    """What is seen of a run."""
    screen = watched(monkeypatch, terminal)
    with Display(RECIPE, shown=visible) as board:
        if start or done:
            board.resumed(start, done)
        for epoch in range(start, 3):
            board.start_epoch(epoch, 2, done)
            for step in range(done, 2):
                board.step(torch.tensor(2.0 * (step + 1)), step + 1)
            done = 0
            board.end_epoch(row(epoch + 1), {"multiplier": torch.tensor([0.1, 0.3])})
        board.message("predicting test")
    return screen.getvalue()


def test_a_terminal_has_a_bar_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True)
    assert "cals-alm[margin=6], seed 2" in text
    assert "6/6" in text
    assert "predicting test" in text


def test_a_bar_shows_the_figures_of_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch, terminal=True)
    with Display(RECIPE, shown=True) as board:
        board.start_epoch(0, 2, 0)
        board.end_epoch(row(1), {"gamma": torch.tensor([3.0, -0.1]), "offset": torch.tensor(0.25)})
    assert "loss 1.234 accuracy 50.0 % ECE 4.3 % γ -0.1…3 offset 0.25" in screen.getvalue()
    assert "2/6" in screen.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_note_has_a_line_of_its_own(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch, terminal, width=40)
    with Display(RECIPE, shown=True) as board:
        board.start_epoch(0, 2, 0)
        board.note("what a step cannot be, and why [not]")
        board.step(torch.tensor(2.0), 1)
    note = "cals-alm[margin=6], seed 2: what a step cannot be, and why [not]\n"
    assert screen.getvalue().count(note) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_sizes_and_classes_have_a_line_that_stays(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = "".join(f"{i % 7},{('cat', 'dog', chr(27) + '[31mred')[i % 3]}\n" for i in range(90))
    (tmp_path / "pets.csv").write_text(f"x,kind\n{rows}")
    screen = watched(monkeypatch, terminal)
    recipe = choose_recipe(tmp_path / "pets.csv", "kind", ["epochs=1"])
    train(recipe, tmp_path / "run", progress=True)
    line = next(line for line in screen.getvalue().splitlines() if "3 classes" in line)
    assert line.endswith(r" test; 3 classes: \x1b[31mred, cat, dog")
    assert "━" not in line


def test_a_file_has_lines_now_and_then_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display.time, "monotonic", lambda: 100.0)  # no time passes after the first line
    lines = shown(monkeypatch, terminal=False).splitlines()
    name = "cals-alm[margin=6], seed 2: "
    assert lines == [
        f"{name}epoch 1/3 loss 1.234 accuracy 50.0 % ECE 4.3 % λ 0.1…0.3",
        f"{name}epoch 3/3 loss 1.234 accuracy 50.0 % ECE 4.3 % λ 0.1…0.3",
        f"{name}predicting test",
    ]


def test_a_resumed_run_says_where_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first = shown(monkeypatch, terminal=False, start=1, done=1).splitlines()[0]
    assert first == "cals-alm[margin=6], seed 2: going on after 1 of 3 epochs and 1 batches"
    assert "4/6" not in first


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_shown_unless_asked_for(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=terminal, visible=False) == ""
