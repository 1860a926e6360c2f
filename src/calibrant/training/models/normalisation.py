"""Batch normalisation together with what follows it."""

from __future__ import annotations

from torch import Tensor, nn

from calibrant.kernels import normalised


class Norm(nn.Module):
    """Batch normalisation, then a sum if something is to be added, then ReLU: on a GPU in one go.

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
        return normalised(self.norm, images, added, relu=self.relu)
