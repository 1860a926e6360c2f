"""Parts of data sets give batches and subsets of what they hold."""

import warnings
from pathlib import Path

import pytest
import torch

from calibrant.training.data.split import DataSets, TensorSplit, warn_of_missing_classes


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
        warn_of_missing_classes(Path("x"), DataSets(whole, whole, some, names))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing has the classes b and d, and an empty part is meant
        warn_of_missing_classes(Path("x"), DataSets(whole, none, whole, names))
