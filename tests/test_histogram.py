import copy
import math
import pickle
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrant.histogram import ConfidenceHistogram, Outcomes, _cell_of, bin_with_width, cell_edges
from calibrant.kernels import TopProbability, reduce_classes
from calibrant.layout import arrange
from tests.metrics.test_calibration import shared

CPU = torch.device("cpu")
EDGES = cell_edges(CPU)
CELLS = len(EDGES) - 1
DIVISORS = [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 25, 30, 50, 60, 75, 100, 150, 300]


def batch(seed, size, classes=4, spread=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * spread
    return logits.to(dtype), torch.randint(classes, (size,), generator=generator)


def of(logits, target):
    return ConfidenceHistogram.of(arrange(logits, target))


def of_confidences(confidence, correct):
    """The histogram of given confidences, as numbers of two classes' logits; they must be above 1/2."""
    confidence = torch.as_tensor(confidence, dtype=torch.float64)
    logits = torch.stack([confidence.logit(), torch.zeros_like(confidence)], 1)
    return of(logits, 1 - torch.as_tensor(correct).long())


def assert_same(left, right, tolerance=1e-12):
    assert left.samples.item() == right.samples.item()
    torch.testing.assert_close(left.count, right.count, rtol=0, atol=0)
    torch.testing.assert_close(left.correct, right.correct, rtol=0, atol=0)
    torch.testing.assert_close(left.confidence, right.confidence, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------- cells


def test_cell_edges_are_strictly_increasing_from_0_to_1():
    assert EDGES.dtype == torch.float64
    assert (EDGES.diff() > 0).all()
    assert EDGES[0] == 0
    assert EDGES[-1] == 1


def test_cell_edges_contain_every_equal_width_edge_exactly():
    held = set(EDGES.tolist())
    for bins in DIVISORS:
        assert {k / bins for k in range(bins + 1)} <= held


def test_cells_are_fine_where_confident_networks_live():
    tail = EDGES[EDGES > 1 - 1 / 300]
    assert len(tail) > 1000
    # no cell of the tail is wider than a fiftieth of the doubt that is left
    inner = EDGES[(EDGES > 0.5) & (EDGES < 1 - 2e-13)]
    assert (inner.diff() / (1 - inner[:-1])).max() < 1 / 50


def test_state_is_small_whatever_the_number_of_elements():
    for size in (0, 1, 10_000):
        histogram = of(*batch(0, size))
        assert sum(t.numel() * t.element_size() for t in histogram.tensors()) < 128 * 1024
        assert histogram.count.shape == (CELLS,)


def adversarial(dtype):
    """Confidences at, just below and just above every edge, and some more of the same kind."""
    edges = EDGES.to(dtype)
    up, down = torch.tensor(2.0, dtype=dtype), torch.tensor(-1.0, dtype=dtype)
    near = [edges]
    for direction in (up, down):
        step = edges
        for _ in range(8):
            step = torch.nextafter(step, direction)
            near.append(step)
    tiny = torch.finfo(dtype).tiny
    special = torch.tensor([1.0, tiny, tiny / 4, 1e-30, 1e-7, 0.5], dtype=dtype)
    values = torch.cat([*near, special])
    return values[(values > 0) & (values <= 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["adversarial", "uniform", "confident", "timid"])
def test_every_confidence_is_in_its_cell(dtype, kind):
    uniform = torch.rand(300_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    confidence = {
        "adversarial": adversarial(dtype),
        "uniform": uniform,
        "confident": 1 - torch.exp(-40 * uniform),
        "timid": torch.exp(-40 * uniform),
    }[kind].to(dtype)
    confidence = confidence[confidence > 0]
    exact = confidence.double()
    cell = _cell_of(confidence)
    of_bins = torch.isin(EDGES, torch.arange(301, dtype=torch.float64) / 300)
    edges = torch.where(of_bins, EDGES * (1 + 2**-20), EDGES)
    expected = torch.bucketize(exact, edges) - 1  # edges[i-1] < v <= edges[i]
    assert torch.equal(cell, expected)
    assert (edges[cell] < exact).all()
    assert (exact <= edges[cell + 1]).all()


def test_multiples_of_a_300th_close_their_cells():
    multiples = torch.arange(1, 301, dtype=torch.float64) / 300
    assert torch.equal(EDGES[_cell_of(multiples) + 1], multiples)


def test_certainty_and_zero_are_in_the_outermost_cells():
    assert _cell_of(torch.tensor([1.0, 0.0])).tolist() == [CELLS - 1, 0]
    assert of(torch.tensor([[1000.0, 0.0]]), torch.tensor([0])).count[-1] == 1


# --------------------------------------------------------------------------------------- the statistic


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(0, 40), st.integers(0, 40), st.integers(2, 6))
def test_adding_is_taking_both_data_sets(seed, first, second, classes):
    logits, target = batch(seed, first + second, classes)
    added = of(logits[:first], target[:first]) + of(logits[first:], target[first:])
    assert_same(of(logits, target), added)


def test_counts_confidences_and_correctness_are_what_they_say():
    logits, target = batch(1, 1_000)
    histogram = of(logits, target)
    probability = logits.softmax(1)
    assert histogram.samples.item() == histogram.count.sum().item() == 1_000
    assert histogram.correct.sum().item() == (probability.argmax(1) == target).sum().item()
    assert histogram.confidence.sum().item() == pytest.approx(probability.amax(1).sum().item(), rel=1e-13)
    filled = histogram.count > 0
    mean = histogram.confidence[filled] / histogram.count[filled]
    assert (mean > EDGES[:-1][filled] - 1e-15).all()
    assert (mean < EDGES[1:][filled] + 1e-15).all()
    assert (histogram.correct <= histogram.count).all()


def test_no_gradient_is_recorded():
    logits, target = batch(2, 8)
    histogram = of(logits.requires_grad_(), target)
    assert not any(tensor.requires_grad for tensor in histogram.tensors())


@pytest.mark.parametrize("shape", [(60, 4), (3, 4, 4, 5)])
def test_ignoring_is_deleting(shape):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    target = torch.randint(4, shape[:1] + shape[2:], generator=generator)
    ignored = torch.rand(target.shape, generator=generator) < 0.4
    rows, labels = logits.movedim(1, -1)[~ignored], target[~ignored]
    poisoned = logits.masked_fill(ignored.unsqueeze(1), math.nan)  # whatever an ignored element holds
    for held in (logits, poisoned):
        histogram = of(held, target.masked_fill(ignored, -100))
        assert histogram.samples.item() == len(labels) < target.numel()
        assert_same(histogram, of(rows, labels))


def test_ignoring_is_deleting_across_blocks():
    logits, target = batch(3, 150_000, classes=2)
    ignored = target.roll(1) == 1
    rows, labels = logits[~ignored], target[~ignored]
    histogram = of(logits, target.masked_fill(ignored, -100))
    assert_same(histogram, of(rows, labels), tolerance=1e-9)
    confidence, correct = rows.softmax(1).amax(1), rows.argmax(1) == labels
    assert_same(histogram, ConfidenceHistogram.of_outcomes(confidence, correct), tolerance=1e-9)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dense_equals_flattened(memory_format):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64)
    target = torch.randint(4, (3, 5, 6), generator=generator)
    rows = logits.movedim(1, -1).reshape(-1, 4)
    assert_same(of(logits.to(memory_format=memory_format), target), of(rows, target.reshape(-1)))


def test_nothing_is_the_neutral_element():
    histogram = of(*batch(5, 20))
    assert_same(histogram + of(torch.empty(0, 4), torch.empty(0, dtype=torch.int64)), histogram)


@pytest.mark.parametrize("dense", [False, True])
def test_at_an_exact_tie_the_first_class_is_the_prediction(dense):
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, 3.0, 3.0], [0.0, 1.0, 0.5]])
    for label in range(3):
        target = torch.full((4,), label)
        expected = (logits.argmax(1) == label).sum().item()
        histogram = (
            of(logits.T.unsqueeze(0).contiguous(), target.unsqueeze(0)) if dense else of(logits, target)
        )
        assert histogram.correct.sum().item() == expected
    assert of(logits[:1], torch.tensor([0])).correct.sum() == 1
    assert of(logits[:1], torch.tensor([1])).correct.sum() == 0


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(2, 8), st.integers(1, 5))
def test_ties_as_in_argmax(seed, classes, values):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (30, classes), generator=generator).float()
    target = torch.randint(classes, (30,), generator=generator)
    assert of(logits, target).correct.sum().item() == (logits.argmax(1) == target).sum().item()


