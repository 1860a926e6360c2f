"""Calibration errors of the top-class confidence."""

from __future__ import annotations

from calibrant.histogram import ConfidenceHistogram


def expected_calibration_error(histogram: ConfidenceHistogram, bins: int = 15) -> float:
    """Expected calibration error ``Σ |B|/N · |accuracy - confidence|`` over equal-width bins; exact.

    Args:
        histogram: of the data set.
        bins: number of bins ``(lo, hi]``, a divisor of 300.

    >>> import torch
    >>> from calibrant.layout import arrange
    >>> elements = arrange(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    >>> round(expected_calibration_error(ConfidenceHistogram.of(elements)), 4)
    0.4999
    """
    if histogram.samples == 0:
        raise ValueError("the calibration error of an empty data set is undefined")
    pooled = histogram.equal_width(bins)
    return float((pooled.confidence - pooled.correct).abs().sum() / histogram.samples)
