"""Imports point down only, importing the package is cheap, and public names say what they are."""

import ast
import inspect
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import calibrant
import calibrant.losses
import calibrant.metrics

PACKAGE = Path(calibrant.__file__).parent

BELOW_LOSSES = {
    "histogram",
    "inference",
    "kernels",
    "distributed",
    "statistics",
    "layout",
    "probabilities",
    "arguments",
    "warning",
}

MAY_IMPORT = {
    "__main__": {"cli", "extras"},
    "cli": {
        "calibrant",
        "processes",
        "arguments",
        "atomic",
        "calibrators",
        "conformal",
        "distributed",
        "ensembles",
        "evaluation",
        "extras",
        "losses",
        "metrics",
        "options",
        "predictions",
        "printable",
        "reports",
        "training",
        "warning",
    },
    "training": {
        "options",
        "atomic",
        "calibrators",
        "evaluation",
        "extras",
        "lazy",
        "losses",
        "metrics",
        "predictions",
        "printable",
        "processes",
        "sizes",
        *BELOW_LOSSES,
    },
    "integrations": {
        *("calibrators", "evaluation", "extras", "lazy", "losses", "metrics", "printable", "reports"),
        *BELOW_LOSSES,
    },
    "reports": {
        *("arguments", "atomic", "evaluation", "extras", "layout", "lazy", "losses", "metrics", "options"),
        "printable",
    },
    "predictions": {
        "arguments",
        "atomic",
        "ensembles",
        "extras",
        "layout",
        "printable",
        "probabilities",
        "sizes",
    },
    "evaluation": {"metrics", "printable", "processes", *BELOW_LOSSES},
    "calibrators": {"atomic", "printable", "sizes", *BELOW_LOSSES},
    "conformal": {"calibrators", "metrics", "printable", *BELOW_LOSSES},
    "losses": BELOW_LOSSES,
    "metrics": BELOW_LOSSES,
    "histogram": {"distributed", "kernels", "statistics", "layout", "arguments"},
    "kernels": {"statistics", "layout"},
    "statistics": {"distributed"},
    "inference": {"arguments", "distributed", "ensembles"},
    "ensembles": {"layout", "probabilities", "statistics"},
    "distributed": set(),
    "layout": {"arguments"},
    "probabilities": {"layout", "warning"},
    "options": {"arguments"},
    "arguments": set(),
    "atomic": set(),
    "extras": set(),
    "processes": {"extras"},
    "lazy": {"extras"},
    "printable": set(),
    "sizes": set(),
    "warning": set(),
}
"""What each part of the package may import of the others; `calibrant` itself gathers all of them."""


STRANGERS = {
    "cli": {"typer", "rich"},
    "training": {
        *(
            "PIL",
            "lightning_fabric",
            "numpy",
            "optuna",
            "pyarrow",
            "rich",
        ),
        *("safetensors", "scipy", "sklearn"),
    },
    "kernels": {"triton"},
    "losses": {"numpy", "triton"},
    "predictions": {"numpy", "pyarrow", "safetensors"},
    "sizes": {"numpy"},
    "evaluation": {"rich", "scipy"},
    "metrics": {"scipy"},
    "calibrators": {"rich", "safetensors", "scipy"},
    "conformal": {"scipy"},
    "reports": {"jinja2", "markupsafe", "matplotlib", "mpl_toolkits", "numpy", "rich"},
    "integrations": {
        "accelerate",
        "lightning",
        "matplotlib",
        "numpy",
        "pytorch_lightning",
        "sklearn",
        "torchmetrics",
        "transformers",
    },
}
"""What else each part may import beside torch and the standard library."""


