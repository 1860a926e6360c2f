"""Ensemble temperature scaling: a mixture of tempered, original and uniform probabilities."""

from __future__ import annotations

import math
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from calibrant.calibrators.base import below_maximum
from calibrant.calibrators.streaming import HeldOut, Scaling, Sums
from calibrant.calibrators.temperature import likeliest

_LEAST = 1e-2  # the least weight of the two components that know the order of the classes
_LARGEST = 60.0  # the largest log(q / mixture): the square of its exponential stays finite
_KEPT = 1 << 24  # the most elements whose components are kept in memory: 400 MB


class EnsembleTemperature(Scaling):
    """Ensemble temperature scaling, ETS (key ``ensemble-temperature``), as log-probabilities.

    ``w1·softmax(l/T) + w2·softmax(l) + w3/K`` with weights of at least 0 that sum to 1. T is the temperature
    of temperature scaling. The weights then minimise the negative log-likelihood, which is convex in them, by
    Newton steps on the simplex. The order of the classes is kept.

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
    temperature: Tensor
    weights: Tensor

    def fit_passes(self, data: HeldOut) -> None:
        temperature = likeliest(data).temperature
        self.learn("weights", _likeliest_weights(data, temperature))
        self.learn("temperature", torch.tensor(temperature, dtype=torch.float64))

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
    """The weights of least negative log-likelihood, by Newton steps on the simplex."""

    def components(rows: Tensor, labels: Tensor) -> Tensor:
        """The label's log-probability in each of the three components, ``(3, n)``."""
        below = below_maximum(rows.double())
        truth = below.gather(1, labels[:, None]).squeeze(1)
        plain = truth - below.exp().sum(1).log()
        tempered = truth / temperature - below.div_(temperature).exp_().sum(1).log()
        return torch.stack([tempered, plain, torch.full_like(plain, -math.log(rows.shape[1]))])

    # The weights depend on three numbers per element. They are kept if they fit into memory.
    kept = [components(*block) for block in data] if data.samples <= _KEPT else None

    def evaluate(weights: Tensor) -> tuple[float, Tensor, Tensor]:
        """The mean negative log-likelihood, its gradient and its Hessian."""

        def summed(logs: Tensor) -> Tensor:
            mixture = (logs + weights.log().to(logs.device)[:, None]).logsumexp(0)
            ratio = (logs - mixture).clamp_max(_LARGEST).exp()
            return torch.cat([-mixture.sum()[None], -ratio.sum(1), (ratio @ ratio.T).flatten()]).cpu()

        def terms(*block: Tensor) -> Sums:
            return (summed(components(*block)),)

        total = data.sums(terms)[0] if kept is None else torch.stack([summed(logs) for logs in kept]).sum(0)
        mean = total / data.samples
        return mean[0].item(), mean[1:4], mean[4:].view(3, 3)

    tempered = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    value, gradient, hessian = evaluate(weights)
    for _ in range(100):
        step = _model_minimum(weights, gradient, hessian) - weights
        descent = float(gradient @ step)
        share = 1.0
        while share > 1e-6:
            # Rounding must not make a weight negative.
            trial = (weights + share * step).clamp_min(0)
            trial = trial / trial.sum()
            result = evaluate(trial)
            if result[0] <= value + 1e-4 * share * descent:
                break
            share /= 4
        else:
            break
        moved = float((trial - weights).abs().max())
        weights, (value, gradient, hessian) = trial, result
        if moved < 1e-9:
            break
    # The uniform distribution alone has no order of classes. A little of the tempered one restores it.
    if float(weights[:2].sum()) < _LEAST:
        weights = (1 - _LEAST) * weights + _LEAST * tempered
        value = evaluate(weights)[0]
    # Rounding can keep the steps from reaching temperature scaling where that is best.
    return tempered if evaluate(tempered)[0] <= value else weights


def _model_minimum(weights: Tensor, gradient: Tensor, hessian: Tensor) -> Tensor:
    """The minimum of a convex quadratic over the simplex: the best of the minima on its seven faces."""
    # Equal components make the Hessian singular. Any of their mixtures is a solution.
    hessian = hessian + 1e-12 * hessian.trace() * torch.eye(3, dtype=torch.float64)
    slope = gradient - hessian @ weights
    best, lowest = weights, math.inf
    for size in (1, 2, 3):
        for face in combinations(range(3), size):
            index = torch.tensor(face)
            system = torch.ones(size + 1, size + 1, dtype=torch.float64)
            system[:size, :size] = hessian[index][:, index]
            system[size, size] = 0
            right = torch.cat([-slope[index], torch.ones(1, dtype=torch.float64)])
            solution = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:size, 0]
            point = torch.zeros(3, dtype=torch.float64).index_copy(0, index, solution)
            value = float(slope @ point + point @ hessian @ point / 2)
            if bool((point >= 0).all()) and value < lowest:
                best, lowest = point, value
    return best
