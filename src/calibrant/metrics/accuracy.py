"""Accuracy, balanced accuracy, top-k accuracy and mean IoU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from calibrant.arguments import label, whole_number
from calibrant.kernels.block import Scratch
from calibrant.kernels.workers import map_blocks
from calibrant.layout import Index, computing_dtype
from calibrant.metrics.predictions import Predictions, as_predictions
from calibrant.statistics import Statistics, sum_dtype


@dataclass(frozen=True, eq=False)
class ClassCounts(Statistics):
    """Counts of true, recognised and predicted elements of each class. A leading axis is allowed.

    Attributes:
        occurs: ``(K,)``, number of elements of each class.
        recognised: ``(K,)``, number of elements of each class that are predicted correctly.
        predicted: ``(K,)``, number of elements predicted as each class.

    >>> counts = ClassCounts.of(Predictions.of(9 * torch.eye(2)[[0, 0, 1]], torch.tensor([0, 1, 1])))
    >>> counts.occurs.tolist(), counts.recognised.tolist(), counts.predicted.tolist()
    ([1.0, 2.0], [1.0, 1.0], [2.0, 1.0])
    """

    occurs: Tensor
    recognised: Tensor
    predicted: Tensor

    @classmethod
    def of(cls, predictions: Predictions) -> Self:
        """The counts of these predictions."""
        classes, dtype = predictions.num_classes, sum_dtype(predictions.label.device)
        label, prediction = predictions.label, predictions.prediction
        counted = (label, label[predictions.correct], prediction)
        counts = (torch.bincount(values, minlength=classes).to(dtype) for values in counted)
        return cls(torch.tensor(predictions.samples, dtype=dtype, device=label.device), *counts)

    @property
    def accuracy(self) -> Tensor:
        """The accuracy of each class, ``(K,)``; NaN for a class that does not occur."""
        return self.recognised / self.occurs

    @property
    def iou(self) -> Tensor:
        """Intersection over union of each class, ``(K,)``; NaN if it neither occurs nor is predicted."""
        return self.recognised / (self.occurs + self.predicted - self.recognised)


Source = Tensor | Predictions | ClassCounts


def accuracy(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> float:
    """The fraction of correct predictions; exact, also in streams. Of equal logits the first is predicted.

    Args:
        source: logits ``(B, K, *S)``, `Predictions` or `ClassCounts`.
        target: labels ``(B, *S)``; only with logits.
        ignore_index: the label of elements to leave out.

    >>> accuracy(9 * torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 1, 1, 1]))
    0.75
    """
    counts = _counts(source, target, ignore_index)
    return float(counts.recognised.sum() / counts.samples)


def balanced_accuracy(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> float:
    """The accuracy of each class, averaged over the classes that occur; exact, also in streams.

    Arguments as for `accuracy`.

    >>> round(balanced_accuracy(9 * torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 1, 1, 1])), 4)
    0.8333
    """
    return float(_counts(source, target, ignore_index).accuracy.nanmean())


def top_k_accuracy(
    source: Tensor | Predictions, target: Tensor | None = None, *, k: int = 5, ignore_index: int = -100
) -> float:
    """The fraction of elements whose true class is among the k most probable; exact, also in streams.

    Of equal logits the first are taken, as for `accuracy`. With at most k classes it is always 1, and
    `calibrant.evaluate` leaves it out. The source is logits or `Predictions`, and ``k`` is at least 1. Other
    arguments as for `accuracy`.

    >>> top_k_accuracy(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2]), k=2)
    0.5
    """
    k = whole_number("k", k)
    return float(in_top_k(as_predictions(source, target, ignore_index), k).mean())


@torch.no_grad()
def in_top_k(predictions: Predictions, k: int) -> Tensor:
    """1 for the elements whose true class is among the k most probable, else 0, ``(N,)`` in float64."""
    if k >= predictions.num_classes:
        return torch.ones_like(predictions.confidence, dtype=torch.float64)
    elements = predictions.elements
    found = torch.empty(elements.valid.shape, dtype=torch.float64, device=elements.logits.device)

    def score(index: Index, scratch: Scratch) -> None:
        place = index[:1] + index[2:]
        logits = elements.logits[index].to(computing_dtype(elements.logits))
        labels = elements.target[place].unsqueeze(1)
        own = logits.gather(1, labels)
        scratch.restart()
        # As numbers, because torch adds up booleans many times more slowly.
        inside = torch.ge(logits, own, out=scratch.take(logits)).sum(1) <= k
        unsure = ~inside  # false, or several classes have the true one's logit
        rows, own = logits.movedim(1, -1)[unsure], own.squeeze(1)[unsure].unsqueeze(1)
        earlier = torch.arange(rows.shape[1], device=rows.device) < labels.squeeze(1)[unsure].unsqueeze(1)
        before = (rows > own).to(rows.dtype).addcmul_((rows == own).to(rows.dtype), earlier.to(rows.dtype))
        inside[unsure] = before.sum(1) < k
        found[place] = inside.to(found.dtype)

    map_blocks(score, elements.logits)
    return found.flatten() if elements.all_valid else found[elements.valid]


def mean_iou(
    source: Source, target: Tensor | None = None, *, background: int | None = None, ignore_index: int = -100
) -> float:
    """Intersection over union, averaged over classes that occur or are predicted; exact, also in streams.

    ``background`` is the class to leave out of the average; None to average over all classes. Other arguments
    as for `accuracy`.

    >>> round(mean_iou(9 * torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 1, 1, 1])), 4)
    0.5833
    """
    return float(mean_of_ious(_counts(source, target, ignore_index), background))


def mean_of_ious(counts: ClassCounts, background: int | None) -> Tensor:
    """`mean_iou` as a tensor; NaN if no class occurs or is predicted."""
    iou = counts.iou
    if background is not None:
        if not 0 <= label("background", background) < iou.shape[-1]:
            raise ValueError(
                f"background must be a class from 0 to {iou.shape[-1] - 1}, or None, got {background}"
            )
        others = [k for k in range(iou.shape[-1]) if k != background]
        iou = iou[..., others]
    return iou.nanmean(-1)


def _counts(source: Source, target: Tensor | None, ignore_index: int) -> ClassCounts:
    if isinstance(source, ClassCounts):
        if source.samples == 0:
            raise ValueError("the accuracy of an empty data set is undefined")
        return source
    return ClassCounts.of(as_predictions(source, target, ignore_index))
