"""A mixture of tempered, plain and uniform probabilities: more expressive, and the order stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from calibrant.calibrators.streaming import HeldOut, Scaling, totals
from calibrant.calibrators.temperature import likeliest

# What the two components that know the order of the classes weigh at least.
_LEAST = 1e-2

_LARGEST = 60.0  # of log(q / mixture): squares of what it stands for stay finite
_KEPT = 1 << 24  # elements whose components' probabilities are kept in memory, 400 MB of them at most


class EnsembleTemperature(Scaling):
    """Ensemble temperature scaling, ETS (key ``ensemble-temperature``), as log-probabilities.

    ``w1·softmax(l/T) + w2·softmax(l) + w3/K`` with weights of at least 0 that sum to 1. T is the one that
    temperature scaling finds; then the negative log-likelihood, convex in the weights, is minimised by
    Newton steps on the simplex. The order of the classes stays.

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
        weights = _likeliest_weights(data, temperature)
        self.learn("temperature", torch.tensor(temperature, dtype=torch.float64))
        self.learn("weights", weights)

    def transform(self, rows: Tensor) -> Tensor:
        # Logarithms in the rows' type, of weights in float64: there is more room for small ones.
        weights = self.weights.to(rows.device).log().to(rows.dtype)
        parts = (
            (rows / self.learned("temperature", rows)).log_softmax(1) + weights[0],
            rows.log_softmax(1) + weights[1],
            (weights[2] - math.log(rows.shape[1])).expand_as(rows),
        )
        return torch.stack(parts).logsumexp(0)


def _likeliest_weights(data: HeldOut, temperature: float) -> Tensor:
    """The weights of least negative log-likelihood, by Newton steps whose model is solved exactly."""

    def components() -> Iterator[Tensor]:
        for rows, labels in data:
            yield _log_components(rows.double(), labels, temperature)

    # Three numbers an element are all that the weights depend on: kept, unless they are very many.
    kept = list(components()) if data.samples <= _KEPT else []

    def evaluate(weights: Tensor) -> tuple[float, Tensor, Tensor]:
        """The mean negative log-likelihood, its gradient and its Hessian."""

        def terms() -> Iterator[tuple[Tensor, ...]]:
            for logs in kept or components():
                mixture = (logs + weights.log().to(logs.device)[:, None]).logsumexp(0)
                ratio = (logs - mixture).clamp_max(_LARGEST).exp()
                yield (-mixture, *-ratio, *(ratio[:, None] * ratio).flatten(0, 1))

        sums = torch.tensor(totals(terms()), dtype=torch.float64) / data.samples
        return sums[0].item(), sums[1:4], sums[4:].view(3, 3)

    tempered = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    value, gradient, hessian = evaluate(weights)
    for _ in range(100):
        step = _model_minimum(weights, gradient, hessian) - weights
        descent = float(gradient @ step)
        share = 1.0
        while share > 1e-6:
            # Rounding must not push a weight that is at its bound below it.
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
    # Equal probabilities alone would forget the order of the classes. A little of the tempered ones, which
    # costs less than they do by themselves, keeps it.
    if float(weights[:2].sum()) < _LEAST:
        weights = (1 - _LEAST) * weights + _LEAST * tempered
        value = evaluate(weights)[0]
    # Never worse than temperature scaling: where that is best, rounding may have kept the steps from it.
    return tempered if evaluate(tempered)[0] <= value else weights


def _log_components(rows: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The label's log-probability in each of the three components, ``(3, n)``."""
    below = rows - rows.amax(1, keepdim=True)
    truth = below.gather(1, labels[:, None]).squeeze(1)
    plain = truth - below.exp().sum(1).log()
    tempered = truth / temperature - below.div_(temperature).exp_().sum(1).log()
    return torch.stack([tempered, plain, torch.full_like(plain, -math.log(rows.shape[1]))])


def _model_minimum(weights: Tensor, gradient: Tensor, hessian: Tensor) -> Tensor:
    """The minimum over the simplex of a convex quadratic: the best of the minima on its seven faces."""
    # Components that coincide leave the Hessian singular: any of their mixtures will do.
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
