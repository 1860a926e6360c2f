"""`calibrant sweep`: train a loss with several values of its options, and choose on the validation data."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from calibrant.cli import training_options as options
from calibrant.cli.program import say
from calibrant.cli.run_files import check_written
from calibrant.cli.terminal import Resamples, Wide, app, fail


@app.command()
def sweep(
    *,
    recipe: options.RecipeArgument = None,
    own_data: options.OwnData = None,
    target: options.Target = None,
    over: Annotated[
        list[str],
        typer.Option(
            metavar="OPTION=VALUE,VALUE,…",
            help="The values of a hyper-parameter of the loss, such as margin=4,6,8, or of a key of the "
            "recipe, such as optimizer.lr=0.1,0.01; repeatable, for every combination.",
        ),
    ],
    loss: options.Loss = None,
    seeds: Annotated[
        str, typer.Option(metavar="N,N,…", help="The seeds of every setting.", show_default="the recipe's")
    ] = "",
    by: options.By = "nll",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the runs, sweep.json, .md and .tex, and plots/sensitivity.png and .svg.",
            show_default="runs/RECIPE",
        ),
    ] = None,
    data_root: options.DataRoot = None,
    changes: options.Changes = None,
    resamples: Resamples = 1000,
    wide: Wide = False,
    accelerator: options.Accelerator = "auto",
    devices: options.Devices = "auto",
    nodes: options.Nodes = 1,
) -> None:
    """Train a loss with several values of its options, choose on the validation data, and test the choice.

    Only the chosen setting is evaluated on the test data. Runs in the output folder are reused, whether
    finished or not.
    """
    with options.training_errors(), options.preparing() as started:
        followed = options.load_recipe(recipe, changes, loss=loss, data=own_data, target=target)
        from calibrant.evaluation.criterion import Criterion
        from calibrant.reports import chosen
        from calibrant.training import run_folder, sweep
        from calibrant.training.lock import FolderLock
        from calibrant.training.runs import plain_name
        from calibrant.training.sweeps import settings_of

        folder = output or Path("runs", plain_name(followed.name))
        run_folder.check_for_several(folder)
        numbers = options.seed_numbers(seeds) if seeds else [followed.seed]
        values = _values(over)
        Criterion.parse(by)
        settings = settings_of(followed, values, folder)
        check_written(folder, chosen.SWEEP_FILES, recipe, followed, data_root)
        for setting, seed in product(settings, numbers):
            place = setting.folder(seed)
            check_written(place, run_folder.FILES, recipe, setting.with_seed(seed), data_root)
        fabric = options.launch(followed, accelerator, devices, nodes)
        result = sweep(
            followed,
            values,
            folder,
            seeds=numbers,
            by=by,
            data_root=data_root,
            resamples=resamples,
            fabric=fabric,
            progress=True,
            report=started if fabric.is_global_zero else None,
        )
        if result is None:
            return
        with FolderLock(folder, "writing the results of a sweep"):  # all files are of one sweep
            chosen.write_sweep(result, folder)
    chosen.print_choice(result, wide=wide)
    say(f"{folder}: {', '.join(chosen.SWEEP_FILES)}")


def _values(texts: list[str]) -> dict[str, list[Any]]:
    """The values of each option, from texts such as ``margin=4,6,8``."""
    from calibrant.options import parse_value, split_outside_brackets

    found: dict[str, list[Any]] = {}
    for text in texts:
        first, *others = split_outside_brackets(text) or [""]
        option, equals, value = (part.strip() for part in first.partition("="))
        if not (option and equals and value):
            fail(f"--over {text}: expected OPTION=VALUE,VALUE,…, as in margin=4,6,8")
        if option in found:
            fail(f"--over {option}: given twice; expected all of its values in one list")
        found[option] = [parse_value(each) for each in (value, *others)]
    return found
