"""Collectives with time-outs and readable errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

# How gloo and NCCL report a process that is late or gone. Other errors are passed on unchanged.
_ALONE = re.compile(r"time.?out|timed out|connection|closed by peer|reset by peer|abort", re.IGNORECASE)

# Marks the messages of `wait_for_all`, so that no other message is taken for one of them.
_TAG = 0x0CA11B


def several_processes() -> bool:
    """Whether this is a distributed run."""
    return dist.is_available() and dist.is_initialized()


def collective_device(
    data: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> torch.device:
    """The device for exchanging tensors in the process group: that of the data if possible.

    A process without data guesses the device of the others.
    """
    if not several_processes() or (data is not None and data.type == "cuda"):
        return data or torch.device("cpu")
    backend = dist.get_backend(group)
    # The backend "undefined" means one backend for each kind of device.
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
        tensor: a tensor that has the same shape in every process.
        maximum: return the maximum instead of the sum.
        group: the processes to pool over; all of them by default.
        timeout: seconds to wait for the other processes; by default the process group's own time-out. Allow
            for processes that arrive late. (With NCCL and no time-out here, its watchdog ends the program.)

    Raises:
        RuntimeError: another process did not arrive in time, or has ended.

    >>> all_reduce(torch.ones(2))
    tensor([1., 1.])
    """
    if not several_processes():
        return tensor
    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    pooled = tensor.to(collective_device(tensor.device, group), copy=True)
    wait_for_all(group=group, timeout=timeout)
    with _waiting(timeout):
        work = dist.all_reduce(pooled, operation, group=group, async_op=True)
        if work is not None:  # None where this process is not in the group
            _wait(work, timeout)
    return pooled.to(tensor.device)


def wait_for_all(*, group: dist.ProcessGroup | None = None, timeout: float | None = None) -> None:
    """Wait until every process is here, if they communicate by gloo; with other backends, do nothing.

    Gloo aborts the program if one process is in another collective than the others. Here such a process is
    only missed, and the others raise an error. Arguments and errors as for `all_reduce`.
    """
    if not several_processes() or dist.get_rank(group) < 0:  # below 0: not in the group
        return
    if "cpu:gloo" not in dist.get_backend_config(group):
        return
    first, *others = dist.get_process_group_ranks(group or dist.group.WORLD)
    is_first = dist.get_rank() == first
    peers = others if is_first else [first]
    nothing = torch.zeros(1, device="cpu")
    with _waiting(timeout):
        # All report to the first process, which answers when it has heard from all.
        for exchange in (dist.irecv, dist.isend) if is_first else (dist.isend, dist.irecv):
            for work in [exchange(nothing, peer, group, _TAG) for peer in peers]:
                assert work is not None  # this process is in the group
                _wait(work, timeout)


def _wait(work: dist.Work, timeout: float | None) -> None:
    work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))


@contextmanager
def _waiting(timeout: float | None) -> Iterator[None]:
    """Turn errors about a process that is late or gone into one that says what to do."""
    try:
        yield
    except RuntimeError as problem:
        if not _ALONE.search(str(problem)):
            raise
        limit = "the process group's time-out" if timeout is None else f"{timeout:g} seconds"
        raise RuntimeError(
            f"process {dist.get_rank()} of {dist.get_world_size()} waited for the others, but one did not "
            f"arrive within {limit} or has ended: every process must take part, even without data; see the "
            f"output of the other processes for the reason ({str(problem).splitlines()[0]})"
        ) from problem


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all processes, in the order of their ranks; any picklable value.

    >>> gather(3)
    [3]
    """
    if not several_processes() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(
    settings: Mapping[str, object],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Raise the same error in every process unless all have equal settings.

    The settings are values by name that must print the same in every process; the error has the lines in
    which they differ. Other arguments and errors as for `all_reduce`.
    """
    if not several_processes():
        return
    printed = {name: str(value) for name, value in settings.items()}
    hashes = torch.tensor(
        [crc32(text.encode()) for text in printed.values()], dtype=torch.float64, device="cpu"
    )
    highest, lowest = all_reduce(torch.stack([hashes, -hashes]), maximum=True, group=group, timeout=timeout)
    for (name, text), differs in zip(printed.items(), (highest != -lowest).tolist(), strict=True):
        if differs:
            lines = [each.splitlines() for each in sorted(set(gather(text, group)))]
            common = set[str].intersection(*map(set, lines))
            own = ["; ".join(line for line in each if line not in common) or "nothing" for each in lines]
            raise ValueError(f"all processes need the same {name}, got {' and '.join(own)}")


class OtherProcessError(RuntimeError):
    """Another process failed; the message says what it was doing and why it failed."""


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn errors about lost connections into an `OtherProcessError` in one line."""
    try:
        yield
    except OtherProcessError:
        raise
    except RuntimeError as problem:
        if not several_processes() or not _ALONE.search(str(problem)):
            raise
        raise OtherProcessError(
            f"process {dist.get_rank()} of {dist.get_world_size()} lost the connection to another process, "
            "which was killed, has failed or does not answer; its own output may say why"
        ) from problem


def together(
    action: Callable[[], T],
    what: str,
    device: torch.device | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> T:
    """Call a function in every process. If it fails in one, raise an error in all, so that none waits.

    ``what`` says what the function does, for messages: "reading the data". ``device`` is that of the data.
    Other arguments as for `all_reduce`. Returns the result of the function in this process.

    Raises:
        OtherProcessError: the function failed in another process. A process in which it fails raises the
            function's own error.

    >>> together(lambda: 1 + 1, "adding")
    2
    """
    if not several_processes():
        return action()
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
        # Logged at once, because the other processes may arrive much later.
        _LOG.error("process %d failed while %s: %s", dist.get_rank(), what, problem)
    failures = torch.tensor(float(problem is not None), device=device or "cpu")
    try:
        failures = all_reduce(failures, group=group, timeout=timeout)
        if failures > 0:  # all processes have arrived, so this exchange needs no time-out
            reasons = gather(None if problem is None else f"{type(problem).__name__}: {problem}", group)
    except RuntimeError:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    if failures > 0:
        reason = next(each for each in reasons if each is not None)
        raise OtherProcessError(
            f"{int(failures)} of {dist.get_world_size(group)} processes failed while {what}: {reason}"
        )
    return result
