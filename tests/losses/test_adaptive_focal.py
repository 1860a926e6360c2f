"""AdaFocal and its relatives against the published update, written out with sorting and loops."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from calibrant import create_loss
from calibrant.histogram import Outcomes
from calibrant.layout import arrange


def validation_set(size: int, seed: int, classes: int = 5, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (size,), generator=generator)


def spread_validation_set(seed: int) -> tuple[Tensor, Tensor]:
    """Forty samples of five classes, each in a cell of the histogram of its own."""
    generator = torch.Generator().manual_seed(seed)
    top = torch.linspace(0.5, 8, 40) + 0.1 * torch.rand(40, generator=generator)
    logits = torch.zeros(40, 5, dtype=torch.float64)
    logits[:, 2] = top[torch.randperm(40, generator=generator)]
    right = torch.rand(40, generator=generator) < (0.97 if seed < 10 else 0.3)
    return logits, torch.where(right, 2, 4)


def crowded_validation_set(number: int, ties: bool, size: int = 1000) -> tuple[Tensor, Tensor]:
    """An over-confident network: most confidences above 0.99; with ties, few distinct ones and many at 1."""
    generator = np.random.default_rng(number)
    doubt = np.exp(-generator.exponential(6, size) * (0.5 + number / 60))
    if ties:
        doubt = np.where(doubt < 1e-3, 0.0, np.ceil(doubt * 50) / 50)
    confidence = 1 - 0.79 * doubt
    logits = torch.zeros(size, 5, dtype=torch.float64)
    with np.errstate(divide="ignore"):
        logits[:, 2] = torch.from_numpy(np.log(4 * confidence / (1 - confidence)).clip(max=100))
    right = generator.random(size) < confidence ** (0.3, 1.0, 2.2)[number % 3]
    return logits, torch.from_numpy(np.where(right, 2, 4))


class Reference:
    """AdaFocal's state by exact equal-mass bins."""

    def __init__(self, bins: int = 15, rate: float = 1.0) -> None:
        self.gamma = [1.0] * bins
        self.rate = rate

    def adapt(self, logits: Tensor, target: Tensor) -> list[np.ndarray]:
        """Update γ; the elements of each bin."""
        confidence, prediction = (values.numpy() for values in logits.softmax(1).max(1))
        order = np.argsort(confidence)
        # Equal confidences count with their mean correctness.
        _, tied, count = np.unique(confidence, return_inverse=True, return_counts=True)
        correct = (np.bincount(tied, prediction == target.numpy()) / count)[tied]
        groups = np.array_split(order, len(self.gamma))
        ends = np.cumsum([len(group) for group in groups])
        ranked = np.append(confidence[order], confidence.max())
        edges = np.append(-1.0, (ranked[ends - 1] + ranked[ends]) / 2)
        for b, group in enumerate(groups):
            if not len(group) or edges[b] == edges[b + 1]:  # empty, or inside a group of equal confidences
                continue
            gap = confidence[group].mean() - correct[group].mean()
            before = self.gamma[b]
            after = before * math.exp(self.rate * gap if before > 0 else -self.rate * gap)
            after = min(max(after, -2.0), 20.0)
            if abs(after) < 0.2:
                after = -0.2 if before > 0 else 0.2
            self.gamma[b] = after
        return groups


@pytest.mark.parametrize("key", ["adafocal", "ada-dual-focal"])
@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_equals_the_exact_update(key: str, rate: float) -> None:
    loss, reference, switched = create_loss(key, 5, rate=rate), Reference(rate=rate), False
    for number in range(25):
        logits, target = spread_validation_set(number)
        groups = reference.adapt(logits, target)
        loss.observe(logits, target)
        loss.adapt()
        edges = loss.edges.tolist()
        # As the loss measures them: other ways to compute a softmax may differ in the last digit.
        confidence = torch.cat(Outcomes.of(arrange(logits, target)).parts, 1)[0]
        for b, group in enumerate(groups):
            assert all(edges[b] <= value <= edges[b + 1] for value in confidence[group].tolist())
        torch.testing.assert_close(
            loss.gamma, torch.tensor(reference.gamma, dtype=torch.float64), rtol=1e-9, atol=0
        )
        switched = switched or bool((loss.gamma < 0).any())
    assert switched
    assert (loss.gamma > 1).any()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("key", ["adafocal", "ada-dual-focal"])