def test_16_bit_logits_count_as_their_float32_values():
    for dtype in (torch.float16, torch.bfloat16):
        logits, target = batch(6, 500, dtype=dtype)
        assert_same(of(logits, target), of(logits.float(), target))


# ----------------------------------------------------------------------------------------- equal width


def pooled_by_numpy(confidence, correct, bins):
    """Sums over bins (lo, hi], element by element's own comparison with every edge and its slack."""
    confidence, correct = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    edges = np.arange(bins + 1) / bins * (1 + 2**-20)
    inside = (edges[:-1, None] < confidence) & (confidence <= edges[1:, None])
    return inside.sum(1), (inside * confidence).sum(1), (inside * correct).sum(1)


def assert_pooled(bins, confidence, correct):
    number = len(bins.count)
    count, summed, right = pooled_by_numpy(confidence, correct, number)
    assert bins.edges.tolist() == [k / number for k in range(number + 1)]
    assert bins.count.tolist() == count.tolist()
    assert bins.correct.tolist() == right.tolist()
    np.testing.assert_allclose(bins.confidence.numpy(), summed, rtol=1e-12, atol=1e-12)
    gap = np.where(count > 0, (summed - right) / np.maximum(count, 1), 0)
    np.testing.assert_allclose(bins.gap.numpy(), gap, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bins", DIVISORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_width_is_exact(bins, dtype):
    logits, target = batch(7, 2_000, classes=6, spread=2.0, dtype=dtype)
    elements = arrange(logits, target)
    confidence = reduce_classes(elements, TopProbability())
    assert_pooled(ConfidenceHistogram.of(elements).equal_width(bins), confidence, logits.argmax(1) == target)


@pytest.mark.parametrize("bins", DIVISORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_width_is_exact_for_confidences_at_the_edges(bins, dtype):
    multiples = torch.arange(1, 301, dtype=torch.float64).div(300).to(dtype)
    up, down = torch.tensor(2.0, dtype=dtype), torch.tensor(0.0, dtype=dtype)
    confidence = torch.cat([multiples, multiples.nextafter(up)[:-1], multiples.nextafter(down)])
    correct = torch.rand(len(confidence), generator=torch.Generator().manual_seed(8)) < 0.5
    histogram = ConfidenceHistogram.of_outcomes(confidence, correct)
    assert_pooled(histogram.equal_width(bins), confidence, correct)


@pytest.mark.parametrize("bins", [7, 0, -15, 301, 600])
def test_equal_width_names_what_it_can_do(bins):
    with pytest.raises(ValueError, match=r"divisor of 300") as caught:
        of(*batch(0, 3)).equal_width(bins)
    assert str(DIVISORS) in str(caught.value)
    assert str(bins) in str(caught.value)


# ------------------------------------------------------------------------------------------ equal mass


def one_sample_per_cell(seed, number):
    """Confidences above 1/2 in cells of their own, each in the middle of its cell."""
    generator = np.random.default_rng(seed)
    # the last cells are a few units in the last place wide: softmax could not hit them
    candidates = np.flatnonzero((EDGES[:-1].numpy() > 0.5) & (EDGES[1:].numpy() < 1 - 1e-9))
    cells = np.sort(generator.choice(candidates, number, replace=False))
    edges = EDGES.numpy()
    return (edges[cells] + edges[cells + 1]) / 2, generator.random(number) < 0.7


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 400), st.integers(1, 40))
def test_equal_mass_is_sort_and_split(seed, number, bins):
    confidence, correct = one_sample_per_cell(seed, number)
    shuffled = np.random.default_rng(seed).permutation(number)
    pooled = of_confidences(confidence[shuffled], correct[shuffled]).equal_mass(bins)
    groups = np.array_split(np.arange(number), bins)
    assert pooled.count.tolist() == [len(group) for group in groups]
    assert pooled.count.max() - pooled.count.min() <= 1
    assert pooled.correct.tolist() == [correct[group].sum() for group in groups]
    np.testing.assert_allclose(
        pooled.confidence.numpy(), [confidence[group].sum() for group in groups], rtol=1e-9, atol=1e-9
    )
    edges = pooled.edges.numpy()
    for b, group in enumerate(groups):
        assert (edges[b] < confidence[group]).all()
        assert (confidence[group] <= edges[b + 1]).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 12))
