"""20 Newsgroups."""

import pytest
import torch

from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.text import encoding, newsgroups, twenty_newsgroups

from .writing import GROUPS, write_messages, write_vectors


class TestNewsgroups:
    def test_sizes_are_scaled_down_and_use_everything(self, tmp_path):
        data = newsgroups(write_messages(tmp_path), embedding="", length=8)
        assert [len(data.train), len(data.validation), len(data.test)] == [45, 3, 12]
        assert data.class_names == GROUPS
        assert data.class_counts == (15, 15, 15)
        assert torch.bincount(data.test.targets).tolist() == [4, 4, 4]
        assert data.about["length"] == 8
        assert "embedding" not in data.about

    def test_sizes_that_fit_are_kept(self, tmp_path):
        data = newsgroups(write_messages(tmp_path), embedding="", length=8, train=30, validation=6, test=None)
        assert [len(data.train), len(data.validation), len(data.test)] == [30, 6, 24]
        data = newsgroups(tmp_path, embedding="", length=8, train=30, validation=6, test=3)
        assert [len(data.train), len(data.validation), len(data.test)] == [30, 6, 3]

    def test_by_date_sizes_of_the_papers(self):
        assert twenty_newsgroups._scaled(15098, 900, 3999, 18846) == (14229, 848, 3769)
        assert twenty_newsgroups._scaled(15098, 900, 3999, 19997) == (15098, 900, 3999)

    def test_nothing_left_to_test_with(self, tmp_path):
        with pytest.raises(ValueError, match="some are left to test with"):
            newsgroups(write_messages(tmp_path), embedding="", train=50, validation=10, test=None)

    def test_headers_are_removed(self, tmp_path, monkeypatch):
        seen = []
        monkeypatch.setattr(encoding, "tokens", lambda text: seen.append(text) or text.split())
        newsgroups(write_messages(tmp_path), embedding="")
        assert len(seen) == 60
        assert all(text.startswith("The ") and text.endswith("\n\nMore.") and "é" in text for text in seen)
        seen.clear()
        newsgroups(tmp_path, embedding="", headers=True)
        assert all(text.startswith("From: ") for text in seen)

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"A: b\r\nC: d\r\n\r\nbody\r\n", "body\n"),
            (b"\nbody\n\nmore", "body\n\nmore"),
            (b"A: b\nno body", ""),
            (b"", ""),
        ],
    )
    def test_header_forms(self, content, expected):
        assert twenty_newsgroups._message(content, headers=False) == expected

    def test_seed(self, tmp_path):
        write_messages(tmp_path)
        first, again, other = (newsgroups(tmp_path, embedding="", split_seed=seed) for seed in (0, 0, 1))
        assert torch.equal(first.train.inputs, again.train.inputs)
        assert not torch.equal(first.train.inputs, other.train.inputs)

    def test_original_collection(self, tmp_path):
        write_messages(tmp_path, folders=("20_newsgroups",))
        data = newsgroups(tmp_path, collection="original", embedding="")
        assert len(data.train) + len(data.validation) + len(data.test) == 30
        with pytest.raises(MissingDataError, match="20news-bydate-train is missing: download 20news-bydate"):
            newsgroups(tmp_path, embedding="")

    def test_missing_original_collection(self, tmp_path):
        with pytest.raises(
            MissingDataError, match=r"20_newsgroups is missing: download 20news-19997\.tar\.gz"
        ):
            newsgroups(tmp_path, collection="original")

    def test_missing_embedding(self, tmp_path):
        with pytest.raises(MissingDataError, match=r"glove\.6B\.100d\.txt is missing"):
            newsgroups(write_messages(tmp_path))

    def test_empty_folders(self, tmp_path):
        for folder in ("20news-bydate-train", "20news-bydate-test"):
            (tmp_path / folder).mkdir()
        with pytest.raises(ValueError, match="messages of 0 groups"):
            newsgroups(tmp_path)

    @pytest.mark.parametrize("inside", ["", "glove.6B"])
    def test_embedding(self, tmp_path, inside):
        (tmp_path / inside).mkdir(exist_ok=True)
        write_vectors(tmp_path / inside, {"orbit": [1, 2, 3], "engine": [4, 5, 6]})
        data = newsgroups(write_messages(tmp_path), embedding="vectors.txt", length=10)
        vectors = data.about["embedding"]
        assert vectors.shape == (data.about["vocabulary_size"], 3)
        assert vectors[:2].eq(0).all()
        inputs, targets = data.train.batch(torch.arange(len(data.train)))
        topics = vectors[inputs].sum(1)
        expected = torch.tensor([[0, 0, 0], [4, 5, 6], [1, 2, 3]], dtype=torch.float32)
        assert torch.equal(topics, expected[targets])

    def test_preprocessing_of_the_papers(self, tmp_path):
        data = newsgroups(write_messages(tmp_path), embedding="", length=3, preprocessing="keras")
        inputs, _ = data.train.batch(torch.arange(len(data.train)))
        assert (inputs[:, -1] == 1).all()  # "more" ends every message, and is the first by count and name
