"""The weights that every network written here starts from."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def initialised(network: Network) -> Network:
    """The network itself, with convolutions drawn anew.

    Convolutions get normal weights of variance ``2 / fan-out`` and biases of 0 (He et al., 2015), which keeps
    gradients of one size through layers with ReLU. Normalisations start as the identity and linear and
    embedding layers as PyTorch draws them.

    >>> convolution = initialised(nn.Conv2d(64, 64, 3))
    >>> bool((convolution.weight.std() * (9 * 64 / 2) ** 0.5 - 1).abs() < 0.05)
    True
    """
    for module in network.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network
