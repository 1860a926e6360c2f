import json
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.fft import dct, idct
from scipy.optimize import brentq
from scipy.stats import foldnorm

from calibrant.histogram import ConfidenceHistogram, cell_edges
from calibrant.layout import arrange
from calibrant.metrics import (
    Predictions,
    adaptive_ece,
    debiased_ece,
    ece,
    ece_l2,
    mce,
    smooth_ece,
    sweep_ece,
)
from calibrant.metrics.calibration import smooth_ece_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())


def of(logits, target):
    return ConfidenceHistogram.of(arrange(logits, target))


def ece_by_numpy(logits, target, bins):
    """The definition: softmax, argmax, one loop over bins (lo, hi]."""
    logits = np.asarray(logits, np.float64)
    probability = np.exp(logits - logits.max(1, keepdims=True))
    probability /= probability.sum(1, keepdims=True)
    confidence, correct = probability.max(1), probability.argmax(1) == np.asarray(target)
    total = 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return total


@pytest.fixture(scope="module")
def golden_batch():
    return torch.tensor(GOLDEN["logits"], dtype=torch.float64), torch.tensor(GOLDEN["target"])


def test_golden(golden_batch):
    assert GOLDEN["bins"] == 15
    assert ece(of(*golden_batch)) == pytest.approx(GOLDEN["ece"], rel=0, abs=1e-9)


@pytest.mark.parametrize("pieces", [2, 7, 500])
def test_golden_streamed(golden_batch, pieces):
    logits, target = golden_batch
    parts = [of(*part) for part in zip(logits.tensor_split(pieces), target.tensor_split(pieces), strict=True)]
    streamed = ece(reduce(add, parts), bins=15)
    assert streamed == pytest.approx(GOLDEN["ece"], rel=0, abs=1e-9)


@pytest.mark.parametrize("bins", [1, 10, 12, 15, 20, 25, 30, 50, 100])
def test_equals_the_definition(bins):
    generator = torch.Generator().manual_seed(bins)
    logits = torch.randn(3_000, 5, generator=generator, dtype=torch.float64) * 2
    target = torch.randint(5, (3_000,), generator=generator)
    result = ece(of(logits, target), bins=bins)
    assert isinstance(result, float)
    assert result == pytest.approx(ece_by_numpy(logits, target, bins), rel=0, abs=1e-12)


def test_perfect_and_worst():
    certain = torch.tensor([[200.0, 0.0]]).expand(10, 2)
    assert ece(of(certain, torch.zeros(10, dtype=torch.int64))) == 0
    assert ece(of(certain, torch.ones(10, dtype=torch.int64))) == 1


def test_ignored_elements_do_not_count(golden_batch):
    logits, target = golden_batch
    padded = torch.cat([logits, torch.full((50, logits.shape[1]), 9.0)])
    padded[500:, 0] = 99.0
    labels = torch.cat([target, torch.full((50,), -100)])
    assert ece(of(padded, labels)) == pytest.approx(GOLDEN["ece"], rel=0, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 200), st.integers(2, 8), st.floats(0.01, 20))
