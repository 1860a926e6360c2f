"""How sure a figure is: resampled data, exact binomial intervals, and a test of calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.histogram import (
    Bins,
    ConfidenceHistogram,
    bin_of,
    bin_of_cells,
    equal_mass_ends,
    equal_width_edges,
)
from calibrant.metrics.accuracy import ClassCounts, mean_of_ious
from calibrant.metrics.calibration import ERRORS
from calibrant.metrics.classwise import ClassGaps
from calibrant.metrics.predictions import Predictions

Interval = tuple[float, float]

# Numbers of drawn weights held at once, (resamples, N).
_DRAWS = 1 << 21


class Resamples:
    """Confidences drawn again from the data, with replacement, many times at once.

    Everything is read off running sums along the sorted confidences: any bins, of equal width or equal
    mass, are differences of them, also where one element that was drawn thrice straddles two bins.

    Args:
        position: confidences of elements, or mean confidences of cells, rising, ``(n,)``.
        drawn: how often each was drawn, and the confidence and correctness that came with it, summed,
            ``(3, R, n)``.
    """

    most_bins: ClassVar[int] = 64  # doubled elements end the sweep earlier than on the data themselves
    cells: ClassVar[int] = 1 << 9  # what coarser cells change is far below the noise

    def __init__(self, position: Tensor, drawn: Tensor) -> None:
        self._sorted = position
        self._sums = F.pad(drawn.cumsum(2), (1, 0))

    @classmethod
    def of(cls, predictions: Predictions, weight: Tensor) -> Self:
        """Elements drawn as often as ``weight`` says, ``(R, N)``."""
        order = predictions.order
        confidence = predictions.confidence[order].double()
        values = (torch.ones_like(confidence), confidence, predictions.correct[order].double())
        weight = weight[:, order]
        return cls(confidence, torch.stack([weight * value for value in values]))

    def equal_width(self, bins: int) -> Bins:
        """Bins of equal width, each sum ``(R, bins)``."""
        edges = equal_width_edges(bins, self._sorted.device)
        return Bins(edges, *self._between(edges))

    def equal_mass(self, bins: int) -> Bins:
        """Groups of drawn elements whose sizes differ by at most one, each sum ``(R, bins)``."""
        count = self._sums[0]
        ends = equal_mass_ends(count[:, -1:], bins)
        element = (torch.searchsorted(count, ends) - 1).clamp_min_(0)  # whose copies reach the group's end
        element = element.expand(3, -1, -1)
        below, above = self._sums.gather(2, element), self._sums.gather(2, element + 1)
        share = (ends - below[0]) / (above - below)[0].clamp_min(1)
        sums = F.pad(below + share * (above - below), (1, 0)).diff(dim=2)
        return Bins(self._sorted.new_full((bins + 1,), torch.nan), *sums)

    def residual(self, cells: int) -> Tensor:
        """``(correct - confidence) / N`` in cells of ``[0, 1]``, ``(R, cells)``."""
        sums = self._between(equal_width_edges(cells, self._sorted.device))
        return (sums[2] - sums[1]) / sums[0].sum(1, keepdim=True)

    def _between(self, edges: Tensor) -> Tensor:
        ends = torch.searchsorted(self._sorted, edges[1:], right=True)
        ends[-1] = len(self._sorted)  # rounding may have put a confidence a little above 1
        below: Tensor = F.pad(self._sums[..., ends], (1, 0))
        return below.diff(dim=2)


def draws(samples: int, resamples: int, seed: int, numbers: int = 1) -> Iterator[Tensor]:
    """How often each of the samples is drawn, ``(r, N)`` float64 at a time, ``resamples`` rows in all.

    The same for the same samples and seed: two models judged on the same data are judged on the same draws.

    Args:
        samples: N.
        resamples: how many rows.
        seed: of the draws.
        numbers: that will be held beside each row; it bounds r as N does.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _DRAWS // max(samples, numbers))
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        drawn = torch.randint(samples, (count, samples), generator=generator)
        drawn += samples * torch.arange(count).unsqueeze(1)
        yield torch.bincount(drawn.flatten(), minlength=count * samples).view(count, samples).double()


