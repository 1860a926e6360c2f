"""The verdict of a report: what its figures say, in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from calibrant.evaluation import Evaluation, Reliability
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.evaluation.notes import (
    LITTLE,
    data_notes,
    predicts_by_chance,
    predicts_the_other_class,
    zeros_matter,
)
from calibrant.metrics import METRICS
from calibrant.printable import NOT_INDEPENDENT, counted
from calibrant.reports.table_builders import differences
from calibrant.reports.tables import Table, in_percent, number_text

_DOUBTFUL = 0.2  # a p-value below which calibration is in doubt, even where it is not rejected
_SMALL_GAP = 0.005  # between mean confidence and accuracy: not worth a headline
_WORDS = {"ece": "calibration error (ECE)", "nll": "NLL"}


@dataclass(frozen=True)
class Verdict:
    """What a report says first."""

    headline: str
    sentences: tuple[str, ...] = ()
    models: tuple[tuple[str, str], ...] = ()  # the name of each model, and a sentence about it


def mean_confidence_and_accuracy(reliability: Reliability) -> tuple[float, float]:
    """Means over all elements; NaN without any.

    >>> from calibrant.evaluation import Reliability
    >>> bins = Reliability((0.0, 0.5, 1.0), (0, 4), (None, 0.8), (None, 0.5), (None, None), (None, None))
    >>> mean_confidence_and_accuracy(bins)
    (0.8, 0.5)
    """
    total = sum(reliability.count) or float("nan")

    def mean(values: Sequence[float | None]) -> float:
        pairs = zip(reliability.count, values, strict=True)
        return sum(count * value for count, value in pairs if value is not None) / total

    return mean(reliability.confidence), mean(reliability.accuracy)


def gap_words(gap: float) -> str:
    """Mean confidence minus accuracy in words.

    >>> gap_words(0.097), gap_words(-0.02), gap_words(0.0001)
    ('over-confident by 9.7 points on average', 'under-confident by 2.0 points on average', \
'as confident as accurate on average')
    """
    if not abs(gap) >= 0.0005:  # NaN counts as none
        return "as confident as accurate on average"
    return f"{'over' if gap > 0 else 'under'}-confident by {100 * abs(gap):.1f} points on average"


def reliability_words(evaluation: Evaluation) -> str:
    """How far confidence is from accuracy on average, in words.

    If binary, how far probabilities of yes are from frequencies: all in one direction, or away from 1/2.
    """
    data = evaluation.reliability
    confidence, accuracy = mean_confidence_and_accuracy(data)
    gap = confidence - accuracy
    if not evaluation.binary:
        return gap_words(gap)
    bins = zip(data.count, data.confidence, data.accuracy, strict=True)
    away = sum(
        count * (probability - frequency) * (1 if probability > 0.5 else -1)
        for count, probability, frequency in bins
        if probability is not None and frequency is not None
    ) / max(1, sum(data.count))
    if max(abs(gap), abs(away)) < 0.0005:
        return "probabilities of yes are right on average"
    high = "too high" if gap > 0 else "too low"
    if abs(away) > abs(gap):
        high = "too extreme" if away > 0 else "not extreme enough"
    return f"probabilities of yes are {high} by {100 * max(abs(gap), abs(away)):.1f} points on average"


def p_words(p_value: float) -> str:
    """A p-value as in a sentence.

    >>> p_words(0.001), p_words(0.0312), p_words(0.4)
    ('p ≤ 0.001', 'p = 0.031', 'p = 0.40')
    """
    if p_value <= 0.001:  # the smallest that a thousand resamples can give
        return "p ≤ 0.001"
    return f"p = {p_value:.{3 if p_value < 0.1 else 2}f}"


def change_words(before: float, after: float, clear: bool = True) -> str:
    """How much of a calibration error a calibrator repairs; ``clear`` is what `is_clear` says.

    >>> change_words(0.1, 0.04), change_words(0.1, 0.06), change_words(0.1, 0.095), change_words(0.1, 0.2)
    ('repairs most of it', 'repairs a part of it', 'changes little', 'makes it worse')
    >>> change_words(0.06, 0.08, clear=False)
    'makes no clear difference'
    """
    if not clear:
        return "makes no clear difference"
    repaired = (before - after) / before if before else 0.0
    if repaired >= 0.5:
        return "repairs most of it"
    if repaired >= 0.1:
        return "repairs a part of it"
    return "changes little" if repaired > -0.1 else "makes it worse"


def is_clear(before: Sequence[Evaluation], after: Sequence[Evaluation]) -> bool:
    """Whether the ECE of several seeds differs clearly before and after a calibrator.

    It does if more than half of the seeds show it, in the direction of the mean difference. A seed shows it
    if the difference is significant (see `Evaluation.compare`) and calibration is rejected before or after.
    With too few resamples nothing can be tested, and any difference counts. A single element shows nothing.
    """
    pairs = list(zip(before, after, strict=True))
    if any(each.samples == 1 for each in before):
        return False
    tests = [differences(first, second).get("ece") for first, second in pairs]
    if None in tests:
        return True
    better = "second" if sum(second.ece - first.ece for first, second in pairs) < 0 else "first"
    shown = [
        test is not None and test.better == better and _is_needed(*pair)
        for test, pair in zip(tests, pairs, strict=True)
    ]
    return 2 * sum(shown) > len(shown)


def one_model(evaluation: Evaluation) -> Verdict:
    """The verdict on one model."""
    confidence, accuracy = mean_confidence_and_accuracy(evaluation.reliability)
    sentences = [f"Mean confidence is {in_percent(confidence)}, accuracy {in_percent(accuracy)}."]
    if evaluation.binary:
        sentences = [
            f"The mean probability of yes is {in_percent(confidence)}, its frequency {in_percent(accuracy)}."
        ]
    sentences += _room_for_a_temperature(evaluation)
    if _p_value(evaluation) is not None:
        error = in_percent(evaluation.ece)
        meaning = f"a calibrated model may well get an ECE of {error} from this many elements"
        if _is_doubtful(evaluation):
            meaning = (
                f"few calibrated models get an ECE of {error} from this many elements. More data would tell"
            )
        if _is_rejected(evaluation):
            meaning = f"chance alone does not explain an ECE of {error}"
        sentences.append(f"{_capital(_test_words(evaluation))}: {meaning}.")
    return Verdict(f"{_capital(_headline(evaluation))}.", tuple(sentences))


def before_and_after(before: Evaluation, after: Evaluation, fitted: str) -> Verdict:
    """The verdict on a calibrator.

    ``fitted`` is the calibrator and the data it was fitted to, such as "temperature, fitted to val.npz".
    """
    change = "is not needed"
    if _is_needed(before, after):
        change = change_words(before.ece, after.ece, is_clear([before], [after]))
    headline = f"{_capital(_headline(before))}; {fitted.partition(', fitted to ')[0]} {change}."
    sentences = [
        f"Calibrator: {fitted}.",
        f"{_from_to(before, after, 'ece')}; {_from_to(before, after, 'nll')}.",
        f"Before, {_test_words(before)}; after, {_test_words(after)}.",
    ]
    return Verdict(headline, tuple(sentences))


def several_models(evaluations: Sequence[Evaluation], table: Table, warning: str) -> Verdict:
    """The verdict on several models and their `evaluation_table`, tested against the best.

    ``warning`` says why their figures must not be compared; "" if they may be.
    """
    models = tuple(
        (name, f"{reliability_words(each)}, {_test_words(each)}.")
        for name, each in zip(table.rows, evaluations, strict=True)
    )
    if warning:
        return Verdict("No ranking of these models.", (), models)
    ranked = [sentence for key in ("ece", "nll") if (sentence := _ranking(table, key))]
    headline, *sentences = ranked or ["No ranking of these models: they lack ECE and NLL."]
    return Verdict(headline, tuple(sentences), models)


def methods(comparison: Comparison) -> Verdict:
    """The verdict on a comparison of methods: the best after temperature scaling, and each one's error."""
    own, common = _tests([] if comparison.dense else comparison.methods)
    lines = tuple((each.name, _method_words(each, own.get(each.name, []))) for each in comparison.methods)
    if len(comparison.methods) == 1:
        return Verdict(_capital(lines[0][1]))
    after = "temperature" if "temperature" in comparison.calibrators else ""
    state = "after temperature scaling, " if after else ""
    headline, other = (_best_method(comparison, key, after, state) for key in ("nll", "ece"))
    return Verdict(headline, (other, *common), lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _p_value(evaluation: Evaluation) -> float | None:
    """That of the test of calibration. The test takes elements as independent, and pixels are not."""
    return None if evaluation.per_image else evaluation.p_value


def _is_rejected(evaluation: Evaluation) -> bool:
    p_value = _p_value(evaluation)
    return p_value is not None and p_value < 1 - evaluation.level


def _is_doubtful(evaluation: Evaluation) -> bool:
    """Whether calibration is not rejected, but not far from it."""
    p_value = _p_value(evaluation)
    return p_value is not None and p_value < _DOUBTFUL and not _is_rejected(evaluation)


def _is_needed(before: Evaluation, after: Evaluation) -> bool:
    """Whether a calibrator has something to repair, or has broken something, as far as this is tested."""
    return _p_value(before) is None or _is_rejected(before) or _is_rejected(after)


def _headline(evaluation: Evaluation) -> str:
    confidence, accuracy = mean_confidence_and_accuracy(evaluation.reliability)
    if _p_value(evaluation) is not None and not _is_rejected(evaluation):
        sign = "no clear sign" if _is_doubtful(evaluation) else "no sign"
        return f"{sign} of miscalibration in {counted(evaluation.samples, 'element')}"
    small = abs(confidence - accuracy) < _SMALL_GAP and not evaluation.binary
    if _is_rejected(evaluation) and small:
        return "miscalibrated, although mean confidence and accuracy agree"
    return reliability_words(evaluation)


def _test_words(evaluation: Evaluation) -> str:
    p_value = _p_value(evaluation)
    if p_value is None:
        return "calibration is not tested"
    result = "is rejected" if _is_rejected(evaluation) else "is not rejected"
    return f"calibration {result} ({p_words(p_value)})"


def _room_for_a_temperature(evaluation: Evaluation) -> list[str]:
    """What one temperature would save, if the evaluation knows it."""
    nll, saved = evaluation.nll, evaluation.nll_calibration
    useless = predicts_by_chance(evaluation) or predicts_the_other_class(evaluation)
    if useless or zeros_matter(evaluation):
        # Of no use, or the best for zeros, which spoils the other elements.
        return data_notes([evaluation])
    if not nll or saved is None:
        return []
    share = f"{number_text(saved, False)} of an NLL of {number_text(nll, False)} ({100 * saved / nll:.0f} %)"
    if saved < LITTLE * nll:
        return [f"A temperature would change little: fitted to these data, it saves {share}."]
    if evaluation.samples == 1 or evaluation.intervals.get("nll_calibration", (saved, saved))[0] <= 0:
        return [f"A temperature may not help: fitted to these data, it saves {share}, which may be chance."]
    return [f"A temperature would help: fitted to these data, it saves {share}."]


def _from_to(before: Evaluation, after: Evaluation, key: str) -> str:
    metric = METRICS[key]
    ends = [number_text(each.metrics[key], metric.percent, unit=" %") for each in (before, after)]
    text = f"{metric.label} {ends[0]} before, {ends[1]} after"
    difference = differences(before, after).get(key)
    if difference is not None:
        better = "significantly better" if difference.better == "second" else "significantly worse"
        text += f" ({better if difference.significant else 'no significant difference'})"
    return text


def _ranking(table: Table, key: str) -> str:
    """The best model by one figure, and which others are significantly worse; "" if it is not known."""
    (column,) = table.select([key]).columns
    cells = dict(zip(table.rows, column.cells, strict=True))
    best = [name for name, cell in cells.items() if cell.best]
    if not best and all(cell.value is not None for cell in cells.values()):
        return f"All models have about the same {_WORDS[key]}, {column.cells[0].text}."
    if not best:
        return ""
    worse = [name for name, cell in cells.items() if cell.verdict == "worse"]
    equal = [name for name, cell in cells.items() if cell.verdict == "equal"]
    text = f"{listed(best)} {'has' if len(best) == 1 else 'have'} the lowest {_WORDS[key]}, "
    text += cells[best[0]].text
    found = []
    if worse and len(cells) == 2:
        found.append(f"significantly lower than {listed(worse)}")
    elif worse:  # the best of several was picked by the data that test it
        found.append(
            f"lower than {listed(worse)}, if each is tested alone and the choice of the best is not counted"
        )
    found += [f"not distinguishable from {listed(equal)}"] if equal else []
    return f"{text}: {'; '.join(found)}." if found else f"{text}; differences from it are not tested."


def listed(names: Sequence[str]) -> str:
    """Names in a sentence; only some of many.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b", "c", "d", "e"])
    ('a', 'a, b and c', 'a, b, c and 2 others')
    """
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} others"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _best_method(comparison: Comparison, key: str, calibrator: str, state: str) -> str:
    """The best method by one metric, and whether the difference from the first is significant."""
    metric = METRICS[key]
    figures = comparison.figures(key, after=calibrator)
    if not figures:
        return ""
    first = comparison.methods[0].name
    best = min(figures, key=lambda name: figures[name].mean)

    def text(name: str) -> str:
        return number_text(figures[name].mean, metric.percent, decimals=3, unit=" %")

    sentence = _capital(f"{state}the lowest {_WORDS[key]} is that of {best}: {text(best)}")
    if first in figures and best != first and text(best) == text(first):
        return _capital(f"{state}{best} and {first} have the same {_WORDS[key]}, the lowest: {text(best)}.")
    others = {name: figure for name, figure in figures.items() if name != first}
    if first not in figures or any(figure.p_value is None for figure in others.values()):
        why = "one seed is too few" if len(comparison.seeds) == 1 else "too few resamples"
        return f"{sentence}; differences are not tested ({NOT_INDEPENDENT if comparison.dense else why})."
    if best != first:
        found = "a significant" if figures[best].significant else "no significant"
        p_value = p_words(figures[best].p_value or 0.0)
        return f"{sentence} against {text(first)} of {first}, {found} difference ({p_value})."
    worse = [name for name, figure in others.items() if figure.significant]
    rest = [name for name in others if name not in worse]
    parts = [f"significantly better than {listed(worse)}"] if worse else []
    parts += [f"not significantly better than {listed(rest)}"] if rest else []
    return f"{sentence}, {', '.join(parts)}."


