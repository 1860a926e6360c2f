"""Confidence and correctness as additive statistics: for ECE, reliability diagrams and AdaFocal's bins.

`ConfidenceHistogram` has a fixed size. `Outcomes` keeps every element up to a limit. `RankedSums` makes the
exact bins of equal mass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import label, whole_number
from calibrant.distributed import all_reduce, several_processes
from calibrant.kernels import Block, visit
from calibrant.kernels.block import Scratch
from calibrant.kernels.workers import sum_blocks
from calibrant.layout import Elements, Index, computing_dtype
from calibrant.statistics import Statistics, sum_dtype

_UNIFORM = 300  # so that 10, 12, 15, 20, 25, 30, 50 and 100 equal bins are unions of cells
_PER_UNIT = 64  # cells per unit of log-odds: over-confident networks put much data into the last 1/300
_LOW, _HIGH = -14, 30  # log-odds covered: confidence from 1e-6 to 1 - 1e-13

_SLACK = 1 + 2.0**-20
"""Confidences up to an edge of equal width times this are in the bin below it: 1/5, which trees and rounded
probabilities have, is in the same bin whether rounding made it a little smaller or larger."""

_EQUAL = 2.0**-48
"""Confidences in float64 that differ by less, relatively, are equal but for rounding."""


@lru_cache
def cell_edges(device: torch.device) -> Tensor:
    """Edges of the cells ``(lo, hi]``: multiples of 1/300, and steps even in log-odds."""
    # Computed on the CPU, also for a GPU: a GPU divides by multiplying with the reciprocal, so that edges of
    # cells and bins that should be equal would differ in the last place.
    uniform = torch.arange(_UNIFORM + 1, dtype=torch.float64, device="cpu") / _UNIFORM
    # Half a step off, so that the two sets have no edge in common: both would contain 1/2.
    odds = torch.arange(_LOW * _PER_UNIT, _HIGH * _PER_UNIT, dtype=torch.float64, device="cpu")
    edges = torch.cat([uniform, ((odds + 0.5) / _PER_UNIT).sigmoid()]).sort().values
    return edges.to(device, sum_dtype(device))


def _cell_of(confidence: Tensor) -> Tensor:
    """The cell of each confidence: the number of edges below it, uniform ones and those even in log-odds."""
    odds = torch.logit(confidence).mul_(_PER_UNIT).sub_(0.5 + _LOW * _PER_UNIT).ceil_()
    odds.clamp_(0, (_HIGH - _LOW) * _PER_UNIT)
    cell = (confidence * (_UNIFORM / _SLACK)).ceil_().add_(odds).sub_(1)
    return _corrected(cell, confidence, last_of_cells(confidence.dtype, confidence.device))


def _corrected(bins: Tensor, values: Tensor, edges: Tensor) -> Tensor:
    """The bins ``(lo, hi]`` of values ``(N,)``, from bins found by arithmetic, which may miss by one.

    Arithmetic and comparisons with the two nearest edges take half the time of a search through the edges.
    """
    near = bins.long().clamp_(0, len(edges) - 2)  # as integers, which cannot be NaN
    # Comparisons as numbers, and index_select: booleans and indexing by brackets take four times longer.
    missed = torch.gt(values, edges.index_select(0, near + 1), out=torch.empty_like(bins))
    bins.add_(missed)
    bins.sub_(torch.le(values, edges.index_select(0, near), out=missed))
    return bins.long().clamp_(0, len(edges) - 2)


@lru_cache
def last_of_cells(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The largest number of a type that is not above each edge of the cells, with the slack of some."""
    edges = cell_edges(device)
    of_bins = torch.isin(edges, equal_width_edges(_UNIFORM, device))
    return rounded_down(torch.where(of_bins, edges * _SLACK, edges).clamp_max(1), dtype)


def rounded_down(edges: Tensor, dtype: torch.dtype) -> Tensor:
    """Edges rounded down to a type, so that comparing numbers of that type with them stays exact.

    >>> rounded_down(torch.tensor([0.1], dtype=torch.float64), torch.float32).double() <= 0.1
    tensor([True])
    """
    rounded = edges.to(dtype)
    down = torch.full_like(rounded, -torch.inf)
    return torch.where(rounded.to(edges.dtype) > edges, rounded.nextafter(down), rounded)