def test_merging_bins_never_raises_the_error(seed, size, classes, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * spread
    histogram = of(logits, torch.randint(classes, (size,), generator=generator))
    for chain in ([30, 15, 5, 1], [100, 50, 25]):
        errors = [ece(histogram, bins=bins) for bins in chain]
        assert all(0 <= after <= before + 1e-12 for before, after in pairwise(errors))
        assert errors[0] <= 1


def hundredth(dtype):
    """5 000 samples whose confidence and accuracy are 0.01 apart in every bin: above, then below."""
    per_level = 1_000
    rows, target = [], []
    for level, accuracy in [(0.61, 0.60), (0.71, 0.72), (0.82, 0.81), (0.91, 0.92), (0.99, 0.98)]:
        logit = np.log(level / (1 - level))
        rows.append(torch.tensor([[logit, 0.0]], dtype=torch.float64).expand(per_level, 2))
        target.append((torch.arange(per_level) >= round(per_level * accuracy)).long())
    return torch.cat(rows).to(dtype), torch.cat(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hundredth_over_ten_million_streamed_samples(dtype):
    block = of(*hundredth(dtype))
    total = block
    for _ in range(1_999):
        total = total + block
    assert total.samples.item() == 10_000_000
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert ece(total) == pytest.approx(0.01, rel=0, abs=tolerance)


def test_a_hundredth_over_one_large_batch():
    logits, target = hundredth(torch.float32)
    shuffled = torch.randperm(2_000_000, generator=torch.Generator().manual_seed(0))
    logits, target = logits.repeat(400, 1)[shuffled], target.repeat(400)[shuffled]
    histogram = of(logits, target)
    assert histogram.samples.item() == 2_000_000
    assert ece(histogram) == pytest.approx(0.01, rel=0, abs=1e-6)


def test_unequal_blocks_are_weighted_by_their_samples():
    logits, target = hundredth(torch.float64)
    right = of(torch.tensor([[200.0, 0.0]]).expand(5_000, 2), torch.zeros(5_000, dtype=torch.int64))
    # As many samples again without any error: the sum stays, the number doubles.
    assert ece(of(logits, target) + right) == pytest.approx(0.005, rel=0, abs=1e-12)


@pytest.mark.parametrize("target", [torch.empty(0, dtype=torch.int64), torch.full((4,), -100)])
def test_the_error_of_nothing_is_an_error(target):
    with pytest.raises(ValueError, match="empty data set"):
        ece(of(torch.randn(len(target), 3), target))


def test_bins_that_are_not_a_union_of_cells(golden_batch):
    with pytest.raises(ValueError, match="divisor of 300"):
        ece(of(*golden_batch), bins=7)


# ------------------------------------------------------------------------------- the other definitions

BINNED = [ece, mce, ece_l2, adaptive_ece, debiased_ece]
EXACT_FROM_HISTOGRAM = [ece, mce, ece_l2]


def batch(seed, size, classes=4, spread=2.0, rounded=False):
    """Labels that are right more often for larger logits; rounded logits, as of float16, tie a lot."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * spread
    if rounded:
        logits = (logits * 2).round() / 2
    target = torch.multinomial((logits / 2).softmax(1), 1, generator=generator).squeeze(1)
    return logits, target


def outcomes(logits, target):
    """Confidence and correctness; from `Predictions`, lest ties be broken by another rounding."""
    predictions = Predictions.of(logits, target)
    confidence = predictions.confidence.numpy()
    return confidence, shared(confidence, predictions.correct.numpy())


def ties(confidence):
    """The number of each element's group of equal confidences, up to rounding, by rising confidence."""
    order = np.argsort(confidence)
    ranked = confidence[order].astype(np.float64)
    group = np.empty(len(ranked), int)
    group[order] = np.cumsum(np.diff(ranked, prepend=ranked[:1]) > 2.0**-48 * ranked)
    return group


def shared(confidence, correct):
    """The mean correctness of elements of equal confidence: so bins share them."""
    group = ties(confidence)
    return (np.bincount(group, correct) / np.bincount(group))[group]


def equal_width_groups(confidence, bins):
    places = [(confidence > b / bins) & (confidence <= (b + 1) / bins) for b in range(bins)]
    return [np.flatnonzero(place) for place in places]


def equal_mass_groups(confidence, bins):
    return np.array_split(np.argsort(confidence, kind="stable"), bins)


def undivided_groups(confidence, bins):
    """Groups of equal mass that keep equal confidences together, where the middle one would be."""
    tie = ties(confidence)
    size = np.bincount(tie)
    middle = np.floor(np.cumsum(size) - size + (size - 1) / 2)  # of an even number, the lower one
    last = np.cumsum([len(group) for group in np.array_split(tie, bins)]) - 1
    place = np.searchsorted(last, middle)[tie]
    return [np.flatnonzero(place == b) for b in range(bins)]


def gaps(groups, confidence, correct):
    """Share and gap of each group that is not empty."""
    groups = [group for group in groups if len(group)]
    share = np.array([len(group) / len(confidence) for group in groups])
    return share, np.array([abs(confidence[g].mean() - correct[g].mean()) for g in groups])


def by_definition(metric, confidence, correct, bins):
    if metric in EXACT_FROM_HISTOGRAM:
        share, gap = gaps(equal_width_groups(confidence, bins), confidence, correct)
        results = {ece: (share * gap).sum(), mce: gap.max(), ece_l2: np.sqrt((share * gap**2).sum())}
        return results[metric]
    if metric is adaptive_ece:
        share, gap = gaps(equal_mass_groups(confidence, bins), confidence, correct)
        return (share * gap).sum()
    total = 0.0
    for group in undivided_groups(confidence, bins):
        if len(group) >= 2:
            accuracy = correct[group].mean()
            noise = accuracy * (1 - accuracy) / (len(group) - 1)
            total += len(group) / len(correct) * ((confidence[group].mean() - accuracy) ** 2 - noise)
    return np.sqrt(max(0, total))


def sweep_by_definition(confidence, correct, norm, most=512, grouped=equal_mass_groups):
    chosen = 1
    for bins in range(2, min(most, len(confidence)) + 1):
        accuracies = [correct[group].mean() for group in grouped(confidence, bins) if len(group)]
        if any(after < before - 1e-12 for before, after in pairwise(accuracies)):  # equal but for rounding
            break
        chosen = bins
    share, gap = gaps(grouped(confidence, chosen), confidence, correct)
    return (share * gap**norm).sum() ** (1 / norm)


def debiased_l1_by_definition(confidence, correct, bins, resamples=None):
    """The published estimator; the mean over its Gaussian resamples as an integral, or as it is published."""
    error = mean = 0.0
    for group in undivided_groups(confidence, bins):
        if len(group) < 2:
            continue
        share, accuracy = len(group) / len(correct), correct[group].mean()
        gap, spread = accuracy - confidence[group].mean(), np.sqrt(accuracy * (1 - accuracy) / len(group))
        error += share * abs(gap)
        if resamples is not None:
            mean += share * np.abs(gap + spread * resamples.normal(size=200_000)).mean()
        elif spread:
            mean += share * foldnorm.mean(abs(gap) / spread, scale=spread)
        else:
            mean += share * abs(gap)
    return max(0.0, 2 * error - mean)


def smooth_by_definition(confidence, correct, grid=1_500):
    """The integral by the midpoint rule, the kernel's mirror images written out; then its fixed point."""
    t = ((np.arange(grid) + 0.5) / grid)[:, None]

    def error(width):
        kernel = sum(
            np.exp(-0.5 * ((t - image) / width) ** 2)
            for turn in (-2, 0, 2)
            for image in (turn + confidence, turn - confidence)
        )
        kernel = kernel / (width * np.sqrt(2 * np.pi))
        return np.abs((kernel * (correct - confidence)).mean(1)).mean()

    width = brentq(lambda width: error(width) - width, 2e-3, 0.5, xtol=1e-9)
    return error(width)


@pytest.mark.parametrize("name", ["ece", "mce", "ece_l2", "adaptive_ece"])
def test_golden_from_logits_predictions_and_streams(golden_batch, name):
    metric = {"ece": ece, "mce": mce, "ece_l2": ece_l2, "adaptive_ece": adaptive_ece}[name]
    logits, target = golden_batch
    expected = pytest.approx(GOLDEN[name], rel=0, abs=1e-9)
    assert metric(logits, target) == expected
    assert metric(Predictions.of(logits, target), bins=GOLDEN["bins"]) == expected
    for pieces in (1, 7, 500):
        parts = zip(logits.tensor_split(pieces), target.tensor_split(pieces), strict=True)
        histogram = reduce(add, [of(*part) for part in parts])
        if metric in EXACT_FROM_HISTOGRAM:
            assert metric(histogram) == expected
        else:
            error, bound = abs(metric(histogram) - GOLDEN[name]), straddling(histogram, 15)
            assert error <= bound + 1e-12 < 0.05


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("bins", [1, 7, 15, 50])
@pytest.mark.parametrize("metric", BINNED)
def test_binned_errors_equal_their_definitions(metric, bins, rounded):
    for size in (1, 2, 33, 1_000):
        logits, target = batch(bins + size, size, rounded=rounded)
        expected = by_definition(metric, *outcomes(logits, target), bins)
        # The root of what is left of a difference is as good as half its digits.
        expected = pytest.approx(expected, rel=0, abs=1e-7 if metric is debiased_ece else 1e-12)
        assert metric(logits, target, bins=bins) == expected
        assert metric(Predictions.of(logits, target), bins=bins) == expected


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("rounded", [False, True])
def test_sweep_equals_its_definition(norm, rounded):
    chosen = set()
    for seed in range(25):
        logits, target = batch(seed, [1, 2, 20, 300, 3_000][seed % 5], rounded=rounded)
        expected = sweep_by_definition(*outcomes(logits, target), norm)
        assert sweep_ece(logits, target, norm=norm) == pytest.approx(expected, rel=0, abs=1e-12)
        chosen.add(round(expected, 6))
    assert len(chosen) > 10


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("rounded", [False, True])
def test_equal_width_sweep_equals_its_definition(norm, rounded):
    chosen = set()
    for seed in range(15):
        logits, target = batch(seed, [1, 2, 20, 300, 2_000][seed % 5], rounded=rounded)
        expected = sweep_by_definition(*outcomes(logits, target), norm, grouped=equal_width_groups)
        found = sweep_ece(logits, target, norm=norm, binning="equal-width")
        assert found == pytest.approx(expected, rel=0, abs=1e-12)
        chosen.add(round(expected, 6))
    assert len(chosen) > 7


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("bins", [1, 7, 15, 50])
def test_debiased_l1_equals_its_definition(bins, rounded):
    for size in (1, 2, 33, 1_000):
        logits, target = batch(bins + size, size, rounded=rounded)
        expected = debiased_l1_by_definition(*outcomes(logits, target), bins)
        assert debiased_ece(logits, target, bins=bins, norm=1) == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("norm", [1, 2])
def test_equal_confidences_do_not_bias_debiased_errors(norm):
    gap, found = 0.05, []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        confidence = torch.randint(6, 11, (2_000,), generator=generator).double() / 11  # five different ones
        correct = torch.rand(2_000, generator=generator, dtype=torch.float64) < confidence - gap
        logits = torch.stack([confidence, 1 - confidence], 1).log()
        predictions = Predictions.of(logits, (~correct).long())
        found.append(debiased_ece(predictions, norm=norm))
        assert debiased_ece(predictions.histogram, norm=norm) == pytest.approx(found[-1], abs=1e-9)
    assert np.mean(found) == pytest.approx(gap, abs=0.005)


def test_debiased_l1_equals_the_resampling_of_the_paper():
    logits, target = batch(0, 600)
    resampled = debiased_l1_by_definition(*outcomes(logits, target), 15, np.random.default_rng(0))
    found = debiased_ece(logits, target, norm=1)
    assert found == pytest.approx(resampled, abs=2e-4)
    assert 0 < found < adaptive_ece(logits, target) - 1e-3


@pytest.mark.parametrize("options", [{}, {"norm": 1}])
def test_equal_width_sweep_of_a_histogram_is_close(options):
    logits, target = batch(1, 20_000)
    exact, close = (
        sweep_ece(*each, binning="equal-width", **options)
        for each in ((logits, target), (of(logits, target),))
    )
    assert close == pytest.approx(exact, rel=0.1)


def test_sweep_stops_at_the_first_number_of_bins_that_is_not_monotone():
    # Two bins fall, three would rise again: one bin counts.
    confidence = torch.tensor([0.6, 0.65, 0.7, 0.75, 0.8, 0.85], dtype=torch.float64)
    correct = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)
    logits = torch.stack([confidence.logit(), torch.zeros(6, dtype=torch.float64)], 1)
    target = (~correct).long()
    for bins, accuracies in ((2, [2 / 3, 1 / 3]), (3, [1 / 2, 1 / 2, 1 / 2])):
        pooled = Predictions.of(logits, target).equal_mass(bins)
        assert (pooled.correct / pooled.count).tolist() == pytest.approx(accuracies)
    assert sweep_ece(logits, target) == pytest.approx(0.725 - 0.5, abs=1e-12)


def test_sweep_tries_512_bins():
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(2_000, 2, generator=generator, dtype=torch.float64) - 2  # not as sigmoids
    target = logits.argmax(1)
    confidence, correct = outcomes(logits, target)
    least = confidence.argmin()
    target[least], correct[least] = 1 - target[least], 0  # the least confident is wrong: no accuracy falls
    share, gap = gaps(equal_mass_groups(confidence, 512), confidence, correct)
    expected = np.sqrt((share * gap**2).sum())
    assert sweep_ece(logits, target) == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("samples", [1, 300, 2_000])
@pytest.mark.parametrize("target_of", [torch.argmax, torch.argmin])
@pytest.mark.parametrize("binning", ["equal-mass", "equal-width"])
def test_sweep_takes_the_most_bins_if_all_predictions_are_alike(samples, target_of, binning):
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(samples, 2, generator=generator, dtype=torch.float64) - 2  # not as sigmoids
    target = target_of(logits, 1)  # never wrong, or always: no number of bins falls
    confidence, correct = outcomes(logits, target)
    grouped = equal_mass_groups if binning == "equal-mass" else equal_width_groups
    share, gap = gaps(grouped(confidence, min(samples, 512)), confidence, correct)
    expected = np.sqrt((share * gap**2).sum())
    assert sweep_ece(logits, target, binning=binning) == pytest.approx(expected, rel=0, abs=1e-12)


def test_sweep_binning(golden_batch):
    with pytest.raises(ValueError, match="binning must be one of 'equal-mass', 'equal-width'"):
        sweep_ece(*golden_batch, binning="width")


@pytest.mark.parametrize("norm", [0, 3, 1.5, "2"])
def test_sweep_norm(golden_batch, norm):
    with pytest.raises(ValueError, match="norm must be one of 1, 2"):
        debiased_ece(*golden_batch, norm=norm)
    with pytest.raises(ValueError, match="norm must be one of 1, 2"):
        sweep_ece(*golden_batch, norm=norm)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("spread", [1.0, 3.0, 10.0])
def test_smooth_equals_its_definition(spread, rounded):
    logits, target = batch(int(spread), 200, spread=spread, rounded=rounded)
    expected = smooth_by_definition(*outcomes(logits, target))
    assert 0.01 < expected < 0.6
    assert smooth_ece(logits, target) == pytest.approx(expected, rel=1e-3)


def random_predictions(size, sharpness):
    generator = torch.Generator().manual_seed(size)
    logits = 2 * torch.randn(size, 5, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return Predictions.of(sharpness * logits, target)


def alternating_predictions(levels):
    """Too high and too low in turns along the probability, so that smoothing cancels nearly everything."""
    probabilities = 0.2 + 0.6 * (torch.arange(levels, dtype=torch.float64) + 0.5) / levels
    rates = probabilities + torch.where(torch.arange(levels) % 2 == 0, 0.2, -0.2)
    target = (torch.arange(1000) < 1000 * rates.unsqueeze(1)).long()
    return Predictions.of(probabilities.logit().repeat_interleave(1000), target.flatten(), binary=True)


@pytest.mark.parametrize(
    "predictions",
    [
        *(random_predictions(size, sharpness) for size in (20, 1_000) for sharpness in (0.2, 1.0, 3.0)),
        alternating_predictions(50),
        alternating_predictions(100),
    ],
)
def test_smooth_is_the_error_of_the_width_that_equals_it(predictions):
    spectrum = dct(predictions.residual(predictions.cells).numpy())

    def error(width):
        kernel = np.exp(-0.5 * (np.pi * width * np.arange(len(spectrum))) ** 2)
        return np.abs(idct(spectrum * kernel)).sum()

    expected = brentq(lambda width: error(width) - width, 0, 1, xtol=1e-12)
    assert smooth_ece(predictions) == pytest.approx(expected, rel=0, abs=2e-8)


def test_smooth_of_resamples_takes_few_steps_and_is_that_of_each(monkeypatch):
    """Beside other rows: one without residuals, and one whose error is narrower than a cell."""
    rows = torch.randn(50, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 5_000
    rows[0] = 0
    rows[1] = 0
    rows[1, 511] = -6e-4
    rows[2, :100] = torch.rand(100, dtype=torch.float64) / 500
    steps = []
    plain = torch.fft.irfft
    monkeypatch.setattr(torch.fft, "irfft", lambda *a, **k: steps.append(1) or plain(*a, **k))
    found = smooth_ece_of(SimpleNamespace(cells=512, residual=lambda _: rows))
    assert len(steps) <= 14
    assert found[0] == 0
    assert found[1] == pytest.approx(6e-4, abs=1e-8)
    for row, value in zip(rows, found, strict=True):
        alone = smooth_ece_of(SimpleNamespace(cells=512, residual=lambda _, row=row: row))
        assert value == pytest.approx(float(alone), abs=2e-8)


def test_smooth_of_small_errors():
    """One error of 0.002 alone at each of two levels far apart: nothing cancels, whatever the width."""
    rows, target = [], []
    for level, accuracy in [(0.602, 0.6), (0.898, 0.9)]:
        rows.append(torch.tensor([[np.log(level / (1 - level)), 0.0]], dtype=torch.float64).expand(1_000, 2))
        target.append((torch.arange(1_000) >= round(1_000 * accuracy)).long())
    logits, target = torch.cat(rows), torch.cat(target)
    assert smooth_ece(logits, target) == pytest.approx(0.002, rel=2e-3)


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 1.0])
def test_all_confidences_equal(accuracy):
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64).expand(40, 2)
    target = (torch.arange(40) >= round(40 * accuracy)).long()
    gap = abs(torch.tensor(2.0, dtype=torch.float64).sigmoid().item() - accuracy)
    for metric in (ece, mce, ece_l2, smooth_ece):
        assert metric(logits, target) == pytest.approx(gap, abs=1e-9)
    assert adaptive_ece(logits, target, bins=1) == pytest.approx(gap, abs=1e-12)
    assert adaptive_ece(logits, target) >= gap - 1e-12
    assert adaptive_ece(of(logits, target)) == pytest.approx(gap, abs=1e-12)