def test_a_crowded_cell_goes_where_its_middle_element_goes(seed, crowd, bins):
    confidence, _ = one_sample_per_cell(seed, len(crowd))
    cells = np.repeat(np.arange(len(crowd)), crowd)
    pooled = of_confidences(confidence[cells], np.ones(len(cells), dtype=bool)).equal_mass(bins)
    group = np.repeat(np.arange(bins), [len(part) for part in np.array_split(cells, bins)])
    middle = np.cumsum(crowd) - crowd + (np.array(crowd) - 1) // 2
    assert pooled.count.tolist() == np.bincount(group[middle], weights=crowd, minlength=bins).tolist()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(1, 30), st.floats(0.01, 30))
def test_equal_mass_bins_partition_any_data(seed, number, bins, spread):
    logits, target = batch(seed, number, spread=spread)
    elements = arrange(logits, target)
    histogram, confidence = ConfidenceHistogram.of(elements), reduce_classes(elements, TopProbability())
    pooled = histogram.equal_mass(bins)
    assert len(pooled.edges) == bins + 1
    assert (pooled.edges.diff() >= 0).all()
    assert pooled.edges[0] < confidence.min()
    assert confidence.max() <= pooled.edges[-1]
    # bin b holds what lies in (edges[b], edges[b+1]], and a bin without width holds nothing
    inside = (pooled.edges[:-1, None] < confidence) & (confidence <= pooled.edges[1:, None])
    assert pooled.count.tolist() == inside.sum(1).tolist()
    assert (pooled.count[pooled.edges.diff() == 0] == 0).all()
    assert (pooled.edges.diff()[pooled.count == 0] == 0).all()
    torch.testing.assert_close(pooled.confidence, inside.double() @ confidence, rtol=1e-12, atol=1e-12)
    assert pooled.correct.sum().item() == (logits.argmax(1) == target).sum().item()


