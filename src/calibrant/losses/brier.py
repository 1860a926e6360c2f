"""The Brier score as a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrant.kernels import Composition, Part, PenaltyTerm, SquaredError, device_function
from calibrant.losses.base import Loss

if TYPE_CHECKING:
    import triton.language as tl


@device_function
def _below_one(shifted, e):
    """``1 - e``, to the last digit where e is almost 1."""
    near = tl.maximum(shifted, -0.125)
    series = -near * (1 + near * (0.5 + near * (0.16666667 + near * (0.041666668 + near * 0.008333334))))
    return tl.where(shifted > -0.125, series, 1 - e)


@device_function
def _sums(tile, top, parameters, VARIANT, SOFT, ALONE):
    e = tile.exponential
    two = tl.zeros_like(e)
    three = two
    if SOFT:
        one = e * tile.target
        two = e * e
        three = tile.target * tile.target
    else:
        one = tl.where(tile.is_target, 0.0, e * e)
        if ALONE:
            two = tl.where(tile.is_target, 0.0, e * _below_one(tile.shifted, e))
    return one, two, three


@device_function
def _value(one, two, three, element, K, SOFT, ALONE):
    total = element.total
    if SOFT:
        value = two / (total * total) - 2 * one / total + three
        along = -2 * (two / total - one) / total  # Σ s (s - t)
        at_target = 0.0 * total
        aside = 2 / total
    else:
        spread = element.p * element.doubt
        squares = one / (total * total)
        value = squares + element.doubt * element.doubt
        along = -2 * (squares - spread)
        at_target = -2 * (element.p * squares + spread * element.doubt)
        aside = 2 / (total * total)
        if ALONE:
            # The same without a difference of numbers near 1, for a wrong class that is all but certain.
            along = 2 * (two / (total * total) + spread)
            aside /= total
    return value, along, at_target, aside


@device_function
def _rest(tile, top, parameters, element, aside, K, VARIANT, SOFT, ALONE):
    e = tile.exponential
    if SOFT:
        rest = aside[:, None] * e * (e * aside[:, None] / 2 - tile.target)
    elif ALONE:
        far = _below_one(tile.shifted, e)
        rest = aside[:, None] * e * (e * element.at_target[:, None] - far * element.others[:, None])
        rest = tl.where(tile.is_target, 0.0, rest)
    else:
        rest = tl.where(tile.is_target, 0.0, aside[:, None] * e * e)
    return rest


SQUARED_ERROR = PenaltyTerm(_sums, _value, _rest)


class Brier(Loss):
    """Brier score ``Σ_k (s_k - 1[k=y])²`` (key ``brier``).

    Brier, *Verification of Forecasts Expressed in Terms of Probability*, 1950.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    >>> import torch
    >>> Brier(2)(torch.zeros(1, 2), torch.tensor([0])).item()
    0.5
    """

    accepts_probabilities = True
    linear_in_target = False

    def composition(self) -> Composition:
        return Composition(penalty=Part(lambda logits: SquaredError(), SQUARED_ERROR))
