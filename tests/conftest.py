"""Two workers run the tests on two cores: with one thread each, and the longest files first."""

import inspect
from functools import cache
from types import ModuleType

import pytest
import torch

torch.set_num_threads(1)  # more of them would wait for one another


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start programs take longest: first, so that no worker is left alone with one in the end."""
    items.sort(key=lambda item: not (isinstance(item, pytest.Function) and starts_programs(item.module)))


@cache
def starts_programs(module: ModuleType) -> bool:
    source = inspect.getsource(module)
    return "subprocess" in source or "processes import" in source
