"""One model on one data set: every metric, its uncertainty, and what diagrams are drawn from."""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrant.distributed import all_reduce, collective_device
from calibrant.histogram import Bins, ConfidenceHistogram, bin_of, bin_of_cells, equal_width_edges
from calibrant.inference import Forward, OwnRows, Progress, for_each_prediction
from calibrant.layout import Elements, arrange
from calibrant.metrics.accuracy import ClassCounts, accuracy, balanced_accuracy, mean_iou
from calibrant.metrics.calibration import ERRORS
from calibrant.metrics.catalogue import METRICS
from calibrant.metrics.classwise import ClassGaps, classwise_ece
from calibrant.metrics.predictions import Predictions
from calibrant.metrics.scores import brier_split, kde_ece, nll_split, tempered_brier, tempered_nll
from calibrant.metrics.uncertainty import (
    Interval,
    binomial_interval,
    bootstrap,
    bootstrap_histogram,
    calibrated_classwise_ece,
    calibrated_gaps,
    calibration_test,
    consistency_band,
    interval,
)
from calibrant.statistics import Statistics

if TYPE_CHECKING:
    from rich.table import Table

# Beyond so many draws, elements times resamples, data are drawn from the histogram's cells instead.
_MOST_DRAWS = 2 * 10**8

# Simulations of a calibrated model, for the bias of errors that the bootstrap sees too little of.
_SIMULATIONS = 100

