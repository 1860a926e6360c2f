"""Calibration by pairwise constraints: binary discrimination and exclusion beside cross-entropy."""

from __future__ import annotations

from typing import Unpack

from calibrant.arguments import in_range
from calibrant.kernels import Composition, Discrimination, Exclusion, Part, Term, WeightedSum
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy


class PairwiseConstraints(Loss):
    """Calibration by pairwise constraints, ``-log p + w1·BDC + w2·BEC`` (key ``cpc``).

    ``BDC = -1/(K-1) Σ_{j≠y} log σ(l_y - l_j)`` tells the true class from each other one;
    ``BEC = -1/((K-1)(K-2)) Σ_{i≠y} Σ_{j≠y,i} ½ log σ(l_i - l_j)`` keeps the others alike, and is 0 for
    two classes. Every pair of classes is visited, so the cost grows with K², the memory does not.

    Cheng and Vasconcelos, *Calibrating Deep Neural Networks by Pairwise Constraints*, CVPR 2022.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        discrimination: w1.
        exclusion: w2.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(1, 3), torch.tensor([0])
    >>> round(PairwiseConstraints(3, discrimination=1, exclusion=1)(logits, target).item(), 4)
    2.1383
    """

    search_space = (Range("discrimination", 0.1, 30, log=True), Range("exclusion", 0.01, 10, log=True))

    def __init__(
        self,
        num_classes: int,
        *,
        discrimination: float = 10.0,
        exclusion: float = 1.0,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.discrimination = in_range("discrimination", discrimination)
        self.exclusion = in_range("exclusion", exclusion)

    def composition(self) -> Composition:
        others = self.num_classes - 1
        parts: list[tuple[float, Term]] = [(self.discrimination / others, Discrimination())]
        if others > 1 and self.exclusion:
            parts.append((self.exclusion / (others * (others - 1)), Exclusion()))
        return Composition(cross_entropy(), Part(lambda logits: WeightedSum(*parts)))
