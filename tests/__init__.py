"""Tests mirror the package.

PyPI's torchvision cannot be imported beside a CPU build of torch: two operators of detection, which nothing
here uses, are missing. torchmetrics, timm and others import it if it is there, so they are declared first,
here, where processes that a test starts come by too.
"""

import importlib

import torch

_DECLARED = torch.library.Library("torchvision", "FRAGMENT")

try:
    importlib.import_module("torchvision")
except ModuleNotFoundError:
    pass
except RuntimeError:
    for _name in ("nms", "qnms"):
        _DECLARED.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")
