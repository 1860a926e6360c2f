"""Pools of processes: errors end them, and they do not outlive the process that started them."""

import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calibrant.processes import WorkerError, process_pool


def work(folder: Path) -> None:
    """Say which process works, and work for long."""
    (folder / "begun").write_text(str(os.getpid()))
    time.sleep(30)
    (folder / "ended").touch()


def begun(folder: Path) -> int:
    """The process that works there, once it does."""
    for _ in range(600):
        if (folder / "begun").exists() and (text := (folder / "begun").read_text()):
            return int(text)
        time.sleep(0.1)
    raise AssertionError("the work has not begun")


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_an_error_ends_work_that_has_begun(tmp_path: Path) -> None:
    def fail() -> None:
        with process_pool(1) as pool:
            pool.submit(work, tmp_path)
            begun(tmp_path)
            raise KeyError("this")

    with pytest.raises(KeyError, match="this"):
        fail()
    assert not (tmp_path / "ended").exists()


def test_a_killed_worker_is_told(tmp_path: Path) -> None:
    def lose() -> None:
        with process_pool(1) as pool:
            future = pool.submit(work, tmp_path)
            os.kill(begun(tmp_path), signal.SIGKILL)
            future.result()

    with pytest.raises(WorkerError, match="ended without a result"):
        lose()


PROGRAM = f"""
import os, sys, time
from pathlib import Path
from calibrant.processes import process_pool

{inspect.getsource(work)}

if __name__ == "__main__":
    with process_pool(1) as pool:
        pool.submit(work, Path(sys.argv[1])).result()
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    with subprocess.Popen(command) as program:
        worker = begun(tmp_path)
        program.kill()
    for _ in range(100):
        if not is_alive(worker):
            break
        time.sleep(0.1)
    assert not is_alive(worker)
