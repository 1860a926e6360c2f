"""Confidence intervals, consistency bands and a test of calibration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calibrant.arguments import label, whole_number
from calibrant.histogram import Bins, ConfidenceHistogram, bin_of, bin_of_cells, equal_width_edges
from calibrant.metrics.calibration import ece_of
from calibrant.metrics.classwise import ClassGaps
from calibrant.metrics.predictions import Predictions

Interval = tuple[float, float]

# Simulations of a calibrated model, for the mean error by chance.
_SIMULATIONS = 100
# The bias of the error of a calibrated model, over the bias that resamples add to it. The gap of a bin is
# chance alone then, and a resample has the chance of the sample and its own: √2 times as much.
_BIAS_OF_RESAMPLES = 2**0.5 + 1
# Numbers of several simulations at once, which stay in the processor's cache.
_AT_ONCE = 1 << 16


def interval(estimate: float, replicates: Tensor, level: float, *, debiased: bool = False) -> Interval:
    """The basic bootstrap interval: the quantiles of the replicates, reflected at the estimate.

    It corrects for bias: if the estimate of a resample is too large, that of the sample is taken to be too
    large by as much. If the estimate is ``debiased``, only the spread of the replicates ``(R,)`` is used.
    """
    if debiased:
        replicates = replicates - replicates.mean() + estimate
    low, high = percentile_interval(replicates, level)
    return 2 * estimate - high, 2 * estimate - low


def error_interval(estimate: float, replicates: Tensor, level: float) -> Interval:
    """The interval of a calibration error, or of the difference of two.

    The error of a finite sample is larger than that of the model. By how much is not known: not at all where
    the gaps of all bins are clear, and by `_BIAS_OF_RESAMPLES` times what resamples add if the model is
    calibrated. Whatever lies between no correction and a full one is in the interval.
    """
    low, high = interval(estimate, replicates, level, debiased=True)
    bias = _BIAS_OF_RESAMPLES * float(replicates.mean() - estimate)
    return min(low, low - bias), max(high, high - bias)


def least_resamples(level: float) -> int:
    """The fewest resamples that tell whether a difference is significant: one lies outside of each end.

    >>> least_resamples(0.95)
    40
    """
    return math.ceil(2 / (1 - level) - 1e-6)


def percentile_interval(replicates: Tensor, level: float) -> Interval:
    """The quantiles of the replicates ``(R,)``, for estimates near a bound that a reflection would cross."""
    tail = (1 - level) / 2
    low, high = torch.quantile(replicates, replicates.new_tensor([tail, 1 - tail])).tolist()
    return low, high


def normal_interval(mean: float, deviation: float, level: float) -> Interval:
    """The interval of a mean whose standard deviation is known, by the normal distribution."""
    quantile = torch.erfinv(torch.tensor(level, dtype=torch.float64, device="cpu"))
    reach = math.sqrt(2) * float(quantile) * deviation
    return mean - reach, mean + reach


def student_interval(mean: float, error: float, count: float, level: float) -> Interval:
    """The interval of a mean of ``count`` numbers whose standard error is estimated, by Student's t.

    >>> [round(end, 2) for end in student_interval(0.0, 1.0, 3, 0.95)]
    [-4.3, 4.3]
    """
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # here: it takes half a second

    reach = float(stdtrit(count - 1, (1 + level) / 2)) * error
    return mean - reach, mean + reach


def binomial_interval(successes: Tensor, trials: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Clopper-Pearson interval of a probability, from counts of successes in trials, elementwise.

    >>> low, high = binomial_interval(torch.tensor([8.0]), torch.tensor([10.0]))
    >>> [round(v.item(), 4) for v in (low, high)]
    [0.4439, 0.9748]
    """
    from scipy.special import betaincinv

    tail = (1 - level) / 2
    k, n = successes.double().cpu().numpy(), trials.double().cpu().numpy()
    low = torch.as_tensor(betaincinv(k.clip(1e-300), n - k + 1, tail), device="cpu")
    high = torch.as_tensor(betaincinv(k + 1, (n - k).clip(1e-300), 1 - tail), device="cpu")
    successes, trials = successes.double().cpu(), trials.double().cpu()
    return torch.where(successes > 0, low, 0.0), torch.where(successes < trials, high, 1.0)


