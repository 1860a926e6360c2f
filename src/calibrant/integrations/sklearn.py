"""Calibration for scikit-learn: a scorer, evaluations, a reliability display and calibrated classifiers."""

# ruff: noqa: N803, N806 (scikit-learn's matrix is called X)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

from calibrant.extras import require

require("sklearn", "sklearn", purpose=__name__)

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import (  # type: ignore[import-untyped]
    BaseEstimator,
    ClassifierMixin,
    MetaEstimatorMixin,
    clone,
)
from sklearn.model_selection import StratifiedKFold, train_test_split  # type: ignore[import-untyped]
from sklearn.utils import _safe_indexing, get_tags, indexable  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    _check_sample_weight,
    _check_y,
    check_is_fitted,
    has_fit_parameter,
)
from torch import Tensor

from calibrant.arguments import one_of, whole_number
from calibrant.calibrators import choose, create_calibrator
from calibrant.evaluation import Evaluation, Reliability, evaluate
from calibrant.layout import SUM_TOLERANCE, as_logits, as_pairs
from calibrant.metrics.catalogue import METRICS, Options, calibration_errors
from calibrant.metrics.classwise import ClassGaps
from calibrant.metrics.predictions import Predictions
from calibrant.printable import counted, first_few
from calibrant.warning import warn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["CalibratedClassifier", "ReliabilityDisplay", "calibration_scorer", "evaluate_estimator"]

# The most copies of a row of mean weight. Weights that would need more, or that are no multiples of the
# smallest, are approximated.
_FINENESS = 20


@dataclass(frozen=True)
class _CalibrationScorer:
    """A class and not a closure, so that it can be pickled for other processes, and compared."""

    kind: str
    bins: int

    def __call__(self, estimator: Any, X: Any, y: Any) -> float:
        logits, classes = _logits_of(estimator, X)
        predictions = Predictions.of(logits, _target(y, classes, len(logits)))
        gaps = METRICS[self.kind].source == "gaps"
        source = ClassGaps.of(predictions.elements, self.bins) if gaps else predictions
        return -float(METRICS[self.kind].function(source, Options(self.bins)))


def calibration_scorer(kind: str = "ece", *, bins: int = 15) -> Callable[[Any, Any, Any], float]:
    """A scorer ``(estimator, X, y) -> float`` for `cross_val_score`, `GridSearchCV` and similar functions.

    It returns the negative error, since scikit-learn maximises scores. `sklearn.metrics.make_scorer` does not
    work here: it passes one column of a binary classifier's probabilities, without the labels of the columns.

    Args:
        kind: the name of the error in `calibrant.metrics.METRICS`: ``ece``, ``mce``, ``ece_l2``,
            ``adaptive_ece``, ``classwise_ece``, ``classwise_mce``, ``debiased_ece``, ``debiased_ece_l1``,
            ``sweep_ece``, ``sweep_ece_l1``, ``sweep_ece_width``, ``sweep_ece_width_l1`` or ``smooth_ece``.
        bins: number of bins; the sweeps and ``smooth_ece`` ignore it.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.dummy import DummyClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> scorer = calibration_scorer("ece")
    >>> round(scorer(DummyClassifier(strategy="most_frequent").fit(X, y), X, y), 4)
    -0.6667
    """
    one_of("kind", kind, calibration_errors("confidences", "gaps"))
    return _CalibrationScorer(kind, whole_number("bins", bins))


def evaluate_estimator(
    estimator: Any, X: Any, y: ArrayLike, *, name: str | None = None, **options: Any
) -> Evaluation:
    """Compute every metric of a fitted classifier on one data set.

    Args:
        estimator: a fitted classifier, pipeline or search with ``predict_proba`` and ``classes_``.
        X: N rows of input for ``predict_proba``.
        y: labels ``(N,)`` from ``classes_``.
        name: the name of the model; by default that of the estimator's class.
        options: the options of `calibrant.evaluation.evaluate`.

    Raises:
        TypeError: the estimator is not a classifier with probabilities.
        ValueError: labels are not in ``classes_``, or shapes do not fit.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_iris(return_X_y=True)
    >>> evaluation = evaluate_estimator(GaussianNB().fit(X, y), X, y, resamples=0)
    >>> evaluation.name, evaluation.samples, evaluation.accuracy
    ('GaussianNB', 150, 0.96)
    """
    logits, classes = _logits_of(estimator, X)
    target = _target(y, classes, len(logits))
    options = {"class_names": [str(label) for label in classes]} | options
    return evaluate(logits, target, name=name or type(estimator).__name__, **options)


