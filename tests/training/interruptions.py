"""Processes that work side by side on one folder, or are killed in the midst of training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

from calibrant.training import loop
from tests.programs import PREPARED

Work = Callable[[Path], str]
"""Works in a folder and returns a result as text. It goes to other processes, so it is no inner function."""


def killed_in_step(work: Work, folder: Path, step: int) -> None:
    """Kill a process that works in a folder, in the given training step, counted from 1 over all runs."""
    process = PREPARED.Process(target=_work_until, args=(work, folder, step))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def _work_until(work: Work, folder: Path, last: int) -> None:
    plain = loop.Loop._train_step
    steps = [0]

    def step(training: loop.Loop, batch: Any) -> None:
        steps[0] += 1
        if steps[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(training, batch)

    loop.Loop._train_step = step  # type: ignore[method-assign]
    work(folder)


def side_by_side(work: Work, folder: Path) -> list[tuple[list[str], str]]:
    """Let two processes work in the folder ``out``, so that both begin with a run of their own.

    Returns:
        For each process, the recipes that it trained, and its result. Both have trained something.
    """
    barrier = PREPARED.Barrier(2)
    processes = [PREPARED.Process(target=_share, args=(work, folder, number, barrier)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    found = [json.loads((folder / f"{number}.json").read_text()) for number in range(2)]
    assert all(trained for trained, _ in found)
    return [(trained, result) for trained, result in found]


def _share(work: Work, folder: Path, number: int, barrier: Barrier) -> None:
    trained: list[str] = []
    plain = loop.Loop.run

    def run(training: loop.Loop) -> None:
        if not trained:
            barrier.wait(60)  # both processes work on a run now
        trained.append(training.parts.recipe.to_toml())
        plain(training)

    loop.Loop.run = run  # type: ignore[method-assign]
    result = work(folder / "out")
    (folder / f"{number}.json").write_text(json.dumps([trained, result]))
