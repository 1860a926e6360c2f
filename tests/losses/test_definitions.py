"""Each loss against its definition written out naively, and in its limits."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant import create_loss, layout

from .conftest import peak_memory

K = 6


@pytest.fixture
def logits() -> Tensor:
    return 4 * torch.randn(17, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def target() -> Tensor:
    return torch.randint(K, (17,), generator=torch.Generator().manual_seed(1))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("arguments", [{}, {"ignore_index": 2}, {"reduction": "sum"}, {"reduction": "none"}])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2, 0.5, 3, 0.1, 1], dtype=torch.float64)])
def test_cross_entropy_is_torch_s(
    logits: Tensor, target: Tensor, arguments: dict[str, object], weight: Tensor | None
) -> None:
    expected = F.cross_entropy(logits, target, weight, **arguments)
    ours = create_loss("ce", K, class_weight=weight, **arguments)(logits, target)
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9)
    expected = F.cross_entropy(logits, target, weight, label_smoothing=0.1, **arguments)
    ours = create_loss("ls", K, smoothing=0.1, class_weight=weight, **arguments)(logits, target)
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2, 0.5, 3, 0.1, 1], dtype=torch.float64)])
def test_cross_entropy_with_probabilities_is_torch_s(logits: Tensor, weight: Tensor | None) -> None:
    soft = torch.rand(17, K, dtype=torch.float64).softmax(1)
    for key, arguments in (("ce", {}), ("ls", {"label_smoothing": 0.05})):
        expected = F.cross_entropy(logits, soft, weight, **arguments)
        torch.testing.assert_close(
            create_loss(key, K, class_weight=weight)(logits, soft), expected, rtol=1e-7, atol=1e-9
        )


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("ls", {"smoothing": 0}),
        ("ecp", {"weight": 0}),
        ("focal", {"gamma": 0}),
        ("inverse-focal", {"gamma": 0}),
        ("flsd", {"gamma_below": 0, "gamma_above": 0}),
        ("dual-focal", {"gamma": 0}),
        ("mbls", {"margin": 1e6}),
        ("mbls", {"weight": 0}),
        ("cals-hr", {"margin": 1e6}),
        ("cpc", {"discrimination": 0, "exclusion": 0}),
        ("mmce", {"weight": 0}),
        ("kde-xe", {"weight": 0}),
        ("mdca", {"weight": 0, "gamma": 0}),
        ("nacl", {"weight": 0}),
        ("avuc", {"weight": 0}),
        ("bsce-gra", {"gamma": 0}),
        ("sb-ece", {"weight": 0}),
        ("acls", {"margin": 1e6}),
        ("label-relaxation", {"relaxation": 0}),
        ("maxsup", {"weight": 0}),
    ],
)
def test_limits_are_cross_entropy(
    logits: Tensor, target: Tensor, key: str, arguments: dict[str, float]
) -> None:
    close(create_loss(key, K, **arguments)(logits, target), F.cross_entropy(logits, target))


def test_lagrangian_with_a_wide_margin_is_cross_entropy(logits: Tensor, target: Tensor) -> None:
    # z = -1 everywhere: the penalty is the constant P(-1), and at most λ = 1e-6.
    loss = create_loss("cals-alm", K, margin=1e9)
    assert loss(logits, target).item() == pytest.approx(F.cross_entropy(logits, target).item(), abs=2e-6)


def test_conditional_smoothing_does_not_move_all_logits_together(logits: Tensor, target: Tensor) -> None:
    """A gradient that does so, batch after batch, makes the logits grow without end."""
    logits = (20 * logits).requires_grad_()
    create_loss("acls", K)(logits, target).backward()
    assert logits.grad is not None
    close(logits.grad.sum(1), torch.zeros_like(logits.grad.sum(1)))


def test_conditional_smoothing_of_the_release(logits: Tensor, target: Tensor) -> None:
    logits = (20 * logits).requires_grad_()
    high = logits.amax(1, keepdim=True)
    top = (high - 10).clamp_min(0) ** 2
    others = (high.detach() - logits - 10).clamp_min(0) ** 2
    expected = F.cross_entropy(logits, target) + 0.1 * top.mean() + 0.01 * others.sum(1).mean() / (K - 1)
    found = create_loss("acls", K, as_released=True)(logits, target)
    close(found, expected)
    close(torch.autograd.grad(found, logits)[0], torch.autograd.grad(expected, logits)[0])


@pytest.mark.parametrize("numbers", [1 << 18, 21])  # in a block
@pytest.mark.parametrize(("shape", "window"), [((9,), 3), ((5, 4), 3), ((5, 4), 5), ((3, 4, 5), 3)])
def test_neighbour_aware_calibration(
    shape: tuple[int, ...], window: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pixel at a time, on lines, images and volumes; ignored pixels are no neighbours."""
    monkeypatch.setattr(layout, "_CPU_BLOCK", numbers)
    generator = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)
    target = torch.randint(3, (2, *shape), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.2] = -100
    found = create_loss("nacl", 3, weight=0.7, window=window, reduction="none")(logits, target)
    for place in itertools.product(*map(range, target.shape)):
        if target[place] == -100:
            assert found[place] == 0
            continue
        first, *at = place
        around = [
            range(max(0, x - window // 2), min(n, x + window // 2 + 1))
            for x, n in zip(at, shape, strict=True)
        ]
        labels = [int(target[(first, *near)]) for near in itertools.product(*around)]
        labels = [label for label in labels if label != -100]
        own = logits[(first, slice(None), *at)]
        share = torch.tensor([labels.count(k) / len(labels) for k in range(3)], dtype=torch.float64)
        close(found[place], -own.log_softmax(0)[target[place]] + 0.7 * (own - share).abs().mean())


def test_neighbour_aware_calibration_needs_an_odd_window_and_three_axes_at_most() -> None:
    with pytest.raises(ValueError, match=r"^window must be odd.*got 4"):
        create_loss("nacl", 3, window=4)
    with pytest.raises(ValueError, match=r"up to 3 spatial axes, got 4"):
        create_loss("nacl", 3)(torch.zeros(1, 3, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1, 1, dtype=torch.long))


def lower_probability(probabilities: list[float], p: float, rank: int | str) -> float:
    below = sorted((s for s in probabilities if s < p), reverse=True)
    padded = [*below, 0.0, 0.0, 0.0]
    if rank == "all":
        return sum(below) / len(below) if below else 0.0
    ranks = [rank] if isinstance(rank, int) else [int(r) for r in rank.split("+")]
    return sum(padded[r - 1] for r in ranks) / len(ranks)


@pytest.mark.parametrize("rank", [1, 2, 3, "1+2", "1+2+3", "all"])
def test_dual_focal_ranks(logits: Tensor, target: Tensor, rank: int | str) -> None:
    values = create_loss("dual-focal", K, gamma=2.5, rank=rank, reduction="none")(logits, target)
    for row, label, value in zip(logits, target, values, strict=True):
        s = row.softmax(0)
        p = s[label]
        q = lower_probability(s.tolist(), p.item(), rank)
        assert value.item() == pytest.approx((-((1 - p + q) ** 2.5) * p.log()).item(), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dual_focal_counts_classes_whose_probability_underflows(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -1.0, -2.0, -1e4]], dtype=dtype)
    p, first, second, _ = logits[0].softmax(0).tolist()
    expected = -(1 - p + (first + second) / 3) * math.log(p)
    value = create_loss("dual-focal", 4, gamma=1, rank="all")(logits, torch.tensor([0]))
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_soft_brier_with_class_weights_weighs_elements(logits: Tensor) -> None:
    soft = torch.rand(17, K, dtype=torch.float64).softmax(1)
    soft[3] = 0
    soft[3, 1] = 1
    weight = torch.tensor([1.0, 0.0, 0.5, 3, 0.1, 1], dtype=torch.float64)
    expected = (soft * weight).sum(1) * (logits.softmax(1) - soft).square().sum(1)
    close(create_loss("brier", K, class_weight=weight, reduction="none")(logits, soft), expected)
    for key in ("ce", "ls", "ecp", "mbls", "cals-alm"):  # an element without any weight
        assert create_loss(key, K, class_weight=weight)(logits, soft).isfinite()


def test_dual_focal_constant(logits: Tensor, target: Tensor) -> None:
    p = logits.softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    expected = -((1 - p + 0.25) ** 3) * p.log()
    close(create_loss("dual-focal", K, gamma=3, constant=0.25, reduction="none")(logits, target), expected)


def test_dual_focal_takes_the_strictly_smaller() -> None:
    logits = torch.tensor(
        [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True
    )
    values = create_loss("dual-focal", 4, gamma=1, reduction="none")(logits, torch.tensor([0, 0]))
    s = logits.detach().softmax(1)
    assert values[0].item() == pytest.approx((-(1 - s[0, 0] + s[0, 2]) * s[0, 0].log()).item())
    assert values[1].item() == pytest.approx((-(1 - s[1, 0]) * s[1, 0].log()).item())  # none below: q = 0
    values.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 2].item() == pytest.approx(logits.grad[0, 3].item())  # the tie is shared


def test_pairwise_constraints(logits: Tensor, target: Tensor) -> None:
    values = create_loss("cpc", K, discrimination=3, exclusion=2, reduction="none")(logits, target)
    for row, y, value in zip(logits, target.tolist(), values, strict=True):
        log_sigmoid = lambda i, j, row=row: F.logsigmoid(row[i] - row[j])  # noqa: E731
        others = [k for k in range(K) if k != y]
        discrimination = -sum(log_sigmoid(y, j) for j in others) / (K - 1)
        pairs = itertools.permutations(others, 2)
        exclusion = -sum(log_sigmoid(i, j) / 2 for i, j in pairs) / ((K - 1) * (K - 2))
        expected = -row.log_softmax(0)[y] + 3 * discrimination + 2 * exclusion
        assert value.item() == pytest.approx(expected.item(), rel=1e-10)


def mmce_residuals(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    confidence, prediction = logits.softmax(1).max(1)
    correct = (prediction == target).double()
    kernel = (-(confidence[:, None] - confidence[None, :]).abs() / 0.4).exp()
    return confidence, correct, kernel


def test_mmce_is_the_sum_over_pairs(logits: Tensor, target: Tensor) -> None:
    logits[3] = logits[8]  # equal confidences
    one, other = (logits.clone().requires_grad_() for _ in range(2))
    loss = create_loss("mmce", K, weight=0.7)(one, target)
    confidence, correct, kernel = mmce_residuals(other, target)
    residual = (correct - confidence) / len(target)
    expected = F.cross_entropy(other, target) + 0.7 * (residual @ kernel @ residual).sqrt()
    close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_weighted_mmce_is_the_sum_over_pairs(logits: Tensor, target: Tensor) -> None:
    target[:8] = logits[:8].argmax(1)
    one, other = (logits.clone().requires_grad_() for _ in range(2))
    loss = create_loss("mmce-weighted", K)(one, target)
    confidence, correct, kernel = mmce_residuals(other, target)
    right, wrong = correct.bool(), ~correct.bool()
    n, m = right.sum(), wrong.sum()
    a, b = (1 - confidence)[right], confidence[wrong]
    squared = (
        (a @ kernel[right][:, right] @ a) / n**2
        + (b @ kernel[wrong][:, wrong] @ b) / m**2
        - 2 * (a @ kernel[right][:, wrong] @ b) / (n * m)
    )
    expected = F.cross_entropy(other, target) + 2 * squared.sqrt()
    close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_weighted_mmce_with_one_group_is_cross_entropy(logits: Tensor) -> None:
    for target in (logits.argmax(1), logits.argmin(1)):
        close(create_loss("mmce-weighted", K)(logits, target), F.cross_entropy(logits, target))


def test_mmce_of_perfect_confidence_has_a_finite_gradient() -> None:
    logits = torch.tensor([[1e4, 0.0], [0.0, 1e4]], requires_grad=True)
    create_loss("mmce", 2)(logits, torch.tensor([0, 1])).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("bandwidth", [0.001, 0.05, 0.5])
def test_dirichlet_kernel(logits: Tensor, target: Tensor, bandwidth: float) -> None:
    logits = (logits / 8).requires_grad_()
    other = logits.detach().clone().requires_grad_()
    loss = create_loss("kde-xe", K, weight=1.0, bandwidth=bandwidth)(logits, target)
    s = other.softmax(1)
    density = torch.distributions.Dirichlet(s / bandwidth + 1)
    log_kernel = torch.stack([density.log_prob(row) for row in s])  # [j, i]: of s_j under s_i
    log_kernel = log_kernel - torch.diag(torch.full((17,), torch.inf, dtype=torch.float64))
    ratio = log_kernel.softmax(1) @ F.one_hot(target, K).double()
    expected = F.cross_entropy(other, target) + (ratio - s).abs().sum(1).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-10)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("key", "samples"), [("cpc", 64), ("mmce", 256), ("mmce-weighted", 256)])
