"""Adds the runs in a folder to the published leaderboard.

    python benchmarks/leaderboard_tables.py runs/leaderboard

The leaderboard in ``benchmarks/results/leaderboard`` was trained in parts, on machines that are gone. Of
earlier parts only figures, recipes and logs are left. This program writes the tables of all parts:

- An experiment without runs in the folder stays as it was published, with its intervals and tests.
- In the others, runs in the folder replace published ones. Where a seed is not in the folder, the published
  run counts. A loss with such a seed has no interval and is not tested: both need resamples of the test data,
  which are not published.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from calibrant.evaluation import Evaluation
from calibrant.evaluation.comparison import Comparison, MeanFigure, Method
from calibrant.evaluation.figures import Figure, Reliability
from calibrant.evaluation.ranks import Standing
from calibrant.metrics import METRICS
from calibrant.reports.leaderboard_files import all_rankings, markdown, to_json
from calibrant.training.leaderboard import Experiment, Leaderboard, standings

HERE = Path(__file__).parent
PUBLISHED = HERE / "results" / "leaderboard"


@dataclass(frozen=True)
class AsPublished(Comparison):
    """A comparison with the means, intervals and tests that were published."""

    stored: Mapping[str, Any] = field(default_factory=dict)

    def figures(self, metric: str, *, after: bool | str = False) -> dict[str, MeanFigure]:
        """The published figures of one metric."""
        state = self.stored["after" if after else "before"]
        found = {name: MeanFigure(**each[metric]) for name, each in state.items() if metric in each}
        sign = 1 if METRICS[metric].higher_is_better else -1
        first = next(iter(found.values()), None)
        return {
            name: replace(each, better=first is not None and sign * (each.mean - first.mean) > 0)
            for name, each in found.items()
        }


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


def merged(experiment: Experiment, here: Standing, published: Mapping[str, Any]) -> Standing:
    """An experiment with the runs in the folder and the published ones."""
    results = published["results"]
    if results is None:
        return here
    absent = {(loss, seed): reason for loss, seed, reason in published["missing"]}
    known = {name: published_method(name, results) for name in results["runs"]}
    if here.comparison is None:
        columns = tuple(results["columns"])
        comparison = AsPublished(
            experiment.name, experiment.seeds, tuple(known.values()), results["dense"], columns, results
        )
        return replace(here, comparison=comparison, missing=absent)
    own = {method.name: method for method in here.comparison.methods}
    missing = {run: reason for run, reason in here.missing.items() if run in absent}
    methods = []
    for loss in experiment.losses:
        done = [seed for seed in experiment.seeds if (loss, seed) not in here.missing]
        earlier = [seed for seed in experiment.seeds if (loss, seed) not in absent]
        runs = [
            (own[loss], done.index(seed)) if seed in done else (known[loss], earlier.index(seed))
            for seed in experiment.seeds
            if (loss, seed) not in missing
        ]
        if runs:
            methods.append(_of_runs(loss, runs))
    return replace(here, comparison=replace(here.comparison, methods=tuple(methods)), missing=missing)


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


def copy_logs(board: Leaderboard, folder: Path, target: Path) -> None:
    """Copy the logs of runs that are done, and the recipe of the first loss."""
    for entry in board.entries(folder):
        if entry.is_done:
            logs = entry.experiment.folder(target)
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry.folder / "log.csv", logs / f"{entry.folder.name}.csv")
            if (entry.recipe.loss, entry.recipe.seed) == (entry.experiment.losses[0], 0):
                shutil.copyfile(entry.folder / "recipe.toml", logs / "recipe.toml")


def main() -> None:
    """Write ``leaderboard.json``, ``leaderboard.md`` and the logs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the output folder of calibrant leaderboard")
    parser.add_argument("--resamples", type=int, default=1000, help="as for calibrant leaderboard")
    options = parser.parse_args()
    board = Leaderboard.load(HERE / "leaderboard.toml")
    published = json.loads((PUBLISHED / "leaderboard.json").read_text(encoding="utf-8"))["experiments"]
    found = standings(board, options.folder, resamples=options.resamples)
    pairs = zip(board.experiments, found, strict=True)
    every = [merged(experiment, here, published[experiment.name]) for experiment, here in pairs]
    ranks = all_rankings(every)
    (PUBLISHED / "leaderboard.json").write_text(to_json(board.title, every, ranks) + "\n", encoding="utf-8")
    (PUBLISHED / "leaderboard.md").write_text(markdown(board.title, every, ranks), encoding="utf-8")
    copy_logs(board, options.folder, PUBLISHED / "logs")
    for each in every:
        done = sum(len(method.before) for method in each.comparison.methods) if each.comparison else 0
        print(f"{each.name}: {done} runs, {len(each.missing)} missing")


if __name__ == "__main__":
    main()
