"""Evaluation of single logits: yes-or-no decisions, one for each element or for each of several labels."""

from copy import copy
from itertools import pairwise

import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_calibration_error, multilabel_accuracy

from calibrant import Evaluator, evaluate, evaluate_on
from calibrant.evaluation import Evaluation
from calibrant.metrics import METRICS, Predictions, ece, mce
from calibrant.reports.page import render_report


def decisions(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64) - 1
    target = (torch.rand(*shape, generator=generator, dtype=torch.float64) < (logits / 2).sigmoid()).long()
    return logits, target


def close(value: object) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("bins", [10, 15])
def test_agrees_with_torchmetrics_and_scikit_learn(bins: int) -> None:
    logits, target = decisions(500)
    probability = logits.sigmoid()
    found = evaluate(logits, target, binary=True, bins=bins, resamples=0)
    for norm, name in (("l1", "ece"), ("max", "mce"), ("l2", "ece_l2")):
        theirs = binary_calibration_error(probability, target, n_bins=bins, norm=norm)
        assert found.metrics[name] == close(float(theirs)), name
    assert found.brier == close(brier_score_loss(target, probability))
    assert found.brier_calibration + found.brier_refinement == close(found.brier)
    assert found.nll == close(log_loss(target, probability))
    assert found.accuracy == close(accuracy_score(target, probability > 0.5))
    assert found.classes[1].ece == close(found.ece)


def test_errors_of_yes_are_not_those_of_the_top_class() -> None:
    """Half of all decisions at 10 %, half at 90 %, and half of each is yes: the sides do not cancel."""
    logits = torch.tensor([0.1, 0.9]).logit().repeat_interleave(10)
    target = torch.arange(20) % 2
    found = evaluate(logits, target, binary=True, resamples=0)
    assert found.ece == pytest.approx(0.4, abs=1e-6)
    assert found.classes[1].gap == pytest.approx(0, abs=1e-6)
    never = evaluate(torch.full((10,), -2.0), torch.ones(10).long(), binary=True, resamples=0)
    assert never.ece == pytest.approx(1 - torch.tensor(-2.0).sigmoid().item(), abs=1e-6)


def test_selection_is_by_the_confidence_of_the_prediction() -> None:
    logits, target = decisions(300)
    pairs = torch.stack([torch.zeros_like(logits), logits], 1)
    expected = evaluate(pairs, target, resamples=0)
    streamed = Evaluator(binary=True, resamples=0).update(logits, target).compute()
    for found in (evaluate(logits, target, binary=True, resamples=0), streamed):
        for name, metric in METRICS.items():
            if metric.group in ("selective", "recognition"):
                close_to = expected.metrics[name]
                assert found.metrics[name] == (close_to and pytest.approx(close_to, abs=2e-3)), name
        assert found.risk_coverage == expected.risk_coverage or found is streamed
    again = Evaluator(resamples=30).update(pairs, target).compute()
    resampled = Evaluator(binary=True, resamples=30).update(logits, target).compute()
    for found, other in zip(resampled.figures["aurc"].interval, again.figures["aurc"].interval, strict=True):
        assert found == pytest.approx(other, abs=0.02)


def test_metrics_take_predictions() -> None:
    logits, target = decisions(200)
    predictions = Predictions.of(logits, target, binary=True)
    found = evaluate(logits, target, binary=True, resamples=0)
    assert (ece(predictions), mce(predictions)) == close((found.ece, found.mce))


