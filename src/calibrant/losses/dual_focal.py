"""Dual focal loss: focal loss on the gap between the true class and the best class below it."""

from __future__ import annotations

from typing import Unpack

from calibrant.arguments import in_range, one_of
from calibrant.kernels import Composition, LowerProbability
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.focal import DUAL_FOCAL, focal

RANKS: dict[int | str, tuple[int, ...]] = {
    1: (1,),
    2: (2,),
    3: (3,),
    "1+2": (1, 2),
    "1+2+3": (1, 2, 3),
    "all": (),
}
"""The variants of q: which ranks among the classes below the true one are averaged."""


class DualFocal(Loss):
    """Dual focal loss ``-(1-p+q)^γ log p`` (key ``dual-focal``).

    ``q = max{s_k : s_k < p}``, the best probability strictly below the true class's, is
    differentiated; it is 0 where the true class has the smallest.

    Tao, Dong and Xu, *Dual Focal Loss for Calibration*, ICML 2023.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        gamma: γ, at least 0; 0 is cross-entropy.
        rank: which probability below the true class's is q: the best (1), the second (2), the third
            (3), the mean of the best two (``"1+2"``) or three (``"1+2+3"``), or of all below
            (``"all"``). Ranks that do not exist count as 0.
        constant: a fixed q, instead of one by rank.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    >>> round(DualFocal(3, gamma=2)(logits, target).item(), 4)
    0.1369
    """

    search_space = (Range("gamma", 0, 10),)

    def __init__(
        self,
        num_classes: int,
        *,
        gamma: float = 5.0,
        rank: int | str = 1,
        constant: float | None = None,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.gamma = in_range("gamma", gamma)
        self.rank = one_of("rank", rank, list(RANKS))
        self.constant = None if constant is None else in_range("constant", constant, 0, 1)
        if constant is not None and rank != 1:
            raise ValueError(f"constant={constant} takes the place of rank={rank!r}: pass one of them")
        if max(RANKS[rank], default=1) >= num_classes:
            raise ValueError(f"rank={rank!r} needs more than {max(RANKS[rank])} classes, got {num_classes}")

    def composition(self) -> Composition:
        numbers = {"gamma": self.gamma}
        if self.constant is not None:
            return Composition(focal(None, numbers, self.gamma, lower=self.constant))
        device = DUAL_FOCAL if self.rank == 1 else None
        return Composition(focal(device, numbers, self.gamma, lower=LowerProbability(RANKS[self.rank])))
