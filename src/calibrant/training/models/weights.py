"""Loads weights from a file, and raises an error for everything that does not fit."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calibrant import arguments
from calibrant.printable import first_few
from calibrant.sizes import check_torch_file
from calibrant.warning import warn

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Endings of files of weights."""


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], num_classes: int, *, replace_head: bool = False
) -> tuple[str, ...]:
    """Load the weights of a file into a model, in place.

    Args:
        model: the model. If it is an adapter of this package, the names in the file may have the prefix
            ``network.`` or not.
        path: a safetensors file, or a state dict written by `torch.save`, alone or under the key
            ``state_dict`` or ``model``. Only tensors and plain values are read from it.
        num_classes: K.
        replace_head: if the file has a last layer for another number of classes, leave the model's last layer
            as it is and warn.

    Returns:
        The names of the parameters that were left as they are.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "weights.pt")
    >>> torch.save(nn.Linear(3, 2).state_dict(), path)
    >>> model = nn.Linear(3, 2)
    >>> load_weights(model, path, num_classes=2)
    ()
    >>> torch.equal(model.weight, torch.load(path)["weight"])
    True
    """
    state = _read(Path(path))
    inner = getattr(model, "network", None)
    if isinstance(inner, nn.Module) and not all(name.startswith("network.") for name in state):
        model = inner
    expected = model.state_dict()
    shapes = {
        name: (tuple(state[name].shape), tuple(expected[name].shape)) for name in expected if name in state
    }
    different = [name for name, (found, wanted) in shapes.items() if found != wanted]
    head = [name for name in different if _is_head(*shapes[name], num_classes)]
    others = [f"{name} {shapes[name][0]} and not {shapes[name][1]}" for name in different if name not in head]
    problems = [
        _listed("missing", [name for name in expected if name not in state]),
        _listed("unknown", [name for name in state if name not in expected]),
        _listed("of another shape", others),
    ]
    if any(problems):
        raise ValueError(f"{path} has weights of another model: {'; '.join(filter(None, problems))}")
    if head:
        sizes = f"{path} is for {shapes[head[0]][0][0]} classes and the data has {num_classes}"
        if not replace_head:
            raise ValueError(
                f"{sizes} ({', '.join(head)}): replace_head = true starts the last layer from random weights"
            )
        warn(f"{sizes}: the last layer starts from random weights ({', '.join(head)})")
    model.load_state_dict({**state, **{name: expected[name] for name in head}})
    return tuple(head)


def _is_head(found: tuple[int, ...], expected: tuple[int, ...], num_classes: int) -> bool:
    """Whether two shapes differ only in the number of classes, which is the first axis."""
    return len(expected) > 0 and expected[0] == num_classes and found[1:] == expected[1:] and found != ()


def _listed(what: str, names: list[str]) -> str:
    return f"{len(names)} {what} ({first_few(names)})" if names else ""


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"there is no file of weights {path}")
    arguments.one_of("the ending of a file of weights", path.suffix, SUFFIXES)
    content: Any
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            check_torch_file(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path} is damaged, or has more in it than tensors and plain values") from None
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    for name in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} has no state dict: expected tensors by name")
    return dict(content)
