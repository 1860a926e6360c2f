"""MMCE against the plain double sum over pairs."""

import pytest
import torch
from torch import Tensor

from calibrant import create_loss
from calibrant.losses.kernel_calibration import laplacian_form

KEYS = ["mmce", "mmce-weighted"]
WIDTHS = [1 / 300, 0.005, 0.01, 0.02, 0.1, 0.4, 10.0, 1e6]


def double_sum(key: str, logits: Tensor, target: Tensor, width: float) -> Tensor:
    """The penalty by its definition, in float64."""
    confidence, predicted = logits.double().softmax(1).max(1)
    correct = (predicted == target).double()
    if key == "mmce":
        residual = (correct - confidence) / len(target)
    else:
        right, wrong = correct, 1 - correct
        residual = right * (1 - confidence) / right.sum() - wrong * confidence / wrong.sum()
    kernel = (-(confidence[:, None] - confidence).abs() / width).exp()
    return (residual @ kernel @ residual).sqrt()


def with_gradient(value: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach().double(), gradient.double()


def penalty(key: str, logits: Tensor, target: Tensor, width: float) -> Tensor:
    """The loss without its cross-entropy."""
    loss = create_loss(key, logits.shape[1], weight=1.0, kernel_width=width)
    return loss.over_batch(loss.elements(logits, target))


def batch(samples: int, dtype: torch.dtype, *, ties: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    logits = 3 * torch.randn(max(samples, 9), 4, generator=generator, dtype=torch.float64)
    if ties:  # a few confidences, each many times, by logits in another order
        logits = logits[torch.randint(9, (max(samples, 9),), generator=generator)]
    return logits[:samples].to(dtype), torch.randint(4, (samples,), generator=generator)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_equals_the_double_sum(
    key: str, width: float, ties: bool, dtype: torch.dtype, tolerance: float
) -> None:
    for samples in (2, 3, 257):
        logits, target = batch(samples, dtype, ties=ties)
        target[0] = logits[0].argmax()
        target[1] = logits[1].argmin()
        logits.requires_grad_()
        value, gradient = with_gradient(penalty(key, logits, target, width), logits)
        expected, slope = with_gradient(double_sum(key, logits, target, width), logits)
        assert (value - expected).abs() <= tolerance * expected
        assert (gradient - slope).norm() <= tolerance * slope.norm()


@pytest.mark.parametrize("key", KEYS)
def test_many_elements(key: str) -> None:
    """Confidences near 1, far closer to one another than the width."""
    logits, target = batch(2000, torch.float64)
    logits = (logits + 8 * torch.eye(4, dtype=torch.float64)[logits.argmax(1)]).requires_grad_()
    value, gradient = with_gradient(penalty(key, logits, target, 0.01), logits)
    expected, slope = with_gradient(double_sum(key, logits, target, 0.01), logits)
    assert (value - expected).abs() <= 1e-10 * expected
    assert (gradient - slope).norm() <= 1e-10 * slope.norm()


def test_equal_confidences_have_no_derivative_by_their_distance() -> None:
    """Ties only: the penalty is the absolute sum of the residuals, whatever the width."""
    logits = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64).requires_grad_()
    target = torch.tensor([0, 0, 0, 1])
    for width in WIDTHS:
        value, gradient = with_gradient(penalty("mmce", logits, target, width), logits)
        confidence = logits.softmax(1)[0, 0].detach()
        torch.testing.assert_close(value, 0.75 - confidence if confidence < 0.75 else confidence - 0.75)
        torch.testing.assert_close(gradient, gradient[:1].expand(4, 2))


@pytest.mark.parametrize("key", KEYS)
def test_options_are_checked_when_they_are_changed(key: str) -> None:
    loss = create_loss(key, 3)
    for name, wrong in (("kernel_width", -1), ("kernel_width", 0), ("kernel_width", "x"), ("weight", -1)):
        with pytest.raises(ValueError, match=f"^{name} must "):
            setattr(loss, name, wrong)
    loss.kernel_width, loss.weight = 1, 0
    assert (loss.kernel_width, loss.weight) == (1.0, 0.0)


def test_float32_positions_stay_inside_the_last_cell() -> None:
    """A width just above 1/10 has 10 cells, but 1 / width is rounded to 10 in float32."""
    width = 0.1 + 1e-9
    position, weight = torch.tensor([0.0, 0.95, 1.0, 1.0]), torch.tensor([1.0, -2.0, 3.0, 0.5])
    kernel = (-(position[:, None] - position).abs() / width).exp()
    torch.testing.assert_close(laplacian_form(position, weight, width), weight @ kernel @ weight)


def normalised_twice(logits: Tensor, target: Tensor) -> Tensor:
    """The weighted term as public releases compute it: means over pairs, divided by the number of pairs."""
    confidence, predicted = logits.softmax(1).max(1)
    right = predicted == target
    good, bad = 1 - confidence[right], confidence[~right]

    def mean(one: Tensor, at: Tensor, other: Tensor, beside: Tensor) -> Tensor:
        kernel = (-(at[:, None] - beside).abs() / 0.4).exp()
        return (one[:, None] * other * kernel).mean() / (len(one) * len(other))

    at, beside = confidence[right], confidence[~right]
    both = mean(good, at, good, at) + mean(bad, beside, bad, beside)
    return (both - 2 * mean(good, at, bad, beside)).sqrt()


@pytest.mark.parametrize(("wrong", "least", "most"), [(64, 64, 64), (32, 20, 32), (13, 8, 13), (1, 0.5, 1)])
def test_the_weighted_term_is_larger_than_in_releases_by_the_number_of_wrong_elements(
    wrong: int, least: float, most: float
) -> None:
    """The factor that docs/losses.md states, for a batch of 128."""
    generator = torch.Generator().manual_seed(wrong)
    logits = 4 * torch.randn(128, 10, generator=generator, dtype=torch.float64)
    target = logits.argmax(1)
    target[:wrong] = (target[:wrong] + 1) % 10
    factor = (penalty("mmce-weighted", logits, target, 0.4) / normalised_twice(logits, target)).item()
    assert least * (1 - 1e-9) <= factor <= most * (1 + 1e-9)
