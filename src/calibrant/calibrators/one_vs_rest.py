"""What calibrators of one probability at a time share: questions asked of a row, a row of answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from calibrant.calibrators.base import Calibrator

Variant = Literal["one-vs-rest", "top-label"]
"""What is asked: of every class whether it is this one, or only whether the prediction is right."""

FLOOR = 1e-12
"""The least probability given, so that logarithms stay finite."""

# Of the predicted class's probability, the most that another class may have: far enough below 1 that the
# prediction survives rounding to float16.
_RUNNER_UP = 0.99

# A trace of the uniform distribution that is in every row, so that a class ruled out by its logit has a
# logarithm that float16 can hold.
_TRACE = 1e-30

# Numbers in one block of classes during a fit: few enough that temporaries stay near the cores.
_BLOCK = 1 << 19


class BinaryMaps(Calibrator):
    """Calibrators with a map of one probability for each class.

    Attributes:
        ceilings: ``(K,)``, the most that a class may get: 1, or ``1/(N + K)``, Laplace's estimate, for a
            class that did not occur in the N samples. A single map of the confidence has none.
    """

    per_class = True
    ceilings: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ceilings", None)

    def learn_ceilings(self, rows: Tensor, labels: Tensor) -> None:
        """Keep which classes occur."""
        samples, classes = rows.shape
        if self.per_class:
            absent = labels.bincount(minlength=classes) == 0
            ones = torch.ones(classes, dtype=torch.float64, device=rows.device)
            self.learn("ceilings", ones.masked_fill(absent, 1 / (samples + classes)))

    def limits(self, like: Tensor) -> Tensor | None:
        """The ceilings, in another tensor's type and on its device; files of older versions lack them."""
        return None if self.ceilings is None else self.learned("ceilings", like)


def precise(rows: Tensor) -> Tensor:
    """The rows in float64, if the device has it: in float32 much of a confident network's data ties at 1."""
    return rows if rows.device.type == "mps" else rows.double()


def probabilities(rows: Tensor, variant: Variant) -> Tensor:
    """The probabilities to calibrate: ``(K, N)`` of every class, or ``(1, N)`` of the predicted one."""
    rows = precise(rows).softmax(-1)
    return rows.T.contiguous() if variant == "one-vs-rest" else rows.amax(-1).unsqueeze(0)


