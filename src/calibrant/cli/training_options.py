"""Options and errors that the commands for training share."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrant.cli.program import INTERRUPTED, complain, say
from calibrant.cli.terminal import fail, one_line_errors, waiting

if TYPE_CHECKING:
    from calibrant.training import Recipe
    from calibrant.training.fabric import Fabric


def as_recipe(value: str | None) -> str | None:
    """The argument, unless it is a file of data: before a second file is refused as one argument too many."""
    suffix = Path(value or "").suffix.lower()
    if suffix not in ("", ".toml"):
        from calibrant.predictions import FORMATS
        from calibrant.training.own_data import SUFFIXES

        remedies = []
        if suffix in SUFFIXES:
            remedies.append(f"for data of your own, use --data {shlex.quote(str(value))}")
        if suffix in FORMATS:
            remedies.append("to compare files of predictions, use calibrant evaluate")
        if remedies:
            fail("; ".join([f"{value} is no recipe, expected a .toml file or a name", *remedies]))
    return value


RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        callback=as_recipe,
        help="A TOML file, or the name of a shipped recipe; see calibrant recipes.",
        show_default="chosen by --data",
    ),
]
OwnData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Your own data, in place of a recipe: a folder of class folders with images, a .csv, .tsv, "
        ".parquet or .jsonl table, or an .npz file.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN[,COLUMN…]",
        help="The column of the class in the table of --data; or the columns of several labels, each 0 or 1.",
        show_default="label, target or class",
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
Jobs = Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")]


@contextmanager
def training_errors(*, resumes: bool = True) -> Iterator[None]:
    """One-line errors and warnings, from the first process only.

    ``resumes`` says whether the same command goes on after an interruption.
    """
    with waiting("loading libraries", shown=_is_first()):
        from calibrant.distributed import OtherProcessError
        from calibrant.processes import WorkerError
        from calibrant.training import TrainingError

    errors = (ValueError, OSError, ImportError, TrainingError, OtherProcessError, WorkerError)
    try:
        with one_line_errors(*errors, shown=_is_first()):
            yield
    except KeyboardInterrupt:
        complain("stopped" + ("; the same command continues from the last checkpoint" if resumes else ""))
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def preparing() -> Iterator[Callable[[str], None]]:
    """Show on the terminal that libraries and data are being loaded, until the first line is reported.

    The block gets a function that prints a line on the error output.
    """
    with waiting("loading libraries and data", shown=_is_first()) as stop:

        def report(line: str) -> None:
            stop()
            say(line, err=True)

        yield report


def _is_first() -> bool:
    """Whether this is the first process of the command."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def load_recipe(
    source: str | None,
    changes: Sequence[str] | None,
    *,
    loss: str | None = None,
    seed: int | None = None,
    data: Path | None = None,
    target: str | None = None,
    compared: Sequence[str] = (),
) -> Recipe:
    """The recipe of a name or file, or the one chosen for ``data``, with the changes of the command line.

    For ``data``, a line says what was found and chosen. A warning tells of settings for losses that adapt, if
    neither the loss of the recipe nor, in their place, those that are ``compared`` do.
    """
    from calibrant.training import Recipe

    changes = changes or ()
    if data is not None:
        from calibrant.training.own_data import choose_recipe

        if source is not None:
            fail(f"expected a recipe or --data PATH, got {source} and --data {data}")
        recipe = choose_recipe(data, target, changes)
        if _is_first():
            same = ["--data", str(data), *(["--target", target] if target else [])]
            same += [word for change in changes for word in ("--set", change)]
            more = f"calibrant recipes {shlex.join(same)} prints the recipe, --set KEY=VALUE changes it"
            say(f"{data}: {recipe.description}. {more}.", err=True)
    elif source is None:
        fail("expected a RECIPE (calibrant recipes lists them), or --data PATH")
    elif target is not None:
        fail("--target is for a table of --data")
    else:
        recipe = Recipe.load(source).override(changes)
    given: dict[str, Any] = {"loss": loss, "seed": seed}
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    _check_adaptation(changes, compared or [recipe.loss])
    return recipe


def _check_adaptation(changes: Sequence[str], losses: Sequence[str]) -> None:
    """Warn of settings for losses that adapt, if none of these does."""
    from calibrant.losses import LOSSES, AdaptiveLoss
    from calibrant.options import Choice

    keys = [change.partition("=")[0].strip() for change in changes]
    given = [key for key in ("adapt", "adapt_on") if key in keys]
    kinds = [LOSSES.get(Choice.parse(loss).name, AdaptiveLoss) for loss in losses]
    if given and _is_first() and not any(issubclass(kind, AdaptiveLoss) for kind in kinds):
        found = f"{losses[0]} does not adapt" if len(losses) == 1 else "none of these losses adapts"
        warnings.warn(
            f"--set {' and '.join(given)}: no effect, because {found}; calibrant losses lists those that do",
            stacklevel=2,
        )


def seed_numbers(text: str) -> list[int]:
    """The seeds in a text such as ``0,1,2``."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() and len(number) < 19 for number in numbers):
        fail(f"--seeds {text}: expected whole numbers separated by commas")
    return [int(number) for number in numbers]


def launch(recipe: Recipe, accelerator: str, devices: str, nodes: int) -> Fabric:
    """Fabric with all processes started."""
    from calibrant.training.setup import launched

    if devices != "auto" and not (devices.isdecimal() and int(devices) > 0):
        fail(f"--devices {devices}: expected a whole number of at least 1, or auto")
    wanted = devices if devices == "auto" else int(devices)
    try:
        return launched(recipe, accelerator=accelerator, devices=wanted, nodes=nodes)
    except ImportError as error:
        raise ImportError(f"--accelerator {accelerator}: {error}") from error
