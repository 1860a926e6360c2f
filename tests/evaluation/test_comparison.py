from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats

from calibrant.evaluation import Evaluation, Evaluator, Figure, evaluate
from calibrant.evaluation.comparison import Comparison, MeanFigure, Method, _holm
from calibrant.reports.table_builders import comparison_note

from ..evaluations import changed

ELEMENTS, RESAMPLES = 300, 100


def logits_of(seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(3, (ELEMENTS,), generator=torch.Generator().manual_seed(7))
    noise = torch.randn(ELEMENTS, 3, generator=torch.Generator().manual_seed(seed))
    return scale * (noise + 1.5 * torch.nn.functional.one_hot(labels, 3)), labels


@cache
def evaluation_of(seed: int, scale: float = 1.0, resamples: int = RESAMPLES) -> Evaluation:
    return evaluate(*logits_of(seed, scale), name=f"{scale} {seed}", resamples=resamples)


@pytest.fixture(scope="module")
def template() -> Evaluation:
    return evaluation_of(0)


def method(name: str, scale: float, seeds: int, first: int = 0, **options: Any) -> Method:
    evaluations = tuple(evaluation_of(first + seed, scale, **options) for seed in range(seeds))
    after = tuple(evaluation_of(first + seed, 1.0, **options) for seed in range(seeds))
    return Method(
        name, evaluations, after, tuple(1.5 + seed for seed in range(seeds)), {"svhn": (0.9,) * seeds}
    )


# ---- Significance ---------------------------------------------------------------------------------


@cache
def draws(seed: int) -> np.ndarray:
    """The share of each element in each resample, for all seeds and methods of a simulation."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(ELEMENTS, np.full(ELEMENTS, 1 / ELEMENTS), RESAMPLES) / ELEMENTS


def simulated(
    template: Evaluation, seeds: int, effect: float, spread: float, generator: np.random.Generator
) -> Comparison:
    """Two methods on a new test set, whose elements differ in difficulty, from seeds that differ in skill."""
    difficulty = generator.normal(0, 1, ELEMENTS)
    share = draws(int(generator.integers(20)))
    methods = []
    for name, skill in (("first", 1.0), ("second", 1.0 + effect)):
        evaluations = []
        for _ in range(seeds):
            chance = special.ndtr(skill + generator.normal(0, spread) - difficulty)
            correct = (generator.random(ELEMENTS) < chance).astype(float)
            figure = Figure(float(correct.mean()), None, tuple((share @ correct).tolist()))
            evaluations.append(replace(template, figures={"accuracy": figure}))
        methods.append(Method(name, tuple(evaluations)))
    return Comparison("simulated", tuple(range(seeds)), tuple(methods))


@cache
def rejections(seeds: int, effect: float, spread: float, count: int) -> float:
    generator, template = np.random.default_rng(seeds), evaluation_of(0)
    found = [
        simulated(template, seeds, effect, spread, generator).figures("accuracy")["second"].significant
        for _ in range(count)
    ]
    return sum(found) / count


@pytest.mark.parametrize(("seeds", "spread"), [(2, 0.15), (2, 0.6), (3, 0.15), (5, 0.3)])
def test_equal_methods_seldom_differ_significantly(seeds: int, spread: float) -> None:
    rate = rejections(seeds, 0.0, spread, 200)
    assert rate <= stats.binom.ppf(0.999, 200, 0.05) / 200  # 0.105


@pytest.mark.parametrize(("seeds", "spread"), [(3, 0.15), (5, 0.15)])
def test_the_test_is_not_merely_cautious(seeds: int, spread: float) -> None:
    assert rejections(seeds, 0.0, spread, 200) > 0.004


@pytest.mark.parametrize(("seeds", "spread"), [(3, 0.05), (5, 0.05)])
def test_a_real_difference_is_found(seeds: int, spread: float) -> None:
    assert rejections(seeds, 0.8, spread, 60) > 0.9


def test_seeds_that_differ_widely_hide_a_difference() -> None:
    """Which the test data alone would call significant."""
    assert rejections(3, 0.8, 2.0, 60) < 0.5


def test_intervals_cover_the_true_mean(template: Evaluation) -> None:
    generator = np.random.default_rng(0)
    true = float(stats.norm.cdf(1.0 / math.sqrt(2 + 0.15**2)))
    covered = 0
    for _ in range(200):
        low, high = simulated(template, 3, 0.0, 0.15, generator).figures("accuracy")["first"].interval or (
            0,
            0,
        )
        covered += low <= true <= high
    assert covered / 200 >= 0.91


def test_the_p_value_is_that_of_the_formula(template: Evaluation) -> None:
    ours, theirs = (0.80, 0.90, 0.88), (0.70, 0.74, 0.75)
    spread = np.random.default_rng(1).normal(0, 0.01, RESAMPLES)

    def with_values(values: tuple[float, ...], scale: float) -> tuple[Evaluation, ...]:
        return tuple(
            changed(
                template, accuracy=value, replicates={"accuracy": tuple((value + scale * spread).tolist())}
            )
            for value in values
        )

    comparison = Comparison(
        "", (0, 1, 2), (Method("b", with_values(theirs, 1)), Method("a", with_values(ours, 3)))
    )
    differences = np.subtract(ours, theirs)
    of_seeds = differences.var(ddof=1) / 3
    of_data = (2 * spread).var(ddof=1)
    figure = comparison.figures("accuracy")["a"]
    tail = figure.p_value / 2
    reach = math.sqrt(stats.norm.isf(tail) ** 2 * of_data + stats.t.isf(tail, 2) ** 2 * of_seeds)
    assert reach == pytest.approx(differences.mean(), rel=1e-6)
    assert figure.mean == pytest.approx(np.mean(ours))
    assert figure.std == pytest.approx(np.std(ours, ddof=1))


def test_holm_against_known_values() -> None:
    # Holm (1979): the smallest times 4, the next times 3, and so on, never falling.
    found = _holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert _holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert _holm({}) == {}


def test_more_methods_make_each_difference_less_significant() -> None:
    first, second = method("first", 1.0, 2), method("second", 1.3, 2)
    others = [method(f"other {number}", 1.0, 2, first=10 + 2 * number) for number in range(3)]
    alone = Comparison("", (0, 1), (first, second)).figures("nll")["second"].p_value
    among = Comparison("", (0, 1), (first, second, *others)).figures("nll")["second"].p_value
    assert alone is not None
    assert among is not None
    assert among > alone


def test_a_method_does_not_differ_from_itself() -> None:
    same = method("same", 1.0, 2)
    figure = Comparison("", (0, 1), (method("first", 1.0, 2), same)).figures("ece")["same"]
    assert figure.p_value == 1.0
    assert not figure.better
    assert not figure.significant


def test_nothing_is_tested_in_a_metric_that_the_first_method_lacks() -> None:
    first, *others = method("first", 1.0, 2), method("second", 1.3, 2), method("third", 1.6, 2)
    first = replace(first, before=tuple(changed(each, nll=None) for each in first.before))
    figures = Comparison("", (0, 1), (first, *others)).figures("nll")
    assert list(figures) == ["second", "third"]
    assert not any(each.better or each.significant for each in figures.values())
    assert figures["third"].p_value is None


@pytest.mark.parametrize(("metric", "better"), [("nll", False), ("ece", False), ("accuracy", False)])
def test_which_way_is_better(metric: str, better: bool) -> None:
    seeds = tuple(range(5))
    comparison = Comparison("", seeds, (method("plain", 1.0, 5), method("sharp", 6.0, 5)))
    figures = comparison.figures(metric)
    assert figures["sharp"].better is better
    assert figures["plain"].p_value is None
    backwards = Comparison("", seeds, comparison.methods[::-1]).figures(metric)
    assert backwards["plain"].better is (metric != "accuracy")  # scaling leaves the accuracy as it is
    if metric == "nll":
        assert figures["sharp"].significant


def test_figures_after_temperature_scaling() -> None:
    comparison = Comparison("", (0, 1), (method("plain", 1.0, 2), method("sharp", 6.0, 2)))
    assert comparison.figures("nll", after=True)["sharp"].p_value == 1.0
    assert comparison.figures("nll")["sharp"].mean > comparison.figures("nll", after=True)["sharp"].mean


# ---- Few seeds, and others ------------------------------------------------------------------------


def test_one_seed_has_an_interval_but_no_deviation_and_no_test() -> None:
    figure = Comparison("", (0,), (method("a", 1.0, 1), method("b", 3.0, 1))).figures("nll")["b"]
    assert figure.std is None
    assert figure.interval is not None
    assert figure.interval[0] < figure.mean < figure.interval[1]
    assert figure.p_value is None


def test_the_interval_of_one_seed_is_that_of_its_evaluation() -> None:
    """On a page with both, the same figure would have two intervals."""
    one = evaluation_of(0)
    comparison = Comparison("", (0,), (Method("a", (one,)),))
    for metric in one.replicates:
        assert comparison.figures(metric)["a"].interval == one.intervals[metric]
    wide = replace(one, level=0.5)  # the intervals of a comparison are at 95 %
    low, high = Comparison("", (0,), (Method("a", (wide,)),)).figures("nll")["a"].interval or (0.0, 0.0)
    assert (low, high) == pytest.approx(one.intervals["nll"], rel=0.05)
    assert (low, high) != one.intervals["nll"]


def test_different_numbers_of_seeds_are_not_tested() -> None:
    comparison = Comparison("", (0, 1, 2), (method("a", 1.0, 2), method("b", 6.0, 3)))
    figure = comparison.figures("nll")["b"]
    assert figure.p_value is None
    assert not figure.significant
    assert figure.interval is not None
    json.loads(comparison.to_json())


@pytest.mark.parametrize("resamples", [1, 39])
def test_with_few_resamples_nothing_is_tested(resamples: int) -> None:
    methods = [method(name, scale, 2, resamples=resamples) for name, scale in (("a", 1.0), ("b", 6.0))]
    comparison = Comparison("", (0, 1), tuple(methods))
    assert comparison.figures("nll")["b"].p_value is None
    assert comparison_note(comparison).endswith("Too few resamples to test significance.")


def test_without_resamples_nothing_is_tested() -> None:
    comparison = Comparison("", (0, 1), (method("a", 1.0, 2, resamples=0), method("b", 6.0, 2, resamples=0)))
    figure = comparison.figures("nll")["b"]
    assert (figure.p_value, figure.interval) == (None, None)
    assert figure.std is not None
    json.loads(comparison.to_json())


def test_another_test_set_is_not_paired(template: Evaluation) -> None:
    """Pairing would take the same resamples to have drawn the same elements, and see no spread at all."""
    shifted = changed(
        template,
        nll=template.nll + 1e-3,
        replicates={"nll": tuple(value + 1e-3 for value in template.replicates["nll"])},
    )
    foreign = changed(shifted, fingerprint="of other labels")
    paired = Comparison("", (0, 1), (Method("a", (template,) * 2), Method("b", (shifted,) * 2)))
    apart = Comparison("", (0, 1), (Method("a", (template,) * 2), Method("b", (foreign,) * 2)))
    assert paired.figures("nll")["b"].significant
    assert not apart.figures("nll")["b"].significant


# ---- JSON -----------------------------------------------------------------------------------------


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


@pytest.mark.parametrize("seeds", [1, 2])
def test_json_holds_every_figure(seeds: int) -> None:
    comparison = Comparison(
        "toy", tuple(range(seeds)), (method("a", 1.0, seeds), method('b[x="y"]', 2.0, seeds))
    )
    plain = json.loads(comparison.to_json(), parse_constant=refuse)
    assert plain["format"] == 1
    assert plain["title"] == "toy"
    assert plain["first"] == "a"
    assert plain["seeds"] == list(range(seeds))
    assert len(plain["runs"]['b[x="y"]']["before"]) == seeds
    assert plain["runs"]["a"]["temperature"] == [1.5 + seed for seed in range(seeds)]
    assert plain["runs"]["a"]["detection"] == {"svhn": [0.9] * seeds}
    for after, part in ((False, "before"), (True, "after")):
        for metric in ("accuracy", "nll", "ece", "adaptive_ece", "mce"):
            figure = comparison.figures(metric, after=after)["a"]
            assert plain[part]["a"][metric]["mean"] == figure.mean
            assert plain[part]["a"][metric]["std"] == figure.std
            assert plain[part]["a"][metric]["interval"] == list(figure.interval or ())
    assert (plain["before"]['b[x="y"]']["nll"]["p_value"] is None) == (seeds == 1)


@pytest.mark.parametrize("streamed", [False, True])
def test_other_resamples_for_each_seed_do_not_narrow_the_interval(streamed: bool) -> None:
    logits, labels = logits_of(0)

    def run(scale: float, seed: int) -> Evaluation:
        if streamed:  # draws from a histogram, which are never paired
            return Evaluator(resamples=RESAMPLES, seed=seed).update(scale * logits, labels).compute()
        return evaluate(scale * logits, labels, resamples=RESAMPLES, seed=seed)

    def comparison(seeds: range) -> Comparison:
        methods = [Method(str(scale), tuple(run(scale, seed) for seed in seeds)) for scale in (1.0, 1.3)]
        return Comparison("", tuple(range(4)), tuple(methods))

    def width(figure: MeanFigure) -> float:
        assert figure.interval is not None
        return figure.interval[1] - figure.interval[0]

    methods = comparison(range(4))
    several = methods.figures("ece")
    for each in methods.methods:  # four equal runs on the same data say no more than one
        one = 2 * 1.96 * np.std(each.before[0].replicates["ece"])
        assert width(several[each.name]) == pytest.approx(one, rel=0.15)
    assert several["1.3"].p_value is not None


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="two methods have the name 'a'"):
        Comparison("", (0, 1), (method("a", 1.0, 2), method("a", 6.0, 2)))
    with pytest.raises(
        ValueError, match="method 'a' has 3 evaluations, expected one for each of the 2 seeds"
    ):
        Comparison("", (0, 1), (method("a", 1.0, 3),))
    with pytest.raises(ValueError, match=r"unknown metric 'nlll' \(did you mean 'nll'\?\)"):
        Comparison("", (0, 1), (method("a", 1.0, 2),)).figures("nlll")
