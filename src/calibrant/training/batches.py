"""Batches in an order that depends only on seed and epoch, not on the number of processes or workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from calibrant.training.data import DataSets, Inputs, Split, map_inputs, random_numbers, shuffled, tensors_of

Batch = tuple[Inputs, Tensor]

_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 28  # the most batches, and bytes of inputs, that a GPU makes at once


def on_device(data: DataSets, device: torch.device) -> DataSets:
    """Move data to a GPU if they are in memory and take at most a quarter of its free memory."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch
    if 4 * sum(part.nbytes for part in data.parts) > torch.cuda.mem_get_info(device)[0] + unused:
        return data
    train, validation, test = (part.to(device) for part in data.parts)
    return replace(data, train=train, validation=validation, test=test)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Consecutive elements of a batch.

    >>> rows_of((torch.arange(4.0), torch.arange(4)), slice(1, 3))
    (tensor([1., 2.]), tensor([1, 2]))
    """
    inputs, target = batch
    return map_inputs(inputs, lambda tensor: tensor[rows]), target[rows]


class _Batches(Dataset[Batch]):
    """Batches by the indices of their elements; augmented if there is a seed."""

    def __init__(self, split: Split, seed: int | None, epoch: int) -> None:
        self.split, self.seed, self.epoch = split, seed, epoch

    def __getitem__(self, indices: Tensor) -> Batch:
        draws = None if self.seed is None else random_numbers(self.seed, self.epoch, indices)
        return self.split.batch(indices, draws)


def _made_at_once(batches: _Batches, parts: Sequence[Tensor]) -> Iterator[Batch]:
    """The same batches, many of them made at once and then cut: far fewer launches on a GPU."""
    start, count = 0, 1  # the first batch alone shows how much memory one takes
    while start < len(parts):
        chosen = parts[start : start + count]
        made, first = batches[torch.cat(list(chosen))], 0
        for part in chosen:
            yield rows_of(made, slice(first, first + len(part)))
            first += len(part)
        start += count
        if count == 1:
            size = sum(tensor.nbytes for tensor in tensors_of(made[0]))
            count = max(1, min(_AT_ONCE, _BYTES_AT_ONCE // max(1, size)))


def _load(batches: _Batches, parts: Sequence[Tensor], workers: int, pinned: bool) -> Iterable[Batch]:
    if batches.split.device.type != "cpu":
        return _made_at_once(batches, parts)
    if workers == 0:
        return (batches[indices] for indices in parts)
    return DataLoader(
        batches,
        batch_size=None,
        sampler=parts,
        num_workers=workers,
        pin_memory=pinned,
        generator=torch.Generator(),  # torch's own would be moved on, and a resumed run would differ
    )


def steps_per_epoch(size: int, batch_size: int, drop_last: bool) -> int:
    """The number of batches in an epoch; at least one.

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
    """This process's elements of every batch of an epoch, augmented.

    Seed and epoch decide the order and the augmentation. A batch has ``batch_size`` elements over all
    processes. A resumed run skips the ``first`` batches.
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
    """This process's elements of a split, in order and unchanged. Every element belongs to one process.

    >>> from calibrant.training.data import TensorSplit
    >>> part = TensorSplit(torch.zeros(5, 1), torch.arange(5))
    >>> [labels.tolist() for _, labels in evaluation_batches(part, batch_size=2, rank=0, processes=2)]
    [[0, 2], [4]]
    """
    parts = torch.split(torch.arange(len(split), device=split.device)[rank::processes], batch_size)
    return _load(_Batches(split, None, 0), [part for part in parts if len(part)], workers, pinned)
