"""Checks of the data that the plots are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant.arguments import unknown
from calibrant.metrics import METRICS

Array = NDArray[np.float64]
Numbers = ArrayLike | Tensor | Sequence[Tensor]


def check_filled(data: object, expected: str, kind: type = Mapping) -> None:
    """Refuse data of another type and empty data; `expected` says what they should be."""
    if not isinstance(data, kind):
        raise TypeError(f"data must be {expected}, got {type(data).__name__}")
    if not data:
        raise ValueError(f"data must be {expected}, got none")


def array(what: str, data: Numbers, *shapes: str, missing: bool = False, infinite: bool = False) -> Array:
    """Convert data to float64 and check it. Shapes are written like "(passes, K)"; NaN means missing."""
    expected = f"{what} must have shape {' or '.join(shapes)}"
    try:
        if isinstance(data, Sequence) and any(isinstance(part, Tensor) for part in data):
            data = torch.stack([torch.as_tensor(part, device="cpu") for part in data])
        if isinstance(data, Tensor):
            data = data.detach().double().cpu().numpy()
        values = np.asarray(data, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{expected}, and hold numbers: {error}") from error
    if values.ndim not in {shape.count(",") + (not shape.endswith(",)")) for shape in shapes}:
        raise ValueError(f"{expected}, got {values.shape}")
    if not values.size:
        raise ValueError(f"{expected}, with nothing empty, got {values.shape}")
    absent = np.isnan(values)
    if absent.all() or (absent.any() and not missing):
        raise ValueError(f"{what} must not be NaN, but {int(absent.sum())} of {values.size} numbers are")
    if not infinite and np.isinf(values).any():
        number = int(np.isinf(values).sum())
        raise ValueError(f"{what} must be finite, but {number} of {values.size} numbers are infinite")
    return values


def metric_axis(metric: str) -> tuple[str, int]:
    """The label of an axis for a key of `METRICS`, and the factor that its figures are multiplied by."""
    if metric not in METRICS:
        raise ValueError(unknown("metric", metric, METRICS))
    label = METRICS[metric].label
    return (f"{label} (%)", 100) if METRICS[metric].percent else (label, 1)