def test_equals_the_exact_update_after_many_passes(key: str, ties: bool) -> None:
    loss, reference = create_loss(key, 5), Reference()
    for number in range(0, 60, 2):
        logits, target = crowded_validation_set(number, ties)
        reference.adapt(logits, target)
        for piece in torch.randperm(len(logits), generator=torch.Generator().manual_seed(number)).split(350):
            loss.observe(logits[piece], target[piece])
        loss.adapt()
        assert loss.gamma.tolist() == pytest.approx(reference.gamma, rel=1e-9)
    assert (loss.gamma > 1.5).any()
    assert (loss.gamma < 0.9).any()
    assert (loss.gamma < 20).all()
    if ties:
        assert (loss.edges.diff() == 0).any()
        assert loss.edges[-1] == 1


@pytest.mark.parametrize("number", [0, 7, 30])
def test_bins_hold_equally_many_where_confidences_crowd(number: int) -> None:
    logits, target = crowded_validation_set(number, ties=False, size=5000)
    loss = create_loss("adafocal", 5)
    loss.observe(logits, target)
    loss.adapt()
    confidence = logits.softmax(1).amax(1)
    count = torch.bincount(loss.bin_of(confidence), minlength=15)
    assert sorted(count.tolist()) == [333] * 10 + [334] * 5
    assert (loss.edges.diff() > 0).all()


@pytest.mark.parametrize("per", ["sample", "bin"])
def test_calfocal_has_exact_bins(per: str) -> None:
    loss = create_loss("calfocal", 5, per=per)
    logits, target = crowded_validation_set(3, ties=False)
    loss.observe(logits, target)
    loss.adapt()
    confidence, prediction = (values.numpy() for values in logits.softmax(1).max(1))
    groups = np.array_split(np.argsort(confidence), 15)
    accuracy = [(prediction == target.numpy())[group].mean() for group in groups]
    gaps = [confidence[group].mean() - right for group, right in zip(groups, accuracy, strict=True)]
    assert loss.accuracy.tolist() == pytest.approx(accuracy, rel=1e-12)
    assert loss.gamma.tolist() == pytest.approx([math.exp(10 * gap) for gap in gaps], rel=1e-9)


