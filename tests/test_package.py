"""The wheel: what it needs, what it says about what is missing, and what importing it costs."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import calibrant
from calibrant.extras import MissingPackageError, optional_package, require
from tests.test_architecture import MODULES, PACKAGE

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {"numpy", "safetensors", "scipy", "torch"}
NOT_FOR_USERS = {"dev", "docs"}
MISSING = re.compile(r'[\w.:, ]+ needs \w+, which is not installed: pip install "calibrant\[(\w+)\]"')


# ------------------------------------------------------------------------------------------ the bare wheel


def distributions(requirements, seen):
    """The installed distributions that requirements lead to, without those of extras."""
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found = seen[name] = metadata.distribution(name)
        distributions(found.requires or [], seen)
    return seen


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The program of a virtual environment with the wheel and its core dependencies, as pip installs them."""
    folder = tmp_path_factory.mktemp("bare")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    venv.create(folder / "environment", with_pip=False, symlinks=True)
    program = folder / "environment" / "bin" / "python"
    if not program.exists():
        pytest.skip("links to packages need POSIX")
    (packages,) = (folder / "environment" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (own,) = metadata.distributions(name="calibrant", path=[str(packages)])
    for found in distributions(own.requires, {}).values():
        tops = {file.parts[0] for file in found.files or []}
        for top in tops - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(found.locate_file(top))
    return program


def run(program, *arguments):
    return subprocess.run([program, "-I", *arguments], capture_output=True, text=True, timeout=120)


USE = """
import torch, calibrant
logits = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
target = logits.argmax(1).roll(1)
calibrant.create_loss("adafocal", 3)(logits, target).backward()
held_out = logits.detach()
print(calibrant.evaluate(held_out, target, resamples=20))
calibrator = calibrant.calibrators.Temperature().fit(held_out, target)
isotonic = calibrant.calibrators.create_calibrator("isotonic").fit(held_out, target)
print(calibrant.evaluate(isotonic(calibrator(held_out)), target, resamples=0).nll)
calibrant.calibrators.save_calibrator(calibrator, "temperature.safetensors")
"""
IMPORT_ALL = """
import importlib, json, pkgutil
found = {}
for module in pkgutil.walk_packages(calibrant.__path__, "calibrant.", onerror=lambda name: None):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
            found[module.name] = None
        except Exception as error:
            found[module.name] = f"{type(error).__name__}: {error}"
print(calibrant.__file__)
print(json.dumps(found))
"""


def test_the_bare_wheel(bare, tmp_path, monkeypatch):
    """A loss, an evaluation and a calibrator work. Every other part works or says what to install."""
    monkeypatch.chdir(tmp_path)
    used = run(bare, "-c", USE + IMPORT_ALL)
    assert used.returncode == 0, used.stderr
    assert re.search(r"^ECE +\d+\.\d+ %", used.stdout, re.MULTILINE)
    assert (tmp_path / "temperature.safetensors").is_file()
    *_, place, found = used.stdout.splitlines()
    assert Path(place).is_relative_to(bare.parents[1])
    modules = json.loads(found)
    for part in ("losses", "metrics", "calibrators", "evaluation", "predictions", "kernels"):
        inside = {name: problem for name, problem in modules.items() if name.split(".")[1] == part}
        assert len(inside) > 1
        assert set(inside.values()) == {None}
    problems = {name: problem for name, problem in modules.items() if problem is not None}
    extras = {}
    for name, problem in problems.items():
        match = re.fullmatch(rf"MissingPackageError: {MISSING.pattern}", problem)
        assert match, f"{name}: {problem}"
        extras[name] = match[1]
    assert extras["calibrant.cli"] == "cli"
    assert extras["calibrant.reports.page"] == extras["calibrant.reports.plots"] == "report"
    assert extras["calibrant.training"] == "train"
    for name in ("accelerate", "lightning", "sklearn", "torchmetrics", "transformers"):
        assert extras[f"calibrant.integrations.{name}"] == name


def test_the_program_without_its_packages_says_what_to_install(bare):
    for arguments in ((), ("--version",), ("evaluate", "a.npz")):
        ended = run(bare, "-m", "calibrant", *arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        (line,) = ended.stderr.splitlines()
        assert line.startswith("calibrant: ")
        assert MISSING.fullmatch(line.removeprefix("calibrant: "))[1] == "cli"


def test_the_program_in_the_wheel_is_that_of_the_module():
    assert PROJECT["scripts"] == {"calibrant": "calibrant.__main__:main"}
    assert callable(importlib.import_module("calibrant.__main__").main)


# ----------------------------------------------------------------------------------------------- extras


def test_the_core_is_small():
    assert {Requirement(each).name for each in PROJECT["dependencies"]} == CORE


def test_the_oldest_versions_are_tested():
    """The lower bounds are the versions that a workflow tests."""
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert f"pip install {' '.join(PROJECT['dependencies']).replace('>=', '==')}\n" in workflow


def test_the_programs_of_the_workflows_exist():
    """Every target of make that a workflow or CONTRIBUTING.md names."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    texts.append((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    named = {target for text in texts for target in re.findall(r"(?:run: |`)make ([a-z-]+)", text)}
    assert {"check", "test", "test-oldest"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def distributions_of(extra):
    """The names of an extra's requirements, those of the extras it includes among them."""
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == "calibrant":
            for included in requirement.extras:
                yield from distributions_of(included)
        else:
            yield canonicalize_name(requirement.name)


def test_all_has_every_extra():
    listed = [Requirement(each) for each in PROJECT["optional-dependencies"]["all"]]
    assert {each.name for each in listed} == {"calibrant"}
    included = set().union(*(each.extras for each in listed))
    assert included == set(PROJECT["optional-dependencies"]) - {"all"} - NOT_FOR_USERS


def test_the_words_for_a_missing_package(monkeypatch):
    with pytest.raises(MissingPackageError) as info:
        require("tune", "json", "no_such_package", purpose="calibrant tune")
    message = 'calibrant tune needs no_such_package, which is not installed: pip install "calibrant[tune]"'
    assert str(info.value) == message
    assert info.value.name == "no_such_package"
    with pytest.raises(MissingPackageError) as info:
        optional_package("tune", "no_such_package", purpose="calibrant tune")
    assert str(info.value) == message
    assert MISSING.fullmatch(message)
    monkeypatch.setitem(sys.modules, "json", None)
    with pytest.raises(MissingPackageError, match="json"):
        require("tune", "json", purpose="calibrant tune")


def test_a_package_that_lacks_another_names_that_one(tmp_path, monkeypatch):
    (tmp_path / "incomplete_package.py").write_text("import package_that_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError, match=r"a model needs package_that_it_needs, .*\[timm\]"):
        optional_package("timm", "incomplete_package", purpose="a model")


CALLED = ("require", "optional_package")
BY_OTHERS = {"torch.utils.tensorboard": "tensorboard", "markupsafe": "jinja2"}
"""Modules that need another package, or come with it: that one is to be checked."""
UNGUARDED = {"triton"}
"""Part of torch's builds for GPUs; without it the losses use other kernels."""


def optional_imports(source, guarded):
    """Optional packages that a module imports without a check before, and each extra with what it checks.

    A check counts for all that comes after it in its function, or, outside of functions, in the module.

    Args:
        source: the text of the module.
        guarded: the packages that the packages around the module have checked.
    """
    unguarded, checks = set(), []
    known = CORE | UNGUARDED | {"calibrant"} | sys.stdlib_module_names

    def visit(node, guarded):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.FunctionDef) and node.name == "__rich__":
            return  # only rich calls it
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            guarded = set(guarded)
        if isinstance(node, ast.Import | ast.ImportFrom):
            several = isinstance(node, ast.Import)
            for name in [each.name for each in node.names] if several else [node.module or ""]:
                package = BY_OTHERS.get(name, name.partition(".")[0])
                if not getattr(node, "level", 0) and package not in known | guarded:
                    unguarded.add(package)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED:
            extra, *packages = [each.value for each in node.args if isinstance(each, ast.Constant)] or [None]
            checks.append((extra, packages))
            guarded.update(packages)
        for child in ast.iter_child_nodes(node):
            visit(child, guarded)

    guarded = set(guarded)
    visit(ast.parse(source), guarded)
    return unguarded, checks, guarded


@cache
def guarded_in(package):
    """The packages that the `__init__.py` of a package, and of each package around it, checks."""
    source = PACKAGE.joinpath(*package, "__init__.py").read_text(encoding="utf-8")
    return optional_imports(source, guarded_in(package[:-1]) if package else ())[2]


PROVIDERS = metadata.packages_distributions()


@pytest.mark.parametrize(("parts", "path"), MODULES)
def test_optional_packages_are_checked_before_they_are_imported(parts, path):
    around = guarded_in(parts[:-1]) if parts else ()
    unguarded, checks, _ = optional_imports(path.read_text(encoding="utf-8"), around)
    assert unguarded == set(), "see calibrant.extras.require"
    for extra, packages in checks:
        if extra is None:  # a function that hands on its arguments
            continue
        included = set(distributions_of(extra))
        for package in packages:
            names = {canonicalize_name(name) for name in PROVIDERS.get(package, [package])}
            assert names & included, f"the extra {extra} does not install {package}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import rich", {"rich"}),
        ("from rich.table import Table", {"rich"}),
        ("import numpy, scipy.special, os, calibrant.losses", set()),
        ("from . import rich", set()),
        ("def f():\n    import rich", {"rich"}),
        ("require('cli', 'rich', purpose='a')\nimport rich.table", set()),
        ("import rich\nrequire('cli', 'rich', purpose='a')", {"rich"}),
        ("def f():\n    require('cli', 'rich', purpose='a')\ndef g():\n    import rich", {"rich"}),
        ("def f():\n    require('cli', 'rich', purpose='a')\n    import rich", set()),
        ("if TYPE_CHECKING:\n    import rich", set()),
        ("if not TYPE_CHECKING:\n    import rich", {"rich"}),
        ("try:\n    import rich\nexcept ImportError:\n    pass", {"rich"}),
        ("from torch.utils.tensorboard import SummaryWriter", {"tensorboard"}),
        ("from markupsafe import escape", {"jinja2"}),
    ],
)
def test_the_check_sees_every_optional_import(source, expected):
    assert optional_imports(source, ())[0] == expected


