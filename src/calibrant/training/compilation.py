"""``compile = "auto"``: compiles the network of a run on a GPU once the rest of the run repays it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from calibrant.training.batches import Batch, rows_of
from calibrant.training.checkpoint import random_state, restore_random_state
from calibrant.training.data import tensors_of
from calibrant.training.fabric import FabricModule
from calibrant.training.setup import Parts, compiled, is_single_gpu

COMPILE_SECONDS = 60.0
"""The time that `torch.compile` typically takes: ResNet-50 takes about 45 seconds on an H200."""

CACHED_COMPILE_SECONDS = 15.0
"""The same for a network that has been compiled on this machine before: its kernels are in the cache."""

TIME_SAVED = 0.25
"""The fraction of the training time that a compiled network typically saves."""


def repays(history: Sequence[Mapping[str, float]], epochs: int, compile_seconds: float) -> bool:
    """Whether compiling saves more time than it takes.

    The remaining time is estimated from the shorter of the last two epochs in the log rows: the first epoch
    of a process is longer because it warms up.

    >>> rows = [{"seconds": 9.0}, {"seconds": 4.0}]
    >>> repays(rows, 30, COMPILE_SECONDS), repays(rows, 30, CACHED_COMPILE_SECONDS)
    (False, True)
    """
    if len(history) < (1 if compile_seconds <= CACHED_COMPILE_SECONDS else 2):
        return False
    seconds = min(row["seconds"] for row in history[-2:])
    return TIME_SAVED * seconds * (epochs - len(history)) > compile_seconds


def should_compile(parts: Parts, batch: Batch, history: Sequence[Mapping[str, float]]) -> bool:
    """Whether to compile the network before the next batch, by recipe, device and the time that is left."""
    if parts.recipe.compile != "auto" or not is_single_gpu(parts.fabric) or len(batch[1]) != parts.batch_size:
        return False
    epochs = parts.recipe.epochs
    if not repays(history, epochs, CACHED_COMPILE_SECONDS):
        return False
    return repays(history, epochs, COMPILE_SECONDS) or _marker(parts, batch).exists()


def compile_network(parts: Parts, batch: Batch) -> FabricModule:
    """The network behind `torch.compile`, compiled by a forward and a backward pass on a full batch.

    The passes leave no trace, even if they raise an exception.
    """
    fabric, network = parts.fabric, parts.network
    inputs, target = rows_of(batch, slice(0, parts.batch_size // parts.recipe.accumulate))
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    randomness = random_state()
    try:
        with warnings.catch_warnings(action="ignore"):  # the compiler's hints are for developers
            model = fabric.setup_module(compiled(network, fabric.device, dynamic=False))
            fabric.backward(parts.loss(model(inputs), target))
    finally:
        parts.optimizer.zero_grad(set_to_none=True)
        for buffer, before in buffers:
            buffer.copy_(before)
        restore_random_state(randomness)
    remember_compiled(parts, batch)
    return model


def remember_compiled(parts: Parts, batch: Batch) -> None:
    """Note for later runs on this machine that the kernels of this network are in the compiler's cache."""
    with suppress(OSError):
        marker = _marker(parts, batch)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _marker(parts: Parts, batch: Batch) -> Path:
    """A file beside the compiler's cache that says that this network has been compiled before."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    about = (
        str(parts.recipe.model),
        parts.recipe.accumulate,
        parts.fabric.strategy.precision.precision,
        [tuple(tensor.shape) for tensor in (*tensors_of(batch[0]), batch[1])],
        parts.recipe.outputs(parts.data),
        torch.__version__,
        torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )
    return Path(cache_dir()) / "calibrant" / hashlib.sha256(repr(about).encode()).hexdigest()
