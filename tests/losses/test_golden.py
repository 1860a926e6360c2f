"""Losses and adaptation against values computed elsewhere, to nine digits in float64."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calibrant import create_loss
from calibrant.losses import Loss

GOLDEN = Path(__file__).parent.parent / "golden"
LOSS_VALUES = json.loads((GOLDEN / "losses.json").read_text())
PASSES = json.loads((GOLDEN / "adaptation.json").read_text())


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(name: str, **shared: Any) -> Loss:
    """The loss a golden entry is named after, such as ``cals-alm(margin=10,penalty=p2,…)``."""
    key, _, arguments = name.rstrip(")").partition("(")
    pairs = dict(re.findall(r"(\w+)=([\w.]+)", arguments))
    loss = create_loss(key, 7, **{k: v if k == "penalty" else float(v) for k, v in pairs.items()}, **shared)
    if "as given" in name:
        for state in ("multiplier", "penalty_weight"):
            if hasattr(loss, state):
                getattr(loss, state).copy_(double(LOSS_VALUES[state]))
    return loss


@pytest.mark.parametrize("name", LOSS_VALUES["losses"])
class TestLosses:
    def test_per_sample(self, name: str) -> None:
        values = loss_of(name, reduction="none")(
            double(LOSS_VALUES["logits"]), torch.tensor(LOSS_VALUES["target"])
        )
        torch.testing.assert_close(
            values, double(LOSS_VALUES["losses"][name]["per_sample"]), rtol=1e-9, atol=1e-9
        )

    def test_mean_and_gradient(self, name: str) -> None:
        logits = double(LOSS_VALUES["logits"]).requires_grad_()
        mean = loss_of(name)(logits, torch.tensor(LOSS_VALUES["target"]))
        mean.backward()
        golden = LOSS_VALUES["losses"][name]
        assert mean.item() == pytest.approx(golden["mean"], abs=1e-9)
        torch.testing.assert_close(logits.grad, double(golden["grad_of_mean"]), rtol=1e-9, atol=1e-9)


def test_mmce() -> None:
    logits, target = double(LOSS_VALUES["logits"]), torch.tensor(LOSS_VALUES["target"])
    term = create_loss("mmce", 7, weight=1.0)(logits, target) - create_loss("ce", 7)(logits, target)
    assert term.item() ** 2 == pytest.approx(LOSS_VALUES["mmce_squared"], abs=1e-9)


@pytest.mark.parametrize("name", [key for key in PASSES if key.startswith("cals")])
def test_adaptation(name: str) -> None:
    key, _, penalty = name.partition("/")
    loss = create_loss(key, 7, margin=PASSES["margin"], **({"penalty": penalty} if penalty else {}))
    assert len(PASSES["passes"]) == len(PASSES[name]) > 20
    for logits, expected in zip(PASSES["passes"], PASSES[name], strict=True):
        loss.observe(double(logits), torch.zeros(len(logits), dtype=torch.long))
        loss.adapt()
        for state, values in expected.items():
            torch.testing.assert_close(getattr(loss, state), double(values), rtol=1e-9, atol=1e-9)
