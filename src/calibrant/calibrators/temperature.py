"""One temperature for all logits: the calibrator to beat, and the start of those with more parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from calibrant.calibrators.base import warn_at_bound
from calibrant.calibrators.streaming import HeldOut, Scaling, totals
from calibrant.histogram import ConfidenceHistogram

# Temperatures looked at, in units of the logits' scale: at the lowest the typical element is a thousand
# nats from any doubt, at the highest its classes differ by a ten-thousandth of one.
_LOWEST, _HIGHEST = 1e-3, 1e4
_BINS = 15
_GRID = tuple(tenths / 10 for tenths in range(1, 101))


class Temperature(Scaling):
    """Temperature scaling (key ``temperature``): ``l / T``, one number for all classes and elements.

    The order of the classes stays. ``objective="nll"`` minimises the negative log-likelihood, which is
    convex in ``1/T``: its derivative is brought to zero by Newton's method, kept between bounds that close
    in. Bounds are relative to the logits, so ``c·l`` gives ``c·T``. ``objective="ece"`` takes, of
    T = 0.1, 0.2, ..., 10, the one with the least expected calibration error (15 bins of equal width).

    Where every label is predicted perfectly no T is best: T stays at its lower bound, with a warning;
    likewise at the upper bound where the logits tell nothing, or the opposite of the truth, and at
    either end of the grid.

    Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017; the grid: Mukhoti et al.,
    *Calibrating Deep Neural Networks using Focal Loss*, NeurIPS 2020.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        objective: what to minimise, ``"nll"`` or ``"ece"``.

    Attributes:
        temperature: T, a scalar buffer, once fitted.

    >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    >>> calibrator = Temperature().fit(logits, torch.tensor([0, 0, 1, 1]))
    >>> round(calibrator.temperature.item(), 4), round(calibrator(logits)[0].softmax(0)[0].item(), 4)
    (1.8205, 0.75)
    """

    key: ClassVar[str] = "temperature"
    preserves_order = True
    temperature: Tensor

    def __init__(self, *, objective: Literal["nll", "ece"] = "nll") -> None:
        super().__init__()
        if objective not in ("nll", "ece"):
            raise ValueError(f"objective must be 'nll' or 'ece', got {objective!r}")
        self.objective = objective

    def fit_passes(self, data: HeldOut) -> None:
        temperature = likeliest(data).temperature if self.objective == "nll" else _best_calibrated(data)
        self.learn("temperature", torch.tensor(temperature, dtype=torch.float64))

    def transform(self, rows: Tensor) -> Tensor:
        return rows / self.learned("temperature", rows)


@dataclass(frozen=True)
class Likeliest:
    """The temperature of least negative log-likelihood.

    Attributes:
        temperature: T.
        scale: the typical distance of an element's top logit from the mean of its logits.
    """

    temperature: float
    scale: float

    @property
    def unit(self) -> float:
        """A divisor that brings logits to the size of log-probabilities, also where T is at a bound."""
        return min(max(self.temperature, self.scale / 20), self.scale)


def likeliest(data: HeldOut) -> Likeliest:
    """Find the temperature of least negative log-likelihood, to about 1e-12 of itself."""
    scale = _scale(data)
    if scale == 0:
        return Likeliest(1.0, 1.0)  # every T gives the same: all classes are always equal

    def derivatives(log_inverse: float, dtype: torch.dtype | None) -> tuple[float, float]:
        inverse = math.exp(log_inverse)

        def terms() -> Iterator[tuple[Tensor, ...]]:
            for rows, labels in data:
                yield sharpness_terms(rows if dtype is None else rows.to(dtype), labels, inverse)[1:]

        slope, curvature = totals(terms())
        return slope, curvature

    low, high = -math.log(_HIGHEST * scale), -math.log(_LOWEST * scale)
    # Single precision suffices to come near, in less than half the time, unless it cannot hold the numbers.
    rough = None if 1e-25 < scale < 1e25 else torch.float64
    at = _root(lambda at: derivatives(at, rough), low, high, -math.log(scale / 4), 1e-3)
    for bound, beyond, sign, why in (
        (high, min, -1, "every label is predicted perfectly, more confidence is always better"),
        (low, max, 1, "the logits say nothing about the labels, or the opposite"),
    ):
        if abs(at - bound) < 0.01 and sign * derivatives(bound, torch.float64)[0] >= 0:
            # The likelihood grows up to the bound and beyond: T = 1, if it lies there, is better still.
            temperature = beyond(math.exp(-bound), 1.0)
            warn_at_bound("the temperature", temperature, why)
            return Likeliest(temperature, scale)
    at = _root(lambda at: derivatives(at, torch.float64), low, high, at, 1e-7)
    return Likeliest(math.exp(-at), scale)


def sharpness_terms(rows: Tensor, labels: Tensor, inverse: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Per element, the negative log-likelihood at a temperature and what its derivatives are made of.

    With ``z = l/T``: ``-log softmax(z)_y``, ``E[z] - z_y`` and ``Var[z]``, where E and Var are taken over
    the classes by their probabilities. The second is the derivative in ``u = -log T``; the second and the
    third add up to the second derivative, which is near the third alone where the derivative vanishes.

    Args:
        rows: logits ``(n, K)``.
        labels: ``(n,)``.
        inverse: ``1/T``, one for all or ``(n, 1)``.
    """
    scaled = (rows - rows.amax(1, keepdim=True)).mul_(inverse)
    truth = scaled.gather(1, labels[:, None]).squeeze(1)
    weight = scaled.exp()
    total = weight.sum(1)
    # In this order a logit so low that its probability is 0 adds 0, and never infinity times 0.
    mean = weight.mul_(scaled).sum(1) / total
    square = weight.mul_(scaled).sum(1) / total
    return total.log() - truth, mean - truth, square - mean * mean