def _method_words(method: Method, tests: Sequence[str]) -> str:
    """The error of a method before and after temperature scaling, and its tests of calibration."""
    pairs = [mean_confidence_and_accuracy(each.reliability) for each in method.before]
    parts = [gap_words(fmean(confidence - accuracy for confidence, accuracy in pairs))]
    before = fmean(each.ece for each in method.before)
    if method.after and method.temperatures:
        after = fmean(each.ece for each in method.after)
        change = change_words(before, after, is_clear(method.before, method.after))
        temperature = f"a temperature of {fmean(method.temperatures):.2f} {change}"
        parts.append(f"{temperature} (ECE {in_percent(before)} before, {in_percent(after)} after)")
    else:
        parts.append(f"ECE {in_percent(before)}")
    return f"{'; '.join([*parts, *tests])}."


def _tests(methods: Sequence[Method]) -> tuple[dict[str, list[str]], list[str]]:
    """The tests of calibration in words: of each method, and once what holds for all of several methods."""
    own: dict[str, list[str]] = {each.name: [] for each in methods}
    common = []
    before = {each.name: each.before for each in methods}
    after = {each.name: each.after for each in methods if each.after}
    states = ("before temperature scaling, " if after else "", before), ("after temperature scaling, ", after)
    for state, runs in states:
        words = {name: f"{state}{_seeds_rejected(found)}" for name, found in runs.items()}
        several = len(words) == len(methods) > 1 and all(len(found) > 1 for found in runs.values())
        if several and len(set(words.values())) == 1:
            text = words[methods[0].name]
            common.append(_capital(f"{text} of {'any' if text.endswith('no seed') else 'every'} method."))
        else:
            for name, text in words.items():
                own[name].append(text)
    return own, common


def _seeds_rejected(evaluations: Sequence[Evaluation]) -> str:
    """The tests of calibration of all seeds."""
    if len(evaluations) == 1:
        return _test_words(evaluations[0])
    rejected = sum(_is_rejected(each) for each in evaluations)
    number = "no seed" if not rejected else f"{rejected} of {len(evaluations)} seeds"
    return f"calibration is rejected for {number}"
