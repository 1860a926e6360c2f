"""Classifiers of scikit-learn, in scikit-learn's own searches, against figures computed by hand."""

# ruff: noqa: N803, N806 (scikit-learn's matrix is called X)

import importlib
import pickle
import sys
from functools import partial

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris, make_classification
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.multioutput import MultiOutputClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier

from calibrant import metrics
from calibrant.integrations.sklearn import ReliabilityDisplay, calibration_scorer, evaluate_estimator
from tests.programs import PREPARED

KINDS = [
    "ece",
    "mce",
    "ece_l2",
    "adaptive_ece",
    "classwise_ece",
    "classwise_mce",
    "debiased_ece",
    "debiased_ece_l1",
    "sweep_ece",
    "sweep_ece_l1",
    "sweep_ece_width",
    "sweep_ece_width_l1",
    "smooth_ece",
]
NAMES = np.array(["setosa", "versicolor", "virginica"])


@pytest.fixture
def iris():
    X, y = load_iris(return_X_y=True)
    return X[:, :2], NAMES[y]


@pytest.fixture
def binary():
    X, y = make_classification(400, n_features=5, flip_y=0.2, random_state=0)
    return X, np.where(y == 1, 7, 3)


def ece_by_numpy(probabilities, correct, bins=15):
    confidence = probabilities.max(1)
    place = np.ceil(confidence * bins - 1e-12)
    return sum(abs((confidence - correct)[place == b].sum()) for b in range(bins + 1)) / len(confidence)


def by_numpy(estimator, X, y, bins=15):
    return ece_by_numpy(estimator.predict_proba(X), estimator.predict(X) == y, bins)


# -------------------------------------------------------------------------------------------- the scorer


@pytest.mark.parametrize("bins", [10, 15, 7])
@pytest.mark.parametrize("data", ["iris", "binary"])
def test_the_score_is_minus_the_error(data, bins, request):
    X, y = request.getfixturevalue(data)
    estimator = GaussianNB().fit(X, y)
    score = calibration_scorer("ece", bins=bins)(estimator, X, y)
    assert isinstance(score, float)
    assert score == pytest.approx(-by_numpy(estimator, X, y, bins), abs=1e-12)
    assert score < -0.01


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_metric_of_that_name(iris, kind):
    X, y = iris
    estimator = GaussianNB().fit(X, y)
    logits = torch.from_numpy(estimator.predict_proba(X)).log()
    target = torch.from_numpy(np.searchsorted(NAMES, y))
    options = {} if kind.startswith(("sweep_ece", "smooth_ece")) else {"bins": 10}
    if "_width" in kind:
        options["binning"] = "equal-width"
    if kind.endswith("_l1"):
        options["norm"] = 1
    function = getattr(metrics, kind.removesuffix("_l1").removesuffix("_width"))
    expected = function(logits, target, **options)
    assert calibration_scorer(kind, bins=10)(estimator, X, y) == pytest.approx(-expected, rel=1e-9)


def test_cross_validation(iris):
    X, y = iris
    scores = cross_val_score(GaussianNB(), X, y, scoring=calibration_scorer("ece"), cv=3)
    assert scores.shape == (3,)
    assert (scores < 0).all()
    several = cross_validate(
        GaussianNB(), X, y, scoring={"accuracy": "accuracy", "ece": calibration_scorer()}, cv=3
    )
    np.testing.assert_allclose(several["test_ece"], scores)


def test_a_search_prefers_the_better_calibrated(binary):
    X, y = binary
    search = GridSearchCV(
        DecisionTreeClassifier(random_state=0),
        {"max_depth": [2, None]},
        scoring=calibration_scorer("ece"),
        cv=3,
    ).fit(X, y)
    assert search.best_params_ == {"max_depth": 2}  # a full tree is certain of everything
    assert evaluate_estimator(search, X, y, resamples=0).name == "GridSearchCV"


def test_a_scorer_can_be_sent_to_another_process(iris):
    scorer = calibration_scorer("adaptive_ece", bins=9)
    copy = pickle.loads(pickle.dumps(scorer))
    assert copy == scorer
    estimator = GaussianNB().fit(*iris)
    assert copy(estimator, *iris) == scorer(estimator, *iris)


