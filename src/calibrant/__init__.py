"""Train, calibrate and evaluate PyTorch classifiers, so that their confidence matches their accuracy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from calibrant.lazy import on_demand as _on_demand

if TYPE_CHECKING:
    import torch

    from calibrant import calibrators as calibrators
    from calibrant import conformal as conformal
    from calibrant import evaluation as evaluation
    from calibrant import integrations as integrations
    from calibrant import losses as losses
    from calibrant import metrics as metrics
    from calibrant import predictions as predictions
    from calibrant import reports as reports
    from calibrant import training as training
    from calibrant.evaluation import Evaluation, Evaluator, evaluate, evaluate_on
    from calibrant.losses import LOSSES, adapt_on, create_loss
    from calibrant.training.bundle import Bundle

__all__ = ["LOSSES", "Evaluation", "Evaluator", "adapt_on", "create_loss", "evaluate", "evaluate_on", "load"]
__version__ = "0.1.0"

# On demand: `calibrant --help` answers without torch, and a loss needs nothing of training or reports.
if not TYPE_CHECKING:  # type checkers would take every misspelled name for an attribute
    __getattr__, __dir__ = _on_demand(
        __name__,
        __path__,
        {
            "LOSSES": "calibrant.losses",
            "adapt_on": "calibrant.losses",
            "create_loss": "calibrant.losses",
            "Evaluation": "calibrant.evaluation",
            "Evaluator": "calibrant.evaluation",
            "evaluate": "calibrant.evaluation",
            "evaluate_on": "calibrant.evaluation",
        },
    )


def load(path: str | os.PathLike[str], *, device: str | torch.device | None = None) -> Bundle:
    """Load a trained model with its calibrator, for predictions on new raw inputs.

    ``calibrant.load("runs/a").predict_proba(inputs)`` are calibrated probabilities of new images, numbers,
    rows or texts. Nothing of the data set is needed.

    Args:
        path: the folder of a run that `calibrant train` wrote, or its folder ``bundle``, which may have been
            moved elsewhere.
        device: where to predict; by default the GPU if there is one.

    Raises:
        ValueError: there is no bundle, or it is damaged; or the model cannot be built.
        ImportError: a package of training, or that of the model, is not installed.
    """
    from calibrant.training.bundle import load_bundle  # not above: it imports all that training needs

    return load_bundle(path, device=device)
