"""A leaderboard: several experiments with many losses and seeds, worked on by any number of processes."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from calibrant.atomic import replace_file
from calibrant.evaluation.comparison import Comparison, default_columns
from calibrant.evaluation.ranks import Standing
from calibrant.options import Choice, RecipeError, check_option, check_options, check_type, read_toml
from calibrant.processes import Workers, process_pool, ray_cluster
from calibrant.training import TrainingError
from calibrant.training.data import load_data_once
from calibrant.training.grid import check_unique, method_of
from calibrant.training.lock import FolderLock
from calibrant.training.loop import train
from calibrant.training.other_data import load_other
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import RESULT, check_folder, check_for_several, hash_of
from calibrant.training.runs import Detected, Run, folder_of, plain_name

ENTRY, FAILURE = "leaderboard.json", "failure.txt"
"""Files in the folder of a run: written last if it succeeded, or the reason if it failed."""

NOT_DONE = "not done"
"""Why a run is missing that has not failed."""

Report = Callable[[str], None]

_CALIBRATORS = ("temperature",)
_PAUSE = 0.5  # seconds between looks at runs that other processes work on
_DAMAGED = (ValueError, LookupError, TypeError, RecursionError)  # what damaged JSON raises


@dataclass(frozen=True)
class Experiment:
    """One recipe with several losses and seeds."""

    name: str  # the heading in tables, and the name of its folder
    recipe: Recipe  # what to train; its own loss and seed are ignored
    losses: tuple[str, ...]  # the others are tested against the first
    seeds: tuple[int, ...]  # those of every loss
    outside: tuple[Choice, ...] = ()  # out-of-distribution data sets, to be detected by the entropy
    ranked: bool = True  # whether it counts in the ranks

    def folder(self, output: Path) -> Path:
        """The folder of the experiment."""
        return output / plain_name(self.name)


@dataclass(frozen=True)
class Entry:
    """One run of a leaderboard, of one of its experiments."""

    experiment: Experiment
    recipe: Recipe  # with loss and seed
    folder: Path

    @property
    def name(self) -> str:
        """The experiment, the loss and the seed."""
        return f"{self.experiment.name}: {self.recipe.loss}, seed {self.recipe.seed}"

    @property
    def is_done(self) -> bool:
        """Whether the run was trained and evaluated, also on the out-of-distribution data."""
        path = self.folder / ENTRY
        if not path.is_file():
            return False
        with suppress(*_DAMAGED):  # `standings` refuses a damaged file
            detected = json.loads(path.read_text(encoding="utf-8"))["detected"]
            return set(detected) == {str(choice) for choice in self.experiment.outside}
        return True

    @property
    def has_ended(self) -> bool:
        """Whether the run is done or has failed."""
        return self.is_done or bool(self.failure)

    @property
    def failure(self) -> str:
        """Why the run failed; "" if it did not."""
        path = self.folder / FAILURE
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


@dataclass(frozen=True)
class Leaderboard:
    """Several experiments, as a TOML file declares them.

    >>> text = '''
    ... title = "Small"
    ... losses = ["ce", "ls"]
    ... seeds = [0, 1]
    ... [[experiment]]
    ... name = "digits, two epochs"
    ... recipe = "digits"
    ... changes = ["epochs=2"]
    ... '''
    >>> board = Leaderboard.from_toml(text)
    >>> [entry.folder.as_posix() for entry in board.entries(Path("out"))][:2]
    ['out/digits--two-epochs/runs/ce-seed0', 'out/digits--two-epochs/runs/ls-seed0']
    """

    title: str  # the heading of the page
    experiments: tuple[Experiment, ...]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML file."""
        return cls.from_toml(read_toml(Path(path)), where=str(path))

    @classmethod
    def from_toml(cls, text: str, *, where: str = "leaderboard") -> Self:
        """Read TOML; see `load`."""
        try:
            shared = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # of the parser
            raise RecipeError(f"{where} is not TOML: {error}") from error
        for key in shared:
            check_option(where, key, ("title", "losses", "seeds", "experiment"))
        title = check_type(f"{where}: title", shared.pop("title", "Leaderboard"), str)
        tables = check_type(f"{where}: experiment", shared.pop("experiment", ()), tuple[dict[str, Any], ...])
        experiments = []
        for number, table in enumerate(tables, start=1):
            place = f"{where}, experiment {number}"
            options = check_options(place, {**shared, **table}, _experiment)
            experiments.append(_experiment(place, **options))
        folders = [plain_name(each.name) for each in experiments]
        for folder in folders:
            if folders.count(folder) > 1:
                raise RecipeError(f"{where}: two experiments have the folder {folder}; change a name")
        if not experiments:
            raise RecipeError(f"{where}: expected at least one table [[experiment]]")
        return cls(title, tuple(experiments))

    def entries(self, output: Path) -> list[Entry]:
        """All runs, the first seed of every loss before the second. Folders of other recipes are refused."""
        found = [
            Entry(experiment, each, folder_of(experiment.folder(output), each.loss, seed))
            for experiment in self.experiments
            for seed in experiment.seeds
            for loss in experiment.losses
            for each in [replace(experiment.recipe, loss=loss, seed=seed)]
        ]
        for folder in (output, *(each.folder(output) for each in self.experiments)):
            check_for_several(folder)
        for entry in found:
            check_folder(entry.folder, entry.recipe)
        return found


