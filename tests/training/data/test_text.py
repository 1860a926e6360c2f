import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from calibrant.training.data import text as module
from calibrant.training.data.sources import MissingDataError
from calibrant.training.data.split import TensorSplit
from calibrant.training.data.text import (
    PADDING,
    UNKNOWN,
    Documents,
    encoded,
    glove,
    huggingface,
    newsgroups,
    text_table,
    tokens,
)

GROUPS = ("alt.atheism", "rec.autos", "sci.space")
TOPICS = {"alt.atheism": "belief", "rec.autos": "engine", "sci.space": "orbit"}


def write_messages(root: Path, folders=("20news-bydate-train", "20news-bydate-test"), count=10) -> Path:
    for folder in folders:
        for group in GROUPS:
            (root / folder / group).mkdir(parents=True)
            for number in range(count):
                content = f"From: secret@{group}\nSubject: hidden\n\nThe {TOPICS[group]} é {number}\n\nMore."
                (root / folder / group / str(50000 + number)).write_bytes(content.encode("latin-1"))
    return root


def write_vectors(root: Path, words: dict[str, list[float]]) -> Path:
    file = root / "vectors.txt"
    file.write_text("".join(f"{word} {' '.join(map(str, v))}\n" for word, v in words.items()), "utf-8")
    return file


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
        assert module._scaled(15098, 900, 3999, 18846) == (14229, 848, 3769)
        assert module._scaled(15098, 900, 3999, 19997) == (15098, 900, 3999)

    def test_nothing_left_to_test_with(self, tmp_path):
        with pytest.raises(ValueError, match="some are left to test with"):
            newsgroups(write_messages(tmp_path), embedding="", train=50, validation=10, test=None)

    def test_headers_are_removed(self, tmp_path, monkeypatch):
        seen = []
        monkeypatch.setattr(module, "tokens", lambda text: seen.append(text) or text.split())
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
        assert module._message(content, headers=False) == expected

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


class TestEncoded:
    def documents(self, *texts):
        return Documents(list(texts), torch.zeros(len(texts), dtype=torch.long))

    def test_vocabulary_by_frequency_in_training_alone(self):
        train = self.documents("b b a c", "b a d")
        other = self.documents("z z z z a", "b")
        data = encoded(Path(), [train, other, other], ("x", "y"), length=4, vocabulary=4)
        assert data.train.inputs.tolist() == [[2, 2, 3, UNKNOWN], [2, 3, UNKNOWN, PADDING]]
        assert data.test.inputs.tolist() == [[UNKNOWN] * 4, [2, PADDING, PADDING, PADDING]]
        assert data.train.inputs.dtype == torch.int64
        assert data.about["vocabulary_size"] == 4

    def test_word_that_only_the_test_has_is_unknown(self):
        data = encoded(
            Path(), [self.documents("a b"), self.documents("c a"), self.documents("c")], ("x", "y"), length=2
        )
        assert data.validation.inputs.tolist() == [[UNKNOWN, 2]]

    def test_lengths(self):
        part = self.documents("a b c d e", "")
        data = encoded(Path(), [part] * 3, ("x", "y"), length=2, test_length=6)
        assert data.train.inputs.shape == (2, 2)
        assert data.validation.inputs.shape == data.test.inputs.shape == (2, 6)
        assert data.test.inputs[1].tolist() == [PADDING] * 6
        assert data.about["length"] == 2

    def test_refuses(self):
        part = self.documents("a")
        with pytest.raises(ValueError, match="length must be a whole number"):
            encoded(Path(), [part] * 3, ("x", "y"), length=0)
        with pytest.raises(ValueError, match="vocabulary must be at least 3"):
            encoded(Path(), [part] * 3, ("x", "y"), length=1, vocabulary=2)
        with pytest.raises(ValueError, match="no training documents"):
            encoded(Path(), [self.documents(), part, part], ("x", "y"), length=1)
        with pytest.raises(ValueError, match="2 texts and 1 labels"):
            Documents(["a", "b"], torch.zeros(1))


def write_csv(file: Path, rows: list[tuple[str, object]], delimiter=",", header=("text", "label")) -> Path:
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows([header, *rows])
    return file


def write_jsonl(file: Path, rows: list[tuple[object, object]]) -> Path:
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return file


ROWS = [(f"a text, of {word}\nin lines", word) for word in ("good", "bad") for _ in range(10)]


