"""The recipe that is chosen for data of one's own."""

import json
import random

import numpy as np
import pytest

from calibrant.training.data import load_data
from calibrant.training.loop import train
from calibrant.training.own_data import LOSS, choose_recipe
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import result_of
from tests.training.data.test_on_disk import write_folders, write_image
from tests.training.data.test_table import people, varied, write, write_csv, write_parquet

SENTENCES = [
    {"words": f"the {'good' if n % 2 else 'bad'} film, number {n}", "label": n % 2} for n in range(30)
]


def chosen(path, target=None):
    """The recipe, after a look at whether it can be followed and written."""
    recipe = choose_recipe(path, target)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert recipe.loss == LOSS
    data = load_data(recipe.data)
    assert min(len(data.train), len(data.validation), len(data.test)) > 0
    model = dict(recipe.model.options)
    assert recipe.model.name != "mlp" or model or "features" in data.about
    return recipe


@pytest.mark.parametrize("name", ["people.csv", "people.tsv", "people.parquet"])
def test_a_table(tmp_path, name):
    rows = [{"name": f"N. N. {row['id']}", **row} for row in people()]
    (write_parquet if name.endswith("parquet") else write_csv)(
        tmp_path / name, rows, *(["\t"] if name.endswith("tsv") else [])
    )
    recipe = chosen(tmp_path / name)
    assert (recipe.name, recipe.data.name, recipe.model.name) == ("people", "table", "mlp")
    assert recipe.data.options == {
        "file": str(tmp_path / name),
        "target": "label",
        "drop": ("name", "id"),
        "validation": 0.2,
        "test": 0.2,
    }
    assert recipe.description == (
        "a table of 60 rows, target 'label' (by its name), 3 numeric and 1 categorical columns, without "
        "'name', 'id': data set table, network mlp"
    )
    other = chosen(tmp_path / name, "rooms")
    assert other.data.options["target"] == "rooms"
    assert "(by its name)" not in other.description


@pytest.mark.parametrize(("column", "found"), [("Target", True), (" CLASS ", True), ("classes", False)])
def test_the_name_of_a_target(tmp_path, column, found):
    path = write_csv(tmp_path / "a.csv", [{"x": n * n, column: "ab"[n % 2]} for n in range(30)])
    if found:
        assert chosen(path).data.options["target"] == column
    else:
        with pytest.raises(ValueError, match=r"has the columns 'x', 'classes': name .* by --target COLUMN"):
            choose_recipe(path)


@pytest.mark.parametrize("names", [("label", "Label"), ("label", "target"), ("Class", "label ")])
def test_several_columns_may_be_the_target(tmp_path, names):
    path = write_csv(tmp_path / "a.csv", [{"x": n * n, **dict.fromkeys(names, n % 2)} for n in range(30)])
    listed = ", ".join(map(repr, names))
    with pytest.raises(ValueError, match=rf"a\.csv has the columns {listed}: name the one .* by --target"):
        choose_recipe(path)
    assert chosen(path, names[1]).data.options["target"] == names[1]


def test_texts(tmp_path):
    tab = write_csv(tmp_path / "a.tsv", SENTENCES, "\t")
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in SENTENCES))
    for path in (tab, lines):
        recipe = chosen(path)
        assert (recipe.data.name, recipe.model.name) == ("text-table", "text-bag")
        assert recipe.data.options["text"] == "words"
        assert recipe.data.options["label"] == "label"
        assert recipe.data.options["length"] == 32
        assert "texts in column 'words', 30 rows, target 'label' (by its name)" in recipe.description
    numbered = write_csv(tmp_path / "b.tsv", [{"id": n, **row} for n, row in enumerate(SENTENCES)], "\t")
    assert chosen(numbered).data.name == "text-table"


