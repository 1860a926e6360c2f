"""`calibrant tune`: tune the hyper-parameters of a loss on the validation data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrant.cli import training_options as options
from calibrant.cli.program import say
from calibrant.cli.run_files import check_written
from calibrant.cli.terminal import Resamples, Wide, app


@app.command()
def tune(
    recipe: options.RecipeArgument = None,
    own_data: options.OwnData = None,
    target: options.Target = None,
    loss: options.Loss = None,
    trials: Annotated[
        int, typer.Option(help="Number of trials in the study, of all processes and calls together.")
    ] = 20,
    by: options.By = "nll",
    prune: Annotated[
        bool,
        typer.Option(
            help="Stop a trial early if it is worse than the median of the others at the same epoch."
        ),
    ] = True,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the study, the runs, tune.json, .md and .html, and plots.",
            show_default="runs/RECIPE/tune-LOSS",
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
    """Tune the hyper-parameters of a loss on the validation data, and test the choice.

    Options in the name of the loss stay fixed. Only the chosen loss is evaluated on the test data. After an
    interruption, the same command goes on; with more --trials, it adds trials. The same command in several
    processes shares the work.
    """
    with options.training_errors(), options.preparing() as started:
        followed = options.load_recipe(recipe, changes, loss=loss, data=own_data, target=target)
        from calibrant.arguments import whole_number
        from calibrant.evaluation.criterion import Criterion
        from calibrant.reports import chosen
        from calibrant.training import run_folder, tune
        from calibrant.training.lock import FolderLock
        from calibrant.training.runs import plain_name
        from calibrant.training.tuning import space_of

        whole_number("--trials", trials)
        Criterion.parse(by)
        space_of(followed)
        folder = output or Path("runs", plain_name(followed.name), f"tune-{plain_name(followed.loss)}")
        run_folder.check_for_several(folder)
        check_written(folder, chosen.TUNING_FILES, recipe, followed, data_root)
        fabric = options.launch(followed, accelerator, devices, nodes)
        result = tune(
            followed,
            folder,
            trials=trials,
            by=by,
            prune=prune,
            data_root=data_root,
            resamples=resamples,
            fabric=fabric,
            progress=True,
            report=started if fabric.is_global_zero else None,
        )
        if result is None:
            return
        with FolderLock(folder, "writing the results of a study"):  # all files are of one state of it
            chosen.write_tuning(result, folder)
    chosen.print_choice(result, wide=wide)
    say(f"{folder}: {', '.join(name for name in chosen.TUNING_FILES if (folder / name).is_file())}")
