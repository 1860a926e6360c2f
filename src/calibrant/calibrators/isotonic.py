"""Isotonic regression: the best calibration map that never falls."""

from __future__ import annotations

from typing import ClassVar, get_args

import torch
from torch import Tensor

from calibrant.arguments import one_of
from calibrant.calibrators.one_vs_rest import (
    BinaryMaps,
    Variant,
    distributions,
    interpolated,
    ordering,
    precise,
    probabilities,
    questions,
    stacked,
)


class Isotonic(BinaryMaps):
    """Isotonic regression of what happened on what was predicted (key ``isotonic``).

    ``q = argmin Σ (1[y = k] - q(s_k))²`` over functions that never fall, by pooling adjacent violators;
    straight lines between the fitted points, constant beyond them, as in scikit-learn.

    ``"one-vs-rest"`` has a map for each class and scales the answers to sum to 1 (a row of zeros keeps its
    original probabilities). ``"top-label"`` has one map, of the confidence to the frequency of being right;
    the other classes share the rest in proportion, and the prediction stays what it was: where the new
    confidence is less than another class would get, the others' shares are evened out as far as needed.
    No probability is less than 1e-12 in the first variant; the predicted class never has less than about
    1/K in the second.

    Zadrozny and Elkan, *Transforming Classifier Scores into Accurate Multiclass Probability Estimates*,
    KDD 2002.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Args:
        variant: ``"one-vs-rest"`` or ``"top-label"``.

    Attributes:
        points: ``(K, P)`` or ``(1, P)``, the corners of the maps; short ones repeat their last.
        values: the maps at the points.
        ceilings: ``(K,)``, in the first variant: 1, or ``1/(N + K)`` for a class that did not occur in the N
            samples, which keeps its probability up to that.

    >>> import torch
    >>> probability = torch.tensor([0.1, 0.6, 0.8, 0.9])
    >>> logits = torch.stack([1 - probability, probability], 1).log()
    >>> calibrator = Isotonic().fit(logits, torch.tensor([0, 1, 0, 1]))
    >>> [round(number, 3) for number in calibrator(logits).exp()[:, 1].tolist()]
    [0.0, 0.5, 0.5, 1.0]
    """

    key: ClassVar[str] = "isotonic"
    points: Tensor
    values: Tensor

    def __init__(self, *, variant: Variant = "one-vs-rest") -> None:
        super().__init__()
        one_of("variant", variant, get_args(Variant))
        self.variant: Variant = variant
        self.preserves_order = variant == "top-label"  # type: ignore[misc]  # one class, two answers
        self.per_class = not self.preserves_order  # type: ignore[misc]

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        curves = [
            _curve(probability, outcome)
            for block in questions(rows, labels, self.variant)
            for probability, outcome in zip(*block, strict=True)
        ]
        points, values = zip(*curves, strict=True)
        self.learn("points", stacked(points, at_least=2))
        self.learn("values", stacked(values, at_least=2))
        self.learn_ceilings(rows, labels)

    def transform(self, rows: Tensor) -> Tensor:
        rows = precise(rows)
        points, values = self.learned("points", rows), self.learned("values", rows)
        calibrated = interpolated(points, values, probabilities(rows, self.variant))
        return distributions(rows, calibrated, self.variant, self.limits(rows))


def _curve(probability: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
    """The corners of one isotonic map of ``(N,)`` probabilities: where they are, and its values there."""
    from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

    # Below the first success the map is 0. For a class among a thousand that is nearly all of the data,
    # which need not be sorted.
    first = torch.where(outcome, probability, torch.inf).min()
    below = probability[probability < first]
    rising = probability >= first

    above = probability[rising]
    order = ordering(above)
    points, group, count = torch.unique_consecutive(above[order], return_inverse=True, return_counts=True)
    sums = torch.zeros_like(points).index_add_(0, group, outcome[rising][order].to(points.dtype))
    means = (sums / count).cpu().numpy()
    values = means if len(means) < 2 else isotonic_regression(means, weights=count.cpu().numpy()).x
    fitted = torch.as_tensor(values, dtype=points.dtype, device=points.device)

    if len(below):
        points = torch.cat([torch.stack(torch.aminmax(below)), points])
        fitted = torch.cat([fitted.new_zeros(2), fitted])
    corner = torch.ones_like(points, dtype=torch.bool)
    corner[1:-1] = (fitted[1:-1] != fitted[:-2]) | (fitted[1:-1] != fitted[2:])
    return points[corner], fitted[corner]
