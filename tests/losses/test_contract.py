"""The contract of every loss: parametrised over LOSSES, so a new one is covered when it is registered."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F

from calibrant import LOSSES, create_loss, layout
from calibrant.histogram import Outcomes
from calibrant.losses import AdaptiveLoss, Loss
from calibrant.statistics import Statistics

from .conftest import ADAPTIVE, SOFT, adapted_loss

K = 7
Function = Callable[[Tensor], Tensor]
DETACHED = {"calfocal": "through_gamma", "bsce-gra": "through_weight"}
"""Losses that hold a part of themselves fixed by default, and the option that differentiates it."""
WEIGHTING = {(loss._weighted, loss.per_sample, loss.over_batch): key for key, loss in LOSSES.items()}.values()
"""A loss for each code that applies class weights; under transforms and compilation, the others share it."""
TRACED_BACKWARD = {*WEIGHTING, *{LOSSES[key].__module__: key for key in ADAPTIVE}.values()}
"""Losses whose gradient is compiled too. The others have the same code around sums of plain operations."""
WEIGHTS = [0.5, 1, 2, 0.1, 1, 3, 1]


def batch(
    *shape: int, classes: int = K, scale: float = 4.0, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random logits ``(shape[0], classes, *shape[1:])`` and labels ``shape``."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(shape[0], classes, *shape[1:], generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(classes, shape, generator=generator)


def gradient(loss: Loss, logits: Tensor, target: Tensor) -> Tensor:
    logits = logits.detach().clone().requires_grad_()
    loss(logits, target).backward()
    assert logits.grad is not None
    return logits.grad


def smooth_loss(key: str, num_classes: int, **arguments: Any) -> Loss:
    """An adapted loss none of whose parameters depend on the logits behind autograd's back."""
    if key in DETACHED:
        arguments[DETACHED[key]] = True
    return adapted_loss(key, num_classes, **arguments)


def test_gradient_is_that_of_the_value(key: str) -> None:
    logits, target = batch(4, classes=4, scale=2.0)
    loss = smooth_loss(key, 4)
    assert torch.autograd.gradcheck(lambda x: loss(x, target), logits.requires_grad_())


def test_gradient_with_ignored_elements_and_class_weights(key: str) -> None:
    logits, target = batch(2, 1, 3, classes=3, scale=2.0)
    target[0, 0, 0] = target[1, 0, 2] = -100
    loss = smooth_loss(key, 3, class_weight=[0.5, 2.0, 0.0], reduction="none")
    assert torch.autograd.gradcheck(lambda x: loss(x, target), logits.requires_grad_())


def test_second_derivatives(key: str) -> None:
    logits, target = batch(3, classes=3, scale=1.0)
    loss = smooth_loss(key, 3)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, target), logits.requires_grad_())


def test_a_retained_graph_gives_the_same_gradient_again(key: str) -> None:
    logits, target = batch(9)
    logits.requires_grad_()
    value = adapted_loss(key, K)(logits, target)
    (first,) = torch.autograd.grad(value, logits, retain_graph=True)
    (second,) = torch.autograd.grad(value, logits, torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(second, 3 * first, rtol=1e-12, atol=1e-15)


def test_a_retained_graph_does_not_see_the_next_adaptation(key: str) -> None:
    logits, target = batch(9)
    logits.requires_grad_()
    loss = adapted_loss(key, K)
    value = loss(logits, target)
    (first,) = torch.autograd.grad(value, logits, retain_graph=True)
    loss.observe(3 * logits, target)
    loss.adapt()
    (second,) = torch.autograd.grad(value, logits)
    torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-15)


def by_forward_mode(function: Function, logits: Tensor) -> Tensor:
    """The gradient, one direction after the other."""
    slopes = []
    with forward_ad.dual_level():
        for direction in torch.eye(logits.numel(), dtype=logits.dtype).view(-1, *logits.shape):
            dual = function(forward_ad.make_dual(logits, direction))
            slopes.append(forward_ad.unpack_dual(dual).tangent)
    return torch.stack(slopes).view_as(logits)


def by_batched_upstream(function: Function, logits: Tensor) -> Tensor:
    """The gradient, as the difference of two that are computed together."""
    logits = logits.detach().requires_grad_()
    upstream = torch.tensor([3.0, 2.0], dtype=logits.dtype)
    (slopes,) = torch.autograd.grad(function(logits), logits, upstream, is_grads_batched=True)
    return slopes[0] - slopes[1]


