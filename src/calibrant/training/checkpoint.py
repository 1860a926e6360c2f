"""Checkpoints that survive a kill, a full disk and damaged files: a good one is always there."""

from __future__ import annotations

import copy
import errno
import os
import random
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

from calibrant.atomic import replacing
from calibrant.sizes import check_torch_file
from calibrant.warning import warn

LAST, PREVIOUS = "last.pt", "previous.pt"
BEST, SECOND_BEST = "best.pt", "second-best.pt"
NAMES = (LAST, PREVIOUS, BEST, SECOND_BEST)


class DamagedError(ValueError):
    """A checkpoint is damaged, or the file is something else."""


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state to a file. An existing file is replaced in one step, once the new one is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        try:
            torch.save(dict(state), stream)
        except RuntimeError as error:  # this is how torch reports a full disk
            cause = error.__context__
            raise (cause if isinstance(cause, OSError) else OSError(str(error))) from None
        stream.flush()
        os.fsync(stream.fileno())


def save_last(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the newest checkpoint, and keep the one before it."""
    for unfinished in folder.glob(".*.pt.*"):  # of a process that was killed while writing
        unfinished.unlink()
    _save_and_keep(folder, state, LAST, PREVIOUS)


def _save_and_keep(folder: Path, state: Mapping[str, Any], name: str, former: str) -> None:
    newest = folder / f"new-{name}"
    save(newest, state)
    if (folder / name).exists():
        (folder / name).replace(folder / former)
    newest.replace(folder / name)


class Writer:
    """Writes checkpoints to a folder. Best weights come before the state that names them.

    With ``background``, a thread writes copies made on the device while training goes on. An error in the
    thread is raised by the next call, or at the end. Only one checkpoint is written at a time.
    """

    def __init__(self, folder: Path, *, background: bool) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1) if background else None
        self._stream: torch.cuda.Stream | None = None
        if background and torch.cuda.is_available():
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pending: Future[None] | None = None

    def write(self, last: Mapping[str, Any], best: Mapping[str, Any] | None = None) -> None:
        """Write the newest state, and the best weights if they have changed."""
        self.wait()
        if self._thread is not None:
            with suppress(torch.OutOfMemoryError):  # no room for copies
                last, best = copy.deepcopy((last, best))
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream())
                self._pending = self._thread.submit(self._write_aside, last, best)
                return
        self._write(last, best)

    def wait(self) -> None:
        """Wait until everything is on the disk; raise the error if the last checkpoint was not written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_aside(self, last: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
        with torch.cuda.stream(self._stream):  # copies to the host do not wait for training
            self._write(last, best)

    def _write(self, last: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
        if best is not None:
            _save_and_keep(self.folder, best, BEST, SECOND_BEST)
        save_last(self.folder, last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, problem: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except Exception as error:
            if problem is None:
                raise
            # The first error is the one to raise.
            warn(f"the last checkpoint could not be written: {error}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()


def load_last(folder: Path) -> dict[str, Any] | None:
    """The newest undamaged checkpoint, on the CPU; None if there is none. A damaged one gives a warning."""
    return _load_undamaged(folder, {LAST: "going back to the one before", PREVIOUS: "starting anew"})


def load_best(folder: Path) -> dict[str, Any] | None:
    """The best undamaged weights, on the CPU; None if there are none. Damaged ones give a warning."""
    return _load_undamaged(folder, {BEST: "taking the best before it", SECOND_BEST: "there is no other"})


def _load_undamaged(folder: Path, names: Mapping[str, str]) -> dict[str, Any] | None:
    for name, instead in names.items():
        path = folder / name
        with suppress(FileNotFoundError):  # none yet, or another process has just renamed it
            try:
                return load(path)
            except DamagedError as error:
                warn(f"{error}; {instead}")
                # Otherwise the next save would keep it in place of the undamaged one.
                path.replace(path.with_suffix(".damaged"))
    return None


def load(path: Path) -> dict[str, Any]:
    """Read a state that `save` wrote."""
    try:
        check_torch_file(path)
        with zipfile.ZipFile(path) as archive:  # torch does not verify checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(damaged)
        state = torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # damage can raise anything, depending on where it is
        # The file could not be read at all. (A damaged one may seek to an invalid position.)
        if isinstance(error, OSError) and error.errno is not None and error.errno != errno.EINVAL:
            raise
        raise DamagedError(f"the checkpoint {path} is damaged") from error
    if not isinstance(state, dict):
        raise DamagedError(f"the checkpoint {path} holds a {type(state).__name__}; expected a dict")
    return state


def random_state() -> dict[str, Any]:
    """The states of the random number generators of torch, Python and the current GPU."""
    python = torch.tensor(random.getstate()[1], device="cpu")
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the random number generators to a state of `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(map(int, state["python"])), None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
