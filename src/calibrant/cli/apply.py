"""`calibrant apply`: write the calibrated predictions of a file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrant.cli import terminal
from calibrant.cli.program import say
from calibrant.printable import first_few

if TYPE_CHECKING:
    from calibrant.calibrators import Calibrator


@terminal.app.command()
def apply(
    calibrator: Annotated[
        Path,
        typer.Argument(metavar="CALIBRATOR", help="A calibrator, written by calibrate --output."),
    ],
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Predictions, also without labels; see evaluate."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="OUT",
            help="The file to write: .npz or .safetensors; or .csv, if FILE is a CSV table.",
        ),
    ],
    ignore_index: terminal.IgnoreIndex = -100,
) -> None:
    """Write the calibrated predictions of a file."""
    from calibrant.cli import prediction_files
    from calibrant.predictions import WRITERS, open_predictions, rewrite_table, write_predictions

    with terminal.one_line_errors(OSError, ValueError):
        layer = _loaded(calibrator, file)
        as_table = output.suffix.lower() == ".csv"
        if as_table and (file.is_dir() or file.suffix.lower() != ".csv"):
            terminal.fail(f"--output {output}: {file} is not a .csv file; expected .npz or .safetensors")
        if not as_table:
            terminal.check_suffix(output, WRITERS)
        reading: dict[str, Any] = {"ignore_index": ignore_index, "binary": layer.binary}
        predictions = open_predictions(file, labelled=False, **reading)
        terminal.check_outputs([calibrator, *predictions.files], {"--output": output})
        if file.is_dir() and output.resolve().parent == file.resolve():
            terminal.fail(
                f"--output {output}: lies in the folder to read, where other commands would take it for a "
                "part of the predictions; expected another folder"
            )
        prediction_files.check_calibrator(predictions, layer, calibrator)
        with terminal.progress_bars() as progress:
            rows = predictions.rows
            if any(part.stored_labels is None for part in predictions.parts):
                # A table: a CSV file may have fewer rows than lines.
                lines = prediction_files.Passes(predictions, progress, "counting rows")
                rows = sum(len(labels) for _, labels in lines)
            calibrated = prediction_files.Passes(predictions, progress, "calibrating", layer)
            if as_table:
                rewrite_table(output, predictions, (logits for logits, _ in calibrated))
            else:
                labelled = not predictions.no_labels
                write_predictions(output, calibrated, rows, predictions.class_names, labelled=labelled)
    source, method = predictions.path.name, prediction_files.in_words(layer)
    left_out = {} if as_table else dict.fromkeys(name for part in predictions.parts for name in part.beside)
    without = f"; without its other columns {first_few(map(repr, left_out))}" if left_out else ""
    say(f"{output}: {rows:,} rows of {source}, calibrated by {method}{without}")


def _loaded(calibrator: Path, file: Path) -> Calibrator:
    """The calibrator, with a better error where both arguments were swapped."""
    from calibrant.calibrators import load_calibrator
    from calibrant.predictions import open_predictions

    try:
        return load_calibrator(calibrator)
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            load_calibrator(file)
            if not calibrator.is_dir():  # a folder is no calibrator, whatever else is in it
                open_predictions(calibrator, labelled=False)
            terminal.fail(f"{calibrator} is no calibrator, but {file} is; expected the calibrator first")
        raise
