"""Talk between processes in which nobody waits without a word for one that does not come."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


def several_processes() -> bool:
    """Whether this process is one of a distributed run."""
    return dist.is_available() and dist.is_initialized()


def talking_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must be to be exchanged: NCCL takes none but a GPU's."""
    on_gpu = several_processes() and dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def all_reduce(
    tensor: Tensor,
    *,
    maximum: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Put the sum of all processes' tensors, or their maximum, in place of each; alone, do nothing.

    Args:
        tensor: of the same shape in every process.
        maximum: instead of the sum.
        group: the processes to pool over; all of them by default.
        timeout: seconds to wait for the others; by default as long as the process group does.

    Raises:
        RuntimeError: another process did not come in time, or is gone.

    >>> alone = torch.ones(2)
    >>> all_reduce(alone)
    >>> alone
    tensor([1., 1.])
    """
    if not several_processes():
        return
    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    try:
        work = dist.all_reduce(tensor, operation, group=group, async_op=True)
        if work is not None:  # None where this process is not in the group
            work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))
    except RuntimeError as problem:
        limit = "the process group's time-out" if timeout is None else f"{timeout:g} seconds"
        raise RuntimeError(
            f"process {dist.get_rank()} of {dist.get_world_size()} waited for the others, but one did not "
            f"come within {limit} or is gone: every process must take part, also one without data; what the "
            f"others printed says why one did not ({str(problem).splitlines()[0]})"
        ) from problem


def fail_together(
    problem: Exception | None,
    what: str,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Raise in every process if one of them has a problem, where else the others would wait for it.

    Args:
        problem: of this process, which it raises; the others say that there is one.
        what: the processes were doing, for the message.
        group: the processes concerned; all of them by default.
        timeout: as in `all_reduce`.

    >>> fail_together(None, "counting")
    >>> fail_together(ValueError("no data"), "counting")
    Traceback (most recent call last):
    ValueError: no data
    """
    failures = torch.tensor(float(problem is not None), device=talking_device(group))
    try:
        all_reduce(failures, group=group, timeout=timeout)
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
