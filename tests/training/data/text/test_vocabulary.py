"""How texts become numbers of words."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from calibrant.training.data.text.documents import Documents
from calibrant.training.data.text.encoding import encode, separated_words, tokens


class TestTokens:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", []),
            (" \n\t", []),
            ("Don't can't", ["do", "n't", "ca", "n't"]),
            ("they've John's I'm", ["they", "'ve", "john", "'s", "i", "'m"]),
            ("1,000.50 v2", ["1,000.50", "v", "2"]),
            ("end. >>>> next", ["end", ".", ">", "next"]),
            ("snake_case ____", ["snake", "_", "case", "_"]),
            ("Éa ü", ["éa", "ü"]),
            ("a-b@c.com", ["a", "-", "b", "@", "c", ".", "com"]),
        ],
    )
    def test_examples(self, text, expected):
        assert tokens(text) == expected

    def test_loses_nothing_but_blanks_and_repeats(self):
        text = "x+y=z; (a|b) ~ 'quoted' 3.14.15"
        assert "".join(tokens(text)) == text.replace(" ", "")


class TestSeparatedWords:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", []),
            ("...", []),
            ("Don't stop", ["don't", "stop"]),
            ("snake_case, a-b@c.com", ["snake", "case", "a", "b", "c", "com"]),
            ("1,000.50\n\tv2", ["1", "000", "50", "v2"]),
            ("Éa 'quoted'", ["éa", "'quoted'"]),
        ],
    )
    def test_examples(self, text, expected):
        assert separated_words(text) == expected


TEXTS = [
    ["A cat! A cat.", "the dog's dog; the end the"],
    ["unseen, a the the"],
    ["zebra zebra zebra zebra zebra", "", "end dog's a the cat a the cat a the"],
]


class TestKeras:
    """The pre-processing of the papers' releases, against a plain account of what Keras does."""

    @staticmethod
    def reference(vocabulary, length):
        """Words by falling frequency over all texts; the others left out; the last ones; zeros in front."""
        counts = Counter(word for part in TEXTS for text in part for word in separated_words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 1]
        numbers = {word: rank for rank, word in enumerate(ranked, start=1)}
        rows = []
        for part in TEXTS:
            known = [[numbers[word] for word in separated_words(text) if word in numbers] for text in part]
            rows.append([([0] * length + document)[-length:] for document in known])
        return rows, ranked

    @pytest.mark.parametrize(("vocabulary", "length"), [(100, 12), (5, 12), (4, 3), (2, 1)])
    def test_numbers(self, vocabulary, length):
        parts = [Documents(texts, torch.zeros(len(texts), dtype=torch.long)) for texts in TEXTS]
        data = encode(Path(), parts, ("x", "y"), length, vocabulary=vocabulary, preprocessing="keras")
        expected, words = self.reference(vocabulary, length)
        found = [part.inputs.tolist() for part in (data.train, data.validation, data.test)]
        assert found == expected
        assert data.about["vocabulary_size"] == len(words) + 1 <= vocabulary

    def test_vectors_are_beside_their_words(self, tmp_path):
        (tmp_path / "vectors.txt").write_text("zebra 5 5\nthe 7 7\n")
        parts = [Documents(texts, torch.zeros(len(texts), dtype=torch.long)) for texts in TEXTS]
        data = encode(
            tmp_path, parts, ("x", "y"), 4, vocabulary=4, embedding="vectors.txt", preprocessing="keras"
        )
        assert data.about["embedding"].tolist() == [[0, 0], [7, 7], [0, 0], [5, 5]]  # padding, the, a, zebra

    def test_refusals(self):
        parts = [Documents(texts, torch.zeros(len(texts), dtype=torch.long)) for texts in TEXTS]
        with pytest.raises(ValueError, match="vocabulary must be at least 2, padding included, got 1"):
            encode(Path(), parts, ("x", "y"), 4, vocabulary=1, preprocessing="keras")
        with pytest.raises(ValueError, match="preprocessing must be one of 'glove', 'keras', got 'own'"):
            encode(Path(), parts, ("x", "y"), 4, preprocessing="own")
