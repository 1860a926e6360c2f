"""`calibrant conformal`: fit prediction sets to held-out predictions."""

from __future__ import annotations

from dataclasses import asdict
from functools import reduce
from json import dumps
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrant.atomic import replace_file
from calibrant.cli import terminal
from calibrant.cli.program import say
from calibrant.printable import counted

if TYPE_CHECKING:
    from calibrant.calibrators import Calibrator
    from calibrant.conformal import ClassSets, ConformalSets, SetFigures
    from calibrant.predictions import PredictionFile

_MOST_CLASSES = 20  # classes in the printed table


@terminal.app.command()
def conformal(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Held-out predictions to fit to, new to the calibrator; see evaluate.",
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="lac, aps or raps; with options in brackets, such as raps[weight=0.05,size=3] or "
            "lac[class_conditional=true]."
        ),
    ] = "lac",
    alpha: Annotated[
        float,
        typer.Option(min=1e-6, max=0.999999, help="Accepted probability that a set misses the true class."),
    ] = 0.1,
    calibrator: Annotated[
        Path | None,
        typer.Option(metavar="CALIBRATOR", help="Calibrate first, by a file of calibrate --output."),
    ] = None,
    test: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Predictions to measure coverage and size on.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="SETS.safetensors",
            help="Write the fitted sets, for calibrant.conformal.load_conformal in Python.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Write the figures of all classes.")
    ] = None,
    ignore_index: terminal.IgnoreIndex = -100,
    wide: terminal.Wide = False,
) -> None:
    """Fit prediction sets that hold the true class at a chosen rate.

    With --test, coverage and size of the sets are measured on other data, of each class and of all, with
    intervals.
    """
    from calibrant.calibrators import load_calibrator
    from calibrant.cli import prediction_files
    from calibrant.conformal import expected_coverage, save_conformal
    from calibrant.predictions import open_predictions
    from calibrant.printable import NOT_INDEPENDENT

    with terminal.one_line_errors(OSError, ValueError):
        sets = _sets(method, alpha)
        if json is not None and test is None:
            terminal.fail("--json writes figures of other data: name them by --test FILE")
        layer = None if calibrator is None else load_calibrator(calibrator)
        if layer is not None and layer.binary:
            terminal.fail(
                f"--calibrator {calibrator} was fitted with --binary; conformal sets need a calibrator of "
                "classes"
            )
        held_out = open_predictions(file, ignore_index=ignore_index)
        files = [held_out] if test is None else [held_out, open_predictions(test, ignore_index=ignore_index)]
        inputs = [
            *([] if calibrator is None else [calibrator]),
            *(path for each in files for path in each.files),
        ]
        terminal.check_outputs(inputs, {"--output": output, "--json": json})
        terminal.check_suffix(output, [".safetensors"])
        terminal.check_names(json=json)
        for each in files:
            prediction_files.check_same_classes(held_out, each)
            prediction_files.check_class_names(each, held_out.class_names, held_out.path.name)
            if layer is not None and calibrator is not None:
                prediction_files.check_calibrator(each, layer, calibrator)
        with terminal.progress_bars() as progress, prediction_files.errors_of(held_out):
            batches = prediction_files.Passes(held_out, progress, f"fitting {sets.key}", layer)
            sets.class_names = held_out.class_names  # for warnings
            sets.fit_batches(batches, ignore_index=ignore_index)
        figures = None if test is None else _figures(sets, layer, files[1])
    with terminal.one_line_errors(OSError):  # written first: printing fails if nobody reads the output
        if output is not None:
            save_conformal(sets, output, class_names=held_out.class_names)
        if json is not None and figures is not None:
            content = {"method": sets.key, "options": sets.options(), **asdict(figures)}
            replace_file(json, (dumps(content) + "\n").encode())
    elements = batches.elements
    at_least = "About" if held_out.spatial else "At least"
    promise = f"{at_least} {100 * (1 - sets.alpha):g} % of the sets of new elements"
    promise += f"{' of each class' * sets.class_conditional} hold the true class, on average over many fits"
    if held_out.spatial:
        promise += f"; a single fit to few images or texts (here {held_out.rows:,}) may reach far more or "
        promise += f"less, because {NOT_INDEPENDENT}"
    elif not sets.class_conditional:
        low, high = (100 * end for end in expected_coverage(elements, sets.alpha))
        promise += f"; a single fit reaches {low:.1f} to {high:.1f} % in 95 % of cases"
        promise += ", more if many scores are equal"
    say(f"{sets.key}, fitted to {counted(elements, 'element')} of {held_out.path.name}. {promise}")
    if figures is not None:
        _print(figures, files[1], wide=wide)
        if prediction_files.same_content(*files):
            say(
                "Note: the sets were fitted to these same data, so the figures flatter them; pass other data "
                "as --test FILE."
            )


