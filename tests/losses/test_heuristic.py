"""CALS-HR: the rule by which multipliers follow their penalty."""

import torch

from calibrant import create_loss


def multipliers_after(*excesses: float, **arguments: object) -> list[float]:
    """λ of class 1 after each pass, when it lies ``margin + excess`` below class 0."""
    loss = create_loss("cals-hr", 2, margin=4, **arguments)
    found = []
    for excess in excesses:
        loss.observe(torch.tensor([[4 + excess, 0.0]], dtype=torch.float64), torch.tensor([0]))
        loss.adapt()
        found.append(round(loss.multiplier[1].item(), 12))
    return found


def test_follows_the_penalty() -> None:
    assert multipliers_after(1, 1, 2, 2, 1, 0.2) == [0.1, 0.1, 0.11, 0.11, 0.1, round(0.1 / 1.1, 12)]


def test_rounding_does_not_decide() -> None:
    # After the raise on pass 2 the raw penalty stays: c grows by exactly the factor, which is no change.
    for start in (0.1, 0.3, 0.7, 1 / 3):
        for value in (0.1, 0.37, 1 / 3, 2.9):
            found = multipliers_after(value, 2 * value, 2 * value, 2 * value, initial_multiplier=start)
            assert found[1] == found[2] == found[3] > found[0]


def test_growth_and_threshold_are_two_numbers() -> None:
    excesses = (1, 1.2, 1.4, 1.0)  # grows by 1.2 and 1.167, then falls by 1.4
    assert multipliers_after(*excesses, factor=2, threshold=1.19) == [0.1, 0.2, 0.4, 0.8]  # λ feeds itself
    assert multipliers_after(*excesses, factor=1.5, threshold=3) == [0.1] * 4
    assert multipliers_after(1, 4, 2, 0.5, factor=1.5, threshold=3) == [0.1, 0.15, 0.15, 0.1]
    for default in ({}, {"factor": 1.3}):
        same = {"threshold": default.get("factor", 1.1)}
        found = multipliers_after(*excesses, 3, 0.5, 0.4, **default)
        assert found == multipliers_after(*excesses, 3, 0.5, 0.4, **default, **same)


def test_from_and_to_nothing() -> None:
    assert multipliers_after(0, 1, 0, 0) == [0.1, 0.11, 0.1, 0.1]


def test_range() -> None:
    assert multipliers_after(1, 2, 4, 8, multiplier_range=(0.05, 0.12)) == [0.1, 0.11, 0.12, 0.12]


def test_slope_at_the_margin_is_zero() -> None:
    for key in ("cals-hr", "mbls"):
        logits = torch.tensor([[9.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
        loss = create_loss(key, 3, margin=8)
        plain = create_loss("ce", 3)
        (ours,) = torch.autograd.grad(loss(logits, torch.tensor([0])), logits)
        (theirs,) = torch.autograd.grad(plain(logits, torch.tensor([0])), logits)
        torch.testing.assert_close(ours, theirs)
