"""Accuracy versus uncertainty: accurate elements are to be certain, and inaccurate ones uncertain."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Composition, Correctness, reduce_classes
from calibrant.layout import Elements, computing_dtype
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy
from calibrant.statistics import sum_dtype


class AccuracyUncertainty(Loss):
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

    def over_batch(self, elements: Elements) -> Tensor:
        valid, dtype = elements.valid, sum_dtype(elements.logits.device)
        # Not in float32: the sums may consist of differences 1 - r alone.
        log_s = elements.logits.to(dtype).log_softmax(1)
        s = log_s.exp()
        confidence, entropy = s.amax(1), -(s * log_s).sum(1)
        accurate = reduce_classes(elements.detached(), Correctness()) > 0
        certain = entropy.detach() <= self._threshold(entropy.detach(), accurate & valid, ~accurate & valid)
        doubtful = entropy.tanh()
        amount = torch.where(accurate, confidence, 1 - confidence)
        amount = amount * torch.where(certain, 1 - doubtful, doubtful)
        amount = torch.where(valid, amount, 0)
        desired = torch.where(accurate == certain, amount, 0)
        term = (amount.sum() + 1e-10).log() - (desired.sum() + 1e-10).log()
        return (self.weight * term).to(computing_dtype(elements.logits))

    def _threshold(self, entropy: Tensor, accurate: Tensor, inaccurate: Tensor) -> Tensor | float:
        if self.threshold is not None:
            return self.threshold
        counts = torch.stack([accurate.sum(), inaccurate.sum()])
        sums = torch.stack([torch.where(group, entropy, 0).sum() for group in (accurate, inaccurate)])
        middle = (sums / counts.clamp_min(1)).sum() / (counts > 0).sum().clamp_min(1)
        return middle * (1 + 1e-9)  # equal entropies are certain, however their mean is rounded
