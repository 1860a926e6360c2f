"""The contract of losses that learn from the validation set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from calibrant.kernels import nan_if_invalid
from calibrant.layout import Elements, arrange
from calibrant.losses.base import Loss, LossOptions
from calibrant.probabilities import warn_of_probabilities
from calibrant.statistics import Statistics, adding, sum_dtype
from calibrant.warning import warn

SYMBOLS = {"multiplier": "λ", "gamma": "γ", "penalty_weight": "ρ"}
"""The letters by which papers call what adaptive losses learn, by the name of the buffer."""


def summarised(learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Learned quantities in a few scalars to log: of more than a scalar, mean, minimum and maximum.

    >>> list(summarised({"scale": torch.tensor(0.5), "gamma": torch.tensor([1.0, 3.0])}))
    ['scale', 'gamma_mean', 'gamma_min', 'gamma_max']
    """
    found: dict[str, Tensor] = {}
    for name, value in learned.items():
        if value.ndim == 0:
            found[name] = value
        else:
            found |= {f"{name}_mean": value.mean(), f"{name}_min": value.min(), f"{name}_max": value.max()}
    return found


class AdaptationWarning(UserWarning):
    """An adaptive loss has no effect, or its learned state is at its bounds; see `AdaptiveLoss.advice`.

    Also if it adapted only after the last training step.
    """


SEVERAL_PASSES = 10
"""The number of passes after which the learned state of a loss shows whether the loss is at work."""


