"""A model's logits on a stream of batches: what adapting to data and judging by data have in common."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from calibrant.distributed import fail_together

Forward = Callable[[Any, Any], tuple[Tensor, Tensor]]
OwnRows = Callable[[int], int]
Progress = Callable[[int, int | None], None]

_TIMMS = "OrderedDistributedSampler"
"""timm's sampler, which deals out elements in turn as torch's does, but is not derived from it."""


def own_rows(loader: object, seen: int, rows: int) -> int:
    """How many rows of a batch are data of this process, and not repeats that a sampler put in.

    Samplers for several processes repeat elements until every process has equally many. The repeats are a
    process's last elements, so the rows to keep are always the first ones of a batch.

    Args:
        loader: where the batch is from. If its sampler, or its batch sampler's, is torch's
            `DistributedSampler`, one derived from it, or timm's, the repeats are known; else there are none.
        seen: how many rows this process had before from this pass over the data.
        rows: of the batch.

    >>> from torch.utils.data import DataLoader
    >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
    >>> loader = DataLoader(range(5), batch_size=2, sampler=sampler)
    >>> list(loader)  # of 0 to 4 the second process has 1 and 3; 0 is the first process's
    [tensor([1, 3]), tensor([0])]
    >>> own_rows(loader, 0, 2), own_rows(loader, 2, 1)
    (2, 0)
    """
    sampler = _dealing_sampler(loader)
    if sampler is None:
        return rows
    behind = len(sampler.dataset) - sampler.rank
    own = -(-behind // sampler.num_replicas)  # rounded up: positions rank, rank + replicas, …
    return min(rows, max(0, int(own) - seen))


def _dealing_sampler(loader: object) -> Any:
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler: Any = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler) or type(sampler).__name__ == _TIMMS:
            return sampler
    return None


class Share:
    """This process's share of a pass over a loader: which rows of its batches are its own.

    Args:
        loader: where the batches are from.

    >>> from torch.utils.data import DataLoader
    >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
    >>> share = Share(DataLoader(range(5), batch_size=2, sampler=sampler))
    >>> share.rows(2), share.rows(1)
    (2, 0)
    """

    def __init__(self, loader: object) -> None:
        self.loader = loader
        self.seen = 0

    def rows(self, rows: int) -> int:
        """How many of the next batch's rows to keep: always the first ones."""
        sampler = _dealing_sampler(self.loader)
        if sampler is None:
            return rows
        # Logits may have been flattened to (B·S, K), and a data set may have batches for elements, which the
        # loader does not put together: a row is then not an element.
        elements = rows
        size = getattr(self.loader, "batch_size", None)
        if size is not None:
            elements = min(size, len(sampler) - self.seen)
        elif getattr(self.loader, "batch_sampler", self) is None:
            elements = 1
        keep = own_rows(self.loader, self.seen, elements)
        self.seen += elements
        return rows if keep == elements else scaled_rows(keep, elements, rows)


def scaled_rows(keep: int, elements: int, rows: int) -> int:
    """How many of a batch's rows belong to its first elements, each having equally many rows.

    >>> scaled_rows(keep=1, elements=2, rows=10)
    5
    """
    if elements and rows % elements:
        raise ValueError(
            f"{elements - keep} of {elements} elements in this batch are repeats of the sampler, but which "
            f"of {rows} rows of logits are theirs is not known: keep the rows of all elements, equally many "
            "each, with ignore_index as the label of those that do not count"
        )
    return rows // max(1, elements) * keep


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
    logits'. The buffers of a `DistributedDataParallel`, in whatever wrapper, are made equal at the start and
    not in its forward pass, so that processes may have different numbers of batches.

    Args:
        model: from an input to logits ``(B, K, *S)``.
        batches: pairs ``(input, target)``; the input is a tensor, or tuples, lists and dicts of them.
        forward: from the model and a batch to logits and target, for batches of another form.
        own_rows: from the number of rows of the current batch to how many of them, the first ones, are not
            repeats; by default a `Share` of ``batches`` tells.
        progress: called after every batch with the number of batches done and their total, or None where
            ``batches`` has no length.

    >>> for logits, target in predictions_on(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 2]))]):
    ...     print(logits.argmax(1), target)
    tensor([0, 1, 2]) tensor([0, 1, 2])
    """
    total = _length(batches)
    own_rows = Share(batches).rows if own_rows is None else own_rows
    device = device_of(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with _buffers_in_step(model):
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
                keep = own_rows(len(logits))
                yield logits[:keep], target[:keep].to(logits.device)
                if progress is not None:
                    progress(done, total)
    finally:
        for module, training in modes:
            module.training = training


def feed(
    use: Callable[[Tensor, Tensor], object],
    what: str,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    **options: Any,
) -> None:
    """Give logits and targets of all batches to a function; what fails in one process fails in all.

    Args:
        use: takes the logits and targets of a batch.
        what: that is called, for the message in the other processes.
        model: as in `predictions_on`.
        batches: likewise.
        group: the processes that must all succeed; all of them by default.
        timeout: seconds to wait for the others; by default as long as the process group does.
        **options: of `predictions_on`.

    >>> batches = [(torch.ones(2, 3), torch.ones(2))]
    >>> feed(lambda logits, target: print(len(logits)), "counting", nn.Identity(), batches)
    2
    """
    problem: Exception | None = None
    predictions = predictions_on(model, batches, **options)
    try:
        with closing(predictions):  # now, not when the traceback is gone: the modes are put back by it
            for logits, target in predictions:
                use(logits, target)
    except Exception as error:
        problem = error
    fail_together(problem, what, device_of(model), group=group, timeout=timeout)


def device_of(model: nn.Module) -> torch.device | None:
    """Where the parameters are; None without any."""
    return next((parameter.device for parameter in model.parameters()), None)


@contextmanager
def _buffers_in_step(model: nn.Module) -> Iterator[None]:
    """Exchange now what DDP would in its first forward pass, which a process without data never makes."""
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    before = [(module, module.require_forward_param_sync) for module in wrapped if module.broadcast_buffers]
    for module, _ in before:
        ignored = module.parameters_to_ignore
        source = dist.get_global_rank(module.process_group, 0)
        for name, buffer in module.module.named_buffers():
            if name not in ignored:
                dist.broadcast(buffer, source, group=module.process_group)
        module.require_forward_param_sync = False
    try:
        yield
    finally:
        for module, in_step in before:
            module.require_forward_param_sync = in_step


def _pair(model: nn.Module, batch: Any, device: torch.device | None) -> tuple[Any, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"batches must be pairs (input, target), got {_describe(batch)}; for batches of another form "
            "pass forward=lambda model, batch: (logits, target)"
        )
    inputs, target = batch
    return model(_to(inputs, device)), target


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
        return value if device is None else value.to(device, non_blocking=device.type == "cuda")
    if isinstance(value, Mapping):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_to(item, device) for item in value)
    return value
