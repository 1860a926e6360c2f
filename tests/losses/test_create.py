"""Making losses by key, and the errors for what does not exist."""

import numpy as np
import pytest
import torch

from calibrant import LOSSES, create_loss


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
        "cals-alm",
        "cals-hr",
        "adafocal",
        "ada-dual-focal",
        "calfocal",
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
    with pytest.raises(ValueError, match=r"'cals-aml', did you mean 'cals-alm'\?; known: ce, ls, .*calfocal"):
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
        TypeError, match=r"'focal'.*'gama', did you mean 'gamma'\?; it takes: gamma, reduction"
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
        ("cals-hr", {"factor": 1}),
        ("dual-focal", {"rank": 4}),
        ("cals-alm", {"initial_penalty_weight": 50}),
        ("adafocal", {"bins": 0}),
        ("adafocal", {"bins": 1.7}),
        ("cals-alm", {"every": 2.9}),
        ("adafocal", {"gamma_range": (0.1, 20)}),
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
