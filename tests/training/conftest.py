"""Fixtures of the training tests."""

import pytest

from calibrant.training import loop


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Losses and seeds of the runs that were trained and not only found."""
    found: list[tuple[str, int]] = []
    plain = loop.Loop.run

    def noting(training: loop.Loop) -> None:
        found.append((training.parts.recipe.loss, training.parts.recipe.seed))
        plain(training)

    monkeypatch.setattr(loop.Loop, "run", noting)
    return found
