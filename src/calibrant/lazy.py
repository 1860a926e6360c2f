"""Modules and names that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from calibrant.extras import MissingPackageError


def on_demand(
    package: str, path: Iterable[str], names: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package whose modules are imported on demand.

    Every public module in its ``path`` becomes an attribute. ``names`` has further ones, with their modules.
    """
    modules = {module.name for module in iter_modules(path) if not module.name.startswith("_")}
    origins = dict(names or {})

    def find(name: str) -> Any:
        try:
            if name in origins:
                value = getattr(import_module(origins[name]), name)
                setattr(sys.modules[package], name, value)
                return value
            if name in modules:
                return import_module(f"{package}.{name}")  # sets the attribute as well
        except MissingPackageError as error:
            # `help`, `inspect` and `hasattr` look at every attribute, and go on after this error only.
            raise AttributeError(str(error), name=name) from error
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *origins})

    return find, listed
