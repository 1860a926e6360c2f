"""Settings of all tests: one thread each, the longest files first, the marker ``slow``, blank pictures."""

import gc
import inspect
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

from .programs import build_commands_once, draw_blank, quick_programs, start_processes_quickly

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start: other threads, other rounding

SLOW = (
    "test_compiles_whole_and_is_not_compiled_again_by_adapt",
    "test_compiles_with_class_weights_and_without_a_gradient",
    "test_exports_behind_a_model",
    "test_compare_writes_tables_pictures_and_a_page_and_trains_only_what_is_missing",
    "test_compare_detects_other_data",
    "test_compare_and_predict_on_shifted_data",
    "test_losses_that_need_more_than_two_classes_are_trained",
    "test_scaling_never_fits_worse_than_doing_nothing",
    "test_other_data_are_normalised_as_the_models_were",
    "test_the_program_starts_from_any_folder_and_under_torchrun",
    "test_commands_of_a_section_run_and_write_what_its_rows_name",
    "test_onnx_and_torch_graphs_predict_the_same",
    "test_calibrators_of_other_kinds_are_exported_to_onnx",
    "test_the_commands_for_using_a_model_run",
    "test_the_newer_exporter",
    "test_the_newer_exporter_on_images",
)
"""Tests that `make check` leaves out, because they take most of the time of their files."""


FOLDER = pytest.StashKey[str]()
"""Where the stand-ins for programs are; set in pytest's main process."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start the workers of pytest-xdist as forks of one server, which has already imported what they need."""
    stack = ExitStack()
    config.add_cleanup(stack.close)
    folder = stack.enter_context(quick_programs(Path(stack.enter_context(TemporaryDirectory()))))
    config.stash[FOLDER] = str(folder)
    for spec in specs:
        spec.python = str(folder / "python")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each worker where the stand-ins are, and the path of the real Python."""
    node.workerinput |= {"programs": node.config.stash[FOLDER], "python": sys.executable}


def pytest_configure(config: pytest.Config) -> None:
    """In a worker: restore the real `sys.executable`, and start multiprocessing's fork server as a fork."""
    if given := getattr(config, "workerinput", None):
        sys.executable = given["python"]
        multiprocessing.set_executable(sys.executable)
        start_processes_quickly(Path(given["programs"], "python"))


def pytest_collection() -> None:
    """Turn garbage collection off while modules are imported: nearly all objects that it visits are in use.

    Later, full collections are rare, because each takes a third of a second.
    """
    import torch

    gc.disable()
    gc.set_threshold(700, 10, 1000)
    torch.set_num_threads(1)  # several processes run the tests, and their threads would wait for one another
    with suppress(ImportError):  # typer is an extra
        build_commands_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and put files that start programs first: they take longest."""
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not (isinstance(item, pytest.Function) and starts_programs(item.module)))


def pytest_collection_finish() -> None:
    """Leave all that was imported out of the search for garbage, which trainers start before each run."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let go of it, or else some packages report leaks at the end."""
    gc.unfreeze()


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures without content, for tests that only ask which there are: drawing takes most of their time."""
    from calibrant.reports.plots import drawing

    monkeypatch.setattr(drawing, "_saved", drawing._saved)  # as it was, after the test
    draw_blank()


@pytest.fixture
def jobs_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread for the jobs of `compare`: it starts sooner than processes. Two would parse at once.

    Python 3.11 then fails now and then: "AST constructor recursion depth mismatch".
    """
    from calibrant.training import grid

    monkeypatch.setattr(grid, "process_pool", lambda jobs: ThreadPoolExecutor(1))


@pytest.fixture(scope="session")
def programs(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a `calibrant` and a `python` that start at once."""
    if given := getattr(pytestconfig, "workerinput", None):
        yield Path(given["programs"])
        return
    with quick_programs(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@cache
def starts_programs(module: ModuleType) -> bool:
    source = inspect.getsource(module)
    return any(word in source for word in ("subprocess", "processes import", "programs import"))
