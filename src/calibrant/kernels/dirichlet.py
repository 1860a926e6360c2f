"""Canonical calibration errors with a Dirichlet kernel, for the loss and the metric of that name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from calibrant.layout import is_transformed
from calibrant.statistics import sum_dtype

# Pairs of elements held at once: bounds the memory, whatever the batch size.
_PAIRS = 1 << 22


def dirichlet_errors(
    logits: Tensor, target: Tensor, bandwidth: float, valid: Tensor | None = None
) -> Iterator[Tensor]:
    """The L1 distance between each softmax and the leave-one-out kernel mean of the labels around it.

    All pairs of elements are visited, in float64 and a bounded number at a time; autograd can follow.

    Args:
        logits: ``(N, K)``.
        target: labels ``(N,)``.
        bandwidth: the bandwidth h of the kernel.
        valid: whether each element counts, ``(N,)``; None for all. The errors of the others are arbitrary.

    Yields:
        The errors of consecutive runs of elements.
    """
    # Concentrations of 1/h make log-densities in the thousands, too large for the precision of float32.
    rows = logits.to(sum_dtype(logits.device))
    if valid is not None:
        rows = torch.where(valid.unsqueeze(1), rows, 0)
    log_probability = F.log_softmax(rows, 1)
    probability = log_probability.exp()
    labels = torch.zeros_like(rows).scatter(1, target.unsqueeze(1), 1)
    # The factor of the density that depends on j alone cancels in the ratio.
    log_factor = -torch.lgamma(probability / bandwidth + 1).sum(1)
    if valid is not None:
        log_factor = torch.where(valid, log_factor, -torch.inf)
    if not len(rows):
        yield log_probability.sum(1)
        return
    step = max(1, _PAIRS // len(rows))
    for start in range(0, len(rows), step):
        arguments = (log_probability[start : start + step], probability, log_factor, labels, start, bandwidth)
        # Transforms do not support checkpoints, and keep all pairs in memory.
        if torch.is_grad_enabled() and not is_transformed():
            yield checkpoint(_errors, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            yield _errors(*arguments)


def _errors(
    log_probability: Tensor,
    probability: Tensor,
    log_factor: Tensor,
    labels: Tensor,
    start: int,
    bandwidth: float,
) -> Tensor:
    """Errors ``(n,)`` of the elements from ``start`` on, each against all others."""
    log_kernel = log_probability @ probability.T / bandwidth + log_factor
    others = torch.arange(len(labels), device=labels.device)
    itself = others[start : start + len(log_kernel)].unsqueeze(1) == others
    log_kernel = log_kernel.masked_fill(itself, -torch.inf)
    # Not logsumexp: a row without any other element is all -inf and must stay finite.
    top = log_kernel.detach().amax(1, keepdim=True).clamp_min(torch.finfo(log_kernel.dtype).min)
    kernel = (log_kernel - top).exp()
    ratio = kernel @ labels / kernel.sum(1, keepdim=True).clamp_min(torch.finfo(kernel.dtype).tiny)
    return (ratio - log_probability.exp()).abs().sum(1)


def dirichlet_bandwidth(logits: Tensor) -> float:
    """The bandwidth with the highest leave-one-out likelihood of the predictions ``(N, K)``.

    The candidates are 1e-4 to 1, two per factor of ten. At a tie the smallest is chosen.
    """
    log_probability = F.log_softmax(logits.to(sum_dtype(logits.device)), 1)
    probability = log_probability.exp()
    alignment = log_probability @ probability.T

    def likelihood(bandwidth: float) -> float:
        concentration = probability / bandwidth + 1
        log_kernel = alignment / bandwidth - torch.lgamma(concentration).sum(1)
        log_kernel = log_kernel + torch.lgamma(concentration.sum(1))
        return float(log_kernel.fill_diagonal_(-torch.inf).logsumexp(1).mean())

    return max((10 ** (exponent / 2) for exponent in range(-8, 1)), key=likelihood)
