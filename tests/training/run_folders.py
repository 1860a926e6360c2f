"""What a run left in its folder, and when two runs came to the same."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

TENSORS = ("model.safetensors", "loss.safetensors", "learned.safetensors", "bins.safetensors")


def tensors(folder: Path) -> dict[str, Tensor]:
    """Weights, the loss's state and predictions, by file and name."""
    found = {
        f"{name}/{key}": value
        for name in TENSORS
        if (folder / name).exists()
        for key, value in load_file(folder / name).items()
    }
    for part in ("validation", "test"):
        with np.load(folder / f"{part}.npz") as archive:
            found |= {f"{part}/{key}": torch.tensor(archive[key]) for key in ("logits", "labels")}
    return found


def rows(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock said."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def result(folder: Path) -> dict[str, Any]:
    """The result without what a clock said."""
    content = json.loads((folder / "result.json").read_text())
    for row in content["history"]:
        del row["seconds"]
    return content


def assert_identical(one: Path, other: Path) -> None:
    """Bit for bit, but for what a clock said."""
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    assert len(first) >= 5
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert rows(one) == rows(other)
    ours, theirs = result(one), result(other)
    for content in (ours, theirs):
        del content["recipe"]  # workers, for example, change it and nothing else
    assert ours == theirs
    with (one / "log.csv").open() as a, (other / "log.csv").open() as b:
        columns = [
            [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(stream)]
            for stream in (a, b)
        ]
    assert columns[0] == columns[1] != []


def assert_close(one: Path, other: Path, tolerance: float = 2e-5) -> None:
    """But for rounding, and what a clock said."""
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name],
            second[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, at=name: f"{at}: {text}",
        )
    for ours, theirs in zip(rows(one), rows(other), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert abs(value - theirs[key]) <= tolerance * max(1, abs(value)), key
