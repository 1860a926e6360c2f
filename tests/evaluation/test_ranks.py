"""Ranks over data sets, against SciPy and published critical values."""

import math
from itertools import permutations, product

import pytest
import torch
from scipy import stats

from calibrant import evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.evaluation.criterion import Criterion
from calibrant.evaluation.ranks import Standing, rank_methods, rankings, widest


def test_friedman_is_exact_for_few_data_sets():
    """Against all permutations of three methods on three data sets, two of which agree."""
    table = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0]]
    values = {str(d): {str(k): [value] for k, value in enumerate(row)} for d, row in enumerate(table)}

    def spread(rows):
        return torch.tensor(rows).mean(0).var()

    every = [spread(rows) for rows in product(*(permutations(row) for row in table))]
    expected = sum(each >= spread(table) - 1e-6 for each in every) / len(every)
    assert rank_methods(values, higher_is_better=False).p_value == pytest.approx(float(expected), abs=0.015)


def test_friedman_is_near_that_of_scipy_for_many_data_sets():
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(20, 4, generator=generator) + 0.1 * torch.arange(4)
    values = {str(d): {str(k): [float(value)] for k, value in enumerate(row)} for d, row in enumerate(table)}
    ranks = rank_methods(values, higher_is_better=True)
    _, expected = stats.friedmanchisquare(*table.T.tolist())
    assert ranks.p_value == pytest.approx(expected, abs=0.02)
    assert sum(ranks.mean.values()) == pytest.approx(10)
    assert list(ranks.mean.values()) == sorted(ranks.mean.values())


# The critical values of Nemenyi's test at 5 %, by the number of methods (Demšar, 2006, Table 5).
@pytest.mark.parametrize(("methods", "value"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)])
def test_critical_difference(methods, value):
    values = {str(d): {str(k): [float(k)] for k in range(methods)} for d in range(5)}
    expected = value * math.sqrt(methods * (methods + 1) / (6 * 5))
    found = rank_methods(values, higher_is_better=False, resamples=2)
    assert found.critical_difference == pytest.approx(expected, rel=1e-3)
    assert all(int(worse) - int(better) > expected for better, worse in found.significant())


def test_intervals_cover_seeds_and_data_sets():
    sure = {name: {"a": [1.0, 1.0], "b": [2.0, 2.0]} for name in "xyz"}
    assert rank_methods(sure, higher_is_better=False).intervals == {"a": (1.0, 1.0), "b": (2.0, 2.0)}
    seeds = {name: {"a": [1.0, 3.0], "b": [2.0, 2.1]} for name in "xyz"}
    low, high = rank_methods(seeds, higher_is_better=False).intervals["a"]
    assert low < high
    sets = {**sure, "z": {"a": [2.0, 2.0], "b": [1.0, 1.0]}}
    low, high = rank_methods(sets, higher_is_better=False).intervals["a"]
    assert low < high


def test_methods_without_all_data_sets_are_left_out():
    values = {"x": {"a": [1.0], "b": [2.0], "c": [0.0]}, "y": {"a": [1.0], "b": [2.0]}}
    assert rank_methods(values, higher_is_better=False).mean == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match="at least one method that has values on every data set"):
        rank_methods({"x": {"a": [1.0]}, "y": {"b": [1.0]}}, higher_is_better=False)


def test_one_data_set_is_not_tested():
    ranks = rank_methods({"x": {"a": [1.0], "b": [2.0]}}, higher_is_better=False)
    assert math.isnan(ranks.p_value)
    assert math.isinf(ranks.critical_difference)
    assert ranks.groups() == [("a", "b")]


@pytest.mark.parametrize(("dense", "best"), [(False, "background only"), (True, "both classes")])
def test_segmentation_is_ranked_by_mean_iou(dense, best):
    target = torch.tensor([0] * 18 + [1] * 2)
    predicted = {"background only": [0] * 20, "both classes": [0] * 15 + [1] * 5}
    methods = tuple(
        Method(name, (evaluate(4.0 * torch.eye(2)[classes], target, resamples=0),))
        for name, classes in predicted.items()
    )
    ranks = rankings([Standing("data", "data", Comparison("data", (0,), methods, dense=dense), {})])
    assert next(iter(ranks[Criterion("accuracy")].mean)) == best


def standing(name, losses, ranked=True):
    same = evaluate(4 * torch.eye(2), torch.tensor([0, 1]), resamples=0)
    methods = tuple(Method(loss, (same,)) for loss in losses)
    return Standing(name, name, Comparison(name, (0,), methods) if methods else None, {}, ranked)


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ({"A": "abc", "B": "abc", "C": "ab"}, "AB"),
        ({"A": "abc", "B": "abc", "C": "abc"}, ""),  # all have the same
        ({"A": "abc", "B": "abc", "C": "a"}, ""),  # C has just begun, and is not ranked
        ({"A": "abc", "B": "abc", "C": ""}, ""),
        ({"A": "abcde", "B": "abcde", "C": "abcde", "D": "abcdef", "E": "ab"}, "ABCD"),  # f is alone
        ({"A": "abx", "B": "aby", "C": "aby", "D": "ab"}, "BC"),
        ({"A": "abc", "B": "ab"}, ""),  # one experiment is not enough
        ({"A": "ab"}, ""),
        ({}, ""),
    ],
)
def test_experiments_over_which_more_methods_have_a_rank(losses, found):
    standings = [standing(name, each) for name, each in losses.items()]
    assert [each.name for each in widest(standings)] == list(found)
    assert sorted(each.name for each in widest(standings[::-1])) == list(found)


def test_experiments_that_do_not_count_do_not_count_there_either():
    standings = [standing("A", "abc"), standing("B", "abc", ranked=False), standing("C", "ab")]
    assert widest(standings) == []


def test_means_that_are_equal_but_for_rounding_share_their_rank():
    assert 0.1 + 0.2 != 0.3
    values = {"x": {"a": [0.1 + 0.2], "b": [0.3], "c": [0.5]}}
    assert rank_methods(values, higher_is_better=False).mean == {"a": 1.5, "b": 1.5, "c": 3.0}
