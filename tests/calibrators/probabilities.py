"""Data and measures for the tests of calibrators of one probability at a time."""

import torch


def overconfident(samples, classes, *, sharpness=2.5, seed=0, dtype=torch.float64):
    """Logits that are too large by a known factor, and labels drawn from what the smaller logits say."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits * sharpness).to(dtype), target


def binary_logits(probability):
    """Logits whose softmax gives the second class these probabilities."""
    return torch.stack([torch.log1p(-probability), probability.log()], 1)


def second(logits):
    """The probability of the second class."""
    return logits.softmax(-1)[:, 1]