def _sets(method: str, alpha: float) -> ConformalSets:
    """The sets with their options, checked; not fitted yet."""
    from calibrant.arguments import unknown
    from calibrant.conformal import CONFORMAL, create_conformal
    from calibrant.options import Choice, check_options

    try:
        choice = Choice.parse(method)
        if choice.name not in CONFORMAL:
            raise ValueError(unknown("method", choice.name, CONFORMAL))
        if "alpha" in choice.options:
            raise ValueError("alpha is an option of its own: --alpha")
        options = check_options(choice.name, choice.options, CONFORMAL[choice.name].__init__)
        return create_conformal(choice.name, alpha=alpha, **options)
    except (TypeError, ValueError) as problem:
        terminal.fail(f"--method {method}: {problem}")


def _figures(sets: ConformalSets, layer: Calibrator | None, file: PredictionFile) -> SetFigures:
    """The figures of the sets of a file, read in one pass."""
    from calibrant.cli import prediction_files
    from calibrant.conformal import SetCounts

    with terminal.progress_bars() as progress, prediction_files.errors_of(file):
        batches = prediction_files.Passes(file, progress, "predicting sets", layer)
        counts = (
            SetCounts.of(sets(each), labels, ignore_index=file.ignore_index) for each, labels in batches
        )
        return reduce(add, counts).figures(class_names=file.class_names)


def _print(figures: SetFigures, file: PredictionFile, *, wide: bool) -> None:
    """Print the figures of all classes together and of those that are covered least."""
    from calibrant.printable import NOT_INDEPENDENT
    from calibrant.reports.tables import interval_text, listing, number_text, print_table

    known = [each for each in figures.classes if each.coverage is not None]
    known.sort(key=lambda each: each.coverage or 0.0)
    shown = known if wide else known[:_MOST_CLASSES]
    lines: list[tuple[str, int, ClassSets | SetFigures]] = [("all classes", figures.samples, figures)]
    lines += [(each.name, each.count, each) for each in shown]
    rows = [
        (
            name,
            f"{count:,}",
            number_text(each.coverage, unit=" %"),
            *([] if file.spatial else [interval_text(each.coverage_interval)]),
            number_text(each.size, percent=False, decimals=2),
        )
        for name, count, each in lines
    ]
    interval = {} if file.spatial else {f"{100 * figures.level:g} % interval": 2}
    headings = {"elements": 0, "coverage": 3, **interval, "mean size": 1}
    print_table(listing(rows, headings), heading=file.path.name, wide=wide)
    if left := len(known) - len(shown):
        say(f"{left:,} classes with higher coverage are not shown; --wide shows all")
    ends = ""
    if figures.size_interval is not None and not file.spatial:
        low, high = figures.size_interval
        ends = f" [{low:.3f}, {high:.3f}]"
    shares = f"{100 * figures.single:.1f} % of the sets have one class, {100 * figures.empty:.1f} % none"
    say(f"mean size {figures.size:.3f}{ends}; {shares}")
    if file.spatial:
        say(f"No intervals: {NOT_INDEPENDENT}.")
