"""The parts of a data set, and the data set that they make up."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from calibrant.printable import counted, first_few
from calibrant.training.data.augmentation import Normalising

if TYPE_CHECKING:
    from calibrant.training.data.preparation import Preparation

Inputs = Tensor | dict[str, Tensor]
"""The argument of a model: a tensor, or tensors by name."""


class Split(ABC):
    """One part of a data set: training, validation or test.

    A batch is a pure function of the indices and of random numbers given by the caller. The numbers depend
    only on seed, epoch and element (see `random_numbers`), so augmentation is the same on any number of
    processes and workers, and in a resumed run.

    Attributes:
        targets: ``(N,)`` labels, or ``(N, L)`` of 0 and 1 for L labels; None for labelled images, whose
            labels are read with each batch.
        normalisation: the normalisation of the inputs; None if there is none or it is unknown.
    """

    targets: Tensor | None
    normalisation: Normalising | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Inputs, Tensor]:
        """The inputs with these indices, along axis 0, and their targets ``(n, *S)``, int64.

        ``draws`` are ``(n, DRAWS)`` random numbers in [0, 1) for the augmentation; None for no augmentation.
        """

    @abstractmethod
    def subset(self, indices: Tensor) -> Split:
        """A part with only these elements, in this order."""

    def normalised_by(self, normalisation: Normalising) -> Split:
        """The same part with this normalisation in place of its own; a `TypeError` if that cannot be."""
        raise TypeError(f"{type(self).__name__} cannot be normalised by {type(normalisation).__name__}")

    def content(self) -> Iterable[Tensor]:
        """All tensors in memory, for the fingerprint of the data."""
        return [] if self.targets is None else [self.targets]

    @property
    def device(self) -> torch.device:
        """The device on which batches are made."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """The memory it would take on a device; 0 for files on disk, which stay there."""
        return 0

    def to(self, device: torch.device) -> Self:
        """The same part with its tensors on a device; files on disk stay there."""
        return self


@dataclass(eq=False, repr=False)
class TensorSplit(Split):
    """Inputs and labels in memory, without augmentation.

    >>> part = TensorSplit(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1]))
    >>> part.batch(torch.tensor([2]))
    (tensor([[4., 5.]]), tensor([1]))

    ``normalisation`` is the one that the inputs ``(N, ...)`` have been through. Subclasses are dataclasses
    too, so that parts of them can be made.
    """

    inputs: Inputs
    targets: Tensor
    normalisation: Normalising | None = None

    def __post_init__(self) -> None:
        lengths = [len(tensor) for tensor in tensors_of(self.inputs)]
        if any(length != len(self.targets) for length in lengths):
            raise ValueError(f"inputs have {lengths} elements and targets {len(self.targets)}")
        self.targets = self.targets.long()

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Inputs, Tensor]:
        return map_inputs(self.inputs, lambda tensor: tensor[indices]), self.targets[indices]

    def normalised_by(self, normalisation: Normalising) -> TensorSplit:
        if self.normalisation is not None or not isinstance(self.inputs, Tensor):
            raise TypeError("inputs that are normalised already cannot be normalised again")
        return TensorSplit(normalisation(self.inputs), self.targets, normalisation)

    def subset(self, indices: Tensor) -> Self:
        return self._with(lambda tensor: tensor[indices])

    def content(self) -> Iterable[Tensor]:
        return [*tensors_of(self.inputs), self.targets]

    @property
    def device(self) -> torch.device:
        return self.targets.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.content())

    def to(self, device: torch.device) -> Self:
        return self._with(lambda tensor: tensor.to(device))

    def _with(self, function: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, inputs=map_inputs(self.inputs, function), targets=function(self.targets))


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors of an input."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def map_inputs(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """The input with a function applied to each of its tensors."""
    if isinstance(inputs, dict):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return function(inputs)


@dataclass(frozen=True)
class DataSets:
    """A data set in three parts, ready to train with.

    Attributes:
        train: the part that the weights learn from.
        validation: the part for adaptive losses, model selection and post-hoc calibration.
        test: the part for the final figures, and for nothing else.
        class_names: K names, in the order of the labels; of the L labels, if there are several.
        about: facts that a model may need: ``channels``, ``image_size``, ``features``, ``embedding``.
        ignore_index: the label of elements, such as void pixels, that do not count.
        preparation: how new raw inputs become the argument of a model; None if that is not known.
        several_labels: whether an element has a yes or no for each of several labels, and not one class.
    """

    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    ignore_index: int = -100
    preparation: Preparation | None = None
    several_labels: bool = False

    @property
    def parts(self) -> tuple[Split, Split, Split]:
        """The training, validation and test part."""
        return self.train, self.validation, self.test

    @property
    def in_words(self) -> str:
        """The sizes of the parts, and the classes or labels."""
        sizes = (
            f"{len(part):,} {name}"
            for part, name in zip(self.parts, ("training", "validation", "test"), strict=True)
        )
        kind = ("label", "labels") if self.several_labels else ("class", "classes")
        return f"{', '.join(sizes)}; {counted(self.num_classes, *kind)}: {first_few(self.class_names, 10)}"

    @property
    def num_classes(self) -> int:
        """K; L for several labels."""
        return len(self.class_names)

    @property
    def dense(self) -> bool:
        """Whether an element has many places with a label, as an image with one for each pixel."""
        targets = self.train.targets
        return not self.several_labels and (targets is None or targets.ndim > 1)

    @property
    def class_counts(self) -> tuple[int, ...] | None:
        """The number of training elements of each class; None for dense data and several labels."""
        if self.several_labels or self.dense or self.train.targets is None:
            return None
        return tuple(torch.bincount(self.train.targets, minlength=self.num_classes).tolist())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all labels in memory and all inputs in memory, to recognise other data."""
        digest = hashlib.blake2b(repr(self.class_names).encode(), digest_size=16)
        for part in self.parts:
            digest.update(f"{type(part).__name__} {len(part)}".encode())
            for tensor in part.content():
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                if tensor.numel():  # an empty tensor may have strides that cannot be viewed as bytes
                    digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()
