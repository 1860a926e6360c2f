"""Leaderboards: every run is done once, by one process or several, killed and resumed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from calibrant.options import RecipeError
from calibrant.processes import ray_cluster
from calibrant.reports.leaderboard_files import all_rankings, markdown, to_json
from calibrant.training import DivergedError, leaderboard, loop
from calibrant.training.leaderboard import Leaderboard, standings, work
from calibrant.training.lock import FolderLock
from tests.cli.commands import printed
from tests.cli.test_evaluate_folders import figures, same, write_folder
from tests.training.interruptions import killed_in_step, side_by_side

BOARD = """
title = "Two data sets"
losses = ["ce", "mbls[margin=6]"]
seeds = [0, 1]

[[experiment]]
name = "easy"
recipe = "digits-lt"
changes = [
    "epochs=2",
    "data=synthetic[classes=3,features=4,train_size=60,validation_size=40,test_size=41]",
    "batch_size=20",
    "model.hidden=[8]",
    "optimizer.lr=0.05",
]
ood = ["synthetic[classes=3,features=4,separation=0.0,test_size=30]"]

[[experiment]]
name = "hard"
recipe = "digits-lt"
changes = [
    "epochs=2",
    "data=synthetic[classes=3,features=4,separation=1.5,train_size=60,validation_size=40,test_size=41]",
    "batch_size=20",
    "model.hidden=[8]",
    "optimizer.lr=0.05",
]
seeds = [0]
"""
RUNS = [("ce", 0), ("mbls[margin=6]", 0), ("ce", 1), ("mbls[margin=6]", 1), ("ce", 0), ("mbls[margin=6]", 0)]


def board(text: str = BOARD) -> Leaderboard:
    return Leaderboard.from_toml(text)


def written(folder: Path) -> str:
    """The results of the runs in a folder."""
    found = standings(board(), folder, resamples=20)
    return to_json("Title", found, all_rankings(found))


class Done(NamedTuple):
    """What one process did that did everything."""

    folder: Path
    trained: list[tuple[str, int]]
    said: list[str]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Done:
    found = Done(tmp_path_factory.mktemp("board"), [], [])
    plain = loop.Loop.run

    def noting(training: loop.Loop) -> None:
        found.trained.append((training.parts.recipe.loss, training.parts.recipe.seed))
        plain(training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "run", noting)
        work(board(), found.folder, resamples=20, report=found.said.append)
    return found


@pytest.fixture(scope="module")
def done(everything: Done) -> Path:
    """A folder in which one process has done everything."""
    return everything.folder


@pytest.fixture(scope="module")
def expected(done: Path) -> str:
    """The results in that folder."""
    return written(done)


def test_every_run_is_done_and_kept(everything: Done, trained: list[tuple[str, int]]) -> None:
    folder = everything.folder
    assert everything.trained == RUNS
    assert everything.said[0] == "easy: ce, seed 0: done"
    assert len(everything.said) == 6
    work(board(), folder, resamples=20)
    assert trained == []
    easy, hard = standings(board(), folder, resamples=20)
    assert easy.comparison is not None
    assert hard.comparison is not None
    assert [len(method.before) for method in easy.comparison.methods] == [2, 2]
    assert [len(method.before) for method in hard.comparison.methods] == [1, 1]
    assert not easy.missing
    ((name, areas),) = easy.comparison.methods[0].detection.items()
    assert name.startswith("synthetic[")
    assert len(areas) == 2


def test_small_files_are_enough(
    done: Path, expected: str, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    kept = ("recipe.toml", "result.json", "evaluation.json", "leaderboard.json", "log.csv")
    for path in done.rglob("*"):
        if path.name in kept and path.parent.parent.name == "runs":
            copy = tmp_path / path.relative_to(done)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    work(board(), tmp_path, resamples=20)
    assert trained == []
    assert written(tmp_path) == expected


def test_missing_runs_are_named(done: Path, tmp_path: Path) -> None:
    more = board(
        BOARD.replace("seeds = [0]", "seeds = [0, 7]").replace('losses = ["ce"', 'losses = ["ls", "ce"')
    )
    easy, hard = standings(more, done, resamples=20)
    assert set(easy.missing) == {("ls", 0), ("ls", 1)}
    assert set(hard.missing.values()) == {"not done"}
    assert len(hard.missing) == 4
    text = markdown("Title", [easy, hard], [])
    assert "Missing runs: 4" in text
    assert "- ls (seeds 0, 7): not done" in text
    assert "| loss | Seeds |" in text  # of one seed instead of two
    assert standings(more, tmp_path)[0].comparison is None


def test_a_run_that_diverges_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    plain = loop.Loop._train_step

    def step(training: loop.Loop, batch: Any) -> None:
        if training.parts.recipe.loss == "ce":
            raise DivergedError("the loss is infinite")
        plain(training, batch)

    monkeypatch.setattr(loop.Loop, "_train_step", step)
    for _ in range(2):
        work(board(), tmp_path, resamples=20)
    assert trained == RUNS
    easy, hard = standings(board(), tmp_path, resamples=20)
    assert hard.missing == {("ce", 0): "the loss is infinite"}
    assert easy.comparison is not None
    assert [method.name for method in easy.comparison.methods] == ["mbls[margin=6]"]


def all_of_it(folder: Path) -> str:
    work(board(), folder, resamples=20)
    return written(folder)


def test_a_killed_process_leaves_its_run_to_the_next(
    expected: str, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    killed_in_step(all_of_it, tmp_path, 11)  # three steps in each of two epochs: in the second run
    assert all_of_it(tmp_path) == expected
    assert trained == RUNS[1:]


def test_two_processes_share_the_runs(expected: str, tmp_path: Path) -> None:
    (first, one), (second, other) = side_by_side(all_of_it, tmp_path)
    assert len(first + second) == len(set(first + second)) == 6
    assert one == other == expected


@pytest.fixture(scope="module")
def cluster(programs: Path) -> Iterator[None]:
    """A new Ray cluster of this machine, which takes seconds to start. Its workers start at once."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(programs / "python"))
        with ray_cluster(2, "this test"):
            yield
    assert not ray.is_initialized()


