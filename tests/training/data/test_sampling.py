"""Random numbers and parts depend on the seed alone; parts are in proportion and do not overlap."""

import pytest
import torch

from calibrant.training.data.sampling import (
    DRAWS,
    draw_parts,
    long_tail,
    part_sizes,
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


@pytest.mark.parametrize(
    ("given", "shares", "expected"),
    [
        ((), (0.1, 0.2), {"validation": 10, "test": 20}),
        (("validation",), (0.9, 0.9), {"test": 90}),
        (("validation", "test"), (0.5, 0.5), {}),
        ((), (0.0, 1.0), {"validation": 0, "test": 100}),
    ],
)
def test_sizes(given, shares, expected):
    assert part_sizes(100, given, validation=shares[0], test=shares[1]) == expected


def test_rounding_never_asks_for_more_than_there_is():
    assert sum(part_sizes(3, (), validation=0.5, test=0.5).values()) == 3


@pytest.mark.parametrize(("validation", "test"), [(-0.1, 0), (0, 1.1), (0.6, 0.6)])
def test_shares_that_cannot_be_are_refused(validation, test):
    with pytest.raises(ValueError, match="must"):
        part_sizes(100, (), validation=validation, test=test)


def test_drawn_parts_make_up_the_whole_and_only_the_rest_is_long_tailed():
    targets = torch.arange(4).repeat(50)
    parts = draw_parts(targets, {"validation": 40, "test": 20}, imbalance=1, num_classes=4, seed=3)
    assert torch.equal(torch.cat(list(parts.values())).sort().values, torch.arange(200))
    tailed = draw_parts(targets, {"validation": 40, "test": 20}, imbalance=35, num_classes=4, seed=3)
    assert torch.bincount(targets[tailed["train"]]).tolist() == [35, 10, 3, 1]
    assert torch.equal(tailed["test"], parts["test"])
    everything = draw_parts(targets, {"test": 200}, imbalance=9, num_classes=4, seed=3)
    assert len(everything["train"]) == 0
