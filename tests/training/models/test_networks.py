"""The networks written here have the shapes and the parameters that their definitions give them."""

import inspect
from functools import cache

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from calibrant.training.models import MODELS, create_model
from calibrant.training.models.cifar_resnet import StochasticDepth

from .shapes import quick_norms, weights_without_numbers

__all__ = ["quick_norms"]

ABOUT = {"channels": 3, "image_size": 16, "vocabulary_size": 50}
TEXTS = ("text-cnn", "text-bag")
LARGE = {"cifar-resnet-50", "cifar-resnet-110", "wide-resnet-26-10", "cifar-densenet-121"}


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@cache
def on_meta(name, num_classes, **options):
    with weights_without_numbers():
        return create_model(name, num_classes, ABOUT, **options)


def inputs_for(name, count):
    if name in TEXTS:
        return torch.randint(50, (count, 30))
    return torch.randn(count, 3, 16, 16)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_a_function_of_the_classes_and_keywords(name):
    first, *others = inspect.signature(MODELS[name]).parameters.values()
    assert first.name == "num_classes"
    assert all(each.kind is each.KEYWORD_ONLY and each.default is not each.empty for each in others)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LARGE))
def test_every_parameter_gets_a_gradient(name):
    model = create_model(name, 7, ABOUT)
    logits = model(inputs_for(name, 3))
    assert logits.shape == (3, 7)
    F.cross_entropy(logits, torch.tensor([0, 3, 6])).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(LARGE))
def test_large_networks_give_finite_logits(name, monkeypatch):
    monkeypatch.setattr(nn.Conv2d, "reset_parameters", lambda convolution: None)  # its weights are drawn anew
    torch.manual_seed(0)
    model = create_model(name, 7, ABOUT).eval()
    with torch.no_grad():
        # as after training: statistics of the data in place of those that an untrained network has
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train()
        logits = model(torch.randn(1, 3, 32, 32))
    assert logits.shape == (1, 7)
    assert logits.isfinite().all()
    assert 0.01 < logits.std() < 100


@pytest.mark.usefixtures("quick_norms")
@pytest.mark.parametrize("name", sorted(LARGE))
def test_large_networks_have_gradients_by_shape(name):
    model = on_meta(name, 7, channels=1)
    logits = model(torch.zeros(2, 1, 64, 64, device="meta"))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("quick_norms")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mlp", *TEXTS)])
def test_images_may_have_any_size_and_number_of_channels(name):
    model = on_meta(name, 7, channels=1)
    # The tests around this one take 3 channels and 16 or 32, and the large networks to 64.
    for size in (8,) if name in LARGE else (8, 64):
        assert model(torch.zeros(2, 1, size, size, device="meta")).shape == (2, 7)


@pytest.mark.usefixtures("quick_norms")
@pytest.mark.parametrize("name", ["cifar-resnet-18", "cifar-resnet-50", "wide-resnet-26-10"])
def test_the_stem_keeps_the_resolution(name):
    model = on_meta(name, 7)
    stem = model.stem(torch.zeros(1, 3, 32, 32, device="meta"))
    assert stem.shape[2:] == (32, 32)
    assert model.stages[0](stem).shape[2:] == (32, 32)
    assert model.stages(stem).shape[2] == 32 >> (len(model.stages) - 1)


# ----------------------------------------------------------------------------------------- parameter counts


def bottlenecks(depths, num_classes):
    total, channels = 3 * 64 * 9 + 2 * 64, 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for block in range(depth):
            total += channels * width + 9 * width**2 + 4 * width**2 + 2 * (width + width + 4 * width)
            if block == 0:
                total += channels * 4 * width + 2 * 4 * width
            channels = 4 * width
    return total + (channels + 1) * num_classes


def pairs(depths, widths, stem, num_classes, projected):
    total, channels = 3 * stem * 9 + 2 * stem, stem
    for depth, width in zip(depths, widths, strict=True):
        for _ in range(depth):
            total += 9 * channels * width + 9 * width**2 + 4 * width
            if projected and channels != width:
                total += channels * width + 2 * width
            channels = width
    return total + (channels + 1) * num_classes


