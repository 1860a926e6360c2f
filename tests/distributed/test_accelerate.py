"""Several processes under Accelerate learn and report the same as one process with all data.

Starting processes takes seconds, so one start serves all tests; they look at what it left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import calibrant
from calibrant import Evaluation, create_loss
from calibrant.integrations.accelerate import adapt_on, evaluate_on, own_rows, prepare_loss

from ..evaluations import assert_same as assert_same_evaluation
from .processes import Results, in_processes

KEYS = ["cals-alm", "adafocal"]  # one for each kind of state; `test_adaptation.py` tests all losses

CLASSES, FEATURES, VALIDATION = 4, 6, 23
EPOCHS = 12  # more than the ten passes of some schedules
PROCESSES = [3]

WAYS: dict[str, dict[str, Any]] = {
    "whole batches": {},
    "split batches": {"split_batches": True},
    "uneven": {"even_batches": False},
    "uneven, split": {"even_batches": False, "split_batches": True},
    "dispatched": {"dispatch_batches": True},
    "dispatched, split": {"dispatch_batches": True, "split_batches": True},
}
SIZES = [2, 4, 5, 12, 13, 17]  # accelerate cannot split a single element between three processes


class Stream(IterableDataset):
    """A data set without a length, which accelerate dispatches by default."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def accelerator_of(rank: int, count: int, **options: Any) -> Accelerator:
    """Run with the environment variables of ``torchrun``, which accelerate reads."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


@pytest.fixture(scope="module", params=PROCESSES, ids=lambda count: f"{count} processes")
def apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("accelerate")
    return in_processes(partial(work, request.param, folder), request.param, folder)


def work(count: int, folder: Path, rank: int) -> Results:
    accelerator = accelerator_of(rank, count)
    assert (accelerator.num_processes, accelerator.process_index) == (count, rank)
    whole = {key: train(accelerator_of(rank, count, split_batches=True), key) for key in KEYS}
    saved = train(accelerator_of(rank, count, split_batches=True), "cals-alm", save_to=folder / "state")
    accelerator.wait_for_everyone()
    torch.manual_seed(99)
    resumed = train(accelerator_of(rank, count, split_batches=True), "cals-alm", load_from=folder / "state")
    return {
        "rows": {way: rows(accelerator_of(rank, count, **options), range) for way, options in WAYS.items()},
        "stream": rows(accelerator, Stream),
        "trained": whole,
        "saved": saved,
        "resumed": resumed,
        "learned": {way: pass_over(accelerator_of(rank, count, **options)) for way, options in WAYS.items()},
        "inside": inside_training(accelerator),
        "unprepared": unprepared(accelerator),
    }


# ---- Whose rows -----------------------------------------------------------------------------------


def rows(accelerator: Accelerator, data: Any) -> list[tuple[list[int], list[int] | None]]:
    """For each size, the elements that this process keeps and those that gathering keeps."""
    found = []
    for size in SIZES:
        loader = accelerator.prepare(DataLoader(data(size), 6 if accelerator.split_batches else 2))
        kept: list[int] = []
        gathered: list[int] = []
        for batch in loader:
            kept += batch[: own_rows(len(batch))].tolist()
            if accelerator.even_batches:
                gathered += accelerator.gather_for_metrics(batch).tolist()
        found.append((kept, gathered if accelerator.even_batches else None))
    return found


@pytest.mark.parametrize("way", [*WAYS, "stream"])
def test_every_element_is_one_processes_own(way: str, apart: list[Results]) -> None:
    shares = [process["stream"] if way == "stream" else process["rows"][way] for process in apart]
    for size, *found in zip(SIZES, *shares, strict=True):
        assert sorted(element for kept, _ in found for element in kept) == list(range(size))
        for _, gathered in found:
            assert gathered is None or sorted(gathered) == list(range(size))


# ---- One pass -------------------------------------------------------------------------------------


def data(size: int, seed: int) -> TensorDataset:
    """Elements of growing size, so that repeats of the first ones change the result."""
    generator = torch.Generator().manual_seed(seed)
    inputs = 50 * torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
    inputs *= torch.linspace(0.1, 2, size, dtype=torch.float64).unsqueeze(1)
    return TensorDataset(inputs, torch.randint(CLASSES, (size,), generator=generator))


def normalizing_model() -> nn.Module:
    """A network with buffers, which DDP must not broadcast in its forward pass if batches are uneven."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    return model.double()


def validation_loader(accelerator: Accelerator | None = None) -> DataLoader:
    loader = DataLoader(data(VALIDATION, 3), 6)
    return loader if accelerator is None else accelerator.prepare(loader)


