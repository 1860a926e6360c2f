"""Scaling calibrators: they find what is there, never harm, and come out the same however data arrive."""

import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.calibration import _TemperatureScaling
from torch import Tensor
from torch.nn import functional as F

from calibrant.calibrators import CALIBRATORS, linear
from calibrant.calibrators import temperature as temperature_module
from calibrant.calibrators.ensemble import EnsembleTemperature
from calibrant.calibrators.linear import (
    Dirichlet,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from calibrant.calibrators.local import LocalTemperature
from calibrant.calibrators.streaming import HeldOut, Scaling
from calibrant.calibrators.temperature import Objective, Temperature
from calibrant.layout import as_logits, as_pairs

METHODS = [kind for kind in CALIBRATORS.values() if issubclass(kind, Scaling)]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.key)


def sampled(samples: int, classes: int, *, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from their softmax."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


def images(count: int = 12, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Images of unequal difficulty, three rows of each void."""
    generator = torch.Generator().manual_seed(1)
    sharpness = 0.5 + 3 * torch.rand(count, 1, 1, 1, generator=generator)
    logits = sharpness * torch.randn(count, classes, 9, 7, generator=generator)
    truth = (logits / sharpness**0.7).movedim(1, -1).reshape(-1, classes).softmax(1)
    target = torch.multinomial(truth, 1, generator=generator).view(count, 9, 7)
    target[:, :3] = 255
    return logits, target


def likelihood(logits: Tensor, target: Tensor) -> float:
    return F.cross_entropy(logits, target).item()


def stationary(logits: Tensor, target: Tensor) -> float:
    """The derivative of the negative log-likelihood in log T, of logits that were divided by T."""
    inverse = torch.ones((), dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(F.cross_entropy(logits * inverse, target), inverse)[0].item()


@pytest.fixture(scope="module")
def large_sample() -> tuple[Tensor, Tensor, float]:
    """Logits, labels, and the temperature that scikit-learn finds: 20,000 labels tell T to half a percent."""
    logits, target = sampled(20_000, 10)
    return logits, target, 1 / _TemperatureScaling().fit(logits.numpy(), target.numpy()).beta_


class TestTemperature:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize("true", [0.02, 0.1, 0.5, 1.0, 10.0, 50.0])
    def test_recovers_what_the_logits_were_multiplied_by(
        self, true: float, dtype: torch.dtype, large_sample: tuple[Tensor, Tensor, float]
    ) -> None:
        logits, target, itself = large_sample
        found = Temperature().fit((true * logits).to(dtype), target).temperature.item()
        precision = {torch.float16: 1e-4, torch.float32: 1e-7, torch.float64: 1e-7}[dtype]
        assert found / true == pytest.approx(itself, rel=precision)
        assert found == pytest.approx(true, rel=0.02)

    def test_derivative_vanishes_at_what_is_found(self) -> None:
        for seed, (samples, classes) in enumerate([(30, 2), (400, 5), (3000, 30)]):
            logits, target = sampled(samples, classes, seed=seed)
            calibrated = Temperature().fit(37 * logits, target)(37 * logits)
            assert abs(stationary(calibrated, target)) < 1e-12

    @pytest.mark.parametrize("classes", [2, 7])
    def test_equals_scikit_learn(self, classes: int) -> None:
        logits, target = sampled(2000, classes, seed=3)
        logits = 3 * logits
        theirs = 1 / _TemperatureScaling().fit(logits.numpy(), target.numpy()).beta_
        assert Temperature().fit(logits, target).temperature.item() == pytest.approx(theirs, rel=1e-6)

    @pytest.mark.parametrize("factor", [2.0**-30, 0.001, 7.0, 2.0**20, 1e30])
    def test_multiplying_logits_multiplies_the_temperature(self, factor: float) -> None:
        logits, target = sampled(500, 6)
        plain = Temperature().fit(logits, target)
        scaled = Temperature().fit(factor * logits, target)
        assert scaled.temperature.item() == pytest.approx(factor * plain.temperature.item(), rel=1e-12)
        torch.testing.assert_close(scaled(factor * logits), plain(logits), rtol=1e-11, atol=1e-11)

    def test_adding_a_constant_to_an_element_changes_nothing(self) -> None:
        logits, target = sampled(500, 6)
        shifted = Temperature().fit(logits + 100 * torch.randn(500, 1, dtype=torch.float64), target)
        plain = Temperature().fit(logits, target)
        assert shifted.temperature.item() == pytest.approx(plain.temperature.item(), rel=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_perfect_predictions_stop_at_the_lower_bound(self, dtype: torch.dtype) -> None:
        logits = sampled(200, 5)[0].to(dtype)
        with pytest.warns(
            UserWarning, match="predicted correctly, so no temperature could be fitted; if the model was"
        ):
            calibrator = Temperature().fit(logits, logits.argmax(1))
        assert 0 < calibrator.temperature.item() < 0.01
        assert calibrator(logits).isfinite().all()

    def test_a_warning_is_about_the_line_that_fits(self) -> None:
        logits = 2 * torch.eye(3).repeat(5, 1)
        for objective in get_args(Objective):
            with pytest.warns(UserWarning, match="the temperature stopped at its bound") as caught:
                Temperature(objective=objective).fit(logits, logits.argmax(1))
            assert [each.filename for each in caught] == [__file__]

    def test_the_edges_of_the_grid_are_bounds(self) -> None:
        logits, target = sampled(2000, 5)
        for factor, edge in ((50.0, 10), (0.02, 0.1)):
            with pytest.warns(UserWarning, match=f"at its bound {edge}: beyond this grid"):
                calibrator = Temperature(objective="ece").fit(factor * logits, target)
            assert calibrator.temperature == edge

    def test_opposite_labels_stop_at_the_upper_bound(self) -> None:
        logits, _ = sampled(200, 5)
        with pytest.warns(UserWarning, match="no better than chance"):
            calibrator = Temperature().fit(logits, logits.argmin(1))
        assert 1000 < calibrator.temperature.item() < 1e6

    @pytest.mark.parametrize("imbalanced", [False, True])
    def test_labels_in_another_order_are_noticed(self, imbalanced: bool) -> None:
        missed = 0
        for seed in range(20):
            logits, target = sampled(400, 4, seed=seed)
            if imbalanced:
                frequent = torch.arange(400) % 10 < 8
                logits[frequent, 0] += 8
                target[frequent] = 0
            calm = Temperature().fit(logits, target).temperature  # warnings are errors in the tests
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
                shuffled = Temperature().fit(logits, target[order]).temperature
            assert shuffled > calm
            missed += not any("check the order of both" in str(each.message) for each in caught)
        assert missed <= 2

    @pytest.mark.parametrize(("size", "share"), [(100, 0.1), (200, 0.03), (500, 0.03), (1000, 0.01)])
    def test_rare_classes_and_few_elements_are_no_chance(self, size: int, share: float) -> None:
        for seed in range(30):
            generator = torch.Generator().manual_seed(seed)
            target = (torch.arange(size) < share * size).long()
            feature = torch.randn(size, generator=generator) + 1.2 * target  # an AUROC of 0.8
            logits = 1.2 * feature - 0.72 + math.log(share / (1 - share))
            Temperature().fit(as_pairs(logits), target)  # warnings are errors in the tests

    def test_one_mistake_is_not_perfect(self) -> None:
        logits, _ = sampled(1000, 5)
        target = logits.argmax(1)
        target[0] = logits[0].argmin()
        calibrator = Temperature().fit(logits, target)
        assert abs(stationary(calibrator(logits), target)) < 1e-10

    def test_absent_class(self) -> None:
        logits, target = sampled(5000, 5)
        kept = target != 3
        found = Temperature().fit(10 * logits[kept], target[kept])
        assert abs(stationary(found(10 * logits[kept]), target[kept])) < 1e-12

    def test_one_outlier_does_not_hide_the_temperature(self) -> None:
        logits, target = sampled(1000, 5)
        logits[0] = torch.nn.functional.one_hot(target[0], 5) * 1e9
        assert Temperature().fit(logits, target).temperature.item() == pytest.approx(1, rel=0.1)

    @pytest.mark.filterwarnings("ignore:all labels are of one class")
    def test_logits_without_differences_stay(self) -> None:
        logits = torch.full((10, 3), 0.1)
        assert Temperature().fit(logits, torch.zeros(10, dtype=torch.long)).temperature.item() == 1

    def test_calibration_error_is_minimised_over_the_grid(self) -> None:
        logits, target = sampled(3000, 5)
        logits = 2.5 * logits

        def error(temperature: float) -> float:
            confidence, prediction = (logits / temperature).softmax(1).max(1)
            gap = (confidence - (prediction == target).double()).numpy()
            place = np.ceil(confidence.numpy() * 15).astype(int) - 1
            return float(np.abs(np.bincount(place, gap, minlength=15)).sum() / len(gap))

        grid = [tenths / 10 for tenths in range(1, 101)]
        found = Temperature(objective="ece").fit(logits, target).temperature.item()
        assert found == min(grid, key=error)

    @pytest.mark.parametrize("seed", range(3))
    def test_error_over_equal_masses_is_minimised_over_the_grid(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        logits = torch.from_numpy(generator.normal(size=(400, 5)) * 4)
        probabilities = (logits / 1.7).softmax(1).numpy()
        target = torch.tensor([generator.choice(5, p=row) for row in probabilities])

        def error(temperature: float) -> float:
            confidence, prediction = (logits / temperature).softmax(1).max(1)
            gap = (confidence - (prediction == target).double()).numpy()
            parts = np.array_split(gap[np.argsort(confidence.numpy())], 15)
            return sum(abs(float(part.sum())) for part in parts)

        grid = [tenths / 10 for tenths in range(1, 101)]
        found = Temperature(objective="adaptive-ece").fit(logits, target).temperature.item()
        assert found == min(grid, key=error)

    def test_equal_masses_do_not_depend_on_the_order_of_tied_confidences(self) -> None:
        logits = torch.tensor([[2.0, 0.0], [4.0, 0.0], [6.0, 0.0]]).repeat_interleave(40, 0)
        target = (torch.rand(120, generator=torch.Generator().manual_seed(0)) < 0.3).long()
        by_target = torch.argsort(target, stable=True)
        errors = []
        for order in (torch.arange(120), by_target, by_target.flip(0)):
            data = HeldOut([(logits[order], target[order])])
            bins = [each.equal_mass(15) for each in temperature_module._ranked(data)]
            errors.append([float((each.confidence - each.correct).abs().sum()) for each in bins])
        for other in errors[1:]:
            np.testing.assert_allclose(other, errors[0], atol=1e-9)

    def test_equal_masses_of_many_elements_come_from_cells(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits, target = sampled(3000, 5)
        exact = Temperature(objective="adaptive-ece").fit(2.5 * logits, target)
        monkeypatch.setattr(temperature_module, "_MOST_SORTED", 100)
        monkeypatch.setattr(temperature_module, "_ranked", lambda _: pytest.fail("sorted"))
        close = Temperature(objective="adaptive-ece").fit(2.5 * logits, target)
        assert abs(float(close.temperature - exact.temperature)) <= 0.2

    def test_unknown_objective(self) -> None:
        with pytest.raises(ValueError, match="objective must be"):
            Temperature(objective="accuracy")  # type: ignore[arg-type]


class TestLinear:
    def test_vector_scaling_recovers_factors_and_offsets(self) -> None:
        generator = torch.Generator().manual_seed(5)
        logits, _ = sampled(50_000, 4)
        weight = torch.tensor([0.5, 1.0, 1.5, 0.8], dtype=torch.float64)
        bias = torch.tensor([0.5, -0.5, 0.3, -0.3], dtype=torch.float64)
        target = torch.multinomial((logits * weight + bias).softmax(1), 1, generator=generator).squeeze(1)
        found = VectorScaling().fit(logits, target)
        torch.testing.assert_close(found.weight, weight, rtol=0, atol=0.04)
        torch.testing.assert_close(found.bias, bias, rtol=0, atol=0.04)

    @pytest.mark.parametrize("method", [VectorScaling, MatrixScaling, Dirichlet])
    def test_reaches_the_optimum_that_scipy_reaches(self, method: type[Scaling]) -> None:
        generator = torch.Generator().manual_seed(6)
        logits, target = sampled(800, 3, seed=2)
        logits = 2 * logits + 0.3 * torch.randn(800, 3, generator=generator, dtype=torch.float64)
        options = {} if method is VectorScaling else {"off_diagonal_penalty": 0.0, "bias_penalty": 0.0}
        calibrator = method(ridge=0.0, **options).fit(logits, target)
        features = logits.log_softmax(1) if method is Dirichlet else logits

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            parameters = torch.tensor(flat, requires_grad=True)
            weight, bias = parameters[:-3], parameters[-3:]
            mapped = features * weight if method is VectorScaling else features @ weight.view(3, 3).T
            value = F.cross_entropy(mapped + bias, target)
            return value.item(), torch.autograd.grad(value, parameters)[0].numpy()

        size = 6 if method is VectorScaling else 12
        best = minimize(objective, np.zeros(size), jac=True, method="BFGS", options={"gtol": 1e-9}).fun
        assert likelihood(calibrator(logits), target) == pytest.approx(best, abs=1e-9)

    @pytest.mark.parametrize("method", [StructuredVectorScaling, StructuredMatrixScaling])
    def test_structured_scaling_minimises_the_penalised_likelihood(self, method: type[Scaling]) -> None:
        logits, target = sampled(300, 3, seed=2)
        logits = 3 * logits + torch.tensor([1.0, 0.0, -1.0])
        temperature = Temperature().fit(logits, target).temperature
        calibrator = method(strength=2.0).fit(logits, target)
        weight = calibrator.weight if calibrator.weight.ndim == 2 else calibrator.weight.diag()
        mean, identity = logits.mean(0), torch.eye(3, dtype=torch.float64)
        parameters = [
            temperature * weight - identity,
            calibrator.bias + (weight - identity / temperature) @ mean,
        ]

        def objective(deviation: Tensor, bias: Tensor) -> Tensor:
            mapped = logits / temperature + (logits - mean) / temperature @ deviation.T + bias
            off = deviation - deviation.diag().diag()
            squares = 3 * deviation.diag().square().sum() + 6 * off.square().sum() + 3 * bias.square().sum()
            return F.cross_entropy(mapped, target) + 2.0 / 300 * squares

        for parameter in parameters:
            parameter.requires_grad_()
        slopes = torch.autograd.grad(objective(*parameters), parameters)
        deviation = slopes[0] if method is StructuredMatrixScaling else slopes[0].diag()
        assert parameters[0].abs().max() > 1e-3  # it did move
        assert max(deviation.abs().max(), slopes[1].abs().max()) < 1e-6

    @pytest.mark.filterwarnings("ignore:of 10 classes the data lack")
    @pytest.mark.parametrize("method", [StructuredVectorScaling, StructuredMatrixScaling])
    def test_little_data_leave_a_temperature_and_many_do_not(self, method: type[Scaling]) -> None:
        def loss(calibrator: Scaling, samples: int, factor: Tensor | float) -> float:
            logits, target = sampled(samples + 4000, 10, seed=8)
            logits = 2 * logits * factor
            calibrated = calibrator.fit(logits[:samples], target[:samples])(logits[samples:])
            return likelihood(calibrated, target[samples:])

        assert loss(method(), 25, 1.0) < loss(Temperature(), 25, 1.0) + 0.05
        assert loss(VectorScaling(), 25, 1.0) > loss(Temperature(), 25, 1.0) + 1
        unequal = torch.linspace(0.5, 1.5, 10, dtype=torch.float64)
        assert loss(method(), 10_000, unequal) < loss(Temperature(), 10_000, unequal) - 0.02

    def test_penalties_hold_what_they_name(self) -> None:
        logits, target = sampled(500, 4, seed=4)
        target = (target + (torch.arange(500) % 5 == 0)) % 4
        free = MatrixScaling(off_diagonal_penalty=0.0, bias_penalty=0.0).fit(logits, target)
        held = MatrixScaling(off_diagonal_penalty=1e4, bias_penalty=1e4).fit(logits, target)
        off = ~torch.eye(4, dtype=torch.bool)
        assert held.weight[off].abs().max() < 1e-3 < free.weight[off].abs().max()
        assert held.bias.abs().max() < 0.01

    def test_negative_penalty(self) -> None:
        with pytest.raises(ValueError, match="ridge must lie in"):
            VectorScaling(ridge=-1)


class TestEnsemble:
    def test_recovers_a_mixture_with_uniform_noise(self) -> None:
        generator = torch.Generator().manual_seed(3)
        logits, _ = sampled(50_000, 5, spread=4.0)
        truth = 0.7 * logits.softmax(1) + 0.3 / 5
        target = torch.multinomial(truth, 1, generator=generator).squeeze(1)
        calibrator = EnsembleTemperature().fit(logits, target)
        assert calibrator.weights[0].item() == pytest.approx(0, abs=0.05)
        assert calibrator.weights[2].item() == pytest.approx(0.3, abs=0.02)
        assert (calibrator(logits).exp() - truth).abs().max() < 0.02

    @pytest.mark.parametrize("seed", range(4))
    def test_weights_are_the_best_on_the_simplex(self, seed: int) -> None:
        logits, target = sampled(400, 4, seed=seed)
        logits = [0.5, 1.0, 2.0, 5.0][seed] * logits
        calibrator = EnsembleTemperature().fit(logits, target)
        index = torch.arange(400)
        parts = torch.stack(
            [
                (logits / calibrator.temperature).softmax(1)[index, target],
                logits.softmax(1)[index, target],
                torch.full((400,), 0.25, dtype=torch.float64),
            ]
        )
        found = -(calibrator.weights @ parts).log().mean()
        corners = torch.distributions.Dirichlet(torch.full((3,), 0.5, dtype=torch.float64)).sample((3000,))
        others = -(corners @ parts).log().mean(1)
        assert calibrator.weights.min() >= 0
        assert calibrator.weights.sum().item() == pytest.approx(1, abs=1e-12)
        assert found <= others.min() + 1e-9
        # The condition of a minimum on the simplex, which no sample of other weights can show.
        slope = -(parts / (calibrator.weights @ parts)).mean(1)
        assert (slope - slope @ calibrator.weights).min() > -1e-6

    def test_is_a_probability(self) -> None:
        logits, target = sampled(300, 4)
        total = EnsembleTemperature().fit(3 * logits, target)(3 * logits).exp().sum(1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)


class TestLocal:
    def test_images_of_unequal_difficulty_get_unequal_temperatures(self) -> None:
        logits, target = images(60)
        one = Temperature().fit(logits, target, ignore_index=255)
        many = LocalTemperature().fit(logits, target, ignore_index=255)
        valid = target != 255

        def loss(calibrated: Tensor) -> float:
            return likelihood(calibrated.movedim(1, -1)[valid], target[valid])

        assert loss(many(logits)) < loss(one(logits)) - 1e-3

    def test_parameters_are_stationary(self) -> None:
        logits, target = images(20)
        calibrator = LocalTemperature(strength=0.0).fit(logits.double(), target, ignore_index=255)
        for name in ("temperature", "slope"):
            learned = getattr(calibrator, name).clone().requires_grad_()
            calibrator._buffers[name] = learned
            loss = F.cross_entropy(calibrator(logits.double()), target, ignore_index=255)
            assert abs(torch.autograd.grad(loss, learned)[0].item()) < 1e-6
            calibrator._buffers[name] = learned.detach()

    def test_temperatures_stay_positive_and_finite_without_penalty(self) -> None:
        logits = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
        calibrator = LocalTemperature(strength=0.0).fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
        for slope in (1e6, -1e6):
            calibrator.slope.fill_(slope)
            assert calibrator(logits).isfinite().all()

    def test_one_image_has_one_temperature(self) -> None:
        logits, target = images(1)
        one = Temperature().fit(logits, target, ignore_index=255)
        many = LocalTemperature().fit(logits, target, ignore_index=255)
        assert many.temperature.item() == pytest.approx(one.temperature.item(), rel=1e-6)
        assert many.slope.item() == 0

    def test_each_image_is_by_itself(self) -> None:
        logits, target = images()
        calibrator = LocalTemperature().fit(logits, target, ignore_index=255)
        torch.testing.assert_close(calibrator(logits)[3:4], calibrator(logits[3:4]))

    def test_units_do_not_matter(self) -> None:
        logits, target = images()
        plain = LocalTemperature().fit(logits.double(), target, ignore_index=255)
        scaled = LocalTemperature().fit(1000 * logits.double(), target, ignore_index=255)
        torch.testing.assert_close(scaled(1000 * logits.double()), plain(logits.double()))

    @pytest.mark.filterwarnings("ignore:the temperature stopped at its bound")
    @pytest.mark.parametrize("seed", [11, 18, 20, 30, 50])
    def test_does_no_harm_without_penalty_where_labels_are_random(self, seed: int) -> None:
        """Entropies hardly differ at a huge temperature, and single precision lost the difference."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(35, 2, generator=generator)
        target = torch.randint(2, (35,), generator=generator)
        calibrator = LocalTemperature(strength=0.0).fit(logits, target)
        assert likelihood(calibrator(logits), target) <= likelihood(logits, target)


@st.composite
def problems(draw: st.DrawFn) -> tuple[type[Scaling], Tensor, Tensor]:
    method = draw(st.sampled_from(METHODS))
    classes = draw(st.integers(2, 10) if draw(st.booleans()) else st.integers(2, 5))
    samples = draw(st.sampled_from([*range(1, 41), 90, 200]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    logits = logits * 10 ** draw(st.floats(-1, 1)) + draw(st.sampled_from([0.0, 50.0]))
    kind = draw(st.sampled_from(["likely", "perfect", "opposite", "random", "one class"]))
    target = {
        "likely": torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1),
        "perfect": logits.argmax(1),
        "opposite": logits.argmin(1),
        "random": torch.randint(0, classes, (samples,), generator=generator),
        "one class": torch.zeros(samples, dtype=torch.long),
    }[kind]
    return method, logits * 10 ** draw(st.floats(-4, 4)), target


@settings(max_examples=80, deadline=None)
@given(problems())
def test_never_less_likely_than_the_logits_as_they_are(problem: tuple[type[Scaling], Tensor, Tensor]) -> None:
    method, logits, target = problem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        calibrator = method().fit(logits, target)
    before, after = likelihood(logits, target), likelihood(calibrator(logits), target)
    assert all(buffer.isfinite().all() for buffer in calibrator.buffers())
    assert after <= before + 1e-9 * max(1, before)


@each_method
def test_learns_and_never_touches_its_input(method: type[Scaling]) -> None:
    logits, target = sampled(400, 5)
    logits = 4 * logits
    copies = logits.clone(), target.clone()
    calibrator = method().fit(logits, target)
    assert torch.equal(logits, copies[0])
    assert torch.equal(target, copies[1])
    assert likelihood(calibrator(logits), target) < likelihood(logits, target) - 0.1


@pytest.mark.parametrize("method", [method for method in METHODS if method.preserves_order])
def test_order_stays(method: type[Scaling]) -> None:
    assert method in (Temperature, EnsembleTemperature, LocalTemperature)
    logits, target = sampled(500, 8)
    calibrated = method().fit(3 * logits, target)(3 * logits)
    assert torch.equal(calibrated.argsort(1), logits.argsort(1))


@each_method
def test_streamed_equals_in_memory(method: type[Scaling]) -> None:
    logits, target = images(12)
    whole = method().fit(logits, target, ignore_index=255)
    cuts = [(logits[part], target[part]) for part in (slice(0, 5), slice(5, 6), slice(6, 6), slice(6, 12))]
    streamed = method().fit_batches(cuts, ignore_index=255)
    assert whole.num_classes == streamed.num_classes
    for (name, buffer), other in zip(whole.named_buffers(), streamed.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(whole(logits), streamed(logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", ["ece", "adaptive-ece"])
def test_streamed_error_grid_equals_in_memory(objective: Objective) -> None:
    logits, target = sampled(1000, 5)
    whole = Temperature(objective=objective).fit(3 * logits, target)
    streamed = Temperature(objective=objective).fit_batches(
        [(3 * logits[:7], target[:7]), (3 * logits[7:], target[7:])]
    )
    assert whole.temperature == streamed.temperature


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        (Temperature, torch.contiguous_format),
        # A method gets the same rows for either layout; these are the harder ones.
        *((method, torch.channels_last) for method in METHODS if method is not LocalTemperature),
    ],
)
def test_images_equal_their_pixels(method: type[Scaling], layout: torch.memory_format) -> None:
    logits, target = images()
    logits = logits.to(memory_format=layout)
    valid = target != 255
    flat = method().fit(logits.movedim(1, -1)[valid], target[valid])
    logits[:, :, :3] = torch.nan  # void pixels hold anything
    dense = method().fit(logits, target, ignore_index=255)
    for one, other in zip(dense.buffers(), flat.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert dense(logits).shape == logits.shape
    torch.testing.assert_close(dense(logits).movedim(1, -1)[valid], flat(logits.movedim(1, -1)[valid]))


@each_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fits_half_precision(method: type[Scaling], dtype: torch.dtype) -> None:
    logits, target = sampled(60, 3)
    calibrated = method().fit(logits.to(dtype), target)(logits.to(dtype))
    assert calibrated.dtype == torch.float32
    assert calibrated.isfinite().all()


@each_method
def test_batches_must_start_anew(method: type[Scaling]) -> None:
    logits, target = sampled(50, 5)

    class Once:
        """An iterable that is empty from the second time on."""

        def __init__(self) -> None:
            self.batches = [(logits, target)]

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            while self.batches:
                yield self.batches.pop()

    with pytest.raises(ValueError, match="nothing to fit"):
        method().fit_batches([])
    with pytest.raises(TypeError, match="several times"):
        method().fit_batches(batch for batch in [(logits, target)])
    with pytest.raises(ValueError, match="several times"):
        method().fit_batches(Once())
    for wrong, got in (
        ((logits, target), r"a tensor; for a single pair call fit\(logits, target\)"),
        ((logits[:2], target[:2]), "a tensor; for a single pair"),
        ([logits], "a tensor; for a single pair"),
        ([(logits, target, target)], "a tuple of 3"),
        ([{"logits": logits}], "a dict"),
    ):
        with pytest.raises(TypeError, match=rf"^batches must be pairs \(logits, target\), got {got}"):
            method().fit_batches(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 classes"):
        method().fit_batches([(logits, target), (logits[:, :4], target.clamp_max(3))])


@each_method
def test_options_are_attributes(method: type[Scaling]) -> None:
    parameters: Callable[..., Scaling] = method
    options = {name: value for name, value in vars(method()).items() if isinstance(value, (str, float))}
    assert vars(parameters(**options)).items() >= options.items()
    if options:
        with pytest.raises(TypeError, match="positional"):
            parameters(next(iter(options.values())))


class Counted(list):
    """Batches that count how often they are gone through."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


@pytest.mark.filterwarnings("ignore:of 200 classes the data lack")
def test_many_classes_do_not_take_many_passes() -> None:
    # Some classes are rare, some absent: without a curvature for each this took more than a thousand.
    logits, target = sampled(1000, 200)
    batches = Counted([(2 * logits, target)])
    calibrator = VectorScaling().fit_batches(batches)
    assert batches.passes < 150
    output = calibrator(2 * logits).detach()
    residual = output.softmax(1) - torch.nn.functional.one_hot(target, 200)
    assert residual.mean(0).abs().max() < 1e-5  # the pull on the bias is all that is left


@pytest.mark.parametrize("method", [MatrixScaling, Dirichlet, StructuredMatrixScaling])
def test_very_many_parameters_are_fitted_nearly_as_well(
    method: type[Scaling], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target = sampled(500, 6)
    logits = (2 * logits * torch.linspace(0.5, 1.5, 6)).float()
    exact = likelihood(method().fit(logits, target)(logits), target)
    monkeypatch.setattr("calibrant.calibrators.linear._MANY", 20)
    nearly = likelihood(method().fit(logits, target)(logits), target)
    assert nearly < exact + 1e-4
    assert nearly < likelihood(logits, target)


@pytest.mark.parametrize("method", [MatrixScaling, Dirichlet])
class TestFreeParameters:
    """How many of a matrix's parameters the data can pay for."""

    def test_a_long_fit_that_cannot_pay_is_left_at_temperature_scaling(
        self, method: type[MatrixScaling], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("calibrant.calibrators.linear._MANY", 1)
        logits, target = sampled(200, 50, spread=1.0)
        batches = Counted([(logits, target)])
        with pytest.warns(
            UserWarning, match="has about 2,4.. free parameters for 200 elements.* stays temperature scaling"
        ):
            calibrator = method().fit_batches(batches)
        assert batches.passes < 20
        expected = torch.eye(50) / Temperature().fit(logits, target).temperature
        torch.testing.assert_close(calibrator.weight, expected, check_dtype=False)

    def test_a_stronger_penalty_leaves_fewer(self, method: type[MatrixScaling]) -> None:
        logits, target = sampled(400, 50, spread=1.0)
        with warnings.catch_warnings(action="error"):
            held = method(off_diagonal_penalty=10_000, bias_penalty=10).fit(logits, target)
        tempered = Temperature().fit(logits, target)
        assert 1 < likelihood(held(logits), target) < likelihood(tempered(logits), target)

    @pytest.mark.parametrize(("classes", "samples"), [(2, 10), (5, 100), (10, 300), (20, 800)])
    def test_a_fit_to_few_elements_is_warned_of(
        self, classes: int, samples: int, method: type[MatrixScaling]
    ) -> None:
        logits, target = sampled(samples + 4000, classes, spread=1.0)
        learned, others = slice(samples), slice(samples, None)
        free = (classes - 1) * (classes + 1)
        with pytest.warns(UserWarning, match="On other data it is probably worse") as caught:
            calibrator = method().fit(logits[learned], target[learned])
        (found,) = re.findall(r"about ([\d,]+) free", str(caught[0].message))
        assert int(found.replace(",", "")) == pytest.approx(free, rel=0.1)
        tempered = Temperature().fit(logits[learned], target[learned])

        def on_others(fitted: Scaling) -> float:
            return likelihood(fitted(logits[others]), target[others])

        assert on_others(calibrator) > on_others(tempered)

    def test_a_fit_to_many_is_not(self, method: type[MatrixScaling]) -> None:
        """Two classes are swapped: a matrix repairs that, and a temperature cannot."""
        generator = torch.Generator().manual_seed(0)
        target = torch.randint(6, (4000,), generator=generator)
        logits = torch.randn(4000, 6, generator=generator) + 12 * torch.nn.functional.one_hot(target, 6)
        logits = logits[:, [1, 0, 2, 3, 4, 5]]
        learned, others = slice(200), slice(200, None)
        with warnings.catch_warnings(action="error"):
            calibrator = method().fit(logits[learned], target[learned])
        tempered = Temperature().fit(logits[learned], target[learned])
        on_others = likelihood(tempered(logits[others]), target[others])
        assert likelihood(calibrator(logits[others]), target[others]) < on_others / 10


def test_rounded_matrix_products_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32 the fit of very many parameters is the exact one, in double precision."""
    logits, target = sampled(500, 5)
    exact = MatrixScaling().fit(logits.float(), target)
    monkeypatch.setattr("calibrant.calibrators.linear._MANY", 1)
    assert not torch.equal(MatrixScaling().fit(logits.float(), target).weight, exact.weight)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert torch.equal(MatrixScaling().fit(logits.float(), target).weight, exact.weight)


@each_method
def test_threads_change_nothing_but_rounding(method: type[Scaling], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibrant.layout._CPU_BLOCK", 90)  # five blocks
    logits, target = sampled(150, 3)
    before = torch.get_num_threads()
    fitted = []
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            fitted.append(method().fit(2 * logits, target))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, several, again in zip(*(each.buffers() for each in fitted), strict=True):
        torch.testing.assert_close(several, one, rtol=1e-6, atol=1e-7)
        assert torch.equal(again, several)


@pytest.mark.parametrize("key", ["vector", "structured-vector"])
def test_few_classes_take_few_passes(monkeypatch, key):
    """With the exact curvature; a few wrong labels among clear ones are hardest."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(10, (300,), generator=generator)
    logits = 10 * F.one_hot(target, 10) + torch.randn(300, 10, generator=generator)
    target[:6] = (target[:6] + 1) % 10
    passes = []
    pass_over = linear._PerClass.pass_over

    def counted(*given):
        passes.append(given)
        return pass_over(*given)

    monkeypatch.setattr(linear._PerClass, "pass_over", counted)
    exact = CALIBRATORS[key]().fit(logits, target)(logits)
    few = len(passes)
    monkeypatch.setattr(linear, "_FEW", 0)
    approximate = CALIBRATORS[key]().fit(logits, target)(logits)
    assert few < (len(passes) - few) / 2
    torch.testing.assert_close(approximate.softmax(1), exact.softmax(1), rtol=0, atol=1e-5)


def test_the_temperature_of_an_ensemble_is_that_of_possible_classes() -> None:
    logits, target = sampled(300, 5)
    impossible = as_logits(torch.tensor([[0.5, 0.5, 0, 0, 0]] * 9, dtype=torch.float64))
    plain = EnsembleTemperature().fit(3 * logits, target)
    batches = [(3 * logits, target), (impossible, torch.tensor([2, 3, 4] * 3))]
    mixed = EnsembleTemperature().fit_batches(batches)
    assert mixed.temperature == pytest.approx(plain.temperature)
    assert 0.02 < mixed.weights[2] < 0.2  # the uniform part is for them
    with pytest.warns(UserWarning, match="no better than chance"):  # nothing else to fit a temperature to
        only = EnsembleTemperature().fit(*batches[1])
    assert torch.equal(only(impossible).argmax(1), impossible.argmax(1))


@each_method
@pytest.mark.parametrize("binary", [False, True])
def test_true_classes_with_a_probability_of_0_are_warned_of(method: type[Scaling], binary: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randint(0, 6, (200,), generator=generator) / 5
    target = (torch.rand(200, generator=generator) < probabilities).long()
    target[:3] = (probabilities[:3] < 0.5).long()
    probabilities[:3] = 1.0 - target[:3]
    single = as_logits(probabilities) - as_logits(1 - probabilities)
    both = as_logits(torch.stack([1 - probabilities, probabilities], 1))
    fit = partial(method().fit, single if binary else both, target, binary=binary)
    if method.copes_with_zeros:
        assert method is EnsembleTemperature
        fit()  # warnings are errors
    else:
        with pytest.warns(UserWarning, match="3 of 200 true classes have a probability of 0"):
            fit()
    smoothed = (5 * probabilities + 1) / 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method().fit(
            smoothed.logit() if binary else torch.stack([1 - smoothed, smoothed], 1).log(),
            target,
            binary=binary,
        )


def test_arranged_data_are_let_go_before_others_take_their_place():
    logits, target = images(4)
    data = HeldOut([(logits, target)], 255, in_memory=True)
    rows = [weakref.ref(rows) for rows, _ in data]
    assert all(each() is not None for each in rows)

    def of_images(logits: Tensor) -> Tensor:
        assert all(each() is None for each in rows)
        return logits.flatten(1).mean(1)

    data.totals(lambda rows, labels, value: (value,), of_images)
