"""Labels that are words instead of class numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from calibrant.predictions.file import BadFileError
from calibrant.printable import first_few, row_of


class Names:
    """Class numbers by the names of the classes. Case does not matter, unless names differ only by it.

    A label may also be a number, unless a name is one. ``where`` says where the names are, for messages.
    """

    def __init__(self, names: Sequence[str], where: str = "") -> None:
        lower = [name.lower() for name in names]
        self._any_case = len(set(lower)) == len(lower)
        self.numbers = {name: number for number, name in enumerate(lower if self._any_case else names)}
        self._or_numbers = not any(map(is_finite_number, names))
        named = [f"one of the class names {first_few(names)}{where}"] if names else []
        self.expected = ", or ".join(["a class number"] * self._or_numbers + named)  # for messages

    def number(self, label: str) -> int | None:
        """The number of the class with this name, or None."""
        return self.numbers.get(label.lower() if self._any_case else label)

    def takes(self, number: object) -> bool:
        """Whether a label may be this number instead of a name."""
        return self._or_numbers

    def meaning(self, label: str) -> float | None:
        """The class number that a label stands for, or None."""
        found = self.number(label)
        if found is None and is_finite_number(label) and self.takes(float(label)):
            return float(label)
        return found

    def numbers_of(self, path: Path, labels: np.ndarray[Any, Any], start: int) -> np.ndarray[Any, Any]:
        """The class numbers of labels in a file. ``start`` is the first row."""
        found = [self.meaning(str(label)) for label in labels.flat]
        if None in found:
            place = found.index(None)
            row = row_of(path, start + place * len(labels) // len(found))
            label = str(labels.flat[place])
            raise BadFileError(path, f"has label {label!r} at {row}; expected {self.expected}")
        return np.array(found, np.float64).reshape(labels.shape)


class Answers(Names):
    """Labels of single scores: false and true, or the word ``yes`` and one other word, in any case.

    Beside such words, 0 and 1 are refused.
    ``words`` are the labels so far, if they are words other than false and true.
    """

    def __init__(self, yes: str = "") -> None:
        super().__init__(("false", "true"))
        self.expected = (
            "0 or 1, or false or true; or two words, if the column of scores ends in the word for yes"
        )
        self.words: set[str] = set()
        self._yes = None if yes.lower() in ("", "false", "true") or is_finite_number(yes) else yes.lower()

    def number(self, label: str) -> int | None:
        """1 for yes, 0 for no, or None. The first label that is a word decides which words are expected."""
        word = label.lower()
        if not word or is_finite_number(word):
            return None
        if self._yes and not self.words:
            if word in self.numbers:
                self._yes = None
            else:
                self.numbers = {self._yes: 1}
        if len(self.words) == 2 and word not in self.numbers:
            first, second = sorted(self.words)
            self.expected = f"two different words, and {word} is a third beside {first} and {second}"
        if len(self.numbers) < 2 and word not in self.numbers:
            self.numbers[word] = 0
            self.expected = f"{word}, or {self._yes}, the word in the name of the scores"
        if self._yes and word in self.numbers:
            self.words.add(word)
        elif self.words and self._yes not in self.words:  # neither label is the word for yes
            self.expected += f"; if {self._yes} is misspelt, name the scores after one of the labels"
        return self.numbers.get(word)

    def takes(self, number: object) -> bool:
        return not self.words or number not in (0, 1)

    def settle(self, labels: Iterable[float | None]) -> tuple[str, ...]:
        """Read labels, as `meaning` returns them, until their kind is certain; return the words."""
        for label in labels:
            if label in (0, 1) and not self.words:
                self._yes, self.expected = None, "0 or 1, or false or true, as in the rows before"
            if self._yes is None or len(self.words) == 2:
                break
        return tuple(self.words)


def numbers_in(cells: Sequence[str]) -> list[float] | None:
    """The numbers in cells; None if one of them is something else."""
    text = "".join(cells)
    if not text.isascii() or "_" in text:  # Python's numbers have underscores and digits of any script
        return None
    try:
        return list(map(float, cells))
    except ValueError:
        return None


def is_number(text: str) -> bool:
    """Whether a cell holds a number."""
    return numbers_in([text]) is not None


def is_finite_number(text: str) -> bool:
    """Whether the name of a class is a number; nan and inf are words."""
    return is_number(text) and isfinite(float(text))
