"""Arguments checked, with errors that say what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


def one_of(name: str, value: T, allowed: Sequence[T]) -> T:
    """``value`` if it is allowed; else an error that lists what is."""
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
    """``value`` as a float if it is finite and in the range; else an error that gives the range."""
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
    """``value`` if it is an integer of at least 1; else an error that says so."""
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def ordered_pair(name: str, value: Sequence[float]) -> tuple[float, float]:
    """``value`` as ``(low, high)`` if it is one; else an error that says so."""
    pair = tuple(float(bound) for bound in value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or not pair[0] < pair[1]:
        raise ValueError(f"{name} must be a pair (low, high) with low < high, got {value!r}")
    return pair


def nearest(word: object, known: Iterable[str]) -> str:
    """What to add to an error about an unknown word: the known one that is spelt most like it, if any is.

    >>> nearest("temprature", ["spline", "temperature"])
    ", did you mean 'temperature'?"
    """
    near = get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def from_text(name: str, text: str, kind: Any) -> Any:
    """An argument as its annotation wants it, from what was typed on a command line.

    Args:
        name: of the argument, for errors.
        text: what was typed; several numbers have commas between.
        kind: ``int``, ``float``, ``bool``, ``str``, a ``Literal`` of texts, a ``Sequence`` of these, or any
            of them or None.

    Raises:
        ValueError: a text that does not stand for such a value.

    >>> from_text("bins", "20", int), from_text("bins", "5,10", Sequence[int] | None)
    (20, [5, 10])
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if text.lower() == "none" and NoneType in inner:
            return None
        (kind,) = (each for each in inner if each is not NoneType)
        return from_text(name, text, kind)
    if origin is Literal:
        if text not in inner:
            listed = ", ".join(map(repr, inner))
            raise ValueError(f"{name} must be one of {listed}, got {text!r}{nearest(text, inner)}")
        return text
    if origin is not None and issubclass(origin, Sequence):
        return [from_text(name, part.strip(), inner[0]) for part in text.split(",")]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        what = {int: "a whole number", float: "a number"}.get(kind, f"a {kind.__name__}")
        raise ValueError(f"{name} must be {what}, got {text!r}") from None
