"""Reproducible random numbers, and random parts of a data set drawn by them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from calibrant.arguments import in_range

DRAWS = 16
"""How many random numbers the augmentation of one element may use."""


def random_numbers(seed: int, epoch: int, indices: Tensor, count: int = DRAWS) -> Tensor:
    """Uniform random numbers in [0, 1), ``(n, count)`` for n indices, float32, without a generator.

    They are a hash of seed, epoch and index (splitmix64, Steele, Lea and Flood, 2014). There is no state to
    save, and every process, worker and device computes the same numbers.

    >>> numbers = random_numbers(0, 5, torch.tensor([7, 3]))
    >>> numbers.shape, bool((numbers[1] == random_numbers(0, 5, torch.tensor([3]))[0]).all())
    (torch.Size([2, 16]), True)
    """
    stream = _stream(seed, epoch)
    keys = _mix(_mix(stream + indices.long()).unsqueeze(1) + torch.arange(count, device=indices.device))
    return _shift_right(keys, 40).to(torch.float32) / (1 << 24)


def _stream(seed: int, epoch: int) -> int:
    """Seed and epoch hashed to one number: a Python integer, which needs no copy to a device."""
    return int(_mix(_mix(torch.tensor(seed, device="cpu")) + epoch))


def _mix(values: Tensor) -> Tensor:
    # The constants are less 2^64, as signed integers of the same bits.
    values = values + (0x9E3779B97F4A7C15 - 2**64)
    values = (values ^ _shift_right(values, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    values = (values ^ _shift_right(values, 27)) * (0x94D049BB133111EB - 2**64)
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift as if the integers were unsigned."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def shuffled(size: int, seed: int, epoch: int = 0) -> Tensor:
    """A random permutation of ``0 … size - 1`` that depends only on seed and epoch."""
    generator = torch.Generator().manual_seed(_stream(seed, epoch) & ((1 << 63) - 1))
    return torch.randperm(size, generator=generator, device="cpu")


def stratified(targets: Tensor, sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Sorted indices of disjoint random parts in which every class has the same proportion as in the whole.

    The count of a class in a part is rounded up or down. Elements with several labels, ``(N, L)``, cannot be
    stratified: their parts are drawn at random.

    >>> first, second = stratified(torch.tensor([0, 0, 0, 0, 1, 1]), (3, 3), seed=0)
    >>> len(first), len(second), sorted((*first.tolist(), *second.tolist()))
    (3, 3, [0, 1, 2, 3, 4, 5])
    """
    if min(sizes, default=0) < 0 or sum(sizes) > len(targets):
        raise ValueError(
            f"cannot draw parts of {', '.join(map(str, sizes))} elements from {len(targets)}: expected sizes "
            f"of at least 0 with a sum of at most {len(targets)}"
        )
    if targets.ndim > 1:
        targets = torch.zeros(len(targets), dtype=torch.long, device="cpu")
    order = shuffled(len(targets), seed)
    # Sort by the relative position of an element in its shuffled class. Every class is then spread evenly
    # over the sequence, and any stretch of it has the classes in proportion.
    by_class = order[torch.sort(targets[order], stable=True).indices]
    counts = torch.bincount(targets)
    starts = counts.cumsum(0) - counts
    labels = targets[by_class]
    position = (torch.arange(len(targets), device="cpu") - starts[labels] + 0.5) / counts[labels]
    sequence = by_class[torch.sort(position.double(), stable=True).indices]
    return [part.sort().values for part in torch.split(sequence[: sum(sizes)], list(sizes))]


def long_tail(targets: Tensor, imbalance: float, seed: int, num_classes: int = 0) -> Tensor:
    """Sorted indices of a random subset with exponentially decreasing class counts.

    Class k keeps ``n · imbalance^(−k / (K − 1))`` elements, but at least one, where n is the count of the
    smallest class. On balanced data this is the long-tailed CIFAR of Cui et al. (2019). The imbalance 1 keeps
    every element. K is ``num_classes``, or the largest label plus one if that is more.

    >>> kept = long_tail(torch.arange(3).repeat_interleave(100), imbalance=100, seed=0)
    >>> torch.bincount(torch.arange(3).repeat_interleave(100)[kept])
    tensor([100,  10,   1])
    """
    if imbalance < 1:
        raise ValueError(f"imbalance must be at least 1, got {imbalance!r}")
    if imbalance == 1:
        return torch.arange(len(targets), device="cpu")
    if targets.ndim > 1:
        raise ValueError(f"imbalance must be 1 for several labels, which have no classes, got {imbalance!r}")
    counts = torch.bincount(targets, minlength=num_classes)
    classes, largest = len(counts), int(counts.min())
    if classes < 2 or largest == 0:
        raise ValueError(f"imbalance needs elements of every class, got counts {counts.tolist()}")
    order = shuffled(len(targets), seed)
    kept = []
    for label in range(classes):
        size = max(1, int(largest * imbalance ** (-label / (classes - 1)) + 1e-9))
        kept.append(order[targets[order] == label][:size])
    return torch.cat(kept).sort().values


def part_sizes(size: int, given: Collection[str], *, validation: float, test: float) -> dict[str, int]:
    """By name, the sizes of the parts to draw from ``size`` elements because they are not given.

    >>> part_sizes(200, ["test"], validation=0.1, test=0.2)
    {'validation': 20}
    """
    fractions = {"validation": in_range("validation", validation, 0, 1), "test": in_range("test", test, 0, 1)}
    fractions = {name: fraction for name, fraction in fractions.items() if name not in given}
    if sum(fractions.values()) > 1 + 1e-9:
        raise ValueError(f"validation and test must add up to at most 1, got {validation!r} and {test!r}")
    sizes: dict[str, int] = {}
    for name, fraction in fractions.items():
        sizes[name] = min(round(fraction * size), size - sum(sizes.values()))
    return sizes


def draw_parts(
    targets: Tensor, sizes: Mapping[str, int], *, seed: int, imbalance: float = 1.0, num_classes: int = 0
) -> dict[str, Tensor]:
    """Sorted indices of stratified parts of these sizes, and as ``"train"`` the rest, made long-tailed.

    >>> parts = draw_parts(torch.arange(2).repeat(50), {"test": 10}, imbalance=9, num_classes=2, seed=0)
    >>> {name: len(indices) for name, indices in parts.items()}
    {'train': 50, 'test': 10}
    """
    rest = len(targets) - sum(sizes.values())
    train, *others = stratified(targets, (rest, *sizes.values()), seed)
    if len(train):
        train = train[long_tail(targets[train], imbalance, seed, num_classes)]
    return {"train": train, **dict(zip(sizes, others, strict=True))}
