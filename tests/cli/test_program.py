"""How a command ends: one line and an exit code, and a log for what nobody foresaw."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from calibrant import cli
from calibrant.cli import prediction_files


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "m.npz"
    np.savez(path, logits=np.random.default_rng(0).normal(size=(30, 3)), labels=np.arange(30) % 3)
    return path


@pytest.fixture
def logs(tmp_path, monkeypatch):
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def ended(file, monkeypatch, problem):
    """The command evaluate, in which an error occurs."""

    def fails(*_, **__):
        raise problem

    monkeypatch.setattr(prediction_files, "evaluate_file", fails)
    result = CliRunner().invoke(cli.app, ["evaluate", str(file)], catch_exceptions=False)
    assert result.stdout == ""
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    "problem",
    [TypeError("no\x1b[2J,\nnot this"), RecursionError("too deep"), AssertionError(), KeyError("x")],
    ids=lambda problem: type(problem).__name__,
)
def test_what_nobody_foresaw_is_one_line_and_a_log_that_only_its_owner_reads(
    file, logs, monkeypatch, problem
):
    code, line = ended(file, monkeypatch, problem)
    assert code == 1
    assert line.startswith(f"calibrant: unexpected {type(problem).__name__} (test_program.py, line ")
    assert line.count("\n") == 1
    assert "\x1b" not in line
    (log,) = logs.iterdir()
    assert line.rstrip().endswith(f"the traceback is in {log}")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    text = log.read_text()
    assert "Traceback (most recent call last)" in text
    assert "command: [" in text


def test_a_log_that_cannot_be_written_is_said(file, logs, monkeypatch):
    logs.rmdir()
    code, line = ended(file, monkeypatch, TypeError("not this"))
    assert code == 1
    assert "TypeError" in line
    assert "not this; no log could be written: " in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("problem", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (MemoryError(), 2, "not enough memory: expected smaller files"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), 2, "9 bytes"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 2, "/x/y: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", b"/x/\xff"), 2, "/x/\\udcff: Permission denied"),
        (OSError("plain"), 2, "plain"),
    ],
)
def test_what_was_foreseen_is_one_line_without_a_log(file, logs, monkeypatch, problem, code, words):
    found, line = ended(file, monkeypatch, problem)
    assert found == code
    assert line.startswith("calibrant: ")
    assert words in line
    assert line.count("\n") == 1
    assert not list(logs.iterdir())


def test_an_error_of_another_package_is_not_foreseen(file, logs, monkeypatch):
    """Such as a ValueError of a user's model; this test stands for one."""

    def fails(*_, **__):
        a, b = (1,)
        return a, b

    arguments = ["apply", str(file), str(file), "--output", "out.npz"]
    monkeypatch.setattr("calibrant.calibrators.load_calibrator", fails)
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stderr.startswith("calibrant: unexpected ValueError (test_program.py, line ")
    assert "not enough values to unpack" in result.stderr
    assert len(list(logs.iterdir())) == 1


def test_nobody_who_reads_the_output_is_no_error(file, logs, monkeypatch):
    assert ended(file, monkeypatch, BrokenPipeError(errno.EPIPE, "Broken pipe")) == (141, "")
    from_rich = SystemExit(1)
    from_rich.__context__ = BrokenPipeError()
    assert ended(file, monkeypatch, from_rich) == (141, "")
    assert not list(logs.iterdir())


def test_an_interruption_while_writing_leaves_nothing(file, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    output = tmp_path / "out.json"
    result = CliRunner().invoke(cli.app, ["evaluate", str(file), "--resamples", "0", "--json", str(output)])
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == [file]


def test_usage_errors_have_the_same_exit_code():
    assert CliRunner().invoke(cli.app, ["evaluate", "--nonsense"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["evaluate"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["--help"]).exit_code == 0


FORKS = """
import os, sys
import rich.progress, rich.table, scipy.stats
import calibrant.cli, calibrant.cli.prediction_files, calibrant.predictions, calibrant.reports.table_builders

def ends(number, closed, output, encoding, *arguments, command="evaluate"):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.dup2(os.open(f"{number}.err", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(output, 1)
    for descriptor in closed:
        os.close(descriptor)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if descriptor else "r"
        setattr(sys, name, None if descriptor in closed else open(descriptor, mode, encoding=encoding))
    sys.argv = ["calibrant", command, *arguments]
    calibrant.cli.main()

nobody_reads = os.pipe()
os.close(nobody_reads[0])
to_file, full = os.open("out", os.O_WRONLY | os.O_CREAT), os.open("/dev/full", os.O_WRONLY)
file = ["m.npz", "--resamples", "0"]
print([
    ends(0, [1], to_file, "utf-8", *file, "--json", "0.json"),
    ends(1, [0, 1, 2], to_file, "utf-8", *file, "--json", "1.json"),
    ends(2, [], nobody_reads[1], "utf-8", *file, "--json", "2.json"),
    ends(3, [], full, "utf-8", *file),
    ends(4, [], to_file, "ascii", *file),
    ends(5, [], to_file, "ascii", os.fsdecode(b"\\xff\\xe2\\x80\\x93.npz")),
    ends(6, [], full, "utf-8", command="--version"),
    ends(7, [], full, "utf-8", command="--help"),
    ends(8, [], nobody_reads[1], "utf-8", command="--help"),
    ends(9, [1], to_file, "utf-8", command="--help"),
    ends(10, [], full, "utf-8", "--wide", command="losses"),
])
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs fork and /dev/full")
def test_streams_that_are_closed_full_or_ascii(file, programs, tmp_path):
    """In one process that forks, because a new one takes seconds to import torch."""
    command = [str(programs / "python"), "-c", FORKS]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout == f"{[0, 0, 141, 2, 0, 2, 2, 2, 141, 0, 2]}\n", result.stderr
    for number in range(3):
        assert (tmp_path / f"{number}.json").read_text().startswith("[{")
    full = "calibrant: the standard output: No space left on device\n"
    assert [(tmp_path / f"{number}.err").read_text() for number in range(11)] == [
        *("", "", ""),
        full,
        "",
        "calibrant: \\udcff\\u2013.npz: does not exist\n",
        *(full, full, "", "", full),
    ]
    assert "Accuracy" in (tmp_path / "out").read_text()


def test_reports_do_not_depend_on_the_backend_that_jupyter_chooses(file, tmp_path):
    """In a new process: matplotlib reads the environment variable when it is imported."""
    command = [
        sys.executable,
        "-m",
        "calibrant",
        "evaluate",
        str(file),
        "--resamples",
        "0",
        "--report",
        "m.html",
    ]
    environment = {
        **os.environ,
        "MPLBACKEND": "not-installed",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "m.html").exists()
