"""Writes small files in the formats that the data sets of text read."""

import csv
import json
from pathlib import Path

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


def write_csv(file: Path, rows: list[tuple[str, object]], delimiter=",", header=("text", "label")) -> Path:
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows([header, *rows])
    return file


def write_jsonl(file: Path, rows: list[tuple[object, object]]) -> Path:
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return file


ROWS = [(f"a text, of {word}\nin lines", word) for word in ("good", "bad") for _ in range(10)]
