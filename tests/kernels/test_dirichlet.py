import numpy as np
import pytest
import torch
from scipy.stats import dirichlet

from calibrant.kernels import dirichlet as module
from calibrant.kernels import dirichlet_bandwidth, dirichlet_errors


def batch(seed, size, classes=3, spread=1.5):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * spread
    return logits, torch.randint(classes, (size,), generator=generator)


def errors(*arguments, **options):
    return torch.cat(list(dirichlet_errors(*arguments, **options)))


def log_kernels(logits, bandwidth):
    """Log-density of prediction j under the Dirichlet distribution around prediction i, all pairs."""
    probability = logits.softmax(1).numpy()
    return np.array(
        [[dirichlet.logpdf(s_j, s_i / bandwidth + 1) for s_i in probability] for s_j in probability]
    )


def by_loops(logits, target, bandwidth):
    probability, label = logits.softmax(1).numpy(), np.eye(logits.shape[1])[target.numpy()]
    kernel = np.exp(log_kernels(logits, bandwidth))
    result = []
    for j in range(len(logits)):
        others = [i for i in range(len(logits)) if i != j]
        ratio = sum(kernel[j, i] * label[i] for i in others) / sum(kernel[j, i] for i in others)
        result.append(np.abs(ratio - probability[j]).sum())
    return np.array(result)


@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize("bandwidth", [0.01, 0.1, 1.0])
def test_equals_scipy(bandwidth, classes):
    logits, target = batch(classes, 25, classes)
    np.testing.assert_allclose(
        errors(logits, target, bandwidth), by_loops(logits, target, bandwidth), rtol=1e-9, atol=1e-12
    )


def test_equal_predictions_give_the_frequencies_of_the_others():
    target = torch.tensor([0, 0, 0, 1])
    ours = errors(torch.zeros(4, 2, dtype=torch.float64), target, 0.1)
    # The others of a 0 are 2/3 zeros, those of the 1 are all zeros; the prediction is (1/2, 1/2).
    expected = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0], dtype=torch.float64)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("pairs", [1, 60, 41])
@pytest.mark.parametrize("gradient", [False, True])
def test_pieces_make_no_difference(monkeypatch, pairs, gradient):
    logits, target = batch(1, 20)
    whole_logits, cut_logits = (logits.clone().requires_grad_(gradient) for _ in range(2))
    whole = errors(whole_logits, target, 0.05)
    monkeypatch.setattr(module, "_PAIRS", pairs)
    parts = list(dirichlet_errors(cut_logits, target, 0.05))
    assert len(parts) == -(-20 // max(1, pairs // 20))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-14)
    if gradient:
        for given, result in ((whole_logits, whole), (cut_logits, torch.cat(parts))):
            result.sum().backward()
            assert given.grad.abs().sum() > 0
        torch.testing.assert_close(cut_logits.grad, whole_logits.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("filler", [0.0, 50.0, torch.nan])
def test_what_is_not_valid_does_not_count(filler):
    logits, target = batch(2, 20)
    valid = torch.arange(20) % 3 != 0
    expected = errors(logits[valid], target[valid], 0.1)
    noisy = torch.where(valid.unsqueeze(1), logits, filler)
    torch.testing.assert_close(errors(noisy, target, 0.1, valid)[valid], expected, rtol=1e-12, atol=1e-14)


def test_gradient():
    logits, target = batch(3, 8)
    valid = torch.ones(8, dtype=torch.bool)
    valid[5] = False

    def total(logits):
        return errors(logits, target, 0.2, valid)[valid].mean()

    assert torch.autograd.gradcheck(total, logits.requires_grad_())


def test_extremes_are_finite():
    target = torch.tensor([0, 1, 2, 0])
    for logits in (
        torch.eye(3)[[0, 1, 2, 1]] * 1e4,
        torch.eye(3)[[0, 1, 2, 1]] * 3e38,
        torch.zeros(4, 3),
        torch.tensor([[1e4, 0.0, 0.0]]).expand(4, 3),
    ):
        for bandwidth in (1e-4, 1.0):
            result = errors(logits, target, bandwidth)
            assert result.isfinite().all()
            assert ((result >= 0) & (result <= 2 + 1e-9)).all()


def test_one():
    assert errors(torch.randn(1, 3), torch.tensor([1]), 0.1).isfinite().all()


def test_none():
    assert errors(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 0.1).shape == (0,)


def test_float32_loses_nothing():
    logits, target = batch(4, 30)
    single = logits.float()
    result = errors(single, target, 0.001)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, errors(single.double(), target, 0.001), rtol=0, atol=0)


@pytest.mark.parametrize("spread", [0.05, 0.3, 1.0, 3.0])
def test_bandwidth_is_the_likeliest(spread):
    logits, _ = batch(5, 20, spread=spread)
    candidates = [10 ** (exponent / 2) for exponent in range(-8, 1)]

    def likelihood(bandwidth):
        kernels = np.exp(log_kernels(logits, bandwidth))
        np.fill_diagonal(kernels, 0)
        with np.errstate(divide="ignore"):
            return np.log(kernels.mean(1)).mean()

    values = [likelihood(candidate) for candidate in candidates]
    assert dirichlet_bandwidth(logits) == pytest.approx(candidates[int(np.argmax(values))])


def test_bandwidth_follows_the_data():
    narrow, wide = (dirichlet_bandwidth(batch(6, 200, spread=spread)[0]) for spread in (0.02, 1.0))
    assert narrow < wide


def test_bandwidth_of_equal_predictions_is_the_smallest():
    assert dirichlet_bandwidth(torch.zeros(5, 3)) == pytest.approx(1e-4)
