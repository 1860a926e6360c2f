"""Readers for images, pickles, arrays and MATLAB files that never run code from the file.

A file that is damaged, or is of another kind, is a `ValueError` that names it.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from calibrant.predictions.file import not_utf8
from calibrant.printable import one_line
from calibrant.sizes import MAX_CLASSES, check_member, check_memory, npy_header

Array = NDArray[Any]

ARRAYS = ("images", "inputs", "features")
"""The names that the inputs may have in a NumPy archive."""

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""The suffixes of image files, in lower case."""


class MissingDataError(FileNotFoundError):
    """A file of a data set is missing; the message says what to download and where to put it.

    Data of one's own have no folder: the message says what was expected.

    >>> print(MissingDataError(Path("data/a.bin"), "a.tar from https://example.org", Path("data")))
    data/a.bin is missing: download a.tar from https://example.org and unpack it in data
    >>> print(MissingDataError(Path("data/a.csv"), "a table"))
    data/a.csv is missing: expected a table
    """

    def __init__(self, path: Path, what: str, folder: Path | None = None, how: str = "unpack") -> None:
        advice = f"expected {what}" if folder is None else f"download {what} and {how} it in {folder}"
        super().__init__(f"{path} is missing: {advice}")


def present(path: Path, what: str, folder: Path | None = None, how: str = "unpack") -> Path:
    """``path``, if it exists; otherwise a `MissingDataError` of these arguments.

    >>> present(Path("."), "a folder")
    PosixPath('.')
    """
    if not path.exists():
        raise MissingDataError(path, what, folder, how)
    return path


def read_image(path: Path, mode: str | None = None) -> Image.Image:
    """Decode an image of at most as many pixels as Pillow's limit, and convert it if a mode is given."""
    # From memory: of a file, Pillow would allocate as many bytes as a damaged part declares.
    with _image_errors(path), Image.open(io.BytesIO(path.read_bytes())) as image:
        _check_pixels(image)
        return converted(image, mode) if mode else image.copy()


def image_size(path: Path) -> tuple[int, int]:
    """Width and height of an image in pixels. Only the header is read."""
    # As a map, for the same reason.
    with (
        _image_errors(path),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        Image.open(content) as image,  # type: ignore[arg-type]
    ):
        _check_pixels(image)
        return image.size


class _UnsuitableError(ValueError):
    """An image is whole, but is not taken."""


