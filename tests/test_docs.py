"""The documents match the code: blocks and commands run, lists and counts follow the registries."""

import ast
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import calibrant
import calibrant.reports.plots
from calibrant.calibrators import CALIBRATORS
from calibrant.losses import AdaptiveLoss, Loss
from calibrant.metrics import METRICS
from calibrant.training.recipe import shipped_recipes

from .onnx_exporter import operators_listed_once

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
LOSS_PAGE = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")


def python_blocks():
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(1))
            yield pytest.param(document, line, match[1], id=f"{document.name}:{line + 1}")


SHORTER_PYTHON = {
    r"^(for epoch in range|epochs = )(\(?)\d+": r"\1\g<2>2",
    r"\b22_000\b": "3000",
    r"\b20_000\b": "1000",
    r"\b300\b": "100",
}
"""Numbers in the Python of pages, and smaller ones for the tests."""


def with_smaller_numbers(text, numbers):
    for pattern, smaller in numbers.items():
        text = re.sub(pattern, smaller, text, flags=re.MULTILINE)
    return text


@pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\):FutureWarning")  # torch.onnx on torch
@pytest.mark.parametrize(("document", "line", "source"), list(python_blocks()))
def test_every_python_block_runs(document, line, source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # a block may write files
    # The same graphs without a C++ compiler at work on them: seconds instead of a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    code = compile("\n" * line + with_smaller_numbers(source, SHORTER_PYTHON), str(document), "exec")
    # A block may register a loss. A thousand resamples, the default, take most of the time of some.
    fewer = patch.dict(calibrant.evaluate.__kwdefaults__, resamples=40)
    with patch.dict(calibrant.LOSSES), fewer, operators_listed_once():
        exec(code, {"__name__": "__main__"})


LOSS_TABLE, _, LOSS_SECTIONS = LOSS_PAGE.partition("\n## All losses\n")[2].partition("\n## ")


def cells(text):
    """The cells of each row of the tables in a text that starts with code."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def table_rows():
    """The cells of each loss in the table, by key."""
    return {row[0].strip("`"): row for row in cells(LOSS_TABLE)}


def stated_defaults(text):
    """The values of all code spans of the form ``name=value``."""
    return {name: ast.literal_eval(value) for name, value in re.findall(r"`(\w+)=([^`]+)`", text)}


def defaults(loss):
    return {name: parameter.default for name, parameter in loss.hyperparameters().items()}


def test_the_table_lists_every_loss_once_and_in_order():
    assert re.findall(r"^\| `([^`]+)`", LOSS_TABLE, re.MULTILINE) == list(calibrant.LOSSES)


@pytest.mark.parametrize("key", calibrant.LOSSES)
def test_the_row_of_a_loss_matches_its_class(key):
    loss = calibrant.LOSSES[key]
    _, name, _, hyperparameters, probabilities, adaptive, _ = table_rows()[key]
    shared = defaults(Loss)
    own = {name: default for name, default in defaults(loss).items() if name not in shared}
    assert name == f"`{loss.__name__}`"
    assert stated_defaults(hyperparameters) == own
    assert probabilities == ("yes" if loss.accepts_probabilities else "no")
    assert adaptive == ("yes" if issubclass(loss, AdaptiveLoss) else "no")


def test_every_default_has_a_source():
    (section,) = re.findall(r"Where the defaults come from\n(.*?)\n## ", LOSS_SECTIONS, re.DOTALL)
    stated = [
        (key, name.strip("`"), ast.literal_eval(default.strip("`")))
        for keys, name, default, source in cells(section)
        for key in re.findall(r"`([^`]+)`", keys)
        if source
    ]
    own = [
        (key, name, default)
        for key, loss in calibrant.LOSSES.items()
        for name, default in defaults(loss).items()
        if name not in defaults(Loss)
    ]
    assert sorted(stated, key=lambda row: list(calibrant.LOSSES).index(row[0])) == own


def test_the_shared_arguments_are_stated_below_the_table():
    (sentence,) = re.findall(r"^Every loss also takes (.*?)\.\s", LOSS_PAGE, re.MULTILINE | re.DOTALL)
    assert stated_defaults(sentence) == defaults(Loss)


def in_one_kernel():
    """The losses that have a GPU kernel with their default arguments."""
    for key, loss in calibrant.LOSSES.items():
        composition = calibrant.create_loss(key, 10).composition()
        fused = composition is not None and composition.has_device_form
        if fused and loss.over_batch is Loss.over_batch:
            yield key


COUNTS = {
    "calibration losses": (len(calibrant.LOSSES), ["README.md", "CHANGELOG.md", "pyproject.toml"]),
    "losses run in one": (len(list(in_one_kernel())), ["README.md", "CHANGELOG.md", "docs/losses.md"]),
    "post-hoc calibrators": (len(CALIBRATORS), ["CHANGELOG.md"]),
    "metrics": (len(METRICS), ["CHANGELOG.md"]),
    "plots": (len(calibrant.reports.plots.__all__), ["CHANGELOG.md"]),
    "recipes": (len(shipped_recipes()), ["README.md", "CHANGELOG.md"]),
    "examples": (len(list((ROOT / "examples").glob("*.py"))), ["CHANGELOG.md"]),
}
"""Things that documents count: how many there are, and the files that must say so in digits."""


@pytest.mark.parametrize("noun", COUNTS)
def test_counts_are_those_of_the_registries(noun):
    count, files = COUNTS[noun]
    for file in {*files, *(str(path.relative_to(ROOT)) for path in DOCUMENTS)}:
        found = re.findall(rf"(\d+)\s+{noun}\b(?!/)", (ROOT / file).read_text(encoding="utf-8"))
        assert set(found) == {str(count)} or (not found and file not in files), file


@pytest.mark.parametrize(
    ("file", "pattern", "keys"),
    [
        ("README.md", r"\*\*Every loss by its key\*\*: `([^`]+)`", calibrant.LOSSES),
        ("README.md", r"\*\*Post-hoc calibrators\*\*[^`]*`([^`]+)`", CALIBRATORS),
        ("CHANGELOG.md", r"calibration losses by key[^:]*:([^.]+)\.", calibrant.LOSSES),
        ("docs/losses.md", r"losses run in one Triton kernel[^:]*:([^.]+)\.", list(in_one_kernel())),
        (
            "docs/how-to/timm.md",
            r"## Which losses take mixed targets\n\n([^(]+)\(",
            [key for key, loss in calibrant.LOSSES.items() if loss.accepts_probabilities],
        ),
    ],
)
def test_every_key_is_listed(file, pattern, keys):
    (listed,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"))
    assert re.findall(r"[a-z-]+", listed.replace("\n", " ").replace(" and ", " ")) == list(keys)


def test_the_table_of_calibrators_names_their_classes():
    text = (ROOT / "docs" / "calibrators.md").read_text(encoding="utf-8")
    rows = cells(text.partition("\n| key | class |")[2].partition("\n\n")[0])
    assert [row[:2] for row in rows] == [
        [f"`{key}`", f"`{kind.__name__}`"] for key, kind in CALIBRATORS.items()
    ]


def test_every_plot_is_listed():
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    table = text.partition("| function | plots |\n")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    assert sorted(names) == calibrant.reports.plots.__all__


SHORTER = {
    r'changes = \["epochs=4"\]': 'changes = ["epochs=1"]',
    r"\bepochs=[2-9]\b": "epochs=2",
    r"\bepochs=10\b": "epochs=2 --set optimizer.lr=0.004",  # as far as in five epochs of 0.001
    r"--resamples \d+": "--resamples 20",
    r"--trials \d+": "--trials 2",
    r"--over margin=4,6,8\b": "--over margin=4,8",
    r"\bce,ls,cals-alm\b": "ce,cals-alm",
    r'\["ce", "ls", "ada-scale"\]': '["ce", "ada-scale"]',
    # Two seeds are compared once, and once in several processes.
    r"--seeds 0,1(?= --set epochs=2$| .*(?:--calibrators .temp|--shift |--output sweep))": "--seeds 0",
    # Numbers of elements.
    r"\(1000, 3\)": "(300, 3)",
    r"\b2000\b": "500",
    r"\b200 \*": "50 *",
    "^import own_parts$": "import own_parts, tests.programs; tests.programs.draw_blank()",
    "^torchrun ": "python -m torch.distributed.run ",  # with what it imports there already
    # The graph for ONNX takes longest: the commands for using a model write one.
    "--output labels.onnx": "--output labels.pt2 --format torch",
}
"""Numbers in the commands of pages, and smaller ones for the tests."""


def run_commands(text, programs, folder):
    """Run all bash blocks of a page in a folder, with smaller numbers; they must succeed."""
    commands = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    folders = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(folders)}
    command = ["bash", "-e", "-c", with_smaller_numbers("\n".join(commands), SHORTER)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result


def test_the_commands_for_using_a_model_run(programs, tmp_path):
    text = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
    printed = run_commands(text, programs, tmp_path).stdout
    assert "new.csv: 5 inputs of new.npy" in printed
    assert "calibrated by vector" in printed
    assert (tmp_path / "new.csv").read_text().startswith("name,prediction,probability_0,")
    assert {"a.onnx", "a.pt2"} <= {path.name for path in tmp_path.iterdir()}


def test_the_commands_for_conformal_sets_run(programs, tmp_path):
    """In an empty folder; the table has the form that the page shows."""
    text = (ROOT / "docs" / "after-calibration.md").read_text(encoding="utf-8")
    printed = run_commands(text, programs, tmp_path).stdout
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    form = [re.sub(r"[\d.,]+", "0", line).split() for line in shown.splitlines()]
    assert form == [re.sub(r"[\d.,]+", "0", line).split() for line in printed.splitlines()[-len(form) :]]
    assert (tmp_path / "sets.safetensors").is_file()


def test_the_commands_for_single_logits_run(programs, tmp_path):
    text = (ROOT / "docs" / "binary.md").read_text(encoding="utf-8")
    printed = run_commands(text, programs, tmp_path).stdout
    assert "runs/single: spam, ce, seed 0, 2 epochs" in printed
    assert "runs/texts/bundle: " in printed
    assert "labels.pt2: inputs: float32 (batch, 4) to probabilities of 3 labels" in printed
    header = "name,probability_cat,probability_dog,probability_bird"
    assert (tmp_path / "probabilities.csv").read_text().startswith(header)
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_the_commands_with_own_parts_run(programs, tmp_path):
    text = (ROOT / "docs" / "how-to" / "own-parts.md").read_text(encoding="utf-8")
    result = run_commands(text, programs, tmp_path)
    assert "runs/poly: digits-lt, poly[epsilon=2], seed 0, 2 epochs" in result.stdout
    assert "shrink, fitted to validation.npz" in result.stdout
    assert "calibrated.npz: " in result.stdout
    assert "Confident errors" in result.stdout
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    error, code = shown.splitlines()
    assert error in result.stderr.splitlines()
    assert code in result.stdout


def test_the_commands_of_the_leaderboard_run(programs, tmp_path):
    text = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    printed = run_commands(text, programs, tmp_path)
    assert "long-tailed digits: ada-scale, seed 1: done" in printed.stderr
    assert "Mean ranks over 2 experiments (digits; long-tailed digits)" in printed.stdout
    assert (tmp_path / "board" / "leaderboard.html").is_file()


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        (
            "training",
            [r"runs/a: digits-lt, cals-alm, seed 0, 2 epochs", r"cals-alm\[margin=6\]", r"trial 0: margin=8"],
        ),
        (
            "own-data",
            [
                r"runs/photos: photos, ce, seed 0, 2 epochs",
                r"runs/wine: wine, ce, seed 0, 50 epochs, epoch \d+ kept; validation accuracy (9\d|100)",
                r"runs/rooms: rooms, ce",
                r"runs/reviews: reviews, ce",
                r"runs/digits: digits, ce",
                r"runs/cals: wine, cals-alm, seed 0, 2 epochs",
            ],
        ),
        ("evaluate-command", [r"overconfident: ECE"]),
        (
            "calibrate-command",
            [
                r"temperature \(T = [23]\.\d+\), fitted to validation\.npz",
                r"Held-out NLL",
                r"ECE 0\.\d+ before, 0\.\d+ after",
            ],
        ),
    ],
)
def test_every_command_of_a_page_runs(page, printed, programs, tmp_path):
    """In an empty folder and in the order of the page; its last error is what the page shows."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    result = run_commands(text, programs, tmp_path)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    error, code = shown.splitlines()
    errors = [line for line in result.stderr.splitlines() if line.startswith("calibrant: ")]
    # Of short runs, which the page makes longer.
    assert [line for line in errors if "penalty had no effect in" not in line] == [error]
    assert code in result.stdout
    for pattern in printed:
        assert re.search(pattern, result.stdout), pattern
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_the_demo_runs(programs):
    program = ROOT / "examples" / "digits.py"
    command = [str(programs / "python"), str(program), "--epochs", "2", "--seeds", "1"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.search(r"^\W*ce\W+\d", output, re.MULTILINE)
    assert re.search(r"^\W*cals-alm\W+\d", output, re.MULTILINE)


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "benchmarks" / "README.md"], ids=lambda path: path.name
)
def test_relative_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        assert link.startswith("http") or (document.parent / link).exists(), link


@pytest.mark.parametrize("command", ["evaluate", "calibrate"])
def test_the_tables_of_options_are_complete(command):
    from typer.main import get_command

    from calibrant.cli import app

    text = (ROOT / "docs" / f"{command}-command.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE)
    options = {
        option
        for parameter in get_command(app).commands[command].params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    }
    assert {option for row in table for option in re.findall(r"`(--[a-z-]+)", row)} == options - {"--help"}


@pytest.mark.parametrize("name", ["npz", "image-folder", "table", "text-table", "huggingface"])
def test_the_table_of_data_options_is_complete(name):
    from calibrant.options import options_of
    from calibrant.training.data import DATA_SETS

    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{name}` \|.*\| (.*) \|$", text, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(options_of(DATA_SETS[name]))
