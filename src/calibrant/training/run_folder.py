"""The folder of a run: its files, how they are written and read, and checks before it is used."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from calibrant.atomic import replace_file
from calibrant.options import RecipeError
from calibrant.training import checkpoint
from calibrant.training.data import DataSets
from calibrant.training.recipe import Recipe

RECIPE, RESULT, CHECKPOINTS = "recipe.toml", "result.json", "checkpoints"
WEIGHTS, LOSS, LEARNED = "model.safetensors", "loss.safetensors", "learned.safetensors"

STORED = 1 << 30
"""The largest size of the logits, in bytes, at which the predictions are stored in the folder."""


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run."""
    return (folder / RESULT).is_file()


def result_of(folder: Path) -> dict[str, Any]:
    """The result of a finished run."""
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return result


def check_folder(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder that cannot be written to, or that holds a run of another recipe."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; expected a folder to write the run to")
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to: {parent} does not allow it")
    path = folder / RECIPE
    if not path.exists():
        return
    other = Recipe.from_toml(path.read_text(encoding="utf-8"), where=str(path))
    begun = is_finished(folder) or any((folder / CHECKPOINTS).glob("*"))
    if other != recipe and begun:
        ours, theirs = recipe.to_toml().splitlines(), other.to_toml().splitlines()
        changed = [line for line in theirs if line not in ours]
        there = changed or [f"without {line}" for line in ours if line not in theirs]
        raise RecipeError(
            f"{folder} holds a run of another recipe (there: {'; '.join(there[:3])}); choose another "
            "output folder, or delete this one"
        )


def check_data(folder: Path, kept: str | None, fingerprint: str) -> None:
    """Refuse data with another fingerprint than the one that the run has kept, if it has kept one."""
    if kept is not None and kept != fingerprint:
        raise RecipeError(
            f"the data are not those that the run in {folder} was begun with: images, labels or their split "
            "have changed; put them back as they were, or choose another output folder"
        )


def check_begun(folder: Path, recipe: Recipe, data: DataSets) -> None:
    """Refuse a folder that holds a run, finished or not, of another recipe or of other data."""
    check_folder(folder, recipe)
    kept: dict[str, Any] = {}
    if is_finished(folder):
        kept = result_of(folder)
    else:
        with suppress(ValueError, FileNotFoundError):  # the run itself handles and reports a damaged file
            kept = checkpoint.load(folder / CHECKPOINTS / checkpoint.LAST)
    check_data(folder, kept.get("data"), data.fingerprint)


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
    order = torch.cat([torch.arange(size)[rank::count] for rank in range(count)]).argsort()
    return logits[order], labels[order]


def as_written(target: Tensor, ignore_index: int) -> Tensor:
    """Labels as prediction files have them: -100 for every ignored element.

    >>> as_written(torch.tensor([0, 255, 2]), 255)
    tensor([   0, -100,    2])
    """
    return target.masked_fill(target == ignore_index, -100)
