"""Isotonic regression against scikit-learn."""

import pytest
import torch

from calibrant.calibrators.isotonic import Isotonic
from calibrant.layout import as_logits
from tests.calibrators.probabilities import binary_logits, overconfident, second

sklearn_isotonic = pytest.importorskip("sklearn.isotonic")


def reference(probability, outcome, at):
    regression = sklearn_isotonic.IsotonicRegression(out_of_bounds="clip")
    regression.fit(probability.numpy(), outcome.double().numpy())
    return torch.from_numpy(regression.predict(at.numpy()))


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
def test_binary_equals_scikit_learn(rounded):
    logits, target = overconfident(500, 2)
    logits = (logits / 2).round() * 2 if rounded else logits
    other = overconfident(300, 2, seed=1)[0]
    expected = reference(second(logits), target == 1, second(other))
    torch.testing.assert_close(second(Isotonic().fit(logits, target)(other)), expected, rtol=0, atol=1e-9)


def test_many_classes_equal_scikit_learn_renormalised():
    logits, target = overconfident(800, 5)
    other = overconfident(300, 5, seed=1)[0]
    before, at = logits.softmax(1), other.softmax(1)
    expected = torch.stack([reference(before[:, k], target == k, at[:, k]) for k in range(5)], 1)
    total = expected.sum(1, keepdim=True)
    expected = torch.where(total > 0, expected / total, at)
    actual = Isotonic().fit(logits, target)(other).softmax(1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_top_label_equals_scikit_learn():
    logits, target = overconfident(800, 5)
    other = overconfident(300, 5, seed=1)[0]
    correct = logits.argmax(1) == target
    expected = reference(logits.softmax(1).amax(1), correct, other.softmax(1).amax(1))
    actual = Isotonic(variant="top-label").fit(logits, target)(other).softmax(1)
    assert expected.min() > 0.21
    torch.testing.assert_close(actual.amax(1), expected, rtol=0, atol=1e-9)


def test_rows_of_zeros_keep_their_probabilities():
    # Each class was wrong at 0.4 and right at 0.59, so that none has a chance in a row of thirds.
    logits = torch.tensor([[0.4, 0.59, 0.01], [0.01, 0.4, 0.59], [0.59, 0.01, 0.4]]).log()
    calibrator = Isotonic().fit(logits, torch.tensor([1, 2, 0]))
    undecided = torch.tensor([[0.36, 0.34, 0.3]])
    torch.testing.assert_close(calibrator(undecided.log()).exp(), undecided)


@pytest.mark.filterwarnings("ignore:of 3 classes the data lack 2")
@pytest.mark.filterwarnings("ignore:all labels are of one class")
def test_a_class_that_is_always_right_has_nearly_all():
    logits = overconfident(20, 3)[0]
    calibrated = Isotonic().fit(logits, torch.zeros(20).long())(logits)
    # What Laplace leaves to each class that was not seen: (0 + 1) / (20 + 3).
    assert calibrated.exp()[:, 0].min() > 1 - 2 / 23 - 1e-9


@pytest.mark.filterwarnings("ignore:all labels are of one class")
def test_confidence_below_chance_becomes_chance():
    # Always wrong when confident: the prediction stays, with hardly more than its rival.
    logits = binary_logits(torch.linspace(0.6, 0.9, 50, dtype=torch.float64))
    calibrated = Isotonic(variant="top-label").fit(logits, torch.zeros(50).long())(logits)
    assert (calibrated.argmax(1) == 1).all()
    torch.testing.assert_close(second(calibrated), torch.full((50,), 1 / 1.99, dtype=torch.float64))


def test_probabilities_closer_than_1e_15_are_equal_as_in_scikit_learn():
    # Naive Bayes gives probabilities such as 1e-30, whose order says little. Were they apart, the map would
    # be 0 below the first success, and cost 27 nats wherever that is wrong.
    from sklearn.datasets import load_digits
    from sklearn.naive_bayes import GaussianNB

    digits = load_digits()
    train, held_out, test = slice(0, 700), slice(700, 1100), slice(1100, None)
    bayes = GaussianNB().fit(digits.data[train], digits.target[train])
    probabilities = bayes.predict_proba(digits.data)
    target = torch.from_numpy(digits.target)
    calibrator = Isotonic().fit(as_logits(torch.from_numpy(probabilities[held_out])), target[held_out])
    found = calibrator(as_logits(torch.from_numpy(probabilities[test])))
    given = torch.from_numpy(probabilities)
    columns = [
        reference(given[held_out, number], target[held_out] == number, given[test, number])
        for number in range(10)
    ]
    expected = torch.stack(columns, 1)
    expected = expected / expected.sum(1, keepdim=True)
    # Its groups start at their first number, ours at multiples of 1e-15.
    torch.testing.assert_close(found.exp(), expected, rtol=0, atol=1e-3)
    nll = torch.nn.functional.cross_entropy(found, target[test])
    assert nll < 1.0
