"""The result of a sweep: validation figures of every setting, the choice, and its test figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from calibrant.evaluation.comparison import Comparison
from calibrant.evaluation.criterion import Criterion, at_edge

_FORMAT = 1

Value = int | float | str
"""A value of an option: a number, or any other value as it is written."""


@dataclass(frozen=True)
class Sweep:
    """A loss trained with every combination of some options.

    Attributes:
        title: what was trained on which data.
        options: the values of each option, by its name.
        criterion: what the choice was made by.
        validation: the figures of every setting on the validation data. The settings are in the order of
            `itertools.product` of the values.
        chosen: the name of the chosen setting in ``validation``.
        test: the chosen setting alone, on the test data. No other setting was evaluated on them.
    """

    title: str
    options: Mapping[str, tuple[Value, ...]]
    criterion: Criterion
    validation: Comparison
    chosen: str
    test: Comparison

    @property
    def settings(self) -> dict[str, dict[str, Value]]:
        """The values of the options of each setting, by its name."""
        names = (method.name for method in self.validation.methods)
        combinations = product(*self.options.values())
        return {
            name: dict(zip(self.options, values, strict=True))
            for name, values in zip(names, combinations, strict=True)
        }

    def remarks(self) -> list[str]:
        """How the choice was made, and what to be careful about."""
        means = [figure.mean for figure in self.criterion.figures(self.validation).values()]
        found = [self.criterion.reason(self.validation, self.chosen)]
        if len(set(means)) > 1:
            found += self._at_edges()
        if any(option.partition(".")[0] == "data" for option in self.options):
            found.append(
                "The settings differ in their data: the figures may be of different validation data."
            )
        return found

    def _at_edges(self) -> list[str]:
        found = []
        for option, value in self.settings[self.chosen].items():
            numbers = [each for each in self.options[option] if not isinstance(each, str)]
            if len(numbers) < max(2, len(self.options[option])) or isinstance(value, str):
                continue
            if value in (min(numbers), max(numbers)):
                found.append(at_edge(option, str(value), smaller=value == min(numbers)))
        return found

    def to_json(self) -> str:
        """The options, the choice, and the figures of every run."""
        plain = {
            "format": _FORMAT,
            "title": self.title,
            "options": self.options,
            "settings": self.settings,
            "criterion": str(self.criterion),
            "chosen": self.chosen,
            "remarks": self.remarks(),
            "validation": json.loads(self.validation.to_json()),
            "test": json.loads(self.test.to_json()),
        }
        return json.dumps(plain, indent=1, allow_nan=False)
