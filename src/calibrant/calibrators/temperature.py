"""Temperature scaling, and the search for a temperature that other calibrators start from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from calibrant.arguments import one_of
from calibrant.calibrators.base import BoundWarning, below_maximum
from calibrant.calibrators.streaming import HeldOut, Scaling, Sums
from calibrant.histogram import ConfidenceHistogram, RankedSums
from calibrant.warning import warn

# The range of temperatures, in units of the logits' scale. At the lowest, the top class of a typical element
# leads by a thousand nats; at the highest, by a ten-thousandth of one.
_LOWEST, _HIGHEST = 1e-3, 1e4
_BINS = 15
_GRID = tuple(tenths / 10 for tenths in range(1, 101))
_MOST_SORTED = 10**5  # elements whose confidences are sorted at every temperature of the grid

Objective = Literal["nll", "ece", "adaptive-ece"]
"""What a temperature minimises: the negative log-likelihood, or ECE over bins of equal width or mass."""


CHECK_ORDER = "check the order of both"
"""What to do where the logits tell nothing about the labels, unless one has just trained the model."""


ALL_RIGHT = (
    "every label is predicted correctly, so no temperature could be fitted; if the model was trained on "
    "these data, fit to others"
)
"""Why a temperature stops at its lower bound, unless one has just trained the model on other data."""


class ChanceWarning(UserWarning):
    """The logits tell hardly anything about the labels, as those in another order."""


class ChanceBoundWarning(BoundWarning):
    """The temperature stopped at its upper bound: the logits predict the labels no better than chance."""


class Temperature(Scaling):
    """Temperature scaling (key ``temperature``): ``l / T``, one number for all classes and elements.

    ``objective="nll"`` minimises the negative log-likelihood, which is convex in ``1/T``, by Newton's method
    within bounds. The bounds are relative to the logits, so logits ``c·l`` give the temperature ``c·T``.
    ``objective="ece"`` takes the temperature with the least expected calibration error (15 bins of equal
    width) from the grid 0.1, 0.2, ..., 10. ``objective="adaptive-ece"`` does the same with 15 bins of equal
    counts, exactly for up to 100,000 elements and with the cells of a `ConfidenceHistogram` for more. The
    order of the classes is kept: the largest logit of an element is subtracted first, so that rounding does
    not make classes equal. The result is therefore ``l / T`` up to a constant for each element.

    T stops at its lower bound, with a warning, if every label is predicted correctly. It stops at its upper
    bound if the logits are unrelated to the labels or contradict them. Either end of the grid also warns.

    Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017; the grid: Mukhoti et al.,
    *Calibrating Deep Neural Networks using Focal Loss*, NeurIPS 2020; with bins of equal counts: Ghosh,
    Schaaf and Gormley, *AdaFocal*, NeurIPS 2022.

    With ``"nll"``, `fit` warns if the logits tell hardly anything about the labels, as in another order.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        objective: what to minimise, ``"nll"``, ``"ece"`` or ``"adaptive-ece"``.

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

    def __init__(self, *, objective: Objective = "nll") -> None:
        super().__init__()
        one_of("objective", objective, get_args(Objective))
        self.objective = objective

    def fit_passes(self, data: HeldOut) -> None:
        if self.objective == "nll":
            likely = likeliest(data)
            found = likely.temperature
            if not likely.at_bound:
                _warn_of_chance(data, likely.unit)
        else:
            found = _best_calibrated(data, equal_mass=self.objective == "adaptive-ece")
        self.learn("temperature", found)

    def transform(self, rows: Tensor) -> Tensor:
        return below_maximum(rows) / self.learned("temperature", rows)


_FEW = 100
"""If shuffling changes fewer labels, as where classes are rare, good logits may seem to tell nothing."""


