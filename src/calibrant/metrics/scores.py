"""NLL and Brier score, their calibration and refinement parts, and the kernel calibration error."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import dirichlet_bandwidth, dirichlet_errors
from calibrant.metrics.predictions import Predictions, as_predictions

_BLOCK = 1 << 20  # logits processed at once
_CHOOSE_FROM = 1000  # elements from which a bandwidth is chosen
_COLDEST, _HOTTEST = 1e-3, 1e3  # the range of temperatures


Source = Tensor | Predictions


def nll(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> float:
    """Mean negative log-likelihood of the true class; exact, also in streams.

    Args:
        source: logits ``(B, K, *S)``, or `Predictions`.
        target: labels ``(B, *S)``; only with logits.
        ignore_index: the label of elements to leave out.

    >>> round(nll(torch.zeros(3, 2), torch.tensor([0, 0, 1])), 4)
    0.6931
    """
    return -float(as_predictions(source, target, ignore_index).log_likelihood.double().mean())


def brier(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> float:
    """Brier score ``mean_i Σ_k (s_k - 1[y=k])²``, between 0 and 2; exact, also in streams.

    Arguments as for `nll`.

    >>> brier(torch.zeros(3, 2), torch.tensor([0, 0, 1]))
    0.5
    """
    return float(as_predictions(source, target, ignore_index).squared_error.double().mean())


def root_brier(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> float:
    """The square root of the Brier score, an upper bound of L2 calibration errors; exact, also in streams.

    Gruber and Buettner, *Better Uncertainty Calibration via Proper Scores*, NeurIPS 2022. Arguments as for
    `nll`.

    >>> round(root_brier(torch.zeros(3, 2), torch.tensor([0, 0, 1])), 4)
    0.7071
    """
    return math.sqrt(brier(source, target, ignore_index=ignore_index))


class Split(NamedTuple):
    """A score as the sum of a calibration part and a refinement part.

    Attributes:
        calibration: the improvement by the best temperature, at least 0.
        refinement: the score at the best temperature.
        temperature: the best temperature. Logits are divided by it.
    """

    calibration: float
    refinement: float
    temperature: float


def nll_split(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> Split:
    """NLL as calibration plus refinement, ``NLL = (NLL - min_T NLL(l/T)) + min_T NLL(l/T)``.

    Exact up to 1e-6 in ``log T``. It needs every prediction, so it is not available in streams.

    Berta, Holzmüller, Jordan and Bach, *Rethinking Early Stopping: Refine, Then Calibrate*, 2025.
    Arguments as for `nll`.

    >>> split = nll_split(torch.tensor([[4.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1]))
    >>> round(split.temperature, 3), round(split.refinement, 4)
    (3.641, 0.5623)
    """
    return _split(as_predictions(source, target, ignore_index), tempered_nll)


def brier_split(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> Split:
    """Brier score as calibration plus refinement, by the temperature that is best for the Brier score.

    As `nll_split`. The Brier score may have several local optima in T. The search goes downhill from T = 1.

    >>> split = brier_split(torch.tensor([[4.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1]))
    >>> round(split.temperature, 3), round(split.refinement, 4)
    (3.641, 0.375)
    """
    return _split(as_predictions(source, target, ignore_index), tempered_brier)


@torch.no_grad()
def kde_ece(
    source: Source, target: Tensor | None = None, *, bandwidth: float | None = None, ignore_index: int = -100
) -> float:
    """Canonical calibration error: the L1 distance between ``s`` and the class frequencies seen near it.

    ``1/N Σ_j ‖ Σ_{i≠j} k(s_j, s_i) 1_{y_i} / Σ_{i≠j} k(s_j, s_i) - s_j ‖₁`` with the Dirichlet density
    ``k(·, s_i)`` of parameters ``s_i/h + 1``, between 0 and 2. Exact. All pairs are visited in blocks: time
    grows with N², memory does not.

    The estimate needs predictions with close neighbours. With ten classes and a thousand elements there are
    hardly any, and the estimate is large for every model.

    ``bandwidth`` is h. By default it is the value from 1e-4 to 1 with the largest leave-one-out likelihood
    of up to 1,000 predictions. Other arguments as for `nll`.

    Popordanoska, Sayer and Blaschko, *A Consistent and Differentiable Lp Canonical Calibration Error
    Estimator*, NeurIPS 2022.

    >>> kde_ece(torch.zeros(4, 2), torch.tensor([0, 0, 1, 1])) < 0.4
    True
    """
    if bandwidth is not None:
        bandwidth = in_range("bandwidth", bandwidth, open_low=True)
    predictions = as_predictions(source, target, ignore_index)
    if predictions.samples < 2:
        raise ValueError("the canonical calibration error needs at least two elements to compare")
    if bandwidth is None:
        step = -(-predictions.samples // _CHOOSE_FROM)
        bandwidth = dirichlet_bandwidth(predictions.rows[::step])
    errors = list(dirichlet_errors(predictions.rows, predictions.label, bandwidth))
    return float(torch.cat(errors).mean())


_Score = Callable[[Predictions, float], tuple[Tensor, Tensor]]


def split_parts(predictions: Predictions, score: _Score) -> tuple[Tensor, Tensor]:
    """The contributions of each element to the parts of `nll_split` or `brier_split`, ``(N,)`` each."""
    left, _ = score(predictions, _split(predictions, score).temperature)
    return score(predictions, 1.0)[0] - left, left


def _split(predictions: Predictions, score: _Score) -> Split:
    known = predictions.derived  # the search takes about ten passes, and several metrics need its result
    if score not in known:
        temperature = 1 / _root(lambda sharpness: float(score(predictions, 1 / sharpness)[1].mean()))
        before, after = (float(score(predictions, t)[0].mean()) for t in (1.0, temperature))
        if after > before:  # by rounding, or in another local optimum
            temperature, after = 1.0, before
        known[score] = Split(before - after, after, temperature)
    split: Split = known[score]
    return split


def _root(function: Callable[[float], float]) -> float:
    """The positive number at which an increasing function is 0, to a relative precision of 1e-6."""
    from scipy.optimize import brentq  # type: ignore[import-untyped]  # here: it takes half a second

    at = cache(lambda logarithm: function(math.exp(logarithm)))
    if at(0.0) == 0:
        return 1.0
    sign, limit = (-1, math.log(_HOTTEST)) if at(0.0) > 0 else (1, -math.log(_COLDEST))
    near, far = 0.0, math.log(2)  # the distances from 1 between which the function changes its sign
    # By signs, not by their product, which is 0 for tiny slopes.
    while at(sign * far) and (at(sign * near) > 0) == (at(sign * far) > 0):
        if far == limit:
            return math.exp(sign * limit)
        near, far = far, min(limit, 2 * far + math.log(2))
    return math.exp(brentq(at, sign * near, sign * far, xtol=1e-7))


def tempered_nll(predictions: Predictions, temperature: float) -> tuple[Tensor, Tensor]:
    """The NLL of each element with its logits divided by T, and its derivative by 1/T, ``(N,)`` each."""

    def score(shifted: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        scaled = shifted / temperature
        at_label, exponential = scaled.gather(1, label).squeeze(1), scaled.exp_()
        total = exponential.sum(1)
        mean = (exponential * shifted).sum(1, dtype=torch.float64) / total
        return total.log() - at_label, mean - shifted.gather(1, label).squeeze(1)

    return _in_blocks(predictions, score)


def tempered_brier(predictions: Predictions, temperature: float) -> tuple[Tensor, Tensor]:
    """The Brier score of each element, and its derivative, as `tempered_nll`."""

    def score(shifted: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        probability = (shifted / temperature).softmax(1)
        residual = probability.scatter_add(1, label, probability.new_full(label.shape, -1.0))
        product = probability * residual
        pull = product - probability * product.sum(1, keepdim=True)
        return residual.square().sum(1), 2 * (pull * shifted).sum(1, dtype=torch.float64)

    values, slopes = _in_blocks(predictions, score)
    return values / (2 if predictions.binary else 1), slopes


def _in_blocks(
    predictions: Predictions, score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """A score and its derivative, from logits minus their maximum ``(n, K)`` and labels ``(n, 1)``."""
    step = max(1, _BLOCK // predictions.num_classes)
    blocks = (torch.split(values, step) for values in (predictions.rows, predictions.label))
    found = [
        score(rows - rows.amax(1, keepdim=True), y.unsqueeze(1)) for rows, y in zip(*blocks, strict=True)
    ]
    values, slopes = zip(*found, strict=True)
    return torch.cat(values).double(), torch.cat(slopes)
