"""Trains every loss from every seed, and compares the runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

from calibrant.arguments import unknown, whole_number
from calibrant.calibrators import CALIBRATORS
from calibrant.calibrators.streaming import Scaling
from calibrant.distributed import agree, readable_errors, together
from calibrant.evaluation import Evaluation
from calibrant.evaluation.comparison import CLEAN, Comparison, Method, Metrics
from calibrant.metrics import METRICS
from calibrant.options import Choice, RecipeError
from calibrant.processes import process_pool
from calibrant.training import TrainingError
from calibrant.training.data import Split, load_data, load_data_once
from calibrant.training.fabric import Fabric
from calibrant.training.loop import train
from calibrant.training.other_data import by_severity, load_other
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import check_begun, check_for_several
from calibrant.training.runs import BEFORE, Detected, Result, Run, folder_of, make_calibrator
from calibrant.training.setup import launched
from calibrant.warning import warn

Severities = Mapping[str, Mapping[str, Metrics]]
"""The metrics of a run by severity and calibrator."""


def compare(
    recipe: Recipe,
    losses: Sequence[str],
    seeds: Sequence[int],
    output: str | Path,
    *,
    data_root: str | Path | None = None,
    outside: Sequence[Choice] = (),
    shifted: Sequence[Choice] = (),
    calibrators: Sequence[Choice] = (),
    columns: Sequence[str] = (),
    resamples: int = 1000,
    jobs: int = 1,
    fabric: Fabric | None = None,
    progress: bool = False,
    report: Callable[[str], None] | None = None,
) -> Comparison | None:
    """Train every loss from every seed and compare the test results. Finished runs are reused.

    Args:
        recipe: the recipe to follow; its own loss and seed are ignored.
        losses: the losses, written as `Recipe.loss`. The others are tested against the first.
        seeds: the seeds of the runs.
        output: the folder of all runs.
        data_root: the folder with the files of the data sets.
        outside: out-of-distribution data sets, to be told from the test data, before and after every
            calibrator that is a temperature. They are normalised like the test data where possible.
        shifted: shifted test data with the classes of the test data, at every severity if they have any. They
            are normalised in the same way. If several have the same name, the mean is added.
        calibrators: calibrators to compare beside temperature scaling. All are fitted to the validation data.
        columns: the metrics in the tables, keys of `calibrant.metrics.METRICS`. `kde_ece` is computed only if
            it is one of them.
        resamples: bootstrap resamples for the intervals.
        jobs: the number of runs at the same time. With several, each has a process of its own on the first
            device of the Fabric's kind. A script then needs ``if __name__ == "__main__":``.
        fabric: a launched Fabric; with several jobs, of one process.
        progress: show the progress of training on the terminal, with one job.
        report: called with a line when a run is evaluated or, with several jobs, done.

    Returns:
        The comparison in the first process, None in the others.

    Raises:
        RecipeError: the losses, seeds, data, calibrators or columns cannot be compared. It is raised before
            anything is trained.
        ValueError: the processes have different recipes, losses, seeds or data.
        TrainingError: see `train`.
        OSError: see `train`.
        WorkerError: the process of a job was killed.

    >>> from tempfile import TemporaryDirectory
    >>> recipe = Recipe.load("digits-lt").override(["epochs=1"])
    >>> with TemporaryDirectory() as folder:
    ...     comparison = compare(recipe, ["ce", "ls"], [0], folder, resamples=10)
    >>> [method.name for method in comparison.methods]
    ['ce', 'ls']
    """
    jobs = whole_number("jobs", jobs)
    if not losses or not seeds:
        raise RecipeError("compare needs at least one loss and one seed")
    # An unknown loss or option is refused here, before the data are read.
    rows = [[replace(recipe, loss=loss, seed=seed) for seed in seeds] for loss in losses]
    check_unique("loss", [row[0].loss for row in rows])
    check_unique("seed", seeds)
    keys = [str(each) for each in calibrators]
    check_unique("calibrator", keys)
    check_unique("out-of-distribution data", [str(each) for each in outside])
    check_unique("shifted data", [str(each) for each in shifted])
    check_unique("column", columns)
    _check_columns(columns)
    for choice in calibrators:
        make_calibrator(choice)
    keys = ["temperature", *(key for key in keys if key != "temperature")]
    fabric = fabric or launched(recipe)
    if jobs > 1 and fabric.world_size > 1:
        devices = fabric.world_size
        raise RecipeError(f"{jobs} jobs need one device, and there are {devices}: choose one (--devices 1)")
    with readable_errors():
        lists = {
            "losses": losses,
            "seeds": seeds,
            "out-of-distribution data": outside,
            "shifted data": shifted,
            "calibrators": keys,
            "columns": columns,
        }
        settings = {name: ", ".join(map(str, values)) for name, values in lists.items()}
        agree({**settings, "recipe": rows[0][0].to_toml()})
        data = together(lambda: load_data(recipe.data, data_root), "reading the data")
        agree({"data": data.fingerprint})
    if len(data.test) == 0:
        raise RecipeError(f"data {recipe.data.name!r} have no test part to compare on")
    for row in rows:  # a loss may need more classes than the data have
        row[0].loss_for(data)
    if data.dense:
        _check_dense(calibrators, columns)
    if outside and data.several_labels:
        raise RecipeError(
            "--ood needs one class or one decision for each element, and these data have several labels"
        )

    def load(choice: Choice, same_classes: bool) -> Split:
        action = partial(load_other, choice, recipe, data, data_root, same_classes=same_classes)
        return together(action, f"reading the data {choice}")

    others = {str(choice): load(choice, False) for choice in outside}
    shifts = {
        str(choice): {level: load(each, True) for level, each in by_severity(choice).items()}
        for choice in shifted
    }

    def folder(each: Recipe) -> Path:
        return folder_of(Path(output), each.loss, each.seed)

    together(partial(check_for_several, Path(output)), "checking the output folder")
    for each in chain(*rows):  # all folders before the first run is trained
        together(partial(check_begun, folder(each), each, data), "checking the output folder")
    say = report or (lambda _: None)
    kde = "kde_ece" in columns
    if jobs > 1:
        task = partial(_perform, data_root, fabric.device.type, keys, resamples, kde)
        with process_pool(min(jobs, len(losses) * len(seeds))) as pool:
            futures = {pool.submit(task, each, folder(each)): each for each in chain(*rows)}
            for future in as_completed(futures):
                name = f"{futures[future].loss}, seed {futures[future].seed}"
                try:
                    caught = future.result()
                except TrainingError as error:
                    raise type(error)(f"{name}: {error}") from error
                for warning in caught:
                    warn(warning)
                say(f"{name}: done")
    for each in chain(*rows):  # runs that the jobs have finished stay as they are
        train(each, folder(each), data=data, fabric=fabric, progress=progress)
    if not fabric.is_global_zero:
        return None
    methods = []
    for row in rows:
        results, detected, moved = [], [], []
        for each in row:
            if jobs == 1 or others or shifts:
                say(f"{each.loss}, seed {each.seed}: evaluating")
            run = Run(folder(each), loaded=data)
            results.append(run.results(keys, resamples=resamples, kde=kde))
            scaled = [key for key, result in results[-1].items() if result.temperature is not None]
            detected.append({name: run.detected(other, scaled) for name, other in others.items()})
            found = {name: _on_shifted(run, results[-1], levels) for name, levels in shifts.items()}
            moved.append({**found, **_means(shifted, found)})
        methods.append(method_of(row[0].loss, results, detected, moved))
    return Comparison(recipe.name, tuple(seeds), tuple(methods), data.dense, tuple(columns))


def _perform(
    data_root: str | Path | None,
    accelerator: str,
    calibrators: Sequence[str],
    resamples: int,
    kde: bool,
    recipe: Recipe,
    folder: Path,
) -> list[Warning]:
    """Train and evaluate a run in a process of its own; return its warnings. Its folder keeps the results."""
    # The process that started this one has read the data, and warned.
    with warnings.catch_warnings(action="ignore"):
        data = load_data_once(str(recipe.data), data_root)
    fabric = launched(recipe, accelerator=accelerator, devices=1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        train(recipe, folder, data=data, fabric=fabric)
        Run(folder, loaded=data).results(calibrators, resamples=resamples, kde=kde)
    return [each.message for each in caught if isinstance(each.message, UserWarning)]


def _on_shifted(run: Run, clean: Mapping[str, Result], levels: Mapping[str, Split]) -> Severities:
    """The metrics on the test data and at each severity, before and after each calibrator."""
    calibrators = [key for key in clean if key != BEFORE]
    return {
        CLEAN: {key: result.evaluation.metrics for key, result in clean.items()},
        **{level: run.metrics_on(split, calibrators) for level, split in levels.items()},
    }


def _means(shifted: Sequence[Choice], found: Mapping[str, Severities]) -> dict[str, Severities]:
    """The means over shifted data of one name and with the same severities, such as several corruptions."""
    groups: dict[tuple[str, ...], list[Severities]] = {}
    for choice in shifted:
        severities = found[str(choice)]
        groups.setdefault((choice.name, *severities), []).append(severities)

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == len(values) else None

    return {
        f"{name}, mean of {len(group)}": {
            level: {
                key: {metric: mean([each[level][key][metric] for each in group]) for metric in METRICS}
                for key in group[0][level]
            }
            for level in levels
        }
        for (name, *levels), group in groups.items()
        if len(group) > 1
    }


def method_of(
    name: str,
    results: Sequence[Mapping[str, Result]],
    detected: Sequence[Mapping[str, Mapping[str, Detected]]] = ({},),
    moved: Sequence[Mapping[str, Severities]] = ({},),
) -> Method:
    """The results of one method, from those of each seed."""

    def evaluations(key: str) -> tuple[Evaluation, ...]:
        return tuple(each[key].evaluation for each in results)

    def temperatures(key: str) -> tuple[float, ...]:
        found = [each[key].temperature for each in results]
        return tuple(value for value in found if value is not None)

    def areas(key: str) -> dict[str, tuple[float, ...]]:
        return {data: tuple(each[data][key].auroc for each in detected) for data in detected[0]}

    def curve(data: str, key: str) -> tuple[float, ...]:
        return tuple(map(fmean, zip(*(each[data][key].curve for each in detected), strict=True)))

    beside = [key for key in results[0] if key not in (BEFORE, "temperature")]
    scaled = [key for key in beside if temperatures(key)]
    return Method(
        name,
        evaluations(BEFORE),
        evaluations("temperature"),
        temperatures("temperature"),
        detection=areas(BEFORE),
        detection_after=areas("temperature"),
        detection_chosen={key: areas(key) for key in scaled if detected[0]},
        curves={data: {key: curve(data, key) for key in states} for data, states in detected[0].items()},
        calibrated={key: evaluations(key) for key in beside},
        chosen={key: temperatures(key) for key in scaled},
        shifted={
            shift: {
                level: {key: tuple(each[shift][level][key] for each in moved) for key in results[0]}
                for level in levels
            }
            for shift, levels in moved[0].items()
        },
    )


def _check_columns(columns: Sequence[str]) -> None:
    for name in columns:
        if name not in METRICS:
            raise RecipeError(unknown("metric", name, METRICS))
        if METRICS[name].requires not in (None, "kde"):
            raise RecipeError(f"column {name}: {METRICS[name].why_missing}")


def _check_dense(calibrators: Sequence[Choice], columns: Sequence[str]) -> None:
    """Refuse what needs all predictions at once, which images with a label for each pixel do not allow."""
    for choice in calibrators:
        if not issubclass(CALIBRATORS[choice.name], Scaling):
            known = ", ".join(key for key, kind in CALIBRATORS.items() if issubclass(kind, Scaling))
            raise RecipeError(
                f"calibrator {choice} needs all predictions in memory, too much for a label for each pixel; "
                f"calibrators that do not: {known}"
            )
    for name in columns:
        if not METRICS[name].streamed:
            raise RecipeError(
                f"column {name} needs all predictions in memory, too much for a label for each pixel"
            )


def check_unique(what: str, values: Sequence[object]) -> None:
    """Refuse values of which one is there twice."""
    for value in values:
        if values.count(value) > 1:
            raise RecipeError(f"{what} {value} is there twice; expected each once")
