"""Every loss on a GPU: the same numbers as on the CPU, and no waiting for the device."""

import warnings
from typing import Any

import pytest
import torch

from calibrant import create_loss

from .conftest import ADAPTIVE, adapted_loss
from .test_contract import PER_SAMPLE, K, batch, gradient

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
@pytest.mark.parametrize("key", PER_SAMPLE)
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
