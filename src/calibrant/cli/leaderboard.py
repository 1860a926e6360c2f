"""`calibrant leaderboard`: many losses on several data sets, from several processes, and their ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from calibrant.cli import training_options as options
from calibrant.cli.program import say
from calibrant.cli.terminal import On, Resamples, Wide, app, fail


@app.command()
def leaderboard(
    board: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A TOML file with recipes, losses and seeds."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the runs, leaderboard.json, .md, .tex and .html, and plots.",
            show_default="runs/FILE",
        ),
    ] = None,
    data_root: options.DataRoot = None,
    jobs: options.Jobs = 1,
    on: On = "processes",
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="Train nothing; write the tables of what is done.")
    ] = False,
    resamples: Resamples = 1000,
    wide: Wide = False,
) -> None:
    """Train every loss of several recipes from every seed, and rank the losses over all of them.

    Runs that are done are kept, even if only their small files are left. The command may be given several
    times at once: every run is done once.
    """
    with options.training_errors():
        from calibrant.reports import leaderboard_files
        from calibrant.reports.tables import print_table
        from calibrant.training import leaderboard, run_folder
        from calibrant.training.lock import FolderLock

        plan = leaderboard.Leaderboard.load(board)
        folder = output or Path("runs", board.stem)
        run_folder.check_for_several(folder)
        shared: dict[str, Any] = {"data_root": data_root, "resamples": resamples}

        def report(line: str) -> None:
            say(line, err=True)

        if not tables_only:
            leaderboard.work(plan, folder, jobs=jobs, on=on, progress=True, report=report, **shared)
        standings = leaderboard.standings(plan, folder, **shared)
        if all(each.comparison is None for each in standings):
            fail(f"{folder} has no run of {board} that is done")
        with FolderLock(folder, "writing the results of a leaderboard"):  # all files are of one state of it
            ranked = leaderboard_files.write_leaderboard(plan.title, standings, folder, report=report)
        for each in ranked:
            say(f"{each.heading}:")
            print_table(each.table, each.note, wide=wide)
        if not ranked:
            say("no ranks: no two losses have results in every ranked experiment", err=True)
    missing = sum(len(each.missing) for each in standings)
    if missing:
        say(f"missing runs: {missing}; leaderboard.md names them", err=True)
    say(f"{folder}: {', '.join(leaderboard_files.FILES)}, plots")
