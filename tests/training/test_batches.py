from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from calibrant.training import batches as module
from calibrant.training.batches import evaluation_batches, steps_per_epoch, training_batches
from calibrant.training.data import Split, TensorSplit, random_numbers
from calibrant.training.data.augmentation import NORMALISATIONS
from calibrant.training.data.in_memory import ImageSplit


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


# ---- Many at once -----------------------------------------------------------------------------------


def images(count: int = 23) -> ImageSplit:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return ImageSplit(pixels, torch.arange(count), NORMALISATIONS["cifar10"], "crop-flip")


@pytest.mark.parametrize("first", [0, 2, 6])
@pytest.mark.parametrize("room", [1, 3 * 4 * 3 * 8 * 8 * 4, 1 << 28], ids=["one", "three", "all"])
def test_batches_made_together_are_those_made_one_by_one(
    first: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    plain = ImageSplit.batch

    def noting(split: ImageSplit, indices: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        asked.append(len(indices))
        return plain(split, indices, draws)

    options = {"seed": 3, "epoch": 5, "batch_size": 4, "drop_last": False, "first": first}
    expected = list(training_batches(images(), **options))
    monkeypatch.setattr(module, "_load", lambda batches, parts, *_: module._made_at_once(batches, parts))
    monkeypatch.setattr(module, "_BYTES_AT_ONCE", room)
    monkeypatch.setattr(ImageSplit, "batch", noting)
    found = list(training_batches(images(), **options))
    assert len(found) == len(expected) == 6 - first
    for (inputs, target), (other, labels) in zip(found, expected, strict=True):
        assert torch.equal(inputs, other)
        assert torch.equal(target, labels)
    if first == 0:
        assert asked == {1: [4, 4, 4, 4, 4, 3], 1 << 28: [4, 19]}.get(room, [4, 12, 7])


def test_named_inputs_are_made_together_too(monkeypatch: pytest.MonkeyPatch) -> None:
    split = TensorSplit({"a": torch.arange(7.0), "b": torch.randn(7, 2)}, torch.arange(7))
    expected = list(evaluation_batches(split, batch_size=3))
    monkeypatch.setattr(module, "_load", lambda batches, parts, *_: module._made_at_once(batches, parts))
    for (inputs, target), (other, labels) in zip(
        evaluation_batches(split, batch_size=3), expected, strict=True
    ):
        assert all(torch.equal(inputs[name], other[name]) for name in ("a", "b"))
        assert torch.equal(target, labels)


def test_data_move_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    part = images()
    assert part.nbytes == 23 * (3 * 8 * 8 + 8)
    data = module.DataSets(part, part, Noting(5), ("a", "b"))
    meta = torch.device("meta")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * part.nbytes, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000 + 2 * part.nbytes - 1)
    assert module.on_device(data, meta) is data
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000 + 2 * part.nbytes)
    moved = module.on_device(data, meta)
    assert moved.train.device == moved.validation.device == meta
    assert moved.test is data.test
    assert data.train.device.type == "cpu"
    assert moved.train.normalisation == part.normalisation


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_batches() -> None:
    device, split = torch.device("cuda"), images(300)
    indices = torch.arange(300)
    numbers = random_numbers(7, 11, indices)
    assert torch.equal(random_numbers(7, 11, indices.to(device)).cpu(), numbers)
    options = {"seed": 3, "epoch": 5, "batch_size": 16, "drop_last": False, "first": 2}
    found = list(training_batches(split.to(device), workers=2, **options))
    for (inputs, target), (other, labels) in zip(found, training_batches(split, **options), strict=True):
        assert inputs.is_cuda
        torch.testing.assert_close(inputs.cpu(), other, rtol=0, atol=1e-6)
        assert torch.equal(target.cpu(), labels)
