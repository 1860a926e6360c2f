"""Neural classifiers whose confidence means what it says."""

from calibrant.losses import LOSSES, adapt_on, create_loss

__all__ = ["LOSSES", "adapt_on", "create_loss"]
__version__ = "0.1.0"
