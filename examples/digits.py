"""Cross-entropy and a calibration loss, side by side, on long-tailed handwritten digits.

A small network is trained twice per seed, from the same initial weights and in the same data order:
with cross-entropy, and with the loss of your choice. After every epoch an adaptive loss learns from the
validation data. The test data are used once, at the end.

    python examples/digits.py
    python examples/digits.py --loss adafocal --seeds 3

The default margin was chosen from 4, 6, 8, 10 and 12 by the validation column alone.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import calibrant
from calibrant.histogram import ConfidenceHistogram
from calibrant.layout import arrange
from calibrant.losses import Loss
from calibrant.metrics import expected_calibration_error

CLASSES = 10
HEAD, TAIL = 80, 1  # training images of digit 0 and of digit 9
VALIDATION, TEST = 40, 54  # images of every digit; the rarest digit has 174 in all

Data = tuple[Tensor, Tensor]


def load_data() -> tuple[Data, Data, Data]:
    """Long-tailed training data, balanced validation data, balanced test data; no image is in two."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    shuffle = torch.Generator().manual_seed(0)
    train, validation, test = [], [], []
    for digit in range(CLASSES):
        indices = (labels == digit).nonzero().flatten()
        indices = indices[torch.randperm(len(indices), generator=shuffle)]
        test.append(indices[:TEST])
        validation.append(indices[TEST : TEST + VALIDATION])
        count = round(HEAD * (TAIL / HEAD) ** (digit / (CLASSES - 1)))
        train.append(indices[TEST + VALIDATION :][:count])
    return tuple((images[part], labels[part]) for part in map(torch.cat, (train, validation, test)))


def fit(
    loss: Loss, seed: int, epochs: int, train: Data, validation: Data, after_epoch: Callable[[], None]
) -> nn.Module:
    """A network trained from that seed; an adaptive loss learns from the validation data meanwhile."""
    torch.manual_seed(seed)  # the same weights and the same data order whatever the loss
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = train
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            loss(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        calibrant.adapt_on(loss, model, [validation])  # nothing to do for a loss that does not adapt
        after_epoch()
    return model


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> list[float]:
    """Accuracy, mean confidence and ECE, in percent."""
    images, labels = data
    histogram = ConfidenceHistogram.of(arrange(model(images), labels))
    accuracy = float(histogram.correct.sum() / histogram.samples)
    confidence = float(histogram.confidence.sum() / histogram.samples)
    return [100 * accuracy, 100 * confidence, 100 * expected_calibration_error(histogram, bins=15)]


def summarise(values: Sequence[float]) -> str:
    """Mean and, where there are several values, their standard deviation."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a calibration loss with cross-entropy on digits.")
    parser.add_argument("--loss", choices=calibrant.LOSSES, default="cals-alm")
    parser.add_argument("--margin", type=float, default=8.0, help="for a loss that has one (default 8)")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    options = parser.parse_args()

    torch.set_num_threads(1)  # matrices this small gain nothing from more
    console = Console()
    train, validation, test = load_data()
    console.print(
        f"{len(train[1])} training images, {HEAD} of digit 0 down to {TAIL} of digit 9 (imbalance "
        f"{HEAD // TAIL}).\n{len(validation[1])} validation and {len(test[1])} test images, balanced."
    )

    losses = {"ce": {}, options.loss: {}}
    if "margin" in calibrant.LOSSES[options.loss].hyperparameters():
        losses[options.loss]["margin"] = options.margin
    figures = {key: [] for key in losses}
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=options.seeds * len(losses) * options.epochs)
        for seed in range(options.seeds):
            for key, hyperparameters in losses.items():
                loss = calibrant.create_loss(key, CLASSES, **hyperparameters)
                model = fit(loss, seed, options.epochs, train, validation, partial(progress.advance, task))
                figures[key].append(evaluate(model, test) + evaluate(model, validation)[-1:])

    table = Table(title=f"{options.epochs} epochs, {options.seeds} seed(s); in %, ECE with 15 bins")
    for heading in ("loss", "test accuracy", "test confidence", "test ECE", "validation ECE"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for key in losses:
        table.add_row(key, *(summarise(values) for values in zip(*figures[key], strict=True)))
    console.print(table)


if __name__ == "__main__":
    main()
