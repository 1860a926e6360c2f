"""How often are two calibrated models called different in a calibration error?

    python benchmarks/false_differences.py

Both models are perfectly calibrated, so every difference that is called significant is false; about 5 %
are allowed. Three kinds of pairs: equally sharp, one sharper than the other, and tested on different numbers
of elements. In the last column the second model is over-confident, and a difference is right.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from calibrant import Evaluation, evaluate
from calibrant.metrics import METRICS

_POINTS, _WEIGHTS = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(30))
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def logits(known: Tensor, unknown: float) -> Tensor:
    """Calibrated logits of a model that knows a part of the score; the rest is normal."""
    yes = (known[:, None] + unknown * _POINTS).sigmoid() @ _WEIGHTS
    return torch.stack([1 - yes, yes], 1).clamp_min(1e-12).log()


def evaluated(score: Tensor, resamples: int, generator: torch.Generator, *models: Tensor) -> list[Evaluation]:
    """Evaluations of models on labels drawn with the probabilities of a score."""
    uniform = torch.rand(len(score), generator=generator, dtype=torch.float64)
    target = (uniform < score.sigmoid()).long()
    return [evaluate(each, target, resamples=resamples) for each in models]


def pairs(resamples: int, generator: torch.Generator) -> dict[str, Callable[[], list[Evaluation]]]:
    """For each kind of pair, a function that draws one."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def equal(factor: float = 1.0) -> list[Evaluation]:
        shared, first, second = normal(3, 1000)
        models = logits(shared + first - 1, 1.0), factor * logits(shared + second - 1, 1.0)
        return evaluated(shared + first + second - 1, resamples, generator, *models)

    def sharper() -> list[Evaluation]:
        first, second = normal(2, 1000)
        score = first + 4 * second
        return evaluated(score, resamples, generator, logits(score, 0.0), logits(first, 4.0))

    def sizes() -> list[Evaluation]:
        scores = [1.5 * normal(size) for size in (300, 2000)]
        return [evaluated(each, resamples, generator, logits(each, 0.0))[0] for each in scores]

    return {
        "equal": equal,
        "one sharper": sharper,
        "300 and 2,000 elements": sizes,
        "logits times 1.5": lambda: equal(1.5),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--resamples", type=int, default=200)
    arguments = parser.parse_args()
    found = pairs(arguments.resamples, torch.Generator().manual_seed(0))
    counts: dict[str, Counter[str]] = {name: Counter() for name in found}
    for name, draw in found.items():
        for _ in range(arguments.repetitions):
            first, second = draw()
            differences = first.compare(second)
            counts[name].update(metric for metric, each in differences.items() if each.significant)
        print(f"{name}: done", flush=True)
    print(f"| metric | {' | '.join(found)} |\n| --- |{' ---: |' * len(found)}")
    for metric, record in METRICS.items():
        if record.group == "calibration" and metric != "kde_ece":
            cells = (f"{100 * each[metric] / arguments.repetitions:.0f} %" for each in counts.values())
            print(f"| `{metric}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
