"""A calibrated scikit-learn classifier: scikit-learn's own checks, and what calibration is for."""

# ruff: noqa: N806 (scikit-learn's matrix is called X)

import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris, make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict, train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from calibrant.calibrators import CALIBRATORS, Temperature, choose
from calibrant.integrations.sklearn import CalibratedClassifier, _copies, calibration_scorer
from calibrant.layout import as_logits

# The checks' data are tiny: some are separable, some are noise.
pytestmark = pytest.mark.filterwarnings("ignore:the temperature stopped at its bound:UserWarning")


@parametrize_with_checks(
    [
        CalibratedClassifier(LogisticRegression(), random_state=0),
        CalibratedClassifier(GaussianNB(), method="isotonic", cv=2, random_state=0),
    ],
    # Copies of a sample go into other folds than its weight would.
    expected_failed_checks=lambda _: {
        "check_sample_weight_equivalence_on_dense_data": "folds differ",
        "check_sample_weight_equivalence_on_sparse_data": "folds differ",
    },
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def problem():
    """Features that repeat one another, which makes naive Bayes overconfident; labels are names."""
    X, y = make_classification(
        2000, n_features=20, n_informative=4, n_redundant=14, n_classes=3, flip_y=0.1, random_state=0
    )
    return train_test_split(X, np.array(["ash", "elm", "oak"])[y], test_size=0.5, random_state=0)


@pytest.mark.parametrize("method", CALIBRATORS)
def test_every_method_beats_an_overconfident_classifier(problem, method):
    X, X_test, y, y_test = problem
    fitted = CalibratedClassifier(GaussianNB(), method=method, random_state=0).fit(X, y)
    probabilities = fitted.predict_proba(X_test)
    assert probabilities.shape == (1000, 3)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-9)
    assert fitted.classes_.tolist() == ["ash", "elm", "oak"]
    assert (fitted.predict(X_test) == fitted.classes_[probabilities.argmax(1)]).all()
    before, after = (-calibration_scorer()(each, X_test, y_test) for each in (fitted.estimator_, fitted))
    assert after == pytest.approx(before) if method == "identity" else after < 0.6 * before
    if fitted.calibrator_.preserves_order:
        assert (fitted.predict(X_test) == fitted.estimator_.predict(X_test)).all()


def test_fits_the_calibrator_to_what_the_classifier_has_not_seen(problem):
    X, _, y, _ = problem
    fitted = CalibratedClassifier(GaussianNB(), holdout=0.3, random_state=5).fit(X, y)
    train, held_out = train_test_split(np.arange(len(y)), test_size=0.3, stratify=y, random_state=5)
    classifier = GaussianNB().fit(X[train], y[train])
    logits = as_logits(torch.from_numpy(classifier.predict_proba(X[held_out])))
    target = torch.from_numpy(np.searchsorted(classifier.classes_, y[held_out]))
    assert torch.equal(fitted.calibrator_.temperature, Temperature().fit(logits, target).temperature)


def test_a_classifier_fitted_before_stays_as_it_is(problem):
    X, X_test, y, y_test = problem
    classifier = GaussianNB().fit(X, y)
    means = classifier.theta_.copy()
    fitted = CalibratedClassifier(classifier, prefit=True).fit(X_test, y_test)
    assert fitted.estimator_ is classifier
    assert (classifier.theta_ == means).all()
    logits = as_logits(torch.from_numpy(classifier.predict_proba(X_test)))
    target = torch.from_numpy(np.searchsorted(classifier.classes_, y_test))
    assert torch.equal(fitted.calibrator_.temperature, Temperature().fit(logits, target).temperature)


def test_a_part_of_the_classes_suffices_for_a_classifier_fitted_before(problem):
    X, X_test, y, y_test = problem
    some = y_test != "elm"
    fitted = CalibratedClassifier(GaussianNB().fit(X, y), prefit=True).fit(X_test[some], y_test[some])
    assert fitted.classes_.tolist() == ["ash", "elm", "oak"]
    assert fitted.predict_proba(X_test).shape == (1000, 3)