def consistency_band(bins: Bins, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """The range of accuracies of a calibrated model in each bin: binomial quantiles.

    Every element of a bin is given the mean confidence of the bin. That widens the band by about 1 % and
    never narrows it. Bröcker and Smith, *Increasing the Reliability of Reliability Diagrams*, 2007.

    Args:
        bins: confidence and correctness in M bins.
        level: the probability that the accuracy of a calibrated model lies in the band.

    Returns:
        Lower and upper ends, each ``(M,)``.

    >>> one = Bins(torch.tensor([0.0, 1.0]), *torch.tensor([[100.0], [80.0], [70.0]]))
    >>> low, high = consistency_band(one)
    >>> low.item(), high.item()
    (0.72, 0.88)
    """
    from scipy.special import bdtrik, betainc  # scipy.stats would take another half a second

    tail = (1 - level) / 2
    count = bins.count.double().cpu().clamp_min(1)
    probability = (bins.confidence / bins.count.clamp_min(1)).double().clamp(0, 1).cpu()

    def quantile(at: float) -> Tensor:
        """The smallest fraction of successes whose cumulative probability is at least ``at``."""
        most = torch.as_tensor(bdtrik(at, count.numpy(), probability.numpy()), device="cpu")
        most = most.nan_to_num(0).ceil()  # NaN for a probability of 0
        fewer = (most - 1).clamp_min(0)
        reached = betainc((count - fewer).numpy(), (fewer + 1).numpy(), (1 - probability).numpy())
        return torch.where(torch.as_tensor(reached, device="cpu") >= at, fewer, most) / count

    return quantile(tail), quantile(1 - tail)


@dataclass(frozen=True)
class CalibrationTest:
    """The result of `calibration_test`.

    Attributes:
        statistic: the ECE of the data.
        p_value: the probability that a calibrated model gets an ECE at least as large.
    """

    statistic: float
    p_value: float


def calibration_test(
    source: Predictions | ConfidenceHistogram, *, bins: int = 15, simulations: int = 999, seed: int = 0
) -> CalibrationTest:
    """A test of the hypothesis that the model is calibrated.

    Correctness is simulated with each confidence as its probability, and the simulated ECEs are compared with
    the ECE of the data (consistency resampling: Bröcker and Smith 2007; Vaicenavicius et al., AISTATS 2019).
    The simulation uses the cells of a histogram at their mean confidence: its cost does not grow with the
    data.

    Args:
        source: predictions or a histogram.
        bins: number of bins of the ECE, a divisor of 300.
        simulations: number of simulations; the smallest p-value is ``1 / (simulations + 1)``.
        seed: the seed of the simulations.

    >>> logits = torch.tensor([[0.5, 0.0]]).expand(1000, 2)
    >>> half = torch.arange(1000) % 2
    >>> calibration_test(Predictions.of(logits, half)).p_value
    0.001
    """
    simulations, seed = whole_number("simulations", simulations), label("seed", seed)
    histogram = _histogram(source)
    statistic = float(ece_of(histogram, bins))
    simulated = _simulated_gaps(histogram, bins, simulations, seed).abs().sum(1)
    # The tolerance counts ties: a model that is always certain and right has nothing but ties.
    reached = int((simulated / histogram.samples.cpu() >= statistic - 1e-12).sum())
    return CalibrationTest(statistic, (1 + reached) / (1 + simulations))


def chance_mce(source: Predictions | ConfidenceHistogram, bins: int, seed: int) -> float:
    """The mean MCE that a calibrated model gets by chance."""
    histogram, bins = _histogram(source), bins_of_the_test(bins)
    gaps = _simulated_gaps(histogram, bins, _SIMULATIONS, seed)
    count = histogram.equal_width(bins).count.cpu()
    return float((gaps.abs() / count.clamp_min(1)).amax(1).mean())


@torch.no_grad()
def chance_classwise(source: Predictions | ConfidenceHistogram, bins: int, seed: int) -> tuple[float, float]:
    """The mean class-wise ECE and MCE that a calibrated model gets by chance."""
    assert isinstance(source, Predictions)  # class-wise errors are not resampled in streams
    name = "class-wise errors by chance", bins, seed
    if name in source.derived:
        known: tuple[float, float] = source.derived[name]
        return known
    probability = source.rows.softmax(1)
    # On the CPU, as all draws: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(probability.cpu(), _SIMULATIONS, replacement=True, generator=generator)
    labels = torch.cat([source.label.unsqueeze(1), labels.to(probability.device)], 1)
    edges = equal_width_edges(bins, probability.device)
    place = (labels * bins + bin_of(probability.gather(1, labels).double(), edges)).T.contiguous()
    found = ClassGaps.of(source.elements, bins)
    size = found.gap.numel()

    def occurrences(places: Tensor) -> Tensor:
        """How often each class is true in each bin, ``(r, K, bins)``, in r simulations ``(r, N)``."""
        apart = places + size * torch.arange(len(places), device=places.device).unsqueeze(1)
        return torch.bincount(apart.flatten(), minlength=size * len(places)).view(-1, *found.gap.shape)

    probabilities = found.gap + occurrences(place[:1])
    errors = []
    for some in torch.split(place[1:], max(1, _AT_ONCE // size)):
        gaps = replace(found, gap=probabilities - occurrences(some))
        errors.append(torch.stack([gaps.error, gaps.largest_error]))
    mean, largest = torch.cat(errors, 1).mean(1).tolist()
    source.derived[name] = mean, largest
    return mean, largest


def bins_of_the_test(bins: int) -> int:
    """The number of bins of the test of calibration: ``bins``, or 15 if a histogram cannot have as many."""
    return bins if 300 % bins == 0 else 15


def _histogram(source: Predictions | ConfidenceHistogram) -> ConfidenceHistogram:
    return source if isinstance(source, ConfidenceHistogram) else source.histogram


def _simulated_gaps(histogram: ConfidenceHistogram, bins: int, simulations: int, seed: int) -> Tensor:
    """Correctness minus confidence of a calibrated model, summed over each bin, ``(simulations, bins)``."""
    filled = (histogram.count > 0).cpu()
    count, confidence, _ = (values.cpu()[filled] for values in histogram.tensors()[1:])
    shape = (simulations, len(count))
    probability = (confidence / count).clamp(0, 1).expand(shape)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.binomial(count.expand(shape), probability, generator=generator)
    place = bin_of_cells(bins, count.device)[filled]
    return drawn.new_zeros(simulations, bins).index_add_(1, place, drawn - confidence)
