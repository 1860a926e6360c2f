"""Every loss on a GPU: the same numbers as on the CPU, and no waiting for the device."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from calibrant import create_loss
from calibrant.kernels.launch import _finished
from calibrant.losses import LOSSES, Loss

from .conftest import ADAPTIVE, adapted_loss
from .test_contract import K, batch, gradient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64,), (3, 9, 7)])
def test_equals_the_cpu(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits, target = batch(*shape, dtype=dtype)
    target.view(-1)[::5] = -100
    loss = adapted_loss(key, K)
    value, slope = loss(logits.double(), target), gradient(loss, logits.double(), target)
    loss.cuda()
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert loss(logits.cuda(), target.cuda()).item() == pytest.approx(value.item(), rel=max(1e-9, 1e-5))
    found = gradient(loss, logits.cuda(), target.cuda()).double().cpu()
    assert (found - slope).norm() <= tolerance * slope.norm()


@pytest.mark.parametrize("key", ADAPTIVE)
def test_state_equals_the_cpu_s(key: str) -> None:
    here, there = create_loss(key, K), create_loss(key, K).cuda()
    for number in range(3):
        logits, target = batch(2, 8, 8, seed=number)
        target[:, 0] = -100
        here.observe(logits, target)
        there.observe(logits.cuda(), target.cuda())
        here.adapt()
        there.adapt()
    for name, state in here.state_dict().items():
        assert there.state_dict()[name].is_cuda
        torch.testing.assert_close(there.state_dict()[name].cpu(), state, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1_000_000, 10), (5_000, 1_000), (300, 20_000), (4, 19, 500, 501)])
@pytest.mark.parametrize("key", ["cals-alm", "cals-hr", "adafocal"])
def test_sums_of_a_large_batch(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (4 * torch.randn(shape, generator=generator, device="cuda")).to(dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator, device="cuda")
    target.view(-1)[::5] = -100
    loss = create_loss(key, shape[1], **({} if key == "adafocal" else {"margin": 3})).cuda()
    first, again = loss.measure(loss.elements(logits, target)), loss.measure(loss.elements(logits, target))
    wanted = loss.measure(loss.elements(logits.double(), target))
    assert first.samples == wanted.samples == (target != -100).sum()
    for ours, twice, theirs in zip(first.tensors(), again.tensors(), wanted.tensors(), strict=True):
        if key == "adafocal":  # what lies on an edge between two cells may change sides
            ours, twice, theirs = ours.sum(), twice.sum(), theirs.sum()
            torch.testing.assert_close(twice, ours, rtol=1e-12, atol=0)
        else:
            assert torch.equal(ours, twice)
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("flaw", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("shape", [(32,), (2, 8, 8)])
@pytest.mark.parametrize("key", ADAPTIVE)
def test_what_is_not_finite_is_not_learned(key: str, shape: tuple[int, ...], flaw: float) -> None:
    logits, target = batch(*shape, dtype=torch.float32)
    loss = create_loss(key, K).cuda()
    target[0] = -100
    logits[0] = flaw
    loss.observe(logits.cuda(), target.cuda())
    loss.adapt()
    logits[1, 2] = flaw
    loss.observe(logits.cuda(), target.cuda())
    with pytest.raises(ValueError, match="NaN or infinite"):
        loss.adapt()


@pytest.mark.parametrize("key", ["cals-alm", "cals-hr", "adafocal", "calfocal"])
def test_labels_out_of_range_are_not_learned(key: str) -> None:
    logits, target = batch(32, dtype=torch.float32)
    target[::2] = 255
    loss = create_loss(key, K).cuda()
    loss.observe(logits.cuda(), target.cuda())
    with pytest.raises(ValueError, match="labels lay outside 0 to 6"):
        loss.adapt()


@pytest.mark.parametrize("arguments", [{}, {"class_weight": [1.0, 2, 3, 4, 5, 6, 7]}])
def test_never_waits_for_the_device(key: str, arguments: dict[str, Any]) -> None:
    logits, target = batch(64, dtype=torch.float32)
    logits, target = logits.cuda().requires_grad_(), target.cuda()
    loss = adapted_loss(key, K, **arguments).cuda()
    loss(logits, target).backward()  # warm up
    loss.observe(logits, target)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of being a prototype
            torch.cuda.set_sync_debug_mode("error")
        loss(logits, target).backward()
        loss.observe(logits, target)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about its own choices
@pytest.mark.parametrize("key", [key for key, loss in LOSSES.items() if loss.over_batch is Loss.over_batch])
def test_compiles(key: str) -> None:
    torch._dynamo.reset()
    logits, target = batch(32, dtype=torch.float32)
    logits, target = logits.cuda(), target.cuda()
    loss = adapted_loss(key, K).cuda()
    compiled = torch.compile(loss, fullgraph=True)
    for _ in range(2):
        expected = gradient(loss, logits, target)
        assert (gradient(compiled, logits, target) - expected).norm() <= 1e-4 * expected.norm()
        loss.observe(3 * logits, target)
        loss.adapt()


def outcome(loss: Loss, logits: Tensor, target: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    value = loss(leaf, target)
    (factor * value).backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def assert_equal(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_layouts() -> None:
    loss = adapted_loss("cals-alm", K).cuda()
    logits, target = (each.cuda() for each in batch(4, 8, 8, dtype=torch.float32))
    for odd in (logits.to(memory_format=torch.channels_last), logits[..., ::2], logits.transpose(2, 3)):
        labels = target[..., : odd.shape[-1]]
        wanted = outcome(loss, odd.contiguous(), labels.contiguous())
        for _ in range(2):
            value, slope = outcome(loss, odd, labels)
        torch.testing.assert_close(value, wanted[0])
        torch.testing.assert_close(slope, wanted[1])


def test_what_the_loss_learns_and_is_told_counts() -> None:
    loss = adapted_loss("cals-alm", K).cuda()
    logits, target = (each.cuda() for each in batch(64, dtype=torch.float32))
    before = outcome(loss, logits, target)[0]
    loss.observe(logits, target)
    loss.adapt()
    after = outcome(loss, logits, target)[0]
    assert not torch.equal(before, after)
    loss.margin = 0.5
    assert not torch.equal(outcome(loss, logits, target)[0], after)


@pytest.mark.parametrize("size", [64, 5000])
def test_several_backward_passes(size: int) -> None:
    loss = adapted_loss("cals-alm", K).cuda()
    logits, target = (each.cuda() for each in batch(size, dtype=torch.float32))
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    (first,) = torch.autograd.grad(value, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(value, leaf, retain_graph=True)
    torch.testing.assert_close(first, second)
    loss.observe(logits, target)
    loss.adapt()
    with pytest.raises(RuntimeError, match="call the loss again"):
        torch.autograd.grad(value, leaf)
    (slope,) = torch.autograd.grad(loss(leaf, target), leaf, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), leaf)
    assert curvature.isfinite().all()
    with torch.no_grad():
        assert not loss(leaf, target).requires_grad


@pytest.mark.parametrize("size", [64, 5000])
def test_streams_and_graphs(size: int) -> None:
    loss = adapted_loss("adafocal", K).cuda()
    logits, target = (each.cuda() for each in batch(size, dtype=torch.float32))
    for _ in range(2):
        wanted = outcome(loss, logits, target)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = outcome(loss, logits, target)
    torch.cuda.synchronize()
    assert_equal(found, wanted)
    leaf = logits.clone().requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        value = loss(leaf, target)
        value.backward()
    leaf.grad.zero_()
    recording.replay()
    torch.cuda.synchronize()
    assert_equal((value.detach(), leaf.grad), wanted)


def test_in_a_fresh_thread() -> None:
    loss = adapted_loss("focal", K).cuda()
    logits, target = (each.cuda() for each in batch(5000, dtype=torch.float32))
    wanted = outcome(loss, logits, target)
    leaf = logits.clone().requires_grad_()
    with ThreadPoolExecutor(1) as thread:  # which has not used the GPU yet
        value = thread.submit(loss, leaf, target).result()
    value.backward()
    assert leaf.grad is not None
    assert_equal((value.detach(), leaf.grad), wanted)


def test_function_transforms() -> None:
    loss = adapted_loss("focal", K).cuda()
    logits, target = (each.cuda() for each in batch(64, dtype=torch.float32))
    slope = torch.func.grad(lambda x: loss(x, target))(logits)
    torch.testing.assert_close(slope, outcome(loss, logits, target)[1])


@pytest.mark.parametrize("strided", [False, True])
def test_a_call_holds_one_tensor(strided: bool) -> None:
    loss = adapted_loss("cals-alm", K).cuda()
    logits, target = (each.cuda() for each in batch(8, 512, 512, dtype=torch.float32))
    if strided:
        logits, target = logits.transpose(2, 3), target.transpose(1, 2)
    logits.requires_grad_()
    for _ in range(3):
        logits.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss(logits, target).backward()
    held = (torch.cuda.max_memory_allocated() - before) / (logits.numel() * logits.element_size())
    assert held <= (2.4 if strided else 1.1)  # strided images and labels are copied, and labels have 8 bytes


def test_streams_that_may_overlap_share_no_counter() -> None:
    here = torch.device("cuda", torch.cuda.current_device())
    shared = _finished(here)
    assert _finished(here) is shared
    with torch.cuda.stream(torch.cuda.Stream()):
        assert _finished(here) is not shared
    assert _finished(here) is shared
