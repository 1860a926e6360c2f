"""The loss inside a user's module, its figures and warnings: shared by the integrations of trainers."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from calibrant.losses import AdaptiveLoss, Loss
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


def never_adapted(loss: Loss, settings: str) -> str:
    """A warning for the end of a training without evaluation; ``settings`` decide when it evaluates."""
    return (
        f"{type(loss).__name__} has not adapted, because no evaluation ran before the end of this training: "
        f"train for longer, or change {settings}"
    )


def warn(message: str) -> None:
    """Warn on behalf of the function that calls the caller."""
    warnings.warn(f"calibrant: {message}", stacklevel=3)
