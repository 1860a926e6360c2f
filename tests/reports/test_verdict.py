"""The verdict of a report says what its figures say, and does not claim what was not tested."""

import math
from dataclasses import replace as changed_field
from functools import cache

import pytest
import torch

from calibrant.evaluation import evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.reports import verdict
from calibrant.reports.table_builders import evaluation_table
from tests.evaluations import changed as replace
from tests.reports.test_page import evaluation, models


@cache
def of_logits(scale, seed=0, size=600, resamples=60):
    target = torch.randint(3, (size,), generator=torch.Generator().manual_seed(7))
    noise = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))
    logits = noise + 2 * torch.nn.functional.one_hot(target, 3)
    return evaluate(scale * 2 * logits, target, resamples=resamples)


def test_one_over_confident_model():
    found = of_logits(4.0)
    confidence, accuracy = verdict.mean_confidence_and_accuracy(found.reliability)
    assert accuracy == pytest.approx(found.accuracy)
    said = verdict.one_model(found)
    assert said.headline == f"Over-confident by {100 * (confidence - accuracy):.1f} points on average."
    assert f"saves {found.nll_calibration:.4f} of an NLL of {found.nll:.4f}" in said.sentences[1]
    assert said.sentences[1].startswith("A temperature would help")
    assert said.sentences[2].startswith("Calibration is rejected (p ")


def test_one_calibrated_model_is_not_called_over_confident():
    said = verdict.one_model(of_logits(1.0))
    assert said.headline == "No sign of miscalibration in 600 elements."
    assert "Calibration is not rejected (p = 0." in said.sentences[-1]
    assert said.sentences[1].startswith("A temperature would change little")


@pytest.mark.parametrize(("p_value", "clear"), [(0.051, False), (0.19, False), (0.21, True)])
def test_calibration_that_is_nearly_rejected_is_in_doubt(p_value: float, clear: bool):
    said = verdict.one_model(replace(of_logits(1.0), p_value=p_value))
    assert said.headline == f"No {'' if clear else 'clear '}sign of miscalibration in 600 elements."
    assert ("a calibrated model may well get" in said.sentences[-1]) is clear
    assert ("few calibrated models get" in said.sentences[-1]) is not clear


def test_a_temperature_that_may_save_nothing_is_not_recommended():
    found = of_logits(4.0)
    unsure = replace(found, intervals={**found.intervals, "nll_calibration": (0.0, 9.0)})
    assert verdict.one_model(unsure).sentences[1].startswith("A temperature may not help")
    assert verdict.one_model(unsure).sentences[1].endswith("which may be chance.")


def test_no_temperature_is_recommended_for_two_classes_that_are_swapped():
    target = torch.arange(200) % 2
    swapped = evaluate(4.0 * torch.stack([target, 1 - target], 1), target, resamples=0)
    said = verdict.one_model(swapped)
    assert "scores or labels may be swapped" in said.sentences[1]
    assert "A temperature" not in " ".join(said.sentences)


def test_a_single_element_recommends_nothing():
    one, cooler = (evaluate(torch.tensor([[scale, 0.0]]), torch.tensor([1])) for scale in (9.0, 2.0))
    assert verdict.one_model(one).sentences[1].startswith("A temperature may not help")
    said = verdict.before_and_after(one, cooler, "temperature, fitted to val.npz")
    assert said.headline.endswith("temperature makes no clear difference.")


def test_no_temperature_is_recommended_for_true_classes_with_a_probability_of_0():
    said = verdict.one_model(changed_field(of_logits(4.0), ruled_out=3, samples=6000))
    assert said.sentences[1].startswith("3 of 6,000 true classes have a probability of 0")
    assert "would help" not in " ".join(said.sentences)


def test_no_temperature_is_recommended_for_labels_in_another_order():
    found = of_logits(4.0)
    said = verdict.one_model(replace(found, nll_refinement=math.log(found.num_classes)))
    assert said.sentences[1].startswith("Even with the best temperature, the logits predict these labels no")
    assert "would help" not in " ".join(said.sentences)


def test_means_over_images_are_not_tested():
    found = changed_field(of_logits(4.0), per_image=True)
    said = verdict.one_model(found)
    assert said.headline.startswith("Over-confident by ")
    assert not any("rejected" in sentence for sentence in said.sentences)
    after = changed_field(of_logits(1.0, resamples=0), per_image=True)
    said = verdict.before_and_after(found, after, "spline")
    assert said.headline.endswith("spline repairs most of it.")


