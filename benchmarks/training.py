"""What calibration costs in training: seconds per epoch with adaptive losses over those with cross-entropy.

Every loss trains the same network on the same generated images, validation pass included, in turns, so that
whatever else the machine does meets all of them alike. The first epoch of each turn warms up and is left out.

    python benchmarks/training.py
    python benchmarks/training.py --rounds 2 --images 512
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from calibrant.training.engine import train
from calibrant.training.recipe import Recipe

LOSSES = ("ce", "cals-alm", "cals-hr", "adafocal", "dual-focal", "mbls")

RECIPE = """
epochs = 3
batch_size = 128

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of every loss (default 5)")
    parser.add_argument("--images", type=int, default=2560, help="a tenth validate (default 2560)")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--model", default="cifar-resnet-32")
    parser.add_argument("--json", type=Path, help="write all seconds there")
    options = parser.parse_args()

    recipe = Recipe.from_toml(RECIPE.format(model=options.model), name="benchmark")
    seconds: dict[str, list[float]] = {loss: [] for loss in LOSSES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder, options.images, options.classes)
        for number in track(range(options.rounds * len(LOSSES)), description="training"):
            # Another order in every round: the first after a change is not always the same.
            round_number, place = divmod(number, len(LOSSES))
            loss = LOSSES[(place + round_number) % len(LOSSES)]
            run = train(recipe.override([f"loss={loss}"]), folder / f"{number}", data_root=folder)
            rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
            seconds[loss] += [row["seconds"] for row in rows[1:]]

    table = Table(
        title=f"{options.model}, {options.images} images, {options.classes} classes, "
        f"{torch.get_num_threads()} threads; median of {2 * options.rounds} epochs"
    )
    for heading in ("loss", "seconds an epoch", "fastest", "over ce", "fastest over ce"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for loss, values in seconds.items():
        ratio, least = median(values) / median(seconds["ce"]), min(values) / min(seconds["ce"])
        table.add_row(loss, f"{median(values):.3f}", f"{min(values):.3f}", f"{ratio:.3f}", f"{least:.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    main()
