"""Coverage and size of prediction sets: additive, per class, with intervals."""

import math

import pytest
import torch
from scipy.stats import binomtest

from calibrant.conformal import SetCounts, evaluate_sets


def random_sets(size=300, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sets = torch.rand(size, classes, generator=generator) < 0.6
    return sets, torch.randint(classes, (size,), generator=generator)


def test_figures_equal_counting():
    sets, target = random_sets()
    figures = evaluate_sets(sets, target, level=0.9)
    held = sets[torch.arange(300), target]
    size = sets.sum(1).double()
    assert figures.samples == 300
    assert figures.coverage == pytest.approx(held.double().mean().item())
    interval = binomtest(int(held.sum()), 300).proportion_ci(0.9, method="exact")
    assert figures.coverage_interval == pytest.approx((interval.low, interval.high))
    assert figures.size == pytest.approx(size.mean().item())
    reach = 1.6448536269514722 * size.std(correction=0).item() / math.sqrt(300)
    assert figures.size_interval == pytest.approx((figures.size - reach, figures.size + reach))
    assert figures.empty == pytest.approx((size == 0).double().mean().item())
    assert figures.single == pytest.approx((size == 1).double().mean().item())
    for k, each in enumerate(figures.classes):
        own = target == k
        assert (each.name, each.count) == (str(k), int(own.sum()))
        assert each.coverage == pytest.approx(held[own].double().mean().item())
        assert each.size == pytest.approx(size[own].mean().item())
        interval = binomtest(int(held[own].sum()), each.count).proportion_ci(0.9, method="exact")
        assert each.coverage_interval == pytest.approx((interval.low, interval.high))


def test_the_size_of_a_single_set_has_no_interval():
    figures = evaluate_sets(torch.tensor([[True, False]]), torch.tensor([0]))
    assert figures.size == 1
    assert figures.size_interval is None
    assert figures.coverage_interval == pytest.approx((0.025, 1.0))


def test_parts_add_up_and_ignored_elements_do_not_count():
    sets, target = random_sets()
    target[::4] = -100
    whole = SetCounts.of(sets, target)
    parts = SetCounts.of(sets[:90], target[:90]) + SetCounts.of(sets[90:], target[90:])
    kept = SetCounts.of(sets[target != -100], target[target != -100])
    images = SetCounts.of(sets.view(3, 10, 10, 4).movedim(-1, 1), target.view(3, 10, 10))
    for other in (parts, kept, images):
        assert other.figures() == whole.figures()


def test_labels_in_8_bits_are_not_taken_for_ignored_ones():
    sets, target = torch.ones(3, 200, dtype=torch.bool), torch.tensor([156, 3, 4], dtype=torch.uint8)
    assert evaluate_sets(sets, target).samples == 3
    assert evaluate_sets(sets, target, ignore_index=3).samples == 2


def test_a_class_without_elements_has_no_coverage():
    figures = evaluate_sets(torch.ones(3, 3, dtype=torch.bool), torch.tensor([0, 0, 1]))
    assert figures.classes[2].coverage is None
    assert (figures.classes[2].count, figures.classes[2].size) == (0, None)
    named = SetCounts.of(torch.ones(1, 2, dtype=torch.bool), torch.tensor([0])).figures(
        class_names=("x", "y")
    )
    assert [each.name for each in named.classes] == ["x", "y"]


def test_wrong_arguments():
    sets, target = random_sets()
    with pytest.raises(TypeError, match=r"boolean tensor.*got torch\.float32"):
        evaluate_sets(sets.float(), target)
    with pytest.raises(TypeError, match="integer labels"):
        evaluate_sets(sets, target.float())
    with pytest.raises(ValueError, match=r"shape \(300,\)"):
        evaluate_sets(sets, target[1:])
    with pytest.raises(ValueError, match="from 0 to 3, got 0 to 9"):
        evaluate_sets(sets, target.clone().index_fill_(0, torch.tensor([2]), 9))
    with pytest.raises(ValueError, match="every element is ignored"):
        evaluate_sets(sets, torch.full((300,), -100))
