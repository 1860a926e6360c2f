"""Forward+backward time and memory of every loss, as ratios to `F.cross_entropy` in the same run.

    python benchmarks/losses.py [--losses ce,cals-alm] [--shapes 4096x1000] [--seconds 3] [--threads 2]
                                [--busy 2] [--json FILE]

Time: steps of the loss and of `F.cross_entropy` take turns; the table shows the median ratio of
neighbouring steps. With ``--busy N``, N processes keep the cores busy during the measurement, as data
loaders do in training. Memory: the peak that torch allocates in forward+backward beyond the logits
themselves, gradient included, in units of the logits' size; measured with one thread, because the profiler
sees no other. Each further thread adds scratch memory of a few MiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from calibrant import LOSSES, create_loss

SHAPES = [(4096, 1000), (128, 100), (8, 21, 256, 256)]
PAIRWISE = "cpc"  # has a term for every pair of classes: O(K²) by definition
BATCHWISE = ("mmce", "mmce-weighted", "kde-xe")  # have a term over the whole batch
TOO_MANY_PAIRS = {("kde-xe", (8, 21, 256, 256)): "2.7e11 pairs of pixels"}

LossFunction = Callable[[Tensor, Tensor], Tensor]


def variants() -> dict[str, tuple[str, dict[str, object]]]:
    """Every registered loss with its defaults, and CALS-ALM's other penalties.

    Losses over pairs come last: they allocate gigabytes, which changes later measurements.
    """
    named: dict[str, tuple[str, dict[str, object]]] = {key: (key, {}) for key in LOSSES}
    for penalty in ("p2", "p3"):
        named[f"cals-alm[{penalty}]"] = ("cals-alm", {"penalty": penalty})
    for key in (*BATCHWISE, PAIRWISE):
        named[key] = named.pop(key)
    return named


def name_of(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def step(function: LossFunction, logits: Tensor, target: Tensor) -> None:
    logits.grad = None
    function(logits, target).backward()


def seconds(function: LossFunction, logits: Tensor, target: Tensor) -> float:
    start = time.perf_counter()
    step(function, logits, target)
    return time.perf_counter() - start


def ratio_of_times(
    function: LossFunction, logits: Tensor, target: Tensor, budget: float
) -> tuple[float, float]:
    """The median ratio to the `F.cross_entropy` step before, and the median seconds of the latter."""
    pairs: list[tuple[float, float]] = []
    while len(pairs) < 5 or (len(pairs) < 202 and sum(map(sum, pairs)) < budget):
        pairs.append((seconds(F.cross_entropy, logits, target), seconds(function, logits, target)))
    pairs = pairs[2:]  # the first two warm up
    return statistics.median(ours / theirs for theirs, ours in pairs), statistics.median(
        theirs for theirs, _ in pairs
    )


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep cores busy with the given number of processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def peak_in_logits(function: LossFunction, logits: Tensor, target: Tensor) -> float:
    """Peak extra memory of a step in units of the logits' size, from the allocator's own events."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step(function, logits, target)
    logits.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(function, logits, target)
    level = peak = 0
    events = recorded.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    torch.set_num_threads(threads)
    return peak / (logits.numel() * logits.element_size())


def measure(shape: tuple[int, ...], names: list[str], budget: float, threads: int) -> list[dict[str, object]]:
    """Print a table for one shape, and return its numbers."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    logits = (3 * torch.randn(shape)).requires_grad_()
    target = torch.randint(shape[1], shape[:1] + shape[2:])
    reference = peak_in_logits(F.cross_entropy, logits, target)
    results: list[dict[str, object]] = []
    print(f"\n{shape}\n{'loss':20}{'time':>8}{'memory in logits':>18}", flush=True)
    for name in names:
        key, hyperparameters = variants()[name]
        if (key, shape) in TOO_MANY_PAIRS:
            print(f"{name:20}   not run: {TOO_MANY_PAIRS[key, shape]}")
            continue
        if sys.stderr.isatty():
            print(f"measuring {name}", end="\r", file=sys.stderr, flush=True)
        loss = create_loss(key, shape[1], **hyperparameters)
        time_ratio, torch_seconds = ratio_of_times(loss, logits, target, budget)
        memory = peak_in_logits(loss, logits, target)
        note = "O(K²)" if key == PAIRWISE else "over the batch" if key in BATCHWISE else ""
        print(f"{name:20}{time_ratio:7.2f}x{memory:18.2f}  {note}", flush=True)
        results.append({"shape": shape, "loss": name, "time_ratio": time_ratio, "memory_in_logits": memory})
    print(f"{'F.cross_entropy':20}{1000 * torch_seconds:6.2f}ms{reference:18.2f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", default=",".join(variants()), help="comma-separated (default: all)")
    parser.add_argument(
        "--shapes",
        default=",".join(map(name_of, SHAPES)),
        help="comma-separated, as 4096x1000 (default: all)",
    )
    parser.add_argument("--seconds", type=float, default=3, help="time spent on each loss (default: 3)")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the cores busy (default: 0)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    names = arguments.losses.split(",")
    unknown = set(names) - set(variants())
    if unknown:
        parser.error(f"unknown losses {', '.join(sorted(unknown))}; known: {', '.join(variants())}")

    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]

    print(
        f"torch {torch.__version__}, {arguments.threads} threads, {arguments.busy} busy processes, float32; "
        "ratios to F.cross_entropy"
    )
    results: list[dict[str, object]] = []
    for shape in shapes:
        # One process per shape: the state of the allocator must not carry over to the next shape.
        with (
            busy_processes(arguments.busy),
            ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process,
        ):
            job = process.submit(measure, shape, names, arguments.seconds, arguments.threads)
            results += job.result()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"torch": torch.__version__, "busy": arguments.busy, "results": results}, file, indent=1
            )


if __name__ == "__main__":
    main()