def modules():
    """Dotted names relative to the package, and the files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield parts[:-1] if parts[-1] == "__init__" else parts, path


@cache
def docstring_and_imports(source, parts, is_package):
    """What several tests ask of each module, from one look at its source."""
    tree = ast.parse(source)
    return ast.get_docstring(tree), frozenset(imported(tree, parts, is_package))


def imported(tree, parts, is_package):
    """Dotted names, absolute, of all that a module imports, wherever in the file the import stands."""
    here = ("calibrant", *parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                base = ".".join([*here[: len(here) - up], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def parts_used(source, parts, is_package=False):
    """Which parts of calibrant a module imports, its own left out; "calibrant" for the package itself."""
    found = set()
    for name in docstring_and_imports(source, parts, is_package)[1]:
        root, _, rest = name.partition(".")
        if root == "calibrant":
            part = rest.partition(".")[0]
            found.add(part if part in MAY_IMPORT else "calibrant")
    return found - {parts[0] if parts else "calibrant"}


MODULES = [pytest.param(parts, path, id=".".join(("calibrant", *parts))) for parts, path in modules()]


@pytest.mark.parametrize(("parts", "path"), MODULES)
def test_imports_point_down(parts, path):
    used = parts_used(path.read_text(encoding="utf-8"), parts, path.name == "__init__.py")
    if parts:
        assert parts[0] in MAY_IMPORT, "a new part of the package needs its place among the layers"
        assert used <= MAY_IMPORT[parts[0]]


def test_every_layer_exists_and_is_used():
    found = {parts[0] for parts, _ in modules() if parts}
    assert found == set(MAY_IMPORT)
    used = [
        parts_used(path.read_text(encoding="utf-8"), parts, path.name == "__init__.py")
        for parts, path in modules()
    ]
    assert set.union(*used) >= BELOW_LOSSES


def test_the_layers_have_no_cycle():
    order = [
        "arguments",
        "atomic",
        "extras",
        "processes",
        "lazy",
        "printable",
        "sizes",
        "options",
        "warning",
        "layout",
        "probabilities",
        "distributed",
        "statistics",
        "ensembles",
        "inference",
        "kernels",
        "histogram",
        "metrics",
        "losses",
        "predictions",
        "calibrators",
        "conformal",
        "evaluation",
        "reports",
        "integrations",
        "training",
        "cli",
        "__main__",
    ]
    assert sorted(order) == sorted(MAY_IMPORT)
    for position, part in enumerate(order):
        assert MAY_IMPORT[part] - {"calibrant"} <= set(order[:position])
    assert "losses" not in MAY_IMPORT["metrics"]
    assert "metrics" not in MAY_IMPORT["losses"]


@pytest.mark.parametrize(
    ("source", "parts", "is_package", "expected"),
    [
        ("from calibrant.metrics import x", ("losses", "focal"), False, {"metrics"}),
        ("import calibrant.losses.base", ("metrics", "calibration"), False, {"losses"}),
        ("from calibrant import histogram", ("kernels", "terms"), False, {"histogram"}),
        ("from calibrant import LOSSES", ("metrics", "calibration"), False, {"calibrant"}),
        ("import calibrant", ("layout",), False, {"calibrant"}),
        ("def f():\n    from calibrant.kernels import y", ("statistics",), False, {"kernels"}),
        ("from ..metrics.calibration import z", ("losses", "focal"), False, {"metrics"}),
        ("from .. import metrics", ("losses", "focal"), False, {"metrics"}),
        ("from ..metrics import z", ("losses",), True, {"metrics"}),
        ("from . import base", ("losses",), True, set()),
        ("from .base import Loss", ("losses", "focal"), False, set()),
        ("from calibrant.losses.base import Loss", ("losses", "focal"), False, set()),
        ("from torch import nn\nimport calibrantly", ("layout",), False, set()),
    ],
)
def test_the_check_sees_every_kind_of_import(source, parts, is_package, expected):
    assert parts_used(source, parts, is_package) == expected


@pytest.mark.parametrize(("parts", "path"), MODULES)
def test_only_torch_the_standard_library_and_what_is_listed_are_imported(parts, path):
    source = path.read_text(encoding="utf-8")
    _, names = docstring_and_imports(source, parts, path.name == "__init__.py")
    roots = {name.partition(".")[0] for name in names}
    allowed = STRANGERS.get(parts[0], set()) if parts else set()
    assert roots <= {"calibrant", "torch"} | allowed | sys.stdlib_module_names


@pytest.mark.parametrize(("parts", "path"), MODULES)
def test_every_module_says_why_it_exists(parts, path):
    source = path.read_text(encoding="utf-8")
    assert docstring_and_imports(source, parts, path.name == "__init__.py")[0]


# ------------------------------------------------------------------------------------------- at run time

LOADED_BY_IMPORTS = """
import json, sys
import torch
loaded = []
for name in sys.argv[1:]:
    before = set(sys.modules)
    __import__(name)
    loaded.append(sorted(set(sys.modules) - before))
print(json.dumps(loaded))
"""


def loaded_by(*names):
    """For each module, what importing it adds to torch and those before it, in a fresh interpreter."""
    command = [sys.executable, "-c", LOADED_BY_IMPORTS, *names]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def strangers(names):
    known = {"calibrant", "torch"} | sys.stdlib_module_names
    return {name for name in names if name.partition(".")[0] not in known}


def test_importing_calibrant_imports_nothing_heavier_than_torch():
    parts = ("losses", "metrics", "evaluation", "calibrators", "integrations", "reports", "training")
    package, *loaded = loaded_by("calibrant", *(f"calibrant.{part}" for part in parts))
    assert "calibrant.losses" not in package
    names = {name for each in (package, *loaded) for name in each}
    assert {"calibrant.losses.focal", "calibrant.metrics.calibration", "calibrant.training"} <= names
    assert strangers(names) == set()


def test_the_check_sees_strangers():
    assert strangers(["json", "calibrant.losses", "torch.fx", "sklearn.svm", "rich"]) == {
        "sklearn.svm",
        "rich",
    }


# ----------------------------------------------------------------------------------------------- names


PUBLIC = [
    pytest.param(module, name, id=f"{module.__name__}.{name}")
    for module in (calibrant, calibrant.losses, calibrant.metrics)
    for name in module.__all__
]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_names_exist_and_say_what_they_are(module, name):
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        # not inspect.getdoc, which would find an ancestor's; not the signature a dataclass puts there
        assert value.__doc__
        assert value.__doc__.strip()
        assert not value.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize(
    "module", [calibrant, calibrant.losses, calibrant.metrics], ids=lambda module: module.__name__
)
def test_public_names_are_listed_once(module):
    assert len(set(module.__all__)) == len(module.__all__)
    classes_and_functions = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("calibrant")
    ]
    assert set(classes_and_functions) <= set(module.__all__)


def test_every_registered_loss_is_public():
    assert {loss.__name__ for loss in calibrant.LOSSES.values()} <= set(calibrant.losses.__all__)
