"""What the folder of a run holds, and how it is written and read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from calibrant.atomic import replace_file
from calibrant.options import RecipeError
from calibrant.training.recipe import Recipe

RECIPE, RESULT, CHECKPOINTS = "recipe.toml", "result.json", "checkpoints"
WEIGHTS, LOSS, LEARNED = "model.safetensors", "loss.safetensors", "learned.safetensors"

STORED = 1 << 30
"""Bytes of logits up to which the predictions of a run are kept in its folder."""


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a run that came to its end."""
    return (folder / RESULT).is_file()


def result_of(folder: Path) -> dict[str, Any]:
    """What a finished run has written last."""
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return result


def check_folder(folder: Path, recipe: Recipe) -> None:
    """See that a folder is new and can be made, or that its run is of the same recipe."""
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
    """See that data are those of the run in a folder, which has kept their fingerprint."""
    if kept is not None and kept != fingerprint:
        raise RecipeError(
            f"the data are not those that the run in {folder} was begun with: images, labels or their split "
            "have changed; put them back as they were, or choose another output folder"
        )


def save_weights(module: nn.Module, path: Path) -> None:
    """Write a module's weights as safetensors, or replace them in one step."""
    # Copies, for safetensors refuses tensors that share memory.
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    replace_file(path, save(state))


def load_weights(module: nn.Module, path: Path) -> None:
    """Load what `save_weights` wrote."""
    module.load_state_dict(load_file(path))


def in_order(shares: list[list[tuple[Tensor, Tensor]]], size: int) -> tuple[Tensor, Tensor]:
    """Predictions of all processes, each with every so-many-th element, as one process would have them.

    >>> first, second = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0]])
    >>> logits, _ = in_order([[(first, first[:, 0].long())], [(second, second[:, 0].long())]], 3)
    >>> logits.flatten()
    tensor([0., 1., 2.])
    """
    present = [share for share in shares if share]
    logits = torch.cat([part for share in present for part, _ in share])
    labels = torch.cat([part for share in present for _, part in share])
    positions = torch.cat([torch.arange(size)[rank :: len(shares)] for rank in range(len(shares))])
    order = positions.argsort()
    return logits[order], labels[order]


def as_written(target: Tensor, ignore_index: int) -> Tensor:
    """The labels as files of predictions have them: -100 for what the data set says to ignore.

    >>> as_written(torch.tensor([0, 255, 2]), 255)
    tensor([   0, -100,    2])
    """
    return target.masked_fill(target == ignore_index, -100)
