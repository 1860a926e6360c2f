import math
from dataclasses import FrozenInstanceError, dataclass
from typing import Generic, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from calibrant.histogram import ConfidenceHistogram, Outcomes
from calibrant.kernels import sum_by_class
from calibrant.layout import arrange
from calibrant.statistics import Statistics, sum_dtype

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Moments(Statistics):
    """What an author of an adaptive loss writes: fields, and nothing else."""

    total: Tensor
    squares: Tensor


def moments(values):
    values = torch.as_tensor(values, dtype=torch.float64)
    return Moments(
        torch.tensor(float(len(values)), dtype=torch.float64), values.sum(0), values.square().sum(0)
    )


def test_addition_is_fieldwise():
    left, right = moments([[1.0, 2.0]]), moments([[3.0, 5.0], [7.0, 11.0]])
    added = left + right
    assert type(added) is Moments
    assert added.samples.item() == 3
    assert added.total.tolist() == [11.0, 18.0]
    assert added.squares.tolist() == [59.0, 150.0]
    # and neither operand moved
    assert left.samples.item() == 1
    assert left.total.tolist() == [1.0, 2.0]
    assert right.total.tolist() == [10.0, 16.0]


def test_addition_is_the_statistics_of_both_data_sets():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    parts = moments(values[:7]) + moments(values[7:]) + moments(values[:0])
    for part, whole in zip(parts.tensors(), moments(values).tensors(), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-14, atol=1e-14)


def test_what_a_notebook_shows_is_short():
    """Of subclasses too, for which dataclass would write its own."""
    assert repr(moments([[1.0, 2.0]])) == "Moments(samples=1, total=<shape (2,)>, squares=<shape (2,)>)"
    assert repr(Statistics(torch.tensor(1234567.0))) == "Statistics(samples=1234567)"
    assert repr(Statistics(torch.empty((), device="meta"))) == "Statistics(samples=<shape ()>)"
    histogram = ConfidenceHistogram.of(arrange(torch.eye(3), torch.arange(3)))
    assert repr(histogram).startswith("ConfidenceHistogram(samples=3, count=<shape (")
    assert len(repr(histogram)) < 150


def test_subclasses_may_have_other_bases():
    """The class was not told that it is generic."""

    class Typed(Statistics, Generic[T]):
        pass

    assert Typed[int](torch.tensor(2.0)).samples == 2


def test_tensors_come_in_the_order_of_the_fields():
    statistics = moments([[2.0]])
    assert [tensor.reshape(-1).tolist() for tensor in statistics.tensors()] == [[1.0], [2.0], [4.0]]


@dataclass(frozen=True, eq=False)
class OfLabels(Statistics):
    """A tuple of statistics, one for each of several labels."""

    labels: tuple[Moments, ...]


def test_tuples_of_statistics_add_one_by_one():
    one, two = (
        OfLabels(torch.tensor(2.0), tuple(moments([value]) for value in values))
        for values in ([1.0, 2.0], [3.0, 5.0])
    )
    added = one + two
    assert [label.total.item() for label in added.labels] == [4.0, 7.0]
    assert [label.samples.item() for label in added.to(torch.device("cpu")).labels] == [2.0, 2.0]
    assert repr(added) == "OfLabels(samples=4, labels=<6 tensors>)"


def test_statistics_with_an_addition_of_their_own_cannot_be_a_field():
    """Added tensor by tensor, elements of two batches would be mixed."""

    @dataclass(frozen=True, eq=False)
    class Nested(Statistics):
        outcomes: Outcomes

    outcomes = Outcomes.of(arrange(torch.eye(3), torch.tensor([0, 1, 1])))
    with pytest.raises(TypeError, match="Outcomes has an addition of its own: it cannot be a field"):
        Nested(outcomes.samples, outcomes)


def test_statistics_of_different_kinds_do_not_add():
    with pytest.raises(ValueError, match="argument"):
        moments([[1.0]]) + Statistics(torch.tensor(1.0))


def test_statistics_are_frozen():
    with pytest.raises(FrozenInstanceError):
        moments([[1.0]]).samples = torch.tensor(0.0)


