"""Losses of single logits: yes-or-no decisions, one for each element or for each of several labels."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant import LOSSES, adapt_on, create_loss
from calibrant.losses import AdaptiveLoss, Loss

from .conftest import SOFT

BINARY = [key for key, loss in LOSSES.items() if loss.accepts_binary]
OVER_BATCH = [key for key in BINARY if LOSSES[key].over_batch is not Loss.over_batch]
DOCUMENT = Path(__file__).parents[2] / "docs" / "binary.md"


def decisions(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits, torch.randint(2, shape, generator=generator)


@pytest.mark.parametrize("key", BINARY)
def test_the_loss_is_that_of_the_pair(key: str) -> None:
    logits, target = decisions(12)
    single, double = create_loss(key, 2, binary=True), create_loss(key, 2)
    for loss, given in ((single, logits), (double, torch.stack([0 * logits, logits], 1))):
        loss.observe(given, target)
        loss.adapt()
    expected = double(torch.stack([torch.zeros(12, dtype=torch.float64), logits], 1), target)
    torch.testing.assert_close(single(logits, target), expected)
    torch.testing.assert_close(single(logits.unsqueeze(1), target.unsqueeze(1)), expected)
    torch.testing.assert_close(single(logits.unsqueeze(1), target), expected)
    slopes = [
        torch.func.grad(lambda x, loss=loss: loss(x, target))(given)
        for loss, given in ((single, logits), (double, torch.stack([0 * logits, logits], 1)))
    ]
    torch.testing.assert_close(slopes[0], slopes[1][:, 1])


@pytest.mark.parametrize("key", BINARY)
def test_the_loss_does_not_depend_on_which_logit_of_the_pair_is_zero(key: str) -> None:
    """Otherwise a single logit would mean something else than two."""
    logits, target = decisions(12)
    loss = create_loss(key, 2)
    pairs = torch.stack([torch.zeros_like(logits), logits], 1)
    torch.testing.assert_close(loss(pairs, target), loss(pairs - 3, target))


@pytest.mark.parametrize("weight", [None, [1.0, 3.0]])
def test_cross_entropy_is_that_of_torch(weight: list[float] | None) -> None:
    logits, target = decisions(9, 4)
    loss = create_loss("ce", 2, binary=True, class_weight=weight, reduction="none")
    factor = None if weight is None else torch.tensor(3.0, dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(
        logits, target.double(), pos_weight=factor, reduction="none"
    )
    torch.testing.assert_close(loss(logits, target), expected)
    torch.testing.assert_close(loss(logits, target.double()), expected)
    torch.testing.assert_close(loss(logits, target.bool()), expected)


@pytest.mark.parametrize("key", SOFT)
def test_probabilities_of_yes(key: str) -> None:
    logits, target = decisions(8, 3)
    loss = create_loss(key, 2, binary=True)
    torch.testing.assert_close(loss(logits, target.double()), loss(logits, target))


@pytest.mark.parametrize("key", [key for key in BINARY if key not in OVER_BATCH])
def test_labels_count_alike(key: str) -> None:
    logits, target = decisions(8, 3)
    loss = create_loss(key, 2, binary=True)
    assert loss.takes_several_labels
    each = torch.stack([loss(logits[:, i], target[:, i]) for i in range(3)])
    torch.testing.assert_close(loss(logits, target), each.mean())
    target[2, 1] = -100
    elementwise = create_loss(key, 2, binary=True, reduction="none")(logits, target)
    assert elementwise.shape == (8, 3)
    assert elementwise[2, 1] == 0


@pytest.mark.parametrize("key", OVER_BATCH)
def test_losses_over_a_batch_take_one_label_only(key: str) -> None:
    loss = create_loss(key, 2, binary=True)
    assert not loss.takes_several_labels
    with pytest.raises(ValueError, match=r"no meaning across labels: logits of shape \(8, 3\) have 3 labels"):
        loss(*decisions(8, 3))
    assert loss(*decisions(8, 1)).isfinite()


@pytest.mark.parametrize("key", sorted(set(LOSSES) - set(BINARY)))
def test_losses_that_take_no_single_logits(key: str) -> None:
    with pytest.raises(ValueError, match=r"takes no binary=True: pass logits \(0, l\)"):
        create_loss(key, 2, binary=True)
    assert not create_loss(key, 2).takes_several_labels


def test_nacl_looks_at_neighbouring_pixels_not_labels() -> None:
    assert "nacl" not in BINARY


def test_the_page_lists_the_losses_with_limits() -> None:
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for keys, limit in ((OVER_BATCH, "one label only"), (set(LOSSES) - set(BINARY), "no `binary=True`")):
        (listed,) = re.findall(rf"\(([^()]+)\) take {limit}", text)
        assert set(re.findall(r"`([^`]+)`", listed)) == set(keys)


def test_the_argument_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="binary must be True or False, got 'no'"):
        create_loss("ce", 2, binary="no")


@pytest.mark.parametrize("bad", [5.0, -3.0, -100.0])
def test_probabilities_of_yes_lie_between_0_and_1(bad: float) -> None:
    logits, target = decisions(6)
    target = target.double()
    target[2] = bad
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got values from .* with ignore_index"):
        create_loss("ce", 2, binary=True)(logits, target)


def test_channels_of_images() -> None:
    logits, target = decisions(2, 1, 4, 5)
    loss = create_loss("focal", 2, binary=True)
    torch.testing.assert_close(loss(logits, target.squeeze(1)), loss(logits.flatten(), target.flatten()))


def test_a_model_with_one_logit_is_trained_and_adapted() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 2, generator=generator)
    target = (inputs[:, 0] > 0).float()
    model = nn.Linear(2, 1)
    loss = create_loss("cals-hr", 2, binary=True, margin=1.0)
    assert isinstance(loss, AdaptiveLoss)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(30):
        optimizer.zero_grad()
        loss(model(inputs), target.long()).backward()
        optimizer.step()
    adapt_on(loss, model, [(inputs, target.long())])
    assert loss.passes == 1
    assert ((model(inputs).squeeze(1) > 0) == target.bool()).float().mean() > 0.95


def test_a_binary_loss_has_two_classes() -> None:
    with pytest.raises(ValueError, match="num_classes must be 2 with binary=True"):
        create_loss("ce", 5, binary=True)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_single_logits_need_the_argument(key: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="pass binary=True"):
        create_loss(key, 2)(*decisions(*shape))


def test_targets_of_another_shape_are_refused() -> None:
    logits, _ = decisions(6, 3)
    with pytest.raises(ValueError, match=r"target must have the logits' shape \(6, 3\), got \(6,\); if each"):
        create_loss("ce", 2, binary=True)(logits, torch.zeros(6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"labels from 0 to 2"):
        create_loss("ce", 2, binary=True)(logits, torch.arange(18).reshape(6, 3) % 3)


def test_probabilities_are_refused_where_they_have_no_meaning() -> None:
    (hard,) = sorted(set(LOSSES) - set(SOFT))[:1]
    logits, target = decisions(6)
    with pytest.raises(TypeError, match=r"integers 0 and 1, got torch.float64: pass target.long\(\)"):
        create_loss(hard, 2, binary=True)(logits, target.double())


@pytest.mark.parametrize("key", SOFT)
def test_several_labels_are_not_probabilities(key: str) -> None:
    logits, _ = decisions(4, 3)
    target = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0]], dtype=torch.float64)
    with pytest.raises(
        ValueError, match="must add up to 1 over the classes, got sums from 0 to 2; if each logit"
    ):
        create_loss(key, 3)(logits, target)
    with pytest.raises(ValueError, match="pass binary=True"):
        create_loss(key, 3)(logits, target.long())


def test_one_class_is_told_how_single_logits_are_passed() -> None:
    with pytest.raises(ValueError, match="got 1; for single logits pass 2 and binary=True"):
        create_loss("focal", 1, binary=True)