def test_equal_mass_is_near_equal_on_real_crowds():
    # Over-confident: most of the data above 0.99, which a uniform grid could not split.
    logits, target = batch(9, 20_000, classes=10, spread=12.0)
    count = of(logits, target).equal_mass(15).count
    assert (logits.softmax(1).amax(1) > 0.99).double().mean() > 0.5
    assert ((count / (20_000 / 15) - 1).abs() < 0.05).all()


@pytest.mark.parametrize("bins", [1, 2, 15])
@pytest.mark.parametrize("number", [1, 7, 100])
def test_equal_confidences_share_one_bin(bins, number):
    histogram = of(torch.tensor([[1.5, 0.0, -1.0]]).expand(number, 3), torch.zeros(number, dtype=torch.int64))
    pooled = histogram.equal_mass(bins)
    assert sorted(pooled.count.tolist()) == [0.0] * (bins - 1) + [float(number)]
    widths = pooled.edges.diff()
    assert (widths >= 0).all()
    assert (widths[pooled.count == 0] == 0).all()
    assert (widths[pooled.count > 0] > 0).all()
    confidence = torch.tensor([1.5, 0.0, -1.0]).softmax(0).max()
    assert pooled.edges[0] < confidence <= pooled.edges[-1]
    assert (pooled.gap[pooled.count == 0] == 0).all()
    assert pooled.gap.sum().item() == pytest.approx(confidence.item() - 1, abs=1e-6)


