"""Batch normalisation together with what follows it."""

from __future__ import annotations

from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional as F

from calibrant.kernels import normalised


class Norm(nn.Module):
    """Batch normalisation, then a sum if something is to be added, then ReLU if there is to be one.

    On a GPU, in training and with channels that lie side by side, kernels do all of it together.

    Args:
        channels: of the images ``(B, channels, H, W)``.
        relu: whether negative numbers become 0.

    >>> import torch
    >>> norm = Norm(1)
    >>> norm(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1), torch.full((2, 1, 1, 1), 0.5)).flatten()
    tensor([0.0000, 1.5000], grad_fn=<ViewBackward0>)
    """

    def __init__(self, channels: int, *, relu: bool = True) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(channels), relu

    def forward(self, images: Tensor, added: Tensor | None = None) -> Tensor:
        if is_scripting():  # TorchScript knows no functions of layers
            result = self.norm(images)
            if added is not None:
                result = result + added
            return F.relu(result) if self.relu else result
        return normalised(self.norm, images, added, relu=self.relu)

    def extra_repr(self) -> str:
        return f"relu={self.relu}"
