"""Calibrators by their keys."""

from inspect import signature

import pytest

from calibrant import calibrators
from calibrant.calibrators import CALIBRATORS, Calibrator, create_calibrator

OPTIONS = {
    "temperature": {"objective": "ece"},
    "local-temperature": {"strength": 2.5},
    "vector": {"ridge": 1e-3},
    "structured-vector": {"strength": 0.5},
    "matrix": {"off_diagonal_penalty": 0.3, "bias_penalty": 0.2, "ridge": 0.1},
    "structured-matrix": {"strength": 3.0},
    "dirichlet": {"off_diagonal_penalty": 0.3, "bias_penalty": 0.2, "ridge": 0.1},
    "spline": {"knots": 4},
    "isotonic": {"variant": "top-label"},
    "histogram-binning": {"bins": 7, "variant": "top-label", "binning": "equal-mass"},
    "bayesian-binning": {"bins": [2, 3, 5], "prior_samples": 4.0},
    "platt": {"smooth_targets": False},
}
"""A value that is not the default for every option of every calibrator."""

every = pytest.mark.parametrize("key", CALIBRATORS)


@every
def test_has_its_key(key):
    calibrator = create_calibrator(key)
    assert isinstance(calibrator, Calibrator)
    assert type(calibrator) is CALIBRATORS[key]
    assert calibrator.key == key
    assert calibrator.num_classes is None


@every
def test_is_public_and_documented(key):
    kind = CALIBRATORS[key]
    assert kind.__name__ in calibrators.__all__
    assert getattr(calibrators, kind.__name__) is kind
    assert f"``{key}``" in kind.__doc__


def test_public_names_exist():
    assert all(hasattr(calibrators, name) for name in calibrators.__all__)
    assert sorted(set(calibrators.__all__)) == sorted(calibrators.__all__)


@every
def test_options_are_stored_under_their_names(key):
    parameters = signature(CALIBRATORS[key]).parameters
    assert list(OPTIONS.get(key, {})) == list(parameters), "give every option a value in OPTIONS"
    changed = create_calibrator(key, **OPTIONS.get(key, {}))
    default = create_calibrator(key)
    for name, parameter in parameters.items():
        assert getattr(changed, name) == OPTIONS[key][name] != parameter.default
        assert getattr(default, name) == parameter.default


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("local_temperature", "local-temperature"),
        ("histogram", "histogram-binning"),
        ("dirichelt", "dirichlet"),
        ("isotone", "isotonic"),
    ],
)
def test_unknown_key_with_the_nearest(key, meant):
    with pytest.raises(ValueError, match=f"unknown calibrator {key!r}, did you mean {meant!r}") as error:
        create_calibrator(key)
    assert all(known in str(error.value) for known in CALIBRATORS)


@pytest.mark.parametrize("key", ["", "xyzzy", None, 3])
def test_unknown_key_with_nothing_near(key):
    with pytest.raises(ValueError, match="unknown calibrator") as error:
        create_calibrator(key)
    assert "did you mean" not in str(error.value)
    assert "known: identity, temperature" in str(error.value)


def test_unknown_option_with_the_nearest():
    with pytest.raises(
        TypeError, match=r"'spline' has no option 'knot', did you mean 'knots'.*takes: knots$"
    ):
        create_calibrator("spline", knot=5)
    with pytest.raises(TypeError, match="'matrix' has no option 'xyzzy'; it takes: off_diagonal_penalty, "):
        create_calibrator("matrix", xyzzy=5)
    with pytest.raises(TypeError, match="'beta' has no option 'bins'; it takes: none"):
        create_calibrator("beta", bins=5)


@every
def test_no_calibrator_takes_an_unknown_option(key):
    with pytest.raises(TypeError, match=f"calibrator '{key}' has no option 'unheard_of'"):
        create_calibrator(key, unheard_of=1)


def test_a_bad_value_is_refused():
    with pytest.raises(ValueError, match="variant must be one of"):
        create_calibrator("isotonic", variant="sideways")