def equal_width_edges(bins: int, device: torch.device) -> Tensor:
    """Edges of ``bins`` bins of equal width on ``[0, 1]``, ``(bins + 1,)``."""
    bins = whole_number("bins", bins)
    return (torch.arange(bins + 1, dtype=torch.float64, device="cpu") / bins).to(device, sum_dtype(device))


def bin_of(values: Tensor, edges: Tensor) -> Tensor:
    """The bin ``(lo, hi]`` of each value in ``[0, 1]``, by the edges of bins of equal width.

    >>> tenths = torch.tensor([0.1 + 0.2, 0.3, 0.29], dtype=torch.float64)  # the first is slightly above 0.3
    >>> bin_of(tenths, equal_width_edges(10, tenths.device))
    tensor([2, 2, 2])
    """
    flat = values.flatten()
    near = (flat * ((len(edges) - 1) / _SLACK)).ceil_().sub_(1)
    return _corrected(near, flat, edges * _SLACK).view(values.shape)


def bin_with_width(values: Tensor, edges: Tensor) -> Tensor:
    """The bin ``(lo, hi]`` in which each value is looked up, by edges of any widths; never one without width.

    Values below the lowest edge are in the first bin with a width, values above the highest in the last.

    >>> bin_with_width(torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.2, 0.5, 0.7]))
    tensor([1, 1, 2])
    """
    # Above the highest edge, its first occurrence ends the last bin with a width; a value on or below the
    # lowest edge counts as just above it, where the first such bin begins.
    lowest = torch.nextafter(edges[0], edges[-1])
    inside = values.to(edges.dtype).clamp(lowest, edges[-1])
    # NaN would be sorted behind everything: it has no bin, but must not end in an index error. The remainder
    # gives the last bin where all edges are equal.
    bins = len(edges) - 1
    return (torch.bucketize(inside, edges) - 1).clamp_max(bins - 1).remainder(bins)


def bin_of_cells(bins: int, device: torch.device) -> Tensor:
    """The equal-width bin that each cell lies in, ``(cells,)``."""
    if label("bins", bins) < 1 or _UNIFORM % bins:
        divisors = [n for n in range(1, _UNIFORM + 1) if _UNIFORM % n == 0]
        raise ValueError(f"equal-width bins must be a divisor of 300 ({divisors}), got {bins}")
    upper = cell_edges(device)[1:]
    return torch.bucketize(upper, equal_width_edges(bins, device)[1:-1])


def equal_mass_ends(samples: Tensor, bins: int) -> Tensor:
    """Where each group ends when samples are divided into groups whose sizes differ by at most one."""
    bins = whole_number("bins", bins)
    # samples is a scalar or a column of totals.
    group = torch.arange(1, bins + 1, dtype=sum_dtype(samples.device), device=samples.device)
    size = (samples / bins).floor()
    return group * size + torch.minimum(group, samples - bins * size)


def _empty_sums(device: torch.device) -> Tensor:
    return torch.zeros(3, len(cell_edges(device)) - 1, dtype=sum_dtype(device), device=device)


def _tally(confidence: Tensor, correct: Tensor, valid: Tensor | None) -> Tensor:
    """The cells' sums ``(3, cells)`` of count, confidence and correctness, of elements ``(n,)``."""
    empty = _empty_sums(confidence.device)
    if valid is None:
        weight = empty.new_ones(()).expand(len(confidence))
    else:
        weight = valid.to(empty.dtype)
        confidence = torch.where(valid, confidence, 1)
    cells = empty.shape[1]
    # The wrong elements of all cells, then the right ones.
    place = _cell_of(confidence) + cells * correct.long()
    sums = empty.new_zeros(2, 2 * cells)
    for total, values in zip(sums, (weight, confidence * weight), strict=True):
        total.scatter_add_(0, place, values)  # twice as fast as index_add_
    wrong, right = sums.view(2, 2, cells).unbind(1)
    return torch.stack([*(wrong + right), right[0]])


