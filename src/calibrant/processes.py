"""Talk between processes in which nobody waits without a word for one that does not come."""

from __future__ import annotations

import logging
import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_LOG = logging.getLogger(__name__)

# What gloo and NCCL say of a process that is late or gone; other errors are mistakes, and stay as they are.
_ALONE = re.compile(r"time.?out|timed out|connection|closed by peer|reset by peer|abort", re.IGNORECASE)


def several_processes() -> bool:
    """Whether this process is one of a distributed run."""
    return dist.is_available() and dist.is_initialized()


def talking_device(data: torch.device | None = None, group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must be to be exchanged: where the data are, unless the processes cannot talk from there.

    Args:
        data: the device of the data; None in a process that has none and guesses where the others' are.
        group: the processes; all of them by default.
    """
    if not several_processes() or (data is not None and data.type == "cuda"):
        return data or torch.device("cpu")
    backend = dist.get_backend(group)
    # "undefined" is one for each kind of device.
    if backend == "nccl" or (data is None and torch.cuda.is_available() and backend != "gloo"):
        return torch.device("cuda", torch.cuda.current_device())
    return data or torch.device("cpu")


def all_reduce(
    tensor: Tensor,
    *,
    maximum: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The sum of all processes' tensors, or their maximum; alone, the tensor itself.

    Args:
        tensor: of the same shape in every process.
        maximum: instead of the sum.
        group: the processes to pool over; all of them by default.
        timeout: seconds to wait for the others, so more than the difference in their work before; by default
            as long as the process group does. (NCCL without a time-out given here does not wait: its own
            watchdog ends the program.)

    Raises:
        RuntimeError: another process did not come in time, or is gone.

    >>> all_reduce(torch.ones(2))
    tensor([1., 1.])
    """
    if not several_processes():
        return tensor
    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    pooled = tensor.to(talking_device(tensor.device, group), copy=True)
    try:
        work = dist.all_reduce(pooled, operation, group=group, async_op=True)
        if work is not None:  # None where this process is not in the group
            work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))
    except RuntimeError as problem:
        if not _ALONE.search(str(problem)):
            raise
        limit = "the process group's time-out" if timeout is None else f"{timeout:g} seconds"
        raise RuntimeError(
            f"process {dist.get_rank()} of {dist.get_world_size()} waited for the others, but one did not "
            f"come within {limit} or is gone: every process must take part, also one without data; what the "
            f"others printed says why one did not ({str(problem).splitlines()[0]})"
        ) from problem
    return pooled.to(tensor.device)


def fail_together(
    problem: Exception | None,
    what: str,
    device: torch.device | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Raise in every process if one of them has a problem, where else the others would wait for it.

    Args:
        problem: of this process, which it raises; the others say that there is one.
        what: the processes were doing, for the message.
        device: of the data, in every process.
        group: the processes concerned; all of them by default.
        timeout: as in `all_reduce`.

    >>> fail_together(None, "counting")
    >>> fail_together(ValueError("no data"), "counting")
    Traceback (most recent call last):
    ValueError: no data
    """
    if not several_processes():
        if problem is not None:
            raise problem
        return
    if problem is not None:  # now, because the others may come late
        _LOG.error("process %d failed while %s: %s", dist.get_rank(), what, problem)
    failures = torch.tensor(float(problem is not None), device=device)
    try:
        failures = all_reduce(failures, group=group, timeout=timeout)
    except RuntimeError:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    if failures > 0:
        raise RuntimeError(
            f"{int(failures)} of {dist.get_world_size(group)} processes failed while {what}; their own "
            "errors say why. Nothing was changed here."
        )
