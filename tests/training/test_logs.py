from __future__ import annotations

import csv
import errno
import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from calibrant.losses import create_loss
from calibrant.training.logs import Logs

ROWS = [
    {"epoch": 1, "train_loss": 2.0, "seconds": 0.5},
    {"epoch": 2, "train_loss": 1.0, "seconds": 0.5},
    {"epoch": 3, "train_loss": 0.1 + 0.2, "seconds": 0.5, "multiplier_mean": 1.5},
]


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def write(folder: Path, first: int, last: int, key: str = "ce") -> None:
    with closing(Logs(folder)) as logs:
        for count in range(first, last + 1):
            logs.write(ROWS[:count], create_loss(key, 4).learned())


def test_all_rows_are_in_both_files(tmp_path: Path) -> None:
    write(tmp_path, 1, 3)
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == ROWS
    with (tmp_path / "log.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [float(row["train_loss"]) for row in table] == [2.0, 1.0, 0.1 + 0.2]
    assert [row["multiplier_mean"] for row in table] == ["", "", "1.5"]


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    write(tmp_path, 1, 3, "cals-alm")
    assert scalars(tmp_path, "train_loss") == [(1, 2.0), (2, 1.0), (3, pytest.approx(0.3))]
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert "epoch" not in events.Tags()["scalars"]
    assert [event.step for event in events.Histograms("loss/multiplier")] == [1, 2, 3]


def test_what_a_killed_run_wrote_too_much_is_written_over(tmp_path: Path) -> None:
    write(tmp_path, 1, 3)
    write(tmp_path, 2, 2)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert [step for step, _ in scalars(tmp_path, "train_loss")] == [1, 2]


def test_nothing_is_made_where_nothing_is_written(tmp_path: Path) -> None:
    with closing(Logs(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_log_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.flush", full)
    with pytest.raises(OSError, match=r"^cannot write \S+/tensorboard: No space left on device$"):
        write(tmp_path, 1, 1)
