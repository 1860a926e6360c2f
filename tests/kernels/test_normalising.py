"""The GPU kernels normalise as torch does.

Without a GPU Triton interprets them, which is slow and exact: every branch runs, on few pixels.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from calibrant.kernels import normalised, normalising
from calibrant.training.models import create_model
from calibrant.training.models.cifar_resnet import CifarResNet, basic_block

pytest.importorskip("triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(HERE == "cpu", reason="no GPU")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at what is not finite
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    if HERE == "cuda":
        return
    monkeypatch.setattr(normalising, "runs_triton", lambda images: images.dtype in DTYPES)
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
    assert by_kernels(result)
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


def by_kernels(result: Tensor) -> bool:
    return type(result.grad_fn).__name__ == "_NormalisedBackward"


def double(norm: nn.BatchNorm2d) -> None:
    """Make it give twice as much."""

    def forward(images: Tensor) -> Tensor:
        return 2 * F.batch_norm(images, None, None, training=True)

    norm.forward = forward  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[nn.BatchNorm2d], object]] = {
    "evaluation": lambda norm: norm.eval(),
    "no statistics": lambda norm: setattr(norm, "track_running_stats", False),
    "no count": lambda norm: setattr(norm, "num_batches_tracked", None),
    "no momentum": lambda norm: setattr(norm, "momentum", None),
    "a hook": lambda norm: norm.register_forward_hook(lambda norm, images, result: 2 * result),
    "a hook before": lambda norm: norm.register_forward_pre_hook(lambda norm, images: 2 * images[0]),
    "another function": double,
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_the_kernels_do_not_know_are_left_to_torch(change: str) -> None:
    images, added = (channels_last(2, 3, 4, 5, seed=seed) for seed in (1, 2))
    norms = [layer(3), layer(3)]
    for norm in norms:
        CHANGES[change](norm)
    ours = normalised(norms[0], images, added, relu=True)
    assert torch.equal(ours, by_torch(norms[1], images, added, True))
    for name, tensor in norms[0].named_buffers():
        assert torch.equal(tensor, norms[1].get_buffer(name))


def test_other_classes_of_layers_are_left_to_torch() -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, images: Tensor) -> Tensor:
            return 2 * super().forward(images)

    images = channels_last(2, 3, 4, 5, seed=1)
    ours, theirs = Doubled(3).to(HERE), Doubled(3).to(HERE)
    assert torch.equal(normalised(ours, images, relu=False), theirs(images))


def test_types_that_do_not_go_together() -> None:
    with pytest.raises(RuntimeError):  # torch's own
        normalised(layer(3).double(), channels_last(2, 3, 4, 5, seed=1), relu=True)


def layouts() -> dict[str, tuple[Tensor, Tensor | None]]:
    images, added = (channels_last(2, 3, 4, 5, seed=seed) for seed in (1, 2))
    return {
        "rows": (images.contiguous(), None),
        "cropped": (images[..., 1:], None),
        "other rows": (images, added.contiguous()),
        "one for all": (images, added[:1]),
        "another type": (images, added.bfloat16()),
        "double": (images.double(), None),
    }


@pytest.mark.parametrize("layout", layouts())
def test_images_that_the_kernels_cannot_take_are_left_to_torch(layout: str) -> None:
    images, added = layouts()[layout]
    ours, theirs = (layer(3).to(torch.double if layout == "double" else torch.float) for _ in range(2))
    result = normalised(ours, images, added, relu=True)
    assert not by_kernels(result)
    assert torch.equal(result, by_torch(theirs, images, added, True))


def test_a_single_pixel_has_no_variance() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        normalised(layer(3), channels_last(1, 3, 1, 1, seed=1), relu=True)


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_what_is_not_finite_spreads(odd: float) -> None:
    images = channels_last(2, 3, 2, 2, seed=1)
    images[0, 0, 1, 1] = odd
    norm = layer(3)
    result = normalised(norm, images, relu=True)
    assert result[:, 0].isnan().all()
    assert result[:, 1:].isfinite().all()
    assert norm.running_var is not None
    assert norm.running_var[0].isnan()


def test_a_mean_far_from_0_and_from_the_first_pixel() -> None:
    images = 300 + channels_last(4, 1, 16, 16, seed=1) / 2
    images[0, 0, 0, 0] = 0
    norm, exact = layer(1), layer(1).double()
    close(normalised(norm, images, relu=False), exact(images.double()), 1e-5)
    close(norm.running_var, exact.running_var, 1e-5)


def test_an_upstream_gradient_that_lies_otherwise() -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        images = channels_last(2, 3, 2, 2, seed=1, dtype=dtype).requires_grad_()
        norm = layer(3).to(dtype)
        result = normalised(norm, images, relu=True)
        result.mean((2, 3)).square().sum().backward()
        found.append(images.grad)
    close(found[0], found[1], 1e-5)


@pytest.mark.parametrize("trained", ["images", "weight", "bias", "added"])
def test_only_some_need_a_gradient(trained: str) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        images = channels_last(2, 3, 2, 2, seed=1).to(dtype)
        added = channels_last(2, 3, 2, 2, seed=2).to(dtype) % 2 - 1
        norm = layer(3).to(dtype).requires_grad_(False)
        parts = {"images": images, "weight": norm.weight, "bias": norm.bias, "added": added}
        parts[trained].requires_grad_()
        result = normalised(norm, images, added, relu=True)
        (gradient,) = torch.autograd.grad(result.square().sum(), parts[trained])
        found.append(gradient)
    close(found[0], found[1], 1e-4)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("adds", ["nothing", "another", "itself"])
def test_gradients_of_gradients(adds: str, relu: bool) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        norm = layer(3).to(dtype)
        images = channels_last(2, 3, 2, 2, seed=1).to(dtype).requires_grad_()
        other = (channels_last(2, 3, 2, 2, seed=2).to(dtype) % 2 - 1).requires_grad_()
        added = {"nothing": None, "another": other, "itself": images}[adds]
        result = normalised(norm, images, added, relu=relu)
        assert by_kernels(result) == (dtype == torch.float32)
        inputs = [images, norm.weight, norm.bias, *([other] if adds == "another" else [])]
        slopes = torch.autograd.grad(result.pow(3).sum(), inputs, create_graph=True)
        total = torch.stack([slope.square().sum() for slope in slopes]).sum()
        found.append([*slopes, *torch.autograd.grad(total, inputs)])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, 1e-3)


def test_what_was_added_may_change_afterwards() -> None:
    images, added = (channels_last(2, 3, 2, 2, seed=seed).requires_grad_() for seed in (1, 2))
    changed = added * 1
    result = normalised(layer(3), images, changed, relu=True)
    changed.add_(1)
    result.sum().backward()
    assert added.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own formulas
def test_forward_mode() -> None:
    images = channels_last(2, 3, 2, 2, seed=1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(images, torch.ones_like(images))
        tangent = forward_ad.unpack_dual(normalised(layer(3), dual, relu=False)).tangent
    assert tangent.abs().max() < 1e-4  # the same for all pixels is nothing


@ON_GPU
def test_same_every_time() -> None:
    found = []
    for _ in range(3):
        images = channels_last(64, 100, 16, 16, seed=1).requires_grad_()
        norm = layer(100)
        normalised(norm, images, images, relu=True).square().sum().backward()
        found.append((images.grad, norm.weight.grad, norm.running_var))
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs)


def test_a_network() -> None:
    torch.manual_seed(0)
    network = CifarResNet(5, basic_block, 1, (1, 1), width=4, channels=3)
    network = network.to(HERE).to(memory_format=torch.channels_last)
    exact = copy.deepcopy(network).double()
    images = channels_last(3, 3, 4, 4, seed=1) / 10
    logits, wanted = network(images), exact(images.double())
    close(logits, wanted, 1e-3)
    logits.square().sum().backward()
    wanted.square().sum().backward()
    for ours, theirs in zip(network.parameters(), exact.parameters(), strict=True):
        close(ours.grad, theirs.grad, 2e-2)


@ON_GPU
def test_a_deep_network_is_no_further_off_than_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    network = create_model("cifar-resnet-50", 5, {"channels": 3, "image_size": 32})
    network = network.to(HERE).to(memory_format=torch.channels_last)
    images = channels_last(32, 3, 32, 32, seed=1) / 10

    def outcome(network: nn.Module, images: Tensor) -> list[Tensor]:
        logits = network(images)
        logits.square().sum().backward()
        return [logits.detach(), *(each.grad for each in network.parameters() if each.grad is not None)]

    exact = outcome(copy.deepcopy(network).double(), images.double())
    ours = outcome(copy.deepcopy(network), images)
    monkeypatch.setattr(normalising, "_by_kernels", lambda *arguments: False)
    theirs = outcome(network, images)
    errors = [
        [float((part.double() - true).norm() / true.norm()) for part, true in zip(found, exact, strict=True)]
        for found in (ours, theirs)
    ]
    assert sum(errors[0]) <= 2 * sum(errors[1])
    assert all(mine <= max(2e-2, 2 * its) for mine, its in zip(*errors, strict=True))
    assert errors[0][0] < 1e-3


def test_a_network_for_several_processes() -> None:
    network = nn.SyncBatchNorm.convert_sync_batchnorm(create_model("cifar-resnet-18", 5, {"channels": 3}))
    norms = [each for each in network.modules() if isinstance(each, nn.SyncBatchNorm)]
    assert len(norms) == 20
    result = normalised(norms[0].eval().to(HERE), channels_last(1, 64, 2, 2, seed=1), relu=True)
    assert not by_kernels(result)
