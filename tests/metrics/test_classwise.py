import json
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import pytest
import torch

from calibrant import layout
from calibrant.layout import arrange
from calibrant.metrics import ClassGaps, Predictions, classwise_ece, classwise_mce

METRICS = (classwise_ece, classwise_mce)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())


def batch(seed, size, classes, spread=2.0, rounded=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * spread
    target = torch.randint(classes, (size,), generator=generator)
    return (logits * 2).round() / 2 if rounded else logits, target


def by_definition(logits, target, bins):
    """One ECE and one MCE for each class, of its probability against whether it occurs; then their means."""
    logits = np.asarray(logits, np.float64)
    probability = np.exp(logits - logits.max(1, keepdims=True))
    probability /= probability.sum(1, keepdims=True)
    errors, largest = [], []
    for k in range(logits.shape[1]):
        s, hit, error, worst = probability[:, k], np.asarray(target) == k, 0.0, 0.0
        for b in range(bins):
            inside = (s > b / bins) & (s <= (b + 1) / bins)
            if b == 0:
                inside |= s == 0  # a probability that underflows
            if inside.any():
                gap = abs(s[inside].mean() - hit[inside].mean())
                error, worst = error + inside.mean() * gap, max(worst, gap)
        errors.append(error)
        largest.append(worst)
    return np.mean(errors), np.mean(largest)


def streamed(logits, target, pieces, bins=15):
    parts = zip(logits.tensor_split(pieces), target.tensor_split(pieces), strict=True)
    return reduce(add, [ClassGaps.of(arrange(*part), bins) for part in parts])


def test_golden():
    logits, target = torch.tensor(GOLDEN["logits"], dtype=torch.float64), torch.tensor(GOLDEN["target"])
    expected = pytest.approx(GOLDEN["classwise_ece"], rel=0, abs=1e-9)
    assert classwise_ece(logits, target) == expected
    assert classwise_ece(Predictions.of(logits, target), bins=15) == expected
    for pieces in (1, 7, 500):
        assert classwise_ece(streamed(logits, target, pieces)) == expected


@pytest.mark.parametrize("shape", [(300_000, 2), (40, 2, 90, 90)])
def test_the_rounding_of_large_probabilities_stays_out_of_small_bins(shape):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator) / 10
    target = torch.randint(2, shape[:1] + shape[2:], generator=generator)
    gaps = ClassGaps.of(arrange(logits, target))
    assert gaps.gap[gaps.count == 0].abs().sum() == 0
    assert classwise_mce(logits, target) == pytest.approx(classwise_mce(logits.double(), target), rel=1e-6)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("classes", [2, 5, 40])
@pytest.mark.parametrize("bins", [1, 2, 7, 15, 50])
def test_equals_the_definition(bins, classes, rounded):
    logits, target = batch(bins, 400, classes, rounded=rounded)
    gaps = streamed(logits, target, 9, bins)
    for metric, value in zip(METRICS, by_definition(logits, target, bins), strict=True):
        expected = pytest.approx(value, rel=0, abs=1e-12)
        assert metric(logits, target, bins=bins) == expected
        assert metric(gaps) == expected


@pytest.mark.parametrize("spread", [0.01, 30.0])
def test_flat_and_sharp_probabilities(spread):
    logits, target = batch(1, 300, 6, spread)
    for metric, value in zip(METRICS, by_definition(logits, target, 15), strict=True):
        assert metric(logits, target) == pytest.approx(value, rel=0, abs=1e-12)


def test_certain_and_uniform():
    target = torch.tensor([0, 0, 0, 1])
    # Class 0 is given 1 and occurs in 3/4; class 1 is given 0 and occurs in 1/4; class 2 is right.
    certain = torch.tensor([[1e4, 0.0, 0.0]]).expand(4, 3)
    assert classwise_ece(certain, target) == pytest.approx((1 / 4 + 1 / 4 + 0) / 3, abs=1e-12)
    uniform = (abs(1 / 3 - 3 / 4) + abs(1 / 3 - 1 / 4) + 1 / 3) / 3
    assert classwise_ece(torch.zeros(4, 3), target) == pytest.approx(uniform, abs=1e-7)


def test_gaps_by_class_and_bin():
    logits, target = batch(2, 500, 4)
    gaps = ClassGaps.of(arrange(logits, target), bins=10)
    probability = logits.softmax(1).numpy()
    for k in range(4):
        residual = probability[:, k] - (target == k).numpy()
        for b in range(10):
            inside = (probability[:, k] > b / 10) & (probability[:, k] <= (b + 1) / 10)
            assert gaps.gap[k, b].item() == pytest.approx(residual[inside].sum(), abs=1e-11)
    assert gaps.samples == 500


def test_additive_and_indifferent_to_blocks(monkeypatch):
    logits, target = batch(3, 4 * 5 * 6, 7)
    images = logits.view(4, 5, 6, 7).permute(0, 3, 1, 2).contiguous()
    labels = target.view(4, 5, 6).clone()
    labels[1, 2:4] = -100
    whole = ClassGaps.of(arrange(images, labels))
    parts = ClassGaps.of(arrange(images[:1], labels[:1])) + ClassGaps.of(arrange(images[1:], labels[1:]))
    monkeypatch.setattr(layout, "_CPU_BLOCK", 50)
    blocks = ClassGaps.of(arrange(images, labels))
    kept = labels.flatten() != -100
    deleted = ClassGaps.of(arrange(logits[kept], target[kept]))
    for other in (parts, blocks, deleted):
        assert other.samples == whole.samples == kept.sum()
        torch.testing.assert_close(other.gap, whole.gap, rtol=0, atol=1e-12)


def test_nothing_gathered():
    with pytest.raises(ValueError, match="empty data set"):
        classwise_ece(ClassGaps(torch.tensor(0.0), torch.zeros(3, 15), torch.zeros(3, 15)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_ignored_may_be_anything(value):
    logits, target = batch(4, 20, 3)
    expected, _ = by_definition(logits[1:], target[1:], 15)
    logits[0, 1], target[0] = value, -100
    assert classwise_ece(logits, target) == pytest.approx(expected, rel=0, abs=1e-12)


def test_streamed_numbers_that_are_not_finite():
    logits, target = batch(5, 20, 3)
    logits[0, 1] = torch.nan
    gaps = ClassGaps.of(arrange(logits, target))
    with pytest.raises(ValueError, match="NaN or infinite"):
        classwise_ece(gaps)
