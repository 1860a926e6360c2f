"""The examples are short, run to the end, print figures that can be true, and stand in their pages as is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = {
    "plain_loop": "plain-loop",
    "lightning": "lightning",
    "huggingface": "huggingface",
    "accelerate": "accelerate",
    "timm_mixup": "timm",
    "segmentation": "segmentation",
    "token_classification": "token-classification",
}
# As if the program were started itself: its folder is in the path. `tests` makes torchvision importable.
START = """
import os, sys
if os.path.basename(sys.argv[1]) not in ("plain_loop.py", "segmentation.py", "accelerate.py"):
    import tests
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
exec(compile(open(sys.argv[0], encoding="utf-8").read(), sys.argv[0], "exec"))
"""


def path_of(example):
    return ROOT / "examples" / f"{example}.py"


def page_of(example):
    return (ROOT / "docs" / "how-to" / f"{PAGES[example]}.md").read_text(encoding="utf-8")


def run(folder, example, *arguments, launcher=("-c", START)):
    """What the program prints, started in that folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(path_of(example)), *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def figures(output):
    """Accuracy and ECE of each loss, in percent: the first and the last percentage of a line."""
    lines = [re.findall(r"(\d+\.\d+)\s?%", line) for line in output.splitlines()]
    return [(float(percentages[0]), float(percentages[-1])) for percentages in lines if len(percentages) > 1]


def states(folder):
    """What the checkpoints of the plain loop hold: by file, every tensor and number in it."""
    return {path.name: flat(torch.load(path, weights_only=True)) for path in folder.glob("*.pt")}


def flat(state):
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return [leaf for entry in state for leaf in flat(entry)]
    return [state.tolist() if isinstance(state, torch.Tensor) else state]


def contents(folder):
    """The files under a folder that belong there, with their times."""
    return {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_example_has_a_page():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {"digits", *PAGES}
    pages = {path.stem for path in (ROOT / "docs" / "how-to").glob("*.md")}
    assert pages == {"README", *PAGES.values()}


@pytest.mark.parametrize("example", PAGES)
def test_an_example_is_short(example):
    assert len(path_of(example).read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("example", PAGES)
def test_a_page_has_the_example_as_it_is(example):
    source = path_of(example).read_text(encoding="utf-8")
    name = f"examples/{example}.py"
    assert f"[{name}](../../{name}):\n\n```py\n{source}```\n" in page_of(example)


@pytest.mark.parametrize("example", PAGES)
def test_the_index_lists_the_page(example):
    index = (ROOT / "docs" / "how-to" / "README.md").read_text(encoding="utf-8")
    assert f"]({PAGES[example]}.md)" in index


@pytest.mark.parametrize("example", PAGES)
def test_an_example_runs_in_any_folder_and_prints_figures(example, tmp_path):
    before = contents(ROOT / "examples")
    output = run(tmp_path, example)
    assert contents(ROOT / "examples") == before
    assert re.search(r"accuracy.*ECE", output), output
    found = figures(output)
    assert len(found) >= 2, output  # cross-entropy and at least one more
    # Far above guessing and not perfect: the networks have learned, and from other data than these.
    assert all(50 < accuracy < 100 and 0 < ece < 30 for accuracy, ece in found), output


def test_the_plain_loop_resumes_and_runs_on_two_processes(tmp_path):
    """Stopped and resumed, and on two processes, it prints what it prints in one go on one process."""
    for name in ("whole", "stopped", "two"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", "plain_loop", "6", launcher=())
    assert run(tmp_path / "stopped", "plain_loop", "3", launcher=()) != whole
    assert run(tmp_path / "stopped", "plain_loop", "6", launcher=()) == whole
    assert states(tmp_path / "stopped") == states(tmp_path / "whole")
    assert set(states(tmp_path / "whole")) == {"plain-loop-ce.pt", "plain-loop-cals-alm.pt"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run(tmp_path / "two", "plain_loop", "6", launcher=torchrun) == whole
