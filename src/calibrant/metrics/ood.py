"""Out-of-distribution detection: scores of logits, with AUROC, AUPR and FPR95."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrant.arguments import in_range, whole_number
from calibrant.layout import check_floating, computing_dtype
from calibrant.probabilities import warn_of_probabilities
from calibrant.statistics import sum_dtype

_PERCENT_TRUE_POSITIVES = 95


def entropy(logits: Tensor) -> Tensor:
    """Entropy ``-Σ s_k log s_k`` of the probabilities, in nats: from 0 to log K.

    Args:
        logits: floating-point logits ``(B, K, *S)``.

    Returns:
        Scores ``(B, *S)``, higher for elements that look out of distribution; float64 for float64 logits,
        else float32.

    >>> entropy(torch.tensor([[0.0, 0.0], [30.0, 0.0]]))
    tensor([6.9315e-01, 2.9009e-12])
    """
    shifted, others = _beside_the_top(logits)
    rest = others.sum(1)
    # exp(-∞) · -∞ would be NaN where it means 0.
    summed = (others * shifted.clamp_min(torch.finfo(shifted.dtype).min)).sum(1)
    return rest.log1p() - summed / (1 + rest)


def maximum_probability(logits: Tensor) -> Tensor:
    """One minus the largest probability, ``1 - max s``: from 0 to 1 - 1/K.

    Computed as the sum of the other probabilities. Predictions as confident as ``1 - 1e-30`` still differ,
    even in float32.

    Argument and result as in `entropy`.

    >>> maximum_probability(torch.tensor([[0.0, 0.0], [30.0, 0.0]]))
    tensor([5.0000e-01, 9.3576e-14])
    """
    rest = _beside_the_top(logits)[1].sum(1)
    return rest / (1 + rest)


def energy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Free energy ``-T log Σ exp(l_k / T)`` (Liu et al., Energy-based out-of-distribution detection, 2020).

    Unlike the scores of probabilities it changes when a constant is added to an element's logits.

    Args:
        logits: as in `entropy`, and so is the result.
        temperature: T, above 0.

    >>> energy(torch.tensor([[0.0, 0.0], [30.0, 0.0]]))
    tensor([ -0.6931, -30.0000])
    """
    temperature = in_range("temperature", temperature, open_low=True)
    logits = _prepared(logits)
    # Large logits lose digits by a division, so their maximum is subtracted first.
    top = logits.amax(1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    return -temperature * ((logits - top) / temperature).logsumexp(1) - top.squeeze(1)


def maximum_logit(logits: Tensor) -> Tensor:
    """Minus the largest logit (Hendrycks et al., *Scaling Out-of-Distribution Detection*, ICML 2022).

    Like `energy` it changes when a constant is added to an element's logits. Argument and result as in
    `entropy`.

    >>> maximum_logit(torch.tensor([[0.0, 2.0], [30.0, 0.0]]))
    tensor([ -2., -30.])
    """
    return -_prepared(logits).amax(1)


def generalised_entropy(logits: Tensor, *, gamma: float = 0.1, classes: int = 100) -> Tensor:
    """Generalised entropy ``Σ s_k^γ (1 - s_k)^γ`` over the most probable classes.

    A small γ weighs small probabilities more than entropy does.

    Liu, Lochman and Zach, *GEN: Pushing the Limits of Softmax-Based Out-of-Distribution Detection*,
    CVPR 2023.

    Args:
        logits: as in `entropy`, and so is the result.
        gamma: γ, above 0 and at most 1.
        classes: number of most probable classes to sum over; all of them if there are fewer.

    >>> generalised_entropy(torch.tensor([[0.0, 0.0], [30.0, 0.0]]))
    tensor([1.7411, 0.0996])
    """
    gamma = in_range("gamma", gamma, 0, 1, open_low=True)
    classes = whole_number("classes", classes)
    logits = _prepared(logits)
    top, index = logits.max(1, keepdim=True)
    # In logarithms: powers of probabilities that are too small for the type need not be.
    beside = (logits - top).scatter(1, index, -torch.inf)
    log_rest = beside.logsumexp(1, keepdim=True)
    log_total = log_rest.exp().log1p()
    logarithm = beside - log_total  # of the probability
    terms = (gamma * (logarithm + (-logarithm.exp()).log1p())).exp()  # 0 for the top class
    if classes < logits.shape[1]:
        # The top class is counted apart.
        terms = terms.topk(classes - 1, 1).values if classes > 1 else terms[:, :0]
    return terms.sum(1) + (gamma * (log_rest - 2 * log_total)).exp().squeeze(1)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": entropy,
    "maximum_probability": maximum_probability,
    "energy": energy,
    "maximum_logit": maximum_logit,
    "generalised_entropy": generalised_entropy,
}
"""Scores by name: functions from logits ``(B, K, *S)`` to ``(B, *S)``, higher = more out of distribution."""


