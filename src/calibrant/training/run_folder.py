"""The folder of a run: its files, how they are written and read, and checks before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from calibrant.atomic import replace_file, why_unwritable
from calibrant.options import RecipeError
from calibrant.printable import is_unicode, printable
from calibrant.training import checkpoint
from calibrant.training.data import DataSets
from calibrant.training.recipe import Recipe

RECIPE, RESULT, CHECKPOINTS = "recipe.toml", "result.json", "checkpoints"
WEIGHTS, LOSS = "model.safetensors", "loss.safetensors"
LEARNED, BINS = "learned.safetensors", "bins.safetensors"

BUNDLE = "bundle"
"""The folder inside a run's folder with all that is needed to use the model; see `calibrant.load`."""

MANIFEST, CALIBRATOR, PREPARATION = "bundle.json", "calibrator.safetensors", "preparation.json"
"""Files of a bundle, beside the weights."""

FILES = (
    *(RECIPE, RESULT, WEIGHTS, LOSS, LEARNED, BINS, "validation.npz", "test.npz", "evaluation.json"),
    *("log.csv", "log.jsonl"),
    *(f"{CHECKPOINTS}/{name}" for name in checkpoint.NAMES),
    *(f"{BUNDLE}/{name}" for name in (MANIFEST, WEIGHTS, CALIBRATOR, PREPARATION)),
)
"""The files that a run writes. (Those of TensorBoard have a name of their own each time.)"""

FORMAT = 2
"""The version of the content of ``result.json``."""

STORED = 1 << 30
"""The largest size of the logits, in bytes, at which the predictions are stored in the folder."""

_RESULT_TYPES = {"recipe": str, "data": str, "files": dict, "epoch": int, "epochs": int, "history": list}
_COLUMNS = {"epoch", "validation_accuracy", "validation_nll", "validation_ece"}


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run."""
    return (folder / RESULT).is_file()


def has_begun(folder: Path) -> bool:
    """Whether a folder holds a run that is finished or has a checkpoint."""
    return is_finished(folder) or any((folder / CHECKPOINTS).glob("*"))


def result_of(folder: Path) -> dict[str, Any]:
    """The result of a finished run."""
    path = folder / RESULT
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        result = None
    if (
        not isinstance(result, dict)
        or result.get("format") != FORMAT
        or not all(type(result.get(name)) is kind for name, kind in _RESULT_TYPES.items())
        or not all(isinstance(each, str) for each in result["files"].values())
        or not 1 <= result["epoch"] <= result["epochs"] == len(result["history"])
        or not all(isinstance(row, dict) and row.keys() >= _COLUMNS for row in result["history"])
        or not all(type(value) in (int, float) for row in result["history"] for value in row.values())
    ):
        raise RecipeError(
            f"{path} is damaged, or not the result of a run in format {FORMAT}; delete it and give the "
            "command that trains the run again"
        )
    return result


def hash_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_file(path: Path, expected: str) -> Path:
    """Refuse a file whose content is not the one that the run has written; return the path."""
    if hash_of(path) != expected:
        raise RecipeError(
            f"{path} is damaged or was changed: its SHA-256 is not the one in {RESULT}; put the file back, "
            f"or delete {path.parent / RESULT} and give the command that trains the run again"
        )
    return path


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be created or written to."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise NotADirectoryError(f"{place} is a link that leads nowhere; expected a folder to write to")
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(f"{place} is a file; expected a folder to write to")
    problem = parent = None
    while parent is None or (problem and not parent.exists()):  # removed by another process meanwhile
        parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        problem = why_unwritable(parent)
    if problem:
        raise PermissionError(f"{folder} cannot be written to: {problem}")


def _check_output(folder: Path) -> None:
    """Refuse a folder for runs that cannot be written to, or whose name is not UTF-8."""
    if not is_unicode(str(folder)):
        raise RecipeError(
            f"{printable(str(folder))}: the name is not UTF-8, and TensorBoard cannot write there; rename "
            "the folder, or choose another one with --output"
        )
    check_writable(folder)


def check_for_several(folder: Path) -> None:
    """Refuse a folder for several runs that cannot be written to, or that is itself the folder of a run."""
    _check_output(folder)
    if has_begun(folder):
        raise RecipeError(
            f"{folder} holds a training run of its own, expected a folder for several runs; choose another "
            "one with --output"
        )


def check_folder(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder that cannot be written to, or that holds a run of another recipe or several runs."""
    _check_output(folder)
    begun = has_begun(folder)
    runs = (
        f"runs/*-seed*/{RECIPE}",
        f"*/runs/*-seed*/{RECIPE}",
    )  # of a comparison, of a sweep; see `folder_of`
    if not begun and (one := next(chain.from_iterable(map(folder.glob, runs)), None)):
        raise RecipeError(
            f"{folder} holds several runs, such as {one.parent}, expected a folder for one run; choose "
            "another one with --output"
        )
    path = folder / RECIPE
    if not path.exists():
        return
    other = Recipe.load(path)
    if begun:
        _check_same(f"{folder} holds a run of", recipe, other)


