"""What a loss costs on a GPU: forward and backward over those of `F.cross_entropy`, in the same run.

Each loss is called as a user calls it, and once more from a CUDA graph, where the time that Python takes to
start kernels does not count; "torch" is the same loss by operations of torch, without the fused kernel. The
memory is what a call takes beyond the logits, in tensors of their size. Random logits, nothing ignored,
medians of seven runs.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --losses ce,cals-alm --json gpu.json
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import calibrant

LOSSES = "ce,ls,ecp,brier,focal,flsd,inverse-focal,dual-focal,mbls,cals-alm,cals-hr,"
LOSSES += "adafocal,ada-dual-focal,calfocal"
SIZES = [
    ((128, 100), torch.float32),
    ((16384, 1000), torch.float32),
    ((16384, 1000), torch.bfloat16),
    ((8, 21, 512, 512), torch.float32),
    ((8, 21, 512, 512), torch.bfloat16),
    ((4, 150, 512, 512), torch.bfloat16),
]


def microseconds(call: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / repeats)
    return median(times)


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
    return microseconds(graph.replay, 20)


def forward_and_backward(
    logits: torch.Tensor, target: torch.Tensor, loss: Callable[..., torch.Tensor]
) -> None:
    logits.grad = None
    loss(logits, target).backward()


def memory(call: Callable[[], object], logits: torch.Tensor) -> float:
    call()
    logits.grad = None  # what the call before left
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (logits.numel() * logits.element_size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--losses", default=LOSSES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    console, rows = Console(width=120), []
    for shape, dtype in SIZES:
        logits = (3 * torch.randn(shape, device="cuda")).to(dtype).requires_grad_()
        target = torch.randint(shape[1], (shape[0], *shape[2:]), device="cuda")
        repeats = 20 if logits.numel() > 10**5 else 100

        step = partial(forward_and_backward, logits, target)
        base = microseconds(partial(step, F.cross_entropy), repeats)
        base_graph = from_graph(partial(step, F.cross_entropy))
        held = memory(partial(step, F.cross_entropy), logits)
        name = f"{shape} {str(dtype).removeprefix('torch.')}"
        title = f"{name}: F.cross_entropy {base:.0f} µs, from a graph {base_graph:.0f} µs"
        headings = "loss", "as called", "from a graph", "torch", f"memory (F.cross_entropy {held:.1f})"
        table = Table(*headings, title=title)
        for key in options.losses.split(","):
            loss = calibrant.create_loss(key, shape[1]).cuda()
            row = {
                "shape": shape,
                "dtype": str(dtype),
                "loss": key,
                "as called": microseconds(partial(step, loss), repeats) / base,
                "from a graph": from_graph(partial(step, loss)) / base_graph,
                "torch": microseconds(partial(step, loss._eager), 5) / base,
                "memory": memory(partial(step, loss), logits),
            }
            rows.append(row)
            table.add_row(
                key, *(f"{row[name]:.2f}" for name in ("as called", "from a graph", "torch", "memory"))
            )
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
