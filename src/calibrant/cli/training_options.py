"""Options and errors that the commands for training share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrant.cli.program import INTERRUPTED, complain
from calibrant.cli.terminal import fail, one_line_errors

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from calibrant.training import Recipe

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A TOML file, or the name of a shipped recipe; see calibrant recipes.",
        show_default=False,
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="KEY[OPTION=VALUE,…]", help="The loss; see calibrant losses.", show_default="the recipe's"
    ),
]
By = Annotated[
    str,
    typer.Option(
        metavar="FIGURE",
        help="What to choose by, on the validation data: nll, ece, adaptive-ece, accuracy, or another "
        "metric, possibly with -after-temperature.",
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder with the files of the data sets.",
        envvar="CALIBRANT_DATA",
        show_default="data",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change the recipe, for example optimizer.lr=0.05; repeatable."
    ),
]
Accelerator = Annotated[str, typer.Option(help="auto, cpu, cuda, or another name of Lightning Fabric.")]
Devices = Annotated[
    str, typer.Option(help="Number of GPUs or CPU processes; auto: all GPUs, or one process.")
]
Nodes = Annotated[int, typer.Option(min=1, help="Number of machines.")]


@contextmanager
def training_errors() -> Iterator[None]:
    """One-line errors and warnings, from the first process only."""
    from calibrant.distributed import OtherProcessError
    from calibrant.training import TrainingError

    errors = (ValueError, OSError, ImportError, TrainingError, OtherProcessError)
    first = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
    try:
        with one_line_errors(*errors, shown=first):
            yield
    except KeyboardInterrupt:
        complain("stopped; the same command continues from the last checkpoint")
        raise typer.Exit(INTERRUPTED) from None


def import_fabric() -> None:
    """Import Lightning Fabric without torchmetrics.

    Fabric only asks for the version of torchmetrics. Importing it takes seconds, because it imports
    torchvision and transformers where they are installed.
    """
    if "torchmetrics" in sys.modules:
        return
    sys.modules["torchmetrics"] = None  # type: ignore[assignment]
    try:
        import lightning_fabric  # noqa: F401
    finally:
        del sys.modules["torchmetrics"]


def load_recipe(
    source: str, changes: Sequence[str] | None, *, loss: str | None = None, seed: int | None = None
) -> Recipe:
    """The recipe with the changes of the command line."""
    from calibrant.training import Recipe

    recipe = Recipe.load(source).override(changes or ())
    given: dict[str, Any] = {"loss": loss, "seed": seed}
    return replace(recipe, **{name: value for name, value in given.items() if value is not None})


def seed_numbers(text: str) -> list[int]:
    """The seeds in a text such as ``0,1,2``."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() and len(number) < 19 for number in numbers):
        fail(f"--seeds {text}: expected whole numbers separated by commas")
    return [int(number) for number in numbers]


def launch(recipe: Recipe, accelerator: str, devices: str, nodes: int) -> Fabric:
    """Fabric with all processes started."""
    from calibrant.training.setup import make_fabric

    if devices != "auto" and not (devices.isdecimal() and int(devices) > 0):
        fail(f"--devices {devices}: expected a whole number of at least 1, or auto")
    wanted = devices if devices == "auto" else int(devices)
    fabric = make_fabric(recipe, accelerator=accelerator, devices=wanted, nodes=nodes)
    fabric.launch()
    return fabric
