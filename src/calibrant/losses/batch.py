"""What losses share that measure the calibration of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrant.kernels import Correctness, TopProbability, reduce_classes
from calibrant.layout import Elements
from calibrant.statistics import sum_dtype


def confidence_and_correctness(elements: Elements) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence, correctness, and whether each element counts, ``(N,)`` each, in the type of sums.

    Gradients flow through the confidence only. Where an element does not count, its confidence is 0, and its
    correctness has no meaning.

    >>> from calibrant.layout import arrange
    >>> confidence, correct, counted = confidence_and_correctness(
    ...     arrange(torch.zeros(2, 2), torch.tensor([0, -100]))
    ... )
    >>> confidence.tolist(), correct[0].item(), counted.tolist()
    ([0.5, 0.0], 1.0, [1.0, 0.0])
    """
    dtype = sum_dtype(elements.logits.device)
    confidence = reduce_classes(elements, TopProbability())
    correct = reduce_classes(elements.detached(), Correctness())
    confidence = torch.where(elements.valid, confidence, 0)  # ignored logits may not be numbers
    counted = elements.valid.flatten().to(dtype)
    return confidence.flatten().to(dtype), correct.flatten().to(dtype), counted


def root(square: Tensor) -> Tensor:
    """The square root with a slope of 0 at 0, where the root has none.

    >>> square = torch.zeros((), requires_grad=True)
    >>> root(square).backward()
    >>> square.grad
    tensor(0.)
    """
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)
