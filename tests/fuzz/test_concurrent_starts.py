"""Many training commands started at once in one folder: one recipe is trained, once, under its own name.

``python -m tests.fuzz.test_concurrent_starts --trials 2 --starts 50`` makes two trials of 50 starts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from calibrant import cli
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import check_file, result_of
from calibrant.training.runs import Run
from tests.programs import PREPARED
from tests.training.run_folders import assert_identical

CHANGES = [
    "data=synthetic[classes=4,features=5,train_size=64,validation_size=40,test_size=31]",
    "model.hidden=[8]",
    "batch_size=16",
]
KINDS = (
    ("ce", 3),
    ("focal", 3),
    ("ls[smoothing=0.1]", 3),
    ("cals-alm[margin=1]", 3),
    ("ce", 4),
)
"""The losses and epochs of the recipes."""

PATIENCE = 600
"""Seconds that a trial may take, even on a busy machine."""


def arguments(kind: int, output: Path) -> list[str]:
    loss, epochs = KINDS[kind]
    changes = [part for change in (*CHANGES, f"epochs={epochs}") for part in ("--set", change)]
    return ["train", "digits-lt", "--loss", loss, *changes, "--accelerator", "cpu", "--output", str(output)]


def live(kind: int, output: Path, said: Path, signal: Path, delay: float) -> None:
    """Give the command in this process, once the signal is there."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["calibrant", *arguments(kind, output)]
    while not signal.exists():
        time.sleep(0.01)
    time.sleep(delay)
    cli.main()


def start(kind: int, output: Path, said: Path, signal: Path, delay: float = 0.0) -> BaseProcess:
    process: BaseProcess = PREPARED.Process(target=live, args=(kind, output, said, signal, delay))
    process.start()
    return process


def trial(seed: int, starts: int, folder: Path) -> str:
    """Give many commands at once, and check what they said and what they published.

    Args:
        seed: decides the recipe and the moment of every start.
        starts: the number of commands.
        folder: an empty folder.

    Returns:
        A description in one line.

    Raises:
        AssertionError: something was published under a wrong name, trained twice, lost, or refused unclearly.
    """
    draw = random.Random(seed)
    kinds = [draw.randrange(len(KINDS)) for _ in range(starts)]
    output, signal = folder / "run", folder / "signal"
    said = [folder / f"said{number}" for number in range(starts)]
    processes = [
        start(kind, output, path, signal, draw.choice([0.0, draw.uniform(0, 1)]))
        for kind, path in zip(kinds, said, strict=True)
    ]
    while not all(path.exists() for path in said):
        time.sleep(0.01)
    signal.touch()
    until = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
        process.join()
    published = Recipe.load(output / "recipe.toml")
    winner = KINDS.index((published.loss, published.epochs))
    check_published(winner, output, folder)
    trained = waited = 0
    for process, kind, path in zip(processes, kinds, said, strict=True):
        text = path.read_text()
        lines = [line for line in text.splitlines() if line.startswith("calibrant: ")]
        if kind != winner:
            assert process.exitcode == 2, f"exit code {process.exitcode}: {text}"
            assert len(lines) == 1, text
            assert "another recipe" in lines[0], text
            assert "Traceback" not in text
            continue
        assert process.exitcode == 0, f"exit code {process.exitcode}: {text}"
        assert f"{output}: digits-lt, {published.loss}, seed 0, {published.epochs} epochs;" in text
        trained += "reading the data" in text
        waited += "for the same recipe; waiting" in text
    assert trained == 1, f"the run was trained {trained} times"
    refused = sum(kind != winner for kind in kinds)
    return (
        f"seed {seed}: {starts} starts; {published.loss} was trained once, {waited} waited, "
        f"{starts - refused - 1 - waited} found it finished, {refused} were refused in one line"
    )


def check_published(winner: int, output: Path, folder: Path) -> None:
    """Recipe, result, weights and predictions are those of one undisturbed run of the recipe."""
    result = result_of(output)
    recipe = Recipe.load(output / "recipe.toml")
    assert Recipe.from_toml(result["recipe"]) == recipe == Run(output).recipe
    for name, expected in result["files"].items():
        check_file(output / name, expected)
    assert [path.name for path in output.rglob(".*")] == [".lock"]
    alone = start(winner, folder / "alone", folder / "said", folder / "signal")
    alone.join(PATIENCE)
    assert alone.exitcode == 0
    assert_identical(output, folder / "alone")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failures = 0
    for seed in range(given.seed, given.seed + given.trials):
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(trial(seed, given.starts, Path(folder)), flush=True)
            except AssertionError as problem:
                failures += 1
                print(f"seed {seed}: FAILED {problem}", flush=True)
    print(f"{given.trials} trials of {given.starts} starts, {failures} failures")
    sys.exit(failures > 0)


def test_four_starts_at_once_train_one_recipe_once(tmp_path: Path) -> None:
    trial(38, 4, tmp_path)  # two of each of two recipes


if __name__ == "__main__":
    # The processes find the functions under the real name of this module.
    from tests.fuzz import test_concurrent_starts

    test_concurrent_starts.main()
