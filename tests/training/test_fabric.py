"""Fabric is imported without torchmetrics, and still knows its version."""

from __future__ import annotations

import ast
import importlib
import operator
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from lightning_utilities.core import imports

from calibrant.training import fabric

TRAINING = Path(fabric.__file__).parent


def test_versions_are_compared_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was imported")

    plain = imports.compare_version
    with fabric._version_from_metadata("torchmetrics"):
        with monkeypatch.context() as patch:
            patch.setattr(importlib, "import_module", refuse)
            patch.setattr(metadata, "version", lambda _: "1.9.0")
            assert imports.compare_version("torchmetrics", operator.ge, "1.0.0")
            assert not imports.compare_version("torchmetrics", operator.ge, "2.0.0")
        assert imports.compare_version("torch", operator.ge, "2.0.0")  # as before
    assert imports.compare_version is plain


def test_a_package_that_is_not_installed() -> None:
    with fabric._version_from_metadata("no-such-package"):
        assert not imports.compare_version("no-such-package", operator.ge, "0.0")


def test_the_comparison_is_restored_after_an_error() -> None:
    plain = imports.compare_version
    with pytest.raises(ImportError), fabric._version_from_metadata("torchmetrics"):
        raise ImportError
    assert imports.compare_version is plain


@pytest.mark.parametrize("path", sorted(TRAINING.rglob("*.py")), ids=lambda path: path.stem)
def test_only_this_module_imports_fabric(path: Path) -> None:
    if path.name == "fabric.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.startswith("lightning_fabric") for name in names)


def test_a_program_that_trains_does_not_import_what_it_does_not_need(tmp_path: Path) -> None:
    program = (
        "import atexit, sys; atexit.register(lambda: print(sorted(sys.modules)));"
        "import calibrant.cli, calibrant.training.grid, calibrant.reports.comparison_page;"
        "calibrant.cli.main()"
    )
    arguments = ["train", "digits-lt", "--set", "epochs=1", "--accelerator", "cpu", "--output", str(tmp_path)]
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "'lightning_fabric'" in result.stdout
    for package in ("torchmetrics", "sklearn", "scipy.stats"):
        assert f"'{package}'" not in result.stdout
