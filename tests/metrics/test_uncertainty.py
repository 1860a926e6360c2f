import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest

from calibrant import evaluate
from calibrant.histogram import Bins, ConfidenceHistogram
from calibrant.metrics import (
    METRICS,
    Predictions,
    binomial_interval,
    calibration_test,
    consistency_band,
    ece,
)
from calibrant.metrics.calibration import ece_of, smooth_ece_of
from calibrant.metrics.classwise import classwise_ece, classwise_mce
from calibrant.metrics.resampling import Resamples, draws
from calibrant.metrics.uncertainty import error_interval, interval


def batch(seed, size, classes=4, rounded=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * 2
    if rounded:
        logits = (logits * 2).round() / 2
    return logits, torch.multinomial((logits / 1.5).softmax(1), 1, generator=generator).squeeze(1)


def of_confidence(confidence, correct):
    """Predictions of two classes with given confidences above 1/2."""
    logits = torch.stack([confidence.logit(), torch.zeros_like(confidence)], 1)
    return Predictions.of(logits, (~correct).long())


def random(generator, *shape):
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


# ------------------------------------------------------------------------------------------- intervals


def test_interval():
    replicates = torch.linspace(0, 1, 1_001, dtype=torch.float64)
    low, high = interval(0.4, replicates, 0.9)
    # Reflected at the estimate: quantiles 0.05 and 0.95 become 2 · 0.4 - 0.95 and 2 · 0.4 - 0.05.
    assert (low, high) == pytest.approx((-0.15, 0.75))
    assert interval(0.4, replicates, 0.9, debiased=True) == pytest.approx((0.4 - 0.45, 0.4 + 0.45))


def over_confident(generator, size):
    """Confidence even on (0.5, 1), right with a probability that is 0.1 less: an ECE of 0.1 with any bins."""
    confidence = 0.5 + 0.5 * random(generator, size)
    return of_confidence(confidence, random(generator, size) < confidence - 0.1)


def test_error_interval():
    replicates = torch.linspace(0.4, 0.6, 1_001, dtype=torch.float64)  # larger than the estimate by 0.1
    low, high = error_interval(0.4, replicates, 0.9)
    assert (low, high) == pytest.approx((0.4 - 0.09 - 0.1 / (math.sqrt(2) - 1), 0.4 + 0.09))
    low, high = error_interval(0.6, replicates, 0.9)  # as a difference may be
    assert (low, high) == pytest.approx((0.6 - 0.09, 0.6 + 0.09 + 0.1 / (math.sqrt(2) - 1)))


@pytest.mark.parametrize("size", [100, 1_000])
def test_coverage_of_the_interval_of_the_ece(size):
    """Of intervals at 95 %, about as many cover the error of the population, for small samples too."""
    generator = torch.Generator().manual_seed(0)
    covered = []
    for repetition in range(100):
        predictions = over_confident(generator, size)
        replicates = torch.cat(
            [ece_of(Resamples.of(predictions, weight), 15) for weight in draws(size, 150, repetition)]
        )
        low, high = error_interval(ece(predictions), replicates, 0.95)
        assert low < high
        covered.append(low <= 0.1 <= high)
    assert 0.92 <= np.mean(covered) <= 0.99


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_binomial_interval_equals_scipy(level):
    pairs = [(k, n) for n in (1, 2, 10, 137, 100_000) for k in sorted({0, 1, n // 3, n - 1, n})]
    successes, trials = torch.tensor(pairs, dtype=torch.float64).T
    low, high = binomial_interval(successes, trials, level)
    for i, (k, n) in enumerate(pairs):
        theirs = binomtest(k, n).proportion_ci(level, method="exact")
        assert low[i].item() == pytest.approx(theirs.low, rel=1e-8, abs=1e-12)
        assert high[i].item() == pytest.approx(theirs.high, rel=1e-8, abs=1e-12)


def test_binomial_interval_of_no_trials_is_everything():
    low, high = binomial_interval(torch.zeros(2), torch.tensor([0.0, 5.0]))
    assert low.tolist() == [0, 0]
    assert high[0] == 1


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_consistency_band_covers_what_a_calibrated_model_does(level):
    generator = torch.Generator().manual_seed(1)
    inside = []
    for _ in range(100):
        confidence = 0.5 + 0.5 * random(generator, 2_000)
        bins = of_confidence(confidence, random(generator, 2_000) < confidence).equal_mass(10)
        low, high = consistency_band(bins, level)
        accuracy = bins.correct / bins.count
        inside.append(((low - 1e-12 <= accuracy) & (accuracy <= high + 1e-12)).double())
    # Whole numbers of correct elements make the band a little wide.
    coverage = torch.stack(inside).mean().item()
    assert level - 0.01 <= coverage <= level + 0.05


def test_consistency_band_is_that_of_scipy():
    """Also where a quantile is reached exactly, as by one element with a confidence of 0.9."""
    pairs = product([1, 2, 10, 777], [0, 0.1, 0.25, 0.5, 0.9, 0.999, 1])
    count, confidence = torch.tensor(list(pairs), dtype=torch.float64).T
    bins = Bins(torch.zeros(len(count) + 1), count, count * confidence, count)
    for level in (0.5, 0.8, 0.95):
        tail = (1 - level) / 2
        for end, at in zip(consistency_band(bins, level), (tail, 1 - tail), strict=True):
            quantile = torch.from_numpy(binom.ppf(at, count, confidence).clip(0))
            torch.testing.assert_close(end, quantile / count, rtol=1e-12, atol=0, msg=f"level {level}")


def test_consistency_band_of_one_bin():
    def band(count, confidence):
        bins = Bins(*(torch.tensor(v, dtype=torch.float64) for v in ([0, 1], [count], [confidence], [0])))
        return [v.item() for v in consistency_band(bins)]

    # Quantiles of ten throws of a fair coin: at most 1 head has probability 0.011, at most 2 has 0.055.
    assert band(10, 5.0) == pytest.approx([0.2, 0.8])
    assert band(10, 10.0) == [1, 1]
    assert all(np.isfinite(band(0, 0.0)))


# ------------------------------------------------------------------------------------------------ test


def test_p_values_are_even_when_calibrated():
    generator = torch.Generator().manual_seed(2)
    p_values = []
    for seed in range(200):
        confidence = 0.5 + 0.5 * random(generator, 500)
        histogram = ConfidenceHistogram.of_outcomes(confidence, random(generator, 500) < confidence)
        p_values.append(calibration_test(histogram, simulations=199, seed=seed).p_value)
    assert 0.02 <= np.mean(np.array(p_values) <= 0.05) <= 0.09
    # Kolmogorov and Smirnov's distance from an even distribution, at a level of a thousandth.
    rank = (np.arange(200) + 0.5) / 200
    assert np.abs(np.sort(p_values) - rank).max() < 1.95 / 200**0.5


def test_p_values_follow_the_seed():
    generator = torch.Generator().manual_seed(4)
    confidence = 0.5 + 0.5 * random(generator, 300)
    predictions = of_confidence(confidence, random(generator, 300) < confidence)
    p_values = [calibration_test(predictions, simulations=300, seed=seed).p_value for seed in (0, 0, 1)]
    assert p_values[0] == p_values[1] != p_values[2]
    assert p_values[2] == pytest.approx(p_values[0], abs=0.15)


def test_power():
    generator = torch.Generator().manual_seed(3)
    p_values = [calibration_test(over_confident(generator, 2_000), simulations=99).p_value for _ in range(20)]
    assert max(p_values) == 0.01


def test_calibration_test_of_a_histogram_and_of_predictions():
    predictions = Predictions.of(*batch(8, 400))
    ours = calibration_test(predictions, bins=10, simulations=200, seed=3)
    assert ours == calibration_test(predictions.histogram, bins=10, simulations=200, seed=3)
    assert ours.statistic == pytest.approx(ece(predictions, bins=10), abs=1e-12)
    # The logits are too large by half: an error beyond all that were simulated.
    assert ours.p_value == pytest.approx(1 / 201)
    with pytest.raises(ValueError, match="divisor of 300"):
        calibration_test(predictions, bins=7)


def test_certain_and_right_is_calibrated():
    logits = torch.tensor([[1e4, 0.0]]).expand(50, 2)
    assert calibration_test(Predictions.of(logits, torch.zeros(50).long())).p_value == 1
    wrong = torch.zeros(50).long()
    wrong[0] = 1
    assert calibration_test(Predictions.of(logits, wrong)).p_value == 0.001


def test_class_wise_errors_by_chance_are_those_of_drawn_labels():
    """Also of other bins and seeds on the same data, whose simulations are kept."""
    logits, target = batch(0, 60)
    predictions = Predictions.of(logits, target)
    for bins, seed in ((15, 0), (10, 0), (10, 1)):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(logits.softmax(1), 100, replacement=True, generator=generator).unbind(1)
        for name, error in (("classwise_ece", classwise_ece), ("classwise_mce", classwise_mce)):
            wanted = np.mean([error(logits, labels, bins=bins) for labels in drawn])
            assert METRICS[name].chance(predictions, bins, seed) == pytest.approx(wanted, abs=1e-12), name


def test_the_smooth_error_of_a_resample_does_not_depend_on_the_others():
    predictions = Predictions.of(*batch(0, 30))
    weight = next(draws(30, 20, seed=0))
    together = smooth_ece_of(Resamples.of(predictions, weight))
    alone = [smooth_ece_of(Resamples.of(predictions, row.unsqueeze(0))) for row in weight]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-13)


@pytest.fixture
def few_metrics():
    """An evaluation of two metrics, since all of them would take most of the time."""
    every = dict(METRICS)  # in their order
    METRICS.clear()
    METRICS.update({name: every[name] for name in ("nll", "classwise_ece")})
    yield
    METRICS.clear()
    METRICS.update(every)


@pytest.mark.usefixtures("few_metrics")
@pytest.mark.parametrize("sharpness", [1.0, 1.3])
def test_coverage_of_classwise_ece(sharpness):
    """Of calibrated and of over-confident models: of 40 intervals, 39 cover the true value, of either."""
    generator = torch.Generator().manual_seed(0)

    def draw(size):
        posterior = 2 * torch.randn(size, 10, generator=generator, dtype=torch.float64)
        target = torch.multinomial(posterior.softmax(1), 1, generator=generator).squeeze(1)
        return sharpness * posterior, target

    truth = 0.0 if sharpness == 1 else classwise_ece(*draw(100_000))
    covered = 0
    for _ in range(20):
        low, high = evaluate(*draw(500), resamples=100).intervals["classwise_ece"]
        covered += low <= truth <= high
    assert covered >= 17
