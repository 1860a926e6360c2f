"""Penalty functions of a constraint ``z <= 0``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.kernels import Factor, MarginPenalty, PenaltyFunction, SumAndSlope, Value, sum_over_classes

New = Callable[[], Tensor | None]

Prepare = Callable[[Tensor, Tensor, Value, Value], PenaltyFunction]
"""From the penalty weight ρ and the multiplier λ, ``(1, K[, 1])``, an offset and a scale, each a number or
one per class, to a function of ``x``: the penalty of ``z = offset + scale·x``. What depends on the parameters
alone is computed once."""


@dataclass(frozen=True)
class Penalty:
    """A penalty ``P(z, ρ, λ)`` and its slope ``∂P/∂z``, a pair of pure functions.

    The slope is never negative; its mean over the validation data is the next multiplier.

    Attributes:
        prepare: computes both together, class by class; `value` and `slope` are derived from it.

    >>> violation, weight, multiplier = torch.tensor([-1.0, 0.5]), torch.tensor(2.0), torch.tensor(1.0)
    >>> PENALTIES["phr"].slope(violation, weight, multiplier)  # max(0, λ + ρz)
    tensor([0., 2.])
    """

    prepare: Prepare

    def value(self, violation: Tensor, weight: Tensor, multiplier: Tensor) -> Tensor:
        """``P``, elementwise on broadcastable tensors."""
        return self._elementwise(lambda result: result[0], violation, weight, multiplier)

    def slope(self, violation: Tensor, weight: Tensor, multiplier: Tensor) -> Tensor:
        """``∂P/∂z``, elementwise on broadcastable tensors."""
        return self._elementwise(lambda result: result[1](1.0), violation, weight, multiplier)

    def _elementwise(self, select: Callable[[SumAndSlope], Tensor], *arguments: Tensor) -> Tensor:
        shape = sum(arguments[1:], arguments[0]).shape
        violation, weight, multiplier = (argument.expand(shape).reshape(-1, 1) for argument in arguments)
        result = select(self.prepare(weight, multiplier, 0.0, 1.0)(violation, lambda: None))
        return result.reshape(shape)

    def on_margin(self, margin: Value, *, unit: Value, weight: Tensor, multiplier: Tensor) -> MarginPenalty:
        """This penalty of ``z_k = (max_j l_j - l_k - margin_k) / unit_k``, summed over classes.

        Args:
            margin: distances between logits up to this size are no violation; a number, or one per class.
            unit: the distance between logits that counts as a violation of 1; likewise.
            weight: ρ along the class axis, ``(1, K[, 1])``.
            multiplier: λ, likewise.
        """
        return MarginPenalty(
            self.prepare(weight, multiplier, -margin / unit, -1 / unit), margin=margin, unit=unit
        )


# Each function makes as few passes over the elements as possible and works in place on its own tensors: on a
# CPU one pass over a block costs about a tenth of a whole cross-entropy.


def _per_class(x: Tensor, factor: Tensor, bias: Tensor, new: New) -> Tensor:
    """``bias_k + factor_k·x_k``."""
    if x.ndim == 2:
        return torch.addcmul(bias, x, factor, out=new())
    return torch.mul(x, factor, out=new()).add_(bias)  # two passes, yet faster along this axis


def _phr(weight: Tensor, multiplier: Tensor, offset: Value, scale: Value) -> PenaltyFunction:
    # Both branches in one: with m = max(ρz, -λ) the penalty is m²/2ρ + mλ/ρ, and its slope m + λ. The shorter
    # ((m + λ)² - λ²) / 2ρ cancels: where λ is large, hardly a digit of m would be left.
    bias, factor, half, ratio = weight * offset, weight * scale, 0.5 / weight, multiplier / weight
    least = -multiplier

    def evaluate(x: Tensor, new: New) -> SumAndSlope:
        out = new()
        change = torch.maximum(_per_class(x, factor, bias, lambda: out), least, out=out)
        square = torch.mul(change, change, out=new())
        value = sum_over_classes(square, half) + sum_over_classes(change, ratio)

        def slope(by: Factor) -> Tensor:
            if isinstance(by, Tensor):
                return change.add_(multiplier).mul_(by)
            return torch.add(multiplier * by, change, alpha=by, out=out)  # in one pass

        return value, slope

    return evaluate


# P2 and P3 are smooth at 0, where both branches are 0. With u = ρz they are therefore the sum of a function
# of a = max(u, 0) and one of r = 1 / (1 - min(u, 0)): the lower branch is λ/ρ (r - 1), its slope λr². This
# avoids selecting a branch per element, which is slow on a CPU. relu instead of clamp_min: one of max and min
# must have derivative 0 at u = 0, or autograd finds the slope 2λ there instead of λ.


def _branches(weight: Tensor, offset: Value, scale: Value) -> Callable[[Tensor, New], tuple[Tensor, Tensor]]:
    """From ``x`` to ``a`` and ``-r``."""
    bias, factor = weight * offset, weight * scale

    def branches(x: Tensor, new: New) -> tuple[Tensor, Tensor]:
        violation = _per_class(x, factor, bias, new)
        out = new()
        above = violation.relu() if out is None else torch.clamp_min(violation, 0, out=out)
        return above, violation.clamp_max_(0).sub_(1).reciprocal_()

    return branches


def _p2(weight: Tensor, multiplier: Tensor, offset: Value, scale: Value) -> PenaltyFunction:
    # λ/ρ (a + a² + r - 1) + a³/6ρ, with slope λ (2a + r²) + a²/2.
    branches, ratio, sixth = _branches(weight, offset, scale), multiplier / weight, 1 / (6 * weight)
    constant = ratio.sum(1, keepdim=True)

    def evaluate(x: Tensor, new: New) -> SumAndSlope:
        above, below = branches(x, new)
        square = torch.mul(above, above, out=new())
        cube = torch.mul(above, square, out=new())
        value = sum_over_classes(above, ratio) + sum_over_classes(square, ratio)
        value = value + sum_over_classes(cube, sixth) - sum_over_classes(below, ratio) - constant

        def slope(by: Factor) -> Tensor:
            slope = below.square_().add_(above, alpha=2).mul_(multiplier * by)
            if isinstance(by, Tensor):
                return slope.add_(square.mul_(by), alpha=0.5)
            return slope.add_(square, alpha=0.5 * by)

        return value, slope

    return evaluate


def _p3(weight: Tensor, multiplier: Tensor, offset: Value, scale: Value) -> PenaltyFunction:
    # λ/ρ (a + a² + r - 1), with slope λ (2a + r²).
    branches, ratio = _branches(weight, offset, scale), multiplier / weight
    constant = ratio.sum(1, keepdim=True)

    def evaluate(x: Tensor, new: New) -> SumAndSlope:
        above, below = branches(x, new)
        upper = torch.addcmul(above, above, above, out=new())
        value = sum_over_classes(upper, ratio) - sum_over_classes(below, ratio) - constant
        return value, lambda by: below.square_().add_(above, alpha=2).mul_(multiplier * by)

    return evaluate


PENALTIES: dict[str, Penalty] = {"phr": Penalty(_phr), "p2": Penalty(_p2), "p3": Penalty(_p3)}
"""Augmented-Lagrangian penalties by name: Powell-Hestenes-Rockafellar, P2 and P3."""


def hinge(margin: Value, multiplier: Tensor | None = None) -> PenaltyFunction:
    """``Σ_k λ_k max(0, max_j l_j - l_k - margin_k)``, for `MarginPenalty` in units of 1.

    Args:
        margin: distances between logits up to this size are not penalised; a number, or one per class.
        multiplier: λ along the class axis, ``(1, K[, 1])``; None for ones.
    """
    factor = -1.0 if multiplier is None else -multiplier

    def evaluate(shifted: Tensor, new: New) -> SumAndSlope:
        # Minus the excess. For one number that is softshrink, in a single pass: shifted + margin below
        # -margin, 0 above it.
        out = new()
        if out is None:
            # relu, because its derivative at 0 is 0, as that of softshrink.
            excess = (
                -(-shifted - margin).relu() if isinstance(margin, Tensor) else F.softshrink(shifted, margin)
            )
        elif isinstance(margin, Tensor):
            excess = torch.add(shifted, margin, out=out).clamp_max_(0)
        else:
            excess = torch.ops.aten.softshrink.out(shifted, margin, out=out)
        return sum_over_classes(excess, factor), lambda by: excess.sign_().mul_(factor * by)

    return evaluate
