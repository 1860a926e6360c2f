"""Optional packages, and the one error for those that are missing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


class MissingPackageError(ImportError):
    """An optional package is not installed. The message names the extra to install."""

    def __init__(self, extra: str, package: str, purpose: str) -> None:
        super().__init__(
            f'{purpose} needs {package}, which is not installed: pip install "calibrant[{extra}]"',
            name=package,
        )


def require(extra: str, *packages: str, purpose: str) -> None:
    """Raise an error if a package, by the name under which it is imported, is not installed.

    Nothing is imported. ``extra`` is the extra of calibrant that installs the packages, and ``purpose`` what
    needs them, as the start of a sentence.

    >>> require("parquet", "no_such_package", purpose="reading Parquet")
    Traceback (most recent call last):
    calibrant.extras.MissingPackageError: reading Parquet needs no_such_package, which is not installed: \
pip install "calibrant[parquet]"
    """
    for package in packages:
        if not _is_installed(package):
            raise MissingPackageError(extra, package, purpose)


def optional_package(extra: str, package: str, *, purpose: str) -> Any:
    """Import a package, or raise the error of `require` if it, or a package that it imports, is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackageError(extra, error.name or package, purpose) from error


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None  # None forbids the import
    return importlib.util.find_spec(package) is not None