def test_certain_elements_lie_in_the_last_bin():
    logits = torch.tensor([[1e4, 0.0], [0.0, 1e4], [3.0, 0.0], [0.0, 0.0]])
    pooled = Predictions.of(logits, torch.zeros(4).long()).equal_width(15)
    assert pooled.count.tolist() == [0] * 7 + [1] + [0] * 6 + [3]
    assert mce(logits[:2], torch.zeros(2).long()) == 0.5


@pytest.mark.parametrize("metric", BINNED)
@pytest.mark.parametrize("bins", [0, -3])
def test_no_bins(golden_batch, metric, bins):
    with pytest.raises(ValueError, match="bins"):
        metric(*golden_batch, bins=bins)
    with pytest.raises(ValueError, match="bins"):
        metric(of(*golden_batch), bins=bins)


# ------------------------------------------------------------------------- exact figures, and streamed


def straddling(histogram, bins):
    """The documented bound: for each boundary between equal-mass bins, the share of the cell it cuts."""
    count = histogram.count.numpy()
    ends = np.cumsum([len(group) for group in np.array_split(np.arange(int(count.sum())), bins)])[:-1]
    upper = np.cumsum(count)
    cells = np.searchsorted(upper, ends)  # the cell that holds the last element before the boundary
    cut = upper[cells] != ends
    return (count[cells] * cut).sum() / count.sum()


