"""Triton's interpreter without searches that it repeats for every function a kernel calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Let the interpreter replace the operations of ``triton.language`` once for each kernel.

    By itself it looks through all members of the language whenever a kernel calls a function, to replace the
    operations by its own: most of its time. A version of Triton without these functions only stays slower.
    """
    try:
        from triton.runtime import interpreter

        language, kernels = interpreter.tl, interpreter.InterpretedFunction
        patch_language, data_type = interpreter._patch_lang, interpreter._get_np_dtype
    except (ImportError, AttributeError):
        yield
        return
    is_builtin = language.core.is_builtin
    everywhere = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    data_types: dict[str, Any] = {}

    @cache
    def operations(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def replace_operations(package: Any, builder: Any, *scope: Any) -> None:
        for name in operations(package):
            if is_builtin(member := getattr(package, name)):  # else it is replaced already
                interpreter._patch_attr(package, name, member, builder, *scope)

    def call_within_kernel(function: Any, *arguments: Any, **options: Any) -> Any:
        return function.rewrite()(*arguments, **options)

    def known_data_type(kind: Any) -> Any:
        if kind.name not in data_types:
            data_types[kind.name] = data_type(kind)
        return data_types[kind.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", replace_operations, raising=False)
        patch.setattr(interpreter, "_patch_lang", lambda kernel: patch_language(everywhere))
        patch.setattr(kernels, "__call__", call_within_kernel)
        patch.setattr(interpreter, "_get_np_dtype", known_data_type)
        yield
