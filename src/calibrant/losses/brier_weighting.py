"""Cross-entropy with a gradient that is weighted by the Brier score of each element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range, true_or_false, whole_number
from calibrant.kernels import (
    Block,
    Composition,
    Formula,
    LogLikelihood,
    Part,
    PenaltyTerm,
    SquaredError,
    Term,
    device_function,
)
from calibrant.kernels.reduction import Gradient, Linearization
from calibrant.losses.base import Loss, LossOptions, Range

if TYPE_CHECKING:
    import triton.language as tl


@device_function
def _sums(tile, top, parameters, VARIANT, SOFT, ALONE):
    e = tile.exponential
    zero = tl.zeros_like(e)
    return tl.where(tile.is_target, 0.0, e * e), zero, zero


@device_function
def _value(one, two, three, element, K, SOFT, ALONE):
    weight = one / (element.total * element.total) + element.doubt * element.doubt
    return -weight * element.log_p, weight, -weight * element.doubt, 0.0


BY_BRIER_SCORE = PenaltyTerm(_sums, _value)
"""The GPU form for the Brier score itself, held fixed."""


class _Held:
    """A term that is not differentiated."""

    def __init__(self, term: Term) -> None:
        self.term = term

    def value(self, block: Block) -> Tensor:
        return self.term.value(block).detach()

    def linearize(self, block: Block) -> Linearization:
        return Linearization(self.value(block), lambda factor: Gradient())


def _error_sum(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """``Σ_k |s_k - 1[k=y]| = 2 (1 - p)`` and its slope."""
    return -2 * log_p.expm1(), -2 * log_p.exp()


class BrierWeighting(Loss):
    """Cross-entropy weighted by a generalised Brier score ``-‖s - 1_y‖^γ log p`` (key ``bsce-gra``).

    The weight is not differentiated, so that it scales the gradient of cross-entropy: uncertain elements
    get larger gradients. With the default γ of 2 and the L2 norm, the weight is the Brier score.
    ``through_weight`` differentiates the weight as well, which the paper calls BSCE.

    Lin et al., *Uncertainty Weighted Gradients for Model Calibration*, CVPR 2025. The released code is the
    same, except that it adds up the losses of a batch by default: pass ``reduction="sum"`` for that.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        gamma: γ, at least 0; 0 is cross-entropy.
        norm: 1 or 2, the norm of the errors of all classes. The L1 norm is ``2 (1 - p)``, so that the weight
            is that of the focal loss, times 2^γ.
        through_weight: whether the weight is differentiated.
        **shared: see `Loss`.

    >>> import torch
    >>> round(BrierWeighting(2)(torch.zeros(1, 2), torch.tensor([0])).item(), 4)  # ½ log 2
    0.3466
    """

    search_space = (Range("gamma", 0, 10),)

    def __init__(
        self,
        num_classes: int,
        *,
        gamma: float = 2.0,
        norm: int = 2,
        through_weight: bool = False,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.gamma = in_range("gamma", gamma)
        self.norm = whole_number("norm", norm, 1, 2)
        self.through_weight = true_or_false("through_weight", through_weight)

    def composition(self) -> Composition:
        power = self.gamma / self.norm
        errors: Term = Formula(_error_sum, LogLikelihood()) if self.norm == 1 else SquaredError()

        def value_and_slopes(log_p: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            error = error.clamp_min(torch.finfo(error.dtype).tiny)  # a power below 1 has no slope at 0
            weight = error.pow(power)
            return -weight * log_p, -weight, -power * weight / error * log_p

        seen = errors if self.through_weight else _Held(errors)
        device = BY_BRIER_SCORE if power == 1 and self.norm == 2 and not self.through_weight else None
        part = Part(lambda logits: Formula(value_and_slopes, LogLikelihood(), seen), device)
        return Composition(penalty=part)
