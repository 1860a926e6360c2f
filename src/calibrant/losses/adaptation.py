"""One adaptation pass over a validation set, for plain loops, and warnings about what was learned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from calibrant.distributed import several_processes
from calibrant.inference import Forward, OwnRows, Progress, for_each_prediction
from calibrant.losses.adaptive import SEVERAL_PASSES, AdaptationWarning, AdaptiveLoss
from calibrant.losses.base import Loss
from calibrant.statistics import Statistics
from calibrant.warning import warn


def adapt_on(
    loss: Loss,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    own_rows: OwnRows | None = None,
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Statistics | None:
    """Let an adaptive loss learn from validation data, in one pass over the batches.

    Call it after each epoch. It calls `AdaptiveLoss.observe` for every batch, then `AdaptiveLoss.adapt`. The
    model runs in evaluation mode, without gradients; the mode of every module is restored. Observations from
    before this call are dropped, and if a batch fails, those of this call too. If the loss does not adapt, no
    batch is read.

    In a distributed run every process calls this function with its own part of the data, which may be empty.
    Elements that a `torch.utils.data.DistributedSampler` repeats are left out. If a batch fails in one
    process, the call fails in all of them.

    If the loss turns out to have no effect, or to be at its bounds, an `AdaptationWarning` says so, once.

    Args:
        loss: any calibrant loss.
        model: a module that maps an input to logits ``(B, K, *S)``.
        batches: pairs ``(input, target)``. The input is a tensor, or tuples, lists and dicts of tensors.
        forward: a function that maps the model and a batch to logits and target, for other kinds of batches.
        own_rows: a function that maps the number of rows in the current batch to the number of rows to keep,
            the first ones; for samplers whose repeats `calibrant.inference.own_rows` does not know.
        progress: called after every batch with the number of batches done and their total, or None
            where ``batches`` has no length.
        group: the processes to pool over; all of them by default.
        timeout: seconds to wait for the other processes; by default as long as the process group does.

    Returns:
        The pooled statistics, or None for a loss that does not adapt.

    >>> import torch
    >>> from calibrant import create_loss
    >>> loss, model = create_loss("cals-alm", 3), nn.Linear(5, 3)
    >>> batches = [(torch.randn(4, 5), torch.tensor([0, 1, 2, 0])) for _ in range(2)]
    >>> adapt_on(loss, model, batches).samples.item()
    8.0
    """
    loss = getattr(loss, "_orig_mod", loss)  # of torch.compile, which hides the class
    if not isinstance(loss, Loss):
        raise TypeError(
            f"adapt_on(loss, model, batches) takes a calibrant loss first, got {type(loss).__name__}: make "
            "one with calibrant.create_loss(key, num_classes)"
        )
    if not isinstance(loss, AdaptiveLoss):
        return None
    loss.forget()
    try:
        for_each_prediction(
            loss.observe,
            "observing validation batches",
            model,
            batches,
            forward=forward,
            own_rows=own_rows,
            progress=progress,
            group=group,
            timeout=timeout,
        )
    except BaseException:
        loss.forget()
        raise
    statistics = loss.adapt(group, timeout=timeout)
    advise(loss)
    return statistics


def advise(loss: Loss, *, name: str | None = None, ended: bool = False, too_late: str | None = None) -> None:
    """Warn with the `AdaptiveLoss.advice` of a loss, if it has any; once per loss, in the first process.

    Args:
        loss: any loss.
        name: the name of the loss in the warning; its class by default.
        ended: whether training has ended. A training too short for advice then warns of a loss that is
            `AdaptiveLoss.idle`.
        too_late: the settings that decide when it adapts, if it adapted only after the last training step.
            The warning then says so.
    """
    if not isinstance(loss, AdaptiveLoss) or loss._advised or (several_processes() and dist.get_rank()):
        return
    found, passes = loss.advice(), int(loss.passes)
    if too_late is not None:
        found = (
            "it adapted only after the last training step, so nothing was trained with what it learned. "
            f"Train for longer, or let it adapt earlier ({too_late})"
        )
    elif found is not None:
        loss._advised = True  # after the others, a longer training may need other advice
    elif ended and 0 < passes < SEVERAL_PASSES and (remedy := loss.idle()) is not None:
        so_far = f"{passes} pass{'es' * (passes > 1)}"
        found = f"its penalty had no effect in {so_far}: this is cross-entropy. {remedy}"
    if found is not None:
        warn(f"{name or type(loss).__name__}: {found}", AdaptationWarning)