def dense(depths, growth, num_classes):
    channels = 2 * growth
    total = 3 * channels * 9
    for block, depth in enumerate(depths):
        if block:
            total += 2 * channels + channels * (channels // 2)
            channels //= 2
        for _ in range(depth):
            total += 2 * channels + channels * 4 * growth + 2 * 4 * growth + 9 * 4 * growth * growth
            channels += growth
    return total + 2 * channels + (channels + 1) * num_classes


def plain_dense(depths, growth, num_classes):
    channels = 16
    total = 3 * channels * 9
    for block, depth in enumerate(depths):
        if block:
            total += 2 * channels + channels**2
        for _ in range(depth):
            total += 2 * channels + 9 * channels * growth
            channels += growth
    return total + 2 * channels + (channels + 1) * num_classes


@pytest.mark.parametrize(
    ("name", "num_classes", "expected", "millions"),
    [
        ("cifar-resnet-18", 10, pairs([2] * 4, [64, 128, 256, 512], 64, 10, True), 11.17),
        ("cifar-resnet-32", 10, pairs([5] * 3, [16, 32, 64], 16, 10, False), 0.46),
        ("cifar-resnet-50", 100, bottlenecks([3, 4, 6, 3], 100), 23.71),
        ("cifar-resnet-110", 100, bottlenecks([3, 4, 26, 3], 100), 46.05),
        ("cifar-resnet-110-sd", 10, pairs([18] * 3, [16, 32, 64], 16, 10, False), 1.73),
        ("wide-resnet-26-10", 10, pairs([4] * 3, [160, 320, 640], 16, 10, True), 36.48),
        ("cifar-densenet-40", 10, plain_dense([12] * 3, 12, 10), 1.02),
        ("cifar-densenet-121", 10, dense([6, 12, 24, 16], 32, 10), 6.96),
    ],
)
def test_parameters_are_as_many_as_the_definition_has(name, num_classes, expected, millions):
    model = on_meta(name, num_classes)
    assert parameters(model) == expected
    assert expected / 1e6 == pytest.approx(millions, abs=0.005)


def test_text_cnn_has_the_parameters_of_its_definition():
    model = create_model("text-cnn", 20, {"embedding": torch.randn(500, 100), "vocabulary_size": 500})
    convolutions = (5 * 100 + 1) * 128 + 2 * (5 * 128 + 1) * 128
    learned = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert learned == convolutions + 129 * 128 + 129 * 20
    assert parameters(model) == learned + 500 * 100


# ------------------------------------------------------------------------------------------ stochastic depth


def gates(model):
    return [module for module in model.modules() if isinstance(module, StochasticDepth)]


def test_survival_falls_linearly_from_block_to_block():
    found = [gate.survival for gate in gates(on_meta("cifar-resnet-110-sd", 7))]
    assert found == pytest.approx([1 - 0.5 * block / 54 for block in range(1, 55)])
    assert gates(on_meta("cifar-resnet-110-sd", 7, survival=0.2))[-1].survival == pytest.approx(0.2)
    assert not gates(on_meta("cifar-resnet-110-sd", 7, survival=1))
    with pytest.raises(ValueError, match=r"survival must lie in \(0, 1\], got 0"):
        on_meta("cifar-resnet-110-sd", 7, survival=0)


def test_a_batch_survives_as_a_whole_as_often_as_it_should():
    torch.manual_seed(0)
    gate, ones = StochasticDepth(0.3), torch.ones(4, 2)
    found = [gate(ones) for _ in range(2000)]
    assert all(bool((each == each[0, 0]).all()) for each in found)
    assert sum(float(each[0, 0]) for each in found) / 2000 == pytest.approx(0.3, abs=0.04)
    assert torch.equal(gate.eval()(ones), 0.3 * ones)


def test_a_dropped_block_gets_no_gradient_even_from_numbers_that_are_not_finite():
    gate = StochasticDepth(1e-9)
    images = torch.tensor([1.0, float("inf")], requires_grad=True)
    dropped = gate(images)
    dropped.sum().backward()
    assert dropped.tolist() == [0, 0]
    assert images.grad.tolist() == [0, 0]


def test_the_choice_is_a_tensor_operation():
    """A graph that was traced once still chooses anew: recordings and compiled networks depend on it."""
    torch.manual_seed(0)
    traced = make_fx(StochasticDepth(0.5))(torch.ones(3))
    found = {tuple(traced(torch.ones(3)).tolist()) for _ in range(30)}
    assert found == {(0.0,) * 3, (1.0,) * 3}


# ------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("name", TEXTS)
def test_a_frozen_embedding_is_kept(name):
    embedding = torch.randn(50, 8)
    model = create_model(name, 3, {"embedding": embedding})
    model(torch.randint(50, (2, 21))).sum().backward()
    assert model.words.weight.grad is None
    assert torch.equal(model.words.weight, embedding)
    model.words.weight.data.zero_()
    assert embedding.abs().sum() > 0


@pytest.mark.parametrize("name", TEXTS)
def test_an_embedding_is_trained_if_asked_or_drawn(name):
    given = create_model(name, 3, {"embedding": torch.randn(50, 8)}, frozen=False)
    drawn = create_model(name, 3, {"vocabulary_size": 50}, dimension=12)
    assert given.words.weight.requires_grad
    assert drawn.words.weight.requires_grad
    assert drawn.words.weight.shape == (50, 12)


def test_text_cnn_takes_the_largest_value_over_positions():
    model = create_model("text-cnn", 3, {"vocabulary_size": 50}).eval()
    text = torch.randint(1, 50, (1, 40))
    padded = torch.zeros(1, 300, dtype=torch.long)
    early, late = padded.clone(), padded.clone()
    early[:, 100:140], late[:, 200:240] = text, text
    torch.testing.assert_close(model(early), model(late))


def test_text_cnn_starts_with_the_weights_that_pytorch_draws():
    torch.manual_seed(0)
    convolution = create_model("text-cnn", 3, {"embedding": torch.zeros(50, 100)}).layers[0]
    limit = (5 * 100) ** -0.5
    assert 0.99 * limit < convolution.weight.abs().max() <= limit
    assert 0.9 * limit < convolution.bias.abs().max() <= limit


def test_text_cnn_drops_features_of_its_last_layer_in_training_only():
    model = create_model("text-cnn", 3, {"vocabulary_size": 50}, dropout=0.3)
    text = torch.randint(1, 50, (2, 40))
    assert not torch.equal(model(text), model(text))
    model.eval()
    assert torch.equal(model(text), model(text))
    assert not any(isinstance(module, nn.Dropout) for module in create_model("text-cnn", 3, ABOUT).modules())
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\], got 1.5"):
        create_model("text-cnn", 3, {"vocabulary_size": 50}, dropout=1.5)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({}, "needs embedding or vocabulary_size"),
        ({"embedding": torch.zeros(5, 2), "vocabulary_size": 6}, "5 words and vocabulary_size is 6"),
        ({"embedding": torch.zeros(5)}, r"must have shape \(V, d\)"),
    ],
)
@pytest.mark.parametrize("name", TEXTS)
def test_words_that_do_not_fit_are_refused(name, about, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, 3, about)