# Long-tailed data: classes with more training elements than the first number, at least the second, or fewer.
_HEAD, _TAIL = 100, 20
GROUPS = ("head", "mid", "tail")


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram in numbers: M bins ``(edges[b], edges[b+1]]`` of confidence.

    Attributes:
        edges: M + 1 of them.
        count: elements per bin.
        confidence: mean confidence per bin; None where it is empty, as below.
        accuracy: fraction correct per bin.
        accuracy_interval: Clopper-Pearson interval of the accuracy.
        consistency: where the accuracy of this bin would fall, were the model calibrated.
    """

    edges: tuple[float, ...]
    count: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    accuracy_interval: tuple[Interval | None, ...]
    consistency: tuple[Interval | None, ...]


@dataclass(frozen=True)
class ClassFigures:
    """One class.

    Attributes:
        name: its name, or its number.
        count: elements of this class.
        accuracy: the fraction of them that were recognised; None where there are none.
        iou: intersection over union; None where the class neither occurs nor is predicted.
        gap: mean probability given to the class minus its frequency; above 0: given too often.
        ece: calibration error of the class's probability.
    """

    name: str
    count: int
    accuracy: float | None
    iou: float | None
    gap: float
    ece: float


@dataclass(frozen=True)
class GroupFigures:
    """The elements of several classes together: the head, middle or tail of long-tailed data.

    Attributes:
        classes: how many classes are in the group.
        count: elements of these classes.
        accuracy: fraction correct.
        confidence: mean confidence.
        ece: calibration error of the confidence; None, as the others, where there are no elements.
    """

    classes: int
    count: int
    accuracy: float | None
    confidence: float | None
    ece: float | None


@dataclass(frozen=True)
class Difference:
    """How two evaluations differ in one metric.

    Attributes:
        value: first minus second.
        interval: of the difference, at the evaluations' level.
        significant: whether the interval leaves out 0.
        better: which of the two is better, "first" or "second", where significant; else None.
    """

    value: float
    interval: Interval
    significant: bool
    better: str | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Plain numbers about one model on one data set; made by `evaluate` or an `Evaluator`.

    Figures are fractions, not percent; `calibrant.metrics.METRICS` says what each is. A figure that could not
    be computed is None: from a stream, those that need every prediction at once; `mean_iou_foreground`
    without a background class; `kde_ece` unless asked for.

    Attributes:
        name: of the model.
        samples: elements that were not ignored.
        num_classes: K.
        bins: of the binned errors.
        exact: whether every prediction was at hand, or only a stream's sums.
        per_image: whether the figures are means over images. The p-value, the reliability diagram, classes
            and groups are those of all elements together in any case.
        p_value: how probable an ECE this large is, were the model calibrated; see `calibration_test`. Of 15
            bins where `bins` is not a divisor of 300.
        reliability: the reliability diagram in numbers.
        classes: figures of each class.
        groups: figures of the head, middle and tail, where class counts were given.
        intervals: by figure; see `calibrant.metrics.uncertainty.interval`.
        level: of the intervals.
        seed: of the resamples.
        replicates: figures of the resamples, for `compare`.
        fingerprint: of the labels, where resamples were drawn element by element: equal ones can be paired.
    """

    name: str
    samples: int
    num_classes: int
    bins: int
    exact: bool
    per_image: bool = False
    accuracy: float
    balanced_accuracy: float
    mean_iou: float
    mean_iou_foreground: float | None = None
    nll: float
    nll_calibration: float | None = None
    nll_refinement: float | None = None
    brier: float
    root_brier: float
    brier_calibration: float | None = None
    brier_refinement: float | None = None
    ece: float
    mce: float
    ece_l2: float
    adaptive_ece: float
    classwise_ece: float
    debiased_ece: float
    sweep_ece: float
    smooth_ece: float
    kde_ece: float | None = None
    p_value: float
    reliability: Reliability
    classes: tuple[ClassFigures, ...]
    groups: Mapping[str, GroupFigures] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    level: float = 0.95
    seed: int = 0
    replicates: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    fingerprint: str | None = None

    @property
    def metrics(self) -> dict[str, float | None]:
        """Every figure by name, in the order of `calibrant.metrics.METRICS`."""
        return {name: getattr(self, name) for name in METRICS}

    def compare(self, other: Evaluation) -> dict[str, Difference]:
        """Which figures differ significantly between two models, by the bootstrap.

        Where both were evaluated on the same labels in the same order, and with the same seed, each
        resample drew the same elements for both: the comparison is paired, which sees far smaller
        differences. Otherwise the data sets are taken to be independent.

        Returns:
            One entry for each figure that both have resampled; without the binned ones where the numbers of
            bins differ.

        Raises:
            ValueError: there is no such figure.

        >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> target = logits.argmax(1)
        >>> difference = evaluate(logits, target).compare(evaluate(5 * logits, target))["nll"]
        >>> difference.significant, difference.better
        (True, 'second')
        """
        if self.per_image or other.per_image:
            raise ValueError("figures that are means over images are not resampled, and cannot be compared")
        names = [name for name in METRICS if name in self.replicates and name in other.replicates]
        if not names:
            raise ValueError(
                "nothing to compare: one of the evaluations has no resampled figures; evaluate "
                "with resamples > 0"
            )
        if self.bins != other.bins:
            names = [name for name in names if name not in ERRORS and name != "classwise_ece"]
        paired = self.is_paired_with(other)
        differences = {}
        for name in names:
            size = min(len(self.replicates[name]), len(other.replicates[name]))
            ours = torch.tensor(self.replicates[name][:size], dtype=torch.float64)
            theirs = torch.tensor(other.replicates[name][:size], dtype=torch.float64)
            if not paired:  # the same numbers may have been drawn for both: take them in another order
                theirs = theirs.flip(0)
            value = getattr(self, name) - getattr(other, name)
            low, high = interval(value, ours - theirs, self.level, debiased=name == "debiased_ece")
            # Rounding must not count as a difference, however regular it is.
            rounding = 1e-6 * max(abs(getattr(self, name)), abs(getattr(other, name)))
            significant = not low <= 0 <= high and abs(value) > rounding
            first = (value > 0) == METRICS[name].higher_is_better
            better = ("first" if first else "second") if significant else None
            differences[name] = Difference(value, (low, high), significant, better)
        return differences

    def is_paired_with(self, other: Evaluation) -> bool:
        """Whether both were resampled alike from the same labels in the same order."""
        same = (self.fingerprint, self.seed, self.samples) == (other.fingerprint, other.seed, other.samples)
        return same and self.fingerprint is not None

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries, lists and numbers."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    def to_json(self) -> str:
        """Everything as JSON; `from_json` gives back an equal evaluation."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The evaluation that `to_json` wrote.

        Raises:
            ValueError: the text is something else; the message says what is wrong.
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
        """The evaluation that `to_dict` wrote; errors as `from_json`."""
        plain = dict(plain)
        version = plain.pop("format", None)
        if version != _FORMAT:
            raise ValueError(f"an evaluation of format {version!r}; this version reads format {_FORMAT}")
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(plain) - known):
            raise ValueError(f"not an evaluation: unknown keys {unknown}")
        try:
            plain["reliability"] = Reliability(**{k: _tuples(v) for k, v in plain["reliability"].items()})
            plain["classes"] = tuple(ClassFigures(**figures) for figures in plain["classes"])
            plain["groups"] = {name: GroupFigures(**figures) for name, figures in plain["groups"].items()}
            plain["intervals"] = {name: _tuples(ends) for name, ends in plain["intervals"].items()}
            plain["replicates"] = {name: _tuples(values) for name, values in plain["replicates"].items()}
            return cls(**plain)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an evaluation: {type(error).__name__} {error}") from None

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        kind = ("exact" if self.exact else "streamed") + (", means over images" if self.per_image else "")
        title = (
            f"{self.name}: {self.samples:,} elements, {self.num_classes:,} classes, {self.bins} bins, {kind}"
        )
        caption = "Intervals are corrected for the bias of small samples." if self.intervals else None
        table = Table(
            "metric", title=Text(title), title_justify="left", caption=caption, caption_justify="left"
        )
        table.add_column("value", justify="right")
        table.add_column(f"{100 * self.level:g} % interval", justify="right")
        for name, description in METRICS.items():
            value = getattr(self, name)
            if value is None:
                continue
            ends = self.intervals.get(name)
            between = "" if ends is None else " – ".join(description.text(end) for end in ends)
            table.add_row(description.label, description.text(value), between)
        table.add_section()
        for name, group in self.groups.items():
            if group.ece is not None and group.accuracy is not None:
                table.add_row(
                    f"Accuracy, {name}", METRICS["accuracy"].text(group.accuracy), f"{group.classes} classes"
                )
                table.add_row(f"ECE, {name}", METRICS["ece"].text(group.ece), f"{group.count:,} elements")
        table.add_row("p-value of calibration", f"{self.p_value:.3f}", "")
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, color_system=None)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip()


_FORMAT = 1


def _tuples(values: Any) -> Any:
    return tuple(_tuples(value) for value in values) if isinstance(values, list) else values


def evaluate(
    logits: Tensor,
    target: Tensor,
    *,
    name: str = "model",
    bins: int = 15,
    ignore_index: int = -100,
    class_names: Sequence[str] | None = None,
    class_counts: Sequence[int] | Tensor | None = None,
    background: int | None = None,
    per_image: bool = False,
    kde: bool = False,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Every metric of a model's logits, exact, with its uncertainty.

    Args:
        logits: ``(B, K, *S)``, in any floating type. Probabilities enter as ``probabilities.log()``.
        target: labels ``(B, *S)``.
        name: of the model, for tables and reports.
        bins: of the binned errors and of the reliability diagram.
        ignore_index: label of elements that count for nothing.
        class_names: K names; the classes' numbers by default.
        class_counts: K numbers of training elements, for figures of the head (more than 100), middle and
            tail (fewer than 20) of long-tailed data.
        background: a class to leave out of `mean_iou_foreground`.
        per_image: average the figures over the entries of the batch axis, with intervals from their spread,
            instead of taking all elements of the data set together.
        kde: whether to compute `kde_ece` as well, which takes time that grows with N² and means something
            only where predictions have neighbours: for few classes and many elements. It gets no interval.
        resamples: of the bootstrap behind the intervals; 0 for none.
        level: of the intervals.
        seed: of the bootstrap.
        progress: called with the number of resamples done and their total.

    Raises:
        ValueError: shapes, labels or options that do not fit, nothing to evaluate, or logits that are not
            finite.

    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = torch.randn(1000, 5, generator=generator)
    >>> evaluation = evaluate(logits, logits.argmax(1), resamples=100)
    >>> evaluation.accuracy, round(evaluation.ece, 3)
    (1.0, 0.534)
    """
    evaluator = Evaluator(
        name=name,
        bins=bins,
        ignore_index=ignore_index,
        class_names=class_names,
        class_counts=class_counts,
        background=background,
        per_image=per_image,
        resamples=resamples,
        level=level,
        seed=seed,
    )
    if per_image:
        sums = evaluator.update(logits, target)._sums
        assert sums is not None
        return replace(evaluator._evaluation(sums), exact=True)
    _look_for_probabilities(logits)
    predictions = Predictions.of(logits, target, ignore_index=ignore_index)
    evaluation = evaluator._exactly(predictions, progress)
    return replace(evaluation, kde_ece=kde_ece(predictions)) if kde else evaluation


