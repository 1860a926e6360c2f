"""Batches in an order that the seed and the epoch decide, whatever the number of processes or workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from calibrant.training.data import DataSets, Inputs, Split, random_numbers, shuffled

Batch = tuple[Inputs, Tensor]

_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 28  # batches, and their inputs, that a device makes together


def on_device(data: DataSets, device: torch.device) -> DataSets:
    """The data on a GPU, if they are in memory and take no more than a quarter of what is free there."""
    parts = (data.train, data.validation, data.test)
    kept_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, to reuse
    if 4 * sum(part.nbytes for part in parts) > torch.cuda.mem_get_info(device)[0] + kept_back:
        return data
    train, validation, test = (part.to(device) for part in parts)
    return replace(data, train=train, validation=validation, test=test)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some consecutive elements of a batch.

    >>> rows_of((torch.arange(4.0), torch.arange(4)), slice(1, 3))
    (tensor([1., 2.]), tensor([1, 2]))
    """
    inputs, target = batch
    if isinstance(inputs, dict):
        return {name: tensor[rows] for name, tensor in inputs.items()}, target[rows]
    return inputs[rows], target[rows]


def tensors_of(batch: Batch) -> list[Tensor]:
    """All tensors of a batch, the target last."""
    inputs, target = batch
    return [*(inputs.values() if isinstance(inputs, dict) else [inputs]), target]


class _Batches(Dataset[Batch]):
    """Batches by their indices; with a seed, augmented."""

    def __init__(self, split: Split, seed: int | None, epoch: int) -> None:
        self.split, self.seed, self.epoch = split, seed, epoch

    def __getitem__(self, indices: Tensor) -> Batch:
        draws = None if self.seed is None else random_numbers(self.seed, self.epoch, indices)
        return self.split.batch(indices, draws)


def _together(batches: _Batches, parts: Sequence[Tensor]) -> Iterator[Batch]:
    """The same batches, many made at once and then cut: a GPU has to be told far less often what to do."""
    start, count = 0, 1  # the first one alone shows how much memory one takes
    while start < len(parts):
        chosen = parts[start : start + count]
        made, first = batches[torch.cat(list(chosen))], 0
        for part in chosen:
            yield rows_of(made, slice(first, first + len(part)))
            first += len(part)
        start += count
        if count == 1:
            inputs, _ = made
            tensors = inputs.values() if isinstance(inputs, dict) else [inputs]
            size = sum(tensor.nbytes for tensor in tensors)
            count = max(1, min(_AT_ONCE, _BYTES_AT_ONCE // max(1, size)))


def _load(batches: _Batches, parts: Sequence[Tensor], workers: int, pinned: bool) -> Iterable[Batch]:
    if batches.split.device.type != "cpu":
        return _together(batches, parts)
    if workers == 0:
        return (batches[indices] for indices in parts)
    # Its own generator: a loader takes a number from torch's, which a resumed run would take once more.
    return cast(
        Iterable[Batch],
        DataLoader(
            batches,
            batch_size=None,
            sampler=parts,
            num_workers=workers,
            pin_memory=pinned,
            generator=torch.Generator(),
        ),
    )


def steps_per_epoch(size: int, batch_size: int, drop_last: bool) -> int:
    """How many batches an epoch has; at least one.

    >>> steps_per_epoch(206, 32, drop_last=True), steps_per_epoch(206, 32, drop_last=False)
    (6, 7)
    """
    return max(1, size // batch_size if drop_last else -(-size // batch_size))


def training_batches(
    split: Split,
    *,
    seed: int,
    epoch: int,
    batch_size: int,
    drop_last: bool,
    first: int = 0,
    rank: int = 0,
    processes: int = 1,
    workers: int = 0,
    pinned: bool = False,
) -> Iterable[Batch]:
    """This process's part of every batch of an epoch, augmented.

    Args:
        split: the training data.
        seed: of the order and the augmentation.
        epoch: likewise.
        batch_size: over all processes.
        drop_last: whether a last, smaller batch is left out.
        first: how many batches to leave out at the start, after a resumed run.
        rank: of this process.
        processes: how many there are.
        workers: processes that prepare batches, unless the data are on a device.
        pinned: whether batches are to lie in memory that a GPU can copy from directly.
    """
    order = shuffled(len(split), seed, epoch)
    if split.device.type != "cpu":
        order = order.pin_memory().to(split.device, non_blocking=True)
    steps = steps_per_epoch(len(split), batch_size, drop_last)
    parts = [part[rank::processes] for part in torch.split(order, batch_size)[first:steps]]
    return _load(_Batches(split, seed, epoch), parts, workers, pinned)


def evaluation_batches(
    split: Split,
    *,
    batch_size: int,
    rank: int = 0,
    processes: int = 1,
    workers: int = 0,
    pinned: bool = False,
) -> Iterable[Batch]:
    """This process's share of a part, in order and as it is; the shares hold every element just once.

    >>> from calibrant.training.data import TensorSplit
    >>> part = TensorSplit(torch.zeros(5, 1), torch.arange(5))
    >>> [labels.tolist() for _, labels in evaluation_batches(part, batch_size=2, rank=0, processes=2)]
    [[0, 2], [4]]
    """
    parts = torch.split(torch.arange(len(split), device=split.device)[rank::processes], batch_size)
    return _load(_Batches(split, None, 0), [part for part in parts if len(part)], workers, pinned)
