"""Files of word vectors."""

import pytest
import torch

from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.text.encoding import glove

from .writing import write_vectors


class TestGlove:
    def test_words_in_the_order_asked_for_and_zeros_for_the_rest(self, tmp_path):
        file = write_vectors(tmp_path, {"the": [1, 2], "cat": [3, 4], "é": [5, 6]})
        vectors = glove(file, ["é", "unheard", "the"])
        assert vectors.dtype == torch.float32
        assert vectors.tolist() == [[5, 6], [0, 0], [1, 2]]

    def test_malformed_lines_are_passed_over(self, tmp_path):
        file = tmp_path / "vectors.txt"
        file.write_text(
            "5 2\n"  # the header of word2vec
            "at name@domain.com 7 7\n"
            "the 1\n"
            "the one two\n"
            "the nan 1\n"
            "\n"
            "the 1 2\n"
            "the 8 8\n"
            "at 3 4\n"
            "dog 1 1\ncow 1 1\nhen 1 1\n"
        )
        assert glove(file, ["the", "at"]).tolist() == [[1, 2], [3, 4]]

    def test_missing(self, tmp_path):
        with pytest.raises(MissingDataError, match=r"vectors\.txt is missing: download glove\.6B\.zip"):
            glove(tmp_path / "vectors.txt", ["a"])

    @pytest.mark.parametrize("content", ["", "\n\n"])
    def test_empty(self, tmp_path, content):
        (tmp_path / "vectors.txt").write_text(content)
        with pytest.raises(ValueError, match="has no vectors"):
            glove(tmp_path / "vectors.txt", ["a"])

    def test_no_word_in_common(self, tmp_path):
        with pytest.raises(ValueError, match="none of the 1 words"):
            glove(write_vectors(tmp_path, {"The": [1, 2]}), ["the"])
