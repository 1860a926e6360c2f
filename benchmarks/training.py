"""Seconds per epoch with adaptive losses, over those with cross-entropy.

Every loss trains the same network on the same generated images, validation included. The losses take turns,
so that other work on the machine affects all of them equally. The first epoch of each turn warms up and is
not counted.

Whole epochs vary by several percent on a busy machine. The last column therefore times each loss without the
network: forward and backward of every step, `observe` of every validation batch, and `adapt`. It shows the
time beyond that of the first loss, as a fraction of an epoch with the first loss.

    python benchmarks/training.py
    python benchmarks/training.py --rounds 2 --images 512
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from calibrant.losses import Loss
from calibrant.training.loop import train
from calibrant.training.recipe import Recipe

LOSSES = "ce,cals-alm,cals-hr,adafocal,dual-focal,mbls"

BATCH = 128
RECIPE = """
epochs = 3
batch_size = {batch}

[data]
name = "npz"
file = "images.npz"
augmentation = "crop-flip"
validation = 0.1
test = 0.0

[model]
name = "{model}"

[optimizer]
name = "sgd"
lr = 0.05
"""


def generate(folder: Path, images: int, classes: int) -> None:
    random = np.random.default_rng(0)
    labels = np.arange(images) % classes
    pixels = random.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=pixels, labels=labels)


def own_seconds(loss: Loss, images: int, classes: int) -> float:
    """Seconds of a loss in one epoch, timed without the network."""
    validation = images // 10
    steps, batches = (images - validation) // BATCH, -(-validation // BATCH)
    logits = torch.randn(BATCH, classes, requires_grad=True)
    labels = torch.randint(classes, (BATCH,))

    def timed(action: Callable[[], object]) -> float:
        seconds = []
        for _ in range(200):
            started = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - started)
        return median(seconds)

    def adapted() -> None:
        loss.observe(logits.detach(), labels)
        loss.adapt()

    step = timed(lambda: loss(logits, labels).backward())
    observed = timed(lambda: loss.observe(logits.detach(), labels))
    return steps * step + (batches - 1) * observed + timed(adapted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of every loss (default 5)")
    parser.add_argument("--images", type=int, default=2560, help="a tenth validate (default 2560)")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument(
        "--losses", default=LOSSES, help=f"the first is what the others are divided by ({LOSSES})"
    )
    parser.add_argument("--model", default="cifar-resnet-32")
    parser.add_argument("--json", type=Path, help="write all seconds there")
    options = parser.parse_args()

    recipe = Recipe.from_toml(RECIPE.format(model=options.model, batch=BATCH), name="benchmark")
    losses = options.losses.split(",")
    seconds: dict[str, list[float]] = {loss: [] for loss in losses}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder, options.images, options.classes)
        for number in track(range(options.rounds * len(losses)), description="training"):
            # Another order in every round, so that no loss always follows the same one.
            round_number, place = divmod(number, len(losses))
            loss = losses[(place + round_number) % len(losses)]
            run = train(recipe.override([f"loss={loss}"]), folder / f"{number}", data_root=folder)
            rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
            seconds[loss] += [row["seconds"] for row in rows[1:]]

    table = Table(
        title=f"{options.model}, {options.images} images, {options.classes} classes, "
        f"{torch.get_num_threads()} threads; median of {2 * options.rounds} epochs"
    )
    first = losses[0]
    for heading in (
        "loss",
        "seconds an epoch",
        "fastest",
        f"over {first}",
        f"fastest over {first}",
        "own fraction",
    ):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    own = {
        loss: own_seconds(
            recipe.override([f"loss={loss}"]).create_loss(options.classes), options.images, options.classes
        )
        for loss in losses
    }
    for loss, values in seconds.items():
        # Ratios of neighbouring epochs, which met similar conditions.
        ratio = median(ours / theirs for ours, theirs in zip(values, seconds[first], strict=True))
        least = min(values) / min(seconds[first])
        fraction = (own[loss] - own[first]) / median(seconds[first])
        row = (
            f"{median(values):.3f}",
            f"{min(values):.3f}",
            f"{ratio:.3f}",
            f"{least:.3f}",
            f"{100 * fraction:.2f} %",
        )
        table.add_row(loss, *row)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    main()
