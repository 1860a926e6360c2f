"""`calibrant predict`: write the predictions of a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrant.cli.program import say
from calibrant.cli.run_files import files_of_run
from calibrant.cli.terminal import app, check_outputs, check_suffix, fail, progress_bars
from calibrant.cli.training_options import DataRoot, training_errors
from calibrant.printable import counted, first_few

if TYPE_CHECKING:
    from torch import Tensor


@app.command()
def predict(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a finished run or, with --input, of a bundle."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="OUT",
            help="The file to write: .npz or .safetensors; with --input, .csv, .npz or .parquet.",
        ),
    ],
    new: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FOLDER|FILE",
            help="New inputs without labels, of the kind that the model was trained on: a folder of images, "
            "a table, or an .npz or .npy file.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Part of the run's data: train, validation or test.", show_default="test"),
    ] = None,
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
    """Write the predictions of a trained model.

    With --input, these are calibrated probabilities and the predicted class of each new input; of several
    labels, the probability of each. Otherwise they are logits and labels of the run's own data, for
    calibrant evaluate and calibrant calibrate.
    """
    with training_errors(resumes=False):
        if new is None:
            _predict_data(run, output, split or "test", on, data_root)
        elif split or on:
            fail(f"--input and {'--split' if split else '--on'}: expected one of them")
        else:
            _predict_new(run, output, new)


def _predict_new(path: Path, output: Path, new: Path) -> None:
    from calibrant import load
    from calibrant.predictions import PROBABILITY_SUFFIXES, write_probabilities

    check_suffix(output, PROBABILITY_SUFFIXES)
    if not new.exists():
        fail(f"--input {new}: there is no such file or folder")
    bundle = load(path)
    if bundle.preparation is None:
        fail(f"{bundle.folder} does not say how to prepare new inputs")
    raw, names = bundle.preparation.read(new)
    if not names:
        fail(f"--input {new}: has no inputs")
    files = [each for each in raw if isinstance(each, Path)] if new.is_dir() else [new]
    check_outputs([*bundle.folder.iterdir(), *files], {"--output": output})
    with progress_bars() as progress:
        task = progress.add_task(f"{new.name}: predicting", total=len(names))

        def batches() -> Iterator[Tensor]:
            for probabilities in bundle.batches(raw):
                yield probabilities
                progress.advance(task, len(probabilities))

        left_out = write_probabilities(
            output,
            batches(),
            names,
            bundle.classes,
            several_labels=bundle.several_labels,
            beside=bundle.preparation.beside(new, raw),
        )
    without = f", without its other columns {first_few(map(repr, left_out))}" if left_out else ""
    say(f"{output}: {counted(len(names), 'input')} of {new}{without}")


def _predict_data(run: Path, output: Path, split: str, on: str, data_root: Path | None) -> None:
    from calibrant.options import Choice
    from calibrant.predictions import WRITERS
    from calibrant.training.data import files_of
    from calibrant.training.run_folder import MANIFEST, RECIPE
    from calibrant.training.runs import Run

    if split not in ("train", "validation", "test"):
        fail(f"--split {split}: expected train, validation or test")
    check_suffix(output, WRITERS)
    if not run.exists():
        fail(f"{run} is not the folder of a run: it does not exist")
    if (run / MANIFEST).exists():
        fail(f"{run} is a bundle, which has no data of its own: expected --input, or the folder of its run")
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
