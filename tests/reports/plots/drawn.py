"""Data for the plots, and functions that read a plot back."""

import numpy as np
import torch

from calibrant.evaluation import ClassFigures, Reliability
from calibrant.evaluation.comparison import MeanFigure
from calibrant.metrics import risk_coverage

NAN, INFINITY = float("nan"), float("inf")
PASSES = np.random.default_rng(0).normal(size=(20, 15))
LOGITS = {"ce": torch.randn(50, 10, generator=torch.Generator().manual_seed(0)) * 9, "ls": torch.eye(10)}
FIGURES = {
    "before": {"ce": MeanFigure(0.08, 0.01, (0.06, 0.1)), "$ls$": MeanFigure(0.04, None, None)},
    "after": {"ce": MeanFigure(0.03, 0.01, (0.01, 0.05))},
}
SENSITIVITY = {
    4: MeanFigure(0.04, 0.01, None),
    10: MeanFigure(0.02, 0.02, None),
    6: MeanFigure(0.01, 0.0, None),
}


def reliability(bins=4):
    """Over-confident by 0.1 everywhere; the first bin is empty."""
    edges = np.linspace(0, 1, bins + 1)
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()

    def but_first(values):
        return (None, *values[1:])

    return Reliability(
        edges=tuple(edges.tolist()),
        count=(0, *(10 * b for b in range(1, bins))),
        confidence=but_first(middle),
        accuracy=but_first([max(0.0, value - 0.1) for value in middle]),
        accuracy_interval=but_first([(value - 0.15, value - 0.08) for value in middle]),
        consistency=but_first([(value - 0.04, value + 0.05) for value in middle]),
    )


def classes(number):
    """Gaps 2 ‰ apart, half of them below 0, shuffled; each class is called after its gap in ‰."""
    gaps = (torch.randperm(number, generator=torch.Generator().manual_seed(0)) - number / 2 + 0.5) / 500
    return [
        ClassFigures(name=f"class {gap * 1000:g}", count=1, accuracy=1.0, iou=1.0, gap=gap, ece=0.1)
        for gap in gaps.tolist()
    ]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def bars(ax, label):
    """Left, bottom, width and height of the bars of that label."""
    (container,) = [container for container in ax.containers if container.get_label() == label]
    return np.array([(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()) for bar in container])


def line(ax, label):
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


def curve(size=500):
    """A risk-coverage curve of random predictions."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(size, 5, generator=generator)
    return risk_coverage(logits, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1))
