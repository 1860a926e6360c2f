"""Attributes that are imported on demand, where the package that they need is not installed."""

import importlib
import inspect
import pydoc
import sys

import pytest

import calibrant.integrations
from calibrant.extras import MissingPackageError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accelerate", "lightning", "sklearn", "torchmetrics", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"calibrant.integrations.{name}", raising=False)
        monkeypatch.delattr(calibrant.integrations, name, raising=False)


def test_help_and_members_leave_out_what_cannot_be_imported() -> None:
    assert "calibrant inside other libraries" in pydoc.render_doc(calibrant.integrations)
    members = dict(inspect.getmembers(calibrant.integrations))
    assert "sklearn" not in members
    assert "adaptive" in members  # needs nothing but torch


def test_the_way_to_install_it_is_named() -> None:
    with pytest.raises(AttributeError, match=r'pip install "calibrant\[sklearn\]"') as problem:
        _ = calibrant.integrations.sklearn
    assert isinstance(problem.value.__cause__, MissingPackageError)
    with pytest.raises(MissingPackageError, match="sklearn"):
        from calibrant.integrations import sklearn  # noqa: F401
    with pytest.raises(MissingPackageError, match="sklearn"):
        importlib.import_module("calibrant.integrations.sklearn")
