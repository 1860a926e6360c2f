"""Under Accelerate, every element counts once, checkpoints contain the loss, and nothing else changes.

Here accelerate only simulates several processes, which is fast enough to try every size. Tests with real
processes are in `tests/distributed/test_accelerate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import calibrant
from calibrant import create_loss
from calibrant.integrations.accelerate import adapt_on, evaluate_on, own_rows, prepare_loss

from ..evaluations import assert_same

CLASSES, FEATURES = 4, 6


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    """Reset the state that all accelerators of a process, and so all tests, share."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


# ---- Whose rows -----------------------------------------------------------------------------------


def drawn(loader: DataLoader, processes: int, **options: Any) -> tuple[list[int], list[int]]:
    """The elements that all processes draw and keep, in the order of gathering."""
    all_batches: list[list[tuple[list[int], int]]] = []
    for place in range(processes):
        torch.manual_seed(0)
        shard = prepare_data_loader(loader, num_processes=processes, process_index=place, **options)
        generator = getattr(loader.sampler, "generator", None)
        if generator is not None:  # accelerate makes it the same in all processes
            generator.manual_seed(0)
        all_batches.append([(batch.tolist(), own_rows(len(batch))) for batch in shard])
    together, kept = [], []
    for number in range(max(map(len, all_batches))):
        for batches in all_batches:
            if number < len(batches):
                batch, own = batches[number]
                assert 0 <= own <= len(batch)
                together += batch
                kept += batch[:own]
    return together, kept


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


def sizes(processes: int, split_batches: bool) -> Iterator[tuple[int, int]]:
    """Sizes of the data, up to a bit more than two rounds of all processes, and of batches."""
    for batch_size in (processes, 2 * processes) if split_batches else (1, 2, 3):
        together = batch_size if split_batches else batch_size * processes
        yield from ((size, batch_size) for size in range(1, 2 * together + 2))


