"""The result of a sweep: validation figures of every setting, the choice, and its test figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from calibrant.arguments import nearest
from calibrant.evaluation.comparison import Comparison, MeanFigure
from calibrant.metrics.catalogue import METRICS, Options

_FORMAT = 1
_AFTER = "-after-temperature"

Value = int | float | str
"""A value of an option: a number, or any other value as it is written."""


@dataclass(frozen=True)
class Criterion:
    """A figure on the validation data, by which a setting is chosen.

    Attributes:
        metric: the key of the metric in `calibrant.metrics.METRICS`.
        after: whether it is measured after temperature scaling.
    """

    metric: str
    after: bool = False

    @classmethod
    def parse(cls, text: str) -> Criterion:
        """Read a metric such as ``nll`` or ``adaptive-ece``, possibly with ``-after-temperature``.

        Raises:
            ValueError: there is no such metric, or an evaluation does not compute it by default.

        >>> Criterion.parse("nll-after-temperature")
        Criterion(metric='nll', after=True)
        """
        name = text.strip().removesuffix(_AFTER).replace("-", "_")
        known = [key for key, metric in METRICS.items() if metric.wanted(Options())]
        if name not in known:
            raise ValueError(
                f"unknown criterion {text!r}{nearest(name, known)}; expected one of {', '.join(known)}, each "
                f"possibly with {_AFTER}"
            )
        return cls(name, text.strip().endswith(_AFTER))

    def __str__(self) -> str:
        return self.metric.replace("_", "-") + (_AFTER if self.after else "")

    @property
    def label(self) -> str:
        """The criterion in print."""
        return METRICS[self.metric].label + (" after temperature scaling" if self.after else "")

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better."""
        return METRICS[self.metric].higher_is_better

    def figures(self, comparison: Comparison) -> dict[str, MeanFigure]:
        """The figure of every method, by its name."""
        return comparison.figures(self.metric, after=self.after)

    def choose(self, validation: Comparison) -> str:
        """The name of the method with the best mean over seeds; of equal ones, the first.

        Raises:
            ValueError: the figure is missing or not a number for every method.
        """
        means = {name: figure.mean for name, figure in self.figures(validation).items()}
        means = {name: mean for name, mean in means.items() if not math.isnan(mean)}
        if not means:
            raise ValueError(
                f"{self} is not known for these validation data, which are too large to be kept in memory; "
                "choose nll, ece or accuracy"
            )
        return (max if self.higher_is_better else min)(means, key=lambda name: means[name])

    def reason(self, validation: Comparison, chosen: str) -> str:
        """Why this method was chosen, in a sentence."""
        means = [figure.mean for figure in self.figures(validation).values()]
        mean = self.figures(validation)[chosen].mean
        equal, seeds = means.count(mean), len(validation.seeds)
        which = f"the first of {equal} settings with" if equal > 1 else "with"
        best = "highest" if self.higher_is_better else "lowest"
        over = f", mean over {seeds} seeds" if seeds > 1 else ""
        value = f"{self.label} ({METRICS[self.metric].text(mean)}{over})"
        return f"Chosen on the validation data: {chosen}, {which} the {best} {value}."


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
        edges = self._at_edges() if len(set(means)) > 1 else []
        return [self.criterion.reason(self.validation, self.chosen), *edges, *self._about_data()]

    def _at_edges(self) -> list[str]:
        found = []
        for option, value in self.settings[self.chosen].items():
            numbers = [each for each in self.options[option] if not isinstance(each, str)]
            if len(numbers) < max(2, len(self.options[option])) or isinstance(value, str):
                continue
            directions = {min(numbers): "smaller", max(numbers): "larger"}
            if value in directions:
                found.append(
                    f"The best value of {option}, {value}, is at the edge of the range; "
                    f"try {directions[value]} values."
                )
        return found

    def _about_data(self) -> list[str]:
        if not any(option.partition(".")[0] == "data" for option in self.options):
            return []
        return ["The settings differ in their data: the figures may be of different validation data."]

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
