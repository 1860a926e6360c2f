"""Parts of data sets give batches and subsets of what they hold."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from calibrant.training.data.split import DataSets, TensorSplit, _warn_of_copies, warn_about_parts


def test_tensor_splits_give_and_divide_what_they_hold():
    part = TensorSplit({"a": torch.arange(4), "b": torch.arange(8).reshape(4, 2)}, torch.tensor([0, 1, 2, 3]))
    inputs, targets = part.subset(torch.tensor([3, 1])).batch(torch.tensor([0]))
    assert inputs["a"].tolist() == [3]
    assert inputs["b"].tolist() == [[6, 7]]
    assert targets.tolist() == [3]
    with pytest.raises(ValueError, match="3"):
        TensorSplit(torch.zeros(3, 1), torch.zeros(2))


def test_class_counts_are_those_of_the_training_part():
    train = TensorSplit(torch.zeros(3, 1), torch.tensor([0, 2, 2]))
    data = DataSets(train, train, train, ("a", "b", "c", "d"))
    assert data.class_counts == (1, 0, 2, 0)
    maps = TensorSplit(torch.zeros(3, 1), torch.zeros(3, 2, 2))
    assert DataSets(maps, maps, maps, ("a",)).class_counts is None


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


def test_copies_of_training_elements_in_other_parts_are_told():
    def told_of(inputs):
        copies = TensorSplit(inputs, torch.randint(2, (200,))).subset(torch.arange(200).repeat(3))
        train, test = (copies.subset(each) for each in torch.randperm(600).split(400))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_about_parts(Path("x"), DataSets(train, train.subset(torch.arange(0)), test, ("a", "b")))
        return [str(each.message) for each in told]

    torch.manual_seed(0)
    copied = r"x: (\d+) of 200 test elements equal a training element in all inputs and the label"
    for inputs in (
        torch.randn(200, 4),
        {"words": torch.randint(1000, (200, 9)), "length": torch.full((200,), 9)},
        torch.randint(256, (200, 3, 4, 4), dtype=torch.uint8),
    ):
        (message,) = told_of(inputs)
        assert int(re.match(copied, message)[1]) > 150
    few_rows = torch.randint(5, (200, 2)).float()  # 25 different rows, which are equal by chance
    assert told_of(few_rows) == []
    categories = torch.nn.functional.one_hot(torch.randint(3, (200, 4)), 3).flatten(1).float()
    assert told_of(categories) == []


def test_few_copies_and_other_labels_are_not_told():
    inputs, labels = torch.randn(200, 4), torch.zeros(200, dtype=torch.long)
    train = TensorSplit(inputs[:104], labels[:104])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = TensorSplit(inputs[100:], labels[100:])  # 4 of 100
        other = TensorSplit(inputs[:104], labels[:104] + 1)
        warn_about_parts(Path("x"), DataSets(train, few, few, ("a",)))
        _warn_of_copies(Path("x"), DataSets(train, few, other, ("a", "b")))
