"""AURC, AUGRC and the risk-coverage curve against their definitions, with and without ties."""

from itertools import pairwise, permutations
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from calibrant import evaluate
from calibrant.evaluation import Evaluator
from calibrant.metrics import (
    METRICS,
    Predictions,
    augrc,
    aurc,
    coverage_at_risk,
    risk_at_coverage,
    risk_coverage,
)


def of_outcomes(confidence, correct):
    """Logits of two classes with these confidences, and labels that make them right or wrong."""
    confidence = torch.as_tensor(confidence, dtype=torch.float64)
    logits = torch.stack([confidence.logit(), torch.zeros_like(confidence)], 1)
    return logits, 1 - torch.as_tensor(correct).long()


def random_outcomes(seed, size):
    generator = torch.Generator().manual_seed(seed)
    confidence = 0.5 + 0.5 * torch.rand(size, generator=generator, dtype=torch.float64)
    return confidence, torch.rand(size, generator=generator, dtype=torch.float64) < confidence


def risks(errors):
    """The risk of the first 1, 2, … N elements."""
    return np.cumsum(errors) / np.arange(1, len(errors) + 1)


def by_definition(errors):
    """AURC, AUGRC, risk at 80 % coverage and coverage at 5 % risk of errors by falling confidence."""
    size = len(errors)
    found = risks(errors)
    undetected = np.concatenate([[0.0], np.cumsum(errors) / size])
    within = np.flatnonzero(found <= 0.05 + 1e-12)
    return (
        found.mean(),
        ((undetected[1:] + undetected[:-1]) / 2).sum() / size,
        found[-(-8 * size // 10) - 1],
        (within[-1] + 1) / size if len(within) else 0.0,
    )


def figures(logits, target):
    predictions = Predictions.of(logits, target)
    return tuple(metric(predictions) for metric in (aurc, augrc, risk_at_coverage, coverage_at_risk))


@pytest.mark.parametrize("size", [1, 2, 5, 10, 333, 5000])
def test_without_ties_they_equal_their_definitions(size):
    confidence, correct = random_outcomes(size, size)
    errors = (~correct)[confidence.argsort(descending=True)].double().numpy()
    assert figures(*of_outcomes(confidence, correct)) == pytest.approx(by_definition(errors), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_with_ties_areas_are_means_over_all_orders(outcomes):
    """Every order of the data that falls in confidence is equally likely."""
    orders = [
        [not right for _, right in order]
        for order in permutations(outcomes)
        if all(first[0] >= second[0] for first, second in pairwise(order))
    ]
    wanted = np.mean([by_definition(np.array(errors, dtype=float))[:3] for errors in orders], 0)
    confidence = [0.6 + level / 10 for level, _ in outcomes]
    assert figures(*of_outcomes(confidence, [right for _, right in outcomes]))[:3] == pytest.approx(
        wanted, abs=1e-12
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=20), st.floats(0, 1))
def test_with_ties_the_coverage_is_the_largest_with_that_risk(outcomes, risk):
    logits, target = of_outcomes(
        [0.6 + level / 10 for level, _ in outcomes], [right for _, right in outcomes]
    )
    found = coverage_at_risk(logits, target, risk=risk)
    count = round(found * len(outcomes))
    assert found == pytest.approx(count / len(outcomes))
    expected = [
        risk_at_coverage(logits, target, coverage=number / len(outcomes))
        for number in range(1, len(outcomes) + 1)
    ]
    if count:
        assert expected[count - 1] <= risk + 1e-9
    assert all(value > risk - 1e-9 for value in expected[count:])


@pytest.mark.parametrize("levels", [3, 10_000])
def test_augrc_is_a_function_of_auroc_and_accuracy(levels):
    """The identity of Traub et al.; ties count one half."""
    confidence, correct = random_outcomes(0, 2000)
    confidence = 0.5 + (confidence - 0.5).mul(levels).ceil() / (2 * levels + 2)
    auroc = roc_auc_score(correct.numpy(), confidence.numpy())
    accuracy = correct.double().mean().item()
    wanted = (1 - auroc) * accuracy * (1 - accuracy) + (1 - accuracy) ** 2 / 2
    assert augrc(*of_outcomes(confidence, correct)) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2, 100, 3000])
def test_torch_uncertainty_leaves_out_the_first_element(seed, size):
    """Its areas are trapezoids over the coverages from 1/N to 1, divided by 1 - 1/N.

    This is a mean over N - 1 intervals in the place of one over N elements; the difference is at most 1/N.
    """
    confidence, correct = random_outcomes(seed, size)
    errors = (~correct)[confidence.argsort(descending=True)].double().numpy()
    coverage = np.arange(1, size + 1) / size
    theirs = np.trapezoid(risks(errors), coverage) / (1 - 1 / size)
    theirs_generalised = np.trapezoid(risks(errors) * coverage, coverage) / (1 - 1 / size)
    ours, ours_generalised, *_ = figures(*of_outcomes(confidence, correct))
    ends = (errors[0] + errors.mean()) / 2
    assert (size * ours - ends) / (size - 1) == pytest.approx(theirs, abs=1e-12)
    first = errors[0] / (2 * size**2)
    assert (ours_generalised - first) / (1 - 1 / size) == pytest.approx(theirs_generalised, abs=1e-12)
    assert abs(ours - theirs) <= 1 / size
    assert abs(ours_generalised - theirs_generalised) <= 1 / size


