"""Label relaxation: no loss while the true class is probable enough."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Composition, FirstTerm, Formula, LogLikelihood, Part, device_function
from calibrant.kernels.device import number
from calibrant.losses.base import Loss, LossOptions, Range

if TYPE_CHECKING:
    import triton.language as tl


@device_function
def _relaxed(element, numbers):
    alpha = number(numbers.alpha)
    inside = element.doubt <= alpha  # false for NaN, which must not be hidden
    doubt = tl.where(inside, tl.maximum(alpha, 1.1754943508222875e-38), element.doubt)
    value = number(numbers.constant) - (1 - alpha) * element.log_p - alpha * tl.log(doubt)
    by_log_p = alpha * element.p / doubt - (1 - alpha)
    return tl.where(inside, 0.0, value), tl.where(inside, 0.0, by_log_p), 0.0


RELAXED = FirstTerm(_relaxed)


class LabelRelaxation(Loss):
    """Label relaxation (key ``label-relaxation``): the divergence from all targets with ``t_y >= 1 - a``.

    0 where ``p >= 1 - a``. Elsewhere it is the smallest Kullback-Leibler divergence between such a target and
    the prediction, ``(1-a) log((1-a) / p) + a log(a / (1-p))``. The target that attains it spreads a over the
    other classes in proportion to their probabilities.

    Lienen and Hüllermeier, *From Label Smoothing to Label Relaxation*, AAAI 2021. The released code is the
    same.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        relaxation: a (α of the paper), from 0 to 1; 0 is cross-entropy, and 1 no loss at all.
        **shared: see `Loss`.

    >>> import torch
    >>> loss = LabelRelaxation(2, relaxation=0.1, reduction="none")
    >>> loss(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0]))
    tensor([0.3681, 0.0000])
    """

    search_space = (Range("relaxation", 0.005, 0.4, log=True),)

    def __init__(self, num_classes: int, *, relaxation: float = 0.1, **shared: Unpack[LossOptions]) -> None:
        super().__init__(num_classes, **shared)
        self.relaxation = in_range("relaxation", relaxation, 0, 1)

    def composition(self) -> Composition:
        alpha = self.relaxation
        constant = sum(x * math.log(x) for x in (alpha, 1 - alpha) if x)

        def value_and_slope(log_p: Tensor) -> tuple[Tensor, Tensor]:
            doubt = -log_p.expm1()
            inside = doubt <= alpha  # false for NaN, which must not be hidden
            # Where nothing is lost, the branch that is not taken must be finite, too.
            doubt = torch.where(inside, max(alpha, torch.finfo(log_p.dtype).tiny), doubt)
            value = constant - (1 - alpha) * log_p - alpha * doubt.log()
            slope = alpha * log_p.exp() / doubt - (1 - alpha)
            return torch.where(inside, 0, value), torch.where(inside, 0, slope)

        numbers = {"alpha": alpha, "constant": constant}
        return Composition(Part(lambda logits: Formula(value_and_slope, LogLikelihood()), RELAXED, numbers))
