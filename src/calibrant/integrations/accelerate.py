"""Adaptive losses and evaluation under Hugging Face Accelerate, whose loaders repeat data to fill a batch."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar
from weakref import WeakSet

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.data_loader import (  # type: ignore[import-untyped]
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderStateMixin,
    IterableDatasetShard,
)
from accelerate.state import GradientState, PartialState  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import BatchSampler

import calibrant.evaluation
import calibrant.losses
from calibrant.evaluation import Evaluation
from calibrant.inference import rows_of_elements
from calibrant.losses import AdaptiveLoss, Loss
from calibrant.statistics import Statistics

__all__ = ["adapt_on", "evaluate_on", "own_rows", "prepare_loss"]

AnyLoss = TypeVar("AnyLoss", bound=nn.Module)

_PREPARED: WeakSet[nn.Module] = WeakSet()


def prepare_loss(accelerator: Accelerator, loss: AnyLoss) -> AnyLoss:
    """Move a loss to the accelerator's device and let its checkpoints carry what the loss has learned.

    Call it once for each loss, and in the same order wherever the checkpoints are loaded.
    ``accelerator.prepare(loss)`` is not the way: it takes every module for a model, to be run in mixed
    precision and wrapped, and on several CPUs fails in `torch.nn.parallel.DistributedDataParallel`, which
    refuses modules without parameters. A loss needs no wrapper: its state is the same in every process
    because every process adapts by the same sums.

    Args:
        accelerator: whose ``save_state`` and ``load_state`` shall include the loss.
        loss: any calibrant loss, compiled or not; an adaptive one or another.

    Returns:
        The loss.

    >>> from calibrant import create_loss
    >>> loss = prepare_loss(Accelerator(cpu=True), create_loss("cals-alm", 10))
    >>> loss.multiplier.device.type
    'cpu'
    """
    itself = getattr(loss, "_orig_mod", loss)  # of torch.compile, which hides the class
    if not isinstance(itself, Loss):
        raise TypeError(
            f"prepare_loss(accelerator, loss) takes a calibrant loss, got {type(itself).__name__}; models, "
            "optimizers and loaders go to accelerator.prepare"
        )
    itself.to(accelerator.device)
    # The loss itself, so that a compiled loss and a plain one can read each other's checkpoints.
    accelerator.register_for_checkpointing(itself)
    _PREPARED.add(itself)
    return loss


def adapt_on(
    accelerator: Accelerator, loss: nn.Module, model: nn.Module, batches: Any, **options: Any
) -> Statistics | None:
    """`calibrant.adapt_on` with a prepared loader: on any number of processes every element counts once.

    Every process makes the call.

    Args:
        accelerator: that prepared the loader.
        loss: any calibrant loss, compiled or not.
        model: from an input to logits, prepared or not.
        batches: the loader that ``accelerator.prepare`` returned; alone, anything that gives batches.
        **options: of `calibrant.adapt_on`: ``forward`` for batches that are no pairs, ``progress``,
            ``timeout``.

    Returns:
        The pooled statistics, or None for a loss that does not adapt.

    Raises:
        TypeError: there are several processes and the loader was not prepared: each would count all data.

    >>> import torch
    >>> from calibrant import create_loss
    >>> accelerator, model = Accelerator(cpu=True), nn.Linear(5, 3)
    >>> loss = prepare_loss(accelerator, create_loss("cals-alm", 3))
    >>> data = torch.utils.data.TensorDataset(torch.randn(7, 5), torch.arange(7) % 3)
    >>> loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4))
    >>> adapt_on(accelerator, loss, model, loader).samples.item()
    7.0
    """
    _require_shares(accelerator, batches)
    itself = getattr(loss, "_orig_mod", loss)
    if isinstance(itself, AdaptiveLoss) and itself not in _PREPARED:
        _PREPARED.add(itself)  # once is enough
        warnings.warn(
            "calibrant: this loss was not given to prepare_loss(accelerator, loss), so that the "
            "accelerator's checkpoints do not carry what it learns",
            stacklevel=2,
        )
    return calibrant.losses.adapt_on(loss, model, batches, own_rows=own_rows, **options)  # type: ignore[arg-type]


def evaluate_on(accelerator: Accelerator, model: nn.Module, batches: Any, **options: Any) -> Evaluation:
    """`calibrant.evaluate_on` with a prepared loader: the figures of all data, in every process.

    Sums of constant size are pooled and no logits gathered. Elements that accelerate repeats are left out,
    as by ``accelerator.gather_for_metrics``. Every process makes the call.

    Args:
        accelerator: that prepared the loader.
        model: from an input to logits, prepared or not.
        batches: the loader that ``accelerator.prepare`` returned; alone, anything that gives batches.
        **options: of `calibrant.evaluate_on`: ``forward`` for batches that are no pairs, ``progress``,
            ``timeout``, and those of `calibrant.Evaluator`.

    Raises:
        TypeError: there are several processes and the loader was not prepared: each would count all data.

    >>> import torch
    >>> accelerator = Accelerator(cpu=True)
    >>> data = torch.utils.data.TensorDataset(9 * torch.eye(3).repeat(3, 1), torch.arange(9) % 3)
    >>> loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4))
    >>> evaluation = evaluate_on(accelerator, nn.Identity(), loader)
    >>> evaluation.samples, evaluation.accuracy
    (9, 1.0)
    """
    _require_shares(accelerator, batches)
    return calibrant.evaluation.evaluate_on(model, batches, own_rows=own_rows, **options)


def own_rows(rows: int) -> int:
    """How many rows of the current batch are data of this process, and not repeats that fill up the last one.

    For loops of your own over a prepared loader: ``loss.observe(logits[:own], target[:own])``. The rows to
    keep are those that ``accelerator.gather_for_metrics`` keeps, always the first ones, and often none of the
    last process's last batch. Repeats are known in some cases more than there: samplers that draw more or
    fewer elements than the data set has, batch samplers that drop the last batch or have no fixed size,
    ``even_batches=False``, and iterable data sets that have a length with ``dispatch_batches=False``.

    Args:
        rows: the size of this process's batch.

    Raises:
        ValueError: nobody can tell: an iterable data set without a length is dealt out with
            ``dispatch_batches=False``.

    >>> from torch.utils.data import DataLoader
    >>> loader = Accelerator(cpu=True).prepare(DataLoader(range(5), batch_size=3))
    >>> [own_rows(len(batch)) for batch in loader]  # one process: no repeats
    [3, 2]
    """
    loader = GradientState().active_dataloader
    if isinstance(loader, DataLoaderDispatcher):
        if not loader.end_of_dataloader:
            return rows
        # Process 0 reads for all, so it knows how many there were.
        return _part(loader.remainder, rows, PartialState().process_index)
    shard = _shard(loader)
    if shard is None or shard.drop_last or not getattr(shard, "even_batches", True):
        return rows
    elements = _elements(shard, loader)
    if not loader.end_of_dataloader:
        return rows
    processes, place = shard.num_processes, shard.process_index
    if shard.batch_size is None:  # whole batches are repeated, so that every process has equally many
        batches = len(shard.batch_sampler) % processes
        return rows if batches == 0 or place < batches else 0
    # The last batch of every process is full, by repeats. A row of logits need not be an element of the data.
    full = shard.batch_size // processes if shard.split_batches else shard.batch_size
    keep = _part(elements % (full * processes) or full * processes, full, place)
    return rows if keep == full else rows_of_elements(keep, full, rows)


def _part(elements: int, rows: int, place: int) -> int:
    """What is this process's of elements that lie end to end in equally long batches of all processes."""
    return min(rows, max(0, elements - place * rows))


