"""Every loss with random options, state and batches against its definition; its state after random passes."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from calibrant import LOSSES, create_loss
from calibrant.losses import AdaptiveLoss, Loss

from . import references
from .batches import SEEDS, Batch, as_rows, batches

WEIGHTS = st.sampled_from([0.0, 1e-3, 0.1, 1.0, 10.0]) | st.floats(0, 10)
GAMMAS = st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.0, 20.0]) | st.floats(0, 10)
MARGINS = st.sampled_from([0.01, 0.5, 1.0, 4.0, 6.0, 10.0, 1e4]) | st.floats(0.01, 30)
WIDTHS = st.sampled_from([1 / 300, 0.005, 0.01, 0.02, 0.4, 1e3]) | st.floats(1 / 300, 2)
BANDWIDTHS = st.sampled_from([1e-4, 1e-3, 0.02, 0.5, 10.0]) | st.floats(1e-3, 1)

OPTIONS: dict[str, dict[str, st.SearchStrategy]] = {
    "ce": {},
    "ls": {"smoothing": st.sampled_from([0.0, 0.05, 1.0]) | st.floats(0, 1)},
    "ecp": {"weight": WEIGHTS},
    "brier": {},
    "focal": {"gamma": GAMMAS},
    "flsd": {
        "gamma_below": GAMMAS,
        "gamma_above": GAMMAS,
        "threshold": st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    },
    "inverse-focal": {"gamma": GAMMAS},
    "dual-focal": {"gamma": GAMMAS, "rank": st.sampled_from([1, 2, 3, "1+2", "1+2+3", "all"])},
    "mbls": {"margin": st.just(0.0) | MARGINS, "weight": WEIGHTS},
    "cpc": {"discrimination": WEIGHTS, "exclusion": WEIGHTS},
    "mmce": {"weight": WEIGHTS, "kernel_width": WIDTHS},
    "mmce-weighted": {"weight": WEIGHTS, "kernel_width": WIDTHS},
    "kde-xe": {"weight": WEIGHTS, "bandwidth": BANDWIDTHS},
    "mdca": {"weight": WEIGHTS, "gamma": GAMMAS},
    "maxsup": {"weight": WEIGHTS},
    "label-relaxation": {"relaxation": st.sampled_from([0.0, 0.1, 0.9, 1.0]) | st.floats(1e-6, 1)},
    "acls": {
        "margin": st.just(0.0) | MARGINS,
        "weight_of_top": WEIGHTS,
        "weight_of_others": WEIGHTS,
        "as_released": st.booleans(),
    },
    "sb-ece": {
        "weight": WEIGHTS,
        "bins": st.integers(1, 20),
        "temperature": st.sampled_from([1e-6, 1e-4, 0.01, 1.0, 1e3]) | st.floats(1e-6, 0.1),
    },
    "bsce-gra": {"gamma": GAMMAS, "norm": st.sampled_from([1, 2]), "through_weight": st.booleans()},
    "avuc": {"weight": WEIGHTS, "threshold": st.none() | st.sampled_from([0.1, 0.5, 1.0])},
    "nacl": {"weight": WEIGHTS, "window": st.sampled_from([1, 3, 5])},
    "cals-alm": {
        "margin": MARGINS,
        "penalty": st.sampled_from(["phr", "p2", "p3"]),
        "per": st.sampled_from(["class", "all"]),
    },
    "cals-hr": {"margin": st.just(0.0) | MARGINS},
    "adafocal": {"bins": st.integers(1, 20)},
    "ada-dual-focal": {"bins": st.integers(1, 20)},
    "calfocal": {
        "bins": st.integers(1, 20),
        "per": st.sampled_from(["sample", "bin"]),
        "rate": st.sampled_from([0.0, 1.0, 10.0]),
        "through_gamma": st.booleans(),
    },
    "ada-scale": {"margin": MARGINS, "weight": WEIGHTS},
}
DUAL = ("dual-focal", "ada-dual-focal")
BINNED = ("adafocal", "ada-dual-focal", "calfocal")
# Logits of -inf, as docs/losses.md says.
RULED_OUT = (
    "ce",
    "brier",
    "focal",
    "flsd",
    "inverse-focal",
    "label-relaxation",
    "mdca",
    "bsce-gra",
    *DUAL,
    *BINNED,
)
ADAPTIVE = [key for key, kind in LOSSES.items() if issubclass(kind, AdaptiveLoss)]
every_loss = pytest.mark.parametrize("key", LOSSES)


def test_every_loss_has_a_reference() -> None:
    assert set(LOSSES) == set(OPTIONS) == set(references.ELEMENTS)


def draw_loss(data: st.DataObject, key: str, classes: int, ignore_index: int) -> Loss:
    """A loss with random options and a random learned state."""
    options = {name: data.draw(strategy, name) for name, strategy in OPTIONS[key].items()}
    if options.get("rank") in (2, 3, "1+2", "1+2+3") and classes <= int(str(options["rank"])[-1]):
        options["rank"] = 1
    if key == "dual-focal" and options["rank"] == 1 and data.draw(st.booleans(), "a constant"):
        options["constant"] = data.draw(st.floats(0, 1), "constant")
    if options.get("per") == "bin":
        options["through_gamma"] = False
    options["reduction"] = data.draw(st.sampled_from(["mean", "sum", "none"]), "reduction")
    if data.draw(st.booleans(), "class weights"):
        choices = st.sampled_from([0.0, 1.0, 100.0]) | st.floats(0.01, 3)
        options["class_weight"] = data.draw(st.lists(choices, min_size=classes, max_size=classes))
    loss = create_loss(key, classes, ignore_index=ignore_index, **options)
    if isinstance(loss, AdaptiveLoss):
        set_state(loss, torch.Generator().manual_seed(data.draw(SEEDS, "state")))
    return loss


def set_state(loss: AdaptiveLoss, generator: torch.Generator) -> None:
    def between(low: float, high: float, like: Tensor) -> Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=generator, dtype=torch.float64)

    state = dict(loss.named_buffers())
    for name, powers in (("multiplier", (-6, 0.5)), ("penalty_weight", (0, 1))):
        if name in state:
            state[name].copy_(10 ** between(*powers, state[name]))
    if "scale" in state:
        state["scale"].copy_(10 ** between(-1, 1.3, state["scale"]))
        state["offset"].copy_(between(-3, 3, state["offset"]))
    if "gamma" in state:
        state["gamma"].copy_(between(-2, 20, state["gamma"]))
        if "accuracy" in state:
            state["gamma"].abs_()
            state["accuracy"].copy_(between(0, 1, state["gamma"]))
        edges = between(0, 1, state["edges"]).mul(20).round().div(20).sort().values
        if edges[0] == edges[-1]:  # at least one bin always has a width
            edges[0] = 0 if edges[0] > 0 else -0.1
        # Now and then the edges of the start.
        if torch.rand((), generator=generator) < 0.7:
            state["edges"].copy_(edges)
        loss.passes.fill_(1)


def settings_of(loss: Loss) -> SimpleNamespace:
    """Options and state for a reference."""
    found = SimpleNamespace(**loss.options(), undecided=False)
    for name, buffer in loss.named_buffers():
        setattr(found, name, buffer.clone())
    weight = loss.class_weight
    found.class_weight = None if weight is None else weight.double()
    found.passes = int(getattr(loss, "passes", 0))
    return found


def undecidable(key: str, o: SimpleNamespace, batch: Batch) -> Tensor:
    """Elements ``(N,)`` so near a jump of the loss or its gradient that rounding decides the side."""
    rows, near = batch.rows, 16 * batch.epsilon
    size = (rows - rows.amax(1, keepdim=True)).abs()
    labels = torch.where(batch.valid, batch.labels, 0)
    p = references.log_softmax(rows).exp().gather(1, labels[:, None]).squeeze(1)
    found = torch.zeros(len(rows), dtype=torch.bool)
    if key == "flsd":
        found |= (p - o.threshold).abs() < near
    if key in BINNED:
        found |= ((p[:, None] - o.edges[None, :]).abs() < near).any(1)
    if key == "ada-scale":
        scaled = references.scaled(rows, o)
        distance = scaled.amax(1, keepdim=True) - scaled
        most = o.scale * size.amax(1, keepdim=True) + o.offset.abs().max() + o.margin
        found |= ((distance - o.margin).abs() <= near * most).any(1)
        # The offset decides which of two scaled logits is larger, where they hardly differ.
        top = scaled.topk(2, 1).values
        found |= (top[:, 0] - top[:, 1] <= near * most[:, 0]) & (distance.amax(1) >= o.margin)
    if key == "avuc" and batch.valid.any():
        one_hot = F.one_hot(batch.labels[batch.valid], rows.shape[1]).double()
        u, threshold = references.avuc_threshold(rows[batch.valid], one_hot, o)
        gap = (u - threshold).abs()
        assume(not ((gap > 1e-8 * threshold) & (gap < 64 * batch.epsilon + 1e-6 * threshold)).any())
    if key in ("mbls", "cals-hr"):
        found |= ((size - o.margin).abs() <= near * (size + o.margin)).any(1)
    if key in DUAL:
        # Whether a class is below the true one, and which of two neighbours in rank is the better one.
        ranked = rows.sort(1, descending=True).values.nan_to_num(neginf=-1e9)
        gap = ranked[:, :-1] - ranked[:, 1:]
        close = (gap > 0) & (gap <= near * (1 + size.nan_to_num(posinf=1e9).sort(1).values[:, 1:]))
        found |= close.any(1)
    return found


def has_kink(key: str, batch: Batch, o: SimpleNamespace) -> bool:
    """Whether two numbers whose distance enters are so close that rounding decides which is larger."""
    rows = batch.rows[batch.valid]
    if key == "kde-xe" and len(rows) > 1:
        one_hot = torch.nn.functional.one_hot(batch.labels[batch.valid], rows.shape[1]).double()
        gaps = references.kde_gaps(rows, one_hot, o).abs()
        # Of a class with hardly any probability, the sign has hardly any effect.
        return bool(((gaps < 64 * batch.epsilon) & (references.log_softmax(rows) > -20)).any())
    if key == "nacl":
        gaps = (rows - torch.nn.functional.one_hot(batch.labels[batch.valid], rows.shape[1])).abs()
        return bool(((gaps > 0) & (gaps < 64 * batch.epsilon)).any())
    if key == "mdca":
        one_hot = torch.nn.functional.one_hot(batch.labels[batch.valid], rows.shape[1]).double()
        return bool((references.mdca_gaps(rows, one_hot).abs() < 64 * batch.epsilon).any())
    if not key.startswith("mmce"):
        return False
    confidence = references.top_confidence(rows, rows)[0]
    gap = (confidence[:, None] - confidence[None, :]).abs()
    same = (rows[:, None, :] == rows[None, :, :]).all(2)
    return bool(((gap < 16 * batch.epsilon) & ~same).any())


def by_definition(
    key: str, o: SimpleNamespace, rows: Tensor, target: Tensor, upstream: Tensor, soft: bool
) -> tuple[Tensor, Tensor]:
    """Value and gradient of the reference; both of the elements that count."""
    rows = rows.clone().requires_grad_()
    value = references.reduced(key, rows, target, o, soft=soft)
    (slope,) = torch.autograd.grad((value * upstream).sum(), rows, allow_unused=True)
    return value.detach(), torch.zeros_like(rows) if slope is None else slope


def rounded(rows: Tensor, epsilon: float) -> Tensor:
    """Logits with an error as of a few operations on their distances to the maximum; ties stay ties."""
    shifted = rows - rows.amax(1, keepdim=True)
    finite = shifted.clamp_min(-1e30)
    return shifted + epsilon * (finite.abs() * (37 * finite).cos() + (53 * finite).sin())


def assert_near(
    what: str, found: Tensor, wanted: Tensor, moved: Tensor, tolerance: float, scale: float
) -> None:
    """Compare to the accuracy of the type, allowing for what a perturbation by rounding does to the result.

    The scale is that of the numbers that were added up, which may cancel.
    """
    assert found.shape == wanted.shape
    scale = max(scale, wanted.abs().amax().item()) if wanted.numel() else scale
    allowed = tolerance * scale + 16 * (moved - wanted).abs()
    right = (found.double() - wanted).abs() <= allowed  # false for NaN
    for place in (~right).nonzero().tolist()[:5]:
        at = tuple(place)
        note(f"{what} at {place}: {found[at]}, by definition {wanted[at]}, allowed {allowed[at]}")
    assert right.all(), f"{what} is wrong"


def compare(key: str, loss: Loss, batch: Batch, target: Tensor, seed: int) -> None:
    """Compare the value and the gradient of a loss with the reference."""
    o = settings_of(loss)
    note(f"{loss}, { ({n: b.tolist() for n, b in loss.named_buffers()}) }")
    soft = target.is_floating_point()
    keep = torch.ones_like(batch.valid) if soft else batch.valid
    rows = batch.rows[keep]
    one_hot = as_rows(target).double() if soft else F.one_hot(batch.labels[keep], rows.shape[1]).double()
    generator = torch.Generator().manual_seed(seed)
    shape = target.shape[:1] + batch.logits.shape[2:] if loss.reduction == "none" else ()
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64).to(
        torch.float64 if batch.logits.dtype == torch.float64 else torch.float32
    )

    logits = batch.logits.detach().requires_grad_()
    value = loss(logits, target)
    (slope,) = torch.autograd.grad(value, logits, upstream)
    assert value.dtype == upstream.dtype
    assert slope.dtype == logits.dtype
    factor = upstream.double().reshape(-1)[keep] if shape else upstream.double()
    wanted = by_definition(key, o, rows, one_hot, factor, soft)
    changed = rounded(rows, 4 * batch.epsilon)
    if key == "nacl":  # a constant added to all logits changes it
        changed = rows * (1 + 4 * batch.epsilon)
    moved = by_definition(key, o, changed, one_hot, factor, soft)

    value, slopes = value.detach(), as_rows(slope)
    if shape:
        assert (value.reshape(-1)[~keep] == 0).all()
        value = value.reshape(-1)[keep]
    assert (slopes[~keep] == 0).all()
    heaviest = max(1.0, 0.0 if o.class_weight is None else o.class_weight.max().item())
    if key == "inverse-focal":  # multiplies the rounding of log p by (1+p)^γ
        heaviest *= 2**o.gamma
    scale = heaviest * (len(rows) if loss.reduction == "sum" else 1)
    tolerance = max(200 * batch.epsilon, 1e-12)  # the references are no more exact than that
    if key in references.BATCHES:  # sums over pairs, a root, exponents in the thousands
        tolerance = 1e-10 if batch.logits.dtype == torch.float64 else 1e-4
    assert_near("the value", value, wanted[0], moved[0], tolerance, scale)
    if not has_kink(key, batch, o):
        # Gradients in 16 bits are rounded to them at the end.
        tolerance = max(tolerance, 1e-2 if logits.dtype == torch.bfloat16 else 0)
        assert_near("the gradient", slopes[keep], wanted[1], moved[1], tolerance, heaviest)


@every_loss
@given(data=st.data())
def test_losses_equal_their_definitions(key: str, data: st.DataObject) -> None:
    # The neighbours of a pixel have a test of their own, beside the definitions.
    batch = data.draw(batches(ruled_out=key in RULED_OUT, flat=key == "nacl"), "batch")
    loss = draw_loss(data, key, batch.logits.shape[1], batch.ignore_index)
    batch.ignore(undecidable(key, settings_of(loss), batch))
    compare(key, loss, batch, batch.target, data.draw(SEEDS, "upstream"))


@pytest.mark.parametrize("key", [key for key, kind in LOSSES.items() if kind.accepts_probabilities])
@given(data=st.data())
def test_probability_targets(key: str, data: st.DataObject) -> None:
    batch = data.draw(batches(), "batch")
    loss = draw_loss(data, key, batch.logits.shape[1], batch.ignore_index)
    generator = torch.Generator().manual_seed(data.draw(SEEDS, "targets"))
    shape = batch.rows.shape
    sharpness = data.draw(st.sampled_from([0.0, 1.0, 5.0, 1e4]), "sharpness")  # uniform to one-hot
    soft = (sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(1)
    images = soft.view(batch.logits.movedim(1, -1).shape).movedim(-1, 1)
    dtype = torch.float64 if batch.logits.dtype == torch.float64 else torch.float32
    assume(not undecidable(key, settings_of(loss), batch).any())
    note(f"soft = {soft.tolist()}")
    compare(key, loss, batch, images.to(dtype), data.draw(SEEDS, "upstream"))


# ----------------------------------------------------------------------------------------- learned state


def draw_rule(data: st.DataObject, key: str, classes: int) -> AdaptiveLoss:
    """An adaptive loss with random options of its rule."""
    start = st.sampled_from([1e-6, 0.1, 1.0])
    own: dict[str, dict[str, st.SearchStrategy]] = {
        "cals-alm": {
            "margin": MARGINS,
            "penalty": st.sampled_from(["phr", "p2", "p3"]),
            "per": st.sampled_from(["class", "all"]),
            "clip": st.sampled_from(["mean", "each"]),
            "growth": st.sampled_from([1.0, 1.2, 3.0]),
            "required_decrease": st.sampled_from([0.0, 0.5, 0.9, 2.0]),
            "every": st.integers(1, 4),
            "penalty_weight_max": st.sampled_from([None, 1.5, 10.0]),
            "multiplier_range": st.sampled_from([(1e-6, 1e6), (0.01, 2.0)]),
            "initial_multiplier": start,
        },
        "cals-hr": {
            "margin": MARGINS,
            "factor": st.sampled_from([1.01, 1.1, 2.0]),
            "threshold": st.sampled_from([None, 1.0, 1.1, 3.0]),
            "multiplier_range": st.sampled_from([(1e-6, 1e6), (0.05, 0.2)]),
            "initial_multiplier": start,
        },
        "calfocal": {"bins": st.integers(1, 20), "rate": st.sampled_from([0.0, 1.0, 10.0])},
        "ada-scale": {
            "rate": st.sampled_from([0.0, 0.5, 1.0]),
            "lead": st.sampled_from([0.0, 1.0, 3.0]),
            "evidence": st.sampled_from([0.0, 1.0, 2.0]),
            "scale_range": st.sampled_from([(0.1, 20.0), (0.9, 1.2)]),
        },
    }
    focal = {
        "bins": st.integers(1, 20),
        "rate": st.sampled_from([0.0, 1.0, 5.0]),
        "switch_at": st.sampled_from([0.0, 0.2, 1.0]),
        "initial_gamma": st.sampled_from([-1.5, 1.0, 10.0]),
    }
    rule = own.get(key, focal) | {"evidence": st.sampled_from([0.0, 0.0, 1.0, 2.5])}
    options = {name: data.draw(each, name) for name, each in rule.items()}
    loss = create_loss(key, classes, **options)
    assert isinstance(loss, AdaptiveLoss)
    return loss


def in_pieces(data: st.DataObject, loss: AdaptiveLoss, logits: Tensor, target: Tensor) -> None:
    """Observe a batch in pieces of random sizes, also empty ones."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(logits)), max_size=3), "cuts"))
    for part, labels in zip(logits.tensor_split(cuts), target.tensor_split(cuts), strict=True):
        loss.observe(part, labels)
    loss.adapt()


