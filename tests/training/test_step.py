from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from calibrant.losses import create_loss
from calibrant.training.data import DataSets, TensorSplit
from calibrant.training.recipe import Recipe
from calibrant.training.setup import Parts
from calibrant.training.step import Recorded, Step


class Device:
    """A GPU that is not there: while it records, a step is noted and not taken."""

    def __init__(self) -> None:
        self.taken: list[list[float]] = []
        self.recording: Any = None
        self.writing = True
        self.ends_badly = False
        self.replays = 0
        self.mode: Any = 0
        self.stream_now, self.randomness = "main", "as it was"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Graph:
            def replay(self) -> None:
                device.replays += 1
                device.taken.append(self.inputs.tolist())

        @contextmanager
        def graph(graph: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
            device.recording = graph
            device.stream_now = "aside"
            try:
                yield  # like torch's, it does not clean up after an error
            except Exception:
                if device.ends_badly:
                    raise RuntimeError("capture_end: the capture was invalidated") from None
                raise
            device.recording, device.stream_now = None, "main"

        @contextmanager
        def stream(_: Any) -> Iterator[None]:
            yield

        def set_stream(_: Any) -> None:
            device.recording, device.stream_now = None, "main"

        class Generator:
            def __init__(self, _: Any = None) -> None:
                self.state = device.randomness

            def get_state(self) -> str:
                return device.randomness

            def set_state(self, state: str) -> None:
                self.state = state

            def graphsafe_get_state(self) -> str:
                return self.state

            def graphsafe_set_state(self, state: str) -> None:
                device.randomness = state

        main = SimpleNamespace(device_index=0, device="cpu", wait_stream=lambda other: None)
        fake = SimpleNamespace(
            CUDAGraph=Graph,
            graph=graph,
            stream=stream,
            set_stream=set_stream,
            current_stream=lambda: main,
            Stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
            default_generators=[Generator()],
            get_sync_debug_mode=lambda: self.mode,
            set_sync_debug_mode=lambda mode: setattr(self, "mode", mode),
        )
        monkeypatch.setattr(torch, "cuda", fake)
        monkeypatch.setattr(torch, "Generator", Generator)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        if self.recording is None:
            self.taken.append(inputs.tolist())
        else:
            self.recording.inputs = inputs


def follow(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], change: Callable[[Device], None] = lambda device: None
) -> tuple[Device, list[str], list[list[float]]]:
    """Steps of batches of these sizes; the device, the messages, and the batches."""
    device, said = Device(), list[str]()
    device.install(monkeypatch)

    def step(*batch: Any) -> None:
        change(device)
        device.step(*batch)

    taken = Recorded(step, 4, said.append, lambda: setattr(device, "writing", False))
    batches = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    for batch in batches:
        taken(batch, torch.zeros(len(batch)))
    return device, said, [batch.tolist() for batch in batches]


def test_every_batch_is_taken_once_and_most_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    device, said, batches = follow(monkeypatch, [4, 4, 3, 4, 4, 4, 3, 4])
    assert device.taken == batches
    assert device.replays == 3  # of the six full ones, three warm up
    assert said == []
    assert device.mode == 0


def test_what_waits_for_the_device_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(device: Device) -> None:
        if device.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    device, said, batches = follow(monkeypatch, [4] * 6, wait)
    assert (device.taken, device.replays, device.mode) == (batches, 0, 0)
    assert len(said) == 1
    assert "makes the host wait" in said[0]


def test_what_a_checkpoint_waits_for_is_not_the_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(device: Device) -> None:
        if device.mode == "warn" and device.writing:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    device, said, batches = follow(monkeypatch, [4] * 6, write)
    assert (device.taken, device.replays, said) == (batches, 3, [])


def test_warnings_of_a_watched_step_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(device: Device) -> None:
        if device.mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
            warnings.warn("this network is old", DeprecationWarning, stacklevel=1)

    with pytest.warns() as caught:
        device, said, _ = follow(monkeypatch, [4] * 6, warn)
    assert [(each.category, str(each.message)) for each in caught] == [
        (DeprecationWarning, "this network is old")
    ]
    assert caught[0].filename == __file__
    assert (device.replays, said) == (3, [])


@pytest.mark.parametrize(
    "draw", [random.random, lambda: torch.rand(1), np.random.rand], ids=["python", "torch", "numpy"]
)
def test_what_draws_on_the_host_is_not_recorded(
    draw: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, said, batches = follow(monkeypatch, [4] * 6, lambda device: draw())
    assert (device.taken, device.replays) == (batches, 0)
    assert len(said) == 1
    assert "random numbers on the host" in said[0]


@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_recording_that_fails_leaves_steps_as_they_are(
    ends_badly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: Device) -> None:
        device.ends_badly = ends_badly
        if device.recording is not None:
            device.randomness = "spoiled"
            raise RuntimeError("operation not permitted when stream is capturing\nmore words")

    device, said, batches = follow(monkeypatch, [4, 4, 3, 4, 4, 4], refuse)
    assert device.taken == batches
    assert device.replays == 0
    assert device.stream_now == "main"
    assert device.randomness == "as it was"
    assert len(said) == 1
    assert "(operation not permitted when stream is capturing)" in said[0]


def test_a_step_leaves_no_gradients_behind() -> None:
    """Nor does one that fails on its way, as a recording may."""
    recipe = Recipe.load("digits-lt").override(["accumulate=2", "precision=32-true"])
    part = TensorSplit(torch.eye(4), torch.arange(4))
    data = DataSets(part, part, part, ("a", "b", "c", "d"))
    fabric = Fabric(accelerator="cpu", devices=1)
    network = nn.Linear(4, 4)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    loss = create_loss("ce", 4)
    parts = Parts(recipe, fabric, data, "", network, model, optimizer, loss, None, [0.1], batch_size=4)
    step = Step(parts, torch.zeros(()))
    before = network.weight.detach().clone()
    step(torch.eye(4), torch.arange(4))
    assert not torch.equal(network.weight, before)
    assert [weight.grad for weight in network.parameters()] == [None, None]
    seen = []

    def fail(*_: Any) -> None:
        seen.append(network.weight.grad)
        if len(seen) == 2:
            raise RuntimeError("cannot be recorded")

    network.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        step(torch.eye(4), torch.arange(4))
    assert seen[1] is not None  # of the first part
    assert [weight.grad for weight in network.parameters()] == [None, None]