def _shard(loader: Any) -> Any:
    """What deals out the data of a loader among processes, or None where nothing does."""
    if isinstance(getattr(loader, "dataset", None), IterableDatasetShard):
        return loader.dataset
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, BatchSampler):
        sampler = getattr(loader, "batch_sampler", None)
    # Of accelerator.skip_first_batches, which wraps what deals out.
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def _elements(shard: Any, loader: Any) -> int:
    """How many elements all processes together draw."""
    if isinstance(shard, BatchSamplerShard):
        return len(getattr(shard.batch_sampler, "sampler", loader.dataset))
    try:
        return len(shard.dataset)
    except TypeError:
        raise ValueError(
            "accelerate repeats elements of this iterable data set to fill the last batch, and without a "
            "length nobody can tell which: give the data set a __len__, use a loader with drop_last=True, or "
            "leave out dispatch_batches=False"
        ) from None


def _require_shares(accelerator: Accelerator, batches: object) -> None:
    if accelerator.num_processes > 1 and not isinstance(batches, DataLoaderStateMixin):
        raise TypeError(
            f"with {accelerator.num_processes} processes, batches must be the loader that "
            f"accelerator.prepare(loader) returned, got {type(batches).__name__}: every process would "
            "count all data. (For a progress bar pass progress=; for data that your own code deals out, "
            "call the function of the same name in calibrant.)"
        )
