"""Focal losses whose exponent follows the validation set's calibration, bin by bin."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range, one_of, ordered_pair, true_or_false, whole_number
from calibrant.histogram import Bins, Outcomes, bin_with_width
from calibrant.kernels import Composition, FirstTerm, LowerProbability, Value, device_function
from calibrant.kernels.device import exp, number
from calibrant.layout import Elements
from calibrant.losses.adaptive import SEVERAL_PASSES, AdaptiveLoss
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.evidence import beyond, error_of_accuracy
from calibrant.losses.focal import LookUp, focal, modulated
from calibrant.statistics import Statistics

if TYPE_CHECKING:
    import triton.language as tl


@device_function
def _bin_of(p, edges):
    """The bin of each probability; see `bin_with_width`."""
    lowest = tl.load(edges.value)
    position = tl.minimum(p.to(tl.float64), tl.load(edges.value + edges.size - 1))
    index = tl.zeros_like(p).to(tl.int32)
    for place in tl.static_range(1, edges.size - 1):
        edge = tl.zeros_like(position) + tl.load(edges.value + place)
        # On or below the lowest edge counts as just above it; a bin without width is never chosen.
        index += ((edge < position) | (edge == lowest)).to(tl.int32)
    return index


@device_function
def _binned(element, numbers):
    gamma = tl.load(numbers.gamma.value + _bin_of(element.p, numbers.edges)).to(tl.float32)
    return modulated(element, tl.abs(gamma), tl.where(gamma < 0, -1.0, 1.0))


@device_function
def _exponent(element, numbers):
    """CalFocal's exponent, and its derivative by log p."""
    index = _bin_of(element.p, numbers.edges)
    accuracy = tl.load(numbers.accuracy.value + index).to(tl.float32)
    rate, adapted = number(numbers.rate), tl.load(numbers.passes.value) > 0
    # 69 is _LARGEST: Triton reads no constants of the module.
    gamma = exp(tl.minimum(rate * (element.p - accuracy), 69.0))
    return tl.where(adapted, gamma, 1.0), tl.where(adapted, gamma * rate * element.p, 0.0)


@device_function
def _per_sample(element, numbers):
    gamma, _ = _exponent(element, numbers)
    return modulated(element, gamma, 1.0)


@device_function
def _through_gamma(element, numbers):
    gamma, by_log_p = _exponent(element, numbers)
    value, along, by_base = modulated(element, gamma, 1.0)
    log_base = tl.log2(tl.maximum(element.doubt, 1.1754943508222875e-38)) * 0.6931471805599453
    return value, along + value * log_base * by_log_p, by_base


_LARGEST = 69.0
"""The largest ``log γ``: a larger γ gives the same loss of 0, and overflows in float32."""

BINNED, BINNED_DUAL = FirstTerm(_binned), FirstTerm(_binned, uses_lower=True)
PER_SAMPLE, THROUGH_GAMMA = FirstTerm(_per_sample), FirstTerm(_through_gamma)


