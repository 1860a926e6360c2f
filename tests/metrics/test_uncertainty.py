import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from calibrant import evaluate
from calibrant.histogram import Bins, ConfidenceHistogram
from calibrant.metrics import (
    METRICS,
    ClassCounts,
    Predictions,
    accuracy,
    adaptive_ece,
    balanced_accuracy,
    binomial_interval,
    brier,
    calibration_test,
    consistency_band,
    debiased_ece,
    ece,
    ece_l2,
    mce,
    mean_iou,
    nll,
    root_brier,
    smooth_ece,
    sweep_ece,
    uncertainty,
)
from calibrant.metrics.calibration import _ece
from calibrant.metrics.classwise import classwise_ece
from calibrant.metrics.uncertainty import Resamples, bootstrap, bootstrap_histogram, draws, interval

FIGURES = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "mean_iou": mean_iou,
    "nll": nll,
    "brier": brier,
    "root_brier": root_brier,
    "sweep_ece": sweep_ece,
    "smooth_ece": smooth_ece,
}
BINNED = {
    "ece": ece,
    "mce": mce,
    "ece_l2": ece_l2,
    "adaptive_ece": adaptive_ece,
    "debiased_ece": debiased_ece,
    "classwise_ece": classwise_ece,
}


def batch(seed, size, classes=4, rounded=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * 2
    if rounded:
        logits = (logits * 2).round() / 2
    return logits, torch.multinomial((logits / 1.5).softmax(1), 1, generator=generator).squeeze(1)


def weights(seed, resamples, size):
    """Whole numbers, many of them 0, that need not sum to the number of elements."""
    return torch.randint(-1, 4, (resamples, size), generator=torch.Generator().manual_seed(seed)).clamp_min(0)


def of_confidence(confidence, correct):
    """Predictions of two classes with given confidences above 1/2."""
    logits = torch.stack([confidence.logit(), torch.zeros_like(confidence)], 1)
    return Predictions.of(logits, (~correct).long())


def random(generator, *shape):
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


# ------------------------------------------------------------------------------------------- resamples


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("size", [1, 7, 101])
@pytest.mark.parametrize("bins", [1, 4, 15, 40])
def test_resamples_equal_repeated_data(rounded, size, bins):
    logits, target = batch(size, size, rounded=rounded)
    weight = weights(size, 6, size)
    weight[:, 0] += 1
    resamples = Resamples.of(Predictions.of(logits, target), weight.double())
    width, mass, residual = resamples.equal_width(bins), resamples.equal_mass(bins), resamples.residual(bins)
    for row in range(6):
        repeated = Predictions.of(
            logits.repeat_interleave(weight[row], 0), target.repeat_interleave(weight[row])
        )
        for ours, theirs in ((width, repeated.equal_width(bins)), (mass, repeated.equal_mass(bins))):
            for name in ("count", "confidence", "correct"):
                torch.testing.assert_close(
                    getattr(ours, name)[row], getattr(theirs, name), rtol=0, atol=1e-10
                )
        confidence, gap = repeated.confidence.numpy(), repeated.correct.double() - repeated.confidence
        expected = [
            gap[(confidence > b / bins) & (confidence <= (b + 1) / bins)].sum().item() / repeated.samples
            for b in range(bins)
        ]
        np.testing.assert_allclose(residual[row], expected, atol=1e-12)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("bins", [6, 15])
@pytest.mark.parametrize("size", [50, 203])
def test_bootstrap_equals_the_figures_of_repeated_data(rounded, bins, size):
    logits, target = batch(3, size, rounded=rounded)
    target[target == 1] = 0  # a class that does not occur, and one that a resample can lose
    target[0] = 1
    extra = torch.arange(size, dtype=torch.float64)
    predictions = Predictions.of(logits, target)
    replicates = bootstrap(predictions, bins=bins, background=0, means={"extra": extra}, resamples=12, seed=5)
    assert set(replicates) == {*FIGURES, *BINNED, "mean_iou_foreground", "extra"}
    assert set(replicates) - {"extra"} <= set(METRICS)
    weight = torch.cat(list(draws(size, 12, 5))).long()
    for row in range(12):
        repeated = Predictions.of(
            logits.repeat_interleave(weight[row], 0), target.repeat_interleave(weight[row])
        )
        expected = {name: figure(repeated) for name, figure in FIGURES.items()}
        expected |= {name: figure(repeated, bins=bins) for name, figure in BINNED.items()}
        expected["mean_iou_foreground"] = mean_iou(repeated, background=0)
        expected["extra"] = (weight[row] * extra).sum().item() / size
        # The smooth error of resamples is integrated over 512 cells: a confidence is off by 1/1024 at most.
        tolerance = {"smooth_ece": 2e-3, "debiased_ece": 1e-7}
        for name, value in expected.items():
            assert replicates[name][row].item() == pytest.approx(
                value, rel=0, abs=tolerance.get(name, 1e-10)
            ), name


def test_bootstrap_of_float32_and_of_images():
    logits, target = batch(4, 120)
    target[::9] = -100
    options = {"bins": 15, "background": None, "means": {}, "resamples": 5, "seed": 0}
    rows = bootstrap(Predictions.of(logits, target), **options)
    images = logits.view(2, 6, 10, 4).permute(0, 3, 1, 2).float()
    pixels = bootstrap(Predictions.of(images, target.view(2, 6, 10)), **options)
    assert "mean_iou_foreground" not in rows
    for name in rows:
        torch.testing.assert_close(pixels[name].double(), rows[name], rtol=1e-4, atol=1e-5)


def test_bootstrap_reports_progress(monkeypatch):
    predictions = Predictions.of(*batch(5, 50))
    options = {"bins": 15, "background": None, "means": {}, "resamples": 25, "seed": 1}
    whole = bootstrap(predictions, **options)
    monkeypatch.setattr(uncertainty, "_DRAWS", 10 * max(50, 15 * predictions.num_classes))
    seen = []
    parts = bootstrap(predictions, **options, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(10, 25), (20, 25), (25, 25)]
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=1e-12)


