from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from calibrant.training.step import Recorded


class Device:
    """A GPU that is not there: while it records, a step is noted and not taken."""

    def __init__(self) -> None:
        self.taken: list[list[float]] = []
        self.recording: Any = None
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
            yield  # like torch's, it does not clean up after an error
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
    taken = Recorded(lambda *batch: (change(device), device.step(*batch))[-1], 4, said.append)
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


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1)], ids=["python", "torch"])
def test_what_draws_on_the_host_is_not_recorded(
    draw: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, said, batches = follow(monkeypatch, [4] * 6, lambda device: draw())
    assert (device.taken, device.replays) == (batches, 0)
    assert len(said) == 1
    assert "random numbers on the host" in said[0]


def test_a_recording_that_fails_leaves_steps_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Device) -> None:
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