def evaluate_on(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    own_rows: OwnRows | None = None,
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Evaluation:
    """Every metric of a model on a stream of batches, in constant memory: an `Evaluator` in a loop.

    In a distributed run every process makes the call, each with its own share of the data, which may be
    none, and gets the figures of all of it. Elements that a `torch.utils.data.DistributedSampler` repeats are
    left out. If a batch fails in one process, the call fails in all of them.

    Args:
        model: from an input to logits ``(B, K, *S)``; runs in evaluation mode and without gradients.
        batches: pairs ``(input, target)``; the input is a tensor, or tuples, lists and dicts of them.
        forward: from the model and a batch to logits and target, for batches of another form.
        own_rows: as in `calibrant.inference.predictions_on`.
        progress: called after every batch with the number of batches done and their total, or None.
        group: the processes to pool over; all of them by default.
        timeout: seconds to wait for the other processes; by default as long as the process group does.
        **options: of `Evaluator`.

    >>> batches = [(9 * torch.eye(3), torch.tensor([0, 1, 2])), (9 * torch.eye(3), torch.tensor([0, 1, 1]))]
    >>> round(evaluate_on(nn.Identity(), batches).accuracy, 3)
    0.833
    """
    evaluator = Evaluator(**options)
    for_each_prediction(
        evaluator.update,
        "evaluating batches",
        model,
        batches,
        forward=forward,
        own_rows=own_rows,
        progress=progress,
        group=group,
        timeout=timeout,
    )
    return evaluator.compute(group, timeout=timeout)


class Evaluator:
    """The same figures from a stream, in constant memory.

    What is kept are sums: the confidence histogram, and per class some bins. Equal-width figures, scores
    and accuracies are exact; equal-mass and smooth ones are close (see `calibrant.metrics`); the calibration
    and refinement parts and `kde_ece`, which need every prediction at once, are None. Intervals cover the
    figures of the top class, accuracy, balanced accuracy, NLL and Brier.

    Two evaluators add up (``+``). In a distributed run every rank calls `compute` and gets the figures of
    all.

    Args:
        num_classes: K; by default that of the first batch, or of the other processes'.
        **options: as for `evaluate`.

    >>> evaluator = Evaluator()
    >>> for _ in range(3):
    ...     evaluator = evaluator.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> evaluation = evaluator.compute()
    >>> evaluation.samples, evaluation.accuracy
    (6, 0.5)
    """

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        name: str = "model",
        bins: int = 15,
        ignore_index: int = -100,
        class_names: Sequence[str] | None = None,
        class_counts: Sequence[int] | Tensor | None = None,
        background: int | None = None,
        per_image: bool = False,
        resamples: int = 1000,
        level: float = 0.95,
        seed: int = 0,
    ) -> None:
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}")
        if resamples < 0:
            raise ValueError(f"resamples must be at least 0, got {resamples}")
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        self.name = name
        self.bins = bins
        self.ignore_index = ignore_index
        self.class_names = None if class_names is None else [str(entry) for entry in class_names]
        self.class_counts = None if class_counts is None else torch.as_tensor(class_counts).tolist()
        self.background = background
        self.per_image = per_image
        self.resamples = resamples
        self.level = level
        self.seed = seed
        self._sums: _Sums | None = None
        self.num_classes = self._given_classes = num_classes
        if num_classes is not None:
            self._check(num_classes)

    def update(self, logits: Tensor, target: Tensor) -> Self:
        """Add a batch; shapes as for `evaluate`. Returns itself.

        Raises:
            ValueError: shapes or labels that do not fit, or logits that are not finite; nothing is added.
        """
        if self._sums is None:
            _look_for_probabilities(logits)
        if not self.per_image:
            bin_of_cells(self.bins, torch.device("cpu"))  # the error for bins that a stream cannot have
        elements = arrange(
            logits, target, num_classes=self.num_classes, ignore_index=self.ignore_index, look_at_labels=True
        )
        if self.num_classes is None:
            self._check(logits.shape[1])
        sums = self._measure(elements)
        if self.per_image:
            for image, labels in zip(torch.split(logits, 1), torch.split(target, 1), strict=True):
                part = arrange(image, labels, ignore_index=self.ignore_index)
                sums = sums.with_image(self._figures(Predictions.of_elements(part)))
        self.num_classes = logits.shape[1]
        self._sums = sums if self._sums is None else self._sums.to(logits.device) + sums
        return self

    def compute(
        self, group: dist.ProcessGroup | None = None, *, pooled: bool = True, timeout: float | None = None
    ) -> Evaluation:
        """The figures of all that was added, by all processes; more can be added afterwards.

        Args:
            group: the processes to pool over; all of them by default.
            pooled: False for the figures of what this process added alone, without waiting for others.
            timeout: seconds to wait for the other processes; by default as long as the process group does.

        Raises:
            ValueError: nothing that is not ignored was added.
            RuntimeError: another process did not come in time.
        """
        device = None if self._sums is None else self._sums.samples.device
        classes = self.num_classes
        if pooled:
            classes = _agreed(classes, collective_device(device, group), group, timeout)
        if classes is None:
            raise ValueError("nothing to evaluate: call update(logits, target) first")
        if self._sums is None:
            device = collective_device(None, group)  # where the other processes' sums are
            self._check(classes)
            empty = torch.empty(0, classes, device=device), torch.empty(0, dtype=torch.int64, device=device)
            self._sums = self._measure(arrange(*empty))
            self.num_classes = classes
        return self._evaluation(self._sums.all_reduce(group, timeout=timeout) if pooled else self._sums)

    def reset(self) -> None:
        """Forget what was added."""
        self._sums = None
        self.num_classes = self._given_classes

    def __add__(self, other: Evaluator) -> Evaluator:
        """An evaluator that has seen what both have seen, with the options of the first."""
        if not isinstance(other, Evaluator):
            return NotImplemented
        for option in ("bins", "ignore_index", "per_image", "class_counts", "background"):
            if getattr(self, option) != getattr(other, option):
                raise ValueError(
                    f"evaluators with different {option} do not add up: {getattr(self, option)} and "
                    f"{getattr(other, option)}"
                )
        if self.num_classes != other.num_classes and None not in (self.num_classes, other.num_classes):
            raise ValueError(
                f"evaluators of {self.num_classes} and of {other.num_classes} classes do not add up"
            )
        total = copy(self)
        total.num_classes = self.num_classes or other.num_classes
        total._sums = None
        parts = [part._sums for part in (self, other) if part._sums is not None]
        if parts:
            total._sums = parts[0] if len(parts) == 1 else parts[0] + parts[1].to(parts[0].samples.device)
        return total

    def _check(self, num_classes: int) -> None:
        """Whether the options fit K classes."""
        for option, values in (("class_names", self.class_names), ("class_counts", self.class_counts)):
            if values is not None and len(values) != num_classes:
                raise ValueError(
                    f"{option} must have one entry for each of {num_classes} classes, got {len(values)}"
                )
        if self.background is not None and not 0 <= self.background < num_classes:
            raise ValueError(
                f"background must be a class from 0 to {num_classes - 1}, or None, got {self.background}"
            )

    def _group_of_class(self) -> Tensor | None:
        if self.class_counts is None:
            return None
        counts = torch.tensor(self.class_counts)
        return (counts <= _HEAD).long() + (counts < _TAIL).long()

    def _measure(self, elements: Elements) -> _Sums:
        return _Sums.of(Predictions.of_elements(elements), self.bins, self._group_of_class())

    def _figures(self, predictions: Predictions) -> dict[str, float | None]:
        """The figures that need no more than one pass, of predictions that are held in full."""
        sums = _Sums.of(predictions, self.bins, None)
        return _figures(predictions, sums, self.bins, self.background)

    def _exactly(self, predictions: Predictions, progress: Callable[[int, int], None] | None) -> Evaluation:
        """The exact figures of predictions that are held in full."""
        self._check(predictions.num_classes)
        sums = _Sums.of(predictions, self.bins, self._group_of_class())
        figures = _figures(predictions, sums, self.bins, self.background)
        nll, brier = nll_split(predictions), brier_split(predictions)
        means = {
            "nll_refinement": tempered_nll(predictions, nll.temperature),
            "brier_refinement": tempered_brier(predictions, brier.temperature),
        }
        # Their spread is taken at the best temperature of the data: by how much it would move matters only
        # to second order.
        means["nll_calibration"] = -predictions.log_likelihood.double() - means["nll_refinement"]
        means["brier_calibration"] = predictions.squared_error.double() - means["brier_refinement"]
        figures |= {name: float(values.mean()) for name, values in means.items()}
        figures |= {"nll_calibration": nll.calibration, "brier_calibration": brier.calibration}
        if self.resamples * predictions.samples <= _MOST_DRAWS:
            labels = predictions.label.cpu().numpy().tobytes()
            fingerprint = hashlib.sha256(labels).hexdigest()
            replicates = bootstrap(
                predictions,
                bins=self.bins,
                background=self.background,
                means=means,
                resamples=self.resamples,
                seed=self.seed,
                progress=progress,
            )
        else:
            replicates = self._from_sums(sums, progress)
            fingerprint = None  # not drawn element by element: there is nothing to pair
        biases = {}
        if "classwise_ece" in replicates:
            simulated = calibrated_classwise_ece(
                predictions, bins=self.bins, simulations=_SIMULATIONS, seed=self.seed
            )
            biases["classwise_ece"] = float(simulated.mean())
        return self._assemble(sums, figures, replicates, exact=True, fingerprint=fingerprint, biases=biases)

    def _evaluation(self, sums: _Sums) -> Evaluation:
        if sums.samples == 0:
            raise ValueError("nothing to evaluate: every element that was added is ignored")
        if self.per_image:
            means, intervals = sums.image_means(self.level)
            evaluation = self._assemble(sums, means, {}, exact=False)
            return replace(evaluation, per_image=True, intervals=intervals if self.resamples else {})
        figures = _figures(sums.histogram, sums, self.bins, self.background)
        return self._assemble(sums, figures, self._from_sums(sums), exact=False)

    def _from_sums(
        self, sums: _Sums, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Tensor]:
        return bootstrap_histogram(
            sums.histogram,
            sums.counts,
            bins=self.bins,
            resamples=self.resamples,
            seed=self.seed,
            progress=progress,
        )

    def _assemble(
        self,
        sums: _Sums,
        figures: Mapping[str, float | None],
        replicates: Mapping[str, Tensor],
        *,
        exact: bool,
        fingerprint: str | None = None,
        biases: Mapping[str, float] | None = None,
    ) -> Evaluation:
        # A resample may lack what a figure needs, such as any foreground: its spread is then not known.
        replicates = {name: values for name, values in replicates.items() if bool(values.isfinite().all())}
        biases = dict(biases or {})
        if "mce" in replicates:
            biases["mce"] = sums.mce_if_calibrated(self.seed)
        p_value = calibration_test(sums.histogram, bins=sums.histogram_bins, seed=self.seed).p_value
        intervals = sums.score_intervals(self.level) if self.resamples else {}
        for name, values in replicates.items():
            estimate = figures[name]
            if estimate is None:
                continue
            low, high = interval(estimate, values, self.level, debiased=name == "debiased_ece")
            if name in biases:
                # The bootstrap sees too little of this bias, which is largest for a calibrated model.
                low = min(low, interval(estimate, values, self.level, debiased=True)[0] - biases[name])
            if name in ERRORS and p_value >= 1 - self.level:
                low = 0.0  # the bootstrap cannot see that no error at all is possible, but the test can
            intervals[name] = _clipped(name, (low, high))
        if self.resamples and not self.per_image:
            low, high = intervals["brier"]
            intervals["root_brier"] = math.sqrt(low), math.sqrt(high)
            hits, total = sums.recognised.sum(), sums.samples
            low_end, high_end = binomial_interval(hits, total, self.level)
            intervals["accuracy"] = float(low_end), float(high_end)
        return Evaluation(
            name=self.name,
            samples=int(sums.samples),
            num_classes=len(sums.occurs),
            bins=self.bins,
            exact=exact,
            p_value=p_value,
            reliability=_reliability(sums.reliability, self.level),
            classes=_classes(sums, self.class_names),
            groups=_groups(sums, self._group_of_class()),
            intervals=intervals,
            level=self.level,
            seed=self.seed,
            # Seven digits are far below the noise of a resample, and halve the JSON.
            replicates={
                name: tuple(float(f"{value:.7g}") for value in values.tolist())
                for name, values in replicates.items()
            },
            fingerprint=fingerprint,
            **figures,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, eq=False)
