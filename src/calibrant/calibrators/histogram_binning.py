"""Histogram binning: each probability becomes the observed frequency in its bin."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from calibrant.arguments import one_of, whole_number
from calibrant.calibrators.one_vs_rest import ProbabilityMap, Variant, binary_problems, ordering, stepped

Binning = Literal["equal-width", "equal-mass"]
"""Bins of equal width, or bins with equal numbers of samples."""


class HistogramBinning(ProbabilityMap):
    """Histogram binning: each probability becomes the observed frequency in its bin (``histogram-binning``).

    ``q(s) = Σ_{i in bin(s)} 1[y_i = k] / |bin(s)|`` over bins ``(lo, hi]``. The value of an empty bin is its
    centre, so probabilities without data stay about the same.

    Equal-width bins are the default because they suit both variants. Equal-mass bins are better for
    ``"top-label"`` on confident networks. They are worse for one of many classes, whose probabilities are
    nearly all close to 0. Equal samples are in one bin, so equal-mass bins can differ in size or be empty.

    ``"one-vs-rest"`` has bins for each class and scales the results to sum to 1 (a row of zeros keeps its
    original probabilities). ``"top-label"`` bins the confidence. The other classes then share the rest in
    proportion, and the prediction never changes, as in `Isotonic`.

    Zadrozny and Elkan, *Obtaining calibrated probability estimates from decision trees and naive Bayesian
    classifiers*, ICML 2001.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Args:
        bins: the number of bins, at least 1.
        variant: ``"one-vs-rest"`` or ``"top-label"``.
        binning: ``"equal-width"`` or ``"equal-mass"``.

    Attributes:
        edges: ``(K, bins - 1)`` or ``(1, bins - 1)``, the edges between bins.
        frequencies: ``(K, bins)`` or ``(1, bins)``, the value of each bin.
        ceilings: as in `Isotonic`.

    >>> import torch
    >>> probability = torch.tensor([0.1, 0.6, 0.8, 0.9])
    >>> logits = torch.stack([1 - probability, probability], 1).log()
    >>> calibrator = HistogramBinning(bins=2).fit(logits, torch.tensor([0, 1, 0, 1]))
    >>> [round(number, 3) for number in calibrator(logits).exp()[:, 1].tolist()]
    [0.0, 0.667, 0.667, 0.667]
    """

    key: ClassVar[str] = "histogram-binning"
    edges: Tensor
    frequencies: Tensor

    def __init__(
        self, *, bins: int = 15, variant: Variant = "one-vs-rest", binning: Binning = "equal-width"
    ) -> None:
        super().__init__(variant=variant)
        self.binning: Binning = one_of("binning", binning, get_args(Binning))
        self.bins = whole_number("bins", bins)

    def fit_maps(self, rows: Tensor, labels: Tensor) -> None:
        fitted = [self._bins(*block) for block in binary_problems(rows, labels, self.variant)]
        edges, frequencies = zip(*fitted, strict=True)
        self.learn("edges", torch.cat(edges))
        self.learn("frequencies", torch.cat(frequencies))

    def mapped(self, given: Tensor) -> Tensor:
        return stepped(self.learned("edges", given), self.learned("frequencies", given), given)

    def _bins(self, probability: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
        """Edges ``(C, bins - 1)`` and frequencies ``(C, bins)`` from probabilities and hits ``(C, N)``."""
        classes, samples = probability.shape
        if self.binning == "equal-width":
            edges = torch.arange(1, self.bins, dtype=probability.dtype, device=probability.device) / self.bins
            edges = edges.expand(classes, -1).contiguous()
        else:
            ends = torch.arange(1, self.bins, device=probability.device) * samples // self.bins
            ordered = probability.gather(1, ordering(probability))
            edges = midpoints(ordered, ends.expand(classes, -1))

        place = torch.searchsorted(edges, probability)
        zeros = probability.new_zeros(classes, self.bins)
        count = zeros.scatter_add(1, place, torch.ones_like(probability))
        successes = zeros.scatter_add(1, place, outcome.to(probability.dtype))
        bounds = torch.cat([zeros[:, :1], edges, torch.ones_like(zeros[:, :1])], 1)
        center = (bounds[:, 1:] + bounds[:, :-1]) / 2
        return edges, torch.where(count > 0, successes / count.clamp_min(1), center)


def midpoints(ordered: Tensor, positions: Tensor) -> Tensor:
    """Edges ``(C, E)`` with ``positions`` of the sorted numbers ``(C, N)`` at or below them.

    An edge is half-way between two numbers. It is the first number at position 0 and the last at N.
    """
    last = ordered.shape[1] - 1
    below = ordered.gather(1, (positions - 1).clamp(0, last))
    above = ordered.gather(1, positions.clamp(0, last))
    middle = (below + above) / 2
    # Adjacent floating-point numbers have no number between them.
    return torch.where(middle < above, middle, below)
