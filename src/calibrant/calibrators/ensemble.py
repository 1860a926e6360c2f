"""Ensemble temperature scaling: a mixture of tempered, original and uniform probabilities."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from calibrant.calibrators.base import below_maximum
from calibrant.calibrators.streaming import HeldOut, Scaling, Sums
from calibrant.calibrators.temperature import likeliest

_LEAST = 1e-2  # the least weight of the two components that know the order of the classes
_LARGEST = 60.0  # the largest log(q / mixture): its exponential stays finite
_KEPT = 1 << 24  # the most elements whose components are kept in memory: 400 MB


class EnsembleTemperature(Scaling):
    """Ensemble temperature scaling, ETS (key ``ensemble-temperature``), as log-probabilities.

    ``w1·softmax(l/T) + w2·softmax(l) + w3/K`` with weights of at least 0 that sum to 1. T is the temperature
    of temperature scaling. The weights then minimise the negative log-likelihood, which is convex in them.
    The order of the classes is kept.

    True classes with a probability of 0, which trees and rounding give, do not count for T: the uniform part
    covers them. A temperature that suits them would spoil all other probabilities.

    Zhang, Kailkhura and Han, *Mix-n-Match: Ensemble and Compositional Methods for Uncertainty
    Calibration in Deep Learning*, ICML 2020.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Attributes:
        temperature: T, a scalar buffer, once fitted.
        weights: w1, w2 and w3, ``(3,)``, once fitted.

    >>> logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    >>> calibrator = EnsembleTemperature().fit(logits, torch.tensor([0, 0, 1, 1]))
    >>> round(calibrator(logits)[0].exp()[0].item(), 4)
    0.75
    """

    key: ClassVar[str] = "ensemble-temperature"
    preserves_order = True
    definition: ClassVar[int] = 2
    copes_with_zeros = True
    temperature: Tensor
    weights: Tensor

    def fit_passes(self, data: HeldOut) -> None:
        temperature = likeliest(data.without_ruled_out()).temperature
        self.learn("weights", _likeliest_weights(data, temperature))
        self.learn("temperature", temperature)

    def transform(self, rows: Tensor) -> Tensor:
        # The logarithm is taken in float64, which holds smaller weights, and then converted.
        weights = self.weights.to(rows.device).log().to(rows.dtype)
        rows = below_maximum(rows)
        parts = (
            (rows / self.learned("temperature", rows)).log_softmax(1) + weights[0],
            rows.log_softmax(1) + weights[1],
            (weights[2] - math.log(rows.shape[1])).expand_as(rows),
        )
        return torch.stack(parts).logsumexp(0)


def _likeliest_weights(data: HeldOut, temperature: float) -> Tensor:
    """The weights of least negative log-likelihood."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]  # here: it takes half a second

    def components(rows: Tensor, labels: Tensor) -> Tensor:
        """The label's log-probability in each of the three components, ``(3, n)``."""
        below = below_maximum(rows.double())
        truth = below.gather(1, labels[:, None]).squeeze(1)
        plain = truth - below.exp().sum(1).log()
        tempered = truth / temperature - below.div_(temperature).exp_().sum(1).log()
        return torch.stack([tempered, plain, torch.full_like(plain, -math.log(rows.shape[1]))])

    # The weights depend on three numbers per element. They are kept if they fit into memory.
    kept = [components(*block) for block in data] if data.samples <= _KEPT else None

    def evaluate(weights: Any) -> tuple[float, list[float]]:
        """The mean negative log-likelihood and its gradient."""
        # Rounding may make a weight negative.
        logarithms = torch.as_tensor(weights, device="cpu").clamp_min(0).log()

        def summed(logs: Tensor) -> Tensor:
            mixture = (logs + logarithms.to(logs.device)[:, None]).logsumexp(0)
            ratio = (logs - mixture).clamp_max(_LARGEST).exp()
            return torch.cat([-mixture.sum()[None], -ratio.sum(1)]).cpu()

        def terms(*block: Tensor) -> Sums:
            return (summed(components(*block)),)

        total = data.sums(terms)[0] if kept is None else torch.stack([summed(logs) for logs in kept]).sum(0)
        value, *gradient = (total / data.samples).tolist()
        return value, gradient

    simplex = {"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": lambda _: [1, 1, 1]}
    start, options = [1 / 3, 1 / 3, 1 / 3], {"ftol": 1e-15, "maxiter": 200}
    bounds = [(0, 1), (0, 1), (0, 1)]
    found = minimize(
        evaluate, start, jac=True, method="SLSQP", bounds=bounds, constraints=simplex, options=options
    )
    weights = torch.from_numpy(found.x).clamp_min(0)
    weights, tempered = weights / weights.sum(), weights.new_tensor([1.0, 0.0, 0.0])
    # The uniform distribution alone has no order of classes. A little of the tempered one restores it.
    if weights[:2].sum() < _LEAST:
        weights = (1 - _LEAST) * weights + _LEAST * tempered
    # Rounding can keep the search from reaching temperature scaling where that is best.
    return weights if evaluate(weights)[0] < evaluate(tempered)[0] else tempered
