"""Speed, memory and correctness of losses, metrics and training on a GPU.

Prints a table for each of four parts. Ratios compare with another implementation in the same run.

- correctness: relative errors of value and gradient of every loss with a kernel, against float64, at odd
  shapes.
- losses: forward and backward over those of `F.cross_entropy`. "as called" includes the time of the host.
  "from a graph" is a CUDA graph, where only the time of the GPU counts. "torch" is the same loss by torch
  operations, as called. "floor" is the time from a graph over that of one copy of the logits. "memory" is the
  memory beyond the logits, in tensors of their size.
- measuring: `observe` and `Evaluator.update` over forward and backward of `F.cross_entropy`.
- training: CIFAR ResNet-50 on generated images with batch size 128. `calibrant train`, compiled and not, over
  a plain loop in float32 with its data on the GPU, with and without validation; and epochs with adaptive
  losses over those with cross-entropy.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --only losses,training --json gpu.json
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import calibrant
from calibrant.losses import Loss

Rows = list[dict[str, Any]]


def in_kernel(key: str) -> bool:
    """Whether a loss runs in the GPU kernel, as a whole."""
    loss = calibrant.create_loss(key, 10)
    composition = loss.composition()
    whole = type(loss).per_sample is Loss.per_sample and type(loss).over_batch is Loss.over_batch
    return whole and composition is not None and composition.has_device_form


LOSSES: dict[str, dict[str, Any]] = {key: {} for key in calibrant.LOSSES if in_kernel(key)}
LOSSES |= {f"cals-alm {penalty}": {"penalty": penalty} for penalty in ("p2", "p3")}
SIZES = [
    ((128, 100), torch.float32),
    ((16384, 1000), torch.float32),
    ((16384, 1000), torch.bfloat16),
    ((8, 21, 512, 512), torch.float32),
    ((8, 21, 512, 512), torch.bfloat16),
    ((4, 150, 512, 512), torch.bfloat16),
]
console = Console(width=120)


def create(name: str, classes: int) -> Loss:
    return calibrant.create_loss(name.split()[0], classes, **LOSSES[name]).cuda()


def by_torch(loss: Loss, logits: Tensor, target: Tensor) -> Tensor:
    """A loss by torch operations, without its kernel."""
    return loss._reduced(loss.elements(logits, target))


def batch(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = torch.randn(shape, dtype=dtype, device="cuda").mul_(3).requires_grad_()
    return logits, torch.randint(shape[1], (shape[0], *shape[2:]), device="cuda")


def print_table(title: str, rows: Rows) -> None:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


# ------------------------------------------------------------------------------------------------ correctness


def correctness() -> Rows:
    """The largest relative errors of each loss over many shapes."""
    seed = int.from_bytes(os.urandom(4), "little")  # other inputs in every run, the same for all losses
    rows = side_by_side(partial(errors_of, seed=seed), ["F.cross_entropy", *LOSSES])
    print_table(
        "Relative errors against float64: K in 2 … 50257, N in 1 … 16384, images with void pixels", rows
    )
    return rows


def side_by_side(job: Callable[[str], Any], names: list[str]) -> list[Any]:
    """Run a job for every name, in parallel processes: most of the time goes into compiling kernels."""
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), get_context("spawn")) as pool:
        found = []
        for name, result in zip(names, pool.map(job, names), strict=True):
            console.print(f"{name}: {result or 'compiled'}", soft_wrap=True, highlight=False)
            found.append(result)
        return found


def errors_of(name: str, seed: int) -> dict[str, Any]:
    worst: dict[str, float] = {}
    checked = 0
    for dtype in (torch.float32, torch.bfloat16):
        for logits, target in odd_batches(dtype, seed):
            checked += 1
            torch.cuda.empty_cache()  # other processes need the memory too
            for what, error in relative_errors(name, logits, target).items():
                key = f"{str(dtype).removeprefix('torch.')} {what}"
                worst[key] = max(worst.get(key, 0.0), error)
    return {"loss": name, "shapes": checked, **worst}


def odd_batches(dtype: torch.dtype, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for classes in (2, 3, 10, 21, 100, 1000, 50257):
        for elements in (1, 127, 16384):
            torch.manual_seed(seed)  # each time, because the losses draw random numbers in between
            yield batch((elements, classes), dtype)
    for shape in ((3, 21, 65, 37), (2, 21, 64, 64), (2, 150, 33, 40)):
        torch.manual_seed(seed)
        logits, target = batch(shape, dtype)
        target[torch.rand(target.shape, device="cuda") < 0.2] = -100
        yield logits, target
        yield logits.detach().to(memory_format=torch.channels_last).requires_grad_(), target
    torch.manual_seed(seed)
    wide, target = batch((127, 100), dtype)
    for strided in (wide.detach()[:, ::2], wide.detach().T.contiguous().T[:, :50], wide.detach()[:, 3:53]):
        yield strided.requires_grad_(), target % 50


def relative_errors(name: str, logits: Tensor, target: Tensor) -> dict[str, float]:
    if name == "F.cross_entropy":  # the errors of torch itself, for comparison
        whole, exactly = F.cross_entropy, partial(F.cross_entropy, reduction="sum")
    else:
        whole = create(name, logits.shape[1])
        with torch.no_grad():  # learned numbers that differ between classes or bins
            for learned in whole.learned().values():
                learned.mul_(0.5 + torch.rand_like(learned))
        summed = deepcopy(whole)
        summed.reduction = "sum"
        exactly = partial(by_torch, summed)
    for _ in range(2):  # the second launch skips Triton's inspection of the arguments
        value = whole(logits, target)
        (gradient,) = torch.autograd.grad(value, logits)
    total, error, size = 0.0, 0.0, 0.0
    valid = max(1, int((target != -100).sum()))
    rows = max(1, 2**24 // logits[0].numel())  # a float64 copy of the largest batch would not fit
    for part, labels, slope in zip(*(x.split(rows) for x in (logits, target, gradient)), strict=True):
        exact = part.detach().double().requires_grad_()
        wanted = exactly(exact, labels)
        (wanted_slope,) = torch.autograd.grad(wanted, exact)
        total += wanted.item() / valid
        error += (slope.double() - wanted_slope / valid).square().sum().item()
        size += (wanted_slope / valid).square().sum().item()
    # A loss may be flat where all elements lie: then its gradient must be 0 too.
    tiny = 1e-30
    return {
        "value": abs(value.item() - total) / max(abs(total), tiny),
        "gradient": (error / max(size, tiny)) ** 0.5,
    }


# ----------------------------------------------------------------------------------------------------- losses


def microseconds(call: Callable[[], object], repeats: int = 20, rounds: int = 7) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / repeats)
    return median(times)


def over(
    calls: dict[str, Callable[[], object]], peer: Callable[[], object], repeats: int = 20
) -> dict[str, tuple[float, float]]:
    """Median microseconds of each call, and the median of their ratios to the peer's.

    Each measurement is followed by one of the peer. All calls take turns, nine times, so that a spell in
    which the host is slow disturbs a few measurements of all instead of all of one.
    """
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(9):
        for name, call in calls.items():
            pairs[name].append((microseconds(call, repeats, 3), microseconds(peer, repeats, 3)))
    return {
        name: (median(ours for ours, _ in found), median(ours / theirs for ours, theirs in found))
        for name, found in pairs.items()
    }


def from_graph(call: Callable[[], object]) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return microseconds(graph.replay)


def forward_and_backward(logits: Tensor, target: Tensor, loss: Callable[..., Tensor]) -> None:
    logits.grad = None
    loss(logits, target).backward()


def memory(call: Callable[[], object], logits: Tensor) -> float:
    call()
    logits.grad = None  # from the call before
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (logits.numel() * logits.element_size())


def compile_for_all_sizes(name: str) -> None:
    for shape, dtype in SIZES:
        forward_and_backward(*batch(shape, dtype), create(name, shape[1]))


def losses() -> Rows:
    """Time and memory of each loss at each size."""
    side_by_side(compile_for_all_sizes, list(LOSSES))
    everything = []
    for shape, dtype in SIZES:
        logits, target = batch(shape, dtype)
        repeats = 20 if logits.numel() > 10**5 else 100
        step = partial(forward_and_backward, logits, target)
        base = microseconds(partial(step, F.cross_entropy), repeats)
        base_graph = from_graph(partial(step, F.cross_entropy))
        held = memory(partial(step, F.cross_entropy), logits)
        copied = torch.empty_like(logits)
        floor = from_graph(partial(copied.copy_, logits.detach()))
        created = {name: create(name, shape[1]) for name in LOSSES}
        called = over(
            {name: partial(step, loss) for name, loss in created.items()},
            partial(step, F.cross_entropy),
            repeats,
        )
        rows = []
        for name, loss in created.items():
            graph = from_graph(partial(step, loss))
            rows.append(
                {
                    "loss": name,
                    "as called": called[name][1],
                    "from a graph": graph / base_graph,
                    "torch": microseconds(partial(step, partial(by_torch, loss)), 5) / base,
                    "floor": graph / floor,
                    "memory": memory(partial(step, loss), logits),
                }
            )
        name = f"{shape} {str(dtype).removeprefix('torch.')}"
        print_table(
            f"{name}: F.cross_entropy {base:.0f} µs as called, {base_graph:.0f} µs from a graph, memory "
            f"{held:.2f}; a copy {floor:.0f} µs",
            rows,
        )
        about = {"shape": shape, "dtype": str(dtype), "F.cross_entropy µs": base}
        everything += [about | row for row in rows]
        del logits, target, copied
    return everything


# -------------------------------------------------------------------------------------------------- measuring


def measuring() -> Rows:
    """Time of `observe` and `Evaluator.update`, over forward and backward of cross-entropy."""
    rows = []
    for shape, dtype in SIZES[1:]:
        logits, target = batch(shape, dtype)
        peer = partial(forward_and_backward, logits, target, F.cross_entropy)
        jobs = {
            f"{key}.observe": create(key, shape[1]).observe for key in ("cals-alm", "cals-hr", "adafocal")
        }
        jobs["Evaluator.update"] = calibrant.Evaluator(shape[1]).update
        calls = {name: partial(job, logits.detach(), target) for name, job in jobs.items()}
        for name, (ours, ratio) in over(calls, peer, 3).items():
            size = f"{shape} {str(dtype).removeprefix('torch.')}"
            rows.append({"job": name, "shape": size, "µs": ours, "over F.cross_entropy": ratio})
    print_table("Measuring a validation batch", rows)
    return rows


# --------------------------------------------------------------------------------------------------- training

IMAGES, VALIDATION, CLASSES, BATCH, EPOCHS, LONG = 50_000, 5_000, 100, 128, 3, 30

RECIPE = f"""
epochs = {EPOCHS}
batch_size = {BATCH}
evaluation_batch_size = 1000

