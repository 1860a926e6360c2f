"""A scikit-learn classifier whose probabilities are calibrated by any of calibrant's methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import (  # type: ignore[import-untyped]
    BaseEstimator,
    ClassifierMixin,
    MetaEstimatorMixin,
    clone,
)
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from sklearn.utils import _safe_indexing, indexable  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    _check_y,
    check_is_fitted,
)

from calibrant.calibrators import create_calibrator
from calibrant.integrations.sklearn import _logits_of, _target

__all__ = ["CalibratedClassifier"]


class CalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier, and a calibrator fitted to data that the classifier has not seen.

    Unlike `sklearn.calibration.CalibratedClassifierCV` it takes every method of
    `calibrant.calibrators.CALIBRATORS` and keeps one classifier, not one for each fold.

    Args:
        estimator: a classifier with ``predict_proba``; a pipeline or a search will do.
        method: key of the calibrator.
        options: keyword arguments of the calibrator.
        holdout: share of the data, drawn class by class, that the classifier is not fitted to and the
            calibrator is.
        prefit: whether the classifier is fitted already: then it stays as it is, and all of the data, which
            it must not have been fitted to, go to the calibrator.
        random_state: of the draw.

    Attributes:
        estimator_: the fitted classifier.
        calibrator_: the fitted calibrator.
        classes_: labels, in the order of the probabilities' columns.

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
        prefit: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.estimator = estimator
        self.method = method
        self.options = options
        self.holdout = holdout
        self.prefit = prefit
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Fit the classifier to one part of the data and the calibrator to the other.

        Args:
            X: what the classifier's ``fit`` takes, N rows.
            y: labels ``(N,)``.

        Raises:
            TypeError: no classifier that gives probabilities, or an unknown option of the calibrator.
            ValueError: an unknown method, a holdout that is no share, fewer than two classes, or a class
                with too few samples to be in both parts.
        """
        calibrator = create_calibrator(self.method, **(self.options or {}))
        labels = np.asarray(_check_y(y, multi_output=False, estimator=self))
        X, labels = indexable(X, labels)  # noqa: N806
        check_classification_targets(labels)
        if self.prefit:
            check_is_fitted(self.estimator)
            self.estimator_, held_out = self.estimator, np.arange(len(labels))
        else:
            fitted_to, held_out = self._parts(labels)
            self.estimator_ = clone(self.estimator)
            self.estimator_.fit(_safe_indexing(X, fitted_to), labels[fitted_to])
        logits, classes = _logits_of(self.estimator_, _safe_indexing(X, held_out))
        self.calibrator_ = calibrator.fit(logits, _target(labels[held_out], classes, len(logits)))
        self.classes_ = np.asarray(self.estimator_.classes_)
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        return self

    def _parts(self, labels: NDArray[Any]) -> tuple[NDArray[np.int_], NDArray[np.int_]]:
        """Indices of what the classifier is fitted to, and of what it is not."""
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout must be a share of the data, between 0 and 1, got {self.holdout!r}")
        classes, counts = np.unique(labels, return_counts=True)
        if len(classes) < 2:
            raise ValueError(f"y must hold at least 2 classes, got {len(classes)} class")
        if counts.min() < 2:
            rare = classes[counts.argmin()].item()
            raise ValueError(
                f"class {rare!r} has 1 sample, but each needs at least 2: one to fit the classifier, one to "
                "fit the calibrator"
            )
        parts = train_test_split(
            np.arange(len(labels)), test_size=self.holdout, stratify=labels, random_state=self.random_state
        )
        return parts[0], parts[1]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Calibrated probabilities ``(N, K)``."""
        check_is_fitted(self)
        logits, _ = _logits_of(self.estimator_, X)
        with torch.no_grad():
            probabilities: NDArray[np.float64] = self.calibrator_(logits).softmax(1).numpy()
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """The most probable labels ``(N,)``."""
        probabilities = self.predict_proba(X)
        labels: NDArray[Any] = self.classes_[probabilities.argmax(1)]
        return labels

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import get_tags

        tags = super().__sklearn_tags__()
        tags.input_tags = get_tags(self.estimator).input_tags
        return tags
