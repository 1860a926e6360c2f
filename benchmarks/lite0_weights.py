"""Converts ImageNet weights of EfficientNet-Lite0 for the leaderboard's segmentation runs.

    python benchmarks/lite0_weights.py efficientnet_lite0.npz efficientnet-lite0.safetensors

The input has the arrays in the order of the layers. timm has the same layers in the same order under other
names. The weights expect pixels as ``(x - 0.498) / 0.502``, but recipes normalise by the mean and standard
deviation of ImageNet. The difference goes into the first convolution and the batch normalisation after it.
At the borders of an image, where zeros are padded, the result differs a little.
"""

from __future__ import annotations

import sys

import numpy as np
import timm
import torch
from safetensors.torch import save_file

from calibrant.training.data.augmentation import NORMALISATIONS

MEAN, DEVIATION = 0.498, 0.502


def main(source: str, target: str) -> None:
    """Rename the arrays, and fold the normalisation of the pixels into the first layers."""
    expected = timm.create_model("tf_efficientnet_lite0", num_classes=0).state_dict()
    with np.load(source) as file:
        arrays = [torch.from_numpy(file[name]) for name in file.files if not name.startswith("_fc.")]
    weights = {
        name: array.to(value.dtype).contiguous()
        for (name, value), array in zip(expected.items(), arrays, strict=True)
    }
    for name, value in expected.items():
        if weights[name].shape != value.shape:
            raise SystemExit(
                f"{source}: {name} has shape {tuple(weights[name].shape)}, not {tuple(value.shape)}"
            )
    imagenet = NORMALISATIONS["imagenet"]
    mean, deviation = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (imagenet.mean, imagenet.std))
    stem = weights["conv_stem.weight"]
    weights["bn1.running_mean"] -= (stem * (mean - MEAN) / DEVIATION).sum((1, 2, 3))
    weights["conv_stem.weight"] = stem * deviation / DEVIATION
    save_file(weights, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
