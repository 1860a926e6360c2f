"""Atomic file writing: a file is replaced in one step, so that nobody sees half of it."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path | str) -> Iterator[IO[bytes]]:
    """A stream to a temporary file that replaces ``path`` once it is complete.

    A replaced file keeps its mode and, where the system allows it, its owner and group. If the group cannot
    be kept, the permissions of the group are reduced to those of others. If ``path`` is a symbolic link, the
    link stays and the file that it points to is replaced. A device or a pipe is written to directly, and so
    is the file that the standard output or the error output goes to.

    Raises:
        OSError: the file cannot be written. The error has the original type and number, and names the file.
            Inside the ``with`` block, errors that name another file pass unchanged.
    """
    path = Path(path)
    with naming(path):
        target, before, partial = Path(os.path.realpath(path)), None, None
        with suppress(FileNotFoundError):
            before = path.stat()
        stream_number = _standard_stream(before)
        if stream_number is not None:
            descriptor = os.dup(stream_number)
        elif before is not None and not stat.S_ISREG(before.st_mode):
            descriptor = os.open(path, os.O_WRONLY)
        else:
            partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
            # Nobody else may read the new content of a private file, not even before it has its final mode.
            mode = 0o666 if before is None else 0o600
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with naming(path, others=True), os.fdopen(descriptor, "wb") as stream:
            yield stream
        if partial is not None:
            with naming(path):
                if before is not None:
                    _keep_owner_and_mode(partial, before)
                partial.replace(target)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def replace_file(path: Path | str, content: bytes) -> None:
    """Write or replace a file in one step; see `replacing`."""
    with replacing(path) as stream:
        stream.write(content)


def replace_files(folder: str | os.PathLike[str], contents: Mapping[str, bytes | str]) -> None:
    """Write or replace files of a folder, by their names. Missing folders are created."""
    for name, content in contents.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.encode() if isinstance(content, str) else content)


def why_unwritable(folder: Path) -> str:
    """Why no file can be created in a folder that exists; "" if one can.

    It is tried: the rights of a folder do not tell for root, nor for folders of the system such as ``/proc``.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except PermissionError:
        return f"{folder} does not allow it"
    except FileNotFoundError:
        return f"{folder} takes no new files"
    except OSError as error:
        return f"{folder}: {error.strerror or error}"


def _standard_stream(status: os.stat_result | None) -> int | None:
    """The number of the standard or the error output, if it goes to this regular file."""
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    for number in (1, 2):
        with suppress(OSError):  # a closed stream
            if os.path.samestat(status, os.fstat(number)):
                return number
    return None


def _keep_owner_and_mode(path: Path, before: os.stat_result) -> None:
    """Give a new file the owner, group and mode of the one that it replaces, as far as possible."""
    mode = stat.S_IMODE(before.st_mode) & 0o777
    try:
        os.chown(path, -1, before.st_gid)
    except OSError:  # another group than before must not get its rights
        mode = mode & 0o707 | (mode & 0o007) << 3
    with suppress(OSError):
        os.chown(path, before.st_uid, -1)
    path.chmod(mode)


@contextmanager
def naming(path: Path, *, others: bool = False) -> Iterator[None]:
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