def test_rejected_without_a_mean_gap():
    found = replace(evaluation(over=-0.005), p_value=1e-5)
    assert "miscalibrated, although" in verdict.one_model(found).headline.lower()


def test_streamed_figures_say_nothing_of_a_temperature():
    sentences = verdict.one_model(evaluation(exact=False)).sentences
    assert not any("temperature" in sentence for sentence in sentences)


def test_a_calibrator():
    before, after = of_logits(4.0), of_logits(1.0)
    said = verdict.before_and_after(before, after, "temperature (T = 4), fitted to val.npz")
    assert said.headline.endswith("points on average; temperature (T = 4) repairs most of it.")
    ensemble = "ensemble-temperature (T = 4; weights 1, 0, 0.00033)"
    said_of_ensemble = verdict.before_and_after(before, after, f"{ensemble}, fitted to val.npz")
    assert said_of_ensemble.headline.endswith(f"; {ensemble} repairs most of it.")
    assert "Calibrator: temperature (T = 4), fitted to val.npz." in said.sentences
    assert (
        f"ECE {100 * before.ece:.2f} % before, {100 * after.ece:.2f} % after (significantly better)"
        in (said.sentences[1])
    )
    worse = verdict.before_and_after(after, before, "spline, fitted to val.npz")
    assert "spline makes it worse" in worse.headline
    assert "(significantly worse)" in worse.sentences[1]
    untested = verdict.before_and_after(evaluation(), evaluation(), "spline, fitted to val.npz")
    assert "significant" not in "".join(untested.sentences)


def test_a_calibrator_that_is_not_needed():
    said = verdict.before_and_after(of_logits(1.0), of_logits(0.98), "temperature, fitted to val.npz")
    assert said.headline == "No sign of miscalibration in 600 elements; temperature is not needed."


def test_several_models():
    evaluations = [of_logits(4.0), of_logits(1.0), of_logits(1.01)]
    said = verdict.several_models(evaluations, evaluation_table(evaluations, ["a", "b", "c"]), "")
    for sentence in (said.headline, *said.sentences):
        assert sentence.startswith(("b has the lowest ", "c has the lowest "))
        assert "lower than a, if each is tested alone and the choice of the best is not counted" in sentence
        assert "significantly" not in sentence
        assert "not distinguishable from" in sentence
    assert [name for name, _ in said.models] == ["a", "b", "c"]
    assert said.models[0][1].startswith("over-confident by ")


def test_several_models_without_a_test_or_on_other_data():
    names = [each.name for each in models()]
    said = verdict.several_models(models(), evaluation_table(models(), names), "")
    assert said.headline == (
        "CALS-ALM has the lowest calibration error (ECE), 0.80 %; differences from it are not tested."
    )
    other = verdict.several_models(models(), evaluation_table(models(), names), "different data")
    assert other.headline == "No ranking of these models."
    assert not other.sentences
    missing = [replace(each, ece=None, nll=None) for each in models()]
    assert "lack" in verdict.several_models(missing, evaluation_table(missing, names), "").headline


def test_models_with_equal_figures():
    same = [of_logits(1.0)] * 2
    said = verdict.several_models(same, evaluation_table(same, ["a", "b"]), "")
    assert (
        said.headline == f"All models have about the same calibration error (ECE), {100 * same[0].ece:.2f} %."
    )
    assert said.sentences == (f"All models have about the same NLL, {same[0].nll:.4f}.",)


def comparison(scales, seeds=2, **options):
    def method(name, scale):
        before = tuple(of_logits(scale, seed) for seed in range(seeds))
        return Method(name, before, tuple(of_logits(1.0, seed) for seed in range(seeds)), (scale,) * seeds)

    methods = tuple(method(name, scale) for name, scale in scales.items())
    return Comparison("toy", tuple(range(seeds)), methods, **options)


def test_a_comparison_of_methods():
    found = comparison({"ce": 4.0, "sharp": 8.0})
    found = changed_field(found, methods=tuple(changed_field(each, after=()) for each in found.methods))
    said = verdict.methods(found)
    assert said.headline.startswith("The lowest NLL is that of ce: ")
    assert said.headline.endswith("better than sharp.")
    reverse = verdict.methods(comparison({"sharp": 8.0, "ce": 4.0, "flat": 1.0}))
    assert reverse.headline.startswith("After temperature scaling, the lowest NLL is that of ")
    (name, words), *_ = reverse.models
    assert name == "sharp"
    assert "a temperature of 8.00 repairs most of it (ECE " in words
    assert words.endswith("; before temperature scaling, calibration is rejected for 2 of 2 seeds.")
    assert reverse.sentences[1:] == (
        "After temperature scaling, calibration is rejected for no seed of any method.",
    )
    figures = found.figures("nll")["sharp"]
    assert ("not significantly" in said.headline) == (not figures.significant)


