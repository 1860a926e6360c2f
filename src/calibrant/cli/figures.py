"""`calibrant figures`: draw the figures of finished runs, or of the formulas of losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrant.arguments import nearest
from calibrant.cli.program import say
from calibrant.cli.terminal import app, fail, progress_bars
from calibrant.cli.training_options import training_errors

if TYPE_CHECKING:
    from calibrant.reports.run_figures import Drawing, RunRecord
    from calibrant.training.recipe import Recipe
    from calibrant.training.runs import Run

_FORMULAS = "formulas"


@app.command()
def figures(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN…",
            help="Folders of finished runs or comparisons; the word formulas for the formulas of losses.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figures, as .png and .svg.")],
    losses: Annotated[
        str,
        typer.Option(
            metavar="KEY,KEY[OPTION=VALUE],…",
            help="Losses to draw, as the runs name them.",
            show_default="all",
        ),
    ] = "",
    bins: Annotated[
        str,
        typer.Option(metavar="N,N,…", help="Bins of confidence to draw, counted from 1.", show_default="all"),
    ] = "",
    smooth: Annotated[
        float,
        typer.Option(
            min=0, max=0.999, help="Factor of an exponential moving average of the curves over the epochs."
        ),
    ] = 0.0,
) -> None:
    """Draw curves, bins, confidences and learned state over the epochs, from the logs of finished runs."""
    missing: list[str] = []
    with training_errors():
        from calibrant.training import run_folder

        run_folder.check_writable(output)
        if _FORMULAS in runs:
            if len(runs) > 1:
                fail(f"formulas stands alone, got {' '.join(runs)}; for a folder of this name: ./formulas")
            from calibrant.reports.run_figures import drawings_of_formulas

            drawings = drawings_of_formulas()
        else:
            from calibrant.reports.run_figures import drawings_of_runs, left_out

            records = _records(_with_losses(list(_runs(runs)), losses))
            missing = left_out(records)
            drawings = drawings_of_runs(records, bins=_bins(bins, records), smooth=smooth)
        _write(drawings, output)
    for line in missing:
        say(line)
    say(f"{output}: {', '.join(name for name, _ in drawings)} (.png, .svg)")


def _runs(given: Sequence[str]) -> Iterable[Run]:
    """The runs in the given folders, each once; those of a comparison in the order of its results."""
    from calibrant.reports.comparison_page import methods_in
    from calibrant.training import run_folder
    from calibrant.training.runs import Run

    seen = set()
    for text in given:
        folder = Path(text)
        inside = sorted(path.parent for path in (folder / "runs").glob(f"*/{run_folder.RECIPE}"))
        own = (folder / run_folder.RECIPE).is_file()
        if not own and not inside:
            reason = "" if folder.exists() else f": it does not exist{nearest(text, [_FORMULAS])}"
            fail(f"{folder} is not the folder of a run or of a comparison{reason}")
        # As in the comparison, so that both draw a loss in one colour.
        order = {loss: place for place, loss in enumerate(methods_in(folder))}
        found = [Run(place) for place in ([folder] if own else inside)]
        found.sort(key=lambda run: (order.get(run.recipe.loss, len(order)), run.recipe.loss, run.recipe.seed))
        for run in found:
            if run.folder.resolve() not in seen:
                seen.add(run.folder.resolve())
                yield run


def _with_losses(runs: list[Run], text: str) -> list[Run]:
    """The runs of the losses in ``text``; all for an empty text."""
    from calibrant.options import Choice, split_outside_brackets

    chosen = {str(Choice.parse(loss)) for loss in split_outside_brackets(text)}
    known = list(dict.fromkeys(run.recipe.loss for run in runs))
    for loss in chosen.difference(known):
        fail(f"--losses {loss}: no run has this loss; expected some of {', '.join(known)}")
    return [run for run in runs if not chosen or run.recipe.loss in chosen]


def _labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: the loss if that is enough to tell the runs apart up to their seeds."""
    for names in (
        [run.recipe.loss for run in runs],
        [f"{run.recipe.name}, {run.recipe.loss}" for run in runs],
    ):
        pairs = [(name, run.recipe) for name, run in zip(names, runs, strict=True)]
        first: dict[str, Recipe] = {}
        alike = [replace(first.setdefault(name, each), seed=each.seed) == each for name, each in pairs]
        seeds = {(name, recipe.seed) for name, recipe in pairs}
        if all(alike) and len(seeds) == len(runs):
            return names
    return [str(run.folder) for run in runs]


def _records(runs: Sequence[Run]) -> list[RunRecord]:
    from calibrant.reports.run_figures import RunRecord
    from calibrant.training.runs import plain_name

    records = []
    for run, label in zip(runs, _labels(runs), strict=True):
        # Predictions that are too large to be stored would take a pass over the test data.
        stored = (run.folder / "test.npz").is_file()
        test = run.as_classes(*next(iter(run.predictions("test")))) if stored else None
        recipe = run.recipe
        file = f"{plain_name(label)}-seed{recipe.seed}"
        records.append(
            RunRecord(label, file, run.history, run.bins, run.learned, test, recipe.seed, recipe.binary)
        )
    return records


def _bins(text: str, records: Sequence[RunRecord]) -> list[int] | None:
    if not text:
        return None
    most = min((run.bins["validation_count"].shape[1] for run in records if run.bins), default=0)
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and 1 <= int(number) <= most for number in numbers):
        fail(f"--bins {text}: expected numbers from 1 to {most}, separated by commas")
    return [int(number) - 1 for number in dict.fromkeys(numbers)]


def _write(drawings: Sequence[Drawing], folder: Path) -> None:
    """Draw everything, and only then write."""
    from calibrant.atomic import replace_files
    from calibrant.reports.plots.drawing import default_style, png, svg

    files = {}
    with progress_bars() as progress, default_style():
        task = progress.add_task("drawing", total=len(drawings))
        for name, draw in drawings:
            figure = draw()
            files[f"{name}.png"], files[f"{name}.svg"] = png(figure), svg(figure)
            progress.advance(task)
    replace_files(folder, files)