def test_beyond_the_limit_stays_near_the_exact_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outcomes, "limit", 10_000)
    loss, reference = create_loss("adafocal", 5), Reference()
    for number in range(10):
        logits, target = validation_set(20_000, seed=number)
        reference.adapt(logits, target)
        for piece in range(0, 20_000, 3_000):
            loss.observe(logits[piece : piece + 3_000], target[piece : piece + 3_000])
        assert loss.adapt().histogram.samples > 0
    torch.testing.assert_close(
        loss.gamma, torch.tensor(reference.gamma, dtype=torch.float64), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("key", ["adafocal", "ada-dual-focal"])
def test_loss_is_focal_or_inverse_focal_by_the_bin_of_p(key: str) -> None:
    loss = create_loss(key, 5, bins=3, reduction="none")
    loss.edges.copy_(torch.tensor([0.3, 0.5, 0.8, 1.0]))
    loss.gamma.copy_(torch.tensor([2.0, -1.5, 0.7]))
    logits, target = validation_set(200, seed=3)
    values = loss(logits, target)
    s = logits.softmax(1)
    seen = set()
    for row, label, value in zip(s, target, values, strict=True):
        p = row[label].item()
        b = 0 if p <= 0.5 else 1 if p <= 0.8 else 2
        seen.add(b)
        q = max([k for k in row.tolist() if k < p], default=0.0) if key == "ada-dual-focal" else 0.0
        gamma = [2.0, -1.5, 0.7][b]
        factor = (1 - p + q) ** gamma if gamma >= 0 else (1 + p - q) ** -gamma
        assert value.item() == pytest.approx(-factor * math.log(p), rel=1e-6)
    assert seen == {0, 1, 2}


def test_starts_as_focal_loss_with_gamma_one() -> None:
    logits, target = validation_set(50, seed=0)
    focal = create_loss("focal", 5, gamma=1)(logits, target)
    dual = create_loss("dual-focal", 5, gamma=1)(logits, target)
    torch.testing.assert_close(create_loss("adafocal", 5)(logits, target), focal)
    torch.testing.assert_close(create_loss("calfocal", 5)(logits, target), focal)
    torch.testing.assert_close(create_loss("ada-dual-focal", 5)(logits, target), dual)
    assert create_loss("adafocal", 5).edges.tolist() == [b / 15 for b in range(16)]


def test_equal_confidences_use_one_bin_and_leave_the_others() -> None:
    loss = create_loss("adafocal", 2)
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64).expand(100, 2)
    loss.observe(logits, torch.ones(100, dtype=torch.long))  # all wrong
    loss.adapt()
    moved = loss.gamma != 1
    assert moved.sum() == 1
    confidence = torch.tensor(2.0, dtype=torch.float64).sigmoid()
    assert loss.gamma[moved].item() == pytest.approx(math.exp(confidence))
    # Whatever the probability, the one bin with a width is looked up.
    for p in (1e-9, 0.1, 0.5, 0.88, 0.95, 1.0):
        assert moved[loss.bin_of(torch.tensor(p))]


def test_bins_without_width_are_never_looked_up() -> None:
    loss = create_loss("adafocal", 3, bins=5)
    loss.edges.copy_(torch.tensor([0.2, 0.2, 0.4, 0.4, 0.9, 0.9]))
    probabilities = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.41, 0.9, 0.95, 1.0], dtype=torch.float64)
    assert loss.bin_of(probabilities).tolist() == [1, 1, 1, 1, 1, 3, 3, 3, 3]


def test_switches_both_ways() -> None:
    loss = create_loss("adafocal", 2, bins=1, rate=3)
    right, wrong = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long)
    unsure, sure = torch.tensor([[0.1, 0.0]]).expand(4, 2), torch.tensor([[9.0, 0.0]]).expand(4, 2)
    found = []
    for logits, target in [(unsure, right)] * 2 + [(sure, wrong)] * 2:
        loss.observe(logits, target)
        loss.adapt()
        found.append(loss.gamma.item())
    assert found[0] == pytest.approx(math.exp(-3 * (1 - 1 / (1 + math.exp(-0.1)))), rel=1e-4)
    assert found[1] == -0.2  # under-confident: inverse focal
    assert found[2] == 0.2  # over-confident: back to focal
    assert found[3] == pytest.approx(0.2 * math.e**3, rel=1e-3)


def test_gamma_stays_in_its_range() -> None:
    loss = create_loss("adafocal", 2, bins=1, rate=50)
    loss.observe(torch.tensor([[9.0, 0.0]]), torch.tensor([1]))
    loss.adapt()
    assert loss.gamma.item() == 20
    never = create_loss("adafocal", 2, bins=1, rate=50, gamma_range=(0.1, 5), switch_at=0)
    never.observe(torch.tensor([[0.1, 0.0]]), torch.tensor([0]))
    never.adapt()
    assert never.gamma.item() == 0.1


