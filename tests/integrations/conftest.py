import gc

import pytest


@pytest.fixture(autouse=True)
def _no_search_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers search all of memory for garbage in each run, which late in a session takes most of its time.

    What Python collects by itself is collected all the same.
    """
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
