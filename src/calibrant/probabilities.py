"""Whether numbers are probabilities: rounded ones, percentages, and those in the place of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrant.layout import SUM_TOLERANCE, computing_dtype, is_transformed
from calibrant.warning import ProbabilitiesWarning, warn


def decimals(probabilities: Tensor) -> int | None:
    """The number of decimals that probabilities are rounded to: 1 to 3, or None for more.

    >>> decimals(torch.tensor([[0.5, 0.25]])), decimals(torch.rand(9, 4))
    (2, None)
    """
    for digits in (1, 2, 3):
        scaled = probabilities.double() * 10**digits
        if bool(((scaled - scaled.round()).abs() < 1e-3).all()):
            return digits
    return None


def tolerance_of_rounded(probabilities: Tensor) -> float:
    """How far probabilities ``(N, K, *S)`` may be from a sum of 1, given the digits they are rounded to.

    At least `SUM_TOLERANCE`, and at most 0.05: beyond that, rounding has changed too much.

    >>> tolerance_of_rounded(torch.tensor([[0.34, 0.34, 0.33]])), tolerance_of_rounded(torch.rand(9, 4))
    (0.015, 0.01)
    """
    digits = max(2, decimals(probabilities) or 9)
    return min(0.05, max(SUM_TOLERANCE, probabilities.shape[1] / 2 / 10.0**digits))


def are_percentages(scores: Tensor) -> bool:
    """Whether scores ``(N, K, *S)`` are at least 0 and add up to 100, as probabilities in percent do.

    >>> are_percentages(torch.tensor([[30.0, 70.0], [99.5, 0.5]])), are_percentages(torch.eye(2))
    (True, False)
    """
    if scores.ndim < 2 or not scores.numel():
        return False
    total = scores.sum(1, dtype=computing_dtype(scores))
    return bool((scores >= 0).all() & ((total - 100).abs() <= 100 * SUM_TOLERANCE).all())


def look_like_probabilities(logits: Tensor) -> bool:
    """Whether logits lie in [0, 1] and add up to 1, as probabilities do. Some elements are checked.

    Several elements may be off by `SUM_TOLERANCE`, as rounded probabilities are; a single one by 0.001.

    Args:
        logits: logits ``(N, K, *S)``.

    >>> look_like_probabilities(torch.tensor([[0.25, 0.75]])), look_like_probabilities(torch.eye(2) * 2)
    (True, False)
    """
    some = _some(logits)
    total = some.sum(1, dtype=computing_dtype(some))
    # The logits of a single element may come close by chance. Half precision rounds every probability.
    tolerance = SUM_TOLERANCE if total.numel() > 1 or some.itemsize == 2 else 1e-3
    within = (some >= 0) & (some <= 1 + tolerance)
    return some.numel() > 0 and bool(within.all() & ((total - 1).abs() <= tolerance).all())


def warn_of_probabilities(logits: Tensor) -> None:
    """Warn of probabilities in the place of logits. On a GPU this waits for the device."""
    if torch.compiler.is_compiling() or is_transformed():  # their numbers cannot be read
        return
    if look_like_probabilities(logits):
        what, logarithm = "logits", "they lie in [0, 1] and add up to 1; pass their .log()"
    elif _look_like_probabilities_of_yes(logits):
        what, logarithm = "single logits", "they lie in [0, 1]; pass their .logit()"
    elif _look_like_sigmoids(logits):
        what = "logits"
        logarithm = "they lie in [0, 1], as those of sigmoids do; if each is a decision of its own, pass "
        logarithm += "their .logit() and binary=True"
    elif logits.shape[0] > 1 and are_percentages(_some(logits)):
        what, logarithm = "logits", "they add up to 100, as percentages do; pass (logits / 100).log()"
    else:
        return
    warn(f"these {what} look like probabilities: {logarithm}", ProbabilitiesWarning)


def _some(logits: Tensor) -> Tensor:
    """Some elements of logits ``(N, K, *S)``."""
    logits = logits.detach()
    return logits[:64].flatten(2)[..., :64] if logits.ndim > 2 else logits[:1024]


def _look_like_sigmoids(logits: Tensor) -> bool:
    """Whether logits are spread over [0, 1], as the outputs of sigmoids are.

    Cosines of CLIP are not: they are not near 0, or not above 1/2. Most votes and entries of one-hot vectors
    are exactly 0 or 1, which sigmoids are not. A network that has hardly been trained may give logits in
    [0, 1], but nearly the same ones to all elements, and a few elements may have such logits by chance. So at
    least 20 elements are needed, and two classes whose logits vary by more than 0.6.
    """
    some = _some(logits)
    if some.numel() < 20 * some.shape[1]:
        return False
    low, high = torch.aminmax(some.transpose(0, 1).flatten(1), dim=1)  # of each class
    least, varying = low.amin(), (high - low > 0.6).sum()
    inside = ((some > 0) & (some < 1)).double().mean()
    return bool((least >= 0) & (least < 0.1) & (high.amax() <= 1) & (varying >= 2) & (inside > 0.5))


def _look_like_probabilities_of_yes(pairs: Tensor) -> bool:
    """Whether these are pairs of `as_pairs` whose single logits lie in [0, 1]. A few may do so by chance."""
    if pairs.ndim < 2 or pairs.shape[1] != 2:
        return False
    no, yes = (pairs.detach()[:1024, k].flatten()[:4096] for k in range(2))
    enough = len(yes) >= 20
    return enough and bool((no == 0).all() & (yes >= 0).all() & (yes <= 1).all() & (yes > 0).any())
