"""What every metric of logits and target promises; a new one is tested the moment it is exported."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrant import metrics
from calibrant.metrics import (
    METRICS,
    Predictions,
    Split,
    adaptive_ece,
    augrc,
    aurc,
    coverage_at_risk,
    debiased_ece,
    risk_at_coverage,
    sweep_ece,
)


def takes_target(function):
    """Whether it is a metric: `risk_coverage` has the same arguments, but returns a curve."""
    if not inspect.isfunction(function) or function is metrics.risk_coverage:
        return False
    return list(inspect.signature(function).parameters)[:2] == ["source", "target"]


ALL = {name: getattr(metrics, name) for name in metrics.__all__ if takes_target(getattr(metrics, name))}
every_metric = pytest.mark.parametrize("metric", ALL.values(), ids=ALL)
# What depends on the order of equal confidences.
SORTED = (adaptive_ece, debiased_ece, sweep_ece, aurc, augrc, risk_at_coverage, coverage_at_risk)


def batch(seed=0, size=120, classes=4, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * spread
    target = torch.multinomial((logits / 2).softmax(1), 1, generator=generator).squeeze(1)
    return logits, target


def numbers(result):
    """The float, or the floats of a split."""
    values = tuple(result) if isinstance(result, Split) else (result,)
    assert all(type(value) is float for value in values)
    return np.array(values)


def assert_same(left, right, tolerance=1e-9):
    # Temperatures are found to 1e-6.
    np.testing.assert_allclose(numbers(left), numbers(right), rtol=1e-5, atol=tolerance)


def test_all_are_found():
    assert set(ALL) >= {"ece", "mce", "ece_l2", "adaptive_ece", "debiased_ece", "sweep_ece", "smooth_ece"}
    assert set(ALL) >= {"classwise_ece", "accuracy", "balanced_accuracy", "mean_iou", "nll", "brier"}
    assert set(ALL) >= {"aurc", "augrc", "risk_at_coverage", "coverage_at_risk"}
    assert set(ALL) >= {"root_brier", "nll_split", "brier_split", "kde_ece"}
    assert set(METRICS) >= {name for name in ALL if not name.endswith("_split")}


@every_metric
def test_finite_floats_in_range(metric):
    result = numbers(metric(*batch()))
    assert np.isfinite(result).all()
    assert (result >= 0).all()
    if metric.__name__ in METRICS and METRICS[metric.__name__].percent:
        assert (result <= 1).all()


@every_metric
def test_predictions_in_place_of_logits(metric):
    logits, target = batch()
    target[::5] = -100
    np.testing.assert_array_equal(
        numbers(metric(Predictions.of(logits, target))), numbers(metric(logits, target))
    )


@every_metric
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("ignored", [False, True])
def test_images_equal_their_pixels(metric, memory_format, ignored):
    rows, label = batch()
    if ignored:
        label[::7] = -100
    images = rows.view(2, 6, 10, 4).permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    assert images.is_contiguous(memory_format=memory_format)
    assert_same(metric(images, label.view(2, 6, 10)), metric(rows, label))


@every_metric
def test_volumes_and_sequences(metric):
    rows, label = batch()
    assert_same(metric(rows.view(4, 30, 4).movedim(2, 1), label.view(4, 30)), metric(rows, label))
    volume = rows.view(2, 3, 4, 5, 4).movedim(-1, 1).contiguous()
    assert_same(metric(volume, label.view(2, 3, 4, 5)), metric(rows, label))


@every_metric
@pytest.mark.parametrize("ignore_index", [-100, 255, 2])
def test_ignoring_equals_deleting(metric, ignore_index):
    logits, target = batch()
    dropped = target == 2 if ignore_index == 2 else torch.arange(120) % 3 == 0
    noisy = torch.where(dropped.unsqueeze(1), 50 * logits.flip(0), logits)
    labels = target.masked_fill(dropped, ignore_index)
    assert_same(
        metric(noisy, labels, ignore_index=ignore_index), metric(logits[~dropped], target[~dropped]), 1e-12
    )


@every_metric
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_ignored_may_be_anything(metric, value):
    logits, target = batch()
    expected = metric(logits[10:], target[10:])
    logits[:10, 1], target[:10] = value, -100
    assert_same(metric(logits, target), expected, 1e-12)


@every_metric
@pytest.mark.parametrize("constant", [-1e3, 0.7, 1e4])
def test_a_constant_changes_nothing(metric, constant):
    logits, target = batch()
    shift = constant * torch.linspace(-1, 1, 120, dtype=torch.float64).unsqueeze(1)
    assert_same(metric(logits + shift, target), metric(logits, target), 1e-8)


@every_metric
def test_permuting_elements_changes_nothing(metric):
    logits, target = batch()
    assert len(logits.softmax(1).amax(1).unique()) == 120
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    assert_same(metric(logits[order], target[order]), metric(logits, target))


@every_metric
def test_permuting_classes_changes_nothing(metric):
    logits, target = batch()
    order = torch.tensor([2, 0, 3, 1])
    assert_same(metric(logits[:, order], order.argsort()[target]), metric(logits, target))


@every_metric
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types(metric, dtype):
    logits, target = batch(size=400)
    narrow = logits.to(dtype)
    result, exact = numbers(metric(narrow, target)), numbers(metric(narrow.double(), target))
    assert np.isfinite(result).all()
    # Rounding may part elements that are equal in float64, and join others: their order is then another.
    tolerance = 2e-2 if metric in SORTED and dtype != torch.float32 else 1e-5
    np.testing.assert_allclose(result, exact, rtol=1e-3, atol=tolerance)


@every_metric
@pytest.mark.parametrize("wrong", [0, 3, 12])
def test_certainty_is_finite(metric, wrong):
    target = torch.arange(12) % 3
    logits = torch.eye(3)[target] * 1e4
    target[:wrong] = (target[:wrong] + 1) % 3
    result = numbers(metric(logits, target))
    assert np.isfinite(result).all()
    if wrong == 0:
        # Of a split, the calibration part.
        best = metric.__name__ in METRICS and METRICS[metric.__name__].higher_is_better
        assert result[0] == pytest.approx(float(best), abs=1e-6)


@every_metric
def test_uniform_and_equal_predictions(metric):
    for row in (torch.zeros(3), torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1e4, 0.0, 0.0])):
        result = numbers(metric(row.expand(30, 3), torch.arange(30) % 3))
        assert np.isfinite(result).all()
        assert (result >= 0).all()


@every_metric
def test_one_sample(metric):
    logits, target = batch(size=1)
    if metric is metrics.kde_ece:
        with pytest.raises(ValueError, match="at least two"):
            metric(logits, target)
    else:
        assert np.isfinite(numbers(metric(logits, target))).all()


@every_metric
def test_a_class_that_is_missing(metric):
    logits, target = batch()
    target[target == 2] = 0
    assert np.isfinite(numbers(metric(logits, target))).all()
    logits[:, 2] = -30  # nor predicted
    assert np.isfinite(numbers(metric(logits, target))).all()


@every_metric
def test_one_class(metric):
    """Single logits: the advice is one that works, because metrics take no ``binary``."""
    logits, target = torch.linspace(-1, 1, 6), torch.arange(6) % 2
    advice = r"to a metric pass Predictions\.of\(logits, target, binary=True\)"
    for shape in ((6,), (6, 1), (2, 3)):
        with pytest.raises(ValueError, match=advice):
            metric(logits.view(shape), target.view(shape))
    with pytest.raises(ValueError, match=advice):
        metric(logits.unsqueeze(1), target)
    assert np.isfinite(numbers(metric(Predictions.of(logits, target, binary=True)))).all()


@every_metric
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(metric, value):
    logits, target = batch()
    logits[3, (target[3] + 1) % 4] = value
    with pytest.raises(ValueError, match="NaN or infinite numbers at index 3 of the batch"):
        metric(logits, target)


@every_metric
def test_a_class_may_be_ruled_out(metric):
    logits, target = batch()
    logits[:, 3] = -torch.inf
    logits, target = logits[target != 3], target[target != 3]
    far = logits.nan_to_num(neginf=-2e4)
    assert_same(metric(logits, target), metric(far, target), 1e-6)
    target[0] = 3
    with pytest.raises(
        ValueError, match=r"rule out a true class at index 0 of the batch; .* as_logits\(p\),"
    ):
        metric(logits, target)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_row_that_is_not_finite_is_that_of_the_image(memory_format):
    logits = torch.zeros(3, 2, 4, 5).contiguous(memory_format=memory_format)
    target = torch.ones(3, 4, 5, dtype=torch.long)
    target[0] = target[1, :2] = -100
    logits[0] = torch.nan  # ignored
    logits[2, 1, 3, 3] = -torch.inf
    with pytest.raises(ValueError, match=r"rule out a true class at index 2 of the batch"):
        Predictions.of(logits, target)


def test_single_logits_of_probabilities_with_zeros():
    advice = r"at index 1 of the batch; .* pass as_logits\(p\) - as_logits\(1 - p\)"
    with pytest.raises(ValueError, match=advice):
        Predictions.of(torch.tensor([0.5, 0.0]).logit(), torch.tensor([1, 1]), binary=True)


@every_metric
def test_nothing(metric):
    with pytest.raises(ValueError, match="nothing to evaluate"):
        metric(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="nothing to evaluate"):
        metric(torch.empty(2, 3, 0, 4), torch.empty(2, 0, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="not ignored"):
        metric(torch.randn(4, 3), torch.full((4,), -100))


@every_metric
def test_wrong_arguments(metric):
    logits, target = batch()
    with pytest.raises(TypeError, match="target"):
        metric(logits)
    with pytest.raises(TypeError, match="integer labels"):
        metric(logits, target.double())
    with pytest.raises(TypeError, match="floating point"):
        metric(logits.long(), target)
    with pytest.raises(ValueError, match=r"shape \(120,\)"):
        metric(logits, target[:-1])
    with pytest.raises(ValueError, match="4 classes"):
        metric(logits, target + 1)


@every_metric
def test_inputs_stay_as_they_are(metric):
    logits, target = batch()
    target[3] = -100
    before = logits.clone(), target.clone()
    metric(logits, target)
    assert torch.equal(before[0], logits)
    assert torch.equal(before[1], target)


@pytest.fixture
def every_warning():
    """Torch gives some warnings once in a process; the first test would be the only one to see them."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("every_warning")