@pytest.mark.parametrize("shape", [(300,), (300, 1), (100, 3), (20, 3, 5)])
def test_a_stream_has_the_same_figures(shape: tuple[int, ...]) -> None:
    logits, target = decisions(*shape)
    target.view(-1)[3] = -100
    exact = evaluate(logits, target, binary=True, resamples=0)
    evaluator = Evaluator(binary=True, resamples=0)
    cuts = [0, 7, 12, shape[0]]
    for start, end in pairwise(cuts):
        evaluator = evaluator + Evaluator(binary=True, resamples=0).update(
            logits[start:end], target[start:end]
        )
    batches = [(logits[start:end], target[start:end]) for start, end in pairwise(cuts)]
    for streamed in (evaluator.compute(), evaluate_on(nn.Identity(), batches, binary=True, resamples=0)):
        for name in ("accuracy", "nll", "brier", "ece", "mce", "classwise_ece", "balanced_accuracy"):
            assert streamed.metrics[name] == close(exact.metrics[name]), name
        assert len(streamed.labels) == len(exact.labels)
        for ours, theirs in zip(streamed.labels, exact.labels, strict=True):
            assert ours.ece == close(theirs.ece)


def test_the_name_of_yes_is_printed() -> None:
    logits, target = decisions(50)
    for names, yes in ((None, "yes"), (["not neg", "neg"], "neg")):
        found = evaluate(logits, target, binary=True, class_names=names, resamples=0)
        assert f"exact; calibration of the probability of {yes}\n" in str(found)
    found = evaluate(*decisions(50, 2), binary=True, class_names=["a", "b"], resamples=0)
    assert "calibration of the probability of yes\n" in str(found)


def test_several_labels() -> None:
    logits, target = decisions(200, 4)
    names = ["cat", "dog", "bird", "fish"]
    found = evaluate(logits, target, binary=True, class_names=names, resamples=20)
    micro = evaluate(logits.flatten(), target.flatten(), binary=True, resamples=20)
    each = [evaluate(logits[:, i], target[:, i], binary=True, resamples=0) for i in range(4)]
    assert (found.ece, found.nll, found.accuracy) == close((micro.ece, micro.nll, micro.accuracy))
    assert found.figures["ece"].interval == close(micro.figures["ece"].interval)
    assert [label.ece for label in found.labels] == close([alone.ece for alone in each])
    assert [label.ece for label in found.classes] == close([alone.ece for alone in each])
    assert found.macro["ece"] == close(sum(alone.ece for alone in each) / 4)
    assert found.classwise_ece == close(found.macro["ece"])
    assert found.macro["accuracy"] == pytest.approx(
        float(multilabel_accuracy(logits, target, 4, average="macro")), abs=1e-6
    )
    assert [label.name for label in found.classes] == names
    assert (found.num_classes, found.samples) == (4, 800)
    assert Evaluation.from_json(found.to_json()) == found
    assert "mean over all labels" in str(found)
    assert "4 labels" in render_report([found])


@pytest.mark.parametrize(
    ("factor", "shift", "words"),
    [
        (3.0, 0.0, "too extreme"),
        (0.3, 0.0, "not extreme enough"),
        (1.0, 2.0, "too high"),
        (1.0, -2.0, "too low"),
    ],
)
def test_a_report_says_where_probabilities_of_yes_are_wrong(factor: float, shift: float, words: str) -> None:
    logits, target = decisions(2000)
    found = evaluate(factor * (logits + 1) / 2 + shift - 0.5, target, binary=True, resamples=0)
    assert f"Probabilities of yes are {words} by" in render_report([found])


def test_evaluations_without_decisions_say_so() -> None:
    found = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)
    plain = found.to_dict()
    assert (plain["binary"], plain["labels"]) == (False, [])
    assert Evaluation.from_dict(plain) == found
    assert found.macro == {}


def test_images() -> None:
    logits, target = decisions(6, 2, 4, 5)
    found = evaluate(logits, target, binary=True, per_image=True, resamples=0)
    single = [evaluate(logits[i : i + 1], target[i : i + 1], binary=True, resamples=0) for i in range(6)]
    assert found.ece == close(sum(each.ece for each in single) / 6)
    assert [each.exact for each in (found, *found.labels)] == [True] * 3


