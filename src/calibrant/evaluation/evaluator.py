"""`evaluate`, the streamed `Evaluator`, and `evaluate_on` for a model and its batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrant.arguments import LARGEST_INT, in_range, label, true_or_false, whole_number
from calibrant.distributed import agree, all_reduce, collective_device
from calibrant.evaluation.figures import ClassBin, ClassFigures, Evaluation, Figure
from calibrant.evaluation.intervals import figures_of, image_figures
from calibrant.evaluation.sums import EvaluationSums, group_of_class
from calibrant.histogram import bin_of_cells
from calibrant.inference import Forward, OwnRows, Progress, for_each_prediction
from calibrant.layout import Elements, answers, arrange, as_decisions
from calibrant.metrics.catalogue import METRICS, Options, element_values
from calibrant.metrics.predictions import Predictions
from calibrant.metrics.resampling import ResampleProgress, bootstrap, bootstrap_histogram
from calibrant.metrics.selective import risk_coverage
from calibrant.metrics.uncertainty import bins_of_the_test, calibration_test
from calibrant.probabilities import warn_of_probabilities
from calibrant.statistics import adding

# Above this number of draws, elements times resamples, data are drawn from the cells of the histogram.
_MOST_DRAWS = 2 * 10**8

_ALL_IGNORED = "nothing to evaluate: every element is ignored"

# The options that decide what is added up.
_SUMMED_BY = ("bins", "ignore_index", "per_image", "class_counts", "class_names", "background", "binary")


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
    binary: bool = False,
    kde: bool = False,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    progress: ResampleProgress | None = None,
) -> Evaluation:
    """Compute every metric of a model's logits, exactly, with confidence intervals.

    Args:
        logits: logits ``(B, K, *S)`` of any floating type. For probabilities pass ``probabilities.log()``.
        target: labels ``(B, *S)``.
        name: the name of the model, for tables and reports.
        bins: number of bins of the binned errors and of the reliability diagram.
        ignore_index: the label of elements to leave out.
        class_names: K names; by default the numbers of the classes.
        class_counts: the number of training elements of each class, for the figures of the head (more than
            100), middle and tail (fewer than 20) of long-tailed data.
        background: the class to leave out of `mean_iou_foreground`.
        per_image: compute the metrics of each entry of the batch axis and average them, with intervals from
            their spread. By default all elements of the data set are taken together.
        binary: each logit is a yes-or-no decision of its own. Logits are ``(B,)``, or ``(B, L, *S)`` for L
            labels; the target has the same shape and holds 0 and 1. Calibration errors are those of the
            probability of yes; see `Evaluation.binary` and `Evaluation.labels`. ``class_names`` are those of
            no and yes, or of the L labels.
        kde: also compute `kde_ece`, without an interval. Its time grows with N². It is only informative for
            few classes and many elements. Not with ``per_image``.
        resamples: number of bootstrap resamples for the intervals; 0 for neither intervals nor tests.
        level: the level of the intervals.
        seed: the seed of the bootstrap.
        progress: called with the number of resamples done and their total. With ``per_image`` there are none.

    Raises:
        ValueError: shapes, labels or options do not fit, there is nothing to evaluate, or logits are not
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
        binary=binary,
        resamples=resamples,
        level=level,
        seed=seed,
    )
    if per_image:
        if kde:
            raise ValueError("kde_ece is computed for all elements together: leave out kde or per_image")
        evaluation = evaluator.update(logits, target).compute(pooled=False)
        labels = tuple(replace(each, exact=True) for each in evaluation.labels)
        return replace(evaluation, exact=True, labels=labels)
    predictions = Predictions.of(logits, target, ignore_index=ignore_index, binary=binary)
    classes = _size(logits, binary)
    evaluator._check(classes)
    evaluator._dense = _is_dense(logits)
    evaluation = evaluator._exactly(predictions, kde, progress)
    found = []
    for i, each in enumerate(evaluator._parts(classes)):
        # Not by `Predictions.of`, which would warn of probabilities once more for each label.
        decisions = as_decisions(logits[:, i], target[:, i])
        part = arrange(*decisions, ignore_index=ignore_index, look_at_labels=True)
        with _naming(each):
            found.append(each._exactly(Predictions.of_elements(part, binary=True), kde, None))
    return _with_labels(evaluation, found)


