from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calibrant.training.data.augmentation import NORMALISATIONS
from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.sampling import random_numbers
from calibrant.training.data.segmentation import SegmentationSplit, Window, camvid, voc2012

VOID = 255


def write_pair(image: Path, labels: Path, height=20, width=30, void=VOID, seed=0) -> None:
    """A picture whose red channel is ten times the label, so that the two can be compared."""
    generator = np.random.default_rng(seed)
    classes = generator.integers(0, 11, (height // 5, width // 5)).repeat(5, 0).repeat(5, 1).astype(np.uint8)
    pixels = np.stack([classes * 10, classes * 0 + 100, classes * 0 + 100], -1)
    classes[0, 0] = void
    Image.fromarray(pixels).save(image, quality=100, subsampling=0)
    palette = Image.fromarray(classes).convert("P")
    palette.putdata(classes.flatten().tolist())
    palette.putpalette([value for level in range(256) for value in (255 - level, level, 0)])
    palette.save(labels)


def write_voc(root: Path, train=10, val=4) -> Path:
    folder = root / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for part, count in (("train", train), ("val", val)):
        names = [f"2007_{part}{number}" for number in range(count)]
        for number, name in enumerate(names):
            image, labels = (
                folder / "JPEGImages" / f"{name}.jpg",
                folder / "SegmentationClass" / f"{name}.png",
            )
            write_pair(image, labels, seed=number)
        (folder / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("\n".join(names) + "\n")
    return root


def write_camvid(root: Path) -> Path:
    for part, count in (("train", 3), ("val", 2), ("test", 2)):
        for folder in (part, f"{part}annot"):
            (root / "CamVid" / folder).mkdir(parents=True)
        for number in range(count):
            name = f"{number}.png"
            write_pair(
                root / "CamVid" / part / name, root / "CamVid" / f"{part}annot" / name, void=11, seed=number
            )
    return root


def red(images: torch.Tensor) -> torch.Tensor:
    normalisation = NORMALISATIONS["imagenet"]
    return (images[:, 0] * normalisation.std[0] + normalisation.mean[0]) * 255


class TestVoc:
    def test_parts(self, tmp_path):
        data = voc2012(write_voc(tmp_path), crop=32)
        assert [len(data.train), len(data.validation), len(data.test)] == [8, 2, 4]
        assert data.num_classes == 21
        assert data.ignore_index == VOID
        assert data.about == {"channels": 3, "image_size": 32}
        assert data.class_counts is None
        train, validation = set(data.train.files), set(data.validation.files)
        assert len(train | validation) == 10
        assert all("train" in file.name for file, _ in train | validation)
        assert all("val" in file.name for file, _ in data.test.files)

    def test_sizes_of_the_papers(self, tmp_path):
        folder = write_voc(tmp_path, train=0, val=1) / "VOCdevkit" / "VOC2012"
        names = [str(number) for number in range(1464)]
        for name in names:
            (folder / "JPEGImages" / f"{name}.jpg").touch()
            (folder / "SegmentationClass" / f"{name}.png").touch()
        (folder / "ImageSets" / "Segmentation" / "train.txt").write_text("\n".join(names))
        data = voc2012(tmp_path)
        assert [len(data.train), len(data.validation)] == [1171, 293]

    def test_seed(self, tmp_path):
        write_voc(tmp_path)
        files = [voc2012(tmp_path, split_seed=seed).validation.files for seed in (0, 0, 1, 2)]
        assert files[0] == files[1]
        assert len(set(files)) > 1

    def test_evaluation_gives_the_whole_image_and_pads_with_void(self, tmp_path):
        data = voc2012(write_voc(tmp_path), crop=32)
        images, labels = data.test.batch(torch.tensor([2, 0]))
        assert images.shape == (2, 3, 32, 32)
        assert images.dtype == torch.float32
        assert images.is_contiguous()
        assert labels.shape == (2, 32, 32)
        assert labels.dtype == torch.int64
        assert labels[:, 20:].eq(VOID).all()
        assert labels[:, :, 30:].eq(VOID).all()
        assert labels[:, 0, 0].eq(VOID).all()
        assert images[:, :, 20:].abs().max() < 0.02
        _, original = data.test.decoded(2)
        assert torch.equal(labels[0, :20, :30], torch.tensor(original).long())
        inside = labels != VOID
        assert inside.sum() == 2 * (20 * 30 - 1)
        assert (red(images)[inside] - 10 * labels[inside]).abs().max() < 5

    def test_evaluation_makes_large_images_smaller(self, tmp_path):
        _, labels = voc2012(write_voc(tmp_path), crop=15).test.batch(torch.tensor([0]))
        assert labels.shape == (1, 15, 15)
        assert labels[:, 10:].eq(VOID).all()
        assert labels[:, 1:10].ne(VOID).all()

    def test_augmentation_keeps_image_and_labels_together(self, tmp_path):
        data = voc2012(write_voc(tmp_path), crop=32)
        indices = torch.arange(8)
        for epoch in range(5):
            images, labels = data.train.batch(indices, random_numbers(0, epoch, indices))
            inside = labels != VOID
            assert inside.flatten(1).any(1).all()
            # Within five times five blocks of one class the red channel is the label also after scaling.
            difference = (red(images) - 10 * labels).abs()[inside]
            assert difference.median() < 2
            assert (difference < 30).float().mean() > 0.85

    def test_augmentation_is_a_function_of_the_draws(self, tmp_path):
        data = voc2012(write_voc(tmp_path), crop=32)
        indices = torch.arange(4)
        draws = random_numbers(0, 0, indices)
        images, labels = data.train.batch(indices, draws)
        again, labels_again = data.train.batch(indices.flip(0), draws.flip(0))
        assert torch.equal(images, again.flip(0))
        assert torch.equal(labels, labels_again.flip(0))
        other, _ = data.train.batch(indices, random_numbers(0, 1, indices))
        assert not torch.equal(images, other)
        plain = voc2012(tmp_path, crop=32, augmentation=False).train
        assert torch.equal(plain.batch(indices, draws)[0], plain.batch(indices)[0])

    def test_subset(self, tmp_path):
        data = voc2012(write_voc(tmp_path), crop=32)
        part = data.train.subset(torch.tensor([5, 1]))
        assert len(part) == 2
        assert part.targets is None
        assert torch.equal(part.batch(torch.tensor([0]))[0], data.train.batch(torch.tensor([5]))[0])

    def test_reads_nothing_before_it_is_needed(self, tmp_path, monkeypatch):
        write_voc(tmp_path)
        monkeypatch.setattr(Image, "open", None)
        assert len(voc2012(tmp_path).test) == 4

    @pytest.mark.parametrize(
        "gone",
        [
            "ImageSets/Segmentation/val.txt",
            "JPEGImages/2007_train3.jpg",
            "SegmentationClass/2007_val1.png",
        ],
    )
    def test_missing(self, tmp_path, gone):
        (write_voc(tmp_path) / "VOCdevkit" / "VOC2012" / gone).unlink()
        with pytest.raises(
            MissingDataError, match=f"{gone} is missing: download VOCtrainval_11-May-2012.tar"
        ):
            voc2012(tmp_path)

    def test_options_refused(self, tmp_path):
        write_voc(tmp_path)
        with pytest.raises(ValueError, match="validation must lie in"):
            voc2012(tmp_path, validation=0.0)
        with pytest.raises(ValueError, match="expected some for each"):
            voc2012(tmp_path, validation=1.0)
        with pytest.raises(ValueError, match="crop must be a whole number"):
            voc2012(tmp_path, crop=0)
        with pytest.raises(ValueError, match=r"scales must be a pair \(low, high\)"):
            voc2012(tmp_path, scales=(2.0, 0.5))


class TestCamvid:
    def test_parts(self, tmp_path):
        data = camvid(write_camvid(tmp_path), crop=32)
        assert [len(data.train), len(data.validation), len(data.test)] == [3, 2, 2]
        assert data.num_classes == data.ignore_index == 11
        _, labels = data.validation.batch(torch.arange(2))
        assert labels[:, 20:].eq(11).all()

    def test_missing(self, tmp_path):
        with pytest.raises(MissingDataError, match="CamVid/train is missing: download CamVid"):
            camvid(tmp_path)
        (write_camvid(tmp_path) / "CamVid" / "valannot" / "1.png").unlink()
        with pytest.raises(MissingDataError, match=r"valannot/1\.png is missing"):
            camvid(tmp_path)

    def test_empty(self, tmp_path):
        (tmp_path / "CamVid" / "train").mkdir(parents=True)
        with pytest.raises(ValueError, match=r"has no images: expected files that end in '\.png'"):
            camvid(tmp_path)


class TestMalformed:
    @pytest.fixture
    def split(self, tmp_path) -> SegmentationSplit:
        image, labels = tmp_path / "image.png", tmp_path / "labels.png"
        write_pair(image, labels)
        return SegmentationSplit(((image, labels),), num_classes=21, void=VOID, crop=32)

    def test_label_of_no_class(self, split):
        Image.fromarray(np.full((20, 30), 21, np.uint8)).save(split.files[0][1])
        with pytest.raises(ValueError, match=r"labels\.png has the label 21, expected 0 to 20, and 255"):
            split.batch(torch.tensor([0]))

    def test_coloured_labels(self, split):
        Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(split.files[0][1])
        with pytest.raises(ValueError, match=r"labels\.png has 3 channels, expected one"):
            split.batch(torch.tensor([0]))

    def test_other_size(self, split):
        Image.fromarray(np.zeros((20, 31), np.uint8)).save(split.files[0][1])
        with pytest.raises(ValueError, match="20 rows and 31 columns, expected the 20 and 30 of"):
            split.batch(torch.tensor([0]))

    @pytest.mark.parametrize("which", [0, 1])
    @pytest.mark.parametrize("content", [b"", b"nothing", "half"])
    def test_damaged(self, split, which, content):
        file = split.files[0][which]
        file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2] if content == "half" else content)
        with pytest.raises(ValueError, match=f"{file.name} cannot be read as an image"):
            split.batch(torch.tensor([0]))

    def test_grey_images_become_coloured(self, split):
        Image.fromarray(np.full((20, 30), 50, np.uint8)).save(split.files[0][0])
        images, _ = split.batch(torch.tensor([0]))
        assert images.shape == (1, 3, 32, 32)


class TestWindow:
    @pytest.mark.parametrize("size", [(20, 30), (3, 200), (64, 64), (200, 3)])
    def test_is_never_empty(self, size):
        for draws in torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 0.9999999])] * 4).tolist():
            window = Window.drawn(*size, 64, (0.5, 2.0), draws)
            canvas = np.full((64, 64), VOID, np.uint8)
            window.cut(np.ones(size, np.uint8), canvas, Image.Resampling.NEAREST)
            assert (canvas == 1).sum() == min(window.height, 64) * min(window.width, 64)

    def test_places(self):
        pixels = np.arange(16, dtype=np.uint8).reshape(4, 4)
        canvas = np.zeros((2, 2), np.uint8)
        Window(4, 4, 1, 2).cut(pixels, canvas, Image.Resampling.NEAREST)
        assert canvas.tolist() == [[6, 7], [10, 11]]
        Window(4, 4, 1, 2, mirrored=True).cut(pixels, canvas, Image.Resampling.NEAREST)
        assert canvas.tolist() == [[7, 6], [11, 10]]
        canvas = np.full((3, 3), VOID, np.uint8)
        Window(2, 2, -1, 0).cut(pixels[:2, :2], canvas, Image.Resampling.NEAREST)
        assert canvas.tolist() == [[255, 255, 255], [0, 1, 255], [4, 5, 255]]