def test_methods_with_the_same_figure_are_not_called_better():
    found = comparison({"ce": 4.0, "sharp": 8.0})
    close = [changed_field(each, after=each.before) for each in found.methods]
    first, second = close[0], changed_field(close[0], name="other")
    nearly = tuple(replace(each, nll=each.nll - 1e-6) for each in second.after)
    found = changed_field(found, methods=(first, changed_field(second, after=nearly)))
    value = f"{found.figures('nll', after=True)['other'].mean:.3f}"
    assert verdict.methods(found).headline == (
        f"After temperature scaling, other and ce have the same NLL, the lowest: {value}."
    )


def test_a_difference_from_the_first_method_comes_with_its_p_value():
    found = comparison({"sharp": 8.0, "flat": 1.0})
    found = changed_field(found, methods=tuple(changed_field(each, after=()) for each in found.methods))
    figures = found.figures("nll")
    kind = "a significant" if figures["flat"].significant else "no significant"
    assert verdict.methods(found).headline == (
        f"The lowest NLL is that of flat: {figures['flat'].mean:.3f} against {figures['sharp'].mean:.3f} of "
        f"sharp, {kind} difference ({verdict.p_words(figures['flat'].p_value)})."
    )


@pytest.mark.parametrize(
    ("options", "reason"), [({"seeds": 1}, "one seed is too few"), ({"seeds": 1, "dense": True}, "pixels")]
)
def test_what_was_not_tested_is_not_called_significant(options, reason):
    said = verdict.methods(comparison({"ce": 4.0, "flat": 2.0}, **options))
    assert f"differences are not tested ({reason}" in said.headline.replace("the pixels", "pixels")
    assert all(("rejected" in words) == ("dense" not in options) for _, words in said.models)


def test_a_single_method():
    said = verdict.methods(comparison({"ce": 4.0}))
    assert said.headline.startswith("Over-confident by ")
    assert not said.models


def of_few(scale, seed=0, resamples=60):
    """63 elements of a model that is calibrated with the scale 1."""
    return of_logits(scale, seed, 63, resamples)


def test_noise_is_not_called_an_effect_of_the_temperature():
    before, after = (tuple(of_few(scale, seed) for seed in (0, 3)) for scale in (1.0, 1 / 0.91))
    assert sum(each.ece for each in after) > 1.1 * sum(each.ece for each in before)
    words = verdict.methods(Comparison("toy", (0, 3), (Method("ce", before, after, (0.91,) * 2),))).headline
    assert "a temperature of 0.91 makes no clear difference (ECE " in words


def test_a_calibrator_without_a_clear_effect():
    before, after = replace(of_few(1.0), p_value=0.01), of_few(1.05)
    said = verdict.before_and_after(before, after, "spline, fitted to val.npz")
    assert said.headline.endswith("spline makes no clear difference.")
    assert said.sentences[1].count("(no significant difference)") == 2


def test_a_difference_is_clear_if_most_seeds_agree():
    poor, good = of_logits(4.0), of_logits(1.0)
    assert verdict.is_clear([poor] * 3, [good, good, poor])
    assert not verdict.is_clear([poor] * 3, [good, poor, poor])
    assert not verdict.is_clear([poor, good], [good, poor])
    calibrated = [replace(each, p_value=0.4) for each in (poor, good)]
    assert not verdict.is_clear(calibrated[:1], calibrated[1:])  # neither is miscalibrated
    assert verdict.is_clear([of_logits(4.0, resamples=0)], [of_logits(3.9, resamples=0)])  # not tested


def test_a_temperature_is_recommended_although_few_true_classes_have_a_probability_of_0():
    said = verdict.one_model(changed_field(of_logits(4.0), ruled_out=3, samples=6_000_000))
    assert said.sentences[1].startswith("A temperature would help")
    images = changed_field(of_logits(4.0, resamples=0), ruled_out=3, samples=6_000_000, per_image=True)
    assert verdict.one_model(images).sentences[1].startswith("3 of 6,000,000 true classes")
