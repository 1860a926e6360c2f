"""Real gloo processes, and what each of them found."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Results = dict[str, Any]


def in_processes(scenario: Callable[[int], Results], count: int, folder: Path) -> list[Results]:
    """What the scenario returns in each of so many processes, given its rank."""
    mp.start_processes(_process, (scenario, count, folder), nprocs=count, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)]


def _process(rank: int, scenario: Callable[[int], Results], count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=60),
    )
    torch.save(scenario(rank), folder / f"{rank}.pt")
    dist.destroy_process_group()
