"""Warnings that point to the user's own code."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

# Where a warning must not point to: the files of this package, and the wrappers of torch around them.
_NOT_CALLERS = tuple(f"{Path(path).parent}{os.sep}" for path in (__file__, torch.__file__))


class ProbabilitiesWarning(UserWarning):
    """Probabilities seem to stand in the place of logits."""


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn the user. The warning points to the line outside of this package that led to it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
