"""Balanced softmax with several losses: the logarithm of the class counts is added to the logits in the loss.

Long-tailed digits, as in the recipe ``digits-lt``: 206 training images, 80 down to 1 of a class; 400
validation and 540 test images, balanced. A network with two hidden layers, 60 epochs of Adam. Means over
seeds.

    python benchmarks/balanced_softmax.py
    python benchmarks/balanced_softmax.py --seeds 0
"""

import argparse

import torch
from torch import Tensor, nn

import calibrant
from calibrant.calibrators import Temperature
from calibrant.training.data import DataSets, load_data
from calibrant.training.recipe import Recipe

EPOCHS = 60
BATCH = 32
LOSSES = [
    ("ce", {}),
    ("cals-alm", {"margin": 6}),
    ("cals-alm", {"margin": 10}),
    ("mbls", {"margin": 6}),
    ("adafocal", {"evidence": 2}),
    ("ada-scale", {}),
]


def parts(data: DataSets) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels to train, validate and test."""
    splits = (data.train, data.validation, data.test)
    return [split.batch(torch.arange(len(split))) for split in splits]


def train(key: str, options: dict[str, float], prior: Tensor, seed: int, data: DataSets) -> list[float]:
    """Train one network; accuracy, NLL and ECE on the test images, then NLL and ECE after a temperature."""
    train, validation, test = parts(data)
    torch.manual_seed(seed)
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model, loss = nn.Sequential(*layers), calibrant.create_loss(key, 10, **options)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(train[1])).split(BATCH):
            optimizer.zero_grad()
            loss(model(train[0][rows]) + prior, train[1][rows]).backward()
            optimizer.step()
        calibrant.adapt_on(loss, model, [validation])  # by the plain logits, which are used
    with torch.no_grad():
        fitted, tested = model(validation[0]), model(test[0])
    before = calibrant.evaluate(tested, test[1], resamples=0)
    after = calibrant.evaluate(Temperature().fit(fitted, validation[1])(tested), test[1], resamples=0)
    return [100 * before.accuracy, before.nll, 100 * before.ece, after.nll, 100 * after.ece]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="separated by commas")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    torch.set_num_threads(1)
    data = load_data(Recipe.load("digits-lt").data)
    counts = torch.tensor(data.class_counts, dtype=torch.float32)
    print("| loss | balanced softmax | accuracy | NLL | ECE | NLL + T | ECE + T |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for key, options in LOSSES:
        name = key + "".join(f"[{option}={value:g}]" for option, value in options.items())
        for balanced in (False, True):
            if balanced and key == "ada-scale":
                continue  # it learns the offsets
            prior = counts.log() if balanced else torch.zeros(10)
            runs = torch.tensor([train(key, options, prior, seed, data) for seed in seeds])
            accuracy, nll, error, nll_after, error_after = runs.mean(0).tolist()
            figures = f"{accuracy:.1f} | {nll:.3f} | {error:.1f} | {nll_after:.3f} | {error_after:.1f}"
            print(f"| `{name}` | {'yes' if balanced else 'no'} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