@pytest.mark.filterwarnings(
    "ignore:these logits look like"
)  # a few rounded logits may look like probabilities
@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31),
    st.integers(1, 400),
    st.floats(0.05, 20),
    st.booleans(),
    st.sampled_from([1, 2, 10, 15, 50]),
)
@example(seed=1, size=1, spread=0.5, rounded=True, bins=1)
def test_streamed_figures(seed, size, spread, rounded, bins):
    logits, target = batch(seed, size, spread=spread, rounded=rounded)
    histogram = of(logits, target)
    for metric in EXACT_FROM_HISTOGRAM:
        exact, streamed = metric(logits, target, bins=bins), metric(histogram, bins=bins)
        assert streamed == pytest.approx(exact, rel=0, abs=1e-12)
    error = abs(adaptive_ece(histogram, bins=bins) - adaptive_ece(logits, target, bins=bins))
    assert error <= straddling(histogram, bins) + 1e-12


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_streamed_approximations_on_many_elements(spread):
    logits, target = batch(1, 20_000, spread=spread)
    histogram, predictions = of(logits, target), Predictions.of(logits, target)
    assert straddling(histogram, 15) < 0.15
    assert adaptive_ece(histogram) == pytest.approx(adaptive_ece(predictions), abs=2e-3)
    assert debiased_ece(histogram) == pytest.approx(debiased_ece(predictions), abs=2e-3)
    # Another number of bins may end the sweep.
    assert sweep_ece(histogram) == pytest.approx(sweep_ece(predictions), abs=1e-2)
    assert smooth_ece(predictions) > 0.01
    assert smooth_ece(histogram) == pytest.approx(smooth_ece(predictions), rel=1e-2)


