"""Cross-entropy of scaled and shifted logits; scale and offsets are learned on the validation set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from calibrant.arguments import in_range, one_of, ordered_pair
from calibrant.kernels import Block, Composition, visit
from calibrant.layout import Elements, Index
from calibrant.losses.adaptive import SEVERAL_PASSES, AdaptiveLoss
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy
from calibrant.losses.evidence import shrunk
from calibrant.losses.margin import margin_penalty
from calibrant.statistics import Statistics, sum_dtype

Offset = Literal["learned", "none"]

_FARTHEST = -1e6
"""Logits further below the largest count as this far in the statistics: the square must fit into float32."""

_LARGEST = 0.5
"""The largest step of the log-temperature. Newton's step is too long where predictions are nearly certain."""

_PATIENCE = 16.0
"""The largest multiple of the lead. Steps in one direction double it, any other step sets it back to 1."""

_LONGEST_LEAD = 1.0
"""The largest lead of the logarithm of the scale."""

_PRIOR = 10.0
"""Elements of every class that are taken as predicted and observed, so that rare classes move slowly."""

_WIDEST = 10.0
"""The largest offset."""

_WORRYING = 5.0
"""An offset beyond this, a factor of 148 in the odds, is more than class frequencies explain."""

_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class ScaleStatistics(Statistics):
    """Sums over elements that say which temperature and which offsets would calibrate the plain logits.

    With ``p`` the softmax of the plain logits ``l``, and ``g = E_p[l] - l_y``:

    Attributes:
        slope: the sum of ``g``, the derivative of the NLL by the inverse temperature.
        squares: the sum of ``g²``.
        curvature: the sum of ``Var_p[l]``, the second derivative.
        predicted: ``(K,)``, the sum of ``p_k``.
        spread: ``(K,)``, the sum of ``p_k (1 - p_k)``.
        observed: ``(K,)``, the number of elements of class k.
    """

    slope: Tensor
    squares: Tensor
    curvature: Tensor
    predicted: Tensor
    spread: Tensor
    observed: Tensor


