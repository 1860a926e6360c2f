"""Platt scaling: a sigmoid of the log-odds, for each class against the rest."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from calibrant.calibrators.logistic import Sigmoid, fit_logistic


class Platt(Sigmoid):
    """Platt scaling: a sigmoid of each class's log-odds (key ``platt``).

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

    def __init__(self, *, smooth_targets: bool = True) -> None:
        super().__init__()
        self.smooth_targets = smooth_targets

    def features(self, present: Tensor, absent: Tensor) -> list[Tensor]:
        return [present - absent]

    def coefficients(self, features: Tensor, outcome: Tensor) -> Tensor:
        return fit_logistic(features, self._targets(outcome))[0]

    def _targets(self, outcome: Tensor) -> Tensor:
        if not self.smooth_targets:
            return outcome.double()
        successes = outcome.sum(-1, keepdim=True).double()
        failures = outcome.shape[-1] - successes
        return torch.where(outcome, (successes + 1) / (successes + 2), 1 / (failures + 2))
