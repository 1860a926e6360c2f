"""Registries: what is added in any way is checked; otherwise they are dictionaries."""

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from calibrant import LOSSES
from calibrant.arguments import Registry
from calibrant.calibrators import CALIBRATORS
from calibrant.metrics import METRICS


def whole(key: str, part: int, others: Mapping[str, int]) -> None:
    if not isinstance(part, int):
        raise TypeError(f"{key!r}: expected an int, got {part!r}")


@pytest.fixture
def registry() -> Registry[int]:
    return Registry({"one": 1, "two": 2}, whole)


def join(registry: Any, parts: Mapping[str, Any]) -> None:
    registry |= parts


def set_default(registry: Any, parts: Mapping[str, Any]) -> None:
    registry.setdefault("three", parts["three"])


@pytest.mark.parametrize(
    "add",
    [lambda to, parts: to.update(parts), lambda to, parts: to.setdefault("three", parts["three"]), join],
)
def test_every_way_to_add_is_checked(registry: Registry[int], add: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="'three': expected an int, got '3'"):
        add(registry, {"three": "3"})
    assert list(registry) == ["one", "two"]
    add(registry, {"three": 3})
    assert dict(registry) == {"one": 1, "two": 2, "three": 3}


@pytest.mark.parametrize("key", [7, None, "", "my loss[", "a,b", "a.b", "ä", "a\n"])
def test_keys_can_be_named_on_a_command_line(registry: Registry[int], key: Any) -> None:
    with pytest.raises(ValueError, match="expected a key of letters, digits, - and _, got ") as error:
        registry[key] = 3
    assert str(error.value).endswith(repr(key))
    assert list(registry) == ["one", "two"]
    registry["A-b_3"] = 3


def test_what_calibrant_brings_cannot_be_replaced(registry: Registry[int]) -> None:
    with pytest.raises(ValueError, match="'two' is taken by a part of calibrant: choose another key"):
        registry.update(two=3)
    registry["two"] = registry["two"]
    registry["three"] = 3
    registry["three"] = 4  # a user's own
    assert dict(registry) == {"one": 1, "two": 2, "three": 4}


@pytest.mark.parametrize("parts", [LOSSES, METRICS, CALIBRATORS], ids=["losses", "metrics", "calibrators"])
def test_no_registry_lets_its_first_parts_be_replaced(parts: Registry[Any]) -> None:
    first, second, *_ = parts
    with pytest.raises(ValueError, match=f"'{first}' is taken by a part of calibrant"):
        parts[first] = parts[second]


def test_metrics_can_be_copied_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METRICS, "data", dict(METRICS))
    METRICS["brier"] = METRICS.pop("brier")  # now behind root_brier, which is computed from it
    assert dict(METRICS.copy()) == dict(METRICS)
    own = METRICS["ece"]
    metrics = METRICS.copy()
    metrics["mine"] = replace(own, label="Mine")
    metrics["of_mine"] = replace(own, label="Of mine", source="mine")
    metrics["mine"] = metrics.pop("mine")
    assert dict(metrics.copy()) == dict(metrics)
    with patch.dict(METRICS, {"mean": replace(METRICS["ece"], label="Mean")}, clear=True):
        assert list(METRICS) == ["mean"]
    assert list(METRICS)[-1] == "brier"


def test_registries_are_joined_as_dictionaries(registry: Registry[int]) -> None:
    other: dict[str, Any] = {"two": "another", "three": 3}
    assert registry | other == {"one": 1, **other}
    assert other | registry == {"three": 3, "one": 1, "two": 2}
    assert registry | registry == registry
    assert list(registry) == ["one", "two"]


@pytest.mark.parametrize("same", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_check_as_well(registry: Registry[int], same: Callable[..., Any]) -> None:
    copied = same(registry)
    assert copied == registry
    with pytest.raises(TypeError, match="'three'"):
        copied["three"] = "3"
    copied["three"] = 3
    assert "three" not in registry
