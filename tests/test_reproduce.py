"""docs/reproduce.md: every table and figure of the papers has a row, and every command runs in miniature."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from calibrant.losses import create_loss
from calibrant.options import split_outside_brackets
from calibrant.reports import comparison_page, page, run_figures
from calibrant.reports.plots import drawing
from calibrant.training.data import in_memory
from calibrant.training.recipe import Recipe

from .miniatures import FirstPictures, Miniatures, blank_picture, commands_of, rows_of, values_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"

SECTIONS = dict(re.findall(r"^###? (.+)\n((?:(?!##).*\n)*)", PAGE, re.MULTILINE))
"""The text below every heading."""

COMMANDS = {
    heading: commands
    for heading, text in SECTIONS.items()
    if (commands := commands_of("".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))))
}
"""The commands of every section that has some."""

pytestmark = pytest.mark.filterwarnings("ignore:the temperature stopped at its bound")  # by so few data

PARTS = {
    "CALS, Figure 3": "abc",
    "Dual focal, Figure 4": "abc",
    "AdaFocal, Figure 1": "ab",
    "AdaFocal, Figure 3": "abcd",
}
"""Figures whose parts come from different experiments, and have a row each."""

NUMBERED = {
    "CALS": {"Table": 4, "Figure": 4},
    "Dual focal": {"Table": 13, "Figure": 4},
    "AdaFocal": {"Table": 8, "Figure": 56},
}
"""How many tables and figures each paper has, appendices included."""

CLASSES = {
    "cifar10": 10,
    "cifar100": 100,
    "svhn": 10,
    "tiny-imagenet": 200,
    "imagenet": 1000,
    "imagenet-lt": 1000,
    "voc2012": 21,
    "newsgroups": 20,
}


def anchor(heading: str) -> str:
    """The address of a heading in a rendered page."""
    kept = [letter for letter in heading.lower() if letter.isalnum() or letter in " -"]
    return "".join(kept).replace(" ", "-")


def items() -> list[str]:
    numbered = [
        f"{paper}, {kind} {number}"
        for paper, kinds in NUMBERED.items()
        for kind, count in kinds.items()
        for number in range(1, count + 1)
    ]
    return [f"{item}{part}" for item in numbered for part in PARTS.get(item, [""])]


def test_every_table_and_figure_has_one_row() -> None:
    rows = re.findall(r"^\| ((?:CALS|Dual focal|AdaFocal), (?:Table|Figure) \w+) \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(items())


def test_rows_are_complete() -> None:
    """Each has a published figure or what is shown instead, and a command or the reason why there is none."""
    for heading, text in SECTIONS.items():
        for item, cells in rows_of(text).items():
            assert len(cells) == 4, item
            assert all(cell.strip() for cell in cells), item
            assert heading in COMMANDS or cells[1].startswith("No command: "), item


def test_contents_lead_to_the_sections_of_the_items() -> None:
    addresses = {anchor(heading): text for heading, text in SECTIONS.items()}
    (contents,) = re.findall(r"^## Contents\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    papers = dict(re.findall(r"^\| (CALS|dual focal loss|AdaFocal) \| (.*) \|$", contents, re.MULTILINE))
    for (paper, kinds), links in zip(NUMBERED.items(), papers.values(), strict=True):
        for kind, cell in zip(kinds, links.split(" | "), strict=True):
            found = []
            for numbers, address in re.findall(r"\[([^]]+)\]\(#([^)]+)\)", cell):
                assert address in addresses, address
                if not numbers[0].isdigit():
                    continue
                for number in numbers.split(", "):
                    first, _, last = number.partition("–")
                    each = [first] if not last else [str(n) for n in range(int(first), int(last) + 1)]
                    for name in each:
                        assert f"| {paper}, {kind} {name}" in addresses[address], name
                    found += [name.rstrip(string.ascii_lowercase) for name in each]
            assert sorted(set(found), key=int) == [str(n) for n in range(1, kinds[kind] + 1)]


@pytest.mark.parametrize("heading", COMMANDS)
def test_recipes_and_losses_of_a_section_can_be_followed(heading: str) -> None:
    for command, recipe, *arguments in (each for each in COMMANDS[heading] if values_of(each, "--output")):
        if command not in ("compare", "train", "sweep"):
            continue
        followed = Recipe.load(recipe).override(values_of(arguments, "--set"))
        losses = ",".join(values_of(arguments, "--losses") + values_of(arguments, "--loss"))
        for loss in split_outside_brackets(losses):
            replace(followed, loss=loss).create_loss(CLASSES[followed.data.name])


@pytest.fixture(scope="module")
def miniatures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Miniatures]:
    folder = tmp_path_factory.mktemp("miniatures")
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CALIBRANT_DATA", "data")
        patch.setitem(in_memory.cifar10_c.__kwdefaults__, "validation", 60)  # the files have 200 images
        # Pictures and pages take most of the time, and other tests look at them.
        pictures = FirstPictures()
        patch.setattr(drawing, "_saved", blank_picture)
        patch.setattr(comparison_page, "figure_of", pictures.figure_of)
        patch.setattr(run_figures, "drawings_of_runs", pictures.drawings_of_runs)
        patch.setattr(comparison_page, "reliability_grid", lambda data, title: Figure())
        patch.setattr(page, "render_report", lambda *arguments, **options: "<!doctype html>")
        named = re.findall(r"`((?:runs|figures)/[^`]+)`", PAGE)
        for command in (each for commands in COMMANDS.values() for each in commands):
            outputs = values_of(command, "--output")
            named += [each for each in command if each not in outputs]
        yield Miniatures(named)
    assert Path.cwd() == before


@pytest.mark.parametrize("heading", COMMANDS)
def test_commands_of_a_section_run_and_write_what_its_rows_name(heading: str, miniatures: Miniatures) -> None:
    for arguments in COMMANDS[heading]:
        miniatures.run(arguments)
    for item, cells in rows_of(SECTIONS[heading]).items():
        for path in re.findall(r"`((?:runs|figures)/[^`]+)`", cells[0]):
            assert Path(miniatures.place(path)).exists(), f"{item}: {path}"


def test_measured_figures_are_those_of_the_results() -> None:
    """Every number with decimals in the column "here" is in the tables of benchmarks/results."""
    stored = " ".join(path.read_text(encoding="utf-8") for path in RESULTS.rglob("*.md"))
    known = set(re.findall(r"\d+\.\d+", stored))
    for item, cells in rows_of(PAGE).items():
        text = re.sub(r"\]\([^)]*\)", "", cells[2])
        if not item.startswith("CALS, Table 4"):
            assert set(re.findall(r"\d+\.\d+", text)) <= known, item


def test_hyperparameters_of_cals_are_those_of_its_table() -> None:
    loss = create_loss("cals-alm", 10)
    names = ("margin", "initial_multiplier", "initial_penalty_weight", "growth", "required_decrease", "every")
    assert [getattr(loss, name) for name in names] == [10, 1e-6, 1, 1.2, 0.9, 10]