def test_all_reduce_without_a_process_group_is_the_identity():
    statistics = moments([[1.0]])
    assert statistics.all_reduce() is statistics


def test_moving_keeps_kind_and_values():
    statistics = moments([[1.0, 2.0]])
    moved = statistics.to(torch.device("cpu"))
    assert type(moved) is Moments
    assert moved.total.tolist() == [1.0, 2.0]
    assert all(tensor.device.type == "meta" for tensor in statistics.to(torch.device("meta")).tensors())


@pytest.mark.parametrize("left", [math.nan, 3.0])
@pytest.mark.parametrize("right", [math.nan, 5.0])
def test_nan_samples_survive_addition(left, right):
    added = Statistics(torch.tensor(left)) + Statistics(torch.tensor(right))
    assert math.isnan(added.samples.item()) == (math.isnan(left) or math.isnan(right))
    later = added + Statistics(torch.tensor(1.0))
    assert math.isnan(later.samples.item()) == math.isnan(added.samples.item())


# -------------------------------------------------------------------------------------------- accuracy


def test_sums_are_float64_where_the_device_has_it():
    assert sum_dtype(torch.device("cpu")) == torch.float64
    assert sum_dtype(torch.device("cuda")) == torch.float64
    assert sum_dtype(torch.device("mps")) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_the_library_sums_is_float64(dtype):
    elements = arrange(torch.randn(5, 3).to(dtype), torch.tensor([0, 1, 2, 0, 1]))
    assert {tensor.dtype for tensor in ConfidenceHistogram.of(elements).tensors()} == {torch.float64}
    assert {tensor.dtype for tensor in sum_by_class(elements, lambda shifted: (shifted,))} == {torch.float64}


def test_ten_million_samples_stream_without_loss():
    # 2 000 batches of 5 000 equal samples, all correct.
    batch, batches = 5_000, 2_000
    elements = arrange(torch.tensor([[2.0, 0.0]]).expand(batch, 2), torch.zeros(batch, dtype=torch.int64))
    one = ConfidenceHistogram.of(elements)
    total = one
    for _ in range(batches - 1):
        total = total + one
    number = batch * batches
    confidence = float(1 / (1 + torch.tensor(-2.0).exp()))
    assert total.samples.item() == number
    assert total.correct.sum().item() == number
    assert total.confidence.sum().item() == pytest.approx(number * confidence, rel=1e-12)
    # The same stream in float32 is off in the second digit, so the check above can tell.
    naive = float(np.cumsum(np.full(number, confidence, dtype=np.float32), dtype=np.float32)[-1])
    assert abs(naive / (number * confidence) - 1) > 0.01


def test_one_sample_counts_after_ten_million():
    one = Statistics(torch.tensor(1.0, dtype=sum_dtype(torch.device("cpu"))))
    many = Statistics(torch.tensor(2.0**24, dtype=sum_dtype(torch.device("cpu"))))
    assert (many + one).samples.item() == 2**24 + 1
    assert torch.tensor(2.0**24, dtype=torch.float32) + 1 == 2**24


@pytest.mark.parametrize("shape", [(1 << 20, 2), (2, 2, 1 << 19)])
def test_sums_by_class_are_exact_over_a_large_batch(shape):
    # float64 has room for every sum of a million copies of one float32 number; float32 has not.
    logits = torch.zeros(shape)
    logits[:, 1] = -0.1
    elements = arrange(logits, torch.zeros(shape[:1] + shape[2:], dtype=torch.int64))
    samples, shifted = sum_by_class(elements, lambda shifted: (shifted,))
    assert samples.item() == 1 << 20
    assert shifted.tolist() == [0.0, (1 << 20) * float(torch.tensor(-0.1))]


def test_sums_by_class_leave_ignored_elements_out():
    logits = torch.tensor([[0.0, -1.0], [math.nan, math.inf], [-3.0, 0.0]])
    elements = arrange(logits, torch.tensor([0, -100, 1]))
    samples, shifted, squares = sum_by_class(elements, lambda shifted: (shifted, shifted.square()))
    assert samples.item() == 2
    assert shifted.tolist() == [-3.0, -1.0]
    assert squares.tolist() == [9.0, 1.0]
