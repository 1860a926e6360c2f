"""Evaluations for tests: changed ones, and whether two are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from calibrant.evaluation import Evaluation, Figure


def figures(
    values: Mapping[str, float | None],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    replicates: Mapping[str, tuple[float, ...]] | None = None,
) -> dict[str, Figure]:
    """Figures from values, intervals and replicates, each by metric."""
    ends, drawn = intervals or {}, replicates or {}
    return {name: Figure(value, ends.get(name), drawn.get(name, ())) for name, value in values.items()}


def changed(evaluation: Evaluation, **changes: Any) -> Evaluation:
    """The evaluation with other fields, metrics, intervals or replicates."""
    values = {name: changes.pop(name, value) for name, value in evaluation.metrics.items()}
    intervals = changes.pop("intervals", evaluation.intervals)
    replicates = changes.pop("replicates", evaluation.replicates)
    return replace(evaluation, figures=figures(values, intervals, replicates), **changes)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, strings and Nones of nested dictionaries and lists, with where they lie."""
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, f"{path}.{key}")
    else:
        yield path, value


def assert_same(one: Evaluation, other: Evaluation, tolerance: float = 1e-12, without: Any = ()) -> None:
    """Every number of the two is the same up to the tolerance, and all else is the same altogether."""
    parts = [
        {key: value for key, value in evaluation.to_dict().items() if key not in without}
        for evaluation in (one, other)
    ]
    first, second = (dict(leaves(part)) for part in parts)
    assert first.keys() == second.keys()
    assert len(first) > 20
    different = {
        path: (value, second[path])
        for path, value in first.items()
        if value != second[path]
        and not (
            isinstance(value, float)
            and isinstance(second[path], float)
            and abs(value - second[path]) <= tolerance
        )
    }
    assert different == {}
