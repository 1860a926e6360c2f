"""Penalties of logit distances beyond a margin: the part that MbLS and both kinds of CALS share."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range, one_of, ordered_pair
from calibrant.kernels import Composition, MarginPenalty, Part, PenaltyTerm, Value, device_function
from calibrant.kernels.device import exact_per_class, per_class, two_sum
from calibrant.layout import along_classes, computing_dtype
from calibrant.losses.adaptive import SEVERAL_PASSES, AdaptiveLoss
from calibrant.losses.base import LossOptions
from calibrant.losses.cross_entropy import cross_entropy
from calibrant.losses.penalties import PENALTIES, hinge

if TYPE_CHECKING:
    import triton.language as tl

_LOW_CONFIDENCE = 0.7
"""A margin that does not allow this much confidence is likely to be too small."""


class _Parameters(NamedTuple):
    """What the GPU kernel reads for the classes of a tile, ``(1, BK)`` or one number for all."""

    margin: Any
    margin_rest: Any
    per_unit: Any
    weight: Any
    multiplier: Any


@device_function
def _parameters(numbers, columns, K):
    margin, rest = exact_per_class(numbers.margin, columns, K, 1.0)
    return _Parameters(
        margin,
        rest,
        1 / per_class(numbers.unit, columns, K, 1.0),
        per_class(numbers.weight, columns, K, 1.0),
        per_class(numbers.multiplier, columns, K, 0.0),
    )


@device_function
def _is_beyond(tile, top, by):
    """Whether a logit is further below the maximum than the margin, decided without rounding."""
    limit, rest = two_sum(top[:, None], -by.margin)
    limit, rest = two_sum(limit, rest - by.margin_rest)
    bits = limit.to(tl.int32, bitcast=True)
    above = tl.where(limit > 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
    return tile.inside & (tile.logits < tl.where(rest > 0, above, limit))


@device_function
def _reciprocal(x):
    """1 / x for x > 0, in two instructions; a division takes a dozen."""
    root = tl.rsqrt(x)
    return root * root


@device_function
def _penalty(tile, top, by, VARIANT):
    """The penalty of each class, and its slope by the logit distance."""
    shifted = tl.where(tile.inside, tile.shifted, 0.0)  # beyond the last class it is infinite
    if VARIANT == "hinge":
        violation = -shifted * by.per_unit - by.margin * by.per_unit
        value = by.multiplier * tl.maximum(violation, 0.0)
        slope = tl.where(_is_beyond(tile, top, by), by.multiplier, 0.0)
    elif VARIANT == "phr":
        by_unit = by.weight * by.per_unit
        change = tl.maximum(-by.margin * by_unit - shifted * by_unit, -by.multiplier)
        slope = change + by.multiplier
        value = change * (slope + by.multiplier) * (0.5 / by.weight)
    else:
        by_unit = by.weight * by.per_unit
        scaled = -by.margin * by_unit - shifted * by_unit  # the violation, times the weight
        above = tl.maximum(scaled, 0.0)
        below = _reciprocal(1 - tl.minimum(scaled, 0.0))
        inverse = _reciprocal(by.weight)
        ratio = by.multiplier * inverse
        slope = by.multiplier * (2 * above + below * below)
        if VARIANT == "p2":
            slope += 0.5 * above * above
            value = above * (ratio + above * (ratio + above * (inverse * 0.16666667))) + ratio * (below - 1)
        else:
            value = ratio * (above * above + above + (below - 1))
    return tl.where(tile.inside, value, 0.0), tl.where(tile.inside, slope * by.per_unit, 0.0)


@device_function
def _sums(tile, top, by, VARIANT, SOFT, ALONE):
    value, slope = _penalty(tile, top, by, VARIANT)
    return value, slope, tl.where(tile.shifted == 0, 1.0, 0.0)


@device_function
def _value(value, slope, ties, element, K, SOFT, ALONE):
    return value, 0.0, 0.0, slope / ties


@device_function
def _rest(tile, top, by, element, at_maximum, K, VARIANT, SOFT, ALONE):
    # As in `_sums`, so that the compiler sees that it has the slope already.
    _, slope = _penalty(tile, top, by, VARIANT)
    return tl.where(tile.shifted == 0, at_maximum[:, None], 0.0) - slope


ON_MARGIN = {
    variant: PenaltyTerm(_sums, _value, _rest, _parameters, variant) for variant in ("hinge", *PENALTIES)
}


def margin_penalty(
    variant: str,
    *,
    margin: Value,
    unit: Value = 1.0,
    weight: Value = 1.0,
    multiplier: Value = 1.0,
    factor: float = 1.0,
) -> Part:
    """A part ``factor · Σ_k P(z_k, ρ_k, λ_k)`` of a loss, with ``z_k = (max_j l_j - l_k - m_k) / unit_k``.

    Every number may be fixed, or a tensor of one number or of one per class.

    Args:
        variant: ``"hinge"`` for ``P = λ max(0, z)``, or one of `PENALTIES`.
        margin: m; logit distances up to this size are not penalised.
        unit: the logit distance that counts as a violation of 1.
        weight: ρ; unused by ``"hinge"``.
        multiplier: λ.
        factor: multiplies the sum.
    """

    def term(logits: Tensor) -> MarginPenalty:
        dtype = computing_dtype(logits)

        def copied(value: Value) -> Value:  # a graph must not see the next adaptation
            if not isinstance(value, Tensor):
                return value
            one = value.numel() == 1
            return value.reshape(()).to(dtype, copy=True) if one else along_classes(value, logits)

        def by_class(value: Value) -> Tensor:
            value = torch.as_tensor(value, dtype=dtype, device=logits.device)
            return along_classes(value.expand(logits.shape[1]), logits) if not value.ndim else value

        m, u, rho, lam = (copied(value) for value in numbers.values())
        if variant == "hinge":  # in units of 1, with the unit in its factor: fewer passes
            plain = not isinstance(lam, Tensor) and not isinstance(u, Tensor) and lam == u
            return MarginPenalty(hinge(m, None if plain else by_class(lam / u)), margin=m, unit=1.0)
        return PENALTIES[variant].on_margin(m, unit=u, weight=by_class(rho), multiplier=by_class(lam))

    numbers = {"margin": margin, "unit": unit, "weight": weight, "multiplier": multiplier}
    return Part(term, ON_MARGIN[variant], numbers, factor)


class ClassAdaptiveSmoothing(AdaptiveLoss):
    """Cross-entropy plus a margin penalty with a learned multiplier per class, or one for all classes.

    Subclasses write `margin_term`, and the rule that moves the multipliers.

    Attributes:
        multiplier: λ, ``(K,)``, or ``()`` for ``per="all"``.
    """

    accepts_probabilities = True

    multiplier: Tensor

    def __init__(
        self,
        num_classes: int,
        margin: float,
        multiplier_range: tuple[float, float],
        initial_multiplier: float,
        evidence: float,
        per: str = "class",
        /,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.margin = in_range("margin", margin)
        self.multiplier_range = ordered_pair("multiplier_range", multiplier_range)
        self.initial_multiplier = in_range("initial_multiplier", initial_multiplier)
        self.evidence = in_range("evidence", evidence)
        self.per = one_of("per", per, ["class", "all"])
        self.register_learned("multiplier", self.initial(self.initial_multiplier))

    def initial(self, value: float) -> float | list[float]:
        """A value for each class, or one for all."""
        return [value] * self.num_classes if self.per == "class" else value

    @abstractmethod
    def margin_term(self) -> Part:
        """The penalty under the current state."""

    @abstractmethod
    def idle(self) -> str | None:
        """What to change if the penalty has no effect under the current state; None if it has one."""

    def lower_margin(self, margin: float, expected: str) -> str:
        """The advice to try a lower margin, described by ``expected``, unless it would be useless."""
        highest = self._highest_confidence(margin)
        if highest < _LOW_CONFIDENCE:
            return (
                f"Train for longer: a margin of {margin:.2g} would allow no confidence above "
                f"{100 * highest:.0f} %"
            )
        return f"Try {expected}, or train for longer"

    def _highest_confidence(self, margin: float) -> float:
        """That of the largest logit if all others lie the margin below it."""
        return 1 / (1 + (self.num_classes - 1) * math.exp(-margin))

    def advice(self) -> str | None:
        if self.passes < SEVERAL_PASSES:
            return None
        if (idle := self.idle()) is not None:
            return (
                f"after {int(self.passes)} passes the penalty is still negligible, because the logits "
                f"lie closer together than the margin of {self.margin:g}: this is cross-entropy. {idle}"
            )
        low, high = self.multiplier_range
        if low < high and (reached := int((self.multiplier >= high).sum())):
            return (
                f"{reached} of {self.multiplier.numel()} multipliers are at the upper bound {high:g} of "
                f"multiplier_range. Try a margin above {self.margin:g}"
            )
        highest = self._highest_confidence(self.margin)
        if highest < _LOW_CONFIDENCE:
            return (
                f"with {self.num_classes} classes and logits at most the margin of {self.margin:g} apart, no "
                f"confidence can be above {100 * highest:.0f} %. If the model is right more often, try a "
                "larger margin"
            )
        return None

    def composition(self) -> Composition:
        return Composition(cross_entropy(), self.margin_term())
