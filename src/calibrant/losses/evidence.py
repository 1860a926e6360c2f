"""Standard errors of what a validation set measures, and how far a measured gap exceeds them."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrant.histogram import Bins


def beyond(gap: Tensor, error: Tensor, evidence: float) -> Tensor:
    """The part of a gap beyond ``evidence`` standard errors: ``sign(gap) · max(0, |gap| - evidence·error)``.

    >>> beyond(torch.tensor([0.5, -0.5, 0.1]), torch.tensor(0.2), 1.0)
    tensor([ 0.3000, -0.3000,  0.0000])
    """
    if not evidence:  # as it is: an infinite error times 0 would be NaN
        return gap
    return gap.sign() * (gap.abs() - evidence * error).clamp_min(0)


def shrunk(gap: Tensor, error: Tensor, evidence: float) -> Tensor:
    """A gap shrunk towards 0 by ``(evidence·error)² / gap``; 0 within ``evidence`` standard errors.

    Beyond many standard errors nothing is taken away, where `beyond` always takes the same amount.

    >>> shrunk(torch.tensor([0.5, -0.5, 0.1]), torch.tensor(0.2), 1.0)
    tensor([ 0.4200, -0.4200,  0.0000])
    """
    limit = evidence * error
    return torch.where(gap.abs() > limit, gap - limit.square() / gap, 0)


def error_of_mean(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """The standard error of a mean, from sums over elements; infinite for a single element.

    Args:
        total: the sum of the values.
        squares: the sum of their squares.
        count: the number of elements.

    >>> error_of_mean(torch.tensor(6.0), torch.tensor(20.0), torch.tensor(2.0))  # of 2 and 4
    tensor(1.)
    """
    variance = (squares - total * total / count).clamp_min(0) / (count - 1)
    return torch.where(count > 1, (variance / count).sqrt(), torch.inf)


def error_of_accuracy(bins: Bins) -> Tensor:
    """The standard error of the accuracy in each bin, and so of confidence minus accuracy, ``(bins,)``.

    The standard deviation of the accuracy under Jeffreys' prior: ``a (1-a) / (n+2)`` is its variance, with
    ``a = (correct + ½) / (n + 1)``. The plain ``A (1-A) / n`` is 0 where all or none of a few elements are
    right, as if they left no doubt.

    >>> all_right = Bins(torch.tensor([0.0, 1.0]), *torch.tensor([[14.0], [13.0], [14.0]]))
    >>> error_of_accuracy(all_right)
    tensor([0.0449])
    """
    accuracy = (bins.correct + 0.5) / (bins.count + 1)
    return (accuracy * (1 - accuracy) / (bins.count + 2)).sqrt()