def _scale(data: HeldOut) -> float:
    """The geometric mean of top logit minus mean logit, over elements where that is not 0."""

    def terms() -> Iterator[tuple[Tensor, ...]]:
        for rows, _ in data:
            top = rows.amax(1).double()
            gap = top - rows.mean(1, dtype=torch.float64)
            # Rounding alone may part equal logits from their mean.
            gap = torch.where(rows.amin(1) < top, gap, 0)
            yield torch.where(gap > 0, gap, 1).log(), gap > 0

    logarithm, count = totals(terms())
    return math.exp(logarithm / count) if count else 0.0


def _root(
    derivatives: Callable[[float], tuple[float, float]],
    low: float,
    high: float,
    start: float,
    tolerance: float,
) -> float:
    """The root of a function that rises from below 0 to above 0, given with (about) its derivative.

    Newton's method between bounds. Where a step leaves them, or steps do not shrink fast enough, as where
    the function is all but flat, the interval is halved instead.
    """
    at, step, before = start, high - low, high - low
    for _ in range(200):
        value, derivative = derivatives(at)
        low, high = (low, at) if value > 0 else (at, high)
        newton = -value / derivative if derivative > 0 else math.inf
        if low <= at + newton <= high and abs(newton) <= before / 2:
            before, step = abs(step), newton
        else:
            before, step = abs(step), (low + high) / 2 - at
        at += step
        if abs(step) < tolerance or high - low < tolerance:
            break
    return at


def _best_calibrated(data: HeldOut) -> float:
    histograms: list[ConfidenceHistogram | None] = [None] * len(_GRID)
    for rows, labels in data:
        top, predicted = rows.max(1, keepdim=True)
        below, correct = rows - top, predicted.squeeze(1) == labels
        for index, temperature in enumerate(_GRID):
            confidence = (below / temperature).exp_().sum(1).reciprocal_()
            histogram = ConfidenceHistogram.of_outcomes(confidence, correct)
            before = histograms[index]
            histograms[index] = histogram if before is None else before + histogram

    def error(histogram: ConfidenceHistogram | None) -> float:
        assert histogram is not None
        bins = histogram.equal_width(_BINS)
        return float((bins.confidence - bins.correct).abs().sum() / histogram.samples)

    errors = [error(histogram) for histogram in histograms]
    best = _GRID[errors.index(min(errors))]
    if best in (_GRID[0], _GRID[-1]):
        warn_at_bound("the temperature", best, "the least calibration error is at the edge of the grid")
    return best
