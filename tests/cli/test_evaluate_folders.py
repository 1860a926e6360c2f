"""The command evaluate on folders: the same figures in one process and in several."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from calibrant import cli
from tests.programs import started_by

ROWS, CLASSES, SHARDS = 40, 4, 10


def run(*arguments):
    command = ["evaluate", "--resamples", "20", *map(str, arguments)]
    return CliRunner().invoke(cli.app, command, catch_exceptions=False)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


def write_folder(place):
    """Ten Parquet files with a column of lists."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = place / "test"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(SHARDS):
        logits = 3 * generator.normal(size=(ROWS, CLASSES)).astype(np.float32)
        labels = np.where(generator.random(ROWS) < 0.7, logits.argmax(1), 0)
        table = pyarrow.table({"label": labels, "logits": logits.tolist()})
        parquet.write_table(table, folder / f"test-{number:05}-of-{SHARDS:05}.parquet")
    return folder


def figures(path):
    (evaluation,) = json.loads(path.read_text())
    return evaluation


def same(first, second):
    """Whether two evaluations have the same numbers to 1e-12, and everything else is equal."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        return all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == (pytest.approx(second, abs=1e-12, rel=1e-12) if isinstance(second, float) else second)


def test_the_same_figures_in_several_processes(tmp_path, folder, programs):
    """`tests/training/test_leaderboard.py` does the same on Ray."""
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    assert run(folder, "--stream", "--json", one).exit_code == 0
    with started_by(programs / "python"):
        assert run(folder, "--json", several, "--jobs", "2").exit_code == 0
    assert figures(one)["samples"] == ROWS * SHARDS
    assert same(figures(one), figures(several))


def test_a_folder_is_exact_by_default(tmp_path, folder):
    result = run(folder, "--json", tmp_path / "out.json")
    assert result.exit_code == 0
    assert "test: 400 elements" in result.stdout
    assert figures(tmp_path / "out.json")["exact"]


def test_what_does_not_go_together(folder):
    result = run(folder, "--exact", "--jobs", "2")
    assert result.exit_code == 2
    assert "--exact loads everything" in result.stderr
    shard = next(folder.glob("test-00003*"))
    result = run(shard, "--jobs", "2")
    assert result.exit_code == 2
    assert f"--jobs reads the files of a folder side by side; {shard} is a single file" in result.stderr


def test_an_error_names_the_shard(folder):
    shard = next(folder.glob("test-00003*"))
    shard.write_bytes(shard.read_bytes()[:-20])
    result = run(folder)
    assert result.exit_code == 2
    assert f"{shard}: cannot be read as .parquet" in result.stderr