def test_more_bins_than_samples():
    pooled = of_confidences([0.6, 0.8, 0.9], [True, False, True]).equal_mass(5)
    assert pooled.count.tolist() == [1, 1, 1, 0, 0]
    assert (pooled.edges.diff() >= 0).all()


def test_no_samples():
    nothing = of(torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    for pooled in (nothing.equal_mass(5), nothing.equal_width(5)):
        assert pooled.count.tolist() == [0] * 5
        assert pooled.gap.tolist() == [0] * 5
        assert (pooled.edges.diff() >= 0).all()
        assert pooled.edges.isfinite().all()


@pytest.mark.parametrize("bins", [0, -1])
def test_equal_mass_needs_a_bin(bins):
    histogram = ConfidenceHistogram.of(arrange(torch.zeros(2, 3), torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=f"at least 1, got {bins}"):
        histogram.equal_mass(bins)


# ------------------------------------------------------------------------------------------- outcomes


def outcomes_of(logits, target):
    return Outcomes.of(arrange(logits, target))


def bits(pooled):
    return [values.tolist() for values in (pooled.edges, pooled.count, pooled.confidence, pooled.correct)]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 20))
def test_outcomes_of_parts_are_those_of_the_whole(seed, sizes, bins):
    logits, target = batch(seed, sum(sizes))
    target[torch.arange(len(target)) % 5 == 3] = -100
    parts = zip(logits.split(sizes), target.split(sizes), strict=True)
    total = reduce(add, [outcomes_of(*part) for part in parts])
    whole = outcomes_of(logits, target)
    assert total.samples == whole.samples == (target != -100).sum()
    assert torch.equal(total.pairs, whole.pairs)
    if whole.samples > 0:
        assert bits(total.equal_mass(bins)) == bits(whole.equal_mass(bins))


def test_adding_many_batches_keeps_few_parts():
    total = outcomes_of(*batch(0, 0))
    for _ in range(1000):
        total = total + outcomes_of(*batch(1, 3))
        assert len(total.parts) < 12
    assert total.pairs.shape == (2, 3000)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 400), st.integers(1, 40), st.floats(0.5, 30))
