"""calibrant inside other libraries: one module each, importing the library it is named after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrant.lazy import on_demand

if TYPE_CHECKING:
    from calibrant.integrations import accelerate as accelerate
    from calibrant.integrations import lightning as lightning
    from calibrant.integrations import sklearn as sklearn
    from calibrant.integrations import torchmetrics as torchmetrics
    from calibrant.integrations import transformers as transformers
else:
    __getattr__, __dir__ = on_demand(__name__, __path__)
