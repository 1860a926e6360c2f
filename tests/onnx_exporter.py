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

    Those of torch are also listed once, in place of once for each of its namespaces. A version of torch
    without these functions only stays slower.
    """
    try:
        from torch._export import utils
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        listing, load = _listing(), cache(utils._materialize_cpp_cia_ops)
    except (ImportError, AttributeError):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(listing))
        patch.setattr(utils, "_materialize_cpp_cia_ops", load)
        yield


@cache
def _listing() -> Callable[..., Any]:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return cache(ONNXRegistry.from_torchlib)
