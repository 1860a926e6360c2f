"""Threads that work through the blocks of a batch on a CPU.

torch splits every operation among its threads, and all of them wait for the slowest at the end of each
operation. That is slow when other processes need the cores too, as data loaders do. Here each thread takes
whole blocks, runs all operations of a block alone, and waits for the others only at the end of the batch.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Barrier, Lock, Semaphore, Thread
from typing import TypeVar

import torch
from torch import Tensor

from calibrant.kernels.block import Scratch
from calibrant.layout import Index, blocks

Result = TypeVar("Result")
Task = TypeVar("Task")
_Job = tuple[Callable[[], None], Semaphore]

# Only one thread at a time holds Python's interpreter lock to start an operation: more threads would wait.
_MOST_WORKERS = 16


def sum_blocks(function: Callable[[Index, Scratch], Sequence[Tensor]], logits: Tensor) -> list[Tensor]:
    """Add up the tensors that a function computes from each block, in the order of the blocks.

    Holds few results at a time, and the sum does not depend on the number of threads.
    """
    totals: list[Tensor] = []
    waiting: dict[int, Sequence[Tensor]] = {}
    lock, added = Lock(), 0

    def add(number: int, index: Index, scratch: Scratch) -> None:
        nonlocal added
        tensors = function(index, scratch)
        with lock:
            waiting[number] = tensors
            while added in waiting:
                ready = waiting.pop(added)
                if added:
                    for total, tensor in zip(totals, ready, strict=True):
                        total += tensor
                else:
                    totals.extend(tensor.clone() for tensor in ready)
                added += 1

    _for_each_block(add, logits)
    return totals


def map_blocks(function: Callable[[Index, Scratch], Result], logits: Tensor) -> list[Result]:
    """Call a function for each block of the logits, without gradients and without autocast.

    On a CPU the calls run in as many threads as torch uses, each with one thread inside torch. The blocks
    depend on the shape alone, and so do the results.

    Args:
        function: takes the index of a block and scratch memory, which the next block overwrites.
        logits: ``(A, K[, S])``.

    Returns:
        The results in the order of the blocks.
    """
    results: dict[int, Result] = {}

    def keep(number: int, index: Index, scratch: Scratch) -> None:
        results[number] = function(index, scratch)

    _for_each_block(keep, logits)
    return [results[number] for number in range(len(results))]


def map_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], device: torch.device
) -> list[Result]:
    """Call a function with each task, without gradients and without autocast.

    On a CPU, where torch may use threads, even a single task is worked on in a thread of its own. Inside it,
    torch uses one thread.
    """
    if device.type != "cpu" or torch.get_num_threads() == 1:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return [function(task) for task in tasks]
    results: dict[int, Result] = {}

    def keep(number: int, task: Task, scratch: Scratch) -> None:
        results[number] = function(task)

    _for_each(tasks, keep, threads_for(len(tasks), device))
    return [results[number] for number in range(len(tasks))]


def _for_each_block(function: Callable[[int, Index, Scratch], None], logits: Tensor) -> None:
    """As `map_blocks`, for a function that also takes the number of the block and returns nothing."""
    places = list(blocks(logits.shape, logits.device))
    threads = threads_for(len(places), logits.device)
    if threads > 1:
        _for_each(places, function, threads)
        return
    scratch = Scratch()
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for number, index in enumerate(places):
            function(number, index, scratch)


def _for_each(tasks: Iterable[Task], function: Callable[[int, Task, Scratch], None], threads: int) -> None:
    pending = deque(enumerate(tasks))

    def next_task() -> tuple[int, Task] | None:
        try:
            return pending.popleft()
        except IndexError:
            return None

    def work(_: int) -> None:
        scratch = Scratch()
        try:
            while task := next_task():
                function(*task, scratch)
        except BaseException:
            pending.clear()
            raise

    try:
        in_threads(work, threads)
    finally:
        pending.clear()  # the caller was interrupted: start no further task


def threads_for(tasks: int, device: torch.device) -> int:
    """The number of threads for independent tasks: as many as torch uses and the tasks need, 1 on a GPU."""
    if device.type != "cpu" or torch.compiler.is_compiling():
        return 1
    return min(tasks, torch.get_num_threads(), _MOST_WORKERS)


def in_threads(work: Callable[[int], None], threads: int) -> None:
    """Call a function with the number of each thread, in that many threads, and wait for all of them.

    Inside, torch uses one thread, without gradients and without autocast. The first error is raised.
    """
    errors: list[BaseException] = []
    finished = Semaphore(0)
    inference = torch.is_inference_mode_enabled()

    def job(thread: int) -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():  # each thread has modes of its own
                work(thread)
        except BaseException as error:
            errors.append(error)

    jobs = _jobs_for(threads)
    for thread in range(threads):
        jobs.put((partial(job, thread), finished))
    for _ in range(threads):
        finished.acquire()
    if errors:
        raise errors[0]


_lock = Lock()
_jobs: SimpleQueue[_Job | None] = SimpleQueue()
_workers: list[Thread] = []


def _jobs_for(threads: int) -> SimpleQueue[_Job | None]:
    """The queue from which at least so many worker threads take their jobs."""
    with _lock:
        if len(_workers) < threads:
            _start(threads - len(_workers))
    return _jobs


def _start(count: int) -> None:
    ready = Barrier(count + 1)
    jobs = _jobs

    def serve() -> None:
        torch.get_num_threads()  # applies torch's default to this thread, which would undo the next line
        torch.set_num_threads(1)
        ready.wait()
        while entry := jobs.get():
            job, finished = entry
            job()
            del job, entry  # first: autograd copies a gradient that somebody else still holds
            finished.release()

    default = torch.get_num_threads()
    threads = [Thread(target=serve, name="calibrant", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    _workers.extend(threads)
    ready.wait()
    torch.set_num_threads(default)  # what a thread sets also becomes the default of threads started later


@atexit.register
def _end_workers() -> None:
    """Let threads end before Python does: one that is inside torch then would abort the process.

    There are jobs at the end if the caller was interrupted while it waited for them.
    """
    for _ in _workers:
        _jobs.put(None)
    for thread in _workers:
        thread.join()


def _forget_workers() -> None:
    global _lock, _jobs, _workers
    _lock, _jobs, _workers = Lock(), SimpleQueue(), []


# A forked process has none of its parent's threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