@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("split_batches", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_element_is_one_processes_own(processes: int, split_batches: bool, even_batches: bool) -> None:
    options = {"split_batches": split_batches, "even_batches": even_batches}
    repeated = 0
    for size, batch_size in sizes(processes, split_batches):
        together, kept = drawn(DataLoader(range(size), batch_size), processes, **options)
        assert kept == list(range(size)), (size, batch_size)
        repeated += len(together) - len(kept)
    assert (repeated > 0) == (processes > 1 and even_batches)


@pytest.mark.parametrize("split_batches", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_same_of_streams_that_have_a_length(processes: int, split_batches: bool) -> None:
    for size, batch_size in sizes(processes, split_batches):
        _, kept = drawn(DataLoader(SizedStream(size), batch_size), processes, split_batches=split_batches)
        assert kept == list(range(size)), (size, batch_size)


@pytest.mark.parametrize("data", [range, SizedStream, Stream])
@pytest.mark.parametrize("processes", [2, 3])
def test_where_the_last_batch_is_dropped_nothing_is_cut(processes: int, data: Any) -> None:
    for size, batch_size in product(range(12, 20), [1, 2, 3]):
        together, kept = drawn(DataLoader(data(size), batch_size, drop_last=True), processes)
        assert kept == together == list(range(len(kept)))
        assert size - len(kept) < batch_size * processes


def test_a_stream_without_length_is_refused_at_once() -> None:
    loader = prepare_data_loader(DataLoader(Stream(7), 2), num_processes=2, process_index=0)
    first = next(iter(loader))
    with pytest.raises(ValueError, match="give the data set a __len__"):
        own_rows(len(first))


def test_in_one_process_a_stream_without_length_is_all_data() -> None:
    assert drawn(DataLoader(Stream(7), 2), 1)[1] == list(range(7))


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("draws", [1, 4, 9, 13])
def test_a_sampler_need_not_draw_each_element_once(draws: int, processes: int) -> None:
    subset = DataLoader(range(20), 2, sampler=SubsetRandomSampler(range(20 - draws, 20)))
    assert sorted(drawn(subset, processes)[1]) == list(range(20 - draws, 20))
    weighted = DataLoader(range(5), 2, sampler=WeightedRandomSampler([1.0] * 5, draws))
    assert len(drawn(weighted, processes)[1]) == draws


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_shuffled_data(processes: int) -> None:
    assert sorted(drawn(DataLoader(range(11), 2, shuffle=True), processes)[1]) == list(range(11))


class Buckets:
    """Batches of different sizes."""

    def __init__(self, sizes: list[int]) -> None:
        ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self.batches = [list(range(*pair)) for pair in pairwise(ends)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self.batches])

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_batch_samplers(processes: int) -> None:
    for size in range(12, 20):
        sampler = BatchSampler(SequentialSampler(range(size)), 2, drop_last=False)
        assert drawn(DataLoader(range(size), batch_sampler=sampler), processes)[1] == list(range(size))

        # The loader does not know that its batch sampler drops batches.
        sampler = BatchSampler(SequentialSampler(range(size)), 4, drop_last=True)
        together, kept = drawn(DataLoader(range(size), batch_sampler=sampler), processes)
        assert kept == together == list(range(len(kept)))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_batch_samplers_without_a_size(processes: int) -> None:
    for count in range(1, 8):
        sizes = [3, 1, 4, 1, 5, 9, 2][:count]
        try:
            _, kept = drawn(DataLoader(range(25), batch_sampler=Buckets(sizes)), processes)
        except ValueError as refusal:
            if "the batch sampler has no batch size" not in str(refusal):
                raise
            assert version("accelerate") != "1.15.0", "the newest one that is tested takes them"
            pytest.skip("this version of accelerate refuses them")
        assert kept == list(range(sum(sizes)))


@pytest.mark.parametrize("processes", [2, 3])
def test_a_batch_sampler_in_the_place_of_a_sampler(processes: int) -> None:
    class Lists:
        def __len__(self) -> int:
            return 11

        def __getitem__(self, places: list[int]) -> Tensor:
            return torch.tensor(places)

    sampler = BatchSampler(SequentialSampler(range(11)), 2, drop_last=False)
    loader = DataLoader(Lists(), batch_size=None, sampler=sampler)
    assert drawn(loader, processes)[1] == list(range(11))


def test_first_batches_can_be_skipped() -> None:
    kept = []
    for place in range(2):
        loader = prepare_data_loader(DataLoader(range(11), 2), num_processes=2, process_index=place)
        for batch in skip_first_batches(loader, 1):
            kept += batch[: own_rows(len(batch))].tolist()
    assert sorted(kept) == list(range(4, 11))


def test_outside_of_a_loader_all_rows_are_data() -> None:
    assert own_rows(5) == 5


# ---- Losses ---------------------------------------------------------------------------------------


class Recorder:
    """Replaces an accelerator on another device."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.registered: list[Any] = []

    def register_for_checkpointing(self, *objects: Any) -> None:
        self.registered += objects


@pytest.mark.parametrize("compiled", [False, True])
def test_a_prepared_loss_is_moved_and_registered(compiled: bool) -> None:
    itself = create_loss("cals-alm", CLASSES)
    loss = torch.compile(itself, backend="eager") if compiled else itself
    recorder = Recorder()
    assert prepare_loss(recorder, loss) is loss
    assert {buffer.device.type for buffer in itself.buffers()} == {"meta"}
    assert len(recorder.registered) == 1
    assert recorder.registered[0] is itself


@pytest.mark.parametrize("other", [nn.CrossEntropyLoss(), nn.functional.cross_entropy, "cals-alm"])
def test_what_is_no_loss_of_ours_is_refused(other: Any, accelerator: Accelerator) -> None:
    with pytest.raises(TypeError, match="takes a calibrant loss, got"):
        prepare_loss(accelerator, other)


def test_a_compiled_loss_reads_a_plain_ones_checkpoint(tmp_path: Path, accelerator: Accelerator) -> None:
    loss = prepare_loss(accelerator, create_loss("cals-alm", CLASSES))
    loss.observe(20 * torch.randn(8, CLASSES), torch.zeros(8, dtype=torch.long))
    loss.adapt()
    accelerator.save_state(str(tmp_path))
    other = Accelerator(cpu=True)
    compiled = prepare_loss(other, torch.compile(create_loss("cals-alm", CLASSES), backend="eager"))
    other.load_state(str(tmp_path))
    assert compiled.multiplier.tolist() == loss.multiplier.tolist()
    assert compiled.multiplier.max() > 0.1


# ---- Training -------------------------------------------------------------------------------------


def data(size: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = 5 * torch.randn(size, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (size,), generator=generator))


def setting(key: str) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, DataLoader, nn.Module]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training, validation = DataLoader(data(30, 2), 8, shuffle=True), DataLoader(data(23, 3), 8)
    return model, optimizer, training, validation, create_loss(key, CLASSES)


def plain(key: str, epochs: int) -> tuple[nn.Module, nn.Module]:
    model, optimizer, training, validation, loss = setting(key)
    for _ in range(epochs):
        for inputs, target in training:
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        calibrant.adapt_on(loss, model, validation)
    return model, loss


def accelerated(
    key: str, epochs: int, save_to: Path | None = None, load_from: Path | None = None
) -> tuple[nn.Module, nn.Module]:
    """Train and save in the middle, or resume from there."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, training, validation, loss = setting(key)
    model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)
    loss = prepare_loss(accelerator, loss)
    if load_from is not None:
        accelerator.load_state(str(load_from))
    for epoch in range(0 if load_from is None else epochs // 2, epochs):
        if save_to is not None and epoch == epochs // 2:
            accelerator.save_state(str(save_to))
        for inputs, target in training:
            optimizer.zero_grad()
            accelerator.backward(loss(model(inputs), target))
            optimizer.step()
        adapt_on(accelerator, loss, model, validation)
    return model, loss


def states(pair: tuple[nn.Module, nn.Module]) -> dict[str, Tensor]:
    return {f"{place}.{name}": value for place in (0, 1) for name, value in pair[place].state_dict().items()}


def assert_identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("key", ["cals-alm", "cals-hr", "adafocal"])
def test_the_result_is_the_plain_loops(key: str) -> None:
    accelerator_free, with_accelerator = states(plain(key, 4)), states(accelerated(key, 4))
    assert accelerator_free["1.passes"] == 4
    assert_identical(with_accelerator, accelerator_free)


@pytest.mark.filterwarnings("ignore::calibrant.losses.AdaptationWarning")  # exponents learn from noise here
@pytest.mark.parametrize("key", ["cals-alm", "cals-hr", "adafocal"])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(key: str, tmp_path: Path) -> None:
    whole = states(accelerated(key, 12, save_to=tmp_path))
    torch.manual_seed(99)  # as in a new process
    resumed = states(accelerated(key, 12, load_from=tmp_path))
    assert_identical(resumed, whole)
    assert resumed["1.passes"] == 12


def test_evaluation_is_that_of_all_data(accelerator: Accelerator) -> None:
    model, _, _, validation, _ = setting("ce")
    prepared, loader = accelerator.prepare(model, validation)
    whole = calibrant.evaluate_on(model, validation, name="model", resamples=20)
    assert whole.samples == 23
    assert_same(evaluate_on(accelerator, prepared, loader, name="model", resamples=20), whole)


def test_options_go_on_to_calibrants_own_functions(accelerator: Accelerator) -> None:
    model, _, _, validation, loss = setting("cals-alm")
    prepare_loss(accelerator, loss)
    loader = accelerator.prepare(validation)
    done: list[tuple[int, int | None]] = []

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), torch.zeros_like(batch[1])

    options = {"forward": forward, "progress": lambda *numbers: done.append(numbers)}
    adapt_on(accelerator, loss, model, loader, **options)
    evaluation = evaluate_on(accelerator, model, loader, name="zeros", resamples=0, **options)
    assert done == [(1, 3), (2, 3), (3, 3)] * 2
    assert evaluation.name == "zeros"
    with torch.no_grad():
        zeros = sum((model.eval()(inputs).argmax(1) == 0).sum().item() for inputs, _ in validation)
    assert evaluation.accuracy == pytest.approx(zeros / 23)


def test_alone_any_batches_do(accelerator: Accelerator) -> None:
    model, _, _, validation, loss = setting("cals-alm")
    with pytest.warns(UserWarning, match="not given to prepare_loss"):
        assert adapt_on(accelerator, loss, model, list(validation)).samples == 23
    assert adapt_on(accelerator, loss, model, list(validation)).samples == 23  # warned only once
    assert evaluate_on(accelerator, model, list(validation), resamples=0).samples == 23


def test_a_loss_that_does_not_adapt_reads_no_batch(accelerator: Accelerator) -> None:
    assert adapt_on(accelerator, create_loss("ce", CLASSES), nn.Identity(), iter([])) is None


class Several:
    num_processes = 2


def test_on_several_processes_a_loader_must_be_prepared() -> None:
    model, _, _, validation, loss = setting("cals-alm")
    for batches in (validation, list(validation)):
        with pytest.raises(TypeError, match=r"accelerator\.prepare\(loader\) returned, got \w+"):
            adapt_on(Several(), loss, model, batches)
        with pytest.raises(TypeError, match=r"accelerator\.prepare\(loader\) returned, got \w+"):
            evaluate_on(Several(), model, batches)
