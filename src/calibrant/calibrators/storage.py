"""Saving and loading calibrators as safetensors files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from calibrant.atomic import replace_file
from calibrant.calibrators.base import Calibrator, FittedLayer, described, labels_without_state
from calibrant.calibrators.registry import UnknownCalibratorError, create_calibrator
from calibrant.printable import first_few
from calibrant.sizes import MAX_CLASSES

Layer = TypeVar("Layer", bound=FittedLayer)


def save_calibrator(
    calibrator: Calibrator, path: str | os.PathLike[str], *, class_names: Sequence[str] | None = None
) -> None:
    """Write a fitted calibrator to a file. An existing file is replaced in one step.

    The learned state becomes the tensors of a safetensors file. The header holds, as JSON, the method, its
    options, the number of classes or labels, their names if known, and the version of the format.

    Args:
        calibrator: the fitted calibrator.
        path: the file to write.
        class_names: the names of the classes in the order of the logits. None keeps the calibrator's own.

    Raises:
        TypeError: it is no calibrator, or it depends on more than the file would hold.
        RuntimeError: the calibrator is not fitted.
        ValueError: the number of names is not the number of classes.

    >>> import tempfile
    >>> from calibrant.calibrators import Temperature
    >>> calibrator = Temperature().fit(2 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_calibrator(calibrator, Path(folder, "calibrator.safetensors"))
    ...     [path.name for path in Path(folder).iterdir()]
    ['calibrator.safetensors']
    """
    if not isinstance(calibrator, Calibrator):
        found = type(calibrator).__name__
        raise TypeError(
            f"save_calibrator takes a calibrator, got {found}; conformal sets have save_conformal"
        )
    save_layer(calibrator, path, what="calibrator", class_names=class_names)


def save_layer(
    calibrator: FittedLayer, path: str | os.PathLike[str], *, what: str, class_names: Sequence[str] | None
) -> None:
    """Write a fitted layer of the kind that ``what`` names. Otherwise as `save_calibrator`."""
    replace_file(Path(path), layer_content(calibrator, what=what, class_names=class_names))


def layer_content(calibrator: FittedLayer, *, what: str, class_names: Sequence[str] | None) -> bytes:
    """The content of the file that `save_layer` writes."""
    from safetensors.torch import save

    names = _checked(calibrator.class_names if class_names is None else class_names, calibrator)
    description = {"method": calibrator.key, "class_names": names, **described(calibrator)}
    if not calibrator.from_calibrant:
        # Loading imports nothing, but its error can name the module.
        description["module"] = type(calibrator).__module__
    tensors = {name: buffer.cpu().contiguous() for name, buffer in calibrator.named_buffers()}
    # Some readers refuse a file without tensors.
    tensors = tensors or {"nothing": torch.zeros(1, device="cpu")}
    description["checksum"] = _checksum(tensors)
    written = json.dumps(description, default=_plain)
    if not calibrator.from_calibrant:
        _check_read_back(calibrator, json.loads(written), tensors)
    return save(tensors, metadata={"format": _format(what), "calibrator": written})


def load_calibrator(path: str | os.PathLike[str], *, class_names: Sequence[str] | None = None) -> Calibrator:
    """Read a calibrator that `save_calibrator` wrote.

    Args:
        path: the file to read.
        class_names: the names of the classes to calibrate, in the order of the logits. If the calibrator was
            saved with names, they must be the same.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is no calibrator, or is for other classes. The message says which.

    >>> import tempfile
    >>> from calibrant.calibrators import Temperature
    >>> path = Path(tempfile.mkdtemp(), "calibrator.safetensors")
    >>> logits, target = 2 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1])
    >>> calibrator = Temperature().fit(logits, target)
    >>> save_calibrator(calibrator, path)
    >>> torch.equal(load_calibrator(path)(logits), calibrator(logits))
    True
    """
    return load_layer(path, what="calibrator", create=create_calibrator, class_names=class_names)


def load_layer(
    path: str | os.PathLike[str],
    *,
    what: str,
    create: Callable[..., Layer],
    class_names: Sequence[str] | None,
) -> Layer:
    """Read a layer that `save_layer` wrote. ``create`` makes it from a key and options, not fitted yet.

    Otherwise as `load_calibrator`.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {what} {path}")
    return layer_from(path.read_bytes(), path.name, what=what, create=create, class_names=class_names)