def _warn_of_chance(data: HeldOut, unit: float) -> None:
    """Warn of logits that have nothing to do with the labels, as those in another order.

    A test of the probability of the true class, given how often each class is predicted and occurs.
    """
    frequency = data.counts.double() / data.samples
    if data.samples * (1 - float(frequency.square().sum())) < _FEW:
        return

    def terms(rows: Tensor, labels: Tensor) -> Sums:
        p = (rows / unit).softmax(1).double()
        true, expected = p.gather(1, labels[:, None]), p @ frequency.to(p.device)
        squares = p.square() @ frequency.to(p.device)
        return true.sum(), p.sum(0), squares.sum(), expected.square().sum()

    true, predicted, squares, expected = (each.cpu() for each in data.sums(terms))
    mean = predicted / data.samples
    by_chance = float(mean @ frequency.cpu())
    # The variance of the true class's probability, summed over elements, if labels are shuffled.
    between = float(squares - data.samples * (mean.square() @ frequency.cpu()))
    variance = between - float(expected) + data.samples * by_chance**2
    excess = float(true) - data.samples * by_chance
    if variance > 1e-12 * data.samples and excess < 2.33 * math.sqrt(variance):  # 1 % of shuffled labels pass
        warn(
            "the logits tell hardly anything about the labels: the true class has a probability of "
            f"{float(true) / data.samples:.3f}, and {by_chance:.3f} if the labels are shuffled; "
            f"{CHECK_ORDER}",
            ChanceWarning,
        )


@dataclass(frozen=True)
class Likeliest:
    """The temperature of least negative log-likelihood."""

    temperature: float
    scale: float  # the typical difference between an element's top logit and the mean of its logits
    at_bound: bool = False  # whether the best temperature lies beyond the largest or smallest allowed

    @property
    def unit(self) -> float:
        """A divisor that brings logits to the size of log-probabilities, even if T is at a bound."""
        return min(max(self.temperature, self.scale / 20), self.scale)


def likeliest(data: HeldOut) -> Likeliest:
    """Find the temperature of least negative log-likelihood, to a relative precision of about 1e-12."""
    scale = _scale(data)
    if scale == 0:
        return Likeliest(1.0, 1.0)  # all classes are always equal: the temperature has no effect

    def derivatives(log_inverse: float, dtype: torch.dtype | None) -> tuple[float, float]:
        def terms(rows: Tensor, labels: Tensor) -> Sums:
            rows = rows if dtype is None else rows.to(dtype)
            return sharpness_terms(rows, labels, math.exp(log_inverse))[1:]

        slope, curvature = data.totals(terms).tolist()
        return slope, curvature

    low, high = -math.log(_HIGHEST * scale), -math.log(_LOWEST * scale)
    # Single precision takes less than half the time and comes near, unless the scale is out of its range.
    rough = None if 1e-25 < scale < 1e25 else torch.float64
    at = _root(lambda at: derivatives(at, rough), low, high, -math.log(scale / 4), 1e-3)
    chance = f"the logits predict the labels no better than chance; {CHECK_ORDER}"
    for bound, beyond, sign, why, category in (
        (high, min, -1, ALL_RIGHT, BoundWarning),
        (low, max, 1, chance, ChanceBoundWarning),
    ):
        if abs(at - bound) < 0.01 and sign * derivatives(bound, torch.float64)[0] >= 0:
            # The likelihood still grows beyond the bound. T = 1 is better if it lies there.
            temperature = beyond(math.exp(-bound), 1.0)
            warn(f"the temperature stopped at its bound {temperature:.3g}: {why}", category)
            return Likeliest(temperature, scale, at_bound=True)
    at = _root(lambda at: derivatives(at, torch.float64), low, high, at, 1e-7)
    return Likeliest(math.exp(-at), scale)


