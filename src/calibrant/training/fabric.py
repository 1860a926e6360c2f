"""Lightning Fabric, imported without torchmetrics.

Fabric asks for the version of torchmetrics, and imports it for that. This takes seconds where torchvision and
transformers are installed, because torchmetrics imports them. Here the version is read from the installed
package's metadata instead. All modules import Fabric from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from lightning_utilities.core import imports
from packaging.version import Version


@contextmanager
def _version_from_metadata(only: str) -> Iterator[None]:
    """Let Lightning compare the version of this package without importing it.

    Modules that are imported meanwhile keep the function that does so.
    """
    compare = imports.compare_version

    def compare_version(
        package: str, op: Callable[..., Any], version: str, use_base_version: bool = False
    ) -> bool:
        if package != only:
            return compare(package, op, version, use_base_version)
        try:
            found = Version(metadata.version(package))
        except (metadata.PackageNotFoundError, TypeError):  # the latter: its metadata are damaged
            return False
        return bool(op(Version(found.base_version) if use_base_version else found, Version(version)))

    imports.compare_version = compare_version
    try:
        yield
    finally:
        imports.compare_version = compare


with _version_from_metadata("torchmetrics"):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision import MixedPrecision, Precision
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy
    from lightning_fabric.wrappers import _FabricModule as FabricModule
    from lightning_fabric.wrappers import _FabricOptimizer as FabricOptimizer

__all__ = ["Fabric", "FabricModule", "FabricOptimizer", "MixedPrecision", "Precision", "SingleDeviceStrategy"]
