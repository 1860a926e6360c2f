"""The GPU kernels normalise as torch does.

Without a GPU Triton interprets them, which is slow and exact: every branch runs, on few pixels.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant.kernels import normalised, normalising

pytest.importorskip("triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(HERE == "cpu", reason="no GPU")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalising, "runs_triton", lambda images: True)
    if HERE == "cpu":
        for name in ("_MOMENTS", "_NORMALISE", "_GRADIENT_SUMS", "_GRADIENTS"):
            tiles = getattr(normalising, name)  # so small that there are several to be put together
            monkeypatch.setattr(normalising, name, tiles._replace(rows=2, programs=3))


def channels_last(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    images = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    images = images * 2 + 10 * (torch.arange(shape[1]) % 4).view(
        1, -1, 1, 1
    )  # far from 0, where digits get lost
    return images.to(HERE, dtype).to(memory_format=torch.channels_last)


def layer(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.3, eps=1e-3).to(HERE)
    generator = torch.Generator().manual_seed(0)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        tensor.data.copy_(0.5 + torch.rand(channels, generator=generator))
    return norm


def by_torch(norm: nn.BatchNorm2d, images: Tensor, added: Tensor | None, relu: bool) -> Tensor:
    result = norm(images)
    result = result if added is None else result + added
    return F.relu(result) if relu else result


def close(ours: Tensor | None, theirs: Tensor | None, tolerance: float) -> None:
    assert ours is not None
    assert theirs is not None
    assert ours.shape == theirs.shape
    assert (ours.double() - theirs).norm() <= tolerance * theirs.double().norm()


SHAPES = [(2, 3, 2, 3), (1, 16, 3, 3), (3, 70, 2, 1)]
SHAPES_OF_A_GPU = [(128, 64, 32, 32), (128, 2048, 4, 4), (17, 100, 7, 9)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=ON_GPU) for shape in SHAPES_OF_A_GPU)]
)
def test_values_gradients_and_running_averages(
    shape: tuple[int, ...], dtype: torch.dtype, adds: bool, relu: bool
) -> None:
    norm = layer(shape[1])
    exact_norm = layer(shape[1]).double()
    images = channels_last(*shape, seed=1, dtype=dtype).requires_grad_()
    added = (channels_last(*shape, seed=2, dtype=dtype) % 3 - 1).requires_grad_() if adds else None
    upstream = channels_last(*shape, seed=3, dtype=dtype) % 7 - 3
    result = normalised(norm, images, added, relu=relu)
    result.backward(upstream)
    exact = images.detach().double().requires_grad_()
    exact_added = None if added is None else added.detach().double().requires_grad_()
    wanted = by_torch(exact_norm, exact, exact_added, relu)
    wanted.backward(upstream.double())
    # Among millions of pixels some are so near 0 that rounding takes them to the other side of the ReLU.
    at_zero = 3e-3 if relu and images.numel() > 10_000 else 1e-5
    rounding = {torch.float32: at_zero, torch.bfloat16: 1e-2, torch.float16: 4e-3}[dtype]
    assert type(result.grad_fn).__name__ == "_NormalisedBackward"
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=torch.channels_last)
    close(result, wanted, rounding)
    close(images.grad, exact.grad, rounding)
    if added is not None and exact_added is not None:
        close(added.grad, exact_added.grad, rounding)
    for name, tensor in norm.named_parameters():
        close(tensor.grad, exact_norm.get_parameter(name).grad, max(1e-4, at_zero))
    for name, tensor in norm.named_buffers():
        close(tensor, exact_norm.get_buffer(name), 1e-5)


@pytest.mark.parametrize(
    "change", ["eval", "rows", "no statistics", "no momentum", "other shape", "subclass"]
)
def test_what_the_kernels_cannot_do_is_left_to_torch(change: str) -> None:
    images, added = channels_last(2, 3, 4, 5, seed=1), channels_last(2, 3, 4, 5, seed=2)
    norms = [layer(3), layer(3)]
    if change == "eval":
        norms = [norm.eval() for norm in norms]
    elif change == "rows":
        images = images.contiguous()
    elif change == "no statistics":
        norms = [nn.BatchNorm2d(3, track_running_stats=False).to(HERE) for _ in norms]
    elif change == "no momentum":
        norms = [nn.BatchNorm2d(3, momentum=None).to(HERE) for _ in norms]
    elif change == "other shape":
        added = added[:1]
    else:

        class Doubled(nn.BatchNorm2d):
            def forward(self, images: Tensor) -> Tensor:
                return 2 * super().forward(images)

        norms = [Doubled(3).to(HERE) for _ in norms]
    ours = normalised(norms[0], images, added, relu=True)
    theirs = by_torch(norms[1], images, added, True)
    assert torch.equal(ours, theirs)
    for name, tensor in norms[0].named_buffers():
        assert torch.equal(tensor, norms[1].get_buffer(name))


def test_a_single_pixel_has_no_variance() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        normalised(layer(3), channels_last(1, 3, 1, 1, seed=1), relu=True)


@pytest.mark.parametrize("adds", [False, True])
def test_gradients_of_gradients(adds: bool) -> None:
    norm = layer(3)
    images = channels_last(2, 3, 2, 2, seed=1).double().requires_grad_()
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = images.detach().to(dtype).requires_grad_()
        added = leaf.detach() % 2 - 1 if adds else None
        call = normalised(norm, leaf, added, relu=True) if dtype == torch.float32 else None
        if call is None:
            call = by_torch(layer(3).double(), leaf, added, True)
        (slope,) = torch.autograd.grad(call.square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), leaf)
        found.append(second)
    close(found[0], found[1], 1e-3)


def test_same_every_time() -> None:
    images = channels_last(4, 16, 5, 5, seed=1)
    first, second = (normalised(layer(16), images, relu=True) for _ in range(2))
    assert torch.equal(first, second)
