"""Calibrators by their keys."""

import math
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from calibrant import calibrators
from calibrant.calibrators import CALIBRATORS, Calibrator, Identity, create_calibrator
from calibrant.calibrators.streaming import HeldOut, Scaling


def another(annotation, default):
    """A value that an option may take and that is not its default."""
    if get_origin(annotation) is Literal:
        return next(value for value in get_args(annotation) if value != default)
    if default is None:
        return [2, 3, 5]
    return not default if isinstance(default, bool) else default + (1 if isinstance(default, int) else 0.5)


def other_options(kind):
    parameters, hints = signature(kind).parameters, get_type_hints(kind.__init__)
    return {name: another(hints[name], parameter.default) for name, parameter in parameters.items()}


OPTIONS = {key: options for key, kind in CALIBRATORS.items() if (options := other_options(kind))}
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
    with pytest.raises(ValueError, match=f"unknown calibrator {key!r} [(]did you mean {meant!r}") as error:
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
        TypeError, match=r"'spline' has no option 'knot' [(]did you mean 'knots'.*takes: knots$"
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


DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_lists_every_calibrator():
    page = (DOCS / "calibrators.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (.*) \| (streams|memory) \|$", page, re.MULTILINE)
    assert [key for key, _, _ in rows] == [key for key in CALIBRATORS if key != "identity"]
    for key, order, source in rows:
        options = {"variant": "top-label"} if order.startswith("top-label: ") else {}
        assert ("kept" in order) == create_calibrator(key, **options).preserves_order
        assert (source == "streams") == issubclass(CALIBRATORS[key], Scaling)


def test_the_command_page_quotes_every_key():
    page = (DOCS / "calibrate-command.md").read_text(encoding="utf-8")
    assert f"known: {', '.join(['auto', *CALIBRATORS])}\n" in page


NO_NUMBERS = [math.inf, math.nan, True, "3", "x", [1], torch.ones(2)]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (key, name)
        for key, calibrator in CALIBRATORS.items()
        for name, parameter in signature(calibrator).parameters.items()
        if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool)
    ],
)
def test_what_is_no_finite_number_is_refused_by_name(key: str, name: str) -> None:
    whole = isinstance(signature(CALIBRATORS[key]).parameters[name].default, int)
    for value in [*NO_NUMBERS, *([1.5, 2**70] if whole else []), -1, None]:
        with pytest.raises(ValueError, match=f"^{name} must "):
            create_calibrator(key, **{name: value})


@pytest.mark.parametrize("bins", [[], 3, "12", [0], [1.5], [True], ["1"], [math.inf]])
def test_lists_of_numbers_of_bins(bins: object) -> None:
    with pytest.raises(ValueError, match=r"^bins must be "):
        create_calibrator("bayesian-binning", bins=bins)


@pytest.mark.parametrize("key", CALIBRATORS)
def test_labels_to_ignore_are_whole_numbers(key: str) -> None:
    logits, target = torch.randn(9, 3), torch.arange(9) % 3
    for wrong in (1.5, math.nan, True, "3", None):
        with pytest.raises(ValueError, match=r"^ignore_index must be a whole number"):
            create_calibrator(key).fit(logits, target, ignore_index=wrong)


def test_a_calibrator_is_registered_under_its_own_key() -> None:
    class Own(Identity):
        key = "own"

    with pytest.raises(ValueError, match=r"'other': expected Own.key = 'other', got 'own'"):
        CALIBRATORS["other"] = Own
    with pytest.raises(TypeError, match="'own': expected a subclass of calibrant's Calibrator, got "):
        CALIBRATORS["own"] = Own()  # type: ignore[assignment]
    assert not {"own", "other"} & set(CALIBRATORS)


@pytest.mark.parametrize("word", ["auto", "none"])
def test_words_of_the_commands_are_no_keys(word: str) -> None:
    class Own(Identity):
        key = word

    with pytest.raises(ValueError, match=f"'{word}': a key must not be auto or none"):
        CALIBRATORS[word] = Own


