"""Adds the runs in a folder to the published leaderboard.

    python benchmarks/leaderboard_tables.py runs/leaderboard

The leaderboard in ``benchmarks/results/leaderboard`` was trained in parts, on machines that are gone. Of
earlier parts only figures, recipes and logs are left. This program writes the tables of all parts:

- An experiment without runs in the folder stays as it was published, with its intervals and tests.
- In the others, runs in the folder replace published ones. Where a seed is not in the folder, the published
  run counts.
- A loss without runs in the folder keeps its intervals. It keeps its test if the first loss does so too.
- A loss with all its runs in the folder has intervals from their resamples, and a test if the first loss
  has all of its runs there too.
- A loss with both published and new runs has no interval and is not tested; if it is the first loss, no
  other is tested either. Intervals and tests need resamples of the test data, which are not published.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from calibrant.atomic import replace_file
from calibrant.evaluation import Evaluation
from calibrant.evaluation.comparison import Comparison, MeanFigure, Method
from calibrant.evaluation.figures import Figure, Reliability
from calibrant.evaluation.ranks import Standing
from calibrant.metrics import METRICS
from calibrant.reports.leaderboard_files import all_rankings, markdown, to_json
from calibrant.training.leaderboard import NOT_DONE, Experiment, Leaderboard, standings, table_columns
from calibrant.training.recipe import Recipe

HERE = Path(__file__).parent
PUBLISHED = HERE / "results" / "leaderboard"


@dataclass(frozen=True)
class PartlyPublished(Comparison):
    """A comparison in which some losses keep the intervals and tests that were published.

    Attributes:
        stored: the published results.
        kept: the losses that have the published runs and no others.
    """

    stored: Mapping[str, Any] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()

    def figures(self, metric: str, *, after: bool | str = False) -> dict[str, MeanFigure]:
        """The published figures of losses that are kept, and those of the runs of other losses."""
        found = super().figures(metric, after=after)
        state = self.stored["after" if after else "before"]
        first = self.stored["first"]  # the loss that the published tests compare with
        tested = first in self.kept and next(iter(found), None) == first
        for name, own in found.items():
            if name in self.kept:
                published = MeanFigure(**state[name][metric], better=own.better)
                found[name] = published if tested else replace(published, p_value=None)
        return found


def evaluation(metrics: Mapping[str, float | None], samples: int) -> Evaluation:
    """The published figures of one run, without intervals."""
    nothing = Reliability((), (), (), (), (), ())
    figures = {name: Figure(metrics.get(name)) for name in METRICS}
    return Evaluation(
        name="",
        samples=samples,
        num_classes=0,
        bins=15,
        exact=True,
        figures=figures,
        p_value=float("nan"),
        reliability=nothing,
        classes=(),
    )


def published_method(name: str, results: Mapping[str, Any]) -> Method:
    """The published runs of a loss."""
    runs, samples = results["runs"][name], results["samples"]
    return Method(
        name,
        tuple(evaluation(metrics, samples) for metrics in runs["before"]),
        tuple(evaluation(metrics, samples) for metrics in runs["after"]),
        tuple(runs["temperature"]),
        {data: tuple(values) for data, values in runs["detection"].items()},
        {data: tuple(values) for data, values in runs["detection_after"].items()},
    )


def merged(experiment: Experiment, here: Standing, published: Mapping[str, Any] | None) -> Standing:
    """An experiment with the runs in the folder and the published ones."""
    if published is None or published["results"] is None:
        return here
    results = published["results"]
    reasons = {(loss, seed): reason for loss, seed, reason in published["missing"]}
    known: dict[tuple[str, int], tuple[Method, int]] = {}  # the published runs, by loss and seed
    for loss in results["runs"]:
        method = published_method(loss, results)
        seeds = [seed for seed in results["seeds"] if (loss, seed) not in reasons]
        known |= {(loss, seed): (method, position) for position, seed in enumerate(seeds)}
    runs: dict[str, list[tuple[Method, int]]] = {}
    missing = {}
    own = {method.name: method for method in here.comparison.methods} if here.comparison else {}
    for loss in experiment.losses:
        done = [seed for seed in experiment.seeds if (loss, seed) not in here.missing]
        for seed in experiment.seeds:
            if seed in done:
                runs.setdefault(loss, []).append((own[loss], done.index(seed)))
            elif (failure := here.missing[loss, seed]) != NOT_DONE:
                missing[loss, seed] = failure
            elif (loss, seed) in known:
                runs.setdefault(loss, []).append(known[loss, seed])
            else:
                missing[loss, seed] = reasons.get((loss, seed), NOT_DONE)
    methods = tuple(_of_runs(loss, each) for loss, each in runs.items())
    dense, columns = results["dense"], table_columns(results["dense"])
    before = {loss: [run for (name, _), run in known.items() if name == loss] for loss in results["runs"]}
    kept = frozenset(loss for loss, own in runs.items() if own == before.get(loss))
    comparison = PartlyPublished(experiment.name, experiment.seeds, methods, dense, columns, results, kept)
    return replace(here, comparison=comparison, missing=missing)


def _of_runs(loss: str, runs: Sequence[tuple[Method, int]]) -> Method:
    """A loss with one run per seed, each from a method and by its position there."""

    def areas(name: str) -> dict[str, tuple[float, ...]]:
        return {
            data: tuple(getattr(method, name)[data][position] for method, position in runs)
            for data in getattr(runs[0][0], name)
        }

    return Method(
        loss,
        tuple(method.before[position] for method, position in runs),
        tuple(method.after[position] for method, position in runs),
        tuple(method.temperatures[position] for method, position in runs),
        areas("detection"),
        areas("detection_after"),
    )


def check_recipes(board: Leaderboard, logs: Path) -> None:
    """Refuse published runs of another recipe."""
    for experiment in board.experiments:
        path = experiment.folder(logs) / "recipe.toml"
        if path.is_file():
            recipe = Recipe.from_toml(path.read_text(encoding="utf-8"), where=str(path))
            loss, seed = experiment.losses[0], experiment.seeds[0]
            if replace(recipe, loss=loss, seed=seed) != replace(experiment.recipe, loss=loss, seed=seed):
                raise SystemExit(
                    f"{path} is not the recipe of {experiment.name!r} in leaderboard.toml; "
                    "change the latter back, or give the experiment another name"
                )


def copy_logs(board: Leaderboard, folder: Path, target: Path) -> None:
    """Copy the logs of runs that are done, and the recipe of the first loss."""
    for entry in board.entries(folder):
        if entry.is_done:
            logs = entry.experiment.folder(target)
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry.folder / "log.csv", logs / f"{entry.folder.name}.csv")
            if (entry.recipe.loss, entry.recipe.seed) == (
                entry.experiment.losses[0],
                entry.experiment.seeds[0],
            ):
                shutil.copyfile(entry.folder / "recipe.toml", logs / "recipe.toml")


def main() -> None:
    """Write ``leaderboard.json``, ``leaderboard.md`` and the logs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the output folder of calibrant leaderboard")
    parser.add_argument("--resamples", type=int, default=1000, help="as for calibrant leaderboard")
    options = parser.parse_args()
    board = Leaderboard.load(HERE / "leaderboard.toml")
    check_recipes(board, PUBLISHED / "logs")
    published = json.loads((PUBLISHED / "leaderboard.json").read_text(encoding="utf-8"))["experiments"]
    found = standings(board, options.folder, resamples=options.resamples)
    pairs = zip(board.experiments, found, strict=True)
    every = [merged(experiment, here, published.get(experiment.name)) for experiment, here in pairs]
    ranks = all_rankings(every)
    plain = json.loads(to_json(board.title, every, ranks))
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)  # a third smaller without indentation
    replace_file(PUBLISHED / "leaderboard.json", f"{text}\n".encode())
    replace_file(PUBLISHED / "leaderboard.md", markdown(board.title, every, ranks).encode())
    copy_logs(board, options.folder, PUBLISHED / "logs")
    for each in every:
        done = sum(len(method.before) for method in each.comparison.methods) if each.comparison else 0
        print(f"{each.name}: {done} runs, {len(each.missing)} missing")


if __name__ == "__main__":
    main()
