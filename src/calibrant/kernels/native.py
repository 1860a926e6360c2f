"""Builds what `native.cpp` has, in the background, and hands kernels over to it.

At the sizes of most batches, a function of autograd that is written in Python takes longer to be called than
cross-entropy takes in all. C++ needs a compiler where the library is used, as Triton does. Where there is
none, or it fails, losses go on as they are.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import Any

import torch

_SWITCH = "CALIBRANT_NATIVE"
_NAME = "calibrant_native"
_log = logging.getLogger(__name__)


class _Builder:
    """Builds the module once, in a thread of its own."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self._lock = Lock()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin, unless that has been done or is not wanted."""
        with self._lock:
            if self._thread is None and os.environ.get(_SWITCH, "1") != "0":
                self._thread = Thread(target=self._build, name=_NAME, daemon=True)
                self._thread.start()

    def wait(self) -> ModuleType | None:
        """Until it is there; None if it cannot be built."""
        self.start()
        if self._thread is not None:
            self._thread.join()
        return self.module

    def _build(self) -> None:
        try:
            self.module = load(built())
        except Exception as error:  # whatever goes wrong, there is another way
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Do without it from now on."""
        self.module = None
        _log.info("losses are called by way of Python: %s", error)


BUILDER = _Builder()


def module() -> ModuleType | None:
    """What C++ has, or None as long as it is not there; it is begun when this is called first."""
    if BUILDER.module is None:
        BUILDER.start()
    return BUILDER.module


def built() -> Path:
    """The compiled module, from the cache of this user if it has been compiled before.

    Raises:
        RuntimeError: there is no compiler, or it failed.
    """
    from torch.utils import cpp_extension

    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    compiler = shlex.split(os.environ.get("CXX", "")) or ([found] if found else [])
    if not compiler or sys.platform != "linux":
        raise RuntimeError("no C++ compiler is there, or none that is known for this system")
    import fcntl  # which other systems do not have

    source = Path(__file__).with_name("native.cpp")
    headers = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    command = [
        *compiler,
        "-O2",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{folder}" for folder in headers),
        str(source),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *(f"-l{name}" for name in ("c10", "torch_cpu", "torch_python")),
        "-nodefaultlibs",  # of C++, what torch has loaded: with a second copy of it in here, streams crash
        "-lc",
        "-lgcc",
    ]
    machine = [platform.machine(), *platform.libc_ver(), sys.version, torch.__version__]
    about = [source.read_text(encoding="utf-8"), *machine, *command]
    digest = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "calibrant"
    path = folder / f"{_NAME}-{digest}.so"
    if path.is_file():
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        with suppress(OSError):  # not every disk can; then several may build it
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if path.is_file():
                return path
            # Whole or not at all. It goes on, and holds the lock, if this process ends before it does.
            outcome = subprocess.run(
                ["sh", "-c", _COMPILE, "sh", str(path), *command],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        finally:
            with suppress(OSError):  # a process that was forked meanwhile has the file open as well
                fcntl.flock(lock, fcntl.LOCK_UN)
    if outcome.returncode:
        raise RuntimeError(f"{shlex.join(compiler)} failed: {outcome.stderr.strip()[:2000]}")
    return path


_COMPILE = """
path=$1 part=$1.$$
shift
"$@" -o "$part" && mv "$part" "$path" && exit
rm -f "$part"
exit 1
"""


def load(path: Path) -> ModuleType:
    """The module in a file."""
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = spec_from_loader(_NAME, loader)
    assert spec is not None
    found = module_from_spec(spec)
    loader.exec_module(found)
    return found


@cache
def driver() -> tuple[int | None, ...]:
    """Where the functions of CUDA are that ``native.cpp`` needs, in the order of its ``Driver``."""
    cuda = ctypes.CDLL("libcuda.so.1")
    torch_cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    functions = (
        cuda.cuLaunchKernel,
        torch_cuda.aoti_torch_get_current_cuda_stream,
        cuda.cuCtxGetCurrent,
        cuda.cuDevicePrimaryCtxRetain,
        cuda.cuCtxSetCurrent,
    )
    return tuple(ctypes.cast(each, ctypes.c_void_p).value for each in functions)


class Number(int):
    """A tensor among the arguments of a kernel, by its number in ``native.cpp``."""


LOGITS, TARGET, OWN, FOUND, VALUE, GRADIENT, UPSTREAM = map(Number, (0, 1, 2, 9, 10, 11, 12))

_HANDED_OVER: dict[int, Any] = {}
"""Kernels by their addresses, which are all that C++ has of them."""

Kernel = tuple[int, int, int, int, list[tuple[int, int]]]


def described(compiled: Any, programs: int, names: Sequence[str], arguments: Sequence[Any]) -> Kernel:
    """A kernel that Triton has compiled, as ``native.cpp`` takes it.

    Args:
        compiled: it.
        programs: how many there are.
        names: of the kernel's arguments.
        arguments: of a launch, with a `Number` for each tensor.
    """
    signature = compiled.src.signature
    parameters = []
    for name, argument in zip(names, arguments, strict=True):
        kind = signature[name]
        if kind == "constexpr":  # such as a stride that is 1
            continue
        if isinstance(argument, Number) != kind.startswith("*"):
            raise TypeError(f"{name} is compiled as {kind}, but given as {type(argument).__name__}")
        parameters.append((argument, 0) if isinstance(argument, Number) else (-1, _bits(kind, argument)))
    metadata = compiled.metadata
    _HANDED_OVER[compiled.function] = compiled
    return compiled.function, programs, 32 * metadata.num_warps, metadata.shared, parameters


def _bits(kind: str, number: float) -> int:
    """A number as a kernel reads it, in the first bytes of eight.

    >>> _bits("i32", -1) == 2**64 - 1, hex(_bits("fp32", 1.0))
    (True, '0x3f800000')
    """
    if kind in ("i32", "i64"):
        return int(number) & (2**64 - 1)
    if kind == "fp32":
        return int.from_bytes(bytes(ctypes.c_float(number)), sys.byteorder)
    raise TypeError(f"numbers of type {kind} are not known")