def test_the_same_seed_gives_the_same(problem):
    X, X_test, y, _ = problem
    once, again, other = (
        CalibratedClassifier(GaussianNB(), random_state=seed).fit(X, y).predict_proba(X_test)
        for seed in (1, 1, 2)
    )
    assert (once == again).all()
    assert (once != other).any()


def test_goes_through_pipelines_searches_clones_and_pickles(problem):
    X, X_test, y, _ = problem
    calibrated = CalibratedClassifier(make_pipeline(StandardScaler(), GaussianNB()), random_state=0)
    search = GridSearchCV(
        calibrated,
        {"method": ["identity", "temperature"], "estimator__gaussiannb__var_smoothing": [1e-9, 1e-3]},
        scoring="neg_log_loss",
        cv=2,
    ).fit(X, y)
    assert search.best_params_["method"] == "temperature"
    best = search.best_estimator_
    copy = pickle.loads(pickle.dumps(best))
    assert (copy.predict_proba(X_test) == best.predict_proba(X_test)).all()
    assert clone(best).get_params()["method"] == "temperature"


def test_options_reach_the_calibrator(problem):
    X, _, y, _ = problem
    fitted = CalibratedClassifier(GaussianNB(), method="spline", options={"knots": 4}).fit(X, y)
    assert fitted.calibrator_.knots == 4


def test_auto_takes_what_choose_takes(problem):
    X, X_test, y, _ = problem
    classifier = CalibratedClassifier(GaussianNB(), method="auto", random_state=5, options={"folds": 3})
    fitted = classifier.fit(X, y)
    train, held_out = train_test_split(np.arange(len(y)), test_size=0.2, stratify=y, random_state=5)
    base = GaussianNB().fit(X[train], y[train])
    logits = as_logits(torch.from_numpy(base.predict_proba(X[held_out])))
    target = torch.from_numpy(np.searchsorted(base.classes_, y[held_out]))
    expected = choose(logits, target, folds=3)
    assert fitted.calibrator_.key == expected.key != "identity"
    test = as_logits(torch.from_numpy(base.predict_proba(X_test)))
    assert np.allclose(fitted.predict_proba(X_test), expected(test).softmax(1).numpy())
    with pytest.raises(TypeError, match="unheard_of"):
        clone(classifier).set_params(options={"unheard_of": 3}).fit(X, y)


def test_probabilities_of_zero_are_no_obstacle(problem):
    X, X_test, y, _ = problem
    forest = RandomForestClassifier(5, random_state=0)
    for method in ("temperature", "beta", "structured-matrix"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\d+ of 200 true classes have a probability of 0")
            fitted = CalibratedClassifier(forest, method=method, random_state=0).fit(X, y)
        assert np.isfinite(fitted.predict_proba(X_test)).all()


@pytest.mark.parametrize("labels", [[False, True], [3, 7], ["no", "yes"]])
def test_binary_labels_of_any_kind(labels):
    X, y = make_classification(200, flip_y=0.2, random_state=0)
    y = np.array(labels)[y]
    fitted = CalibratedClassifier(LogisticRegression(), random_state=0).fit(X, y)
    assert fitted.classes_.tolist() == labels
    assert set(fitted.predict(X).tolist()) == set(labels)
    assert fitted.score(X, y) > 0.8


class DecisionOnly(ClassifierMixin, BaseEstimator):
    def fit(self, X, y):  # noqa: N803
        self.classes_ = np.unique(y)
        return self

    def predict(self, X):  # noqa: N803
        return np.zeros(len(X))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("options", [{}, {"cv": 3}], ids=["holdout", "cv"])
def test_classifiers_with_a_decision_function(options, classes):
    X, y = make_classification(
        3000, n_features=8, n_informative=6, n_classes=classes, flip_y=0.1, random_state=0
    )
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.5, random_state=0)
    for method in ("temperature", "platt"):
        fitted = CalibratedClassifier(LinearSVC(), method=method, random_state=0, **options).fit(X, y)
        probabilities = fitted.predict_proba(X_test)
        assert probabilities.shape == (1500, classes)
        assert -calibration_scorer()(fitted, X_test, y_test) < 0.1
        theirs = CalibratedClassifierCV(LinearSVC(), ensemble=False).fit(X, y)
        assert log_loss(y_test, probabilities) < log_loss(y_test, theirs.predict_proba(X_test)) + 0.03
    fitted = CalibratedClassifier(LinearSVC(), random_state=0).fit(X, y)
    assert (fitted.predict(X_test) == fitted.estimator_.predict(X_test)).all()