def test_certain_predictions_are_certain(binary):
    X, y = binary
    wrong = np.where(y == 7, 3, 7)
    tree = DecisionTreeClassifier(random_state=0).fit(X, y)
    assert set(np.unique(tree.predict_proba(X))) == {0.0, 1.0}
    assert calibration_scorer()(tree, X, y) == pytest.approx(0, abs=1e-15)
    assert calibration_scorer()(tree, X, wrong) == pytest.approx(-1, abs=1e-15)


def test_a_part_of_the_classes_is_enough(iris):
    X, y = iris
    estimator = GaussianNB().fit(X, y)
    some = y != "setosa"
    expected = -by_numpy(estimator, X[some], y[some])
    assert calibration_scorer()(estimator, X[some], y[some].tolist()) == pytest.approx(expected, abs=1e-12)


def import_anew():
    """Import the module as if neither calibrant nor matplotlib had been; fail if matplotlib is loaded."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("calibrant", "matplotlib"):
            del sys.modules[name]
    importlib.import_module("calibrant.integrations.sklearn")
    sys.exit("matplotlib" in sys.modules)


def test_scoring_does_not_load_matplotlib():
    process = PREPARED.Process(target=import_anew)
    process.start()
    process.join()
    assert process.exitcode == 0


# ---------------------------------------------------------------------------------------- the evaluation


@pytest.mark.parametrize("data", ["iris", "binary"])
def test_an_evaluation_of_an_estimator(data, request):
    X, y = request.getfixturevalue(data)
    estimator = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)
    evaluation = evaluate_estimator(estimator, X, y, name="logistic", bins=10, resamples=0)
    assert evaluation.name == "logistic"
    assert evaluation.samples == len(X)
    assert evaluation.num_classes == len(estimator.classes_)
    assert evaluation.bins == 10
    assert evaluation.accuracy == pytest.approx(estimator.score(X, y))
    assert evaluation.ece == pytest.approx(by_numpy(estimator, X, y, 10), abs=1e-12)
    assert [figures.name for figures in evaluation.classes] == [str(label) for label in estimator.classes_]
    assert [figures.count for figures in evaluation.classes] == [(y == k).sum() for k in estimator.classes_]
    true = estimator.predict_proba(X)[np.arange(len(X)), np.searchsorted(estimator.classes_, y)]
    assert evaluation.nll == pytest.approx(-np.log(true).mean(), rel=1e-9)


def test_names_can_be_given(binary):
    X, y = binary
    evaluation = evaluate_estimator(GaussianNB().fit(X, y), X, y, class_names=["no", "yes"], resamples=20)
    assert evaluation.intervals["ece"][0] < evaluation.intervals["ece"][1]
    assert evaluation.name == "GaussianNB"
    assert [figures.name for figures in evaluation.classes] == ["no", "yes"]


def test_impossible_labels_have_a_finite_likelihood(binary):
    X, y = binary
    tree = DecisionTreeClassifier(random_state=0).fit(X, y)
    evaluation = evaluate_estimator(tree, X, np.where(y == 7, 3, 7), resamples=0)
    assert evaluation.nll == pytest.approx(-np.log(float(np.finfo(np.float32).tiny)))


# ------------------------------------------------------------------------------------------- the display


def test_a_display_of_an_estimator(iris):
    X, y = iris
    estimator = GaussianNB().fit(X, y)
    ax = Figure().subplots()
    display = ReliabilityDisplay.from_estimator(estimator, X, y, bins=10, ax=ax)
    assert display.ax_ is ax
    assert display.figure_ is ax.figure
    assert ax.get_title() == "GaussianNB"
    expected = by_numpy(estimator, X, y, 10)
    assert display.ece == pytest.approx(expected, abs=1e-12)
    assert any(f"{100 * expected:.2f} %" in text.get_text() for text in ax.texts)
    confidence = estimator.predict_proba(X).max(1)
    np.testing.assert_array_equal(
        display.reliability.count, np.histogram(-confidence, -np.linspace(1, 0, 11))[0][::-1]
    )


def test_a_display_of_predictions_equals_that_of_the_estimator(iris):
    X, y = iris
    estimator = GaussianNB().fit(X, y)
    by_estimator = ReliabilityDisplay.from_estimator(estimator, X, y, ax=Figure().subplots(), name="bayes")
    probabilities = estimator.predict_proba(X)
    by_name = ReliabilityDisplay.from_predictions(
        probabilities, y, classes=estimator.classes_, ax=Figure().subplots(), name="bayes"
    )
    by_number = ReliabilityDisplay.from_predictions(
        probabilities.tolist(), np.searchsorted(NAMES, y), ax=Figure().subplots()
    )
    assert by_estimator.reliability == by_name.reliability == by_number.reliability
    assert by_name.ax_.get_title() == by_estimator.ax_.get_title() == "bayes"
    assert by_number.ax_.get_title() == ""


def test_without_axes_there_is_a_new_figure_each_time():
    display = ReliabilityDisplay.from_predictions([[0.9, 0.1], [0.2, 0.8]], [0, 0])
    first = display.figure_
    assert pyplot.fignum_exists(first.number)
    assert display.plot() is display
    assert display.figure_ is not first
    ax = Figure().add_subplot()
    assert display.plot(ax).ax_ is ax
    pyplot.close("all")


# ----------------------------------------------------------------------------------------------- errors


USES = {
    "scorer": calibration_scorer(),
    "evaluation": partial(evaluate_estimator, resamples=0),
    "display": ReliabilityDisplay.from_estimator,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
class TestErrors:
    def test_unknown_labels(self, use, iris):
        X, y = iris
        estimator = GaussianNB().fit(X[:100], y[:100])
        with pytest.raises(
            ValueError, match="not among the classes: 'virginica'; the classes are 'setosa', 'v"
        ):
            use(estimator, X, y)
        with pytest.raises(ValueError, match=r"not among the classes: 0, 1; the classes are 'setosa'"):
            use(estimator, X[:100], load_iris().target[:100])

    def test_shapes(self, use, iris):
        X, y = iris
        estimator = GaussianNB().fit(X, y)
        with pytest.raises(ValueError, match=r"y must have shape \(150,\), .*got \(149,\)"):
            use(estimator, X, y[1:])
        with pytest.raises(ValueError, match=r"got \(150, 1\)"):
            use(estimator, X, y[:, None])

    def test_no_probabilities(self, use, binary):
        X, y = binary
        for estimator in (LinearSVC().fit(X, y), LinearRegression().fit(X, y)):
            with pytest.raises(TypeError, match=f"{type(estimator).__name__} gives no probabilities"):
                use(estimator, X, y)
        use(CalibratedClassifierCV(LinearSVC()).fit(X, y), X, y)
        pyplot.close("all")

    def test_not_fitted(self, use, binary):
        with pytest.raises(NotFittedError):
            use(GaussianNB(), *binary)

    def test_several_outputs(self, use, binary):
        X, y = binary
        estimator = MultiOutputClassifier(GaussianNB()).fit(X, np.stack([y, y], 1))
        with pytest.raises(TypeError, match="one output"):
            use(estimator, X, y)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ([0.1, 0.9], r"shape \(N, K\), got \(2,\); of a binary classifier pass both columns"),
        ([[0.5, 0.6], [0.5, 0.5]], "add up to 1"),
        ([[-0.5, 1.5], [0.5, 0.5]], "at least 0"),
        ([[np.nan, 1.0], [0.5, 0.5]], "at least 0 and add up to 1"),
        ([[[0.5, 0.5]]], r"got \(1, 1, 2\)$"),
    ],
)
def test_what_are_no_probabilities(probabilities, message):
    with pytest.raises(ValueError, match=message):
        ReliabilityDisplay.from_predictions(probabilities, [0, 1])


def test_clear_errors():
    with pytest.raises(ValueError, match=r"kind must be one of 'ece', .*, got 'brier'"):
        calibration_scorer("brier")
    with pytest.raises(ValueError, match="bins must be a whole number of at least 1, got 0"):
        calibration_scorer(bins=0)
    with pytest.raises(ValueError, match="2 columns, but there are 3 classes"):
        ReliabilityDisplay.from_predictions([[0.5, 0.5]], ["a"], classes=["a", "b", "c"])
