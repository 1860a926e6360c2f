"""Adaptive losses and evaluation with Hugging Face Accelerate, whose loaders repeat data to fill a batch."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakSet

from calibrant.extras import require

require("accelerate", "accelerate", purpose=__name__)

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
from calibrant.integrations.adaptive import calibrant_loss, uncompiled, warn
from calibrant.losses import AdaptiveLoss
from calibrant.statistics import Statistics

__all__ = ["adapt_on", "evaluate_on", "own_rows", "prepare_loss"]

AnyLoss = TypeVar("AnyLoss", bound=nn.Module)

_PREPARED: WeakSet[nn.Module] = WeakSet()


def prepare_loss(accelerator: Accelerator, loss: AnyLoss) -> AnyLoss:
    """Move a loss to the accelerator's device, and include its learned state in the checkpoints.

    Call it once for each loss, and in the same order in every program that loads the checkpoints. Do not call
    ``accelerator.prepare(loss)``: it treats every module as a model, which runs in mixed precision and is
    wrapped in `torch.nn.parallel.DistributedDataParallel`, and that refuses modules without parameters. A
    loss needs no wrapper: every process adapts by the same sums, so the state is the same in all.

    Args:
        accelerator: the accelerator whose ``save_state`` and ``load_state`` include the loss.
        loss: any calibrant loss, adaptive or not, compiled or not.

    Returns:
        The loss.

    >>> from calibrant import create_loss
    >>> loss = prepare_loss(Accelerator(cpu=True), create_loss("cals-alm", 10))
    >>> loss.multiplier.device.type
    'cpu'
    """
    hint = "; models, optimizers and loaders go to accelerator.prepare"
    itself = calibrant_loss(loss, "prepare_loss(accelerator, loss)", hint)
    itself.to(accelerator.device)
    # Without the wrapper of torch.compile: compiled and plain losses can read each other's checkpoints.
    accelerator.register_for_checkpointing(itself)
    _PREPARED.add(itself)
    return loss


def adapt_on(
    accelerator: Accelerator, loss: nn.Module, model: nn.Module, batches: Any, **options: Any
) -> Statistics | None:
    """`calibrant.adapt_on` for a prepared loader: every element counts once on any number of processes.

    Call it in every process.

    Args:
        accelerator: the accelerator that prepared the loader.
        loss: any calibrant loss, compiled or not.
        model: maps an input to logits; prepared or not.
        batches: the loader that ``accelerator.prepare`` returned. With a single process, any iterable of
            batches.
        **options: further arguments of `calibrant.adapt_on`: ``forward`` for batches that are not pairs,
            ``progress``, ``timeout``.

    Returns:
        The pooled statistics, or None for a loss that does not adapt.

    Raises:
        TypeError: there are several processes and the loader was not prepared, so each would count all data.

    >>> import torch
    >>> from calibrant import create_loss
    >>> accelerator, model = Accelerator(cpu=True), nn.Linear(5, 3)
    >>> loss = prepare_loss(accelerator, create_loss("cals-alm", 3))
    >>> data = torch.utils.data.TensorDataset(torch.randn(7, 5), torch.arange(7) % 3)
    >>> loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4))
    >>> adapt_on(accelerator, loss, model, loader).samples.item()
    7.0
    """
    _check_prepared(accelerator, batches)
    itself = uncompiled(loss)
    if isinstance(itself, AdaptiveLoss) and itself not in _PREPARED:
        _PREPARED.add(itself)  # warn only once
        warn(
            "this loss was not given to prepare_loss(accelerator, loss), so the accelerator's checkpoints do "
            "not include its learned state"
        )
    return calibrant.losses.adapt_on(loss, model, batches, own_rows=own_rows, **options)  # type: ignore[arg-type]


def evaluate_on(accelerator: Accelerator, model: nn.Module, batches: Any, **options: Any) -> Evaluation:
    """`calibrant.evaluate_on` for a prepared loader: every process gets the figures of all data.

    The processes exchange sums of constant size, not logits. Elements that accelerate repeats are left out,
    as in ``accelerator.gather_for_metrics``. Call it in every process.

    ``options`` are further arguments of `calibrant.evaluate_on`: ``forward`` for batches that are not pairs,
    ``progress``, ``timeout``, and the options of `calibrant.Evaluator`. Other arguments, and errors, as for
    `adapt_on`.

    >>> import torch
    >>> accelerator = Accelerator(cpu=True)
    >>> data = torch.utils.data.TensorDataset(9 * torch.eye(3).repeat(3, 1), torch.arange(9) % 3)
    >>> loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4))
    >>> evaluation = evaluate_on(accelerator, nn.Identity(), loader)
    >>> evaluation.samples, evaluation.accuracy
    (9, 1.0)
    """
    _check_prepared(accelerator, batches)
    return calibrant.evaluation.evaluate_on(model, batches, own_rows=own_rows, **options)


def own_rows(rows: int) -> int:
    """How many rows of the current batch are this process's own data, not repeats that fill the last batch.

    Use it in your own loop over a prepared loader: ``loss.observe(logits[:own], target[:own])``. The rows to
    keep are always the first ones, the same as in ``accelerator.gather_for_metrics``; the last batch of the
    last process often has none. Unlike there, repeats are also known for samplers that draw more or fewer
    elements than the data set has, batch samplers that drop the last batch or have no fixed size,
    ``even_batches=False``, and iterable data sets with a length and ``dispatch_batches=False``.

    Args:
        rows: the number of rows in this process's batch.

    Raises:
        ValueError: the repeats are unknown: an iterable data set without a length is used with
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
        # Process 0 reads the data for all processes, so it knows their number.
        return _own_part(loader.remainder, rows, PartialState().process_index)
    shard = _shard(loader)
    if shard is None or shard.drop_last or not getattr(shard, "even_batches", True):
        return rows
    elements = _elements(shard, loader)
    if not loader.end_of_dataloader:
        return rows
    processes, place = shard.num_processes, shard.process_index
    if shard.batch_size is None:  # whole batches are repeated
        batches = len(shard.batch_sampler) % processes
        return rows if batches == 0 or place < batches else 0
    # Repeats fill the last batch of every process. An element of the data may have several rows of logits.
    full = shard.batch_size // processes if shard.split_batches else shard.batch_size
    keep = _own_part(elements % (full * processes) or full * processes, full, place)
    return rows if keep == full else rows_of_elements(keep, full, rows)