GRADIENTS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "grad": lambda function, logits: torch.func.grad(function)(logits),
    "jacrev": lambda function, logits: torch.func.jacrev(function)(logits),
    "jacfwd": lambda function, logits: torch.func.jacfwd(function)(logits),
    "vjp": lambda function, logits: torch.func.vjp(function, logits)[1](torch.ones((), dtype=logits.dtype))[
        0
    ],
    "forward_ad": by_forward_mode,
    "is_grads_batched": by_batched_upstream,
    "vectorize": lambda function, logits: jacobian(function, logits, vectorize=True),
}
HESSIANS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "hessian": lambda function, logits: torch.func.hessian(function)(logits),
    "jacrev of jacrev": lambda function, logits: torch.func.jacrev(torch.func.jacrev(function))(logits),
    "autograd": lambda function, logits: hessian(function, logits),
    "autograd, vectorize": lambda function, logits: hessian(function, logits, vectorize=True),
}


in_torch = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


@in_torch
def test_transforms_give_the_gradient(key: str) -> None:
    logits, target = batch(4, classes=3, scale=2.0)
    target[1] = -100
    for arguments in ({}, {"class_weight": [0.5, 1.0, 2.0]})[: 1 + (key in WEIGHTING)]:
        loss = smooth_loss(key, 3, **arguments)
        expected = gradient(loss, logits, target)
        for name, transform in GRADIENTS.items():
            slope = transform(lambda x, loss=loss: loss(x, target), logits)
            torch.testing.assert_close(
                slope, expected, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@in_torch
def test_transforms_give_the_hessian(key: str) -> None:
    logits, target = batch(3, classes=3, scale=2.0)
    loss = smooth_loss(key, 3)
    step = 1e-5 * torch.eye(9, dtype=torch.float64).view(9, 3, 3)
    differences = [
        gradient(loss, logits + each, target) - gradient(loss, logits - each, target) for each in step
    ]
    expected = torch.stack(differences).view(3, 3, 3, 3) / 2e-5
    for transform in HESSIANS.values():
        found = transform(lambda x: loss(x, target), logits)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "options"), [((5,), {"class_weight": WEIGHTS}), ((2, 3, 2), {"reduction": "none"})]
)
def test_vmap(key: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    logits, target = batch(3 * shape[0], *shape[1:])
    logits, target = logits.unflatten(0, (3, -1)), target.unflatten(0, (3, -1))
    target[0, 0] = -100
    for arguments in ({}, options):
        loss = smooth_loss(key, K, **arguments)
        each = torch.stack([loss(x, y) for x, y in zip(logits, target, strict=True)])
        torch.testing.assert_close(torch.func.vmap(loss)(logits, target), each, rtol=1e-9, atol=1e-12)
        of_logits = torch.func.vmap(loss, in_dims=(0, None))(logits, target[0])
        torch.testing.assert_close(of_logits[0], each[0], rtol=1e-9, atol=1e-12)
        of_target = torch.func.vmap(loss, in_dims=(None, 0))(logits[0], target)
        torch.testing.assert_close(of_target[0], each[0], rtol=1e-9, atol=1e-12)
    loss = smooth_loss(key, K)
    slopes = torch.func.vmap(torch.func.grad(loss))(logits, target)
    expected = torch.stack([gradient(loss, x, y) for x, y in zip(logits, target, strict=True)])
    torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-12)


def test_labels_out_of_range_that_cannot_be_read_make_the_loss_nan(key: str) -> None:
    logits, target = batch(6)
    target[2] = -100
    target = torch.stack([target, target])
    for wrong in (K, -1, 10**12):
        target[1, 4] = wrong
        for arguments in ({}, {"class_weight": WEIGHTS}, {"reduction": "sum"}):
            loss = adapted_loss(key, K, **arguments)
            right, stray = torch.func.vmap(loss, in_dims=(None, 0))(logits, target)
            assert right.isfinite()
            assert stray.isnan()


def test_logits_that_are_not_numbers_give_a_loss_that_is_none(key: str) -> None:
    logits, target = batch(4)
    logits[1, 2] = torch.nan
    assert create_loss(key, K)(logits, target).isnan()


def test_images_equal_their_flattened_pixels(key: str) -> None:
    logits, target = batch(2, 5, 3)
    target[0, 1, 1] = -100
    loss = adapted_loss(key, K)
    rows, labels = logits.movedim(1, -1).reshape(-1, K), target.flatten()
    if key == "nacl":  # by definition: it compares a pixel with its neighbours
        assert loss(logits, target) != loss(rows, labels)
        return
    torch.testing.assert_close(loss(logits, target), loss(rows, labels), rtol=1e-12, atol=0)
    expected = gradient(loss, rows, labels).view(2, 5, 3, K).movedim(-1, 1)
    torch.testing.assert_close(gradient(loss, logits, target), expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("arrangement", ["channels_last", "transposed", "crop"])
def test_memory_layout_does_not_matter(key: str, arrangement: str) -> None:
    logits, target = batch(2, 5, 3)
    if arrangement == "channels_last":
        same = logits.to(memory_format=torch.channels_last)
    elif arrangement == "transposed":
        same = logits.movedim(1, -1).contiguous().movedim(-1, 1)
    else:
        same = F.pad(logits, (1, 2, 3, 1))[:, :, 3:-1, 1:-2]
    loss = adapted_loss(key, K)
    torch.testing.assert_close(loss(same, target), loss(logits, target), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradient(loss, same, target), gradient(loss, logits, target), rtol=1e-11, atol=1e-14
    )


def test_many_blocks_equal_one(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = batch(5, 4, 3)
    loss = adapted_loss(key, K)
    value, slope = loss(logits, target), gradient(loss, logits, target)
    monkeypatch.setattr(layout, "_CPU_BLOCK", 5 * K)
    torch.testing.assert_close(loss(logits, target), value, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient(loss, logits, target), slope, rtol=1e-11, atol=1e-14)


def test_ignoring_equals_deleting(key: str) -> None:
    logits, target = batch(12)
    keep = torch.ones(12, dtype=torch.bool)
    keep[[0, 5, 11]] = False
    void = torch.where(keep, target, 255)
    loss = adapted_loss(key, K, ignore_index=255)
    torch.testing.assert_close(loss(logits, void), loss(logits[keep], target[keep]), rtol=1e-12, atol=0)
    slope = gradient(loss, logits, void)
    torch.testing.assert_close(
        slope[keep], gradient(loss, logits[keep], target[keep]), rtol=1e-11, atol=1e-15
    )
    assert (slope[~keep] == 0).all()


def test_what_an_ignored_element_holds_does_not_reach_the_loss(key: str) -> None:
    logits, target = batch(6)
    target[2] = -100
    loss = adapted_loss(key, K)
    value = loss(logits, target)
    slope = gradient(loss, logits, target)
    for place, content in (((2,), torch.nan), ((2, 0), -torch.inf), ((2, 1), torch.inf), ((2,), -torch.inf)):
        changed = logits.clone()
        changed[place] = content
        assert torch.equal(loss(changed, target), value)
        assert torch.equal(gradient(loss, changed, target), slope)
        changed.requires_grad_()
        (again,) = torch.autograd.grad(loss(changed, target), changed, create_graph=True)
        torch.testing.assert_close(again, slope)
        by_transform = torch.func.grad(loss)(changed.detach(), target)
        torch.testing.assert_close(by_transform, slope)


def test_nothing_valid_is_zero_with_a_zero_gradient(key: str) -> None:
    logits, target = batch(3, 2)
    for reduction in ("mean", "sum"):
        loss = adapted_loss(key, K, reduction=reduction)
        assert loss(logits, torch.full_like(target, -100)).item() == 0
        assert (gradient(loss, logits, torch.full_like(target, -100)) == 0).all()
        assert loss(logits[:0], target[:0]).item() == 0
        assert gradient(loss, logits[:0], target[:0]).shape == (0, K, 2)


def test_one_element(key: str) -> None:
    logits, target = batch(1)
    loss = adapted_loss(key, K)
    assert loss(logits, target).isfinite()
    assert gradient(loss, logits, target).isfinite().all()


def test_reductions(key: str) -> None:
    logits, target = batch(4, 3)
    target[1, 1] = -100
    each = adapted_loss(key, K, reduction="none")(logits, target)
    assert each.shape == target.shape
    assert each[1, 1] == 0
    total = adapted_loss(key, K, reduction="sum")(logits, target)
    mean = adapted_loss(key, K)(logits, target)
    torch.testing.assert_close(total, each.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(mean, each.sum() / 11, rtol=1e-12, atol=0)


def test_class_weights(key: str) -> None:
    logits, target = batch(40)
    target[3] = -100
    weight = torch.tensor([0.2, 1.0, 3.0, 0.0, 1.5, 0.7, 1.1], dtype=torch.float64)
    each = adapted_loss(key, K, reduction="none")(logits, target)
    if key == "ls":
        expected = F.cross_entropy(logits, target, weight, label_smoothing=0.05)
    else:
        factor = torch.where(target >= 0, weight[target.clamp_min(0)], 0)
        expected = (factor * each).sum() / factor.sum()
    for form in (weight, weight.tolist()):
        weighted = adapted_loss(key, K, class_weight=form)(logits, target)
        torch.testing.assert_close(weighted, expected, rtol=1e-11, atol=1e-13)


def test_adding_a_constant_changes_nothing(key: str) -> None:
    logits, target = batch(10)
    loss = adapted_loss(key, K)
    generator = torch.Generator().manual_seed(0)
    moved = logits + 100 * torch.randn(10, 1, generator=generator, dtype=torch.float64)
    if key == "nacl":  # by definition: its penalty is on the logits themselves
        assert loss(moved, target) > 2 * loss(logits, target)
        return
    torch.testing.assert_close(loss(moved, target), loss(logits, target), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        gradient(loss, moved, target), gradient(loss, logits, target), rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("offset", [1e6, -3e7])
def test_single_precision_suffices_far_from_zero(key: str, offset: float) -> None:
    logits, target = batch(20, dtype=torch.float32)
    far = logits + offset
    loss = adapted_loss(key, K)
    torch.testing.assert_close(loss(far, target).double(), loss(far.double(), target), rtol=1e-5, atol=1e-6)
    exact = gradient(loss, far.double(), target)
    assert (gradient(loss, far, target).double() - exact).norm() <= 1e-4 * exact.norm()


def test_permuting_classes_changes_nothing_and_permutes_the_state(key: str) -> None:
    logits, target = batch(30)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3))
    one, other = create_loss(key, K), create_loss(key, K)
    for _ in range(3):
        one.observe(logits, target)
        other.observe(logits[:, order], order.argsort()[target])
        one.adapt()
        other.adapt()
    for name, state in one.state_dict().items():
        expected = state[order] if state.shape == (K,) else state
        torch.testing.assert_close(other.state_dict()[name], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        other(logits[:, order], order.argsort()[target]), one(logits, target), rtol=1e-9, atol=1e-12
    )


def test_shuffling_samples_changes_nothing(key: str) -> None:
    logits, target = batch(30)
    logits[7] = logits[3]  # a tie between samples
    order = torch.randperm(30, generator=torch.Generator().manual_seed(4))
    loss = adapted_loss(key, K)
    torch.testing.assert_close(loss(logits[order], target[order]), loss(logits, target), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        gradient(loss, logits[order], target[order]),
        gradient(loss, logits, target)[order],
        rtol=1e-8,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float16, (16,)), (torch.bfloat16, (2, 4, 4)), (torch.float32, (2, 4, 4))]
)
def test_low_precision_is_computed_in_float32(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    logits, target = batch(*shape, dtype=dtype)
    loss = adapted_loss(key, K)
    value = loss(logits, target)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(logits.double(), target).float(), rtol=2e-5, atol=2e-6)
    slope = gradient(loss, logits, target)
    assert slope.dtype == dtype
    exact = gradient(loss, logits.double(), target)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-4}[dtype]
    assert (slope.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_logits_and_ties(key: str, dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [[1e4, -1e4, 0, 0, 1e4], [0, 0, 0, 0, 0], [-1e4, -1e4, -1e4, 1e4, -1e4], [1e4, 0, 0, 0, 0]],
        dtype=dtype,
    )
    loss = adapted_loss(key, 5)
    for label in range(5):
        target = torch.full((4,), label)
        assert loss(logits, target).isfinite()
        assert gradient(loss, logits, target).isfinite().all()


def test_saturated_confidence_has_a_finite_gradient(key: str) -> None:
    """Focal-like losses with an exponent below 1 give NaN here when written naively."""
    arguments: dict[str, Any] = {"gamma": 0.3} if "gamma" in LOSSES[key].hyperparameters() else {}
    loss = create_loss(key, 3, **arguments)
    if key in ("adafocal", "ada-dual-focal"):
        loss.gamma.fill_(0.2)
    logits = torch.tensor([[200.0, 0.0, 0.0], [30.0, 0.0, 0.0], [17.0, 0.0, 0.0]])
    assert gradient(loss, logits, torch.zeros(3, dtype=torch.long)).isfinite().all()


def test_two_classes(key: str) -> None:
    logits, target = batch(5, classes=2)
    loss = smooth_loss(key, 2)
    assert loss(logits, target).isfinite()
    assert torch.autograd.gradcheck(lambda x: loss(x, target), logits.requires_grad_())


def test_deterministic(key: str) -> None:
    logits, target = batch(300, dtype=torch.float32)
    loss = adapted_loss(key, K)
    assert all(torch.equal(gradient(loss, logits, target), gradient(loss, logits, target)) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(key: str, dtype: torch.dtype) -> None:
    logits, target = batch(32, dtype=torch.float32)
    loss = adapted_loss(key, K)
    with torch.autocast("cpu", dtype=dtype):
        value, slope = loss(logits, target), gradient(loss, logits, target)
        loss.observe(logits, target)
        loss.adapt()
    fresh = adapted_loss(key, K)
    assert torch.equal(value, fresh(logits, target))
    assert torch.equal(slope, gradient(fresh, logits, target))
    fresh.observe(logits, target)
    fresh.adapt()
    for name, state in fresh.state_dict().items():
        assert torch.equal(loss.state_dict()[name], state)


@pytest.mark.parametrize("key", SOFT)
class TestProbabilityTargets:
    def test_one_hot_equals_labels(self, key: str) -> None:
        logits, target = batch(3, 4)
        one_hot = F.one_hot(target, K).movedim(-1, 1).double()
        for arguments in ({}, {"class_weight": WEIGHTS}):
            loss = adapted_loss(key, K, reduction="none", **arguments)
            torch.testing.assert_close(loss(logits, one_hot), loss(logits, target), rtol=1e-9, atol=1e-12)

    def test_gradient(self, key: str) -> None:
        logits, _ = batch(3, classes=3, scale=2.0)
        soft = torch.rand(3, 3, dtype=torch.float64).softmax(1)
        for arguments in ({}, {"class_weight": [0.5, 1, 2]}):
            loss = adapted_loss(key, 3, **arguments)
            assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, soft), logits.requires_grad_())
            assert torch.autograd.gradgradcheck(lambda x, loss=loss: loss(x, soft), logits)

    def test_gradient_by_the_target(self, key: str) -> None:
        logits, _ = batch(5, classes=4)
        soft = torch.rand(5, 4, dtype=torch.float64).softmax(1).requires_grad_()
        loss = adapted_loss(key, 4)
        assert torch.autograd.gradcheck(lambda t: loss(logits, t), soft)

    def test_observing_needs_no_labels(self, key: str) -> None:
        logits, target = batch(20)
        by_label, by_probability = create_loss(key, K), create_loss(key, K)
        by_label.observe(logits, target)
        by_probability.observe(logits, F.one_hot(target, K).double())
        by_label.adapt()
        by_probability.adapt()
        for name, state in by_label.state_dict().items():
            assert torch.equal(by_probability.state_dict()[name], state)


