"""Weights from a file, with an error for all that does not fit."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calibrant import arguments

_NAMES_SHOWN = 5


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], num_classes: int, *, replace_head: bool = False
) -> tuple[str, ...]:
    """Put the weights of a file into a model, in place.

    Args:
        model: that the file's names are of. Those of the network that an adapter of this package holds are
            right with and without ``network.`` before them.
        path: a safetensors file, or one that `torch.save` wrote of a state dict, alone or under the name
            ``state_dict`` or ``model``. Nothing but tensors and plain values is read from it.
        num_classes: K.
        replace_head: leave the last layer as it is where the file has one of another number of classes, and
            warn of it.

    Returns:
        The names of what was left as it is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, has something else than weights, or those of another model.

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
    return fit_weights(model, state, num_classes, replace_head=replace_head, source=str(path))


def fit_weights(
    model: nn.Module, state: Mapping[str, Tensor], num_classes: int, *, replace_head: bool, source: str
) -> tuple[str, ...]:
    """Put a state dict into a model, in place; arguments, result and errors are those of `load_weights`.

    >>> model = nn.Linear(3, 2)
    >>> fit_weights(model, {"weight": torch.ones(2, 3)}, 2, replace_head=False, source="a file")
    Traceback (most recent call last):
    ValueError: a file has weights of another model: 1 missing (bias)
    """
    expected = model.state_dict()
    shapes = {
        name: (tuple(state[name].shape), tuple(expected[name].shape)) for name in expected.keys() & state
    }
    different = [name for name in expected if name in shapes and shapes[name][0] != shapes[name][1]]
    head = [name for name in different if _is_head(*shapes[name], num_classes)]
    problems = [
        _listed("missing", [name for name in expected if name not in state]),
        _listed("unknown", [name for name in state if name not in expected]),
        _listed(
            "of another shape",
            [f"{name} {shapes[name][0]} and not {shapes[name][1]}" for name in different if name not in head],
        ),
    ]
    if any(problems):
        raise ValueError(f"{source} has weights of another model: {'; '.join(filter(None, problems))}")
    if head and not replace_head:
        raise ValueError(
            f"{source} is for {shapes[head[0]][0][0]} classes and the data has {num_classes} "
            f"({', '.join(head)}): replace_head = true starts the last layer anew"
        )
    model.load_state_dict({**state, **{name: expected[name] for name in head}})
    if head:
        warnings.warn(
            f"{source} is for {shapes[head[0]][0][0]} classes and the data has {num_classes}: "
            f"not loaded, but started anew: {', '.join(head)}",
            stacklevel=2,
        )
    return tuple(head)


def _is_head(found: tuple[int, ...], expected: tuple[int, ...], num_classes: int) -> bool:
    """Whether two shapes differ in nothing but the number of classes, which is the first axis."""
    return len(expected) > 0 and expected[0] == num_classes and found[1:] == expected[1:] and found != ()


def _listed(what: str, names: list[str]) -> str:
    more = ", …" if len(names) > _NAMES_SHOWN else ""
    return f"{len(names)} {what} ({', '.join(names[:_NAMES_SHOWN])}{more})" if names else ""


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"there is no file of weights {path}")
    arguments.one_of("the ending of a file of weights", path.suffix, (".safetensors", ".pt", ".pth", ".bin"))
    content: Any
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path} is damaged, or has more in it than tensors and plain values") from None
    except (SafetensorError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    for name in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} has no state dict: expected tensors by name")
    return dict(content)