def test_a_thousand_classes_fit_in_an_eighth_of_a_gibibyte(key: str, samples: int) -> None:
    """All pairs of classes of 64 samples at once would take a quarter."""
    logits, target = torch.randn(samples, 1000, requires_grad=True), torch.randint(1000, (samples,))
    loss = create_loss(key, 1000)
    assert 0 < peak_memory(lambda: loss(logits, target).backward()) < 2**27


def test_flsd_switches_gamma_without_differentiating_it() -> None:
    logits = torch.tensor([[0.0, 1.5, 0, 0, 0], [2.0, 0, 0, 0, 0]], dtype=torch.float64)
    p = logits.softmax(1)[:, 0]
    assert p[0] < 0.2 < p[1]
    values = create_loss("flsd", 5, reduction="none")(logits, torch.tensor([0, 0]))
    close(values, -((1 - p) ** torch.tensor([5.0, 3.0], dtype=torch.float64)) * p.log())


@pytest.mark.parametrize("key", ["ce", "focal", "dual-focal", "mbls", "cals-alm", "adafocal"])
def test_the_gradient_is_the_only_tensor_of_the_logits_size(key: str) -> None:
    logits, target = torch.randn(4096, 1000, requires_grad=True), torch.randint(1000, (4096,))
    loss = create_loss(key, 1000)
    assert peak_memory(lambda: loss(logits, target).backward()) < 2 * logits.nbytes
