"""How large the parts are that a data set does not bring along and that are drawn from its training part."""

from __future__ import annotations

from collections.abc import Collection

from calibrant.arguments import in_range


def drawn_sizes(size: int, given: Collection[str], *, validation: float, test: float) -> dict[str, int]:
    """Sizes of the parts that are not given, by name.

    >>> drawn_sizes(200, ["test"], validation=0.1, test=0.2)
    {'validation': 20}

    Args:
        size: of what they are drawn from.
        given: the names of the parts that are there.
        validation: the share of the validation part.
        test: the share of the test part.

    Raises:
        ValueError: a share is not in [0, 1], or there is not enough for both.
    """
    shares = {"validation": in_range("validation", validation, 0, 1), "test": in_range("test", test, 0, 1)}
    shares = {name: share for name, share in shares.items() if name not in given}
    if sum(shares.values()) > 1 + 1e-9:
        raise ValueError(f"validation and test must add up to at most 1, got {validation!r} and {test!r}")
    sizes = {}
    left = size
    for name, share in shares.items():
        sizes[name] = min(round(share * size), left)
        left -= sizes[name]
    return sizes
