"""Processes that Fabric starts, when the first one is killed before they are connected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

COMMAND = ["train", "digits-lt", "--set", "epochs=1000", "--devices=2", "--accelerator=cpu", "--output=run"]


def second_processes(folder: Path) -> list[int]:
    """The processes that work in a folder and are not the first one there."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            here = os.readlink(f"/proc/{process}/cwd") == str(folder)
            if here and b"\0LOCAL_RANK=1\0" in Path("/proc", process, "environ").read_bytes():
                found.append(int(process))
        except OSError:  # it has ended, or belongs to somebody else
            pass
    return found


def wait_for(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_processes_end_with_the_first_one_before_they_are_connected(tmp_path: Path) -> None:
    """The second one still imports packages, for seconds, when the first one is killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "calibrant", *COMMAND]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: second_processes(tmp_path))
            process.kill()
            wait_for(lambda: not second_processes(tmp_path))
        finally:
            process.kill()
            for left in second_processes(tmp_path):
                os.kill(left, signal.SIGKILL)
