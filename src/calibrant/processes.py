"""Other processes to work in: a pool on this machine, and the workers of Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, Literal, get_args

from calibrant.extras import optional_package

Workers = Literal["processes", "ray"]

WORKERS: tuple[Workers, ...] = get_args(Workers)
"""Who can share work: processes of this machine, or the workers of a Ray cluster."""

_LOST = (
    "a worker process ended without a result; it may have run out of memory: use fewer jobs "
    '(or a script lacks `if __name__ == "__main__":`)'
)


class WorkerError(RuntimeError):
    """A worker process ended before its work was done."""


@contextmanager
def process_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that share the cores of this machine. They end with this process.

    Work that waits is dropped at the end. After an error, so is work that has begun. A killed worker process
    raises a `WorkerError`.
    """
    import torch  # here: the options of the commands name `Workers`, and their help must not wait for torch

    context = get_context("spawn")  # a forked process would inherit the threads' locks of torch
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(jobs, context, _start_worker, (threads,)) as pool:
        try:
            yield pool
        except BaseException as error:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise WorkerError(_LOST) from error
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def ray_cluster(jobs: int | None, purpose: str) -> Iterator[Any]:
    """The package Ray, connected to a cluster.

    It is the cluster that ``ray start`` has started or joined on this machine, or that the environment
    variable ``RAY_ADDRESS`` names, or a new one on this machine, with ``jobs`` CPUs or all of them. A killed
    worker process raises a `WorkerError`.

    ``purpose`` is what needs Ray, as the start of a sentence, for the error if it is not installed.
    """
    ray = optional_package("ray", "ray", purpose=purpose)
    started = not ray.is_initialized()
    if started:
        quiet = {"logging_level": "error", "log_to_driver": False}
        own = {"num_cpus": jobs, "include_dashboard": False, **quiet}
        # Not the address "auto": it also finds a cluster that another program started for itself, and this
        # process would be killed when that program ends.
        try:
            ray.init(**own)
        except ConnectionError:  # the environment asks for "auto", and there is no cluster
            ray.init(address="local", **own)
        except ValueError:  # a cluster that runs already has its own number of CPUs
            ray.init(**quiet)
    try:
        yield ray
    except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError) as error:
        raise WorkerError(_LOST) from error
    finally:
        if started:
            ray.shutdown()
