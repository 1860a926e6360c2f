"""Spline calibration: a smooth map of the confidence, without bins."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from calibrant.arguments import whole_number
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.one_vs_rest import (
    at_least_two,
    in_double,
    interpolated,
    probabilities,
    with_confidence,
)

# The most points of the map that are kept: enough for a spline with a few knots, and few enough for a
# checkpoint after a fit to the pixels of a thousand images.
_POINTS = 1 << 14


class Spline(Calibrator):
    """The confidence plus the slope of a spline through the cumulative gap (key ``spline``).

    Samples are sorted by confidence. At the fraction ``t`` of them, ``h(t)`` is the sum of correctness minus
    confidence so far, divided by N. Samples of equal confidence count with their mean correctness. A natural
    cubic spline with evenly spaced knots is fitted to h by least squares. The map is
    ``q(s) = s + h'(t(s))``, linear between the samples and constant beyond them.

    The other classes share the rest in proportion, and the prediction never changes, as in `Isotonic` with
    ``"top-label"``. The map need not be monotone: it decreases where more confident predictions are less
    often right. A natural spline makes the gap level off towards the least and the greatest confidence. The
    map is limited to about 1/K to 1 - 1e-12. With fewer than ``knots - 1`` samples there are as many knots as
    points.

    Gupta et al., *Calibration of Neural Networks using Splines*, ICLR 2021. (Their released code swaps the
    weights of the two neighbours when it interpolates; this implementation does not.)

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Args:
        knots: the number of knots, at least 2; 2 give a straight line, the same gap everywhere.

    Attributes:
        points: ``(P,)``, confidences, P at most 16,384.
        values: the map at the points.

    >>> import torch
    >>> confidence = torch.linspace(0.6, 0.9, 100)
    >>> logits = torch.stack([1 - confidence, confidence], 1).log()
    >>> target = (torch.arange(100) % 2)  # right in half of the cases, whatever the confidence
    >>> calibrated = Spline().fit(logits, target)(logits).exp()[:, 1]
    >>> bool((calibrated - 0.5).abs().max() < 0.03)
    True
    """

    key: ClassVar[str] = "spline"
    preserves_order: ClassVar[bool] = True
    points: Tensor
    values: Tensor

    def __init__(self, *, knots: int = 6) -> None:
        super().__init__()
        self.knots = whole_number("knots", knots, 2)

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        at_least_two(rows)
        confidence, order = probabilities(rows, "top-label").squeeze(0).sort()
        correct = (rows.argmax(-1) == labels)[order].to(confidence.dtype)
        samples = len(confidence)
        points, group, count = torch.unique_consecutive(confidence, return_inverse=True, return_counts=True)

        def mean(values: Tensor) -> Tensor:
            """The mean over the samples of equal confidence."""
            total = torch.zeros_like(points).index_add_(0, group, values)
            return total.div_(count)

        correct = mean(correct)[group]  # the order of equal confidences must not matter
        gap = torch.cat([confidence.new_zeros(1), (correct - confidence).cumsum(0) / samples])
        fraction = torch.arange(samples + 1, dtype=gap.dtype, device=gap.device) / samples
        # The slope at a sample is taken half-way between the sums before and after it.
        slope = spline_slope(fraction, gap, min(self.knots, samples + 1), (fraction[1:] + fraction[:-1]) / 2)

        # Equal confidences get the mean of their slopes, so that the map has one value.
        values = points + mean(slope)
        kept = torch.linspace(0, len(points) - 1, min(_POINTS, max(2, len(points))), dtype=torch.float64)
        kept = kept.round().long().to(points.device)
        self.learn("points", points[kept])
        self.learn("values", values[kept].clamp(0, 1))

    def transform(self, rows: Tensor) -> Tensor:
        rows = in_double(rows)
        points, values = self.learned("points", rows), self.learned("values", rows)
        confidence = probabilities(rows, "top-label")
        calibrated = interpolated(points.unsqueeze(0), values.unsqueeze(0), confidence)
        return with_confidence(rows, calibrated.squeeze(0))


def spline_slope(at: Tensor, values: Tensor, knots: int, where: Tensor) -> Tensor:
    """The slope ``(M,)`` of a natural cubic spline on [0, 1], fitted to values ``(N,)`` by least squares."""
    curvatures = _curvatures(knots, like=at)
    basis = _basis(at, curvatures)[0]
    # The basis is well conditioned, so the normal equations are accurate, and they need no copy of it.
    heights: Tensor = torch.linalg.solve(basis.T @ basis, basis.T @ values)
    return _basis(where, curvatures)[1] @ heights


def _curvatures(knots: int, like: Tensor) -> Tensor:
    """Second derivatives at the knots ``(knots, knots)`` of the natural splines that are 1 at one knot."""
    step = 1 / (knots - 1)
    identity = torch.eye(knots, dtype=like.dtype, device=like.device)
    if knots == 2:
        return torch.zeros_like(identity)
    bend = (identity[:-2] - 2 * identity[1:-1] + identity[2:]) / step
    system = (identity[:-2] + 4 * identity[1:-1] + identity[2:])[:, 1:-1] * step / 6
    ends = torch.zeros_like(identity[:1])
    return torch.cat([ends, torch.linalg.solve(system, bend), ends])


def _basis(at: Tensor, curvatures: Tensor) -> tuple[Tensor, Tensor]:
    """Values and slopes ``(N, knots)`` of the natural splines that are 1 at one knot."""
    knots = len(curvatures)
    step = 1 / (knots - 1)
    left = (at * (knots - 1)).floor().long().clamp(0, knots - 2)
    b = (at / step - left).unsqueeze(1)
    a = 1 - b
    identity = torch.eye(knots, dtype=at.dtype, device=at.device)
    lower, upper = curvatures[left], curvatures[left + 1]
    values = a * identity[left] + b * identity[left + 1]
    values = values + step**2 / 6 * ((a**3 - a) * lower + (b**3 - b) * upper)
    slopes = (identity[left + 1] - identity[left]) / step
    slopes = slopes + step / 6 * ((1 - 3 * a**2) * lower + (3 * b**2 - 1) * upper)
    return values, slopes
