"""Checks of arguments, with errors that say what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


def one_of(name: str, value: T, allowed: Sequence[T]) -> T:
    """Return ``value`` if it is allowed; otherwise raise an error that lists the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def in_range(
    name: str,
    value: float,
    low: float = 0.0,
    high: float = float("inf"),
    *,
    open_low: bool = False,
) -> float:
    """Return ``value`` as a float if it is finite and in the range; otherwise raise an error."""
    if isinstance(value, str):
        raise ValueError(f"{name} must be a number, got {value!r}")
    number = float(value)
    above = number > low if open_low else number >= low
    if not (above and number <= high and number != float("inf")):
        left = "(" if open_low else "["
        right = "]" if high != float("inf") else ")"
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, got {value!r}")
    return number


def whole_number(name: str, value: int) -> int:
    """Return ``value`` if it is an integer of at least 1; otherwise raise an error."""
    if isinstance(value, bool) or not 1 <= value < 2**63 or value != int(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def label(name: str, value: int) -> int:
    """Return ``value`` if it is an integer that a label can have, of 64 bits; otherwise raise an error."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be a whole number from -2^63 to 2^63 - 1, got {value!r}")
    return value


def ordered_pair(name: str, value: Sequence[float]) -> tuple[float, float]:
    """Return ``value`` as a pair ``(low, high)`` with low < high; otherwise raise an error."""
    pair = tuple(float(bound) for bound in value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or not pair[0] < pair[1]:
        raise ValueError(f"{name} must be a pair (low, high) with low < high, got {value!r}")
    return pair


def nearest(word: object, known: Iterable[str]) -> str:
    """A suggestion to append to an error about an unknown word; empty if no known word is similar.

    >>> nearest("temprature", ["spline", "temperature"])
    ", did you mean 'temperature'?"
    """
    near = get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""
