"""Models by name: what the data tells is filled in, and what cannot be is said in one line."""

import sys

import pytest
import torch

from calibrant.training.models import MODELS, PREFIXES, create_model, model_factory


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own, and its name."""
    (tmp_path / "own_networks.py").write_text(
        "from torch import nn\n"
        "number = 3\n"
        "def linear(num_classes, *, features, bias=True):\n"
        "    return nn.Linear(features, num_classes, bias=bias)\n"
        "def anything(num_classes, **options):\n"
        "    network = nn.Linear(1, num_classes)\n"
        "    network.options = options\n"
        "    return network\n"
        "def nothing(num_classes):\n"
        "    return 'a string'\n"
        "def broken(num_classes):\n"
        "    raise TypeError('of its own')\n",
        encoding="utf-8",
    )
    (tmp_path / "own_incomplete.py").write_text("import a_module_that_is_not_there\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_networks"
    sys.modules.pop("own_networks", None)


def test_an_unknown_model_is_refused_with_the_nearest_one():
    with pytest.raises(
        ValueError, match=r"unknown model 'cifar-resnet-5' [(]did you mean 'cifar-resnet-50'"
    ) as info:
        create_model("cifar-resnet-5", 10)
    assert all(name in str(info.value) for name in MODELS)
    assert all(f"{prefix}:NAME" in str(info.value) for prefix in PREFIXES)
    with pytest.raises(ValueError, match="unknown model ':x'"):
        create_model(":x", 10)


def test_an_unknown_option_is_refused_with_the_valid_ones():
    with pytest.raises(
        TypeError, match=r"has no option 'hiden' [(]did you mean 'hidden'.*takes: features, .*weights"
    ):
        create_model("mlp", 10, features=3, hiden=(2,))


@pytest.mark.parametrize("num_classes", [0, 2.5])
def test_the_number_of_classes_is_checked(num_classes):
    with pytest.raises(ValueError, match="num_classes"):
        create_model("mlp", num_classes, features=3)


def test_options_go_before_what_the_data_tells():
    about = {"channels": 3, "image_size": 8, "class_names": ("a", "b")}
    assert create_model("cnn", 2, about).layers[0].in_channels == 3
    assert create_model("cnn", 2, about, channels=1).layers[0].in_channels == 1


def test_a_model_of_the_users_own(own):
    model = create_model(f"{own}:linear", 4, {"features": 7, "channels": 3}, bias=False)
    assert model.weight.shape == (4, 7)
    assert model.bias is None
    assert model_factory(f"{own}:linear") is sys.modules[own].linear


def test_a_factory_that_takes_anything_gets_only_the_options(own):
    assert create_model(f"{own}:anything", 4, {"features": 7}, depth=2).options == {"depth": 2}


def test_a_class_is_a_factory():
    assert create_model("torch.nn:Linear", 3, out_features=2)(torch.zeros(1, 3)).shape == (1, 2)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("own_network:linear", {}, ValueError, "there is no module 'own_network'; expected timm:NAME"),
        ("tim:resnet18", {}, ValueError, "there is no module 'tim' [(]did you mean 'timm'[?][)]; expected"),
        ("own_networks.deep:linear", {}, ValueError, "there is no module"),
        ("own_networks:liner", {}, ValueError, "has no 'liner' [(]did you mean 'linear'"),
        ("own_networks:", {}, ValueError, "has no ''"),
        ("own_networks:number", {}, TypeError, "must be a function or a class, got a int"),
        ("own_networks:nothing", {}, TypeError, "must be a torch.nn.Module, its factory returned 'a string'"),
        ("own_networks:broken", {}, TypeError, "of its own"),
        ("own_networks:linear", {"bis": 1}, TypeError, "has no option 'bis' [(]did you mean 'bias'"),
        ("own_networks:linear", {}, TypeError, "needs features: set it as an option"),
        ("own_incomplete:linear", {}, ModuleNotFoundError, "a_module_that_is_not_there"),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_is_wrong_with_a_model_of_the_users_own(name, options, error, message):
    with pytest.raises(error, match=message) as info:
        create_model(name, 4, **options)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("timm:resnet18", "timm", "timm"),
        ("smp:Unet", "segmentation_models_pytorch", "smp"),
        ("hf:bert", "transformers", "transformers"),
    ],
)
def test_a_missing_package_says_what_to_install(name, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'needs {module}, .*: pip install "calibrant\[{extra}\]"'):
        create_model(name, 4)


def test_a_package_that_does_not_fit_torch_says_so(monkeypatch):
    def refused(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("calibrant.training.models.external.importlib.import_module", refused)
    with pytest.raises(
        ImportError, match="nms does not exist; torch and torchvision must be builds for each"
    ):
        create_model("timm:resnet18", 4)