class ReliabilityDisplay:
    """A reliability diagram with the interface of scikit-learn's displays.

    Unlike `sklearn.calibration.CalibrationDisplay` it takes any number of classes and shows the confidence
    of the top class. `from_estimator` and `from_predictions` create and draw it.

    Args:
        reliability: the numbers of the diagram.
        ece: the calibration error to print; by default computed from the bins.
        name: the title.

    Attributes:
        ax_: the axes of the last drawing.
        figure_: the figure of these axes.

    >>> probabilities, y = [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], [0, 1, 1]
    >>> display = ReliabilityDisplay.from_predictions(probabilities, y)
    >>> sum(display.reliability.count), round(display.ece, 4)
    (3, 0.3333)
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def __init__(
        self, reliability: Reliability, *, ece: float | None = None, name: str | None = None
    ) -> None:
        self.reliability = reliability
        self.ece = ece
        self.name = name

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: ArrayLike,
        *,
        bins: int = 15,
        ax: Axes | None = None,
        name: str | None = None,
    ) -> Self:
        """Draw the diagram of a fitted classifier, given as in `evaluate_estimator`.

        ``bins`` and ``ax`` are as in `from_predictions`. The title is by default the name of the estimator's
        class.
        """
        logits, classes = _logits_of(estimator, X)
        target = _target(y, classes, len(logits))
        return cls._of(logits, target, bins, name or type(estimator).__name__).plot(ax)

    @classmethod
    def from_predictions(
        cls,
        probabilities: ArrayLike,
        y: ArrayLike,
        *,
        classes: Sequence[Any] | None = None,
        bins: int = 15,
        ax: Axes | None = None,
        name: str | None = None,
    ) -> Self:
        """Draw the diagram of predicted probabilities.

        Args:
            probabilities: probabilities ``(N, K)``; each row adds up to 1.
            y: labels ``(N,)``.
            classes: the label of each column; by default 0 to K - 1.
            bins: number of equal-width bins of confidence.
            ax: the axes to draw on; by default those of a new figure.
            name: the title.
        """
        logits = _logits(probabilities)
        labels = list(range(logits.shape[1])) if classes is None else list(classes)
        if len(labels) != logits.shape[1]:
            raise ValueError(
                f"probabilities have {logits.shape[1]} columns, but there are {len(labels)} classes"
            )
        return cls._of(logits, _target(y, labels, len(logits)), bins, name).plot(ax)

    @classmethod
    def _of(cls, logits: Tensor, target: Tensor, bins: int, name: str | None) -> Self:
        evaluation = evaluate(logits, target, bins=bins, resamples=0)
        return cls(evaluation.reliability, ece=evaluation.ece, name=name)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw on ``ax`` or in a new figure, and return self."""
        # Imported here: a scorer in another process does not need matplotlib.
        from calibrant.reports.plots import reliability_diagram

        self.ax_ = reliability_diagram(self.reliability, ax, title=self.name, ece=self.ece)
        self.figure_ = self.ax_.figure
        return self


class CalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier with a calibrator that is fitted to held-out or out-of-fold predictions.

    Unlike `sklearn.calibration.CalibratedClassifierCV` it offers every method of
    `calibrant.calibrators.CALIBRATORS` and keeps one classifier, not one per fold.

    Args:
        estimator: a classifier, pipeline or search with ``predict_proba`` or ``decision_function``. Decision
            values are the logits: one for each class, or for two classes that of the second.
        method: the key of the calibrator, or ``"auto"`` to let `calibrant.calibrators.choose` select one.
        options: keyword arguments of the calibrator; with ``"auto"``, of `choose`.
        holdout: the fraction of the data, stratified by class, that is held out for the calibrator.
        cv: the number of folds, or a splitter of scikit-learn, for cross-validation instead of a hold-out.
            The calibrator is fitted to the predictions for all data, each by a classifier that has not seen
            it, and the classifier is fitted to all data. It takes longer and uses the data better.
        prefit: whether the classifier is already fitted. It is then left unchanged, and all data are used
            for the calibrator. They must not be the data that the classifier was fitted to.
        random_state: the random state of the split, or of the folds.

    Attributes:
        estimator_: the fitted classifier.
        calibrator_: the fitted calibrator.
        classes_: labels, in the order of the columns of the probabilities.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = CalibratedClassifier(GaussianNB(), method="temperature", random_state=0).fit(X, y)
    >>> classifier.predict_proba(X).shape, bool((classifier.predict(X) == y).mean() > 0.9)
    ((150, 3), True)
    """

    def __init__(
        self,
        estimator: Any,
        *,
        method: str = "temperature",
        options: Mapping[str, Any] | None = None,
        holdout: float = 0.2,
        cv: Any = None,
        prefit: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.estimator = estimator
        self.method = method
        self.options = options
        self.holdout = holdout
        self.cv = cv
        self.prefit = prefit
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the classifier and the calibrator.

        Args:
            X: N rows of input for the classifier's ``fit``.
            y: labels ``(N,)``.
            sample_weight: a weight of at least 0 for each row. The classifier gets them if its ``fit`` takes
                them. For the calibrator they are copies: a weight of 3 counts as 3 rows. If they are not
                multiples of the smallest, they are rounded to about a twentieth of their mean. Methods with
                a prior then see more rows than there are.

        Raises:
            TypeError: the estimator is not a classifier with probabilities or decisions, or an option of the
                calibrator is unknown.
            ValueError: the method is unknown, the holdout is not between 0 and 1, there are fewer than two
                classes, a class has too few samples to be in every part, or weights are negative or given
                for the method ``"auto"``.
        """
        options = self.options or {}
        calibrator = None if self.method == "auto" else create_calibrator(self.method, **options)
        signature(choose).bind("logits", "target", **(options if calibrator is None else {}))  # fail early
        labels = np.asarray(_check_y(y, multi_output=False, estimator=self))
        X, labels = indexable(X, labels)
        check_classification_targets(labels)
        weights = None
        if sample_weight is not None:
            if calibrator is None:
                raise ValueError("method='auto' takes no sample_weight: choose a method")
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            _check_counts(labels[weights > 0])
        everything = np.arange(len(labels))
        if self.prefit:
            if self.cv is not None:
                raise ValueError(
                    "prefit=True fits no classifier, so cv has no meaning: leave one of them out"
                )
            check_is_fitted(self.estimator)
            self.estimator_, parts = self.estimator, [(everything, everything)]
        elif self.cv is None:
            parts = [self._parts(labels)]
            self.estimator_ = self._fitted(X, labels, weights, parts[0][0])
        else:
            parts = self._folds(X, labels)
            self.estimator_ = self._fitted(X, labels, weights, everything)
        pieces, targets = [], []
        for fitted_to, held_out in parts:
            one = self.estimator_ if self.cv is None else self._fitted(X, labels, weights, fitted_to)
            found, classes = _logits_of(one, _safe_indexing(X, held_out), decisions=True)
            pieces.append(found)
            targets.append(_target(labels[held_out], classes, len(found)))
        logits, target = torch.cat(pieces), torch.cat(targets)
        if weights is not None:
            copies = _copies(weights[np.concatenate([held_out for _, held_out in parts])])
            logits, target = logits[copies], target[copies]
        self.calibrator_ = (
            choose(logits, target, **options) if calibrator is None else calibrator.fit(logits, target)
        )
        self.classes_ = np.asarray(self.estimator_.classes_)
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        return self

    def _fitted(
        self, X: Any, labels: NDArray[Any], weights: NDArray[np.float64] | None, rows: NDArray[np.int_]
    ) -> Any:
        """A new classifier, fitted to some rows."""
        options = {}
        if weights is not None and has_fit_parameter(self.estimator, "sample_weight"):
            options["sample_weight"] = weights[rows]
        elif weights is not None:
            warn(f"{type(self.estimator).__name__} takes no sample_weight: only the calibrator uses it")
        return clone(self.estimator).fit(_safe_indexing(X, rows), labels[rows], **options)

    def _folds(self, X: Any, labels: NDArray[Any]) -> list[tuple[NDArray[np.int_], NDArray[np.int_]]]:
        """For each fold, the indices of the data for its classifier, and of the data to predict."""
        splitter = self.cv
        if not hasattr(splitter, "split"):
            if not isinstance(splitter, Integral) or splitter < 2:
                raise ValueError(f"cv must be a whole number of at least 2, or a splitter, got {splitter!r}")
            _check_counts(labels, int(splitter), f"{splitter} folds need at least {splitter} of each")
            splitter = StratifiedKFold(int(splitter), shuffle=True, random_state=self.random_state)
        return list(splitter.split(X, labels))

    def _parts(self, labels: NDArray[Any]) -> tuple[NDArray[np.int_], NDArray[np.int_]]:
        """The indices of the data for the classifier, and of the held-out data."""
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout must be a fraction of the data, between 0 and 1, got {self.holdout!r}")
        _check_counts(
            labels, 2, "each needs at least 2: one to fit the classifier, one to fit the calibrator"
        )
        parts = train_test_split(
            np.arange(len(labels)), test_size=self.holdout, stratify=labels, random_state=self.random_state
        )
        return parts[0], parts[1]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Calibrated probabilities ``(N, K)``."""
        check_is_fitted(self)
        logits, _ = _logits_of(self.estimator_, X, decisions=True)
        with torch.no_grad():
            probabilities: NDArray[np.float64] = self.calibrator_(logits).softmax(1).numpy()
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable labels ``(N,)``."""
        probabilities = self.predict_proba(X)
        labels: NDArray[Any] = self.classes_[probabilities.argmax(1)]
        return labels

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags = get_tags(self.estimator).input_tags
        return tags


