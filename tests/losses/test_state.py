"""What an adaptive loss learns: where it lives, what moves it, and what must never touch it."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from calibrant import LOSSES, create_loss
from calibrant.layout import Elements
from calibrant.losses import AugmentedLagrangian, Loss
from calibrant.losses.lagrangian import MarginStatistics

from .conftest import ADAPTIVE

K = 4
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]

adaptive = pytest.mark.parametrize("key", ADAPTIVE)


def batch(number: int, size: int = 30) -> tuple[Tensor, Tensor]:
    """A validation batch whose logits stray far enough to violate every default margin."""
    generator = torch.Generator().manual_seed(number)
    return 10 * torch.randn(size, K, generator=generator), torch.randint(K, (size,), generator=generator)


def run(loss: Loss, numbers: range) -> Loss:
    for number in numbers:
        loss.observe(*batch(number))
        loss.adapt()
    return loss


@adaptive
def test_a_loaded_state_begins_a_new_pass(key: str) -> None:
    """What was observed under the state before must not be mixed with what follows."""
    saved = run(create_loss(key, K), range(3)).state_dict()
    clean, used = create_loss(key, K), create_loss(key, K)
    used.observe(*batch(7))
    for loss in (clean, used):
        loss.load_state_dict(saved)
        run(loss, range(8, 9))
    assert snapshot(used).keys() == snapshot(clean).keys()
    assert all(torch.equal(snapshot(used)[name], value) for name, value in snapshot(clean).items())


def snapshot(loss: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in loss.state_dict().items()}


def learned(loss: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in loss.named_buffers() if value.dtype == torch.float64}


def differing(state: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names under which two states do not hold the same bits in the same type."""
    same = [
        name
        for name in state.keys() & other.keys()
        if state[name].dtype == other[name].dtype and torch.equal(state[name], other[name])
    ]
    return sorted((state.keys() | other.keys()) - set(same))


class TestSaving:
    @adaptive
    def test_the_state_is_what_was_learned_and_the_number_of_passes(self, key: str) -> None:
        loss = run(create_loss(key, K), range(2))
        assert learned(loss)
        assert set(loss.state_dict()) == {"passes", *learned(loss)}
        assert loss.state_dict()["passes"].item() == 2
        assert loss.passes.dtype == torch.int64

    @adaptive
    def test_observed_sums_are_neither_saved_nor_buffers(self, key: str) -> None:
        loss = run(create_loss(key, K), range(2))
        before, buffers = snapshot(loss), [name for name, _ in loss.named_buffers()]
        loss.observe(*batch(2))
        assert differing(before, snapshot(loss)) == []
        assert [name for name, _ in loss.named_buffers()] == buffers
        assert list(loss.parameters()) == []

        other = create_loss(key, K)
        other.load_state_dict(loss.state_dict())
        with pytest.raises(RuntimeError, match="nothing to learn from"):
            other.adapt()

    @adaptive
    def test_every_pass_moves_the_state(self, key: str) -> None:
        """Without this the tests of resuming could pass on a loss that never learns."""
        loss = create_loss(key, K)
        for number in range(3):
            before = snapshot(loss)
            run(loss, range(number, number + 1))
            moved = differing(before, snapshot(loss))
            assert "passes" in moved
            assert len(moved) > 1

    @pytest.mark.parametrize("form", ["torch", "safetensors"])
    @adaptive
    def test_resuming_equals_an_uninterrupted_run(self, key: str, form: str, tmp_path: Path) -> None:
        # Twelve passes, so that a schedule which looks every tenth time has to count across the break.
        uninterrupted = run(create_loss(key, K), range(12))
        first = run(create_loss(key, K), range(7))
        file = tmp_path / "state"
        if form == "torch":
            torch.save(first.state_dict(), file)
            state = torch.load(file, weights_only=True)
        else:
            save_file(first.state_dict(), file)
            state = load_file(file)

        second = create_loss(key, K)
        second.load_state_dict(state)
        assert differing(snapshot(second), snapshot(first)) == []
        run(second, range(7, 12))
        assert differing(snapshot(second), snapshot(uninterrupted)) == []
        logits, target = batch(99)
        assert torch.equal(second(logits, target), uninterrupted(logits, target))

    def test_the_state_of_other_hyper_parameters_loads_with_a_warning(self, tmp_path: Path) -> None:
        saved = run(create_loss("cals-alm", K, margin=6), range(2))
        torch.save(nn.ModuleDict({"loss": saved}).state_dict(), tmp_path / "state")
        state = torch.load(tmp_path / "state", weights_only=True)
        other = nn.ModuleDict({"loss": create_loss("cals-alm", K, penalty="p2")})
        expected = "state of AugmentedLagrangian with margin=6.0, penalty='phr' is loaded into one with "
        with pytest.warns(UserWarning, match=re.escape(expected + "margin=10.0, penalty='p2'")):
            other.load_state_dict(state)
        assert differing(snapshot(other["loss"]), snapshot(saved)) == []
        with pytest.warns(UserWarning, match="state of AugmentedLagrangian is loaded into "):
            create_loss("cals-hr", K).load_state_dict(saved.state_dict(), strict=False)

    @adaptive
    def test_the_same_hyper_parameters_and_old_states_load_without_a_warning(self, key: str) -> None:
        saved = run(create_loss(key, K), range(2))
        other = create_loss(key, K, reduction="sum", ignore_index=255)
        other.load_state_dict(saved.state_dict())
        old = saved.state_dict()
        del old._metadata  # type: ignore[attr-defined]
        other.load_state_dict(old)
        assert differing(snapshot(other), snapshot(saved)) == []

    @adaptive
    def test_a_copy_goes_its_own_way(self, key: str) -> None:
        loss = run(create_loss(key, K), range(2))
        loss.observe(*batch(2))
        before = snapshot(loss)
        twin = copy.deepcopy(loss)
        assert differing(snapshot(twin), before) == []

        twin.adapt()
        run(twin, range(3, 5))
        assert differing(snapshot(loss), before) == []
        loss.adapt()
        run(loss, range(3, 5))
        assert differing(snapshot(loss), snapshot(twin)) == []


