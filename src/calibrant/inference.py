"""Loop over a model's predictions on batches of data, for adapting a loss and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing, contextmanager
from numbers import Number
from operator import length_hint
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from calibrant.arguments import whole_number
from calibrant.distributed import together, wait_for_all
from calibrant.ensembles import pool

Forward = Callable[[Any, Any], tuple[Tensor, Tensor]]
OwnRows = Callable[[int], int]
Progress = Callable[[int, int | None], None]


def own_rows(loader: object, seen: int, rows: int) -> int:
    """How many rows of a batch are this process's own data, not repeats added by a sampler.

    Samplers for several processes repeat elements until every process has equally many. The repeats are the
    last elements of a process, so its own rows are always the first rows of a batch.

    Args:
        loader: the loader that the batch comes from. Repeats are known if its sampler, or that of its batch
            sampler, is a `DistributedSampler` of torch or the `OrderedDistributedSampler` of timm. Other
            loaders are taken to repeat nothing.
        seen: how many rows this process has seen before in this pass over the data.
        rows: the number of rows in the batch.

    >>> from torch.utils.data import DataLoader
    >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
    >>> loader = DataLoader(range(5), batch_size=2, sampler=sampler)
    >>> list(loader)  # the second process has 1 and 3; 0 belongs to the first process
    [tensor([1, 3]), tensor([0])]
    >>> own_rows(loader, 0, 2), own_rows(loader, 2, 1)
    (2, 0)
    """
    sampler = _distributed_sampler(loader)
    if sampler is None:
        return rows
    # The positions rank, rank + replicas, ...: their number is rounded up.
    own = -(-(len(sampler.dataset) - sampler.rank) // sampler.num_replicas)
    return min(rows, max(0, int(own) - seen))


def own_rows_in(loader: object) -> OwnRows:
    """A function that counts the own rows of each batch during one pass over a loader; see `own_rows`.

    It takes the number of rows of the next batch and returns how many of them, the first ones, to keep.
    """
    sampler = _distributed_sampler(loader)
    seen = 0

    def count(rows: int) -> int:
        nonlocal seen
        # A row of logits is not always an element: logits may have been flattened to (B·S, K), and without
        # automatic batching an element of the data set may be a whole batch.
        elements = rows
        size = getattr(loader, "batch_size", None)
        if size is not None:
            elements = min(size, len(sampler) - seen)
        elif getattr(loader, "batch_sampler", count) is None:
            elements = 1
        keep = own_rows(loader, seen, elements)
        seen += elements
        return rows if keep == elements else rows_of_elements(keep, elements, rows)

    return count if sampler is not None else lambda rows: rows


def _distributed_sampler(loader: object) -> Any:
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler: Any = getattr(holder, "sampler", None)
        # timm's sampler deals out elements in turn, as torch's does, but is not derived from it.
        if isinstance(sampler, DistributedSampler) or type(sampler).__name__ == "OrderedDistributedSampler":
            return sampler
    return None


def rows_of_elements(keep: int, elements: int, rows: int) -> int:
    """How many of a batch's rows belong to its first ``keep`` elements, if all have equally many rows.

    >>> rows_of_elements(keep=1, elements=2, rows=10)
    5
    """
    if elements and rows % elements:
        raise ValueError(
            f"{elements - keep} of {elements} elements in this batch are repeats of the sampler, but it is "
            f"not known which of the {rows} rows of logits belong to them: keep equally many rows for every "
            "element, and label rows that do not count with ignore_index"
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
    passes: int = 1,
    pooled: bool = True,
    binary: bool = False,
) -> Generator[tuple[Tensor, Tensor]]:
    """Yield logits and targets batch by batch, in evaluation mode and without gradients.

    With several ``passes``, dropout stays active and every batch is predicted several times (MC dropout, Gal
    and Ghahramani, ICML 2016). All other modules, such as batch normalisation, are in evaluation mode.

    Every module's own mode is restored at the end. Inputs are moved to the model's device, targets to that
    of the logits. The buffers of a `DistributedDataParallel`, in any wrapper, are synchronised at the start
    instead of in its forward pass, so that processes may have different numbers of batches.

    Args:
        model: maps an input to logits ``(B, K, *S)``.
        batches: pairs ``(input, target)``; the input is a tensor, or tuples, lists and dicts of tensors.
        forward: maps the model and a batch to logits and target, for batches of another form.
        own_rows: maps the number of rows in the current batch to the number of rows to keep, the first
            ones. The others are repeats added by a sampler. By default `own_rows_in` of ``batches``.
        progress: called after every batch with the number of batches done and their total, or None if
            ``batches`` has no length.
        passes: how often each batch is predicted. More than one needs a model with dropout layers.
        pooled: with several passes, yield logits ``(B, K, *S)`` of the mean probabilities; see
            `calibrant.ensembles.pool`. False for the logits of all passes, ``(passes, B, K, *S)``.
        binary: each logit is a yes-or-no decision of its own, so the probabilities of yes are averaged. It
            matters for pooled passes only.

    Raises:
        ValueError: ``passes`` is above 1, but the model has no dropout layer that would make passes differ.

    >>> for logits, target in predictions_on(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 2]))]):
    ...     print(logits.argmax(1), target)
    tensor([0, 1, 2]) tensor([0, 1, 2])
    """
    total = length_hint(batches) or None  # of a DataLoader known only if its data set has a length
    own_rows = own_rows_in(batches) if own_rows is None else own_rows
    device = device_of(model)
    modes = [(module, module.training) for module in model.modules()]
    passes = whole_number("passes", passes)
    dropouts = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.p > 0]
    if passes > 1 and not dropouts:
        raise ValueError(
            f"passes={passes} needs a model with dropout layers (torch.nn.Dropout with p above 0): without "
            "them, all passes are equal"
        )
    model.eval()
    try:
        for dropout in dropouts if passes > 1 else ():
            dropout.train()
        with _synchronised_buffers(model):
            for done, batch in enumerate(batches, start=1):
                batch = _to(batch, device) if forward else _pair(batch, device)
                found = [_predictions(model, batch, forward) for _ in range(passes)]
                logits, target = found[0]
                keep = own_rows(len(logits))
                target = target[:keep].to(logits.device)
                if passes > 1:
                    members = torch.stack([logits[:keep] for logits, _ in found])
                    yield pool(members, binary=binary) if pooled else members, target
                else:
                    yield logits[:keep], target
                if progress is not None:
                    progress(done, total)
    finally:
        for module, training in modes:
            module.training = training


def for_each_prediction(
    use: Callable[[Tensor, Tensor], object],
    what: str,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    **options: Any,
) -> None:
    """Call a function with the logits and targets of every batch. A failure in one process fails in all.

    ``what`` says what the loop does, for the error in the other processes. ``group`` and ``timeout`` as for
    `calibrant.distributed.all_reduce`, other arguments as for `predictions_on`.
    """

    def loop() -> None:
        # Closed at once, not when the traceback is released: closing restores the modes of the modules.
        with closing(predictions_on(model, batches, **options)) as predictions:
            for logits, target in predictions:
                use(logits, target)

    # Before the buffers of DDP are synchronised, which has no time-out of its own.
    wait_for_all(group=group, timeout=timeout)
    together(loop, what, device_of(model), group=group, timeout=timeout)


def device_of(model: nn.Module) -> torch.device | None:
    """The device of the parameters; None if there are none."""
    return next((parameter.device for parameter in model.parameters()), None)


@contextmanager
def _synchronised_buffers(model: nn.Module) -> Iterator[None]:
    """Synchronise buffers now instead of in DDP's forward pass, which a process without data never runs."""
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
        for module, synchronised in before:
            module.require_forward_param_sync = synchronised


def _pair(batch: Any, device: torch.device | None) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"batches must be pairs (input, target), got {_describe(batch)}; for batches of another form "
            "pass forward=lambda model, batch: (logits, target)"
        )
    inputs, target = batch
    if isinstance(target, Number) or getattr(target, "ndim", None) == 0:
        raise TypeError(
            f"expected batches, got a single element with the target {target}; wrap a data set in "
            "torch.utils.data.DataLoader(data, batch_size=128)"
        )
    return _to(inputs, device), target


def _predictions(model: nn.Module, batch: Any, forward: Forward | None) -> tuple[Tensor, Tensor]:
    if forward is None:
        inputs, target = batch
        logits = model(inputs)
    else:
        logits, target = forward(model, batch)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model must return a tensor of logits, got {_describe(logits)}; otherwise "
            "pass forward=lambda model, batch: (logits, target)"
        )
    return logits, target


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"{type(value).__name__}{size}"


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
