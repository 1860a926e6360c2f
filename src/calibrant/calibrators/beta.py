"""Beta calibration: a three-parameter map per class, exact for beta-distributed scores."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from calibrant.calibrators.logistic import Sigmoid, fit_logistic


class Beta(Sigmoid):
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

    def features(self, present: Tensor, absent: Tensor) -> list[Tensor]:
        return [present, -absent]

    def coefficients(self, features: Tensor, outcome: Tensor) -> Tensor:
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

        # The problem is convex. If one slope is negative in the free solution, it is 0 in the constrained
        # solution. If both are negative, at least one of them is 0. Both are 0 only if no solution with one
        # slope is allowed.
        attempt(negative[:, 0], [False, True])
        attempt(negative[:, 1], [True, False])
        attempt(value.isinf(), [False, False])
        return best