def _check_counts(labels: NDArray[Any], fewest: int = 1, needed: str = "") -> None:
    """Raise an error unless there are two or more classes, with ``fewest`` samples or more of each."""
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"y must hold at least 2 classes, got {len(classes)} class")
    number = int(counts.min())
    if number < fewest:
        rare = classes.tolist()[int(counts.argmin())]  # also of Python objects
        raise ValueError(f"class {rare!r} has {counted(number, 'sample')}, but {needed}")


def _copies(weights: NDArray[np.float64]) -> NDArray[np.int_]:
    """Indices that repeat each row as often as its weight says."""
    used = weights[weights > 0]
    if not len(used):
        raise ValueError("all weights of the held-out data are 0")
    multiples = weights / used.min()
    whole = np.allclose(multiples, multiples.round(), rtol=0, atol=1e-9)
    if not whole or multiples.sum() > _FINENESS * len(used):
        multiples = weights * (_FINENESS / used.mean())
    # The rounded sums and not the sum of rounded weights: no error adds up.
    ends = multiples.cumsum().round().astype(int)
    return np.repeat(np.arange(len(weights)), np.diff(ends, prepend=0))


def _decisions_of(estimator: Any, X: Any) -> tuple[Tensor, list[Any]]:
    """Decision values as logits ``(N, K)``, and the label of each column."""
    kind = type(estimator).__name__
    if not hasattr(estimator, "decision_function"):
        raise TypeError(f"{kind} has neither predict_proba nor decision_function")
    values = torch.from_numpy(np.array(estimator.decision_function(X), dtype=np.float64))
    labels = np.asarray(estimator.classes_).tolist()
    if values.ndim == 1 and len(labels) == 2:
        values = as_pairs(values)
    if values.ndim != 2 or values.shape[1] != len(labels):
        number = 1 if values.ndim == 1 else values.shape[1]
        raise ValueError(
            f"{kind} gives {number} decision values for {len(labels)} classes: expected one for each "
            "(for SVC, decision_function_shape='ovr')"
        )
    return values, labels


def _logits_of(estimator: Any, X: Any, *, decisions: bool = False) -> tuple[Tensor, list[Any]]:
    """Logits ``(N, K)`` of a classifier, and the label of each column.

    They are the logarithms of its probabilities. Without probabilities, decision values are taken for logits
    where ``decisions`` allows it.
    """
    kind = type(estimator).__name__
    if decisions and not hasattr(estimator, "predict_proba"):
        return _decisions_of(estimator, X)
    if not hasattr(estimator, "predict_proba"):
        raise TypeError(
            f"{kind} gives no probabilities: it has no predict_proba (some classifiers need probability=True "
            "or another loss for it; CalibratedClassifier adds it to classifiers with decision_function)"
        )
    probabilities = estimator.predict_proba(X)  # before other checks: it has its own error if not fitted
    classes = getattr(estimator, "classes_", None)
    if classes is None or isinstance(probabilities, list):
        raise TypeError(f"{kind} must be a classifier with one output and classes_")
    logits, labels = _logits(probabilities), np.asarray(classes).tolist()
    if len(labels) != logits.shape[1]:
        raise ValueError(f"{kind} gives {logits.shape[1]} probabilities for {len(labels)} classes")
    return logits, labels


def _logits(probabilities: ArrayLike) -> Tensor:
    """Logarithms of probabilities ``(N, K)``, in float64."""
    values = torch.from_numpy(np.array(probabilities, dtype=np.float64))
    if values.ndim != 2:
        hint = "; of a binary classifier pass both columns, np.stack([1 - p, p], axis=1)"
        shape = tuple(values.shape)
        raise ValueError(
            f"probabilities must have shape (N, K), got {shape}{hint if len(shape) == 1 else ''}"
        )
    # Written so that NaN fails.
    if not bool((values >= 0).all()) or not bool(((values.sum(1) - 1).abs() <= SUM_TOLERANCE).all()):
        raise ValueError("probabilities must be at least 0 and add up to 1 in each row")
    return as_logits(values)


def _target(y: ArrayLike, classes: Sequence[Any], samples: int) -> Tensor:
    """The column of each label."""
    labels = np.asarray(y)
    if labels.shape != (samples,):
        raise ValueError(f"y must have shape ({samples},), one label for each row, got {labels.shape}")
    column = {label: number for number, label in enumerate(classes)}
    values = labels.tolist()
    unknown = sorted({label for label in values if label not in column}, key=repr)
    if unknown:
        named, known = first_few(map(repr, unknown)), first_few(map(repr, classes), 10)
        raise ValueError(f"y holds labels that are not among the classes: {named}; the classes are {known}")
    return torch.tensor([column[label] for label in values], dtype=torch.long, device="cpu")
