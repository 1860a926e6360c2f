"""From raw inputs, such as image files, rows of a table or texts, to the argument of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Self

from calibrant.training.data.augmentation import Normalising
from calibrant.training.data.split import Inputs, map_inputs, tensors_of


class Preparation(ABC):
    """The way from raw inputs to the argument of a model: what was done to the validation and test data.

    A data set that has one gives it to its `DataSets`. It is stored with a model, so that the model can be
    used on new inputs without the data set. `state` and `from_state` are JSON values, never pickled objects.

    Inputs, files and states of another kind or shape are a `ValueError` that says what was expected.

    Attributes:
        kind: the name in `calibrant.training.data.PREPARATIONS`.
        example: names of a file or folder with new inputs and of a file for their predictions, as an example.
        graph_inputs: what an exported graph takes, and how to make it from raw inputs, in words.
        normalisation: the last step, if it is one by constants. An exported graph has it inside.
    """

    kind: ClassVar[str]
    example: ClassVar[tuple[str, str]] = ("new.csv", "predictions.csv")
    graph_inputs: ClassVar[str] = "what the network takes"
    normalisation: Normalising | None = None

    @abstractmethod
    def __call__(self, raw: Any) -> Inputs:
        """The argument of a model, with the elements along axis 0."""

    def batches(self, raw: Any, size: int) -> Iterator[Inputs]:
        """The arguments of a model for ``size`` elements at a time.

        Inputs that take much memory, such as images, are prepared one batch after the other.
        """
        inputs = self(raw)
        for start in range(0, len(tensors_of(inputs)[0]), size):
            yield map_inputs(inputs, itemgetter(slice(start, start + size)))

    @abstractmethod
    def read(self, path: Path) -> tuple[Any, list[str]]:
        """The raw inputs in a file or folder, and a name for each, such as its file name or row number."""

    def beside(self, path: Path, raw: Any) -> Mapping[str, Sequence[Any]]:
        """Columns of a file that are no inputs, to be kept beside predictions; ``raw`` is what was read."""
        return {}

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything that `from_state` needs, as JSON values."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The preparation with this state."""
