"""One step of training, and how a GPU is told of it only once."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import Tensor

from calibrant.losses import Loss
from calibrant.options import RecipeError
from calibrant.training.batches import Batch, rows_of
from calibrant.training.data import DataSets, Inputs
from calibrant.training.optimization import RunningAverage
from calibrant.training.recipe import Recipe

_WARM_UP = 3  # steps before the one that is recorded; the last of them is watched


def check_classes(logits: Tensor, recipe: Recipe, data: DataSets) -> None:
    """See that a model gives a logit for each class."""
    name, classes = recipe.model.name, data.num_classes
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise RecipeError(f"model {name!r} gives {found}; expected logits of shape (B, {classes}, …)")
    if logits.shape[1] != classes:
        raise RecipeError(f"model {name!r} gives {logits.shape[1]} classes; the data have {classes}")


class Step:
    """A step: forward, loss, backward, optimizer and running average.

    On a device nothing in it makes the host wait, and it changes tensors in place only.

    Args:
        recipe: that is followed.
        data: that are trained with.
        fabric: of the processes.
        model: as Fabric has set it up.
        optimizer: likewise.
        loss: to descend.
        averaged: the running average of weights, if there is one.
        total_loss: to which each step's loss is added.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: DataSets,
        fabric: Fabric,
        model: _FabricModule,
        optimizer: _FabricOptimizer,
        loss: Loss,
        averaged: RunningAverage | None,
        total_loss: Tensor,
    ) -> None:
        self.recipe, self.data, self.fabric = recipe, data, fabric
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.averaged, self.total_loss = averaged, total_loss

    def __call__(self, inputs: Inputs, target: Tensor) -> None:
        """Take it."""
        try:
            self._descend(inputs, target)
        finally:  # a recording that failed must not leave gradients behind either
            self.optimizer.zero_grad(set_to_none=True)

    def _descend(self, inputs: Inputs, target: Tensor) -> None:
        size = -(-len(target) // self.recipe.accumulate)
        starts = range(0, len(target), size)
        parts = [rows_of((inputs, target), slice(start, start + size)) for start in starts]
        shares = self._shares([part for _, part in parts])
        for number, ((part, labels), share) in enumerate(zip(parts, shares, strict=True), start=1):
            with self.fabric.no_backward_sync(self.model, enabled=number < len(parts)):
                logits = self.model(part)
                check_classes(logits, self.recipe, self.data)
                loss = self.loss(logits, labels)
                if share is not None:
                    loss = loss * share
                self.fabric.backward(loss)
                self.total_loss += loss.detach()
        if self.recipe.gradient_clip:
            self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.recipe.gradient_clip, error_if_nonfinite=False
            )
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update()

    def _shares(self, targets: list[Tensor]) -> list[Tensor | None]:
        """What each part's mean counts, so that all together are the mean over the batch of all processes.

        Gradients are averaged over processes, hence the factor of their number.
        """
        if len(targets) == 1 and self.fabric.world_size == 1:
            return [None]
        counts = torch.stack([self._weight_of(target) for target in targets]).float()
        total = counts.sum()
        if self.fabric.world_size > 1:
            dist.all_reduce(total)
        return list(counts * self.fabric.world_size / total.masked_fill(total <= 0, 1))

    def _weight_of(self, target: Tensor) -> Tensor:
        """What the loss divides by for its mean over a target."""
        ignored = target == self.data.ignore_index
        weights = self.loss.class_weight
        if weights is None:
            return (~ignored).sum()
        return (weights[target.masked_fill(ignored, 0)] * ~ignored).sum()


class Recorded:
    """A step on a GPU that is recorded as a CUDA graph after a few have been taken, and then replayed.

    To launch the many small kernels of a step one by one takes longer than most of them. A recording is
    for batches of one shape; others, such as a smaller one at the end of an epoch, are steps like any
    other. So are all of them where a network waits for the device, or draws random numbers on the host, which
    a replay would not do.

    Args:
        step: to take; must change tensors in place only.
        batch_size: how many elements the batches have that are recorded.
        message: called with the reason where steps cannot be recorded.
        quieten: waits for other threads that use the device; called before a step in which any waiting is
            taken for the step's own.
    """

    def __init__(
        self,
        step: Callable[[Inputs, Tensor], None],
        batch_size: int,
        message: Callable[[str], None],
        quieten: Callable[[], None],
    ) -> None:
        self.step, self.batch_size, self.message, self.quieten = step, batch_size, message, quieten
        self.graph: torch.cuda.CUDAGraph | None = None
        self._possible, self._taken = True, 0
        self._batch: Batch | None = None  # the tensors that the recording reads
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, inputs: Inputs, target: Tensor) -> None:
        """Take the step."""
        if not self._possible or len(target) != self.batch_size:
            self.step(inputs, target)
            return
        if self._batch is None:
            self._batch = (
                {name: torch.empty_like(tensor) for name, tensor in inputs.items()}
                if isinstance(inputs, dict)
                else torch.empty_like(inputs),
                torch.empty_like(target),
            )
        given, read = _tensors((inputs, target)), _tensors(self._batch)
        if [(each.shape, each.dtype) for each in given] != [(each.shape, each.dtype) for each in read]:
            self.step(inputs, target)
            return
        for tensor, content in zip(read, given, strict=True):
            tensor.copy_(content)
        if self.graph is None and self._taken == _WARM_UP:
            self._record(*self._batch)
        if self.graph is not None:
            self.graph.replay()
        elif not self._possible:
            self.step(*self._batch)
        else:
            self._taken += 1
            (self._take_watched if self._taken == _WARM_UP else self._take_aside)(*self._batch)

    def _take_aside(self, inputs: Inputs, target: Tensor) -> None:
        """Take a step on the stream that will be recorded."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self.step(inputs, target)
        current.wait_stream(self._stream)

    def _take_watched(self, inputs: Inputs, target: Tensor) -> None:
        """Take a step and find out whether it can be recorded."""
        self.quieten()
        before, mode = _host_randomness(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._take_aside(inputs, target)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waited = False
        for each in caught:
            if "synchronizing CUDA operation" in str(each.message):
                waited = True
            elif "Synchronization debug mode" not in str(each.message):  # which torch warns of itself
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if waited:
            self._give_up("it makes the host wait for the GPU")
        elif _host_randomness() != before:
            self._give_up("it draws random numbers on the host")

    def _record(self, inputs: Inputs, target: Tensor) -> None:
        current = torch.cuda.current_stream()
        generator = torch.cuda.default_generators[current.device_index]
        randomness = generator.get_state()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, which write checkpoints and pin batches, may go on meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self.step(inputs, target)
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # torch does not go back to it
            fresh = torch.Generator(current.device)  # the old one may take itself for being recorded still
            fresh.set_state(randomness)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            reason = error.__context__ or error  # the end of a recording fails because of what failed in it
            self._give_up(str(reason).strip().partition("\n")[0])
        else:
            self.graph = graph

    def _give_up(self, reason: str) -> None:
        self._possible = False
        self.message(f"the step cannot be recorded as a CUDA graph ({reason}), which would be faster")


def _tensors(batch: Batch) -> list[Tensor]:
    inputs, target = batch
    return [*(inputs.values() if isinstance(inputs, dict) else [inputs]), target]


def _host_randomness() -> tuple[object, bytes, bytes]:
    of_numpy = pickle.dumps(np.random.get_state(legacy=False))
    return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()
