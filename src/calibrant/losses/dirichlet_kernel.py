"""Canonical calibration error by a Dirichlet kernel, as a penalty beside cross-entropy."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.kernels import Composition, dirichlet_errors
from calibrant.layout import Elements, computing_dtype
from calibrant.losses.base import Loss, LossOptions, Range
from calibrant.losses.cross_entropy import cross_entropy


class DirichletKernelCalibration(Loss):
    """Cross-entropy plus a canonical calibration error, ``ce + w·CE₁`` (key ``kde-xe``).

    ``CE₁ = 1/N Σ_j ‖ Σ_{i≠j} k(s_j, s_i) 1_{y_i} / Σ_{i≠j} k(s_j, s_i) - s_j ‖₁`` with the Dirichlet
    density ``k(·, s_i)`` of parameters ``s_i/h + 1``. All pairs of elements are visited, in float64 and
    a bounded number at a time: the cost grows with N², the memory does not.

    Popordanoska, Sayer and Blaschko, *A Consistent and Differentiable Lp Canonical Calibration Error
    Estimator*, NeurIPS 2022.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        num_classes: K.
        weight: w.
        bandwidth: h.
        **shared: see `Loss`.

    >>> import torch
    >>> logits, target = torch.zeros(2, 2), torch.tensor([0, 0])
    >>> round(DirichletKernelCalibration(2, weight=1.0)(logits, target).item(), 4)
    1.6931
    """

    search_space = (Range("weight", 0.01, 2, log=True), Range("bandwidth", 0.0001, 0.1, log=True))

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 0.2,
        bandwidth: float = 0.001,
        **shared: Unpack[LossOptions],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)
        self.bandwidth = in_range("bandwidth", bandwidth, open_low=True)

    def composition(self) -> Composition:
        return Composition(cross_entropy())

    def over_batch(self, elements: Elements) -> Tensor:
        logits, valid = elements.logits, elements.valid.flatten()
        rows = logits.movedim(1, -1).reshape(-1, self.num_classes)
        errors = torch.cat(list(dirichlet_errors(rows, elements.target.flatten(), self.bandwidth, valid)))
        count = valid.sum()
        # One element has no other to be compared with: its error is undefined, and counts as 0.
        error = torch.where(count > 1, torch.where(valid, errors, 0).sum() / count.clamp_min(1), 0)
        return (self.weight * error).to(computing_dtype(logits))
