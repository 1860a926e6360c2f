"""No metric depends on the order of the data, however many confidences are equal."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calibrant import evaluate
from calibrant.calibrators import Spline
from calibrant.metrics import METRICS, Predictions, adaptive_ece
from calibrant.metrics.catalogue import Options, compute
from calibrant.metrics.resampling import Resamples, _drawn_counts

LEVELS = torch.tensor([0.4, 1.1, 2.3, 60.0], dtype=torch.float64)  # the last is a confidence of exactly 1


def tied(seed, size, levels=LEVELS, classes=3):
    """Elements with few distinct confidences, sorted by confidence and then by correctness."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(len(levels), (size,), generator=generator).sort().values
    logits = torch.zeros(size, classes, dtype=levels.dtype)
    top = torch.randint(classes, (size,), generator=generator)
    logits[torch.arange(size), top] = levels[place]
    right = torch.rand(size, generator=generator) < 0.3 + 0.6 * place / len(levels)
    order = (2 * place + right).argsort(stable=True)
    target = torch.where(right, top, (top + 1) % classes)
    # A true class with probability 0 has no NLL.
    logits[(logits.amax(1) == 60) & ~right] = 0.0
    return logits[order], target[order]


def permutations(size):
    yield torch.arange(size).flip(0)
    for seed in range(3):
        yield torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def test_the_example_of_four_confidences():
    """3,000 elements: with ties in the order of the data, 0.0165 or 0.2169."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.tensor([0.55, 0.7, 0.85, 0.95], dtype=torch.float64)
    confidence = confidence[torch.randint(4, (3000,), generator=generator)]
    right = torch.rand(3000, generator=generator) < confidence
    logits = torch.stack([confidence.logit(), torch.zeros(3000, dtype=torch.float64)], 1)
    target = (~right).long()
    shuffled, worst = adaptive_ece(logits, target), right.long().argsort(stable=True)
    assert adaptive_ece(logits[worst], target[worst]) == pytest.approx(shuffled, rel=1e-12)
    assert shuffled < 0.03


@cache
def in_several_orders(bins, dtype):
    logits, target = tied(bins, 150, classes=6)
    logits = logits.to(dtype)
    orders = [torch.arange(150), *permutations(150)]
    options = {"bins": bins, "kde": True, "background": 0, "resamples": 0}
    return [evaluate(logits[order], target[order], **options) for order in orders]


@pytest.mark.parametrize(("bins", "dtype"), [(7, torch.float64), (15, torch.float32), (15, torch.float64)])
@pytest.mark.parametrize("name", METRICS)
def test_no_metric_depends_on_the_order_of_ties(name, bins, dtype):
    first, *others = in_several_orders(bins, dtype)
    assert first.metrics[name] is not None
    for other in others:
        # A temperature is found to 1e-6, and a few sums over classes are in float32.
        tolerance = 1e-6 if dtype == torch.float64 else 1e-5
        assert other.metrics[name] == pytest.approx(first.metrics[name], rel=tolerance, abs=1e-9)
        assert other.p_value == first.p_value


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(1, 20), st.integers(1, 6))
def test_no_order_changes_any_metric(seed, size, bins, levels):
    logits, target = tied(seed, size, torch.linspace(0.3, 3, levels, dtype=torch.float64))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    options = {"bins": bins, "background": 0, "resamples": 0}
    expected, found = (evaluate(logits[each], target[each], **options) for each in (slice(None), order))
    for name, value in expected.metrics.items():
        same = None if value is None else pytest.approx(value, rel=1e-6, abs=1e-9)
        assert found.metrics[name] == same, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [3, 7, 10])
def test_the_place_of_a_pixel_does_not_matter(classes, dtype):
    """Not even in the last bit of its confidence, which would break a tie."""
    for pixels in (777, 1000):
        logits, target = tied(pixels, pixels, LEVELS.to(dtype), classes)

        def error(order, logits=logits, target=target):
            image = logits[order].T.unsqueeze(0).contiguous()
            return adaptive_ece(image, target[order].unsqueeze(0))

        first = error(torch.arange(pixels))
        assert [error(order) for order in permutations(pixels)] == pytest.approx([first] * 4, rel=1e-9)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_a_cut_group_gives_each_side_its_mean(bins):
    logits, target = tied(5, 200)
    predictions = Predictions.of(logits, target)
    pooled = predictions.equal_mass(bins)
    confidence, correct = predictions.confidence.numpy(), predictions.correct.numpy()
    mean = np.array([correct[confidence == value].mean() for value in confidence])
    groups = np.array_split(np.argsort(confidence), bins)
    assert pooled.count.tolist() == [len(group) for group in groups]
    np.testing.assert_allclose(pooled.correct, [mean[group].sum() for group in groups], rtol=1e-12)
    np.testing.assert_allclose(pooled.confidence, [confidence[group].sum() for group in groups], rtol=1e-12)
    assert pooled.correct.sum() == pytest.approx(correct.sum())


def test_resamples_that_draw_the_same_elements_have_the_same_figures():
    """Intervals depend on the draws, not on the order in which equal confidences lie."""
    logits, target = tied(2, 150)
    weight = torch.randint(4, (5, 150), generator=torch.Generator().manual_seed(0)).double()

    def figures(order: Tensor) -> dict[str, Tensor]:
        predictions, drawn = Predictions.of(logits[order], target[order]), weight[:, order]
        parts = {"confidences": Resamples.of(predictions, drawn), "counts": _drawn_counts(predictions, drawn)}
        return compute(parts, Options())

    expected = figures(torch.arange(150))
    for order in permutations(150):
        found = figures(order)
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-12)


def test_spline_does_not_depend_on_the_order_of_ties():
    logits, target = tied(3, 500)
    expected = Spline().fit(logits, target)(logits)
    for order in permutations(500):
        found = Spline().fit(logits[order], target[order])(logits)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
