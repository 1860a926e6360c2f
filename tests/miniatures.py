"""The commands of docs/reproduce.md in miniature: the same losses, options and files on small generated data.

Data, network, epochs, batch size, seeds, values of a sweep and resamples are small ones. Everything else is
as on the page. Commands that are equal after that run once, and equal runs are trained once.

Every loss is trained once with each of its options, and every comparison has its first and its last loss. It
leaves out others that an earlier one has trained on the same kind of data, if only with other numbers, unless
the page names files of their runs. What settings, calibrators and columns do with a run does not depend on
its loss, and `test_recipes_and_losses_of_a_section_can_be_followed` makes every loss with every number.
"""

from __future__ import annotations

import pickle
import re
import subprocess
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from typer.testing import CliRunner

from calibrant import cli
from calibrant.options import split_outside_brackets
from calibrant.reports.plots.drawing import figure_of
from calibrant.reports.run_figures import Drawing, RunRecord, drawings_of_runs
from calibrant.training.data.in_memory import CIFAR10_CLASSES
from calibrant.training.recipe import Recipe
from calibrant.training.runs import folder_of

from .training.data.test_in_memory import write_cifar10_c, write_svhn
from .training.data.test_segmentation import write_voc

RECIPES = {
    "images": """
batch_size = 70
data = { name = "cifar10", validation = 60 }
model = { name = "mlp", hidden = [8] }
optimizer = { name = "adam", lr = 0.01 }
""",
    "pixels": """
batch_size = 4
data = { name = "voc2012", validation = 0.4, crop = 16 }
model = "tests.miniatures:one_convolution"
optimizer = { name = "adam", lr = 0.01 }
""",
}
"""The recipes that stand for all those of the page: classes of images, and of pixels."""

IN_EVERY_DATA_SET = ("data.validation_imbalance", "data.validation_noise")
"""Options of data that the small data have too."""

SMALLER = ("epochs", "batch_size", "data", "model", "schedule")
"""Tables and keys of a recipe that are small in a miniature, whatever the page sets."""

SMALL_OPTIONS = {
    "compare": {"--resamples": "10", "--accelerator": "cpu"},
    "sweep": {"--resamples": "10", "--accelerator": "cpu"},
    "evaluate": {"--resamples": "10"},
    "figures": {"--bins": "1"},
}
"""Options of a miniature, by command, unless the page gives them."""


def one_convolution(num_classes: int) -> nn.Module:
    """A network for segmentation."""
    return nn.Conv2d(3, num_classes, 1)


def commands_of(blocks: str) -> list[list[str]]:
    """The arguments of every `calibrant` in shell code, with its loops and variables expanded."""
    stand_in = "set -eu; calibrant() { printf '%s\\037' \"$@\"; printf '\\036'; }\n"
    result = subprocess.run(["bash", "-c", stand_in + blocks], capture_output=True, text=True, check=True)
    return [command.split("\037")[:-1] for command in result.stdout.split("\036")[:-1]]


def values_of(arguments: list[str], option: str) -> list[str]:
    """The values of an option that may be repeated."""
    return [value for name, value in pairwise(arguments) if name == option]


