"""Parts of data sets are drawn as promised: in proportion, without overlap, from the seed alone."""

import pytest
import torch

from calibrant.training.data.split import (
    DRAWS,
    DataSets,
    TensorSplit,
    long_tail,
    random_numbers,
    shuffled,
    stratified,
)

LABELS = torch.arange(5).repeat_interleave(torch.tensor([100, 60, 30, 9, 1]))[shuffled(200, 1)]


def test_stratified_parts_are_disjoint_and_in_proportion():
    sizes = (120, 50, 20)
    parts = stratified(LABELS, sizes, seed=3)
    assert [len(part) for part in parts] == list(sizes)
    together = torch.cat(parts)
    assert len(together.unique()) == 190
    for part, size in zip(parts, sizes, strict=True):
        assert torch.equal(part, part.sort().values)
        shares = torch.bincount(LABELS, minlength=5) * size / 200
        counts = torch.bincount(LABELS[part], minlength=5)
        assert ((counts - shares).abs() <= 1.5).all()


def test_balanced_classes_give_exactly_balanced_parts():
    labels = torch.arange(100).repeat(500)
    train, validation = stratified(labels, (45_000, 5_000), seed=0)
    assert torch.bincount(labels[train]).unique().tolist() == [450]
    assert torch.bincount(labels[validation]).unique().tolist() == [50]


def test_the_seed_and_nothing_else_decides():
    assert torch.equal(stratified(LABELS, (50,), 7)[0], stratified(LABELS, (50,), 7)[0])
    assert not torch.equal(stratified(LABELS, (50,), 7)[0], stratified(LABELS, (50,), 8)[0])


def test_a_stratified_draw_is_random_within_a_class():
    labels = torch.zeros(10, dtype=torch.long)
    often = torch.zeros(10)
    for seed in range(400):
        often[stratified(labels, (5,), seed)[0]] += 1
    assert often.min() > 150
    assert often.max() < 250


@pytest.mark.parametrize("sizes", [(201,), (150, 51), (-1, 5)])
def test_parts_that_cannot_be_drawn_are_refused(sizes):
    with pytest.raises(ValueError, match="cannot draw parts of"):
        stratified(LABELS, sizes, seed=0)


def test_parts_of_nothing():
    assert [len(part) for part in stratified(LABELS[:0], (0, 0), seed=0)] == [0, 0]


def test_the_long_tail_falls_off_exponentially():
    labels = torch.arange(10).repeat(4500)
    kept = long_tail(labels, 100, seed=0)
    counts = torch.bincount(labels[kept]).tolist()
    assert counts == [int(4500 * 100 ** (-k / 9) + 1e-9) for k in range(10)]
    assert counts[0] == 100 * counts[-1]
    assert len(kept.unique()) == len(kept)


def test_imbalance_one_keeps_everything_and_every_class_keeps_one():
    assert torch.equal(long_tail(LABELS, 1, seed=0), torch.arange(200))
    labels = torch.arange(3).repeat(4)
    assert torch.bincount(labels[long_tail(labels, 1000, seed=0)]).tolist() == [4, 1, 1]


@pytest.mark.parametrize(("imbalance", "num_classes"), [(0.5, None), (10, 6)])
def test_a_tail_that_cannot_be_is_refused(imbalance, num_classes):
    with pytest.raises(ValueError, match="imbalance"):
        long_tail(LABELS, imbalance, seed=0, num_classes=num_classes)


def test_random_numbers_are_uniform_and_independent():
    numbers = random_numbers(0, 0, torch.arange(20_000)).double()
    assert numbers.shape == (20_000, DRAWS)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    tenths = torch.stack([torch.bincount((column * 10).long(), minlength=10) for column in numbers.T])
    # Each count is binomial with a deviation of 42.
    assert (tenths - 2000).abs().max() < 5 * 42
    correlations = torch.corrcoef(numbers.T) - torch.eye(DRAWS)
    assert correlations.abs().max() < 0.04
    following = torch.corrcoef(torch.stack([numbers[:-1, 0], numbers[1:, 0]]))[0, 1]
    assert abs(following) < 0.04


def test_random_numbers_differ_by_seed_epoch_and_element():
    indices = torch.arange(4)
    found = [random_numbers(seed, epoch, indices) for seed in range(3) for epoch in range(3)]
    assert len(torch.cat(found).flatten().unique()) > 0.99 * 9 * 4 * DRAWS
    assert not torch.equal(random_numbers(0, 1, indices), random_numbers(1, 0, indices))


def test_random_numbers_do_not_depend_on_the_batch():
    whole = random_numbers(5, 9, torch.arange(10))
    assert torch.equal(whole[[7, 2]], random_numbers(5, 9, torch.tensor([7, 2])))
    assert torch.equal(whole[:, :3], random_numbers(5, 9, torch.arange(10), count=3))


def test_shuffled_is_a_permutation_by_seed_and_epoch():
    orders = {tuple(shuffled(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert torch.equal(shuffled(50, 1, 2), shuffled(50, 1, 2))


def test_tensor_splits_give_and_divide_what_they_hold():
    part = TensorSplit({"a": torch.arange(4), "b": torch.arange(8).reshape(4, 2)}, torch.tensor([0, 1, 2, 3]))
    inputs, targets = part.subset(torch.tensor([3, 1])).batch(torch.tensor([0]))
    assert inputs["a"].tolist() == [3]
    assert inputs["b"].tolist() == [[6, 7]]
    assert targets.tolist() == [3]
    with pytest.raises(ValueError, match="3"):
        TensorSplit(torch.zeros(3, 1), torch.zeros(2))


def test_class_counts_are_those_of_the_training_part():
    train = TensorSplit(torch.zeros(3, 1), torch.tensor([0, 2, 2]))
    data = DataSets(train, train, train, ("a", "b", "c", "d"))
    assert data.class_counts == (1, 0, 2, 0)
    maps = TensorSplit(torch.zeros(3, 1), torch.zeros(3, 2, 2))
    assert DataSets(maps, maps, maps, ("a",)).class_counts is None
