"""What every registered calibrator owes, whatever it does."""

import copy
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from calibrant.calibrators import (
    CALIBRATORS,
    Calibrator,
    choose,
    create_calibrator,
    load_calibrator,
    save_calibrator,
)
from calibrant.calibrators.streaming import Scaling
from calibrant.calibrators.temperature import ChanceWarning
from tests.calibrators.test_create import OPTIONS

VARIANTS = {key: (key, {}) for key in CALIBRATORS} | {
    f"{key}, options": (key, options) for key, options in OPTIONS.items()
}
every = pytest.mark.parametrize(("key", "options"), VARIANTS.values(), ids=VARIANTS)
types = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)


def sampled(*shape, seed=0, spread=2.0, sharpness=0.5):
    """Logits ``(B, K, *S)``, and labels drawn from their softmax with ``sharpness`` times the logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    return logits, (sharpness * logits - (-uniform.log()).log()).argmax(1)


@pytest.fixture(scope="module")
def fitted():
    """Every variant, fitted to 400 samples of 5 classes; tests must not change it."""
    logits, target = sampled(400, 5)
    return {
        name: create_calibrator(key, **options).fit(logits, target)
        for name, (key, options) in VARIANTS.items()
    }


every_fitted = pytest.mark.parametrize("name", VARIANTS)


@every_fitted
def test_print_shows_options_and_what_was_learned(fitted, name):
    key, options = VARIANTS[name]
    changed = "".join(f"{option}={value!r}, " for option, value in options.items())
    assert repr(create_calibrator(key, **options)).endswith(f"({changed}not fitted)")
    calibrator = fitted[name]
    text = repr(calibrator)
    assert text.startswith(f"{type(calibrator).__name__}({changed}5 classes")
    for buffer, value in calibrator.named_buffers():
        shown = f"{value.item():.4g}" if value.ndim == 0 else "[" if value.numel() < 5 else "<"
        assert f", {buffer}={shown}" in text
    if key == "temperature":
        assert f"temperature={calibrator.temperature.item():.4g})" in text
    repr(copy.deepcopy(calibrator).to("meta"))  # without values


@types
@every_fitted
def test_softmax_sums_to_one(fitted, name, dtype):
    for shape, spread in (((300, 5), 2.0), ((4, 5, 6, 3), 20.0)):
        output = fitted[name](sampled(*shape, seed=1, spread=spread)[0].to(dtype))
        total = output.double().softmax(1).sum(1)
        assert output.isfinite().all()
        assert (total - 1).abs().max() < 1e-6
        # Also in the type they come in.
        assert (output.softmax(1).double().sum(1) - 1).abs().max() < 1e-6


@types
@every_fitted
def test_shape_and_input_are_kept_and_16_bits_become_32(fitted, name, dtype):
    for shape in ((7, 5), (1, 5), (2, 5, 4, 3), (2, 5, 1, 1), (2, 5, 6), (1, 5, 2, 3, 4)):
        logits = sampled(*shape, seed=2)[0].to(dtype)
        before = logits.clone()
        output = fitted[name](logits)
        assert output.shape == logits.shape
        assert output.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("shape", [(0, 5), (0, 5, 2, 3), (2, 5, 0)], ids=str)
@every_fitted
def test_empty_batches_stay_empty(fitted, name, shape):
    output = fitted[name](torch.zeros(shape, dtype=torch.float16))
    assert output.shape == shape
    assert output.dtype == torch.float32


@every_fitted
def test_memory_layouts_agree(fitted, name):
    logits = sampled(3, 5, 4, 6, seed=3)[0]
    expected = fitted[name](logits)
    torch.testing.assert_close(fitted[name](logits.contiguous(memory_format=torch.channels_last)), expected)
    strided = torch.empty(3, 5, 4, 12)[..., ::2].copy_(logits)
    torch.testing.assert_close(fitted[name](strided), expected)


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("local")])  # by image
def test_pixels_are_calibrated_one_by_one(fitted, name):
    logits = sampled(2, 5, 4, 3, seed=4)[0]
    rows = fitted[name](logits.movedim(1, -1).reshape(-1, 5))
    torch.testing.assert_close(fitted[name](logits), rows.view(2, 4, 3, 5).movedim(-1, 1))


@pytest.mark.parametrize(
    ("key", "options", "void"),
    [
        # Its entropies count ignored pixels, which nobody knows at test time.
        *((*variant, 255) for variant in VARIANTS.values() if variant[0] != "local-temperature"),
        # Which label is ignored concerns no method: it only gets the rows that count.
        ("temperature", {}, -100),
        ("isotonic", {}, -100),
    ],
)
def test_ignored_is_as_good_as_deleted(key, options, void):
    logits, target = sampled(120, 3, seed=5)
    target[::3] = void
    keep = target != void
    # What ignored elements hold must not matter, be it far from all else.
    logits[::3] = 1e4
    ours = create_calibrator(key, **options).fit(logits, target, ignore_index=void)
    theirs = create_calibrator(key, **options).fit(logits[keep], target[keep])
    probe = sampled(50, 3, seed=6)[0]
    assert torch.equal(ours(probe), theirs(probe))


@every
def test_void_pixels_are_as_good_as_deleted(key, options):
    logits, target = sampled(6, 3, 7, 5, seed=7)
    target[:, 2:4] = 255
    ours = create_calibrator(key, **options).fit(logits, target, ignore_index=255)
    keep = [0, 1, 4, 5, 6]
    if key == "local-temperature":
        target[:, 2:4] = -100
        theirs = create_calibrator(key, **options).fit(logits, target)
    else:
        theirs = create_calibrator(key, **options).fit(logits[:, :, keep], target[:, keep])
    # The order of pixels is the same: nothing but rounding in sums may differ.
    probe = sampled(4, 3, 2, 2, seed=8)[0]
    torch.testing.assert_close(ours(probe), theirs(probe))


def keeps_order(name):
    key, options = VARIANTS[name]
    return create_calibrator(key, **options).preserves_order


@types
@pytest.mark.parametrize("name", list(filter(keeps_order, VARIANTS)))
def test_order_is_kept_where_promised(fitted, name, dtype):
    calibrator = fitted[name]
    logits = sampled(2000, 5, seed=9, spread=3)[0].to(dtype)
    output, predicted = calibrator(logits), logits.argmax(1)
    # Of classes that tie already, as half precision makes some do, either may be the prediction.
    assert torch.equal(output.gather(1, predicted[:, None]).squeeze(1), output.amax(1))
    untied = (logits == logits.amax(1, keepdim=True)).sum(1) == 1
    assert torch.equal(output.argmax(1)[untied], predicted[untied])
    if dtype == torch.float64:
        ranked = output.gather(1, logits.argsort(1))
        assert (ranked.diff(dim=1) >= -1e-9).all()


@every_fitted
def test_state_goes_into_a_fresh_instance(fitted, name, tmp_path):
    key, options = VARIANTS[name]
    torch.save(fitted[name].state_dict(), tmp_path / "state.pt")
    fresh = create_calibrator(key, **options)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    logits = sampled(50, 5, seed=10)[0]
    assert fresh.num_classes == 5
    assert torch.equal(fresh(logits), fitted[name](logits))


@every_fitted
def test_state_goes_into_a_fresh_model_and_over_another_fit(fitted, name):
    key, options = VARIANTS[name]
    other = create_calibrator(key, **options).fit(*sampled(150, 3, seed=11))
    model = nn.Sequential(nn.Flatten(), other)
    model.load_state_dict(nn.Sequential(nn.Flatten(), fitted[name]).state_dict())
    logits = sampled(50, 5, seed=12)[0]
    assert torch.equal(model(logits), fitted[name](logits))


@every_fitted
def test_copies_and_pickles(fitted, name):
    logits = sampled(20, 5, seed=13)[0]
    expected = fitted[name](logits)
    assert torch.equal(copy.deepcopy(fitted[name])(logits), expected)
    assert torch.equal(pickle.loads(pickle.dumps(fitted[name]))(logits), expected)


@every_fitted
def test_half_keeps_what_was_learned(fitted, name):
    halved = copy.deepcopy(fitted[name]).half()
    for buffer, before in zip(halved.buffers(), fitted[name].buffers(), strict=True):
        assert buffer.dtype == torch.float64
        assert torch.equal(buffer, before)
    logits = sampled(20, 5, seed=14)[0]
    assert torch.equal(halved(logits), fitted[name](logits))


def test_nothing_is_trained(fitted):
    assert not any(list(calibrator.parameters()) for calibrator in fitted.values())


FLATTENING = {calibrator.forward: key for key, calibrator in CALIBRATORS.items()}.values()
"""A calibrator for each code that makes rows of images. `test_the_newer_exporter` exports what follows."""


@pytest.mark.parametrize("key", sorted({*FLATTENING, "isotonic"}))
def test_exports_behind_a_model(fitted, key):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 5, 1), fitted[key]).eval()
    exported = torch.export.export(
        model, (torch.randn(4, 2, 3, 6),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    other = torch.randn(3, 2, 3, 6)
    torch.testing.assert_close(exported.module()(other), model(other))


@every
def test_refuses_to_work_before_it_is_fitted(key, options):
    with pytest.raises(RuntimeError, match=r"has learned nothing yet: call fit\(logits, target\) first"):
        create_calibrator(key, **options)(torch.zeros(2, 3))


@every_fitted
def test_refuses_another_number_of_classes(fitted, name):
    for shape in ((2, 4), (2, 6, 3, 3), (5,), (2, 3, 5)):
        with pytest.raises(
            ValueError, match=r"logits must have shape \(B, 5, \*S\), as when this was fitted"
        ):
            fitted[name](torch.zeros(shape))


@every
def test_refuses_data_it_cannot_learn_from_and_keeps_what_it_has(key, options):
    calibrator = create_calibrator(key, **options).fit(*sampled(100, 3, seed=15))
    probe, _ = sampled(20, 3, seed=16)
    expected = calibrator(probe)
    logits, target = sampled(30, 4, seed=17)
    for number in (math.nan, math.inf, -math.inf):
        bad = logits.clone()
        bad[3, 1] = number
        with pytest.raises(ValueError, match="NaN or infinite"):
            calibrator.fit(bad, target)
    for data in (
        (logits[:0], target[:0]),
        (logits, torch.full_like(target, -100)),
        (torch.zeros(2, 4, 0, 3), torch.zeros(2, 0, 3, dtype=torch.long)),
    ):
        with pytest.raises(ValueError, match="nothing to fit"):
            calibrator.fit(*data)
    with pytest.raises(ValueError, match="expected 0 to 3"):
        calibrator.fit(logits, target + 1)
    with pytest.raises(ValueError, match=r"target must have shape \(30,\)"):
        calibrator.fit(logits, target[:-1])
    with pytest.raises(TypeError, match="integer labels"):
        calibrator.fit(logits, target.float())
    with pytest.raises(TypeError, match="floating point"):
        calibrator.fit(logits.long(), target)
    for foreign in (logits.numpy(), logits.tolist()):
        with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, got (ndarray|list)"):
            calibrator.fit(foreign, target)
        with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, got (ndarray|list)"):
            calibrator(foreign)
    for foreign in (target.numpy(), target.tolist()):
        with pytest.raises(TypeError, match=r"target must be a torch\.Tensor, got (ndarray|list)"):
            calibrator.fit(logits, foreign)
    with pytest.raises(TypeError, match="floating point"):
        calibrator(logits[:, :3].long())
    assert torch.equal(calibrator(probe), expected)


@every
def test_fitting_again_replaces_what_was_learned(key, options):
    first, second = sampled(80, 4, seed=18), sampled(60, 3, seed=19, sharpness=0.9)
    calibrator = create_calibrator(key, **options)
    assert calibrator.fit(*first) is calibrator
    assert calibrator.fit(*second) is calibrator
    fresh = create_calibrator(key, **options).fit(*second)
    probe = sampled(40, 3, seed=20)[0]
    assert torch.equal(calibrator(probe), fresh(probe))
    assert calibrator.state_dict().keys() == fresh.state_dict().keys()


@every
def test_fitting_is_deterministic_and_leaves_the_data_alone(key, options):
    logits, target = sampled(80, 3, seed=21)
    before = logits.clone(), target.clone()
    once = create_calibrator(key, **options).fit(logits, target)
    state = torch.get_rng_state()
    again = create_calibrator(key, **options).fit(logits.requires_grad_(), target)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits, before[0])
    assert torch.equal(target, before[1])
    for ours, theirs in zip(once.buffers(), again.buffers(), strict=True):
        assert torch.equal(ours, theirs)
        assert not theirs.requires_grad


@pytest.mark.filterwarnings("ignore:the temperature stopped at its bound:UserWarning")
@pytest.mark.filterwarnings("ignore:of . classes the data lack:UserWarning")
@pytest.mark.parametrize(
    "key", [key for key, kind in CALIBRATORS.items() if issubclass(kind, Scaling) or key == "identity"]
)
@pytest.mark.filterwarnings("ignore:all labels are of one class")
@pytest.mark.filterwarnings("ignore:.* free parameters for")
def test_scaling_never_fits_worse_than_doing_nothing(key):
    for seed in range(6):
        samples, classes = (3, 20, 60)[seed % 3], (2, 3, 5)[seed % 3]
        spread, sharpness = (0.1, 3.0, 30.0)[seed // 2], (0.3, 1.0, 4.0)[seed % 3]
        logits, target = sampled(samples, classes, seed=seed, spread=spread, sharpness=sharpness)
        logits = logits.double()
        calibrated = create_calibrator(key).fit(logits, target)(logits)
        assert F.cross_entropy(calibrated, target) <= F.cross_entropy(logits, target) + 1e-9


@every_fitted
def test_a_class_that_is_ruled_out_stays_so(fitted, name):
    rows = sampled(40, 5, seed=22)[0]
    images = rows.view(10, 4, 5).movedim(-1, 1).clone()
    rows[::2, 3] = -math.inf
    rows[1, :4] = -math.inf
    images[:, 1] = -math.inf
    for logits in (rows, rows.double(), rows.bfloat16(), images):
        output = fitted[name](logits)
        assert torch.equal(output == -math.inf, logits == -math.inf)
        assert torch.equal(output.softmax(1) == 0, logits == -math.inf)
        assert not output.isnan().any()
    # The other elements are none the worse for it.
    clean = torch.arange(3, 40, 2)
    if not name.startswith("local"):
        torch.testing.assert_close(fitted[name](rows)[clean], fitted[name](rows[clean]))


PER_CLASS = ["vector", "structured-vector", "matrix", "structured-matrix", "dirichlet", "isotonic"]
PER_CLASS += ["histogram-binning", "bayesian-binning", "beta", "platt"]


@every
def test_only_what_fits_each_class_warns_of_one_that_is_absent(key, options):
    logits, target = sampled(200, 5, seed=23)
    target = torch.where((target == 1) | (target == 4), 2, target)
    calibrator = create_calibrator(key, **options)
    assert calibrator.per_class == (key in PER_CLASS and options.get("variant") != "top-label")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator.fit(logits, target)
        if isinstance(calibrator, Scaling):
            calibrator.fit_batches([(logits[:33], target[:33]), (logits[33:], target[33:])])
    times = 0 if not calibrator.per_class else 2 if isinstance(calibrator, Scaling) else 1
    assert [each.filename for each in caught] == [__file__] * times
    for each in caught:
        assert str(each.message).startswith("of 5 classes the data lack 2 (1, 4): ")
    assert calibrator(logits).softmax(1).isfinite().all()


def test_the_state_of_another_method_is_refused():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 4, generator=generator)
    target = (logits + torch.randn(60, 4, generator=generator)).argmax(1)
    matrix = create_calibrator("structured-matrix").fit(logits, target)
    with pytest.raises(ValueError, match="method 'StructuredMatrixScaling' into one with 'Dirichlet'"):
        create_calibrator("dirichlet").load_state_dict(matrix.state_dict())
    top = create_calibrator("isotonic", variant="top-label").fit(logits, target)
    with pytest.raises(ValueError, match="options"):
        create_calibrator("isotonic").load_state_dict(top.state_dict())
    assert all(isinstance(value, torch.Tensor) for value in top.state_dict().values())  # as safetensors wants


@pytest.mark.parametrize("key", ["temperature", "ensemble-temperature", "local-temperature", "spline"])
@pytest.mark.filterwarnings("ignore:.*bound")
def test_order_is_kept_also_where_logits_are_wrong(key):
    logits = 3 * torch.randn(400, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for target in (logits.argmin(1), torch.arange(400) % 5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ChanceWarning)
            calibrator = create_calibrator(key).fit(logits, target)
        assert torch.equal(calibrator(logits).argmax(1), logits.argmax(1))


@pytest.mark.parametrize("offset", [-1e6, 3e7])
@every
def test_logits_far_from_zero_lose_no_digits(key, options, offset):
    logits, target = sampled(200, 5, spread=8.0, sharpness=0.05)
    far = logits + offset
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # logits of 3e7 are whole numbers, and few differ
        calibrator = create_calibrator(key, **options).fit(far, target)
    single, double = calibrator(far), calibrator(far.double())
    torch.testing.assert_close(single.double().softmax(1), double.softmax(1), rtol=1e-4, atol=1e-5)
    if calibrator.preserves_order:
        assert torch.equal(single.argmax(1), far.argmax(1))


@every
def test_what_cannot_learn_from_batches_says_so(key, options):
    calibrator, batches = create_calibrator(key, **options), [sampled(50, 3, seed=29)]
    if isinstance(calibrator, Scaling):
        assert calibrator.fit_batches(batches).num_classes == 3
    else:
        with pytest.raises(TypeError, match=f"{type(calibrator).__name__} cannot learn from batches"):
            calibrator.fit_batches(batches)


class Own(Calibrator):
    """A calibrator that learns a scalar, and does something to itself with it."""

    key = "own"

    def __init__(self, keep):
        super().__init__()
        self.keep, self.state = keep, {}

    def options(self):
        return {}

    def fit_rows(self, rows, labels):
        self.learn("least", rows.min())
        self.keep(self, rows.std())

    def transform(self, rows):
        width = self.state.get("width", getattr(self, "width", 1))
        return rows / (width.weight if isinstance(width, torch.nn.Module) else width)


def keeping(keep):
    """`Own` that does this, also where it is created without arguments, as for each label and when read."""

    class Keeping(Own):
        def __init__(self):
            super().__init__(keep)

    return Keeping()


def as_module(value):
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, value.item())
    return layer


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    "keep",
    [
        lambda self, value: setattr(self, "width", value),
        lambda self, value: setattr(self, "width", 10),
        lambda self, value: setattr(self, "width", torch.nn.Parameter(value)),
        lambda self, value: setattr(self, "wide", as_module(value)) or self.state.update(width=self.wide),
        lambda self, value: self.state.update(width=value.item()),
    ],
)
def test_what_a_file_would_not_hold_is_refused(keep, binary, tmp_path):
    calibrator = keeping(keep)
    logits, target = sampled(50, 2)
    for _ in range(2):
        calibrator.fit(logits[:, 1] if binary else logits, target, binary=binary)
        with pytest.raises(TypeError, match=r"^Keeping: files hold .* gives other results. Store all"):
            save_calibrator(calibrator, tmp_path / "own.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_copy_that_fails_is_refused_with_its_error(tmp_path):
    calibrator = keeping(lambda self, value: setattr(self, "scale", value))
    calibrator.transform = lambda rows: rows
    type(calibrator).transform = lambda self, rows: rows / self.scale
    with pytest.raises(
        TypeError, match="fails with AttributeError: 'Keeping' object has no attribute 'scale'"
    ):
        save_calibrator(calibrator.fit(*sampled(50, 2)), tmp_path / "own.safetensors")


@pytest.mark.parametrize(
    "keep",
    [
        lambda self, value: self.learn("width", value),
        lambda self, value: setattr(self, "steps", 10),  # which changes no result
    ],
)
def test_other_calibrators_of_ones_own_are_saved(keep, tmp_path, monkeypatch):
    logits, target = sampled(50, 2)
    calibrator = keeping(keep).fit(logits, target)
    save_calibrator(calibrator, tmp_path / "own.safetensors")
    monkeypatch.setitem(CALIBRATORS, "own", type(calibrator))
    assert torch.equal(load_calibrator(tmp_path / "own.safetensors")(logits), calibrator(logits))


def test_numbers_are_learned_as_tensors_are():
    number = keeping(lambda self, value: self.learn("width", 0.1)).fit(*sampled(50, 2)).width
    assert number.item() == 0.1  # in float64
    with pytest.raises(
        TypeError, match=r"Keeping: learn\('width', value\) takes a tensor or a number, got str"
    ):
        keeping(lambda self, value: self.learn("width", "wide")).fit(*sampled(50, 2))


def test_advice_for_single_probabilities_with_zeros():
    probabilities, target = torch.tensor([0.0, 0.2, 0.7, 1.0]), torch.tensor([0, 0, 1, 1])
    for call in (create_calibrator("temperature").fit, partial(choose, folds=2)):
        with pytest.raises(ValueError, match=r"binary=True as_logits\(p\) - as_logits\(1 - p\)"):
            call(probabilities.logit(), target, binary=True)
