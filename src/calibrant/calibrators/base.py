"""The contract of a calibrator: fitted once on held-out data, then a layer from logits to logits."""

from __future__ import annotations

import json
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from calibrant.layout import arrange, computing_dtype

_PACKAGE = str(Path(__file__).parents[1] / "_")[:-1]
_NAMED = 5  # classes that a warning names

NOT_FINITE = "logits hold NaN or infinite numbers; a calibrator is fitted to finite logits"
NOTHING_TO_FIT = "nothing to fit: the data hold no element that is not ignored"

Batches = Iterable[tuple[Tensor, Tensor]]
"""Batches of logits and targets that can be gone through again and again: a list, a data loader."""


class Calibrator(nn.Module, ABC):
    """Logits in, calibrated logits out; ``nn.Sequential(model, calibrator)`` is the calibrated model.

    What is learned lives in float64 buffers, whose shapes may depend on the data: `load_state_dict` takes
    them as they come. Methods that give probabilities return their logarithms. The softmax of what is
    returned sums to 1.

    Subclasses write `fit_rows` and `transform`, and register what they learn with `learn`.

    Shape:
        logits ``(B, K, *S)``, integer target ``(B, *S)``. The result is float64 for float64 logits, else
        float32: in 16 bits, classes that were told apart may tie. A logit of -inf, a class that is ruled
        out, stays -inf.

    Attributes:
        num_classes: K, once fitted.
        class_names: of the classes in their order, where known; kept by `save_calibrator`.
    """

    preserves_order: ClassVar[bool] = False
    """Whether the order of an element's classes, and with it the prediction, stays what it was."""

    per_class: ClassVar[bool] = False
    """Whether each class has parameters of its own, of which data without that class say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes: int | None = None
        self.class_names: tuple[str, ...] | None = None

    @abstractmethod
    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        """Learn from float64 logits ``(N, K)`` and labels ``(N,)``, N at least 1."""

    @abstractmethod
    def transform(self, rows: Tensor) -> Tensor:
        """Calibrate logits ``(N, K)``, by operations that `torch.export` can follow."""

    def fit(self, logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Self:
        """Learn from held-out data; what was learned before is replaced.

        Args:
            logits: ``(B, K, *S)``.
            target: labels ``(B, *S)``.
            ignore_index: label of elements to leave out.

        Raises:
            TypeError: logits or target that are no tensors, or of the wrong kind.
            ValueError: shapes or labels that do not fit, nothing to learn from, or logits that are not
                finite; what was learned before stays.
        """
        rows, labels = valid_rows(logits, target, ignore_index)
        if not len(labels):
            raise ValueError(
                f"nothing to fit: logits of shape {tuple(logits.shape)} hold no element that is not ignored"
            )
        with torch.no_grad():
            self.fit_rows(rows, labels)
        self.fitted_to(labels.bincount(minlength=rows.shape[1]))
        return self

    def fitted_to(self, counts: Tensor) -> None:
        """Take note, after a fit, of how many elements each class had, ``(K,)``."""
        self.num_classes, self.class_names = len(counts), None
        absent = (counts == 0).nonzero().flatten().tolist()
        if self.per_class and absent:
            named = ", ".join(map(str, absent[:_NAMED])) + (", …" if len(absent) > _NAMED else "")
            warn(
                f"of {len(counts)} classes the data lack {len(absent)} ({named}): "
                f"{type(self).__name__} fits each class by itself, and has nothing to fit those to"
            )

    def forward(self, logits: Tensor) -> Tensor:
        """Calibrated logits, in the shape of the logits, float64 for float64 ones, else float32."""
        classes = self.check(logits)
        rows = logits.movedim(1, -1)
        flat = rows.reshape(-1, classes).to(computing_dtype(logits))
        calibrated = self.transform(flat).to(flat.dtype)
        # In probabilities: what was impossible stays so, and softmax shares it out among the others.
        calibrated = calibrated.masked_fill(flat == -torch.inf, -torch.inf)
        return calibrated.view(rows.shape).movedim(-1, 1)

    def check(self, logits: Tensor) -> int:
        """The number of classes, once sure that logits are such as this was fitted to."""
        if self.num_classes is None:
            raise RuntimeError(
                f"{type(self).__name__} has learned nothing yet: call fit(logits, target) first"
            )
        if not isinstance(logits, Tensor):
            raise TypeError(f"logits must be a torch.Tensor, got {type(logits).__name__}")
        if not logits.is_floating_point():
            raise TypeError(f"logits must be floating point, got {logits.dtype}")
        if logits.ndim < 2 or logits.shape[1] != self.num_classes:
            raise ValueError(
                f"logits must have shape (B, {self.num_classes}, *S), as when this was fitted, "
                f"got {tuple(logits.shape)}"
            )
        return self.num_classes

    def learn(self, name: str, value: Tensor) -> None:
        """Keep what was learned as a float64 buffer."""
        self.register_buffer(name, value.detach().to(torch.float64).clone())

    def learned(self, name: str, like: Tensor) -> Tensor:
        """What was learned, in another tensor's type and on its device."""
        buffer: Tensor = getattr(self, name)
        return buffer.to(like.device, like.dtype)

    def options(self) -> dict[str, Any]:
        """The keyword arguments this was created with."""
        return {name: getattr(self, name) for name in signature(type(self)).parameters}

    def get_extra_state(self) -> Tensor:
        """The method, its options and the number of classes, for `state_dict`; bytes of JSON in a tensor."""
        state = {"num_classes": self.num_classes, "method": type(self).__name__, "options": self.options()}
        return torch.tensor(list(json.dumps(state, default=str).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """The number of classes, from `load_state_dict`.

        Raises:
            ValueError: the state is that of another method, or of one with other options.
        """
        found = json.loads(bytes(state.tolist()))
        own = json.loads(bytes(self.get_extra_state().tolist()))
        for what in ("method", "options"):
            if found[what] != own[what]:
                raise ValueError(
                    f"cannot load the state of a calibrator with {what} {found[what]!r} into one with "
                    f"{own[what]!r}"
                )
        self.num_classes = found["num_classes"]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}_extra_state" in state_dict:
            self.set_extra_state(state_dict[f"{prefix}_extra_state"])
        for key, value in state_dict.items():
            name = key.removeprefix(prefix)
            buffer = key.startswith(prefix) and "." not in name and name != "_extra_state"
            if buffer and isinstance(value, Tensor):
                self.register_buffer(name, torch.empty_like(value))
        super()._load_from_state_dict(dict(state_dict), prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # As for losses: .half() is for weights, what was learned keeps its precision and follows the device.
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


def valid_rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The elements of a batch that count: float64 logits ``(N, K)`` and labels ``(N,)``, checked."""
    elements = arrange(logits, target, ignore_index=ignore_index)
    rows, labels = elements.rows.double(), elements.labels
    if not bool(rows.isfinite().all()):
        raise ValueError("logits hold NaN or infinite numbers; a calibrator is fitted to finite logits")
    return rows, labels


def warn_at_bound(what: str, bound: float, why: str) -> None:
    """Say that a parameter stopped at the edge of its range."""
    warn(f"{what} stopped at its bound {bound:g}: {why}")


def warn(message: str) -> None:
    """Warn of a fit, at the line outside of this package that asked for it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
