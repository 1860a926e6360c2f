"""Sets up a training run: processes and device, network, optimizer and loss."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from calibrant.evaluation import look_like_probabilities
from calibrant.losses import Loss
from calibrant.options import RecipeError
from calibrant.training.batches import Batch, on_device, steps_per_epoch
from calibrant.training.data import DataSets, Inputs
from calibrant.training.fabric import (
    Fabric,
    FabricModule,
    FabricOptimizer,
    SingleDeviceStrategy,
    launch,
)
from calibrant.training.models import create_model
from calibrant.training.optimization import OPTIMIZERS, RunningAverage, can_be_fused, recordable
from calibrant.training.recipe import Recipe
from calibrant.warning import warn

_SMALL = 10**8
"""Multiplications in a batch: with fewer, threads wait for one another longer than they compute."""


_FASTER_KERNELS: dict[str, Any] = {"max_autotune_pointwise": True, "combo_kernels": True}
"""Options of the compiler on a GPU: try more forms of a kernel, and run small independent ones together."""


def compiled(network: nn.Module, device: torch.device, *, dynamic: bool | None = None) -> nn.Module:
    """The network behind `torch.compile`; ``dynamic`` as there. It compiles when it is first called."""
    options = _FASTER_KERNELS if device.type == "cuda" else None
    return cast(nn.Module, torch.compile(network, dynamic=dynamic, options=options))


def make_fabric(
    recipe: Recipe, *, accelerator: str = "auto", devices: int | str = "auto", nodes: int = 1
) -> Fabric:
    """Create the Lightning Fabric for the precision and batch size of a recipe, not launched yet.

    ``accelerator`` is the kind of device. ``devices`` is their number on each of the machines, the ``nodes``;
    ``auto`` is for all GPUs, or one process on a CPU. Under torchrun, its own numbers replace both.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        devices, nodes = local, int(os.environ["WORLD_SIZE"]) // local
    if devices == "auto" and (accelerator == "cpu" or not torch.cuda.is_available()):
        devices = 1
    several = nodes > 1 or (isinstance(devices, int) and devices > 1)
    if isinstance(devices, int):
        _check_batch_size(recipe, devices * nodes)
    precision = recipe.precision
    if precision == "auto":
        gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        native = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16-mixed" if native else "32-true"
    try:
        return Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            precision=precision,  # type: ignore[arg-type]
            strategy="ddp" if several else "auto",
        )
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"cannot set up training: {' '.join(str(error).split())}") from error


def launched(recipe: Recipe, **options: Any) -> Fabric:
    """Fabric with all processes started; options as for `make_fabric`."""
    fabric = make_fabric(recipe, **options)
    launch(fabric)
    return fabric


def is_single_gpu(fabric: Fabric) -> bool:
    """Whether training runs in one process on one GPU."""
    return isinstance(fabric.strategy, SingleDeviceStrategy) and fabric.device.type == "cuda"


@dataclass(eq=False)
class Parts:
    """Everything that a training run works with, on its device.

    ``model`` is the network as Fabric has wrapped it; training steps call it. ``learning_rates`` are those of
    the parameter groups before the schedule. ``batch_size`` counts the elements of all processes.
    ``recorded`` says whether steps are recorded as a CUDA graph.
    """

    recipe: Recipe
    fabric: Fabric
    data: DataSets
    fingerprint: str
    network: nn.Module
    model: FabricModule
    optimizer: FabricOptimizer
    loss: Loss
    averaged: RunningAverage | None
    learning_rates: list[float]
    batch_size: int
    channels_last: bool = False
    recorded: bool = False

    @property
    def drop_last(self) -> bool:
        """Whether the last, smaller batch of an epoch is left out."""
        # Every process needs at least one element of a batch.
        return self.recipe.drop_last or len(self.data.train) % self.batch_size < self.fabric.world_size

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return steps_per_epoch(len(self.data.train), self.batch_size, self.drop_last)

    @property
    def evaluated(self) -> nn.Module:
        """The network that is validated, adapted to and kept: the average of the weights if there is one."""
        return self.network if self.averaged is None else self.averaged.module

    def to_device(self, batch: Batch) -> Batch:
        """A batch on the device, in the memory layout that the network prefers, with labels of 64 bits.

        In 8 bits, -100 and 156 are the same label.
        """
        inputs, target = self.fabric.to_device(batch)
        if not target.is_floating_point():
            target = target.long()
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, target


