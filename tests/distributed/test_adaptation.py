"""Processes with unequal shares of the validation data learn what one process with all of it learns.

Starting processes takes seconds, so one start serves all losses; the tests look at what it left behind.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibrant import LOSSES, adapt_on, create_loss
from calibrant.histogram import Outcomes
from calibrant.layout import arrange
from calibrant.losses import AdaptiveLoss
from tests.losses.test_adaptive_focal import Reference, crowded_validation_set

from .processes import Results, in_processes

ADAPTIVE = [key for key, loss in LOSSES.items() if issubclass(loss, AdaptiveLoss)]

CLASSES, FEATURES = 4, 6
SHARES = [slice(0, 7), slice(7, 10), slice(10, 10)]
EVERYTHING = slice(0, 10)
RANKS = range(len(SHARES))
WAYS = ["silent", "empty batch", "adapt_on"]

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return in_processes(adapt_apart, len(RANKS), tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return in_processes(train_apart, len(RANKS), tmp_path_factory.mktemp("trained"))


def adapt_apart(rank: int) -> Results:
    return {key: {**learn_apart(key, rank), "spoiled": spoil(key, rank)} for key in ADAPTIVE}


def train_apart(rank: int) -> Results:
    return {key: train(key, slice(rank, None, len(RANKS)), SHARES[rank], rank) for key in ADAPTIVE}


def validation_logits(number: int) -> tuple[Tensor, Tensor]:
    """The ten samples of a pass. The second rank's are tamer, which a mean of means would not survive."""
    generator = torch.Generator().manual_seed(number)
    logits = 10 * torch.randn(10, CLASSES, dtype=torch.float64, generator=generator)
    logits[SHARES[1]] /= 3
    return logits, torch.randint(CLASSES, (10,), generator=generator)


def snapshot(loss: nn.Module) -> State:
    return {name: value.clone() for name, value in loss.state_dict().items()}


def assert_same(state: State, expected: State, rtol: float = 1e-12) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=rtol / 100)


def assert_identical(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


# ---- Unequal shares -------------------------------------------------------------------------------


def learn(key: str, share: slice, way: str, group: dist.ProcessGroup | None = None) -> list[State]:
    """The state after each of 12 passes: enough for schedules that look every tenth time."""
    loss = create_loss(key, CLASSES)
    states = []
    for number in range(12):
        logits, target = validation_logits(number)
        batches = [(logits[share], target[share])]
        if way != "empty batch" and not len(target[share]):
            batches = []
        if way == "adapt_on":
            statistics = adapt_on(loss, nn.Identity(), batches, group=group)
        else:
            for batch in batches:
                loss.observe(*batch)
            statistics = loss.adapt(group)
        states.append({**snapshot(loss), "samples": statistics.samples.clone()})
    return states


def learn_apart(key: str, rank: int) -> dict[str, list[State]]:
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    learned = {way: learn(key, SHARES[rank], way) for way in WAYS}
    # Two groups that learn from different data at the same time: the pair has all ten samples.
    learned["group"] = learn(key, [*SHARES[:2], slice(0, 4)][rank], "adapt_on", single if rank == 2 else pair)
    return learned


@pytest.mark.parametrize("key", ADAPTIVE)
def test_the_data_move_every_learned_buffer(key: str) -> None:
    fresh, state = create_loss(key, CLASSES).state_dict(), learn(key, EVERYTHING, "silent")[-1]
    assert [name for name in fresh if torch.equal(fresh[name], state[name])] == []


@pytest.mark.filterwarnings("ignore::calibrant.losses.AdaptationWarning")  # exponents learn from noise here
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ADAPTIVE)
def test_seven_three_and_no_samples_equal_ten(key: str, way: str, adapted: list[Results]) -> None:
    alone = learn(key, EVERYTHING, way)
    assert alone[-1]["samples"] == 10
    for rank in RANKS:
        for state, expected in zip(adapted[rank][key][way], alone, strict=True):
            assert_same(state, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ADAPTIVE)
