"""Parts of data sets give batches and subsets of what they hold."""

import pytest
import torch

from calibrant.training.data.split import DataSets, TensorSplit


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
