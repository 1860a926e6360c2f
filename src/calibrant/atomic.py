"""Atomic file writing: a file is replaced in one step, so that nobody sees half of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path | str) -> Iterator[IO[bytes]]:
    """A stream to a temporary file that replaces ``path`` once it is complete.

    Raises:
        OSError: the file cannot be written. The error has the original type and names the file.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as stream:
            yield stream
        partial.replace(path)
    except OSError as error:
        raise type(error)(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def replace_file(path: Path | str, content: bytes) -> None:
    """Write or replace a file in one step; see `replacing`."""
    with replacing(path) as stream:
        stream.write(content)
