"""Random kills: a run that is killed with ``kill -9`` and resumed equals an undisturbed one, bit for bit.

``python -m tests.fuzz.test_kills --kills 200 --seed 0`` kills 200 runs, with the seeds 0 to 199.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from calibrant.training.loop import train
from calibrant.training.setup import make_fabric
from tests.programs import PREPARED
from tests.training.run_folders import assert_identical
from tests.training.test_recipes import reduced, write_cifar, write_newsgroups, write_tiny_bert

RECIPES = ("synthetic", "digits-lt", "digits", "newsgroups-cnn", "cifar10-lt", "newsgroups-bert")
"""The shipped recipes that take a few seconds with small data."""

KINDS = 30
"""The number of different settings. Each needs an undisturbed run to compare with."""

PATIENCE = 300
"""Seconds that a run may take, even on a busy machine."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and in how many processes."""

    name: str
    changes: tuple[str, ...]
    processes: int

    @classmethod
    def of(cls, kind: int) -> Setting:
        """One of the settings; the first is the fastest that has everything but a second process."""
        draw = random.Random(kind)
        options = {
            "loss": draw.choice(["ce", "cals-alm[margin=1]", "adafocal", "ada-scale"]),
            "select": draw.choice(["last", "nll", "accuracy", "nll-after-temperature"]),
            "average": draw.choice([0.0, 0.9]),
            "accumulate": draw.choice([1, 2]),
            "workers": draw.choice([0, 0, 2]),
            "checkpoint_batches": draw.choice([0, 1, 3]),
            "adapt": draw.choice(["epoch", "2"]),
            "optimizer": draw.choice(["sgd[lr=0.01]", "adam[lr=0.01]"]),
            "gradient_clip": 1.0,
        }
        if kind == 0:
            options |= {"loss": "cals-alm[margin=1]", "select": "nll", "average": 0.9, "accumulate": 2}
            options |= {"workers": 1, "checkpoint_batches": 1}
        changes = tuple(f"{name}={value}" for name, value in options.items())
        return cls(RECIPES[kind % len(RECIPES)], changes, 2 if kind % 4 == 3 else 1)

    def __str__(self) -> str:
        several = f" processes={self.processes}" if self.processes > 1 else ""
        return f"{self.name} {' '.join(self.changes)}{several}"


def files(folder: Path) -> tuple[Path, Path]:
    """The files of the data sets; see `reduced`."""
    few, many = folder / "few", folder / "many"
    if not few.exists():
        for root, per_class in ((few, 0), (many, 2)):
            root.mkdir(parents=True)
            write_cifar(root, per_class)
        write_newsgroups(few)
        write_tiny_bert(few / "newsgroups-bert")
    return few, many


def live(setting: Setting, folder: Path, roots: tuple[Path, Path], rank: int, port: int) -> None:
    """Train in this process, one of those of the setting; write the seconds that it took to a file."""
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    os.dup2(os.open(folder.with_suffix(f".errors{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    began = time.monotonic()
    # A fork server started this process. Loader workers are to be forked, as they are on Linux by default.
    multiprocessing.set_start_method("fork", force=True)
    if setting.processes > 1:  # as torchrun does
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
        numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), setting.processes)
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(TORCHELASTIC_RUN_ID="kills", MASTER_ADDR="127.0.0.1")
    recipe, root = reduced(setting.name, roots)
    batch_size = max(4, recipe.batch_size // 12 * 4)  # about six steps in an epoch
    recipe = recipe.override([f"batch_size={batch_size}", "epochs=2", *setting.changes])
    fabric = make_fabric(recipe, accelerator="cpu", devices=setting.processes)
    fabric.launch()
    train(recipe, folder, data_root=root, fabric=fabric)
    folder.with_suffix(".seconds").write_text(str(time.monotonic() - began))


def start(setting: Setting, folder: Path, roots: tuple[Path, Path]) -> list[BaseProcess]:
    """Processes that have just begun to train."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[BaseProcess] = [
        PREPARED.Process(target=live, args=(setting, folder, roots, rank, port))
        for rank in range(setting.processes)
    ]
    begun = [folder.with_suffix(f".errors{rank}") for rank in range(setting.processes)]
    for path in begun:
        path.unlink(missing_ok=True)
    for process in processes:
        process.start()
    while not all(path.exists() for path in begun):  # the first processes wait for imports
        time.sleep(0.01)
    return processes


def finish(processes: list[BaseProcess], folder: Path) -> None:
    """Wait until a run is finished."""
    until = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    end(processes, 0)
    if any(codes):
        said = "\n".join(path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}.errors*")))
        raise AssertionError(f"the run ended with {codes}: {said}")


def end(processes: list[BaseProcess], patience: float) -> None:
    """Kill the processes that do not end by themselves."""
    until = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
        process.join()


def undisturbed(kind: int, folder: Path) -> tuple[Path, float]:
    """The folder of the undisturbed run of a setting, and its seconds; trained if it is not there."""
    place = folder / f"undisturbed{kind}"
    clock = place.with_suffix(".seconds")
    if not clock.exists():
        finish(start(Setting.of(kind), place, files(folder)), place)
    return place, float(clock.read_text())


def kill_once(seed: int, folder: Path, *, kinds: int = KINDS) -> tuple[bool, str]:
    """Kill a run at a random moment, resume it, and compare it with the undisturbed run.

    Args:
        seed: decides the setting, the moment, and which processes are killed.
        folder: a folder for the data and runs; undisturbed runs in it are used again.
        kinds: the number of settings to choose from.

    Returns:
        Whether the results are identical, and a description in one line.
    """
    draw = random.Random(seed)
    kind = seed % kinds
    setting = Setting.of(kind)
    try:
        expected, seconds = undisturbed(kind, folder)
    except AssertionError as problem:
        return False, f"seed {seed}: {setting} cannot be trained: {problem}"
    place = folder / f"killed{seed}"
    moment = draw.uniform(0, seconds)
    victims = draw.sample(range(setting.processes), draw.randint(1, setting.processes))
    processes = start(setting, place, files(folder))
    time.sleep(moment)
    for victim in victims:
        processes[victim].kill()
    end(processes, 5)
    in_time = processes[victims[0]].exitcode == -signal.SIGKILL
    last = place / "checkpoints" / "last.pt"
    state = "result" if (place / "result.json").exists() else "checkpoint" if last.exists() else "nothing"
    said = f"seed {seed}: {setting}; process {victims} {'killed' if in_time else 'ended'} "
    said += f"after {moment:.2f} of {seconds:.2f} s with {state}: "
    try:
        finish(start(setting, place, files(folder)), place)
        assert_identical(place, expected)
    except AssertionError as difference:
        return False, f"{said}DIFFERENT {' '.join(str(difference).split())[:2000]}"
    shutil.rmtree(place)
    return True, f"{said}identical"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    differences = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seed, given.seed + given.kills):
            same, said = kill_once(seed, Path(folder))
            print(said, flush=True)
            differences += not same
    print(f"{given.kills} kills, {differences} differences")
    sys.exit(differences > 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.mark.parametrize("seed", [random.randrange(10**6) for _ in range(2)], ids=["first", "second"])
def test_a_kill_at_a_random_moment_changes_nothing(seed: int, folder: Path) -> None:
    same, said = kill_once(seed, folder, kinds=1)
    assert same, said


if __name__ == "__main__":
    # The processes find the functions under the real name of this module.
    from tests.fuzz import test_kills

    test_kills.main()
