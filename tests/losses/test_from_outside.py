"""The loss of docs/architecture.md, added from outside the package: one file, one line in the registry."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import calibrant
from calibrant.kernels import fused_loss
from calibrant.layout import Elements
from calibrant.losses import AdaptiveLoss, HeuristicMultipliers, Loss
from calibrant.losses.batch import BatchLoss

HERE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    (source,) = re.findall(
        r"^```python\n(from __future__.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S
    )
    assert source.count("\n") < 100
    path = tmp_path_factory.mktemp("outside") / "ada_poly.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ada_poly", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(calibrant.LOSSES), patch.dict(sys.modules, {"ada_poly": module}):
        spec.loader.exec_module(module)
        yield module


@pytest.mark.usefixtures("outside")
def test_it_is_created_by_key_and_learns() -> None:
    loss = calibrant.create_loss("ada-poly", 3, rate=2.0)
    assert isinstance(loss, AdaptiveLoss)
    assert repr(loss) == "AdaPoly(3, rate=2.0)"
    loss.observe(torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([1]))
    loss.adapt()
    (learned,) = loss.learned().values()
    assert learned.item() == pytest.approx(2.0, abs=1e-3)
    again = calibrant.create_loss("ada-poly", 3, rate=2.0)
    again.load_state_dict(loss.state_dict())
    assert again.learned()["epsilon"] == learned


@pytest.mark.usefixtures("outside")
def test_its_gradient_is_autograd_s() -> None:
    loss = calibrant.create_loss("ada-poly", 4)
    loss.epsilon.fill_(0.7)
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 3, 1, -100, 2])
    assert torch.autograd.gradcheck(lambda x: loss(x, target), logits)


@pytest.mark.usefixtures("outside")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at elements that are masked
def test_the_gpu_kernel_computes_the_same() -> None:
    pytest.importorskip("triton")
    loss = calibrant.create_loss("ada-poly", 5)
    loss.epsilon.fill_(0.7)
    loss.to(HERE)
    logits, target = 3 * torch.randn(6, 5, device=HERE), torch.arange(6, device=HERE) % 5
    target[2] = -100
    exact = logits.double().requires_grad_()
    wanted = loss(exact, target)
    wanted.backward()
    composition, options = loss.composition(), loss._kernel_options()
    eager = partial(loss._unless_changed, composition, options)
    value = fused_loss(composition, logits.requires_grad_(), target, eager, options)
    value.backward()
    torch.testing.assert_close(value.double(), wanted.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


class Renamed(HeuristicMultipliers):
    """A loss that keeps its options under other names, or not as plain values."""

    def __init__(self, num_classes: int, *, speed: float = 1.0, schedule: object = None, **rest: Any) -> None:
        super().__init__(num_classes, **rest)
        self._speed = speed
        self.schedule = schedule


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def learn(loss: AdaptiveLoss) -> None:
    loss.observe(torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([1]))
    assert loss.adapt().samples == 1


def test_options_need_not_be_attributes() -> None:
    loss = Renamed(3, speed=2.0, margin=5.0)
    learn(loss)
    assert "margin=5.0" in repr(loss)


@pytest.mark.usefixtures("process_group")
def test_processes_compare_only_plain_options() -> None:
    losses = [Renamed(3, schedule=object()) for _ in range(2)]
    learn(losses[0])
    assert losses[0]._kind() == losses[1]._kind()
    for schedule in (1, 0.5, "cosine", True, (1, "a"), [None, 2.0]):
        assert f"schedule={schedule!r}" in Renamed(3, schedule=schedule)._kind()


class MeanOfBatch(Loss):
    """A loss whose author takes `per_sample` for the loss of the batch."""

    def per_sample(self, elements: Elements) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(elements.logits, elements.target)


class TermOfElements(Loss):
    """A loss whose author takes `over_batch` for a term of each element."""

    def per_sample(self, elements: Elements) -> torch.Tensor:
        return elements.logits.logsumexp(1)

    def over_batch(self, elements: Elements) -> torch.Tensor:
        return elements.logits.logsumexp(1)


class Forgetful(Loss):
    """A loss whose author forgets to return it."""

    def per_sample(self, elements: Elements) -> torch.Tensor:  # type: ignore[empty-body]
        pass


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_result_of_another_shape_is_refused(reduction: str) -> None:
    logits, target = torch.zeros(4, 3), torch.tensor([0, 1, 2, -100])
    with pytest.raises(ValueError, match=r"MeanOfBatch.per_sample must return .* shape \(4,\), got \(\)"):
        MeanOfBatch(3, reduction=reduction)(logits, target)
    with pytest.raises(ValueError, match=r"TermOfElements.over_batch must return a scalar, got shape \(4,\)"):
        TermOfElements(3, reduction=reduction)(logits, target)
    with pytest.raises(ValueError, match=r"Forgetful.per_sample must return .* \(4,\), got NoneType"):
        Forgetful(3, reduction=reduction)(logits, target)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [(AdaptiveLoss, "measure.*update"), (BatchLoss, "numbers.*over_numbers")],
)
def test_what_a_loss_lacks_is_named(kind: type[Loss], missing: str) -> None:
    with pytest.raises(TypeError, match=f"abstract class Own with.*{missing}"):
        type("Own", (kind,), {"per_sample": Forgetful.per_sample})(3)
