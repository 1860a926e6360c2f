"""The examples of plots open no windows, and leave no figures open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _close_figures(request: pytest.FixtureRequest) -> Iterator[None]:
    if ".plots." not in request.node.name and ".sklearn." not in request.node.name:
        yield
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield
    pyplot.close("all")
