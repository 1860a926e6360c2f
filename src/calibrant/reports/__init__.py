"""Tables, plots and HTML pages of evaluations and comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrant.lazy import on_demand

if TYPE_CHECKING:
    from calibrant.reports import page as page
    from calibrant.reports import plots as plots
else:
    __getattr__, __dir__ = on_demand(__name__, __path__)
