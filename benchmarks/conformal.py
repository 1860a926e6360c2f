"""Coverage, size and time of conformal sets, beside MAPIE in the same run.

    python benchmarks/conformal.py [--samples 5000] [--classes 10 100] [--alpha 0.1] [--threads 1]

Prints a table for each number of classes. Both libraries get the same probabilities, are fitted to half of
the data and predict sets for the other half. The columns:

- coverage, size: of the sets of calibrant, and of MAPIE.
- equal sets: the fraction of elements for which both give the same set.
- MAPIE time: its seconds for fitting and predicting, divided by those of calibrant; medians of three.

Times are from logits to sets; MAPIE takes probabilities. LAC has one definition, but MAPIE accepts
scores up to 1e-8 above the threshold, which shows with 1,000 classes. The scores of MAPIE's APS
and RAPS have a random part, those of calibrant have none, and MAPIE chooses the penalty of RAPS itself, on a
fifth of the data: these sets agree in coverage and size, not set by set. MAPIE 1.0 or newer must be
installed; calibrant itself does not need it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, LACConformityScore, RAPSConformityScore
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor

from calibrant.conformal import APS, LAC, RAPS, ConformalSets, evaluate_sets

ROWS: dict[str, tuple[type[ConformalSets], Callable[[], Any], dict[str, str]]] = {
    "lac": (LAC, LACConformityScore, {}),
    "aps": (APS, APSConformityScore, {"include_last_label": "randomized"}),
    "raps": (RAPS, RAPSConformityScore, {"include_last_label": "randomized"}),
}
"""For each row the sets of calibrant, the score of MAPIE and its options for predictions."""


class Probabilities(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier for MAPIE whose inputs are probabilities already."""

    def __init__(self, classes: int = 2) -> None:
        self.classes = classes
        self.classes_ = np.arange(classes)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, inputs: Any, target: Any) -> Probabilities:
        """Learn nothing."""
        return self

    def predict_proba(self, inputs: Any) -> Any:
        """The inputs."""
        return inputs

    def predict(self, inputs: Any) -> Any:
        """The most probable class."""
        return inputs.argmax(1)


def data(samples: int, classes: int) -> tuple[Tensor, Tensor]:
    """Twice the samples: logits of an over-confident network, and labels."""
    generator = torch.Generator().manual_seed(0)
    truth = 2 * torch.randn(2 * samples, classes, generator=generator, dtype=torch.float64)
    target = torch.multinomial(truth.softmax(1), 1, generator=generator).squeeze(1)
    return 1.5 * truth, target


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result, and the median seconds of three runs."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def by_calibrant(kind: type[ConformalSets], logits: Tensor, target: Tensor, alpha: float) -> Tensor:
    """The sets of calibrant for the second half of the data."""
    half = len(target) // 2
    return kind(alpha=alpha).fit(logits[:half], target[:half])(logits[half:])


def by_mapie(
    score: Callable[[], Any], options: dict[str, str], logits: Tensor, target: Tensor, alpha: float
) -> Tensor:
    """The sets of MAPIE for the second half of the data."""
    half, arrays = len(target) // 2, (logits.softmax(1).numpy(), target.numpy())
    classifier = SplitConformalClassifier(
        estimator=Probabilities(logits.shape[1]),
        confidence_level=1 - alpha,
        conformity_score=score(),
        prefit=True,
        random_state=0,
    )
    classifier.conformalize(arrays[0][:half], arrays[1][:half])
    _, sets = classifier.predict_set(arrays[0][half:], conformity_score_params=options or None)
    return torch.from_numpy(sets[:, :, 0])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    for classes in arguments.classes:
        logits, target = data(arguments.samples, classes)
        half = arguments.samples
        print(f"\n{arguments.samples:,} elements to fit, as many to predict, {classes} classes\n")
        print("| sets | coverage | MAPIE | size | MAPIE | equal sets | MAPIE time |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name, (kind, score, options) in ROWS.items():
            ours, seconds = timed(partial(by_calibrant, kind, logits, target, arguments.alpha))
            work = partial(by_mapie, score, options, logits, target, arguments.alpha)
            theirs, their_seconds = timed(work)
            figures = [evaluate_sets(sets, target[half:]) for sets in (ours, theirs)]
            coverage = " | ".join(f"{100 * each.coverage:.2f} %" for each in figures)
            size = " | ".join(f"{each.size:.3f}" for each in figures)
            equal = float((ours == theirs).all(1).double().mean())
            print(
                f"| `{name}` | {coverage} | {size} | {100 * equal:.1f} % | {their_seconds / seconds:.1f} × |"
            )


if __name__ == "__main__":
    main()
