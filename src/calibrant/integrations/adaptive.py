"""The loss inside a user's module, its figures and warnings: shared by the integrations of trainers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calibrant.losses import AdaptiveLoss, Loss
from calibrant.losses.adaptation import advise
from calibrant.losses.adaptive import summarised


def calibrant_loss(loss: nn.Module, where: str, hint: str = "") -> Loss:
    """The loss itself, without the wrapper of `torch.compile`; an error if it is not a calibrant loss."""
    itself = uncompiled(loss)
    if not isinstance(itself, Loss):
        raise TypeError(f"{where} takes a calibrant loss, got {type(itself).__name__}{hint}")
    return itself


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside the wrapper of `torch.compile`, or the module itself."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def learned_figures(loss: Loss) -> dict[str, Tensor]:
    """What a loss has learned, in a few scalars to log; empty for a loss that does not adapt.

    These are the number of passes and, for each learned quantity, its value or its mean, minimum and maximum.

    >>> from calibrant import create_loss
    >>> {name: value.item() for name, value in learned_figures(create_loss("ada-scale", 3)).items()}
    {'passes': 0.0, 'scale': 1.0, 'offset_mean': 0.0, 'offset_min': 0.0, 'offset_max': 0.0}
    """
    figures: dict[str, Tensor] = {}
    if isinstance(loss, AdaptiveLoss):
        figures["passes"] = loss.passes.to(torch.float32)  # integers cannot be averaged over processes
    return figures | summarised({name: value.squeeze() for name, value in loss.learned().items()})


MOVES = "the value of this loss changes whenever it adapts and cannot be compared between evaluations"
"""Why a model is not to be chosen by the value of a loss that adapts."""


@dataclass
class Watch:
    """Watches over a training in the first process: the loss should adapt, and steps use what it learned."""

    begun: bool = False  # whether the training has evaluations
    waits: bool = False  # whether the loss has yet to adapt in this training
    used: bool = True  # whether a step has used what the loss learned, in this training or before

    @classmethod
    def begin(cls, loss: AdaptiveLoss) -> Watch:
        """At the start of a training with evaluations."""
        return cls(begun=True, waits=True, used=bool(loss.passes > 0))

    def step(self) -> None:
        """Before a training step."""
        self.used |= not self.waits

    def end(self, loss: Loss, settings: str) -> None:
        """At the end, warn if the loss did not do its work; ``settings`` decide when training evaluates."""
        if self.waits:
            warn(
                f"{type(loss).__name__} has not adapted, because no evaluation ran before the end of this "
                f"training: train for longer, or change {settings}"
            )
        ended = self.begun and not self.waits
        advise(loss, ended=ended, too_late=None if self.waits or self.used else settings)


def warn(message: str) -> None:
    """Warn on behalf of the function that calls the caller."""
    warnings.warn(f"calibrant: {message}", stacklevel=3)
