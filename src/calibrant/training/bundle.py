"""Bundles: a trained network with its calibrator, class names and preparation, ready for new raw inputs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from calibrant.arguments import whole_number
from calibrant.atomic import replace_file
from calibrant.calibrators import Calibrator, create_calibrator
from calibrant.calibrators.storage import layer_content, layer_from
from calibrant.options import Choice, check_options
from calibrant.sizes import MAX_CLASSES, check_memory
from calibrant.training import run_folder
from calibrant.training.calibration import NONE_BETTER, check_method, fitted_calibrator
from calibrant.training.data import PREPARATIONS, Inputs, Preparation, map_inputs
from calibrant.training.models import MODELS, create_model, self_contained
from calibrant.training.run_folder import BUNDLE, CALIBRATOR, MANIFEST, PREPARATION, WEIGHTS
from calibrant.training.run_lock import lock_of
from calibrant.training.runs import Run, content_hash, trained_model, without_starting_weights
from calibrant.warning import warn

FORMAT = 1
"""The version of the content of ``bundle.json``."""

_CONTENT = (WEIGHTS, CALIBRATOR, PREPARATION)
_TYPES = {"class_names": list, "model": dict, "about": dict, "inputs": dict, "files": dict, "run": str}

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Bundle:
    """A trained network that is ready to use: raw inputs in, calibrated probabilities out.

    `calibrant.load` reads one. If its calibrator is binary, the network has one logit for each decision: a
    single one for two classes, or one for each of several labels.

    Attributes:
        folder: the folder that it was read from.
        classes: the names of the classes or labels, in the order of the probabilities.
        preparation: how raw inputs become the argument of the network; None if that is not known.
        model: the network, in evaluation mode.
        calibrator: from the logits of the network to calibrated logits.
        inputs: an argument of the network with two elements, all zeros.
    """

    folder: Path
    classes: tuple[str, ...]
    preparation: Preparation | None
    model: nn.Module
    calibrator: Calibrator
    inputs: Inputs

    def predict_proba(self, raw: Any, *, batch_size: int = 128) -> Floats:
        """Calibrated probabilities of raw inputs.

        Args:
            raw: raw inputs: images, numbers, rows or texts, as the data set of the model has them.
            batch_size: how many inputs to prepare and to predict at once.

        Returns:
            ``(N, K)``, float32; for segmentation ``(N, K, H, W)``. Of several labels, each one's own
            probability, ``(N, L)``; they do not add up to 1.

        Raises:
            ValueError: the inputs are of another kind or shape.
        """
        return _joined(self.batches(raw, batch_size=batch_size), len(self.classes))

    def batches(self, raw: Any, *, batch_size: int = 128) -> Iterator[Tensor]:
        """The probabilities of `predict_proba`, batch by batch, on the device of the network."""
        for logits in self._logits(raw, batch_size):
            yield probabilities_of(self.calibrator, logits)

    def predict(self, raw: Any, *, batch_size: int = 128) -> NDArray[np.str_] | NDArray[np.int64]:
        """The names of the most probable classes, ``(N,)``; for segmentation ``(N, H, W)``.

        Of several labels, 1 for each that is more probable than not, and 0 for the others, ``(N, L)``. The
        arguments are those of `predict_proba`.
        """
        probabilities = self.predict_proba(raw, batch_size=batch_size)
        if self.several_labels:
            return (probabilities > 0.5).astype(np.int64)
        names: NDArray[np.str_] = np.array(self.classes)[probabilities.argmax(1)]
        return names

    @property
    def several_labels(self) -> bool:
        """Whether each input has a yes or no for each of several labels, and not one class."""
        return self.calibrator.binary and _outputs(self.calibrator) > 1

    def logits(self, raw: Any, *, batch_size: int = 128) -> Floats:
        """The logits of the network, before the calibrator; shapes and arguments as for `predict_proba`.

        A single logit of two classes is ``(N, 1)``.
        """
        return _joined(self._logits(raw, batch_size), _outputs(self.calibrator))

    @torch.no_grad()
    def _logits(self, raw: Any, batch_size: int) -> Iterator[Tensor]:
        whole_number("batch_size", batch_size)
        if self.preparation is None:
            raise ValueError(
                f"{self.folder} has no preparation of raw inputs: its data set has none, or a tokenizer that "
                "is not stored as JSON; give prepared tensors to its attribute model"
            )
        device = next((each.device for each in self.model.parameters()), torch.device("cpu"))
        for inputs in self.preparation.batches(raw, batch_size):
            yield self.model(map_inputs(inputs, lambda tensor: tensor.to(device))).float()

    def __repr__(self) -> str:
        kind = None if self.preparation is None else self.preparation.kind
        what = f"{len(self.classes)} {'labels' if self.several_labels else 'classes'}"
        return f"Bundle({str(self.folder)!r}, {what}, {kind}, {self.calibrator.key})"


def probabilities_of(calibrator: Calibrator, logits: Tensor) -> Tensor:
    """The calibrated probabilities of a network's logits ``(N, K, *S)``.

    A single logit gives those of its two classes, and several labels one probability each.
    """
    calibrated: Tensor = calibrator(logits)
    if not calibrator.binary:
        return calibrated.softmax(1)
    yes = calibrated.sigmoid()
    return yes if _outputs(calibrator) > 1 else torch.cat([(-calibrated).sigmoid(), yes], 1)


def _outputs(calibrator: Calibrator) -> int:
    """The number of logits that a fitted calibrator takes."""
    assert calibrator.num_classes is not None
    return len(calibrator.labels) if calibrator.binary else calibrator.num_classes


def _joined(batches: Iterator[Tensor], classes: int) -> Floats:
    parts = [batch.numpy(force=True) for batch in batches]
    return np.concatenate(parts) if parts else np.empty((0, classes), np.float32)


# ---------------------------------------------------------------------------------------------------- reading


def load_bundle(path: str | os.PathLike[str], *, device: str | torch.device | None = None) -> Bundle:
    """Read a bundle; see `calibrant.load`."""
    folder = bundle_folder(Path(path))
    manifest, content = _read(folder)
    names = tuple(map(str, manifest["class_names"]))
    where = f"the bundle in {folder}"
    try:
        stored = json.loads(content[PREPARATION])
        preparation = stored and PREPARATIONS[stored["kind"]].from_state(stored["state"])
        choice, about = _choice(manifest["model"]), _with_tensors(manifest["about"])
        inputs = _example(manifest["inputs"])
        calibrator = _calibrator(content, names)
        weights = load_tensors(content[WEIGHTS])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _damaged(folder, f"{type(error).__name__} {error}") from error
    model = trained_model(choice, _outputs(calibrator), about, weights, where)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Bundle(folder, names, preparation, model.to(place), calibrator.to(place).eval(), inputs)


def bundle_folder(path: Path) -> Path:
    """The folder of a bundle, given that folder or the folder of its run."""
    for folder in (path, path / BUNDLE):
        if (folder / MANIFEST).is_file():
            return folder
    if not path.is_dir():
        why = "it is a file" if path.exists() else "it does not exist"
        raise ValueError(f"{path} is not the folder of a bundle or of a run: {why}")
    if run_folder.is_finished(path):
        recipe = path / run_folder.RECIPE
        raise ValueError(f"{path} has no bundle; write it with: calibrant train {recipe} --output {path}")
    raise ValueError(f"{path} is not the folder of a bundle or of a finished run: it has no {MANIFEST}")


def _damaged(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"the bundle in {folder} is damaged or was changed: {' '.join(why.split())[:200]}; restore it, or "
        "delete this folder and give the command that trained the run again"
    )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The content of ``bundle.json``, and of the files that it describes, all of one time."""
    manifest, content = _manifest(folder), {}
    for name in _CONTENT:
        with suppress(FileNotFoundError, IsADirectoryError):
            content[name] = (folder / name).read_bytes()
    hashes = {name: hashlib.sha256(each).hexdigest() for name, each in content.items()}
    for described in (manifest, manifest.get("before", manifest)):  # see `_replace`
        if described["files"] == hashes:
            return described, content
    if _manifest(folder) != manifest:  # another process has replaced the bundle meanwhile
        return _read(folder)
    name = next(name for name in _CONTENT if hashes.get(name) != manifest["files"][name])
    why = f"the SHA-256 of {name} is not the one in {MANIFEST}" if name in content else f"{name} is missing"
    raise _damaged(folder, why)