def _experiment(
    where: str,
    *,
    recipe: str,
    losses: tuple[str, ...],
    seeds: tuple[int, ...],
    name: str = "",
    changes: tuple[str, ...] = (),
    ood: tuple[str, ...] = (),
    ranked: bool = True,
) -> Experiment:
    """An experiment from its table in TOML."""
    if not losses:
        raise RecipeError(f"{where}: expected losses, got none")
    if not seeds or min(seeds) < 0:
        given = ", ".join(map(str, seeds)) or "none"
        raise RecipeError(f"{where}: expected seeds of at least 0, got {given}")
    followed = Recipe.load(recipe).override(changes)
    losses = tuple(replace(followed, loss=loss).loss for loss in losses)
    check_unique(f"{where}: loss", losses)
    check_unique(f"{where}: seed", seeds)
    outside = tuple(map(Choice.parse, ood))
    return Experiment(name or followed.name, followed, losses, seeds, outside, ranked)


def work(
    board: Leaderboard,
    output: str | Path,
    *,
    jobs: int = 1,
    on: Workers = "processes",
    data_root: str | Path | None = None,
    resamples: int = 1000,
    progress: bool = False,
    report: Report | None = None,
) -> None:
    """Train and evaluate the runs that are missing, until every run is done or has failed.

    Any number of processes may work on one folder at a time: each run is done by one of them. A process that
    is killed releases its run, and the next one continues it; see `FolderLock`. Of a run that is done, only
    its small files are needed, not weights and predictions.

    Args:
        board: the leaderboard.
        output: the folder of all runs.
        jobs: the number of runs at the same time. Several have processes of their own, which share the cores
            of this machine. With Ray, the number of CPUs of a new cluster, if this machine belongs to none.
        on: ``"ray"`` makes every run a task of Ray. All machines must see the output folder and the data.
            Every task gets a GPU, if the cluster has any. Without GPUs it gets one core. Only clusters on one
            machine have been tried.
        data_root: the folder with the files of the data sets.
        resamples: bootstrap resamples for the intervals.
        progress: show the progress of training on the terminal, if runs are done in this process.
        report: called with a line about every run that was done or has failed.
    """
    if on == "ray":  # its workers may have another working folder
        output, data_root = Path(output).absolute(), data_root and Path(data_root).absolute()
    left = [entry for entry in board.entries(Path(output)) if not entry.has_ended]
    options: dict[str, Any] = {"data_root": data_root, "resamples": resamples}
    with _workers(jobs, on) as start:
        while left:
            performed: Iterable[tuple[Entry, bool]]
            if start is None:
                not_ended = (entry for entry in left if not entry.has_ended)
                performed = ((entry, perform(entry, progress=progress, **options)) for entry in not_ended)
            else:
                futures = {start(entry, **options): entry for entry in left}
                performed = ((futures[each], each.result()) for each in as_completed(futures))
            worked_on_elsewhere = []
            for entry, has_ended in performed:
                if not has_ended:
                    worked_on_elsewhere.append(entry)
                elif report is not None:
                    report(f"{entry.name}: {entry.failure or 'done'}")
            left = worked_on_elsewhere
            if left:
                time.sleep(_PAUSE)


