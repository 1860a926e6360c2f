"""Images on disk in the layouts that data sets are published in."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from calibrant.training.data.on_disk import image_folder, imagenet, imagenet_lt, tiny_imagenet
from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.sampling import random_numbers

WNIDS = ("n02", "n01", "n03")


def write_image(path, seed=0, size=(40, 30), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixel = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixel).convert(mode).save(path)


def write_tiny_imagenet(root, per_class=6):
    folder = root / "tiny-imagenet-200"
    annotations = []
    for place, wnid in enumerate(WNIDS):
        for number in range(per_class):
            path = folder / f"train/{wnid}/images/{wnid}_{number}.JPEG"
            write_image(path, number, (64, 64), "L" if number == 0 else "RGB")
        (folder / f"train/{wnid}/{wnid}_boxes.txt").write_text("")
        write_image(folder / f"val/images/val_{place}.JPEG", place, (64, 64))
        annotations.append(f"val_{place}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (folder / "val/val_annotations.txt").write_text("".join(annotations))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (folder / "words.txt").write_text("n00\tentity\nn01\tcrane, lifter\nn02\tcrane\nn03\tcat, true cat\n")


def write_folders(root, *, per_class=10, parts=("train",), classes=("ant", "bee"), suffix=".png"):
    for part in parts:
        for name in classes:
            for number in range(per_class):
                write_image(root / part / name / f"{number}{suffix}", number)


def write_imagenet(root, per_class=5):
    write_folders(
        root / "imagenet", per_class=per_class, parts=("train", "val"), classes=WNIDS, suffix=".JPEG"
    )


def write_lists(root):
    write_imagenet(root)
    classes = sorted(WNIDS)
    rows = {
        "train": [("train", label, number) for label in range(3) for number in range(3 - label)],
        "val": [("train", label, 4) for label in range(3)],
        "test": [("val", label, number) for label in range(3) for number in range(5)],
    }
    for part, entries in rows.items():
        lines = [f"{top}/{classes[label]}/{number}.JPEG {label}\n" for top, label, number in entries]
        (root / f"imagenet/ImageNet_LT_{part}.txt").write_text("".join(lines))


def sizes(data):
    return [len(data.train), len(data.validation), len(data.test)]


def paths(part):
    return [path.decode() for path in part.paths]


def test_tiny_imagenet(tmp_path):
    write_tiny_imagenet(tmp_path)
    data = tiny_imagenet(tmp_path, validation_per_class=2)
    assert sizes(data) == [12, 6, 3]
    assert data.class_counts == (4, 4, 4)
    assert torch.bincount(data.validation.targets).tolist() == [2, 2, 2]
    assert data.class_names == ("crane (n01)", "crane (n02)", "cat")
    assert data.about == {"channels": 3, "image_size": 64}
    assert data.test.targets.tolist() == [1, 0, 2]
    assert not set(paths(data.train)) & set(paths(data.validation))
    inputs, targets = data.train.batch(torch.arange(12), random_numbers(0, 0, torch.arange(12)))
    assert inputs.shape == (12, 3, 64, 64)
    assert targets.tolist() == sorted(targets.tolist())


def test_tiny_imagenet_can_be_long_tailed_and_plain(tmp_path):
    write_tiny_imagenet(tmp_path)
    data = tiny_imagenet(tmp_path, validation_per_class=2, imbalance=4, augmentation="none")
    assert data.class_counts == (4, 2, 1)
    indices = torch.arange(3)
    draws = random_numbers(0, 0, indices)
    assert torch.equal(data.train.batch(indices, draws)[0], data.train.batch(indices)[0])


def test_tiny_imagenet_that_is_missing_or_malformed(tmp_path):
    with pytest.raises(
        MissingDataError, match=r"wnids\.txt is missing: download .*tiny-imagenet-200\.zip and"
    ):
        tiny_imagenet(tmp_path)
    write_tiny_imagenet(tmp_path)
    (tmp_path / "tiny-imagenet-200/words.txt").unlink()
    assert tiny_imagenet(tmp_path, validation_per_class=2).class_names == ("n01", "n02", "n03")
    (tmp_path / "tiny-imagenet-200/val/val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt, line 1, has class 'n99'"):
        tiny_imagenet(tmp_path, validation_per_class=2)
    with (tmp_path / "tiny-imagenet-200/wnids.txt").open("a") as file:
        file.write("n77\n")
    with pytest.raises(ValueError, match="n77/images is missing, expected a folder for each class"):
        tiny_imagenet(tmp_path)


def test_a_batch_is_its_elements(tmp_path):
    write_folders(tmp_path)
    part = image_folder(tmp_path, image_size=16, colour_jitter=0.4, erasing=0.5).train
    indices = torch.tensor([5, 0, 5])
    draws = random_numbers(0, 3, indices)
    inputs, targets = part.batch(indices, draws)
    for row, index in enumerate(indices):
        single, target = part.batch(index.view(1), draws[row : row + 1])
        assert torch.equal(single[0], inputs[row])
        assert target == targets[row]
    assert torch.equal(part.subset(indices).batch(torch.arange(3), draws)[0], inputs)
    assert part.batch(indices[:0])[0].shape == (0, 3, 16, 16)


def test_what_workers_get_gives_the_same(tmp_path):
    write_folders(tmp_path)
    part = image_folder(tmp_path, image_size=16).train
    copy = pickle.loads(pickle.dumps(part))
    assert torch.equal(copy.batch(torch.arange(3))[0], part.batch(torch.arange(3))[0])


def test_parts_without_a_folder_are_drawn_from_the_training_images(tmp_path):
    write_folders(tmp_path / "insects")
    data = image_folder(tmp_path, folder="insects", image_size=16, validation=0.2, test=0.3)
    assert sizes(data) == [10, 4, 6]
    assert data.class_counts == (5, 5)
    assert torch.bincount(data.test.targets).tolist() == [3, 3]
    assert len({*paths(data.train), *paths(data.validation), *paths(data.test)}) == 20
    assert data.class_names == ("ant", "bee")
    assert data.about == {"channels": 3, "image_size": 16}
    other = image_folder(tmp_path, folder="insects", validation=0.2, test=0.3, split_seed=1)
    assert paths(other.test) != paths(data.test)


@pytest.mark.parametrize("name", ["val", "validation"])
def test_parts_with_a_folder_are_that_folder(tmp_path, name):
    write_folders(tmp_path, parts=("train", name))
    assert sizes(image_folder(tmp_path, test=0.5)) == [10, 20, 10]
    write_folders(tmp_path, parts=("test",), classes=("bee",), per_class=3)
    with pytest.warns(UserWarning, match=r"no test element of 1 of 2 classes \('ant' with 20 in all\)"):
        data = image_folder(tmp_path, imbalance=5)
    assert sizes(data) == [12, 20, 3]
    assert data.class_counts == (10, 2)
    assert data.test.targets.tolist() == [1, 1, 1]


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(MissingDataError, match="train is missing: expected images with one folder for each"):
        image_folder(tmp_path)
    with pytest.raises(MissingDataError, match="gone is missing: expected images with one folder for each"):
        image_folder(tmp_path, folder="gone")
    (tmp_path / "train/.hidden").mkdir(parents=True)
    with pytest.raises(ValueError, match="train has no folders, expected one for each class"):
        image_folder(tmp_path)
    (tmp_path / "train/ant").mkdir()
    (tmp_path / "train/ant/notes.txt").write_text("")
    with pytest.raises(ValueError, match="has no images in its class folders"):
        image_folder(tmp_path)
    write_folders(tmp_path)
    with pytest.raises(ValueError, match="validation and test must add up to at most 1"):
        image_folder(tmp_path, validation=0.6, test=0.6)
    write_folders(tmp_path, parts=("test",), classes=("wasp",))
    with pytest.raises(ValueError, match=r"test has a class 'wasp' that .*train does not have"):
        image_folder(tmp_path)


@pytest.mark.parametrize(
    "option",
    [
        {"augmentation": "flip"},
        {"normalisation": "own"},
        {"image_size": 0},
        {"colour_jitter": -1},
        {"erasing": 2},
    ],
)
def test_options_are_checked(tmp_path, option):
    write_folders(tmp_path)
    with pytest.raises(ValueError, match=f"{next(iter(option))} must"):
        image_folder(tmp_path, **option)


def test_a_damaged_image_is_named_when_it_is_needed(tmp_path):
    write_folders(tmp_path, parts=("train", "test"))
    (tmp_path / "test/ant/0.png").write_bytes(b"no image")
    whole = (tmp_path / "test/ant/1.png").read_bytes()
    (tmp_path / "test/ant/1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "test/ant/2.png").unlink()
    write_image(tmp_path / "test/ant/2.png", mode="L")
    part = image_folder(tmp_path, image_size=16).test
    for index in (0, 1):
        with pytest.raises(ValueError, match=f"test/ant/{index}.png cannot be read as an image") as error:
            part.batch(torch.tensor([index]))
        assert " at 0x" not in str(error.value)
        assert ("it may be damaged or incomplete (" in str(error.value)) == (index == 1)
    assert part.batch(torch.tensor([2]))[0].shape == (1, 3, 16, 16)
    (tmp_path / "test/ant/2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"2\.png"):
        part.batch(torch.tensor([2]))


def test_without_augmentation_the_numbers_are_ignored(tmp_path):
    write_folders(tmp_path, per_class=3)
    part = image_folder(tmp_path, image_size=32, augmentation="none", validation=0, test=0).train
    indices = torch.arange(6)
    assert torch.equal(part.batch(indices)[0], part.batch(indices, random_numbers(0, 0, indices))[0])


def test_crops_with_padding_for_small_images(tmp_path):
    write_folders(tmp_path, per_class=3)
    part = image_folder(tmp_path, image_size=32, augmentation="crop-flip", validation=0, test=0).train
    indices = torch.arange(6)
    plain, moved = part.batch(indices)[0], part.batch(indices, random_numbers(0, 0, indices))[0]
    assert plain.shape == moved.shape == (6, 3, 32, 32)
    assert not torch.equal(plain, moved)


def test_imagenet_divides_the_official_validation_images(tmp_path):
    write_imagenet(tmp_path)
    data = imagenet(tmp_path, image_size=32)
    assert sizes(data) == [15, 3, 12]
    assert torch.bincount(data.validation.targets).tolist() == [1, 1, 1]
    assert torch.bincount(data.test.targets).tolist() == [4, 4, 4]
    assert all(path.startswith("val/") for path in paths(data.test) + paths(data.validation))
    assert data.class_names == ("n01", "n02", "n03")
    assert data.train.batch(torch.arange(2), random_numbers(0, 0, torch.arange(2)))[0].shape == (2, 3, 32, 32)
    (tmp_path / "imagenet/LOC_synset_mapping.txt").write_text("n01 tench, Tinca tinca\nn02 goldfish\n")
    assert imagenet(tmp_path).class_names == ("tench", "goldfish", "n03")
    assert imagenet(tmp_path, imbalance=5).class_counts == (5, 2, 1)


def test_imagenet_that_is_missing(tmp_path):
    with pytest.raises(MissingDataError, match=r"imagenet/train is missing: .*image-net\.org/download"):
        imagenet(tmp_path)
    write_imagenet(tmp_path)
    write_image(tmp_path / "flat/train/n01/0.png")
    write_image(tmp_path / "flat/val/0.png")
    with pytest.raises(ValueError, match="val has no folders, expected one for each class"):
        imagenet(tmp_path, folder="flat")


def test_imagenet_lt_is_what_its_lists_say(tmp_path):
    write_lists(tmp_path)
    data = imagenet_lt(tmp_path, image_size=32)
    assert sizes(data) == [6, 3, 15]
    assert data.class_counts == (3, 2, 1)
    assert data.class_names == ("n01", "n02", "n03")
    inputs, targets = data.test.batch(torch.tensor([14]))
    assert inputs.shape == (1, 3, 32, 32)
    assert targets.tolist() == [2]


def test_imagenet_lt_that_is_missing_or_malformed(tmp_path):
    with pytest.raises(MissingDataError, match=r"ImageNet_LT_train\.txt is missing: .* and put it in"):
        imagenet_lt(tmp_path)
    write_lists(tmp_path)
    path = tmp_path / "imagenet/ImageNet_LT_val.txt"
    path.write_text("train/n01/0.JPEG 0\ntrain/n01/1.JPEG\n")
    with pytest.raises(ValueError, match=r"ImageNet_LT_val\.txt, line 2, is 'train/n01/1\.JPEG', expected"):
        imagenet_lt(tmp_path)
    path.write_text("train/n55/0.JPEG 0\n")
    with pytest.raises(MissingDataError, match=r"n55/0\.JPEG is missing"):
        imagenet_lt(tmp_path)
    path.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        imagenet_lt(tmp_path)
