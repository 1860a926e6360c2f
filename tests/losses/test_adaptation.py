"""The driver for plain loops: an adaptation pass that leaves the model as it found it."""

import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from calibrant import LOSSES, adapt_on, create_loss
from calibrant.losses import AdaptationWarning, AdaptiveLoss, Loss

from .conftest import ADAPTIVE

K, FEATURES = 4, 6

adaptive = pytest.mark.parametrize("key", ADAPTIVE)

Batch = tuple[Tensor, Tensor]
Views = namedtuple("Views", ["left", "right"])


class Network(nn.Module):
    """A model that says how it was run; its dropout is frozen while the rest trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, K)
        self.calls: list[tuple[set[bool], bool]] = []
        self.dropout.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.append(({module.training for module in self.modules()}, torch.is_grad_enabled()))
        return 30 * self.head(self.dropout(self.body(inputs)))


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def batches() -> list[Batch]:
    return [(torch.randn(size, FEATURES), torch.randint(K, (size,))) for size in (8, 5, 7)]


def observed_by_hand(key: str, model: nn.Module, batches: list[Batch]) -> Loss:
    loss = create_loss(key, K)
    model.eval()
    with torch.no_grad():
        for inputs, target in batches:
            loss.observe(model(inputs), target)
    return loss


class TestThePass:
    @adaptive
    def test_it_equals_observing_by_hand(self, key: str, network: Network, batches: list[Batch]) -> None:
        loss = create_loss(key, K)
        fresh = snapshot(loss)
        found = adapt_on(loss, network, batches)
        manual = observed_by_hand(key, network, batches)
        expected = manual.adapt()
        assert not same(snapshot(loss), fresh)
        assert same(snapshot(loss), snapshot(manual))
        assert found.samples == 20
        assert all(map(torch.equal, found.tensors(), expected.tensors()))

    @adaptive
    def test_it_drops_what_was_observed_before(
        self, key: str, network: Network, batches: list[Batch]
    ) -> None:
        loss = create_loss(key, K)
        loss.observe(50 * torch.randn(100, K), torch.zeros(100, dtype=torch.int64))
        assert adapt_on(loss, network, batches).samples == 20
        manual = observed_by_hand(key, network, batches)
        manual.adapt()
        assert same(snapshot(loss), snapshot(manual))

    @adaptive
    def test_the_model_runs_in_evaluation_mode_without_gradients(
        self, key: str, network: Network, batches: list[Batch]
    ) -> None:
        before, state = modes(network), snapshot(network)
        assert set(before.values()) == {True, False}
        adapt_on(create_loss(key, K), network, batches)
        assert network.calls == [({False}, False)] * 3
        assert modes(network) == before
        assert same(snapshot(network), state)  # the running averages of the normalisation included
        assert all(parameter.grad is None for parameter in network.parameters())
        assert torch.is_grad_enabled()

    def test_a_model_in_evaluation_mode_stays_in_it(self, network: Network, batches: list[Batch]) -> None:
        network.eval()
        adapt_on(create_loss("cals-alm", K), network, batches)
        assert set(modes(network).values()) == {False}

    def test_nothing_to_read_is_nothing_to_learn_from(self, network: Network) -> None:
        before = modes(network)
        with pytest.raises(RuntimeError, match="nothing to learn from"):
            adapt_on(create_loss("cals-alm", K), network, [])
        assert modes(network) == before


@pytest.mark.parametrize("key", [key for key in LOSSES if key not in ADAPTIVE])
def test_a_loss_that_does_not_adapt_costs_nothing(key: str, network: Network) -> None:
    def untouchable() -> Iterator[Batch]:
        raise AssertionError("the batches were read")
        yield

    def progress(done: int, total: int | None) -> None:
        raise AssertionError("there was progress")

    def eval_called(mode: bool = True) -> None:
        raise AssertionError("the model's mode was changed")

    network.train = network.eval = eval_called
    before = modes(network)
    assert adapt_on(create_loss(key, K), network, untouchable(), progress=progress) is None
    assert modes(network) == before
    assert network.calls == []


class TestFailing:
    """Whatever fails, wherever: the model is restored, the sums are dropped, the state stays."""

    def failing_batches(self, batches: list[Batch], error: BaseException) -> Iterator[Batch]:
        yield batches[0]
        raise error

    def check(
        self,
        key: str,
        network: Network,
        error: type[BaseException],
        call: Callable[[Loss], Any],
        message: str = "broken",
    ) -> None:
        loss = create_loss(key, K)
        for scale in (5, 20):
            loss.observe(scale * torch.randn(30, K), torch.randint(K, (30,)))
            loss.adapt()
        before, state, weights = modes(network), snapshot(loss), snapshot(network)
        with pytest.raises(error, match=message):
            call(loss)
        assert len(network.calls) >= 1  # something had been observed, or was about to be
        assert modes(network) == before
        assert torch.is_grad_enabled()
        assert same(snapshot(loss), state)
        assert same(snapshot(network), weights)
        with pytest.raises(RuntimeError, match="nothing to learn from"):
            loss.adapt()

    @pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
    @adaptive
    def test_in_the_data(
        self, key: str, error: type[BaseException], network: Network, batches: list[Batch]
    ) -> None:
        failing = self.failing_batches(batches, error("broken"))
        self.check(key, network, error, lambda loss: adapt_on(loss, network, failing))

    @adaptive
    def test_in_the_model(self, key: str, network: Network, batches: list[Batch]) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:
            if len(network.calls) == 2:
                raise ArithmeticError("broken")

        network.head.register_forward_pre_hook(hook)
        self.check(key, network, ArithmeticError, lambda loss: adapt_on(loss, network, batches))

    @adaptive
    def test_in_the_loss(self, key: str, network: Network, batches: list[Batch]) -> None:
        batches[1][1][0] = K  # a label that does not exist
        message = "target holds labels"
        self.check(key, network, ValueError, lambda loss: adapt_on(loss, network, batches), message)

    @adaptive
    def test_in_the_progress(self, key: str, network: Network, batches: list[Batch]) -> None:
        def progress(done: int, total: int | None) -> None:
            raise LookupError("broken")

        self.check(
            key, network, LookupError, lambda loss: adapt_on(loss, network, batches, progress=progress)
        )

    @adaptive
    def test_in_adapting(self, key: str, network: Network, batches: list[Batch]) -> None:
        batches[1][0][0] = torch.nan
        message = "NaN or infinite"
        self.check(key, network, ValueError, lambda loss: adapt_on(loss, network, batches), message)


class Stream(IterableDataset):
    """A data set without a length, such as a shard of a web-scale one."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class TestBatches:
    """Any iterable of pairs serves; progress knows the total where there is one."""

    @pytest.mark.parametrize(
        ("wrap", "total"),
        [
            (list, 3),
            (tuple, 3),
            (lambda batches: dict(enumerate(batches)).values(), 3),
            (lambda batches: (pair for pair in batches), None),
            (iter, 3),
            (lambda batches: zip(*zip(*batches, strict=True), strict=True), None),
            (lambda batches: ([inputs, target] for inputs, target in batches), None),
            (lambda batches: DataLoader(Stream(batches), batch_size=None), None),
        ],
        ids=["list", "tuple", "view", "generator", "iterator", "zip", "pairs as lists", "stream loader"],
    )
    def test_any_iterable(
        self,
        wrap: Callable[[list[Batch]], Any],
        total: int | None,
        network: Network,
        batches: list[Batch],
    ) -> None:
        loss, told = create_loss("cals-alm", K), []
        statistics = adapt_on(loss, network, wrap(batches), progress=lambda *told_now: told.append(told_now))
        assert told == [(1, total), (2, total), (3, total)]
        assert statistics.samples == 20
        manual = observed_by_hand("cals-alm", network, batches)
        manual.adapt()
        assert same(snapshot(loss), snapshot(manual))

    def test_a_data_loader(self, network: Network, batches: list[Batch]) -> None:
        data = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
        told: list[tuple[int, int | None]] = []
        loss = create_loss("cals-hr", K)
        for _ in range(2):  # it can be read again
            found = adapt_on(loss, network, DataLoader(data, 8), progress=lambda *now: told.append(now))
            assert found.samples == 20
        assert told == [(1, 3), (2, 3), (3, 3)] * 2
        assert loss.passes == 2

    def test_progress_comes_after_each_batch(self, network: Network, batches: list[Batch]) -> None:
        events: list[str] = []

        def read() -> Iterator[Batch]:
            for pair in batches:
                events.append("read")
                yield pair

        network.register_forward_hook(lambda *_: events.append("run"))
        adapt_on(
            create_loss("adafocal", K),
            network,
            read(),
            progress=lambda done, _: events.append(f"done {done}"),
        )
        assert events == ["read", "run", "done 1", "read", "run", "done 2", "read", "run", "done 3"]