def sharpness_terms(rows: Tensor, labels: Tensor, inverse: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """The negative log-likelihood of each element at a temperature, and the terms of its derivatives.

    With ``z = l/T``: ``-log softmax(z)_y``, ``E[z] - z_y`` and ``Var[z]``, where mean and variance are over
    the classes, weighted by their probabilities. The second term is the derivative in ``u = -log T``. The sum
    of the second and the third is the second derivative. ``inverse`` is ``1/T``, one number or ``(n, 1)``.
    """
    scaled = (rows - rows.amax(1, keepdim=True)).mul_(inverse)
    truth = scaled.gather(1, labels[:, None]).squeeze(1)
    weight = scaled.exp()
    total = weight.sum(1)
    # The products start from the probability: where it is 0, they are 0 and never infinity times 0.
    mean = weight.mul_(scaled).sum(1) / total
    square = weight.mul_(scaled).sum(1) / total
    return total.log() - truth, mean - truth, square - mean * mean


def _scale(data: HeldOut) -> float:
    """The geometric mean of top logit minus mean logit, over elements whose logits are not all equal."""

    def terms(rows: Tensor, _: Tensor) -> Sums:
        top = rows.amax(1).double()
        gap = top - rows.mean(1, dtype=torch.float64)
        # The mean of equal logits may differ from them by rounding.
        gap = torch.where(rows.amin(1) < top, gap, 0)
        return torch.where(gap > 0, gap, 1).log(), gap > 0

    logarithm, count = data.totals(terms).tolist()
    return math.exp(logarithm / count) if count else 0.0


def _root(
    derivatives: Callable[[float], tuple[float, float]],
    low: float,
    high: float,
    start: float,
    tolerance: float,
) -> float:
    """The root of a rising function, by Newton's method between bounds.

    The interval is halved instead if a step leaves it, or if steps do not shrink fast enough because the
    function is nearly flat. ``derivatives`` returns the function's value and, approximately, its derivative.
    ``tolerance`` is the largest last step.
    """
    at, step, before = start, high - low, high - low
    for _ in range(200):
        value, derivative = derivatives(at)
        low, high = (low, at) if value > 0 else (at, high)
        newton = -value / derivative if derivative > 0 else math.inf
        usable = low <= at + newton <= high and abs(newton) <= before / 2
        before, step = abs(step), newton if usable else (low + high) / 2 - at
        at += step
        if abs(step) < tolerance or high - low < tolerance:
            break
    return at


def _best_calibrated(data: HeldOut, *, equal_mass: bool) -> float:
    """The temperature of the grid with the least expected calibration error."""
    ranked = equal_mass and data.samples <= _MOST_SORTED
    sums: Iterator[RankedSums | ConfidenceHistogram] = _ranked(data) if ranked else _histograms(data)
    bins = [each.equal_mass(_BINS) if equal_mass else each.equal_width(_BINS) for each in sums]
    errors = [float((each.confidence - each.correct).abs().sum()) for each in bins]
    best = _GRID[errors.index(min(errors))]
    if best in (_GRID[0], _GRID[-1]):
        warn(
            f"the temperature stopped at its bound {best:g}: beyond this grid the calibration error may be "
            "lower. Without `objective`, the likelihood is fitted, which has no grid",
            BoundWarning,
        )
    return best


def _outcomes(rows: Tensor, labels: Tensor) -> tuple[Iterator[Tensor], Tensor]:
    """The confidences at each temperature of the grid, and whether the predictions are correct."""
    top, predicted = rows.max(1, keepdim=True)
    below = rows - top
    confidences = ((below / temperature).exp_().sum(1).reciprocal_() for temperature in _GRID)
    return confidences, predicted.squeeze(1) == labels


def _ranked(data: HeldOut) -> Iterator[RankedSums]:
    """All confidences at every temperature, for exact errors."""
    parts = [(torch.stack(list(each)), correct) for each, correct in (_outcomes(*block) for block in data)]
    confidences = torch.cat([each.cpu() for each, _ in parts], dim=1).double()
    correct = torch.cat([each.cpu() for _, each in parts]).double()
    return (RankedSums.of_outcomes(row, correct) for row in confidences)


def _histograms(data: HeldOut) -> Iterator[ConfidenceHistogram]:
    """A histogram at every temperature: exact for bins of equal width."""

    def cells(rows: Tensor, labels: Tensor) -> Sums:
        confidences, correct = _outcomes(rows, labels)
        histograms = (ConfidenceHistogram.of_outcomes(each, correct) for each in confidences)
        return (
            torch.stack([torch.stack([each.count, each.confidence, each.correct]) for each in histograms]),
        )

    return (ConfidenceHistogram(each[0].sum(), *each) for each in data.sums(cells)[0])
