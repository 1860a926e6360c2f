"""Fabric is imported without torchmetrics, and still knows its version."""

from __future__ import annotations

import ast
import operator
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from lightning_utilities.core.imports import compare_version

from calibrant.training import fabric

TRAINING = Path(fabric.__file__).parent


def test_a_version_is_known_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchmetrics", raising=False)
    version = metadata.version("torchmetrics")
    with fabric._only_the_version_of("torchmetrics"):
        assert compare_version("torchmetrics", operator.eq, version)
        assert not compare_version("torchmetrics", operator.gt, version)
        assert not hasattr(sys.modules["torchmetrics"], "Metric")
    assert "torchmetrics" not in sys.modules


def test_a_package_that_is_not_installed() -> None:
    with fabric._only_the_version_of("no-such-package"):
        assert not compare_version("no-such-package", operator.ge, "0.0")


def test_a_package_that_is_imported_already_stays() -> None:
    with fabric._only_the_version_of("pytest"):
        assert sys.modules["pytest"] is pytest
    assert sys.modules["pytest"] is pytest


def test_nothing_is_left_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchmetrics", raising=False)
    with pytest.raises(ImportError), fabric._only_the_version_of("torchmetrics"):
        raise ImportError
    assert "torchmetrics" not in sys.modules


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