def _outcomes(elements: Elements) -> tuple[Tensor, Tensor]:
    """The probability of the top class, and whether it is the true one, of all elements ``(A[, S])``."""
    logits, shape = elements.logits, elements.valid.shape
    confidence = torch.empty(shape, dtype=computing_dtype(logits), device=logits.device)
    correct = torch.empty(shape, dtype=torch.bool, device=logits.device)

    def fill(index: Index, block: Block) -> list[Tensor]:
        place = index[:1] + index[2:]
        confidence[place] = block.confidence.squeeze(1)
        correct[place] = block.correct.squeeze(1)
        return []

    visit(elements, fill)
    return confidence, correct


@dataclass(frozen=True, eq=False)
class Bins:
    """Confidence and correctness in M bins; may have leading axes, for resamples of the data.

    Attributes:
        edges: ``(M + 1,)``, never decreasing; bin b holds confidences in ``(edges[b], edges[b+1]]``. A bin of
            equal width also holds those that rounding took slightly above its upper edge, and an exact bin of
            equal mass may hold some of the elements at ``edges[b]``.
        count: ``(M,)``, elements per bin.
        confidence: ``(M,)``, summed confidence per bin.
        correct: ``(M,)``, correct elements per bin; a fraction where a bin has a share of equal confidences.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    correct: Tensor

    @property
    def gap(self) -> Tensor:
        """Mean confidence minus accuracy per bin, 0 where a bin is empty; above 0: over-confident."""
        return (self.confidence - self.correct) / self.count.clamp_min(1)


class RankedSums:
    """Count, confidence and correctness summed along rising confidences, also for many resamples at once.

    Bins are differences of running sums. Elements of equal confidence, up to rounding, form one entry. A
    boundary between bins of equal mass that cuts an entry divides it in proportion: each side gets the mean
    correctness of the entry. No bin depends on the order of the data.

    Args:
        confidence: confidences in rising order, ``(n,)``.
        sums: count, summed confidence and summed correctness at each of them, ``(3, n)`` or ``(3, R, n)``.

    Attributes:
        running: the sums of the 0, 1, … n entries of lowest confidence, ``(3, n + 1)`` or ``(3, R, n + 1)``.
        derived: what several metrics derive from these sums and keep here, by name.

    >>> confidence, correct = torch.tensor([0.6, 0.9, 0.9, 0.9]), torch.tensor([1, 1, 0, 0])
    >>> bins = RankedSums.of_outcomes(confidence, correct).equal_mass(2)
    >>> bins.count.tolist(), [round(value, 4) for value in bins.correct.tolist()]
    ([2.0, 2.0], [1.3333, 0.6667])
    """

    def __init__(self, confidence: Tensor, sums: Tensor) -> None:
        running = sums.cumsum(-1)
        apart = confidence.diff() > _EQUAL * confidence[1:]
        ends = F.pad(apart, (0, 1), value=True).nonzero().squeeze(1)
        if len(ends) < len(confidence):
            # index_select: indexing by brackets takes several times longer.
            confidence, running = confidence.index_select(0, ends), running.index_select(-1, ends)
        self.derived: dict[str, Any] = {}
        self._confidence = confidence
        self.running = F.pad(running, (1, 0))

    @classmethod
    def of_outcomes(cls, confidence: Tensor, correct: Tensor) -> Self:
        """The sums of confidences ``(N,)`` in any order, and whether each prediction is right, ``(N,)``."""
        confidence, order = confidence.to(sum_dtype(confidence.device)).sort()
        correct = correct.to(confidence.dtype).index_select(0, order)
        return cls(confidence, torch.stack([torch.ones_like(confidence), confidence, correct]))

    def folded(self) -> RankedSums:
        """The sums of the predicted class, if these are the sums of the class "yes" of two.

        Up to a probability of 1/2, "no" is predicted: its probability is the rest, and it is right where
        "yes" is not.
        """
        no = self._confidence <= 0.5
        confidence, order = torch.where(no, 1 - self._confidence, self._confidence).sort()
        count, forecast, outcome = self.running.diff(dim=-1)
        sums = count, torch.where(no, count - forecast, forecast), torch.where(no, count - outcome, outcome)
        return RankedSums(confidence, torch.stack(sums).index_select(-1, order))

    def equal_width(self, bins: int) -> Bins:
        """Bins of equal width on ``(0, 1]``, any number of them."""
        edges, places = self._at_equal_widths(bins)
        return Bins(edges, *self.running.index_select(-1, places).diff(dim=-1))

    def _at_equal_widths(self, bins: int) -> tuple[Tensor, Tensor]:
        """The edges of bins of equal width, and the number of entries below each of them."""
        edges = equal_width_edges(bins, self._confidence.device)
        places = torch.searchsorted(self._confidence, edges * _SLACK, right=True)
        places[0] = 0
        places[-1] = len(self._confidence)  # by rounding a confidence may be slightly above 1
        return edges, places

    def equal_mass(self, bins: int) -> Bins:
        """Bins of equal counts: elements sorted and cut into groups whose sizes differ by at most one.

        The larger groups come first. With fewer elements than bins, the last bins are empty. Edges lie
        halfway between the last confidence of a bin and the first of the next, so that rounding does not
        decide the side of an element; where both are equal, they are the edge. The outer edges are the least
        and the greatest confidence.
        """
        count = self.running[0]
        ends = equal_mass_ends(count[..., -1:], bins)
        entry = (torch.searchsorted(count, ends) - 1).clamp_min_(0)  # holds the last element of the bin
        place = entry.expand(3, *entry.shape)
        below, above = self.running.gather(-1, place), self.running.gather(-1, place + 1)
        fraction = (ends - below[0]) / (above - below)[0].clamp_min(1)
        sums = F.pad(below + fraction * (above - below), (1, 0)).diff(dim=-1)
        following = torch.where(fraction < 1, entry, entry + 1).clamp_max(len(self._confidence) - 1)
        edges = (self._confidence[entry] + self._confidence[following]) / 2
        first = self._confidence[:1].expand(*entry.shape[:-1], 1)
        return Bins(torch.cat([first, edges], -1), *sums)

    def undivided_equal_mass(self, bins: int) -> tuple[Tensor, ...]:
        """Count, confidence and correctness in bins of equal counts, as far as whole entries allow.

        An entry is in the bin in which its middle element would be. The noise of different bins is then
        independent, also where many confidences are equal; some bins may be empty.
        """
        count = self.running[0]
        middle = count[..., :-1] + (count.diff(dim=-1) - 1) / 2
        entries = torch.searchsorted(middle.contiguous(), equal_mass_ends(count[..., -1:], bins))
        ends = self.running.gather(-1, entries.expand(3, *entries.shape))
        return F.pad(ends, (1, 0)).diff(dim=-1).unbind()


@dataclass(frozen=True, eq=False)
class ConfidenceHistogram(Statistics):
    """Confidence and correctness in about three thousand fine cells, whatever the number of elements.

    Equal-width figures pooled from it are exact; equal-mass figures are exact up to cells that
    straddle two bins.

    Attributes:
        count: ``(cells,)``, elements per cell.
        confidence: ``(cells,)``, summed confidence per cell.
        correct: ``(cells,)``, number of correct elements per cell.

    >>> logits, target = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    >>> from calibrant.layout import arrange
    >>> histogram = ConfidenceHistogram.of(arrange(logits, target))
    >>> histogram.equal_width(2).count.tolist(), histogram.correct.sum().item()
    ([0.0, 2.0], 1.0)
    """

    most_bins: ClassVar[int] = 512
    cells: ClassVar[int] = 1 << 14

    count: Tensor
    confidence: Tensor
    correct: Tensor

    @classmethod
    def empty(cls, device: torch.device) -> Self:
        """The histogram of no elements."""
        sums = _empty_sums(device)
        return cls(sums[0].sum(), *sums)

    @classmethod
    @torch.no_grad()
    def of(cls, elements: Elements) -> Self:
        """The histogram of the top class's probability, over the elements that are not ignored."""
        return cls.of_outcomes(*_outcomes(elements), None if elements.all_valid else elements.valid)

    @classmethod
    @torch.no_grad()
    def of_outcomes(cls, confidence: Tensor, correct: Tensor, valid: Tensor | None = None) -> Self:
        """The histogram of confidences of any shape, and of whether each prediction is right.

        ``valid`` says which elements count; None for all.
        """
        confidence, correct = confidence.flatten(), correct.flatten()
        valid = None if valid is None else valid.flatten()

        def tally(index: Index, _: Scratch) -> list[Tensor]:
            part = index[-1]
            return [_tally(confidence[part], correct[part], None if valid is None else valid[part])]

        # Blocks as large as those of logits with 8 classes: the dozen temporaries then stay in a CPU's cache.
        (sums,) = sum_blocks(tally, confidence.expand(1, 8, -1))
        return cls(sums[0].sum(), *sums)

    def equal_width(self, bins: int) -> Bins:
        """Bins of equal width on ``(0, 1]``, exact; their number must divide 300."""
        return self._pool(bin_of_cells(bins, self.count.device), equal_width_edges(bins, self.count.device))

    def equal_mass(self, bins: int) -> Bins:
        """Bins of equal counts, as far as whole cells allow.

        A cell goes where its middle element would go if the elements were sorted and cut into groups
        whose sizes differ by at most one. Where more elements share a cell than a bin should hold,
        some bins stay empty: they have no width.
        """
        ends = equal_mass_ends(self.samples, bins)[:-1]
        before = self.count.cumsum(0) - self.count
        middle = before + (self.count - 1) / 2
        bin_of_cell = torch.bucketize(middle, ends, right=True)

        cells = last_of_cells(self.count.dtype, self.count.device)
        filled = self.count > 0
        lowest = torch.where(filled, cells[:-1], torch.inf).min().clamp_max(1)
        upper = lowest.expand(bins).scatter_reduce(
            0, bin_of_cell, torch.where(filled, cells[1:], lowest), "amax"
        )
        return self._pool(bin_of_cell, torch.cat([lowest.view(1), upper.cummax(0).values]))

    @cached_property
    def ranked(self) -> RankedSums:
        """The cells that hold elements, each at its mean confidence."""
        count, confidence, correct = (values[self.count > 0] for values in self.tensors()[1:])
        return RankedSums(confidence / count, torch.stack([count, confidence, correct]))

    def residual(self, cells: int) -> Tensor:
        """``(correct - confidence) / N`` spread over cells of ``[0, 1]``.

        All elements of a histogram cell are placed at its mean confidence.
        """
        position = self.confidence / self.count.clamp_min(1)
        return spread(position, (self.correct - self.confidence) / self.samples, cells)

    def _pool(self, bin_of_cell: Tensor, edges: Tensor) -> Bins:
        def total(values: Tensor) -> Tensor:
            return values.new_zeros(len(edges) - 1).index_add_(0, bin_of_cell, values)

        return Bins(edges, total(self.count), total(self.confidence), total(self.correct))


