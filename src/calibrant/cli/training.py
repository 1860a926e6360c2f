"""The commands that train: train, compare, predict, and the lists of losses and recipes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrant.cli.terminal import app, fail, warning_in_one_line

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from rich.console import Console
    from rich.table import Table

    from calibrant.comparison import Comparison
    from calibrant.training.recipe import Recipe

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A TOML file, or the name of a shipped recipe; calibrant recipes lists them.",
        show_default=False,
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where the data sets' files are.",
        envvar="CALIBRANT_DATA",
        show_default="data",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, as optimizer.lr=0.05; repeatable."),
]
Accelerator = Annotated[str, typer.Option(help="auto, cpu, cuda, or another that Lightning Fabric knows.")]
Devices = Annotated[
    str,
    typer.Option(help="How many GPUs, or CPU processes; auto for all GPUs, or one process."),
]
Nodes = Annotated[int, typer.Option(min=1, help="How many machines.")]


@app.command()
def train(
    recipe: RecipeArgument,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="KEY[OPTION=VALUE,…]",
            help="The loss; calibrant losses lists them.",
            show_default="the recipe's",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of weights, order and augmentation.", show_default="the recipe's"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's folder.", show_default="runs/RECIPE/runs/LOSS-seedN"),
    ] = None,
    data_root: DataRoot = None,
    changes: Changes = None,
    accelerator: Accelerator = "auto",
    devices: Devices = "auto",
    nodes: Nodes = 1,
) -> None:
    """Train a model by a recipe; after an interruption, the same command goes on where it was."""
    with _training_errors():
        followed = _recipe(recipe, changes, loss=loss, seed=seed)
        from calibrant.training.data import load_data
        from calibrant.training.folder import check_folder, is_finished
        from calibrant.training.loop import train
        from calibrant.training.runs import Run, folder_of

        folder = output or folder_of(Path("runs", followed.name), followed.loss, followed.seed)
        fabric = _launched(followed, accelerator, devices, nodes)
        data = None
        finished = is_finished(folder)
        if finished:
            check_folder(folder, followed)
            with suppress(OSError, ImportError, ValueError):  # the run does not need what cannot be read
                data = load_data(followed.data, data_root)
        train(followed, folder, data_root=data_root, data=data, fabric=fabric, progress=True)
        if not fabric.is_global_zero:
            return
        run = Run(folder, data_root)
        last = run.history[-1]
    if finished:
        typer.echo(f"The run in {folder} was finished before; nothing was trained.")
    epochs = f"{len(run.history)} epoch{'s' if len(run.history) > 1 else ''}"
    typer.echo(
        f"{folder}: {followed.name}, {followed.loss}, seed {followed.seed}, {epochs}; "
        f"validation accuracy {100 * last['validation_accuracy']:.2f} %, "
        f"ECE {100 * last['validation_ece']:.2f} %, NLL {last['validation_nll']:.4f}"
    )
    if (folder / "test.npz").is_file():
        typer.echo(f"Test figures: calibrant evaluate {folder / 'test.npz'}")


@app.command()
def compare(
    recipe: RecipeArgument,
    losses: Annotated[
        str,
        typer.Option(
            metavar="KEY,KEY[OPTION=VALUE],…",
            help="The losses; the first is what the others are tested against.",
        ),
    ] = "ce,ls,flsd,mbls,dual-focal,adafocal,cals-hr,cals-alm",
    seeds: Annotated[str, typer.Option(metavar="N,N,…", help="The seeds of every loss.")] = "0,1,2",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where to keep the runs, results.json, .md and .tex, plots and report.html.",
            show_default="runs/RECIPE",
        ),
    ] = None,
    data_root: DataRoot = None,
    ood: Annotated[
        str,
        typer.Option(
            metavar="DATA,DATA[OPTION=VALUE],…",
            help="Data sets to be told from the test data by the entropy, as svhn or cifar10-c[severity=3].",
            show_default=False,
        ),
    ] = "",
    changes: Changes = None,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples behind the intervals.")] = 1000,
    accelerator: Accelerator = "auto",
    devices: Devices = "auto",
    nodes: Nodes = 1,
) -> None:
    """Train losses from several seeds and compare them on the test set, before and after temperature scaling.

    Runs that are there already, finished or not, are reused.
    """
    with _training_errors():
        followed = _recipe(recipe, changes)
        from calibrant.options import Choice, split_outside_brackets
        from calibrant.training.grid import compare

        folder = output or Path("runs", followed.name)
        if folder.exists() and not folder.is_dir():
            fail(f"--output {folder}: is a file; expected a folder")
        numbers = seeds.split(",")
        if not all(number.strip().isdecimal() for number in numbers):
            fail(f"--seeds {seeds}: expected whole numbers with commas between")
        fabric = _launched(followed, accelerator, devices, nodes)
        comparison = compare(
            followed,
            split_outside_brackets(losses),
            [int(number) for number in numbers],
            folder,
            data_root=data_root,
            outside=[Choice.parse(each) for each in split_outside_brackets(ood)],
            resamples=resamples,
            fabric=fabric,
            progress=True,
            evaluating=lambda loss, seed: typer.echo(f"{loss}, seed {seed}: evaluating", err=True),
        )
        if comparison is None:
            return
        from calibrant.reports.comparison import write_comparison

        write_comparison(comparison, folder, _traces(comparison, folder))
    _print(comparison)
    typer.echo(f"{folder}: results.json, results.md, results.tex, plots, report.html")


@app.command()
def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option(metavar="OUT", help="Where to write logits and labels: .npz or .safetensors.")
    ],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    data_root: DataRoot = None,
) -> None:
    """Write what a trained model predicts, for calibrant evaluate and calibrant calibrate."""
    from calibrant.files import WRITERS

    with _training_errors():
        from calibrant.training.runs import Run

        if split not in ("train", "validation", "test"):
            fail(f"--split {split}: expected train, validation or test")
        if output.suffix.lower() not in WRITERS:
            fail(f"--output {output}: expected a name that ends in {' or '.join(WRITERS)}")
        if not output.parent.is_dir():
            fail(f"--output {output}: there is no folder {output.parent}")
        rows = Run(run, data_root).predict(split, output)  # type: ignore[arg-type]
    typer.echo(f"{output}: {rows:,} rows of {split}")


@app.command()
def losses() -> None:
    """List the losses with their hyper-parameters."""
    import re
    from inspect import getdoc

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from calibrant.losses import LOSSES, AdaptiveLoss

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("key", "what it is", "hyper-parameters"):
        table.add_column(heading, no_wrap=heading == "key")
    for key, kind in LOSSES.items():
        shared = ("reduction", "ignore_index", "class_weight")
        options = ", ".join(
            f"{name}={parameter.default}"
            for name, parameter in kind.hyperparameters().items()
            if name not in shared
        )
        first = re.sub(r" \(key ``[^`]*``\)|`", "", (getdoc(kind) or "").split("\n", 1)[0])
        adaptive = " (adaptive)" if issubclass(kind, AdaptiveLoss) else ""
        table.add_row(Text(key), Text(first + adaptive), Text(options))
    Console(highlight=False).print(table)
    typer.echo(
        "Hyper-parameters go in brackets: --loss 'cals-alm[margin=6,penalty=p2]'. Adaptive losses learn"
    )
    typer.echo("from the validation data; adapt= in the brackets says how often: epoch, 100, 0:epoch/10:100.")


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this one as TOML.", show_default=False)
    ] = None,
) -> None:
    """List the shipped recipes, or print one."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    with _training_errors():
        from calibrant.training.recipe import Recipe, shipped_recipes

        if name is not None:
            Recipe.load(name)
            typer.echo(shipped_recipes().get(name) or Path(name).read_text(encoding="utf-8"), nl=False)
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("name", "data", "model", "what it is"):
            table.add_column(heading, no_wrap=heading != "what it is")
        for each in shipped_recipes():
            recipe = Recipe.load(each)
            table.add_row(
                Text(each), Text(recipe.data.name), Text(recipe.model.name), Text(recipe.description)
            )
    (Console(highlight=False) if sys.stdout.isatty() else _wide_console(table)).print(table)


