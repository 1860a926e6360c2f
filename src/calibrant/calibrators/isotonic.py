"""Isotonic regression: the best calibration map that never decreases."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from calibrant.calibrators.one_vs_rest import ProbabilityMap, binary_problems, interpolated, ordering, stacked

# Over-confident classifiers predict 1e-30 and 1e-90. If the order of such numbers counted, the map would be 0
# below the first success, and one mistake there would cost 27 nats.
_RESOLUTION = 1e-15


class Isotonic(ProbabilityMap):
    """Isotonic regression of labels on probabilities (key ``isotonic``).

    ``q = argmin Σ (1[y = k] - q(s_k))²`` over functions that never decrease, by pooling adjacent violators.
    The map is linear between the fitted points and constant beyond them, as in scikit-learn. Probabilities in
    the same cell of width 1e-15 count as equal, much as in scikit-learn.

    ``"one-vs-rest"`` has a map for each class and scales the results to sum to 1 (a row of zeros keeps its
    original probabilities). No probability is below 1e-12. ``"top-label"`` has one map, from confidence to
    accuracy. The other classes share the rest in proportion, and the prediction never changes: if another
    class would exceed the predicted one, the shares of the others are made more equal, no more than needed.
    The confidence is never below about 1/K.

    Zadrozny and Elkan, *Transforming Classifier Scores into Accurate Multiclass Probability Estimates*,
    KDD 2002.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Args:
        variant: ``"one-vs-rest"`` or ``"top-label"``.

    Attributes:
        points: ``(K, P)`` or ``(1, P)``, the corners of the maps; short rows repeat their last.
        values: the values of the maps at the points.
        ceilings: ``(K,)``, for ``"one-vs-rest"``: the largest probability of each class, 1 or, for a class
            that does not occur in the N samples, ``1/(N + K)``. It keeps its probability up to that.

    >>> import torch
    >>> probability = torch.tensor([0.1, 0.6, 0.8, 0.9])
    >>> logits = torch.stack([1 - probability, probability], 1).log()
    >>> calibrator = Isotonic().fit(logits, torch.tensor([0, 1, 0, 1]))
    >>> [round(number, 3) for number in calibrator(logits).exp()[:, 1].tolist()]
    [0.0, 0.5, 0.5, 1.0]
    """

    key: ClassVar[str] = "isotonic"
    definition: ClassVar[int] = 2
    points: Tensor
    values: Tensor

    def fit_maps(self, rows: Tensor, labels: Tensor) -> None:
        curves = [
            _curve(probability, outcome)
            for block in binary_problems(rows, labels, self.variant)
            for probability, outcome in zip(*block, strict=True)
        ]
        points, values = zip(*curves, strict=True)
        self.learn("points", stacked(points, at_least=2))
        self.learn("values", stacked(values, at_least=2))

    def mapped(self, given: Tensor) -> Tensor:
        return interpolated(self.learned("points", given), self.learned("values", given), given)


def _curve(probability: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
    """The corners of an isotonic map of ``(N,)`` probabilities, and its values there."""
    from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

    # The map is 0 below the first success. With many classes that is nearly all of the data, which then need
    # not be sorted.
    cell = (probability / _RESOLUTION).floor()
    rising = cell >= torch.where(outcome, cell, torch.inf).min()
    below = probability[~rising]

    order = ordering(probability[rising])
    above, cell = probability[rising][order], cell[rising][order]
    _, group, count = torch.unique_consecutive(cell, return_inverse=True, return_counts=True)
    points = above[count.cumsum(0) - count]
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
