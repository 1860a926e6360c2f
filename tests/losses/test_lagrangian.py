"""CALS-ALM: the rules of its state, and convergence to Lagrange multipliers that are known."""

import math

import pytest
import torch
from torch import Tensor

from calibrant import create_loss
from calibrant.losses import PENALTIES, AugmentedLagrangian


def lagrangian(num_classes: int, **arguments: object) -> AugmentedLagrangian:
    loss = create_loss("cals-alm", num_classes, **arguments)
    assert isinstance(loss, AugmentedLagrangian)
    return loss


def one_pass(loss: AugmentedLagrangian, distance: float) -> None:
    """A pass in which class 1 of two lies that far below class 0."""
    loss.observe(torch.tensor([[distance, 0.0]], dtype=torch.float64), torch.tensor([0]))
    loss.adapt()


def test_penalty_weight_grows_where_the_violation_does_not_fall() -> None:
    loss = lagrangian(2, margin=1, every=3, growth=2, penalty_weight_max=5)
    weights = []
    for distance in (3, 3, 3, 3, 3, 1.5, 3, 3, 3, 3, 3, 3):
        one_pass(loss, distance)
        weights.append(loss.penalty_weight[1].item())
    # Looked at on passes 3, 6, 9 and 12: stuck, fallen, stuck, stuck; and never above 5.
    assert weights == [1, 1, 2, 2, 2, 2, 2, 2, 4, 4, 4, 5]
    assert loss.penalty_weight[0] == 1  # its violation is -1, below 0.9·max(0, -1) = 0


def test_a_constraint_that_holds_never_grows() -> None:
    loss = lagrangian(3, margin=10, every=1)
    for distance in (0.0, 5.0, 8.0):  # violations -1, -0.5 and -0.2: rising, but none above 0
        loss.observe(torch.tensor([[distance, 0.0, 0.0]], dtype=torch.float64), torch.tensor([0]))
        loss.adapt()
    assert (loss.penalty_weight == 1).all()


def test_the_first_pass_never_grows() -> None:
    loss = lagrangian(2, margin=1, every=1)
    one_pass(loss, 3)
    assert loss.penalty_weight[1] == 1
    one_pass(loss, 3)
    assert loss.penalty_weight[1] == pytest.approx(1.2)


def test_no_bound_on_the_penalty_weight() -> None:
    loss = lagrangian(2, margin=1, every=1, growth=100, penalty_weight_max=None)
    for _ in range(3):
        one_pass(loss, 3)
    assert loss.penalty_weight[1] == 1e4


def test_multipliers_stay_in_their_range() -> None:
    loss = lagrangian(2, margin=1, multiplier_range=(0.5, 2.0), initial_multiplier=1.0)
    one_pass(loss, 100)
    assert loss.multiplier.tolist() == [0.5, 2.0]


@pytest.mark.parametrize("penalty", ["phr", "p2", "p3"])
def test_slopes_are_clipped_after_or_before_the_mean(penalty: str) -> None:
    """After it by default, as in the paper; before it with ``clip="each"``, as in the released code."""
    low, high = 0.5, 2.0
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 4, generator=generator, dtype=torch.float64)
    target = torch.zeros(50, dtype=torch.long)
    learned = {}
    for clip in ("mean", "each"):
        loss = lagrangian(
            4, margin=2, penalty=penalty, clip=clip, multiplier_range=(low, high), initial_multiplier=1.0
        )
        violation = (logits.amax(1, keepdim=True) - logits) / 2 - 1
        slope = PENALTIES[penalty].slope(violation, loss.penalty_weight, loss.multiplier)
        assert (slope < low).any()
        assert (slope > high).any()
        loss.observe(logits, target)
        loss.adapt()
        expected = slope.clamp(low, high).mean(0) if clip == "each" else slope.mean(0).clamp(low, high)
        torch.testing.assert_close(loss.multiplier, expected)
        learned[clip] = loss.multiplier.clone()
    assert not torch.allclose(learned["mean"], learned["each"], rtol=0.05)


