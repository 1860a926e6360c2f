"""Plots of formulas: losses and exponents by the probability of the true class, and penalties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from torch import Tensor

from calibrant.losses import (
    PENALTIES,
    CalFocal,
    DualFocal,
    Focal,
    InverseFocal,
    Loss,
    Penalty,
    SampleDependentFocal,
)
from calibrant.reports.plots import checks, drawing

_PROBABILITIES = torch.linspace(0.002, 0.998, 499, dtype=torch.float64, device="cpu")


def focal_losses(ax: Axes | None = None, *, accuracy: float = 0.8, title: str | None = None) -> Axes:
    """Plot cross-entropy and focal losses against the probability of the true class.

    Args:
        accuracy: the accuracy A of the validation bin, for CalFocal.

    >>> ax = focal_losses()
    >>> [line.get_label() for line in ax.lines][:3]
    ['CE', 'FL-3', 'FL-5']
    """
    losses: dict[str, Loss] = {"CE": Focal(2, gamma=0), "FL-3": Focal(2, gamma=3), "FL-5": Focal(2, gamma=5)}
    losses |= {f"InvFL-{gamma}": InverseFocal(2, gamma=gamma) for gamma in (1, 2)}
    losses |= {f"CF-{rate}": _calfocal(rate, accuracy) for rate in (1, 10, 100)}
    ax = _curves({name: _values(loss)[0] for name, loss in losses.items()}, ax, "Loss", title)
    return _with_accuracy(ax, accuracy, 3)


def exponents(ax: Axes | None = None, *, accuracy: float = 0.8, title: str | None = None) -> Axes:
    """Plot the exponent γ of focal losses against the probability of the true class.

    Args:
        accuracy: the accuracy A of the validation bin, for CalFocal.

    >>> [line.get_label() for line in exponents().lines][:2]
    ['FL-3', 'FLSD-53']
    """
    p, steps = _PROBABILITIES, SampleDependentFocal(2)
    by_threshold = torch.where(p < steps.threshold, steps.gamma_below, steps.gamma_above)
    curves = {"FL-3": torch.full_like(p, 3), "FLSD-53": by_threshold.to(p)}
    curves |= {f"CF-{rate}": _calfocal(rate, accuracy).look_up()(p) for rate in (1, 10)}
    ax = _curves(curves, ax, "Exponent γ", title)
    return _with_accuracy(ax, accuracy, 8)


def dual_focal_phi(
    ax: Axes | None = None, *, gamma: float = 1.0, lower: float = 0.3, title: str | None = None
) -> Axes:
    """Plot ``φ(p) = -p ∂L/∂p`` of focal and dual focal loss, which tells over- from under-confidence.

    Where φ rises, up to a dotted line, the minimiser of the loss is over-confident. It is under-confident
    to the right of the point where φ falls below 1.

    Args:
        gamma: γ of both losses.
        lower: q of the dual focal loss, the largest probability below that of the true class.

    >>> ax = dual_focal_phi()
    >>> bool((ax.lines[1].get_ydata() > ax.lines[0].get_ydata()).all())  # dual focal above focal
    True
    """
    losses = {
        "Focal": Focal(2, gamma=gamma),
        f"Dual focal, q = {lower:g}": DualFocal(2, gamma=gamma, constant=lower),
    }
    curves = {name: _values(loss)[1] for name, loss in losses.items()}
    ax = _curves(curves, drawing.given_or_new(ax, 2.7), f"φ, γ = {gamma:g}", title)
    ax.axhline(1, color=drawing.GREY, linewidth=0.6)
    for number, curve in enumerate(curves.values()):
        highest = int(curve.argmax())
        style = {**drawing.line_style(number), "linestyle": ":"}
        ax.plot([float(_PROBABILITIES[highest])] * 2, [0, float(curve[highest])], linewidth=0.9, **style)
    ax.set_ylim(bottom=0)
    dotted = Line2D([], [], color=drawing.GREY, linestyle=":", linewidth=0.9)
    dotted.set_label("Maximum of φ: over-confident to its left")
    return drawing.legend_below(ax, [*ax.get_legend_handles_labels()[0], dotted])


def penalties(
    data: Mapping[str, Penalty] = PENALTIES,
    ax: Axes | None = None,
    *,
    multiplier: float = 1.0,
    penalty_weight: float = 1.0,
    violations: tuple[float, float] = (-2.0, 2.0),
    title: str | None = None,
) -> Axes:
    """Plot penalties as functions of the violation ``z``.

    Args:
        data: the penalties by name.
        multiplier: the multiplier λ.
        penalty_weight: the penalty weight ρ.
        violations: the range of z.

    >>> ax = penalties(penalty_weight=2.0)
    >>> ax.get_ylabel(), [text.get_text() for text in ax.get_legend().get_texts()]
    ('Penalty, λ = 1, ρ = 2', ['PHR', 'P2', 'P3'])
    """
    checks.check_filled(data, "a mapping from name to Penalty")
    for name, value in (("multiplier", multiplier), ("penalty_weight", penalty_weight)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    low, high = violations
    if not -float("inf") < low < high < float("inf"):
        raise ValueError(f"violations must be a range (low, high) of finite numbers, got {violations}")
    curves = {name.upper(): (penalty, multiplier, penalty_weight) for name, penalty in data.items()}
    ax = _penalties(curves, drawing.given_or_new(ax, 2.4), low, high)
    drawing.finish(ax, "Violation z", f"Penalty, λ = {multiplier:g}, ρ = {penalty_weight:g}", title)
    return drawing.legend_inside(ax, "upper left")  # penalties increase: this corner is free


def penalty_weights(
    data: Sequence[tuple[float, float]] = ((1.0, 1.0), (1.0, 4.0), (1.0, 16.0), (0.2, 1.0), (3.0, 1.0)),
    ax: Axes | None = None,
    *,
    penalty: str = "phr",
    title: str | None = None,
) -> Axes:
    """Plot a penalty for several multipliers λ and penalty weights ρ.

    Args:
        data: pairs ``(λ, ρ)``.
        penalty: a key of `calibrant.losses.PENALTIES`.

    >>> ax = penalty_weights([(1.0, 1.0), (1.0, 10.0)])
    >>> [line.get_label() for line in ax.lines[2:]]
    ['λ = 1, ρ = 1', 'λ = 1, ρ = 10']
    """
    curves = {f"λ = {pair[0]:g}, ρ = {pair[1]:g}": (PENALTIES[penalty], *pair) for pair in data}
    ax = _penalties(curves, drawing.given_or_new(ax, 2.6), -2, 2)
    ax.set_ylim(-2.5, 6)
    drawing.finish(ax, "Violation z", f"Penalty {penalty.upper()}", title)
    return drawing.legend_below(ax)


def _penalties(data: Mapping[str, tuple[Penalty, float, float]], ax: Axes, low: float, high: float) -> Axes:
    """Draw penalties, each with its multiplier λ and its weight ρ, for violations from low to high."""
    ax.axhline(0, color=drawing.GREY, linewidth=0.5)
    ax.axvline(0, color=drawing.GREY, linewidth=0.5)
    violation = torch.linspace(low, high, 401, dtype=torch.float64, device="cpu")
    for number, (label, (penalty, *numbers)) in enumerate(data.items()):
        multiplier, weight = map(violation.new_tensor, numbers)
        curve = penalty.value(violation, weight, multiplier)
        ax.plot(violation.numpy(), curve.numpy(), label=label, linewidth=1.2, **drawing.line_style(number))
    ax.set_xlim(low, high)
    return ax


def _calfocal(rate: float, accuracy: float) -> CalFocal:
    """CalFocal after a pass in which all bins had this accuracy."""
    with torch.device("cpu"):
        loss = CalFocal(2, rate=rate)
    loss.accuracy.fill_(accuracy)
    loss.passes.fill_(1)
    return loss


def _values(loss: Loss) -> tuple[Tensor, Tensor]:
    """The loss by the probability p of the true class, and ``-p ∂L/∂p``."""
    logit = torch.logit(_PROBABILITIES).requires_grad_()
    logits = torch.stack([logit, torch.zeros_like(logit)], dim=1)
    loss.reduction = "none"
    value = loss(logits, torch.zeros(len(logit), dtype=torch.long, device="cpu"))
    (slope,) = torch.autograd.grad(value.sum(), logit)
    return value.detach(), -slope / (1 - _PROBABILITIES)


def _curves(data: Mapping[str, Tensor], ax: Axes | None, ylabel: str, title: str | None) -> Axes:
    ax = drawing.given_or_new(ax, 2.2 + drawing.legend_height(data))
    for number, (name, curve) in enumerate(data.items()):
        style = drawing.line_style(number)
        ax.plot(_PROBABILITIES.numpy(), curve.numpy(), label=name, linewidth=1.2, **style)
    ax.set_xlim(0, 1)
    return drawing.finish(ax, "Probability p of the true class", ylabel, title)


def _with_accuracy(ax: Axes, accuracy: float, highest: float) -> Axes:
    """Mark the accuracy of the validation bin, and cut the vertical axis at ``highest``."""
    ax.set_ylim(0, highest)
    ax.axvline(accuracy, color=drawing.GREY, linewidth=0.6, label=f"Accuracy {accuracy:g}")
    return drawing.legend_below(ax)