class TestPrecision:
    @pytest.mark.parametrize(
        "convert",
        [
            lambda module: module.half(),
            lambda module: module.bfloat16(),
            lambda module: module.float(),
            lambda module: module.to(torch.float16),
            lambda module: module.to("cpu", torch.bfloat16),
        ],
        ids=["half", "bfloat16", "float", "to-float16", "to-cpu-bfloat16"],
    )
    @adaptive
    def test_learned_state_keeps_its_bits(self, key: str, convert: Callable[[nn.Module], nn.Module]) -> None:
        loss = run(create_loss(key, K), range(3))
        expected = snapshot(loss)
        module = nn.ModuleList([nn.Linear(2, 2, dtype=torch.float64), loss])
        assert convert(module) is module
        assert module[0].weight.dtype != torch.float64  # the conversion is one
        assert differing(snapshot(loss), expected) == []
        assert convert(loss) is loss
        assert differing(snapshot(loss), expected) == []

    def test_class_weights_keep_their_bits(self, key: str) -> None:
        weights = [1e-9, 0.1, 3.0, 1e5]
        for given in (weights, torch.tensor(weights, dtype=torch.float64)):
            loss = create_loss(key, K, class_weight=given).half().to("cpu", torch.bfloat16)
            assert loss.class_weight is not None
            assert loss.class_weight.dtype == torch.float64
            assert loss.class_weight.tolist() == weights

    @adaptive
    def test_a_converted_loss_learns_the_same(self, key: str) -> None:
        expected = snapshot(run(create_loss(key, K), range(4)))
        loss = run(run(create_loss(key, K), range(2)).half(), range(2, 4))
        assert differing(snapshot(loss), expected) == []

    @adaptive
    def test_float32_where_the_device_has_no_float64(self, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def move(tensor: Tensor) -> Tensor:
            if tensor.dtype == torch.float64:
                raise TypeError("this device does not support float64")
            return tensor.clone()

        loss = run(create_loss(key, K), range(2))
        expected = snapshot(loss)
        names = set(learned(loss))
        # The CPU stands in for such a device, and has float64: it must be said to have none.
        for module in ("statistics", "losses.base", "losses.adaptive"):
            monkeypatch.setattr(f"calibrant.{module}.sum_dtype", lambda device: torch.float32)
        assert loss._apply(move) is loss
        for name, value in expected.items():
            moved = loss.get_buffer(name)
            assert moved.dtype == (torch.float32 if name in names else torch.int64)
            assert torch.equal(moved, value.to(moved.dtype))

        before = snapshot(loss)
        run(loss, range(2, 3))
        assert len(differing(before, snapshot(loss))) > 1
        assert {value.dtype for value in loss.state_dict().values()} == {torch.float32, torch.int64}


class TestRefusing:
    @adaptive
    def test_adapting_without_observing(self, key: str) -> None:
        loss = run(create_loss(key, K), range(2))
        before = snapshot(loss)
        with pytest.raises(RuntimeError, match=r"Call observe\(logits, target\)"):
            loss.adapt()  # the sums of the pass before are spent
        assert differing(before, snapshot(loss)) == []

    @adaptive
    def test_forgetting(self, key: str) -> None:
        loss = run(create_loss(key, K), range(2))
        before = snapshot(loss)
        loss.observe(*batch(5))
        assert loss.forget() is None
        with pytest.raises(RuntimeError, match="nothing to learn from"):
            loss.adapt()
        assert differing(before, snapshot(loss)) == []

        loss.observe(*batch(6))
        loss.forget()
        run(loss, range(2, 3))
        assert differing(snapshot(loss), snapshot(run(create_loss(key, K), range(3)))) == []

    @pytest.mark.parametrize("ignore_index", [-100, 2])
    @pytest.mark.parametrize("size", [0, 5])
    @adaptive
    def test_nothing_but_ignored_elements(self, key: str, size: int, ignore_index: int) -> None:
        loss = create_loss(key, K, ignore_index=ignore_index)
        before = snapshot(loss)
        loss.observe(batch(0, size)[0], torch.full((size,), ignore_index))
        with pytest.raises(RuntimeError, match="nothing to learn from"):
            loss.adapt()
        assert differing(before, snapshot(loss)) == []

    @pytest.mark.parametrize(
        ("bad", "dtype"),
        [
            *((bad, torch.float32) for bad in NOT_FINITE),
            (NOT_FINITE[0], torch.float64),
            (NOT_FINITE[1], torch.float16),
            (NOT_FINITE[2], torch.bfloat16),
        ],
    )
    @adaptive
    def test_logits_that_are_not_finite(self, key: str, bad: float, dtype: torch.dtype) -> None:
        loss = run(create_loss(key, K), range(2))
        before = snapshot(loss)
        logits, target = batch(5)
        logits[3, 1] = bad
        loss.observe(*batch(6))
        loss.observe(logits.to(dtype), target)
        loss.observe(*batch(7))  # clean batches afterwards do not wash it out
        with pytest.raises(ValueError, match="NaN or infinite"):
            loss.adapt()
        assert differing(before, snapshot(loss)) == []
        with pytest.raises(RuntimeError, match="nothing to learn from"):
            loss.adapt()

        run(loss, range(2, 3))
        assert differing(snapshot(loss), snapshot(run(create_loss(key, K), range(3)))) == []

    @adaptive
    def test_a_whole_element_that_is_not_finite(self, key: str) -> None:
        for bad in NOT_FINITE:
            loss = create_loss(key, K)
            logits, target = batch(5)
            logits[3] = bad
            loss.observe(logits, target)
            with pytest.raises(ValueError, match="NaN or infinite"):
                loss.adapt()

    @pytest.mark.parametrize("bad", NOT_FINITE)
    @adaptive
    def test_ignored_elements_may_hold_anything(self, key: str, bad: float) -> None:
        logits, target = batch(5)
        target[[3, 8]] = -100
        clean = create_loss(key, K)
        clean.observe(logits, target)
        clean.adapt()

        logits[3] = bad
        logits[8, 1] = bad
        loss = create_loss(key, K)
        loss.observe(logits, target)
        assert loss.adapt().samples == 28
        assert differing(snapshot(loss), snapshot(clean)) == []

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @adaptive
    def test_huge_but_finite_logits_are_not_refused(self, key: str, dtype: torch.dtype) -> None:
        """The lowest number of a type is a usual way to mask classes."""
        logits, target = batch(5)
        logits = logits.to(dtype)
        logits[:, 2:] = torch.finfo(dtype).min
        loss = create_loss(key, K)
        loss.observe(logits, target)
        assert loss.adapt().samples == 30
        assert all(buffer.isfinite().all() for buffer in loss.buffers())


class TestAdapting:
    @adaptive
    def test_it_returns_the_sums_of_the_pass(self, key: str) -> None:
        loss = run(create_loss(key, K), range(2))
        logits, target = batch(2)
        target[:4] = -100
        expected = loss.measure(loss.elements(logits[4:], target[4:])) + loss.measure(
            loss.elements(*batch(3))
        )
        loss.observe(logits, target)
        loss.observe(*batch(3))
        pooled = loss.adapt()
        assert type(pooled) is type(expected)
        assert pooled.samples.dtype == torch.float64
        assert pooled.samples.item() == 26 + 30
        for found, sums in zip(pooled.tensors(), expected.tensors(), strict=True):
            torch.testing.assert_close(found, sums, rtol=1e-6, atol=1e-6)

    @adaptive
    def test_buffers_are_updated_in_place(self, key: str) -> None:
        loss = create_loss(key, K)
        before = dict(loss.named_buffers())
        places = {name: buffer.data_ptr() for name, buffer in before.items()}
        fresh = snapshot(loss)
        run(loss, range(12))
        assert sorted(differing(fresh, snapshot(loss))) == sorted(before)  # all of them moved
        assert all(loss.get_buffer(name) is buffer for name, buffer in before.items())
        assert {name: buffer.data_ptr() for name, buffer in loss.named_buffers()} == places

    @adaptive
    def test_nothing_else_moves_the_state(self, key: str) -> None:
        loss = run(create_loss(key, K), range(2))
        before = snapshot(loss)
        logits, target = batch(2)
        for mode in (loss.train, loss.eval, loss.train):
            mode()
            loss(logits.requires_grad_(), target).backward()
            with torch.no_grad():
                loss(logits, target)
            loss.measure(loss.elements(logits.detach(), target))
        assert differing(before, snapshot(loss)) == []
        with pytest.raises(RuntimeError, match="nothing to learn from"):
            loss.adapt()  # nor has any of it been observed

    @adaptive
    def test_training_between_observing_and_adapting_changes_nothing(self, key: str) -> None:
        expected = run(create_loss(key, K), range(3))
        loss = run(create_loss(key, K), range(2))
        loss.observe(*batch(2))
        for mode in (loss.train, loss.eval):
            mode()
            logits, target = batch(7)
            loss(logits.requires_grad_(), target).backward()
        assert loss.adapt().samples == 30
        assert differing(snapshot(loss), snapshot(expected)) == []

    @adaptive
    def test_observing_only_adds_up(self, key: str) -> None:
        loss = run(create_loss(key, K), range(2))
        before = snapshot(loss)
        logits, target = batch(2)
        assert loss.observe(logits.requires_grad_(), target) is None
        assert differing(before, snapshot(loss)) == []
        pooled = loss.adapt()
        assert not any(tensor.requires_grad for tensor in [*pooled.tensors(), *loss.buffers()])


@pytest.mark.parametrize("key", [key for key in LOSSES if key not in ADAPTIVE])
def test_losses_that_do_not_adapt_take_part_in_the_same_loop(key: str) -> None:
    loss = create_loss(key, K, class_weight=[1.0, 2.0, 3.0, 4.0])
    logits, target = batch(0)
    before, value = snapshot(loss), loss(logits, target)
    for _ in range(2):
        assert loss.observe(logits, target) is None
        assert loss.forget() is None
        assert loss.observe(torch.full_like(logits, torch.nan), target) is None
        assert loss.adapt() is None
    assert loss.adapt() is None
    assert differing(before, snapshot(loss)) == []
    assert torch.equal(loss(logits, target), value)


def test_a_measure_of_one_s_own_is_still_guarded() -> None:
    class Mine(AugmentedLagrangian):
        def measure(self, elements: Elements) -> MarginStatistics:
            return super().measure(replace(elements, logits=elements.logits.nan_to_num()))

    loss = Mine(3)
    logits = torch.zeros(4, 3)
    logits[1, 0] = torch.nan
    loss.observe(logits, torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="NaN or infinite"):
        loss.adapt()


def test_what_was_learned_before_stays_as_it_was():
    loss = create_loss("ada-scale", 3)
    before = loss.learned()
    loss.observe(5 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3)
    loss.adapt()
    assert before["scale"] == 1 != loss.learned()["scale"]