def test_labels_of_images_are_dense() -> None:
    logits, target = torch.randn(4, 2, 5, 5), torch.randint(2, (4, 2, 5, 5))
    streamed = Evaluator(2, binary=True, resamples=0).update(logits, target).compute()
    for evaluation in (evaluate(logits, target, binary=True, resamples=0), streamed):
        assert [label.dense for label in evaluation.labels] == [True, True]


@pytest.mark.parametrize("first", [True, False])
def test_what_a_sum_is_given_later_is_its_own(first: bool) -> None:
    logits, target = decisions(50, 3)
    part = Evaluator(binary=True, resamples=0).update(logits, target)
    alone, fresh = part.compute(), Evaluator(binary=True, resamples=0)
    for total in (part + fresh if first else fresh + part, copy(part)):
        total.update(logits, target)
        assert [each.samples for each in total.compute().labels] == [100] * 3
        assert part.compute() == alone


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_single_logits_need_the_argument(shape: tuple[int, ...]) -> None:
    target = torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match="pass binary=True"):
        evaluate(torch.zeros(shape), target)
    with pytest.raises(ValueError, match="pass binary=True"):
        Evaluator().update(torch.zeros(shape), target)
    assert evaluate(torch.zeros(shape), target, binary=True, resamples=0).ece == 0.5


def test_probabilities_given_as_single_logits_warn() -> None:
    logits, target = decisions(50)
    with pytest.warns(
        UserWarning, match=r"single logits look like probabilities: they lie in \[0, 1\]; pass their .logit"
    ):
        evaluate(logits.sigmoid(), target, binary=True, resamples=0)


def test_wrong_input_is_refused() -> None:
    logits, target = decisions(10, 3)
    with pytest.raises(ValueError, match="pass binary=True"):
        evaluate(logits, target)
    with pytest.raises(ValueError, match="if each element has one of several classes, leave out binary=True"):
        evaluate(logits, target[:, 0], binary=True)
    with pytest.raises(ValueError, match="class_names must have one entry for each of 3 labels, got 2"):
        evaluate(logits, target, binary=True, class_names=["no", "yes"])
    with pytest.raises(ValueError, match="class_counts have no meaning for several labels"):
        evaluate(logits, target, binary=True, class_counts=[1, 2, 3])
    with pytest.raises(ValueError, match=r"the logits have 1 label, expected 2; .* is the number of labels"):
        Evaluator(2, binary=True).update(logits[:, 0], target[:, 0])
    with pytest.raises(ValueError, match="the logits have 2 labels, expected 3"):
        Evaluator(binary=True).update(logits, target).update(logits[:, :2], target[:, :2])
    target[:, 1] = -100
    with pytest.raises(ValueError, match="label '1': nothing to evaluate"):
        evaluate(logits, target, binary=True)
    with pytest.raises(ValueError, match="different binary do not add up"):
        Evaluator(binary=True) + Evaluator()


def test_probabilities_of_several_labels_warn_once() -> None:
    logits, target = decisions(50, 6)
    evaluator = Evaluator(binary=True, resamples=0)
    for use in (lambda *batch: evaluate(*batch, binary=True, resamples=0), evaluator.update):
        with pytest.warns(UserWarning, match=r"pass their \.logit\(\)") as caught:
            use(logits.sigmoid(), target)
        assert len(caught) == 1


def test_a_label_without_elements_is_named() -> None:
    logits, target = decisions(20, 3)
    target[:, 1] = -100
    options = {"binary": True, "resamples": 0, "class_names": ["cat", "dog", "bird"]}
    evaluator = Evaluator(**options).update(logits, target)
    for compute in (lambda: evaluate(logits, target, **options), evaluator.compute):
        with pytest.raises(ValueError, match=r"label 'dog': .* is ignored; leave out .* this label"):
            compute()


@pytest.mark.parametrize("option", ["binary", "per_image"])
def test_switches_are_true_or_false(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be True or False, got 'no'"):
        Evaluator(**{option: "no"})
