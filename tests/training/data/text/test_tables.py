"""CSV, TSV and JSON Lines files."""

import csv

import pytest
import torch

from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.text import text_table

from .writing import ROWS, write_csv, write_jsonl


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
        with pytest.warns(UserWarning, match=r"no (validation|test) element of 1 of 2 classes") as told:
            data = text_table(tmp_path, file="a.csv", validation_file="b.jsonl", test_file="c.csv")
        assert len(told) == 2
        assert [len(data.train), len(data.validation), len(data.test)] == [20, 3, 8]
        assert data.validation.targets.tolist() == [1, 1, 1]
        assert data.test.targets.tolist() == [0] * 8

    def test_one_part_drawn(self, tmp_path):
        write_csv(tmp_path / "a.csv", ROWS)
        write_csv(tmp_path / "c.csv", ROWS[9:14])
        data = text_table(tmp_path, file="a.csv", test_file="c.csv", validation=0.3)
        assert [len(data.train), len(data.validation), len(data.test)] == [14, 6, 5]

    @pytest.mark.parametrize("write", [write_csv, write_jsonl])
    def test_integers_are_ordered_by_value(self, tmp_path, write):
        name = "a.csv" if write is write_csv else "a.jsonl"
        write(tmp_path / name, [("text", label) for label in (10, 2, 9, 2, 9, 10, 10, 2, 9, 10)])
        data = text_table(tmp_path, file=name, validation=0.3, test=0.3)
        assert data.class_names == ("2", "9", "10")

    def test_other_columns_and_byte_order_mark(self, tmp_path):
        content = "\ufeffid,body,class\n" + "".join(f"{n},word {n},{n % 2}\n" for n in range(10))
        (tmp_path / "a.csv").write_text(content, "utf-8")
        data = text_table(tmp_path, file="a.csv", text="body", label="class", validation=0.2)
        assert data.class_names == ("0", "1")

    def test_very_long_documents(self, tmp_path):
        limit = csv.field_size_limit()
        write_csv(tmp_path / "a.csv", [("word " * 40000, n % 2) for n in range(10)])
        assert len(text_table(tmp_path, file="a.csv", length=3, validation=0.2).train) == 6
        assert csv.field_size_limit() == limit

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.csv", "text,label\nx,0\ny\n", r"a\.csv, line 3: nothing in column 'label'"),
            ("a.csv", "text,labels\nx,0\n", r"line 2: no column 'label'.*'text', 'labels'"),
            ("a.csv", "text,label\nx,y,0\n", r"line 2: 3 values, expected 2"),
            ("a.csv", "text,label\nx,\n", r"line 2: column 'label' has '', expected a string or an integer"),
            (
                "a.csv",
                'text,label\n"x" y,0\n',
                r"a\.csv, line 2: a value in quotation marks goes on after them: expected ','",
            ),
            ("a.csv", 'text,label\n"x y,0\n', r"a\.csv, line \d: a quotation mark is not closed"),
            ("a.csv", "text,label\nx,0\ny,0\n", r"labels of 1 class: expected at least 2"),
            ("a.csv", "", r"labels of 0 classes"),
            ("a.csv", b"text,label\n\xe9,0\n", r"a\.csv has bytes that are not UTF-8"),
            ("a.jsonl", '{"text": "x", "label": 0}\n{"text": \n', r"a\.jsonl, line 2: not JSON at character"),
            ("a.jsonl", '\n["x", 0]\n', r"line 2: .*expected an object"),
            ("a.jsonl", '{"text": 3, "label": 0}\n', r"line 1: column 'text' has 3, expected a string"),
            ("a.jsonl", '{"text": "x", "label": 0.5}\n', r"line 1: column 'label' has 0\.5, expected"),
            (
                "a.jsonl",
                '{"text": "x", "label": [1.5]}\n',
                r"line 1: column 'label' has \[1.5\], expected a list of labels",
            ),
            ("a.jsonl", '{"text": "x"}\n', r"line 1: no column 'label'"),
            (
                "a.jsonl",
                '{"text": "x", "label": 0}\n{"text": "y"}\n',
                r"a\.jsonl, line 2: nothing in column 'label', expected a value; leave out rows without one",
            ),
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

    def test_no_training_file(self, tmp_path):
        write_csv(tmp_path / "a.csv", ROWS)
        with pytest.raises(ValueError, match=r"is a folder: expected one of '\.csv'"):
            text_table(tmp_path, file="", test_file="a.csv")

    def test_class_that_training_does_not_have(self, tmp_path):
        write_csv(tmp_path / "a.csv", ROWS)
        write_csv(tmp_path / "b.csv", [("x", "good"), ("x", "ugly")])
        with pytest.raises(
            ValueError, match=r"b\.csv, line 3: label 'ugly', expected one of the labels of a\.csv"
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
