"""The commands that judge and calibrate predictions: evaluate, calibrate, apply."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import combinations
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrant.cli.terminal import app, fail, failing_in_one_line

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table
    from torch import Tensor

    from calibrant.calibrators import Calibrator, Ranking
    from calibrant.evaluation import Difference, Evaluation
    from calibrant.files import PredictionFile
    from calibrant.options import Choice

    Batch = tuple[Tensor, Tensor]

EXACT_LIMIT = 1 << 30
"""Bytes of logits up to which a file is taken into memory unless told otherwise."""


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
    from calibrant.files import BadFileError, open_predictions, read_class_counts

    with failing_in_one_line(BadFileError):
        _check_outputs("files to evaluate", files, {"--report": report, "--json": json})
        counts = None
        if class_counts is not None and re.fullmatch(r"\d+(,\d+)*", class_counts):
            counts = [int(count) for count in class_counts.split(",")]
        elif class_counts is not None:
            counts = read_class_counts(class_counts)
        opened = [open_predictions(file, ignore_index=ignore_index) for file in files]
        # Both files of a pair, as *.npy gives them, are one file of predictions.
        opened = list({file.path.resolve(): file for file in opened}.values())
        for file in opened:
            _check_same_classes(opened[0], file)
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
    with failing_in_one_line(OSError):  # before anything is printed, to where nobody may read it
        _write(evaluations, report, json)
    _print(evaluations)


@app.command()
def calibrate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Held-out predictions to fit to, as for evaluate.", show_default=False
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="auto, which takes the best by cross-validation, or one of identity, temperature, "
            "local-temperature, ensemble-temperature, vector, structured-vector, matrix, structured-matrix, "
            "dirichlet, spline, isotonic, histogram-binning, bayesian-binning, beta, platt; with options in "
            "brackets, as histogram-binning[bins=20].",
        ),
    ] = "temperature",
    test: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Predictions to compare before and after on; else the fitted ones."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="CALIBRATOR.safetensors", help="Write the calibrator, for apply and for Python."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Write a page about before and after.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Write all figures: a list of two evaluations."),
    ] = None,
    ignore_index: Annotated[int, typer.Option(help="The label of elements to leave out.")] = -100,
    bins: Annotated[int, typer.Option(min=1, help="Bins of confidence.")] = 15,
    folds: Annotated[int, typer.Option(min=2, help="Parts of the cross-validation of auto.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling and of the folds.")] = 0,
    resamples: Annotated[
        int, typer.Option(min=0, help="Bootstrap resamples behind the intervals; 0 for no intervals.")
    ] = 1000,
) -> None:
    """Fit a calibrator to held-out predictions and print what it changes.

    Where the logits take more than 1 GiB, they are read again and again instead of loaded, by the methods
    that can be fitted so.
    """
    from calibrant.files import BadFileError, open_predictions

    with failing_in_one_line(BadFileError):
        chosen = _method(method)
        inputs = [file] if test is None else [file, test]
        outputs = {"--output": output, "--report": report, "--json": json}
        _check_outputs("files of predictions", inputs, outputs)
        if output is not None and output.suffix.lower() != ".safetensors":
            fail(f"--output {output}: expected a name that ends in .safetensors")
        held_out = open_predictions(file, ignore_index=ignore_index)
        judged = held_out if test is None else open_predictions(test, ignore_index=ignore_index)
        _check_same_classes(held_out, judged)
        _check_class_names(judged, held_out.class_names, held_out.path.name)
        fitted_to = held_out.path.resolve() == judged.path.resolve()
        _check_fits_in_memory(held_out, chosen.name)
        loaded = _load(judged)
        options = {"bins": bins, "ignore_index": ignore_index, "resamples": resamples, "seed": seed}
        # First, for what cannot be evaluated need not be fitted.
        before = _evaluate(judged, "before", loaded is None, options, loaded=loaded)
        calibrator, ranking = _fit(
            held_out, chosen, loaded if fitted_to else _load(held_out), folds=folds, seed=seed
        )
        after = _evaluate(judged, "after", loaded is None, options, loaded=loaded, calibrator=calibrator)
    with failing_in_one_line(OSError):  # before anything is printed, to where nobody may read it
        if output is not None:
            from calibrant.calibrators import save_calibrator

            save_calibrator(calibrator, output, class_names=held_out.class_names)
        _write([before, after], report, json)
    if ranking is not None:
        from rich.console import Console

        Console(highlight=False).print(ranking)
    typer.echo(f"{_in_words(calibrator)}, fitted to {held_out.path.name}")
    _print([before, after])
    if fitted_to:
        typer.echo(
            "Note: these are the data that the calibrator was fitted to, which flatters it; --test FILE "
            "compares on others."
        )


@app.command()
def apply(
    calibrator: Annotated[
        Path,
        typer.Argument(metavar="CALIBRATOR", help="What calibrate --output wrote.", show_default=False),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Predictions, as for evaluate.", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="OUT", help="Where to write them: .npz or .safetensors, with logits and labels."
        ),
    ],
    ignore_index: Annotated[int, typer.Option(help="The label of elements that do not count.")] = -100,
) -> None:
    """Write the calibrated predictions of a file."""
    from calibrant.calibrators import load_calibrator
    from calibrant.files import WRITERS, BadFileError, open_predictions, replacing

    with failing_in_one_line(OSError, ValueError):
        _check_outputs("files to read", [calibrator, file], {"--output": output})
        write = WRITERS.get(output.suffix.lower())
        if write is None:
            fail(f"--output {output}: expected a name that ends in {' or '.join(WRITERS)}")
        layer = load_calibrator(calibrator)
        predictions = open_predictions(file, ignore_index=ignore_index)
        if predictions.num_classes != layer.num_classes:
            raise BadFileError(
                predictions.path,
                f"has {predictions.num_classes} classes, but {calibrator.name} was fitted to "
                f"{layer.num_classes}",
            )
        _check_class_names(predictions, layer.class_names, calibrator.name)
        with _progress() as progress:
            batches = _Passes(predictions, progress, "reading")
            labels = [labels for _, labels in batches]
            batches.purpose = "calibrating"
            calibrated = (_calibrated(layer, predictions, *batch) for batch in batches)
            rows = sum(len(part) for part in labels)
            with replacing(output) as stream:
                write(
                    stream,
                    {
                        "logits": ((rows, predictions.num_classes, *predictions.spatial), calibrated),
                        "labels": ((rows, *predictions.spatial), labels),
                    },
                    predictions.class_names,
                )
    typer.echo(f"{output}: {rows:,} rows of {predictions.path.name}, calibrated by {_in_words(layer)}")


# ------------------------------------------------------------------------------------------------- reading


def _check_outputs(what: str, files: Sequence[Path], options: Mapping[str, Path | None]) -> None:
    """Refuse before the work what could not, or should not, be written after it."""
    inputs = {file.resolve() for file in files}
    outputs = {option: path for option, path in options.items() if path is not None}
    for option, path in outputs.items():
        if path.is_dir():
            fail(f"{option} {path}: is a folder; expected the name of a file")
        if not path.parent.is_dir():
            fail(f"{option} {path}: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            fail(f"{option} {path}: the folder {path.parent} cannot be written to")
        if path.resolve() in inputs:
            fail(f"{option} {path}: is one of the {what}")
    for first, second in combinations(outputs, 2):
        if outputs[first].resolve() == outputs[second].resolve():
            fail(f"{first} and {second} are the same file {outputs[second]}")


def _check_options(
    file: PredictionFile, background: int | None, counts: Sequence[int] | None, per_image: bool
) -> None:
    if background is not None and background >= file.num_classes:
        fail(f"{file.path}: has {file.num_classes} classes; --background {background} is none of them")
    if counts is not None and len(counts) != file.num_classes:
        fail(f"{file.path}: has {file.num_classes} classes; --class-counts has {len(counts)} numbers")
    if per_image and not file.spatial:
        fail(f"{file.path}: has one element in a row; --per-image needs logits of shape (N, K, *S)")


def _distinct_names(files: Sequence[PredictionFile]) -> list[str]:
    """File names where they differ, else paths."""
    names = [file.name for file in files]
    return [
        name if names.count(name) == 1 else str(file.path) for name, file in zip(names, files, strict=True)
    ]


def _evaluate(
    file: PredictionFile,
    name: str,
    stream: bool,
    options: dict[str, Any],
    *,
    loaded: Batch | None = None,
    calibrator: Calibrator | None = None,
) -> Evaluation:
    """Evaluate what is in a file, or what was loaded from it, or what a calibrator makes of it."""
    from calibrant.evaluation import Evaluator, evaluate
    from calibrant.files import BadFileError

    options = {**options, "name": name, "class_names": file.class_names}
    with _progress() as progress:
        reading = progress.add_task(f"{name}: reading", total=file.rows, visible=loaded is None)
        resampling = progress.add_task(f"{name}: resampling", total=options["resamples"], visible=not stream)
        try:
            if not stream:
                logits, labels = loaded or file.load(lambda rows: progress.advance(reading, rows))
                if calibrator is not None:
                    logits = _calibrated(calibrator, file, logits, labels)
                return evaluate(
                    logits,
                    labels,
                    **options,
                    progress=lambda done, total: progress.update(resampling, completed=done, total=total),
                )
            evaluator = Evaluator(file.num_classes, **options)
            with closing(file.batches()) as batches:
                for logits, labels in batches:
                    if calibrator is not None:
                        logits = _calibrated(calibrator, file, logits, labels)
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


# ---------------------------------------------------------------------------------------------- calibration


def _method(text: str) -> Choice:
    """The method with its options; what there is not, or would not be taken, is refused."""
    from calibrant.arguments import nearest
    from calibrant.calibrators import CALIBRATORS, create_calibrator
    from calibrant.options import Choice, check_options

    try:
        method = Choice.parse(text)
        known = ["auto", *CALIBRATORS]
        if method.name not in known:
            raise ValueError(
                f"there is no such method{nearest(method.name, known)}; known: {', '.join(known)}"
            )
        if method.name == "auto":
            if method.options:
                raise ValueError("auto takes no options; those in brackets belong to one method")
            return method
        kind = CALIBRATORS[method.name]
        method = Choice(method.name, check_options(method.name, method.options, kind.__init__))
        create_calibrator(method.name, **method.options)
    except (TypeError, ValueError) as problem:
        fail(f"--method {text}: {problem}")
    return method


def _check_class_names(file: PredictionFile, names: Sequence[str] | None, source: str) -> None:
    """Refuse to calibrate what is not about the classes that a calibrator is fitted to."""
    from calibrant.calibrators.storage import other_classes
    from calibrant.files import BadFileError

    problem = other_classes(file.class_names, names)
    if problem is not None:
        raise BadFileError(file.path, f"has other classes than {source}: {problem}")


def _check_same_classes(first: PredictionFile, other: PredictionFile) -> None:
    """Refuse to compare what is not about the same classes."""
    from calibrant.files import BadFileError

    if other.num_classes != first.num_classes:
        raise BadFileError(
            other.path, f"has {other.num_classes} classes, but {first.path.name} has {first.num_classes}"
        )
    names, expected = other.class_names, first.class_names
    # Other names may be translations, but the same ones in another order are other classes.
    if names and expected and names != expected and set(names) == set(expected):
        raise BadFileError(other.path, f"has the classes of {first.path.name} in another order")


def _check_fits_in_memory(file: PredictionFile, method: str) -> None:
    from calibrant.calibrators import CALIBRATORS
    from calibrant.calibrators.streaming import Scaling
    from calibrant.files import BadFileError

    passing = [key for key, kind in CALIBRATORS.items() if issubclass(kind, Scaling)]
    if file.size > EXACT_LIMIT and method not in passing:
        raise BadFileError(
            file.path,
            f"has {file.size / 2**30:.3g} GiB of logits, and --method {method} takes no more than "
            f"{EXACT_LIMIT / 2**30:.3g} GiB; those that read a file in passes are {', '.join(passing)}",
        )


class _Passes:
    """The batches of a file, as often as they are asked for; small files are kept after the first time."""

    def __init__(self, file: PredictionFile, progress: Progress, purpose: str) -> None:
        self.file, self.progress, self.purpose = file, progress, purpose
        self.kept: list[Batch] | None = [] if file.size <= EXACT_LIMIT else None
        self.passes = 0
        self.task = progress.add_task(f"{file.name}: {purpose}", total=file.rows)

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        description = f"{self.file.name}: {self.purpose}, pass {self.passes}"
        self.progress.reset(self.task, total=self.file.rows, description=description)
        if self.kept:
            for batch in self.kept:
                yield batch
                self.progress.advance(self.task, len(batch[1]))
            return
        batches: list[Batch] = []
        with closing(self.file.batches()) as source:
            for batch in source:
                if self.kept is not None:
                    batches.append(batch)
                yield batch
                self.progress.advance(self.task, len(batch[1]))
        if self.kept is not None:
            self.kept = batches


def _load(file: PredictionFile) -> Batch | None:
    """All predictions, or None where they are to be streamed."""
    if file.size > EXACT_LIMIT:
        return None
    with _progress() as progress:
        reading = progress.add_task(f"{file.name}: reading", total=file.rows)
        return file.load(lambda rows: progress.advance(reading, rows))


def _fit(
    file: PredictionFile,
    method: Choice,
    loaded: Batch | None,
    *,
    folds: int,
    seed: int,
) -> tuple[Calibrator, Ranking | None]:
    """The calibrator, fitted to what was loaded or else in passes; with the ranking it was taken from."""
    from calibrant.calibrators import choose, create_calibrator
    from calibrant.calibrators.streaming import Scaling
    from calibrant.files import BadFileError

    rankings: list[Ranking] = []
    with _progress() as progress:
        try:
            with _warnings_of(file):
                if loaded is None:
                    scaling = create_calibrator(method.name, **method.options)
                    assert isinstance(scaling, Scaling)
                    batches = _Passes(file, progress, f"fitting {method.name}")
                    return scaling.fit_batches(batches, ignore_index=file.ignore_index), None
                progress.add_task(f"{file.name}: fitting {method.name}", total=None)
                if method.name != "auto":
                    calibrator = create_calibrator(method.name, **method.options)
                    return calibrator.fit(*loaded, ignore_index=file.ignore_index), None
                calibrator = choose(
                    *loaded, folds=folds, ignore_index=file.ignore_index, seed=seed, show=rankings.append
                )
                return calibrator, rankings[0]
        except BadFileError:
            raise
        except ValueError as problem:
            raise BadFileError(file.path, str(problem)) from problem


@contextmanager
def _warnings_of(file: PredictionFile) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for kind in (UserWarning, RuntimeWarning):
            warnings.simplefilter("always", kind)
        yield
    for message in dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught):
        typer.echo(f"calibrant: warning: {file.path}: {message}", err=True)


def _calibrated(calibrator: Calibrator, file: PredictionFile, logits: Tensor, labels: Tensor) -> Tensor:
    from torch import cat, no_grad, split

    from calibrant.files import CHUNK, BadFileError

    # Some methods need a multiple of the logits' memory for what they return.
    rows = max(1, CHUNK // prod(logits.shape[1:]))
    with no_grad():
        calibrated = cat([calibrator(part) for part in split(logits, rows)])
    # NaN, plus infinity and nothing but minus infinity have no softmax.
    if not calibrated.logsumexp(1)[labels != file.ignore_index].isfinite().all():
        raise BadFileError(
            file.path, f"has infinite or too large logits, of which {calibrator.key} makes no probabilities"
        )
    return calibrated


def _in_words(calibrator: Calibrator) -> str:
    temperature = getattr(calibrator, "temperature", None)
    value = "" if temperature is None else f" (T = {float(temperature):.4g})"
    return f"{calibrator.key}{value}"


# ------------------------------------------------------------------------------------------------- writing


def _write(evaluations: Sequence[Evaluation], report: Path | None, json: Path | None) -> None:
    from calibrant.files import replace_file

    if json is not None:
        listed = ",\n".join(evaluation.to_json() for evaluation in evaluations)
        replace_file(json, f"[{listed}]\n".encode())
    if report is not None:
        from calibrant.reports.html import write_report

        write_report(evaluations, report)


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
        "pairing needs the same labels in the same order, loaded (evaluate --exact), and at most 200 million "
        "elements times resamples"
    )