def test_text_bag_is_linear_in_the_average_of_the_words():
    model = create_model("text-bag", 3, {"embedding": torch.randn(50, 8)}).eval()
    text = torch.tensor([[4, 9, 9, 0, 0], [0, 0, 0, 0, 0]])  # filled up with 0
    average = (model.words.weight[4] + 2 * model.words.weight[9]) / 3
    expected = model.head(torch.stack([average, torch.zeros(8)]))
    torch.testing.assert_close(model(text), expected)


def test_text_cnn_refuses_texts_that_are_too_short():
    model = create_model("text-cnn", 3, {"vocabulary_size": 50})
    with pytest.raises(ValueError, match="at least 21 positions, got 20"):
        model(torch.zeros(2, 20, dtype=torch.long))


# -------------------------------------------------------------------------------------------------- others


def test_mlp_takes_features_or_images():
    assert create_model("mlp", 3, {"features": 5})(torch.randn(2, 5)).shape == (2, 3)
    images = create_model("mlp", 3, {"channels": 1, "image_size": 8}, hidden=[16])
    assert images(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert parameters(create_model("mlp", 3, features=5, hidden=())) == 18
    with pytest.raises(ValueError, match="mlp needs features"):
        create_model("mlp", 3)


def test_cnn_gives_an_element_the_same_logits_in_any_batch():
    model = create_model("cnn", 3, {"channels": 1})
    images = torch.randn(6, 1, 8, 8)
    torch.testing.assert_close(model(images)[:2], model(images[:2]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cnn", {"width": 12}, "multiple of 8"),
        ("wide-resnet-26-10", {"depth": 28}, "depth must be"),
        ("wide-resnet-26-10", {"dropout": 1.5}, "dropout must lie"),
        ("wide-resnet-26-10", {"width": 0}, "width must be a whole number"),
    ],
)
def test_options_out_of_range_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, 3, **options)


def test_wide_resnet_takes_depth_width_and_dropout():
    model = create_model("wide-resnet-26-10", 3, depth=8, width=1, dropout=0.3)
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 3
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert parameters(model) == pairs([1] * 3, [16, 32, 64], 16, 3, True)


def test_convolutions_start_with_the_variance_of_kaiming():
    torch.manual_seed(0)
    model = create_model("cifar-resnet-18", 10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 30_000:
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.03)


def test_padded_shortcuts_pass_the_input_on():
    block = on_meta("cifar-resnet-32", 10).stages[1][0]
    images = torch.randn(2, 16, 8, 8)
    passed = block.shortcut(images)
    assert passed.shape == (2, 32, 4, 4)
    assert torch.equal(passed[:, 8:24], images[:, :, ::2, ::2])
    assert passed[:, :8].abs().sum() + passed[:, 24:].abs().sum() == 0


def test_networks_learn():
    torch.manual_seed(0)
    model = create_model("cnn", 2, {"channels": 1}, width=8)
    images = torch.randn(32, 1, 8, 8)
    labels = (images[:, 0, 2:6, 2:6].mean((1, 2)) > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.2
