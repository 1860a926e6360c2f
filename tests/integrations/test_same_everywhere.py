"""All trainers learn the same state of the loss on one small problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Trainer, TrainingArguments

import calibrant
from calibrant.integrations import accelerate, lightning, transformers
from calibrant.losses import Loss

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

K, FEATURES, EPOCHS, RATE = 4, 6, 2, 0.5
LOSSES = {
    "cals-alm": {"margin": 1.0},
    "cals-hr": {"margin": 1.0},
    "adafocal": {},
    "ada-dual-focal": {},
    "ada-scale": {},
}

State = dict[str, Tensor]


def part(size: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = 2 * torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
    noise = torch.randn(size, K, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, (inputs[:, :K] + noise).argmax(1))


def loaders() -> tuple[DataLoader, DataLoader]:
    """Batches of 8 in a fixed order; 21 validation elements, so that the last batch is short."""
    return DataLoader(part(40, 0), 8), DataLoader(part(21, 1), 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, K)).double()


def create(key: str) -> Loss:
    return calibrant.create_loss(key, K, **LOSSES[key])


def learned(loss: Loss, model: nn.Module) -> State:
    return {
        **{f"loss.{name}": value.clone() for name, value in loss.state_dict().items()},
        **{f"model.{name}": value.detach().clone() for name, value in model.named_parameters()},
    }


def plain_loop(key: str, folder: Path) -> State:
    (training, validation), model, loss = loaders(), network(), create(key)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(EPOCHS):
        for inputs, target in training:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        calibrant.adapt_on(loss, model, validation)
    return learned(loss, model)


class Classifier(pl.LightningModule):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.network, self.loss = network(), create(key)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE)


def in_lightning(key: str, folder: Path) -> State:
    classifier = Classifier(key)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.Calibration()],
    )
    trainer.fit(classifier, *loaders())
    return learned(classifier.loss, classifier.network)


class Rows(Dataset):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self.data[index]
        return {"inputs": inputs, "labels": labels}


class WithLogits(nn.Module):
    """The network with the interface of the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.network(inputs)}


class InOrder(Trainer):
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, 8))


def in_transformers(key: str, folder: Path) -> State:
    loss, model = create(key), WithLogits()
    calibration = transformers.Calibration(loss)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_eval_batch_size=8,
        learning_rate=RATE,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        eval_strategy="epoch",
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = InOrder(
        model,
        arguments,
        train_dataset=Rows(part(40, 0)),
        eval_dataset=Rows(part(21, 1)),
        compute_loss_func=calibration.compute_loss,
        compute_metrics=calibration.compute_metrics,
        callbacks=[calibration],
    )
    trainer.train()
    return learned(loss, model.network)


def in_accelerate(key: str, folder: Path) -> State:
    accelerator = Accelerator(cpu=True)
    model = network()
    training, validation = loaders()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)
    loss = accelerate.prepare_loss(accelerator, create(key))
    for _ in range(EPOCHS):
        for inputs, target in training:
            optimizer.zero_grad()
            accelerator.backward(loss(model(inputs), target))
            optimizer.step()
        accelerate.adapt_on(accelerator, loss, model, validation)
    return learned(loss, accelerator.unwrap_model(model))


def in_fabric(key: str, folder: Path) -> State:
    fabric = Fabric(accelerator="cpu")
    module, loss = network(), create(key)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), RATE))
    training, validation = fabric.setup_dataloaders(*loaders())
    for _ in range(EPOCHS):
        for inputs, target in training:
            optimizer.zero_grad()
            fabric.backward(loss(model(inputs), target))
            optimizer.step()
        calibrant.adapt_on(loss, model, validation)
    return learned(loss, module)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    return {key: plain_loop(key, tmp_path_factory.mktemp("plain")) for key in LOSSES}


@pytest.mark.parametrize("key", LOSSES)
def test_there_is_something_to_learn(key: str, expected: dict[str, State]) -> None:
    fresh = create(key).state_dict()
    moved = [
        name for name in create(key).learned() if not torch.equal(expected[key][f"loss.{name}"], fresh[name])
    ]
    assert moved
    assert expected[key]["loss.passes"] == EPOCHS


@pytest.mark.parametrize("way", [in_lightning, in_transformers, in_accelerate, in_fabric])
@pytest.mark.parametrize("key", LOSSES)
def test_every_way_of_training_learns_the_same(
    key: str, way: Any, expected: dict[str, State], tmp_path: Path
) -> None:
    found = way(key, tmp_path)
    assert found.keys() == expected[key].keys()
    for name, value in expected[key].items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )
