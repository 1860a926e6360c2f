"""Terms over the batch, computed in parts by several threads."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from calibrant import LOSSES, create_loss
from calibrant.losses import batch
from calibrant.losses.batch import BatchLoss, sum_of_parts

KEYS = [key for key, loss in LOSSES.items() if issubclass(loss, BatchLoss)]


@pytest.fixture(autouse=True)
def _two_threads_and_small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batch, "_SMALLEST_PART", 5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def logits_and_target(samples: int = 23) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    logits = 3 * torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(4, (samples,), generator=generator)
    target[::6] = -100
    return logits.requires_grad_(), target


@pytest.mark.parametrize("key", KEYS)
def test_losses_are_those_of_one_thread(key: str) -> None:
    logits, target = logits_and_target()
    loss = create_loss(key, 4)
    found = loss(logits, target)
    gradient = torch.autograd.grad(found, logits, retain_graph=True)
    again = torch.autograd.grad(found, logits, retain_graph=True)
    differentiable = torch.autograd.grad(found, logits, create_graph=True)
    second = torch.autograd.grad(differentiable[0].square().sum(), logits)
    torch.set_num_threads(1)
    expected = loss(logits, target)
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(expected, logits, create_graph=True)
    for first in (gradient, again, differentiable):
        torch.testing.assert_close(first[0], slope)
    torch.testing.assert_close(second, torch.autograd.grad(slope.square().sum(), logits))


@pytest.mark.parametrize("key", KEYS)
def test_without_gradients(key: str) -> None:
    logits, target = logits_and_target()
    loss = create_loss(key, 4)
    expected = loss(logits, target).detach()
    assert torch.equal(loss(logits.detach(), target), expected)
    with torch.inference_mode():
        assert torch.equal(loss(logits, target), expected)
        assert torch.equal(loss(logits.clone(), target.clone()), expected)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("samples", [0, 1, 2])
def test_few_elements(key: str, samples: int) -> None:
    logits, target = logits_and_target(samples)
    value = create_loss(key, 4)(logits, target)
    value.backward()
    assert value.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_parts_are_computed_by_other_threads_with_one_thread_inside() -> None:
    sizes = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        assert torch.get_num_threads() == 1
        sizes.append(len(x))
        return torch.stack([(x * y).sum(), x.exp().sum()])

    x = torch.linspace(-1, 1, 12, dtype=torch.float64, requires_grad=True)
    y = torch.arange(12, dtype=torch.float64)
    found = sum_of_parts(function, x, y)
    assert sorted(sizes) == [2, 5, 5]
    torch.testing.assert_close(found, torch.stack([(x * y).sum(), x.exp().sum()]))
    (gradient,) = torch.autograd.grad(found, x, torch.tensor([2.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(gradient, 2 * y + 3 * x.exp())
    assert sum_of_parts(lambda x: x.max(), x, together=True) == 1


def test_gradients_can_be_batched() -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64, requires_grad=True)

    def sums(x: Tensor) -> Tensor:
        return sum_of_parts(lambda x: torch.stack([x.exp().sum(), x.square().sum()]), x)

    jacobian = torch.autograd.functional.jacobian(sums, x, vectorize=True)
    torch.testing.assert_close(jacobian, torch.stack([x.exp(), 2 * x]).detach())


def test_errors_of_a_part_reach_the_caller() -> None:
    def fail(x: Tensor) -> Tensor:
        raise IndexError("a part")

    with pytest.raises(IndexError, match="a part"):
        sum_of_parts(fail, torch.zeros(12))
