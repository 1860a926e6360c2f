"""Lightning Fabric, imported without torchmetrics.

Fabric asks for the version of torchmetrics, and imports it for that. This takes seconds where torchvision and
transformers are installed, because torchmetrics imports them. Here it meets an empty module that knows the
version of the installed package. All modules import Fabric from here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from threading import Thread


@contextmanager
def _only_the_version_of(package: str) -> Iterator[None]:
    """An empty module in place of a package that is installed, and not imported yet."""
    found = next(iter(metadata.distributions(name=package)), None)
    if found is None or not found.version or package in sys.modules:  # not installed, or damaged metadata
        yield
        return
    sys.modules[package] = module_from_spec(ModuleSpec(package, None))
    sys.modules[package].__version__ = found.version  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del sys.modules[package]


with _only_the_version_of("torchmetrics"):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision import MixedPrecision, Precision
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy
    from lightning_fabric.wrappers import _FabricModule as FabricModule
    from lightning_fabric.wrappers import _FabricOptimizer as FabricOptimizer

__all__ = [
    "Fabric",
    "FabricModule",
    "FabricOptimizer",
    "MixedPrecision",
    "Precision",
    "SingleDeviceStrategy",
    "launch",
]

_PARENT = "CALIBRANT_PARENT"
"""Environment variable of the processes that Fabric starts: the process that starts them."""


def launch(fabric: Fabric) -> None:
    """Start all processes, and connect them. They end with this one."""
    os.environ[_PARENT] = str(os.getpid())
    try:
        fabric.launch()
    finally:
        os.environ.pop(_PARENT, None)


def _end_with(parent: int) -> None:
    """Wait for the end of the parent, which may have come before, and end this process."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if _parent := os.environ.pop(_PARENT, ""):
    Thread(target=_end_with, args=(int(_parent),), daemon=True).start()
