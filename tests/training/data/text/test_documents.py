"""Documents become numbers by the vocabulary of the training part."""

from pathlib import Path

import pytest
import torch

from calibrant.training.data.text.documents import Documents
from calibrant.training.data.text.encoding import PADDING, UNKNOWN, encode


class TestEncoded:
    def documents(self, *texts):
        return Documents(list(texts), torch.zeros(len(texts), dtype=torch.long))

    def test_vocabulary_by_frequency_in_training_alone(self):
        train = self.documents("b b a c", "b a d")
        other = self.documents("z z z z a", "b")
        data = encode(Path(), [train, other, other], ("x", "y"), length=4, vocabulary=4)
        assert data.train.inputs.tolist() == [[2, 2, 3, UNKNOWN], [2, 3, UNKNOWN, PADDING]]
        assert data.test.inputs.tolist() == [[UNKNOWN] * 4, [2, PADDING, PADDING, PADDING]]
        assert data.train.inputs.dtype == torch.int64
        assert data.about["vocabulary_size"] == 4

    def test_word_that_only_the_test_has_is_unknown(self):
        documents = [self.documents("a b"), self.documents("c a"), self.documents("c")]
        data = encode(Path(), documents, ("x", "y"), length=2)
        assert data.validation.inputs.tolist() == [[UNKNOWN, 2]]

    def test_lengths(self):
        part = self.documents("a b c d e", "")
        data = encode(Path(), [part] * 3, ("x", "y"), length=2, test_length=6)
        assert data.train.inputs.shape == (2, 2)
        assert data.validation.inputs.shape == data.test.inputs.shape == (2, 6)
        assert data.test.inputs[1].tolist() == [PADDING] * 6
        assert data.about["length"] == 2

    def test_refuses(self):
        part = self.documents("a")
        with pytest.raises(ValueError, match="length must be a whole number"):
            encode(Path(), [part] * 3, ("x", "y"), length=0)
        with pytest.raises(ValueError, match="vocabulary must be at least 3"):
            encode(Path(), [part] * 3, ("x", "y"), length=1, vocabulary=2)
        with pytest.raises(ValueError, match="no training documents"):
            encode(Path(), [self.documents(), part, part], ("x", "y"), length=1)
