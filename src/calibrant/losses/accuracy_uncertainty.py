"""Accuracy versus uncertainty: accurate elements are to be certain, and inaccurate ones uncertain."""

from __future__ import annotations

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Correctness, Entropy, Term, TopDoubt
from calibrant.layout import Elements, computing_dtype
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.batch import BatchLoss, flattened, in_type_of_sums, sum_of_parts


class AccuracyUncertainty(BatchLoss):
    """Accuracy versus uncertainty calibration beside cross-entropy, ``ce + w AvUC`` (key ``avuc``).

    ``AvUC = log(1 + (n_au + n_ic) / (n_ac + n_iu))`` over the batch. An element is certain (c) if its entropy
    ``u`` is at most the threshold, otherwise uncertain (u). With the confidence ``r``, accurate elements (a)
    add ``r (1 - tanh u)`` to ``n_ac`` or ``r tanh u`` to ``n_au``; inaccurate ones (i) add
    ``(1-r) (1 - tanh u)`` to ``n_ic`` or ``(1-r) tanh u`` to ``n_iu``. 1e-10 is added to the sum of all
    elements and to that of the desired ones, so that no logarithm is infinite.

    Krishnan and Tickoo, *Improving Model Calibration with Accuracy versus Uncertainty Optimization*, NeurIPS
    2020. The paper applies it to Bayesian networks, beside the evidence lower bound; here the entropy is that
    of one prediction.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        weight: w (β of the paper, where it is 3 and the term is added after some epochs).
        threshold: the entropy in nats up to which an element is certain. None for the middle between the mean
            entropy of the accurate and that of the inaccurate elements of the batch. The paper computes this
            middle once, from training data after a few epochs.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(1, 2), torch.tensor([1])
    >>> round(AccuracyUncertainty(2, weight=1.0, threshold=0.5)(logits, target).item(), 4)  # wrong, uncertain
    0.6931
    """

    search_space = (Range("weight", 0.05, 20, log=True),)

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 1.0,
        threshold: float | None = None,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)
        self.threshold = None if threshold is None else in_range("threshold", threshold)

    def numbers(self, elements: Elements) -> tuple[Term, ...]:
        # Precisely: the sums may consist of numbers near 0 alone.
        return TopDoubt(), Entropy(precise=True), Correctness()

    def over_numbers(self, elements: Elements, *numbers: Tensor) -> Tensor:
        counted, doubt, entropy, correct = flattened(elements, *numbers)
        threshold: Tensor | float | None = self.threshold
        if threshold is None:
            threshold = self._middle(*sum_of_parts(self._entropies, counted, entropy.detach(), correct))
        sums = partial(self._sums, threshold)
        total, desired = (sum_of_parts(sums, counted, doubt, entropy, correct) + 1e-10).log()
        term: Tensor = self.weight * (total - desired)
        return term.to(computing_dtype(elements.logits))

    @staticmethod
    def _sums(threshold: Tensor | float, *numbers: Tensor) -> Tensor:
        """``n`` over all elements, and over those that are accurate and certain, or neither."""
        counted, doubt, entropy, correct = in_type_of_sums(*numbers)
        accurate, certain = correct > 0, entropy.detach() <= threshold
        uncertainty = entropy.tanh()
        amount = counted * torch.where(accurate, 1 - doubt, doubt)
        amount = amount * torch.where(certain, 1 - uncertainty, uncertainty)
        return torch.stack([amount.sum(), ((accurate == certain) * amount).sum()])

    @staticmethod
    def _entropies(*numbers: Tensor) -> Tensor:
        """The sums of entropies of accurate and inaccurate elements, and their numbers, ``(2, 2)``."""
        counted, entropy, correct = in_type_of_sums(*numbers)
        groups = torch.stack([counted * correct, counted * (1 - correct)])
        return torch.stack([groups @ entropy, groups.sum(1)])

    @staticmethod
    def _middle(sums: Tensor, counts: Tensor) -> Tensor:
        middle: Tensor = (sums / counts.clamp_min(1)).sum() / (counts > 0).sum().clamp_min(1)
        return middle * (1 + 1e-6)  # equal entropies are certain, however they and their mean are rounded
