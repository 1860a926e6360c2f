"""Spline calibration: a smooth map of the confidence, without bins."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from calibrant.arguments import whole_number
from calibrant.calibrators.one_vs_rest import ProbabilityMap, interpolated, probabilities

# The most points of the map that are kept: enough for a spline with a few knots, and few enough for a
# checkpoint after a fit to the pixels of a thousand images.
_POINTS = 1 << 14


class Spline(ProbabilityMap):
    """Spline calibration: a smooth map from confidence to accuracy (key ``spline``).

    The map is the confidence plus the slope of a spline through the cumulative gap. Samples are sorted by
    confidence. At the fraction ``t`` of them, ``h(t)`` is the sum of correctness minus
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
    preserves_order = True  # of the class as well: there is one variant
    per_class = False
    points: Tensor
    values: Tensor

    def __init__(self, *, knots: int = 6) -> None:
        super().__init__(variant="top-label")
        self.knots = whole_number("knots", knots, 2)

    def fit_maps(self, rows: Tensor, labels: Tensor) -> None:
        confidence, order = probabilities(rows, "top-label").squeeze(0).sort()
        correct = (rows.argmax(-1) == labels)[order].to(confidence.dtype)
        samples = len(confidence)
        points, group, count = torch.unique_consecutive(confidence, return_inverse=True, return_counts=True)

        def mean(values: Tensor) -> Tensor:
            """The mean over the samples of equal confidence."""
            averaged: Tensor = torch.zeros_like(points).index_add_(0, group, values) / count
            return averaged

        correct = mean(correct)[group]  # the order of equal confidences must not matter
        gap = torch.cat([confidence.new_zeros(1), (correct - confidence).cumsum(0) / samples])
        fraction = torch.arange(samples + 1, dtype=gap.dtype, device=gap.device) / samples
        # The slope at a sample is taken half-way between the sums before and after it.
        slope = spline_slope(fraction, gap, min(self.knots, samples + 1), (fraction[1:] + fraction[:-1]) / 2)

        # Equal confidences get the mean of their slopes, so that the map has one value.
        values = points + mean(slope)
        number = min(_POINTS, max(2, len(points)))
        kept = torch.linspace(0, len(points) - 1, number, dtype=torch.float64, device="cpu")
        kept = kept.round().long().to(points.device)
        self.learn("points", points[kept])
        self.learn("values", values[kept].clamp(0, 1))

    def mapped(self, given: Tensor) -> Tensor:
        points, values = self.learned("points", given), self.learned("values", given)
        return interpolated(points.unsqueeze(0), values.unsqueeze(0), given)


def spline_slope(at: Tensor, values: Tensor, knots: int, where: Tensor) -> Tensor:
    """The slope ``(M,)`` of a natural cubic spline on [0, 1], fitted to values ``(N,)`` by least squares."""
    from scipy.interpolate import CubicSpline  # type: ignore[import-untyped]

    # The splines that are 1 at one knot and 0 at the others.
    ends = torch.linspace(0, 1, knots, dtype=torch.float64, device="cpu")
    identity = torch.eye(knots, dtype=torch.float64, device="cpu")
    basis = CubicSpline(ends.numpy(), identity.numpy(), bc_type="natural")
    design = torch.from_numpy(basis(at.cpu().numpy())).to(at)
    # The basis is well conditioned, so the normal equations are accurate, and they need no copy of it.
    heights: Tensor = torch.linalg.solve(design.T @ design, design.T @ values)
    return torch.from_numpy(basis(where.cpu().numpy(), 1)).to(at) @ heights
