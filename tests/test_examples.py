"""Examples are short, run as documented, print plausible figures, and are shown unchanged in their pages."""

import os
import re
import socket
import subprocess
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

SHORTER = {
    "plain_loop": [("else 60", "else 11")],
    "lightning": [("else 60", "else 11")],
    "huggingface": [("num_train_epochs=20", "num_train_epochs=3")],
    "accelerate": [("else 60", "else 11")],
    "timm_mixup": [
        ("EPOCHS, MIXUP_OFF = 30, 10", "EPOCHS, MIXUP_OFF = 10, 3"),
        ("size=(32, 32)", "size=(16, 16)"),
    ],
    "segmentation": [("EPOCHS = 11, 255, 50", "EPOCHS = 11, 255, 3")],
    "token_classification": [('"num_train_epochs": 15', '"num_train_epochs": 2')],
}
"""Numbers of each example, mostly epochs, and smaller ones for the tests; `make examples` has all of them."""


def path_of(example):
    return ROOT / "examples" / f"{example}.py"


def page_of(example):
    return (ROOT / "docs" / "how-to" / f"{PAGES[example]}.md").read_text(encoding="utf-8")


def run(programs, folder, program, *arguments, launcher=()):
    """What the program prints when it is started in that folder, as its page says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(programs / "python"), *launcher, str(program), *arguments]
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
    """The content of the plain loop's checkpoints: by file, every tensor and number in it."""
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
    assert pages == {"README", "own-parts", *PAGES.values()}  # that page has its files in its text


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
def test_an_example_runs_in_any_folder_and_prints_figures(example, programs, tmp_path):
    source = path_of(example).read_text(encoding="utf-8")
    for longer, shorter in SHORTER[example]:
        assert source.count(longer) == 1
        source = source.replace(longer, shorter)
    program = tmp_path / "programs" / f"shorter_{example}.py"
    program.parent.mkdir()
    program.write_text(source, encoding="utf-8")
    before = contents(program.parent)
    output = run(programs, tmp_path, program)
    assert contents(program.parent) == before
    assert re.search(r"accuracy.*ECE", output), output
    found = figures(output)
    assert len(found) >= 2, output  # cross-entropy and at least one more
    # Far above guessing and not perfect: the networks have learned, and from other data than these.
    assert all(50 < accuracy < 100 and 0 < ece < 30 for accuracy, ece in found), output


def test_the_plain_loop_resumes_and_runs_on_two_processes(programs, tmp_path):
    """Stopped and resumed, and on two processes, it prints what it prints in one go on one process."""
    for name in ("whole", "stopped", "two"):
        (tmp_path / name).mkdir()
    program = path_of("plain_loop")
    whole = run(programs, tmp_path / "whole", program, "2")
    assert run(programs, tmp_path / "stopped", program, "1") != whole
    assert run(programs, tmp_path / "stopped", program, "2") == whole
    assert states(tmp_path / "stopped") == states(tmp_path / "whole")
    assert set(states(tmp_path / "whole")) == {"plain-loop-ce.pt", "plain-loop-cals-alm.pt"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)
    assert run(programs, tmp_path / "two", program, "2", launcher=torchrun) == whole