class _Sums(Statistics):
    """All that an `Evaluator` keeps; see `ConfidenceHistogram`, `ClassGaps` and `ClassCounts`.

    Attributes:
        scores: ``(2, 2)``, NLL and Brier score, summed, and their squares.
        binned: ``(3, bins)``, count, confidence and correctness in equal-width bins.
        grouped: ``(3, groups, bins)``, the same for head, middle and tail.
        images: ``(3, figures)``, over images: how many have the figure, its sum, and its squares.
    """

    count: Tensor
    confidence: Tensor
    correct: Tensor
    gap: Tensor
    occurs: Tensor
    recognised: Tensor
    predicted: Tensor
    scores: Tensor
    binned: Tensor
    grouped: Tensor
    images: Tensor

    @classmethod
    def of(cls, predictions: Predictions, bins: int, group_of_class: Tensor | None) -> Self:
        histogram = predictions.histogram
        counts = ClassCounts.of(predictions)
        gaps = ClassGaps.of(predictions.elements, bins)
        scores = torch.stack([-predictions.log_likelihood.double(), predictions.squared_error.double()])
        device = scores.device
        pooled = predictions.equal_width(bins)
        binned = torch.stack([pooled.count, pooled.confidence, pooled.correct])
        grouped = torch.zeros(3, len(GROUPS), bins, dtype=torch.float64, device=device)
        if group_of_class is not None:
            group = group_of_class.to(device)[predictions.label]
            place = bin_of(predictions.confidence.double(), equal_width_edges(bins, device))
            values = torch.ones_like(scores[0]), predictions.confidence.double(), predictions.correct.double()
            for row, value in zip(grouped.view(3, -1), values, strict=True):
                row.index_add_(0, group * bins + place, value)
        return cls(
            counts.samples,
            histogram.count,
            histogram.confidence,
            histogram.correct,
            gaps.gap,
            counts.occurs,
            counts.recognised,
            counts.predicted,
            torch.stack([scores.sum(1), scores.square().sum(1)]),
            binned,
            grouped,
            torch.zeros(3, len(METRICS), dtype=torch.float64, device=device),
        )

    @property
    def histogram(self) -> ConfidenceHistogram:
        return ConfidenceHistogram(self.samples, self.count, self.confidence, self.correct)

    @property
    def gaps(self) -> ClassGaps:
        return ClassGaps(self.samples, self.gap)

    @property
    def counts(self) -> ClassCounts:
        return ClassCounts(self.samples, self.occurs, self.recognised, self.predicted)

    @property
    def histogram_bins(self) -> int:
        """The number of bins, or 15 where the cells of the histogram are not cut into so many."""
        bins = self.binned.shape[1]
        return bins if 300 % bins == 0 else 15

    @property
    def reliability(self) -> Bins:
        return Bins(equal_width_edges(self.binned.shape[1], self.binned.device), *self.binned)

    def with_image(self, figures: Mapping[str, float | None]) -> Self:
        """The same sums with the figures of one more image."""
        values = torch.tensor([figures.get(name) or 0.0 for name in METRICS], dtype=torch.float64)
        present = torch.tensor([figures.get(name) is not None for name in METRICS], dtype=torch.float64)
        rows = torch.stack([present, values, values.square()]).to(self.images.device)
        return replace(self, images=self.images + rows)

    def image_means(self, level: float) -> tuple[dict[str, float | None], dict[str, Interval]]:
        """Means over images, and intervals from the spread between images."""
        count, total, squares = self.images.cpu()
        mean = total / count
        spread = ((squares / count - mean.square()).clamp_min(0) / (count - 1)).sqrt()
        reach = _quantile(level) * spread
        present = [name for name, n in zip(METRICS, count.tolist(), strict=True) if n]
        means = dict(zip(METRICS, mean.tolist(), strict=True))
        reaches = dict(zip(METRICS, reach.tolist(), strict=True))
        intervals = {
            name: _clipped(name, (means[name] - reaches[name], means[name] + reaches[name]))
            for name in present
            if math.isfinite(reaches[name])
        }
        return {name: means[name] for name in present}, intervals

    def mce_if_calibrated(self, seed: int) -> float:
        """The MCE that chance alone gives a calibrated model, on average."""
        bins = self.histogram_bins
        gaps = calibrated_gaps(self.histogram, bins=bins, simulations=_SIMULATIONS, seed=seed)
        count = self.histogram.equal_width(bins).count.cpu()
        return float((gaps.abs() / count.clamp_min(1)).amax(1).mean())

    def score_intervals(self, level: float) -> dict[str, Interval]:
        """Intervals of NLL and Brier score from their variance."""
        mean, square = self.scores.cpu() / self.samples.cpu()
        reach = _quantile(level) * ((square - mean.square()).clamp_min(0) / self.samples.cpu()).sqrt()
        low, high = (mean - reach).clamp_min(0).tolist(), (mean + reach).tolist()
        return {"nll": (low[0], high[0]), "brier": (low[1], high[1])}