def pass_over(accelerator: Accelerator) -> dict[str, Any]:
    loss = prepare_loss(accelerator, create_loss("cals-alm", CLASSES))
    model, loader = accelerator.prepare(normalizing_model()), validation_loader(accelerator)
    samples = adapt_on(accelerator, loss, model, loader).samples.item()
    evaluation = evaluate_on(accelerator, model, loader, resamples=20)
    not_prepared = evaluate_on(accelerator, normalizing_model(), loader, resamples=20)
    return {
        "samples": samples,
        "state": loss.state_dict(),
        "evaluation": evaluation.to_json(),
        "not prepared": not_prepared.to_json(),
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_pass_counts_all_data_once(way: str, apart: list[Results]) -> None:
    loss = create_loss("cals-alm", CLASSES)
    calibrant.adapt_on(loss, normalizing_model(), validation_loader())
    whole = calibrant.evaluate_on(normalizing_model(), validation_loader(), resamples=20)
    assert loss.multiplier.max() > 0.1
    for process in apart:
        found = process["learned"][way]
        assert found["samples"] == VALIDATION
        assert_same(found["state"], loss.state_dict())
        for model in ("evaluation", "not prepared"):
            assert_same_evaluation(Evaluation.from_json(found[model]), whole)


@pytest.mark.parametrize("way", WAYS)
def test_a_pass_is_the_same_in_every_process(way: str, apart: list[Results]) -> None:
    first, *others = (process["learned"][way] for process in apart)
    for other in others:
        assert_identical(other["state"], first["state"])
        assert other["evaluation"] == first["evaluation"]


def inside_training(accelerator: Accelerator) -> dict[str, Any]:
    """Adapt in the middle of a training epoch and at its last batch, which has repeats, too."""
    loss = create_loss("cals-alm", CLASSES)
    model, loader = accelerator.prepare(normalizing_model()), validation_loader(accelerator)
    training = accelerator.prepare(DataLoader(data(13, 2), 2))
    samples = [adapt_on(accelerator, loss, model, loader).samples.item() for _ in training]
    return {"samples": samples}


def test_a_pass_may_lie_within_a_training_epoch(apart: list[Results]) -> None:
    for process in apart:
        samples = process["inside"]["samples"]
        assert len(samples) > 2
        assert set(samples) == {VALIDATION}


def unprepared(accelerator: Accelerator) -> list[str]:
    messages = []
    for call in (
        partial(adapt_on, accelerator, create_loss("ce", CLASSES)),
        partial(evaluate_on, accelerator),
    ):
        try:
            call(normalizing_model(), validation_loader())
        except TypeError as error:
            messages.append(str(error))
    return messages


def test_a_loader_that_was_not_prepared_is_refused(apart: list[Results]) -> None:
    for process in apart:
        assert len(process["unprepared"]) == 2
        for message in process["unprepared"]:
            assert f"with {len(apart)} processes" in message
            assert "accelerator.prepare(loader) returned, got DataLoader" in message


# ---- Training -------------------------------------------------------------------------------------


def train(
    accelerator: Accelerator | None, key: str, save_to: Path | None = None, load_from: Path | None = None
) -> dict[str, Any]:
    """Train and save in the middle, or resume from there."""
    torch.manual_seed(1)
    model: Any = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    training, validation = DataLoader(data(24, 2), 12), DataLoader(data(VALIDATION, 3), 6)
    loss = create_loss(key, CLASSES)
    if accelerator is not None:
        model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)
        loss = prepare_loss(accelerator, loss)
    if load_from is not None:
        accelerator.load_state(str(load_from))
    for epoch in range(0 if load_from is None else EPOCHS // 2, EPOCHS):
        if save_to is not None and epoch == EPOCHS // 2:
            accelerator.save_state(str(save_to))
        for inputs, target in training:
            optimizer.zero_grad()
            value = loss(model(inputs), target)
            value.backward() if accelerator is None else accelerator.backward(value)
            optimizer.step()
        if accelerator is None:
            calibrant.adapt_on(loss, model, validation)
        else:
            adapt_on(accelerator, loss, model, validation)
    if accelerator is not None:
        model = accelerator.unwrap_model(model)
    return {"model": model.state_dict(), "loss": loss.state_dict()}


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-9) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=rtol / 100)


def assert_identical(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


@pytest.mark.filterwarnings("ignore::calibrant.losses.AdaptationWarning")  # exponents learn from noise here
@pytest.mark.parametrize("key", KEYS)
def test_training_is_that_of_one_process(key: str, apart: list[Results]) -> None:
    alone = train(None, key)
    assert alone["loss"]["passes"] == EPOCHS
    for process in apart:
        assert_same(process["trained"][key]["model"], alone["model"])
        assert_same(process["trained"][key]["loss"], alone["loss"])


@pytest.mark.parametrize("key", KEYS)
def test_training_leaves_the_same_bits_in_every_process(key: str, apart: list[Results]) -> None:
    first, *others = (process["trained"][key] for process in apart)
    for other in others:
        assert_identical(other["model"], first["model"])
        assert_identical(other["loss"], first["loss"])


def test_processes_go_on_from_a_checkpoint_as_if_they_had_not_stopped(apart: list[Results]) -> None:
    for process in apart:
        for part in ("model", "loss"):
            assert_identical(process["resumed"][part], process["saved"][part])
            assert_identical(process["resumed"][part], process["trained"]["cals-alm"][part])
