"""Ablations of the loss `ada-scale`: options, size and classes of the validation data, passes per epoch.

The inputs are the mean and the maximum of the GloVe vectors of a message of 20 Newsgroups. A small network
with batch normalisation is trained by SGD with weight decay; the learning rate drops twice. In the long tail
there are 600 down to 12 training messages of a class. Temperatures are fitted to the same validation messages
that the loss adapts to.

    python benchmarks/ablations.py --data-root DATA
    python benchmarks/ablations.py --data-root DATA --seeds 0 --only options

DATA holds 20news-bydate-train, 20news-bydate-test and glove.6B.100d.txt.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import MultiStepLR

import calibrant
from calibrant.calibrators import Temperature
from calibrant.losses import AdaptiveLoss
from calibrant.metrics import ece
from calibrant.training.data import DataSets, Split, load_data
from calibrant.training.recipe import Recipe

EPOCHS = 30
BATCH = 128
CLASSES = 20
TRAIN = 5000
FEW = 848  # validation messages, where nothing else is said: those of the recipe


class Part(NamedTuple):
    """Messages and their groups."""

    inputs: Tensor
    labels: Tensor

    def take(self, which: Tensor) -> "Part":
        return Part(self.inputs[which], self.labels[which])


class Task(NamedTuple):
    """What a network is trained, adapted and tested on."""

    train: Part
    validation: Part
    test: Part


def features(data: DataSets, part: Split) -> Part:
    """The mean and the maximum of the word vectors of each message."""
    vectors, found = data.about["embedding"].double(), []
    words, labels = part.batch(torch.arange(len(part)))
    for some in words.split(500):
        known = (some > 0).double().unsqueeze(-1)
        seen = vectors[some] * known
        found.append(torch.cat([seen.sum(1) / known.sum(1).clamp_min(1), seen.amax(1)], 1))
    return Part(torch.cat(found).float(), labels)


def tail(part: Part, largest: int = 600, imbalance: float = 50.0) -> Part:
    """Fewer and fewer messages of each class."""
    sizes = [max(8, int(largest * imbalance ** (-k / (CLASSES - 1)))) for k in range(CLASSES)]
    return part.take(torch.cat([(part.labels == k).nonzero()[:size, 0] for k, size in enumerate(sizes)]))


def make_task(pool: Part, test: Part, seed: int, *, long_tail: bool, validation: int, skewed: bool) -> Task:
    order = torch.randperm(len(pool.labels), generator=torch.Generator().manual_seed(seed))
    held, rest = pool.take(order[:validation]), pool.take(order[validation:])
    train = tail(rest) if long_tail else rest.take(torch.arange(TRAIN))
    if skewed:
        held = tail(held, 2 * validation // CLASSES, 20.0)
    return Task(train, held, test)


def train(loss: nn.Module, task: Task, seed: int, passes: int) -> tuple[Tensor, Tensor]:
    """Logits of validation and test messages; adaptive losses adapt `passes` times in an epoch."""
    torch.manual_seed(seed)
    width = task.train.inputs.shape[1]
    layers: list[nn.Module] = []
    for before in (width, 192):
        layers += [nn.Linear(before, 192), nn.BatchNorm1d(192), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(192, CLASSES))
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = MultiStepLR(optimizer, [EPOCHS // 2, EPOCHS * 4 // 5], 0.1)

    @torch.no_grad()
    def logits(part: Part) -> Tensor:
        network.eval()
        found: Tensor = network(part.inputs)
        network.train()
        return found

    def adapt() -> None:
        if isinstance(loss, AdaptiveLoss):
            loss.observe(logits(task.validation), task.validation.labels)
            loss.adapt()

    for _ in range(EPOCHS):
        batches = torch.randperm(len(task.train.labels)).split(BATCH)[:-1]  # the last one is smaller
        for number, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            loss(network(task.train.inputs[batch]), task.train.labels[batch]).backward()
            optimizer.step()
            if number < len(batches) and number * passes % len(batches) < passes:
                adapt()
        schedule.step()
        adapt()
    return logits(task.validation), logits(task.test)


def figures(task: Task, validation: Tensor, test: Tensor) -> list[float]:
    """Accuracy, NLL, NLL + T, ECE, ECE + T, T."""
    temperature = float(Temperature().fit(validation, task.validation.labels).temperature)
    target, found = task.test.labels, []
    for logits in (test.double(), test.double() / temperature):
        found += [F.cross_entropy(logits, target).item(), 100 * float(ece(logits, target))]
    accuracy = 100 * float((test.argmax(1) == target).double().mean())
    return [accuracy, found[0], found[2], found[1], found[3], temperature]


TABLES: dict[str, list[tuple[str, str, dict[str, object], dict[str, object]]]] = {}
"""Rows of each table: name, loss, options of the loss, and options of `run`."""

TABLES["options"] = [
    (name, loss, options, {"long_tail": long_tail})
    for long_tail in (False, True)
    for name, loss, options in [
        ("ce", "ce", {}),
        ("ada-scale", "ada-scale", {}),
        *((f"rate={rate}", "ada-scale", {"rate": rate}) for rate in (0.1, 0.25, 1.0)),
        *((f"lead={lead:g}", "ada-scale", {"lead": lead}) for lead in (0.0, 1.0, 2.0)),
        *((f"evidence={evidence:g}", "ada-scale", {"evidence": evidence}) for evidence in (0.0, 2.0)),
        ("offset=none", "ada-scale", {"offset": "none"}),
        ("weight=0", "ada-scale", {"weight": 0.0}),
        *((f"margin={margin:g}", "ada-scale", {"margin": margin}) for margin in (50.0, 80.0)),
    ]
]
TABLES["validation size"] = [
    (f"{loss}, {size} messages", loss, {}, {"long_tail": long_tail, "validation": size})
    for long_tail in (False, True)
    for size in (200, 500, 1000, 2000, 5000)
    for loss in ("ce", "ada-scale")
]
TABLES["skewed validation"] = [
    (name, loss, options, {"validation": 2000, "skewed": True})
    for name, loss, options in [
        ("ce", "ce", {}),
        ("ada-scale", "ada-scale", {}),
        ("offset=none", "ada-scale", {"offset": "none"}),
        ("cals-alm", "cals-alm", {"margin": 6.0}),
    ]
]
TABLES["passes per epoch"] = [
    (f"{passes}", "ada-scale", {}, {"long_tail": long_tail, "passes": passes})
    for long_tail in (False, True)
    for passes in (1, 2, 4, 8)
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2", help="seeds, separated by commas")
    parser.add_argument("--only", choices=list(TABLES), help="one table instead of all")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    torch.set_num_threads(1)
    data = load_data(Recipe.load("newsgroups-cnn").data, arguments.data_root)
    parts = [features(data, part) for part in (data.train, data.validation, data.test)]
    mean, deviation = parts[0].inputs.mean(0), parts[0].inputs.std(0)
    parts = [Part((part.inputs - mean) / deviation, part.labels) for part in parts]
    pool = Part(*(torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)))

    def run(
        create: Callable[[], nn.Module],
        long_tail: bool = False,
        validation: int = FEW,
        skewed: bool = False,
        passes: int = 1,
    ) -> list[float]:
        found = []
        for seed in seeds:
            task = make_task(pool, parts[2], seed, long_tail=long_tail, validation=validation, skewed=skewed)
            found.append(figures(task, *train(create(), task, seed, passes)))
        return [sum(column) / len(column) for column in zip(*found, strict=True)]

    for table, rows in TABLES.items():
        if arguments.only not in (None, table):
            continue
        print(f"\n{table}, means of {len(seeds)} seeds\n")
        print("| | accuracy | NLL | NLL + T | ECE | ECE + T | T |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for name, key, options, setting in rows:
            values = run(
                lambda key=key, options=options: calibrant.create_loss(key, CLASSES, **options), **setting
            )
            end = ", long tail" if setting.get("long_tail") else ""
            texts = [f"{value:.{digits}f}" for value, digits in zip(values, (1, 3, 3, 1, 1, 2), strict=True)]
            print(f"| {name}{end} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