def _own_part(elements: int, rows: int, place: int) -> int:
    """How many of the elements lie in one process's batch, if they fill the batches one after another."""
    return min(rows, max(0, elements - place * rows))


def _shard(loader: Any) -> Any:
    """The object that splits the data of a loader between processes, or None if there is none."""
    if isinstance(getattr(loader, "dataset", None), IterableDatasetShard):
        return loader.dataset
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, BatchSampler):
        sampler = getattr(loader, "batch_sampler", None)
    # accelerator.skip_first_batches wraps the sampler.
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def _elements(shard: Any, loader: Any) -> int:
    """The number of elements that all processes draw together."""
    if isinstance(shard, BatchSamplerShard):
        return len(getattr(shard.batch_sampler, "sampler", loader.dataset))
    try:
        return len(shard.dataset)
    except TypeError:
        raise ValueError(
            "accelerate repeats elements of this iterable data set to fill the last batch, and without a "
            "length it is not known which: give the data set a __len__, use a loader with drop_last=True, or "
            "remove dispatch_batches=False"
        ) from None


def _check_prepared(accelerator: Accelerator, batches: object) -> None:
    if accelerator.num_processes > 1 and not isinstance(batches, DataLoaderStateMixin):
        raise TypeError(
            f"with {accelerator.num_processes} processes, batches must be the loader that "
            f"accelerator.prepare(loader) returned, got {type(batches).__name__}: every process would "
            "count all data. (For a progress bar, pass progress=. If your own code splits the data between "
            "processes, call the function of the same name in calibrant.)"
        )
