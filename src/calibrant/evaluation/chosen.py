"""The results of a sweep and of a tuning: validation figures of each setting, test figures of the chosen."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from calibrant.evaluation.comparison import Comparison
from calibrant.evaluation.criterion import Criterion, at_edge

_FORMAT = 1
_EDGE = 0.02
"""The part of a range at each end that counts as its edge."""

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
        about = {"options": self.options, "settings": self.settings}
        return _json(self, {**about, "criterion": str(self.criterion), "chosen": self.chosen})


Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Trial:
    """One setting of the hyper-parameters.

    Attributes:
        number: the number of the trial, from 0, in the order in which trials began.
        values: the values of the tuned hyper-parameters, by name.
        loss: the loss with these values.
        outcome: whether training finished, was stopped early, or failed.
        value: the criterion on the validation data; None unless training finished.
        epochs: the criterion after each epoch; empty if training does not log it.
        reason: why training failed; empty if it did not.
    """

    number: int
    values: Mapping[str, float]
    loss: str
    outcome: Outcome
    value: float | None = None
    epochs: tuple[float, ...] = ()
    reason: str = ""

    @property
    def name(self) -> str:
        """The number and the values, such as ``trial 3: margin=4.2, weight=0.1``."""
        values = ", ".join(f"{name}={value:g}" for name, value in self.values.items())
        return f"trial {self.number}: {values}"


@dataclass(frozen=True)
class Tuning:
    """Hyper-parameters of a loss, chosen on the validation data.

    Attributes:
        title: what was tuned on which data.
        space: the ranges that were searched: the name, the smallest and the largest value of each
            hyper-parameter, and whether the search was uniform in the logarithm.
        criterion: what the choice was made by.
        trials: every trial, by number.
        validation: the figures of the finished trials on the validation data, by the names of the trials.
        chosen: the name of the chosen trial.
        test: the chosen loss alone, on the test data. No other trial was evaluated on them.
    """

    title: str
    space: Sequence[tuple[str, float, float, bool]]
    criterion: Criterion
    trials: tuple[Trial, ...]
    validation: Comparison
    chosen: str
    test: Comparison

    @property
    def chosen_trial(self) -> Trial:
        """The chosen trial."""
        return next(trial for trial in self.trials if trial.name == self.chosen)

    def best_so_far(self) -> dict[int, float]:
        """The best value of all finished trials up to each finished one, by the number of the trial.

        >>> trials = [Trial(n, {}, "ce", "finished", value) for n, value in enumerate([3.0, 1.0, 2.0])]
        >>> empty = Comparison("", (), ())
        >>> Tuning("", (), Criterion("nll"), tuple(trials), empty, "", empty).best_so_far()
        {0: 3.0, 1: 1.0, 2: 1.0}
        """
        better = max if self.criterion.higher_is_better else min
        found: dict[int, float] = {}
        for trial in self.trials:
            if trial.value is not None:
                found[trial.number] = better([trial.value, *list(found.values())[-1:]])
        return found

    def remarks(self) -> list[str]:
        """How the choice was made, and what to be careful about."""
        found = [self.criterion.reason(self.validation, self.chosen)]
        counts = Counter[str](trial.outcome for trial in self.trials)
        outcomes = {"finished": "finished", "stopped": "stopped early", "failed": "failed"}
        words = ", ".join(f"{counts[key]} {word}" for key, word in outcomes.items() if key in counts)
        found.append(f"Trials: {len(self.trials)} ({words}). Trial 0 is the loss without tuning.")
        for trial in self.trials:
            if trial.outcome == "failed":
                found.append(f"{trial.name} failed: {trial.reason}.")
        ranges = ", ".join(
            f"{name} from {low:g} to {high:g}{' (logarithmic)' if log else ''}"
            for name, low, high, log in self.space
        )
        chosen = f'The chosen loss: --loss "{self.chosen_trial.loss}".'
        return [*found, f"Searched: {ranges}.", *self._at_edges(), chosen]

    def _at_edges(self) -> list[str]:
        found = []
        for name, low, high, log in self.space:
            value = self.chosen_trial.values[name]
            scale = math.log if log else float
            place = (scale(value) - scale(low)) / (scale(high) - scale(low))
            if not _EDGE < place < 1 - _EDGE:
                searched = f"the range {low:g} to {high:g}"
                how = " with calibrant sweep"
                found.append(at_edge(name, f"{value:g}", smaller=place < 0.5, of=searched, how=how))
        return found

    def to_json(self) -> str:
        """The ranges, the trials, the choice, and the figures of every finished run."""
        about = {
            "space": {name: {"low": low, "high": high, "log": log} for name, low, high, log in self.space},
            "criterion": str(self.criterion),
            "trials": [asdict(trial) for trial in self.trials],
            "chosen": self.chosen,
            "loss": self.chosen_trial.loss,
        }
        return _json(self, about)


def _json(result: Sweep | Tuning, about: Mapping[str, Any]) -> str:
    plain = {
        "format": _FORMAT,
        "title": result.title,
        **about,
        "remarks": result.remarks(),
        "validation": json.loads(result.validation.to_json()),
        "test": json.loads(result.test.to_json()),
    }
    return json.dumps(plain, indent=1, allow_nan=False)