def layer_from(
    content: bytes,
    name: str,
    *,
    what: str,
    create: Callable[..., Layer],
    class_names: Sequence[str] | None,
) -> Layer:
    """The layer in the content of a file called ``name``. Otherwise as `load_layer`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise ValueError(f"{name} is no safetensors file, or damaged: {error}") from None
    # Not `safe_open`, which has the metadata: it takes no path that is not UTF-8.
    length = int.from_bytes(content[:8], "little")
    header: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    if header.get("format") != _format(what):
        raise ValueError(
            f"{name} is not a {what} that this version can read: its format is {header.get('format')!r}, "
            f"expected {_format(what)!r}"
        )
    try:
        description: dict[str, Any] = json.loads(header["calibrator"])
        if description["checksum"] != _checksum(tensors):
            raise ValueError("its numbers are not those that were saved")
        calibrator = _restored(description, tensors, create)
        # It raises an error if tensors do not fit.
        calibrator(torch.zeros(5, _logits_each(calibrator), 2, 3, device="cpu"))
    except UnknownCalibratorError:
        saved_by = description.get("module")
        source = f" ({saved_by!r} when it was saved)" if saved_by else ""
        raise ValueError(
            f"{name} is a calibrator {description['method']!r}, which is unknown here: first import the "
            f"module that adds it to CALIBRATORS{source}"
        ) from None
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{name} is a damaged {what}: {type(error).__name__} {error}") from None
    problem = other_classes(class_names, calibrator.class_names)
    if problem is not None:
        raise ValueError(f"{name} was fitted to other classes than are asked for: {problem}")
    return calibrator


def _restored(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], create: Callable[..., Layer]
) -> Layer:
    """The layer that a file describes."""
    layer = create(description["method"], **description["options"])
    layer.num_classes = int(description["num_classes"])
    if not 0 < layer.num_classes <= MAX_CLASSES:  # before anything is allocated for them
        raise ValueError(f"it is for {layer.num_classes:,} classes")
    labels = int(description.get("labels", 0))
    if not 0 <= labels <= MAX_CLASSES:
        raise ValueError(f"it is for {labels:,} labels")
    possible = labels_without_state(tensors, labels)
    unchanged = tuple(description.get("unchanged", possible))
    if not set(unchanged) <= set(possible):
        raise ValueError(f"it leaves the labels {first_few(unchanged)} as they are, but has numbers for them")
    layer.expect_labels(labels, unchanged)
    layer.class_names = _checked(description.get("class_names"), layer)  # older files have none
    for part in layer.labels if labels else ():
        assert isinstance(part, FittedLayer)
        part.num_classes = layer.num_classes
    for key, tensor in tensors.items():
        owner, _, buffer = key.rpartition(".")
        if buffer != "nothing":
            module = layer.get_submodule(owner)
            assert isinstance(module, FittedLayer)
            module.learn(buffer, tensor)
    return layer


def _logits_each(layer: FittedLayer) -> int:
    """How many logits an element has."""
    return len(layer.labels) if layer.binary else layer.fitted_classes()


def _check_read_back(
    calibrator: FittedLayer, description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Raise an error if a user's layer would not be the same when its file is read."""
    where = next((buffer.device for buffer in calibrator.buffers()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, _logits_each(calibrator), generator=generator, device="cpu").to(where)
    expected = calibrator(rows)
    try:
        again = _restored(description, tensors, lambda _, **options: type(calibrator)(**options))
        same = torch.equal(again.to(where)(rows).nan_to_num(), expected.nan_to_num())
        problem = "" if same else "a calibrator made from them gives other results"
    except Exception as error:  # whatever the user's code raises
        problem = f"a calibrator made from them fails with {type(error).__name__}: {error}"
    if problem:
        raise TypeError(
            f"{type(calibrator).__name__}: files hold its options and what self.learn(name, tensor) stored, "
            f"but {problem}. Store all that it learns with self.learn"
        )


def _format(what: str) -> str:
    return f"calibrant-{what.replace(' ', '-')}-1"


def other_classes(found: Sequence[str] | None, expected: Sequence[str] | None) -> str | None:
    """Describe how class names differ. None if they agree or either are unknown.

    >>> other_classes(["cat", "dog"], ["dog", "cat"])
    "class 0 is 'cat', expected 'dog': the same classes in another order"
    """
    if found is None or expected is None or _only_numbered(found) or _only_numbered(expected):
        return None
    if len(found) != len(expected):
        return f"there are {len(found)}, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            order = ": the same classes in another order" if set(found) == set(expected) else ""
            return f"class {number} is {one!r}, expected {other!r}{order}"
    return None


def _checked(names: Sequence[str] | None, layer: FittedLayer) -> tuple[str, ...] | None:
    """The names of the classes or labels, if known. A single label has the names of no and yes."""
    number = max(2, _logits_each(layer))
    if names is not None and len(names) != number:
        raise ValueError(f"there are {len(names)} class_names for {number} classes")
    return None if names is None else tuple(map(str, names))


def _only_numbered(names: Sequence[str]) -> bool:
    """Whether names are the numbers 0 to K - 1, as in tables with numbered columns, and say nothing."""
    return list(names) == [str(number) for number in range(len(names))]


def _checksum(tensors: dict[str, Tensor]) -> str:
    """A checksum of names, shapes and numbers, because a damaged number still looks like a number."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _plain(option: Any) -> Any:
    """A range or a NumPy number as a type that JSON knows."""
    return option.tolist() if hasattr(option, "tolist") else list(option)