def test_one_decision_for_each_pair_of_classes_is_refused():
    X, y = make_classification(300, n_features=8, n_informative=6, n_classes=4, random_state=0)
    machine = SVC(decision_function_shape="ovo")
    with pytest.raises(ValueError, match="SVC gives 6 decision values for 4 classes: expected one for each"):
        CalibratedClassifier(machine, random_state=0).fit(X, y)


def test_cross_validation_uses_all_data(problem):
    X, X_test, y, y_test = problem
    fitted = CalibratedClassifier(GaussianNB(), cv=4, random_state=3).fit(X, y)
    folds = StratifiedKFold(4, shuffle=True, random_state=3)
    out_of_fold = cross_val_predict(GaussianNB(), X, y, cv=folds, method="predict_proba")
    target = torch.from_numpy(np.searchsorted(fitted.classes_, y))
    expected = Temperature().fit(as_logits(torch.from_numpy(out_of_fold)), target)
    torch.testing.assert_close(fitted.calibrator_.temperature, expected.temperature)
    assert (fitted.estimator_.theta_ == GaussianNB().fit(X, y).theta_).all()
    splitter = CalibratedClassifier(GaussianNB(), cv=folds).fit(X, y)
    assert torch.equal(splitter.calibrator_.temperature, fitted.calibrator_.temperature)
    # One hold-out has fewer data for either part.
    isotonic = [
        CalibratedClassifier(GaussianNB(), method="isotonic", random_state=0, **options).fit(X, y)
        for options in ({"cv": 5}, {})
    ]
    crossed, held_out = (log_loss(y_test, each.predict_proba(X_test)) for each in isotonic)
    assert crossed < held_out


@pytest.mark.parametrize("options", [{}, {"cv": 4}, {"prefit": True}], ids=["holdout", "cv", "prefit"])
@pytest.mark.parametrize("method", ["temperature", "isotonic", "platt"])
def test_weights_count_as_copies(problem, method, options):
    X, X_test, y, y_test = problem
    rare = np.arange(len(y)) % 5 == 0
    weight = np.where(rare, 3, 1)
    estimator = GaussianNB().fit(X_test, y_test)
    fitted = CalibratedClassifier(estimator, method=method, random_state=0, **options)
    plain, weighted = (clone_of(fitted).fit(X, y, sample_weight=each) for each in (None, weight))
    uniform = clone_of(fitted).fit(X, y, np.ones(len(y)))
    scaled = clone_of(fitted).fit(X, y, 0.25 * weight)
    found = [each.predict_proba(X_test) for each in (plain, weighted, uniform, scaled)]
    assert (found[2] == found[0]).all()
    assert np.abs(found[1] - found[0]).max() > 1e-3
    if method != "platt":  # its targets depend on the number of samples
        assert np.abs(found[3] - found[1]).max() < 1e-6
    if "prefit" in options:
        copies = np.repeat(np.arange(len(y)), weight)
        expected = clone_of(fitted).fit(X[copies], y[copies]).predict_proba(X_test)
        np.testing.assert_allclose(found[1], expected, atol=1e-9)


def clone_of(classifier):
    """Like `clone`, but with the same fitted estimator."""
    return CalibratedClassifier(**classifier.get_params(deep=False))


