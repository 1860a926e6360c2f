"""Calibration of one probability at a time: each class against the rest, or the top label alone."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from calibrant.arguments import one_of
from calibrant.calibrators.base import Calibrator, below_maximum, is_traced

Variant = Literal["one-vs-rest", "top-label"]
"""The probabilities to calibrate: those of every class, or only that of the predicted class."""

FLOOR = 1e-12
"""The least probability, so that logarithms stay finite."""

# The largest ratio of another class's probability to that of the predicted class. It is far enough below 1
# that the prediction survives rounding to float16.
_RUNNER_UP = 0.99

# The least share of the uniform distribution in every row. It gives a class ruled out by its logit a
# logarithm that float16 can hold.
_TRACE = 1e-30

# Numbers in one block of classes during a fit, few enough for a CPU's cache.
_BLOCK = 1 << 19


class OneVsRest(Calibrator):
    """A calibrator of one probability at a time: that of each class, or that of the predicted class.

    Args:
        variant: the probabilities to calibrate. Each class has its own map, or the confidence has one.

    Attributes:
        ceilings: ``(K,)``, the largest probability of each class: 1, or Laplace's estimate ``1/(N + K)`` for
            a class that does not occur in the N samples. None for a single map of the confidence.
    """

    per_class = True
    ceilings: Tensor | None

    def __init__(self, *, variant: Variant = "one-vs-rest") -> None:
        super().__init__()
        self.variant: Variant = one_of("variant", variant, get_args(Variant))
        self.preserves_order = variant == "top-label"  # type: ignore[misc]  # one class, two answers
        self.per_class = not self.preserves_order  # type: ignore[misc]
        self.register_buffer("ceilings", None)

    @abstractmethod
    def fit_maps(self, rows: Tensor, labels: Tensor) -> None:
        """Learn the maps, as in `fit_rows`."""

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        samples, classes = rows.shape
        self.fit_maps(rows, labels)
        if self.per_class:
            absent = labels.bincount(minlength=classes) == 0
            ones = torch.ones(classes, dtype=torch.float64, device=rows.device)
            self.learn("ceilings", ones.masked_fill(absent, 1 / (samples + classes)))


class ProbabilityMap(OneVsRest):
    """A calibrator with maps from probabilities to probabilities, which are then scaled to sum to 1."""

    @abstractmethod
    def mapped(self, given: Tensor) -> Tensor:
        """The maps at `probabilities`, in the same shape."""

    def transform(self, rows: Tensor) -> Tensor:
        rows = in_double(rows)
        calibrated = self.mapped(probabilities(rows, self.variant))
        if self.variant == "top-label":
            return _with_confidence(rows, calibrated.squeeze(0))
        limits = self.learned("ceilings", rows)
        # The map of an absent class is arbitrary. It must not hide that all other classes have probability 0.
        unseen = limits < 1
        original = rows.masked_fill(unseen, -torch.inf).softmax(-1)
        shares = _scaled_log_probabilities(calibrated.T.masked_fill(unseen, 0), original)
        return limit_absent(limits, rows, shares)


def in_double(rows: Tensor) -> Tensor:
    """The rows in float64 if the device has it. In float32 many confident predictions would be equal to 1."""
    return rows if rows.device.type == "mps" else rows.double()


def probabilities(rows: Tensor, variant: Variant) -> Tensor:
    """The probabilities to calibrate: ``(K, N)`` for every class, or ``(1, N)`` for the predicted class."""
    rows = in_double(rows).softmax(-1)
    return rows.T.contiguous() if variant == "one-vs-rest" else rows.amax(-1).unsqueeze(0)


def log_probabilities(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``log s`` and ``log(1 - s)`` of every class, each ``(N, K)``, accurate even if s rounds to 1."""
    rows = below_maximum(in_double(rows)).clamp_min(-1e30)  # instead of -inf
    present = rows.log_softmax(-1)
    # The plain formula is accurate for s ≤ 1/2, which holds for all classes but the predicted one.
    is_top = _is_top(rows)
    absent = torch.log1p(-present.masked_fill(is_top, -1.0).exp())
    absent_top = present.masked_fill(is_top, -torch.inf).logsumexp(-1, keepdim=True)
    return present, torch.where(is_top, absent_top, absent)


def indicators(rows: Tensor, labels: Tensor, variant: Variant) -> Tensor:
    """Whether the label is the class, or the prediction is right; in the shape of `probabilities`."""
    if variant == "top-label":
        return (rows.argmax(-1) == labels).unsqueeze(0)
    return labels == torch.arange(rows.shape[1], device=rows.device).unsqueeze(1)


def binary_problems(
    rows: Tensor, labels: Tensor, variant: Variant, most: int = _BLOCK
) -> Iterator[tuple[Tensor, Tensor]]:
    """`probabilities` and `indicators`, ``(C, N)`` each, for blocks of C classes, at most ``most``."""
    given, hits = probabilities(rows, variant), indicators(rows, labels, variant)
    size = min(most, classes_at_once(rows))
    yield from zip(torch.split(given, size), torch.split(hits, size), strict=True)


