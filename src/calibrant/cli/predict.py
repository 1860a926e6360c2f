"""`calibrant predict`: write the predictions of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrant.cli.program import say
from calibrant.cli.run_files import files_of_run
from calibrant.cli.terminal import app, check_outputs, fail
from calibrant.cli.training_options import DataRoot, training_errors


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    output: Annotated[Path, typer.Option(metavar="OUT", help="The file to write: .npz or .safetensors.")],
    split: Annotated[str, typer.Option(help="Part of the data: train, validation or test.")] = "test",
    on: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="Other data with the same classes, such as cifar10-c[corruption=fog,severity=3].",
            show_default="the data of the run",
        ),
    ] = "",
    data_root: DataRoot = None,
) -> None:
    """Write logits and labels of a trained model, for calibrant evaluate and calibrant calibrate."""
    from calibrant.predictions import WRITERS

    with training_errors():
        from calibrant.options import Choice
        from calibrant.training.data import files_of
        from calibrant.training.run_folder import RECIPE
        from calibrant.training.runs import Run

        if split not in ("train", "validation", "test"):
            fail(f"--split {split}: expected train, validation or test")
        if output.suffix.lower() not in WRITERS:
            fail(f"--output {output}: expected a name that ends in {' or '.join(WRITERS)}")
        if not run.exists():
            fail(f"{run} is not the folder of a run: it does not exist")
        inside = sorted(path.parent for path in (run / "runs").glob(f"*/{RECIPE}"))
        if inside and not (run / RECIPE).exists():
            fail(f"{run} is the folder of several runs; give one of them, such as {inside[0]}")
        finished = Run(run, data_root)
        other = Choice.parse(on) if on else None
        read = files_of_run(run, finished.recipe, data_root)
        read += files_of(other, data_root) if other else []
        check_outputs(read, {"--output": output})
        rows = finished.predict(split, output, on=other)  # type: ignore[arg-type]
    say(f"{output}: {rows:,} rows of {split}" + (f" of {other}" if other else ""))
