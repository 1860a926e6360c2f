"""The GPU kernel computes what the losses compute by operations of torch.

Without a GPU Triton interprets it, which is slow and exact: every branch runs, on few elements.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import calibrant
from calibrant.kernels import Composition, PenaltyTerm, fused, fused_loss, launch, operators
from calibrant.layout import Elements
from calibrant.losses import Loss, base
from calibrant.losses.cross_entropy import cross_entropy
from calibrant.losses.margin import margin_penalty

pytest.importorskip("triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at elements that are masked

COVERED = {
    "ce": {},
    "ls": {"smoothing": 0.1},
    "ecp": {},
    "brier": {},
    "focal": {},
    "flsd": {},
    "inverse-focal": {},
    "dual-focal": {},
    "mbls": {"margin": 3},
    "maxsup": {},
    "label-relaxation": {},
    "bsce-gra": {},
    "cals-alm": {"margin": 3},
    "cals-alm p2": {"margin": 3, "penalty": "p2"},
    "cals-alm p3": {"margin": 3, "penalty": "p3"},
    "cals-alm all": {"margin": 3, "per": "all"},
    "cals-hr": {"margin": 3},
    "adafocal": {},
    "ada-dual-focal": {},
    "calfocal": {},
    "calfocal bin": {"per": "bin"},
    "calfocal through": {"through_gamma": True},
    "ada-scale": {"margin": 3},
    "ada-scale alone": {"weight": 0.0},
}
SOFT = [name for name in COVERED if calibrant.LOSSES[name.split()[0]].accepts_probabilities]
DIFFERENT = ["ls", "brier", "dual-focal", "cals-alm", "adafocal", "ada-scale"]
"""Losses that visit the classes for different sums."""
every_loss = pytest.mark.parametrize("name", COVERED)


def create(name: str, classes: int, **shared: object) -> Loss:
    """A loss that has learned something different for every class or bin."""
    loss = calibrant.create_loss(name.split()[0], classes, **COVERED[name], **shared)
    generator = torch.Generator().manual_seed(1)
    for buffer, low, high in (
        ("multiplier", 0, 1),
        ("penalty_weight", 1, 2),
        ("accuracy", 0, 1),
        ("gamma", -2, 5),
        ("scale", 0.5, 2),
        ("offset", -1, 1),
    ):
        values = dict(loss.named_buffers()).get(buffer)
        if values is not None:
            low = 0.5 if buffer == "gamma" and name.startswith("calfocal") else low
            values.copy_(low + (high - low) * torch.rand(values.shape, generator=generator))
    if "accuracy" in dict(loss.named_buffers()):
        loss.passes += 1
    return loss.to(HERE)


def batch(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(shape, generator=generator)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    return logits.to(HERE), target.to(HERE)


def by_kernel(loss: Loss, logits: Tensor, target: Tensor) -> Tensor:
    composition, options = loss.composition(), loss._kernel_options()
    assert composition is not None
    assert composition.has_device_form
    eager = partial(loss._unless_changed, composition, options)
    return fused_loss(composition, logits, target, eager, options)


def by_torch(loss: Loss, logits: Tensor, target: Tensor) -> Tensor:
    return loss._reduced(loss.elements(logits, target))


def run(loss: Loss, logits: Tensor, target: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Value and gradient by the kernel."""
    logits = logits.detach().requires_grad_()
    value = by_kernel(loss, logits, target)
    value.backward(torch.ones_like(value) if upstream is None else upstream)
    return value.detach(), logits.grad


