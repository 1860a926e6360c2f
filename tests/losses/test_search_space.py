"""The ranges in which `calibrant tune` searches hyper-parameters."""

from itertools import product

import pytest
import torch

from calibrant import LOSSES, create_loss


def test_losses_without_ranges_have_no_hyperparameters():
    assert [key for key, loss in LOSSES.items() if not loss.search_space] == ["ce", "brier"]


@pytest.mark.parametrize("key", [key for key, loss in LOSSES.items() if loss.search_space])
def test_a_loss_accepts_both_ends_of_its_ranges_and_its_defaults_lie_between(key):
    space, known = LOSSES[key].search_space, LOSSES[key].hyperparameters()
    names = [each.name for each in space]
    assert len(set(names)) == len(names)
    assert set(names) <= known.keys()
    for each in space:
        assert each.low < each.high
        assert each.low > 0 or not each.log
        assert each.low <= known[each.name].default <= each.high
        # Values are rounded to three digits, which must not lead out of the range.
        assert [float(f"{end:.3g}") for end in (each.low, each.high)] == [each.low, each.high]
    logits = torch.tensor([[4.0, 1.0, -2.0], [0.5, 3.0, 0.0], [6.0, 0.0, 5.0]])
    for ends in product(*((each.low, each.high) for each in space)):
        loss = create_loss(key, 3, **dict(zip(names, ends, strict=True)))
        assert loss(logits, torch.tensor([0, 2, 2])).isfinite()
