"""The loss inside a user's module, and warnings about it: shared by the integrations of trainers."""

from __future__ import annotations

import warnings

from torch import nn

from calibrant.losses import Loss


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


def warn(message: str) -> None:
    """Warn on behalf of the function that calls the caller."""
    warnings.warn(f"calibrant: {message}", stacklevel=3)