def test_a_stream_is_close():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20_000, 10, generator=generator)
    target = torch.multinomial((logits / 1.5).softmax(1), 1, generator=generator).squeeze(1)
    exact = evaluate(logits, target, resamples=0)
    evaluator = Evaluator(resamples=50)
    for part in zip(logits.split(3000), target.split(3000), strict=True):
        evaluator.update(*part)
    streamed = evaluator.compute()
    for name, tolerance in (("aurc", 1e-3), ("augrc", 1e-3), ("risk_at_coverage", 5e-3)):
        assert streamed.metrics[name] == pytest.approx(exact.metrics[name], rel=tolerance), name
        assert streamed.intervals[name][0] < exact.metrics[name] < streamed.intervals[name][1]
    assert streamed.coverage_at_risk == pytest.approx(exact.coverage_at_risk, abs=5e-3)


@pytest.fixture
def few_metrics():
    """Evaluations of these metrics only, since all of them would take most of the time."""
    names = ("nll", "aurc", "augrc", "risk_at_coverage", "coverage_at_risk")
    with patch.dict(METRICS, {name: METRICS[name] for name in names}, clear=True):
        yield


@pytest.mark.usefixtures("few_metrics")
@pytest.mark.parametrize("scale", [3, 20], ids=["many errors", "few errors"])
def test_intervals_cover_the_true_value(scale):
    """Models with a known posterior; with few errors, the figures are near their bounds."""
    generator = torch.Generator().manual_seed(1)

    def sample(size):
        logits = scale * torch.randn(size, 10, generator=generator)
        return logits, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)

    many = sample(100_000)
    truth = {each.__name__: each(*many) for each in (aurc, augrc, risk_at_coverage, coverage_at_risk)}
    covered = dict.fromkeys(truth, 0)
    for seed in range(20):
        evaluation = evaluate(*sample(500), resamples=100, seed=seed)
        for name, value in truth.items():
            low, high = evaluation.intervals[name]
            assert low <= getattr(evaluation, name) <= high
            covered[name] += low <= value <= high
    assert min(covered.values()) >= 16  # of 20: P < 0.3 % at a level of 95 %


def test_no_error_does_not_mean_that_there_will_be_none():
    evaluation = evaluate(*of_outcomes(torch.linspace(0.6, 0.99, 50), [True] * 50), resamples=100)
    assert evaluation.intervals["risk_at_coverage"] == pytest.approx((0.0, 1 - 0.025 ** (1 / 40)))
    assert evaluation.intervals["coverage_at_risk"] == (
        0.0,
        1.0,
    )  # 1 - 0.025^(1/50) is 7 %, and 5 % are allowed
    curve = evaluation.risk_coverage
    assert curve.risk_interval(0.8) == evaluation.intervals["risk_at_coverage"]
    assert curve.coverage_interval(0.1) == (1.0, 1.0)


def test_the_curve_has_the_risks_of_the_metric_and_exact_intervals():
    logits, target = of_outcomes(*random_outcomes(3, 250))
    curve = risk_coverage(logits, target, points=10)
    assert curve.coverage == pytest.approx([n / 10 for n in range(1, 11)])
    for coverage, risk, (low, high) in zip(curve.coverage, curve.risk, curve.interval, strict=True):
        assert risk == pytest.approx(risk_at_coverage(logits, target, coverage=coverage), abs=1e-12)
        assert low <= risk <= high
    # 20 elements and no error: an interval from 0 to 1 - 0.025^(1/20).
    curve = risk_coverage(*of_outcomes([0.9] * 20, [True] * 20), points=1)
    assert curve.interval == (pytest.approx((0.0, 1 - 0.025 ** (1 / 20))),)


def test_a_level_that_falls_on_an_element():
    """0.29 · 100 is 28.999999999999996, and 0.07 · 100 is 7.000000000000001."""
    logits, target = of_outcomes(torch.linspace(0.99, 0.51, 100), [True] * 71 + [False] * 29)
    assert coverage_at_risk(logits, target, risk=0.29) == 1.0
    assert risk_at_coverage(logits, target, coverage=0.71) == 0.0
    wrong_first = of_outcomes(torch.linspace(0.99, 0.51, 100), [True] * 7 + [False] + [True] * 92)
    assert risk_at_coverage(*wrong_first, coverage=0.07) == 0.0


def test_a_model_that_is_always_wrong_covers_nothing():
    logits, target = of_outcomes([0.9, 0.8, 0.7], [False] * 3)
    assert figures(logits, target) == pytest.approx((1.0, 0.5, 1.0, 0.0))


@pytest.mark.parametrize("coverage", [0, -0.1, 1.1, float("nan"), "all"])
def test_coverages_outside_the_range_are_refused(coverage):
    with pytest.raises((TypeError, ValueError), match="coverage must"):
        risk_at_coverage(torch.eye(2), torch.tensor([0, 1]), coverage=coverage)


def test_risks_outside_the_range_are_refused():
    with pytest.raises(ValueError, match=r"risk must lie in \[0, 1\]"):
        coverage_at_risk(torch.eye(2), torch.tensor([0, 1]), risk=2)
    with pytest.raises(ValueError, match="points must"):
        risk_coverage(torch.eye(2), torch.tensor([0, 1]), points=0)