def test_outcomes_are_sorted_and_split(seed, number, bins, spread):
    elements = arrange(*batch(seed, number, spread=spread))
    pooled = Outcomes.of(elements).equal_mass(bins)
    confidence = reduce_classes(elements, TopProbability()).numpy()
    order = np.argsort(confidence)
    right = (elements.logits.argmax(1) == elements.labels).numpy()
    correct = shared(confidence, right)
    groups = np.array_split(order, bins)
    assert pooled.count.tolist() == [len(group) for group in groups]
    np.testing.assert_allclose(pooled.confidence, [confidence[g].sum() for g in groups], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(pooled.correct, [correct[g].sum() for g in groups], rtol=1e-9, atol=1e-9)
    assert (pooled.edges.diff() >= 0).all()
    assert pooled.edges[0] < confidence.min()
    assert pooled.edges[-1] == confidence.max()
    edges = pooled.edges.numpy()
    for lower, upper, group in zip(edges[:-1], edges[1:], groups, strict=True):
        assert (lower <= confidence[group] + 1e-12).all()  # equal but for rounding
        assert (confidence[group] <= upper).all()


@pytest.mark.parametrize("limit", [0, 99, 100, 1000])
def test_beyond_the_limit_outcomes_are_a_histogram(limit, monkeypatch):
    monkeypatch.setattr(Outcomes, "limit", limit)
    logits, target = batch(3, 150)
    target[:50] = -100  # which do not count
    total = reduce(add, [outcomes_of(*part) for part in zip(logits.split(30), target.split(30), strict=True)])
    assert total.samples == 100
    if limit >= 100:
        assert total.histogram.samples == 0
        assert total.pairs.shape == (2, 100)
    else:
        assert total.histogram.samples > 0
        assert sum(part.shape[1] for part in total.parts) <= limit
        assert_same(total.counted().histogram, of(logits, target))
        assert bits(total.equal_mass(7)) == bits(of(logits, target).equal_mass(7))


def test_ignored_elements_of_one_batch_do_not_count_for_the_limit(monkeypatch):
    monkeypatch.setattr(Outcomes, "limit", 1000)
    logits, target = batch(3, 1500)
    target[500:] = -100
    some = outcomes_of(logits, target)
    assert some.histogram.samples == 0
    assert bits(some.equal_mass(7)) == bits(outcomes_of(logits[:500], target[:500]).equal_mass(7))
    target[:] = 0
    target[1001:] = -100
    assert outcomes_of(logits, target).histogram.samples == 1001


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 400), st.sampled_from([1, 15, 30]))
def test_equal_width_bins_of_outcomes_are_those_of_a_histogram(seed, number, bins):
    logits, target = batch(seed, number)
    found, expected = outcomes_of(logits, target).equal_width(bins), of(logits, target).equal_width(bins)
    for name in ("edges", "count", "confidence", "correct"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    counted = outcomes_of(logits, target).counted().equal_width(bins)
    assert torch.equal(counted.count, expected.count)


def test_outcomes_move_and_are_copied_with_all_parts():
    total = outcomes_of(*batch(0, 5)) + outcomes_of(*batch(1, 3))
    assert len(total.parts) == 2
    assert all(tensor.device.type == "meta" for tensor in total.to(torch.device("meta")).tensors())
    for copied in (pickle.loads(pickle.dumps(total)), copy.deepcopy(total), total.to(CPU)):
        assert type(copied) is Outcomes
        assert torch.equal(copied.pairs, total.pairs)
        assert copied.samples == 8


def test_outcomes_that_are_not_finite_say_so():
    logits, target = batch(0, 4)
    logits[1] = math.nan
    total = outcomes_of(logits, target) + outcomes_of(*batch(1, 3))
    assert total.pairs.isnan().any()  # and `AdaptiveLoss.observe` makes samples NaN


def test_ignored_elements_that_a_gpu_keeps_do_not_count():
    kept = torch.tensor([[0.9, 0.0, 0.6], [1.0, 0.0, 0.0]], dtype=torch.float64)
    samples = torch.tensor(2.0, dtype=torch.float64)
    total = Outcomes(samples, ConfidenceHistogram.empty(CPU), (kept,))
    assert total.pairs.tolist() == [[0.9, 0.6], [1.0, 0.0]]
    assert total.equal_mass(2).count.tolist() == [1, 1]
    assert total.counted().histogram.samples == 2


def test_edges_of_equal_mass_are_above_confidences_that_rounding_took_above_an_edge():
    fifths = torch.tensor([0.6, 0.8]).repeat(10)
    confidence = torch.cat([fifths, fifths.nextafter(torch.ones(20))])
    bins = ConfidenceHistogram.of_outcomes(confidence, torch.ones(40)).equal_mass(2)
    assert bins.count.tolist() == [20, 20]
    assert bin_with_width(confidence, bins.edges).tolist() == [0, 1] * 20
