"""Which files the commands for training read and write, so that none is written over another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrant.cli.terminal import check_not_read

if TYPE_CHECKING:
    from calibrant.options import Choice
    from calibrant.training import Recipe


def check_written(
    folder: Path,
    names: Iterable[str],
    source: str | None,
    recipe: Recipe,
    data_root: Path | None,
    outside: Sequence[Choice] = (),
) -> None:
    """End the command if it would write over its recipe, its data, or files that the model is built from.

    ``names`` are the files to be written to the folder, ``source`` is the recipe as given on the command
    line (None with --data), and ``outside`` are data sets that are read beside the recipe's.
    """
    from calibrant.training.data import files_of
    from calibrant.training.run_folder import CHECKPOINTS, RESULT

    inputs = [file for choice in (recipe.data, *outside) for file in files_of(choice, data_root)]
    inputs += _files_of_model(recipe.model)
    # A run goes on by the recipe in its own folder, which is written again as it is.
    begun = any((folder / name).exists() for name in (RESULT, CHECKPOINTS))
    given = None if source is None else Path(source)
    if given and given.is_file() and not begun and given.read_text(encoding="utf-8") != recipe.to_toml():
        inputs.append(given)
    for name in names:
        check_not_read("--output", folder / name, inputs)


def files_of_run(folder: Path, recipe: Recipe, data_root: Path | None) -> list[Path]:
    """The files in the folder of a run, those of its data, and those that its model is built from."""
    from calibrant.training.data import files_of
    from calibrant.training.run_folder import BUNDLE

    own = [*folder.iterdir(), *(folder / BUNDLE).glob("*")]
    return [*own, *files_of(recipe.data, data_root), *_files_of_model(recipe.model)]


def _files_of_model(choice: Choice) -> list[Path]:
    """The existing files in the options of a model, such as ``weights``, and in the folder of ``hf:DIR``."""
    prefix, _, source = choice.name.partition(":")
    paths = [Path(value) for value in choice.options.values() if isinstance(value, str)]
    if prefix == "hf" and Path(source).is_dir():
        paths += Path(source).iterdir()
    return [path for path in paths if path.is_file()]
