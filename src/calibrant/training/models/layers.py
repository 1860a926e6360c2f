"""Layers and initial weights that several networks share."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def batch_norm(channels: int, *, relu: bool = True) -> nn.Sequential:
    """Batch normalisation of images ``(B, channels, H, W)``, followed by a ReLU unless ``relu`` is False.

    >>> list(batch_norm(8).state_dict())[:2]
    ['norm.weight', 'norm.bias']
    """
    layers: dict[str, nn.Module] = {"norm": nn.BatchNorm2d(channels)}
    if relu:
        layers["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(OrderedDict(layers))


def initialise(network: nn.Module) -> None:
    """Draw the weights of all convolutions anew, in place.

    Weights are normal with variance ``2 / fan-out`` and biases are 0 (He et al., 2015), so that gradients
    keep their size through layers with ReLU. All other layers keep PyTorch's initial weights.

    >>> convolution = nn.Conv2d(64, 64, 3)
    >>> initialise(convolution)
    >>> bool((convolution.weight.std() * (9 * 64 / 2) ** 0.5 - 1).abs() < 0.05)
    True
    """
    for module in network.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
