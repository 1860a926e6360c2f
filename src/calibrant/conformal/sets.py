"""Conformal sets: a score of each class, and a threshold that is learned from held-out data."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from calibrant.arguments import check_known, in_range, true_or_false, unknown, whole_number
from calibrant.calibrators.base import some_classes
from calibrant.calibrators.storage import load_layer, save_layer
from calibrant.calibrators.streaming import FittedInPasses, HeldOut
from calibrant.statistics import sum_dtype
from calibrant.warning import warn

_WHAT = "conformal predictor"


def quantile_rank(count: int, alpha: float) -> int:
    """The rank of the threshold among rising scores of ``count`` held-out elements, from 1.

    If it is ``count + 1``, the elements are too few for a finite threshold.

    >>> quantile_rank(99, 0.1), quantile_rank(8, 0.1)
    (90, 9)
    """
    # Less a little: (n + 1) · (1 - alpha) may be a whole number that rounding exceeds.
    return max(1, math.ceil((count + 1) * (1 - alpha) - 1e-9))


class ConformalSets(FittedInPasses):
    """A layer from logits to sets of classes; ``nn.Sequential(model, calibrator, sets)`` predicts sets.

    The sets hold the true class of a new element with a probability of at least ``1 - alpha``, if the new
    element and the held-out data come from the same distribution. The guarantee is an average over elements
    and over held-out data. It needs no calibrated probabilities, but these give smaller sets. The held-out
    data must be new to the model and to the calibrator.

    Like a calibrator, it is fitted, saved and exported; its learned state is a float64 buffer. Subclasses set
    `key` and write `scores`.

    Shape:
        logits ``(B, K, *S)``, integer target ``(B, *S)``. The result ``(B, K, *S)`` is boolean: whether a
        class belongs to the set.

    Args:
        alpha: the accepted probability that the true class is missing, between 0 and 1.
        class_conditional: whether each class has its own threshold. The guarantee then holds for the elements
            of each class. A class with fewer than ``1 / alpha - 1`` held-out elements is in every set.

    Attributes:
        threshold: the largest score of a class in the set, ``(K,)``, once fitted.
    """

    always_shown: ClassVar[tuple[str, ...]] = ("alpha",)
    threshold: Tensor

    def __init__(self, *, alpha: float = 0.1, class_conditional: bool = False) -> None:
        super().__init__()
        self.alpha = in_range("alpha", alpha, 0, 1, open_low=True)
        if self.alpha == 1:
            raise ValueError("alpha must be below 1: with alpha=1, every set could be empty")
        self.class_conditional = true_or_false("class_conditional", class_conditional)

    @abstractmethod
    def scores(self, probability: Tensor) -> Tensor:
        """How unusual each class would be as the true one, ``(N, K)``, from probabilities ``(N, K)``."""

    def fit_passes(self, data: HeldOut) -> None:
        """Learn the thresholds in one pass. Only label and score of each element stay in memory."""
        # Allocated at once: small pieces between large batches would scatter the memory.
        scores = torch.empty(data.samples, dtype=torch.float64, device="cpu")
        classes = torch.empty(data.samples, dtype=torch.int32, device="cpu")
        start = 0
        for rows, labels in data:
            found = self.transform(rows.to(sum_dtype(rows.device)))
            end = min(start + len(labels), data.samples)  # `data` refuses more elements after the loop
            scores[start:end] = found.gather(1, labels.unsqueeze(1)).squeeze(1)[: end - start]
            classes[start:end] = labels[: end - start]
            start = end
        number = data.num_classes
        groups = (scores[classes == k] for k in range(number)) if self.class_conditional else [scores]
        thresholds = []
        for group in groups:  # the score that a new one exceeds with a probability of at most alpha
            rank = quantile_rank(len(group), self.alpha)
            thresholds.append(torch.inf if rank > len(group) else float(group.kthvalue(rank).values))
        threshold = torch.tensor(thresholds, dtype=torch.float64, device=labels.device)
        self.learn("threshold", threshold.expand(number))

    def _fit_labels(self, logits: Tensor, target: Tensor, ignore_index: int) -> Self:
        raise ValueError(
            "conformal sets are of classes: leave out binary=True, and pass torch.stack([0 * l, l], 1) for "
            "single logits l"
        )

    def fitted_to(self, counts: Tensor) -> None:
        """Finish a fit; warn of classes that are in every set."""
        names = self.class_names
        super().fitted_to(counts)
        everywhere = self.threshold.isinf().nonzero().flatten().tolist()
        if everywhere:
            needed, shown = int(1 / self.alpha - 1e-9), some_classes(everywhere, len(counts), names)
            warn(
                f"too few held-out elements for alpha = {self.alpha:g}: {len(everywhere)} of {len(counts)} "
                f"classes are in every set ({shown}); at least {needed} elements"
                f"{' of each class' if self.class_conditional else ''} are needed"
            )

    def _printed(self, learned: Tensor) -> Tensor:
        """Without ``class_conditional``, all classes have the same threshold."""
        return learned if self.class_conditional or learned.is_meta else learned[0]

    def transform(self, rows: Tensor) -> Tensor:
        """The scores of logits ``(N, K)``."""
        return self.scores(rows.softmax(1))

    def forward(self, logits: Tensor) -> Tensor:
        """The sets of logits ``(B, K, *S)``: True for the classes in them."""
        classes = self.check(logits)
        rows = logits.permute(0, *range(2, logits.ndim), 1)
        # In float64, as at the fit: elements whose score is the threshold itself must stay inside.
        flat = rows.reshape(-1, classes).to(sum_dtype(logits.device))
        # A class that is ruled out is in no set, even if its threshold is infinite.
        inside = (self.transform(flat) <= self.learned("threshold", flat)) & (flat > -torch.inf)
        return inside.view(rows.shape).permute(0, logits.ndim - 1, *range(1, logits.ndim - 1))


class LAC(ConformalSets):
    """LAC prediction sets (key ``lac``): classes above a probability threshold; the smallest on average.

    The score is ``1 - s_k``. Sets can be empty where no class is probable.

    Sadinle, Lei and Wasserman, *Least Ambiguous Set-Valued Classifiers With Bounded Error Levels*,
    JASA 2019. Arguments as for `ConformalSets`.

    >>> logits = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]]).log()
    >>> sets = LAC(alpha=0.4).fit(logits, torch.zeros(4, dtype=torch.long))
    >>> sets(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log())
    tensor([[ True, False],
            [False, False]])
    """

    key: ClassVar[str] = "lac"

    def scores(self, probability: Tensor) -> Tensor:
        """``1 - s_k``."""
        return 1 - probability


class APS(ConformalSets):
    """Adaptive prediction sets, APS (key ``aps``): the most probable classes up to a total probability.

    Hard elements get larger sets than with `LAC`, and easy ones smaller sets. The score of a class is the
    total probability of the classes that are more probable. There is no random part: equal logits give equal
    sets.

    ``never_empty=False`` adds the class's own probability to its score. Sets of very confident elements can
    then be empty. Other arguments as for `ConformalSets`.

    Romano, Sesia and Candès, *Classification with Valid and Adaptive Coverage*, NeurIPS 2020.

    >>> logits = torch.tensor([[0.6, 0.3, 0.1]] * 4).log()
    >>> sets = APS(alpha=0.4).fit(logits, torch.tensor([0, 0, 1, 2]))
    >>> sets(torch.tensor([[0.5, 0.4, 0.1]]).log())
    tensor([[ True,  True, False]])
    """

    key: ClassVar[str] = "aps"

    def __init__(
        self, *, alpha: float = 0.1, class_conditional: bool = False, never_empty: bool = True
    ) -> None:
        super().__init__(alpha=alpha, class_conditional=class_conditional)
        self.never_empty = true_or_false("never_empty", never_empty)

    def scores(self, probability: Tensor) -> Tensor:
        """The probability of the more probable classes, with ``never_empty=False`` also the own one."""
        ordered, order = probability.sort(1, descending=True)
        total = ordered.cumsum(1) + self.penalty(probability.shape[1], probability)
        if self.never_empty:
            total = total - ordered
        return torch.zeros_like(total).scatter(1, order, total)

    def penalty(self, classes: int, like: Tensor) -> Tensor:
        """What is added to the scores of the most probable class, the second and so on, ``(K,)``."""
        return torch.zeros(classes, dtype=like.dtype, device=like.device)


class RAPS(APS):
    """`APS` with a penalty for large sets (key ``raps``).

    The classes after the first ``size`` most probable ones get ``weight`` each in addition: long tails of
    improbable classes stay outside. The weight is at least 0 (λ in the paper), the size at least 1 (k_reg in
    the paper). Other arguments as for `APS`.

    Angelopoulos et al., *Uncertainty Sets for Image Classifiers using Conformal Prediction*, ICLR 2021.

    >>> RAPS(weight=0.1, size=1).penalty(3, torch.zeros(1))
    tensor([0.0000, 0.1000, 0.2000])
    """

    key: ClassVar[str] = "raps"

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        class_conditional: bool = False,
        never_empty: bool = True,
        weight: float = 0.01,
        size: int = 5,
    ) -> None:
        super().__init__(alpha=alpha, class_conditional=class_conditional, never_empty=never_empty)
        self.weight = in_range("weight", weight)
        self.size = whole_number("size", size)

    def penalty(self, classes: int, like: Tensor) -> Tensor:
        """``weight`` for each class after the first ``size``."""
        rank = torch.arange(1, classes + 1, dtype=like.dtype, device=like.device)
        return self.weight * (rank - self.size).clamp_min(0)


CONFORMAL: dict[str, type[ConformalSets]] = {kind.key: kind for kind in (LAC, APS, RAPS)}
"""Every kind of conformal sets by its key."""


def create_conformal(key: str, **options: Any) -> ConformalSets:
    """Create conformal sets by their key. They are not fitted yet.

    Args:
        key: a key of `CONFORMAL`.
        **options: keyword arguments of the class.

    Raises:
        ValueError: the key is unknown.
        TypeError: there is no such option.

    >>> create_conformal("raps", alpha=0.05).alpha
    0.05
    """
    if key not in CONFORMAL:
        raise ValueError(unknown("conformal sets", key, CONFORMAL))
    check_known(f"conformal sets {key!r}", options, signature(CONFORMAL[key]).parameters)
    return CONFORMAL[key](**options)


def save_conformal(
    sets: ConformalSets, path: str | os.PathLike[str], *, class_names: Sequence[str] | None = None
) -> None:
    """Write fitted conformal sets to a safetensors file.

    Arguments and errors as for `calibrant.calibrators.save_calibrator`.
    """
    save_layer(sets, path, what=_WHAT, class_names=class_names)


def load_conformal(
    path: str | os.PathLike[str], *, class_names: Sequence[str] | None = None
) -> ConformalSets:
    """Read conformal sets that `save_conformal` wrote.

    Arguments and errors as for `calibrant.calibrators.load_calibrator`.
    """
    return load_layer(path, what=_WHAT, create=create_conformal, class_names=class_names)
