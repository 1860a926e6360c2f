"""`calibrant evaluate`: how accurate and how calibrated predictions are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from calibrant.arguments import LARGEST_INT
from calibrant.cli import terminal
from calibrant.cli.program import complain, say
from calibrant.extras import MissingPackageError
from calibrant.printable import first_few


@terminal.app.command()
def evaluate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Files with logits or probabilities, and labels: .npz, .npy (either file of a pair), .pt, "
            ".safetensors, .csv, .parquet or .jsonl. Or folders of such files: a folder is one set.",
        ),
    ],
    report: terminal.Report = None,
    json: terminal.Json = None,
    bins: terminal.Bins = 15,
    ignore_index: terminal.IgnoreIndex = -100,
    binary: terminal.Binary = False,
    background: Annotated[
        int | None, typer.Option(min=0, help="Class to leave out of the foreground mean IoU.")
    ] = None,
    class_counts: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS",
            help="Training samples of each class, for figures of head, mid and tail classes: numbers "
            "separated by commas, or a file with a JSON list or one number per line.",
        ),
    ] = None,
    per_image: Annotated[
        bool, typer.Option("--per-image", help="Average the figures of single images.")
    ] = False,
    resamples: terminal.Resamples = 1000,
    level: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="Confidence level of the intervals.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_INT, help="Seed of the resampling.")] = 0,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--exact",
            help="Read in constant memory (equal-mass figures are approximate, some are missing), or load "
            "everything. By default a file is loaded if its logits take less than 1 GiB.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Read this many files of a folder at the same time, each in a process of its own. More "
            "than one job implies --stream. By default 1; with --on ray, the CPUs of the cluster.",
        ),
    ] = None,
    on: terminal.On = "processes",
    ensemble: Annotated[
        bool,
        typer.Option(
            "--ensemble",
            help="The files are the members of an ensemble: evaluate their mean probabilities, and compare "
            "them with each member.",
        ),
    ] = False,
    wide: terminal.Wide = False,
) -> None:
    """Print how accurate and how calibrated predictions are.

    Several files or folders are compared. If they have the same labels in the same order, the
    comparison is paired and detects smaller differences.
    """
    from calibrant.cli import prediction_files
    from calibrant.evaluation import WorkerError
    from calibrant.predictions import BadFileError, open_predictions, read_class_counts

    in_workers = on == "ray" or (jobs or 1) > 1
    if in_workers and stream is False:
        terminal.fail(
            "--exact loads everything into this process; leave out --jobs and --on, or use --stream"
        )
    if ensemble and in_workers:
        terminal.fail("--ensemble reads its files side by side in one process; leave out --jobs and --on")
    with terminal.one_line_errors(BadFileError, WorkerError, MissingPackageError):
        inputs, counts = [], None
        if class_counts is not None and re.fullmatch(r"\d{1,15}(,\d{1,15})*", class_counts):
            counts = [int(count) for count in class_counts.split(",")]
        elif class_counts is not None:
            if "," in class_counts and not Path(class_counts).exists():
                terminal.fail(
                    f"--class-counts {class_counts}: expected whole numbers separated by commas, or the name "
                    "of a file with them"
                )
            counts = read_class_counts(class_counts)
            inputs.append(Path(class_counts))
        opened = [open_predictions(file, ignore_index=ignore_index, binary=binary) for file in files]
        given = [os.path.realpath(file) for file in files]
        if repeated := [str(file) for file, path in zip(files, given, strict=True) if given.count(path) > 1]:
            complain(f"warning: {first_few(dict.fromkeys(repeated))}: given more than once, evaluated once")
        # The shell expands *.npy to both files of a pair.
        opened = list({os.path.realpath(file.path): file for file in opened}.values())
        if ensemble and len(opened) < 2:
            terminal.fail("--ensemble needs the files of at least two members")
        if (jobs or 1) > 1 and not any(file.shards for file in opened):
            terminal.fail(
                f"--jobs reads the files of a folder side by side; {opened[0].path} is a single file"
            )
        inputs += [path for file in opened for path in file.files]
        terminal.check_outputs(inputs, {"--report": report, "--json": json})
        terminal.check_names(report, json)
        for file in opened:
            prediction_files.check_same_classes(opened[0], file)
            problem, classes = "", file.values
            if background is not None and background >= classes:
                problem = f"has {classes} classes; there is no --background {background} among them"
            elif counts is not None and len(counts) != classes:
                problem = f"has {classes} classes; --class-counts has {len(counts)} numbers"
            elif per_image and not file.spatial:
                problem = "has one element per row; --per-image needs logits of shape (N, K, *S)"
            if problem:
                terminal.fail(f"{file.path}: {problem}")
        options: dict[str, Any] = {
            "bins": bins,
            "ignore_index": ignore_index,
            "background": background,
            "class_counts": counts,
            "per_image": per_image,
            "binary": binary,
            "resamples": resamples,
            "level": level,
            "seed": seed,
        }
        evaluations, names = [], [file.name for file in opened]
        if ensemble:
            found, differences = prediction_files.evaluate_ensemble(opened, options, stream)
            evaluations.append(found)
        for file in opened:
            name = file.name if names.count(file.name) == 1 else str(file.path)
            if in_workers:
                found = prediction_files.evaluate_in_workers(
                    file, name, options, jobs=jobs or (None if on == "ray" else 1), on=on
                )
            else:
                loaded = prediction_files.load(file, stream)
                found = prediction_files.evaluate_file(file, name, loaded, options)
                del loaded  # before the next file is loaded
            evaluations.append(found)
    with terminal.one_line_errors(OSError):  # written first: printing fails if nobody reads the output
        prediction_files.write_evaluations(evaluations, report, json)
    prediction_files.print_evaluations(evaluations, wide=wide)
    if ensemble:
        say(differences)