def bootstrap(
    predictions: Predictions,
    *,
    bins: int,
    background: int | None,
    means: dict[str, Tensor],
    resamples: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Every figure on data drawn again with replacement.

    Args:
        predictions: the data.
        bins: as for the figures.
        background: as for `mean_iou`.
        means: further figures that are means over elements, each as its ``(N,)`` values.
        resamples: how many times.
        seed: of the draws.
        progress: called with the number of resamples done and their total.

    Returns:
        ``(resamples,)`` for each figure.
    """
    device = predictions.label.device
    columns = torch.stack(
        [-predictions.log_likelihood.double(), predictions.squared_error.double(), *means.values()], 1
    )
    dense, sparse = _class_residuals(predictions, bins)
    rows: list[dict[str, Tensor]] = []
    done = 0
    for weight in draws(predictions.samples, resamples, seed, predictions.num_classes * bins):
        weight = weight.to(device)
        figures = dict(zip(("nll", "brier", *means), (weight @ columns / predictions.samples).T, strict=True))
        figures["root_brier"] = figures["brier"].sqrt()
        counts = _drawn_counts(predictions, weight)
        figures["accuracy"] = counts.recognised.sum(1) / predictions.samples
        figures["balanced_accuracy"] = counts.accuracy.nanmean(1)
        figures["mean_iou"] = mean_of_ious(counts, None)
        if background is not None:
            figures["mean_iou_foreground"] = mean_of_ious(counts, background)
        drawn = Resamples.of(predictions, weight)
        figures |= {name: error(drawn, bins) for name, error in ERRORS.items()}
        figures["classwise_ece"] = _drawn_classwise(weight, dense, sparse, bins)
        rows.append(figures)
        done += len(weight)
        if progress is not None:
            progress(done, resamples)
    return {name: torch.cat([row[name] for row in rows]).cpu() for name in (rows[0] if rows else ())}


def _drawn_counts(predictions: Predictions, weight: Tensor) -> ClassCounts:
    def total(values: Tensor, index: Tensor) -> Tensor:
        return weight.new_zeros(len(weight), predictions.num_classes).index_add_(1, index, values)

    label = predictions.label
    return ClassCounts(
        weight.sum(1),
        total(weight, label),
        total(weight * predictions.correct, label),
        total(weight, predictions.prediction),
    )


Sparse = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def _class_residuals(predictions: Predictions, bins: int) -> tuple[Tensor, Sparse]:
    """``s_k - 1[y=k]`` of every element and class.

    Returns:
        ``(N, K)`` for probabilities in the first bin, which nearly all are, else 0; and for the others the
        element, the place among ``K * bins``, and the residual.
    """
    probability = predictions.rows.softmax(1)
    large = (probability > (1 - 1e-6) / bins).nonzero(as_tuple=True)
    values = probability[large].double()
    edges = equal_width_edges(bins, values.device)
    place = large[1] * bins + bin_of(values, edges)
    hit = (large[1] == predictions.label[large[0]]).double()
    dense = probability.scatter_add_(1, predictions.label.unsqueeze(1), -torch.ones_like(probability[:, :1]))
    dense[large] = 0
    return dense, (large[0], place, values - hit)


def _drawn_classwise(weight: Tensor, dense: Tensor, sparse: Sparse, bins: int) -> Tensor:
    element, place, residual = sparse
    classes = dense.shape[1]
    gap = weight.new_zeros(len(weight), classes * bins)
    gap.index_add_(1, place, weight[:, element] * residual)
    gap = gap.view(len(weight), classes, bins)
    gap[:, :, 0] += weight.to(dense.dtype) @ dense
    return gap.abs().sum((1, 2)) / (weight.sum(1) * classes)


def bootstrap_histogram(
    histogram: ConfidenceHistogram,
    counts: ClassCounts,
    *,
    bins: int,
    resamples: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Figures on data drawn again from sums, ``(resamples,)`` each: of the top class, and balanced accuracy.

    For data too large to be drawn element by element, and for streams. Counts are drawn from Poisson
    distributions, which for so many elements is as good as drawing a fixed number.
    """
    generator = torch.Generator().manual_seed(seed)
    filled = (histogram.count > 0).cpu()
    count, confidence, correct = (values.cpu()[filled] for values in histogram.tensors()[1:])
    position = confidence / count
    rows: list[dict[str, Tensor]] = []
    for start in range(0, resamples, step := max(1, _DRAWS // len(count))):
        shape = (min(step, resamples - start), len(count))
        right = torch.poisson(correct.expand(shape), generator)
        drawn = right + torch.poisson((count - correct).expand(shape), generator)
        # Of a handful of elements nothing at all may be drawn: the data themselves stand in.
        nothing = drawn.sum(1, keepdim=True) == 0
        right, drawn = torch.where(nothing, correct, right), torch.where(nothing, count, drawn)
        resampled = Resamples(position, torch.stack([drawn, drawn * position, right]))
        figures = {name: error(resampled, bins) for name, error in ERRORS.items()}
        figures["accuracy"] = right.sum(1) / drawn.sum(1)
        recognised, missed = (
            torch.poisson(expected.cpu().expand(shape[0], -1), generator)
            for expected in (counts.recognised, counts.occurs - counts.recognised)
        )
        figures["balanced_accuracy"] = (recognised / (recognised + missed)).nanmean(1)
        rows.append(figures)
        if progress is not None:
            progress(start + shape[0], resamples)
    return {name: torch.cat([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def interval(estimate: float, replicates: Tensor, level: float, *, debiased: bool = False) -> Interval:
    """A confidence interval for what the estimate estimates, from the same figure on resampled data.

    The basic bootstrap: resampled figures stray from the estimate as the estimate strays from the truth.
    That takes account of bias: the error of a finite sample is above that of the model, a resampled error is
    above that of the sample by about as much, so an interval can lie wholly below its estimate.

    Args:
        estimate: the figure.
        replicates: the same on resampled data, ``(R,)``.
        level: of the interval.
        debiased: whether the estimate has no bias left; only the spread of the replicates then counts.
    """
    tail = (1 - level) / 2
    if debiased:
        replicates = replicates - replicates.mean() + estimate
    low, high = torch.quantile(replicates, torch.tensor([tail, 1 - tail], dtype=replicates.dtype)).tolist()
    return 2 * estimate - high, 2 * estimate - low


def binomial_interval(successes: Tensor, trials: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Clopper-Pearson interval of a probability, from counts of successes in trials, elementwise.

    >>> low, high = binomial_interval(torch.tensor([8.0]), torch.tensor([10.0]))
    >>> [round(v.item(), 4) for v in (low, high)]
    [0.4439, 0.9748]
    """
    from scipy.special import betaincinv  # type: ignore[import-untyped]  # half a second to import: only when asked for

    tail = (1 - level) / 2
    k, n = successes.double().cpu().numpy(), trials.double().cpu().numpy()
    low = torch.as_tensor(betaincinv(k.clip(1e-300), n - k + 1, tail))
    high = torch.as_tensor(betaincinv(k + 1, (n - k).clip(1e-300), 1 - tail))
    successes, trials = successes.double().cpu(), trials.double().cpu()
    return torch.where(successes > 0, low, 0.0), torch.where(successes < trials, high, 1.0)


def consistency_band(bins: Bins, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Where the accuracy of each bin would fall, were the model calibrated: binomial quantiles.

    Bröcker and Smith, *Increasing the Reliability of Reliability Diagrams*, 2007. The confidences of a bin
    are taken to be their mean, which makes the band wider by about a hundredth, never narrower.

    Args:
        bins: M of them.
        level: how probable it is that a calibrated model's accuracy falls into its bin's band.

    Returns:
        Lower and upper ends, each ``(M,)``.

    >>> one = Bins(torch.tensor([0.0, 1.0]), *torch.tensor([[100.0], [80.0], [70.0]]))
    >>> low, high = consistency_band(one)
    >>> low.item(), high.item()
    (0.72, 0.88)
    """
    from scipy.stats import binom  # type: ignore[import-untyped]

    tail = (1 - level) / 2
    count = bins.count.cpu().clamp_min(1).numpy()
    probability = (bins.confidence / bins.count.clamp_min(1)).clamp(0, 1).cpu().numpy()
    low, high = (torch.from_numpy(binom.ppf(q, count, probability) / count) for q in (tail, 1 - tail))
    return low.clamp_min(0), high


@dataclass(frozen=True)
class CalibrationTest:
    """The outcome of `calibration_test`.

    Attributes:
        statistic: the ECE of the data.
        p_value: how probable an ECE at least as large is, were the model calibrated.
    """

    statistic: float
    p_value: float


def calibration_test(
    source: Predictions | ConfidenceHistogram, *, bins: int = 15, simulations: int = 999, seed: int = 0
) -> CalibrationTest:
    """Whether the data could come from a model whose confidence is right.

    Correctness is drawn anew, with each confidence as its probability, and the ECE of what was drawn
    compared with that of the data (consistency resampling: Bröcker and Smith 2007; Vaicenavicius et
    al., AISTATS 2019). Drawn from the cells of a histogram, at their mean confidence, so the cost does
    not grow with the data.

    Args:
        source: predictions, or a histogram.
        bins: of the ECE, a divisor of 300.
        simulations: how many times to draw; the smallest p-value is ``1 / (simulations + 1)``.
        seed: of the draws.

    >>> logits = torch.tensor([[0.5, 0.0]]).expand(1000, 2)
    >>> half = torch.arange(1000) % 2
    >>> calibration_test(Predictions.of(logits, half)).p_value
    0.001
    """
    histogram = source if isinstance(source, ConfidenceHistogram) else source.histogram
    statistic = float(ERRORS["ece"](histogram, bins))
    simulated = calibrated_gaps(histogram, bins=bins, simulations=simulations, seed=seed).abs().sum(1)
    # Equal up to rounding counts as equal: a model that is always sure and right has only ties.
    reached = int((simulated / histogram.samples.cpu() >= statistic - 1e-12).sum())
    return CalibrationTest(statistic, (1 + reached) / (1 + simulations))


def calibrated_gaps(histogram: ConfidenceHistogram, *, bins: int, simulations: int, seed: int) -> Tensor:
    """Correctness minus confidence, summed over each bin, had the model been calibrated.

    Returns:
        ``(simulations, bins)``, on the CPU.
    """
    filled = (histogram.count > 0).cpu()
    count, confidence, _ = (values.cpu()[filled] for values in histogram.tensors()[1:])
    shape = (simulations, len(count))
    probability = (confidence / count).clamp(0, 1).expand(shape)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.binomial(count.expand(shape), probability, generator=generator)
    place = bin_of_cells(bins, count.device)[filled]
    return torch.zeros(simulations, bins, dtype=drawn.dtype).index_add_(1, place, drawn - confidence)


@torch.no_grad()
def calibrated_classwise_ece(predictions: Predictions, *, bins: int, simulations: int, seed: int) -> Tensor:
    """Class-wise errors of labels drawn from the predicted probabilities, ``(simulations,)``."""
    probability = predictions.rows.softmax(1)
    # On the CPU, as all draws: the same wherever the logits are.
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(probability.cpu(), simulations, replacement=True, generator=generator)
    labels = labels.to(probability.device)
    edges = equal_width_edges(bins, probability.device)
    place = labels * bins + bin_of(probability.gather(1, labels).double(), edges)
    gaps = ClassGaps.of(predictions.elements, bins)
    own = torch.bincount(
        predictions.label * bins
        + bin_of(probability.gather(1, predictions.label.unsqueeze(1)).double(), edges).squeeze(1),
        minlength=gaps.gap.numel(),
    )
    expected = gaps.gap.flatten() + own  # the probabilities alone, without what occurred
    errors = [
        (expected - torch.bincount(column, minlength=gaps.gap.numel())).abs().sum()
        for column in place.unbind(1)
    ]
    return torch.stack(errors).cpu() / gaps.gap.shape[0] / predictions.samples