@pytest.mark.parametrize("key", [key for key in LOSSES if key not in SOFT])
def test_probability_targets_are_refused_elsewhere(key: str) -> None:
    with pytest.raises(TypeError, match="integer labels"):
        create_loss(key, K)(torch.randn(3, K), torch.rand(3, K))


def test_wrong_input_is_named(key: str) -> None:
    loss = create_loss(key, K)
    with pytest.raises(ValueError, match=r"4 classes.*num_classes=7"):
        loss(torch.randn(2, 4), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"shape \(2,\).*got \(3,\)"):
        loss(torch.randn(2, K), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"labels from 0 to 7.*7 classes"):
        loss(torch.randn(2, K), torch.tensor([0, 7]))
    with pytest.raises(ValueError, match=r"labels from -1 to 0"):
        loss(torch.randn(2, K), torch.tensor([0, -1]))


@pytest.mark.parametrize("key", ADAPTIVE)
class TestAdaptive:
    def test_measure_is_additive(self, key: str) -> None:
        @settings(deadline=None, max_examples=15)
        @given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 1000))
        def check(sizes: list[int], seed: int) -> None:
            logits, target = batch(sum(sizes) + 1, seed=seed)
            target[::4] = -100
            whole = loss.measure(loss.elements(logits, target))
            parts = loss.measure(loss.elements(logits[:0], target[:0]))
            for x, y in zip(logits.split([*sizes, 1]), target.split([*sizes, 1]), strict=True):
                parts = parts + loss.measure(loss.elements(x, y))
            for ours, theirs in zip(tensors(parts), tensors(whole), strict=True):
                assert ours.dtype == torch.float64
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

        def tensors(statistics: Statistics) -> list[Tensor]:
            if isinstance(statistics, Outcomes):  # as one list of elements, however it was put together
                return [statistics.samples, *statistics.histogram.tensors(), statistics.pairs]
            return statistics.tensors()

        loss = adapted_loss(key, K)
        assert isinstance(loss, AdaptiveLoss)
        check()

    def test_segmentation_with_void_equals_the_pixels_that_are_left(self, key: str) -> None:
        logits, target = batch(2, 64, 64, classes=21)
        void = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(1)) < 0.2
        target = torch.where(void, 255, target)
        rows, labels = logits.movedim(1, -1)[~void], target[~void]
        dense, flat = (create_loss(key, 21, ignore_index=255) for _ in range(2))
        for _ in range(3):
            dense.observe(logits, target)
            flat.observe(rows, labels)
            dense.adapt()
            flat.adapt()
            for name, state in flat.state_dict().items():
                torch.testing.assert_close(dense.state_dict()[name], state, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dense(logits, target), flat(rows, labels), rtol=1e-12, atol=0)
        slope = gradient(dense, logits, target).movedim(1, -1)
        torch.testing.assert_close(slope[~void], gradient(flat, rows, labels), rtol=1e-10, atol=1e-18)
        assert (slope[void] == 0).all()

    def test_observing_in_parts_equals_observing_at_once(self, key: str) -> None:
        logits, target = batch(50)
        at_once, in_parts = create_loss(key, K), create_loss(key, K)
        at_once.observe(logits, target)
        for x, y in zip(logits.split(7), target.split(7), strict=True):
            in_parts.observe(x, y)
        at_once.adapt()
        in_parts.adapt()
        for name, state in at_once.state_dict().items():
            torch.testing.assert_close(in_parts.state_dict()[name], state, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("quick_compiler")
def test_compiles_whole_and_is_not_compiled_again_by_adapt(key: str) -> None:
    torch._dynamo.reset()
    weighted = key in WEIGHTING and key != "ls"  # which has a test with class weights of its own below
    loss = adapted_loss(key, K, class_weight=WEIGHTS if weighted else None)
    logits, target = batch(16, dtype=torch.float32)
    target[2] = -100
    logits.requires_grad_()
    backend = "aot_eager" if key in TRACED_BACKWARD else "eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)

    def both() -> None:
        value = compiled(logits, target)
        torch.testing.assert_close(value, loss(logits, target), rtol=1e-5, atol=1e-6)
        (slope,) = torch.autograd.grad(value, logits)
        torch.testing.assert_close(slope, gradient(loss, logits, target), rtol=1e-4, atol=1e-6)

    both()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        loss.observe(3 * logits.detach(), target)
        loss.adapt()
        both()
    assert_wrong_labels_show(compiled, logits, target)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("key", ["ls", "kde-xe", "ada-scale"])
def test_compiles_with_class_weights_and_without_a_gradient(key: str) -> None:
    """One loss with class weights of its own, one that asks for gradients, and one of the common code."""
    torch._dynamo.reset()
    loss = adapted_loss(key, K, class_weight=WEIGHTS)
    logits, target = batch(6, dtype=torch.float32)
    target[2] = -100
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, target), loss(logits, target), rtol=1e-5, atol=1e-6)
    assert_wrong_labels_show(compiled, logits, target)


def assert_wrong_labels_show(compiled: Callable[..., Tensor], logits: Tensor, target: Tensor) -> None:
    """A label out of range cannot be refused in a compiled loss, so it makes the loss NaN."""
    for wrong in (K, -1, 10**12):
        target[4] = wrong
        assert compiled(logits, target).isnan()


def test_printing_and_copying(key: str) -> None:
    loss = adapted_loss(key, K)
    assert repr(loss).startswith(f"{type(loss).__name__}({K}")
    buffer = io.BytesIO()
    torch.save(loss, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    logits, target = batch(5)
    assert torch.equal(again(logits, target), loss(logits, target))


def test_hyperparameters_are_keyword_only_and_attributes(key: str) -> None:
    loss = create_loss(key, K)
    names = LOSSES[key].hyperparameters()
    assert {"reduction", "ignore_index", "class_weight"} <= set(names)
    for name, parameter in names.items():
        assert loss.options()[name] == parameter.default
    with pytest.raises(TypeError):
        LOSSES[key](K, 1.0)  # type: ignore[call-arg]