@pytest.mark.usefixtures("cluster")
def test_ray_does_every_run_once(expected: str, tmp_path: Path) -> None:
    said: list[str] = []
    work(board(), tmp_path, jobs=2, on="ray", resamples=20, report=said.append)
    assert len(said) == 6
    assert written(tmp_path) == expected


@pytest.mark.usefixtures("cluster")
def test_ray_waits_for_a_run_that_another_process_works_on(expected: str, tmp_path: Path) -> None:
    folder = board().entries(tmp_path)[0].folder
    claim = FolderLock(folder.parents[1] / "claims" / folder.name, "this test")
    assert claim.acquire()
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if len(said) == 5:  # all the others
            claim.release()

    work(board(), tmp_path, jobs=2, on="ray", resamples=20, report=report)
    assert len(said) == 6
    assert written(tmp_path) == expected


@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("default")  # those of Ray itself
def test_ray_evaluates_the_files_of_a_folder(tmp_path: Path) -> None:
    """Here, because the cluster is."""
    folder, one, several = write_folder(tmp_path), tmp_path / "one.json", tmp_path / "several.json"
    printed("evaluate", folder, "--resamples", 20, "--stream", "--json", one)
    printed("evaluate", folder, "--resamples", 20, "--json", several, "--jobs", 2, "--on", "ray")
    assert same(figures(one), figures(several))


ANOTHER_PROGRAM = """
from calibrant.processes import ray_cluster
with ray_cluster(1, "this test") as ray:
    print(ray.get_runtime_context().gcs_address)
"""


@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("default")  # those of Ray itself
def test_a_cluster_that_a_program_started_for_itself_is_its_own(programs: Path) -> None:
    """Or else other programs would be killed when it ends."""
    import ray

    command = [str(programs / "python"), "-c", ANOTHER_PROGRAM]
    other = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    ours = ray.get_runtime_context().gcs_address
    assert ":" in other
    assert other != ours


def test_runs_of_another_recipe_are_refused(done: Path) -> None:
    other = board(BOARD.replace('"epochs=2"', '"epochs=3"', 1))
    for action in (work, standings):
        with pytest.raises(RecipeError, match=r"holds a run of another recipe \(there: epochs = 2"):
            action(other, done)


def test_new_out_of_distribution_data_are_evaluated(
    done: Path, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    more = board(
        BOARD.replace('test_size=30]"]', 'test_size=30]", "synthetic[classes=3,features=4,test_size=9]"]')
    )
    assert len(standings(more, tmp_path, resamples=20)[0].missing) == 4
    work(more, tmp_path, resamples=20)
    easy, _ = standings(more, tmp_path, resamples=20)
    assert easy.comparison is not None
    assert len(easy.comparison.methods[0].detection) == 2
    assert not easy.missing
    assert trained == []


@pytest.mark.parametrize("content", ['{"run": "of another"}', "[" * 100_000], ids=["of-another", "deep"])
def test_a_damaged_entry_is_refused(content: str, done: Path, tmp_path: Path) -> None:
    run = tmp_path / "easy" / "runs" / "ce-seed0"
    run.mkdir(parents=True)
    for name in ("recipe.toml", "result.json", "evaluation.json"):
        (run / name).write_bytes((done / "easy" / "runs" / "ce-seed0" / name).read_bytes())
    (run / leaderboard.ENTRY).write_text(content)
    with pytest.raises(RecipeError, match="is damaged, or belongs to another run; delete it"):
        standings(board(), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[[experiment]]", "[experiment"), "is not TOML"),
        (("seeds = [0]", f"seeds = [{'1' * 5000}]"), "is not TOML: .*digits"),
        (("seeds = [0]", f"seeds = {'[' * 5000}"), "is not TOML"),
        (
            ("seeds = [0]", "sedes = [0]"),
            "experiment 2 has no option 'sedes' [(]did you mean 'seeds'[?][)]; its options: recipe",
        ),
        (
            ("seeds = [0]", "seeds = [-1]"),
            "expected seeds of at least 0, got -1",
        ),
        (("seeds = [0]", "seeds = [0, 0]"), "experiment 2: seed 0 is there twice"),
        (("seeds = [0]", "seeds = 0"), "experiment 2: seeds must be a list, each a whole number, got 0"),
        (("seeds = [0]", "ranked = 1"), "experiment 2: ranked must be true or false, got 1"),
        (('name = "hard"', 'name = "easy"'), "two experiments have the folder easy"),
        (('recipe = "digits-lt"', ""), "experiment 1 needs the option 'recipe'"),
        (('["ce", ', '["cee", '), "'cee'"),
    ],
)
def test_mistakes_in_the_file_are_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        board(BOARD.replace(*change))


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "board.toml").write_bytes('title = "Größe"'.encode("latin-1"))
    with pytest.raises(RecipeError, match=r"board.toml has bytes that are not UTF-8"):
        Leaderboard.load(tmp_path / "board.toml")


def test_a_file_without_experiments_is_refused() -> None:
    with pytest.raises(RecipeError, match="expected at least one table"):
        board('losses = ["ce"]')