def _agreed(
    classes: int | None, device: torch.device, group: dist.ProcessGroup | None, timeout: float | None
) -> int | None:
    """The number of classes, which a process without data learns from the others; None where nobody knows."""
    known = [-1, -math.inf] if classes is None else [classes, -classes]
    most, least = all_reduce(
        torch.tensor(known, dtype=torch.float64, device=device), maximum=True, group=group, timeout=timeout
    ).tolist()
    if most > 0 and most != -least:
        raise ValueError(f"the processes evaluate different numbers of classes, from {-least:g} to {most:g}")
    return int(most) if most > 0 else None


def look_like_probabilities(logits: Tensor) -> bool:
    """Whether numbers in the place of logits are in [0, 1] and add up to 1; some are enough to know.

    Args:
        logits: ``(N, K, *S)``.

    >>> look_like_probabilities(torch.tensor([[0.25, 0.75]])), look_like_probabilities(torch.eye(2) * 2)
    (True, False)
    """
    some = logits.detach()[:64].flatten(2)[..., :64] if logits.ndim > 2 else logits.detach()[:1024]
    return (
        some.numel() > 0
        and bool(((some >= 0) & (some <= 1)).all())
        and bool(((some.sum(1) - 1).abs() < 1e-3).all())
    )


def _look_for_probabilities(logits: Tensor) -> None:
    """Warn of probabilities where logits belong; a look at some elements is enough to know."""
    if not isinstance(logits, Tensor):
        found = type(logits).__name__
        raise TypeError(f"logits must be a torch.Tensor, got {found}: pass torch.as_tensor of both")
    if look_like_probabilities(logits):
        warnings.warn(
            "these logits lie in [0, 1] and add up to 1, as probabilities do; pass the .log() of those",
            UserWarning,
            stacklevel=3,
        )


