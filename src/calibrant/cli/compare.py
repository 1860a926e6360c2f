"""`calibrant compare`: train several losses and compare them on the test set."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from calibrant.cli import training_options as options
from calibrant.cli.program import say
from calibrant.cli.run_files import check_written
from calibrant.cli.terminal import Resamples, Wide, app


@app.command()
def compare(
    recipe: options.RecipeArgument = None,
    own_data: options.OwnData = None,
    target: options.Target = None,
    losses: Annotated[
        str,
        typer.Option(
            metavar="KEY,KEY[OPTION=VALUE],…", help="The losses. The others are tested against the first."
        ),
    ] = "ce,ls,flsd,mbls,dual-focal,adafocal,cals-hr,cals-alm",
    seeds: Annotated[str, typer.Option(metavar="N,N,…", help="The seeds of every loss.")] = "0,1,2",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the runs, results.json, .md and .tex, plots and report.html.",
            show_default="runs/RECIPE",
        ),
    ] = None,
    data_root: options.DataRoot = None,
    ood: Annotated[
        str,
        typer.Option(
            metavar="DATA,DATA[OPTION=VALUE],…",
            help="Out-of-distribution data sets, to be detected by the entropy: svhn, cifar10-c[severity=3].",
        ),
    ] = "",
    shift: Annotated[
        str,
        typer.Option(
            metavar="DATA,DATA[OPTION=VALUE],…",
            help="Shifted test data with the same classes, at every severity: cifar10-c[corruption=fog].",
        ),
    ] = "",
    calibrators: Annotated[
        str,
        typer.Option(
            metavar="KEY,KEY[OPTION=VALUE],…",
            help="Calibrators, fitted to the validation data. Temperature scaling is always one of them.",
        ),
    ] = "temperature",
    columns: Annotated[
        str,
        typer.Option(
            metavar="METRIC,METRIC,…",
            help="Metrics in the tables. kde_ece is computed only on request: it is slow.",
            show_default="accuracy,nll,ece,adaptive_ece,classwise_ece",
        ),
    ] = "",
    changes: options.Changes = None,
    resamples: Resamples = 1000,
    jobs: options.Jobs = 1,
    wide: Wide = False,
    accelerator: options.Accelerator = "auto",
    devices: options.Devices = "auto",
    nodes: options.Nodes = 1,
) -> None:
    """Train losses from several seeds and compare them on the test set, before and after calibration.

    Runs in the output folder are reused, whether finished or not.
    """
    with options.training_errors():
        from calibrant.options import Choice, split_outside_brackets

        compared = split_outside_brackets(losses)
        followed = options.load_recipe(recipe, changes, compared=compared, data=own_data, target=target)
        from calibrant.reports import comparison_page
        from calibrant.training import compare, run_folder
        from calibrant.training.lock import FolderLock
        from calibrant.training.runs import Run, folder_of, plain_name

        folder = output or Path("runs", plain_name(followed.name))
        run_folder.check_for_several(folder)
        numbers = options.seed_numbers(seeds)
        outside, shifted, chosen = (
            [Choice.parse(each) for each in split_outside_brackets(text)]
            for text in (ood, shift, calibrators)
        )
        others = [*outside, *shifted]
        check_written(folder, comparison_page.FILES, recipe, followed, data_root, others)
        for loss, number in product(compared, numbers):
            each = replace(followed, loss=loss, seed=number)
            place = folder_of(folder, each.loss, each.seed)
            check_written(place, run_folder.FILES, recipe, each, data_root, others)
        fabric = options.launch(followed, accelerator, devices, nodes)
        comparison = compare(
            followed,
            compared,
            numbers,
            folder,
            data_root=data_root,
            outside=outside,
            shifted=shifted,
            calibrators=chosen,
            columns=[name.strip().replace("-", "_") for name in columns.split(",") if name.strip()],
            resamples=resamples,
            jobs=jobs,
            fabric=fabric,
            progress=True,
            report=lambda line: say(line, err=True),
        )
        if comparison is None:
            return
        from calibrant.reports.table_builders import comparison_note, comparison_table, shift_tables
        from calibrant.reports.tables import print_table

        runs = {
            method.name: [Run(folder_of(folder, method.name, seed)) for seed in comparison.seeds]
            for method in comparison.methods
        }
        history = {name: [run.history for run in each] for name, each in runs.items()}
        learned = {name: each[0].learned for name, each in runs.items()}
        with FolderLock(folder, "writing the results of a comparison"):  # all files are of one comparison
            comparison_page.write_comparison(comparison, folder, history, learned)
    table = comparison_table(comparison)
    print_table(table, f"{comparison_note(comparison)} {table.intervals_note}".rstrip(), wide=wide)
    for heading, table in shift_tables(comparison).items():
        say("")
        say(f"{heading} (%)")
        print_table(table, wide=wide)
    say(f"{folder}: {', '.join(comparison_page.FILES)}, plots")