def write_data(root: Path) -> None:
    """Write all data sets that miniatures read, in the formats of their authors."""
    root.mkdir()
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(0)
    colours = generator.integers(0, 206, (10, 3))
    labels = list(range(10)) * 4
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        pixels = colours[labels].repeat(1024, 1) + generator.integers(0, 50, (len(labels), 3072))
        content = {b"data": pixels.astype(np.uint8), b"labels": labels}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = {b"label_names": [name.encode() for name in CIFAR10_CLASSES]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    write_cifar10_c(root, size=40)
    write_svhn(root, "test")
    write_voc(root)


class FirstPictures:
    """Draws the first picture of each kind and leaves the others blank: they would take a third of the time.

    A kind is what is drawn, whatever the data. Pictures of runs whose losses learn other quantities are of
    another kind.
    """

    def __init__(self) -> None:
        self.kinds: set[tuple[object, ...]] = set()

    def is_new(self, *kind: object) -> bool:
        """Whether this is the first picture of its kind."""
        new = kind not in self.kinds
        self.kinds.add(kind)
        return new

    def figure_of(self, plot: Callable[..., Axes], *data: object, **options: Any) -> Figure:
        """Stand-in for `drawing.figure_of`."""
        new = self.is_new(plot.__name__, options.get("metric"), options.get("name"))
        return figure_of(plot, *data, **options) if new else Figure()

    def drawings_of_runs(self, runs: Sequence[RunRecord], **options: Any) -> list[Drawing]:
        """Stand-in for `run_figures.drawings_of_runs`."""
        learned = frozenset(name for run in runs for name in run.learned)
        found: list[Drawing] = []
        for name, draw in drawings_of_runs(runs, **options):
            assert isinstance(draw, partial)
            what = [each for each in draw.args if isinstance(each, str)]
            found.append((name, draw if self.is_new(draw.func.__name__, learned, *what) else Figure))
        return found


def blank_picture(figure: Figure, **options: Any) -> bytes:
    """Stand-in for `drawing._saved`: a picture without the time to render it."""
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
    return svg if options["format"] == "svg" else b"\x89PNG\r\n\x1a\n"


class Miniatures:
    """Runs commands in the current folder, and remembers what it has run and where the page puts it.

    Args:
        named: the files and folders that the page names.
    """

    def __init__(self, named: Collection[str]) -> None:
        self.named = named
        self.losses: set[tuple[str, str]] = set()
        self.done: dict[tuple[str, ...], list[str]] = {}
        self.places: dict[str, str] = {}
        self.trained: dict[tuple[str, ...], Path] = {}
        write_data(Path("data"))
        for name, recipe in RECIPES.items():
            Path(f"{name}.toml").write_text(f"epochs = 2\n{recipe}")

    def place(self, path: str) -> str:
        """Where the output that the page puts at a path really is."""
        for parent in (Path(path), *Path(path).parents):
            if str(parent) in self.places:
                return str(Path(self.places[str(parent)], Path(path).relative_to(parent)))
        return path

    def smaller(self, arguments: list[str]) -> list[str]:
        """The arguments of the miniature of a command."""
        command, *rest = arguments
        smaller = [command]
        if command in ("compare", "sweep"):
            dense = Recipe.load(rest.pop(0)).data.name == "voc2012"
            smaller.append("pixels.toml" if dense else "images.toml")
        while rest:
            argument = rest.pop(0)
            if not argument.startswith("--"):
                smaller.append(self.place(argument))
                continue
            value = rest.pop(0)
            if argument == "--seeds":
                value = value.partition(",")[0]
            elif argument == "--over":
                value = ",".join(value.split(",")[:2])
            key = value.partition("=")[0]
            small = key.partition(".")[0] in SMALLER and key not in IN_EVERY_DATA_SET
            if argument != "--set" or not small:
                smaller += [argument, value]
        for option, value in SMALL_OPTIONS.get(command, {}).items():
            if option not in smaller:
                smaller += [option, value]
        return smaller

    def runs_of(self, smaller: list[str]) -> dict[tuple[str, ...], Path]:
        """The folders of all runs of a comparison, by recipe, settings and loss."""
        names = ("--output", "--losses", "--seeds")
        (output,), (losses,), (seed,) = (values_of(smaller, name) for name in names)
        settings = (smaller[1], *values_of(smaller, "--set"), seed)
        each = split_outside_brackets(losses)
        return {(*settings, loss): folder_of(Path(output), loss, int(seed)) for loss in each}

    def with_fewer_losses(self, smaller: list[str]) -> list[str]:
        """The arguments of a comparison without losses that it does not need."""
        names = ("--output", "--losses", "--seeds")
        (output,), (losses,), (seed,) = (values_of(smaller, name) for name in names)
        each = split_outside_brackets(losses)

        def is_needed(loss: str) -> bool:
            folder = str(folder_of(Path(output), loss, int(seed)))
            kind = (smaller[1], re.sub(r"\d[\d.e-]*", "0", loss))
            new = kind not in self.losses
            self.losses.add(kind)
            return new or any(name.startswith(folder) for name in self.named)

        kept = [loss for loss in each if is_needed(loss) or loss in (each[0], each[-1])]
        place = smaller.index("--losses") + 1
        return [*smaller[:place], ",".join(kept), *smaller[place + 1 :]]

    def run(self, arguments: list[str]) -> None:
        """Run the miniature of a command, unless an equal one has run.

        Raises:
            AssertionError: it failed, or it did not write its output.
        """
        command = arguments[0]
        smaller = self.smaller(arguments)
        outputs = [values_of(arguments, option) for option in ("--output", "--report", "--json")]
        paths = [path for values in outputs for path in values]
        key = tuple(argument for argument in smaller if argument not in paths)
        if key not in self.done:
            for path in paths:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            if command == "compare":
                smaller = self.with_fewer_losses(smaller)
            runs = self.runs_of(smaller) if command == "compare" else {}
            for run in runs.keys() & self.trained.keys():
                runs[run].parent.mkdir(parents=True, exist_ok=True)
                runs[run].symlink_to(self.trained[run].absolute())
            result = CliRunner().invoke(cli.app, smaller)
            assert result.exit_code == 0, f"calibrant {' '.join(smaller)}\n{result.output}"
            for path in paths:
                assert Path(path).exists(), f"calibrant {' '.join(smaller)} wrote no {path}"
            self.done[key] = paths
            self.trained = runs | self.trained
        self.places |= dict(zip(paths, self.done[key], strict=True))


def rows_of(page: str) -> dict[str, list[str]]:
    """The cells of every row about an item of a paper, by the item."""
    lines = re.findall(r"^\| ((?:CALS|Dual focal|AdaFocal), .*) \|$", page, re.MULTILINE)
    return {item: cells for item, *cells in (line.split(" | ") for line in lines)}
