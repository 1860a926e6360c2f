"""Classes that a part lacks and elements that are in two parts are told."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from calibrant.training.data.part_checks import _warn_of_copies, warn_about_parts
from calibrant.training.data.split import DataSets, TensorSplit


def test_classes_that_a_part_has_no_element_of_are_told():
    whole, some, none = (
        TensorSplit(torch.zeros(len(each), 1), torch.tensor(each, dtype=torch.long))
        for each in ([0, 2, 2, 4], [0, 2], [])
    )
    names = ("a", "b", "c", "d", "e")
    with pytest.warns(
        UserWarning, match=r"^x has no test element of 1 of 5 classes \('e' with 2 in all\)"
    ) as told:
        warn_about_parts(Path("x"), DataSets(whole, whole, some, names))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing has the classes b and d, and an empty part is meant
        warn_about_parts(Path("x"), DataSets(whole, none, whole, names))


def parts_told_of(train, validation, test):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _warn_of_copies(Path("x"), DataSets(train, validation, test, ("a", "b")))
    return [str(each.message) for each in told]


def parts_of_copies(inputs, copies=3):
    """Training, no validation and test elements, drawn from 200 elements with so many copies of each."""
    every = TensorSplit(inputs, torch.randint(2, (200,))).subset(torch.arange(200).repeat(copies))
    train, test = (every.subset(each) for each in torch.randperm(len(every)).split(len(every) * 2 // 3))
    return train, train.subset(torch.arange(0)), test


COPIED = {
    "numbers": lambda: torch.randn(200, 4),
    "one number": lambda: torch.randn(200, 1),
    "texts": lambda: {"words": torch.randint(1000, (200, 9)), "length": torch.full((200,), 9)},
    "images": lambda: torch.randint(256, (200, 3, 4, 4), dtype=torch.uint8),
    "black and white": lambda: torch.randint(2, (200, 64), dtype=torch.uint8),
    "many categories": lambda: F.one_hot(torch.randint(6, (200, 12)), 6).flatten(1).float(),
    "a number and categories": lambda: torch.cat([torch.randn(200, 1), COPIED["many categories"]()], 1),
}


@pytest.mark.parametrize("kind", COPIED)
def test_copies_of_training_elements_in_other_parts_are_told(kind):
    torch.manual_seed(0)
    for copies in (2, 3, 10):
        train, _, test = parts_of_copies(COPIED[kind](), copies)
        (message,) = parts_told_of(train, _, test)
        found = re.match(r"x: (\d+) of (\d+) test elements equal a training element in all inputs", message)
        assert int(found[1]) > 0.5 * int(found[2])


def test_rows_that_are_equal_by_chance_are_not_told():
    torch.manual_seed(0)
    few_rows = torch.randint(5, (200, 2)).float()
    few_categories = F.one_hot(torch.randint(3, (200, 4)), 3).flatten(1).float()
    common_rows = torch.where(torch.rand(200, 1) < 0.4, 0.0, torch.randn(200, 5))
    for inputs in (few_rows, few_categories, common_rows):
        assert parts_told_of(*parts_of_copies(inputs, copies=1)) == []


def test_test_elements_that_are_validation_elements_are_told():
    torch.manual_seed(0)
    train, other = (TensorSplit(torch.randn(50, 3), torch.randint(2, (50,))) for _ in range(2))
    (message,) = parts_told_of(train, other, other)
    assert message.startswith("x: 50 of 50 test elements equal a validation element")


def test_texts_of_different_lengths_are_compared():
    torch.manual_seed(0)
    words, labels = torch.randint(1, 99, (50, 6)), torch.randint(2, (50,))
    longer = TensorSplit(F.pad(words, (0, 3)), labels)
    (message,) = parts_told_of(TensorSplit(words, labels), longer.subset(torch.arange(0)), longer)
    assert message.startswith("x: 50 of 50 test elements equal a training element")


def test_few_copies_and_other_labels_are_not_told():
    inputs, labels = torch.randn(200, 4), torch.zeros(200, dtype=torch.long)
    train, few = TensorSplit(inputs[:115], labels[:115]), TensorSplit(inputs[100:], labels[100:])
    other, none = TensorSplit(inputs[:115], labels[:115] + 1), few.subset(torch.arange(0))
    assert parts_told_of(train, none, few) == []  # 15 of 100
    assert parts_told_of(train, none, other) == []


def test_classes_that_differ_only_in_case_are_told():
    part = TensorSplit(torch.zeros(30, 1), torch.arange(30) % 3)
    with pytest.warns(
        UserWarning, match="x has classes that differ only in case or spaces: 'High' and 'high'$"
    ):
        warn_about_parts(
            Path("x"), DataSets(part, part.subset(torch.arange(3)), part, ("High", "high", "low"))
        )
    letters = DataSets(part, part.subset(torch.arange(3)), part, ("A", "B", "a"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_about_parts(Path("x"), letters)
    assert not any("differ only in case" in str(each.message) for each in caught)
