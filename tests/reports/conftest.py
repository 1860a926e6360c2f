import pytest
from matplotlib.figure import Figure


@pytest.fixture
def blank_diagrams(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reliability diagrams in a comparison, for tests that only ask which pictures there are."""
    monkeypatch.setattr("calibrant.reports.comparison_page._diagrams", lambda _: Figure())
