"""Data sets of the package datasets, real or imitated."""

import sys
from types import SimpleNamespace

import pytest
import torch

from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.text import huggingface

from .writing import write_csv


class FakeTable:
    """What is used of ``datasets.Dataset``."""

    def __init__(self, texts, labels, names=None):
        self.columns = {"text": texts, "label": labels}
        self.column_names = list(self.columns)
        self.features = {
            "text": SimpleNamespace(),
            "label": SimpleNamespace(**({"names": names} if names else {})),
        }

    def __getitem__(self, column):
        return self.columns[column]


class TestHuggingFace:
    @pytest.fixture
    def library(self, monkeypatch, tmp_path):
        (tmp_path / "news").mkdir()
        (tmp_path / "news" / "dataset_dict.json").write_text("{}")
        tables = {
            "train": FakeTable(
                [f"word {n}" for n in range(20)], [n % 2 for n in range(20)], ["no", "yes", "never"]
            ),
            "test": FakeTable(["a", "b"], [1, 0], ["no", "yes", "never"]),
        }
        fake = SimpleNamespace(load_from_disk=lambda path: tables, load_dataset=lambda path, name: tables)
        monkeypatch.setitem(sys.modules, "datasets", fake)
        return tables

    def test_class_labels(self, library, tmp_path):
        data = huggingface(tmp_path, path="news")
        assert [len(data.train), len(data.validation), len(data.test)] == [18, 2, 2]
        assert data.class_names == ("no", "yes", "never")
        assert data.test.targets.tolist() == [1, 0]

    def test_strings_in_one_table(self, library, tmp_path, monkeypatch):
        table = FakeTable([f"word {n}" for n in range(10)], ["b", "a"] * 5)
        monkeypatch.setattr(sys.modules["datasets"], "load_from_disk", lambda path: table)
        data = huggingface(tmp_path, path="news", test_split="", validation=0.2)
        assert data.class_names == ("a", "b")
        assert [len(data.train), len(data.validation), len(data.test)] == [6, 2, 2]

    def test_errors(self, library, tmp_path):
        with pytest.raises(MissingDataError, match="elsewhere is missing"):
            huggingface(tmp_path, path="elsewhere")
        with pytest.raises(ValueError, match="has no part 'dev': expected one of 'train', 'test'"):
            huggingface(tmp_path, path="news", validation_split="dev")
        with pytest.raises(ValueError, match="has no column 'body': expected one of 'text', 'label'"):
            huggingface(tmp_path, path="news", text="body")
        library["test"].columns["label"] = [1, -1]
        with pytest.raises(ValueError, match="part 'test', row 2: label -1, expected one of the labels of"):
            huggingface(tmp_path, path="news")
        library["test"].columns["text"] = [None, "b"]
        with pytest.raises(ValueError, match="part 'test', row 1: column 'text' has None, expected a string"):
            huggingface(tmp_path, path="news")

    def test_not_installed(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ImportError, match=r'pip install "calibrant\[datasets\]"'):
            huggingface(tmp_path, path="news")

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("saved", [True, False])
    def test_the_real_library(self, tmp_path, saved, monkeypatch):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        datasets = pytest.importorskip("datasets")
        if saved:
            columns = {"text": ["good", "bad"] * 10, "label": ["b", "a"] * 10}
            table = datasets.Dataset.from_dict(columns).class_encode_column("label")
            datasets.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "news"))
        else:
            (tmp_path / "news").mkdir()
            for part in ("train", "test"):
                write_csv(tmp_path / "news" / f"{part}.csv", [("good", "b"), ("bad", "a")] * 10)
        data = huggingface(tmp_path, path="news", length=2)
        assert [len(data.train), len(data.validation), len(data.test)] == [18, 2, 20]
        assert data.class_names == ("a", "b")
        assert torch.equal(data.test.inputs[:2, 0] == data.test.inputs[2:4, 0], torch.tensor([True, True]))
