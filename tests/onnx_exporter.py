"""The newer ONNX exporter of torch without a list of operators that it makes anew for every model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest


@contextmanager
def operators_listed_once() -> Iterator[None]:
    """Remember which operators ONNX has. The exporter reads the source of each, which takes a second or two.

    A version of torch without this function only stays slower.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        listing = _listing()
    except (ImportError, AttributeError):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(listing))
        yield


@cache
def _listing() -> Callable[..., Any]:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return cache(ONNXRegistry.from_torchlib)