class TestTextTable:
    @pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
    def test_drawn_parts(self, tmp_path, suffix):
        file = tmp_path / f"reviews.{suffix}"
        if suffix == "jsonl":
            write_jsonl(file, ROWS)
        else:
            write_csv(file, ROWS, delimiter="\t" if suffix == "tsv" else ",")
        data = text_table(tmp_path, file=file.name, length=8)
        assert [len(data.train), len(data.validation), len(data.test)] == [14, 2, 4]
        assert data.class_names == ("bad", "good")
        assert data.class_counts == (7, 7)
        inputs, targets = data.train.batch(torch.tensor([0, 13]))
        assert inputs.shape == (2, 8)
        assert (inputs[0] != inputs[1]).sum() == 1
        assert sorted(targets.tolist()) == [0, 1]

    def test_parts_in_files(self, tmp_path):
        write_csv(tmp_path / "a.csv", ROWS)
        write_jsonl(tmp_path / "b.jsonl", ROWS[:3])
        write_csv(tmp_path / "c.csv", ROWS[12:])
        data = text_table(tmp_path, file="a.csv", validation_file="b.jsonl", test_file="c.csv")
        assert [len(data.train), len(data.validation), len(data.test)] == [20, 3, 8]
        assert data.validation.targets.tolist() == [1, 1, 1]
        assert data.test.targets.tolist() == [0] * 8

    def test_one_part_drawn(self, tmp_path):
        write_csv(tmp_path / "a.csv", ROWS)
        write_csv(tmp_path / "c.csv", ROWS[:5])
        data = text_table(tmp_path, file="a.csv", test_file="c.csv", validation=0.3)
        assert [len(data.train), len(data.validation), len(data.test)] == [14, 6, 5]

    @pytest.mark.parametrize("write", [write_csv, write_jsonl])
    def test_integers_are_ordered_by_value(self, tmp_path, write):
        name = "a.csv" if write is write_csv else "a.jsonl"
        write(tmp_path / name, [("text", label) for label in (10, 2, 9, 2, 9, 10, 10, 2, 9, 10)])
        data = text_table(tmp_path, file=name)
        assert data.class_names == ("2", "9", "10")

    def test_other_columns_and_byte_order_mark(self, tmp_path):
        content = "\ufeffid,body,class\n" + "".join(f"{n},word {n},{n % 2}\n" for n in range(10))
        (tmp_path / "a.csv").write_text(content, "utf-8")
        data = text_table(tmp_path, file="a.csv", text="body", label="class")
        assert data.class_names == ("0", "1")

    def test_very_long_documents(self, tmp_path):
        limit = csv.field_size_limit()
        write_csv(tmp_path / "a.csv", [("word " * 40000, n % 2) for n in range(10)])
        assert len(text_table(tmp_path, file="a.csv", length=3).train) == 7
        assert csv.field_size_limit() == limit

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.csv", "text,label\nx,0\ny\n", r"a\.csv, line 3: nothing in column 'label'"),
            ("a.csv", "text,labels\nx,0\n", r"line 2: no column 'label'.*'text', 'labels'"),
            ("a.csv", "text,label\nx,y,0\n", r"line 2: 3 values, expected 2"),
            ("a.csv", "text,label\nx,\n", r"line 2: column 'label' has '', expected a string or an integer"),
            ("a.csv", 'text,label\n"x" y,0\n', r"a\.csv, line 2: "),
            ("a.csv", "text,label\nx,0\ny,0\n", r"labels of 1 classes: expected at least 2"),
            ("a.csv", "", r"labels of 0 classes"),
            ("a.csv", b"text,label\n\xe9,0\n", r"a\.csv has bytes that are not UTF-8"),
            ("a.jsonl", '{"text": "x", "label": 0}\n{"text": \n', r"a\.jsonl, line 2: not JSON at character"),
            ("a.jsonl", '\n["x", 0]\n', r"line 2: .*expected an object"),
            ("a.jsonl", '{"text": 3, "label": 0}\n', r"line 1: column 'text' has 3, expected a string"),
            ("a.jsonl", '{"text": "x", "label": 0.5}\n', r"line 1: column 'label' has 0\.5, expected"),
            ("a.jsonl", '{"text": "x", "label": true}\n', r"line 1: column 'label' has True, expected"),
            ("a.jsonl", '{"text": "x"}\n', r"line 1: no column 'label'"),
            ("a.xlsx", "", r"ends in '\.xlsx': expected one of '\.csv', '\.tsv', '\.jsonl'"),
        ],
    )
    def test_malformed(self, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=message):
            text_table(tmp_path, file=name)

    def test_missing(self, tmp_path):
        with pytest.raises(MissingDataError, match=r"a\.csv is missing: .* the columns 'text' and 'label'"):
            text_table(tmp_path, file="a.csv")

    def test_class_that_training_does_not_have(self, tmp_path):
        write_csv(tmp_path / "a.csv", ROWS)
        write_csv(tmp_path / "b.csv", [("x", "good"), ("x", "ugly")])
        with pytest.raises(
            ValueError, match=r"b\.csv, line 3: column 'label' has 'ugly', which a\.csv does not"
        ):
            text_table(tmp_path, file="a.csv", test_file="b.csv")

    def test_empty_part(self, tmp_path):
        write_csv(tmp_path / "a.csv", ROWS)
        write_csv(tmp_path / "b.csv", [])
        with pytest.raises(ValueError, match=r"b\.csv has no rows"):
            text_table(tmp_path, file="a.csv", test_file="b.csv")

    def test_nothing_left(self, tmp_path):
        write_csv(tmp_path / "a.csv", ROWS)
        with pytest.raises(ValueError, match="cannot draw 10 and 10 of 20 documents"):
            text_table(tmp_path, file="a.csv", validation=0.5, test=0.5)


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
        data = huggingface(tmp_path, path="news", test_split="")
        assert data.class_names == ("a", "b")
        assert [len(data.train), len(data.validation), len(data.test)] == [7, 1, 2]

    def test_errors(self, library, tmp_path):
        with pytest.raises(MissingDataError, match="elsewhere is missing"):
            huggingface(tmp_path, path="elsewhere")
        with pytest.raises(ValueError, match="has no part 'dev': expected one of 'train', 'test'"):
            huggingface(tmp_path, path="news", validation_split="dev")
        with pytest.raises(ValueError, match="has no column 'body': expected one of 'text', 'label'"):
            huggingface(tmp_path, path="news", text="body")
        library["test"].columns["label"] = [1, -1]
        with pytest.raises(ValueError, match="part 'test', row 1: column 'label' has -1, expected one of"):
            huggingface(tmp_path, path="news")
        library["test"].columns["text"] = [None, "b"]
        with pytest.raises(ValueError, match="part 'test', row 0: column 'text' has None, expected a string"):
            huggingface(tmp_path, path="news")

    def test_not_installed(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ImportError, match="pip install datasets"):
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
        monkeypatch.setattr(module, "_AT_ONCE", 3)
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
        with pytest.raises(ImportError, match="pip install transformers"):
            newsgroups(write_messages(tmp_path), tokenizer="tiny")