def _check_same(what: str, recipe: Recipe, other: Recipe) -> None:
    """Refuse another recipe than the expected one; the error names lines of it that differ."""
    if other == recipe:
        return
    ours, theirs = (replace(each, description="").to_toml().splitlines() for each in (recipe, other))
    changed = [line for line in theirs if line not in ours]
    lines = "; ".join((changed or [f"without {line}" for line in ours if line not in theirs])[:3])
    raise RecipeError(
        f"{what} another recipe (there: {lines}); choose another output folder, or delete this one"
    )


def check_data(folder: Path, kept: str, fingerprint: str) -> None:
    """Refuse data with another fingerprint than the one that the run has kept."""
    if kept != fingerprint:
        raise RecipeError(
            f"the data have changed since the run in {folder} began: inputs, labels or their split are "
            "different; put them back as they were, or choose another output folder"
        )


def check_origin(
    folder: Path, name: str, kept: Mapping[str, Any], recipe: Recipe, fingerprint: str | None = None
) -> None:
    """Refuse the file ``name`` of a folder if its content belongs to another recipe or to other data.

    ``fingerprint`` is that of the data, if they are loaded.
    """
    text, data = kept.get("recipe"), kept.get("data")
    if not isinstance(text, str) or not isinstance(data, str):
        raise RecipeError(f"{folder / name} does not say which recipe and data it belongs to; delete it")
    other = Recipe.from_toml(text, where=str(folder / name))
    _check_same(f"{folder / name} belongs to", recipe, other)
    if fingerprint is not None:
        check_data(folder, data, fingerprint)


def check_finished(folder: Path, recipe: Recipe, fingerprint: str | None = None) -> dict[str, Any]:
    """The result of a finished run, if it and its files belong to this recipe and to these data."""
    result = result_of(folder)
    check_origin(folder, RESULT, result, recipe, fingerprint)
    for name, expected in result["files"].items():
        if (folder / name).is_file():
            check_file(folder / name, expected)
    if result["epochs"] != recipe.epochs:
        raise RecipeError(
            f"{folder / RESULT} has epochs = {result['epochs']}, expected {recipe.epochs} as in the recipe; "
            "delete it and give the command that trains the run again"
        )
    return result


def check_begun(folder: Path, recipe: Recipe, data: DataSets) -> None:
    """Refuse a folder that holds a run, finished or not, of another recipe or of other data."""
    check_folder(folder, recipe)
    if is_finished(folder):
        check_finished(folder, recipe, data.fingerprint)
        return
    name = f"{CHECKPOINTS}/{checkpoint.LAST}"
    with suppress(checkpoint.DamagedError, FileNotFoundError):  # the run itself reports a damaged file
        check_origin(folder, name, checkpoint.load(folder / name), recipe, data.fingerprint)


def save_weights(module: nn.Module, path: Path) -> None:
    """Write the weights of a module as safetensors. An existing file is replaced in one step."""
    # Copies, because safetensors refuses tensors that share memory.
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    replace_file(path, save(state))


def in_order(processes: list[list[tuple[Tensor, Tensor]]], size: int) -> tuple[Tensor, Tensor]:
    """Merge the batches of logits and labels of each process into the order of the data.

    Of n processes, the k-th has the elements k, k + n, k + 2 n, …

    >>> first, second = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0]])
    >>> logits, _ = in_order([[(first, first[:, 0].long())], [(second, second[:, 0].long())]], 3)
    >>> logits.flatten()
    tensor([0., 1., 2.])
    """
    batches = [batch for process in processes for batch in process]
    logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    count = len(processes)
    order = torch.cat([torch.arange(size, device="cpu")[rank::count] for rank in range(count)]).argsort()
    return logits[order], labels[order]


def as_written(target: Tensor, ignore_index: int) -> Tensor:
    """Labels as prediction files have them: -100 for every ignored element.

    >>> as_written(torch.tensor([0, 255, 2]), 255)
    tensor([   0, -100,    2])
    """
    target = target.long()  # in 8 bits, -100 and 156 are the same label
    return target.masked_fill(target == ignore_index, -100)
