"""Calibrators fitted and applied on a GPU give what they give on the CPU."""

import pytest
import torch

from calibrant.calibrators import CALIBRATORS, create_calibrator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("key", CALIBRATORS)
def test_equals_the_cpu(key: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 10, 10, generator=generator, dtype=torch.float64)
    target = (logits - (-torch.rand(logits.shape, generator=generator).log()).log()).argmax(1)
    target[0, :2] = -100
    here = create_calibrator(key).fit(3 * logits, target)
    there = create_calibrator(key).fit(3 * logits.cuda(), target.cuda())
    expected, found = here(3 * logits).softmax(1), there(3 * logits.cuda()).softmax(1)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-6)
    moved = here.cuda()(3 * logits.cuda()).softmax(1)
    torch.testing.assert_close(moved.cpu(), expected, rtol=1e-9, atol=1e-12)
