"""Beta calibration: a three-parameter map per class, exact for beta-distributed scores."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from calibrant.calibrators.logistic import fit_logistic
from calibrant.calibrators.one_vs_rest import (
    OneVsRest,
    at_least_two,
    classes_at_once,
    indicators,
    log_probabilities,
)
from calibrant.calibrators.platt import sigmoid_log_probabilities


class Beta(OneVsRest):
    """Beta calibration of each class's probability (key ``beta``).

    ``q_k = sigmoid(a_k log s_k - b_k log(1 - s_k) + c_k)`` with a and b at least 0, so that the map never
    decreases. ``a = b = 1, c = 0`` is the identity. Each class is fitted against the rest by maximum
    likelihood under the constraint, and the results are scaled to sum to 1. For two classes the two maps are
    complements, and the result is the original binary method.

    Kull, Silva Filho and Flach, *Beta calibration: a well-founded and easily implemented improvement on
    logistic calibration for binary classifiers*, AISTATS 2017.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Attributes:
        slopes: a and b, ``(K, 2)``.
        intercepts: c, ``(K,)``.
        ceilings: as in `Isotonic`.

    >>> import torch
    >>> logits = torch.tensor([[0.0, -3.0], [0.0, -2.0], [0.0, 2.0], [0.0, 3.0]]).repeat(10, 1)
    >>> target = torch.tensor([0, 0, 1, 1]).repeat(10)
    >>> target[:4] = 1 - target[:4]
    >>> calibrator = Beta().fit(logits, target)
    >>> [round(number, 3) for number in calibrator(logits[:4]).exp()[:, 1].tolist()]
    [0.068, 0.148, 0.852, 0.932]
    """

    key: ClassVar[str] = "beta"
    slopes: Tensor
    intercepts: Tensor

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        at_least_two(rows)
        present, absent = log_probabilities(rows)
        size = classes_at_once(rows)
        blocks = zip(
            torch.split(present, size, 1),
            torch.split(absent, size, 1),
            torch.split(indicators(rows, labels, "one-vs-rest"), size),
            strict=True,
        )
        fitted = [_constrained(torch.stack([one.T, -other.T], 1), outcome) for one, other, outcome in blocks]
        coefficients = torch.cat(fitted)
        self.learn("slopes", coefficients[:, :2])
        self.learn("intercepts", coefficients[:, 2])
        self.learn_ceilings(rows, labels)

    def transform(self, rows: Tensor) -> Tensor:
        present, absent = log_probabilities(rows)
        slopes = self.learned("slopes", present)
        odds = slopes[:, 0] * present - slopes[:, 1] * absent + self.learned("intercepts", present)
        return sigmoid_log_probabilities(odds, present, self.limits(present))


def _constrained(features: Tensor, outcome: Tensor) -> Tensor:
    """Coefficients ``(C, 3)`` of the best logistic regressions with slopes of at least 0."""
    targets = outcome.to(features.dtype)
    best, value = fit_logistic(features, targets)
    negative = best[:, :2] < 0
    value = value.masked_fill(negative.any(1), torch.inf)

    def attempt(tried: Tensor, free: list[bool]) -> None:
        problems = tried.nonzero().squeeze(1)
        if not len(problems):
            return
        choice = torch.tensor(free, device=features.device).expand(len(problems), 2)
        found, found_value = fit_logistic(features[problems], targets[problems], choice)
        better = (found[:, :2] >= 0).all(1) & (found_value < value[problems])
        value[problems] = torch.where(better, found_value, value[problems])
        best[problems] = torch.where(better.unsqueeze(1), found, best[problems])

    # The problem is convex. If one slope is negative in the free solution, it is 0 in the constrained one. If
    # both are negative, at least one of them is 0. Both are 0 only if no solution with one slope is allowed.
    attempt(negative[:, 0], [False, True])
    attempt(negative[:, 1], [True, False])
    attempt(value.isinf(), [False, False])
    return best