class Scaled(Calibrator):
    """A user's calibrator, with mistakes to choose from."""

    key = "scaled"

    def __init__(self, *, result: Callable[[Tensor], Any] = lambda rows: rows) -> None:
        super().__init__()
        self.result = result

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        pass

    def transform(self, rows: Tensor) -> Tensor:
        result: Tensor = self.result(rows)
        return result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda rows: rows[:, :1], r"floating-point logits of shape \(20, 4\), got .* of shape \(20, 1\)"),
        (
            lambda rows: rows > 0,
            r"logits of shape \(20, 4\), got torch.bool of shape \(20, 4\)",
        ),
        (lambda rows: rows.tolist(), r"Scaled.transform must return logits, got list"),
        (lambda rows: rows.sqrt(), r"Scaled.transform must return logits, .* got NaN for logits such as \["),
    ],
)
def test_what_a_transform_must_return(result: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scaled(result=result).fit(torch.randn(20, 4), torch.arange(20) % 4)
    for samples in (20, 4):
        with pytest.raises(ValueError, match=r"logits of shape \(\d+, 4\), got"):
            Scaled(result=lambda rows: rows.T).fit(torch.randn(samples, 4), torch.arange(samples) % 4)


def test_the_example_of_what_is_not_calibrated_is_one() -> None:
    logits = torch.arange(1.0, 21).view(5, 4)
    logits[3, 2] = -7
    with pytest.raises(ValueError, match=r"got NaN for logits such as \[13.0, 14.0, -7.0, 16.0\]"):
        Scaled(result=Tensor.sqrt).fit(logits, torch.arange(5) % 4)


def test_a_transform_need_not_take_equal_logits() -> None:
    calibrator = Scaled(result=lambda rows: rows / rows.std(1, keepdim=True))
    assert calibrator.fit(torch.randn(20, 4), torch.arange(20) % 4).num_classes == 4


class OnlyFour(Scaled):
    """Learns a number, and returns four logits of whatever it is fitted to."""

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        self.learn("scale", rows.std())

    def transform(self, rows: Tensor) -> Tensor:
        return rows[:, :4] * self.learned("scale", rows)


class OnlyFourInPasses(Scaling):
    """The same, fitted in passes."""

    key = "in-passes"
    transform = OnlyFour.transform

    def fit_passes(self, data: HeldOut) -> None:
        self.learn("scale", float(data.samples))


class OnlyFourAsParameter(OnlyFour):
    """The same, with its number as a parameter."""

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        self.scale = torch.nn.Parameter(rows.std())


@pytest.mark.parametrize("kind", [OnlyFour, OnlyFourInPasses, OnlyFourAsParameter])
def test_an_error_of_a_fit_keeps_the_one_before(kind: type[Calibrator]) -> None:
    calibrator = kind().fit(torch.randn(20, 4), torch.arange(20) % 4)
    before = str(calibrator), {name: value.clone() for name, value in calibrator.state_dict().items()}
    with pytest.raises(ValueError, match="must return floating-point logits"):
        calibrator.fit(torch.randn(20, 6), torch.arange(20) % 6)
    assert str(calibrator) == before[0]
    assert all(torch.equal(calibrator.state_dict()[name], value) for name, value in before[1].items())


def test_what_was_learned_may_be_a_parameter() -> None:
    class Own(Scaled):
        def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
            self.weight = torch.nn.Parameter(torch.tensor(2.0))

        def transform(self, rows: Tensor) -> Tensor:
            return rows * self.learned("weight", rows)

    logits = torch.randn(20, 4)
    assert torch.equal(Own().fit(logits, torch.arange(20) % 4)(logits), 2 * logits)


def test_what_was_not_learned_or_kept_is_named() -> None:
    class Forgetful(Identity):
        key = "forgetful"

        def __init__(self, *, steps: int = 3) -> None:
            super().__init__()
            self.number = steps

        def transform(self, rows: Tensor) -> Tensor:
            return rows * self.learned("weight", rows)

    with pytest.raises(RuntimeError, match=r"has learned no 'weight': call self.learn\('weight', value\)"):
        Forgetful().fit(torch.randn(20, 4), torch.arange(20) % 4)
    with pytest.raises(TypeError, match=r"must keep its option 'steps': set self.steps in"):
        Forgetful().options()
