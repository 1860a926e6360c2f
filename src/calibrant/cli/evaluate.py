"""`calibrant evaluate`: how accurate and how calibrated predictions are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrant.cli.terminal import app, check_outputs, fail, one_line_errors

if TYPE_CHECKING:
    from calibrant.predictions import PredictionFile


@app.command()
def evaluate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Files with logits or probabilities, and labels: .npz, .npy (either file of a pair), .pt, "
            ".safetensors, .csv or .parquet.",
            show_default=False,
        ),
    ],
    report: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Write a page with tables and diagrams.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Write all figures: a list with one evaluation per file."),
    ] = None,
    bins: Annotated[int, typer.Option(min=1, help="Number of confidence bins.")] = 15,
    ignore_index: Annotated[int, typer.Option(help="Label of elements to leave out.")] = -100,
    background: Annotated[
        int | None, typer.Option(min=0, help="Class to leave out of the foreground mean IoU.")
    ] = None,
    class_counts: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS",
            help="Training samples of each class, for figures of head, middle and tail classes: numbers "
            "separated by commas, or a file with a JSON list or one number per line.",
        ),
    ] = None,
    per_image: Annotated[
        bool,
        typer.Option("--per-image", help="Average the figures of single images."),
    ] = False,
    resamples: Annotated[
        int, typer.Option(min=0, help="Bootstrap resamples for the intervals; 0 for no intervals.")
    ] = 1000,
    level: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="Confidence level of the intervals.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling.")] = 0,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--exact",
            help="Read in constant memory (equal-mass figures are approximate, some are missing), or load "
            "everything. By default a file is loaded if its logits take less than 1 GiB.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print how accurate and how calibrated predictions are.

    Several files are compared. Small differences show best if all files have the same labels in the same
    order.
    """
    from calibrant.cli import prediction_files, tables
    from calibrant.predictions import BadFileError, open_predictions, read_class_counts

    with one_line_errors(BadFileError):
        check_outputs(files, {"--report": report, "--json": json})
        counts = None
        if class_counts is not None and re.fullmatch(r"\d+(,\d+)*", class_counts):
            counts = [int(count) for count in class_counts.split(",")]
        elif class_counts is not None:
            counts = read_class_counts(class_counts)
        opened = [open_predictions(file, ignore_index=ignore_index) for file in files]
        # The shell expands *.npy to both files of a pair.
        opened = list({file.path.resolve(): file for file in opened}.values())
        for file in opened:
            prediction_files.check_same_classes(opened[0], file)
            _check_options(file, background, counts, per_image)
        options: dict[str, Any] = {
            "bins": bins,
            "ignore_index": ignore_index,
            "background": background,
            "class_counts": counts,
            "per_image": per_image,
            "resamples": resamples,
            "level": level,
            "seed": seed,
        }
        evaluations = []
        for file, name in zip(opened, _distinct_names(opened), strict=True):
            streamed = file.size > prediction_files.EXACT_LIMIT if stream is None else stream
            evaluations.append(prediction_files.evaluate_file(file, name, streamed, options))
    with one_line_errors(OSError):  # written first: printing fails if nobody reads the output
        prediction_files.write_evaluations(evaluations, report, json)
    tables.print_evaluations(evaluations)


def _check_options(
    file: PredictionFile, background: int | None, counts: Sequence[int] | None, per_image: bool
) -> None:
    if background is not None and background >= file.num_classes:
        fail(f"{file.path}: has {file.num_classes} classes; there is no --background {background} among them")
    if counts is not None and len(counts) != file.num_classes:
        fail(f"{file.path}: has {file.num_classes} classes; --class-counts has {len(counts)} numbers")
    if per_image and not file.spatial:
        fail(f"{file.path}: has one element per row; --per-image needs logits of shape (N, K, *S)")


def _distinct_names(files: Sequence[PredictionFile]) -> list[str]:
    """The names of the files; paths for those with equal names."""
    names = [file.name for file in files]
    return [file.name if names.count(file.name) == 1 else str(file.path) for file in files]