def test_a_few_hundred_texts_are_learned(tmp_path):
    """One word of a text tells its class, the others are drawn at random."""
    draw = random.Random(0)

    def text(label: int) -> str:
        words = [f"word{draw.randrange(300)}" for _ in range(12)]
        words[draw.randrange(12)] = ("yes", "no", "perhaps")[label]
        return " ".join(words)

    path = write_csv(tmp_path / "a.csv", [{"words": text(n % 3), "label": n % 3} for n in range(300)])
    result = result_of(train(choose_recipe(path), tmp_path / "run"))
    assert result["history"][result["epoch"] - 1]["validation_accuracy"] > 0.8


def test_texts_in_a_table_with_semicolons(tmp_path):
    path = write_csv(tmp_path / "a.csv", SENTENCES, ";")
    recipe = chosen(path)
    assert recipe.data.name == "text-table"
    raw, _ = load_data(recipe.data).preparation.read(path)
    assert raw == [row["words"] for row in SENTENCES]


def test_a_column_of_short_texts_is_a_category(tmp_path):
    path = write_csv(
        tmp_path / "a.csv", [{"colour": "red" if n % 3 else "dark blue", "y": n % 2} for n in range(60)]
    )
    assert chosen(path, "y").data.name == "table"


def test_tables_in_parts(tmp_path):
    write_csv(tmp_path / "train.csv", people(60))
    write_csv(tmp_path / "val.csv", people(20, seed=1))
    write_csv(tmp_path / "test.csv", people(30, seed=2))
    recipe = chosen(tmp_path)
    assert recipe.name == tmp_path.name
    data = load_data(recipe.data)
    assert [len(data.train), len(data.validation), len(data.test)] == [60, 20, 30]
    (tmp_path / "val.csv").unlink()
    assert len(load_data(chosen(tmp_path).data).validation) == 12


def test_the_description_is_for_the_changed_recipe(tmp_path):
    write_folders(tmp_path / "insects")
    changed = choose_recipe(tmp_path / "insects", None, ["data.image_size=16", "model=mlp"])
    assert changed.description == (
        "20 images of 2 classes, scaled to 16 × 16 pixels: data set image-folder, network mlp"
    )
    assert choose_recipe(tmp_path / "insects", None, ["description=mine"]).description == "mine"


@pytest.mark.parametrize("top", ["", "train"])
def test_images(tmp_path, top):
    write_folders(tmp_path / "insects", parts=(top,))
    recipe = chosen(tmp_path / "insects")
    assert (recipe.name, recipe.data.name, recipe.model.name) == ("insects", "image-folder", "cnn")
    assert recipe.data.options["image_size"] == 32
    assert "20 images of 2 classes, scaled to 32 × 32 pixels" in recipe.description


def test_large_images_are_scaled_less(tmp_path):
    for name in ("ant", "bee"):
        for number in range(10):
            write_image(tmp_path / name / f"{number}.png", size=(90, 70))
    assert chosen(tmp_path).data.options["image_size"] == 64


@pytest.mark.parametrize(
    ("inputs", "network"),
    [
        (np.zeros((40, 5), np.float32), "mlp"),
        (np.zeros((40, 5, 3), np.float32), "mlp[features=15]"),
        (np.zeros((40, 8, 8), np.uint8), "cnn"),
        (np.zeros((40, 3, 8, 8), np.float32), "cnn"),
    ],
)
def test_arrays(tmp_path, inputs, network):
    np.savez(tmp_path / "a.npz", inputs=inputs, labels=np.arange(40) % 4)
    recipe = chosen(tmp_path / "a.npz")
    assert str(recipe.model) == network
    assert recipe.data.name == "npz"


def test_more_data_get_larger_batches_and_fewer_epochs(tmp_path):
    lengths = []
    for count in (200, 5_000, 20_000, 60_000):
        np.savez(tmp_path / "a.npz", features=np.zeros((count, 1)), labels=np.arange(count) % 2)
        recipe = choose_recipe(tmp_path / "a.npz")
        lengths.append((recipe.batch_size, recipe.epochs))
    assert lengths == [(32, 50), (64, 40), (128, 30), (256, 20)]


