"""Parts that are not there get their share of what is."""

import pytest

from calibrant.training.data.shares import drawn_sizes


@pytest.mark.parametrize(
    ("given", "shares", "expected"),
    [
        ((), (0.1, 0.2), {"validation": 10, "test": 20}),
        (("validation",), (0.9, 0.9), {"test": 90}),
        (("validation", "test"), (0.5, 0.5), {}),
        ((), (0.0, 1.0), {"validation": 0, "test": 100}),
    ],
)
def test_sizes(given, shares, expected):
    assert drawn_sizes(100, given, validation=shares[0], test=shares[1]) == expected


def test_rounding_never_asks_for_more_than_there_is():
    assert sum(drawn_sizes(3, (), validation=0.5, test=0.5).values()) == 3


@pytest.mark.parametrize(("validation", "test"), [(-0.1, 0), (0, 1.1), (0.6, 0.6)])
def test_shares_that_cannot_be_are_refused(validation, test):
    with pytest.raises(ValueError, match="must"):
        drawn_sizes(100, (), validation=validation, test=test)