def test_no_resamples():
    predictions = Predictions.of(*batch(5, 50))
    assert bootstrap(predictions, bins=15, background=None, means={}, resamples=0, seed=0) == {}


# ----------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("size", [1, 10, 1_001])
def test_draws(size):
    weight = torch.cat(list(draws(size, 40, 3)))
    assert weight.shape == (40, size)
    assert weight.dtype == torch.float64
    assert (weight.sum(1) == size).all()
    assert torch.equal(weight, weight.round())
    assert torch.equal(weight, torch.cat(list(draws(size, 40, 3))))
    assert size == 1 or not torch.equal(weight, torch.cat(list(draws(size, 40, 4))))
    # More resamples begin with the same ones.
    assert torch.equal(weight, torch.cat(list(draws(size, 50, 3)))[:40])


@pytest.mark.parametrize("numbers", [1, 1_000, 7_777, 1 << 30])
def test_draws_do_not_depend_on_how_many_are_held(monkeypatch, numbers):
    expected = torch.cat(list(draws(333, 40, 3)))
    monkeypatch.setattr(uncertainty, "_DRAWS", numbers)
    parts = list(draws(333, 40, 3))
    assert all(len(part) * 333 <= max(numbers, 333) for part in parts)
    assert torch.equal(torch.cat(parts), expected)


def test_draws_are_binomial():
    weight = torch.cat(list(draws(100, 2_000, 0)))
    assert weight.mean().item() == 1
    assert weight.var().item() == pytest.approx(1 - 1 / 100, abs=0.02)
    assert (weight == 0).double().mean().item() == pytest.approx(0.99**100, abs=0.005)
    assert (weight.mean(0) - 1).abs().max() < 5 / 2_000**0.5


# ------------------------------------------------------------------------------------------- histogram


def test_bootstrap_of_a_histogram_spreads_as_that_of_the_data():
    logits, target = batch(6, 5_000)
    predictions = Predictions.of(logits, target)
    options = {"bins": 15, "resamples": 300, "seed": 0}
    exact = bootstrap(predictions, means={}, background=None, **options)
    sums = bootstrap_histogram(predictions.histogram, ClassCounts.of(predictions), **options)
    assert set(exact) - set(sums) == {"nll", "brier", "root_brier", "classwise_ece", "mean_iou"}
    for name, values in sums.items():
        assert values.shape == (300,)
        # 300 resamples leave a standard deviation of its own of four percent; the sweep jumps.
        ratio = (values.std() / exact[name].std()).item()
        assert ratio == pytest.approx(1, abs=0.5 if name == "sweep_ece" else 0.25), name
        distance = (values.mean() - exact[name].mean()).abs().item()
        assert distance < 0.5 * exact[name].std().item(), name


