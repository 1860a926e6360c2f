"""Focal losses with a fixed exponent: cross-entropy times a power of the confidence."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Fused, LogLikelihood, reduce_classes
from calibrant.layout import Elements
from calibrant.losses.base import Loss, Shared


def modulate(log_likelihood: Tensor, base: Tensor, gamma: Tensor | float) -> Tensor:
    """``-base^γ log p`` with a finite gradient also where the base is 0 and γ < 1.

    There ``log p`` is 0 as well and the true limit of the gradient is 0; the naive power gives
    infinity times 0.
    """
    return -base.clamp_min(torch.finfo(base.dtype).tiny).pow(gamma) * log_likelihood


def modulate_with_slopes(
    log_likelihood: Tensor, base: Tensor, gamma: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """`modulate`, and its derivatives by ``log p`` (at a fixed base) and by the base."""
    base = base.clamp_min(torch.finfo(base.dtype).tiny)
    power = -base.pow(gamma)
    value = power * log_likelihood
    return value, power, gamma * value / base


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

    def __init__(self, num_classes: int, *, gamma: float = 3.0, **shared: Unpack[Shared]) -> None:
        super().__init__(num_classes, **shared)
        self.gamma = in_range("gamma", gamma)

    def fused(self) -> Fused:
        return Fused(base="doubt", gamma=self.gamma)

    def per_sample(self, elements: Elements) -> Tensor:
        log_likelihood = reduce_classes(elements, LogLikelihood())
        return modulate(log_likelihood, -log_likelihood.expm1(), self.gamma)


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

    def __init__(
        self,
        num_classes: int,
        *,
        gamma_below: float = 5.0,
        gamma_above: float = 3.0,
        threshold: float = 0.2,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.gamma_below = in_range("gamma_below", gamma_below)
        self.gamma_above = in_range("gamma_above", gamma_above)
        self.threshold = in_range("threshold", threshold, 0, 1)

    def fused(self) -> Fused:
        return Fused(
            base="doubt",
            exponent="threshold",
            gamma=self.gamma_below,
            other_gamma=self.gamma_above,
            threshold=self.threshold,
        )

    def per_sample(self, elements: Elements) -> Tensor:
        log_likelihood = reduce_classes(elements, LogLikelihood())
        below = log_likelihood.detach().exp() < self.threshold
        gamma = torch.where(below, self.gamma_below, self.gamma_above).to(log_likelihood.dtype)
        return modulate(log_likelihood, -log_likelihood.expm1(), gamma)


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

    def __init__(self, num_classes: int, *, gamma: float = 2.0, **shared: Unpack[Shared]) -> None:
        super().__init__(num_classes, **shared)
        self.gamma = in_range("gamma", gamma)

    def fused(self) -> Fused:
        return Fused(base="belief", gamma=self.gamma)

    def per_sample(self, elements: Elements) -> Tensor:
        log_likelihood = reduce_classes(elements, LogLikelihood())
        return modulate(log_likelihood, 1 + log_likelihood.exp(), self.gamma)
