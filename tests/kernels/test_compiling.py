"""The GPU kernels can be compiled; see `tests.kernels.compiling`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_can_be_compiled() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiling.py")
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert outcome.stdout.split() == ["loss_and_gradient", "scale_in_place"]