@contextmanager
def _workers(jobs: int, on: Workers) -> Iterator[Callable[..., Future[bool]] | None]:
    """A function that starts `perform` in a worker; None if runs are done in this process."""
    if on == "ray":
        with ray_cluster(jobs, "--on ray") as ray:
            on_gpu = ray.cluster_resources().get("GPU", 0) > 0
            task = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0)(perform)
            yield lambda entry, **options: task.remote(entry, **options).future()
    elif jobs > 1:
        with process_pool(jobs) as pool:
            yield lambda entry, **options: pool.submit(perform, entry, **options)
    else:
        yield None


def perform(entry: Entry, *, data_root: str | Path | None, resamples: int, progress: bool = False) -> bool:
    """Train and evaluate one run, unless that was done already; False if another process works on it."""
    if entry.has_ended:
        return True
    claim = FolderLock(entry.folder.parents[1] / "claims" / entry.folder.name, entry.name)
    if not claim.acquire():
        return False
    try:
        if not entry.has_ended:
            data = load_data_once(str(entry.recipe.data), data_root)
            train(entry.recipe, entry.folder, data=data, progress=progress)
            run = Run(entry.folder, loaded=data)
            run.results(_CALIBRATORS, resamples=resamples)
            detected = {}
            for choice in entry.experiment.outside:
                found = run.detected(load_other(choice, entry.recipe, data, data_root), _CALIBRATORS)
                detected[str(choice)] = {key: vars(each) for key, each in found.items()}
            plain = {"run": hash_of(entry.folder / RESULT), "dense": data.dense, "detected": detected}
            replace_file(entry.folder / ENTRY, json.dumps(plain).encode())
    except TrainingError as error:
        replace_file(entry.folder / FAILURE, f"{error}\n".encode())
    finally:
        claim.release()
    return True


def standings(
    board: Leaderboard, output: str | Path, *, data_root: str | Path | None = None, resamples: int = 1000
) -> list[Standing]:
    """The results of all runs that are done. Nothing is trained.

    The arguments are those of `work`; the data are needed only if results must be computed anew.
    """
    entries = board.entries(Path(output))
    return [
        _standing(each, [entry for entry in entries if entry.experiment is each], data_root, resamples)
        for each in board.experiments
    ]


def table_columns(dense: bool) -> tuple[str, ...]:
    """The metrics in the tables of a leaderboard: those of a comparison, and the Brier score.

    >>> table_columns(dense=True)
    ('accuracy', 'mean_iou', 'nll', 'brier', 'ece', 'adaptive_ece', 'classwise_ece')
    """
    columns = default_columns(dense)
    scores = columns.index("nll") + 1
    return (*columns[:scores], "brier", *columns[scores:])


def _standing(
    experiment: Experiment, entries: Sequence[Entry], data_root: str | Path | None, resamples: int
) -> Standing:
    methods, dense = [], False
    for loss in experiment.losses:
        done = [entry for entry in entries if entry.recipe.loss == loss and entry.is_done]
        results, detected = [], []
        for entry in done:
            run = Run(entry.folder, None if data_root is None else Path(data_root))
            stored = _stored(entry)
            dense = stored["dense"]
            results.append(run.results(_CALIBRATORS, resamples=resamples))
            detected.append(
                {
                    data: {key: Detected(each["auroc"], tuple(each["curve"])) for key, each in states.items()}
                    for data, states in stored["detected"].items()
                }
            )
        if done:
            methods.append(method_of(loss, results, detected))
    missing = {
        (entry.recipe.loss, entry.recipe.seed): entry.failure or NOT_DONE
        for entry in entries
        if not entry.is_done
    }
    seeds = experiment.seeds
    comparison = None
    if methods:
        comparison = Comparison(experiment.name, seeds, tuple(methods), dense, table_columns(dense))
    return Standing(experiment.name, plain_name(experiment.name), comparison, missing, experiment.ranked)


def _stored(entry: Entry) -> dict[str, Any]:
    path = entry.folder / ENTRY
    with suppress(*_DAMAGED):
        plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if plain["run"] == hash_of(entry.folder / RESULT) and {"dense", "detected"} <= plain.keys():
            return plain
    raise RecipeError(
        f"{path} is damaged, or belongs to another run; delete it and give the same command again"
    )