@contextmanager
def _image_errors(path: Path) -> Iterator[None]:
    """Turn the errors of Pillow into a `ValueError` that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except UnidentifiedImageError as error:  # its message has the address of the object in memory
        raise ValueError(f"{path} cannot be read as an image: its format is unknown") from error
    except (_UnsuitableError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    except Exception as error:  # each format has errors of its own
        raise ValueError(
            f"{path} cannot be read as an image: it may be damaged or incomplete ({error})"
        ) from error


def _check_pixels(image: Image.Image) -> None:
    """Raise an error if there are too many pixels; Pillow only warns up to twice its limit."""
    if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise _UnsuitableError(
            f"it declares {image.width} × {image.height} pixels; expected at most "
            f"{Image.MAX_IMAGE_PIXELS} (PIL.Image.MAX_IMAGE_PIXELS)"
        )


def converted(image: Image.Image, mode: str) -> Image.Image:
    """An image in another Pillow mode of 8 bits; pixels of 16 bits are scaled, where Pillow would cut them.

    The range of pixels of 32 bits is not known: they are an error.
    """
    # Pillow has 16 bits of PGM files, and in older versions of PNG files, in 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise _UnsuitableError(f"its pixels are of 32 bits (mode {image.mode}), expected 8 or 16")
    return image.convert(mode)


def is_image(name: str) -> bool:
    """Whether a file with this name is an image, and not a hidden one."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a dictionary of numbers, strings, lists of these, and numeric arrays from an untrusted pickle.

    A pickle can call any function that it names. This reader replaces the few names that NumPy arrays need
    by harmless functions, which build arrays from bytes. It refuses every other name.

    The file may be written by Python 2 or 3, with any version of NumPy. Byte strings are decoded as latin-1.
    """
    # From memory: of a file, Python would allocate as many bytes as a damaged pickle asks for.
    stream = io.BytesIO(path.read_bytes())
    try:
        content = _PlainUnpickler(stream, encoding="bytes").load()
        if isinstance(content, dict):
            plain = {}
            for name, value in content.items():
                listed = isinstance(value, list)
                plain[str(_plain(name))] = list(map(_plain, value)) if listed else _plain(value)
            return plain
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{path} cannot be read as a pickle of numbers and texts: {error}") from error
    raise ValueError(f"{path} holds a {type(content).__name__}, expected a dictionary")


def read_mat(path: Path, names: Sequence[str]) -> list[Array]:
    """Read arrays by name from a MATLAB file of version 5."""
    from scipy.io import loadmat, whosmat  # type: ignore[import-untyped]  # slow to import

    try:
        content = _inflated(path.read_bytes())  # from memory, as above
        for name, shape, kind in whosmat(io.BytesIO(content)):
            # For cells, texts and structures scipy allocates as many entries as the header declares.
            if name in names and not re.fullmatch(r"u?int\d+|double|single|logical", kind):
                raise ValueError(f"{name} has the type {kind}, expected numbers")
            if name in names and math.prod(shape) > len(content):
                raise ValueError(f"{name} declares {math.prod(shape)} numbers, more than the file can hold")
        found = loadmat(io.BytesIO(content), variable_names=list(names))
    except Exception as error:  # scipy has no single exception for damaged files
        raise ValueError(f"{path} cannot be read as a MATLAB file of version 5: {error}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path} has no array {missing[0]!r}, expected {', '.join(names)}")
    return [found[name] for name in names]


def _inflated(content: bytes) -> bytes:
    """A MATLAB file of version 5 with its compressed arrays uncompressed, and the sizes in it checked.

    scipy allocates the size that each part of an array declares before it reads the part.
    """
    order = ">" if content[126:128] == b"MI" else "<"
    parts, at = [content[:128]], 128
    while at + 8 <= len(content):
        kind, size = struct.unpack_from(f"{order}II", content, at)
        element = content[at : at + 8 + size]
        parts.append(zlib.decompress(element[8:]) if kind == 15 else element)
        _check_parts(parts[-1], order)
        at += 8 + size
    return b"".join(parts)


def _check_parts(array: bytes, order: str) -> None:
    at = 8
    while at + 8 <= len(array):
        kind, size = struct.unpack_from(f"{order}II", array, at)
        if kind >> 16:  # a part of at most four bytes stands in its own header
            size = 0
        if size > len(array) - at - 8:
            raise ValueError(f"a part declares {size} bytes, but {len(array) - at - 8} follow")
        at += 8 + -(-size // 8) * 8


class _PlainType:
    """Replaces ``numpy.dtype``: accepts numeric types, refuses Python objects."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        text = code.decode("latin-1") if isinstance(code, bytes) else str(code)
        if not re.fullmatch(r"b1|[iu][1248]|f[248]", text):
            raise ValueError(f"it has an array of type {text!r}, expected numbers")
        self.dtype: np.dtype[Any] = np.dtype(text)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else str(state[1])
        self.dtype = self.dtype.newbyteorder(">" if order == ">" else "<")


class _PlainArray:
    """Replaces ``numpy.ndarray``; the array is built when the pickle sets the state."""

    value: Array

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        self.value = _array(content, kind, shape, "F" if by_columns else "C")


def _array(content: Any, kind: Any, shape: Any, order: Any) -> Array:
    if not isinstance(kind, _PlainType) or not isinstance(content, bytes | bytearray):
        raise ValueError("it has an array that is not made of bytes")
    array: Array = np.frombuffer(content, kind.dtype).reshape(shape, order=order)
    return array


def _array_from_buffer(content: Any, kind: Any, shape: Any, order: Any, *_: object) -> _PlainArray:
    array = _PlainArray()
    array.value = _array(content, kind, shape, order)
    return array


def _encoded(text: str, encoding: str) -> bytes:
    """Replaces ``codecs.encode``, by which Python 3 writes bytes in pickles for Python 2."""
    if encoding.lower().replace("-", "") not in ("latin1", "iso88591"):
        raise ValueError(f"it has a text encoded as {encoding!r}, expected latin-1")
    return text.encode("latin-1")


