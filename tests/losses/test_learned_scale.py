"""The loss with learned scale and offsets: what it computes, what it learns, and that it calibrates."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant import create_loss
from calibrant.calibrators import Temperature
from calibrant.losses import learned_scale


def drawn(size: int, classes: int, *, sharpness: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are ``sharpness`` times as sharp as the distribution of their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    return sharpness * logits, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


def test_is_cross_entropy_of_scaled_logits_plus_a_margin_penalty() -> None:
    loss = create_loss("ada-scale", 3, margin=2, weight=0.3)
    loss.scale.fill_(1.7)
    loss.offset.copy_(torch.tensor([0.5, -0.2, -0.3]))
    logits, target = drawn(9, 3)
    scaled = 1.7 * logits + loss.offset
    excess = (scaled.amax(1, keepdim=True) - scaled - 2).clamp_min(0)
    expected = F.cross_entropy(scaled, target) + 0.3 * excess.mean()
    torch.testing.assert_close(loss(logits, target), expected / 1.7)


def test_starts_as_cross_entropy() -> None:
    logits, target = drawn(9, 3)
    loss = create_loss("ada-scale", 3)
    torch.testing.assert_close(loss(logits, target), F.cross_entropy(logits, target))


def test_with_class_counts_it_starts_as_balanced_softmax() -> None:
    logits, target = drawn(9, 3)
    counts = torch.tensor([100.0, 10.0, 1.0], dtype=torch.float64)
    loss = create_loss("ada-scale", 3, class_counts=counts.tolist())
    torch.testing.assert_close(loss(logits, target), F.cross_entropy(logits + counts.log(), target))
    assert loss.offset.mean().abs() < 1e-12
    for same in (counts, counts.numpy(), counts.int()):
        assert torch.equal(create_loss("ada-scale", 3, class_counts=same).offset, loss.offset)


@pytest.mark.parametrize("sharpness", [0.8, 0.9, 1.0, 1.1, 1.25])
def test_the_step_is_that_of_the_best_temperature(sharpness: float) -> None:
    logits, target = drawn(4000, 5, sharpness=sharpness)
    loss = create_loss("ada-scale", 5, rate=1, lead=0, evidence=0)
    loss.observe(logits, target)
    loss.adapt()
    best = math.log(Temperature().fit(logits, target).temperature)
    assert float(loss.log_scale) == pytest.approx(best, abs=0.15 * abs(best) + 0.005)
    assert float(loss.scale) == pytest.approx(math.exp(loss.log_scale))


def test_a_class_that_is_predicted_too_often_gets_a_higher_offset() -> None:
    logits, target = drawn(4000, 4)
    logits[:, 2] += 1
    loss = create_loss("ada-scale", 4)
    loss.observe(logits, target)
    loss.adapt()
    assert loss.offset.argmax() == 2
    assert loss.offset[2] > 0.1
    assert loss.offset.mean().abs() < 1e-12
    fixed = create_loss("ada-scale", 4, offset="none")
    fixed.observe(logits, target)
    fixed.adapt()
    assert torch.equal(fixed.offset, torch.zeros(4, dtype=torch.float64))


def test_noise_moves_nothing() -> None:
    """Of calibrated predictions, a third exceed one standard error, and a twentieth two."""
    moved = {0.0: 0, 1.0: 0, 2.0: 0, 4.0: 0}
    for seed in range(60):
        logits, target = drawn(200, 3, seed=seed)
        for evidence in moved:
            loss = create_loss("ada-scale", 3, evidence=evidence)
            loss.observe(logits, target)
            loss.adapt()
            moved[evidence] += int(loss.scale != 1)
    assert moved[0.0] == 60
    assert 8 <= moved[1.0] <= 35
    assert moved[2.0] <= 9
    assert moved[4.0] == 0


def test_the_lead_lasts_until_the_next_pass() -> None:
    loss = create_loss("ada-scale", 3, rate=0.5, lead=2)
    loss.observe(*drawn(4000, 3, sharpness=1.3))
    loss.adapt()
    assert float(loss.scale.log()) == pytest.approx(5 * float(loss.log_scale))
    assert loss.gain == 1
    settled = float(loss.log_scale)
    loss = create_loss("ada-scale", 3, rate=0.5, lead=2, evidence=50)
    loss.log_scale.fill_(settled)
    loss.observe(*drawn(4000, 3))  # nothing to correct
    loss.adapt()
    assert float(loss.scale) == pytest.approx(math.exp(settled))


def temperatures(passes: int, speed: float) -> list[float]:
    """Log-temperatures of a network that goes a fraction of its way to the scale between two passes."""
    logits, target = drawn(4000, 5)
    loss = create_loss("ada-scale", 5, offset="none")
    sharpness, found = 0.5, []
    for _ in range(passes):
        loss.observe(math.exp(sharpness) * logits, target)
        loss.adapt()
        found.append(sharpness)
        sharpness += speed * (0.5 - float(loss.scale.log()) - sharpness)
    return found


def test_a_network_that_follows_at_once_does_not_swing() -> None:
    found = temperatures(30, speed=1)
    assert max(abs(each) for each in found[10:]) < 0.05
    assert max(found[10:]) - min(found[10:]) < 0.01


def test_a_network_that_hardly_follows_is_pulled_harder(monkeypatch: pytest.MonkeyPatch) -> None:
    found = temperatures(8, speed=0.05)
    monkeypatch.setattr(learned_scale, "_PATIENCE", 1)
    assert abs(found[-1]) < 0.05 < 0.1 < temperatures(8, speed=0.05)[-1]


def test_certain_predictions_move_the_scale_by_the_largest_step_at_most() -> None:
    for logits in (torch.tensor([[1e30, 0.0]] * 4), torch.tensor([[1e4, 0.0]] * 4)):
        loss = create_loss("ada-scale", 2, lead=0)
        loss.observe(logits, torch.tensor([0, 1, 1, 1]))
        loss.adapt()
        assert float(loss.log_scale) == pytest.approx(0.25)
        loss.observe(logits, torch.tensor([0, 0, 0, 0]))  # nothing wrong, nothing to learn
        loss.adapt()
        assert float(loss.log_scale) == pytest.approx(0.25)


def test_scale_and_offsets_stay_in_their_ranges() -> None:
    assert create_loss("ada-scale", 2, scale_range=(2, 5)).scale == 2
    loss = create_loss("ada-scale", 2, rate=5, lead=5, evidence=0, scale_range=(0.5, 2))
    for _ in range(30):
        loss.observe(torch.tensor([[9.0, 0.0]] * 100), torch.ones(100, dtype=torch.int64))
        loss.adapt()
    assert float(loss.scale) == 2
    assert float(loss.offset.abs().max()) == 10


def test_a_scale_at_its_bound_is_told() -> None:
    loss = create_loss("ada-scale", 2, scale_range=(0.5, 2))
    for number in range(12):
        assert loss.advice() is None, number
        loss.observe(torch.tensor([[9.0, 0.0]] * 100), torch.tensor([0, 1] * 50))
        if number < 9 or loss.advice() is None:
            loss.adapt()
        if loss.advice() is not None:
            break
    assert "the scale is at a bound of scale_range=(0.5, 2)" in str(loss.advice())
    assert int(loss.passes) == 10


def test_probability_targets_are_observed() -> None:
    logits, target = drawn(50, 3, sharpness=2)
    hard, soft = (create_loss("ada-scale", 3, evidence=0) for _ in range(2))
    hard.observe(logits, target)
    soft.observe(logits, F.one_hot(target, 3).double())
    for mine, other in zip(hard.adapt().tensors(), soft.adapt().tensors(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_network_that_memorises_ends_calibrated() -> None:
    """Half of the labels are noise: with cross-entropy, the network is sure of every one of them.

    Without the division by the scale, training is unstable at this learning rate.
    """

    def data(size: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(size, 20, generator=generator)
        noise = torch.randint(4, (size,), generator=generator)
        keep = torch.rand(size, generator=generator) < 0.5
        return inputs, torch.where(keep, inputs[:, :4].argmax(1), noise)

    (inputs, labels), (other, truth), (new, expected) = data(300, 0), data(300, 1), data(2000, 2)
    temperatures = {}
    for key, epochs in (("ce", 40), ("ada-scale", 200)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
        loss = create_loss(key, 4)
        for _ in range(epochs):
            for part in torch.randperm(300).split(100):
                optimizer.zero_grad()
                loss(model(inputs[part]), labels[part]).backward()
                optimizer.step()
            loss.observe(model(other).detach(), truth)
            loss.adapt()
        temperatures[key] = float(Temperature().fit(model(new).detach(), expected).temperature)
    assert temperatures["ce"] > 3
    assert 0.75 < temperatures["ada-scale"] < 1.4, temperatures


def test_a_large_offset_is_told():
    loss = create_loss("ada-scale", 4)
    loss.passes.fill_(20)
    loss.offset.copy_(torch.tensor([-1.6, -1.6, -1.6, 4.8]))
    assert loss.advice() is None
    loss.offset.copy_(torch.tensor([-2.7, -2.7, -2.7, 8.1]))
    assert "an offset has grown to 8.1 (bound 10): the network does not follow it. Try offset='none'" in str(
        loss.advice()
    )
