"""Cross-entropy and a calibration loss, side by side, on long-tailed handwritten digits.

For each seed, a small network is trained with cross-entropy and with a loss of your choice, from the same
initial weights and in the same data order. An adaptive loss learns from the validation data after every
epoch. The test data are used once, at the end.

    python examples/digits.py
    python examples/digits.py --loss adafocal --seeds 3
    python examples/digits.py --report digits.html --diagram digits.png

The default margin was chosen from 4, 6, 8, 10 and 12 by the validation column alone.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, stdev

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import calibrant
from calibrant.losses import Loss
from calibrant.metrics import Predictions, accuracy, ece
from calibrant.reports.page import write_report
from calibrant.reports.plots import reliability_diagram

CLASSES = 10
HEAD, TAIL = 80, 1  # training images of digit 0 and of digit 9
VALIDATION, TEST = 40, 54  # images of every digit; the rarest digit has 174 in all

Data = tuple[Tensor, Tensor]


def load_data() -> tuple[Data, Data, Data]:
    """Long-tailed training data, balanced validation data and balanced test data, without overlap."""
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
    """Train a network; an adaptive loss learns from the validation data after every epoch."""
    torch.manual_seed(seed)  # the same weights and the same data order for every loss
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = train
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            loss(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        calibrant.adapt_on(loss, model, [validation])  # does nothing for losses that do not adapt
        after_epoch()
    return model


@torch.no_grad()
def measure(model: nn.Module, data: Data) -> list[float]:
    """Accuracy, mean confidence and ECE, in percent."""
    images, labels = data
    predictions = Predictions.of(model(images), labels)
    return [100 * accuracy(predictions), 100 * float(predictions.confidence.mean()), 100 * ece(predictions)]


@torch.no_grad()
def judge(models: dict[str, nn.Module], data: Data) -> list[calibrant.Evaluation]:
    """All figures of the models."""
    images, labels = data
    digits = [f"digit {digit}" for digit in range(CLASSES)]
    return [
        calibrant.evaluate(model(images), labels, name=name, class_names=digits)
        for name, model in models.items()
    ]


def draw(evaluations: list[calibrant.Evaluation], path: str) -> None:
    """Reliability diagrams side by side."""
    figure = Figure(figsize=(3.4 * len(evaluations), 3.9), layout="constrained")
    axes = figure.subplots(1, len(evaluations), squeeze=False)[0]
    for evaluation, ax in zip(evaluations, axes, strict=True):
        reliability_diagram(evaluation.reliability, ax, title=evaluation.name)
    figure.savefig(path, dpi=160)


def summarise(values: Sequence[float]) -> str:
    """The mean, and the standard deviation of several values."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a calibration loss with cross-entropy on digits.")
    parser.add_argument("--loss", choices=calibrant.LOSSES, default="cals-alm")
    parser.add_argument("--margin", type=float, default=8.0, help="for a loss that has one (default 8)")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--report", metavar="FILE.html", help="write a page about the last seed's models")
    parser.add_argument("--diagram", metavar="FILE.png", help="draw their reliability diagrams")
    options = parser.parse_args()

    torch.set_num_threads(1)  # more threads do not help with small matrices
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
    models = {}
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=options.seeds * len(losses) * options.epochs)
        for seed in range(options.seeds):
            for key, hyperparameters in losses.items():
                loss = calibrant.create_loss(key, CLASSES, **hyperparameters)
                model = fit(loss, seed, options.epochs, train, validation, partial(progress.advance, task))
                models[key] = model
                figures[key].append(measure(model, test) + measure(model, validation)[-1:])

    table = Table(title=f"{options.epochs} epochs, {options.seeds} seed(s); in %, ECE with 15 bins")
    for heading in ("loss", "test accuracy", "test confidence", "test ECE", "validation ECE"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for key in losses:
        table.add_row(key, *(summarise(values) for values in zip(*figures[key], strict=True)))
    console.print(table)
    if options.report or options.diagram:
        evaluations = judge(models, test)
        if options.report:
            write_report(evaluations, options.report, title="Long-tailed digits")
        if options.diagram:
            draw(evaluations, options.diagram)


if __name__ == "__main__":
    main()