def test_weights_that_are_no_whole_numbers_are_approximated(problem):
    X, X_test, y, y_test = problem
    classifier = GaussianNB().fit(X_test, y_test)
    weight = np.random.default_rng(0).uniform(0, 2, len(y)) * np.where(y == "ash", 3, 1)
    weight[:100] = 0
    fitted = CalibratedClassifier(classifier, prefit=True).fit(X, y, weight)
    fine = np.repeat(np.arange(len(y)), (200 * weight).round().astype(int))
    expected = CalibratedClassifier(classifier, prefit=True).fit(X[fine], y[fine])
    temperature, exact = fitted.calibrator_.temperature, expected.calibrator_.temperature
    assert abs(temperature / exact - 1) < 0.01
    plain = CalibratedClassifier(classifier, prefit=True).fit(X, y).calibrator_.temperature
    assert abs(plain / exact - 1) > 0.01


def test_large_weights_do_not_multiply_the_data():
    """Whole-number weights too: the work stays within 20 copies of a row on average."""
    for weight in (np.array([1.0] + [1000.0] * 99), np.array([1.0, 50.0] * 50)):
        copies = np.bincount(_copies(weight), minlength=100)
        assert copies.sum() == 2000
        assert np.abs(copies - weight * 20 / weight.mean()).max() <= 1
    few = np.array([1.0, 39.0] * 50)  # 20 on average: exact
    assert (np.bincount(_copies(few)) == few).all()


def test_weights_that_cannot_be_used(problem):
    X, _, y, _ = problem
    ones = np.ones(len(y))
    with pytest.raises(ValueError, match="Negative values"):
        CalibratedClassifier(GaussianNB()).fit(X, y, -ones)
    with pytest.raises(ValueError, match="method='auto' takes no sample_weight"):
        CalibratedClassifier(GaussianNB(), method="auto").fit(X, y, ones)
    neighbours = CalibratedClassifier(KNeighborsClassifier(), method="isotonic", random_state=0)
    with pytest.warns(UserWarning, match="KNeighborsClassifier takes no sample_weight: only the calibrator"):
        neighbours.fit(X, y, ones + (y == "ash"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"method": "temprature"}, ValueError, "did you mean 'temperature'"),
        ({"method": "spline", "options": {"knot": 3}}, TypeError, "did you mean 'knots'"),
        ({"holdout": 0}, ValueError, "holdout must be a fraction of the data, between 0 and 1, got 0"),
        ({"holdout": 1.0}, ValueError, "between 0 and 1, got 1.0"),
        ({"holdout": 30}, ValueError, "between 0 and 1, got 30"),
        ({"estimator": DecisionOnly()}, TypeError, "DecisionOnly has neither predict_proba nor decision_"),
        ({"cv": 1}, ValueError, "cv must be a whole number of at least 2, or a splitter, got 1"),
        ({"cv": 60}, ValueError, "class 0 has 50 samples, but 60 folds need at least 60 of each"),
        ({"cv": 3, "prefit": True}, ValueError, "prefit=True fits no classifier, so cv has no meaning"),
        ({"prefit": True}, NotFittedError, "not fitted"),
    ],
)
def test_errors(options, kind, message):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(kind, match=message):
        CalibratedClassifier(**({"estimator": GaussianNB()} | options)).fit(X, y)


def test_labels_that_cannot_be_used():
    X, y = load_iris(return_X_y=True)
    calibrated = CalibratedClassifier(GaussianNB())
    with pytest.raises(ValueError, match="at least 2 classes, got 1 class"):
        calibrated.fit(X, np.zeros(150, dtype=int))
    with pytest.raises(ValueError, match="class 2 has 1 sample, but each needs at least 2"):
        calibrated.fit(X[:101], y[:101])
    with pytest.raises(ValueError, match="Unknown label type"):
        calibrated.fit(X, X[:, 0])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        calibrated.fit(X, y[:100])
    with pytest.raises(NotFittedError):
        calibrated.predict(X)
    half = CalibratedClassifier(GaussianNB().fit(X[:100], y[:100]), prefit=True)
    with pytest.raises(ValueError, match="not among the classes: 2"):
        half.fit(X, y)