@dataclass(frozen=True)
class Detection:
    """How well a score separates out-of-distribution from in-distribution elements; all are fractions.

    Attributes:
        auroc: the probability that an out-of-distribution element scores higher than an in-distribution
            element. Ties count one half. It does not depend on which class is called positive.
        aupr: average precision with out-of-distribution elements as the positive class:
            ``Σ (R_i - R_{i-1}) P_i`` over the distinct scores, without interpolation.
        aupr_in: average precision with in-distribution elements as the positive class, found by low scores.
        fpr_at_95_tpr: the false positive rate with in-distribution elements as the positive class, as in
            papers: the fraction of out-of-distribution elements that the strictest threshold accepts if it
            accepts at least 95 % of the in-distribution elements. Lower is better.
    """

    auroc: float
    aupr: float
    aupr_in: float
    fpr_at_95_tpr: float


@torch.no_grad()
def detection(in_scores: Tensor, out_scores: Tensor) -> Detection:
    """Measure how well scores separate two sets; exact, with ties.

    Args:
        in_scores: floating-point scores of in-distribution elements, of any shape.
        out_scores: scores of out-of-distribution elements, expected to be higher.

    Raises:
        TypeError: the scores are not floating point.
        ValueError: there are no scores, some are NaN, or they are on two devices.

    >>> detection(torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.9]))
    Detection(auroc=0.875, aupr=0.8333333333333333, aupr_in=0.95, fpr_at_95_tpr=0.5)
    """
    inside, outside = _sorted(in_scores, out_scores)
    sizes = len(inside), len(outside)
    # For each of `outside`: how many of `inside` are below it, and how many are not above it. Exact integers.
    below = torch.searchsorted(inside, outside)
    not_above = torch.searchsorted(inside, outside, right=True)
    ranks = int(below.sum()) + int(not_above.sum())
    # Average precision is the mean over the positives of the precision at the score of each.
    found = sizes[1] - torch.searchsorted(outside, outside)
    found_in = torch.searchsorted(inside, inside, right=True)
    mistaken_in = torch.searchsorted(outside, inside, right=True)
    # In integers: 0.95 · 20 must not become 19.000000000000004.
    accepted = -(-_PERCENT_TRUE_POSITIVES * sizes[0] // 100)
    return Detection(
        auroc=ranks / (2 * sizes[0] * sizes[1]),
        aupr=_mean_precision(found, sizes[0] - below),
        aupr_in=_mean_precision(found_in, mistaken_in),
        fpr_at_95_tpr=int(mistaken_in[accepted - 1]) / sizes[1],
    )


@torch.no_grad()
def rates(in_scores: Tensor, out_scores: Tensor) -> tuple[Tensor, Tensor]:
    """False and true positive rates at all thresholds, from the highest down, after the point ``(0, 0)``.

    Out-of-distribution elements are the positive class, found by high scores. Tied scores are found together.
    Arguments as for `detection`.

    Returns:
        Two float64 tensors ``(T + 1,)`` on the CPU, for T different scores.

    >>> [each.tolist() for each in rates(torch.tensor([0.1, 0.6]), torch.tensor([0.6, 0.9]))]
    [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    inside, outside = _sorted(in_scores, out_scores)
    thresholds = torch.unique(torch.cat([inside, outside])).flip(0)

    def flagged(scores: Tensor) -> Tensor:
        count = len(scores) - torch.searchsorted(scores, thresholds)
        return torch.cat([count.new_zeros(1), count]).double().cpu() / len(scores)

    return flagged(inside), flagged(outside)


@torch.no_grad()
def roc(in_scores: Tensor, out_scores: Tensor, *, points: int = 201) -> tuple[float, ...]:
    """The ROC curve at evenly spaced false positive rates, so that curves of several models can be averaged.

    The curve is that of `rates`, straight between neighbouring thresholds. ``points`` is the number of false
    positive rates from 0 to 1. Other arguments as for `detection`.

    Returns:
        The highest true positive rate at each false positive rate.

    >>> roc(torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.9]), points=5)
    (0.5, 1.0, 1.0, 1.0, 1.0)
    """
    false, true = rates(in_scores, out_scores)
    at = torch.linspace(0, 1, whole_number("points", points, 2), dtype=false.dtype, device=false.device)
    # The last point at or before each rate: where the curve is vertical, this is the highest one.
    left = torch.searchsorted(false, at, right=True) - 1
    right = (left + 1).clamp_max(len(false) - 1)
    step = false[right] - false[left]
    part = torch.where(step > 0, (at - false[left]) / step.where(step > 0, torch.ones_like(step)), 0)
    return tuple((true[left] + part * (true[right] - true[left])).tolist())


@torch.no_grad()
def ood_detection(in_logits: Tensor, out_logits: Tensor) -> dict[str, Detection]:
    """Measure how well each of `SCORES` separates out-of-distribution from in-distribution data.

    To leave out elements, such as void pixels, compute a score, select elements, and call `detection`.

    Args:
        in_logits: floating-point logits ``(B, K, *S)`` of in-distribution data.
        out_logits: logits of out-of-distribution data, from the same model; B and S may differ.

    Returns:
        The result for each score, by its name.

    Raises:
        TypeError: the logits are not floating point.
        ValueError: there are no elements, logits are NaN or +∞, the numbers of classes differ, or the logits
            are on two devices.

    >>> in_logits = torch.tensor([[4.0, 0.0], [0.0, 6.0], [3.0, 0.0]])
    >>> out_logits = torch.tensor([[1.0, 0.0], [0.0, 3.5]])
    >>> round(ood_detection(in_logits, out_logits)["entropy"].auroc, 4)
    0.8333
    """
    for name, logits in _checked(in_logits, out_logits, "logits"):
        _check_logits(logits, name)
        if not (logits < torch.inf).all():
            raise ValueError(f"{name} hold NaN or +∞")
    if in_logits.shape[1] != out_logits.shape[1]:
        raise ValueError(
            f"in_logits have {in_logits.shape[1]} classes on axis 1, but out_logits have "
            f"{out_logits.shape[1]}: both must come from one model"
        )
    return {name: detection(score(in_logits), score(out_logits)) for name, score in SCORES.items()}


def _prepared(logits: Tensor) -> Tensor:
    """Checked logits in the computing type."""
    _check_logits(logits, "logits")
    warn_of_probabilities(logits)
    return logits.to(computing_dtype(logits))


def _beside_the_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits minus their maximum, and the exponentials of these, with 0 for the top class.

    The top class contributes exactly 1 to their sum. Adding it last keeps the digits of the small rest.
    """
    logits = _prepared(logits)
    top, index = logits.max(1, keepdim=True)
    shifted = logits - top
    return shifted, shifted.exp().scatter(1, index, 0.0)


