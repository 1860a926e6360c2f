"""``compile = "auto"``: networks are compiled within a run if that repays, and nothing else changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from calibrant.training import compilation, loop, setup
from calibrant.training.compilation import CACHED_COMPILE_SECONDS, COMPILE_SECONDS, repays, should_compile
from calibrant.training.display import Display
from calibrant.training.loop import train
from calibrant.training.recipe import Recipe
from calibrant.training.setup import make_fabric

from .run_folders import assert_identical


def recipe_of(*changes: str) -> Recipe:
    """100 elements are three batches and a smaller one; batch statistics show every extra forward pass."""
    return Recipe.load("digits-lt").override(
        [
            "epochs=4",
            "batch_size=32",
            "drop_last=false",
            "data=synthetic[classes=4,features=5,train_size=100,validation_size=60,test_size=31]",
            "model=tests.training.program:batch_normalised",
            "optimizer=sgd[lr=0.05]",
            *changes,
        ]
    )


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup, "make_fabric", partial(make_fabric, accelerator="cpu"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(Display, "note", lambda self, text: found.append(text))
    return found


def compile_after_an_epoch(monkeypatch: pytest.MonkeyPatch, backend: Any) -> list[int]:
    """Let the next run compile its network; return the sizes of the batches that it sees compiled."""
    sizes: list[int] = []

    def counting(graph: Any, inputs: list[torch.Tensor]) -> Any:
        compiled = backend(graph, inputs)

        def run(*arguments: torch.Tensor) -> Any:
            sizes.append(max(len(each) for each in arguments if each.ndim == 2 and not each.requires_grad))
            return compiled(*arguments)

        return run

    monkeypatch.setattr(loop, "should_compile", lambda parts, batch, history: len(history) == 1)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    return sizes


def test_a_network_in_the_cache_is_compiled_after_one_epoch() -> None:
    assert repays([{"seconds": 4.0}], 30, CACHED_COMPILE_SECONDS)
    assert not repays([{"seconds": 4.0}], 300, COMPILE_SECONDS)
    assert not repays([], 300, CACHED_COMPILE_SECONDS)


@pytest.mark.filterwarnings("ignore")  # the compiler's, about its own choices
def test_a_run_that_compiles_on_demand_leaves_a_marker(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    torch._dynamo.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        train(recipe_of("compile=true", "epochs=2"), tmp_path / "run")
    assert len(list((tmp_path / "cache" / "calibrant").iterdir())) == 1


@pytest.mark.parametrize("changes", [[], ["accumulate=2", "average=0.9", "loss=cals-alm[margin=1]"]])
def test_a_network_compiled_within_a_run_trains_as_before(
    changes: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.compiler.reset()
    plain = train(recipe_of(*changes), tmp_path / "plain")
    sizes = compile_after_an_epoch(monkeypatch, lambda graph, inputs: graph.forward)
    compiled = train(recipe_of(*changes), tmp_path / "compiled")
    assert_identical(compiled, plain)
    pieces = 2 if changes else 1
    # One pass to compile, and the full batches of three epochs; the smaller batches are not compiled.
    assert sizes == [32 // pieces] * (1 + 3 * 3 * pieces)
    assert not [text for text in said if "compile" in text and "cannot" in text]


def test_a_network_that_cannot_be_compiled_trains_on(
    said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.compiler.reset()
    plain = train(recipe_of(), tmp_path / "plain")

    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("there is no compiler\nmore words")

    compile_after_an_epoch(monkeypatch, refuse)
    assert_identical(train(recipe_of(), tmp_path / "refused"), plain)
    (note,) = [text for text in said if "cannot be compiled" in text]
    assert "there is no compiler" in note
    assert "\n" not in note


def test_a_run_on_a_cpu_is_not_compiled() -> None:
    recipe = recipe_of("epochs=1000")
    assert recipe.compile == "auto"
    parts = SimpleNamespace(recipe=recipe, fabric=make_fabric(recipe, accelerator="cpu"), batch_size=1)
    batch = (torch.zeros(1, 1), torch.zeros(1))
    assert not should_compile(parts, batch, [{"seconds": 100.0}] * 2)  # type: ignore[arg-type]


def test_a_network_in_the_cache_is_compiled_for_shorter_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setattr(compilation, "is_single_gpu", lambda fabric: True)
    monkeypatch.setattr(compilation, "_marker", lambda parts, batch: marker)
    batch = (torch.zeros(8, 1), torch.zeros(8))

    def decided(seconds: float, setting: str = "auto", batch_size: int = 8) -> bool:
        recipe = recipe_of("epochs=30", f"compile={setting}")
        parts = SimpleNamespace(recipe=recipe, fabric=None, batch_size=batch_size)
        history = [{"seconds": 60.0}, {"seconds": seconds}]
        return should_compile(parts, batch, history)  # type: ignore[arg-type]

    assert [decided(seconds) for seconds in (1.0, 4.0, 20.0)] == [False, False, True]
    marker.touch()
    assert [decided(seconds) for seconds in (1.0, 4.0, 20.0)] == [False, True, True]
    assert not decided(20.0, setting="false")
    assert not decided(20.0, batch_size=16)


def test_compiling_repays_only_if_enough_is_left() -> None:
    rows = [{"seconds": 10.0}] * 5
    assert not repays(rows[:1], 1000, COMPILE_SECONDS)  # the first epoch says little
    assert repays(rows, 100, COMPILE_SECONDS)
    assert not repays(rows, 6, COMPILE_SECONDS)


def test_a_compiled_network_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.compiler.reset()
    compile_after_an_epoch(monkeypatch, lambda graph, inputs: graph.forward)
    train(recipe_of("epochs=2"), tmp_path / "run")
    assert len(list((tmp_path / "cache" / "calibrant").iterdir())) == 1
