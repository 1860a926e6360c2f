"""Tests mirror the package.

PyPI's torchvision cannot be imported beside a CPU build of torch: two operators of detection, which nothing
here uses, are missing. torchmetrics, timm and others import it if it is there, so they are declared first,
here, where processes that a test starts come by too.

Without a GPU, Triton interprets its kernels if it is told so before it is imported.
"""

import importlib
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

_DECLARED = torch.library.Library("torchvision", "FRAGMENT")

try:
    importlib.import_module("torchvision")
except ModuleNotFoundError:
    pass
except RuntimeError:
    for _name in ("nms", "qnms"):
        _DECLARED.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")
