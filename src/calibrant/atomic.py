"""Atomic file writing: a file is replaced in one step, so that nobody sees half of it."""

from __future__ import annotations

import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path | str) -> Iterator[IO[bytes]]:
    """A stream to a temporary file that replaces ``path`` once it is complete.

    A replaced file keeps its mode and, where the system allows it, its owner. If ``path`` is a symbolic link,
    the link stays and the file that it points to is replaced. A device or a pipe is written to directly.

    Raises:
        OSError: the file cannot be written. The error has the original type and number, and names the file.
            Inside the ``with`` block, errors that name another file pass unchanged.
    """
    path = Path(path)
    with _named(path):
        target, before = _resolved(path)
        if before is not None and not stat.S_ISREG(before.st_mode):
            partial, raw = None, _Output(path, os.open(path, os.O_WRONLY))
        else:
            partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
            # Nobody else may read the new content of a private file, not even before it has its final mode.
            mode = 0o666 if before is None else 0o600
            raw = _Output(path, os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        with _named(path, others=True), io.BufferedWriter(raw) as stream:
            yield stream
        if partial is not None:
            with _named(path):
                if before is not None:
                    with suppress(OSError):
                        os.chown(partial, before.st_uid, before.st_gid)
                    partial.chmod(stat.S_IMODE(before.st_mode) & 0o777)
                partial.replace(target)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def replace_file(path: Path | str, content: bytes) -> None:
    """Write or replace a file in one step; see `replacing`."""
    with replacing(path) as stream:
        stream.write(content)


def _resolved(path: Path) -> tuple[Path, os.stat_result | None]:
    """The file that a path leads to through symbolic links, and its status if it exists."""
    try:
        before = path.stat()
    except FileNotFoundError:
        return Path(os.path.realpath(path)), None
    return Path(os.path.realpath(path)), before


class _Output(io.FileIO):
    """An open file whose errors name the path that was to be written."""

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(descriptor, "w")
        self.path = path

    def write(self, data: Any) -> int:
        with _named(self.path):
            return super().write(data)


@contextmanager
def _named(path: Path, *, others: bool = False) -> Iterator[None]:
    """Let an error say which file cannot be written.

    With ``others``, errors may be about other files. Those of the output name no file: they come from the
    stream or from `os.fsync`.
    """
    try:
        yield
    except OSError as error:
        if others and (error.filename is not None or error.strerror is None):
            raise
        named = type(error)(f"cannot write {path}: {error.strerror or error}")
        named.errno = error.errno
        raise named from None