class TwoViews(nn.Module):
    """A model whose input is a structure of tensors."""

    def __init__(self, pick: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.pick = pick
        self.left, self.right = nn.Linear(FEATURES, K), nn.Linear(FEATURES, K)

    def forward(self, inputs: Any) -> Tensor:
        left, right = self.pick(inputs)
        return 30 * (self.left(left) + self.right(right))


STRUCTURES = {
    "tuple": (lambda a, b: (a, b), lambda x: x),
    "list": (lambda a, b: [a, b], lambda x: x),
    "namedtuple": (Views, lambda x: (x.left, x.right)),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda x: (x["a"], x["b"])),
    "mapping": (lambda a, b: OrderedDict(a=a, b=b), lambda x: (x["a"], x["b"])),
    "nested": (lambda a, b: {"views": (a, [b]), "name": "x"}, lambda x: (x["views"][0], x["views"][1][0])),
    "other leaves": (lambda a, b: (a, b, None, 3, "x"), lambda x: x[:2]),
}


class TestStructuredInputs:
    @pytest.mark.parametrize("name", STRUCTURES)
    def test_they_reach_the_model_as_they_are(self, name: str) -> None:
        build, pick = STRUCTURES[name]
        model = TwoViews(pick)
        inputs = [build(torch.randn(9, FEATURES), torch.randn(9, FEATURES)) for _ in range(2)]
        target = torch.randint(K, (9,))
        seen: list[Any] = []
        model.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))

        loss, manual = create_loss("cals-alm", K), create_loss("cals-alm", K)
        assert adapt_on(loss, model, [(item, target) for item in inputs]).samples == 18
        for item in inputs:
            manual.observe(model(item), target)
        manual.adapt()
        assert same(snapshot(loss), snapshot(manual))
        is_mapping = hasattr(inputs[0], "keys")
        assert all(isinstance(item, dict if is_mapping else type(inputs[0])) for item in seen)

    @pytest.mark.parametrize("name", STRUCTURES)
    def test_every_tensor_in_them_is_moved_to_the_models_device(self, name: str) -> None:
        build, pick = STRUCTURES[name]
        devices: list[str] = []

        class Elsewhere(nn.Module):
            """A model on another device, whose logits come back from it."""

            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.empty(1, device="meta"))

            def forward(self, inputs: Any) -> Tensor:
                devices.extend(tensor.device.type for tensor in pick(inputs))
                return torch.randn(9, K)

        inputs = build(torch.randn(9, FEATURES), torch.randn(9, FEATURES))
        adapt_on(create_loss("cals-alm", K), Elsewhere(), [(inputs, torch.zeros(9, dtype=torch.int64))])
        assert devices == ["meta", "meta"]

    def test_a_model_without_parameters_takes_them_where_they_are(self) -> None:
        logits, target = 20 * torch.randn(9, K), torch.randint(K, (9,))
        loss, manual = create_loss("cals-alm", K), create_loss("cals-alm", K)
        adapt_on(loss, nn.Identity(), [(logits, target)])
        manual.observe(logits, target)
        manual.adapt()
        assert same(snapshot(loss), snapshot(manual))


