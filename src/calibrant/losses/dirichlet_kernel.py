"""Canonical calibration error by a Dirichlet kernel, as a penalty beside cross-entropy."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from calibrant.kernels import LogLikelihood, WeightedSum, reduce_classes
from calibrant.layout import Elements
from calibrant.losses.base import Loss, Shared, in_range
from calibrant.statistics import sum_dtype

# Pairs of elements held at once: bounds the memory, whatever the batch.
_PAIRS = 1 << 22


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

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 0.2,
        bandwidth: float = 0.001,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(num_classes, **shared)
        self.weight = in_range("weight", weight)
        self.bandwidth = in_range("bandwidth", bandwidth, open_low=True)

    def per_sample(self, elements: Elements) -> Tensor:
        return reduce_classes(elements, WeightedSum((-1.0, LogLikelihood())))

    def over_batch(self, elements: Elements) -> Tensor:
        logits, target, valid = elements.logits, elements.target, elements.valid
        # Concentrations of 1/h and log-densities in the thousands: float32 would lose the kernel.
        rows = logits.movedim(1, -1).reshape(-1, self.num_classes).to(sum_dtype(logits.device))
        counted = valid.flatten()
        rows = torch.where(counted.unsqueeze(1), rows, 0)
        log_probability = F.log_softmax(rows, 1)
        probability = log_probability.exp()
        labels = torch.zeros_like(rows).scatter(1, target.flatten().unsqueeze(1), 1)
        # The density's factor that depends on j alone cancels in the ratio.
        log_factor = -torch.lgamma(probability / self.bandwidth + 1).sum(1)
        log_factor = torch.where(counted, log_factor, -torch.inf)

        step = max(1, _PAIRS // max(1, len(rows)))
        total = rows.new_zeros(())
        for start in range(0, len(rows), step):
            chunk = slice(start, start + step)
            errors = checkpoint(
                self._errors,
                log_probability[chunk],
                probability,
                log_factor,
                labels,
                start,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            total = total + torch.where(counted[chunk], errors, 0).sum()
        count = counted.sum()
        # One element has no other to be compared with: its error is undefined, and counts as 0.
        error = torch.where(count > 1, total / count.clamp_min(1), 0)
        return (self.weight * error).to(torch.promote_types(logits.dtype, torch.float32))

    def _errors(
        self,
        log_probability: Tensor,
        probability: Tensor,
        log_factor: Tensor,
        labels: Tensor,
        start: int,
    ) -> Tensor:
        """L1 errors ``(n,)`` of the elements from ``start`` on, each against all others."""
        log_kernel = log_probability @ probability.T / self.bandwidth + log_factor
        others = torch.arange(len(labels), device=labels.device)
        itself = others[start : start + len(log_kernel)].unsqueeze(1) == others
        log_kernel = log_kernel.masked_fill(itself, -torch.inf)
        # Shift by hand: a row without any other element is all -inf, and must stay finite.
        top = log_kernel.detach().amax(1, keepdim=True).clamp_min(torch.finfo(log_kernel.dtype).min)
        kernel = (log_kernel - top).exp()
        ratio = kernel @ labels / kernel.sum(1, keepdim=True).clamp_min(torch.finfo(kernel.dtype).tiny)
        return (ratio - log_probability.exp()).abs().sum(1)