def evaluate_on(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    own_rows: OwnRows | None = None,
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    passes: int = 1,
    **options: Any,
) -> Evaluation:
    """Evaluate a model on a stream of batches in constant memory: an `Evaluator` in a loop.

    In a distributed run every process calls this function with its own part of the data, which may be empty.
    Each gets the figures of all data. Elements that a `torch.utils.data.DistributedSampler` repeats are left
    out. If a batch fails in one process, the call fails in all of them.

    Args:
        model: a module that maps an input to logits ``(B, K, *S)``. It runs in evaluation mode, without
            gradients.
        batches: pairs ``(input, target)``. The input is a tensor, or tuples, lists and dicts of tensors.
        forward: a function that maps the model and a batch to logits and target, for other kinds of batches.
        own_rows: as in `calibrant.inference.predictions_on`.
        progress: called after every batch with the number of batches done and their total, or None.
        group: the processes to pool over; all of them by default.
        timeout: seconds to wait for the other processes; by default the time-out of the process group.
        passes: how often each batch is predicted, with dropout active and probabilities averaged (MC
            dropout); as in `calibrant.inference.predictions_on`.
        **options: the options of `Evaluator`.

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
        passes=passes,
        binary=evaluator.binary,
    )
    return evaluator.compute(group, timeout=timeout)


@dataclass(eq=False, repr=False)
class Evaluator:
    """Evaluate a stream of batches in constant memory.

    It keeps sums: a histogram of confidences, and a few bins per class. Scores, accuracies and errors over
    bins of equal width are exact. Errors over bins of equal mass and the smooth error are close; the
    functions in `calibrant.metrics` state how close. Metrics that need every prediction at once are None:
    the calibration and refinement parts and `kde_ece`. There are intervals for the errors of the top class,
    accuracy, balanced accuracy, NLL and Brier.

    ``evaluator + evaluator`` combines two evaluators. In a distributed run every process calls `compute` and
    gets the figures of all data.

    Args:
        num_classes: number of classes; by default that of the first batch, or of the other processes. With
            ``binary=True`` the number of labels, 1 for a single logit; that of losses and calibrators is 2.
        **options: the options of `evaluate`.

    >>> evaluator = Evaluator()
    >>> for _ in range(3):
    ...     evaluator = evaluator.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> evaluation = evaluator.compute()
    >>> evaluation.samples, evaluation.accuracy
    (6, 0.5)
    """

    num_classes: int | None = None
    _: KW_ONLY
    name: str = "model"
    bins: int = 15
    ignore_index: int = -100
    class_names: Sequence[str] | None = None
    class_counts: Sequence[int] | Tensor | None = None
    background: int | None = None
    per_image: bool = False
    binary: bool = False
    resamples: int = 1000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        self.bins = whole_number("bins", self.bins)
        self.resamples = whole_number("resamples", self.resamples, 0)
        self.ignore_index, self.seed = label("ignore_index", self.ignore_index), label("seed", self.seed)
        self.per_image = true_or_false("per_image", self.per_image)
        self.binary = true_or_false("binary", self.binary)
        self.level = in_range("level", self.level, 0, 1, open_low=True, open_high=True)
        if self.num_classes is not None:
            self.num_classes = whole_number("num_classes", self.num_classes)
        if self.background is not None:
            self.background = label("background", self.background)
        if self.class_names is not None:
            self.class_names = [str(entry) for entry in self.class_names]
        if self.class_counts is not None:
            self.class_counts = _counts(self.class_counts)
        self._options = Options(self.bins, self.background, binary=self.binary)
        self._sums: EvaluationSums | None = None
        self._given_classes = self.num_classes
        self._looked_at = False
        self._dense = False
        if self.num_classes is not None:
            self._check(self.num_classes)

    def update(self, logits: Tensor, target: Tensor) -> Self:
        """Add a batch, with shapes as in `evaluate`, and return the evaluator.

        Several threads may add batches at once.

        Raises:
            ValueError: shapes or labels do not fit, or logits are not finite. Nothing is added then.
        """
        if not self.per_image:
            bin_of_cells(self.bins, torch.device("cpu"))  # raises an error for bins that a stream cannot have
        given, expected = logits, self.num_classes
        if self.binary:
            logits, target = answers(logits, target, self.ignore_index)
            expected = 2
        elements = arrange(
            logits, target, num_classes=expected, ignore_index=self.ignore_index, look_at_labels=True
        )
        classes = _size(given, self.binary)
        self._check(classes)
        if not self._looked_at:  # once, because it waits for a GPU
            warn_of_probabilities(logits)
            self._looked_at = True
        sums = self._measure(elements, logits, target, classes)
        with adding:
            self._check(classes)  # another thread may have added the first batch meanwhile
            self.num_classes = classes
            self._dense |= _is_dense(given)
            self._sums = sums if self._sums is None else self._sums.to(logits.device) + sums
        return self

    def compute(
        self, group: dist.ProcessGroup | None = None, *, pooled: bool = True, timeout: float | None = None
    ) -> Evaluation:
        """The evaluation of all batches that all processes have added; more can be added afterwards.

        Args:
            group: the processes to pool over; all of them by default.
            pooled: False to evaluate the batches of this process alone, without waiting for others.
            timeout: seconds to wait for the other processes; by default the time-out of the process group.

        Raises:
            ValueError: no element was added, or all elements are ignored; or the processes have different
                numbers of classes or different options.
            RuntimeError: another process did not arrive in time.
        """
        with adding:
            sums, classes, dense = self._sums, self.num_classes, self._dense
        device = None if sums is None else sums.samples.device
        if pooled:
            classes, dense = _agreed(classes, dense, collective_device(device, group), group, timeout)
            agree({name: getattr(self, name) for name in _SUMMED_BY}, group=group, timeout=timeout)
        if classes is None:
            raise ValueError("nothing to evaluate: call update(logits, target) first")
        if sums is None:
            device = collective_device(None, group)  # the device of the other processes' sums
            self._check(classes)
            axes = (2, classes) if self.binary else (classes,)
            logits = torch.empty(0, *axes, device=device)
            target = torch.empty(0, *axes[1:], dtype=torch.int64, device=device)
            sums = self._measure(arrange(logits, target), logits, target, classes)
        sums = sums.all_reduce(group, timeout=timeout) if pooled else sums
        evaluation = replace(self._streamed(sums), dense=dense)
        labels = []
        for each, part in zip(self._parts(classes), sums.labels, strict=True):
            with _naming(each):
                labels.append(each._streamed(part))
        return _with_labels(evaluation, labels)

    def reset(self) -> None:
        """Forget all batches."""
        with adding:
            self._sums, self._looked_at, self._dense = None, False, False
            self.num_classes = self._given_classes

    def __add__(self, other: Evaluator) -> Evaluator:
        """An evaluator with the batches of both and the options of the first."""
        if not isinstance(other, Evaluator):
            return NotImplemented
        for option in _SUMMED_BY:
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
        total._dense |= other._dense
        total._sums = self._sums or other._sums
        if self._sums and other._sums:
            total._sums = self._sums + other._sums.to(self._sums.samples.device)
        return total

    def _parts(self, labels: int) -> tuple[Evaluator, ...]:
        """An evaluator for each label; none for a single one or without ``binary``."""
        if not self.binary or labels == 1:
            return ()
        names = self.class_names or [str(number) for number in range(labels)]
        shared = ("bins", "ignore_index", "background", "per_image", "binary", "level", "seed")
        options = {name: getattr(self, name) for name in shared}
        # Without resamples, which would take as long for every label as for all of them together.
        return tuple(Evaluator(1, name=name, resamples=0, **options) for name in names)

    def _check(self, num_classes: int) -> None:
        """Check that the options fit the number of classes, or of labels."""
        if self.num_classes not in (None, num_classes):
            what, hint = "classes", ""
            if self.binary:
                what = "label" if num_classes == 1 else "labels"
                hint = "; with binary=True the num_classes of an Evaluator is the number of labels"
            raise ValueError(f"the logits have {num_classes} {what}, expected {self.num_classes}{hint}")
        classes = 2 if self.binary else num_classes
        entries, what = classes, "classes"
        if self.binary and num_classes > 1:
            entries, what = num_classes, "labels"
            if self.class_counts is not None:
                raise ValueError("class_counts have no meaning for several labels: leave them out")
        for option, values in (("class_names", self.class_names), ("class_counts", self.class_counts)):
            if values is not None and len(values) != entries:
                raise ValueError(
                    f"{option} must have one entry for each of {entries} {what}, got {len(values)}"
                )
        if self.background is not None and not 0 <= self.background < classes:
            raise ValueError(
                f"background must be a class from 0 to {classes - 1}, or None, got {self.background}"
            )

    def _groups(self) -> Tensor | None:
        return None if self.class_counts is None else group_of_class(self.class_counts)

    def _measure(self, elements: Elements, logits: Tensor, target: Tensor, labels: int = 1) -> EvaluationSums:
        """The sums of a batch as `Elements` and as tensors, with those of its images and of several labels.

        With ``binary``, the tensors are ``(B, 2, L, *S)`` and ``(B, L, *S)``, as `as_decisions` has them.
        """
        predictions = Predictions.of_elements(elements, binary=self.binary)
        sums = EvaluationSums.of(predictions, self._options, self._groups())
        if self.per_image:
            for image in zip(torch.split(logits, 1), torch.split(target, 1), strict=True):
                part = arrange(*image, ignore_index=self.ignore_index)
                sums = sums.with_image(Predictions.of_elements(part, binary=self.binary), self._options)
        if self.binary and labels > 1:
            columns = zip(logits.unbind(2), target.unbind(1), strict=True)
            parts = ((arrange(*column, ignore_index=self.ignore_index), *column) for column in columns)
            sums = replace(sums, labels=tuple(self._measure(*part) for part in parts))
        return sums

    def _exactly(self, predictions: Predictions, kde: bool, progress: ResampleProgress | None) -> Evaluation:
        """The evaluation of predictions that are all at hand."""
        if not predictions.samples:
            raise ValueError(_ALL_IGNORED)
        options = self._options._replace(kde=kde)
        sums = EvaluationSums.of(predictions, options, self._groups())
        values = element_values(predictions, options)
        estimates = sums.metrics(options, predictions, values)
        fingerprint = None
        if self.resamples * predictions.samples <= _MOST_DRAWS:
            fingerprint = hashlib.sha256(predictions.label.cpu().numpy().tobytes()).hexdigest()
            replicates = bootstrap(
                predictions, options, values, resamples=self.resamples, seed=self.seed, progress=progress
            )
        else:
            replicates = self._from_sums(sums, progress)
        return self._evaluation(sums, options, estimates, replicates, predictions, fingerprint)

    def _from_sums(self, sums: EvaluationSums, progress: ResampleProgress | None = None) -> dict[str, Tensor]:
        return bootstrap_histogram(
            sums.histogram,
            sums.counts,
            self._options,
            resamples=self.resamples,
            seed=self.seed,
            progress=progress,
        )

    def _streamed(self, sums: EvaluationSums) -> Evaluation:
        """The evaluation of a stream."""
        if sums.samples == 0:
            raise ValueError(_ALL_IGNORED)
        if not self.per_image:
            estimates, replicates = sums.metrics(self._options), self._from_sums(sums)
            return self._evaluation(sums, self._options, estimates, replicates)
        evaluation = self._evaluation(sums, self._options, {}, {})
        figures = image_figures(sums.images, self.level if self.resamples else None)
        return replace(evaluation, per_image=True, figures={**evaluation.figures, **figures})

    def _evaluation(
        self,
        sums: EvaluationSums,
        options: Options,
        estimates: Mapping[str, float | None],
        replicates: Mapping[str, Tensor],
        predictions: Predictions | None = None,
        fingerprint: str | None = None,
    ) -> Evaluation:
        p_value = None
        if self.resamples:
            bins = bins_of_the_test(self.bins)
            p_value = calibration_test(sums.histogram, bins=bins, seed=self.seed).p_value
        ranked = predictions or (sums.histogram.ranked.folded() if self.binary else sums.histogram)
        figures = figures_of(
            estimates,
            replicates,
            sums,
            options,
            level=self.level if self.resamples else None,
            rejected=p_value is not None and p_value < 1 - self.level,
            chance=lambda metric: metric(predictions or sums.histogram, self.bins, self.seed),
            ranked=ranked,
        )
        return Evaluation(
            name=self.name,
            samples=int(sums.samples),
            num_classes=len(sums.counts.occurs),
            bins=self.bins,
            exact=predictions is not None,
            dense=self._dense,
            figures={name: figures.get(name, Figure(None)) for name in METRICS},
            p_value=p_value,
            reliability=sums.reliability(self.level),
            classes=sums.classes(self._names()),
            groups=sums.groups(self._groups()),
            risk_coverage=risk_coverage(ranked, level=self.level),
            level=self.level,
            seed=self.seed,
            fingerprint=fingerprint,
            binary=self.binary,
            ruled_out=int(sums.ruled_out),
        )

    def _names(self) -> Sequence[str] | None:
        """The names of the classes; without names, classes are numbered."""
        if self.binary and (self.class_names is None or len(self.class_names) != 2):
            return ["no", "yes"]  # names of labels come with the labels
        return self.class_names


def _is_dense(logits: Tensor) -> bool:
    """Whether an input has many elements, as an image has pixels."""
    return logits.ndim > 2


def _size(logits: Tensor, binary: bool) -> int:
    """The number of classes, or of labels."""
    return 1 if binary and logits.ndim == 1 else logits.shape[1]


@contextmanager
def _naming(label: Evaluator) -> Iterator[None]:
    """Let errors about the data of a label name it: everything else was checked for all labels before."""
    try:
        yield
    except ValueError as problem:
        raise ValueError(
            f"label {label.name!r}: {problem}; leave out the column of this label in logits and target"
        ) from None


def _with_labels(evaluation: Evaluation, labels: Sequence[Evaluation]) -> Evaluation:
    """The evaluation of all decisions together with those of each label, if there are any."""
    if not labels:
        return evaluation
    evaluation = replace(
        evaluation,
        num_classes=len(labels),
        classes=tuple(map(_class_of_label, labels)),
        labels=tuple(replace(each, dense=evaluation.dense) for each in labels),
    )
    macro = evaluation.macro
    averaged = {
        name: Figure(macro[name])
        for name, metric in METRICS.items()
        if metric.source in ("counts", "gaps") and not metric.binomial
    }
    return replace(evaluation, figures={**evaluation.figures, **averaged})


def _class_of_label(evaluation: Evaluation) -> ClassFigures:
    """The figures of a label as those of a class. The accuracy is that of its decisions, yes and no."""
    data = evaluation.reliability
    filled = zip(range(len(data.count)), data.count, data.confidence, data.accuracy, strict=True)
    bins = tuple(
        ClassBin(number, count, confidence, round(count * frequency))
        for number, count, confidence, frequency in filled
        if confidence is not None and frequency is not None
    )
    _, yes = evaluation.classes
    return replace(yes, name=evaluation.name, accuracy=evaluation.accuracy, bins=bins)


def _counts(values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values  # of torch or NumPy
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"class_counts must be a list of whole numbers, got {values!r}")
    return [whole_number("class_counts", count, 0, LARGEST_INT) for count in values]


def _agreed(
    classes: int | None,
    dense: bool,
    device: torch.device,
    group: dist.ProcessGroup | None,
    timeout: float | None,
) -> tuple[int | None, bool]:
    """The number of classes, None if no process has data, and whether an input has many elements."""
    known = [-1, -math.inf, dense] if classes is None else [classes, -classes, dense]
    most, least, anywhere = all_reduce(
        torch.tensor(known, dtype=torch.float64, device=device), maximum=True, group=group, timeout=timeout
    ).tolist()
    if most > 0 and most != -least:
        raise ValueError(f"the processes evaluate different numbers of classes, from {-least:g} to {most:g}")
    return (int(most) if most > 0 else None), bool(anywhere)