def test_statistics_are_those_of_the_start_of_the_pass() -> None:
    loss = lagrangian(2, margin=1)
    logits = torch.tensor([[3.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    for row in logits:
        loss.observe(row.unsqueeze(0), torch.tensor([0]))
    statistics = loss.adapt()
    assert statistics.samples == 2
    assert (statistics.violation / statistics.samples).tolist() == [-1.0, 1.5]
    assert loss.multiplier[1].item() == pytest.approx(1e-6 + 1.5)


def minimum(loss: AugmentedLagrangian, positive: float) -> Tensor:
    """The logits (a, 0) that minimise the loss when a share ``positive`` of the labels is class 0."""
    number = 201
    candidates = torch.linspace(-50, 50, number, dtype=torch.float64)
    target = torch.tensor([0, 1]).repeat_interleave(number)
    share = torch.tensor([positive, 1 - positive], dtype=torch.float64).repeat_interleave(number)
    for _ in range(4):  # the derivative by a is monotone: zoom in on where it changes sign, to 1e-7
        logit = candidates.requires_grad_()
        logits = torch.stack([logit, torch.zeros_like(logit)], 1).repeat(2, 1)
        (slope,) = torch.autograd.grad(loss(logits, target), logit, share)
        first = int((slope > 0).nonzero()[0])
        low, high = candidates[first - 1].item(), candidates[first].item()
        candidates = torch.linspace(low, high, number, dtype=torch.float64)
    return torch.tensor([[low, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("penalty", ["phr", "p2", "p3"])
@pytest.mark.parametrize(("margin", "positive"), [(1.0, 0.9), (2.0, 0.99), (0.5, 0.2)])
def test_multipliers_converge_to_those_of_the_constrained_problem(
    penalty: str, margin: float, positive: float
) -> None:
    """Minimise the cross-entropy of logits (a, 0) under |a| <= margin.

    Stationarity of CE(a) + ½ λ (|a|/margin - 1) at |a| = margin gives λ = 2 margin |share - σ(margin)|
    for the class that is ranked below, and 0 for the other.
    """
    loss = lagrangian(2, margin=margin, penalty=penalty, reduction="none", penalty_weight_max=None)
    for _ in range(30):  # P3 takes the most: 24
        logits = minimum(loss, positive)
        loss.observe(logits, torch.tensor([0]))
        loss.adapt()
    likely = max(positive, 1 - positive)
    assert math.log(likely / (1 - likely)) > margin  # the constraint binds
    known = 2 * margin * (likely - 1 / (1 + math.exp(-margin)))
    below, above = (1, 0) if positive > 0.5 else (0, 1)
    assert abs(minimum(loss, positive)[0, 0].item()) == pytest.approx(margin, abs=1e-4)
    assert loss.multiplier[below].item() == pytest.approx(known, abs=1e-4)
    assert loss.multiplier[above].item() < 1e-4


def test_an_inactive_constraint_costs_nothing() -> None:
    loss = lagrangian(2, margin=5.0, reduction="none")
    for _ in range(20):
        loss.observe(minimum(loss, 0.8), torch.tensor([0]))
        loss.adapt()
    assert minimum(loss, 0.8)[0, 0].item() == pytest.approx(math.log(4), abs=1e-5)
    assert (loss.multiplier <= 1e-6).all()


# ---- One multiplier for all classes ---------------------------------------------------------------


def validation(size: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (size,), generator=generator)


def passes(loss: AugmentedLagrangian, count: int, first: int = 0) -> AugmentedLagrangian:
    for number in range(first, first + count):
        loss.observe(*validation(40, loss.num_classes, number))
        loss.adapt()
    return loss


@pytest.mark.parametrize("penalty", ["phr", "p2", "p3"])
def test_one_multiplier_is_the_mean_over_elements_and_classes(penalty: str) -> None:
    arguments = {"margin": 3, "penalty": penalty, "initial_multiplier": 0.3, "every": 2, "growth": 1.7}
    loss, by_class = lagrangian(5, per="all", **arguments), lagrangian(5, **arguments)
    logits, target = validation(50, 5)
    torch.testing.assert_close(loss(logits, target), by_class(logits, target))  # the same start
    distance = logits.amax(1, keepdim=True) - logits
    for number in range(4):
        lam, rho = loss.multiplier.clone(), loss.penalty_weight.clone()
        assert lam.shape == rho.shape == ()
        by_class.multiplier.fill_(lam)
        by_class.penalty_weight.fill_(rho)
        torch.testing.assert_close(loss(logits, target), by_class(logits, target))
        slope = PENALTIES[penalty].slope(distance / 3 - 1, rho, lam)
        loss.observe(logits, target)
        loss.adapt()
        assert loss.multiplier.item() == pytest.approx(slope.mean().item(), rel=1e-12)
        assert loss.previous_violation.item() == pytest.approx((distance / 3 - 1).mean().item(), rel=1e-12)
        # The violation is positive and stays: ρ grows on passes 2 and 4.
        assert loss.penalty_weight.item() == pytest.approx(rho.item() * (1.7 if number % 2 else 1))


def test_one_penalty_weight_follows_the_mean_violation() -> None:
    loss = lagrangian(2, per="all", margin=1, every=1, growth=2, penalty_weight_max=4)
    weights = []
    for distance in (1.5, 1.9, 5, 5, 4, 5, 5, 5):  # mean violations: distance / 2 - 1, the first two below 0
        one_pass(loss, distance)
        weights.append(loss.penalty_weight.item())
    assert weights == [1, 1, 2, 4, 4, 4, 4, 4]
    assert loss.multiplier_range[0] <= loss.multiplier.item() <= loss.multiplier_range[1]


def test_one_multiplier_by_the_contract_of_losses() -> None:
    loss = passes(lagrangian(4, per="all", margin=3, every=1), 3)
    logits, target = validation(6, 4, seed=9)
    assert torch.autograd.gradcheck(lambda x: loss(x, target), logits.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x: loss(x, target), logits)
    logits = logits.detach()
    soft = torch.nn.functional.one_hot(target, 4).double()
    torch.testing.assert_close(loss(logits, soft), loss(logits, target))
    images, labels = logits.reshape(2, 3, 4).movedim(2, 1), target.reshape(2, 3)
    torch.testing.assert_close(loss(images, labels), loss(logits, target))
    value = torch.compile(loss, backend="eager", fullgraph=True)(logits, target)
    torch.testing.assert_close(value, loss(logits, target))
    torch.testing.assert_close(
        torch.func.grad(lambda x: loss(x, target))(logits),
        torch.autograd.functional.jacobian(lambda x: loss(x, target), logits),
    )


def test_one_multiplier_does_not_depend_on_batches_or_the_order_of_classes() -> None:
    logits, target = validation(30, 4)
    order = torch.tensor([2, 0, 3, 1])
    whole, parts, permuted = (passes(lagrangian(4, per="all", margin=2, every=1), 2) for _ in range(3))
    whole.observe(logits, target)
    for rows in (slice(0, 7), slice(7, 7), slice(7, 30)):
        parts.observe(logits[rows], target[rows])
    permuted.observe(logits[:, order], order.argsort()[target])
    sums = whole.adapt()
    assert sums.slope.shape == sums.violation.shape == (4,)  # what was observed stays known class by class
    for other in (parts, permuted):
        other.adapt()
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-12, atol=0)


def test_one_multiplier_is_saved_and_resumed() -> None:
    through = passes(lagrangian(3, per="all", every=4), 9)
    resumed = lagrangian(3, per="all", every=4)
    resumed.load_state_dict(passes(lagrangian(3, per="all", every=4), 5).half().state_dict())
    for name, value in passes(resumed, 4, first=5).state_dict().items():
        assert torch.equal(value, through.state_dict()[name])
    warned = pytest.warns(UserWarning, match="with every=4, per='all' is loaded into one with")
    with pytest.raises(RuntimeError, match="size mismatch for multiplier"), warned:
        lagrangian(3).load_state_dict(through.state_dict())
    with pytest.raises(ValueError, match="per must be one of"):
        lagrangian(3, per="sample")
