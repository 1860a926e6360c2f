"""Focal losses with a fixed exponent: cross-entropy times a power of the confidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import (
    Composition,
    FirstTerm,
    Formula,
    LogLikelihood,
    LowerProbability,
    Part,
    Value,
    device_function,
)
from calibrant.kernels.device import number
from calibrant.losses.base import Loss, LossOptions, Range

if TYPE_CHECKING:
    import triton.language as tl

LookUp = Callable[[Tensor], Tensor]
"""From the probabilities of the true class to exponents, negative for the inverse focal loss."""


def focal(
    device: FirstTerm | None,
    numbers: Mapping[str, Value],
    exponent: float | Callable[[], LookUp],
    *,
    lower: LowerProbability | float = 0.0,
    rate: Callable[[], Tensor] | None = None,
) -> Part:
    """``-(1-p+q)^γ log p`` as the first term of a loss; ``-(1+p-q)^|γ| log p``, the inverse, where γ < 0.

    The gradient is finite also where the base is 0 and γ < 1: there ``log p`` is 0 as well, and the limit of
    the gradient is 0, where the naive power gives infinity times 0. γ is not differentiated unless there is
    a ``rate``.

    Args:
        device: the GPU form; None for none.
        numbers: its numbers.
        exponent: γ; or a function that returns a `LookUp`, which copies what it needs of a learned state.
        lower: q, a term or a fixed number.
        rate: a function that returns ``d log γ / dp``, one number for all elements, to differentiate a γ that
            is looked up; None to hold γ fixed.
    """

    def term(logits: Tensor) -> Formula:
        look_up = exponent() if callable(exponent) else None
        rate_of_gamma = None if rate is None else rate()

        def value_and_slopes(log_p: Tensor, *lower_p: Tensor) -> tuple[Tensor, ...]:
            gamma: Tensor | float
            sign: Tensor | float
            if look_up is None:
                assert not callable(exponent)
                gamma, sign = abs(exponent), -1.0 if exponent < 0 else 1.0
            else:
                seen = log_p.detach() if rate_of_gamma is None else log_p
                gamma = look_up(seen.exp()).to(log_p.dtype)
                sign = torch.where(gamma < 0, -1.0, 1.0).to(log_p.dtype)
                gamma = gamma.abs()
            minus_doubt = log_p.expm1()
            distance = (lower if isinstance(lower, float) else lower_p[0]) - minus_doubt
            base = ((1 - sign) + sign * distance).clamp_min(torch.finfo(log_p.dtype).tiny)
            power = -base.pow(gamma)
            value = power * log_p
            by_base = sign * gamma * value / base
            by_log_p = power - by_base * (1 + minus_doubt)
            if rate_of_gamma is not None:
                by_gamma = value * base.log()
                by_log_p = by_log_p + by_gamma * gamma * rate_of_gamma.to(log_p.dtype) * (1 + minus_doubt)
            return (value, by_log_p, by_base) if lower_p else (value, by_log_p)

        return Formula(value_and_slopes, LogLikelihood(), *([] if isinstance(lower, float) else [lower]))

    return Part(term, device, numbers)


@device_function
def modulated(element, exponent, sign):
    """The focal term for exponents that are not negative; ``sign`` is -1 for the inverse."""
    base = (1 - sign) + sign * (element.lower + element.doubt)
    base = tl.maximum(base, 1.1754943508222875e-38)
    power = -tl.exp2(exponent * tl.log2(base))
    value = power * element.log_p
    by_base = sign * exponent * value / base
    return value, power - by_base * element.p, by_base


@device_function
def _focal(element, numbers):
    return modulated(element, number(numbers.gamma), 1.0)


@device_function
def _by_threshold(element, numbers):
    below = element.p < number(numbers.threshold)
    gamma = tl.where(below, number(numbers.gamma_below), number(numbers.gamma_above))
    return modulated(element, gamma, 1.0)


@device_function
def _inverse_focal(element, numbers):
    return modulated(element, number(numbers.gamma), -1.0)


FOCAL, BY_THRESHOLD, INVERSE_FOCAL = FirstTerm(_focal), FirstTerm(_by_threshold), FirstTerm(_inverse_focal)
DUAL_FOCAL = FirstTerm(_focal, uses_lower=True)


class Focal(Loss):
    """Focal loss ``-(1-p)^γ log p`` (key ``focal``).

    Lin et al., *Focal Loss for Dense Object Detection*, ICCV 2017; for calibration: Mukhoti et al.,
    *Calibrating Deep Neural Networks using Focal Loss*, NeurIPS 2020.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        gamma: γ, at least 0; 0 is cross-entropy.
        **shared: see `Loss`.

    >>> import torch
    >>> round(Focal(2, gamma=1)(torch.zeros(1, 2), torch.tensor([0])).item(), 4)
    0.3466
    """

    search_space = (Range("gamma", 0, 10),)

    def __init__(self, num_classes: int, *, gamma: float = 3.0, **shared: Unpack[LossOptions]) -> None:
        super().__init__(num_classes, **shared)
        self.gamma = in_range("gamma", gamma)

    def composition(self) -> Composition:
        return Composition(focal(FOCAL, {"gamma": self.gamma}, self.gamma))


class SampleDependentFocal(Loss):
    """Sample-dependent focal loss, FLSD-53 (key ``flsd``): focal, with γ chosen by ``p``.

    γ is ``gamma_below`` where ``p < threshold`` and ``gamma_above`` elsewhere, and is not
    differentiated.

    Mukhoti et al., *Calibrating Deep Neural Networks using Focal Loss*, NeurIPS 2020.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        gamma_below: γ of elements with low probability of the true class.
        gamma_above: γ of the others.
        threshold: where the two meet.
        **shared: see `Loss`.

    >>> import torch
    >>> round(SampleDependentFocal(2)(torch.zeros(1, 2), torch.tensor([0])).item(), 4)
    0.0866
    """

    search_space = (Range("gamma_below", 0, 10), Range("gamma_above", 0, 10), Range("threshold", 0.05, 0.5))

    def __init__(
        self,
        num_classes: int,
        *,
        gamma_below: float = 5.0,
        gamma_above: float = 3.0,
        threshold: float = 0.2,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.gamma_below = in_range("gamma_below", gamma_below)
        self.gamma_above = in_range("gamma_above", gamma_above)
        self.threshold = in_range("threshold", threshold, 0, 1)

    def composition(self) -> Composition:
        numbers = {
            "gamma_below": self.gamma_below,
            "gamma_above": self.gamma_above,
            "threshold": self.threshold,
        }

        def look_up(p: Tensor) -> Tensor:
            return torch.where(p < numbers["threshold"], numbers["gamma_below"], numbers["gamma_above"])

        return Composition(focal(BY_THRESHOLD, numbers, lambda: look_up))


class InverseFocal(Loss):
    """Inverse focal loss ``-(1+p)^γ log p`` (key ``inverse-focal``): pushes confidence up.

    Wang et al., *Rethinking Calibration of Deep Neural Networks: Do Not Be Afraid of
    Overconfidence*, NeurIPS 2021.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        gamma: γ, at least 0; 0 is cross-entropy.
        **shared: see `Loss`.

    >>> import torch
    >>> round(InverseFocal(2, gamma=1)(torch.zeros(1, 2), torch.tensor([0])).item(), 4)
    1.0397
    """

    search_space = (Range("gamma", 0, 5),)

    def __init__(self, num_classes: int, *, gamma: float = 2.0, **shared: Unpack[LossOptions]) -> None:
        super().__init__(num_classes, **shared)
        self.gamma = in_range("gamma", gamma)

    def composition(self) -> Composition:
        return Composition(focal(INVERSE_FOCAL, {"gamma": self.gamma}, -self.gamma))
