"""`calibrant apply`: write the calibrated predictions of a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from calibrant.cli import terminal
from calibrant.cli.program import say


@terminal.app.command()
def apply(
    calibrator: Annotated[
        Path,
        typer.Argument(
            metavar="CALIBRATOR", help="A calibrator, written by calibrate --output.", show_default=False
        ),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Predictions; see evaluate.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(metavar="OUT", help="The file to write: .npz or .safetensors.")],
    ignore_index: terminal.IgnoreIndex = -100,
) -> None:
    """Write the calibrated predictions of a file."""
    from calibrant.calibrators import load_calibrator
    from calibrant.cli import prediction_files
    from calibrant.predictions import WRITERS, BadFileError, open_predictions, write_predictions

    with terminal.one_line_errors(OSError, ValueError):
        terminal.check_suffix(output, WRITERS)
        layer = load_calibrator(calibrator)
        predictions = open_predictions(file, ignore_index=ignore_index, binary=layer.binary)
        terminal.check_outputs([calibrator, *predictions.files], {"--output": output})
        what, fitted = "classes", layer.num_classes
        if layer.binary:
            what, fitted = "labels", len(layer.labels)
        if predictions.num_classes != fitted:
            raise BadFileError(
                predictions.path,
                f"has {predictions.num_classes} {what}, but {calibrator.name} was fitted to {fitted}",
            )
        prediction_files.check_class_names(predictions, layer.class_names, calibrator.name)
        with terminal.progress_bars() as progress:
            batches: Iterable[prediction_files.Batch]
            batches = prediction_files.Passes(predictions, progress, "calibrating")
            if predictions.size <= prediction_files.EXACT_LIMIT:
                batches = list(batches)
            rows = sum(len(labels) for _, labels in batches)  # a CSV file may have fewer rows than lines
            calibrate = prediction_files.calibrate_batch
            calibrated = ((calibrate(layer, predictions, *batch), batch[1]) for batch in batches)
            write_predictions(output, calibrated, rows, predictions.class_names)
    source, method = predictions.path.name, prediction_files.in_words(layer)
    say(f"{output}: {rows:,} rows of {source}, calibrated by {method}")
