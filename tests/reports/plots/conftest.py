import matplotlib

matplotlib.use("Agg")  # tests open no windows

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


@pytest.fixture
def ax():
    return Figure(figsize=(3.4, 3)).subplots()
