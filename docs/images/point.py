"""Draws point.png, the picture at the top of README.md, and prints the table of its training loop."""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

import calibrant
from calibrant.reports import plots


def predictions(key):
    """Logits and labels of validation and test data, after the training loop of README.md with a loss."""
    torch.manual_seed(0)
    inputs = torch.randn(22_000, 20)
    labels = torch.multinomial((2 * inputs[:, :10]).softmax(1), 1).squeeze(1)
    train, validation, test = random_split(TensorDataset(inputs, labels), [1000, 1000, 20_000])
    model = torch.nn.Sequential(torch.nn.Linear(20, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = calibrant.create_loss(key, num_classes=10)
    for _ in range(40):
        for x, y in DataLoader(train, batch_size=100, shuffle=True):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        calibrant.adapt_on(loss, model, DataLoader(validation, batch_size=1000))
    with torch.no_grad():
        return [(model(inputs[part.indices]), labels[part.indices]) for part in (validation, test)]


validation, test = predictions("ce")
temperature = calibrant.calibrators.Temperature().fit(*validation)
shown = {
    "cross-entropy": test,
    "cross-entropy + temperature scaling": (temperature(test[0]), test[1]),
    "ada-scale": predictions("ada-scale")[1],
}
figure, axes = plt.subplots(1, 3, figsize=(13, 4.6))
for (title, (logits, labels)), ax in zip(shown.items(), axes, strict=True):
    found = calibrant.evaluate(logits, labels)
    print(title, {name: round(found.metrics[name], 4) for name in ("accuracy", "nll", "ece")})
    plots.reliability_diagram(
        found.reliability, ax, title=title, ece=found.metrics["ece"], legend=ax is axes[0]
    )
figure.savefig(Path(__file__).with_name("point.png"), dpi=110, bbox_inches="tight")
