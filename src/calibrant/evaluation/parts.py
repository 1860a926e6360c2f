"""Evaluation of data in parts, in several processes or with Ray: a map and a sum."""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from multiprocessing import cpu_count
from typing import Any, TypeVar

from torch import Tensor

from calibrant.arguments import one_of, whole_number
from calibrant.evaluation.evaluator import Evaluator
from calibrant.evaluation.figures import Evaluation
from calibrant.processes import WORKERS, Workers, process_pool, ray_cluster
from calibrant.warning import ProbabilitiesWarning, warn

Part = TypeVar("Part")
Read = Callable[[Part], Iterable[tuple[Tensor, Tensor]]]
PartProgress = Callable[[int, int], object]


def evaluate_parts(
    parts: Sequence[Part],
    read: Read[Part],
    *,
    jobs: int | None = 1,
    on: Workers = "processes",
    progress: PartProgress | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluate a set of data that comes in parts, such as the files of a folder, in constant memory.

    Each part gets an `Evaluator` of its own, and these are added up in the order of the parts. The figures
    are therefore the same for any number of jobs.

    With several jobs, ``parts`` and ``read`` are sent to other processes by pickle: ``read`` is then a
    function of a module, and a script that calls this function needs ``if __name__ == "__main__":``.

    Args:
        parts: the parts, such as the paths of files; at least one.
        read: yields the batches ``(logits, target)`` of a part.
        jobs: how many parts are evaluated at the same time. 1 means in this process, unless ``on`` is
            ``"ray"``. None means the number of CPUs: of this machine, or of the Ray cluster.
        on: ``"processes"`` of this machine, or ``"ray"``: the cluster that this machine belongs to (or that
            the environment variable ``RAY_ADDRESS`` names), or a new one on this machine. All machines must
            be able to read the parts. Needs the extra ``ray``.
        progress: called after every part with the number of parts done and their total.
        **options: the options of `Evaluator`.

    Raises:
        ValueError: there are no parts, or a part cannot be evaluated; see `Evaluator.update`.
        WorkerError: a worker process was killed.
        MissingPackageError: Ray is not installed.

    >>> import torch
    >>> def read(seed):
    ...     logits = torch.randn(100, 3, generator=torch.Generator().manual_seed(seed))
    ...     yield logits, logits.argmax(1)
    >>> evaluation = evaluate_parts(range(5), read, resamples=0)
    >>> evaluation.samples, evaluation.accuracy
    (500, 1.0)
    """
    on = one_of("on", on, WORKERS)
    jobs = None if jobs is None else whole_number("jobs", jobs)
    if not len(parts):
        raise ValueError("nothing to evaluate: there are no parts")
    total: Evaluator | None = None
    with closing(_evaluators(parts, read, jobs, on, options)) as evaluators:
        for done, evaluator in enumerate(evaluators, start=1):
            total = evaluator if total is None else total + evaluator
            if progress is not None:
                progress(done, len(parts))
    assert total is not None
    return total.compute(pooled=False)


def _evaluators(
    parts: Sequence[Part], read: Read[Part], jobs: int | None, on: Workers, options: dict[str, Any]
) -> Generator[Evaluator]:
    """The evaluators of all parts in order."""
    work = partial(_result, read=read, options=options)
    if on == "ray":
        results = _in_ray(work, parts, jobs)
    elif jobs == 1:
        yield from (_evaluated(part, read, options) for part in parts)
        return
    else:
        results = _in_processes(work, parts, jobs)
    shown: set[str] = set()
    with closing(results):
        for result in results:
            outcome, messages = pickle.loads(result)
            for message in messages:
                if str(message) not in shown:  # every worker gives the same advice
                    warn(message)
                    shown.add(str(message))
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome


def _evaluated(part: Part, read: Read[Part], options: dict[str, Any]) -> Evaluator:
    evaluator = Evaluator(**options)
    for logits, target in read(part):
        evaluator.update(logits, target)
    return evaluator


def _result(part: Part, *, read: Read[Part], options: dict[str, Any]) -> bytes:
    """In a worker: the pickled evaluator, or the error of bad data, and all warnings."""
    outcome: Evaluator | Exception
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            outcome = _evaluated(part, read, options)
        except ValueError as error:
            outcome = error
    # Of other warnings the texts, because a user's class might not be known elsewhere.
    messages = [
        each.message if isinstance(each.message, ProbabilitiesWarning) else str(each.message)
        for each in caught
    ]
    # As bytes: torch would send tensors through files that may be gone when the worker ends.
    return pickle.dumps((outcome, messages))


def _in_processes(work: Callable[[Part], bytes], parts: Sequence[Part], jobs: int | None) -> Generator[bytes]:
    with process_pool(min(cpu_count() if jobs is None else jobs, len(parts))) as pool:
        # Not `map`, which cancels futures when it is closed: the pool's own thread then fails to fill them.
        futures = deque(pool.submit(work, part) for part in parts)
        while futures:
            yield futures.popleft().result()


def _in_ray(work: Callable[[Part], bytes], parts: Sequence[Part], jobs: int | None) -> Generator[bytes]:
    with ray_cluster(jobs, "evaluating with Ray") as ray:
        if jobs is None:
            jobs = max(1, int(ray.cluster_resources().get("CPU", 1)))
        actor = ray.remote(num_cpus=1)(_Worker)
        pool = ray.util.ActorPool([actor.remote(work) for _ in range(min(jobs, len(parts)))])
        yield from pool.map(lambda worker, part: worker.work.remote(part), parts)


class _Worker:
    """A worker of Ray."""

    def __init__(self, work: Callable[[Any], bytes]) -> None:
        self.work_on = work

    def work(self, part: Any) -> bytes:
        return self.work_on(part)
