"""Processes that train together: what one knows, all get to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies.single_device import SingleDeviceStrategy

from calibrant.training.choice import TrainingError

T = TypeVar("T")


def alone_on_gpu(fabric: Fabric) -> bool:
    """Whether there is one process, on a GPU."""
    return isinstance(fabric.strategy, SingleDeviceStrategy) and fabric.device.type == "cuda"


def together(action: Callable[[], T], fabric: Fabric) -> T:
    """Do something in every process; what fails in one fails in all, where else the others would wait."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = action()
    except (OSError, ValueError, ImportError, TypeError) as error:
        problem = error
    problem = next((each for each in gather(problem, fabric) if each is not None), None)
    if problem is not None:
        raise problem
    return cast(T, result)


def agreed(what: str, value: T, fabric: Fabric) -> T:
    """The value, if every process has the same; machines must see the same folder."""
    values = gather(value, fabric)
    if any(each != value for each in values):
        raise TrainingError(
            f"the processes do not agree on {what} ({values}): the output folder must be one that all see"
        )
    return value


def gather(value: Any, fabric: Fabric) -> list[Any]:
    """The values of all processes, in every process."""
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(values, value)
    return values
