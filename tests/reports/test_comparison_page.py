"""The files of a comparison hold every method's figures, and pictures of whatever a loss learns."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from calibrant.evaluation import evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.reports.comparison_page import _diagrams, _pictures, latex, markdown, write_comparison
from calibrant.reports.plots import drawing
from calibrant.reports.table_builders import data_labels
from tests.programs import draw_blank
from tests.reports.test_page import Page


@cache
def unnamed(seed, scale, resamples):
    target = torch.randint(3, (300,), generator=torch.Generator().manual_seed(7))
    noise = torch.randn(300, 3, generator=torch.Generator().manual_seed(seed))
    logits = scale * (noise + 1.5 * torch.nn.functional.one_hot(target, 3))
    return evaluate(logits, target, resamples=resamples)


def evaluation(seed, scale, name, resamples=100):
    return replace(unnamed(seed, scale, resamples), name=name)


def method(name, scale, seeds, **options):
    return Method(
        name,
        tuple(evaluation(seed, scale, f"{name}, seed {seed}", **options) for seed in range(seeds)),
        tuple(evaluation(seed, 1.2, f"{name} + T, seed {seed}", **options) for seed in range(seeds)),
        tuple(1.5 + seed for seed in range(seeds)),
        {"svhn": tuple(0.9 + seed / 100 for seed in range(seeds))},
    )


CURVE = (0.2, 0.6, 1.0)
CALIBRATOR = "temperature[objective=ece]"


def with_everything(name, scale, seeds):
    """A method with other calibrators, with AUROC after temperature scaling, and with shifted data."""
    plain = method(name, scale, seeds)
    figures = {"": 0.1, "temperature": 0.05, CALIBRATOR: 0.04}

    def at(level):
        return {
            state: tuple({"accuracy": 0.9 - level / 10, "ece": ece + level / 20} for _ in range(seeds))
            for state, ece in figures.items()
        }

    return replace(
        plain,
        detection_after={"svhn": (0.5,) * seeds},
        detection_chosen={CALIBRATOR: {"svhn": (0.4,) * seeds}},
        curves={"svhn": {"": CURVE, "temperature": CURVE, CALIBRATOR: CURVE}},
        calibrated={CALIBRATOR: plain.after},
        chosen={CALIBRATOR: (1.1,) * seeds},
        shifted={
            "fog[x=1]": {str(level): at(level) for level in range(6)},
            "other": {"0": at(0), "shifted": at(2)},
        },
    )


@pytest.fixture(scope="module")
def full():
    methods = (with_everything("ce", 1.2, 2), with_everything("sharp", 12.0, 2))
    return Comparison("toy", (0, 1), methods, columns=("accuracy", "sweep_ece"))


def test_calibrators_columns_and_detection_are_in_the_table(full):
    text = markdown(full)
    heading = text.splitlines()[2]
    assert heading == (
        "| loss | Accuracy | Sweep ECE | Sweep ECE + T | Sweep ECE + temperature[objective=ece] | T "
        "| T, temperature[objective=ece] | AUROC, svhn | AUROC + T, svhn "
        "| AUROC + temperature[objective=ece], svhn |"
    )
    assert "All figures but T are in percent" in text
    assert ": after this calibrator, fitted to the validation data" in text
    first, *_ = rows(text, "ce")
    assert first[6:] == ["1.100 ± 0.000", "90.50 ± 0.71", "50.00 ± 0.00", "40.00 ± 0.00"]  # as in all rows


def test_other_data_have_short_labels():
    folder = "image-folder[folder=/long/path/to/ood,image_size=32]"
    same = ("npz[file=a/x.npz]", "npz[file=b/x.npz]")
    names = (folder, "image-folder[folder=/v1.5/]", *same, "cifar10-c[severity=3]", "fog, mean of 3")
    assert tuple(data_labels(names).values()) == ("image-folder ood", "image-folder v1.5", *names[2:])
    odd = ("image-folder[folder=.]", "a]b[", "svhn")
    assert tuple(data_labels(odd).values()) == odd
    plain = with_everything("ce", 1.2, 2)
    only = replace(
        plain,
        detection={folder: (0.9, 0.8)},
        detection_after={folder: (0.5, 0.5)},
        detection_chosen={},
        curves={folder: {"": CURVE}},
        shifted={folder: plain.shifted["other"]},
    )
    found = Comparison("toy", (0, 1), (only,))
    text = markdown(found)
    assert "| AUROC, image-folder ood | AUROC + T, image-folder ood |" in text
    assert "## Accuracy on image-folder ood" in text
    assert "/long/path" not in text + latex(found)
    captions = [caption for _, caption in _pictures(found, {}, {}).values()]
    assert any("telling image-folder ood from the test data" in caption for caption in captions)
    assert not any("/long/path" in caption for caption in captions)
    assert list(json.loads(found.to_json())["runs"]["ce"]["detection"]) == [folder]


def test_accuracy_after_a_calibrator_is_shown_only_where_it_changes():
    assert "Accuracy + T" not in markdown(comparison(1))  # one scale for all logits
    other = tuple(replace(each, after=(evaluation(9, 1.0, "other"),)) for each in comparison(1).methods)
    assert "Accuracy | Accuracy + T | NLL" in markdown(replace(comparison(1), methods=other))


def test_shifted_data_have_tables_of_accuracy_and_ece(full):
    text = markdown(full)
    _, accuracy, ece, *_ = text.split("\n## ")
    assert accuracy.startswith("Accuracy on fog[x=1]\n\n| loss | clean | severity 1 | severity 2 |")
    assert rows(accuracy, "ce") == [["ce", *(f"{90 - 10 * level}.00 ± 0.00" for level in range(6))]]
    assert "+ T" not in accuracy
    assert rows(ece, "sharp + T") == [["sharp + T", *(f"{5 + 5 * level}.00 ± 0.00" for level in range(6))]]
    assert rows(ece, f"ce + {CALIBRATOR}")[0][1] == "**4.00 ± 0.00**"
    assert "| loss | clean | shifted |" in text
    assert text.count("\n## ") == 4
    assert latex(full).count(r"\begin{tabular}") == 5


@pytest.mark.usefixtures("blank_pictures", "blank_diagrams")
def test_shifted_data_and_detection_have_pictures(full, tmp_path):
    only = full.methods[0]
    only = replace(only, calibrated={}, chosen={}, shifted={"fog[x=1]": only.shifted["fog[x=1]"]})
    write_comparison(replace(full, methods=(only,)), tmp_path)
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {
        *(f"accuracy-against-{error}.png" for error in ("ece", "adaptive-ece", "classwise-ece")),
        *(f"shift-fog-x=1-{kind}.png" for kind in ("accuracy", "ece", "ece-temperature")),
        "roc-svhn-before.png",
        "roc-svhn-after.png",
        "roc-svhn-after-temperature-objective=ece.png",
        "ece.png",
        "reliability.png",
    }
    page = Page((tmp_path / "report.html").read_text())
    assert len(page.find("table", class_="comparison")) == 3
    captions = [text for text, _ in page.find("figcaption")]
    assert (
        "ROC curves of telling svhn from the test data, after temperature scaling; means over seeds"
        in captions
    )
    assert f"ROC curves of telling svhn from the test data, after {CALIBRATOR}; means over seeds" in captions
    severity = "ECE before calibration on fog[x=1], against the severity of the shift"
    assert any(text.startswith(severity) for text in captions)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["columns"] == ["accuracy", "sweep_ece"]
    assert found["runs"]["ce"]["detection_after"] == {"svhn": [0.5, 0.5]}
    assert found["runs"]["ce"]["detection_chosen"] == {CALIBRATOR: {"svhn": [0.4, 0.4]}}
    assert found["runs"]["ce"]["shifted"]["fog[x=1]"]["5"][""][0]["ece"] == pytest.approx(0.35)


@pytest.mark.usefixtures("blank_pictures", "blank_diagrams")
def test_pictures_of_an_earlier_comparison_are_removed_and_nothing_else(full, tmp_path):
    plots = tmp_path / "plots"
    learned = {"sharp": {"gamma": torch.rand(3, 15), "offset": torch.rand(3, 2)}}
    write_comparison(full, tmp_path, learned=learned)
    earlier = {path.name for path in plots.iterdir()}
    assert {
        "gamma-sharp.png",
        "roc-svhn-after.png",
        "shift-other-ece-temperature-objective=ece.png",
    } < earlier
    mine = {"mine.png", "gamma-mine.png", "ece.pdf", "roc-mine.png", "sensitivity.png", "training-mine.png"}
    for name in mine:
        (plots / name).touch()
    (only,) = comparison(1).methods[:1]
    for _ in range(2):
        write_comparison(
            replace(comparison(1), methods=(only,)), tmp_path, learned={"ce": {"offset": torch.rand(3, 2)}}
        )
        assert {path.name for path in plots.iterdir()} - mine == {
            *(f"accuracy-against-{error}.png" for error in ("ece", "adaptive-ece", "classwise-ece")),
            "ece.png",
            "reliability.png",
            "offset-ce.png",
        }
        assert all((plots / name).stat().st_size == 0 for name in mine)


def test_titles_and_axes_say_what_is_shown(full):
    history = {"ce": [[{"validation_ece": 0.1}, {"validation_ece": 0.2}]]}
    learned = {"ce": {"gamma": torch.rand(3, 15)}}
    drawn = _pictures(replace(full, seeds=(3, 4)), history, learned)
    expected = {
        "shift-fog-x=1-accuracy": "fog[x=1], before calibration",
        "shift-fog-x=1-ece": "fog[x=1], before calibration",
        "shift-fog-x=1-ece-temperature": "fog[x=1], after temperature scaling",
        "shift-other-ece-temperature-objective=ece": f"other, after {CALIBRATOR}",
        "gamma-ce": "ce, seed 3",
        "accuracy-against-ece": "Means and standard deviations over seeds",
        "ece": "Calibration error on the test data, 2 seeds",
    }
    assert {name: drawn[name][0].axes[0].get_title() for name in expected} == expected
    single = _pictures(comparison(1), {}, {})["accuracy-against-ece"][0].axes
    assert single[0].get_title() == ""  # no bars
    assert drawn["training-ece"][0].axes[0].get_ylabel() == "Validation ECE (%)"


LONG = "cals-alm[penalty_weight_max=none,margin=6,penalty=p2,rate=0.5]"


@pytest.mark.parametrize("names", [(LONG,), ("ce", LONG, "ls")], ids=len)
def test_reliability_diagrams_are_square_in_rows_of_calibrators_with_one_legend(names):
    methods = tuple(with_everything(name, 1.2, 2) for name in names)
    figure = _diagrams(Comparison("toy", (3, 4), methods))
    figure.draw_without_rendering()
    panels = [ax for ax in figure.axes if ax.get_ylim() == (0, 1)]
    assert len(panels) == 3 * len(names)
    for ax in panels:
        box = ax.get_window_extent()
        assert box.width == pytest.approx(box.height)
    assert [ax.get_title().replace("\n", "") for ax in panels[: len(names)]] == list(names)
    assert not any(ax.get_title() for ax in panels[len(names) :])
    title, *rows = [text.get_text().replace("\n", "") for text in figure.texts]
    assert title.replace(" ", "") == "toy,seed3,thefirstseed"
    assert rows == ["Before calibration", "After temperature scaling", f"After {CALIBRATOR}"]
    assert len(figure.legends) == 1
    assert not any(ax.get_legend() for ax in figure.axes)
    words = [*figure.texts, *figure.legends, *(ax.title for ax in panels if ax.get_title())]
    boxes = [each.get_window_extent() for each in words]
    boxes += [ax.get_window_extent() for ax in figure.axes]
    apart = [not (a.overlaps(b)) for n, a in enumerate(boxes) for b in boxes[:n]]
    assert all(apart)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_reliability_diagrams_of_single_logits_speak_of_probabilities_of_yes():
    logits = torch.linspace(-3, 3, 300)
    found = (evaluate(logits, (logits > 1).long(), binary=True, resamples=0),)
    figure = _diagrams(Comparison("toy", (3,), (Method(LONG, found, found, (1.0,), {}),)))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    words += [label for ax in figure.axes for label in (ax.get_xlabel(), ax.get_ylabel())]
    assert {"Frequency of yes", "Mean frequency of yes", "Mean probability of yes"} < set(words)
    assert not any("confidence" in text.lower() or "accuracy" in text.lower() for text in words)
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    assert not any(box.overlaps(ax.get_window_extent()) for ax in figure.axes)


def comparison(seeds=3, **options):
    methods = (method("ce", 1.2, seeds, **options), method("sharp_|x", 12.0, seeds, **options))
    return Comparison("toy", tuple(range(seeds)), methods)


def rows(text, name):
    """Cells of the rows of a Markdown table with this name."""
    found = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found]


def test_markdown_marks_the_best_and_the_significant():
    text = markdown(comparison())
    first, intervals = rows(text, "ce")
    second, _ = rows(text, r"sharp\_\|x")
    heading = rows(text, "loss")[0]
    nll = heading.index("NLL")
    assert first[nll].startswith("**")
    assert not second[nll].startswith("**")
    assert second[nll].endswith(" worse")
    assert first[nll + 1].startswith("**") == second[nll + 1].startswith("**")  # equal after scaling
    assert (first[heading.index("T")], heading[-1]) == ("2.500 ± 1.000", "AUROC, svhn")
    assert intervals[1].startswith("[")
    assert "a significant difference from ce at 5 %" in text


def test_names_are_not_interpreted_as_markdown():
    title = "a\n## <img src=x> [b](http://c) *d*"
    text = markdown(replace(comparison(), title=title))
    assert text.splitlines()[0] == r"# a\\n## \<img src=x\> [b\](http://c) \*d\*"
    method = replace(comparison().methods[0], name="<b>\n|x")
    assert "\n| \\<b\\>\\\\n\\|x | " in markdown(replace(comparison(), methods=(method,)))


def test_one_seed_has_no_deviation_and_says_so():
    text = markdown(comparison(seeds=1))
    assert "±" not in text
    assert "One seed is too few to test significance" in text


def test_without_resamples_there_is_no_table_of_intervals():
    text = markdown(comparison(resamples=0))
    assert len(rows(text, "ce")) == 1
    assert "[" not in text


def test_latex_escapes_names():
    text = latex(comparison())
    assert r"sharp\_|x & " in text
    assert r"\textsuperscript{worse}" in text
    assert r"$\pm$" in text
    comment, begin, *_ = text.splitlines()
    assert comment.startswith("% Test set of 300 elements")
    assert begin == r"\begin{tabular}{l" + "r" * 11 + "}"


def everything():
    """The history of one method, and what the loss of the other learned."""
    figures = ("validation_accuracy", "validation_nll", "validation_ece")
    history = [[dict.fromkeys(figures, epoch / 10) for epoch in range(3)] for _ in range(3)]
    learned = {
        "multiplier": torch.rand(3, 4),
        "gamma": torch.rand(3, 15),
        "logit_scale": torch.linspace(1, 2, 3),
        "offset": torch.rand(3, 2, 5),
        "broken": torch.full((3,), float("nan")),
    }
    return {"ce": history}, {"sharp_|x": learned}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("comparison") / "new"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_saved", drawing._saved)  # as it was, afterwards
        draw_blank()
        write_comparison(comparison(), target, *everything())
    return target


def test_every_picture_can_be_drawn():
    """Once each: saving a file lays it out and draws it twice."""
    figures = [figure for figure, _ in _pictures(comparison(), *everything()).values()]
    for figure in figures:
        figure.draw_without_rendering()
    assert drawing.png(figures[0]).startswith(b"\x89PNG")
    assert drawing.svg(figures[0]).startswith(b"<?xml")


def test_every_file_is_written(folder):
    assert {path.name for path in folder.iterdir()} == {
        "plots",
        "report.html",
        "results.json",
        "results.md",
        "results.tex",
    }
    assert json.loads((folder / "results.json").read_text())["title"] == "toy"
    assert (folder / "results.md").read_text() == markdown(comparison())
    assert (folder / "results.tex").read_text() == latex(comparison())


def test_a_learned_quantity_is_drawn_whatever_its_name(folder):
    learned = ("multiplier", "gamma", "logit_scale", "offset")  # and not what has no finite numbers
    assert {path.name for path in (folder / "plots").iterdir()} == {
        *(f"accuracy-against-{error}.png" for error in ("ece", "adaptive-ece", "classwise-ece")),
        "ece.png",
        "reliability.png",
        *(f"training-{metric}.png" for metric in ("accuracy", "ece", "nll")),
        *(f"{name}-sharp--x.png" for name in learned),
    }
    captions = [text for text, _ in Page((folder / "report.html").read_text()).find("figcaption")]
    assert "Logit scale after each epoch, learned by sharp_|x with the first seed" in captions


def test_the_page_has_the_table_of_the_comparison(folder):
    page = Page((folder / "report.html").read_text())
    [(text, _)] = page.find("table", class_="comparison")
    assert "sharp_|x" in text
    header = page.find("header")[0][0]
    assert "ce, sharp_|x · 2 losses · 3 seeds · before and after temperature scaling · 300 elements" in header
    assert "Mean IoU" not in page.find("main")[0][0]
    assert "the lowest NLL is that of " in page.find("section", id="verdict")[0][0]
    first, second = page.find("td", data_figure="NLL")
    assert first[1]["class"] == "best"
    assert second[1]["class"] == "worse"
    assert second[1]["title"].startswith("significantly worse than ce (p = ")
    assert "worse (significantly worse than ce" in second[0]
    assert len(page.find("table", class_="models")) == 4