def _quantile(level: float) -> float:
    """How many standard deviations reach so far to both sides, for a normal distribution."""
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))


def _clipped(name: str, ends: Interval) -> Interval:
    low, high = ends
    most = 1.0 if METRICS[name].percent else math.inf
    return min(max(low, 0.0), most), min(max(high, 0.0), most)


def _figures(
    confidences: Predictions | ConfidenceHistogram, sums: _Sums, bins: int, background: int | None
) -> dict[str, float | None]:
    """The figures that streams have too; exact ones where all predictions are at hand."""
    if sums.samples == 0:
        return {}
    nll, brier = (sums.scores[0] / sums.samples).tolist()
    # NaN also where nothing but background occurs or is predicted.
    foreground = math.nan if background is None else mean_iou(sums.counts, background=background)
    figures: dict[str, float | None] = {
        name: float(error(confidences, bins)) for name, error in ERRORS.items()
    }
    return figures | {
        "classwise_ece": classwise_ece(sums.gaps),
        "accuracy": accuracy(sums.counts),
        "balanced_accuracy": balanced_accuracy(sums.counts),
        "mean_iou": mean_iou(sums.counts),
        "mean_iou_foreground": None if math.isnan(foreground) else foreground,
        "nll": nll,
        "brier": brier,
        "root_brier": math.sqrt(brier),
    }


