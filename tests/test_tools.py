"""The programs in tools/ and the environment they prepare."""

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "torchvision_beside_cpu_torch.py"


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.filterwarnings("ignore")
def test_torchvision_is_importable():
    """Here, because the tool is imported whenever Python starts."""
    for package in ("timm.data", "torchvision.transforms"):
        import_module(package)


@pytest.mark.parametrize(("loads", "declared"), [(True, []), (False, ["nms", "qnms"])])
def test_operators_are_declared_only_where_the_extension_does_not_load(tmp_path, loads, declared):
    """In place of torch and torchvision stand packages that record what happens."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (tmp_path / "torch.py").write_text(
        "class library:\n"
        "    defined = []\n"
        "    class Library:\n"
        "        def __init__(self, *names): assert names == ('torchvision', 'FRAGMENT')\n"
        "        def define(self, schema): library.defined.append(schema.partition('(')[0])\n"
    )
    (package / "__init__.py").write_text("import torch\nfrom . import extension, _meta_registrations")
    (package / "extension.py").write_text(f"def _has_ops(): return {loads}")
    (package / "_meta_registrations.py").touch()
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import torchvision_beside_cpu_torch\n"
        "assert set(sys.modules) - before == {'torchvision_beside_cpu_torch'}\n"
        "import torchvision, torch\n"
        "assert torch.library.defined == sys.argv[1:], torch.library.defined\n"
    )
    # -S leaves out site-packages, and with it a copy of the tool that is installed there.
    path = os.pathsep.join([str(tmp_path), str(TOOL.parent)])
    result = run("-S", "-c", program, *declared, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
