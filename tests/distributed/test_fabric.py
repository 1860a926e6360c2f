"""Under Lightning Fabric nothing needs preparing: its sampler pads, and `adapt_on` and `evaluate_on` know.

Starting processes takes seconds, so one start serves all tests; they look at what it left behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from calibrant import Evaluation, adapt_on, create_loss, evaluate_on
from tests.programs import started_by

from ..evaluations import assert_same as assert_same_evaluation

CLASSES, FEATURES, VALIDATION, COUNT = 4, 6, 23, 2
EPOCHS = 12  # enough for schedules that look every tenth time
KEYS = ["cals-alm", "adafocal"]


def data(size: int, seed: int) -> TensorDataset:
    """Elements that grow with their number: repeats of the first ones would be noticed."""
    generator = torch.Generator().manual_seed(seed)
    inputs = 50 * torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
    inputs *= torch.linspace(0.1, 2, size, dtype=torch.float64).unsqueeze(1)
    return TensorDataset(inputs, torch.randint(CLASSES, (size,), generator=generator))


def train(
    fabric: Fabric, key: str, save_to: Path | None = None, load_from: Path | None = None
) -> dict[str, Any]:
    """Saves in the middle; started again from there, does the second half only."""
    torch.manual_seed(1)
    model: Any = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    training, validation = fabric.setup_dataloaders(
        DataLoader(data(24, 2), 12 // fabric.world_size), DataLoader(data(VALIDATION, 3), 6)
    )
    loss = create_loss(key, CLASSES).to(fabric.device)
    state = {"model": model, "optimizer": optimizer, "loss": loss}
    if load_from is not None:
        fabric.load(load_from, state)
    for epoch in range(0 if load_from is None else EPOCHS // 2, EPOCHS):
        if save_to is not None and epoch == EPOCHS // 2:
            fabric.save(save_to, state)
        for inputs, target in training:
            optimizer.zero_grad()
            fabric.backward(loss(model(inputs), target))
            optimizer.step()
        samples = adapt_on(loss, model, validation).samples.item()
    return {
        "model": model.state_dict(),
        "loss": loss.state_dict(),
        "samples": samples,
        "rows drawn": sum(len(target) for _, target in validation),
        "evaluation": evaluate_on(model, validation, resamples=20).to_json(),
    }


def work(fabric: Fabric, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for key in KEYS:
        whole = train(fabric, key, save_to=folder / f"{key}.ckpt")
        torch.manual_seed(99)
        found[key] = {"whole": whole, "resumed": train(fabric, key, load_from=folder / f"{key}.ckpt")}
    torch.save(found, folder / f"{fabric.global_rank}.pt")


@pytest.fixture(scope="module")
def apart(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fabric")
    with started_by(programs / "python"):
        Fabric(accelerator="cpu", devices=COUNT, strategy="ddp_spawn").launch(work, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(COUNT)]


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-9) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=rtol / 100)


def assert_identical(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def test_the_sampler_repeats_an_element_that_does_not_count(apart: list[dict[str, Any]]) -> None:
    for key in KEYS:
        assert sum(process[key]["whole"]["rows drawn"] for process in apart) == VALIDATION + 1
        for process in apart:
            assert process[key]["whole"]["samples"] == VALIDATION


@pytest.mark.filterwarnings("ignore::calibrant.losses.AdaptationWarning")  # exponents learn from noise here
@pytest.mark.parametrize("key", KEYS)
def test_training_is_that_of_one_process(key: str, apart: list[dict[str, Any]]) -> None:
    alone = train(Fabric(accelerator="cpu", devices=1), key)
    assert alone["loss"]["passes"] == EPOCHS
    for process in apart:
        found = process[key]["whole"]
        assert_same(found["model"], alone["model"])
        assert_same(found["loss"], alone["loss"])
        whole, part = Evaluation.from_json(alone["evaluation"]), Evaluation.from_json(found["evaluation"])
        assert whole.samples == VALIDATION
        assert_same_evaluation(part, whole, tolerance=1e-9)


@pytest.mark.parametrize("key", KEYS)
def test_both_processes_hold_the_same_bits(key: str, apart: list[dict[str, Any]]) -> None:
    first, second = (process[key]["whole"] for process in apart)
    assert_identical(first["model"], second["model"])
    assert_identical(first["loss"], second["loss"])
    assert first["evaluation"] == second["evaluation"]


@pytest.mark.parametrize("key", KEYS)
def test_processes_go_on_from_a_checkpoint_as_if_they_had_not_stopped(
    key: str, apart: list[dict[str, Any]]
) -> None:
    for process in apart:
        assert_identical(process[key]["resumed"]["model"], process[key]["whole"]["model"])
        assert_identical(process[key]["resumed"]["loss"], process[key]["whole"]["loss"])