[data]
name = "npz"
file = "images.npz"
augmentation = "crop-flip"
validation = {VALIDATION / IMAGES}
test = 0.0

[model]
name = "cifar-resnet-50"

[optimizer]
name = "sgd"
lr = 0.05
"""


def training() -> Rows:
    """Images per second, what adaptive losses add to an epoch, and a whole run that compiles by itself."""
    from calibrant.training.loop import train
    from calibrant.training.recipe import Recipe

    steps: Rows = [{"step": "recorded", "ms": recorded_step()}]
    print_table("A step of CIFAR ResNet-50, recorded", steps)
    size = IMAGES - VALIDATION
    epochs: dict[str, list[Epoch]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random = np.random.default_rng(0)
        pixels = random.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / "images.npz", images=pixels, labels=np.arange(IMAGES) % CLASSES)
        console.print("a plain loop …")
        epochs["plain loop, float32"] = plain_loop(pixels)
        recipe = Recipe.from_toml(RECIPE)
        # Cross-entropy before and after the adaptive losses, in case the speed of the machine changes. The
        # long run comes last, when the compiled network is in the cache.
        jobs = [
            ("loss=ce, compile=false", EPOCHS),
            ("loss=cals-alm, compile=false", EPOCHS),
            ("loss=adafocal, compile=false", EPOCHS),
            ("loss=ce, compile=false", EPOCHS),
            ("loss=ce, compile=false, precision=16-mixed", EPOCHS),
            ("loss=ce, compile=true", EPOCHS),
            ("loss=ce, compile=auto", LONG),
        ]
        for number, (job, length) in enumerate(jobs, start=1):
            console.print(f"{job}, run {number} of {len(jobs)} …")
            changed = recipe.override([*job.split(", "), f"epochs={length}"])
            with timed_validation() as validations:
                run = train(changed, folder / str(number), data_root=folder)
            history = json.loads((run / "result.json").read_text(encoding="utf-8"))["history"]
            found = [Epoch(row["seconds"], part) for row, part in zip(history, validations, strict=True)]
            # In the first epoch of a short run, kernels are compiled. A long run is taken as a whole.
            epochs.setdefault(job, []).extend(found if length == LONG else found[1:])
    middle = {job: mean if job.endswith("auto") else median for job in epochs}
    alone = {
        job: middle[job]([each.seconds - each.validation for each in found]) for job, found in epochs.items()
    }
    whole = {job: middle[job]([each.seconds for each in found]) for job, found in epochs.items()}
    plain, base = "plain loop, float32", "loss=ce, compile=false"
    rows: Rows = [
        {
            "training": job,
            "images/s": size / alone[job],
            "ratio": alone[plain] / alone[job],
            "with validation": size / whole[job],
            "its ratio": whole[plain] / whole[job],
            "epoch over ce's": whole[job] / whole[base],
        }
        for job in epochs
    ]
    print_table(
        f"CIFAR ResNet-50, batch 128; epochs of {base!r}: {whole[base]:.3f} s; compile=auto: the mean of all "
        f"{LONG} epochs, compiling included",
        rows,
    )
    return steps + rows


def recorded_step() -> float:
    """Milliseconds of a training step in mixed precision, from a CUDA graph."""
    from calibrant.training.models import create_model

    model: nn.Module = create_model("cifar-resnet-50", CLASSES, {"channels": 3, "image_size": 32})
    model = model.cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)
    images = torch.randn(BATCH, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (BATCH,), device="cuda")
    loss = create("ce", CLASSES)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(images)
        loss(logits.float(), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()

    return from_graph(step) / 1000


class Epoch(NamedTuple):
    """Seconds of an epoch, and of the validation in it."""

    seconds: float
    validation: float


@contextmanager
def timed_validation() -> Iterator[list[float]]:
    """Collect the seconds of each validation. The training loop waits for the GPU before and after it."""
    from calibrant.training.loop import Loop

    validate = Loop._validate
    seconds: list[float] = []

    def timed(self: Loop, **options: Any) -> Any:
        started = time.perf_counter()
        figures = validate(self, **options)
        seconds.append(time.perf_counter() - started)
        return figures

    Loop._validate = timed
    try:
        yield seconds
    finally:
        Loop._validate = validate


def plain_loop(pixels: np.ndarray[Any, Any]) -> list[Epoch]:
    """Epochs of a plain training loop in float32, with the data on the GPU."""
    from calibrant.training.data.augmentation import NORMALISATIONS, crop_flip
    from calibrant.training.models import create_model

    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().cuda()
    labels = (torch.arange(IMAGES) % CLASSES).cuda()
    normalise = NORMALISATIONS["cifar100"]
    model: nn.Module = create_model("cifar-resnet-50", CLASSES, {"channels": 3, "image_size": 32}).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.train()
        order = torch.randperm(IMAGES - VALIDATION, device="cuda")
        for indices in order.split(BATCH):
            inputs = normalise(crop_flip(images[indices], torch.rand(len(indices), 3, device="cuda")))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels[indices]).backward()
            optimizer.step()
        torch.cuda.synchronize()
        trained = time.perf_counter()
        model.eval()
        with torch.no_grad():
            held_out = zip(images[-VALIDATION:].split(1000), labels[-VALIDATION:].split(1000), strict=True)
            correct = [(model(normalise(part)).argmax(1) == label).sum() for part, label in held_out]
            torch.stack(correct).sum().item()
        times.append(Epoch(time.perf_counter() - started, time.perf_counter() - trained))
    return times[1:]


PARTS: dict[str, Callable[[], Rows]] = {
    "correctness": correctness,
    "losses": losses,
    "measuring": measuring,
    "training": training,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    if unknown := set(options.only.split(",")) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in options.only.split(","):
        found[part] = PARTS[part]()
        torch.cuda.empty_cache()
        if options.json:  # after each part, in case the next one fails
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