_REPLACEMENTS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _PlainType,
    ("numpy", "ndarray"): _PlainArray,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _PlainArray(),
    ("numpy.core.numeric", "_frombuffer"): _array_from_buffer,
    ("_codecs", "encode"): _encoded,
}


# The unpickler in Python, because the one in C allocates a table as large as the largest number in the file.
class _PlainUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        place = module.replace("numpy._core.", "numpy.core.")  # its name since NumPy 2
        if (place, name) not in _REPLACEMENTS:
            raise ValueError(f"it asks for {module}.{name}, expected nothing but NumPy arrays")
        return _REPLACEMENTS[place, name]


def _plain(value: Any) -> Any:
    """Unwrap an array, or decode a byte string."""
    if isinstance(value, _PlainArray):
        return value.value
    return value.decode("latin-1") if isinstance(value, bytes) else value


@contextmanager
def expecting_utf8(path: Path) -> Iterator[None]:
    """Turn the error for bytes that are not UTF-8 into a `ValueError` that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} {not_utf8(path)}") from error


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8."""
    with expecting_utf8(path):
        return path.read_text(encoding="utf-8-sig").splitlines()


def read_npy(path: Path) -> Array:
    """The numbers in a ``.npy`` file, mapped into memory."""
    with path.open("rb") as stream:
        try:
            shape, fortran, dtype = npy_header(stream, path.stat().st_size, "it")
            if not all(shape):
                return np.zeros(shape, dtype)
            return np.memmap(stream, dtype, "r", stream.tell(), shape, "F" if fortran else "C")
        except Exception as error:  # NumPy's parser raises errors of Python's own, too
            raise ValueError(f"{path} cannot be read as a NumPy array: {error}") from error


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays in a NumPy archive that fits in memory, by name."""
    with path.open("rb") as file:
        try:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is another kind of file, or one array; expected an archive of several")
            with zipfile.ZipFile(file) as archive:
                members = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
                for name, member in members.items():
                    check_member(member)
                    with archive.open(member) as stream:
                        npy_header(stream, member.file_size, name)
                check_memory(sum(member.file_size for member in members.values()), "it")
                arrays: dict[str, Array] = {}
                for name, member in members.items():
                    with archive.open(member) as stream:
                        arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
                return arrays
        except Exception as error:  # zipfile, zlib and NumPy have an error of their own each
            problem = one_line(f"{path} cannot be read as a NumPy archive of numbers: {error}")
            raise ValueError(problem) from error


def check_suffix(path: Path, suffixes: Iterable[str]) -> None:
    """Raise a ValueError unless the name of a file ends in one of the suffixes."""
    if path.suffix.lower() not in (known := list(suffixes)):
        found = "is a folder" if path.is_dir() else f"ends in {path.suffix!r}"
        raise ValueError(f"{path} {found}: expected one of {', '.join(map(repr, known))}")


def read_inputs(path: Path) -> Array:
    """The inputs in a ``.npy`` file, or in an archive: the array with a name in `ARRAYS`, or the only one."""
    check_suffix(path, (".npz", ".npy"))
    if path.suffix.lower() == ".npy":
        return np.array(read_npy(path))
    arrays = read_npz(path)
    found = [name for name in ARRAYS if name in arrays] or (list(arrays) if len(arrays) == 1 else [])
    if len(found) != 1:
        raise ValueError(f"{path} has {', '.join(arrays) or 'nothing'}, expected one of {', '.join(ARRAYS)}")
    return arrays[found[0]]


def whole_labels(path: Path, labels: Any, classes: int, name: str = "labels") -> NDArray[np.int64]:
    """Labels ``(N,)`` as int64; an error if they are not whole numbers from 0 to ``classes - 1``."""
    array: Array = np.empty(0)
    with suppress(TypeError, ValueError, OverflowError):
        array = np.asarray(labels)
    limits = f"from 0 to {classes - 1}" if classes < MAX_CLASSES else "from 0"
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{path} has {name} of type {array.dtype} and shape {array.shape}, expected (N,) whole numbers "
            f"{limits}"
        )
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < classes:
        raise ValueError(
            f"{path} has {name} from {int(array.min())} to {int(array.max())}, expected 0 to {classes - 1}"
        )
    return array.astype(np.int64)