class LearnedScale(AdaptiveLoss):
    """Cross-entropy of ``u = scale · l + offset``, both learned on validation data (key ``ada-scale``).

    ``(-log softmax(u)_y + w · mean_k max(0, max_j u_j - u_k - m)) / scale``. The model is used with its plain
    logits l. If they are over-confident on the validation set, the scale grows: the loss then sees sharper
    logits than the model gives, so the model settles at milder ones. If a class is predicted too often, its
    offset grows, so that the model lowers its logit. The division keeps the size of the gradient, so that
    learning rates that suit cross-entropy suit this loss. Nothing has to be tuned to the data.

    A pass takes the Newton step ``t`` of the log-temperature that would calibrate the plain logits, and for
    every class the logarithm ``d_k`` of how many times too often it is predicted. Both are shrunk by their
    standard errors, then ``log scale ← log scale + rate · t`` and ``offset_k ← offset_k + rate · d_k``,
    centred. Until the next pass the loss uses ``scale · exp(lead · gain · t)``: this lead compensates for the
    lag of the network. The gain is 1, and doubles with every further step in the same direction, up to 16: a
    network that hardly follows, such as one with a small learning rate, is pulled harder. With
    ``offset="none"``, offsets stay at their start.

    Class weights apply to the loss, not to what it learns: offsets follow the classes of the validation set.

    It is temperature scaling (Guo et al., ICML 2017) moved into training. With ``class_counts`` and
    ``offset="none"`` it is balanced softmax (Ren et al., NeurIPS 2020; logit adjustment, Menon et al.,
    ICLR 2021) with a learned scale.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    Args:
        num_classes: K.
        offset: ``"learned"``, or ``"none"`` to learn the scale alone.
        class_counts: K numbers of training elements, whose centred logarithms are the initial offsets; None
            for offsets of 0.
        rate: the fraction of a step that is taken at a pass.
        lead: the multiple of the step by which the scale leads until the next pass. Below ``1 - rate / 2``,
            the swings of a network that follows at once die out.
        evidence: a step within this many standard errors of 0 is not taken, and larger ones are shrunk.
        margin: m; distances between scaled logits up to this size are not penalised. Where the training set
            is memorised, the likelihood is 1 whatever the scale is. The penalty then makes the network follow
            the scale. Few training elements reach this margin otherwise.
        weight: w, the weight of the penalty, as in `MarginSmoothing`.
        scale_range: bounds of the scale.
        **shared: see `Loss`.

    Attributes:
        scale: the scale in use, ``()``.
        offset: the offsets, ``(K,)``.
        log_scale: the logarithm of the scale without lead, ``()``.
        gain: the multiple of the lead in use, ``()``.
        step: the last step t, ``()``.

    >>> import torch
    >>> loss = LearnedScale(2)
    >>> logits, target = torch.tensor([[4.0, 0.0]] * 100), torch.tensor([0, 1] * 50)  # sure, and half wrong
    >>> loss.observe(logits, target)
    >>> statistics = loss.adapt()
    >>> loss.scale > 1, loss.offset[0] > 0
    (tensor(True), tensor(True))
    """

    accepts_probabilities = True
    search_space = (Range("rate", 0.1, 1, log=True), Range("margin", 10, 50, log=True))

    scale: Tensor
    offset: Tensor
    log_scale: Tensor
    gain: Tensor
    step: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        offset: Offset = "learned",
        class_counts: Tensor | Sequence[float] | None = None,
        rate: float = 0.5,
        lead: float = 0.5,
        evidence: float = 1.0,
        margin: float = 30.0,
        weight: float = 0.01,
        scale_range: tuple[float, float] = (0.1, 20.0),
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self._offset_rule = one_of("offset", offset, get_args(Offset))
        self.class_counts = None if class_counts is None else _checked_counts(class_counts, num_classes)
        self.rate = in_range("rate", rate)
        self.lead = in_range("lead", lead)
        self.evidence = in_range("evidence", evidence)
        self.margin = in_range("margin", margin)
        self.weight = in_range("weight", weight)
        self.scale_range = ordered_pair("scale_range", scale_range)
        if self.scale_range[0] <= 0:
            raise ValueError(f"scale_range must begin above 0, got {scale_range}")
        start = [math.log(count) for count in self.class_counts or [1.0] * num_classes]
        mean = sum(start) / num_classes
        scale = min(max(1.0, self.scale_range[0]), self.scale_range[1])
        self.register_learned("scale", scale)
        self.register_learned("offset", [value - mean for value in start])
        self.register_learned("log_scale", math.log(scale), reported=False)
        self.register_learned("gain", 1.0, reported=False)
        self.register_learned("step", 0.0, reported=False)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "offset": self._offset_rule}  # the attribute is what was learned

    def advice(self) -> str | None:
        low, high = self.scale_range
        if self.passes < SEVERAL_PASSES:
            return None
        largest = float(self.offset.abs().max())
        if low < high and not math.log(low) < self.log_scale < math.log(high):
            what = f"the scale is at a bound of scale_range=({low:g}, {high:g})"
            remedies = "more steps between passes, a smaller margin, weight decay"
        elif self._offset_rule == "learned" and largest > _WORRYING:
            what = f"an offset has grown to {largest:.2g} (bound {_WIDEST:g})"
            remedies = "offset='none', more steps between passes"
        else:
            return None
        return f"{what}: the network does not follow it. Try {remedies}, or a calibrator afterwards"

    def composition(self) -> Composition:
        factor = self.weight / self.num_classes
        penalty = margin_penalty("hinge", margin=self.margin, factor=factor) if self.weight else None
        return Composition(cross_entropy(), penalty, self.scale, self.offset, divided=True)

    def measure(self, elements: Elements) -> ScaleStatistics:
        dtype = sum_dtype(elements.logits.device)
        axes = [axis for axis in range(elements.logits.ndim) if axis != 1]

        def sums(index: Index, block: Block) -> list[Tensor]:
            valid = elements.valid[index[:1] + index[2:]].unsqueeze(1)
            p = block.exponential / block.total
            shifted = block.shifted.clamp_min(_FARTHEST)
            mean = (p * shifted).sum(1, keepdim=True)
            variance = (p * (shifted - mean).square()).sum(1, keepdim=True)
            true = block.target if block.soft else torch.zeros_like(p).scatter_(1, block.target, 1)
            slope = torch.where(valid, mean - (true * shifted).sum(1, keepdim=True), 0)
            p, true = torch.where(valid, p, 0), torch.where(valid, true, 0)
            return [
                valid.sum(dtype=dtype),
                slope.sum(dtype=dtype),
                slope.square().sum(dtype=dtype),
                torch.where(valid, variance, 0).sum(dtype=dtype),
                *(each.sum(axes, dtype=dtype) for each in (p, p * (1 - p), true)),
            ]

        return ScaleStatistics(*visit(elements, sums))

    def update(self, statistics: Statistics) -> None:
        assert isinstance(statistics, ScaleStatistics)
        low, high = self.scale_range
        curvature = statistics.curvature.clamp_min(_TINY)  # 0 where all predictions are certain
        error = statistics.squares.sqrt() / curvature
        step = shrunk(statistics.slope / curvature, error, self.evidence).clamp(-_LARGEST, _LARGEST)
        self.gain.copy_(torch.where(step * self.step > 0, 2 * self.gain, 1.0).clamp_max(_PATIENCE))
        self.step.copy_(step)
        self.log_scale.add_(self.rate * step).clamp_(math.log(low), math.log(high))
        lead = (self.lead * self.gain * step).clamp(-_LONGEST_LEAD, _LONGEST_LEAD)
        self.scale.copy_((self.log_scale + lead).exp().clamp(low, high))
        if self._offset_rule == "none":
            return
        expected = statistics.observed + _PRIOR
        error = statistics.spread.sqrt() / expected
        excess = shrunk(((statistics.predicted + _PRIOR) / expected).log(), error, self.evidence)
        self.offset.add_(self.rate * excess)
        self.offset.sub_(self.offset.mean()).clamp_(-_WIDEST, _WIDEST)


def _checked_counts(counts: Tensor | Sequence[float], num_classes: int) -> tuple[float, ...]:
    try:
        found = torch.as_tensor(counts, dtype=torch.float64, device="cpu")
        valid = found.shape == (num_classes,) and bool(((found > 0) & found.isfinite()).all())
    except (TypeError, ValueError, RuntimeError):
        valid = False
    if not valid:
        raise ValueError(
            f"class_counts must hold num_classes={num_classes} finite numbers above 0, got {counts!r}"
        )
    return tuple(found.tolist())
