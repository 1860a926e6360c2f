"""A driver for plain loops: one adaptation pass over a validation set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrant.losses.base import AdaptiveLoss, Loss
from calibrant.statistics import Statistics


@torch.no_grad()
def adapt_on(
    loss: Loss,
    model: nn.Module,
    batches: Iterable[tuple[Any, Tensor]],
    *,
    progress: Callable[[int, int | None], None] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Statistics | None:
    """Observe every validation batch, then adapt: `AdaptiveLoss.observe` and `AdaptiveLoss.adapt`.

    The model runs in evaluation mode and without gradients; every module's own mode is restored
    afterwards. Inputs are moved to the model's device, targets to the logits'. Sums left over from
    earlier calls of ``observe`` are dropped first, and if a batch fails, so are those of this call. A
    loss that does not adapt costs nothing: the batches are not even read.

    Args:
        loss: any loss.
        model: from an input to logits ``(B, K, *S)``.
        batches: pairs ``(input, target)``; the input is a tensor, or tuples, lists and dicts of them.
        progress: called after every batch with the number of batches done and their total, or None
            where ``batches`` has no length.
        group: the processes to pool over; all of them by default. Every rank must make the call, each
            with its own share of the data.

    Returns:
        The pooled statistics, or None for a loss that does not adapt.

    >>> from calibrant import create_loss
    >>> loss, model = create_loss("cals-alm", 3), nn.Linear(5, 3)
    >>> batches = [(torch.randn(4, 5), torch.tensor([0, 1, 2, 0])) for _ in range(2)]
    >>> adapt_on(loss, model, batches).samples.item()
    8.0
    """
    loss = getattr(loss, "_orig_mod", loss)  # of torch.compile, which hides the class
    if not isinstance(loss, Loss):
        raise TypeError(
            f"adapt_on(loss, model, batches) takes a calibrant loss first, got {type(loss).__name__}"
        )
    if not isinstance(loss, AdaptiveLoss):
        return None
    total = _length(batches)
    device = next((parameter.device for parameter in model.parameters()), None)
    modes = [(module, module.training) for module in model.modules()]
    loss.forget()
    model.eval()
    try:
        for done, batch in enumerate(batches, start=1):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise TypeError(
                    f"batches must be pairs (input, target), got {_describe(batch)}; for batches of another "
                    "form call loss.observe(logits, target) on each, then loss.adapt()"
                )
            inputs, target = batch
            logits = model(_to(inputs, device))
            if not isinstance(logits, Tensor):
                raise TypeError(
                    f"the model must return a tensor of logits, got {_describe(logits)}; call "
                    "loss.observe(logits, target) on each batch, then loss.adapt()"
                )
            loss.observe(logits, target.to(logits.device))
            if progress is not None:
                progress(done, total)
    except BaseException:
        loss.forget()
        raise
    finally:
        for module, training in modes:
            module.training = training
    return loss.adapt(group)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"{type(value).__name__}{size}"


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader has a length only if its data set does
        return None


def _to(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value if device is None else value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_to(item, device) for item in value)
    return value