def test_streamed_where_every_cell_holds_one_confidence():
    """Then a histogram knows all, and approximations are exact but for cells cut in two."""
    edges = cell_edges(torch.device("cpu"))
    middle = ((edges[:-1] + edges[1:]) / 2)[500:1700:40]
    logits = torch.stack([middle.logit(), torch.zeros_like(middle)], 1)[middle > 0.5]
    target = torch.randint(2, (len(logits),), generator=torch.Generator().manual_seed(1))
    histogram = of(logits, target)
    assert histogram.count.max() == 1
    for metric in (adaptive_ece, debiased_ece, sweep_ece, smooth_ece):
        assert metric(histogram) == pytest.approx(metric(logits, target), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("metric", [ece, smooth_ece])
def test_streamed_numbers_that_are_not_finite(golden_batch, metric):
    logits, target = golden_batch
    logits = logits.clone()
    logits[3, 1] = torch.nan
    histogram = of(logits, target)
    with pytest.raises(ValueError, match="NaN or infinite"):
        metric(histogram)


def test_a_histogram_that_says_it_is_not_finite(golden_batch):
    good = of(*golden_batch)
    bad = ConfidenceHistogram(good.samples * torch.nan, *good.tensors()[1:])
    for metric in (*BINNED, sweep_ece, smooth_ece):
        with pytest.raises(ValueError, match="NaN or infinite"):
            metric(good + bad)


# ------------------------------------------------------------------------------------------------ bias


def drawn(slope, size, generator):
    """Ten classes, confidence c even on (0.1, 1), a known posterior: right with 0.55 + slope (c - 0.55)."""
    confidence = 0.1 + 0.9 * torch.rand(size, generator=generator, dtype=torch.float64)
    correct = torch.rand(size, generator=generator, dtype=torch.float64) < 0.55 + slope * (confidence - 0.55)
    logits = torch.zeros(size, 10, dtype=torch.float64)
    logits[:, 0] = (9 * confidence / (1 - confidence)).log()
    return Predictions.of(logits, (~correct).long())


# Bias, measured over 200 repetitions (standard errors 0.0003 to 0.0018), of the estimators with 15 bins. The
# true mean gap is 0.225 (1 - slope), the true root mean square gap 0.26 (1 - slope).
#
#   slope   samples |     ECE   smooth ECE |   L2 ECE   debiased ECE
#     0.6       500 | +0.0153      +0.0004 |  +0.0229        -0.0054
#     0.6     5,000 | +0.0012      -0.0000 |  +0.0021        -0.0009
#     0.9       500 | +0.0380      +0.0204 |  +0.0495        -0.0023
#     0.9     5,000 | +0.0060      +0.0044 |  +0.0081        -0.0015
#     1.0       500 | +0.0549      +0.0387 |  +0.0689        +0.0171
#     1.0     5,000 | +0.0174      +0.0179 |  +0.0219        +0.0057
#
# So smooth ECE does not beat 15 bins where calibration is perfect and samples are many: its width shrinks
# with the error. Nor by much where the gap has one sign everywhere, which binning inflates less: with two
# classes, confidence even on (0.5, 1) and a gap of 0.02 throughout, both are off by +0.0021 at 5,000 samples.
@pytest.mark.parametrize("size", [500, 5_000])
@pytest.mark.parametrize("slope", [0.6, 0.9, 1.0])
def test_debiased_and_smooth_errors_are_less_biased(slope, size):
    generator = torch.Generator().manual_seed(size)
    metrics = [ece, smooth_ece, ece_l2, debiased_ece]
    repetitions = 30 if size == 500 else 15
    samples = (drawn(slope, size, generator) for _ in range(repetitions))
    mean = np.mean([[metric(sample) for metric in metrics] for sample in samples], 0)

    # The population: mean and root mean square of the gap, and the smooth error, which the next test checks.
    gap = (1 - slope) * (np.linspace(0.1, 1, 200_001) - 0.55)
    smooth = {0.6: 0.0867, 0.9: 0.0224, 1.0: 0.0}[slope]
    true = [np.abs(gap).mean(), smooth, np.sqrt((gap**2).mean()), np.sqrt((gap**2).mean())]
    plain_bias, smooth_bias, plain_l2_bias, debiased_bias = np.abs(mean - true)
    assert debiased_bias < plain_l2_bias
    assert debiased_bias < 0.5 * plain_l2_bias or plain_l2_bias < 0.005
    if (slope, size) != (1.0, 5_000):
        assert smooth_bias < plain_bias


@pytest.mark.parametrize(("slope", "population"), [(0.6, 0.0867), (0.9, 0.0224)])
def test_smooth_error_of_the_population(slope, population):
    """What the test above takes for the truth: the fixed point of the definition, of the true residuals."""
    t = (np.arange(600) + 0.5) / 600
    c = 0.1 + 0.9 * t
    residual = (slope - 1) * (c - 0.55)

    def error(width):
        kernel = sum(
            np.exp(-0.5 * ((t[:, None] - image) / width) ** 2)
            for turn in (-2, 0, 2)
            for image in (turn + c, turn - c)
        )
        return np.abs(kernel @ residual / len(c)).mean() / (width * np.sqrt(2 * np.pi))

    assert brentq(lambda width: error(width) - width, 5e-3, 0.5, xtol=1e-5) == pytest.approx(
        population, abs=6e-5
    )
