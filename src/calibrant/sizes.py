"""Sizes that files declare, checked before memory is allocated for them."""

from __future__ import annotations

import io
import os
import zipfile
from contextlib import suppress
from functools import cache
from math import inf, prod
from pathlib import Path
from typing import IO, Any

import numpy as np

Header = tuple[tuple[int, ...], bool, np.dtype[Any]]

MAX_CLASSES = 1_000_000
"""The most classes of a data set or a file of predictions."""

MAX_AXES = 16
"""The most axes of an array."""

MAX_TEXT = 1 << 28
"""The most bytes of a text or of all class names in a file."""

_MAX_HEADER = 10_000  # bytes; also the limit of NumPy
_DEFLATE = 1032  # no deflated stream is longer than this many times its size in the archive


@cache
def memory() -> float:
    """The bytes of memory that this process may have: the machine's, or the limit of its container."""
    found = [inf]
    with suppress(AttributeError, ValueError, OSError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(ValueError, OSError):  # "max" is no number
            found.append(int(Path(file).read_text()))
    return min(found)


def check_memory(size: int, what: str) -> None:
    """Raise a `ValueError` if something of ``size`` bytes cannot fit in memory."""
    if size > memory():
        raise ValueError(f"{what} takes {size / 2**30:.3g} GiB; this machine has {memory() / 2**30:.3g} GiB")


def check_member(member: zipfile.ZipInfo) -> None:
    """Raise a `ValueError` if a member of a zip archive cannot have the size that it declares."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is compressed by method {member.compress_type}; expected zlib")
    ratio = 1 if member.compress_type == zipfile.ZIP_STORED else _DEFLATE
    if member.file_size > ratio * member.compress_size:
        raise ValueError(
            f"{member.filename} declares {member.file_size} bytes, but has {member.compress_size} in the "
            "archive; it is damaged"
        )


def check_torch_file(path: Path) -> None:
    """Raise a `ValueError` if a file of `torch.save` declares more bytes than it has.

    `torch.load` allocates what each member of the archive declares. `torch.save` does not compress. Files
    from before torch 1.6 are no archives and are not checked.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} is compressed; expected a file as torch.save writes it")
    declared, size = sum(member.file_size for member in members), path.stat().st_size
    if declared > size:
        raise ValueError(f"it declares {declared} bytes, but has {size}; it is damaged")


def npy_header(stream: IO[bytes], size: int, name: str) -> Header:
    """Read the header of a ``.npy`` file of this size: shape, whether in Fortran order, and type.

    The stream is left at the start of the data. A header that is damaged, declares another size, or holds
    pickled objects raises a `ValueError` with the ``name`` of the array.
    """
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{name} is stored in version {version} of .npy; expected version 1 or 2")
    # NumPy would read as many bytes as the header declares before it checks their number.
    start = stream.read(2 if version == (1, 0) else 4)
    declared = int.from_bytes(start, "little")
    if declared > _MAX_HEADER:
        raise ValueError(f"{name} has a header of {declared} bytes; expected at most {_MAX_HEADER}")
    header = io.BytesIO(start + stream.read(declared))
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(header)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(header)
    if dtype.hasobject:
        raise ValueError(
            f"{name} holds pickled objects, which could run code; expected a plain "
            "array (of strings: .astype(str))"
        )
    if len(shape) > MAX_AXES or any(isinstance(length, bool) or length < 0 for length in shape):
        raise ValueError(f"{name} has shape {shape}; expected at most {MAX_AXES} lengths from 0 up")
    length = size - stream.tell()
    if length != prod(shape) * dtype.itemsize or (dtype.itemsize == 0 and prod(shape) > MAX_CLASSES):
        raise ValueError(f"{name} of shape {shape} and type {dtype} has {length} bytes; it is damaged")
    return shape, fortran, dtype
