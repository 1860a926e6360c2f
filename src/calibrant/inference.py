"""A model's logits on a stream of batches: what adapting to data and judging by data have in common."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sized
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Forward = Callable[[Any, Any], tuple[Tensor, Tensor]]
OwnRows = Callable[[int, int], int]
Progress = Callable[[int, int | None], None]

STRIDED = ("DistributedSampler", "OrderedDistributedSampler")
"""The samplers of torch (and Lightning, by inheritance) and of timm that deal out elements in turn."""


def own_rows(loader: object, seen: int, rows: int) -> int:
    """How many rows of a batch are data of this process, and not repeats that a sampler put in.

    Samplers for several processes repeat elements until every process has equally many. The repeats are a
    process's last elements, so the rows to keep are always the first ones of a batch.

    Args:
        loader: where the batch is from. If its sampler, or its batch sampler's, is torch's
            `DistributedSampler`, one derived from it, or timm's, the repeats are known; else there are none.
        seen: how many rows this process had before from this pass over the data.
        rows: of the batch.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
    >>> loader = DataLoader(range(5), batch_size=2, sampler=sampler)
    >>> list(loader)  # of 0 to 4 the second process has 1 and 3; 0 is the first process's
    [tensor([1, 3]), tensor([0])]
    >>> own_rows(loader, 0, 2), own_rows(loader, 2, 1)
    (2, 0)
    """
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler: Any = getattr(holder, "sampler", None)
        if any(ancestor.__name__ in STRIDED for ancestor in type(sampler).__mro__):
            behind = len(sampler.dataset) - sampler.rank
            own = -(-behind // sampler.num_replicas)  # rounded up: positions rank, rank + replicas, …
            return min(rows, max(0, int(own) - seen))
    return rows


_own_rows = own_rows  # by a name that no argument hides


@torch.no_grad()
def predictions_on(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    own_rows: OwnRows | None = None,
    progress: Progress | None = None,
) -> Generator[tuple[Tensor, Tensor]]:
    """Logits and targets, batch by batch, in evaluation mode and without gradients.

    Every module's own mode is restored at the end. Inputs are moved to the model's device, targets to the
    logits'. Of a `DistributedDataParallel` the module itself runs, so that processes may have different
    numbers of batches; its buffers are made equal first, as its own forward would.

    Args:
        model: from an input to logits ``(B, K, *S)``.
        batches: pairs ``(input, target)``; the input is a tensor, or tuples, lists and dicts of them.
        forward: from the model and a batch to logits and target, for batches of another form.
        own_rows: from the number of rows seen and of those in a batch to the number of rows to keep; by
            default the function of that name tells, from ``batches``.
        progress: called after every batch with the number of batches done and their total, or None where
            ``batches`` has no length.

    >>> for logits, target in predictions_on(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 2]))]):
    ...     print(logits.argmax(1), target)
    tensor([0, 1, 2]) tensor([0, 1, 2])
    """
    total = _length(batches)
    own_rows = partial(_own_rows, batches) if own_rows is None else own_rows
    modes = [(module, module.training) for module in model.modules()]
    if isinstance(model, DistributedDataParallel):
        _share_buffers(model)
        model = model.module
    device = next((parameter.device for parameter in model.parameters()), None)
    seen = 0
    model.eval()
    try:
        for done, batch in enumerate(batches, start=1):
            if forward is None:
                logits, target = _pair(model, batch, device)
            else:
                logits, target = forward(model, _to(batch, device))
            if not isinstance(logits, Tensor):
                raise TypeError(
                    f"the model must return a tensor of logits, got {_describe(logits)}; say how to get "
                    "them: forward=lambda model, batch: (logits, target)"
                )
            rows = len(logits)
            keep = own_rows(seen, rows)
            seen += rows
            target = target.to(logits.device)
            yield (logits, target) if keep == rows else (logits[:keep], target[:keep])
            if progress is not None:
                progress(done, total)
    finally:
        for module, training in modes:
            module.training = training


def _pair(model: nn.Module, batch: Any, device: torch.device | None) -> tuple[Any, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"batches must be pairs (input, target), got {_describe(batch)}; for batches of another form "
            "pass forward=lambda model, batch: (logits, target)"
        )
    inputs, target = batch
    return model(_to(inputs, device)), target


def _share_buffers(model: DistributedDataParallel) -> None:
    if model.broadcast_buffers:
        for buffer in model.module.buffers():
            source = dist.get_global_rank(model.process_group, 0)
            dist.broadcast(buffer, source, group=model.process_group)


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