def _reliability(bins: Bins, level: float) -> Reliability:
    count = bins.count.tolist()
    low, high = binomial_interval(bins.correct, bins.count, level)
    from_, to = consistency_band(bins, level)

    def where_filled(values: list[Any]) -> tuple[Any, ...]:
        return tuple(value if n else None for value, n in zip(values, count, strict=True))

    return Reliability(
        edges=tuple(bins.edges.tolist()),
        count=tuple(int(n) for n in count),
        confidence=where_filled((bins.confidence / bins.count).tolist()),
        accuracy=where_filled((bins.correct / bins.count).tolist()),
        accuracy_interval=where_filled(list(zip(low.tolist(), high.tolist(), strict=True))),
        consistency=where_filled(list(zip(from_.tolist(), to.tolist(), strict=True))),
    )


def _classes(sums: _Sums, names: Sequence[str] | None) -> tuple[ClassFigures, ...]:
    columns = (
        [str(k) for k in range(len(sums.occurs))] if names is None else names,
        [int(n) for n in sums.occurs.tolist()],
        [None if math.isnan(value) else value for value in sums.counts.accuracy.tolist()],
        [None if math.isnan(value) else value for value in sums.counts.iou.tolist()],
        (sums.gap.sum(1) / sums.samples).tolist(),
        (sums.gap.abs().sum(1) / sums.samples).tolist(),
    )
    return tuple(ClassFigures(*row) for row in zip(*columns, strict=True))


def _groups(sums: _Sums, group_of_class: Tensor | None) -> dict[str, GroupFigures]:
    if group_of_class is None:
        return {}
    groups = {}
    for number, name in enumerate(GROUPS):
        count, confidence, correct = sums.grouped[:, number]
        total = float(count.sum())
        gap = float((confidence - correct).abs().sum())
        figures = (float(correct.sum()), float(confidence.sum()), gap)
        means = [value / total if total else None for value in figures]
        groups[name] = GroupFigures(int((group_of_class == number).sum()), int(total), *means)
    return groups