def classes_at_once(rows: Tensor) -> int:
    """The number of classes to fit together."""
    return max(1, _BLOCK // len(rows))


def limit_absent(limits: Tensor, rows: Tensor, logarithms: Tensor) -> Tensor:
    """Log-probabilities ``(N, K)`` with absent classes at or below their limits.

    A class that is absent from the fitting data keeps its original probability, up to its limit. The other
    classes share the rest in proportion to ``logarithms``. Without limits, an absent class would become
    certain wherever all other classes are improbable, because the maps are scaled to a sum of 1.
    """
    unseen = limits < 1
    kept = torch.minimum(rows.log_softmax(-1), limits.log()).clamp_min(math.log(FLOOR))
    taken = kept.exp().masked_fill(~unseen, 0).sum(-1, keepdim=True)
    others = logarithms.masked_fill(unseen, -torch.inf).log_softmax(-1)
    return torch.where(unseen, kept, others + torch.log1p(-taken))


def _scaled_log_probabilities(calibrated: Tensor, original: Tensor) -> Tensor:
    """Logarithms of probabilities ``(N, K)`` after scaling each row to a sum of 1.

    A row of zeros becomes the original row. NaN stays NaN.
    """
    total = calibrated.sum(-1, keepdim=True)
    shares = torch.where(total > 0, calibrated / total.clamp_min(torch.finfo(total.dtype).tiny), original)
    return shares.clamp_min(FLOOR).log().masked_fill(original.isnan(), torch.nan).log_softmax(-1)


def _with_confidence(rows: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities with a given confidence ``(N,)`` of the predicted class, in the same order.

    The other classes share the rest in proportion. If one of them would exceed the predicted class, their
    shares are mixed with equal shares, no more than needed. A confidence below 1/K becomes about 1/K, with
    the second class 1 % below.
    """
    others = rows.shape[1] - 1
    confidence = confidence.clamp_min(1 / (1 + _RUNNER_UP * others)).unsqueeze(-1)
    # ONNX holds bounds in single precision, in which 1 - FLOOR would be 1.
    doubt = (1 - confidence).clamp_min(FLOOR)
    confidence = 1 - doubt
    is_top = _is_top(rows)
    shares = below_maximum(rows).clamp_min(-1e30).masked_fill(is_top, -torch.inf).log_softmax(-1)
    largest = shares.amax(-1, keepdim=True).exp()
    allowed = _RUNNER_UP * confidence / doubt
    equal = ((largest - allowed) / (largest - 1 / others).clamp_min(_TRACE)).clamp(_TRACE, 1 - FLOOR)
    one, other = shares + torch.log1p(-equal), equal.log() - math.log(others)
    # This is torch.logaddexp, which the older exporter to ONNX does not know.
    larger, smaller = torch.maximum(one, other), torch.minimum(one, other)
    mixed = larger + torch.log1p((smaller - larger).exp())
    return torch.where(is_top, confidence.log(), doubt.log() + mixed)


def _is_top(rows: Tensor) -> Tensor:
    return torch.arange(rows.shape[-1], device=rows.device) == rows.argmax(-1, keepdim=True)


def ordering(numbers: Tensor) -> Tensor:
    """Indices that sort the last axis. The order of equal numbers is arbitrary."""
    if numbers.device.type != "cpu":
        return numbers.argsort(-1)
    # On a CPU NumPy sorts five times as fast.
    return torch.from_numpy(numbers.numpy().argsort(-1))


def interpolated(points: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Piecewise-linear curves ``(C, P)``, P at least 2, at ``(C, N)``; constant beyond their ends."""
    at = at.clamp(points[:, :1], points[:, -1:])
    right = number_below(points, at).clamp(1, points.shape[1] - 1)
    left = right - 1
    from_point, from_value = points.gather(1, left), values.gather(1, left)
    # Repeated last points have a width of 0.
    width = (points.gather(1, right) - from_point).clamp_min(torch.finfo(points.dtype).tiny)
    return torch.lerp(from_value, values.gather(1, right), ((at - from_point) / width).clamp(0, 1))


def stepped(edges: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Step functions ``(C, E + 1)`` at ``(C, N)``; bins ``(lo, hi]`` lie between edges ``(C, E)``."""
    return values.gather(1, number_below(edges, at))


def number_below(points: Tensor, at: Tensor) -> Tensor:
    """The number of sorted points ``(C, P)`` below each of ``(C, N)`` numbers: `torch.searchsorted`.

    ONNX has no such operator. In graphs the points are searched by halving, with operators that it has.
    """
    if not (torch.compiler.is_exporting() or is_traced()):
        return torch.searchsorted(points, at)
    curves, size = map(int, points.shape)
    bits = size.bit_length()
    padded = torch.cat([points, points.new_full((curves, (1 << bits) - 1 - size), math.inf)], 1)
    below = torch.zeros_like(at, dtype=torch.long)
    for bit in reversed(range(bits)):
        reached = padded.gather(1, below + ((1 << bit) - 1)) < at
        below = torch.where(reached, below + (1 << bit), below)
    return below


def stacked(curves: Sequence[Tensor], *, at_least: int) -> Tensor:
    """Curves of different lengths as rows of one tensor. Short curves repeat their last number."""
    length = max(at_least, *map(len, curves))
    return torch.stack([torch.cat([curve, curve[-1:].expand(length - len(curve))]) for curve in curves])