# ------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _training_errors() -> Iterator[None]:
    """One line for what a user can mend, from the first process alone; warnings in one line too."""
    import os

    from calibrant.options import TrainingError

    first = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
    try:
        with warning_in_one_line(shown=first):
            yield
    except KeyboardInterrupt:
        typer.echo("calibrant: stopped; the same command goes on from the last checkpoint, if any", err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError, ImportError, TrainingError) as problem:
        if first:
            fail(" ".join(str(problem).split()))
        raise typer.Exit(2) from None


def _recipe(
    source: str, changes: Sequence[str] | None, *, loss: str | None = None, seed: int | None = None
) -> Recipe:
    from dataclasses import replace

    from calibrant.training.recipe import Recipe

    recipe = Recipe.load(source).override(changes or ())
    given: dict[str, Any] = {"loss": loss, "seed": seed}
    return replace(recipe, **{name: value for name, value in given.items() if value is not None})


def _launched(recipe: Recipe, accelerator: str, devices: str, nodes: int) -> Fabric:
    from calibrant.training.setup import make_fabric

    if devices != "auto" and not (devices.isdecimal() and int(devices) > 0):
        fail(f"--devices {devices}: expected a whole number of at least 1, or auto")
    wanted = devices if devices == "auto" else int(devices)
    fabric = make_fabric(recipe, accelerator=accelerator, devices=wanted, nodes=nodes)
    fabric.launch()
    return fabric


def _traces(comparison: Comparison, folder: Path) -> Any:
    from calibrant.reports.comparison import Traces
    from calibrant.training.runs import Run, folder_of

    runs = {
        method.name: [Run(folder_of(folder, method.name, seed)) for seed in comparison.seeds]
        for method in comparison.methods
    }
    history = {name: [run.history for run in each] for name, each in runs.items()}
    return Traces(history, {name: each[0].learned for name, each in runs.items()})


_NOT_ON_THE_TERMINAL = ("NLL + T", "Class-wise ECE", "Class-wise ECE + T")


def _wide_console(table: Table) -> Console:
    """Wider than the terminal rather than with digits left out."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, needed)
    return console


def _print(comparison: Comparison) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from calibrant.reports.comparison import columns, notes

    marks = {"better": " ↑", "worse": " ↓", "": ""}
    # The rest is in the files: more would not fit beside one another.
    shown = [each for each in columns(comparison) if each.heading not in _NOT_ON_THE_TERMINAL]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for column in shown:
        table.add_column(Text(column.heading), justify="right")
    for method in comparison.methods:
        cells = []
        for column in shown:
            between = column.between(method.name)
            text = column.text(method.name) + marks[column.verdict(method.name)]
            style = "bold" if column.best == method.name else ""
            cells.append(Text(f"{text}\n{between}" if between else text, style=style))
        table.add_row(Text(method.name), *cells)
    console = _wide_console(table)
    console.print(table)
    console.print(
        f"{notes(comparison)} In brackets: 95 % intervals of the means.",
        markup=False,
        soft_wrap=True,
    )
