"""Calibration errors for torchmetrics, from sums in constant memory where its own keep every confidence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from calibrant.histogram import ConfidenceHistogram
from calibrant.layout import Elements, arrange
from calibrant.metrics.calibration import ERRORS
from calibrant.metrics.classwise import ClassGaps, classwise_ece
from calibrant.statistics import Statistics, sum_dtype

__all__ = ["CalibrationError", "ClasswiseCalibrationError"]

Sums = TypeVar("Sums", bound=Statistics)


def _elements(number: int, num_classes: int) -> Elements:
    return arrange(torch.zeros(number, num_classes), torch.zeros(number, dtype=torch.long))


class _ErrorOfSums(Metric, Generic[Sums]):
    """A metric whose states are the fields of `Statistics`, so that every reduction is a sum."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, nothing: Sums, num_classes: int | None, ignore_index: int, **options: Any) -> None:
        super().__init__(**options)
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self._form = type(nothing)
        for field in fields(nothing):
            self.add_state(field.name, getattr(nothing, field.name), dist_reduce_fx="sum")
        # A collection lets metrics share their updates if their states are equal after the first batch.
        # Those that ignore different labels may be equal by chance then, and must not be.
        self.add_state("ignored_label", torch.tensor(ignore_index), dist_reduce_fx="max")

    @abstractmethod
    def _measure(self, elements: Elements) -> Sums:
        """The sums of a batch."""

    @abstractmethod
    def _error(self, sums: Sums) -> float:
        """The figure, of sums over one element at least."""

    @property
    def sums(self) -> Sums:
        """What has been seen since the last reset, as the statistics that calibrant's own metrics take."""
        return self._form(*(getattr(self, field.name) for field in fields(self._form)))

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add a batch.

        Args:
            logits: floating point, ``(B, K, *S)``; of probabilities pass the ``.log()``.
            target: labels ``(B, *S)``.
        """
        elements = arrange(logits, target, num_classes=self.num_classes, ignore_index=self.ignore_index)
        sums = self.sums + self._measure(elements)
        # New tensors and no in-place sums: in a collection several metrics hold the same one.
        for field in fields(sums):
            setattr(self, field.name, getattr(sums, field.name))

    def compute(self) -> Tensor:
        """The figure, a scalar; NaN where all elements were ignored or none were seen."""
        sums = self.sums
        # No error: one batch without a valid element must not end a training run that logs each step.
        value = self._error(sums) if sums.samples != 0 else torch.nan
        return torch.tensor(value, dtype=sums.samples.dtype, device=sums.samples.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        """Move to another device, never to another type: half precision cannot count beyond 2,048."""

        def move(tensor: Tensor) -> Tensor:
            device = fn(torch.empty(0, dtype=torch.float32, device=tensor.device)).device
            return tensor.to(device, sum_dtype(device) if tensor.is_floating_point() else tensor.dtype)

        return super()._apply(move, exclude_state)


class CalibrationError(_ErrorOfSums[ConfidenceHistogram]):
    """A calibration error of the top class's confidence, from sums of some 75 KiB.

    Takes logits, always: nothing is guessed from their values, and probabilities enter visibly by
    ``.log()``. Equal-width figures (``ece``, ``mce``, ``ece_l2``) are exact, the others as good as a
    histogram of some three thousand cells is. In a `torchmetrics.MetricCollection`, metrics of all kinds
    with the same ``ignore_index`` share one update.

    Args:
        kind: ``ece``, ``mce``, ``ece_l2``, ``adaptive_ece``, ``debiased_ece``, ``sweep_ece`` or
            ``smooth_ece``.
        bins: number of bins; a divisor of 300 for the equal-width figures; ``sweep_ece`` and ``smooth_ece``
            choose for themselves and ignore it.
        ignore_index: the label of elements to leave out.
        options: those of `torchmetrics.Metric`.

    Shapes: logits ``(B, K, *S)``, target ``(B, *S)``.

    >>> metric = CalibrationError("ece")
    >>> metric.update(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.4999
    """

    def __init__(
        self, kind: str = "ece", *, bins: int = 15, ignore_index: int = -100, **options: Any
    ) -> None:
        if kind not in ERRORS:
            raise ValueError(f"kind must be one of {', '.join(ERRORS)}; got {kind!r}")
        # Now and not at the end of the first epoch: a number of bins that does not work.
        ERRORS[kind](ConfidenceHistogram.of(_elements(1, 2)), bins)
        super().__init__(ConfidenceHistogram.of(_elements(0, 2)), None, ignore_index, **options)
        self.kind = kind
        self.bins = bins

    def _measure(self, elements: Elements) -> ConfidenceHistogram:
        return ConfidenceHistogram.of(elements)

    def _error(self, sums: ConfidenceHistogram) -> float:
        return float(ERRORS[self.kind](sums, self.bins))


class ClasswiseCalibrationError(_ErrorOfSums[ClassGaps]):
    """ECE of each class's probability against its frequency, averaged over classes; exact.

    Its state has ``num_classes × bins`` sums. Takes logits, as `CalibrationError` does.

    Args:
        num_classes: K.
        bins: number of equal-width bins.
        ignore_index: the label of elements to leave out.
        options: those of `torchmetrics.Metric`.

    Shapes: logits ``(B, K, *S)``, target ``(B, *S)``.

    >>> metric = ClasswiseCalibrationError(2)
    >>> metric.update(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.4999
    """

    def __init__(self, num_classes: int, *, bins: int = 15, ignore_index: int = -100, **options: Any) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        super().__init__(ClassGaps.of(_elements(0, num_classes), bins), num_classes, ignore_index, **options)
        self.bins = bins

    def _measure(self, elements: Elements) -> ClassGaps:
        return ClassGaps.of(elements, self.bins)

    def _error(self, sums: ClassGaps) -> float:
        return classwise_ece(sums)