@pytest.mark.parametrize("kind", ["sample", "through_gamma", "bin"])
def test_calfocal(kind: str) -> None:
    options = {"through_gamma": True} if kind == "through_gamma" else {"per": kind}
    loss = create_loss("calfocal", 5, bins=4, rate=3, reduction="none", **options)
    logits, target = spread_validation_set(1)
    confidence, prediction = logits.softmax(1).max(1)
    loss.observe(logits, target)
    loss.adapt()
    groups = np.array_split(np.argsort(confidence.numpy()), 4)
    accuracy = [(prediction == target)[group].double().mean().item() for group in groups]
    mean = [confidence[group].mean().item() for group in groups]
    values = loss(logits, target)
    slopes = torch.autograd.functional.jacobian(lambda x: loss(x, target).sum(), logits)
    for row, label, value, slope in zip(logits, target, values, slopes, strict=True):
        p = row.softmax(0)[label].item()
        b = int(loss.bin_of(torch.tensor(p)))
        gamma = math.exp(3 * ((mean[b] if kind == "bin" else p) - accuracy[b]))
        assert value.item() == pytest.approx(-((1 - p) ** gamma) * math.log(p), rel=1e-9)
        by_p = gamma * (1 - p) ** (gamma - 1) * math.log(p) - (1 - p) ** gamma / p  # γ held fixed
        if kind == "through_gamma":
            by_p -= 3 * gamma * (1 - p) ** gamma * math.log(1 - p) * math.log(p)
        assert slope[label].item() == pytest.approx(by_p * p * (1 - p), rel=1e-8)


def test_calfocal_through_gamma_needs_an_exponent_that_depends_on_p() -> None:
    with pytest.raises(ValueError, match=r"through_gamma=True needs per='sample'"):
        create_loss("calfocal", 5, per="bin", through_gamma=True)
    logits, target = validation_set(20, seed=3)
    slopes = []
    for through in (False, True):  # before the first pass γ is 1, whatever p is
        x = logits.clone().requires_grad_()
        create_loss("calfocal", 5, through_gamma=through)(x, target).backward()
        slopes.append(x.grad)
    torch.testing.assert_close(*slopes, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"through_gamma": True}, {"per": "bin"}])
@pytest.mark.parametrize("rate", [10.0, 100.0, 1000.0])  # the paper's figures have 10 and 100
def test_calfocal_is_finite_where_its_exponent_is_huge(rate: float, options: dict[str, object]) -> None:
    loss = create_loss("calfocal", 3, rate=rate, bins=1, reduction="none", **options)
    loss.observe(torch.tensor([[900.0, 0, 0]]), torch.tensor([1]))  # sure, and wrong
    loss.adapt()
    target = torch.zeros(5, dtype=torch.long)
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([[800.0, 0, 0], [8, 0, 0], [0, 60, 0], [0, 0, 0], [3, 0, 0]], dtype=dtype)
        logits.requires_grad_()
        value = loss(logits, target)
        value.sum().backward()
        assert value.isfinite().all()
        assert logits.grad.isfinite().all()
        by_autograd = torch.func.grad(lambda x: loss(x, target).sum())(logits.detach())
        torch.testing.assert_close(logits.grad, by_autograd, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("key", ["adafocal", "ada-dual-focal"])
def test_gradients_are_finite_without_an_upper_bound(key: str) -> None:
    loss = create_loss(key, 3, rate=50.0, gamma_range=(-2, math.inf))
    logits, labels = (
        torch.tensor([[9.0, 1.0, 0.0]] * 3 + [[1.0, 0.5, 0.0]] * 3),
        torch.tensor([1, 2, 1, 1, 2, 1]),
    )
    for _ in range(30):  # always wrong and always confident
        loss.observe(logits, labels)
        loss.adapt()
    assert 1e25 < loss.gamma.max() < 1e35  # of the size of the largest float32, and not beyond
    seen = torch.cat([logits, torch.eye(3) * 1e4, torch.zeros(1, 3)]).requires_grad_()
    value = loss(seen, torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 0, 0]))
    value.backward()
    assert value.isfinite()
    assert seen.grad is not None
    assert seen.grad.isfinite().all()


def test_any_frequency_of_passes() -> None:
    """Every few batches, a pass may see fewer samples than there are bins."""
    loss = create_loss("adafocal", 5)
    for number in range(50):
        logits, target = validation_set(1 + number % 7, seed=number)
        loss.observe(logits, target)
        loss.adapt()
        assert (loss.edges.diff() >= 0).all()
        assert loss(logits, target).isfinite()
    assert loss.passes == 50
