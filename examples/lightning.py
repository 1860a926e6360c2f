"""Cross-entropy and CALS-ALM in Lightning, on long-tailed digits.

Margin 8 was chosen from 4, 6, 8, 10 and 12 by the ECE on the validation data. The test data are used once.
"""

import sys

if __package__ is None:
    del sys.path[0]  # this folder has files with the names of packages
import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy, MetricCollection

import calibrant
from calibrant.integrations.lightning import Calibration
from calibrant.integrations.torchmetrics import CalibrationError

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 60


class Classifier(pl.LightningModule):
    """The usual module, for any loss."""

    def __init__(self, loss):
        super().__init__()
        layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        self.network = nn.Sequential(*layers)
        self.loss = loss

    def step(self, batch):
        return self.loss(self.network(batch[0]), batch[1])

    training_step = validation_step = test_step = step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
images, labels = pixels[order].float() / 16, labels[order]
place = nn.functional.one_hot(labels).cumsum(0)[range(len(labels)), labels]  # 1: the first of its digit
rows = place <= (80 * 80 ** (-labels / 9)).round(), (place > 80) & (place <= 120), place > 120
parts = [TensorDataset(images[part], labels[part]) for part in rows]  # 80 of digit 0, 1 of digit 9 to train
metrics = {"accuracy": Accuracy("multiclass", num_classes=10), "ece": CalibrationError("ece")}
switches = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
quiet = dict.fromkeys(switches, False)
torch.set_num_threads(1)  # more threads do not help with small matrices
for loss in (calibrant.create_loss("ce", 10), calibrant.create_loss("cals-alm", 10, margin=8)):
    pl.seed_everything(0, verbose=False)  # the same weights and order of data for every loss
    calibration = Calibration(metrics=MetricCollection(metrics))  # Calibration() would log calibration errors
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[calibration], **quiet)
    model = Classifier(loss)
    trainer.fit(model, DataLoader(parts[0], 32, shuffle=True), DataLoader(parts[1], 512))
    (result,) = trainer.test(model, DataLoader(parts[2], 512), verbose=False)
    print(f"{type(loss).__name__:20} accuracy {result['test/accuracy']:.1%}  ECE {result['test/ece']:.1%}")
