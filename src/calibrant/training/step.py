"""A training step, eager or recorded as a CUDA graph."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from calibrant.training.batches import Batch, rows_of
from calibrant.training.bins import TrainingConfidences
from calibrant.training.data import Inputs, map_inputs, tensors_of
from calibrant.training.fabric import FabricModule
from calibrant.training.setup import Parts, check_classes

_WARM_UP = 3  # eager steps before the recording; the last of them is watched


class Step:
    """A training step: forward pass, loss, backward pass, optimizer and running average.

    On a GPU the host never waits for it, and it changes tensors in place only. The loss is added to
    ``total_loss``, and the elements to ``confidences``. Batches of the full size go through ``compiled``,
    once there is a compiled model.
    """

    def __init__(self, parts: Parts, total_loss: Tensor) -> None:
        self.parts, self.total_loss = parts, total_loss
        self.confidences = TrainingConfidences(
            parts.fabric.device, parts.data.ignore_index, binary=parts.recipe.binary
        )
        self.compiled: FabricModule | None = None

    def __call__(self, inputs: Inputs, target: Tensor) -> None:
        """Take the step."""
        try:
            self._take(inputs, target)
        finally:  # a failed recording must leave no gradients behind either
            self.parts.optimizer.zero_grad(set_to_none=True)

    def _take(self, inputs: Inputs, target: Tensor) -> None:
        parts, recipe, fabric = self.parts, self.parts.recipe, self.parts.fabric
        full = len(target) == parts.batch_size  # other sizes would be compiled once more
        model = self.compiled if self.compiled is not None and full else parts.model
        size = -(-len(target) // recipe.accumulate)
        starts = range(0, len(target), size)
        pieces = [rows_of((inputs, target), slice(start, start + size)) for start in starts]
        weights, total = self._weights([labels for _, labels in pieces])
        for number, ((piece, labels), weight) in enumerate(zip(pieces, weights, strict=True), start=1):
            with fabric.no_backward_sync(model, enabled=number < len(pieces)):
                logits = model(piece)
                check_classes(logits, recipe, parts.data)
                loss = parts.loss(logits, labels)
                if weight is not None:
                    loss = loss * weight
                fabric.backward(loss if recipe.batch_loss == "mean" else loss * total)
                self.total_loss += loss.detach()
                self.confidences.add(logits, labels)
        if recipe.gradient_clip:
            fabric.clip_gradients(
                model, parts.optimizer, max_norm=recipe.gradient_clip, error_if_nonfinite=False
            )
        parts.optimizer.step()
        if parts.averaged is not None:
            parts.averaged.update()

    def _weights(self, targets: list[Tensor]) -> tuple[list[Tensor | None], Tensor | None]:
        """The weights by which the mean losses of the pieces add up to the mean over the whole batch.

        The batch is that of all processes. Gradients are averaged over processes, hence the factor. Also
        returns what the mean divides by, where it is needed.
        """
        processes = self.parts.fabric.world_size
        one = len(targets) == 1 and processes == 1
        if one and self.parts.recipe.batch_loss == "mean":
            return [None], None
        counts = torch.stack([self._count(target) for target in targets]).float()
        total = counts.sum()
        if processes > 1:
            dist.all_reduce(total)
        weights = [None] if one else list(counts * processes / total.masked_fill(total <= 0, 1))
        return weights, total

    def _count(self, target: Tensor) -> Tensor:
        """The number by which the loss divides to get its mean: elements that count, by class weight."""
        ignored = target == self.parts.data.ignore_index
        weights = self.parts.loss.class_weight
        if weights is None:
            return (~ignored).sum()
        return (weights[target.masked_fill(ignored, 0)] * ~ignored).sum()


class Recorded:
    """A step on a GPU that is recorded as a CUDA graph after a few eager steps, and then replayed.

    Launching the many small kernels of a step one by one takes longer than running most of them. A recording
    is for batches of one shape and ``batch_size``. Other batches, such as a smaller one at the end of an
    epoch, take eager steps. So do all batches if the network waits for the GPU or draws random numbers on the
    host: a replay would do neither, and ``message`` is called with the reason.

    The step must change tensors in place only. ``quieten`` waits for other threads that use the GPU. It is
    called before the watched step, in which any waiting is taken for the step's own.
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
        self._batch: Batch | None = None  # the tensors that the recording reads from
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, inputs: Inputs, target: Tensor) -> None:
        """Take the step."""
        if not self._possible or len(target) != self.batch_size:
            self.step(inputs, target)
            return
        if self._batch is None:
            self._batch = map_inputs(inputs, torch.empty_like), torch.empty_like(target)
        given, read = [*tensors_of(inputs), target], [*tensors_of(self._batch[0]), self._batch[1]]
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
        """Take an eager step on the stream that will be recorded."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self.step(inputs, target)
        current.wait_stream(self._stream)

    def _take_watched(self, inputs: Inputs, target: Tensor) -> None:
        """Take an eager step and find out whether it can be recorded."""
        self.quieten()
        before, mode = _host_randomness(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True, action="always") as caught:
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._take_aside(inputs, target)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waited = False
        for each in caught:
            if "synchronizing CUDA operation" in str(each.message):
                waited = True
            elif "Synchronization debug mode" not in str(each.message):  # torch warns of the mode itself
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
            # Threads that write checkpoints or pin batches may go on meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self.step(inputs, target)
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # torch leaves the recording's stream as the current one
            fresh = torch.Generator(current.device)  # the old one may still be in recording mode
            fresh.set_state(randomness)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            reason = error.__context__ or error  # the first error of the recording, not the one at its end
            self._give_up(str(reason).strip().partition("\n")[0])
        else:
            self.graph = graph

    def _give_up(self, reason: str) -> None:
        self._possible = False
        self.message(f"the step cannot be recorded as a CUDA graph ({reason}); eager steps are slower")


def _host_randomness() -> tuple[object, bytes, bytes]:
    of_numpy = pickle.dumps(np.random.get_state(legacy=False))
    return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()
