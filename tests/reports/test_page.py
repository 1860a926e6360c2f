"""The report shows the right figures and marks, treats names as text, and sorts in a browser."""

import dataclasses
import re
from functools import cache
from html import unescape
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
import torch

from calibrant.evaluation import ClassFigures, Difference, Evaluation, GroupFigures, Reliability, evaluate
from calibrant.evaluation.figures import ClassBin
from calibrant.metrics import METRICS, RiskCoverage
from calibrant.reports.page import render_report, write_report
from tests.evaluations import changed as replace
from tests.evaluations import figures as figures_of

HOSTILE = "<script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>\"'&{{ 7 * 7 }}$x_1"


def evaluation(name="resnet", *, over=0.05, accuracy=0.85, classes=20, samples=10_000, exact=True, seed=0):
    """Plausible figures of a model that is over-confident by about `over`."""
    rng = np.random.default_rng(seed)
    bins = 15
    edges = np.linspace(0, 1, bins + 1)
    share = np.exp(6 * edges[1:])
    share[:2] = 0
    number = np.round(samples * share / share.sum()).astype(int)
    confidence = edges[:-1] + 0.6 / bins
    right = np.clip(confidence - over * np.linspace(0.3, 2, bins) + rng.normal(0, 0.01, bins), 0, 1)
    wide = 1.96 * np.sqrt(right * (1 - right) / np.maximum(number, 1))
    usual = 1.96 * np.sqrt(confidence * (1 - confidence) / np.maximum(number, 1))

    def where(values):
        return tuple(None if empty else value for empty, value in zip(number == 0, values, strict=True))

    def around(centre, half):
        pairs = zip(np.clip(centre - half, 0, 1).tolist(), np.clip(centre + half, 0, 1).tolist(), strict=True)
        return where(list(pairs))

    gap = abs(over) + 0.004
    figures = {
        "accuracy": accuracy,
        "balanced_accuracy": accuracy - 0.021,
        "top_k_accuracy": 1 - (1 - accuracy) / 3,
        "mean_iou": accuracy - 0.12,
        "mean_iou_foreground": 0.61 - gap,
        "nll": 0.4 + 3 * gap,
        "nll_calibration": 2 * gap if exact else None,
        "nll_refinement": 0.4 + gap if exact else None,
        "brier": 0.21 + gap,
        "root_brier": (0.21 + gap) ** 0.5,
        "brier_calibration": 0.6 * gap if exact else None,
        "brier_refinement": 0.21 + 0.4 * gap if exact else None,
        "ece": gap,
        "mce": 2.3 * gap,
        "ece_l2": 1.2 * gap,
        "adaptive_ece": 1.01 * gap,
        "classwise_ece": 0.2 * gap,
        "classwise_mce": 3 * gap,
        "debiased_ece": 0.98 * gap,
        "debiased_ece_l1": 0.85 * gap,
        "sweep_ece": 1.02 * gap,
        "sweep_ece_l1": 0.97 * gap,
        "sweep_ece_width": 1.04 * gap,
        "sweep_ece_width_l1": 0.99 * gap,
        "smooth_ece": 0.9 * gap,
        "kde_ece": 0.7 * gap if exact else None,
        "aurc": 0.02 + gap / 4,
        "augrc": 0.015 + gap / 5,
        "risk_at_coverage": 0.04 + gap / 3,
        "coverage_at_risk": 0.7 - gap,
    }
    present = {key: value for key, value in figures.items() if value is not None}
    errors = rng.exponential(gap / 4, classes)
    return Evaluation(
        name=name,
        samples=samples,
        num_classes=classes,
        bins=bins,
        exact=exact,
        figures=figures_of(figures, {key: (0.93 * value, 1.06 * value) for key, value in present.items()}),
        p_value=0.4 if over < 0.01 else 1e-9,
        reliability=Reliability(
            tuple(edges.tolist()),
            tuple(number.tolist()),
            where(confidence.tolist()),
            where(right.tolist()),
            around(right, wide),
            around(confidence, usual),
        ),
        classes=tuple(
            ClassFigures(f"class {k}", samples // classes, accuracy, accuracy - 0.1, error / 3, error)
            for k, error in enumerate(errors.tolist())
        ),
        groups={
            "head": GroupFigures(4, 6000, accuracy + 0.04, accuracy + 0.04 + over, gap),
            "mid": GroupFigures(6, 3000, accuracy - 0.02, accuracy - 0.02 + over, gap),
            "tail": GroupFigures(10, 1000, accuracy - 0.2, accuracy - 0.2 + 2 * over, 2 * gap),
        },
    )


def models():
    return [
        evaluation("cross-entropy", over=0.06, accuracy=0.86),
        evaluation("label smoothing", over=-0.03, accuracy=0.87),
        evaluation("CALS-ALM", over=0.004, accuracy=0.855),
    ]


class Page(HTMLParser):
    """A parsed page: elements with their attributes, cells by figure, text."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_endtag(self, tag):
        opened, _ = self.open.pop()
        assert opened == tag

    def handle_data(self, data):
        for _, number in self.open:
            self.text[number] = self.text.get(number, "") + data

    def find(self, tag, **wanted):
        """Text and attributes of the elements with this tag and these attributes."""
        return [
            (" ".join(self.text.get(number, "").split()), attributes)
            for number, (found, attributes) in enumerate(self.elements)
            if found == tag
            and all(attributes.get(key.strip("_").replace("_", "-")) == wanted[key] for key in wanted)
        ]

    def best(self, figure):
        """The rows of a column that are marked as best."""
        return [
            row
            for row, (text, attributes) in enumerate(self.find("td", data_figure=figure))
            if attributes.get("class") == "best" and "★" in text and "(best)" in text
        ]


@cache
def page_of_models():
    return Page(render_report(models()))


def with_replicates(evaluations):
    return [replace(each, replicates=dict.fromkeys(each.intervals, (0.0,) * 40)) for each in evaluations]


class TestStructure:
    def test_several_models(self):
        page = Page(render_report(models(), title="On CIFAR"))
        assert [text for text, _ in page.find("h1")] == ["On CIFAR"]
        header = page.find("header")[0][0]
        for part in ("cross-entropy, label smoothing, CALS-ALM", "3 models", "10,000 elements", "20 classes"):
            assert part in header
        assert "15 bins" in header
        assert "exact" in header
        assert "95 % intervals" in header
        headings = [
            attributes["data-key"]
            for _, attributes in page.find("th", scope="col")
            if "data-key" in attributes
        ]
        assert {*headings} == {"model", "p_value", *METRICS}
        assert len(page.find("table", class_="models")) == 4
        assert (
            len(page.find("svg", class_="chart reliability")) == len(page.find("table", class_="bins")) == 3
        )
        assert len(page.find("table", class_="classes")) == 3
        assert "0.80 %★ (best)[0.74, 0.85]" in page.find("td", data_figure="ece")[2][0]

    def test_the_title_names_a_single_model(self):
        for text, expected in (
            (render_report([evaluation(name="preds")]), "Calibration of preds"),
            (render_report(models()), "Calibration report"),
        ):
            page = Page(text)
            assert page.find("h1")[0][0] == page.find("title")[0][0] == expected

    def test_one_model_has_no_best_and_nothing_to_sort(self):
        page = Page(render_report([evaluation()]))
        assert [each["data-figure"] for _, each in page.find("td") if "data-figure" in each][:2] == [
            "ece",
            "mce",
        ]
        assert page.find("button") == []
        assert "best" not in {attributes.get("class") for _, attributes in page.elements}
        assert "★" not in page.find("main")[0][0]

    @pytest.mark.parametrize("number", [1, 2])
    def test_each_figure_is_explained_visibly(self, number):
        main = Page(render_report(models()[:number])).find("main")[0][0]
        for description in METRICS.values():
            assert description.label in main
            assert description.sentence in main

    def test_headings_explain_themselves(self):
        page = page_of_models()
        for name, description in METRICS.items():
            [(_, attributes)] = page.find("th", data_key=name)
            assert attributes["title"] == description.sentence

    def test_images_are_described_and_their_numbers_given(self):
        page = page_of_models()
        (_, attributes), (_, other), _ = page.find("svg", class_="chart reliability")
        assert "Reliability diagram of cross-entropy" in attributes["aria-label"]
        assert "over-confident by" in attributes["aria-label"]
        assert "under-confident by" in other["aria-label"]
        table = page.find("table", class_="bins")[0][0]
        assert "0.933–1.000" in table

    def test_worst_classes_come_first_and_are_few(self):
        shown = evaluation(classes=40)
        page = Page(render_report([shown]))
        names = [text for text, _ in page.find("th", scope="row") if text.startswith("class ")]
        assert names == [each.name for each in sorted(shown.classes, key=lambda each: -each.ece)[:15]]
        assert page.find("caption")[0][0] == "15 of 40 classes"

    def test_classes_without_a_correct_prediction_are_not_the_best_calibrated(self):
        classes = tuple(
            ClassFigures(name, 5, accuracy, None, 0.0, ece)
            for name, accuracy, ece in (("often", 0.9, 0.02), ("never", 0.0, 0.001), ("rare", 0.5, 0.05))
        )
        page = Page(render_report([replace(evaluation(), classes=classes)]))
        [(text, _)] = page.find("table", class_="classes")
        assert re.search(r"rare.*often.*Never predicted correctly.*never5", text)
        across = Page(render_report([replace(evaluation(), classes=classes)] * 2))
        [(text, _)] = across.find("table", class_="across")
        assert re.search(r"rare.*often.*never5.*never right", text)

    def test_classes_are_compared_across_models(self):
        [(text, _)] = page_of_models().find("table", class_="across")
        assert text.startswith("ECE of 15 of 20 classes, the largest first. Lower is better.")
        other = replace(evaluation("other"), classes=(ClassFigures("else", 1, 1.0, 1.0, 0.0, 0.1),))
        assert Page(render_report([*models(), other])).find("table", class_="across") == []

    def test_a_few_figures_come_first_and_the_rest_is_folded(self):
        page = page_of_models()
        [(text, _)] = page.find("table", class_="key-figures")
        assert "Smooth ECE" not in text
        assert [each["data-key-figure"] for _, each in page.find("td") if "data-key-figure" in each][:8] == [
            *("ece", "adaptive_ece", "classwise_ece", "nll", "brier", "accuracy", "mean_iou", "p_value")
        ]
        folded = [text for text, _ in page.find("details") if text.startswith("All figures")]
        assert "Smooth ECE" in folded[0]
        assert len(Page(render_report(models()[:1])).find("div", class_="tile")) == 8

    @pytest.mark.parametrize("number", [1, 2])
    def test_mean_iou_is_only_for_segmentation(self, number):
        plain = [replace(each, mean_iou_foreground=None) for each in models()[:number]]
        assert "Mean IoU" not in render_report(plain)
        assert "Mean IoU" in render_report(plain, segmentation=True)
        assert "Mean IoU" in render_report([replace(each, per_image=True) for each in plain])

    @pytest.mark.parametrize("number", [1, 2])
    def test_the_diagram_is_where_its_explanation_is(self, number):
        page = render_report(models()[:number])
        found = [part for part in page.split("<section ")[1:] if '<svg class="chart reliability"' in part]
        assert len(found) == 1
        assert found[0].startswith('id="verdict"' if number == 1 else 'id="reliability"')
        assert "Point at a bar" in found[0]
        assert found[0].count("The diagram in words and numbers") == number
        assert page.count("Point at a bar") == 1

    def test_the_risk_coverage_curves_are_drawn_if_every_model_has_one(self):
        curve = RiskCoverage((0.5, 1.0), (0.05, 0.15), ((0.03, 0.08), (0.12, 0.19)))
        pair = [replace(each, risk_coverage=curve) for each in models()[:2]]
        page = Page(render_report(pair))
        (section,) = page.find("section", id="selective")
        assert "Selective prediction" in section[0]
        assert len(page.find("polyline", class_="curve")) == len(page.find("polygon", class_="band")) == 2
        tips = [attributes["data-tip"] for _, attributes in page.find("g", class_="dot")]
        assert any("error rate 15.00 % [12.00, 19.00]" in tip for tip in tips)
        assert Page(render_report([pair[0], models()[1]])).find("section", id="selective") == []

    def test_navigation_leads_to_every_section(self):
        page = page_of_models()
        targets = [attributes["href"] for _, attributes in page.find("a")]
        sections = [f"#{attributes['id']}" for _, attributes in page.find("section")]
        assert targets == sections == ["#verdict", "#summary", "#reliability", "#classes", "#groups"]

    def test_a_calibrator_is_named_with_its_data(self):
        text = "temperature (T = 1.9), fitted to validation.npz"
        page = Page(render_report([evaluation("before"), evaluation("after", over=0.01)], fitted=text))
        assert text in page.find("section", id="verdict")[0][0]
        assert "1 model before and after calibration" in page.find("header")[0][0]
        with pytest.raises(ValueError, match="one after, got 3"):
            render_report(models(), fitted=text)

    def test_bins_of_few_elements_are_pale(self):
        page = Page(render_report([evaluation()]))
        opacity = [
            float(each["style"].split(":")[1])
            for _, each in page.find("rect", class_="accuracy")
            if "style" in each
        ]
        assert opacity == sorted(opacity)
        assert opacity[0] < 0.75 < opacity[-1]

    def test_groups(self):
        [(text, _)] = page_of_models().find("table", class_="groups")
        assert text.count("tail") == 3
        assert Page(render_report([replace(evaluation(), groups={})])).find("table", class_="groups") == []

    def test_groups_have_limits_and_elements(self):
        groups = {**evaluation().groups, "mid": GroupFigures(0, 0, None, None, None)}
        page = Page(render_report([replace(evaluation(), groups=groups)]))
        [(text, _)] = page.find("section", id="groups")
        assert "training elements of a class: head (more than 100), tail (fewer than 20)." in text
        assert "mid" not in text
        none = {"mid": groups["mid"]}
        assert Page(render_report([replace(evaluation(), groups=none)])).find("section", id="groups") == []

    def test_one_is_not_plural(self):
        page = Page(render_report([evaluate(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), bins=1)]))
        assert "1 model · 1 element · 2 classes · 1 bin · " in page.find("header")[0][0]

    def test_a_single_element_has_no_interval_of_its_errors(self):
        one = [evaluate(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), name=name) for name in "ab"]
        alone, both = Page(render_report(one[:1])), Page(render_report(one))
        [(text, _)] = alone.find("section", id="summary")
        assert "A single element has no spread" in text
        assert re.findall(r"\[.*?\]", text)[:2] == ["[2.50, 100.00]"] * 2  # of the accuracy, twice
        assert both.find("figcaption")[0][0] == "Calibration error (ECE). Lower is better."

    def test_equal_names_are_told_apart(self):
        page = Page(render_report([evaluation("net"), evaluation("net"), evaluation("net (2)")]))
        rows = [text for text, _ in page.find("th", scope="row")][:3]
        assert rows == ["net", "net (3)", "net (2)"]

    def test_many_models(self):
        page = Page(render_report([evaluation(f"net {k}", over=k / 100, seed=k) for k in range(8)]))
        assert "and 2 more" in page.find("header")[0][0]
        assert page.best("ece") == [0]

    def test_no_classes(self):
        assert Page(render_report([replace(evaluation(), classes=())])).find("table", class_="classes") == []


class TestMarks:
    def test_best_by_what_is_better(self):
        page = page_of_models()
        assert page.best("accuracy") == [1]
        for name in ("ece", "nll", "brier_calibration", "kde_ece"):
            assert page.best(name) == [2]
        assert page.best("p_value") == []
        assert page.best("mean_iou_foreground") == [2]

    def test_every_metric(self):
        pair = [
            replace(evaluation(name), **dict.fromkeys(METRICS, value))
            for name, value in (("one", 0.2), ("other", 0.3))
        ]
        page = Page(render_report(pair))
        expected = {name: [int(metric.higher_is_better)] for name, metric in METRICS.items()}
        assert {name: page.best(name) for name in METRICS} == expected

    def test_equal_values_are_all_best(self):
        equal = [evaluation("a"), evaluation("b")]
        assert Page(render_report([*equal, evaluation("c", over=0.2)])).best("ece") == [0, 1]
        assert Page(render_report(equal)).best("ece") == []  # nothing to choose

    def test_nan_and_infinity(self):
        page = Page(render_report([replace(evaluation(), nll=float(value)) for value in ("inf", "nan", "3")]))
        cells = page.find("td", data_figure="nll")
        assert [attributes["data-value"] for _, attributes in cells] == ["Infinity", "", "3.0"]
        assert cells[0][0].startswith("∞")
        assert page.best("nll") == [2]

    def test_missing_figures_say_why(self):
        page = Page(render_report([evaluation("exact"), evaluation("streamed", exact=False)]))
        text, attributes = page.find("td", data_figure="kde_ece")[1]
        assert text.startswith("–")
        assert "streamed evaluation does not keep" in attributes["title"]
        assert page.best("kde_ece") == []
        notes = [text for text, _ in page.find("p", class_="quiet") if text.startswith("– KDE-ECE")]
        assert len(notes) == 1
        assert "1 exact, 1 streamed" in page.find("header")[0][0]
        [(single, _)] = Page(render_report([evaluation(exact=False)])).find("table", class_="figures")
        assert "does not keep" in single

    def test_p_values(self):
        page = page_of_models()
        first, *_, last = page.find("td", data_figure="p_value")
        assert first[0].startswith("<0.001")
        assert first[0].endswith(")rejected")
        assert last[0].startswith("0.400")
        assert last[0].endswith("not rejected")

    def test_significance(self, monkeypatch):
        def compare(self, other):
            assert self.name == "CALS-ALM" or self.name == "label smoothing"
            value = self.ece - other.ece
            far = abs(value) > 0.03
            return {"ece": Difference(value, (value - 0.03, value + 0.03), far, "first" if far else None)}

        monkeypatch.setattr(Evaluation, "compare", compare, raising=False)
        page = Page(render_report(with_replicates(models())))
        cells = page.find("td", data_figure="ece")
        assert [attributes["class"] for _, attributes in cells] == ["worse", "equal", "best"]
        assert cells[0][1]["title"] == "significantly worse than CALS-ALM: +5.60 % [2.60, 8.60]"
        assert cells[1][1]["title"] == "not distinguishable from CALS-ALM: +2.60 % [−0.40, 5.60]"
        assert "worse (significantly worse than" in cells[0][0]
        assert "≈" in cells[1][0]
        assert "significantly worse" in page.find("p", class_="quiet")[0][0]

    def test_no_significance_without_resamples(self, monkeypatch):
        monkeypatch.setattr(Evaluation, "why_untested", lambda self, other: "for a reason")
        for evaluations in (models(), with_replicates(models())):
            page = Page(render_report(evaluations))
            assert {attributes.get("class") for _, attributes in page.find("td", data_figure="ece")} == {
                "best",
                None,
            }
            assert "could not be tested: for a reason." in page.find("p", class_="quiet")[0][0]

    @pytest.mark.parametrize(
        "change", [{"samples": 5}, {"num_classes": 3}, {"fingerprint": "b"}, {"bins": 10}]
    )
    def test_a_warning_where_figures_do_not_compare(self, change):
        one = replace(evaluation("one"), fingerprint="a")
        assert len(Page(render_report([one, replace(one, **change)])).find("p", class_="warning")) == 1

    def test_no_warning_where_they_do(self):
        one = replace(evaluation("one"), fingerprint="a")
        assert Page(render_report([one, one])).find("p", class_="warning") == []

    def test_significance_by_resamples(self):
        noise = np.random.default_rng(0).normal(0, 0.01, (3, 200))
        values = (0.050, 0.051, 0.150)
        evaluations = [
            replace(evaluation(str(value)), ece=value, replicates={"ece": tuple((value + row).tolist())})
            for value, row in zip(values, noise, strict=True)
        ]
        page = Page(render_report(evaluations))
        marks = [attributes.get("class") for _, attributes in page.find("td", data_figure="ece")]
        assert marks == ["best", "equal", "worse"]
        assert {attributes.get("class") for _, attributes in page.find("td", data_figure="mce")} <= {
            "best",
            None,
        }

    def test_without_intervals(self):
        for number in (1, 2):
            text = render_report([replace(each, intervals={}) for each in models()[:number]])
            assert "no intervals" in text
            assert "[5.95" not in text


class TestSafety:
    def test_names_are_text(self):
        hostile = replace(
            evaluation(HOSTILE),
            classes=(ClassFigures(HOSTILE, 3, None, None, -0.1, 0.1),),
            groups={HOSTILE: GroupFigures(1, 3, 0.5, 0.6, 0.1)},
        )
        honest = replace(evaluation(), classes=hostile.classes[:1], groups={"head": hostile.groups[HOSTILE]})
        for number in (1, 2):
            page = Page(render_report([hostile] * number, title=HOSTILE))
            plain = Page(
                render_report(
                    [replace(honest, classes=(ClassFigures("c", 3, None, None, -0.1, 0.1),))] * number
                )
            )
            assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
            assert page.find("h1")[0][0] == HOSTILE
            assert page.find("title")[0][0] == HOSTILE
            assert "onerror" not in {key for _, attributes in page.elements for key in attributes}

    def test_nothing_is_fetched(self):
        page = Page(render_report([evaluation(HOSTILE), *models()]))
        for tag, attributes in page.elements:
            assert tag not in {"link", "iframe", "object", "embed", "base", "form", "use", "image"}
            for key in ("src", "srcset", "action", "xlink:href"):
                assert attributes.get(key, "data:").startswith("data:")
            assert attributes.get("href", "#").startswith("#")
        assert "url(" not in page.find("style")[0][0]
        assert "@import" not in page.find("style")[0][0]
        [policy] = [each["content"] for _, each in page.find("meta") if "http-equiv" in each]
        assert policy.startswith("default-src 'none'")

    def test_odd_letters_can_be_written(self, tmp_path):
        write_report([evaluation("a\ud83db $x^2$ ☃")], tmp_path / "report.html")
        assert "a\\ud83db $x^2$ ☃" in (tmp_path / "report.html").read_text(encoding="utf-8")

    @pytest.mark.parametrize("name", ["adafocal[evidence=2,rate=3]", "dual-focal"])
    def test_names_break_at_brackets_and_commas_only(self, name):
        text = render_report([evaluation(name)])
        broken = {
            "dual-focal": '<span class="piece">dual-focal</span>',
            "adafocal[evidence=2,rate=3]": "adafocal<wbr>[evidence=2,<wbr>rate=3]",
        }
        assert f"<strong>{broken[name]}</strong>" in text


class TestFile:
    def test_equal_input_gives_equal_bytes(self, tmp_path):
        write_report(models(), tmp_path / "one.html")
        with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black", "svg.fonttype": "none"}):
            write_report(models(), str(tmp_path / "two.html"))
        assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()

    def test_it_is_small_has_pictures_and_leaves_the_session_alone(self):
        before = dict(matplotlib.rcParams)
        text = render_report(models())
        assert len(text) < 500_000
        assert len(Page(text).find("g", class_="bin")) == 3 * 13  # two of the bins are empty
        assert dict(matplotlib.rcParams) == before

    def test_a_thousand_classes_stay_below_2_mb(self):
        bins = tuple(ClassBin(number, 1234, 0.123456789, 1111) for number in range(15))
        many = [evaluation(f"adafocal[evidence={k}]", classes=1000) for k in range(6)]
        many = [
            replace(each, classes=tuple(dataclasses.replace(figures, bins=bins) for figures in each.classes))
            for each in many
        ]
        text = render_report(many)
        assert len(text.encode()) < 2_000_000
        assert "The 500 worst of 1,000 classes can be chosen" in " ".join(text.split())

    def test_it_replaces_and_leaves_nothing_else(self, tmp_path):
        path = tmp_path / "report.html"
        path.write_text("old")
        write_report([evaluation()], path)
        assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
        assert [each.name for each in tmp_path.iterdir()] == ["report.html"]

    def test_a_failure_leaves_the_old_report(self, tmp_path):
        (tmp_path / "folder").mkdir()
        with pytest.raises(OSError, match="folder"):
            write_report([evaluation()], tmp_path / "folder")
        assert [each.name for each in tmp_path.iterdir()] == ["folder"]

    def test_no_evaluations(self, tmp_path):
        with pytest.raises(ValueError, match="at least one evaluation"):
            write_report([], tmp_path / "report.html")
        assert list(tmp_path.iterdir()) == []

    def test_a_single_evaluation_needs_no_list(self):
        assert render_report(evaluation()) == render_report([evaluation()])

    def test_evaluations_may_come_from_any_collection(self):
        assert render_report({"a": evaluation()}.values()) == render_report([evaluation()])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("report.html", [evaluation()]), "path must be of type str or PathLike, got list"),
            (("a.json", "report.html"), "evaluations must be of type Evaluation, got str"),
            (([evaluation(), None], "report.html"), "evaluations must be of type Evaluation, got NoneType"),
        ],
    )
    def test_other_arguments(self, arguments, message):
        with pytest.raises(TypeError, match=message):
            write_report(*arguments)

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing"):
            write_report([evaluation()], tmp_path / "missing" / "report.html")


def test_a_binary_report_speaks_of_probabilities_of_yes():
    logits = torch.randn(400, generator=torch.Generator().manual_seed(0))
    target = (torch.rand(400, generator=torch.Generator().manual_seed(1)) < logits.sigmoid()).long()
    binary = render_report([evaluate(3 * logits, target, binary=True, resamples=0)])
    # Below 1/2, a frequency above the line is over-confidence.
    for words in (
        "Accuracy below the dashed line",
        "too confident, up to",
        ">Accuracy</text>",
        "accuracy is below",
    ):
        assert words not in binary
    assert "over-confident if probabilities below 0.5 are too low" in binary
    assert ">Frequency of yes</text>" in binary
    assert "frequency of yes is below probability of yes in" in binary
    labels = evaluate(
        torch.stack([logits, -logits], 1), torch.stack([target] * 2, 1), binary=True, resamples=0
    )
    several = render_report([labels])
    assert 'id="class-diagrams"' in several
    assert "Worst-calibrated labels" in several
    for words in (
        "the label gets too much probability",
        ">Label</th>",
        "frequency of the labels",
        "Labels of",
    ):
        assert words in several
    assert not re.search(
        ">Class<|the class gets|of the classes|another class|Classes of|of this class", several
    )
    wrong = evaluate(2 * torch.ones(6, 2), torch.tensor([[0, 1]] * 6), binary=True, resamples=0)
    never = re.findall("Never predicted correctly[^<]*", render_report([wrong]))
    assert never == ["Never predicted correctly: the wrong answer was always more probable."]
    assert "800 decisions" in several
    assert 'id="class-diagrams"' not in binary
    assert 'data-axes="probability of yes|frequency of yes"' in several
    named = evaluate(logits, target, binary=True, class_names=["ham", "spam"], resamples=0)
    assert "yes means 'spam'" in unescape(render_report([named]))
    unnamed = evaluate(logits, target, binary=True, resamples=0)
    assert "yes means 'spam' or" not in unescape(render_report([named, unnamed]))
    for page in (binary, several):
        assert "yes means" not in page
        assert "ECE and the diagrams compare the probability of yes with the frequency of yes" in page
        assert '"accuracy" in diagrams' not in unescape(page)
    correlated = "If labels are correlated, intervals are too narrow and p-values too small."
    assert (correlated in several, correlated in binary) == (True, False)
    pair = torch.stack([0 * logits, 3 * logits], 1)
    assert "Accuracy below the dashed line" in render_report([evaluate(pair, target, resamples=0)])


def test_notes_about_probabilities_of_0_number_models_of_the_same_name():
    text = render_report([dataclasses.replace(evaluation(), ruled_out=1)] * 2)
    ((first, second),) = re.findall(r'<p class="quiet">([^<:,]*), ([^<:,]*): 1 of [\d,]+ true classes', text)
    assert second == f"{first} (2)"