def test_bootstrap_of_a_histogram_is_reproducible_and_bounded_in_memory(monkeypatch):
    predictions = Predictions.of(*batch(7, 500))
    counts = ClassCounts.of(predictions)
    options = {"bins": 15, "resamples": 20}
    first = bootstrap_histogram(predictions.histogram, counts, seed=1, **options)
    again = bootstrap_histogram(predictions.histogram, counts, seed=1, **options)
    other = bootstrap_histogram(predictions.histogram, counts, seed=2, **options)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["ece"], other["ece"])
    monkeypatch.setattr(uncertainty, "_DRAWS", 1_000)
    assert all(
        len(v) == 20 for v in bootstrap_histogram(predictions.histogram, counts, seed=1, **options).values()
    )


# ------------------------------------------------------------------------------------------- intervals


def test_interval():
    replicates = torch.linspace(0, 1, 1_001, dtype=torch.float64)
    low, high = interval(0.4, replicates, 0.9)
    # Reflected at the estimate: quantiles 0.05 and 0.95 become 2 · 0.4 - 0.95 and 2 · 0.4 - 0.05.
    assert (low, high) == pytest.approx((-0.15, 0.75))
    assert interval(0.4, replicates, 0.9, debiased=True) == pytest.approx((0.4 - 0.45, 0.4 + 0.45))


def over_confident(generator, size=2_000):
    """Confidence even on (0.5, 1), right with a probability that is 0.1 less: an ECE of 0.1 with any bins."""
    confidence = 0.5 + 0.5 * random(generator, size)
    return of_confidence(confidence, random(generator, size) < confidence - 0.1)


def test_coverage_of_the_interval_of_the_ece():
    """Measured: 192 of 200 intervals at 95 %, which is 96 %, cover the error of the population."""
    generator = torch.Generator().manual_seed(0)
    covered = []
    for repetition in range(200):
        predictions = over_confident(generator)
        replicates = torch.cat(
            [_ece(Resamples.of(predictions, weight), 15) for weight in draws(2_000, 200, repetition)]
        )
        low, high = interval(ece(predictions), replicates, 0.95)
        assert low < high
        covered.append(low <= 0.1 <= high)
    assert 0.90 <= np.mean(covered) <= 0.98


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
    for _ in range(150):
        confidence = 0.5 + 0.5 * random(generator, 3_000)
        bins = of_confidence(confidence, random(generator, 3_000) < confidence).equal_mass(10)
        low, high = consistency_band(bins, level)
        accuracy = bins.correct / bins.count
        inside.append(((low - 1e-12 <= accuracy) & (accuracy <= high + 1e-12)).double())
    # Whole numbers of correct elements make the band a little wide.
    coverage = torch.stack(inside).mean().item()
    assert level - 0.01 <= coverage <= level + 0.05


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
    p_values = [calibration_test(over_confident(generator), simulations=99).p_value for _ in range(20)]
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


@pytest.mark.parametrize("sharpness", [1.0, 1.3])
def test_coverage_of_classwise_ece(sharpness):
    """Of calibrated and of over-confident models: 39 of 40 intervals cover the true value, of either."""
    generator = torch.Generator().manual_seed(0)

    def draw(size):
        posterior = 2 * torch.randn(size, 10, generator=generator, dtype=torch.float64)
        target = torch.multinomial(posterior.softmax(1), 1, generator=generator).squeeze(1)
        return sharpness * posterior, target

    truth = 0.0 if sharpness == 1 else classwise_ece(*draw(400_000))
    covered = 0
    for _ in range(40):
        low, high = evaluate(*draw(2_000), resamples=100).intervals["classwise_ece"]
        covered += low <= truth <= high
    assert covered >= 36
