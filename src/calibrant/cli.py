"""The command line: parse, call, print."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from calibrant.evaluation import Difference, Evaluation
    from calibrant.files import PredictionFile

EXACT_LIMIT = 1 << 30
"""Bytes of logits up to which a file is evaluated in memory unless told otherwise."""

app = typer.Typer(
    name="calibrant",
    help="Does a classifier's confidence mean what it says?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from calibrant import __version__

        typer.echo(f"calibrant {__version__}")
        raise typer.Exit


@app.callback()
def calibrant(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Does a classifier's confidence mean what it says?"""


@app.command()
def evaluate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Predictions: .npz, .npy (either file of a pair), .pt, .safetensors, .csv or .parquet, with "
            "logits or probabilities and labels.",
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
    bins: Annotated[int, typer.Option(min=1, help="Bins of confidence.")] = 15,
    ignore_index: Annotated[int, typer.Option(help="The label of elements to leave out.")] = -100,
    background: Annotated[
        int | None, typer.Option(min=0, help="The class that the foreground mean IoU leaves out.")
    ] = None,
    class_counts: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS",
            help="Training samples of each class, for figures of head, middle and tail: numbers with commas "
            "between, or a file with a JSON list or a number per line.",
        ),
    ] = None,
    per_image: Annotated[
        bool, typer.Option("--per-image", help="Average the figures of images, instead of over all pixels.")
    ] = False,
    resamples: Annotated[
        int, typer.Option(min=0, help="Bootstrap resamples behind the intervals; 0 for no intervals.")
    ] = 1000,
    level: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="Confidence level of the intervals.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling.")] = 0,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--exact",
            help="Read in constant memory, where equal-mass figures are approximate and some are missing; or "
            "load everything. By default a file is loaded if its logits take less than 1 GiB.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print how accurate and how calibrated predictions are.

    Several files make a comparison, which is sharpest where all hold predictions for the same labels in the
    same order.
    """
    from calibrant.files import BadFileError, open_predictions, read_class_counts, replace_file

    with _failing_in_one_line(BadFileError):
        _check_outputs(files, report, json)
        counts = None
        if class_counts is not None and re.fullmatch(r"\d+(,\d+)*", class_counts):
            counts = [int(count) for count in class_counts.split(",")]
        elif class_counts is not None:
            counts = read_class_counts(class_counts)
        opened = [open_predictions(file, ignore_index=ignore_index) for file in files]
        # Both files of a pair, as *.npy gives them, are one file of predictions.
        opened = list({file.path.resolve(): file for file in opened}.values())
        for file in opened[1:]:
            if file.num_classes != opened[0].num_classes:
                raise BadFileError(
                    file.path,
                    f"has {file.num_classes} classes, but {opened[0].path.name} has {opened[0].num_classes}; "
                    "models that are compared must have the same classes",
                )
        for file in opened:
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
        evaluations = [
            _evaluate(file, name, file.size > EXACT_LIMIT if stream is None else stream, options)
            for file, name in zip(opened, _distinct_names(opened), strict=True)
        ]
    _print(evaluations)
    with _failing_in_one_line(OSError):
        if json is not None:
            listed = ",\n".join(evaluation.to_json() for evaluation in evaluations)
            replace_file(json, f"[{listed}]\n".encode())
        if report is not None:
            from calibrant.reports.html import write_report

            write_report(evaluations, report)


# ------------------------------------------------------------------------------------------------- reading


def _fail(problem: str) -> NoReturn:
    typer.echo(f"calibrant: {problem}", err=True)
    raise typer.Exit(2)


@contextmanager
def _failing_in_one_line(error: type[Exception]) -> Iterator[None]:
    try:
        yield
    except error as problem:
        _fail(str(problem))


def _check_outputs(files: Sequence[Path], report: Path | None, json: Path | None) -> None:
    """Refuse before the work what could not, or should not, be written after it."""
    inputs = {file.resolve() for file in files}
    for option, path in (("--report", report), ("--json", json)):
        if path is None:
            continue
        if path.is_dir():
            _fail(f"{option} {path}: is a folder; expected the name of a file")
        if not path.parent.is_dir():
            _fail(f"{option} {path}: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            _fail(f"{option} {path}: the folder {path.parent} cannot be written to")
        if path.resolve() in inputs:
            _fail(f"{option} {path}: is one of the files to evaluate")
    if report is not None and json is not None and report.resolve() == json.resolve():
        _fail(f"--report and --json are the same file {json}")


def _check_options(
    file: PredictionFile, background: int | None, counts: Sequence[int] | None, per_image: bool
) -> None:
    if background is not None and background >= file.num_classes:
        _fail(f"{file.path}: has {file.num_classes} classes; --background {background} is none of them")
    if counts is not None and len(counts) != file.num_classes:
        _fail(f"{file.path}: has {file.num_classes} classes; --class-counts has {len(counts)} numbers")
    if per_image and not file.spatial:
        _fail(f"{file.path}: has one element in a row; --per-image needs logits of shape (N, K, *S)")


def _distinct_names(files: Sequence[PredictionFile]) -> list[str]:
    """File names where they differ, else paths."""
    names = [file.name for file in files]
    return [
        name if names.count(name) == 1 else str(file.path) for name, file in zip(names, files, strict=True)
    ]


def _evaluate(file: PredictionFile, name: str, stream: bool, options: dict[str, Any]) -> Evaluation:
    from calibrant.evaluation import Evaluator, evaluate
    from calibrant.files import BadFileError

    options = {**options, "name": name, "class_names": file.class_names}
    with _progress() as progress:
        reading = progress.add_task(f"{name}: reading", total=file.rows)
        resampling = progress.add_task(f"{name}: resampling", total=options["resamples"], visible=not stream)
        try:
            if not stream:
                predictions = file.load(lambda rows: progress.advance(reading, rows))
                return evaluate(
                    *predictions,
                    **options,
                    progress=lambda done, total: progress.update(resampling, completed=done, total=total),
                )
            evaluator = Evaluator(file.num_classes, **options)
            with closing(file.batches()) as batches:
                for logits, labels in batches:
                    evaluator.update(logits, labels)
                    progress.advance(reading, len(labels))
            return evaluator.compute()
        except BadFileError:
            raise
        except ValueError as problem:
            raise BadFileError(file.path, str(problem)) from problem


def _progress() -> Progress:
    """Bars on the terminal; nothing where the error output is none."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# ------------------------------------------------------------------------------------------------ printing


