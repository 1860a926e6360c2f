"""Two processes train what one process trains with the same batches.

Starting processes takes seconds, so one start follows many recipes; the tests look at what it left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from calibrant.training import checkpoint
from calibrant.training.data import DATA_SETS, load_data
from calibrant.training.recipe import Recipe
from calibrant.training.runs import Predicted, Run
from tests.training import program
from tests.training.run_folders import assert_close, assert_identical, tensors

ROOT = Path(__file__).parents[2]

SYNTHETIC = [
    "data=synthetic[classes=4,features=5,train_size=96,validation_size=61,test_size=31]",
    "model=mlp",
    "model.hidden=[8]",
]
SPOTTED = ["data=spotted", "model=tests.training.program:pixelwise"]
COMMON = [
    "epochs=3",
    "batch_size=16",
    "optimizer=sgd[lr=0.1]",
    "loss=cals-alm[margin=1]",
    "drop_last=true",
]
RECIPES = {
    "plain": [*SYNTHETIC, "select=nll-after-temperature"],
    "averaged": [*SYNTHETIC, "average=0.8", "adapt=4", "gradient_clip=0.1", "log_test=true"],
    "on-training-data": [*SYNTHETIC, "adapt_on=train", "adapt=4"],
    "void": SPOTTED,
    "void-accumulated": [*SPOTTED, "accumulate=2", "optimizer=adam[lr=0.01]"],
    "summed": [*SPOTTED, "accumulate=2", "batch_loss=sum", "gradient_clip=0.2"],
    "single-logit": [
        *SYNTHETIC,
        "data.classes=2",
        "binary=true",
        "loss=cals-alm[margin=0.5]",
        "select=nll-after-temperature",
    ],
    "several-labels": [
        "data=labelled",
        *SYNTHETIC[1:],
        "binary=true",
        "loss=cals-alm[margin=0.5]",
        "accumulate=2",
        "optimizer=adam[lr=0.03]",
        "select=nll-after-temperature",
    ],
    "normalised": [SYNTHETIC[0], "model=tests.training.program:batch_normalised"],
    "dropout": [SYNTHETIC[0], "model=tests.training.program:forgetful", "checkpoint_batches=2"],
    "refused": SYNTHETIC,
    "odd": [*SYNTHETIC, "batch_size=15"],
}
RECIPES["stopped"] = [*RECIPES["dropout"]]
BINARY = ["single-logit", "several-labels"]
AS_ONE = ["plain", "averaged", "on-training-data", "void", "void-accumulated", "summed", *BINARY]
"""Those whose outcome does not depend on how a batch is divided."""

WAYS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"],
    "launcher": ["-m"],
}


@pytest.fixture(autouse=True, scope="module")
def data_sets() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATA_SETS, "spotted", program.spotted)
        patch.setitem(DATA_SETS, "labelled", program.labelled)
        yield


def recipe_of(name: str) -> Recipe:
    return Recipe.load("digits-lt").override([*COMMON, *RECIPES[name]])


def start(way: str, python: Path, folder: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    paths = [folder / f"{name}.toml" for name in names]
    for name, path in zip(names, paths, strict=True):
        path.write_text(recipe_of(name).to_toml())
    command = [str(python), *WAYS[way], "tests.training.program", str(folder), *map(str, paths)]
    command += ["--devices=2", "--stop-at-step=9"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    # A session of their own, so that none of them outlives a test that waited in vain.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.fixture(scope="module")
def pairs(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the way they were started: the folder with what two processes left."""
    folders = {}
    for way, names in (("torchrun", list(RECIPES)), ("launcher", ["plain"])):
        folders[way] = tmp_path_factory.mktemp(way)
        (folders[way] / "refused" / "checkpoints").mkdir(parents=True)
        (folders[way] / "refused" / "checkpoints" / "last.pt").touch()
        (folders[way] / "refused" / "recipe.toml").write_text(recipe_of("averaged").to_toml())
        finished = start(way, programs / "python", folders[way], names)
        assert finished.returncode == 0, finished.stderr
    return folders


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process left."""
    folder = tmp_path_factory.mktemp("alone")
    for name in AS_ONE:
        program.follow(recipe_of(name), folder / name)
    return folder


CASES = [*(("torchrun", name) for name in AS_ONE), ("launcher", "plain")]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_two_processes_equal_one(way: str, name: str, pairs: dict[str, Path], alone: Path) -> None:
    assert_close(pairs[way] / name, alone / name)
    fresh = recipe_of(name).create_loss(4).state_dict()["multiplier"]
    assert not torch.equal(tensors(alone / name)["loss.safetensors/multiplier"], fresh)


@pytest.mark.parametrize(("way", "name"), [*CASES, ("torchrun", "dropout")])
def test_both_hold_the_same_bits(way: str, name: str, pairs: dict[str, Path]) -> None:
    first, second = (
        torch.load(pairs[way] / name / f"process{rank}.pt", weights_only=True) for rank in range(2)
    )
    for part in ("loss", "model"):
        assert first[part].keys() == second[part].keys()
        assert [key for key in first[part] if not torch.equal(first[part][key], second[part][key])] == []


@pytest.mark.parametrize(("way", "name"), CASES)
def test_every_element_is_evaluated_once_and_in_order(way: str, name: str, pairs: dict[str, Path]) -> None:
    data = load_data(recipe_of(name).data)
    assert len(data.test) % 2 == 1
    for part, split in (("test", data.test), ("validation", data.validation)):
        with np.load(pairs[way] / name / f"{part}.npz") as archive:
            assert split.targets is not None
            labels = split.targets.masked_fill(split.targets == data.ignore_index, -100)
            np.testing.assert_array_equal(archive["labels"], labels.numpy())
            assert len(archive["logits"]) == len(split)
    counts = Run(pairs[way] / name).bins["validation_count"]  # of both processes together, and exact
    assert counts.sum(1).unique().tolist() == [(data.validation.targets != data.ignore_index).sum()]
    assert (counts.amax(1) - counts.amin(1) <= 1).all()


@pytest.mark.parametrize("name", ["normalised", "averaged"])
def test_what_both_predicted_is_what_the_kept_weights_predict(name: str, pairs: dict[str, Path]) -> None:
    """Statistics of batches differ between processes, and only those of the first are kept."""
    run = Run(pairs["torchrun"] / name)
    for part in ("validation", "test"):
        ((stored, _),) = run.predictions(part)
        logits = torch.cat([part for part, _ in Predicted(run.model, getattr(run.data, part), 8)])
        torch.testing.assert_close(stored, logits, rtol=1e-5, atol=1e-5)


def test_processes_draw_different_random_numbers(pairs: dict[str, Path]) -> None:
    first, second = (
        torch.load(pairs["torchrun"] / "dropout" / f"process{rank}.pt", weights_only=True)["draws"]
        for rank in range(2)
    )
    assert not torch.equal(first, second)


def test_two_stopped_processes_go_on_exactly(pairs: dict[str, Path]) -> None:
    folder = pairs["torchrun"]
    kept = checkpoint.load(folder / "left0" / "checkpoints" / "last.pt")
    assert (kept["epoch"], kept["step"]) == (1, 2)
    assert_identical(folder / "stopped", folder / "dropout")


def test_one_process_goes_on_with_the_confidences_of_two(pairs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(pairs["torchrun"] / "left0", tmp_path / "run")
    program.follow(recipe_of("stopped"), tmp_path / "run")
    for name in ("train_top_count", "train_true_count"):
        assert Run(tmp_path / "run").bins[name].sum(1).tolist() == [96.0] * 3  # stopped in the second epoch


def test_every_process_says_why_a_folder_is_refused(pairs: dict[str, Path]) -> None:
    for rank in range(2):
        said = (pairs["torchrun"] / f"refused.error{rank}").read_text()
        assert "refused holds a run of another recipe (there: " in said


def test_a_batch_that_two_processes_cannot_share_is_refused(pairs: dict[str, Path]) -> None:
    for rank in range(2):
        said = (pairs["torchrun"] / f"odd.error{rank}").read_text()
        assert said == "batch_size 15 cannot be divided equally among 2 processes; 14 can"


@pytest.mark.parametrize("name", BINARY)
def test_figures_of_single_logits_are_those_of_one_process(
    name: str, pairs: dict[str, Path], alone: Path
) -> None:
    two, one = (
        Run(folder / name).results(["temperature"], resamples=0) for folder in (pairs["torchrun"], alone)
    )
    for key, result in one.items():
        for metric in ("accuracy", "nll", "brier", "ece", "aurc"):
            found, expected = (each.evaluation.metrics[metric] for each in (two[key], result))
            assert found == pytest.approx(expected, rel=1e-4), metric
    assert two["temperature"].temperature == pytest.approx(one["temperature"].temperature, rel=1e-4)


COMPARING = """
import sys
from calibrant.training import Recipe, compare, loop

loop.run_folder.STORED = 0  # as if the predictions were too many to keep
recipe = Recipe.load("digits-lt").override(["epochs=1", "optimizer=sgd[lr=0.1]"])  # of 206 images
found = compare(recipe, ["ce", "cals-alm"], [0], sys.argv[1], resamples=20)
print("comparison" if found is not None else "nothing")
"""


def test_two_processes_compare_and_take_the_steps_of_one_with_a_smaller_last_batch(
    programs: Path, tmp_path: Path
) -> None:
    script = tmp_path / "comparing.py"
    script.write_text(COMPARING)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    python = str(programs / "python")
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for start, name in ((torchrun, "two"), ([python], "one")):
        result = subprocess.run(
            [*start, str(script), str(tmp_path / name)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("comparison") == 1
    for loss in ("ce", "cals-alm"):
        one, two = (
            load_file(tmp_path / name / "runs" / f"{loss}-seed0" / "model.safetensors")
            for name in ("one", "two")
        )
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-6)