def _calibrator(content: Mapping[str, bytes], class_names: Sequence[str] | None = None) -> Calibrator:
    return layer_from(
        content[CALIBRATOR], CALIBRATOR, what="calibrator", create=create_calibrator, class_names=class_names
    )


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        plain: Any = json.loads((folder / MANIFEST).read_bytes())
        expected = plain.pop("sha256")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise _damaged(folder, f"{MANIFEST} is not what was written") from None
    if plain.get("format") != FORMAT:
        raise ValueError(
            f"the bundle in {folder} has the format {plain.get('format')!r}; this version reads {FORMAT}"
        )
    if expected != content_hash(plain):
        raise _damaged(folder, f"{MANIFEST} is not what was written")
    for described in (plain, plain.get("before", plain)):
        if not isinstance(described, dict) or (
            not all(isinstance(described.get(name), kind) for name, kind in _TYPES.items())
            or sorted(described["files"]) != sorted(_CONTENT)
            or not 1 < len(described["class_names"]) <= MAX_CLASSES
        ):
            raise _damaged(folder, f"{MANIFEST} lacks something")
    return dict(plain)


def _choice(plain: Mapping[str, Any]) -> Choice:
    """The model, with lists as tuples where its options are tuples."""
    name, options = str(plain["name"]), dict(plain["options"])
    if name in MODELS:
        functions = MODELS[name], create_model
        options = check_options(f"model {name!r}", options, *functions, complete=False)
    return Choice(name, options)