def test_a_compiled_loss_adapts() -> None:
    loss = create_loss("cals-alm", 3)
    compiled = torch.compile(loss, backend="eager")
    assert adapt_on(compiled, nn.Linear(2, 3), [(torch.zeros(2, 2), torch.tensor([0, 1]))]) is not None
    assert loss.passes == 1


class TestWrongArguments:
    def test_swapped(self) -> None:
        with pytest.raises(TypeError, match="takes a calibrant loss first, got Linear"):
            adapt_on(nn.Linear(2, 3), create_loss("cals-alm", 3), [])

    @pytest.mark.parametrize("batch", [{"x": 1, "y": 2}, (1, 2, 3), torch.zeros(2, 2)])
    def test_batches_that_are_not_pairs(self, batch: object) -> None:
        with pytest.raises(TypeError, match=r"pairs \(input, target\), got"):
            adapt_on(create_loss("cals-alm", 3), nn.Linear(2, 3), [batch])

    def test_model_that_returns_no_tensor(self) -> None:
        class Wrapped(nn.Module):
            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"out": x}

        with pytest.raises(TypeError, match="must return a tensor of logits, got dict of 1"):
            adapt_on(create_loss("cals-alm", 3), Wrapped(), [(torch.zeros(2, 3), torch.tensor([0, 1]))])


