"""What tests of training share."""

import importlib

import pytest
import torch


@pytest.fixture(scope="session")
def torchvision_operators():
    """Makes torchvision importable beside a torch that it was not built for.

    Two operators of detection, which no model here uses, are then missing, and torchvision only needs them
    to be declared.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pytest.skip("torchvision is not installed")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
        yield library
    else:
        yield None
