"""Networks without numbers, for tests that ask for shapes alone. Numbers would take most of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

_DRAWN = ("kaiming_normal_", "kaiming_uniform_", "ones_", "uniform_", "zeros_")


@contextmanager
def weights_without_numbers() -> Iterator[None]:
    """Networks that are created here are on the device "meta", whose weights need no initial numbers."""
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        for name in _DRAWN:
            patch.setattr(nn.init, name, lambda tensor, *_, **__: tensor)
        yield


@pytest.fixture
def quick_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch normalisation as a product and a sum: the same shapes, gradients and refusals."""

    def forward(norm: nn.BatchNorm2d, images: Tensor) -> Tensor:
        assert images.shape[1] == norm.num_features
        return images * norm.weight[:, None, None] + norm.bias[:, None, None]

    monkeypatch.setattr(nn.BatchNorm2d, "forward", forward)
