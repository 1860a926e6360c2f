"""Maximum mean calibration error: a kernel measure of miscalibration on the batch, as a penalty."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Correctness, Term, TopProbability
from calibrant.layout import Elements, computing_dtype, is_transformed
from calibrant.losses.base import LossOptions, Range
from calibrant.losses.batch import BatchLoss, flattened, in_type_of_sums, root, sum_of_parts


def laplacian_form(position: Tensor, weight: Tensor, width: float) -> Tensor:
    """``Σ_ij w_i w_j exp(-|x_i - x_j| / width)`` for positions in [0, 1], in O(N log N).

    [0, 1] is cut into cells of one width. In a cell the kernel splits into ``exp(-u_i) · exp(u_j)``, where
    ``u = x/width`` counts from the start of the cell, so sums over pairs become running sums of numbers
    between ``w`` and ``e·w``. Sums that leave a cell fall by a factor of e in every further cell. Pairs at
    the same position enter by plain sums: the kernel's derivative there is taken as 0, as that of ``|x|``.
    """
    order = _order(position.detach())
    # gather, because the derivative of indexing is many times slower.
    position, weight = position.gather(0, order), weight.gather(0, order)
    fixed = position.detach()
    last = int(1 / width)
    # No index errors: NaN has no cell, and in float32 the quotient may be rounded up to a cell too far.
    cell = (fixed / width).floor().nan_to_num(0).clamp(max=last)
    # The second part is 0, and has the derivatives of the first.
    inside = (fixed / width - cell) + (position - fixed) / width
    cell = cell.long()
    first, start = _first_of_equals(fixed), _first_of_equals(cell)

    sent = weight * inside.exp()
    running = torch.cat([torch.zeros_like(sent[:1]), sent.cumsum(0)])
    cells = torch.arange(last + 1, dtype=fixed.dtype, device=fixed.device)
    of_cells = torch.zeros_like(cells).index_add(0, cell, sent)
    carried = (cells - cells.unsqueeze(1)).exp().tril(-1) @ of_cells
    from_below = running.gather(0, first) - running.gather(0, start) + carried.gather(0, cell)
    from_below = from_below * (-inside).exp()
    tied = torch.zeros_like(weight).index_add(0, first, weight)
    # Each pair is counted once, from above.
    return tied.square().sum() + 2 * (weight * from_below).sum()


def _order(numbers: Tensor) -> Tensor:
    """The places of the numbers, ``(N,)``, from the smallest number to the largest."""
    if numbers.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
        return numbers.argsort()
    return torch.from_numpy(np.argsort(numbers.numpy()))  # three times as fast as torch's


def _first_of_equals(ordered: Tensor) -> Tensor:
    """The place of the first of the numbers equal to each, for numbers in order, ``(N,)``."""
    begins = ordered != ordered.roll(1)
    return (torch.arange(len(ordered), device=ordered.device) * begins).cummax(0).values


class KernelCalibration(BatchLoss):
    """Maximum mean calibration error beside cross-entropy, ``ce + w √MMCE²`` (key ``mmce``).

    ``MMCE² = 1/N² Σ_ij (c_i - r_i)(c_j - r_j) exp(-|r_i - r_j| / width)`` over the batch, with ``r`` the
    top confidence and ``c`` the correctness. Computed in O(N log N), so images are no problem.

    Kumar, Sarawagi and Jain, *Trainable Calibration Measures for Neural Networks from Kernel Mean
    Embeddings*, ICML 2018. The releases of Mukhoti et al. (NeurIPS 2020) and of CALS (CVPR 2023) leave out
    the root: their term is the square of this one.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        weight: w.
        kernel_width: how near two confidences must be to be compared; at least 1/300.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(1, 2), torch.tensor([0])
    >>> round(KernelCalibration(2, weight=1.0)(logits, target).item(), 4)
    1.1931
    """

    search_space = (Range("weight", 0.01, 10, log=True), Range("kernel_width", 0.05, 2, log=True))

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 0.1,
        kernel_width: float = 0.4,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.weight = weight
        self.kernel_width = kernel_width

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            value = in_range(name, value)
        elif name == "kernel_width":
            # Below 1/300 the rounding of float32 confidences would show in the kernel.
            value = in_range(name, value, 1 / 300)
        super().__setattr__(name, value)

    def numbers(self, elements: Elements) -> tuple[Term, ...]:
        return TopProbability(), Correctness()

    def over_numbers(self, elements: Elements, *numbers: Tensor) -> Tensor:
        squared = sum_of_parts(self._squared, *flattened(elements, *numbers), together=True)
        return (self.weight * root(squared)).to(computing_dtype(elements.logits))

    def _squared(self, *numbers: Tensor) -> Tensor:
        counted, confidence, correct = in_type_of_sums(*numbers)
        residual = self.residual(confidence, correct, counted)
        return laplacian_form(confidence, residual, self.kernel_width)

    def residual(self, confidence: Tensor, correct: Tensor, counted: Tensor) -> Tensor:
        """Signed, normalised miscalibration of each element; every argument is ``(N,)``.

        ``correct`` and ``counted`` are 0 or 1, and the result is 0 where ``counted`` is.
        """
        return counted * (correct - confidence) / counted.sum().clamp_min(1)


class WeightedKernelCalibration(KernelCalibration):
    """MMCE with correct and wrong elements normalised apart (key ``mmce-weighted``).

    The residuals are ``(1 - r) / n`` for the n correct elements and ``-r / (N - n)`` for the others; a
    batch with only one kind contributes 0. Public releases normalise twice: they divide the residuals by
    ``n²`` and ``(N - n)²``. With as many right as wrong elements, this term is exactly ``N - n`` times as
    large; with fewer wrong ones, about 0.6 to 0.9 times ``N - n``. In a batch of 128 that is 64 at an
    accuracy of 50 %, about 10 at 90 %, and about 1 at 99 %.

    Kumar, Sarawagi and Jain, ICML 2018, section 4.

    Shape and arguments as `KernelCalibration`.

    >>> import torch
    >>> logits, target = torch.zeros(2, 2), torch.tensor([0, 1])
    >>> round(WeightedKernelCalibration(2, weight=1.0)(logits, target).item(), 4)
    0.6931
    """

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 2.0,
        kernel_width: float = 0.4,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, weight=weight, kernel_width=kernel_width, **shared)

    def residual(self, confidence: Tensor, correct: Tensor, counted: Tensor) -> Tensor:
        right, wrong = counted * correct, counted * (1 - correct)
        apart = right * (1 - confidence) / right.sum().clamp_min(1)
        apart = apart - wrong * confidence / wrong.sum().clamp_min(1)
        return apart * ((right.sum() > 0) & (wrong.sum() > 0))