def _mean_precision(true_positives: Tensor, false_positives: Tensor) -> float:
    dtype = sum_dtype(true_positives.device)
    return float((true_positives.to(dtype) / (true_positives + false_positives)).mean())


def _check_logits(logits: Tensor, name: str) -> None:
    check_floating(logits, name)
    if logits.ndim < 2 or not logits.shape[1]:
        raise ValueError(f"{name} must have shape (B, K, *S) with K > 0, got {tuple(logits.shape)}")


def _sorted(in_scores: Tensor, out_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Both scores, checked and in ascending order."""
    for name, scores in _checked(in_scores, out_scores, "scores"):
        if scores.isnan().any():
            raise ValueError(f"{name} hold NaN")
    # One type for both, and not half precision, in which some devices cannot search.
    dtype = torch.promote_types(torch.promote_types(in_scores.dtype, out_scores.dtype), torch.float32)
    return in_scores.to(dtype).flatten().sort().values, out_scores.to(dtype).flatten().sort().values


def _checked(inside: Tensor, outside: Tensor, what: str) -> tuple[tuple[str, Tensor], ...]:
    """The two tensors with their names."""
    named = (f"in_{what}", inside), (f"out_{what}", outside)
    for name, values in named:
        check_floating(values, name)
        if not values.numel():
            raise ValueError(f"{name} of shape {tuple(values.shape)} hold no elements")
    if inside.device != outside.device:
        raise ValueError(f"the {what} must be on one device, got {inside.device} and {outside.device}")
    return named
