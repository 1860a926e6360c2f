"""Batches in an order that the seed and the epoch decide, whatever the number of processes or workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from calibrant.training.data import Inputs, Split, random_numbers, shuffled

Batch = tuple[Inputs, Tensor]


class _Batches(Dataset[Batch]):
    """Batches by their indices; with a seed, augmented."""

    def __init__(self, split: Split, seed: int | None, epoch: int) -> None:
        self.split, self.seed, self.epoch = split, seed, epoch

    def __getitem__(self, indices: Tensor) -> Batch:
        draws = None if self.seed is None else random_numbers(self.seed, self.epoch, indices)
        return self.split.batch(indices, draws)


def _load(batches: _Batches, parts: Sequence[Tensor], workers: int, pinned: bool) -> Iterable[Batch]:
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
        workers: processes that prepare batches.
        pinned: whether batches are to lie in memory that a GPU can copy from directly.
    """
    order = shuffled(len(split), seed, epoch)
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
    parts = torch.split(torch.arange(len(split))[rank::processes], batch_size)
    return _load(_Batches(split, None, 0), [part for part in parts if len(part)], workers, pinned)
