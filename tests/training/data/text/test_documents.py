"""Documents become numbers by the vocabulary of the training part."""

from pathlib import Path

import pytest
import torch

from calibrant.training.data.text.documents import Documents, Encoding
from calibrant.training.data.text.vocabulary import PADDING, UNKNOWN


class TestEncoded:
    def documents(self, *texts):
        return Documents(list(texts), torch.zeros(len(texts), dtype=torch.long))

    def test_vocabulary_by_frequency_in_training_alone(self):
        train = self.documents("b b a c", "b a d")
        other = self.documents("z z z z a", "b")
        data = Encoding(length=4, vocabulary=4).data_sets(Path(), [train, other, other], ("x", "y"))
        assert data.train.inputs.tolist() == [[2, 2, 3, UNKNOWN], [2, 3, UNKNOWN, PADDING]]
        assert data.test.inputs.tolist() == [[UNKNOWN] * 4, [2, PADDING, PADDING, PADDING]]
        assert data.train.inputs.dtype == torch.int64
        assert data.about["vocabulary_size"] == 4

    def test_word_that_only_the_test_has_is_unknown(self):
        data = Encoding(length=2).data_sets(
            Path(), [self.documents("a b"), self.documents("c a"), self.documents("c")], ("x", "y")
        )
        assert data.validation.inputs.tolist() == [[UNKNOWN, 2]]

    def test_lengths(self):
        part = self.documents("a b c d e", "")
        data = Encoding(length=2, test_length=6).data_sets(Path(), [part] * 3, ("x", "y"))
        assert data.train.inputs.shape == (2, 2)
        assert data.validation.inputs.shape == data.test.inputs.shape == (2, 6)
        assert data.test.inputs[1].tolist() == [PADDING] * 6
        assert data.about["length"] == 2

    def test_refuses(self):
        part = self.documents("a")
        with pytest.raises(ValueError, match="length must be a whole number"):
            Encoding(length=0).data_sets(Path(), [part] * 3, ("x", "y"))
        with pytest.raises(ValueError, match="vocabulary must be at least 3"):
            Encoding(length=1, vocabulary=2).data_sets(Path(), [part] * 3, ("x", "y"))
        with pytest.raises(ValueError, match="no training documents"):
            Encoding(length=1).data_sets(Path(), [self.documents(), part, part], ("x", "y"))
        with pytest.raises(ValueError, match="2 texts and 1 labels"):
            Documents(["a", "b"], torch.zeros(1))
