"""`Predictions`: every prediction of a batch, from which exact metrics are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from calibrant.histogram import Bins, ConfidenceHistogram, RankedSums, bin_of, equal_width_edges, spread
from calibrant.kernels import Block, visit
from calibrant.layout import Elements, Index, answers, arrange, computing_dtype
from calibrant.probabilities import warn_of_probabilities

_RULED_OUT = -1e30


@dataclass(frozen=True, eq=False)
class Predictions:
    """Label, predicted class, confidence and scores of each of the N elements that are not ignored.

    To compute several metrics, create it once and pass it to each of them in place of logits and target.

    Attributes:
        elements: the batch itself.
        label: the true class, ``(N,)``.
        prediction: the first class that attains the maximum, ``(N,)``.
        confidence: its probability, ``(N,)``.
        log_likelihood: log-probability of the true class, ``(N,)``.
        squared_error: ``Σ_k (s_k - 1[y=k])²``, ``(N,)``; half of it if binary, ``(s_1 - y)²``.
        binary: whether calibration errors are those of the probability of class 1, and not of the confidence.

    >>> predictions = Predictions.of(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> predictions.prediction.tolist(), predictions.correct.tolist()
    ([0, 1], [True, False])
    """

    most_bins: ClassVar[int] = 512
    cells: ClassVar[int] = 1 << 14  # at least ten to the width of the kernel for a smooth error of 0.001

    elements: Elements
    label: Tensor
    prediction: Tensor
    confidence: Tensor
    log_likelihood: Tensor
    squared_error: Tensor
    binary: bool = False

    @classmethod
    @torch.no_grad()
    def of(cls, logits: Tensor, target: Tensor, *, ignore_index: int = -100, binary: bool = False) -> Self:
        """Check a batch and compute its predictions in one pass.

        Args:
            logits: ``(B, K, *S)``.
            target: labels ``(B, *S)``.
            ignore_index: the label of elements to leave out.
            binary: each logit is a yes-or-no decision of its own; shapes as for `evaluate`.

        Raises:
            ValueError: shapes or labels that do not fit, nothing to evaluate, logits that are NaN or
                infinite, or a true class with probability 0.
        """
        if binary:
            logits, target = answers(logits, target, ignore_index)
        elements = arrange(logits, target, ignore_index=ignore_index, look_at_labels=True)
        predictions = cls.of_elements(elements, binary=binary)
        if not predictions.samples:
            raise ValueError(
                f"nothing to evaluate: logits of shape {tuple(logits.shape)} hold no element that is not "
                "ignored"
            )
        warn_of_probabilities(logits)
        return predictions

    @classmethod
    @torch.no_grad()
    def of_elements(cls, elements: Elements, *, binary: bool = False) -> Self:
        """The predictions of a batch that has been checked already and may be empty."""
        shape, dtype = elements.valid.shape, computing_dtype(elements.logits)
        prediction = torch.empty(shape, dtype=torch.int64, device=elements.logits.device)
        numbers = torch.empty((3, *shape), dtype=dtype, device=elements.logits.device)

        def score(index: Index, block: Block) -> list[Tensor]:
            place = index[:1] + index[2:]
            squares = torch.mul(block.exponential, block.exponential, out=block.new())
            squares.scatter_(1, block.target, torch.zeros_like(block.total))
            total, log_likelihood = block.total, block.shifted_at_target - block.total.log()
            # A sum of positive parts, as in the loss of that name: no digits cancel.
            error = squares.sum(1, keepdim=True) / total.square() + log_likelihood.expm1().square()
            scores = block.confidence, log_likelihood, error
            prediction[place] = block.prediction.squeeze(1).long()
            for row, values in zip(numbers, scores, strict=True):
                row[place] = values.squeeze(1)
            return []

        visit(elements, score)
        numbers = numbers[:, elements.valid] if not elements.all_valid else numbers.flatten(1)
        chosen = slice(None) if elements.all_valid else elements.valid.flatten()
        label, prediction = elements.labels, prediction.flatten()[chosen]
        if not bool(numbers.isfinite().all()):
            raise ValueError(_not_finite(elements, numbers, binary))
        confidence, log_likelihood, error = numbers
        if binary:  # the error of yes alone, as the Brier score of two outcomes is defined
            error = error / 2
        return cls(elements, label, prediction, confidence, log_likelihood, error, binary)

    @property
    def samples(self) -> int:
        """N, the number of elements that are not ignored."""
        return len(self.label)

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return self.elements.logits.shape[1]

    @property
    def correct(self) -> Tensor:
        """Whether each prediction is right, ``(N,)``."""
        return self.prediction == self.label

    @cached_property
    def forecast(self) -> Tensor:
        """The probability whose calibration is measured: the confidence, or that of class 1, ``(N,)``."""
        return self.elements.positive if self.binary else self.confidence

    @property
    def outcome(self) -> Tensor:
        """Whether what was forecast is the case, ``(N,)``."""
        return self.label == 1 if self.binary else self.correct

    @cached_property
    def rows(self) -> Tensor:
        """The logits of the valid elements, ``(N, K)``, in the computing type.

        Minus infinity, for a class that is ruled out, becomes -1e30: zero times it must be zero.
        """
        rows = self.elements.rows
        return rows if float(rows.amin()) >= _RULED_OUT else rows.clamp_min(_RULED_OUT)

    @cached_property
    def derived(self) -> dict[object, Any]:
        """What several metrics derive from these predictions and keep here."""
        return {}

    @cached_property
    def histogram(self) -> ConfidenceHistogram:
        """The confidences as a histogram, as a stream keeps them."""
        return ConfidenceHistogram.of_outcomes(self.forecast, self.outcome)

    @cached_property
    def order(self) -> Tensor:
        """Indices by rising confidence, ``(N,)``; ties keep the order of the data."""
        return self.forecast.argsort(stable=True)

    @cached_property
    def ranked(self) -> RankedSums:
        """Confidence and correctness along rising confidences."""
        confidence, correct = (values[self.order].double() for values in (self.forecast, self.outcome))
        return RankedSums(confidence, torch.stack([torch.ones_like(confidence), confidence, correct]))

    def equal_width(self, bins: int) -> Bins:
        """Bins of equal width on ``(0, 1]``, any number of them; exact."""
        edges = equal_width_edges(bins, self.confidence.device)
        confidence = self.forecast.double()
        place = bin_of(confidence, edges)
        values = torch.ones_like(confidence), confidence, self.outcome.double()
        # Not `bincount`, which is not deterministic on a GPU.
        return Bins(edges, *(confidence.new_zeros(bins).index_add_(0, place, each) for each in values))

    def equal_mass(self, bins: int) -> Bins:
        """Bins of equal counts, exact; see `RankedSums.equal_mass`."""
        return self.ranked.equal_mass(bins)

    def residual(self, cells: int) -> Tensor:
        """``(correct - confidence) / N`` in cells of ``[0, 1]``; an element is divided between two."""
        values = (self.outcome.double() - self.forecast.double()) / self.samples
        return spread(self.forecast.double(), values, cells)


def _not_finite(elements: Elements, numbers: Tensor, binary: bool) -> str:
    """Why some of the scores ``(3, N)`` are not finite, and where in the batch that begins."""
    wrong = int((~numbers.isfinite()).any(0).int().argmax())
    place = int(elements.valid.flatten().nonzero()[wrong])
    where = f"at index {place // prod(elements.batch_shape[2:])} of the batch"
    if numbers[1, wrong] != -torch.inf:
        return f"logits hold NaN or infinite numbers {where}; metrics need finite logits"
    advice = "as_logits(p) - as_logits(1 - p)" if binary else "as_logits(p)"
    return (
        f"logits of minus infinity rule out a true class {where}; for probabilities p with zeros pass "
        f"{advice}, see calibrant.layout.as_logits"
    )


def as_predictions(source: Tensor | Predictions, target: Tensor | None, ignore_index: int) -> Predictions:
    """Return `Predictions` as they are, or compute them from logits and target."""
    if isinstance(source, Predictions):
        if target is not None:
            raise TypeError("Predictions have their target already: pass them alone")
        return source
    if target is None:
        raise TypeError("a metric of logits needs their target: pass logits and target, or Predictions")
    return Predictions.of(source, target, ignore_index=ignore_index)