def _with_tensors(about: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about the data; a tensor is zeros, because the trained weights replace its numbers."""
    facts = dict(about)
    for name, value in about.items():
        if isinstance(value, dict):
            shape = [int(length) for length in value["shape"]]
            check_memory(4 * prod(shape), name)
            facts[name] = torch.zeros(shape, device="cpu")
    return facts


def _example(plain: Mapping[str, Any]) -> Inputs:
    """An argument of the network with two elements, of zeros."""
    tensors = {}
    for name, (dtype, *shape) in plain.items():
        check_memory(16 * prod(shape), name)
        tensors[name] = torch.zeros(2, *shape, dtype=getattr(torch, dtype), device="cpu")
    return tensors.get("", tensors)


def calibrator_of(run: Path, method: str) -> tuple[Calibrator, str] | None:
    """The calibrator in the bundle of a run, and if that is the identity, why.

    None if there is no bundle with this ``calibrate``.
    """
    found = _intact(run)
    if found is None or found[0].get("calibrate") != method:
        return None
    manifest, content = found
    return _calibrator(content), str(manifest.get("not_calibrated") or NONE_BETTER)


def example_of_use(run: Path) -> tuple[str, str] | None:
    """The `Preparation.example` of the bundle of a run; None without a bundle or a preparation."""
    found = _intact(run)
    if found is None:
        return None
    stored = json.loads(found[1][PREPARATION])
    return stored and PREPARATIONS[stored["kind"]].example


def _intact(run: Path) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """What `_read` returns; None if there is no bundle of this run, or a damaged one."""
    with suppress(OSError, ValueError):
        found = _read(run / BUNDLE)
        if found[0]["run"] == run_folder.hash_of(run / run_folder.RESULT):
            return found
    return None


# ---------------------------------------------------------------------------------------------------- writing


def ensure_bundle(run: Run, method: str, say: Callable[[str], object]) -> None:
    """`write_bundle` for a finished run, unless its bundle exists, undamaged and with the same ``method``.

    If the data of the run are not there, a warning says that no bundle is written, or that it stays as it
    was. ``say`` is called with what is going on.
    """
    with lock_of(run.folder, run.recipe):  # a second start of the recipe waits
        found = _intact(run.folder)
        if found is not None and found[0].get("calibrate") == method:
            return
        try:
            _ = run.data
        except (FileNotFoundError, ConnectionError, ImportError) as error:
            what = "no bundle is written"
            if found is not None:
                kept = _calibrator(found[1]).key
                what = f"the bundle stays as it was, with the calibrator {kept}"
            warn(f"{what}, because the data are not there: {error}")
            return
        say("choosing a calibrator" if method == "auto" else "writing the bundle")
        write_bundle(run, method)


def write_bundle(run: Run, method: str = "auto") -> Calibrator:
    """Write everything that is needed to use the model of a run to the folder ``bundle`` in its folder.

    ``bundle.json`` holds the SHA-256 of the other files, so that a bundle is either complete or refused. A
    bundle of the same run that is already there, with another calibrator, can be read at any time meanwhile.

    Args:
        run: the finished run.
        method: ``auto`` for the calibrator with the best cross-validated likelihood on the validation data,
            ``none`` for no calibrator, or a key of `CALIBRATORS` with options in brackets.

    Returns:
        The calibrator, fitted to the validation data.

    Raises:
        RecipeError: there is no such calibrator, or it cannot be fitted to the validation data.
    """
    folder, data = run.folder / BUNDLE, run.data
    calibrator, reason = fitted_calibrator(run, check_method(method))
    choice = self_contained(run.model, without_starting_weights(run.recipe.model))
    inputs, _ = data.validation.batch(torch.zeros(1, dtype=torch.long, device="cpu"))
    named = inputs if isinstance(inputs, dict) else {"": inputs}
    about = {  # what JSON can hold; of tensors, the shapes
        name: {"shape": list(value.shape)} if isinstance(value, Tensor) else value
        for name, value in data.about.items()
        if isinstance(value, Tensor | str | int | float | bool)
    }
    preparation = data.preparation
    stored = preparation and {"kind": preparation.kind, "state": preparation.state()}
    content = {
        WEIGHTS: (run.folder / WEIGHTS).read_bytes(),
        CALIBRATOR: layer_content(calibrator.cpu(), what="calibrator", class_names=data.class_names),
        PREPARATION: json.dumps(stored, ensure_ascii=False).encode(),
    }
    manifest = {
        "format": FORMAT,
        "versions": {
            "calibrant": _version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "run": run_folder.hash_of(run.folder / run_folder.RESULT),
        "recipe": {"name": run.recipe.name, "loss": run.recipe.loss, "seed": run.recipe.seed},
        "calibrate": method,
        "not_calibrated": reason,
        "class_names": list(data.class_names),
        "model": {"name": choice.name, "options": dict(choice.options)},
        "about": about,
        "inputs": {
            name: [str(each.dtype).removeprefix("torch."), *each.shape[1:]] for name, each in named.items()
        },
        "files": {name: hashlib.sha256(each).hexdigest() for name, each in content.items()},
    }
    folder.mkdir(exist_ok=True)
    _replace(folder, json.loads(json.dumps(manifest)), content)
    return calibrator


def _replace(folder: Path, manifest: dict[str, Any], content: Mapping[str, bytes]) -> None:
    """Write a bundle in place of the one that is there.

    If one file changes, as with another calibrator, ``bundle.json`` describes the bundle before and after
    until it has changed, so that both are complete. Otherwise there is no bundle until all is written.
    """
    changed = list(content)
    with suppress(OSError, ValueError):
        before, _ = _read(folder)
        before.pop("before", None)
        changed = [name for name in content if before["files"][name] != manifest["files"][name]]
    if len(changed) < 2:
        _write_manifest(folder, {**manifest, "before": before})
    else:
        (folder / MANIFEST).unlink(missing_ok=True)
    for name in changed:
        replace_file(folder / name, content[name])
    _write_manifest(folder, manifest)


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    plain = {**manifest, "sha256": content_hash(manifest)}
    replace_file(folder / MANIFEST, (json.dumps(plain, indent=1) + "\n").encode())


def _version() -> str:
    try:
        return version("calibrant")
    except PackageNotFoundError:
        return "not installed"