def test_no_other_place_words_a_missing_package():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "extras.py":
            assert "pip install" not in path.read_text(encoding="utf-8"), path


# ----------------------------------------------------------------------------------- importing calibrant


def test_importing_calibrant_does_not_import_torch():
    program = "import sys, calibrant; calibrant.__version__; print(*({'torch', 'numpy'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""


def test_every_part_is_an_attribute():
    for name in ("calibrators", "integrations", "reports", "training", "losses", "metrics", "evaluation"):
        assert getattr(calibrant, name) is importlib.import_module(f"calibrant.{name}")
        assert name in dir(calibrant)
    assert callable(calibrant.integrations.adaptive.calibrant_loss)
    assert callable(calibrant.reports.page.write_report)
    assert calibrant.training.Recipe.__name__ == "Recipe"
    with pytest.raises(AttributeError, match="module 'calibrant' has no attribute 'calibrator'"):
        calibrant.calibrator  # noqa: B018
    assert not hasattr(calibrant.integrations, "tensorflow")


def test_names_on_demand_have_types():
    """What type checkers see under TYPE_CHECKING is what `__getattr__` finds."""
    for module in (calibrant, calibrant.training):
        (block,) = [
            node
            for node in ast.parse(inspect.getsource(module)).body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        names = {each.name for node in block.body if isinstance(node, ast.ImportFrom) for each in node.names}
        assert names - {"Bundle"} <= set(dir(module))
        assert set(module.__all__) <= {*names, *vars(module)}
