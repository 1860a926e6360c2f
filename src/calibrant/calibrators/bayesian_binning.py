"""Bayesian binning into quantiles: an average over histograms, weighted by their posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from calibrant.arguments import in_range, whole_number
from calibrant.calibrators.histogram_binning import midpoints
from calibrant.calibrators.one_vs_rest import ProbabilityMap, binary_problems, ordering, stacked, stepped

# Histograms with less of the posterior than this are left out. Their effect is below sampling noise, and
# without them a map has a tenth of the steps.
_NEGLIGIBLE = 1e-4

# All histograms together have more bins than there are samples, so fewer classes are fitted at once.
_CLASSES = 4


class BayesianBinning(ProbabilityMap):
    """Bayesian binning into quantiles, BBQ (key ``bayesian-binning``).

    ``q(s) = Σ_M P(M | data) · (m_b + α_b) / (n_b + N'/B)`` over histograms M of B equal-mass bins, where
    ``n_b`` samples with ``m_b`` successes are in the bin of s. The prior of a bin is a beta distribution
    with ``α_b = N'/B · p_b`` and ``β_b = N'/B · (1 - p_b)``, where ``p_b`` is its midpoint. All histograms
    have the same prior, and ``P(M | data)`` is proportional to

    ``Π_b Γ(N'/B) / Γ(n_b + N'/B) · Γ(m_b + α_b) / Γ(α_b) · Γ(n_b - m_b + β_b) / Γ(β_b)``.

    Each class has a map, and the results are scaled to sum to 1. Equal samples are in one bin. B counts bins
    with samples. Histograms with less than 1e-4 of the posterior are left out.

    Naeini, Cooper and Hauskrecht, *Obtaining Well Calibrated Probabilities Using Bayesian Binning*,
    AAAI 2015.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Args:
        bins: the numbers of bins to average over. None means from ``N^(1/3) / 10`` to ``10 N^(1/3)``, and at
            most ``N / 5``.
        prior_samples: N', the number of samples that the prior counts as.

    Attributes:
        edges: ``(K, P)``, the edges of all histograms; short rows repeat their last edge.
        values: ``(K, P + 1)``, the values of the maps between the edges.
        ceilings: as in `Isotonic`.

    >>> import torch
    >>> probability = torch.tensor([0.1, 0.6, 0.8, 0.9])
    >>> logits = torch.stack([1 - probability, probability], 1).log()
    >>> calibrator = BayesianBinning(bins=[1]).fit(logits, torch.tensor([0, 1, 1, 1]))
    >>> [round(number, 3) for number in calibrator(logits).exp()[:, 1].tolist()]  # (3 + 1) / (4 + 2)
    [0.667, 0.667, 0.667, 0.667]
    """

    key: ClassVar[str] = "bayesian-binning"
    edges: Tensor
    values: Tensor

    def __init__(self, *, bins: Sequence[int] | None = None, prior_samples: float = 2.0) -> None:
        super().__init__()
        if bins is not None:
            if isinstance(bins, str) or not isinstance(bins, Sequence) or not bins:
                raise ValueError(f"bins must be a list of numbers of bins, each at least 1, got {bins!r}")
            bins = [whole_number("bins", number) for number in bins]
        self.bins = bins
        self.prior_samples = in_range("prior_samples", prior_samples, open_low=True)

    def fit_maps(self, rows: Tensor, labels: Tensor) -> None:
        samples = len(rows)
        histograms = _Histograms(self.bins or numbers_of_bins(samples), samples, rows.device)
        averages = [
            average
            for block in binary_problems(rows, labels, self.variant, _CLASSES)
            for average in histograms.averages(*block, self.prior_samples)
        ]
        edges, values = zip(*averages, strict=True)
        self.learn("edges", stacked(edges, at_least=1))
        self.learn("values", stacked(values, at_least=2))

    def mapped(self, given: Tensor) -> Tensor:
        return stepped(self.learned("edges", given), self.learned("values", given), given)


def numbers_of_bins(samples: int) -> range:
    """The numbers of bins that the paper averages over, for N samples."""
    root = math.cbrt(samples)
    return range(max(1, math.floor(root / 10)), max(1, min(math.ceil(10 * root), math.ceil(samples / 5))) + 1)


class _Histograms:
    """Equal-mass histograms of N samples. The T bins of all histograms form one axis."""

    def __init__(self, bins: Sequence[int], samples: int, device: torch.device) -> None:
        self.sizes = sizes = torch.tensor(list(bins), device=device)
        self.count = len(sizes)
        self.of_bin = torch.arange(self.count, device=device).repeat_interleave(sizes)
        offset = (sizes.cumsum(0) - sizes)[self.of_bin]
        rank = torch.arange(len(self.of_bin), device=device) - offset
        self.starts = rank * samples // sizes[self.of_bin]
        self.ends = (rank + 1) * samples // sizes[self.of_bin]
        self.follows = rank > 0

    def averages(self, probability: Tensor, outcome: Tensor, prior: float) -> list[tuple[Tensor, Tensor]]:
        """Edges ``(P,)`` and values ``(P + 1,)`` of the average histogram for each row of ``(C, N)``."""
        order = ordering(probability)
        ordered = probability.gather(1, order)
        successes = torch.nn.functional.pad(outcome.gather(1, order).to(ordered.dtype).cumsum(-1), (1, 0))
        position = _after_ties(ordered)
        starts, ends = position[:, self.starts], position[:, self.ends]

        count = (ends - starts).to(ordered.dtype)
        success = successes.gather(1, ends) - successes.gather(1, starts)
        inner = midpoints(ordered, position)
        inner[:, 0], inner[:, -1] = 0, 1
        # No data could overrule a prior with a midpoint of 0 or 1.
        middle = ((inner.gather(1, starts) + inner.gather(1, ends)) / 2).clamp(1e-12, 1 - 1e-12)
        filled = self._sum((count > 0).to(ordered.dtype))
        strengths = prior / filled
        strength = strengths[:, self.of_bin]
        alpha, beta = strength * middle, strength * (1 - middle)

        # Without successes the second factor is 1. With many classes, that is the case in most bins.
        evidence = torch.lgamma(count - success + beta) - torch.lgamma(beta) - torch.lgamma(count + strength)
        hit = success > 0
        evidence[hit] += torch.lgamma((success + alpha)[hit]) - torch.lgamma(alpha[hit])
        weight = (self._sum(evidence) + self.sizes * torch.lgamma(strengths)).softmax(-1)
        weight = torch.where(weight < _NEGLIGIBLE, 0, weight)
        weight = (weight / weight.sum(-1, keepdim=True))[:, self.of_bin]

        # The average is a step function: the weighted steps of all histograms, added up where they are.
        level = weight * (success + alpha) / (count + strength)
        rise = torch.where(self.follows, level - level.roll(1, -1), level)
        rises = torch.zeros_like(successes).scatter_add_(1, starts, rise)
        is_edge = torch.zeros_like(successes).scatter_add_(1, starts, weight * self.follows) > 0
        # Every row has at least one edge.
        is_edge[:, -1] = True
        levels = rises.cumsum(-1).clamp(0, 1)
        return [
            (inner[row, edge], torch.cat([levels[row, :1], levels[row, edge]]))
            for row, edge in enumerate(is_edge)
        ]

    def _sum(self, of_bins: Tensor) -> Tensor:
        """Sums ``(C, M)`` over the bins of each histogram."""
        sums = of_bins.new_zeros(len(of_bins), self.count)
        return sums.index_add_(1, self.of_bin, of_bins)


def _after_ties(ordered: Tensor) -> Tensor:
    """For each position in sorted rows, the next one ``(C, N + 1)`` that does not separate equal numbers."""
    classes, samples = ordered.shape
    position = torch.arange(samples + 1, device=ordered.device).repeat(classes, 1)
    position[:, 1:-1].masked_fill_(ordered[:, 1:] == ordered[:, :-1], samples)
    return position.flip(-1).cummin(-1).values.flip(-1)
