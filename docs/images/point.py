"""Draws point.png, the picture at the top of README.md: its example with cross-entropy and with ada-scale.

The example has 20,000 instead of 2,000 test elements here.

    python docs/images/point.py
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import calibrant
from calibrant.reports import plots

PARTS = [1000, 1000, 20_000]

torch.manual_seed(0)
inputs = torch.randn(sum(PARTS), 20)
labels = torch.multinomial((2 * inputs[:, :10]).softmax(1), 1).squeeze(1)
train, validation, test = zip(inputs.split(PARTS), labels.split(PARTS), strict=True)
figure, axes = plt.subplots(1, 2, figsize=(9, 5))
for key, ax in zip(("ce", "ada-scale"), axes, strict=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = calibrant.create_loss(key, num_classes=10)
    for _ in range(40):
        for batch in torch.randperm(PARTS[0]).split(100):
            optimizer.zero_grad()
            loss(model(train[0][batch]), train[1][batch]).backward()
            optimizer.step()
        if key != "ce":
            calibrant.adapt_on(loss, model, [validation])
    found = calibrant.evaluate(model(test[0]).detach(), test[1])
    print(key, {name: round(found.metrics[name], 4) for name in ("accuracy", "nll", "ece")})
    title = "cross-entropy" if key == "ce" else "ada-scale"
    plots.reliability_diagram(
        found.reliability, ax, title=title, ece=found.metrics["ece"], legend=key == "ce"
    )
figure.savefig(Path(__file__).with_name("point.png"), dpi=110, bbox_inches="tight")
