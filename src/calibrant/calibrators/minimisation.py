"""Minimises a convex function of many parameters: L-BFGS with a solver for approximate curvature."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from calibrant.warning import warn

Solve = Callable[[Tensor], Tensor]
"""Multiplies a gradient by an approximate inverse of the curvature."""

Objective = Callable[[Tensor], tuple[float, Tensor, Solve]]
"""Maps parameters to the value, the gradient and a solver for the approximate curvature."""

Turn = tuple[Tensor, Tensor, Tensor]
"""A step, the change of the gradient along it, and the inverse of their product."""

_STEPS, _HISTORY = 1000, 30
_ROUNDING = 1e-14  # a relative gain that may be rounding
_GRADIENT = 1e-9  # of the mean negative log-likelihood: a fit ends below it
_TOLERATED = 1e-4  # a fit that stops above it warns


def minimise(objective: Objective, start: Tensor, what: str, *, enough: float) -> Tensor:
    """Minimise a convex function by preconditioned L-BFGS. The result is never worse than the start.

    ``what`` is the name of the calibrator, for warnings. The search ends when a step gains less than
    ``enough`` and the next one promises no more.
    """
    at = start
    value, slope, solve = objective(at)
    gain = math.inf
    history: list[Turn] = []
    for _ in range(_STEPS):
        if slope.abs().max() <= _GRADIENT:
            break
        step = -_direction(slope, solve, history)
        descent = float(slope @ step)
        if not descent < 0:
            history.clear()
            step = -solve(slope)
            descent = float(slope @ step)
        if max(gain, -descent / 2) < enough:
            break
        length = 1.0
        while length > 1e-12:
            trial = at + length * step
            result = objective(trial)
            if result[0] <= value + 1e-4 * length * descent:
                break
            # The minimum of the parabola through both values and the slope.
            bend = result[0] - value - length * descent
            length *= min(max(-length * descent / (2 * bend), 0.1), 0.5) if bend > 0 else 0.1
        else:
            break
        moved, turned = trial - at, result[1] - slope
        gain = value - result[0]
        if float(moved @ turned) > 0:
            history = [*history[1 - _HISTORY :], (moved, turned, 1 / (moved @ turned))]
        at, (value, slope, solve) = trial, result
        if gain <= _ROUNDING * abs(value) and float(moved.abs().max()) < 1e-9:
            break
    steepness = slope.abs().max().item()
    if steepness > _TOLERATED:
        warn(
            f"the fit of {what} did not converge (gradient {steepness:.1e}): it is usable and no worse than "
            "its starting point, but not optimal"
        )
    return at


def _direction(slope: Tensor, solve: Solve, history: list[Turn]) -> Tensor:
    """The gradient times the inverse curvature that solver and history approximate."""
    rest, factors = slope.clone(), []
    for moved, turned, inverse in reversed(history):
        factor = inverse * (moved @ rest)
        rest.addcmul_(factor, turned, value=-1)
        factors.append(factor)
    rest = solve(rest)
    if history:
        moved, turned, _ = history[-1]
        rest *= (moved @ turned) / (turned @ solve(turned))
    for (moved, turned, inverse), factor in zip(history, reversed(factors), strict=True):
        rest.addcmul_(torch.addcmul(factor, inverse, turned @ rest, value=-1), moved)
    return rest
