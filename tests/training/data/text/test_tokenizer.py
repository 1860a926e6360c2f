"""Tokenizers of transformers."""

import sys
from pathlib import Path

import pytest
import torch

from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.split import TensorSplit
from calibrant.training.data.text import encoding, newsgroups, text_table

from .writing import write_csv, write_messages


class TestTokenizer:
    @pytest.fixture
    def root(self, tmp_path) -> Path:
        transformers = pytest.importorskip("transformers")
        tokenizers = pytest.importorskip("tokenizers")
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "orbit", "engine", "belief", "good", "bad"]
        model = tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        for name, tokens_ in (("tiny", special), ("no-padding", {"unk_token": "[UNK]"})):
            fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens_)
            fast.save_pretrained(str(tmp_path / name))
        return tmp_path

    def test_newsgroups(self, root):
        data = newsgroups(write_messages(root), tokenizer="tiny", length=4, test_length=6)
        assert isinstance(data.train, TensorSplit)
        inputs, targets = data.train.batch(torch.arange(len(data.train)))
        assert set(inputs) == {"input_ids", "attention_mask"}
        topics = torch.tensor([7, 6, 5])
        assert torch.equal(
            inputs["input_ids"][:, :3], torch.stack([topics * 0 + 2, topics * 0 + 4, topics], 1)[targets]
        )
        assert inputs["input_ids"][:, 3].eq(3).all()
        assert data.test.batch(torch.arange(2))[0]["input_ids"].shape == (2, 6)
        assert data.about["vocabulary_size"] == 10
        assert "embedding" not in data.about

    def test_text_table_in_several_goes(self, root, monkeypatch):
        monkeypatch.setattr(encoding, "BATCH", 3)
        write_csv(root / "a.csv", [("good", 1), ("bad the orbit", 0)] * 10)
        data = text_table(root, file="a.csv", tokenizer="tiny", length=5)
        inputs, targets = data.train.batch(torch.arange(14))
        expected = torch.tensor([[2, 9, 4, 5, 3], [2, 8, 3, 0, 0]])
        assert torch.equal(inputs["input_ids"], expected[targets])
        assert torch.equal(inputs["attention_mask"], (expected != 0).long()[targets])

    def test_no_padding_token(self, root):
        with pytest.raises(ValueError, match="'no-padding' has no padding token"):
            newsgroups(write_messages(root), tokenizer="no-padding")

    @pytest.mark.filterwarnings("ignore")
    def test_missing(self, root, monkeypatch):
        transformers = pytest.importorskip("transformers")

        def unreachable(name):
            raise OSError("no connection")

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
        with pytest.raises(
            MissingDataError, match="elsewhere is missing: download the tokenizer 'elsewhere'"
        ):
            newsgroups(write_messages(root), tokenizer="elsewhere")

    def test_not_installed(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r'pip install "calibrant\[transformers\]"'):
            newsgroups(write_messages(tmp_path), tokenizer="tiny")