class AdaptiveLoss(Loss):
    """A loss that learns from validation data: the base class of adaptive losses.

    Call ``observe`` for each validation batch, then ``adapt`` once. Nothing else changes the learned state.
    It is kept in persistent float64 buffers: saved in the ``state_dict``, moved with the module, equal on
    every rank. The observed sums are a plain attribute: not saved, and never broadcast.

    Subclasses write `measure` and `update`, and may write `advice` and `idle`.

    >>> from calibrant import create_loss
    >>> loss = create_loss("cals-hr", 2)
    >>> loss.observe(torch.tensor([[30.0, 0.0]]), torch.tensor([0]))
    >>> loss.adapt().samples.item(), loss.passes.item()
    (1.0, 1)

    Attributes:
        passes: how many times the loss has adapted.
    """

    passes: Tensor

    def __init__(self, num_classes: int, **shared: Unpack[LossOptions]) -> None:
        super().__init__(num_classes, **shared)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self._observed: Statistics | None = None
        self._learned: list[str] = []
        self._reported: list[str] = []
        self._advised = False
        self._looked_at = False

    def _check_state(self, logits: Tensor) -> None:
        super()._check_state(logits)
        for name in self._learned:
            state = self._buffers[name]
            assert state is not None
            # float64 first: this runs in every call, and asking for the device takes longer.
            if state.dtype is not torch.float64 and state.dtype != sum_dtype(state.device):
                raise TypeError(
                    f"the learned {name} was converted to {state.dtype}, which is not precise enough. FSDP "
                    "with MixedPrecision(buffer_dtype=...) converts the buffers of wrapped modules: keep the "
                    "loss outside the wrapped module, or wrap with ignored_modules=[loss]"
                )

    @abstractmethod
    def measure(self, elements: Elements) -> Statistics:
        """Additive sums of a batch under the current state; must not change anything.

        An empty batch gives the neutral element.
        """

    @abstractmethod
    def update(self, statistics: Statistics) -> None:
        """Move the buffers, in place, by the statistics of a whole pass.

        In place, because a compiled loss then sees the new values without being compiled again.
        `passes` still counts the passes before this one.
        """

    def idle(self) -> str | None:
        """What to change if the loss has no effect under the current state; None if it has one or may have.

        Unlike `advice`, it also looks at the first passes, which show little.
        """
        return None

    @torch.no_grad()
    def observe(self, logits: Tensor, target: Tensor) -> None:
        """Add a validation batch to the sums; shapes as in `forward`. Several threads may do so at once."""
        logits, target = self._classes(logits.detach(), target)
        elements = self.elements(logits, target)
        if not self._looked_at:  # once, because it waits for a GPU
            warn_of_probabilities(logits)
            self._looked_at = True
        measured = self.measure(elements)
        measured = replace(measured, samples=measured.samples + nan_if_invalid(elements))
        with adding:
            if self._observed is not None:
                measured = self._observed.to(logits.device) + measured
            self._observed = measured

    @torch.no_grad()
    def adapt(self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> Statistics:
        """Learn from the observed batches of all processes, and return their pooled sums.

        Every rank must call it, even one that observed nothing. The observed sums are dropped, even if the
        call fails. The learned state is unchanged if it fails.

        Args:
            group: the processes to pool over; all of them by default.
            timeout: seconds to wait for the other processes; by default as long as the process group does.

        Raises:
            RuntimeError: no rank observed any valid element, or another process did not come in time.
            ValueError: some observed logits were not finite, or some labels were out of range; or the
                processes have different losses.
        """
        with adding:
            sums = self._observed
            self.forget()
        self._compare(group, timeout)
        observed = self._nothing() if sums is None else sums.to(self.passes.device)
        pooled = observed.all_reduce(group, timeout=timeout)
        if pooled.samples == 0:
            raise RuntimeError(
                "adapt() has nothing to learn from: no element was observed, or all were ignored. Call "
                "observe(logits, target) on validation batches first; for adapt_on, look at its batches"
            )
        if not all(bool(tensor.isfinite().all()) for tensor in pooled.tensors()):
            raise ValueError(
                "adapt() refused: some logits given to observe() were NaN or infinite, or too large to sum, "
                f"or some labels lay outside 0 to {self.num_classes - 1}; the learned state is unchanged and "
                "the observed sums were dropped"
            )
        with adding:
            self.update(pooled)
            self.passes += 1
        return pooled

    def forget(self) -> None:
        """Drop what was observed since the last `adapt`; what was learned stays."""
        self._observed = None

    def _kind(self) -> str:
        plain = [f"{name}={value!r}" for name, value in self._plain_options().items()]
        return f"{type(self).__name__}({', '.join([str(self.num_classes), *plain])})"

    def _plain_options(self) -> dict[str, Any]:
        """The hyper-parameters that decide what is learned."""
        # Other values may print their address, and so differ in every process.
        return {
            name: value
            for name, value in self.options().items()
            if name not in ("reduction", "class_weight") and _is_plain(value)
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Not in the state itself, whose entries are the learned ones.
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        metadata.update(loss=type(self).__name__, options=self._plain_options())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Load the state, and warn if it was learned with other hyper-parameters."""
        problem = self._other_loss(metadata)
        if problem is not None:
            warn(problem)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)
        self.forget()  # it was observed under another state

    def _other_loss(self, metadata: Mapping[str, Any]) -> str | None:
        """How this loss differs from the one that saved a state; None if it does not, or if unknown."""
        name, own = metadata.get("loss"), type(self).__name__
        if name not in (None, own):
            return f"the state of {name} is loaded into {own}: create the loss that the state is from"
        options, saved = self._plain_options(), metadata.get("options", {})
        changed = [k for k in options if k in saved and k != "ignore_index" and options[k] != saved[k]]
        if not changed:
            return None
        before, now = (", ".join(f"{k}={values[k]!r}" for k in changed) for values in (saved, options))
        return (
            f"the state of {own} with {before} is loaded into one with {now}: to continue as before, create "
            "the loss with the options that it was saved with"
        )

    def _nothing(self) -> Statistics:
        device = self.passes.device
        labels = torch.empty(0, dtype=torch.int64, device=device)
        return self.measure(arrange(torch.empty(0, self.num_classes, device=device), labels))

    def learned(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in self._reported}

    def register_learned(self, name: str, values: float | Sequence[float], *, reported: bool = True) -> None:
        """Register learned state: a persistent buffer that keeps its precision under ``.half()``.

        Args:
            name: the name of the buffer.
            values: its initial value, or one for each class or bin.
            reported: whether `learned` returns it; false for what only serves the next update.
        """
        self.register_buffer(name, torch.tensor(values, dtype=torch.float64))
        self._learned.append(name)
        if reported:
            self._reported.append(name)


def _is_plain(value: object) -> bool:
    """Whether a value is None, a boolean, a number, a text, or a tuple or list of these."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return type(value) in (type(None), bool, int, float, str)  # exactly: others cannot be read back safely
