"""Two sizes of the fuzz tests, and a count of the cases that were run.

`make test` runs a few cases, always the same. `make fuzz` runs many, from a new seed each round: it passes
``--hypothesis-profile=fuzz``. Both hold for every test in this folder that does not set its own.
"""

from collections.abc import Iterator
from functools import wraps

import pytest
from hypothesis import HealthCheck, settings

# Drawing large batches takes long, and drops cases that rounding could decide either way.
_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
_SHARED = settings(deadline=None, database=None, print_blob=True, suppress_health_check=_CHECKS)
settings.register_profile("fuzz-briefly", _SHARED, max_examples=6, derandomize=True)
settings.register_profile("fuzz", _SHARED, max_examples=30)

_CASES = pytest.StashKey[int]()  # completed cases; one that fails, or that a test rejects, does not count


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Import the modules of this folder under the profile of `make test`, unless another one was given."""
    settings.register_profile("outside", settings.default)
    if isinstance(collector, pytest.File) and not collector.config.getoption("--hypothesis-profile"):
        settings.load_profile("fuzz-briefly")
    try:
        return (yield)
    finally:
        settings.load_profile("outside")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Count the cases of a test: its examples, or one if it has none."""
    stash = item.config.stash
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    if inner is None:
        result = yield
        stash[_CASES] = stash.get(_CASES, 0) + 1
        return result

    @wraps(inner)
    def counted(*arguments: object, **named: object) -> None:
        inner(*arguments, **named)
        stash[_CASES] = stash.get(_CASES, 0) + 1

    handle.inner_test = counted
    try:
        return (yield)
    finally:
        handle.inner_test = inner


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the number of cases for `make fuzz`."""
    if config.getoption("--hypothesis-profile") == "fuzz":
        terminalreporter.write_line(f"{config.stash.get(_CASES, 0)} cases completed")
