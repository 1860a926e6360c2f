"""How often predictions are right: overall, class by class, and as overlap of regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from calibrant.metrics.predictions import Predictions, as_predictions
from calibrant.statistics import Statistics, sum_dtype


@dataclass(frozen=True, eq=False)
class ClassCounts(Statistics):
    """How often each class occurs, is recognised, and is predicted; a leading axis is allowed.

    Attributes:
        occurs: ``(K,)``, elements of each class.
        recognised: ``(K,)``, those of them that were predicted as such.
        predicted: ``(K,)``, elements predicted as each class.

    >>> counts = ClassCounts.of(Predictions.of(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 1, 1])))
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
        """The fraction of each class that was recognised, ``(K,)``; NaN for a class that does not occur."""
        return self.recognised / self.occurs

    @property
    def iou(self) -> Tensor:
        """Intersection over union of each class, ``(K,)``; NaN where it neither occurs nor is predicted."""
        return self.recognised / (self.occurs + self.predicted - self.recognised)


def accuracy(
    source: Tensor | Predictions | ClassCounts, target: Tensor | None = None, *, ignore_index: int = -100
) -> float:
    """The fraction of elements whose first most probable class is the true one; exact, streamed as well.

    Args:
        source: logits ``(B, K, *S)``, or `Predictions`, or `ClassCounts`.
        target: labels ``(B, *S)``, with logits.
        ignore_index: label of elements to leave out.

    >>> accuracy(torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 1, 1, 1]))
    0.75
    """
    counts = _counts(source, target, ignore_index)
    return float(counts.recognised.sum() / counts.samples)


def balanced_accuracy(
    source: Tensor | Predictions | ClassCounts, target: Tensor | None = None, *, ignore_index: int = -100
) -> float:
    """The accuracy of each class, averaged over the classes that occur; exact, streamed as well.

    Arguments as for `accuracy`.

    >>> round(balanced_accuracy(torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 1, 1, 1])), 4)
    0.8333
    """
    return float(_counts(source, target, ignore_index).accuracy.nanmean())


def mean_iou(
    source: Tensor | Predictions | ClassCounts,
    target: Tensor | None = None,
    *,
    background: int | None = None,
    ignore_index: int = -100,
) -> float:
    """Intersection over union, averaged over classes that occur or are predicted; exact, streamed as well.

    Args:
        source: as for `accuracy`.
        target: as for `accuracy`.
        background: a class to leave out of the average; None to average over all.
        ignore_index: as for `accuracy`.

    >>> round(mean_iou(torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 1, 1, 1])), 4)
    0.5833
    """
    return float(mean_of_ious(_counts(source, target, ignore_index), background))


def mean_of_ious(counts: ClassCounts, background: int | None) -> Tensor:
    """`mean_iou` of counts that may have a leading axis; NaN where no class occurs or is predicted."""
    iou = counts.iou
    if background is not None:
        if not 0 <= background < iou.shape[-1]:
            raise ValueError(
                f"background must be a class from 0 to {iou.shape[-1] - 1}, or None, got {background}"
            )
        others = [k for k in range(iou.shape[-1]) if k != background]
        iou = iou[..., others]
    return iou.nanmean(-1)


def _counts(
    source: Tensor | Predictions | ClassCounts, target: Tensor | None, ignore_index: int
) -> ClassCounts:
    if isinstance(source, ClassCounts):
        if source.samples == 0:
            raise ValueError("the accuracy of an empty data set is undefined")
        return source
    return ClassCounts.of(as_predictions(source, target, ignore_index))