@dataclass(frozen=True, eq=False)
class Outcomes(Statistics):
    """Confidence and correctness of every element, up to 2²⁰ elements; a histogram beyond.

    Equal-mass bins are exact up to the limit, also where processes pool their elements: the limit holds for
    all of them together. Beyond it, the elements move into a `ConfidenceHistogram`, whose bins hold whole
    cells. Ignored elements do not count, with one exception: a single batch from a GPU counts with all its
    elements, because counting the others would make the host wait.

    Attributes:
        histogram: the elements that exceeded the limit; empty up to it.
        parts: the other elements, tensors ``(2, n)`` of confidence and correctness. From a GPU, ignored
            elements are among them, with confidence 0: leaving them out would make every batch wait for the
            device.

    >>> from calibrant.layout import arrange
    >>> outcomes = Outcomes.of(arrange(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])))
    >>> (outcomes + outcomes).equal_mass(2).correct.tolist()
    [0.0, 2.0]
    """

    limit: ClassVar[int] = 1 << 20

    histogram: ConfidenceHistogram
    parts: tuple[Tensor, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, elements: Elements) -> Self:
        """The outcomes of the top class, over the elements that are not ignored."""
        valid, device = elements.valid, elements.logits.device
        if valid.numel() > cls.limit and (device.type != "cpu" or int(valid.sum()) > cls.limit):
            histogram = ConfidenceHistogram.of(elements)
            return cls(histogram.samples, histogram, ())
        pairs = torch.stack([each.to(sum_dtype(device)) for each in _outcomes(elements)])
        if not elements.all_valid:
            pairs = pairs[:, valid] if device.type == "cpu" else torch.where(valid, pairs, 0)
        return cls(valid.sum(dtype=pairs.dtype), ConfidenceHistogram.empty(device), (pairs.flatten(1),))

    @property
    def pairs(self) -> Tensor:
        """Confidence and correctness of the elements that are not in the histogram, ``(2, n)``."""
        pairs = torch.cat([self.samples.new_empty(2, 0), *self.parts], 1)
        return pairs[:, pairs[0] != 0]

    def __add__(self, other: Self) -> Self:
        samples, histogram = self.samples + other.samples, self.histogram + other.histogram
        joined = type(self)(samples, histogram, (*self.parts, *other.parts))
        if sum(part.shape[1] for part in joined.parts) > self.limit:
            pairs = joined.pairs
            return joined.counted() if pairs.shape[1] > self.limit else replace(joined, parts=(pairs,))
        # Only parts of similar size are joined, so that adding many batches does not copy all at each.
        parts = list(joined.parts)
        while len(parts) > 1 and parts[-2].shape[1] <= parts[-1].shape[1]:
            parts[-2:] = [torch.cat(parts[-2:], 1)]
        return replace(joined, parts=tuple(parts))

    def counted(self) -> Self:
        """The same elements, all in the histogram."""
        return replace(
            self, histogram=self.histogram + ConfidenceHistogram.of_outcomes(*self.pairs), parts=()
        )

    def all_reduce(self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> Self:
        """The elements of all processes; see `Statistics.all_reduce`. Takes two collective calls."""
        rank = dist.get_rank(group) if several_processes() else -1
        if rank < 0:  # one process, or one that is not in the group
            return self
        pairs = self.pairs
        sizes = self.samples.new_zeros(dist.get_world_size(group))
        sizes[rank] = pairs.shape[1]
        numbers = torch.cat([self.samples.view(1), self.histogram.samples.view(1), sizes])
        numbers = all_reduce(numbers, group=group, timeout=timeout)
        samples, in_histogram = numbers[:2]
        starts = [0, *numbers[2:].long().cumsum(0).tolist()]
        if in_histogram > 0 or starts[-1] > self.limit:
            histogram = self.counted().histogram.all_reduce(group, timeout=timeout)
            return type(self)(samples, histogram, ())
        if starts[-1] > 0:  # each process fills its own columns: the sum is what all have
            everything = pairs.new_zeros(2, starts[-1])
            everything[:, starts[rank] : starts[rank + 1]] = pairs
            pairs = all_reduce(everything, group=group, timeout=timeout)
        return type(self)(samples, self.histogram, (pairs,))

    @cached_property
    def _pooling(self) -> RankedSums | ConfidenceHistogram:
        """What bins are made from."""
        if self.histogram.samples > 0:
            return self.counted().histogram
        return RankedSums.of_outcomes(*self.pairs)

    def equal_width(self, bins: int) -> Bins:
        """Bins of equal width on ``(0, 1]``, exact; their number must divide 300, as beyond the limit."""
        return self._pooling.equal_width(bins)

    def equal_mass(self, bins: int) -> Bins:
        """Bins of equal counts: exact up to the limit; see `RankedSums.equal_mass`."""
        pooled = self._pooling.equal_mass(bins)
        if isinstance(self._pooling, ConfidenceHistogram):
            return pooled
        # Just below the least confidence, so that a first bin of equal confidences has a width.
        first = torch.nextafter(pooled.edges[:1], torch.zeros_like(pooled.edges[:1]))
        return replace(pooled, edges=torch.cat([first, pooled.edges[1:]]))


def spread(position: Tensor, values: Tensor, cells: int) -> Tensor:
    """Values at positions in ``[0, 1]``, each divided between the two nearest cell centres, ``(cells,)``."""
    scaled = position * cells - 0.5
    left = scaled.floor()
    to_right = scaled - left
    low = left.long().clamp_(0, cells - 1)
    high = (left.long() + 1).clamp_(0, cells - 1)
    # Not `bincount`, which is not deterministic on a GPU.
    total = values.new_zeros(cells).index_add_(0, low, values * (1 - to_right))
    return total.index_add_(0, high, values * to_right)