def assert_state(loss: AdaptiveLoss, o: SimpleNamespace, epsilon: float) -> None:
    for name, buffer in loss.named_buffers():
        if name != "edges":
            wanted = torch.as_tensor(getattr(o, name), dtype=torch.float64)
            differences = ("previous_violation", "offset", "log_scale")  # near 0 they have few digits
            scale = wanted.abs() + (1 if name in differences else 0)
            ok = bool(((buffer - wanted).abs() <= 1000 * epsilon * scale + 1e-300).all())
            assert ok, f"{name} is {buffer.tolist()}, by definition {wanted.tolist()}"


@pytest.mark.parametrize("key", ["cals-alm", "cals-hr"])
@given(data=st.data())
def test_multipliers_follow_their_rule(key: str, data: st.DataObject) -> None:
    classes = data.draw(st.integers(2, 20), "classes")
    loss = draw_rule(data, key, classes)
    o = settings_of(loss)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]), "dtype")
    epsilon = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    logits, target = torch.zeros(1, classes, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    for _ in range(data.draw(st.integers(1, 6), "passes")):
        if data.draw(st.booleans(), "other data"):  # or the same again, where rounding must not decide
            generator = torch.Generator().manual_seed(data.draw(SEEDS, "data"))
            size = data.draw(st.integers(1, 30), "size")
            scale = loss.margin * data.draw(st.sampled_from([0.1, 1.0, 3.0]), "scale")
            logits = (scale * torch.randn(size, classes, generator=generator)).to(dtype)
            target = torch.randint(classes, (size,), generator=generator)
            target[torch.rand(size, generator=generator) < 0.2] = -100
            target[0] = 0  # something to learn from
        rows = logits[target != -100].double()
        (references.adapt_cals_alm if key == "cals-alm" else references.adapt_cals_hr)(o, rows)
        assume(not o.undecided)
        in_pieces(data, loss, logits, target)
        assert_state(loss, o, epsilon)


@given(data=st.data())
def test_scale_and_offsets_follow_their_rule(data: st.DataObject) -> None:
    classes = data.draw(st.integers(2, 20), "classes")
    loss = draw_rule(data, "ada-scale", classes)
    o = settings_of(loss)
    for _ in range(data.draw(st.integers(1, 6), "passes")):
        generator = torch.Generator().manual_seed(data.draw(SEEDS, "data"))
        size = data.draw(st.integers(1, 60), "size")
        sharpness = data.draw(st.sampled_from([0.1, 1.0, 5.0]), "sharpness")
        logits = sharpness * torch.randn(size, classes, generator=generator, dtype=torch.float64)
        target = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
        references.adapt_ada_scale(o, logits, target)
        assume(not o.undecided)
        in_pieces(data, loss, logits, target)
        assert_state(loss, o, 2.0**-43)


@pytest.mark.parametrize("key", BINNED)
@given(data=st.data())
def test_exponents_follow_their_rule(key: str, data: st.DataObject) -> None:
    classes = data.draw(st.integers(2, 20), "classes")
    loss = draw_rule(data, key, classes)
    o = settings_of(loss)
    for _ in range(data.draw(st.integers(1, 6), "passes")):
        # Confidences far enough apart for every edge between two to be between them in the reference, too.
        generator = torch.Generator().manual_seed(data.draw(SEEDS, "data"))
        levels = torch.arange(1 / classes + 0.005, 0.999, 0.007, dtype=torch.float64)
        levels = levels[torch.randperm(len(levels), generator=generator)][: data.draw(st.integers(1, 60))]
        # Below 0: others may look like probabilities.
        logits = torch.full((len(levels), classes), -8.0, dtype=torch.float64)
        logits[:, 0] += (levels * (classes - 1) / (1 - levels)).log()
        target = (torch.rand(len(levels), generator=generator) < 0.4).long()
        adapt = references.adapt_calfocal if key == "calfocal" else references.adapt_adafocal
        groups = adapt(o, logits, target)
        assume(not o.undecided)
        in_pieces(data, loss, logits, target)
        assert_state(loss, o, 2.0**-53)
        for b, group in enumerate(groups):
            assert ((loss.edges[b] <= group) & (group <= loss.edges[b + 1])).all()
        assert (loss.edges.diff() >= 0).all()
        assert math.isfinite(loss(logits, target))


@pytest.mark.parametrize("key", ADAPTIVE)
@given(data=st.data())
def test_losses_after_random_passes(key: str, data: st.DataObject) -> None:
    """The state that a loss has learned is the one that it uses."""
    batch = data.draw(batches(most=32, most_classes=20, dtypes=(torch.float32, torch.float64)), "batch")
    loss = draw_rule(data, key, batch.logits.shape[1])
    loss.ignore_index = batch.ignore_index
    for _ in range(data.draw(st.integers(1, 3), "passes")):
        if batch.valid.any():
            loss.observe(batch.logits, batch.target)
            loss.adapt()
    batch.ignore(undecidable(key, settings_of(loss), batch))
    compare(key, loss, batch, batch.target, data.draw(SEEDS, "upstream"))
