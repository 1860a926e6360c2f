import json
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrant.histogram import ConfidenceHistogram
from calibrant.layout import arrange
from calibrant.metrics import ece

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
