"""What every data set consists of: parts that give batches by index, and how such parts are drawn."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

Inputs = Tensor | dict[str, Tensor]
"""What a model is called with: a tensor, or tensors by name."""

DRAWS = 16
"""How many random numbers an element may use for its augmentation."""


class Normalising(Protocol):
    """Makes inputs of about zero mean and unit deviation of what a file has.

    Attributes:
        mean: of each channel or feature.
        std: the standard deviation of each.
    """

    @property
    def mean(self) -> tuple[float, ...]: ...

    @property
    def std(self) -> tuple[float, ...]: ...

    def __call__(self, inputs: Tensor, /) -> Tensor: ...


class Split(ABC):
    """One part of a data set; batches are pure functions of the indices and of the random numbers given.

    That the numbers come from outside makes augmentation the same on any number of processes and workers,
    and after a resumed run: they depend on the seed, the epoch and the element alone, see `random_numbers`.

    Attributes:
        targets: ``(N,)`` labels, or for images ``None``: they are read with each batch.
        normalisation: what inputs have been through; None for nothing, or where that is not known.
    """

    targets: Tensor | None
    normalisation: Normalising | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Inputs, Tensor]:
        """The elements of these indices.

        Args:
            indices: ``(n,)`` integers.
            draws: ``(n, DRAWS)`` uniform numbers in [0, 1), by which to augment; None for the elements as
                they are.

        Returns:
            Inputs with n along axis 0, and targets ``(n, *S)``, int64.
        """

    @abstractmethod
    def subset(self, indices: Tensor) -> Split:
        """The part that has only these elements, in this order."""

    def normalised_by(self, normalisation: Normalising) -> Split:
        """The same part, its inputs through this normalisation in place of their own.

        Raises:
            TypeError: that is for inputs of another kind.
        """
        raise TypeError(f"{type(self).__name__} cannot be normalised by {type(normalisation).__name__}")

    def content(self) -> Iterable[Tensor]:
        """What is in memory, by which to tell other data from these."""
        return [] if self.targets is None else [self.targets]

    @property
    def device(self) -> torch.device:
        """Where batches are made."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """What it would take on a device; 0 for what is on disk, and stays there."""
        return 0

    def to(self, device: torch.device) -> Self:
        """The same part, its batches made on a device; what is on disk stays as it is."""
        return self


class TensorSplit(Split):
    """Elements that are in memory, given as they are.

    >>> part = TensorSplit(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1]))
    >>> part.batch(torch.tensor([2]))
    (tensor([[4., 5.]]), tensor([1]))

    Args:
        inputs: ``(N, ...)``, or such tensors by name.
        targets: ``(N, *S)`` labels.
        normalisation: what the inputs have been through.
    """

    targets: Tensor

    def __init__(self, inputs: Inputs, targets: Tensor, normalisation: Normalising | None = None) -> None:
        tensors = inputs.values() if isinstance(inputs, dict) else [inputs]
        if any(len(tensor) != len(targets) for tensor in tensors):
            raise ValueError(
                f"inputs have {[len(tensor) for tensor in tensors]} elements and targets {len(targets)}"
            )
        self.inputs, self.targets, self.normalisation = inputs, targets.long(), normalisation

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Inputs, Tensor]:
        if isinstance(self.inputs, dict):
            return {name: tensor[indices] for name, tensor in self.inputs.items()}, self.targets[indices]
        return self.inputs[indices], self.targets[indices]

    def normalised_by(self, normalisation: Normalising) -> TensorSplit:
        inputs = self.inputs
        if self.normalisation is not None or not isinstance(inputs, Tensor):
            raise TypeError("inputs that have been normalised already cannot be normalised anew")
        return TensorSplit(normalisation(inputs), self.targets, normalisation)

    def subset(self, indices: Tensor) -> TensorSplit:
        return TensorSplit(*self.batch(indices), self.normalisation)

    def content(self) -> Iterable[Tensor]:
        inputs = self.inputs.values() if isinstance(self.inputs, dict) else [self.inputs]
        return [*inputs, self.targets]

    @property
    def device(self) -> torch.device:
        return self.targets.device

    @property
    def nbytes(self) -> int:
        tensors = self.inputs.values() if isinstance(self.inputs, dict) else [self.inputs]
        return sum(tensor.nbytes for tensor in (*tensors, self.targets))

    def to(self, device: torch.device) -> Self:
        moved = copy(self)
        moved.targets = self.targets.to(device)
        moved.inputs = (
            {name: tensor.to(device) for name, tensor in self.inputs.items()}
            if isinstance(self.inputs, dict)
            else self.inputs.to(device)
        )
        return moved


@dataclass(frozen=True)
class DataSets:
    """A data set ready to train with.

    Attributes:
        train: what the weights learn from.
        validation: what adaptive losses, model selection and post-hoc calibration learn from.
        test: what only the final figures are made of.
        class_names: K names, in the order of the labels.
        about: what a model may need to know of the data: ``channels``, ``image_size``, ``features``,
            ``embedding``.
        ignore_index: the label of elements, such as void pixels, that count for nothing.
    """

    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    ignore_index: int = -100

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def dense(self) -> bool:
        """Whether an element has a label for each of its parts, as an image for each of its pixels."""
        return self.train.targets is None or self.train.targets.ndim > 1

    @property
    def class_counts(self) -> tuple[int, ...] | None:
        """How many training elements each class has; None where a target is not one label."""
        if self.dense or self.train.targets is None:
            return None
        return tuple(torch.bincount(self.train.targets, minlength=self.num_classes).tolist())

    @cached_property
    def fingerprint(self) -> str:
        """What other data do not have: made of all labels, and of the inputs that are in memory."""
        digest = hashlib.blake2b(repr(self.class_names).encode(), digest_size=16)
        for part in (self.train, self.validation, self.test):
            digest.update(f"{type(part).__name__} {len(part)}".encode())
            for tensor in part.content():
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def random_numbers(seed: int, epoch: int, indices: Tensor, count: int = DRAWS) -> Tensor:
    """Uniform numbers in [0, 1) that depend on the seed, the epoch and the element alone.

    A hash and not a generator (splitmix64, of Steele, Lea and Flood, 2014): any element's numbers are there
    at once, in any process and on any device, with no state to keep.

    Returns:
        ``(n, count)``, float32.

    >>> numbers = random_numbers(0, 5, torch.tensor([7, 3]))
    >>> numbers.shape, bool((numbers[1] == random_numbers(0, 5, torch.tensor([3]))[0]).all())
    (torch.Size([2, 16]), True)
    """
    stream = _stream(seed, epoch)
    keys = _mix(_mix(stream + indices.long()).unsqueeze(1) + torch.arange(count, device=indices.device))
    return (_shifted(keys, 40)).to(torch.float32) / (1 << 24)


def _stream(seed: int, epoch: int) -> int:
    """One number for both; not a tensor, which a device would have to be given."""
    return int(_mix(_mix(torch.tensor(seed)) + epoch))


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shifted to the right as unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix(values: Tensor) -> Tensor:
    values = values + _signed(0x9E3779B97F4A7C15)
    values = (values ^ _shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shifted(values, 31)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def shuffled(size: int, seed: int, epoch: int = 0) -> Tensor:
    """A permutation of ``0 … size - 1`` that depends on the seed and the epoch alone."""
    generator = torch.Generator().manual_seed(_stream(seed, epoch) & ((1 << 63) - 1))
    return torch.randperm(size, generator=generator)


def stratified(targets: Tensor, sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Disjoint random parts of these sizes, each with the classes in the proportions of the whole.

    Args:
        targets: ``(N,)`` labels.
        sizes: of the parts; their sum is at most N.
        seed: of the draw.

    Returns:
        Sorted indices of each part. A class's share of a part is rounded up or down.

    Raises:
        ValueError: the sizes are more than there is.

    >>> first, second = stratified(torch.tensor([0, 0, 0, 0, 1, 1]), (3, 3), seed=0)
    >>> len(first), len(second), sorted((*first.tolist(), *second.tolist()))
    (3, 3, [0, 1, 2, 3, 4, 5])
    """
    if min(sizes, default=0) < 0 or sum(sizes) > len(targets):
        raise ValueError(
            f"cannot draw parts of {', '.join(map(str, sizes))} elements from {len(targets)}: expected sizes "
            "of at least 0 that add up to no more than there is"
        )
    order = shuffled(len(targets), seed)
    # Elements in random order within their class; the place of each as a fraction of its class spreads
    # every class evenly over the sequence, so that any stretch of it has all classes in proportion.
    by_class = order[torch.sort(targets[order], stable=True).indices]
    counts = torch.bincount(targets)
    starts = counts.cumsum(0) - counts
    labels = targets[by_class]
    place = (torch.arange(len(targets)) - starts[labels] + 0.5) / counts[labels]
    sequence = by_class[torch.sort(place.double(), stable=True).indices]
    return [part.sort().values for part in torch.split(sequence[: sum(sizes)], list(sizes))]