# ---- Advice ---------------------------------------------------------------------------------------


def after_passes(loss: Loss, passes: int = 10, scale: float = 4.0) -> AdaptiveLoss:
    """A loss after passes over the same random validation data, half of them right."""
    assert isinstance(loss, AdaptiveLoss)
    logits = scale * torch.randn(200, K, dtype=torch.float64)
    target = torch.where(torch.rand(200) < 0.5, logits.argmax(1), torch.randint(K, (200,)))
    for _ in range(passes):
        loss.observe(logits, target)
        loss.adapt()
    return loss


@adaptive
def test_a_loss_at_work_gives_no_advice(key: str) -> None:
    options = {"margin": 3} if key.startswith("cals") else {}
    loss = create_loss(key, K, **options)
    assert isinstance(loss, AdaptiveLoss)
    assert loss.advice() is None
    for _ in range(12):
        assert after_passes(loss, passes=1, scale=1.0 if key.startswith("ada") else 4.0).advice() is None


@pytest.mark.parametrize("key", ["cals-alm", "cals-hr"])
@pytest.mark.parametrize("options", [{}, {"evidence": 1}])
def test_a_margin_out_of_reach_is_told(key: str, options: dict[str, float]) -> None:
    loss = create_loss(key, K, margin=1000, **options)
    assert after_passes(loss, 9).advice() is None  # the first epochs show little
    advice = after_passes(loss, 1).advice()
    assert advice is not None
    assert advice.startswith("after 10 passes the penalty is still negligible, because the logits lie closer")
    assert "the margin of 1000: this is cross-entropy. Try a" in advice
    resumed = create_loss(key, K, margin=1000, **options)
    resumed.load_state_dict(loss.state_dict())
    assert resumed.advice() == advice


@pytest.mark.parametrize("key", ["cals-alm", "cals-hr"])
def test_a_margin_that_would_forbid_confidence_is_not_advised(key: str) -> None:
    """Also where the model is confident of many elements already."""
    loss = create_loss(key, 100, margin=8)
    logits = torch.zeros(50, 100)
    logits[:20, 0] = 7.9  # a confidence of 96 %
    for _ in range(10):
        loss.observe(logits, torch.zeros(50, dtype=torch.long))
        loss.adapt()
    advice = loss.advice()
    assert advice is not None
    (allowed,) = re.findall(r"Train for longer: a margin of \S+ would allow .* above (\d+) %", advice)
    assert int(allowed) < 70
    assert "Try a" not in advice