@every_metric
def test_logits_with_a_gradient(metric):
    logits, target = batch()
    assert_same(metric(logits.clone().requires_grad_(), target), metric(logits, target))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(2, 60), st.integers(2, 6), st.floats(0.01, 100))
def test_errors_are_bounded_and_ordered(seed, size, classes, spread):
    logits, target = batch(seed, size, classes, spread)
    predictions = Predictions.of(logits, target)
    value = {name: numbers(metric(predictions))[0] for name, metric in ALL.items()}
    overall = abs(predictions.confidence.mean().item() - predictions.correct.double().mean().item())
    # Finer bins never lower an error; a larger norm never does either.
    assert overall - 1e-9 <= value["ece"] <= value["ece_l2"] + 1e-12
    assert value["ece_l2"] <= value["mce"] + 1e-12 <= 1 + 2e-12
    assert overall - 1e-9 <= value["adaptive_ece"] <= 1 + 1e-12
    assert overall - 1e-6 <= value["smooth_ece"] <= 1 + 1e-9
    assert value["classwise_ece"] <= 2 / classes + 1e-12
    assert value["classwise_ece"] <= value["classwise_mce"] + 1e-12 <= 1 + 2e-12
    assert value["accuracy"] <= value["top_k_accuracy"]
    assert value["augrc"] <= (1 - value["accuracy"]) * (1 - (1 - value["accuracy"]) / 2) + 1e-12
    assert value["kde_ece"] <= 2 + 1e-12
    assert value["root_brier"] == pytest.approx(math.sqrt(value["brier"]), abs=1e-12)
    assert all(math.isfinite(number) for number in value.values())
