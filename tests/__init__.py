"""Tests mirror the package.

Without a GPU, Triton interprets its kernels if it is told so before it is imported. Programs that tests start
import this package too.

Lightning searches all installed packages for plugins whenever a run starts, which takes a tenth of the time
of a short run. Here they are searched once.
"""

import importlib.metadata
import os
from functools import cache

import torch

importlib.metadata.entry_points = cache(importlib.metadata.entry_points)

# Ask for a GPU without starting CUDA, which forks of the process that asked could then not use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
