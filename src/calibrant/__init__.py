"""Neural classifiers whose confidence means what it says."""

from calibrant.evaluation import Evaluation, Evaluator, evaluate, evaluate_on
from calibrant.losses import LOSSES, adapt_on, create_loss

__all__ = ["LOSSES", "Evaluation", "Evaluator", "adapt_on", "create_loss", "evaluate", "evaluate_on"]
__version__ = "0.1.0"