@pytest.mark.parametrize("penalty", ["phr", "p2", "p3"])
@pytest.mark.parametrize("per", ["class", "all"])
def test_the_margin_that_is_advised_has_an_effect(penalty: str, per: str) -> None:
    advice = after_passes(create_loss("cals-alm", K, margin=1000, penalty=penalty, per=per)).advice()
    assert advice is not None
    margin = float(re.search(r"Try a margin of ([\d.]+) or less", advice)[1])
    assert 2 < margin < 10
    loss = after_passes(create_loss("cals-alm", K, margin=margin, penalty=penalty, per=per))
    assert loss.multiplier.max() > (1e-5 if penalty == "p3" else 0.01)  # P3 grows from 1e-6 by factors
    assert "negligible" not in (loss.advice() or "")


def test_multipliers_and_penalty_weights_at_their_bounds_are_told() -> None:
    loss = after_passes(create_loss("cals-alm", K, margin=1, multiplier_range=(1e-6, 2.0)))
    assert "4 of 4 multipliers are at the upper bound 2 of multiplier_range. Try a margin above 1" in (
        loss.advice() or ""
    )
    options = {"margin": 2.5, "every": 1, "penalty_weight_max": 3}
    loss = after_passes(create_loss("cals-alm", K, **options), 4)
    assert loss.advice() is None
    loss = after_passes(loss, 6)
    assert "4 of 4 penalty weights are at penalty_weight_max=3, and the logits still" in (loss.advice() or "")
    chosen = after_passes(create_loss("cals-alm", K, **options, initial_penalty_weight=3))
    assert chosen.advice() is None  # it has not moved there
    loss = create_loss("cals-hr", K, margin=1, multiplier_range=(1e-6, 0.1))
    assert "4 of 4 multipliers are at the upper bound 0.1" in (after_passes(loss).advice() or "")


@pytest.mark.parametrize("key", ["cals-alm", "cals-hr"])
def test_a_margin_that_allows_little_confidence_is_told(key: str) -> None:
    advice = after_passes(create_loss(key, K, margin=1)).advice()
    assert advice == (
        "with 4 classes and logits at most the margin of 1 apart, no confidence can be above 48 %. If the "
        "model is right more often, try a larger margin"
    )
    assert after_passes(create_loss(key, K, margin=2.5)).advice() is None  # 80 %


@pytest.mark.parametrize("key", ["adafocal", "ada-dual-focal"])
def test_exponents_at_their_bounds_are_told(key: str) -> None:
    loss = after_passes(create_loss(key, K, rate=30), 9)
    assert loss.advice() is None
    advice = after_passes(loss, 1).advice()
    assert re.match(r"\d+ of 15 exponents γ are at a bound of gamma_range=\(-2, 20\)", advice or "")
    assert "Try evidence=2" in (advice or "")
    assert "Try more validation data" in (
        after_passes(create_loss(key, K, rate=30, evidence=2)).advice() or ""
    )
    few = create_loss(key, K, bins=8)
    assert isinstance(few, AdaptiveLoss)
    few.passes.fill_(10)
    few.gamma.copy_(torch.tensor([20.0, *[1.0] * 6, -1.0]))
    assert few.advice() is None
    few.gamma[7] = -2
    assert "2 of 8 exponents" in (few.advice() or "")


def test_adapt_on_warns_once_for_each_loss(network: Network) -> None:
    batches = [(torch.randn(4, FEATURES), torch.zeros(4, dtype=torch.long))]
    for loss in (create_loss("cals-alm", K, margin=1e6), create_loss("cals-alm", K, margin=1e6)):
        for _ in range(9):
            adapt_on(loss, network, batches)
        with pytest.warns(AdaptationWarning, match="AugmentedLagrangian: after 10 passes") as caught:
            adapt_on(loss, network, batches)
        assert [warning.filename for warning in caught] == [__file__]
        adapt_on(loss, network, batches)  # a second warning would be an error
