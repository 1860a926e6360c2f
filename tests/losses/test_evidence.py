"""The option `evidence`: only what a gap exceeds its standard errors by moves the state."""

import math

import pytest
import torch
from torch import Tensor

from calibrant import create_loss
from calibrant.losses import AdaptiveLoss

from .conftest import ADAPTIVE

WITH_EVIDENCE = [key for key in ADAPTIVE if create_loss(key, 2).options().get("evidence") == 0]
"""The losses of papers, which do not have the option. (`ada-scale` has its own tests.)"""


def adaptive(key: str, num_classes: int, **options: object) -> AdaptiveLoss:
    loss = create_loss(key, num_classes, **options)
    assert isinstance(loss, AdaptiveLoss)
    return loss


def validation(size: int, seed: int = 0, classes: int = 5, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (size,), generator=generator)


def one_bin(right: int, wrong: int, confidence: float) -> tuple[Tensor, Tensor]:
    """Elements of one confidence, two classes."""
    logit = math.log(confidence / (1 - confidence))
    logits = torch.tensor([[logit, 0.0]], dtype=torch.float64).expand(right + wrong, 2)
    return logits, torch.tensor([0] * right + [1] * wrong)


def test_losses_with_the_option() -> None:
    assert WITH_EVIDENCE == ["cals-alm", "cals-hr", "adafocal", "ada-dual-focal", "calfocal"]
    for key in WITH_EVIDENCE:
        assert create_loss(key, 2).evidence == 0
        with pytest.raises(ValueError, match="evidence must lie in"):
            create_loss(key, 2, evidence=-1)


@pytest.mark.parametrize("key", ["adafocal", "ada-dual-focal"])
@pytest.mark.parametrize(("right", "wrong"), [(14, 0), (13, 1), (7, 7), (0, 14)])
def test_exponents_move_by_the_excess(key: str, right: int, wrong: int) -> None:
    loss = adaptive(key, 2, bins=1, evidence=1.5)
    loss.observe(*one_bin(right, wrong, 0.9))
    loss.adapt()
    count = right + wrong
    gap, shrunk = 0.9 - right / count, (right + 0.5) / (count + 1)
    error = math.sqrt(shrunk * (1 - shrunk) / (count + 2))
    excess = math.copysign(max(0.0, abs(gap) - 1.5 * error), gap)
    assert loss.gamma.item() == pytest.approx(math.exp(excess), rel=1e-9)
    assert (loss.gamma == 1) == (right == 13)


def test_few_elements_that_are_all_right_do_not_move_gamma() -> None:
    loss = adaptive("adafocal", 2, bins=1, evidence=1)
    loss.observe(*one_bin(3, 0, 0.9))
    loss.adapt()
    assert loss.gamma == 1
    loss.observe(*one_bin(300, 0, 0.9))  # the same gap, with a hundred times the evidence
    loss.adapt()
    assert loss.gamma < 0.95


def test_calfocal_takes_what_exceeds_the_error_for_the_gap() -> None:
    for per in ("bin", "sample"):
        loss = adaptive("calfocal", 2, bins=1, rate=3, per=per, evidence=1, reduction="none")
        loss.observe(*one_bin(9, 1, 0.9))
        loss.adapt()
        assert loss.gamma.item() == pytest.approx(1, rel=1e-9)  # no gap at all
        assert loss.accuracy.item() == pytest.approx(0.9, rel=1e-9)
        loss.observe(*one_bin(0, 10, 0.9))
        loss.adapt()
        shrunk = 0.5 / 11
        excess = 0.9 - math.sqrt(shrunk * (1 - shrunk) / 12)
        assert loss.gamma.item() == pytest.approx(math.exp(3 * excess), rel=1e-9)
        assert loss.accuracy.item() == pytest.approx(0.9 - excess, rel=1e-9)


