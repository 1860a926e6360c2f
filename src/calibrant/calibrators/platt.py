"""Platt scaling: a sigmoid of the log-odds, for each class against the rest."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.calibrators.logistic import fit_logistic
from calibrant.calibrators.one_vs_rest import (
    OneVsRest,
    at_least_two,
    classes_at_once,
    indicators,
    limit_absent,
    log_probabilities,
)


class Platt(OneVsRest):
    """A sigmoid of each class's log-odds (key ``platt``).

    ``q_k = sigmoid(a_k · z_k + b_k)`` with ``z_k = log(s_k / (1 - s_k))``, for two classes the difference of
    the logits. Each class is fitted against the rest by maximum likelihood, and the results are scaled to sum
    to 1. For two classes the two sigmoids are complements, and the result is the original binary method.

    Platt, *Probabilistic Outputs for Support Vector Machines*, 1999.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Args:
        smooth_targets: fit to Platt's targets ``(n₊ + 1)/(n₊ + 2)`` and ``1/(n₋ + 2)`` instead of 1 and 0,
            as scikit-learn does. They keep the slope small if the data are separable. With few samples, the
            likelihood of the fitting data may then be below that of the original logits.

    Attributes:
        slopes: a, ``(K,)``.
        intercepts: b, ``(K,)``.
        ceilings: as in `Isotonic`.

    >>> import torch
    >>> logits = torch.tensor([[0.0, -3.0], [0.0, -3.0], [0.0, 3.0], [0.0, 3.0]])
    >>> calibrator = Platt().fit(logits, torch.tensor([0, 0, 1, 1]))
    >>> [round(number, 3) for number in calibrator(logits).exp()[:, 1].tolist()]
    [0.25, 0.25, 0.75, 0.75]
    """

    key: ClassVar[str] = "platt"
    slopes: Tensor
    intercepts: Tensor

    def __init__(self, *, smooth_targets: bool = True) -> None:
        super().__init__()
        self.smooth_targets = smooth_targets

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        at_least_two(rows)
        present, absent = log_probabilities(rows)
        coefficients = []
        size = classes_at_once(rows)
        for odds, outcome in zip(
            torch.split(present - absent, size, 1),
            torch.split(indicators(rows, labels, "one-vs-rest"), size),
            strict=True,
        ):
            coefficients.append(fit_logistic(odds.T.contiguous().unsqueeze(1), self._targets(outcome))[0])
        slopes, intercepts = torch.cat(coefficients).unbind(1)
        self.learn("slopes", slopes)
        self.learn("intercepts", intercepts)
        self.learn_ceilings(rows, labels)

    def transform(self, rows: Tensor) -> Tensor:
        present, absent = log_probabilities(rows)
        odds = self.learned("slopes", present) * (present - absent) + self.learned("intercepts", present)
        return sigmoid_log_probabilities(odds, present, self.limits(present))

    def _targets(self, outcome: Tensor) -> Tensor:
        if not self.smooth_targets:
            return outcome.double()
        successes = outcome.sum(-1, keepdim=True).double()
        failures = outcome.shape[-1] - successes
        return torch.where(outcome, (successes + 1) / (successes + 2), 1 / (failures + 2))


def sigmoid_log_probabilities(odds: Tensor, original: Tensor, limits: Tensor | None) -> Tensor:
    """Log-probabilities ``(N, K)`` from calibrated log-odds of each class, scaled to sum to 1."""
    logarithms = F.logsigmoid(odds).log_softmax(-1)
    if limits is not None:
        logarithms = limit_absent(limits, original, logarithms)
    # float16 can hold the bound, which is far below any probability that matters.
    return logarithms.clamp_min(-1e4)
