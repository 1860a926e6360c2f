"""How often does a 95 % interval of `evaluate` hold the value of the model?

    python benchmarks/interval_coverage.py

Models with 5 and 100 classes are over-confident: their logits are 1.5 times too large. The value of a model
is that of 200,000 elements. Prints how many percent of the intervals hold it, for samples of different sizes.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch import Tensor

from calibrant import evaluate
from calibrant.metrics import METRICS

_SIZES = (50, 200, 1000, 5000)
_SPREADS = {5: 1.5, 100: 3.0}  # of the logits, by the number of classes


def batch(elements: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits of an over-confident model, and labels."""
    logits = _SPREADS[classes] * torch.randn(elements, classes, generator=generator)
    return 1.5 * logits, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--resamples", type=int, default=200)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    columns: dict[str, Counter[str]] = {}
    for classes in _SPREADS:
        values = evaluate(*batch(200_000, classes, generator), resamples=0).metrics
        for size in _SIZES:
            held = columns.setdefault(f"{classes} classes, {size:,}", Counter())
            for _ in range(arguments.repetitions):
                found = evaluate(*batch(size, classes, generator), resamples=arguments.resamples)
                held.update(
                    name
                    for name, (low, high) in found.intervals.items()
                    if low <= (values[name] or 0) <= high
                )
            print(f"{classes} classes, {size} elements: done", flush=True)
    print(f"| metric | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for name in METRICS:
        counts = [each[name] for each in columns.values()]
        if any(counts):  # 0 in a column: the model has too few classes
            cells = (f"{100 * count / arguments.repetitions:.0f}" if count else "–" for count in counts)
            print(f"| `{name}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
