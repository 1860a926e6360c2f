"""Platt scaling: a sigmoid of the score, for one class against the others."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.calibrators.logistic import fit_logistic
from calibrant.calibrators.one_vs_rest import (
    BinaryMaps,
    at_least_two,
    classes_at_once,
    log_probabilities,
    outcomes,
    within,
)


class Platt(BinaryMaps):
    """A sigmoid of each class's log-odds (key ``platt``).

    ``q_k = sigmoid(a_k · z_k + b_k)`` with ``z_k = log(s_k / (1 - s_k))``, which for two classes is the
    difference of the logits; fitted by maximum likelihood, for more than two classes one against the rest,
    scaled to sum to 1. For two classes the two sigmoids are complements and the result is the plain
    binary method.

    Platt, *Probabilistic Outputs for Support Vector Machines*, 1999.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Args:
        smooth_targets: fit to Platt's targets ``(n₊ + 1)/(n₊ + 2)`` and ``1/(n₋ + 2)`` instead of 1 and 0,
            as scikit-learn does; for separable data they keep the slope small. On few samples that can cost
            likelihood: unlike scaling methods, this one may fit the data it was fitted to worse than the
            logits as they are.

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
            torch.split(outcomes(rows, labels, "one-vs-rest"), size),
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
        return normalised_sigmoids(odds, present, self.limits(present))

    def _targets(self, outcome: Tensor) -> Tensor:
        if not self.smooth_targets:
            return outcome.double()
        successes = outcome.sum(-1, keepdim=True).double()
        failures = outcome.shape[-1] - successes
        return torch.where(outcome, (successes + 1) / (successes + 2), 1 / (failures + 2))


def normalised_sigmoids(odds: Tensor, original: Tensor, limits: Tensor | None) -> Tensor:
    """Log-probabilities ``(N, K)`` from one log-odds per class, each against the rest, and the originals."""
    logarithms = F.logsigmoid(odds).log_softmax(-1)
    if limits is not None:
        logarithms = within(limits, original, logarithms)
    # The bound is what float16 can hold, and far below anything that could matter.
    return logarithms.clamp_min(-1e4)
