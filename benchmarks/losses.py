"""Forward+backward time and memory of every loss, as ratios to `F.cross_entropy` in the same run.

    python benchmarks/losses.py [--losses ce,cals-alm] [--rounds 3] [--threads 2] [--json FILE]

Time: rounds of a run of the loss between two runs of `F.cross_entropy`, each warmed up; the ratio of
the medians over all rounds. Memory: the most that torch holds at once during forward+backward beyond
the logits themselves, gradient included, in units of the logits' size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from calibrant import LOSSES, create_loss

SHAPES = [(4096, 1000), (128, 100), (8, 21, 256, 256)]
PAIRWISE = "cpc"  # visits every pair of classes: O(K²) by definition
BATCHWISE = ("mmce", "mmce-weighted", "kde-xe")  # have a term over the whole batch
TOO_MANY_PAIRS = {("kde-xe", (8, 21, 256, 256)): "2.7e11 pairs of pixels"}

LossFunction = Callable[[Tensor, Tensor], Tensor]


def variants() -> dict[str, tuple[str, dict[str, object]]]:
    """Every registered loss with its defaults, and CALS-ALM's other penalties.

    The losses that visit pairs come last: the gigabytes they move change the allocator for good.
    """
    named: dict[str, tuple[str, dict[str, object]]] = {key: (key, {}) for key in LOSSES}
    for penalty in ("p2", "p3"):
        named[f"cals-alm[{penalty}]"] = ("cals-alm", {"penalty": penalty})
    for key in (*BATCHWISE, PAIRWISE):
        named[key] = named.pop(key)
    return named


def step(function: LossFunction, logits: Tensor, target: Tensor) -> None:
    logits.grad = None
    function(logits, target).backward()


def seconds(function: LossFunction, logits: Tensor, target: Tensor, budget: float) -> list[float]:
    """Times of a run of steps, as many as the budget allows, between 3 and 20 after two to warm up."""
    times: list[float] = []
    while len(times) < 5 or (len(times) < 22 and sum(times) < budget):
        start = time.perf_counter()
        step(function, logits, target)
        times.append(time.perf_counter() - start)
    return times[2:]


def ratio_of_times(
    function: LossFunction, logits: Tensor, target: Tensor, rounds: int
) -> tuple[float, float]:
    """Median time over that of `F.cross_entropy`, and the latter in seconds."""
    ours: list[float] = []
    torchs = seconds(F.cross_entropy, logits, target, budget=1.0)
    for _ in range(rounds):
        ours += seconds(function, logits, target, budget=1.0)
        torchs += seconds(F.cross_entropy, logits, target, budget=1.0)
        if sum(ours) > 10:
            break
    reference = statistics.median(torchs)
    return statistics.median(ours) / reference, reference


def peak_in_logits(function: LossFunction, logits: Tensor, target: Tensor) -> float:
    """Peak extra memory of a step in units of the logits' size, from the allocator's own events."""
    step(function, logits, target)
    logits.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(function, logits, target)
    level = peak = 0
    events = recorded.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak / (logits.numel() * logits.element_size())


def measure(shape: tuple[int, ...], names: list[str], rounds: int, threads: int) -> list[dict[str, object]]:
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
        time_ratio, torch_seconds = ratio_of_times(loss, logits, target, rounds)
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
    parser.add_argument("--rounds", type=int, default=3, help="of timing each loss (default: 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    names = arguments.losses.split(",")
    unknown = set(names) - set(variants())
    if unknown:
        parser.error(f"unknown losses {', '.join(sorted(unknown))}; known: {', '.join(variants())}")

    print(f"torch {torch.__version__}, {arguments.threads} threads, float32; ratios to F.cross_entropy")
    results: list[dict[str, object]] = []
    for shape in SHAPES:
        # A process for each shape: what one leaves in the allocator must not speed or slow the next.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            job = process.submit(measure, shape, names, arguments.rounds, arguments.threads)
            results += job.result()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"torch": torch.__version__, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