@pytest.mark.parametrize("per", ["class", "all"])
@pytest.mark.parametrize("penalty", ["phr", "p2", "p3"])
def test_multipliers_move_by_the_excess(penalty: str, per: str) -> None:
    options = {"margin": 3, "penalty": penalty, "per": per, "initial_multiplier": 0.3}
    loss, plain = (adaptive("cals-alm", 5, evidence=evidence, **options) for evidence in (2, 0))
    logits, target = validation(30)
    moved = 0
    for number in range(3):
        before = loss.multiplier.clone()
        plain.multiplier.copy_(before)
        for each in (loss, plain):
            each.observe(logits + 0.1 * number, target)
            each.adapt()
        # One element after the other gives the values whose mean the paper's rule takes.
        single = []
        for row in logits:
            one = adaptive("cals-alm", 5, multiplier_range=(0, 1e6), **options)
            one.multiplier.copy_(before)
            one.observe(row[None] + 0.1 * number, target[:1])
            single.append(one.adapt().slope)
        error = torch.stack(single).std(0) / math.sqrt(30)
        error = error if per == "class" else error.mean()
        gap = plain.multiplier - before
        expected = before + gap.sign() * (gap.abs() - 2 * error).clamp_min(0)
        torch.testing.assert_close(loss.multiplier, expected, rtol=1e-9, atol=0)
        moved += int((loss.multiplier != before).sum())
    assert moved


def test_penalty_weights_grow_on_evidence_only() -> None:
    noisy = torch.tensor([[1.4, 0.0], [0.8, 0.0]], dtype=torch.float64)  # violations 0.4 and -0.2: error 0.3
    steady = torch.tensor([[1.11, 0.0], [1.09, 0.0]], dtype=torch.float64)  # the same mean, error 0.01
    for logits, grown in ((noisy, 1.0), (steady, 1.2)):
        loss = adaptive("cals-alm", 2, margin=1, every=1, evidence=1, required_decrease=0)
        for _ in range(2):
            loss.observe(logits, torch.tensor([0, 0]))
            loss.adapt()
        assert loss.penalty_weight[1].item() == grown


def test_the_heuristic_rule_waits_for_evidence() -> None:
    def multiplier_after(evidence: float, *passes: list[float]) -> float:
        loss = adaptive("cals-hr", 2, margin=4, evidence=evidence)
        for excesses in passes:
            logits = torch.tensor([[4 + excess, 0.0] for excess in excesses], dtype=torch.float64)
            loss.observe(logits, torch.zeros(len(excesses), dtype=torch.long))
            loss.adapt()
        return round(loss.multiplier[1].item(), 12)

    # From 1 to 1.5 on average: by 0.5, with a standard error of 0.5, or of 0.1.
    assert multiplier_after(0, [1, 1], [1, 2]) == 0.11
    assert multiplier_after(1, [1, 1], [1, 2]) == 0.1
    assert multiplier_after(1, [1, 1], [1.4, 1.6]) == 0.11
    assert multiplier_after(1, [2, 2], [1, 2]) == 0.1
    assert multiplier_after(1, [2, 2], [1.4, 1.6]) == round(0.1 / 1.1, 12)


@pytest.mark.parametrize("key", WITH_EVIDENCE)
def test_a_single_element_is_no_evidence(key: str) -> None:
    options = {"margin": 1} if key.startswith("cals") else {"bins": 1}
    loss = adaptive(key, 2, evidence=4, **options)
    before = {name: value.clone() for name, value in loss.learned().items()}
    for _ in range(2):
        loss.observe(torch.tensor([[9.0, 0.0]]), torch.tensor([1]))
        loss.adapt()
    for name, value in loss.learned().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("key", WITH_EVIDENCE)
@pytest.mark.parametrize("evidence", [0.0, 1.0])
def test_batches_do_not_matter(key: str, evidence: float) -> None:
    whole, parts = (adaptive(key, 5, evidence=evidence) for _ in range(2))
    for number in range(4):
        logits, target = validation(60, number, scale=8)
        target[7] = -100
        whole.observe(logits, target)
        for rows in torch.arange(60).split([7, 0, 30, 23]):
            parts.observe(logits[rows], target[rows])
        whole.adapt()
        parts.adapt()
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(parts.state_dict()[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("key", WITH_EVIDENCE)
def test_much_evidence_is_the_papers_rule(key: str) -> None:
    """With many elements the standard errors vanish."""
    options = {"margin": 3} if key.startswith("cals") else {"rate": 1}
    strict, plain = (adaptive(key, 5, evidence=evidence, **options) for evidence in (1, 0))
    for number in range(3):
        for loss in (strict, plain):
            loss.observe(*validation(20_000, number))
            loss.adapt()
    for name, value in plain.learned().items():
        torch.testing.assert_close(strict.learned()[name], value, rtol=0.1, atol=1e-6)
