"""Ensembles, MC dropout and test-time augmentation: several predictions for each element, pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from calibrant.layout import as_decisions, as_pairs, computing_dtype, not_ignored
from calibrant.probabilities import warn_of_probabilities
from calibrant.statistics import Statistics, sum_dtype

__all__ = ["Diversity", "disagreement", "mutual_information", "pool"]


def pool(logits: Tensor, *, binary: bool = False) -> Tensor:
    """Average the probabilities of several members; the result is their logarithms, which are logits.

    Probabilities are averaged, not logits: ``log (1/M Σ_m softmax(l_m))``, without under- or overflow.

    Args:
        logits: logits ``(M, B, K, *S)`` of M members: models of an ensemble, passes with dropout, or
            versions of an input.
        binary: each logit is a yes-or-no decision of its own. Logits are ``(M, B)``, or ``(M, B, L, *S)`` for
            L labels, and the probabilities of yes are averaged.

    Returns:
        Logits ``(B, K, *S)``; if binary, ``(B,)`` or ``(B, L, *S)``. They are float64 for float64
        logits, else float32.

    >>> members = torch.tensor([[[0.0, 0.0]], [[0.0, -torch.inf]]])  # 50 % and 100 %
    >>> pool(members).exp()
    tensor([[0.7500, 0.2500]])
    """
    classes = _classes(logits, binary)
    warn_of_probabilities(classes[0])
    pooled = _log_probabilities(classes).logsumexp(0) - torch.tensor(len(logits), device="cpu").log()
    return pooled[:, 1] - pooled[:, 0] if binary else pooled


def mutual_information(logits: Tensor, *, binary: bool = False) -> Tensor:
    """Mutual information between prediction and member, in nats: from 0 to log M.

    It is the entropy of the pooled probabilities minus the mean entropy of the members. It is 0 where all
    members predict the same probabilities, and large where each is sure of something else.

    Args:
        logits: logits ``(M, B, K, *S)``, as for `pool`.
        binary: each logit is a yes-or-no decision of its own, as for `pool`.

    Returns:
        Scores ``(B, *S)``, for example for out-of-distribution detection; if binary, one for each decision.

    >>> opposed, agreed = torch.tensor([[30.0, 0.0], [0.0, 30.0]]), torch.tensor([[30.0, 0.0], [30.0, 0.0]])
    >>> mutual_information(torch.stack([opposed, agreed], 1))
    tensor([0.6931, 0.0000])
    """
    classes = _classes(logits, binary)
    return (_entropy(pool(classes), 1) - _member_entropy(classes)).clamp_min(0)


def disagreement(logits: Tensor, *, binary: bool = False) -> Tensor:
    """The fraction of pairs of members that predict different classes, from 0 to 1.

    Args:
        logits: logits ``(M, B, K, *S)``, as for `pool`; M at least 2.
        binary: each logit is a yes-or-no decision of its own, as for `pool`.

    Returns:
        Fractions ``(B, *S)``; if binary, one for each decision.

    >>> disagreement(torch.tensor([[[2.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6667])
    """
    classes, members = _classes(logits, binary), len(logits)
    if members < 2:
        raise ValueError("disagreement needs the logits of at least 2 members, got 1")
    votes = torch.zeros(classes.shape[1:], dtype=computing_dtype(logits), device=logits.device)
    predicted = classes.argmax(2)
    for prediction in predicted.unsqueeze(2):
        votes.scatter_add_(1, prediction, torch.ones_like(prediction, dtype=votes.dtype))
    return 1 - (votes * (votes - 1)).sum(1) / (members * (members - 1))


@dataclass(frozen=True, eq=False)
class Diversity(Statistics):
    """How much the members of an ensemble differ, as sums over elements. Diversities add up.

    >>> members = torch.tensor([[[2.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
    >>> diversity = Diversity.of(members, torch.tensor([0]))
    >>> {name: round(value, 3) for name, value in (diversity + diversity).means().items()}
    {'entropy': 0.661, 'member_entropy': 0.51, 'mutual_information': 0.151, 'disagreement': 0.667}
    """

    entropy: Tensor
    member_entropy: Tensor
    disagreement: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, logits: Tensor, target: Tensor, *, ignore_index: int = -100, binary: bool = False) -> Self:
        """The sums of a batch.

        Args:
            logits: logits ``(M, B, K, *S)``, as for `pool`; M at least 2.
            target: labels ``(B, *S)``, of which only those to leave out matter. If binary, one for each
                decision; ``(B,)`` will do for logits ``(M, B, 1)``.
            ignore_index: the label of elements to leave out.
            binary: each logit is a yes-or-no decision of its own, as for `pool`.
        """
        classes = _classes(logits, binary)
        elements = (*classes.shape[1:2], *classes.shape[3:])
        if binary:
            _, target = as_decisions(logits[0], target)
        if target.shape != elements:
            raise ValueError(f"target must have shape {elements}, got {tuple(target.shape)}")
        valid = not_ignored(target, ignore_index)
        dtype = sum_dtype(logits.device)
        values = _entropy(pool(classes), 1), _member_entropy(classes), disagreement(classes)
        sums = (torch.where(valid, value, 0).sum(dtype=dtype) for value in values)
        return cls(valid.sum(dtype=dtype), *sums)

    def means(self) -> dict[str, float]:
        """The means over elements: entropies and mutual information in nats, and the disagreement."""
        entropy, members, apart = (
            float(total / self.samples) for total in (self.entropy, self.member_entropy, self.disagreement)
        )
        return {
            "entropy": entropy,
            "member_entropy": members,
            "mutual_information": max(0.0, entropy - members),
            "disagreement": apart,
        }


def _classes(logits: Tensor, binary: bool) -> Tensor:
    """The logits ``(M, B, K, *S)`` of several members, checked; decisions become two classes, no and yes."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits of an ensemble must be a floating-point tensor, got {kind}: stack them")
    form = "(M, B) or (M, B, L, *S)" if binary else "(M, B, K, *S)"
    if logits.ndim < 3 - binary or not len(logits):
        raise ValueError(
            f"logits of an ensemble must have shape {form} for M members, got {tuple(logits.shape)}"
        )
    if logits.shape[2:3] == (1,) and not binary:
        raise ValueError(
            f"logits of an ensemble must have shape {form} with at least 2 classes, got "
            f"{tuple(logits.shape)}; for single logits there is binary=True"
        )
    return torch.stack([as_pairs(member) for member in logits]) if binary else logits


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(computing_dtype(logits)).log_softmax(2)


def _entropy(log_probabilities: Tensor, axis: int) -> Tensor:
    # A probability of 0 contributes nothing; 0 · -∞ would be NaN.
    finite = log_probabilities.clamp_min(torch.finfo(log_probabilities.dtype).min)
    return -(log_probabilities.exp() * finite).sum(axis)


def _member_entropy(logits: Tensor) -> Tensor:
    return _entropy(_log_probabilities(logits), 2).mean(0)
