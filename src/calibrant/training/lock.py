"""The lock of a folder: one process at a time works in it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from calibrant.atomic import naming
from calibrant.training import TrainingError
from calibrant.training.run_folder import check_writable
from calibrant.warning import warn

FILE = ".lock"

_TAKEN = (errno.EACCES, errno.EAGAIN, errno.ESTALE)  # the last: the file was removed on another machine
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

# Record locks do not exclude threads of one process from one another. By the device and inode of the lock
# file: the holder's name.
_held_here: dict[tuple[int, int], str] = {}
_guard = threading.Lock()


def _forget_after_fork() -> None:
    global _guard
    _guard = threading.Lock()
    _held_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


class FolderLock:
    """Lets one process at a time work in a folder.

    The lock is a POSIX record lock on the file ``.lock`` in the folder. The system releases it when the
    process ends, even by ``kill -9``, and forked workers that outlive the process do not keep it. It should
    also work between machines if the network file system supports such locks; this was not tried. If the
    file system does not support them, a warning says so and nothing is locked.

    As a context manager, it waits until the folder is free. The folder is created if needed. ``purpose`` says
    what the process does in it, for messages.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, FolderLock(Path(folder), "an example"):
    ...     other = FolderLock(Path(folder))
    ...     print(other.acquire(), other.holder().endswith("(an example)"))
    False True
    """

    def __init__(self, folder: Path, purpose: str = "") -> None:
        self.folder, self.path, self.purpose = folder, folder / FILE, purpose
        self._descriptor: int | None = None
        self._key = (0, 0)
        self._created: list[Path] = []
        self._locks = True

    def acquire(self) -> bool:
        """Try to lock the folder; return whether this process holds the lock now."""
        with _guard:
            created = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):
                    if _key_of(os.stat(self.path, follow_symlinks=False)) in _held_here:
                        return False  # opening and closing the file once more would release the lock
                descriptor = _open(self.path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                check_writable(self.folder)  # otherwise the holder has just removed the folder
                return False
            except FileExistsError:  # so here, unless a file is in the way
                if os.path.lexists(self.folder) and not self.folder.is_dir():
                    raise
                return False
            taken = False
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            name = f"process {os.getpid()} on {socket.gethostname()} since {since} ({self.purpose})"
            try:
                if self._lock(descriptor) and self._in_place(descriptor):
                    with naming(self.path):
                        os.ftruncate(descriptor, 0)
                        os.write(descriptor, f"{name}\n".encode())
                    taken = True
            finally:
                if not taken:
                    os.close(descriptor)
            if taken:
                self._descriptor, self._created = descriptor, created
                self._key = _key_of(os.fstat(descriptor))
                _held_here[self._key] = name
            return taken

    def _lock(self, descriptor: int) -> bool:
        problem = _attempt(descriptor, exclusive=True)
        if problem in _UNSUPPORTED:
            self._locks = False
            warn(
                f"{self.folder} cannot be locked, because its file system does not support it "
                f"({os.strerror(problem)}): take care that no second process works in this folder"
            )
        elif problem and problem not in _TAKEN:
            raise OSError(problem, os.strerror(problem), str(self.path))
        return problem not in _TAKEN

    def _in_place(self, descriptor: int) -> bool:
        """Whether the path still leads to the open file."""
        try:
            return _key_of(os.stat(self.path)) == _key_of(os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def holder(self) -> str:
        """The process that holds the lock, in words; "" if there is none."""
        with _guard:
            try:
                key = _key_of(os.stat(self.path))
                if key in _held_here:
                    return _held_here[key]
                with open(_open(self.path, os.O_RDONLY), "rb") as stream:
                    text = stream.read(500).decode(errors="replace")
                    if _attempt(stream.fileno(), exclusive=False) not in _TAKEN:
                        return ""
            except OSError:
                return ""
        return "".join(each for each in text if each.isprintable()) or "another process"

    def check(self) -> None:
        """Raise an error if the folder was deleted or replaced, or another process has locked it."""
        if self._descriptor is None or not self._in_place(self._descriptor):
            raise TrainingError(
                f"the folder {self.folder} was deleted or replaced while this process worked in it; "
                "nothing more is written to it"
            )
        if self._locks and not self._lock(self._descriptor):  # a network file system can lose a lock
            with _guard:
                _held_here.pop(self._key, None)
            holder = self.holder() or "another process"
            raise TrainingError(
                f"{self.folder} was locked by {holder} meanwhile; nothing more is written to it"
            )

    def release(self) -> None:
        """Unlock the folder. If nothing was written to it, it is removed unless it was there before."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with _guard:
            _held_here.pop(self._key, None)
            if _attempt(descriptor, exclusive=True) not in _TAKEN:  # otherwise the file is another process's
                with suppress(OSError):
                    if self._created and self._in_place(descriptor) and os.listdir(self.folder) == [FILE]:
                        self.path.unlink()
                        for folder in self._created:
                            folder.rmdir()
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def __enter__(self) -> Self:
        said = False
        while not self.acquire():
            if not said:
                warn(f"{self.folder} is in use by {self.holder() or 'another process'}; waiting")
                said = True
            time.sleep(0.2)
        return self

    def __exit__(self, *problem: object) -> None:
        self.release()


def _key_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _open(path: Path, flags: int) -> int:
    """Open a lock file, which must be a regular file."""
    # A link could make this process overwrite a file elsewhere; opening a named pipe could wait for ever.
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | safe, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def _attempt(descriptor: int, *, exclusive: bool) -> int:
    """Try to lock an open file; return 0, or the number of the error."""
    try:
        import fcntl

        fcntl.lockf(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except ImportError:  # Windows
        return errno.ENOSYS
    except OSError as error:
        return error.errno or errno.EIO
    return 0
