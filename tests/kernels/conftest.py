"""Triton's interpreter without a search that it repeats for every function a kernel calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Remember which members of ``triton.language`` are operations.

    The interpreter looks through all members before it runs a function, to replace the operations by its own.
    That takes half of its time. A version of Triton without this function only stays slower.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def operations(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def replace_operations(package: Any, builder: Any, *scope: Any) -> None:
        for name in operations(package):
            if is_builtin(member := getattr(package, name)):  # else it is replaced already
                interpreter._patch_attr(package, name, member, builder, *scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", replace_operations, raising=False)
        yield
