"""A program that trains, for tests that kill it, fill its disk, or start it in several processes.

As ``python -m tests.training.program OUTPUT RECIPE...`` it follows each recipe file into a folder of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calibrant.options import Choice, RecipeError
from calibrant.training import loop, setup
from calibrant.training.data import DATA_SETS, DataSets, TensorSplit, load_data
from calibrant.training.fabric import Fabric
from calibrant.training.recipe import Recipe


def spotted(
    root: Path | None = None, *, pixels: int = 6, test_size: int = 31, validation_size: int = 40
) -> DataSets:
    """Rows of pixels, a third of them void: the second of each pair of images has hardly any that is not."""
    plain = load_data(
        Choice(
            "synthetic",
            {
                "classes": 4,
                "features": 5,
                "train_size": 96 * pixels,
                "validation_size": validation_size * pixels,
                "test_size": test_size * pixels,
            },
        )
    )
    parts = []
    for split in (plain.train, plain.validation, plain.test):
        inputs, target = split.batch(torch.arange(len(split)))
        assert isinstance(inputs, Tensor)
        images = inputs.reshape(-1, pixels, 5).movedim(1, -1)
        labels = target.reshape(-1, pixels).clone()
        generator = torch.Generator().manual_seed(len(labels))
        void = torch.rand(len(labels), 1, generator=generator)  # the fraction of void pixels of each row
        labels[torch.rand(labels.shape, generator=generator) < void] = 255
        parts.append(TensorSplit(images, labels))
    return DataSets(*parts, plain.class_names, {"channels": 5}, ignore_index=255)


def labelled(root: Path | None = None) -> DataSets:
    """Elements with three labels, a sixth of which are not known, most of them of the last elements."""
    parts = []
    for size in (96, 61, 31):
        generator = torch.Generator().manual_seed(size)
        inputs = torch.randn(size, 5, generator=generator)
        labels = (2 * inputs[:, :3] + torch.randn(size, 3, generator=generator) > 0).long()
        unknown = torch.linspace(0, 1 / 3, size).unsqueeze(1)
        labels[torch.rand(size, 3, generator=generator) < unknown] = -100
        parts.append(TensorSplit(inputs, labels))
    return DataSets(*parts, ("a", "b", "c"), {"features": 5}, several_labels=True)


def pixelwise(num_classes: int, *, channels: int = 5) -> nn.Module:
    """A network that classifies every pixel."""
    return nn.Sequential(nn.Conv1d(channels, 8, 1), nn.ReLU(), nn.Conv1d(8, num_classes, 1))


def batch_normalised(num_classes: int, *, features: int) -> nn.Module:
    """A network with statistics of batches, which every process has its own of."""
    return nn.Sequential(nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))


def of_seven(num_classes: int, *, features: int) -> nn.Module:
    """A network that does not care how many classes there are."""
    return nn.Linear(features, 7)


def as_probabilities(num_classes: int, *, features: int) -> nn.Module:
    """A network that goes one step too far."""
    return nn.Sequential(nn.Linear(features, num_classes), nn.Softmax(1))


class Forgetful(nn.Module):
    """A network that needs random numbers in every step, and some time.

    Args:
        num_classes: K.
        features: of each element.
        pause: seconds that a training step takes.
    """

    def __init__(self, num_classes: int, features: int, pause: float) -> None:
        super().__init__()
        self.pause = pause
        self.layers = nn.Sequential(
            nn.Linear(features, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, num_classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            announce_step()
            time.sleep(self.pause)
            inputs = inputs + 0.1 * random.random()
        return self.layers(inputs)


def forgetful(num_classes: int, *, features: int, pause: float = 0.0) -> nn.Module:
    return Forgetful(num_classes, features, pause)


class Stopped(BaseException):
    """Nothing catches it on the way out, as nothing catches a kill."""


_doom: dict[str, Any] = {"after": None, "steps": None, "step": None}


def announce_step() -> None:
    """Leave a mark for each step; with the first one the time to be killed begins to run."""
    if _doom["steps"] is not None:
        with open(_doom["steps"], "a") as stream:
            stream.write(".")
    if _doom["step"] is not None:
        _doom["step"] -= 1
        if _doom["step"] < 0:
            _doom["step"] = None
            raise Stopped
    after, _doom["after"] = _doom["after"], None
    if after is not None:

        def kill() -> None:
            time.sleep(after)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


def follow(recipe: Recipe, folder: Path, fabric: Fabric | None = None) -> None:
    """Train, and leave what each process holds in the end beside the run."""

    def run(training: loop.Loop) -> None:
        plain(training)
        held = {"loss": training.parts.loss.state_dict(), "model": training.parts.network.state_dict()}
        held["draws"] = torch.rand(4)
        torch.save(held, folder / f"process{training.parts.fabric.global_rank}.pt")

    plain = loop.Loop.run
    loop.Loop.run = run  # type: ignore[method-assign]
    try:
        loop.train(recipe, folder, fabric=fabric)
    finally:
        loop.Loop.run = plain  # type: ignore[method-assign]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("recipes", type=Path, nargs="+")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--kill-after", type=float)
    parser.add_argument("--stop-at-step", type=int, help="of the recipe named stopped")
    parser.add_argument("--largest-file", type=int)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    DATA_SETS.update(spotted=spotted, labelled=labelled)
    _doom.update(after=given.kill_after)
    if given.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (given.largest_file, given.largest_file))
    fabric = None
    for path in given.recipes:
        recipe = Recipe.load(path)
        if fabric is None:
            fabric = setup.make_fabric(recipe, accelerator="cpu", devices=given.devices)
            fabric.launch()
        _doom.update(steps=given.output / f"{path.stem}.steps")
        if path.stem == "stopped":
            _doom.update(step=given.stop_at_step)
            try:
                follow(recipe, given.output / path.stem, fabric)
            except Stopped:
                shutil.copytree(given.output / path.stem, given.output / f"left{fabric.global_rank}")
        try:
            follow(recipe, given.output / path.stem, fabric)
        except RecipeError as error:
            (given.output / f"{path.stem}.error{fabric.global_rank}").write_text(str(error))


if __name__ == "__main__":
    # The recipes' models name this module, which would else be there twice.
    from tests.training import program

    program.main()