def log_probabilities(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``log s`` and ``log(1 - s)`` of every class, each ``(N, K)``, also where s rounds to 1."""
    # The bound stands for classes ruled out by -inf.
    rows = precise(rows)
    rows = (rows - rows.amax(-1, keepdim=True)).clamp_min(-1e30)
    present = rows.log_softmax(-1)
    # All but the predicted class have s ≤ 1/2, where the plain formula is accurate.
    is_top = _is_top(rows)
    absent = torch.log1p(-present.masked_fill(is_top, -1.0).exp())
    absent_top = present.masked_fill(is_top, -torch.inf).logsumexp(-1, keepdim=True)
    return present, torch.where(is_top, absent_top, absent)


def outcomes(rows: Tensor, labels: Tensor, variant: Variant) -> Tensor:
    """The answers to what `probabilities` asks, of the same shape."""
    if variant == "top-label":
        return (rows.argmax(-1) == labels).unsqueeze(0)
    return labels == torch.arange(rows.shape[1], device=rows.device).unsqueeze(1)


def questions(rows: Tensor, labels: Tensor, variant: Variant) -> Iterator[tuple[Tensor, Tensor]]:
    """`probabilities` and `outcomes`, ``(C, N)`` each, some classes at a time."""
    at_least_two(rows)
    asked, answers = probabilities(rows, variant), outcomes(rows, labels, variant)
    size = classes_at_once(rows)
    yield from zip(torch.split(asked, size), torch.split(answers, size), strict=True)


def classes_at_once(rows: Tensor) -> int:
    """How many classes to fit together."""
    return max(1, _BLOCK // len(rows))


def at_least_two(rows: Tensor) -> None:
    """Refuse to calibrate a single class, whose probability is always 1."""
    if rows.shape[1] < 2:
        raise ValueError(f"there must be at least 2 classes to calibrate, got {rows.shape[1]}")


def distributions(rows: Tensor, calibrated: Tensor, variant: Variant, limits: Tensor | None = None) -> Tensor:
    """Log-probabilities ``(N, K)`` from what became of `probabilities`."""
    if variant == "top-label":
        return with_confidence(rows, calibrated.squeeze(0))
    rows, shares = precise(rows), calibrated.T
    if limits is None:
        return normalised(shares, rows.softmax(-1))
    # What data without a class say of it must not keep a row from being one of zeros.
    unseen = limits < 1
    original = rows.masked_fill(unseen, -torch.inf).softmax(-1)
    return within(limits, rows, normalised(shares.masked_fill(unseen, 0), original))


def within(limits: Tensor, rows: Tensor, logarithms: Tensor) -> Tensor:
    """Log-probabilities ``(N, K)`` in which no class that did not occur has more than its limit.

    Such a class keeps its original probability, or gets the limit if that is less; the other classes
    share the rest as ``logarithms`` say. One-versus-rest maps alone cannot tell: where every class that
    did occur is improbable, scaling to a sum of 1 would make a class certain that was never seen.
    """
    unseen = limits < 1
    kept = torch.minimum(rows.log_softmax(-1), limits.log()).clamp_min(math.log(FLOOR))
    taken = kept.exp().masked_fill(~unseen, 0).sum(-1, keepdim=True)
    others = logarithms.masked_fill(unseen, -torch.inf).log_softmax(-1)
    return torch.where(unseen, kept, others + torch.log1p(-taken))


def normalised(calibrated: Tensor, original: Tensor) -> Tensor:
    """Logarithms of one probability per class ``(N, K)``, scaled to sum to 1.

    A row whose probabilities are all 0 keeps its original ones; NaN stays NaN.
    """
    total = calibrated.sum(-1, keepdim=True)
    shares = torch.where(total > 0, calibrated / total.clamp_min(torch.finfo(total.dtype).tiny), original)
    return shares.clamp_min(FLOOR).log().masked_fill(original.isnan(), torch.nan).log_softmax(-1)


def with_confidence(rows: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities that give the predicted class a confidence ``(N,)`` and keep the order of classes.

    The other classes share the rest in proportion. Where that would lift one of them above the predicted
    class, their shares are mixed with equal shares, no more than needed. A confidence below 1/K is no
    confidence of a prediction and becomes 1/K, nearly: the runner-up stays 1 % below.
    """
    rows = precise(rows)
    others = rows.shape[1] - 1
    confidence = confidence.clamp(1 / (1 + _RUNNER_UP * others), 1 - FLOOR).unsqueeze(-1)
    is_top = _is_top(rows)
    relative = (rows - rows.amax(-1, keepdim=True)).clamp_min(-1e30)
    shares = relative.masked_fill(is_top, -torch.inf).log_softmax(-1)
    largest = shares.amax(-1, keepdim=True).exp()
    allowed = _RUNNER_UP * confidence / (1 - confidence)
    equal = ((largest - allowed) / (largest - 1 / others).clamp_min(_TRACE)).clamp(_TRACE, 1 - FLOOR)
    mixed = torch.logaddexp(shares + torch.log1p(-equal), equal.log() - math.log(others))
    return torch.where(is_top, confidence.log(), torch.log1p(-confidence) + mixed)


def _is_top(rows: Tensor) -> Tensor:
    top = rows.argmax(-1, keepdim=True)
    return torch.zeros_like(rows, dtype=torch.bool).scatter(-1, top, True)


def ordering(numbers: Tensor) -> Tensor:
    """Indices that sort the last axis; equal numbers in any order."""
    if numbers.device.type != "cpu":
        return numbers.argsort(-1)
    # NumPy's is five times as fast on a CPU.
    return torch.from_numpy(numbers.numpy().argsort(-1))


def interpolated(points: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Piecewise-linear curves ``(C, P)``, P at least 2, at ``(C, N)``; constant beyond their ends."""
    at = at.clamp(points[:, :1], points[:, -1:])
    right = torch.searchsorted(points, at).clamp(1, points.shape[1] - 1)
    left = right - 1
    from_point, from_value = points.gather(1, left), values.gather(1, left)
    # Curves end in copies of their last point, where there is no width to divide by.
    width = (points.gather(1, right) - from_point).clamp_min(torch.finfo(points.dtype).tiny)
    return torch.lerp(from_value, values.gather(1, right), ((at - from_point) / width).clamp(0, 1))


def stepped(edges: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Step functions ``(C, E + 1)`` at ``(C, N)``, constant on bins ``(lo, hi]`` between edges ``(C, E)``."""
    return values.gather(1, torch.searchsorted(edges, at))


def stacked(curves: Sequence[Tensor], *, at_least: int = 0) -> Tensor:
    """Curves of different lengths as rows of one tensor, filled up with copies of their last numbers."""
    length = max(at_least, *(len(curve) for curve in curves), 0)
    return torch.stack([torch.cat([curve, curve[-1:].expand(length - len(curve))]) for curve in curves])
