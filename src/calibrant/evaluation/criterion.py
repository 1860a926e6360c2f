"""What a setting is chosen by: a figure on the validation data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from calibrant.arguments import nearest
from calibrant.evaluation.comparison import Comparison, MeanFigure
from calibrant.metrics.catalogue import METRICS, Options

_AFTER = "-after-temperature"


@dataclass(frozen=True)
class Criterion:
    """A figure on the validation data, by which a setting is chosen."""

    metric: str  # a key of `calibrant.metrics.METRICS`
    after: bool = False  # whether it is measured after temperature scaling

    @classmethod
    def parse(cls, text: str) -> Criterion:
        """Read a metric such as ``nll`` or ``adaptive-ece``, possibly with ``-after-temperature``.

        It must be one that an evaluation computes by default.

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
            why = METRICS[self.metric].why_missing or "too large to be kept in memory"
            raise ValueError(
                f"{self} is not known for these validation data ({why}); choose nll, ece or accuracy"
            )
        return (max if self.higher_is_better else min)(means, key=lambda name: means[name])

    def reason(self, validation: Comparison, chosen: str) -> str:
        """Why this method was chosen, in a sentence."""
        means = {name: figure.mean for name, figure in self.figures(validation).items()}
        mean, seeds = means[chosen], len(validation.seeds)
        equal = list(means.values()).count(mean)
        which = f"the first of {equal} settings with" if equal > 1 else "with"
        best = "highest" if self.higher_is_better else "lowest"
        over = f", mean over {seeds} seeds" if seeds > 1 else ""
        value = f"{self.label} ({METRICS[self.metric].text(mean)}{over})"
        return f"Chosen on the validation data: {chosen}, {which} the {best} {value}."


def at_edge(option: str, value: str, *, smaller: bool, of: str = "the range", how: str = "") -> str:
    """Say that the best value of an option is at the edge of its range.

    >>> at_edge("margin", "2", smaller=True)
    'The best value of margin, 2, is at the edge of the range; try smaller values.'
    """
    direction = "smaller" if smaller else "larger"
    return f"The best value of {option}, {value}, is at the edge of {of}; try {direction} values{how}."
