"""`Evaluation`, the figures of one model on one data set, with its parts, JSON and printed table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from calibrant.arguments import nearest
from calibrant.evaluation.notes import data_notes, intervals_note, pixels_note
from calibrant.metrics.catalogue import METRICS
from calibrant.metrics.selective import RiskCoverage
from calibrant.metrics.uncertainty import (
    Interval,
    error_interval,
    interval,
    least_resamples,
    percentile_interval,
)
from calibrant.printable import counted, text_table

if TYPE_CHECKING:
    from rich.text import Text

_SHOWN_LABELS = 20  # in print

# The version of the JSON. A file of an older version lacks the metrics that were added later.
_FORMAT = max(metric.since for metric in METRICS.values())


@dataclass(frozen=True)
class Figure:
    """The value of one metric, with its uncertainty.

    Attributes:
        value: the value; None if it was not computed.
        interval: its confidence interval, at the level of the evaluation; None if it was not computed, or
            cannot be, as from a single element.
        replicates: its values on resampled data, for comparisons; empty if it was not resampled.
    """

    value: float | None
    interval: Interval | None = None
    replicates: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Reliability:
    """The numbers of a reliability diagram: M bins ``(edges[b], edges[b+1]]`` of confidence.

    Attributes:
        edges: the M + 1 edges of the bins.
        count: number of elements per bin.
        confidence: mean confidence per bin. This and the following are None for an empty bin.
        accuracy: fraction of correct elements per bin.
        accuracy_interval: Clopper-Pearson interval of the accuracy.
        consistency: the range in which the accuracy of a calibrated model would lie.
    """

    edges: tuple[float, ...]
    count: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    accuracy_interval: tuple[Interval | None, ...]
    consistency: tuple[Interval | None, ...]


class ClassBin(NamedTuple):
    """One bin of the reliability diagram of the elements that are predicted as one class."""

    bin: int  # its position in `Reliability.edges`
    elements: int  # their number
    confidence: float  # the mean
    correct: int  # the number of elements of the class


@dataclass(frozen=True)
class ClassFigures:
    """The figures of one class.

    Attributes:
        name: the name of the class, or its number.
        count: number of elements of this class.
        accuracy: the fraction of them that are predicted correctly; None without elements.
        iou: intersection over union; None if the class neither occurs nor is predicted.
        gap: mean probability of the class minus its frequency. Above 0: the model predicts it too often.
        ece: calibration error of the probability of the class.
        bins: the bins of confidence that hold elements which are predicted as this class.
    """

    name: str
    count: int
    accuracy: float | None
    iou: float | None
    gap: float
    ece: float
    bins: tuple[ClassBin, ...] = ()


@dataclass(frozen=True)
class GroupFigures:
    """The figures of several classes together: the head, mid or tail of long-tailed data.

    Attributes:
        classes: number of classes in the group.
        count: number of elements of these classes.
        accuracy: fraction of correct elements. This and the following are None without elements.
        confidence: mean confidence.
        ece: calibration error of the confidence.
    """

    classes: int
    count: int
    accuracy: float | None
    confidence: float | None
    ece: float | None


@dataclass(frozen=True)
class Difference:
    """The difference between two evaluations in one metric.

    Attributes:
        value: the first value minus the second.
        interval: the interval of the difference, at the level of the evaluations. That of a calibration
            error covers the bias that the difference may have.
        significant: whether the interval excludes 0.
        better: the better evaluation, "first" or "second"; None if the difference is not significant.
    """

    value: float
    interval: Interval
    significant: bool
    better: str | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The figures of one model on one data set, as plain numbers; made by `evaluate` or an `Evaluator`.

    Every metric in `calibrant.metrics.METRICS` is an attribute: ``evaluation.ece`` is
    ``evaluation.figures["ece"].value``. Fractions are between 0 and 1, not percent. The value is None for a
    metric that was not computed: in a stream, metrics that need every prediction at once;
    `mean_iou_foreground` without a background class; `kde_ece` without ``kde=True``.

    Attributes:
        name: the name of the model.
        samples: number of elements that are not ignored.
        num_classes: number of classes, K; 2 for single logits. With several labels, their number.
        bins: number of bins of the binned errors.
        exact: whether the figures were computed from all predictions, and not from the sums of a stream.
        per_image: whether the figures are means over images. The p-value, the reliability diagram, classes
            and groups always describe all elements together.
        dense: whether an input has many elements, as an image has pixels. Intervals and the p-value take
            elements as independent. Those of one image are not, so intervals are then too narrow, unless
            they are those of means over images, and the p-value is too small.
        figures: the figure of every metric, by name.
        p_value: the probability that a calibrated model gets an ECE at least as large; see
            `calibration_test`. With 15 bins if ``bins`` is not a divisor of 300. None without resamples.
        reliability: the numbers of the reliability diagram.
        classes: the figures of each class.
        groups: the figures of the groups "head", "mid" and "tail", if class counts were given.
        risk_coverage: the risk-coverage curve of all elements together, in streams and per image as close as
            `risk_at_coverage`; None if an older version stored the evaluation.
        level: the level of the intervals.
        seed: the seed of the resamples.
        fingerprint: a hash of the labels, if resamples were drawn element by element. Comparisons between
            evaluations with equal fingerprints are paired.
        binary: whether each logit was a yes-or-no decision of its own. Calibration errors, the p-value and
            the reliability diagram are then those of the probability of yes: "confidence" is this
            probability, and "accuracy" in the diagram the frequency of yes. The Brier score is
            ``mean (p - y)²``. Accuracy as a metric stays what it is.
        labels: with several labels, the evaluation of each, without intervals and p-value. The figures above
            are those of all decisions together (micro), except those that average over classes: they average
            over labels. ``classes`` has one entry for each label. Intervals take decisions as independent.
        ruled_out: the number of elements whose true class had a probability of 0, in a file or before
            `calibrant.layout.as_logits`. Each costs 87.3 in NLL.
    """

    name: str
    samples: int
    num_classes: int
    bins: int
    exact: bool
    per_image: bool = False
    dense: bool = False
    figures: Mapping[str, Figure]
    p_value: float | None
    reliability: Reliability
    classes: tuple[ClassFigures, ...]
    groups: Mapping[str, GroupFigures] = field(default_factory=dict)
    risk_coverage: RiskCoverage | None = None
    level: float = 0.95
    seed: int = 0
    fingerprint: str | None = None
    binary: bool = False
    labels: tuple[Evaluation, ...] = ()
    ruled_out: int = 0

    def __getattr__(self, name: str) -> Any:
        """The value of the metric with this name."""
        try:
            return vars(self)["figures"][name].value
        except KeyError:
            hint = "" if name.startswith("_") else nearest(name, vars(self).get("figures", ()))
            found = f"{type(self).__name__!r} has no attribute or metric {name!r}"
            raise AttributeError(found + hint) from None

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self.figures]

    @property
    def metrics(self) -> dict[str, float | None]:
        """The value of every metric by name, in the order of `calibrant.metrics.METRICS`."""
        return {name: figure.value for name, figure in self.figures.items()}

    @property
    def macro(self) -> dict[str, float | None]:
        """The mean of every metric over the labels; None if a label lacks it. Empty without labels."""
        if not self.labels:
            return {}
        columns = {name: [label.figures[name].value for label in self.labels] for name in self.figures}
        return {
            name: None if None in values else fmean(value for value in values if value is not None)
            for name, values in columns.items()
        }

    @property
    def intervals(self) -> dict[str, Interval]:
        """The confidence intervals by metric; see `calibrant.metrics.uncertainty.interval`."""
        return {name: each.interval for name, each in self.figures.items() if each.interval is not None}

    @property
    def replicates(self) -> dict[str, tuple[float, ...]]:
        """The values on resampled data by metric, for `compare`."""
        return {name: each.replicates for name, each in self.figures.items() if each.replicates}

    def compare(self, other: Evaluation) -> dict[str, Difference]:
        """Compare two evaluations: the difference of each metric, with bootstrap interval and significance.

        The comparison is paired if both models were evaluated on the same labels in the same order, with the
        same seed: each resample then drew the same elements for both. A paired comparison detects far smaller
        differences. Otherwise the two data sets are treated as independent.

        Returns:
            One entry for each metric that both evaluations have resampled. Without calibration errors if the
            numbers of bins differ.

        Raises:
            ValueError: the two cannot be compared, see `why_untested`.

        >>> from calibrant import evaluate
        >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> target = logits.argmax(1)
        >>> difference = evaluate(logits, target).compare(evaluate(5 * logits, target))["nll"]
        >>> difference.significant, difference.better
        (True, 'second')
        """
        if problem := self.why_untested(other):
            raise ValueError(f"nothing to compare: {problem}")
        names = [name for name in self.replicates if name in other.replicates]
        if self.bins != other.bins:
            names = [name for name in names if METRICS[name].group != "calibration"]
        paired = self.is_paired_with(other)
        return {name: self._difference(other, name, paired) for name in names}

    def why_untested(self, other: Evaluation) -> str:
        """Why the two cannot be compared; "" if they can.

        An evaluation has means over images, a single element, or too few resamples for its level; or the two
        differ in `binary` or `level`.
        """
        if self.per_image or other.per_image:
            return "means over images have no resamples"
        if 1 in (self.samples, other.samples):
            return "all resamples of a single element are the same"
        for what in ("binary", "level"):
            own, others = getattr(self, what), getattr(other, what)
            if own != others:
                return f"one evaluation has {what}={own}, the other {what}={others}"
        ours, theirs = self.replicates, other.replicates
        drawn = min((min(len(ours[name]), len(theirs[name])) for name in ours if name in theirs), default=0)
        if not drawn:
            return "there are no resamples"
        if drawn >= (least := least_resamples(self.level)):
            return ""
        few = f"{counted(drawn, 'resample')} {'is' if drawn == 1 else 'are'} too few"
        return f"{few} for a level of {100 * self.level:g} %, which needs at least {least}"

    def _difference(self, other: Evaluation, name: str, paired: bool) -> Difference:
        first, second = self.figures[name], other.figures[name]
        assert first.value is not None
        assert second.value is not None
        size = min(len(first.replicates), len(second.replicates))
        ours, theirs = (
            torch.tensor(each.replicates[:size], dtype=torch.float64, device="cpu")
            for each in (first, second)
        )
        if not paired:  # both may have been drawn with the same random numbers: break the pairing
            theirs = theirs.flip(0)
        value = first.value - second.value
        metric, drawn = METRICS[name], ours - theirs
        if metric.curve_interval is not None:  # often at a bound, where reflected intervals are too narrow
            low, high = percentile_interval(drawn, self.level)
        elif metric.group == "calibration" and not metric.debiased:
            low, high = error_interval(value, drawn, self.level)
            if metric.maximum:
                quantiles = percentile_interval(drawn, self.level)
                low, high = min(low, quantiles[0]), max(high, quantiles[1])
        else:
            low, high = interval(value, drawn, self.level, debiased=metric.debiased)
        # A difference by rounding is not significant, however regular it is.
        rounding = 1e-6 * max(abs(first.value), abs(second.value))
        significant = not low <= 0 <= high and abs(value) > rounding
        better = "first" if (value > 0) == metric.higher_is_better else "second"
        return Difference(value, (low, high), significant, better if significant else None)

    def is_paired_with(self, other: Evaluation) -> bool:
        """Whether both have the same labels in the same order and the same resamples."""
        same = (self.fingerprint, self.seed, self.samples) == (other.fingerprint, other.seed, other.samples)
        return same and self.fingerprint is not None

    def to_dict(self) -> dict[str, Any]:
        """The evaluation as dictionaries, lists and numbers."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    def to_json(self) -> str:
        """The evaluation as JSON; `from_json` returns an equal evaluation."""
        plain = {"format": _FORMAT, **vars(self), **self.metrics}
        plain |= {"intervals": self.intervals, "replicates": self.replicates}
        del plain["figures"]
        plain["labels"] = [label.to_dict() for label in self.labels]
        return json.dumps(plain, default=asdict, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON of `to_json`.

        Raises:
            ValueError: the text is not an evaluation. The message states what is wrong.
        """
        try:
            plain = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not an evaluation: not JSON ({error})") from None
        if not isinstance(plain, dict) or "format" not in plain:
            raise ValueError("not an evaluation: expected a JSON object with the key 'format'")
        return cls.from_dict(plain)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Read the dictionary of `to_dict`; errors as in `from_json`."""
        plain = dict(plain)
        version = plain.pop("format", None)
        if isinstance(version, bool) or version not in range(1, _FORMAT + 1):
            raise ValueError(
                f"an evaluation of format {version!r}; this version reads format {_FORMAT} and older"
            )
        known = {*(entry.name for entry in fields(cls)), *METRICS, "intervals", "replicates"} - {"figures"}
        if unknown := sorted(set(plain) - known):
            raise ValueError(f"not an evaluation: unknown keys {unknown}")
        try:
            ends, drawn = plain.pop("intervals"), plain.pop("replicates")
            plain["figures"] = {
                name: _figure(name, plain.pop(name), ends.get(name), drawn.get(name, []))
                if metric.since <= version
                else Figure(None)
                for name, metric in METRICS.items()
            }
            plain["reliability"] = Reliability(**{k: _tuples(v) for k, v in plain["reliability"].items()})
            plain["classes"] = tuple(
                ClassFigures(**{**each, "bins": tuple(ClassBin(*entry) for entry in each.get("bins", ()))})
                for each in plain["classes"]
            )
            plain["groups"] = {name: GroupFigures(**figures) for name, figures in plain["groups"].items()}
            plain["labels"] = tuple(cls.from_dict(label) for label in plain.get("labels", ()))
            if plain.get("risk_coverage") is not None:
                curve = {key: _tuples(values) for key, values in plain["risk_coverage"].items()}
                plain["risk_coverage"] = RiskCoverage(**curve)
            return cls(**plain)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an evaluation: {type(error).__name__} {error}") from None

    def __str__(self) -> str:
        kind = ("exact" if self.exact else "streamed") + (", means over images" if self.per_image else "")
        words = ("label", "labels") if self.labels else ("class", "classes")
        parts = f"{counted(self.samples, 'element')}, {counted(self.num_classes, *words)}"
        title = f"{self.name}: {parts}, {counted(self.bins, 'bin')}, {kind}"
        if self.binary:
            yes = self.classes[1].name if len(self.classes) == 2 and not self.labels else "yes"
            title += f"; calibration of the probability of {yes}"
        interval = f"{100 * self.level:g} % interval" if self.intervals else ""
        lines = [("metric", "value", interval), *self._rows()]
        columns = 3 if any(last for _, _, last in lines) else 2
        table = text_table(title, lines[0][:columns], [line[:columns] for line in lines[1:]])
        if self.labels:
            shown = ("accuracy", "nll", "brier", "ece", "mce")
            worst = sorted(self.labels, key=lambda label: -(label.metrics["ece"] or 0))[:_SHOWN_LABELS]
            rows = [(label.name, *_texts(label.metrics, shown)) for label in worst]
            rows.append(("mean over all labels", *_texts(self.macro, shown)))
            names = ("label, by falling ECE", *(METRICS[key].label for key in shown))
            table += "\n\n" + text_table(f"{len(worst)} of {len(self.labels)} labels", names, rows)
        notes = [intervals_note([self])] if self.intervals else []
        notes += [pixels_note([self])] if self.dense else []
        return "\n".join([table, *filter(None, notes), *data_notes([self])])

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self))

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        present = [
            (METRICS[name], each.value, each.interval)
            for name, each in self.figures.items()
            if each.value is not None
        ]
        for number, (_, members) in enumerate(groupby(present, lambda each: each[0].group)):
            if number:
                yield "", "", ""  # an empty line between groups
            for metric, value, ends in members:
                yield metric.label, metric.text(value), " – ".join(map(metric.text, ends or ()))
        if present and (self.groups or self.p_value is not None):
            yield "", "", ""
        for name, group in self.groups.items():
            if group.ece is not None and group.accuracy is not None:
                accuracy, ece = METRICS["accuracy"].text(group.accuracy), METRICS["ece"].text(group.ece)
                yield f"Accuracy, {name}", accuracy, counted(group.classes, "class", "classes")
                yield f"ECE, {name}", ece, counted(group.count, "element")
        if self.p_value is not None:
            yield "p-value of calibration", f"{self.p_value:.3f}", ""


def of_same_data(evaluations: Sequence[Evaluation]) -> bool:
    """Whether the evaluations may be of the same data, as far as their sizes and labels tell."""
    fingerprints = {each.fingerprint for each in evaluations if each.fingerprint is not None}
    return len(fingerprints) < 2 and len({(each.samples, each.num_classes) for each in evaluations}) == 1


def _texts(metrics: Mapping[str, float | None], names: Iterable[str]) -> list[str]:
    values = [(METRICS[name], metrics[name]) for name in names]
    return ["" if value is None else metric.text(value) for metric, value in values]


def _figure(name: str, value: Any, ends: Any, drawn: Any) -> Figure:
    """A figure as it was read; an error that names the metric unless all its entries are finite numbers."""
    numbers = [*([] if value is None else [value]), *([] if ends is None else ends), *drawn]
    wrong = [
        each
        for each in numbers
        if isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each)
    ]
    if wrong or (ends is not None and len(ends) != 2):
        got = repr(wrong[0]) if wrong else f"{len(ends)} ends of its interval"
        raise ValueError(
            f"not an evaluation: {name!r}: expected finite numbers, and an interval of two, got {got}"
        )
    return Figure(value, _tuples(ends), _tuples(drawn))


def _tuples(values: Any) -> Any:
    return tuple(_tuples(value) for value in values) if isinstance(values, list) else values