def expected(
    loss: Loss, logits: Tensor, target: Tensor, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same in float64, by operations of torch."""
    logits = logits.detach().double().requires_grad_()
    target = target.double() if target.is_floating_point() else target
    value = by_torch(loss, logits, target)
    value.backward(torch.ones_like(value) if upstream is None else upstream.double())
    return value.detach(), logits.grad


def assert_same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


def test_the_number_that_launches_share_is_left_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, taken = torch.zeros((), dtype=torch.int32, device=HERE), []
    monkeypatch.setattr(launch, "_finished", lambda where: taken.append(where) or shared)
    loss, other = create("ce", 5), create("focal", 5)
    logits, target = batch(3, 5, 7000)
    for each in (loss, other, loss):
        assert_same(run(each, logits, target), expected(each, logits, target))
        assert shared == 0
    assert len(taken) == 3


@every_loss
@pytest.mark.parametrize("shape", [(7, 5), (2, 21, 3, 2)])
def test_values_and_gradients(name: str, shape: tuple[int, ...]) -> None:
    logits, target = batch(*shape)
    target.view(-1)[::3] = -100
    loss = create(name, shape[1])
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("name", ["calfocal", "calfocal through"])
def test_exponents_that_overflow(name: str) -> None:
    logits, target = batch(7, 5)
    loss = create(name, 5)
    loss.rate = 1000.0
    loss.accuracy.zero_()
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("name", ["cals-alm", "cals-alm p2", "cals-alm p3"])
def test_large_multipliers(name: str) -> None:
    logits, target = batch(7, 5)
    loss = create(name, 5)
    loss.multiplier.mul_(1e6)
    assert_same(run(loss, logits, target), expected(loss, logits, target), 1e-6)


@every_loss
def test_an_ignored_element_may_hold_anything(name: str) -> None:
    logits, target = batch(5, 4)
    target[1:4] = -100
    loss = create(name, 4)
    wanted = run(loss, logits, target)
    logits[1], logits[2, 0], logits[3, 1] = torch.nan, -torch.inf, torch.inf
    for found, right in zip(run(loss, logits, target), wanted, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 3, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_several_upstream_gradients_at_once(reduction: str, shape: tuple[int, ...]) -> None:
    logits, target = batch(*shape)
    target.view(-1)[::3] = -100
    loss = create("cals-alm", shape[1], reduction=reduction)
    logits.requires_grad_()
    value = by_kernel(loss, logits, target)
    upstream = torch.randn(2, *value.shape).to(HERE)
    (slopes,) = torch.autograd.grad(value, logits, upstream, is_grads_batched=True)
    for each, slope in zip(upstream, slopes, strict=True):
        assert_same((slope,), expected(loss, logits, target, each)[1:])


def use_tiles(monkeypatch: pytest.MonkeyPatch, elements: int, classes: int, tiles: int = 1) -> None:
    tiling = launch.Tiling(elements, classes, warps=1, unroll=4, tiles=tiles)
    monkeypatch.setattr(launch, "tiling", lambda *shape: tiling)
    monkeypatch.setattr(launch, "_plans", {})


@pytest.mark.parametrize(
    ("name", "tile", "classes"),
    [
        *((name, (2, 2), 3) for name in COVERED),
        # How elements are shared out does not depend on the loss.
        *((name, tile, 5) for name in DIFFERENT for tile in ((2, 2), (2, 8), (1, 8, 2))),
        *((name, (2, 1), 3) for name in DIFFERENT),
    ],
)
def test_more_than_a_tile_holds(
    name: str, tile: tuple[int, ...], classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiles(monkeypatch, *tile)
    logits, target = batch(3, classes)  # two programs, of which the second has less to do
    target[1] = -100
    loss = create(name, classes)
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tiles_after_one_another_of_images(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, 1, 4, 4)  # six pixels, of which a program has four
    logits, target = batch(2, 3, 2, 3)
    target[1, 0, :2] = -100
    loss = create("dual-focal", 3, class_weight=[1.0, 0.5, 2.0], reduction=reduction)
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("margin", [3.0, 3.3, 0.1])
@pytest.mark.parametrize("tile", [None, (8, 2)])
def test_a_class_that_is_hardly_too_far(
    tile: tuple[int, int] | None, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile:
        use_tiles(monkeypatch, *tile)
    generator = torch.Generator().manual_seed(0)
    top = 8 * torch.randn(40, generator=generator)
    top[0] = margin + 0.001
    at_limit = (top.double() - margin).float()
    below, above = (torch.nextafter(at_limit, torch.tensor(end)) for end in (-torch.inf, torch.inf))
    logits = torch.stack([top, at_limit, below, above], 1).to(HERE)
    loss = create("cals-hr", 4)
    loss.margin = margin
    for rows, target in zip(logits.split(8), torch.arange(5, device=HERE) % 4, strict=True):
        labels = target.expand(8)
        assert_same(run(loss, rows, labels), expected(loss, rows, labels))


@pytest.mark.parametrize("tile", [None, (2, 2)])
def test_a_runner_up_that_is_hardly_ahead(
    tile: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile:
        use_tiles(monkeypatch, *tile)
    quarter = torch.tensor(0.25)
    behind = torch.nextafter(quarter, quarter - 1)
    # As far below the highest as these are, the two would be equal.
    logits = torch.stack([quarter + 8, quarter + 0.25, behind, quarter]).to(HERE)[None]
    target = torch.tensor([1], device=HERE)
    loss = create("dual-focal", 4)
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.skipif(HERE == "cpu", reason="no GPU")
@every_loss
@pytest.mark.parametrize("shape", [(2, 21, 65, 37), (2, 21, 64, 64), (300, 1000), (20, 20_000)])
def test_tiles_of_a_gpu(name: str, shape: tuple[int, ...]) -> None:
    logits, target = batch(*shape)
    target.view(-1)[::3] = -100
    loss = create(name, shape[1])
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("name", "tile"), [("ce", None), ("cals-alm", (2, 4)), ("dual-focal", None), ("dual-focal", (2, 4))]
)
def test_reductions_and_class_weights(
    name: str,
    reduction: str,
    weighted: bool,
    tile: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tile is not None:
        use_tiles(monkeypatch, *tile)
    logits, target = batch(2, 4, 3)
    target[0, ::2] = 255
    weight = [0.5, 2.0, 0.0, 1.0] if weighted else None
    loss = create(name, 4, reduction=reduction, class_weight=weight, ignore_index=255)
    upstream = 1 + torch.rand(target.shape if reduction == "none" else (), device=HERE)
    assert_same(run(loss, logits, target, upstream), expected(loss, logits, target, upstream))


@pytest.mark.parametrize(("shape", "tile"), [((3, 5), None), ((1, 3, 3), (2, 2))])
@pytest.mark.parametrize("name", SOFT)
def test_probabilities(
    name: str, shape: tuple[int, ...], tile: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        use_tiles(monkeypatch, *tile)
    logits, _ = batch(*shape)
    target = batch(*shape, seed=3)[0].softmax(1)
    loss = create(name, shape[1])
    assert_same(run(loss, logits, target), expected(loss, logits, target))


class Composed(Loss):
    """A loss of given parts."""

    accepts_probabilities = True

    def __init__(self, classes: int, composition: Composition) -> None:
        super().__init__(classes)
        self.parts = composition

    def composition(self) -> Composition:
        return self.parts


ONE, PER_CLASS = torch.tensor(3.3, dtype=torch.float64), torch.tensor([0.5, 1.7, 3.0, 4.4, 9.0]).double()


@pytest.mark.parametrize("variant", ["hinge", "phr", "p2", "p3"])
@pytest.mark.parametrize(("margin", "tile"), [(ONE, None), (PER_CLASS, (2, 2))], ids=["one", "per class"])
def test_learned_margins(
    margin: Tensor, variant: str, tile: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        use_tiles(monkeypatch, *tile)
    margin, logits, target = margin.to(HERE), *batch(4, 5)
    unit = 2.0 if variant == "hinge" else margin
    penalty = margin_penalty(variant, margin=margin, unit=unit, multiplier=PER_CLASS.to(HERE) / 5)
    loss = Composed(5, Composition(cross_entropy(), penalty))
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("name", ["ce", "ls", "brier", "dual-focal", "cals-alm", "adafocal"])
@pytest.mark.parametrize(("offset", "tile"), [(False, None), (True, (2, 2))])
def test_learned_scale_and_offset(
    name: str, offset: bool, tile: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        use_tiles(monkeypatch, *tile)
    parts = create(name, 5).composition()
    assert parts is not None
    scale = torch.tensor(0.6, dtype=torch.float64, device=HERE)
    loss = Composed(5, replace(parts, scale=scale, offset=PER_CLASS.to(HERE) if offset else None))
    logits, target = batch(4, 5)
    target[1] = -100
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("variant", ["hinge", "phr"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_numbers_of_one_element_and_plain_ones(variant: str, shape: tuple[int, ...]) -> None:
    logits, target = batch(4, 5)
    margin = torch.full(shape, 3.3, dtype=torch.float64, device=HERE)
    penalty = margin_penalty(variant, margin=margin, unit=2.0, multiplier=0.7)
    loss = Composed(5, Composition(cross_entropy(), penalty))
    assert_same(run(loss, logits, target), expected(loss, logits, target))


def test_plain_scales_one_after_another() -> None:
    logits, target = batch(4, 5)
    for scale in (1.0, 2.0, 1.0, -1.0):
        loss = Composed(5, Composition(cross_entropy(), scale=scale))
        assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("mask", [-1e4, -1e9, 1e6])
@pytest.mark.parametrize("classes", [5, 3000])
def test_a_masked_class_or_a_common_number_costs_scaled_logits_no_digits(classes: int, mask: float) -> None:
    logits, target = batch(4, classes)
    target = target.clamp_min(1)
    logits = logits + mask if mask > 0 else logits
    logits[:, 0] = min(mask, 0.0) or logits[:, 0]
    logits = logits.float().double()  # as the kernel sees them
    loss = Composed(classes, Composition(cross_entropy(), scale=1.5))
    assert_same(run(loss, logits.float(), target), expected(loss, logits, target))


def test_forms_that_share_a_function_have_names_of_their_own() -> None:
    first, second = (PenaltyTerm(sums, max, min) for sums in (abs, sum))
    assert first.name != second.name


def test_a_loss_with_its_own_per_sample_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "can_fuse", lambda logits, target: True)

    class Twice(calibrant.losses.CrossEntropy):
        def per_sample(self, elements: Elements) -> Tensor:
            return 2 * super().per_sample(elements)

    logits, target = batch(4, 5)
    once = calibrant.create_loss("ce", 5)(logits, target)
    torch.testing.assert_close(Twice(5)(logits, target), 2 * once)


@every_loss
def test_ties(name: str) -> None:
    logits = torch.tensor([[2.0, 2.0, -9.0, -9.0], [1.0, 0.0, 0.0, -9.0], [0.0, 0.0, 0.0, 0.0]], device=HERE)
    target = torch.tensor([1, 0, 3], device=HERE)
    loss = create(name, 4)
    assert_same(run(loss, logits, target), expected(loss, logits, target))


def test_runners_up_that_tie_across_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, 2, 2)
    logits = torch.tensor([[1.0, 0.0, 0.0, -9.0], [1.0, 0.0, -9.0, 0.0]], device=HERE)
    loss = create("dual-focal", 4)
    target = torch.zeros(2, dtype=torch.long, device=HERE)
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@every_loss
@pytest.mark.parametrize(
    ("logits", "label"),
    [
        ([12.0, -1.0, 0.5], 0),
        ([9.0, -2.0], 1),
        ([4.0, 3.99, -5.0, -12.0], 3),
        ([5.0, 5.0, -5.0, -9.0], 2),
    ],
)
def test_a_confident_prediction_keeps_its_digits(name: str, logits: list[float], label: int) -> None:
    loss = create(name, len(logits))
    single, target = torch.tensor([logits], device=HERE), torch.tensor([label], device=HERE)
    assert_same(run(loss, single, target), expected(loss, single, target))


@pytest.mark.parametrize("name", ["ce", "cals-alm"])
@pytest.mark.parametrize("layout", ["transposed", "strided", "channels last"])
def test_any_strides(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, 2, 8)
    if layout == "channels last":
        logits, target = batch(2, 5, 3, 4)
        logits = logits.to(memory_format=torch.channels_last)
    else:
        logits, target = batch(6, 5)
        logits = (
            logits.T.contiguous().T if layout == "transposed" else torch.stack([logits, logits], 2)[..., 1]
        )
    loss = create(name, 5)
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("dtype", [torch.float16] if HERE == "cpu" else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["ce", "cals-alm", "adafocal", "ada-scale"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    logits, target = batch(6, 5)
    logits = logits.to(dtype)
    loss = create(name, 5)
    value, slope = run(loss, logits, target)
    assert (value.dtype, slope.dtype) == (torch.float32, dtype)
    assert_same((value, slope), expected(loss, logits, target), 1e-2)


def test_float16_survives_a_gradient_scaler() -> None:
    logits, target = batch(4096, 2)  # divided by so many, a gradient has few digits left in float16
    logits = logits.half()
    loss = create("ce", 2)
    scaled = run(loss, logits, target, torch.tensor(2.0**14, device=HERE))[1]
    wanted = expected(loss, logits, target)[1] * 2**14
    assert (scaled.double() - wanted).norm() <= 1e-3 * wanted.norm()


def test_nothing_counts_where_all_is_ignored() -> None:
    logits, target = batch(3, 4)
    value, slope = run(create("cals-alm", 4), logits, torch.full_like(target, -100))
    assert value == 0
    assert torch.equal(slope, torch.zeros_like(slope))


def test_a_label_out_of_range_shows() -> None:
    logits, target = batch(3, 4)
    loss = create("ce", 4)
    run(loss, logits, target)  # a CPU looks at the labels of the first such batch
    target[1] = 7
    assert run(loss, logits, target)[0].isnan()


def test_a_batch_of_another_kind_is_checked() -> None:
    logits, target = batch(3, 4)
    loss = create("ce", 4)
    run(loss, logits, target)
    with pytest.raises(ValueError, match="target must have shape"):
        run(loss, logits, target[:2])
    with pytest.raises(ValueError, match="expected num_classes=5"):
        run(create("ce", 5), logits, target)
    with pytest.raises(TypeError, match="integer labels"):
        run(create("focal", 4), logits, logits.softmax(1))


def odd_layout(name: str) -> tuple[Tensor, Tensor]:
    """Logits of three classes that arranging copies, or whose gradient is laid out otherwise."""
    logits, target = batch(2, 3, 4, 5)
    if name == "turned":  # both are copied
        return logits.transpose(2, 3), target.transpose(1, 2)
    wide = torch.stack([logits, logits + 1], 2).flatten(1, 2)
    if name == "classes of channels last":
        return wide.to(memory_format=torch.channels_last)[:, :3], target
    if name == "images of channels last":
        twice = torch.cat([wide[:, :3]] * 2).to(memory_format=torch.channels_last)
        return twice[::2], target
    if name == "pooled":
        return wide[..., :1, :1].contiguous()[:, :3], target[:, :1, :1]
    assert name == "overlapping"
    strided = torch.as_strided(logits.flatten(), (1, 3, 4, 5), (64, 3, 10, 2))
    return strided, target[:1]


@pytest.mark.parametrize(
    "layout", ["turned", "classes of channels last", "images of channels last", "pooled", "overlapping"]
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_odd_layouts(layout: str, reduction: str, dtype: torch.dtype) -> None:
    logits, target = odd_layout(layout)
    target[0, 0, 0] = -100
    loss = create("cals-alm", 3, reduction=reduction)
    given = logits.detach().to(dtype)
    given = torch.as_strided(given, logits.shape, logits.stride()) if layout == "overlapping" else given
    for _ in range(2):  # the first call of its kind, and a later one
        value, slope = run(loss, given, target)
        assert value.shape == (target.shape if reduction == "none" else ())
        assert_same((value, slope), expected(loss, given, target), 1e-2 if dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_graph_does_not_see_the_next_adaptation(reduction: str) -> None:
    logits, target = batch(6, 5)
    loss = create("cals-alm", 5, reduction=reduction)
    wanted = expected(loss, logits, target)[1]
    logits.requires_grad_()
    value = by_kernel(loss, logits, target)
    loss.multiplier.mul_(100)
    (first,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
    assert (first - wanted).norm() <= 1e-5 * wanted.norm()
    if reduction == "mean":  # the gradient was there already, and has been given away
        with pytest.raises(RuntimeError, match="the loss has adapted, or its class weights"):
            torch.autograd.grad(value, logits)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_graph_does_not_see_other_class_weights(reduction: str) -> None:
    logits, target = batch(6, 5)
    loss = create("focal", 5, reduction=reduction, class_weight=[1.0, 2.0, 3.0, 4.0, 5.0])
    wanted = expected(loss, logits, target)[1]
    logits.requires_grad_()
    value = by_kernel(loss, logits, target)
    loss.class_weight.mul_(torch.arange(5, device=HERE))
    (first,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
    assert (first - wanted).norm() <= 1e-5 * wanted.norm()
    if reduction == "mean":
        with pytest.raises(RuntimeError, match="class weights were changed"):
            torch.autograd.grad(value, logits)


CHANGES = {
    "a hyper-parameter": lambda loss: setattr(loss, "margin", 1.0),
    "the reduction": lambda loss: setattr(loss, "reduction", "sum"),
    "class weights": lambda loss: setattr(loss, "class_weight", torch.ones(5, device=HERE)),
    "another tensor": lambda loss: setattr(loss, "multiplier", 2 * loss.multiplier),
    "the same tensor": lambda loss: loss.multiplier.mul_(2),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_of_gradients_of_what_was_changed(
    reduction: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "can_fuse", lambda logits, target: True)
    logits, target = batch(6, 5)
    loss = create("cals-alm", 5, reduction=reduction)
    value = loss(logits.requires_grad_(), target).sum()
    (slope,) = torch.autograd.grad(value, logits, create_graph=True)
    assert slope.requires_grad
    CHANGES[change](loss)
    with pytest.raises(RuntimeError, match="call the loss again"):
        torch.autograd.grad(value, logits, create_graph=True)


@pytest.mark.parametrize("name", ["focal", "cals-alm"])
def test_a_loss_that_was_made_in_inference_mode(name: str) -> None:
    with torch.inference_mode():
        loss = create(name, 5, class_weight=[1.0, 2.0, 3.0, 4.0, 5.0])
    logits, target = batch(6, 5)
    assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("adafocal", {"bins": 15}), ("adafocal", {"bins": 4})),
        (("mbls", {"weight": 1.0, "margin": 3.0}), ("cals-hr", {"margin": 3.0})),
        (("cals-hr", {"margin": 3.0}), ("mbls", {"weight": 1.0, "margin": 3.0})),
        (("ce", {}), ("ce", {"class_weight": [1.0, 2.0, 3.0, 4.0, 5.0]})),
    ],
)
def test_one_loss_after_another(first: tuple[str, dict], second: tuple[str, dict]) -> None:
    logits, target = batch(6, 5)
    for key, options in (first, second):
        loss = calibrant.create_loss(key, 5, **options).to(HERE)
        for learned in loss.learned().values():
            learned.mul_(1 + torch.rand_like(learned))
        assert_same(run(loss, logits, target), expected(loss, logits, target))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_may_be_changed_in_place(reduction: str) -> None:
    logits, target = batch(6, 5)
    loss = create("ce", 5, reduction=reduction)
    logits.requires_grad_()
    value = by_kernel(loss, logits, target)
    value /= 4  # as people do who accumulate gradients
    value.sum().backward()
    wanted = expected(loss, logits, target)[1] / 4
    assert (logits.grad - wanted).norm() <= 1e-5 * wanted.norm()


def test_an_upstream_gradient_from_within_another_tensor() -> None:
    logits, target = batch(6, 5)
    loss = create("ce", 5, reduction="none")
    upstream = torch.rand(7, device=HERE)[1:]  # begins at an odd place
    assert_same(run(loss, logits, target, upstream), expected(loss, logits, target, upstream))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tile", [None, (2, 8)])
def test_upstream_gradients_that_memory_does_not_hold(
    reduction: str, tile: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile:
        use_tiles(monkeypatch, *tile)
    logits, target = batch(6, 5)
    loss = create("focal", 5, reduction=reduction)
    shape = (6,) if reduction == "none" else ()
    opposite = torch._neg_view(torch.full(shape, 2.0, device=HERE))
    assert_same(run(loss, logits, target, opposite), expected(loss, logits, target, opposite))
    zero = torch._efficientzerotensor(shape, device=HERE)
    assert torch.equal(run(loss, logits, target, zero)[1], torch.zeros_like(logits))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tiles_of_a_single_program(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, 2, 8, 4)
    logits, target = batch(5, 5)
    target[::2] = -100
    loss = create("focal", 5, reduction=reduction)
    assert_same(run(loss, logits, target), expected(loss, logits, target))


def test_a_second_backward_pass() -> None:
    logits, target = batch(6, 5)
    loss = create("dual-focal", 5)
    logits.requires_grad_()
    value = by_kernel(loss, logits, target)
    (first,) = torch.autograd.grad(3 * value, logits, retain_graph=True)
    (second,) = torch.autograd.grad(3 * value, logits)
    torch.testing.assert_close(first, second)


def test_gradients_of_gradients() -> None:
    logits, target = batch(3, 4)
    loss = create("focal", 4)
    logits.requires_grad_()
    value = by_kernel(loss, logits, target)
    (slope,) = torch.autograd.grad(value, logits, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), logits)
    (wanted,) = torch.autograd.grad(by_torch(loss, logits, target), logits, create_graph=True)
    (wanted,) = torch.autograd.grad(wanted.square().sum(), logits)
    torch.testing.assert_close(curvature, wanted, rtol=1e-4, atol=1e-7)


def test_what_the_kernel_does_not_know_is_left_to_torch() -> None:
    weight = [1.0, 2.0, 3.0, 4.0]
    for loss in (
        calibrant.create_loss("mmce", 4),
        calibrant.create_loss("cpc", 4),
        calibrant.create_loss("dual-focal", 4, rank=2),
        calibrant.create_loss("dual-focal", 4, constant=0.5),
        calibrant.create_loss("ls", 4, class_weight=weight),
    ):
        composition = loss.composition()
        assert composition is not None
        assert not composition.has_device_form or type(loss).over_batch is not Loss.over_batch
    logits, target = batch(3, 4)
    can_fuse = fused.can_fuse
    assert can_fuse(logits, target) == (HERE == "cuda")
    assert not can_fuse(logits.double(), target)
    assert not can_fuse(logits[:0], target[:0])
    assert not can_fuse(logits, torch._neg_view(logits))
    assert not can_fuse(torch.view_as_complex(torch.ones(3, 4, 2, device=HERE)).conj().imag, target)


@pytest.mark.parametrize(
    ("name", "reduction", "weighted"),
    [
        ("ce", "mean", True),
        ("cals-alm", "mean", False),
        ("adafocal", "sum", False),
        ("dual-focal", "none", True),
    ],
)
def test_compiles(name: str, reduction: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "can_fuse", lambda logits, target: True)
    use_tiles(monkeypatch, 4, 8)
    torch._dynamo.reset()
    weight = [0.5, 2.0, 0.0, 1.0, 3.0] if weighted else None
    loss = create(name, 5, reduction=reduction, class_weight=weight)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        logits, target = batch(6, 5, seed=seed)
        target[2] = -100
        wanted = expected(loss, logits, target)
        logits.requires_grad_()
        value = compiled(logits, target)
        value.backward(torch.ones_like(value))
        assert_same((value.detach(), logits.grad), wanted)
        for learned in loss.learned().values():
            learned += 0.5  # a compiled loss sees what it learns


def test_the_compiler_is_told_the_truth() -> None:
    logits, target = batch(6, 5)
    loss = create("cals-alm", 5)
    arguments = (
        logits.requires_grad_(),
        target,
        *operators.flattened(loss.composition(), loss._kernel_options()),
    )
    torch.library.opcheck(torch.ops.calibrant.loss, arguments)


@pytest.mark.parametrize("layout", ["rows", "cropped", "channels last", "turned"])
def test_the_compiler_is_told_how_a_gradient_lies(layout: str) -> None:
    logits, target = batch(2, 5, 3, 4)
    if layout == "rows":
        logits, target = batch(6, 5)
    elif layout == "turned":
        logits, target = logits.transpose(2, 3), target.transpose(1, 2)
    else:
        logits = logits.to(memory_format=torch.channels_last)
    if layout == "cropped":
        logits, target = logits[..., :-1], target[..., :-1]
    loss = create("cals-alm", 5)
    elements = loss.elements(logits, target)
    arguments = (
        elements.logits,
        elements.given,
        *operators.flattened(loss.composition(), loss._kernel_options()),
    )
    upstream = torch.ones((), device=HERE)
    torch.library.opcheck(torch.ops.calibrant.loss_backward, (upstream, *arguments))


def test_a_triton_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler\nand more")

    works = fused._triton_works.__wrapped__
    assert works(torch.device(HERE))
    monkeypatch.setattr(fused, "Launcher", fail)
    with pytest.warns(UserWarning, match="run without their GPU kernel: Triton fails with 'Failed to find C"):
        assert not works(torch.device(HERE))


def test_not_all_shapes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_PLANS", 2)
    monkeypatch.setattr(launch, "_plans", {})
    loss = create("ce", 3)
    for size in range(3, 8):
        assert_same(run(loss, *batch(size, 3)), expected(loss, *batch(size, 3)))
    assert len(launch._plans) <= 2
