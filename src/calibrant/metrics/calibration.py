"""Calibration errors of the top class's confidence: ECE and its relatives.

Each function takes logits and target, or `Predictions`, and is then exact. It also takes a
`ConfidenceHistogram`, the constant memory of a stream; each docstring states how exact the result is then.
The functions that end in ``_of`` return tensors and also take `Resamples`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from calibrant.arguments import one_of
from calibrant.histogram import Bins, ConfidenceHistogram, RankedSums
from calibrant.metrics.predictions import Predictions, as_predictions


class Confidences(Protocol):
    """Confidence and correctness of predictions, histograms or, with a leading axis, of resamples."""

    most_bins: ClassVar[int]  # the most bins that the sweep tries; it usually stops far earlier
    cells: ClassVar[int]  # the cells of [0, 1] over which the smooth error is integrated

    def equal_width(self, bins: int) -> Bins:
        """Bins of equal width."""

    def equal_mass(self, bins: int) -> Bins:
        """Bins of equal counts."""

    @property
    def ranked(self) -> RankedSums:
        """The sums along rising confidences, for bins of equal width of any number."""

    def residual(self, cells: int) -> Tensor:
        """``(correct - confidence) / N`` over cells of ``[0, 1]``."""


Source = Tensor | Predictions | ConfidenceHistogram


def ece(source: Source, target: Tensor | None = None, *, bins: int = 15, ignore_index: int = -100) -> float:
    """Expected calibration error ``Σ |B|/N · |accuracy - confidence|`` over equal-width bins ``(lo, hi]``.

    Exact, also from a histogram, where ``bins`` must be a divisor of 300.

    Naeini, Cooper and Hauskrecht, *Obtaining Well Calibrated Probabilities Using Bayesian Binning*,
    AAAI 2015.

    Args:
        source: logits ``(B, K, *S)``, `Predictions` or a `ConfidenceHistogram`.
        target: labels ``(B, *S)``; only with logits.
        bins: number of bins.
        ignore_index: the label of elements to leave out.

    >>> round(ece(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1])), 4)
    0.4999
    """
    return float(ece_of(as_confidences(source, target, ignore_index), bins))


def mce(source: Source, target: Tensor | None = None, *, bins: int = 15, ignore_index: int = -100) -> float:
    """Maximum calibration error: the largest ``|accuracy - confidence|`` of any bin that holds elements.

    Exact, also from a histogram. Arguments as for `ece`.

    >>> round(mce(torch.tensor([[9.0, 0.0], [0.1, 0.0]]), torch.tensor([0, 0])), 4)
    0.475
    """
    return float(mce_of(as_confidences(source, target, ignore_index), bins))


def ece_l2(
    source: Source, target: Tensor | None = None, *, bins: int = 15, ignore_index: int = -100
) -> float:
    """Root mean square gap ``√(Σ |B|/N · (accuracy - confidence)²)`` over equal-width bins.

    Exact, also from a histogram. Arguments as for `ece`.

    >>> round(ece_l2(torch.tensor([[9.0, 0.0], [0.1, 0.0]]), torch.tensor([0, 0])), 4)
    0.3359
    """
    return float(ece_l2_of(as_confidences(source, target, ignore_index), bins))


def adaptive_ece(
    source: Source, target: Tensor | None = None, *, bins: int = 15, ignore_index: int = -100
) -> float:
    """ECE over equal-mass bins: sorted confidences cut into groups whose sizes differ by at most one.

    Exact from predictions. Where a boundary cuts a group of equal confidences, each side gets the mean
    correctness of the group: the order of the data does not matter. From a histogram, cells are not divided.
    The result is then off by at most the fraction of elements in cells that contain a boundary between two
    bins, counted once per boundary.

    Nixon et al., *Measuring Calibration in Deep Learning*, CVPR workshops 2019. Arguments as for `ece`.

    >>> round(adaptive_ece(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]), bins=1), 4)
    0.4999
    """
    return float(adaptive_ece_of(as_confidences(source, target, ignore_index), bins))


def debiased_ece(
    source: Source, target: Tensor | None = None, *, bins: int = 15, norm: int = 2, ignore_index: int = -100
) -> float:
    """Error over equal-mass bins, minus the contribution of sampling noise to the gaps.

    With ``norm=2``, ``√max(0, Σ |B|/N (gap² - accuracy (1 - accuracy) / (|B| - 1)))``, gap = confidence -
    accuracy. With ``norm=1``, ``max(0, Σ |B|/N (2 |gap| - E|gap + noise|))`` with Gaussian noise of variance
    ``accuracy (1 - accuracy) / |B|``: the expectation shows how much such noise raises the error, and as much
    is subtracted. It is computed in closed form; the authors' code draws samples.

    Bins with fewer than two elements contribute 0. Equal confidences are in one bin: if bins shared them,
    their noise would be subtracted several times. Exact from predictions. From a histogram, whose bins hold
    whole cells, it is typically within 1 % of the exact value.

    Kumar, Liang and Ma, *Verified Uncertainty Calibration*, NeurIPS 2019.

    ``norm`` is 2 for squared gaps, 1 for absolute gaps. Other arguments as for `ece`.

    >>> round(debiased_ece(torch.tensor([[9.0, 0.0]] * 4), torch.tensor([0, 1, 1, 1]), bins=1), 3)
    0.707
    """
    one_of("norm", norm, (1, 2))
    return float(debiased_ece_of(as_confidences(source, target, ignore_index), bins, norm))


def sweep_ece(
    source: Source,
    target: Tensor | None = None,
    *,
    norm: int = 2,
    binning: str = "equal-mass",
    ignore_index: int = -100,
) -> float:
    """Error over the largest number of bins whose accuracies do not fall with confidence.

    Bins are added one at a time, up to 512, until the accuracies are no longer monotone. Empty bins do not
    count. Exact from predictions, with equal confidences as for `adaptive_ece`. From a histogram, whose cells
    are not divided, the sweep may stop at another number of bins; the error may then differ by a tenth of its
    value.

    The error is the root mean square gap with ``norm=2``, and the mean gap with ``norm=1``. ``binning`` is
    ``"equal-mass"`` or ``"equal-width"``. Other arguments as for `ece`.

    Roelofs et al., *Mitigating Bias in Calibration Error Estimation*, AISTATS 2022.

    >>> round(sweep_ece(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([1, 0])), 3)
    0.5
    """
    one_of("norm", norm, (1, 2))
    one_of("binning", binning, ("equal-mass", "equal-width"))
    return float(sweep_ece_of(as_confidences(source, target, ignore_index), norm, binning))


def smooth_ece(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> float:
    """Smooth ECE: the gap between confidence and accuracy after smoothing with a Gaussian kernel.

    ``∫ |Σ_i (correct_i - confidence_i) k_σ(t, confidence_i)| dt / N`` with a kernel reflected at 0 and 1, at
    the σ where the integral equals σ. Computed on a grid of 16,384 cells: within 0.1 % of the exact value for
    errors above 0.001. From a histogram, whose cells are at most 1/300 wide: within 1 % for errors above
    0.01.

    Błasiok and Nakkiran, *Smooth ECE: Principled Reliability Diagrams via Kernel Smoothing*, ICLR 2024.
    Arguments as for `ece`.

    >>> round(smooth_ece(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1])), 4)
    0.4999
    """
    return float(smooth_ece_of(as_confidences(source, target, ignore_index)))


def as_confidences(source: Source, target: Tensor | None, ignore_index: int) -> Confidences:
    """Return a histogram as it is, once checked, or compute `Predictions` from logits and target."""
    if isinstance(source, ConfidenceHistogram):
        if source.samples == 0:
            raise ValueError("a metric of an empty data set is undefined")
        if not math.isfinite(source.samples + source.confidence.sum()):
            raise ValueError("the histogram was made from logits with NaN or infinite values")
        return source
    return as_predictions(source, target, ignore_index)


def ece_of(confidences: Confidences, bins: int) -> Tensor:
    """`ece` as a tensor."""
    return _mean_gap(confidences.equal_width(bins), 1)


def mce_of(confidences: Confidences, bins: int) -> Tensor:
    """`mce` as a tensor."""
    return confidences.equal_width(bins).gap.abs().amax(-1)


def ece_l2_of(confidences: Confidences, bins: int) -> Tensor:
    """`ece_l2` as a tensor."""
    return _mean_gap(confidences.equal_width(bins), 2)


def adaptive_ece_of(confidences: Confidences, bins: int) -> Tensor:
    """`adaptive_ece` as a tensor."""
    return _mean_gap(confidences.equal_mass(bins), 1)


def debiased_ece_of(confidences: Confidences, bins: int, norm: int = 2) -> Tensor:
    """`debiased_ece` as a tensor."""
    count, confidence, correct = confidences.ranked.undivided_equal_mass(bins)
    accuracy = correct / count.clamp_min(1)
    variance = (accuracy * (1 - accuracy)).clamp_min(0)  # rounding may take an accuracy above 1
    gap = (confidence - correct).abs() / count.clamp_min(1)
    if norm == 2:
        terms = gap.square() - variance / (count - 1).clamp_min(1)
    else:
        spread = (variance / count.clamp_min(1)).sqrt()
        ratio = gap / spread.clamp_min(torch.finfo(gap.dtype).tiny)
        # The mean of the folded normal distribution.
        folded = (
            gap * (ratio / math.sqrt(2)).erf() + spread * math.sqrt(2 / math.pi) * (-0.5 * ratio**2).exp()
        )
        terms = 2 * gap - folded
    terms = torch.where(count > 1, terms, 0)
    error = ((count * terms).sum(-1) / count.sum(-1)).clamp_min(0)
    return error.sqrt() if norm == 2 else error


def _mean_gap(bins: Bins, norm: int) -> Tensor:
    """``(Σ |B|/N · |gap|^norm)^(1/norm)``."""
    if norm == 1:
        return (bins.confidence - bins.correct).abs().sum(-1) / bins.count.sum(-1)
    return ((bins.count * bins.gap.square()).sum(-1) / bins.count.sum(-1)).sqrt()


# Differences of accuracies by rounding; elements that share a boundary have equal accuracies on both sides.
_ROUNDING = 1e-12
_LEAST_EXCESS = 1e-8  # of the smooth error over its width, where the search ends
_MOST_STEPS = 30
_FEW = 64  # entries that show in nearly all data that the accuracy falls somewhere


def sweep_ece_of(confidences: Confidences, norm: int = 2, binning: str = "equal-mass") -> Tensor:
    """`sweep_ece` as a tensor."""
    ranked = confidences.ranked
    name = f"{binning} sweep"
    if name not in ranked.derived:
        pool = confidences.equal_mass if binning == "equal-mass" else ranked.equal_width
        ranked.derived[name] = _sweep(pool, ranked, confidences.most_bins)
    errors: Tensor = ranked.derived[name]
    return errors[norm - 1]


def _sweep(pool: Callable[[int], Bins], ranked: RankedSums, most_bins: int) -> Tensor:
    """The errors of norm 1 and 2 over the largest number of bins whose accuracies do not fall."""
    bins, pooled = 1, pool(1)
    errors = _mean_gaps(pooled)
    rising = torch.ones_like(errors[0], dtype=torch.bool)
    most_bins = min(most_bins, int(pooled.count.max()))
    # Where the accuracy never falls from one confidence to the next, it falls with no number of bins. Mostly
    # it falls among the first few already, and the others need not be looked at.
    never_falls = rising
    for entries in (_FEW, ranked.running.shape[-1]):
        if bool(never_falls.any()):
            count, _, correct = ranked.running[..., :entries].diff(dim=-1)
            never_falls = ~_falls(count, correct)
    while bins < most_bins and bool(rising.any()):
        bins = most_bins if bool((never_falls | ~rising).all()) else bins + 1
        pooled = pool(bins)
        rising = rising & (never_falls | ~_falls(pooled.count, pooled.correct))
        errors = torch.where(rising, _mean_gaps(pooled), errors)
    return errors


def _mean_gaps(bins: Bins) -> Tensor:
    """The errors of norm 1 and 2."""
    return torch.stack([_mean_gap(bins, 1), _mean_gap(bins, 2)])


def _falls(count: Tensor, correct: Tensor) -> Tensor:
    """Whether the accuracy falls from a bin to the next; an empty bin has the accuracy of the one before."""
    accuracy = correct / count.clamp_min(1)
    accuracy = torch.where(count > 0, accuracy, 0).cummax(-1).values.where(count == 0, accuracy)
    return (accuracy.diff(dim=-1) < -_ROUNDING).any(-1)


def smooth_ece_of(confidences: Confidences) -> Tensor:
    """`smooth_ece` as a tensor."""
    from scipy.fft import dct, idct  # type: ignore[import-untyped]  # here: it takes half a second

    cells = confidences.cells
    found = confidences.residual(cells)
    residual = found.detach().cpu().view(-1, cells)
    # With reflection at 0 and 1, smoothing multiplies the cosine transform of the residuals. SciPy computes
    # it several times faster than torch.fft computes a Fourier transform.
    transform = torch.from_numpy(dct(residual.numpy()))
    # The error without a kernel, which smoothing cannot exceed. A kernel that is narrower than a cell would
    # exceed it, because its transform is cut off at the highest frequency.
    most = residual.abs().sum(-1)
    frequency = torch.arange(cells, dtype=residual.dtype, device=residual.device) * math.pi

    def error_of(width: Tensor, rows: Tensor) -> Tensor:
        """The errors of the chosen rows with kernels of these widths, one for each of them."""
        # Above a frequency of 9 / width, the kernel is less than the rounding error of 1.
        least = float(width.min()) if width.numel() else 0.0
        kept = min(cells, int(9 / (math.pi * least)) + 1) if least > _ROUNDING else cells
        kernel = (-0.5 * (frequency[:kept] * width.unsqueeze(-1)).square()).exp()
        smoothed = torch.from_numpy(idct((transform[rows, :kept] * kernel).numpy(), n=cells))
        return smoothed.abs().sum(-1).minimum(most[rows])

    # The width that equals its error is wanted. The error falls as the kernel widens, so that width lies
    # between any other and its error. In logarithms the error is nearly a straight line: it is constant where
    # the model is wrong, and falls as 1 / √width where it is noise. Each step follows that line.
    tolerance = max(_LEAST_EXCESS, 4 * torch.finfo(residual.dtype).eps)
    width = most.clamp_min(tolerance)
    error = error_of(width, torch.ones_like(width, dtype=torch.bool))
    low, high, slope = error, width, torch.full_like(width, -0.5)
    for _ in range(_MOST_STEPS):
        unfinished = (error - width).abs() > tolerance
        if not bool(unfinished.any()):
            break
        step = (error.clamp_min(tolerance) / width).log() / (1 - slope)
        following = (width * step.exp()).clamp(low, high).clamp_min(tolerance)
        # A resample whose width is found keeps it: its error must not depend on the others.
        before, width = (width, error), torch.where(unfinished, following, width)
        error = error.masked_scatter(unfinished, error_of(width[unfinished], unfinished))
        low, high = low.maximum(error.minimum(width)), high.minimum(error.maximum(width))
        widened = (width / before[0]).log()
        steeper = (error.clamp_min(tolerance) / before[1].clamp_min(tolerance)).log() / widened
        slope = torch.where(widened.abs() > _ROUNDING, steeper.clamp(-10, 0), slope)
    return error.view(found.shape[:-1]).to(found.device)
