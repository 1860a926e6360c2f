"""The additive sums behind an evaluation, and the figures that follow from them alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from calibrant.evaluation.figures import ClassBin, ClassFigures, GroupFigures, Reliability
from calibrant.histogram import Bins, ConfidenceHistogram, bin_of, equal_width_edges
from calibrant.metrics.accuracy import ClassCounts
from calibrant.metrics.catalogue import METRICS, Options, compute, element_metrics, element_values
from calibrant.metrics.classwise import ClassGaps
from calibrant.metrics.predictions import Predictions
from calibrant.metrics.uncertainty import binomial_interval, consistency_band
from calibrant.statistics import Statistics

# Long-tailed data: the head has more training elements than the first number, the tail fewer than the second.
_HEAD, _TAIL = 100, 20
GROUPS = {"head": f"more than {_HEAD}", "mid": f"{_TAIL} to {_HEAD}", "tail": f"fewer than {_TAIL}"}
"""The groups of classes, and how many training elements each of their classes has."""


def group_of_class(class_counts: Sequence[int] | Tensor) -> Tensor:
    """The position in `GROUPS` of each class, by its number of training elements."""
    device = class_counts.device if isinstance(class_counts, Tensor) else "cpu"
    counts = torch.as_tensor(class_counts, device=device)
    return (counts <= _HEAD).long() + (counts < _TAIL).long()


@dataclass(frozen=True, eq=False)
class EvaluationSums(Statistics):
    """All that an `Evaluator` keeps."""

    histogram: ConfidenceHistogram
    gaps: ClassGaps
    counts: ClassCounts
    elements: Tensor  # (2, metrics): sums and sums of squares of the metrics that are means over elements
    binned: Tensor  # (3, bins): count, confidence and correctness in equal-width bins
    grouped: Tensor  # (3, groups, bins): the same for head, mid and tail
    by_class: Tensor  # (3, K, bins): the same for the elements that are predicted as each class
    images: Tensor  # (3, metrics): the number of images that have a metric, its sum and its sum of squares
    ruled_out: Tensor  # the number of elements whose true class has a probability of 0
    labels: tuple[EvaluationSums, ...] = ()  # the sums of each of several labels

    @classmethod
    def of(cls, predictions: Predictions, options: Options, group_of_class: Tensor | None = None) -> Self:
        """The sums of a batch, without those of its images and labels."""
        bins, device = options.bins, predictions.label.device
        counts = ClassCounts.of(predictions)
        values = torch.stack(list(element_values(predictions, options, streamed=True).values()))
        pooled = predictions.equal_width(bins)
        confidence = predictions.confidence.double()
        added = torch.ones_like(confidence), confidence, predictions.correct.double()
        bin_of_element = bin_of(confidence, equal_width_edges(bins, device))

        def binned(rows: int, row_of_element: Tensor | None) -> Tensor:
            """Count, confidence and correctness in the bins of each of several rows, ``(3, rows, bins)``."""
            sums = torch.zeros(3, rows, bins, dtype=torch.float64, device=device)
            if row_of_element is not None:
                for row, value in zip(sums.view(3, -1), added, strict=True):
                    row.index_add_(0, row_of_element * bins + bin_of_element, value)
            return sums

        group = None if group_of_class is None else group_of_class.to(device)[predictions.label]
        return cls(
            counts.samples,
            predictions.histogram,
            ClassGaps.of(predictions.elements, bins),
            counts,
            torch.stack([values.sum(1), values.square().sum(1)]),
            torch.stack([pooled.count, pooled.confidence, pooled.correct]),
            binned(len(GROUPS), group),
            binned(predictions.num_classes, predictions.prediction),
            torch.zeros(3, len(METRICS), dtype=torch.float64, device=device),
            predictions.elements.ruled_out.sum(dtype=torch.float64),
        )

    def with_image(self, predictions: Predictions, options: Options) -> Self:
        """These sums with the metrics of one more image. An image without valid elements does not count."""
        if not predictions.samples:
            return self
        figures = EvaluationSums.of(predictions, options).metrics(options, predictions)
        found = [figures.get(name) for name in METRICS]
        values = torch.tensor([value or 0.0 for value in found], dtype=torch.float64, device="cpu")
        present = torch.tensor([value is not None for value in found], dtype=torch.float64, device="cpu")
        rows = torch.stack([present, values, values.square()])
        return replace(self, images=self.images + rows.to(self.images.device))

    def metrics(
        self,
        options: Options,
        predictions: Predictions | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> dict[str, float | None]:
        """The values of all metrics, None if undefined; exact with all predictions and elements' values."""
        if values is None:
            columns = element_metrics(options, streamed=True)
            values = dict(zip(columns, self.elements[0] / self.samples, strict=True))
        parts = {
            "confidences": self.histogram if predictions is None else predictions,
            "counts": self.counts,
            "gaps": self.gaps,
            "elements": {name: value.mean() for name, value in values.items()},
        }
        found = {name: float(value) for name, value in compute(parts, options).items()}
        classes = len(self.counts.occurs)
        return {
            name: None if math.isnan(value) else value
            for name, value in found.items()
            if classes >= METRICS[name].fewest_classes
        }

    def element_moments(self, name: str, options: Options) -> tuple[float, float]:
        """Mean of a metric over elements, and the standard deviation of this mean."""
        column = list(element_metrics(options, streamed=True)).index(name)
        mean, square = (self.elements[:, column] / self.samples).tolist()
        return mean, math.sqrt(max(0.0, square - mean**2) / float(self.samples))

    def reliability(self, level: float) -> Reliability:
        """The numbers of the reliability diagram."""
        bins = Bins(equal_width_edges(self.binned.shape[1], self.binned.device), *self.binned)
        count = bins.count.tolist()

        def where_filled(*columns: Tensor) -> tuple[Any, ...]:
            rows = zip(*(column.tolist() for column in columns), strict=True)
            values = (row if len(row) > 1 else row[0] for row in rows)
            return tuple(value if n else None for value, n in zip(values, count, strict=True))

        return Reliability(
            edges=tuple(bins.edges.tolist()),
            count=tuple(int(n) for n in count),
            confidence=where_filled(bins.confidence / bins.count),
            accuracy=where_filled(bins.correct / bins.count),
            accuracy_interval=where_filled(*binomial_interval(bins.correct, bins.count, level)),
            consistency=where_filled(*consistency_band(bins, level)),
        )

    def classes(self, names: Sequence[str] | None) -> tuple[ClassFigures, ...]:
        """The figures of each class."""
        gap = self.gaps.gap
        columns = (
            [str(k) for k in range(len(gap))] if names is None else names,
            [int(n) for n in self.counts.occurs.tolist()],
            [None if math.isnan(value) else value for value in self.counts.accuracy.tolist()],
            [None if math.isnan(value) else value for value in self.counts.iou.tolist()],
            (gap.sum(1) / self.samples).tolist(),
            (gap.abs().sum(1) / self.samples).tolist(),
            [_filled(bins) for bins in self.by_class.movedim(0, 2).tolist()],
        )
        return tuple(ClassFigures(*row) for row in zip(*columns, strict=True))

    def groups(self, group_of_class: Tensor | None) -> dict[str, GroupFigures]:
        """The figures of head, mid and tail."""
        if group_of_class is None:
            return {}
        groups = {}
        for number, name in enumerate(GROUPS):
            count, confidence, correct = self.grouped[:, number]
            total = float(count.sum())
            sums = correct.sum(), confidence.sum(), (confidence - correct).abs().sum()
            means = [float(value) / total if total else None for value in sums]
            groups[name] = GroupFigures(int((group_of_class == number).sum()), int(total), *means)
        return groups


def _filled(bins: Sequence[tuple[float, float, float]]) -> tuple[ClassBin, ...]:
    """The bins of one class that hold elements."""
    return tuple(
        ClassBin(number, int(count), confidence / count, int(correct))
        for number, (count, confidence, correct) in enumerate(bins)
        if count
    )