def set_up(recipe: Recipe, data: DataSets, fabric: Fabric) -> Parts:
    """Build the network, the optimizer and the loss of a recipe, and move them to the device."""
    torch.manual_seed(recipe.seed)
    random.seed(recipe.seed)
    _check_batch_size(recipe, fabric.world_size)
    _check_data(recipe, data, fabric.world_size)
    loss = recipe.loss_for(data)
    single_gpu = is_single_gpu(fabric)
    network, channels_last = _create_network(recipe, data, fabric.device)
    try:
        optimizer = OPTIMIZERS[recipe.optimizer.name](network, **recipe.optimizer.options)
    except ValueError as error:
        raise RecipeError(f"optimizer {recipe.optimizer}: {error}") from None
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    scaled = getattr(fabric.strategy.precision, "scaler", None) is not None
    # With a scaler only fused steps are recorded, and Fabric does not clip the gradients of those.
    recorded = single_gpu and recipe.record
    recorded = recorded and not (scaled and (recipe.gradient_clip or not can_be_fused(optimizer)))
    if recorded:
        optimizer = recordable(optimizer, fabric.device)
    called = compiled(network, fabric.device) if recipe.compile is True else network
    model, wrapped_optimizer = fabric.setup(called, optimizer)
    parts = Parts(
        recipe=recipe,
        fabric=fabric,
        data=on_device(data, fabric.device) if single_gpu else data,
        fingerprint=data.fingerprint,
        network=network,
        model=model,
        optimizer=wrapped_optimizer,
        loss=loss.to(fabric.device),
        averaged=RunningAverage(network, recipe.average) if recipe.average else None,
        learning_rates=learning_rates,
        batch_size=min(recipe.batch_size, len(data.train) // fabric.world_size * fabric.world_size),
        channels_last=channels_last,
        recorded=recorded,
    )
    if fabric.global_rank:  # the initial weights must be equal in all processes, dropout must differ
        torch.manual_seed(recipe.seed + (fabric.global_rank << 32))
        random.seed(recipe.seed + (fabric.global_rank << 32))
    return parts


@contextmanager
def threads_that_suit(parts: Parts) -> Iterator[None]:
    """One thread inside torch while a small network trains on a CPU, unless ``OMP_NUM_THREADS`` is set.

    The number depends on the recipe and the data alone, because sums are rounded differently with others.
    """
    chosen_by_user = "OMP_NUM_THREADS" in os.environ
    if parts.fabric.device.type != "cpu" or chosen_by_user or _multiplications(parts) >= _SMALL:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _multiplications(parts: Parts) -> int:
    """An upper bound of the multiplications for the logits of a batch.

    Each parameter is used once for each number of an element; for features in a row, once for the element.
    """
    # As in `_create_network`.
    inputs, _ = parts.data.validation.batch(torch.zeros(1, dtype=torch.long, device="cpu"))
    tensors = [inputs] if isinstance(inputs, Tensor) else inputs.values()
    places = [each.numel() for each in tensors if each.ndim > 2 or not each.is_floating_point()]
    numbers = max(places, default=1)
    return sum(each.numel() for each in parts.network.parameters()) * numbers * parts.batch_size


def _check_batch_size(recipe: Recipe, processes: int) -> None:
    if recipe.batch_size % processes:
        raise RecipeError(
            f"batch_size {recipe.batch_size} cannot be divided equally among {processes} processes; "
            f"{recipe.batch_size // processes * processes or processes} can"
        )


def _check_data(recipe: Recipe, data: DataSets, processes: int) -> None:
    if len(data.train) < processes or len(data.validation) == 0:
        raise RecipeError(
            f"data {recipe.data.name!r} have {len(data.train)} training and {len(data.validation)} "
            f"validation elements; expected at least {processes} for training (one for each process) and "
            "1 for validation"
        )
    if data.num_classes < 2:
        raise RecipeError(
            f"data {recipe.data.name!r} have the single class {data.class_names[0]!r}; expected two or more"
        )


def _create_network(recipe: Recipe, data: DataSets, device: torch.device) -> tuple[nn.Module, bool]:
    """The network in training mode, and whether it takes images with the channels last.

    It is called once on one element, so that a network that does not fit the data is refused before training.
    """
    choice = recipe.model
    try:
        network = create_model(choice.name, recipe.outputs(data), data.about, **choice.options)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, AssertionError, LookupError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RecipeError(f"model {choice}: {reason}") from error
    inputs, _ = data.validation.batch(torch.zeros(1, dtype=torch.long, device="cpu"))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            logits = network.eval()(inputs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else sorted(inputs)
            first_line = str(error).strip().partition("\n")[0]
            raise RecipeError(
                f"model {choice} does not take an input of these data, {shape}: {first_line}"
            ) from error
        check_classes(logits, recipe, data)
        if not recipe.binary and look_like_probabilities(logits):  # of one element, too few to tell
            warn(
                f"model {choice} gives numbers in [0, 1] that add up to 1, as probabilities do; losses "
                "take logits: leave its softmax out"
            )
        # Convolutions on a GPU are fastest with the channels last.
        channels_last = device.type == "cuda" and _lay_channels_last(network, inputs)
    return network.to(device).train(), channels_last


def check_classes(logits: Tensor, recipe: Recipe, data: DataSets) -> None:
    """Refuse logits that do not have shape ``(B, K, …)`` for the classes or labels of the data."""
    name, outputs = recipe.model.name, recipe.outputs(data)
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise RecipeError(f"model {name!r} gives {found}; expected logits of shape (B, {outputs}, …)")
    if logits.shape[1] != outputs:
        what, needs = ("outputs", "binary = true needs") if recipe.binary else ("classes", "the data have")
        raise RecipeError(f"model {name!r} gives {logits.shape[1]} {what}; {needs} {outputs}")


def _lay_channels_last(network: nn.Module, inputs: Inputs) -> bool:
    """Lay out the weights for images with the channels last; return whether the network takes such images."""
    weights = [*network.parameters(), *network.buffers()]
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or any(each.ndim > 4 for each in weights):
        return False
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        network(inputs.contiguous(memory_format=torch.channels_last))
    except Exception:  # the same input in the default layout worked, so the layout is the reason
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return False
    return True