def _print(evaluations: Sequence[Evaluation]) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    # In a file or a pipe nothing limits the width, and folded columns would be hard to read.
    width = None if sys.stdout.isatty() else 100 + sum(20 + len(each.name) for each in evaluations)
    console = Console(width=width, highlight=False)
    if len(evaluations) == 1:
        console.print(evaluations[0])
        return
    table = _comparison(evaluations)
    # Wider than the terminal rather than with digits left out.
    console.width = max(console.width, Measurement.get(console, console.options, table).maximum)
    console.print(table)
    console.print(_caption(evaluations), markup=False)


def _comparison(evaluations: Sequence[Evaluation]) -> Table:
    """One column per model: * at the best value, and what differs significantly from the first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from calibrant.metrics.catalogue import METRICS

    first, *others = evaluations
    differences: list[dict[str, Difference]] = [{}]
    for other in others:
        # What was not resampled cannot be tested.
        both = first.replicates and other.replicates
        differences.append(first.compare(other) if both else {})
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for evaluation in evaluations:
        table.add_column(Text(evaluation.name), justify="right")
    table.add_row("Elements", *(f"{evaluation.samples:,}" for evaluation in evaluations))
    for name, description in METRICS.items():
        values = [evaluation.metrics[name] for evaluation in evaluations]
        known = [value for value in values if value is not None]
        if not known:
            continue
        best = description.text((max if description.higher_is_better else min)(known))
        figures = ["-" if value is None else description.text(value) for value in values]
        cells = []
        for figure, found in zip(figures, differences, strict=True):
            star = " *" if figure == best else ""
            verdict = ""
            # What prints alike is called alike, however certain a difference in later digits may be.
            if name in found and found[name].significant and figure != figures[0]:
                verdict = " worse" if found[name].better == "first" else " better"
            cells.append(Text(f"{figure}{star}{verdict}", style="bold" if star else ""))
        table.add_row(description.label, *cells)
    table.add_row("p-value of calibration", *(f"{evaluation.p_value:.3f}" for evaluation in evaluations))
    return table


def _caption(evaluations: Sequence[Evaluation]) -> str:
    first, *others = evaluations
    if not all(each.replicates for each in evaluations):
        return "* best; without resamples, as for means over images, differences are not tested"
    meaning = f"* best; better, worse: significantly so than {first.name}, at the level {first.level:g}"
    unpaired = [other.name for other in others if not first.is_paired_with(other)]
    if not unpaired:
        return f"{meaning}, by a paired bootstrap"
    return (
        f"{meaning}, by the bootstrap; not paired, as if from independent data, for {', '.join(unpaired)}: "
        "pairing needs the same labels in the same order, loaded (--exact), and at most 200 million elements "
        "times resamples"
    )
