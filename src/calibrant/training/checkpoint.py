"""Checkpoints that survive being killed, a full disk and damage: the last good one is always there."""

from __future__ import annotations

import copy
import errno
import os
import random
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

from calibrant.files import replacing

LAST, PREVIOUS = "last.pt", "previous.pt"
BEST, SECOND_BEST = "best.pt", "second-best.pt"


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state, or replace it in one step once it is on the disk.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        try:
            torch.save(dict(state), stream)
        except RuntimeError as error:  # torch's own writer has no other way to say that a disk is full
            raise (
                error.__context__ if isinstance(error.__context__, OSError) else OSError(str(error))
            ) from None
        stream.flush()
        os.fsync(stream.fileno())


def save_last(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the newest checkpoint, and keep the one before it."""
    for left in folder.glob(".*.pt.*"):  # by a process that was killed while it wrote
        left.unlink()
    _save_beside(folder, state, LAST, PREVIOUS)


def save_best(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the best weights so far, and keep those that were the best before them."""
    _save_beside(folder, state, BEST, SECOND_BEST)


def _save_beside(folder: Path, state: Mapping[str, Any], name: str, former: str) -> None:
    newest = folder / f"new-{name}"
    save(newest, state)
    if (folder / name).exists():
        (folder / name).replace(folder / former)
    newest.replace(folder / name)


class Writer:
    """Writes checkpoints, the best weights before what tells of them.

    Args:
        folder: of the checkpoints.
        background: whether a thread writes, from copies on the device, while training goes on. An error of
            its is raised by the next call, or at the end. No more than one checkpoint is on its way.
    """

    def __init__(self, folder: Path, *, background: bool) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1) if background else None
        self._stream: torch.cuda.Stream | None = None
        if background and torch.cuda.is_available():
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pending: Future[None] | None = None

    def write(self, last: Mapping[str, Any], best: Mapping[str, Any] | None = None) -> None:
        """Write the newest state, and the best weights where they have changed.

        Raises:
            OSError: it could not be written, or what came before it.
        """
        self.wait()
        if self._thread is None:
            self._write(last, best)
            return
        try:
            last, best = copy.deepcopy((last, best))
        except torch.OutOfMemoryError:  # no room for copies
            self._write(last, best)
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._pending = self._thread.submit(self._write_aside, last, best)

    def wait(self) -> None:
        """See that everything is on the disk.

        Raises:
            OSError: it is not.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_aside(self, last: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
        with torch.cuda.stream(self._stream):  # its copies to the host do not wait for training
            self._write(last, best)

    def _write(self, last: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
        if best is not None:
            save_best(self.folder, best)
        save_last(self.folder, last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, problem: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except Exception as error:
            if problem is None:
                raise
            # The other error is the one to raise.
            warnings.warn(f"the last checkpoint is lost: {error}", stacklevel=2)
        finally:
            if self._thread is not None:
                self._thread.shutdown()


def load_last(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, on the CPU; None where there is none.

    A damaged one gives a warning, and the one before it is taken.
    """
    return _load_whole(folder, {LAST: "going back to the one before", PREVIOUS: "starting anew"})


def load_best(folder: Path) -> dict[str, Any] | None:
    """The best weights that are whole, on the CPU; None where there are none.

    Damaged ones give a warning, and those that were the best before them are taken.
    """
    return _load_whole(folder, {BEST: "taking the best before it", SECOND_BEST: "there is no other"})


def _load_whole(folder: Path, names: Mapping[str, str]) -> dict[str, Any] | None:
    for name, instead in names.items():
        path = folder / name
        with suppress(FileNotFoundError):  # there is none, or another process has just set it aside
            try:
                return load(path)
            except ValueError as error:
                warnings.warn(f"{error}; {instead}", stacklevel=3)
                # Else it would be kept as the one before, in the place of the one that is whole.
                path.replace(path.with_suffix(".damaged"))
    return None


def load(path: Path) -> dict[str, Any]:
    """A state that `save` wrote.

    Raises:
        ValueError: the file is damaged, or is something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at the check sums
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(damaged)
        state = torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # what is raised depends on where the damage is, and on no list of errors
        if isinstance(error, OSError) and error.errno is not None and error.errno != errno.EINVAL:
            raise  # the file could not be read at all; a damaged one may ask for an impossible position
        raise ValueError(f"the checkpoint {path} is damaged") from error
    if not isinstance(state, dict):
        raise ValueError(f"the checkpoint {path} holds a {type(state).__name__}; expected a dict")
    return state


def random_state() -> dict[str, Any]:
    """The states of the random number generators of torch, Python and the current GPU."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate()[1])}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the random number generators to a state of `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"]), None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
