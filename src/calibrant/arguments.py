"""Checks of arguments, with errors that say what was expected; the parameters of a function."""

from __future__ import annotations

import inspect
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from functools import lru_cache
from math import isfinite
from typing import Any, Self, TypeVar

T = TypeVar("T")

LARGEST_INT = 2**63 - 1
"""The largest integer of 64 bits: the largest seed, label or count."""


class Registry(UserDict[str, T]):
    """Losses, metrics or calibrators by key. Users add their own; anything else is refused at once.

    Args:
        parts: the parts by key. Nothing can replace them, because stored results go by these keys. Keys have
            letters, digits, - and _ only, as in command lines.
        check: called before a part is added, with its key, the part and the parts known so far; raises an
            error if the part does not belong here.

    >>> def positive(key, number, others):
    ...     if number <= 0:
    ...         raise ValueError(f"{key!r}: expected a positive number, got {number}")
    >>> numbers = Registry({"one": 1}, positive)
    >>> numbers["two"] = -2
    Traceback (most recent call last):
    ValueError: 'two': expected a positive number, got -2
    """

    def __init__(self, parts: Mapping[str, T], check: Callable[[str, T, Mapping[str, T]], None]) -> None:
        self._check = check
        self._built_in: dict[str, T] = {}
        super().__init__(parts)
        self._built_in = dict(parts)

    def __or__(self, other: Any) -> Any:  # a dictionary: with other parts it need not be a registry
        return self.data | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.data

    def __ior__(self, other: Any) -> Any:
        self.update(other)  # checks each part
        return self

    def copy(self) -> Self:
        """A copy. Parts are not checked again: by now one may come after those that depend on it."""
        return copy(self)

    def __setitem__(self, key: str, part: T) -> None:
        if not isinstance(key, str) or re.fullmatch(r"[A-Za-z0-9_-]+", key) is None:
            raise ValueError(f"expected a key of letters, digits, - and _, got {key!r}")
        if self._built_in.get(key, part) is not part:
            raise ValueError(f"{key!r} is taken by a part of calibrant: choose another key")
        # Those of calibrant also where they are missing, as while a copy is filled.
        self._check(key, part, self._built_in | self.data)
        super().__setitem__(key, part)


def instance_of(name: str, value: object, *kinds: type) -> None:
    """Raise an error if ``value`` is of none of these types.

    >>> instance_of("data", [1, 2], str, dict)
    Traceback (most recent call last):
    TypeError: data must be of type str or dict, got list
    """
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be of type {expected}, got {type(value).__name__}")


def one_of(name: str, value: T, allowed: Sequence[T]) -> T:
    """Return ``value`` if it is allowed; otherwise raise an error that lists the allowed values."""
    if isinstance(value, bool) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def true_or_false(name: str, value: bool) -> bool:
    """Return ``value`` if it is a boolean; otherwise raise an error."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def in_range(
    name: str,
    value: float,
    low: float = 0.0,
    high: float = float("inf"),
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """Return ``value`` as a float if it is finite and in the range; otherwise raise an error."""
    number = _as_float(name, value)
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below and isfinite(number)):
        left = "(" if open_low or low == -float("inf") else "["
        right = ")" if open_high or high == float("inf") else "]"
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, got {value!r}")
    return number


def _as_float(name: str, value: float) -> float:
    try:
        if isinstance(value, str | bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def whole_number(name: str, value: int, low: int = 1, high: int = 2**31 - 1) -> int:
    """Return ``value`` as an int if it is a whole number in the range; otherwise raise an error."""
    try:
        if isinstance(value, str | bool):
            raise TypeError
        number = int(value)
        if number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        number = low - 1
    if not low <= number <= high:
        limit = f"of at most {high}" if number > high else f"of at least {low}"
        raise ValueError(f"{name} must be a whole number {limit}, got {value!r}")
    return number


def label(name: str, value: int) -> int:
    """Return ``value`` as an int if it can be a label, of any sign; otherwise raise an error.

    >>> label("ignore_index", 255)
    255
    """
    try:
        return whole_number(name, value, -LARGEST_INT - 1, LARGEST_INT)
    except ValueError:
        raise ValueError(f"{name} must be a whole number from -2^63 to 2^63 - 1, got {value!r}") from None


def ordered_pair(name: str, value: Sequence[float]) -> tuple[float, float]:
    """Return ``value`` as a pair ``(low, high)`` with low < high; otherwise raise an error."""
    pair: tuple[float, ...] = ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        pair = tuple(_as_float(name, bound) for bound in value)
    if len(pair) != 2 or not pair[0] < pair[1]:
        raise ValueError(f"{name} must be a pair (low, high) with low < high, got {value!r}")
    return pair


@lru_cache(maxsize=1024)
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name, read once: a recipe asks for those of dozens of functions.

    >>> list(parameters_of(ordered_pair))
    ['name', 'value']
    """
    return inspect.signature(function).parameters


def nearest(word: object, known: Iterable[str]) -> str:
    """A suggestion to append to an error about an unknown word; empty if no known word is similar.

    >>> nearest("temprature", ["spline", "temperature"])
    " (did you mean 'temperature'?)"
    >>> nearest("acc", ["aurc", "accuracy"])
    " (did you mean 'accuracy'?)"
    """
    names, text = {name.lower(): name for name in known}, str(word).lower()
    longer = [name for name in names if text and name.startswith(text)]
    near = get_close_matches(text, longer or names, n=1, cutoff=0.0 if longer else 0.5)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""


def check_known(what: str, given: Iterable[str], known: Iterable[str], kind: str = "option") -> None:
    """Raise an error for an option that does not exist, with the most similar one that does.

    >>> check_known("model 'mlp'", ["hiden"], ["hidden"])
    Traceback (most recent call last):
    TypeError: model 'mlp' has no option 'hiden' (did you mean 'hidden'?); it takes: hidden
    """
    known = list(known)
    for name in given:
        if name not in known:
            takes = ", ".join(known) or "none"
            raise TypeError(f"{what} has no {kind} {name!r}{nearest(name, known)}; it takes: {takes}")


def unknown(what: str, word: object, known: Iterable[str]) -> str:
    """The error message for a name that does not exist.

    >>> unknown("loss", "Focall", ["ce", "focal"])
    "unknown loss 'Focall' (did you mean 'focal'?); known: ce, focal"
    """
    known = list(known)
    return f"unknown {what} {word!r}{nearest(word, known)}; known: {', '.join(known)}"