def long_tail(targets: Tensor, imbalance: float, seed: int, num_classes: int | None = None) -> Tensor:
    """Indices of a subset whose class counts fall off exponentially.

    Class k keeps ``n · imbalance^(−k / (K − 1))`` elements, where n is the smallest count of any class: the
    long-tailed CIFAR of Cui et al. (2019) for balanced data.

    Args:
        targets: ``(N,)`` labels.
        imbalance: how many times more elements the first class has than the last; 1 keeps every element.
        seed: of the draw.
        num_classes: K; by default the largest label plus one.

    Returns:
        Sorted indices. Every class keeps at least one element.

    >>> kept = long_tail(torch.arange(3).repeat_interleave(100), imbalance=100, seed=0)
    >>> torch.bincount(torch.arange(3).repeat_interleave(100)[kept])
    tensor([100,  10,   1])
    """
    if imbalance < 1:
        raise ValueError(f"imbalance must be at least 1, got {imbalance!r}")
    if imbalance == 1:
        return torch.arange(len(targets))
    counts = torch.bincount(targets, minlength=num_classes or 0)
    classes, largest = len(counts), int(counts.min())
    if classes < 2 or largest == 0:
        raise ValueError(f"imbalance needs elements of every class, got counts {counts.tolist()}")
    order = shuffled(len(targets), seed)
    kept = []
    for label in range(classes):
        size = max(1, int(largest * imbalance ** (-label / (classes - 1)) + 1e-9))
        kept.append(order[targets[order] == label][:size])
    return torch.cat(kept).sort().values
