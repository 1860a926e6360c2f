"""Imports what programs and processes of tests need, once, in the server that forks all of them.

A package that warns is left to the test that needs it: there pytest says which warnings are errors.
"""

import atexit
import gc
import warnings
from contextlib import suppress
from importlib import import_module

PACKAGES = (
    "accelerate",
    "calibrant.cli",
    "calibrant.reports.comparison_page",
    "calibrant.reports.plots",
    "calibrant.training.grid",
    "hypothesis",
    "lightning.pytorch",
    "matplotlib.pyplot",
    "pydantic.main",
    "pytest",
    "sklearn.datasets",
    "timm.data",
    "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
    "transformers.trainer",
)

gc.disable()  # while modules are imported, nearly all that a search for garbage finds is in use
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for package in PACKAGES:
        with suppress(ImportError, Warning):  # most are extras
            import_module(package)
gc.freeze()  # a fork need not search what was imported for garbage, which would copy all of it
gc.enable()
atexit.register(gc.unfreeze)  # or else some packages report leaks when the server ends
