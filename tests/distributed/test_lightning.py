"""Lightning's DDP in two real processes learns what one process with all the data learns.

Starting processes takes seconds, so one start serves all tests that do not end in a failure of a process.
"""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import calibrant
from calibrant.integrations.lightning import Calibration

from .processes import Results, in_processes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec"),
]

KEYS = ["cals-alm", "adafocal"]
CLASSES, FEATURES, BATCH, EPOCHS = 4, 6, 8, 3
RANKS = range(2)


def labelled(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = 20 * torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


TRAIN, VALIDATION, OTHER = labelled(32, 1), labelled(21, 2), labelled(13, 3)


class Classifier(pl.LightningModule):
    def __init__(self, key: str, failing: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
        self.loss = calibrant.create_loss(key, CLASSES)
        self.failing = failing

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(self.network(batch[0]), batch[1])
        if self.failing == self.global_rank and batch_idx == 1 and not self.trainer.sanity_checking:
            raise ValueError("on purpose")

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer(callback: Calibration, processes: int) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def training(processes: int) -> DataLoader[Any]:
    """A sampler without shuffling and repeats."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    sampler = DistributedSampler(TRAIN, processes, rank, shuffle=False)
    return DataLoader(TRAIN, BATCH // processes, sampler=sampler)


def loader(data: TensorDataset, processes: int) -> DataLoader[Any]:
    return DataLoader(data, BATCH // processes)


def learn(key: str, processes: int) -> Results:
    """Fit, test with a new trainer, and validate with the first one."""
    made, run = Classifier(key), trainer(Calibration(timeout=30), processes)
    run.fit(made, training(processes), loader(VALIDATION, processes))
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    state = {name: value.clone() for name, value in made.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (again,) = run.validate(made, loader(OTHER, processes), verbose=False)
    (tested,) = trainer(Calibration(), processes).test(made, loader(OTHER, processes), verbose=False)
    (validated,) = trainer(Calibration(), processes).validate(made, loader(OTHER, processes), verbose=False)
    return {
        "state": state,
        "after": {name: value.clone() for name, value in made.state_dict().items()},
        "logged": logged,
        "tested": tested,
        "validated": validated,
        "again": again,
        "warnings": [
            str(warning.message) for warning in caught if "Trainer was used for fit" in str(warning)
        ],
    }


def learn_apart(folder: Path, rank: int) -> Results:
    """Run with the environment variables of torchrun."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="tests",
    )
    found: Results = {key: learn(key, 2) for key in KEYS}
    # Last, because the processes cannot communicate afterwards.
    try:
        trainer(Calibration(timeout=3), 2).fit(
            Classifier("cals-alm", failing=1), training(2), loader(VALIDATION, 2)
        )
        found["error"] = "none"
    except (RuntimeError, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    (folder / f"done {rank}").touch()
    while not (folder / "done 0").exists():  # the worst case: a process that has failed but does not end
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("apart")
    return in_processes(partial(learn_apart, folder), len(RANKS), folder)


@pytest.fixture(scope="module")
def alone() -> Results:
    return {key: learn(key, 1) for key in KEYS}


@pytest.mark.parametrize("key", KEYS)
def test_two_processes_learn_what_one_learns(key: str, apart: list[Results], alone: Results) -> None:
    expected = alone[key]["state"]
    assert expected["loss.passes"] == EPOCHS
    for rank in RANKS:
        for name, value in expected.items():
            torch.testing.assert_close(apart[rank][key]["state"][name], value, rtol=1e-9, atol=1e-11)
            assert torch.equal(apart[rank][key]["state"][name], apart[0][key]["state"][name])
            assert torch.equal(apart[rank][key]["state"][name], apart[rank][key]["after"][name])


@pytest.mark.parametrize("key", KEYS)
def test_repeats_would_have_shown(key: str, alone: Results) -> None:
    """A repeated element changes the learned state."""
    made, run = Classifier(key), trainer(Calibration(), 1)
    repeated = TensorDataset(*(torch.cat([tensor, tensor[:1]]) for tensor in VALIDATION.tensors))
    run.fit(made, training(1), loader(repeated, 1))
    (learned,) = {"multiplier", "gamma"} & set(made.loss.learned())
    assert not torch.allclose(made.state_dict()[f"loss.{learned}"], alone[key]["state"][f"loss.{learned}"])
    assert len(VALIDATION) % 2 == 1
    assert len(VALIDATION) % BATCH


@pytest.mark.parametrize("key", KEYS)
def test_figures_are_those_of_all_data_in_every_process(
    key: str, apart: list[Results], alone: Results
) -> None:
    assert {"val/nll", "val/ece", "val/classwise_ece", "loss/passes"} < set(alone[key]["logged"])
    for rank in RANKS:
        for run in ("logged", "tested", "validated"):
            assert apart[rank][key][run] == pytest.approx(alone[key][run], rel=1e-9)


@pytest.mark.parametrize("key", KEYS)
def test_repeats_that_cannot_be_known_are_told_of(key: str, apart: list[Results], alone: Results) -> None:
    assert len(apart[0][key]["warnings"]) == 1
    assert apart[1][key]["warnings"] == alone[key]["warnings"] == []
    assert apart[0][key]["again"].keys() == alone[key]["again"].keys()
    assert apart[0][key]["again"] != pytest.approx(alone[key]["again"], rel=1e-9)


def test_a_process_that_fails_does_not_keep_the_other_waiting(apart: list[Results]) -> None:
    assert apart[1]["error"] == "ValueError: on purpose"
    assert apart[0]["error"].startswith(
        "RuntimeError: process 0 of 2 waited for the others, but one did not arrive"
    )
    assert "within 3 seconds" in apart[0]["error"]


# ---- Processes that Lightning starts itself ---------------------------------------------------------


def main() -> None:
    """The program of the test below, which Lightning starts again for the second process."""
    trainer(Calibration(), 2).fit(Classifier("cals-alm", failing=0), training(2), loader(VALIDATION, 2))


def test_a_failure_in_the_first_process_ends_the_other(programs: Path) -> None:
    command = [str(programs / "python"), "-m", __name__]
    # Both processes hold the end of the pipe: this returns when both have ended.
    program = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=180)
    assert program.returncode != 0
    assert "ValueError: on purpose" in program.stderr
    assert "RuntimeError: process 1 of 2 waited for the others, but one did not arrive" in program.stderr


if __name__ == "__main__":
    main()
