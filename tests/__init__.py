"""Tests mirror the package.

Without a GPU, Triton interprets its kernels if it is told so before it is imported. Programs that tests start
import this package too.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
