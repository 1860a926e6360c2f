"""A metric is one function and one record; everything else follows."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from sklearn.dummy import DummyClassifier

import calibrant.metrics
from calibrant import Evaluation, Evaluator, evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.integrations.sklearn import calibration_scorer
from calibrant.integrations.torchmetrics import CalibrationError
from calibrant.metrics import METRICS, Metric
from calibrant.metrics.catalogue import RESERVED

DOCUMENT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")

OUTSIDE = {
    "mean_gap": Metric(
        "Mean gap",
        "The distance between mean confidence and accuracy.",
        source="confidences",
        function=lambda confidences, options: confidences.equal_width(1).gap.abs().sum(-1),
    ),
    "mean_confidence": Metric(
        "Mean confidence",
        "The mean probability of the top class.",
        source="elements",
        function=lambda predictions, options: predictions.confidence,
        group="scores",
    ),
    "squared_confidence": Metric(
        "Squared confidence",
        "The mean confidence, squared.",
        source="mean_confidence",
        function=lambda confidence, options: confidence.square(),
        group="scores",
    ),
    "worst_accuracy": Metric(
        "Worst accuracy",
        "The smallest accuracy of a class.",
        source="counts",
        function=lambda counts, options: counts.accuracy.nan_to_num(1.0).amin(-1),
        group="recognition",
        higher_is_better=True,
    ),
    "largest_gap": Metric(
        "Largest gap",
        "The largest gap between the mean probability of a class and its frequency.",
        source="gaps",
        function=lambda gaps, options: gaps.gap.sum(-1).abs().amax(-1) / gaps.samples,
    ),
    "median_confidence": Metric(
        "Median confidence",
        "The median probability of the top class.",
        source="elements",
        streamed=False,
        function=lambda predictions, options: predictions.confidence.median(),
        group="scores",
    ),
    "distance_from_mean": Metric(
        "Distance from the mean",
        "The mean distance of the confidence from its mean.",
        source="elements",
        streamed=False,
        function=lambda predictions, options: (predictions.confidence - predictions.confidence.mean()).abs(),
        group="scores",
    ),
}
STREAMED = ["mean_gap", "mean_confidence", "squared_confidence", "worst_accuracy", "largest_gap"]
NO_INTERVAL = ["median_confidence"]


@pytest.fixture
def outside(monkeypatch):
    for name, metric in OUTSIDE.items():
        monkeypatch.setitem(METRICS, name, metric)


def batch(scale=2.0):
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(400, 4, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return scale * logits, target


def expected(logits, target):
    probability = logits.softmax(1)
    confidence, prediction = probability.max(1)
    correct = (prediction == target).double()
    frequency = torch.bincount(target, minlength=4).double() / len(target)
    values = {
        "mean_gap": (confidence.mean() - correct.mean()).abs(),
        "mean_confidence": confidence.mean(),
        "squared_confidence": confidence.mean() ** 2,
        "worst_accuracy": min(correct[target == k].mean() for k in range(4)),
        "largest_gap": (probability.mean(0) - frequency).abs().max(),
        "median_confidence": confidence.median(),
        "distance_from_mean": (confidence - confidence.mean()).abs().mean(),
    }
    return {name: float(value) for name, value in values.items()}


@pytest.mark.usefixtures("outside")
def test_a_metric_from_outside_is_evaluated_with_its_interval():
    logits, target = batch()
    evaluation = evaluate(logits, target, resamples=50)
    for name, value in expected(logits, target).items():
        figure = evaluation.figures[name]
        assert getattr(evaluation, name) == evaluation.metrics[name] == figure.value
        assert figure.value == pytest.approx(value, rel=1e-9), name
        assert (figure.interval is None) == (name in NO_INTERVAL), name
        assert len(figure.replicates) == (0 if name in NO_INTERVAL else 50), name
    low, high = evaluation.intervals["mean_confidence"]
    assert evaluation.intervals["squared_confidence"] == pytest.approx((low**2, high**2))


@pytest.mark.usefixtures("outside")
def test_a_metric_from_outside_is_streamed():
    logits, target = batch()
    first, second = Evaluator(resamples=50), Evaluator(resamples=50)
    first.update(logits[:130], target[:130])
    second.update(logits[130:], target[130:])
    streamed = (first + second).compute()
    for name, value in expected(logits, target).items():
        assert METRICS[name].streamed == (name in STREAMED)
        assert streamed.metrics[name] == (pytest.approx(value, rel=1e-9) if name in STREAMED else None)
    assert {"mean_gap", "mean_confidence", "squared_confidence", "worst_accuracy"} <= set(streamed.intervals)
    per_image = evaluate(logits.view(4, 100, 4).mT, target.view(4, 100), per_image=True)
    parts = [expected(*part) for part in zip(logits.split(100), target.split(100), strict=True)]
    for name in STREAMED:
        mean = sum(part[name] for part in parts) / 4
        assert per_image.metrics[name] == pytest.approx(mean, rel=1e-9), name


@pytest.mark.usefixtures("outside")
def test_a_metric_from_outside_is_saved_printed_and_compared():
    (logits, target), (sharper, _) = batch(), batch(5.0)
    evaluation, other = evaluate(logits, target, resamples=50), evaluate(sharper, target, resamples=50)
    assert Evaluation.from_json(evaluation.to_json()) == evaluation
    printed = str(evaluation)
    for name, metric in OUTSIDE.items():
        assert re.search(rf"{metric.label} .*{re.escape(metric.text(evaluation.metrics[name]))}", printed)
    assert evaluation.compare(other)["mean_gap"].better == "first"
    methods = Method("a", (evaluation,) * 2), Method("b", (other,) * 2)
    comparison = json.loads(Comparison("toy", (0, 1), methods).to_json())
    assert comparison["before"]["b"]["mean_gap"]["mean"] == pytest.approx(other.mean_gap)


@pytest.mark.usefixtures("outside")
def test_a_calibration_error_from_outside_is_known_to_torchmetrics_and_scikit_learn():
    logits, target = batch()
    metric = CalibrationError("mean_gap")
    metric.update(logits, target)
    assert metric.compute().item() == pytest.approx(expected(logits, target)["mean_gap"], rel=1e-9)
    classifier = DummyClassifier(strategy="prior").fit([[0]] * 400, target)
    for kind in ("mean_gap", "largest_gap"):
        assert calibration_scorer(kind)(classifier, [[0]] * 400, target) == pytest.approx(0, abs=1e-9)


def test_unknown_attributes_are_refused():
    evaluation = evaluate(*batch(), resamples=0)
    with pytest.raises(AttributeError, match="no attribute or metric 'mean_gap'"):
        evaluation.mean_gap  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute or metric 'ECE' \(did you mean 'ece'\?\)"):
        evaluation.ECE  # noqa: B018
    assert set(METRICS) <= set(dir(evaluation))


OWN = OUTSIDE["mean_confidence"]


@pytest.mark.parametrize(
    ("name", "metric", "message"),
    [
        ("own", print, "'own': expected an instance of calibrant's Metric, got "),
        ("own", replace(OWN, function=0.5), "'own': the function must be callable, got 0.5"),
        ("own", replace(OWN, source="element"), r"'own': the source must be .*'element' \(did you mean"),
        ("own", replace(OWN, source="own"), "'own': the source must be .* added before, got 'own'"),
        ("my-metric", OWN, "'my-metric': expected a Python name"),
        ("class", OWN, "'class': expected a Python name"),
        ("__dict__", OWN, "'__dict__': expected a Python name that begins with a letter"),
        ("own", replace(OWN, label="ECE"), "'own': another metric has the label 'ECE'"),
        ("own", replace(OWN, label=" ece"), "'own': another metric has the label ' ece'"),
        ("name", OWN, "'name': evaluations have another attribute of this name"),
        ("samples", OWN, "'samples': evaluations have another attribute of this name"),
        ("replicates", OWN, "'replicates': evaluations have another attribute of this name"),
    ],
)
def test_metrics_that_could_not_be_computed_or_stored_are_refused(name, metric, message):
    with pytest.raises((TypeError, ValueError), match=message):
        METRICS[name] = metric
    assert name not in METRICS


def test_all_other_attributes_of_evaluations_are_reserved():
    public = {name for name in dir(Evaluation) if not name.startswith("_")}
    assert set(RESERVED.split()) == {*public, *(each.name for each in fields(Evaluation)), "format"}


@pytest.mark.parametrize("source", ["elements", "confidences", "ranking", "counts", "gaps", "brier"])
@pytest.mark.parametrize(
    ("result", "got"),
    [(0.5, "float"), ("0.5", "str"), (None, "NoneType"), (torch.ones(7), r"\(7,\)")],
    ids=["float", "text", "none", "shape"],
)
def test_what_a_function_must_return(source, result, got, monkeypatch):
    monkeypatch.setitem(METRICS, "own", replace(OWN, source=source, function=lambda *_: result))
    shape = r"\(400,\)" if source == "elements" else r"\(\)"
    with pytest.raises(ValueError, match=f"of the metric 'own' must return .* shape {shape} here, got {got}"):
        evaluate(*batch(), resamples=0)


def test_a_metric_must_have_a_value_for_every_resample(monkeypatch):
    own = replace(OWN, source="counts", function=lambda *_: torch.tensor(0.5))
    monkeypatch.setitem(METRICS, "own", own)
    with pytest.raises(ValueError, match=r"of the metric 'own' must return .* shape \(20,\) here, got \(\)"):
        evaluate(*batch(), resamples=20)


def test_records_are_complete():
    labels = [metric.label for metric in METRICS.values()]
    assert len(set(labels)) == len(labels)
    for metric in METRICS.values():
        assert metric.sentence.endswith(".")
        assert metric.group in ("recognition", "scores", "calibration", "selective")
        assert metric.source in ("confidences", "ranking", "counts", "gaps", "elements", *METRICS)


def test_the_documentation_describes_every_metric():
    meaning = DOCUMENT.split("## What the figures mean")[1].split("\n## ")[0]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", meaning, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert named == set(METRICS)
    functions = {name for name in METRICS if hasattr(calibrant.metrics, name)}
    assert {name for name in METRICS if name not in functions} == {
        "mean_iou_foreground",
        "nll_calibration",
        "nll_refinement",
        "brier_calibration",
        "brier_refinement",
        "debiased_ece_l1",  # arguments of debiased_ece and sweep_ece
        "sweep_ece_l1",
        "sweep_ece_width",
        "sweep_ece_width_l1",
    }
