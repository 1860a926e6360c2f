"""The penalty functions against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calibrant.losses.penalties import PENALTIES

violations = st.floats(-1, 30)
weights = st.floats(0.01, 20)
multipliers = st.floats(1e-6, 1e3)


def definition(name: str, z: float, rho: float, lam: float) -> tuple[float, float]:
    if name == "phr":
        if lam + rho * z >= 0:
            return lam * z + rho * z * z / 2, lam + rho * z
        return -lam * lam / (2 * rho), 0.0
    if z < 0:
        return lam * z / (1 - rho * z), lam / (1 - rho * z) ** 2
    value, slope = lam * z + lam * rho * z**2, lam + 2 * lam * rho * z
    return (value + rho**2 * z**3 / 6, slope + rho**2 * z**2 / 2) if name == "p2" else (value, slope)


def doubles(*numbers: float) -> list[Tensor]:
    return [torch.tensor(number, dtype=torch.float64) for number in numbers]


@pytest.mark.parametrize("name", PENALTIES)
class TestPenalty:
    def test_definition(self, name: str) -> None:
        @settings(deadline=None, max_examples=100)
        @given(violations, weights, multipliers)
        def check(z: float, rho: float, lam: float) -> None:
            value, slope = definition(name, z, rho, lam)
            arguments = doubles(z, rho, lam)
            assert PENALTIES[name].value(*arguments).item() == pytest.approx(value, rel=1e-9, abs=1e-9 * lam)
            assert PENALTIES[name].slope(*arguments).item() == pytest.approx(slope, rel=1e-9, abs=1e-9 * lam)

        check()

    def test_slope_is_the_derivative_and_not_negative(self, name: str) -> None:
        @settings(deadline=None, max_examples=60)
        @given(violations, weights, multipliers)
        def check(z: float, rho: float, lam: float) -> None:
            violation, weight, multiplier = doubles(z, rho, lam)
            violation.requires_grad_()
            (derivative,) = torch.autograd.grad(
                PENALTIES[name].value(violation, weight, multiplier), violation
            )
            slope = PENALTIES[name].slope(violation.detach(), weight, multiplier).item()
            assert slope >= 0
            assert slope == pytest.approx(derivative.item(), rel=1e-9, abs=1e-9)

        check()

    def test_at_zero_the_slope_is_the_multiplier(self, name: str) -> None:
        violation = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        weight, multiplier = torch.rand(2, 3, dtype=torch.float64) + 0.1
        PENALTIES[name].value(violation, weight, multiplier).sum().backward()
        torch.testing.assert_close(violation.grad, multiplier)
        torch.testing.assert_close(PENALTIES[name].slope(violation.detach(), weight, multiplier), multiplier)

    def test_broadcasts(self, name: str) -> None:
        violation, weight = torch.linspace(-1, 2, 5).view(5, 1), torch.tensor([0.5, 1.0, 2.0])
        value = PENALTIES[name].value(violation, weight, torch.tensor(0.3))
        assert value.shape == (5, 3)
        for i in range(5):
            for j in range(3):
                alone = PENALTIES[name].value(violation[i, 0], weight[j], torch.tensor(0.3))
                assert value[i, j].item() == pytest.approx(alone.item(), rel=1e-5, abs=1e-7)

    @pytest.mark.parametrize("multiplier", [1e-6, 1.0, 1e6])
    def test_single_precision_suffices_for_every_multiplier(self, name: str, multiplier: float) -> None:
        for z in (-1.0, -0.3, 0.1, 0.37, 2.0):
            for rho in (1.0, 10.0):
                exact, _ = definition(name, z, rho, multiplier)
                found = PENALTIES[name].value(*(number.float() for number in doubles(z, rho, multiplier)))
                assert found.item() == pytest.approx(exact, rel=1e-6)
