from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from calibrant.training.batches import evaluation_batches, steps_per_epoch, training_batches
from calibrant.training.data import Split, TensorSplit


class Noting(Split):
    """Elements that are their own index, with the first random number they were given."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.targets = torch.arange(size)

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Any, Tensor]:
        first = torch.full((len(indices),), -1.0) if draws is None else draws[:, 0]
        return {"draw": first, "index": indices}, indices

    def subset(self, indices: Tensor) -> Split:
        raise NotImplementedError


def indices_of(batches: Any) -> list[list[int]]:
    return [target.tolist() for _, target in batches]


def epoch_of(number: int = 0, size: int = 23, **changes: Any) -> list[list[int]]:
    options = {"seed": 0, "epoch": number, "batch_size": 4, "drop_last": False} | changes
    return indices_of(training_batches(Noting(size), **options))


def test_an_epoch_has_every_element_once() -> None:
    batches = epoch_of()
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert sorted(chain(*batches)) == list(range(23))
    assert list(chain(*batches)) != list(range(23))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert epoch_of(1) == epoch_of(1)
    assert epoch_of(1) != epoch_of(2)
    assert epoch_of(1) != epoch_of(1, seed=1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    epoch_of(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_resumed_epoch_is_the_rest_of_the_whole() -> None:
    assert epoch_of(3, first=2) == epoch_of(3)[2:]
    assert epoch_of(3, first=6) == []


def test_the_smaller_batch_can_be_dropped() -> None:
    assert epoch_of(drop_last=True) == epoch_of()[:5]
    assert steps_per_epoch(23, 4, True) == 5
    assert steps_per_epoch(23, 4, False) == 6
    assert steps_per_epoch(24, 4, True) == steps_per_epoch(24, 4, False) == 6
    assert steps_per_epoch(3, 4, True) == 1


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_each_batch(processes: int) -> None:
    shares = [epoch_of(rank=rank, processes=processes, drop_last=True) for rank in range(processes)]
    for parts, whole in zip(zip(*shares, strict=True), epoch_of(drop_last=True), strict=True):
        assert {len(part) for part in parts} == {4 // processes}
        assert sorted(chain(*parts)) == sorted(whole)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"first": 3}, {"rank": 1, "processes": 2}])
def test_augmentation_depends_on_the_element_and_not_on_who_asks(options: dict[str, Any]) -> None:
    def draws(**given: Any) -> dict[int, float]:
        batches = training_batches(Noting(23), seed=0, epoch=4, batch_size=4, drop_last=False, **given)
        return {
            int(index): float(draw)
            for inputs, _ in batches
            for index, draw in zip(inputs["index"], inputs["draw"], strict=True)
        }

    whole, found = draws(), draws(**options)
    assert found.items() <= whole.items()
    assert found
    assert all(0 <= draw < 1 for draw in whole.values())
    assert len(set(whole.values())) == 23


def test_evaluation_is_in_order_and_as_it_is() -> None:
    batches = list(evaluation_batches(Noting(7), batch_size=3))
    assert indices_of(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert all((inputs["draw"] == -1).all() for inputs, _ in batches)


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8])
def test_processes_evaluate_every_element_once(size: int) -> None:
    shares = [
        chain(*indices_of(evaluation_batches(Noting(size), batch_size=2, rank=rank, processes=3)))
        for rank in range(3)
    ]
    assert sorted(chain(*shares)) == list(range(size))


def test_workers_give_the_same_tensors() -> None:
    split = TensorSplit(torch.randn(9, 2), torch.arange(9))
    plain = list(evaluation_batches(split, batch_size=4))
    before = torch.get_rng_state()
    loaded = list(evaluation_batches(split, batch_size=4, workers=2))
    assert torch.equal(torch.get_rng_state(), before)
    for (inputs, target), (other, labels) in zip(plain, loaded, strict=True):
        assert torch.equal(inputs, other)
        assert torch.equal(target, labels)
