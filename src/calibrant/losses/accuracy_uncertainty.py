"""Accuracy versus uncertainty: accurate elements are to be certain, and inaccurate ones uncertain."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Composition, Correctness, Entropy, Term, TopDoubt
from calibrant.layout import Elements, computing_dtype
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.batch import BatchLoss, in_type_of_sums
from calibrant.losses.cross_entropy import cross_entropy


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

    def composition(self) -> Composition:
        return Composition(cross_entropy())

    def numbers(self, elements: Elements) -> tuple[Term, ...]:
        # Precisely: the sums may consist of numbers near 0 alone.
        return TopDoubt(), Entropy(precise=True), Correctness()

    def over_numbers(self, elements: Elements, *numbers: Tensor) -> Tensor:
        counted, doubt, entropy, correct = in_type_of_sums(elements, *numbers)
        accurate = correct > 0
        certain = entropy.detach() <= self._threshold(entropy.detach(), correct, counted - correct)
        uncertainty = entropy.tanh()
        amount = torch.where(accurate, 1 - doubt, doubt)
        amount = counted * amount * torch.where(certain, 1 - uncertainty, uncertainty)
        desired = torch.where(accurate == certain, amount, 0)
        term = (amount.sum() + 1e-10).log() - (desired.sum() + 1e-10).log()
        return (self.weight * term).to(computing_dtype(elements.logits))

    def _threshold(self, entropy: Tensor, accurate: Tensor, inaccurate: Tensor) -> Tensor | float:
        if self.threshold is not None:
            return self.threshold
        groups = torch.stack([accurate, inaccurate])
        counts = groups.sum(1)
        middle = (groups @ entropy / counts.clamp_min(1)).sum() / (counts > 0).sum().clamp_min(1)
        return middle * (1 + 1e-6)  # equal entropies are certain, however they and their mean are rounded
