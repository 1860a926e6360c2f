"""`calibrant calibrate`: fit a calibrator to held-out predictions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrant.arguments import LARGEST_INT
from calibrant.cli import terminal
from calibrant.cli.program import say

if TYPE_CHECKING:
    from calibrant.calibrators import Calibrator, Ranking
    from calibrant.cli.prediction_files import Batch
    from calibrant.predictions import PredictionFile


@terminal.app.command()
def calibrate(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Held-out predictions to fit to; see evaluate."),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="auto, which takes the best by cross-validation, or one of identity, temperature, "
            "local-temperature, ensemble-temperature, vector, structured-vector, matrix, structured-matrix, "
            "dirichlet, spline, isotonic, histogram-binning, bayesian-binning, beta, platt; with options in "
            "brackets, such as histogram-binning[bins=20]."
        ),
    ] = "temperature",
    test: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Predictions to evaluate before and after.", show_default="FILE"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="CALIBRATOR.safetensors", help="Write the calibrator.")
    ] = None,
    report: terminal.Report = None,
    json: terminal.Json = None,
    ignore_index: terminal.IgnoreIndex = -100,
    binary: terminal.Binary = False,
    bins: terminal.Bins = 15,
    folds: Annotated[int, typer.Option(min=2, max=1000, help="Folds of the cross-validation for auto.")] = 5,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_INT, help="Seed of the resampling and the folds.")
    ] = 0,
    resamples: terminal.Resamples = 1000,
    wide: terminal.Wide = False,
) -> None:
    """Fit a calibrator to held-out predictions and print what it changes.

    Files with more than 1 GiB of logits are not loaded but read in several passes, by the methods that
    support it.
    """
    from calibrant.calibrators import CALIBRATORS
    from calibrant.calibrators.streaming import Scaling
    from calibrant.cli import prediction_files
    from calibrant.predictions import BadFileError, open_predictions

    with terminal.one_line_errors(BadFileError):
        named = _calibrator(method)
        key = "auto" if named is None else named.key
        reading: dict[str, Any] = {"ignore_index": ignore_index, "binary": binary}
        held_out = open_predictions(file, **reading)
        evaluated = held_out if test is None else open_predictions(test, **reading)
        outputs = {"--output": output, "--report": report, "--json": json}
        terminal.check_outputs([*held_out.files, *evaluated.files], outputs)
        terminal.check_suffix(output, [".safetensors"])
        terminal.check_names(report, json)
        prediction_files.check_same_classes(held_out, evaluated)
        prediction_files.check_class_names(evaluated, held_out.class_names, held_out.path.name)
        same = prediction_files.same_content(held_out, evaluated)
        in_passes = [key for key, kind in CALIBRATORS.items() if issubclass(kind, Scaling) and not binary]
        limit = prediction_files.EXACT_LIMIT
        if held_out.size > limit and key not in in_passes:
            raise BadFileError(
                held_out.path,
                f"has {held_out.size / 2**30:.3g} GiB of logits, and --method {key} takes no more "
                f"than {limit / 2**30:.3g} GiB; methods that read a file in passes: "
                f"{', '.join(in_passes) or 'none with --binary'}",
            )
        loaded = prediction_files.load(evaluated)
        options = {**reading, "bins": bins, "resamples": resamples, "seed": seed}
        # First, because data that cannot be evaluated need not be fitted.
        before = prediction_files.evaluate_file(evaluated, "before", loaded, options)
        fitted_to = loaded if same else prediction_files.load(held_out)
        shared = 0
        if not same and loaded is not None and fitted_to is not None:
            shared = prediction_files.shared_rows(loaded, fitted_to)
        calibrator, ranking = _fit(held_out, named, fitted_to, folds=folds, seed=seed)
        after = prediction_files.evaluate_file(evaluated, "after", loaded, options, calibrator)
    with terminal.one_line_errors(OSError):  # written first: printing fails if nobody reads the output
        if output is not None:
            from calibrant.calibrators import save_calibrator

            save_calibrator(calibrator, output, class_names=held_out.class_names)
        fitted = f"{prediction_files.in_words(calibrator)}, fitted to {held_out.path.name}"
        flattered = ""
        if same or shared:
            what = "the same data" if same else f"{shared:,} of the {evaluated.rows:,} rows are the same"
            flattered = f" ({what}, so the figures flatter it)"
        prediction_files.write_evaluations([before, after], report, json, fitted=fitted + flattered)
    if ranking is not None:
        from calibrant.reports.tables import listing, print_table

        table = listing(ranking.texts, {"Held-out NLL": 2, "against doing nothing": 1, "seconds": 0})
        print_table(table, heading="calibrator", wide=wide)
        if ranking.note:
            say(f"Note: {ranking.note}.")
    say(fitted)
    prediction_files.print_evaluations([before, after], wide=wide)
    if shared:
        say(
            f"Note: the calibrator was also fitted to {shared:,} of the {evaluated.rows:,} rows of "
            f"{evaluated.path.name}, so the figures flatter it; evaluate on other data."
        )
    if same:
        say(
            "Note: the calibrator was fitted to these same data, so the figures flatter it; evaluate on "
            "other data with --test FILE."
        )


def _calibrator(text: str) -> Calibrator | None:
    """The calibrator that a method names, with its options; None for auto."""
    from calibrant.arguments import unknown
    from calibrant.calibrators import CALIBRATORS, create_calibrator
    from calibrant.options import Choice, check_options

    try:
        method = Choice.parse(text)
        if method.name == "auto":
            if method.options:
                raise ValueError("auto takes no options; the options in brackets belong to one method")
            return None
        if method.name not in CALIBRATORS:
            raise ValueError(unknown("method", method.name, ["auto", *CALIBRATORS]))
        options = check_options(method.name, method.options, CALIBRATORS[method.name].__init__)
        return create_calibrator(method.name, **options)
    except (TypeError, ValueError) as problem:
        terminal.fail(f"--method {text}: {problem}")


def _fit(
    file: PredictionFile, calibrator: Calibrator | None, loaded: Batch | None, *, folds: int, seed: int
) -> tuple[Calibrator, Ranking | None]:
    """A calibrator fitted to loaded predictions or, without them, in passes over the file.

    Without a calibrator the best one is chosen, and the ranking of all comes second.
    """
    from calibrant.calibrators import create_calibrator, rank
    from calibrant.calibrators.streaming import Scaling
    from calibrant.cli.prediction_files import Passes, errors_of

    ranking: Ranking | None = None
    reading: dict[str, Any] = {"ignore_index": file.ignore_index, "binary": file.binary}
    with terminal.progress_bars() as progress, errors_of(file):
        if loaded is not None and calibrator is None:
            progress.add_task(f"{file.name}: fitting auto", total=None)
            with warnings.catch_warnings(action="ignore"):  # the fit below warns of the same
                ranking = rank(*loaded, folds=folds, seed=seed, **reading)
            calibrator = create_calibrator(ranking.best.key)
        assert calibrator is not None
        calibrator.class_names = file.class_names  # for warnings
        if loaded is not None:
            progress.add_task(f"{file.name}: fitting {calibrator.key}", total=None)
            return calibrator.fit(*loaded, **reading), ranking
        assert isinstance(calibrator, Scaling)
        batches = Passes(file, progress, f"fitting {calibrator.key}")
        return calibrator.fit_batches(batches, ignore_index=file.ignore_index), None