def test_every_rank_holds_the_same_bits(key: str, way: str, adapted: list[Results]) -> None:
    first, *others = (adapted[rank][key][way][-1] for rank in RANKS)
    for other in others:
        assert_identical(other, first)


@pytest.mark.parametrize("key", ADAPTIVE)
def test_a_group_learns_from_its_own_processes_only(key: str, adapted: list[Results]) -> None:
    pair, single = learn(key, EVERYTHING, "silent")[-1], learn(key, slice(0, 4), "silent")[-1]
    for rank, expected in enumerate([pair, pair, single]):
        assert_same(adapted[rank][key]["group"][-1], expected)


# ---- DistributedDataParallel ----------------------------------------------------------------------


class Classifier(nn.Module):
    """A model and its loss, as one would hand them to DDP together."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.model = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
        self.loss = create_loss(key, CLASSES)
        self.register_buffer("canary", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.model(inputs), target)


def labelled_inputs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = 20 * torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def train(key: str, training: slice, share: slice, rank: int | None = None) -> dict[str, Any]:
    """Four passes of three training steps, with a part of the validation set observed after each step."""
    torch.manual_seed(1)
    classifier = Classifier(key)
    step = classifier if rank is None else DistributedDataParallel(classifier)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2)
    samples, canaries = [], []
    for _ in range(4):
        for _ in range(3):
            inputs, target = labelled_inputs(12, generator)
            classifier.canary.fill_(7 + (rank or 0))
            optimizer.zero_grad()
            step(inputs[training], target[training]).backward()
            optimizer.step()
            canaries.append(classifier.canary.item())
            inputs, target = labelled_inputs(10, generator)
            if len(target[share]):
                classifier.loss.observe(classifier.model(inputs[share]), target[share])
        samples.append(classifier.loss.adapt().samples.item())
    return {"state": snapshot(classifier), "samples": samples, "canaries": canaries}


@pytest.mark.parametrize("key", ADAPTIVE)
def test_observing_survives_the_broadcast_of_buffers(key: str, trained: list[Results]) -> None:
    alone = train(key, slice(None), EVERYTHING)
    fresh = Classifier(key).loss.state_dict(prefix="loss.")
    assert any(not torch.equal(alone["state"][name], fresh[name]) for name in fresh if "passes" not in name)
    for rank in RANKS:
        # What was written on this rank before each step is gone: DDP did broadcast its buffers.
        assert trained[rank][key]["canaries"] == [7] * 12
        assert trained[rank][key]["samples"] == alone["samples"] == [30] * 4
        # Averaging gradients rounds otherwise than a larger batch, and training carries that along.
        assert_same(trained[rank][key]["state"], alone["state"], rtol=1e-9)
        assert_identical(trained[rank][key]["state"], trained[0][key]["state"])


# ---- Refusals -------------------------------------------------------------------------------------


def outcome(loss: nn.Module) -> str:
    try:
        loss.adapt()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "adapted"


def spoil(key: str, rank: int) -> dict[str, Any]:
    """Clean passes, and between them passes that some rank spoils for all."""
    loss = create_loss(key, CLASSES)
    found: dict[str, Any] = {}

    def note(name: str) -> None:
        found[name] = (outcome(loss), snapshot(loss))

    def observe(number: int, bad: float | None = None) -> None:
        logits, target = (tensor[SHARES[rank]] for tensor in validation_logits(number))
        if rank == 1 and bad is not None:
            logits[1, 2] = bad
        if len(target):
            loss.observe(logits, target)

    observe(0)
    note("first")
    note("nothing")
    loss.observe(torch.randn(3, CLASSES), torch.full((3,), -100))
    note("ignored")
    for bad in (float("nan"), float("inf"), float("-inf")):
        observe(1, bad)
        note(str(bad))
    observe(2)
    note("last")
    return found


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("nothing", "RuntimeError"),
        ("ignored", "RuntimeError"),
        ("nan", "ValueError"),
        ("inf", "ValueError"),
        ("-inf", "ValueError"),
    ],
)
@pytest.mark.parametrize("key", ADAPTIVE)
def test_every_rank_refuses_what_one_rank_must(
    key: str, reason: str, error: str, adapted: list[Results]
) -> None:
    for rank in RANKS:
        spoiled = adapted[rank][key]["spoiled"]
        raised, state = spoiled[reason]
        assert raised.startswith(f"{error}: adapt() ")  # and not what gloo says when it fails
        assert_identical(state, spoiled["first"][1])


@pytest.mark.parametrize("key", ADAPTIVE)
def test_clean_passes_go_on_as_if_nothing_had_been_spoiled(key: str, adapted: list[Results]) -> None:
    alone = create_loss(key, CLASSES)
    for number in (0, 2):
        alone.observe(*validation_logits(number))
        alone.adapt()
    for rank in RANKS:
        spoiled = adapted[rank][key]["spoiled"]
        assert spoiled["first"][0] == spoiled["last"][0] == "adapted"
        assert_same(spoiled["last"][1], snapshot(alone))


# ---- Exact bins -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def binned(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return in_processes(bin_apart, 2, tmp_path_factory.mktemp("binned"))


LIMITS = {"below": 1 << 20, "together beyond": 900, "one beyond": 500, "both beyond": 200}
PASSES = 30  # ten with each share; by then, the first exponent has switched at 0.2
KINDS = [("adafocal", False), ("adafocal", True), ("ada-dual-focal", False)]


def exact_passes(rank: int | None, key: str, ties: bool) -> State:
    """The state after many passes; of two processes, the first has 700 elements, then 300, then none."""
    loss = create_loss(key, 5)
    for number in range(PASSES):
        logits, target = crowded_validation_set(number, ties)
        first = (700, 300, 0)[number % 3]
        share = slice(None) if rank is None else (slice(0, first), slice(first, None))[rank]
        for part in zip(logits[share].split(250), target[share].split(250), strict=True):
            loss.observe(*part)
        loss.adapt()
    return snapshot(loss)


def pooled_bins(rank: int) -> dict[str, list[Tensor]]:
    """Bins of 650 and 350 elements, with other limits than the usual one."""
    logits, target = crowded_validation_set(0, ties=True)
    share, found = (slice(0, 650), slice(650, None))[rank], {}
    for name, limit in LIMITS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outcomes, "limit", limit)
            parts = zip(logits[share].split(90), target[share].split(90), strict=True)
            total = reduce(add, [Outcomes.of(arrange(*part)) for part in parts])
            pooled = total.all_reduce()
            found[name] = [pooled.samples, pooled.histogram.samples, *pooled.equal_mass(15).__dict__.values()]
    return found


def bin_apart(rank: int) -> Results:
    return {
        "states": [exact_passes(rank, *kind) for kind in KINDS],
        "pooled": pooled_bins(rank),
    }


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_bins_of_two_processes_are_exact_after_many_passes(number: int, binned: list[Results]) -> None:
    key, ties = KINDS[number]
    reference = Reference()
    for each in range(PASSES):
        reference.adapt(*crowded_validation_set(each, ties))
    alone = exact_passes(None, key, ties)
    for rank in range(2):
        state = binned[rank]["states"][number]
        assert state["gamma"].tolist() == pytest.approx(reference.gamma, rel=1e-9)
        assert_identical(state, alone)


@pytest.mark.parametrize("limit", LIMITS)
def test_processes_agree_on_where_the_limit_is(limit: str, binned: list[Results]) -> None:
    logits, target = crowded_validation_set(0, ties=True)
    whole = Outcomes.of(arrange(logits, target))
    expected = (whole if limit == "below" else whole.counted()).equal_mass(15)
    for rank in range(2):
        samples, in_histogram, *pooled = binned[rank]["pooled"][limit]
        assert samples == 1000
        assert in_histogram == (0 if limit == "below" else 1000)
        for found, wanted in zip(pooled, expected.__dict__.values(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