def test_many_images_get_a_residual_network(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.training.own_data._MANY_IMAGES", 10)
    np.savez(tmp_path / "a.npz", images=np.zeros((40, 8, 8), np.uint8), labels=np.arange(40) % 4)
    assert chosen(tmp_path / "a.npz").model.name == "cifar-resnet-32"
    write_folders(tmp_path / "images")
    assert chosen(tmp_path / "images").model.name == "cifar-resnet-32"


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "content", "target", "message"),
    [
        ("a.csv", "", None, "has no rows"),
        ("a.csv", "a,label\n", None, "has no rows"),
        ("a.csv", "a,b\n1,2\n", "c", "has no column 'c'; its columns are 'a', 'b'"),
        ("a.csv", b"a,label\n\xe9,1\n", None, "bytes that are not UTF-8"),
        ("a.csv", "a,a,label\n1,2,3\n", None, "has the column 'a' twice"),
        ("a.csv", "label\n1\n2\n", None, "the table has no column besides the target 'label'$"),
        ("a.jsonl", '{"label": 1}\n', None, "the table has no column besides the target 'label'$"),
        ("a.jsonl", "", None, "has no rows"),
        ("a.jsonl", b'{"text": "\xe9"}', None, "bytes that are not UTF-8"),
        (
            "a.jsonl",
            '{"x": 1, "y": 2, "label": 0}\n',
            None,
            "the columns 'x', 'y' besides 'label', expected one",
        ),
        ("a.npz", b"", None, "cannot be read as a NumPy archive"),
        ("a.npz", b"", "label", "--target names a column of a table, but .* expected .csv, .tsv, .parquet"),
        (
            "a.xlsx",
            b"",
            None,
            r"of no known kind: expected a folder .* \.csv, \.tsv, \.parquet, \.jsonl table",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, target, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        choose_recipe(tmp_path / name, target)


@pytest.mark.parametrize("content", [b"", b"no image", "half"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_an_image_without_a_header_is_named_before_training(tmp_path, part, content):
    write_folders(tmp_path, parts=("train", "test"))
    damaged = tmp_path / part / "bee" / "7.png"
    damaged.write_bytes(damaged.read_bytes()[:20] if content == "half" else content)
    with pytest.raises(ValueError, match=rf"{part}/bee/7\.png cannot be read as an image: (?!.* at 0x)"):
        choose_recipe(tmp_path)


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "a.npz", "images"])
def test_too_little_data(tmp_path, name):
    path, rows = tmp_path / name, SENTENCES[:3]
    if name == "images":
        write_folders(path, per_class=3)
    elif name == "a.npz":
        np.savez(path, features=np.zeros((3, 2)), labels=[0, 1, 0])
    elif name == "a.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        write_csv(path, rows, "\t")
    what = {"a.npz": "elements", "images": "images"}.get(name, "rows")
    few = (
        rf"has too few {what} for 2 classes: 1 for validation or test, expected 4 or more each. .* 20 {what} "
    )
    with pytest.raises(ValueError, match=few):
        choose_recipe(path)


def test_texts_of_json_lines_may_be_short(tmp_path):
    rows = [{"text": ("bad", "good")[n % 2], "label": n % 2} for n in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert chosen(path).data.name == "text-table"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with pytest.raises(ValueError, match="has too few rows"):
        choose_recipe(path)


def test_few_rows_are_enough_if_the_parts_have_files(tmp_path):
    for seed, part in enumerate(("train", "validation", "test")):
        write_csv(tmp_path / f"{part}.csv", people(15, seed))
    assert chosen(tmp_path).data.name == "table"


@pytest.mark.parametrize(
    ("name", "values", "classes"),
    [
        ("a.csv", ("True", "False"), ("False", "True")),
        ("a.csv", ("0", "1"), ("0", "1")),
        ("a.csv", ("yes", "no"), ("no", "yes")),
        ("a.parquet", (True, False), ("False", "True")),
        ("a.parquet", (0, 1), ("0", "1")),
        ("a.jsonl", (True, False), ("false", "true")),
        ("a.npz", (True, False), ("0", "1")),
    ],
)
def test_two_classes_may_be_true_and_false(tmp_path, name, values, classes):
    path, labels = tmp_path / name, [values[n % 2] for n in range(40)]
    if name == "a.npz":
        np.savez(path, features=np.eye(40), labels=labels)
    elif name == "a.jsonl":
        rows = [{"text": f"a text of {n * n} words", "label": label} for n, label in enumerate(labels)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        write(path, [{"x": n * n, "label": label} for n, label in enumerate(labels)])
    data = load_data(chosen(path).data)
    assert data.class_names == classes
    assert sum(data.class_counts) == 24


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (lambda n: "unknown" if n == 7 else n, "119 of them look like numbers, .* such as 'unknown' are"),
        (lambda n: f"{n + 1},000.5", "they look like numbers with commas: .* 1234 for 1,234"),
        (
            lambda n: f"{n + 1},553.92" if n else "9.5",
            "they look like numbers with commas: .* 1234 for 1,234",
        ),
        (lambda n: f"{n + 1} %", "120 of them look like numbers, .* such as '1 %' are"),
        (lambda n: f"{n % 28 + 1}.{n % 12 + 1}.2024 {n % 24}:00", "they look like dates: make numbers"),
        (lambda n: f"{n},5", "they look like numbers with commas: write 1.5"),
    ],
)
def test_a_column_of_numbers_or_dates_that_is_left_out_is_told(tmp_path, cell, problem):
    cells = [cell(number) for number in range(120)]
    rows = "".join(f'"{cells[number]}",{number % 5 / 2},{number % 2}\n' for number in range(120))
    (tmp_path / "a.csv").write_text(f"amount,size,label\n{rows}")
    message = f"column 'amount' is left out, because it has too many different texts; {problem}"
    with pytest.warns(UserWarning, match=message):
        recipe = choose_recipe(tmp_path / "a.csv")
    assert recipe.data.options["drop"] == ("amount",)


def test_a_table_of_nothing_but_names(tmp_path):
    path = write_csv(tmp_path / "a.csv", varied(x=lambda n: f"N{n}", z=lambda n: f"M{n}"))
    with pytest.raises(ValueError, match=r"no column of numbers or categories besides 'y'.* 'x', 'z' have"):
        choose_recipe(path, "y")


def test_texts_in_parquet(tmp_path):
    write(tmp_path / "a.parquet", SENTENCES)
    with pytest.raises(ValueError, match=r"is a table of texts: expected it as \.csv, \.tsv or \.jsonl"):
        choose_recipe(tmp_path / "a.parquet")


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*nowhere"):
        choose_recipe(tmp_path / "nowhere")
    folder = tmp_path / "images"
    folder.mkdir()
    with pytest.raises(ValueError, match="images is of no known kind: expected a folder with a folder of im"):
        choose_recipe(folder)
    (folder / "people.csv").write_text("age,y\n1,2\n")
    with pytest.raises(ValueError, match=r"for a single table pass the file, such as .*people\.csv"):
        choose_recipe(folder)
    (folder / "ant").mkdir()
    with pytest.raises(ValueError, match=r"images has no images in its class folders.*such as .*people\.csv"):
        choose_recipe(folder)
    (folder / "people.csv").unlink()
    write_folders(folder, parts=("",), classes=("ant",))
    with pytest.raises(ValueError, match="has images of 1 class, expected a folder for each of 2 or more"):
        choose_recipe(folder)
    (folder / "bee").mkdir()
    with pytest.raises(ValueError, match="bee has no images, expected some in the folder of each class"):
        choose_recipe(folder)
