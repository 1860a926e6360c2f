"""Raw arrays of numbers as the argument of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from calibrant.training.data.augmentation import Standardisation
from calibrant.training.data.preparation import Preparation
from calibrant.training.data.safe_readers import Array, read_inputs


@dataclass(frozen=True)
class ArrayPreparation(Preparation):
    """Numbers of one shape, standardised if there are constants.

    Raw inputs are an array of shape ``(N, *shape)``, or of ``shape`` for one element. An axis of length 1 for
    a single channel may be left out.

    >>> ArrayPreparation((2,), Standardisation((1.0, 0.0), (2.0, 1.0)))([[5, 5]])
    tensor([[2., 5.]])
    """

    kind: ClassVar[str] = "arrays"
    example = ("new.npy", "predictions.csv")
    graph_inputs = "the numbers as the data set has them"
    shape: tuple[int, ...]
    normalisation: Standardisation | None = None

    def __call__(self, raw: Any) -> Tensor:
        inputs = torch.from_numpy(self.numbers(raw))
        return inputs if self.normalisation is None else self.normalisation(inputs)

    def numbers(self, raw: Any) -> Array:
        """The raw numbers before their standardisation, ``(N, *shape)``, float32."""
        if isinstance(raw, Tensor):
            raw = raw.numpy(force=True)
        try:
            array = np.asarray(raw)
        except ValueError:  # rows of different lengths
            raise ValueError(f"got lists of different lengths, expected {self._expected}") from None
        if array.dtype.kind not in "biuf":
            found = f"a {type(raw).__name__}" if array.ndim == 0 else f"values of type {array.dtype}"
            raise ValueError(f"got {found}, expected {self._expected}")
        if array.shape == self.shape or (array.shape == self.shape[1:] and self.shape[0] == 1):
            array = array[None]
        if array.shape[1:] != self.shape:
            if self.shape[0] != 1 or array.ndim == 0 or array.shape[1:] != self.shape[1:]:
                raise ValueError(f"got numbers of shape {array.shape}, expected {self._expected}")
            array = array[:, None]
        with np.errstate(over="ignore"):
            numbers: Array = array.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise ValueError(
                "got NaN, infinite numbers or numbers too large for float32, expected finite ones"
            )
        return numbers

    @property
    def _expected(self) -> str:
        return f"an array of numbers of shape (N, {', '.join(map(str, self.shape))})"

    def read(self, path: Path) -> tuple[Array, list[str]]:
        try:
            inputs = self.numbers(read_inputs(path))
        except ValueError as error:
            raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
        return inputs, [str(number) for number in range(len(inputs))]

    def state(self) -> dict[str, Any]:
        constants = self.normalisation
        return {
            "shape": list(self.shape),
            "mean": constants and list(constants.mean),
            "std": constants and list(constants.std),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        mean, std = state["mean"], state["std"]
        constants = None if mean is None else Standardisation(tuple(map(float, mean)), tuple(map(float, std)))
        return cls(tuple(map(int, state["shape"])), constants)
