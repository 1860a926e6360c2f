"""Objects that add up batches lose none, however many threads share them."""

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from calibrant import Evaluator, create_loss
from calibrant.integrations.torchmetrics import CalibrationError, ClasswiseCalibrationError
from calibrant.losses import AdaptiveLoss

THREADS, BATCHES, SIZE = 8, 20, 4


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(use: Callable[[Tensor, Tensor], object]) -> int:
    """Call a function with batches in several threads, and return the number of elements."""
    logits, target = 2 * torch.eye(SIZE), torch.arange(SIZE)

    def work(_: int) -> None:
        for _ in range(BATCHES):
            use(logits, target)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    return THREADS * BATCHES * SIZE


@pytest.mark.parametrize("key", ["cals-hr", "adafocal"])
def test_observe(key: str) -> None:
    loss = create_loss(key, SIZE)
    assert isinstance(loss, AdaptiveLoss)
    elements = in_threads(loss.observe)
    assert loss.adapt().samples == elements


def test_observe_while_another_thread_adapts() -> None:
    loss = create_loss("cals-hr", SIZE)
    assert isinstance(loss, AdaptiveLoss)
    seen: list[int] = []

    def observe(logits: Tensor, target: Tensor) -> None:
        loss.observe(logits, target)
        if loss._observed is not None and torch.rand(()) < 0.1:
            try:
                found = int(loss.adapt().samples)
            except RuntimeError:  # another thread took the sums
                return
            seen.append(found)

    elements = in_threads(observe)
    left = 0 if loss._observed is None else int(loss._observed.samples)
    assert sum(seen) + left == elements


def test_evaluator() -> None:
    evaluator = Evaluator(resamples=0)
    elements = in_threads(evaluator.update)
    assert evaluator.compute().samples == elements


def test_evaluator_refuses_a_second_number_of_classes_from_any_thread() -> None:
    for _ in range(5):
        evaluator, refused = Evaluator(resamples=0), []

        def update(classes: int, evaluator: Evaluator = evaluator, refused: list[int] = refused) -> None:
            for _ in range(5):
                try:
                    evaluator.update(torch.eye(classes) * 2, torch.arange(classes))
                except ValueError:
                    refused.append(classes)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(update, [3, 4]))
        assert len(refused) == 5
        assert len(set(refused)) == 1
        assert evaluator.compute().num_classes not in refused


@pytest.mark.parametrize("create", [CalibrationError, partial(ClasswiseCalibrationError, SIZE)])
def test_torchmetrics(create: Callable[[], CalibrationError]) -> None:
    metric = create()
    elements = in_threads(metric.update)
    assert metric.sums.samples == elements


@pytest.mark.parametrize("create", [CalibrationError, partial(ClasswiseCalibrationError, SIZE)])
def test_torchmetrics_forward(create: Callable[[], CalibrationError]) -> None:
    """Values of batches, while other threads only update."""
    metric, alone, values = create(), create(), []

    def use(logits: Tensor, target: Tensor) -> None:
        if torch.rand(()) < 0.5:
            metric.update(logits.clone().requires_grad_(), target)
        else:
            values.append(metric(logits, target).item())

    elements = in_threads(use)
    assert metric.sums.samples == elements
    assert not any(state.requires_grad for state in metric.sums.tensors())
    assert set(values) == {alone(2 * torch.eye(SIZE), torch.arange(SIZE)).item()}


def test_what_threads_share_can_be_copied_and_saved() -> None:
    loss, evaluator = create_loss("cals-hr", SIZE), Evaluator(resamples=0)
    logits, target = 2 * torch.eye(SIZE), torch.arange(SIZE)
    for copied in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)), through_torch):
        again = copied(loss)
        again.observe(logits, target)
        assert again.adapt().samples == SIZE
        assert copied(evaluator).update(logits, target).compute().samples == SIZE
    assert set(loss.state_dict()) == {"multiplier", "passes", "previous_penalty"}
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    compiled(logits, target)
    compiled.observe(logits, target)
    assert loss.adapt().samples == SIZE


def through_torch(value: object) -> object:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