class BinnedFocal(AdaptiveLoss):
    """A focal loss with an exponent per confidence bin of the validation set.

    Training elements are looked up by the probability of their true class, which is not
    differentiated there: below the lowest edge they use the first bin, above the highest the last. A
    pass regroups the validation confidences into bins of equal mass: sorted and cut into groups whose sizes
    differ by at most one. Where a boundary cuts a group of equal confidences, each side gets their mean
    correctness. A bin inside such a group has no width: its state stays as it is, and it is not looked up.

    The bins are exact for up to 2²⁰ (1,048,576) validation elements in all processes together. Beyond that
    they are pooled from a histogram of fixed size and hold whole cells, see `ConfidenceHistogram.equal_mass`.

    With ``evidence`` above 0, a gap between confidence and accuracy counts only as far as it exceeds that
    many standard errors, see `error_of_accuracy`.

    Attributes:
        gamma: ``(bins,)``, the exponents.
        edges: ``(bins + 1,)``, bin b being ``(edges[b], edges[b+1]]``; equal widths at the start.
    """

    gamma: Tensor
    edges: Tensor

    def __init__(
        self,
        num_classes: int,
        bins: int,
        initial_gamma: float,
        evidence: float,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.bins = whole_number("bins", bins)
        self.evidence = in_range("evidence", evidence)
        self.initial_gamma = in_range("initial_gamma", initial_gamma, -float("inf"))
        self.register_learned("gamma", [self.initial_gamma] * self.bins)
        edges = [b / self.bins for b in range(self.bins + 1)]
        self.register_learned("edges", edges, reported=False)

    def bin_of(self, probability: Tensor) -> Tensor:
        """The bin in which each probability is looked up; see `bin_with_width`."""
        return bin_with_width(probability, self.edges)

    def look_up(self) -> LookUp:
        """From probabilities of the true class to exponents, by copies of the current state."""
        gamma, edges = self.gamma.clone(), self.edges.clone()
        return lambda p: gamma[bin_with_width(p, edges)]

    def composition(self) -> Composition:
        return Composition(focal(BINNED, {"gamma": self.gamma, "edges": self.edges}, self.look_up))

    def measure(self, elements: Elements) -> Outcomes:
        return Outcomes.of(elements)

    def update(self, statistics: Statistics) -> None:
        assert isinstance(statistics, Outcomes)
        bins = statistics.equal_mass(self.bins)
        self.edges.copy_(bins.edges)
        self.update_bins(bins, (bins.count > 0) & (bins.edges.diff() > 0))

    def gap(self, bins: Bins) -> Tensor:
        """Confidence minus accuracy of each bin, as far as it exceeds its standard errors, ``(bins,)``."""
        return beyond(bins.gap, error_of_accuracy(bins), self.evidence)

    @abstractmethod
    def update_bins(self, bins: Bins, moved: Tensor) -> None:
        """Move the state of the bins in ``moved``, those with elements and a width, in place."""


class AdaFocal(BinnedFocal):
    """AdaFocal (key ``adafocal``): ``-(1-p)^γ log p``, or ``-(1+p)^|γ| log p`` where γ < 0.

    After each pass, with mean confidence C and accuracy A of a validation bin,
    ``γ ← γ exp(±rate (C - A))``, + for γ > 0 and - for γ < 0: over-confidence raises γ. γ is clipped to
    ``gamma_range``, and where ``|γ| < switch_at`` it changes sign: ``-switch_at`` coming from above and
    ``+switch_at`` from below. Bins without elements or width keep their γ.

    Ghosh, Schaaf and Gormley, *AdaFocal: Calibration-aware Adaptive Focal Loss*, NeurIPS 2022.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        bins: number of bins.
        rate: λ of the paper, how strongly γ answers a gap.
        gamma_range: bounds of γ; the upper one may be infinite.
        switch_at: ``|γ|`` below which focal and inverse focal loss change places; 0 for never.
        initial_gamma: γ at the start.
        evidence: the number of standard errors that a gap must exceed; only the excess moves γ. 0 is the
            paper's rule; 2 suits small validation sets.
        **shared: see `Loss`.

    >>> import torch
    >>> loss = AdaFocal(2, bins=1)
    >>> logits, target = torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1])
    >>> loss.observe(logits, target)
    >>> _ = loss.adapt()
    >>> round(loss.gamma.item(), 3)  # half of it wrong at full confidence: exp(1 - 0.5)
    1.649
    """

    search_space = (Range("rate", 0.1, 10, log=True),)

    def __init__(
        self,
        num_classes: int,
        *,
        bins: int = 15,
        rate: float = 1.0,
        gamma_range: tuple[float, float] = (-2.0, 20.0),
        switch_at: float = 0.2,
        initial_gamma: float = 1.0,
        evidence: float = 0.0,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, bins, initial_gamma, evidence, **shared)
        self.rate = in_range("rate", rate)
        self.gamma_range = ordered_pair("gamma_range", gamma_range)
        self.switch_at = in_range("switch_at", switch_at)
        low, high = self.gamma_range
        if self.switch_at and not (low <= -self.switch_at and self.switch_at <= high):
            raise ValueError(
                f"gamma_range={gamma_range} must hold both -switch_at and switch_at ({switch_at}); "
                "pass switch_at=0 to keep the sign of gamma"
            )
        if not (self.initial_gamma and low <= self.initial_gamma <= high):
            raise ValueError(
                f"initial_gamma must not be 0 and must lie in gamma_range={gamma_range}, got {initial_gamma}"
            )

    def advice(self) -> str | None:
        low, high = self.gamma_range
        used = self.edges.diff() > 0
        reached = int((used & ((self.gamma <= low) | (self.gamma >= high))).sum())
        if self.passes < SEVERAL_PASSES or low == high or not reached or 4 * reached < int(used.sum()):
            return None
        return (
            f"{reached} of {int(used.sum())} exponents γ are at a bound of gamma_range=({low:g}, {high:g}), "
            "because they do not close the gap between confidence and accuracy. "
            f"Try {'more validation data' if self.evidence >= 2 else 'evidence=2'}, or another loss"
        )

    def update_bins(self, bins: Bins, moved: Tensor) -> None:
        sign = self.gamma.sign()
        gamma = self.gamma * (sign * self.rate * self.gap(bins)).exp()
        gamma = gamma.clamp(*self.gamma_range).clamp_max(math.exp(_LARGEST))
        gamma = torch.where(gamma.abs() < self.switch_at, -sign * self.switch_at, gamma)
        self.gamma.copy_(torch.where(moved, gamma, self.gamma))


class AdaDualFocal(AdaFocal):
    """AdaDualFocal (key ``ada-dual-focal``): `AdaFocal` on the gap of `DualFocal`.

    ``-(1-p+q)^γ log p``, or ``-(1+p-q)^|γ| log p`` where γ < 0, with ``q`` the best probability strictly
    below p. The bin is that of p.

    Tao, Dong and Xu, *Dual Focal Loss for Calibration*, ICML 2023. (The paper has no formula for it. The
    code that was first released never reaches the update of γ for this loss, and looks γ up by ``p - q``.)

    Shape and arguments as `AdaFocal`.

    >>> import torch
    >>> logits, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    >>> round(AdaDualFocal(3)(logits, target).item(), 4)
    0.2362
    """

    def composition(self) -> Composition:
        numbers = {"gamma": self.gamma, "edges": self.edges}
        return Composition(focal(BINNED_DUAL, numbers, self.look_up, lower=LowerProbability((1,))))


class CalFocal(BinnedFocal):
    """CalFocal (key ``calfocal``): ``-(1-p)^γ log p`` with γ read off the validation gap.

    ``γ = exp(rate (p - A_b))`` for each sample, or ``γ_b = exp(rate (C_b - A_b))`` for each bin, with mean
    confidence C and accuracy A of the validation bin. γ is 1 before the first pass. It is not differentiated
    unless ``through_gamma`` is true. (The paper writes γ as a function of p and does not say whether the
    gradient passes through it.) The bins are never differentiated.

    Ghosh, Schaaf and Gormley, *AdaFocal: Calibration-aware Adaptive Focal Loss*, NeurIPS 2022,
    section 5.1.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        bins: number of bins.
        rate: λ of the paper.
        per: ``"sample"`` or ``"bin"``.
        through_gamma: differentiate γ by p as well; for ``per="sample"`` only, since the γ of a bin does not
            depend on p.
        evidence: the number of standard errors that a gap ``C_b - A_b`` must exceed; only the excess counts,
            so that ``C_b`` minus the excess takes the place of ``A_b``. 0 is the paper's rule.
        **shared: see `Loss`.

    Attributes:
        accuracy: ``(bins,)``, accuracy of the validation bins, or with ``evidence`` what takes its place.

    >>> import torch
    >>> loss = CalFocal(2, bins=1, per="bin")
    >>> loss.observe(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    >>> _ = loss.adapt()
    >>> round(loss.gamma.item(), 1)  # exp(10 · 0.5)
    148.2
    """

    accuracy: Tensor

    search_space = (Range("rate", 1, 50, log=True),)

    def __init__(
        self,
        num_classes: int,
        *,
        bins: int = 15,
        rate: float = 10.0,
        per: str = "sample",
        through_gamma: bool = False,
        evidence: float = 0.0,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, bins, 1.0, evidence, **shared)
        self.rate = in_range("rate", rate)
        self.per = one_of("per", per, ["sample", "bin"])
        self.through_gamma = true_or_false("through_gamma", through_gamma)
        if through_gamma and per == "bin":
            raise ValueError(
                "through_gamma=True needs per='sample': the exponent of a bin does not depend on p"
            )
        self.register_learned("accuracy", [0.0] * self.bins, reported=False)

    def composition(self) -> Composition:
        if self.per == "bin":
            return super().composition()
        numbers: dict[str, Value] = {
            "rate": self.rate,
            "edges": self.edges,
            "accuracy": self.accuracy,
            "passes": self.passes,
        }
        if self.through_gamma:
            return Composition(focal(THROUGH_GAMMA, numbers, self.look_up, rate=self._rate_of_gamma))
        return Composition(focal(PER_SAMPLE, numbers, self.look_up))

    def look_up(self) -> LookUp:
        if self.per == "bin":
            return super().look_up()
        rate, adapted = self.rate, self.passes > 0
        accuracy, edges = self.accuracy.clone(), self.edges.clone()

        def exponent(p: Tensor) -> Tensor:
            gap = p - accuracy[bin_with_width(p.detach(), edges)]
            return torch.where(adapted, (rate * gap).clamp_max(_LARGEST).exp(), 1.0)

        return exponent

    def _rate_of_gamma(self) -> Tensor:
        """``d log γ / dp``, for elements in any bin."""
        return self.accuracy.new_full((), self.rate) * (self.passes > 0)

    def update_bins(self, bins: Bins, moved: Tensor) -> None:
        gap, filled = self.gap(bins), bins.count.clamp_min(1)
        accuracy = bins.confidence / filled - gap if self.evidence else bins.correct / filled
        self.accuracy.copy_(torch.where(moved, accuracy, self.accuracy))
        gamma = (self.rate * gap).clamp_max(_LARGEST).exp()
        self.gamma.copy_(torch.where(moved, gamma, self.gamma))
