"""Making losses by key, and the errors for what does not exist."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import calibrant
from calibrant import LOSSES, create_loss
from calibrant.losses import CrossEntropy


def test_every_key_of_the_papers_is_there() -> None:
    assert list(LOSSES) == [
        "ce",
        "ls",
        "ecp",
        "brier",
        "focal",
        "flsd",
        "inverse-focal",
        "dual-focal",
        "mbls",
        "cpc",
        "mmce",
        "mmce-weighted",
        "kde-xe",
        "mdca",
        "maxsup",
        "label-relaxation",
        "acls",
        "sb-ece",
        "bsce-gra",
        "avuc",
        "nacl",
        "cals-alm",
        "cals-hr",
        "adafocal",
        "ada-dual-focal",
        "calfocal",
        "ada-scale",
    ]


def test_defaults_are_those_of_the_papers() -> None:
    defaults = {
        ("ls", "smoothing"): 0.05,
        ("ecp", "weight"): 0.1,
        ("focal", "gamma"): 3,
        ("inverse-focal", "gamma"): 2,
        ("dual-focal", "gamma"): 5,
        ("mbls", "margin"): 10,
        ("mbls", "weight"): 0.1,
        ("cpc", "discrimination"): 10,
        ("cpc", "exclusion"): 1,
        ("mmce", "weight"): 0.1,
        ("mmce-weighted", "weight"): 2,
        ("kde-xe", "weight"): 0.2,
        ("kde-xe", "bandwidth"): 0.001,
        ("mdca", "weight"): 1,
        ("mdca", "gamma"): 1,
        ("maxsup", "weight"): 0.1,
        ("label-relaxation", "relaxation"): 0.1,
        ("acls", "margin"): 10,
        ("acls", "weight_of_top"): 0.1,
        ("acls", "weight_of_others"): 0.01,
        ("sb-ece", "weight"): 0.5,
        ("sb-ece", "bins"): 15,
        ("sb-ece", "temperature"): 0.01,
        ("bsce-gra", "gamma"): 2,
        ("bsce-gra", "norm"): 2,
        ("avuc", "weight"): 1,
        ("nacl", "weight"): 0.1,
        ("nacl", "window"): 3,
        ("cals-alm", "margin"): 10,
        ("cals-alm", "penalty"): "phr",
        ("cals-alm", "growth"): 1.2,
        ("cals-alm", "required_decrease"): 0.9,
        ("cals-alm", "every"): 10,
        ("cals-alm", "penalty_weight_max"): 10,
        ("cals-hr", "margin"): 10,
        ("adafocal", "bins"): 15,
        ("adafocal", "gamma_range"): (-2, 20),
        ("adafocal", "switch_at"): 0.2,
        ("calfocal", "rate"): 10,
    }
    for (key, name), value in defaults.items():
        assert LOSSES[key].hyperparameters()[name].default == value


def test_unknown_key_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"'cals-aml' \(did you mean 'cals-alm'\?\); known: ce, ls, .*calfocal"
    ):
        create_loss("cals-aml", 10)


def test_case_does_not_hide_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'ce'"):
        create_loss("CE", 10)


def test_arrays_are_not_tensors() -> None:
    for key in ("ce", "cals-alm"):
        with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, got ndarray"):
            create_loss(key, 3)(torch.zeros(2, 3).numpy(), torch.tensor([0, 1]))
        with pytest.raises(TypeError, match=r"target must be a torch\.Tensor, got list"):
            create_loss(key, 3)(torch.zeros(2, 3), [0, 1])


def test_unknown_hyperparameter_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(
        TypeError, match=r"'focal'.*'gama' \(did you mean 'gamma'\?\); it takes: gamma, reduction"
    ):
        create_loss("focal", 10, gama=2)


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("ls", {"smoothing": 1.5}),
        ("mbls", {"margin": "6"}),
        ("cals-alm", {"multiplier_range": 3}),
        ("focal", {"gamma": -1}),
        ("focal", {"gamma": float("nan")}),
        ("mbls", {"margin": float("inf")}),
        ("cals-alm", {"margin": 0}),
        ("cals-alm", {"penalty": "p4"}),
        ("cals-alm", {"every": 0}),
        ("cals-alm", {"multiplier_range": (1, 0)}),
        ("cals-alm", {"per": "bin"}),
        ("cals-hr", {"factor": 1}),
        ("cals-hr", {"threshold": 0.9}),
        ("cals-hr", {"threshold": "1.1"}),
        ("calfocal", {"per": "class"}),
        ("calfocal", {"through_gamma": 1}),
        ("dual-focal", {"rank": 4}),
        ("cals-alm", {"initial_penalty_weight": 50}),
        ("adafocal", {"bins": 0}),
        ("adafocal", {"bins": 1.7}),
        ("cals-alm", {"every": 2.9}),
        ("adafocal", {"gamma_range": (0.1, 20)}),
        ("ada-scale", {"offset": "fixed"}),
        ("ada-scale", {"scale_range": (0, 1)}),
        ("ada-scale", {"class_counts": [1, 2]}),
        ("ada-scale", {"class_counts": [1, 2, 0]}),
        ("ada-scale", {"class_counts": "abc"}),
        ("adafocal", {"initial_gamma": 0}),
        ("kde-xe", {"bandwidth": 0}),
        ("ce", {"reduction": "median"}),
        ("ce", {"class_weight": [1.0, 2.0]}),
        ("ce", {"class_weight": [-1.0] * 10}),
    ],
)
def test_bad_values_are_named(key: str, arguments: dict[str, object]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=name):
        create_loss(key, 10, **arguments)


@pytest.mark.parametrize("number", [1, 0, -3, 2.5, True])
def test_class_count(number: object) -> None:
    with pytest.raises(ValueError, match="num_classes"):
        create_loss("ce", number)  # type: ignore[arg-type]


def test_rank_and_constant_exclude_one_another() -> None:
    with pytest.raises(ValueError, match=r"constant=0\.3 takes the place of rank=2"):
        create_loss("dual-focal", 5, rank=2, constant=0.3)


def test_numpy_integers_count_classes() -> None:
    assert create_loss("ce", np.int64(5)).num_classes == 5


def test_rank_needs_enough_classes() -> None:
    with pytest.raises(ValueError, match="rank=3"):
        create_loss("dual-focal", 3, rank=3)


def test_state_on_another_device_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"logits are on meta.*state of this loss is on cpu.*loss.to\('meta'\)"
    ):
        create_loss("cals-alm", 3)(
            torch.empty(2, 3, device="meta"), torch.empty(2, dtype=torch.long, device="meta")
        )


def test_printing_shows_what_differs() -> None:
    assert repr(create_loss("cals-alm", 10, margin=6)) == "AugmentedLagrangian(10, margin=6.0)"
    assert repr(create_loss("ce", 2, class_weight=[1, 2])) == "CrossEntropy(2, class_weight=[1.0, 2.0])"


def numeric_options() -> list[tuple[str, str]]:
    return [
        (key, name)
        for key, loss in LOSSES.items()
        for name, parameter in loss.hyperparameters().items()
        if isinstance(parameter.default, int | float)
        and not isinstance(parameter.default, bool)
        and name != "rank"
    ]


NO_NUMBERS = [math.inf, -math.inf, math.nan, True, "3", "x", [1], torch.ones(2)]


@pytest.mark.parametrize(("key", "name"), numeric_options())
def test_what_is_no_finite_number_is_refused_by_name(key: str, name: str) -> None:
    whole = isinstance(LOSSES[key].hyperparameters()[name].default, int)
    for value in [*NO_NUMBERS, *([1.5, 2**70] if whole else []), None]:
        if value is None and name == "penalty_weight_max":
            continue
        with pytest.raises(ValueError, match=f"^{name} must "):
            create_loss(key, 3, **{name: value})


def test_class_weights_are_finite_numbers_of_at_least_0(key: str) -> None:
    for wrong in (
        [1, 2, math.inf],
        [1, 2, math.nan],
        [1, 2, -1],
        [1, 2],
        ["a", "b", "c"],
        "abc",
        1.0,
        [[1, 2, 3]],
    ):
        with pytest.raises(ValueError, match=r"^class_weight must hold num_classes=3 "):
            create_loss(key, 3, class_weight=wrong)
    assert create_loss(key, 3, class_weight=torch.tensor([1, 2, 3])).class_weight.dtype == torch.float64


def test_shared_options_are_checked_when_they_are_changed(key: str) -> None:
    loss = create_loss(key, 3, class_weight=[1, 2, 3])
    for name, wrong in (("reduction", "bogus"), ("ignore_index", 1.5), ("class_weight", [1, 2, math.inf])):
        before = getattr(loss, name)
        with pytest.raises(ValueError, match=f"^{name} must "):
            setattr(loss, name, wrong)
        assert getattr(loss, name) is before
    loss.reduction, loss.ignore_index, loss.class_weight = "none", 255, [0.5, 1, 1]
    target = torch.tensor([0, 255])
    assert loss(torch.eye(3)[:2], target)[1] == 0
    loss.class_weight = None
    assert loss(torch.eye(3)[:2], target)[1] == 0


@pytest.mark.parametrize("wrong", [[1, 2, math.inf], [1, 2, math.nan], [1, 2, -1]])
def test_class_weights_are_checked_when_they_are_loaded(wrong: list[float]) -> None:
    loss = create_loss("cals-hr", 3, class_weight=[1, 2, 3])
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    state = {**before, "passes": torch.tensor(5), "class_weight": torch.tensor(wrong, dtype=torch.float64)}
    network = torch.nn.ModuleDict({"loss": loss})
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"loss\.class_weight must hold num_classes=3 finite numbers"):
            network.load_state_dict({f"loss.{name}": value for name, value in state.items()}, strict=strict)
        assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())
    with pytest.raises(RuntimeError, match=r"size mismatch for class_weight"):
        loss.load_state_dict({**before, "class_weight": torch.ones(4)})


def test_the_number_of_classes_stays() -> None:
    loss = create_loss("ce", 3)
    for wrong in ("x", 4, None):
        with pytest.raises(AttributeError, match=r"^num_classes cannot be changed .*create a new loss"):
            loss.num_classes = wrong
    loss.num_classes = 3
    assert loss.num_classes == 3


@pytest.mark.parametrize("key", ["ce", "cals-hr"])
def test_a_loss_without_memory_takes_class_weights(key: str) -> None:
    with torch.device("meta"):
        loss = create_loss(key, 3, class_weight=[1, 2, 3])
        with pytest.raises(ValueError, match=r"^class_weight must hold num_classes=3 .*got shape \(2,\)"):
            create_loss(key, 3, class_weight=[1, 2])
    assert loss.class_weight.is_meta
    loss.to_empty(device="cpu")
    loss.load_state_dict(create_loss(key, 3, class_weight=[1, 2, 3]).state_dict())
    assert loss.class_weight.tolist() == [1, 2, 3]


def test_no_weight_is_no_loss(key: str) -> None:
    """Elements whose class weights are all 0 count as little as those that are ignored."""
    logits = torch.eye(3).requires_grad_()
    loss = create_loss(key, 3, class_weight=[0, 0, 1])
    value = loss(logits, torch.tensor([0, 1, 1]))
    value.backward()
    assert value == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize(
    "part", [lambda logits, target: 0, torch.nn.CrossEntropyLoss, calibrant.create_loss("ce", 2)]
)
def test_only_losses_are_registered(part: object) -> None:
    with pytest.raises(TypeError, match="'own': expected a subclass of calibrant's Loss, got "):
        LOSSES["own"] = part  # type: ignore[assignment]
    assert "own" not in LOSSES


@pytest.mark.parametrize("annotation", [float, float | None, int | float, "float", "None | int", "float|int"])
def test_texts_in_place_of_the_numbers_of_a_loss_from_outside(
    monkeypatch: pytest.MonkeyPatch, annotation: Any
) -> None:
    class Unchecked(CrossEntropy):
        def __init__(self, num_classes: int, *, eps: float = 0.1, **options: Any) -> None:
            super().__init__(num_classes, **options)
            self.eps = -eps

    Unchecked.__init__.__annotations__["eps"] = annotation
    monkeypatch.setitem(LOSSES, "own", Unchecked)
    with pytest.raises(ValueError, match="eps must be a number, got 'x'"):
        create_loss("own", 3, eps="x")
    assert create_loss("own", 3, eps=0.5).options()["eps"] == -0.5


def test_options_must_be_keyword_only() -> None:
    class Positional(CrossEntropy):
        def __init__(self, num_classes: int, eps: float = 0.1, **options: Any) -> None:
            super().__init__(num_classes, **options)

    with pytest.raises(TypeError, match="'own': the option 'eps' of Positional must be keyword-only"):
        LOSSES["own"] = Positional
    assert "own" not in LOSSES
