"""Which files the commands for training read and write, so that none is written over another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrant.cli.terminal import check_not_read

if TYPE_CHECKING:
    from calibrant.options import Choice
    from calibrant.training import Recipe

RUN = (
    *("recipe.toml", "result.json", "evaluation.json", "log.csv", "log.jsonl", "test.npz", "validation.npz"),
    *("model.safetensors", "loss.safetensors", "learned.safetensors"),
)
"""The files of a run, in its folder."""

COMPARISON = ("results.json", "results.md", "results.tex", "report.html")
"""The files of a comparison, in its folder."""


def check_written(
    folder: Path,
    names: Iterable[str],
    source: str,
    recipe: Recipe,
    data_root: Path | None,
    outside: Sequence[Choice] = (),
) -> None:
    """End the command if it would write over its recipe or its data.

    Args:
        folder: the output folder.
        names: the files to be written there.
        source: the recipe as given on the command line.
        recipe: the recipe itself.
        data_root: the folder with the files of the data sets.
        outside: data sets that are read beside the recipe's.
    """
    from calibrant.training.data import files_of

    inputs = [file for choice in (recipe.data, *outside) for file in files_of(choice, data_root)]
    given = Path(source)
    # A run goes on by the recipe in its own folder, which is written again as it is.
    begun = any((folder / name).exists() for name in ("result.json", "checkpoints"))
    if given.is_file() and not begun and given.read_text(encoding="utf-8") != recipe.to_toml():
        inputs.append(given)
    for name in names:
        check_not_read("--output", folder / name, inputs)


def files_of_run(folder: Path, recipe: Recipe, data_root: Path | None) -> list[Path]:
    """The files in the folder of a run, and those of its data."""
    from calibrant.training.data import files_of

    return [*folder.iterdir(), *files_of(recipe.data, data_root)]
