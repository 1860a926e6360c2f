"""The documentation site: tutorials run and say what came out, the site builds, links lead somewhere."""

import functools
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from importlib import import_module
from inspect import ismodule
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.slow

CLAIMS = {
    "statistics": [
        "ece(*calibrated(100, seed=0)) > 3 * ece(*calibrated(1000, seed=0))",
        "mean_error(ece, 300, bins=50) > mean_error(ece, 300, bins=5)",
        "mean_error(debiased_ece, 1000) < mean_error(ece, 1000)",
        "honest.p_value > 0.05 and honest.intervals['ece'][0] == 0 and sharp.p_value < 0.05",
        "first.compare(second)['nll'].significant and not first.compare(elsewhere)['nll'].significant",
        "rejected <= 8",
        "p_values[0] > 0.05 > test.p_value",
    ],
    "tutorials/digits": [
        "cross_entropy.p_value < 0.05",
        "cals_alm.compare(cross_entropy)['ece'].better == 'first'",
        "cals_alm.compare(cross_entropy)['classwise_ece'].better == 'second'",
        "cals_alm.compare(cross_entropy)['accuracy'].better is None",
        "comparison.figures('ece')['CALS-ALM'].significant",
        "not comparison.figures('ece', after=True)['CALS-ALM'].better",
        "methods[0].after[0].nll < methods[1].after[0].nll",
        "methods[0].after[0].ece < methods[1].after[0].ece",
    ],
    "tutorials/trained-model": [
        "before.p_value < 0.05 < after.p_value",
        "calibrator.temperature > 1",
        "after.accuracy == before.accuracy",
        "after.nll < before.nll",
    ],
    "tutorials/long-tails": [
        "all(each.groups['head'].accuracy > 0.9 for each in results.values())",
        "results['ce'].groups['tail'].confidence - results['ce'].groups['tail'].accuracy > 0.1",
        "results['ada-scale'].groups['tail'].accuracy > results['ce'].groups['tail'].accuracy",
        "after.accuracy > results['ce'].accuracy",
    ],
    "tutorials/segmentation": [
        "pooled['cals-alm'].ece < pooled['ce'].ece",
        "pooled['cals-alm'].classes[1].ece < pooled['ce'].classes[1].ece",
        "pooled['cals-alm'].classes[0].ece > pooled['ce'].classes[0].ece",
        "result.samples < test[1].numel()",
        "after['temperature'].nll < pooled['cals-alm'].nll",
        "abs(after['temperature'].ece - pooled['cals-alm'].ece) < 0.003",
    ],
    "tutorials/text": [
        "abs(results['ce'].accuracy - results['cals-alm'].accuracy) < 0.05",
        "results['cals-alm'].ece < results['ce'].ece / 2",
        "loss.passes == 15",
        "history[-1]['eval_nll'] > min(entry['eval_nll'] for entry in history)",
    ],
}
"""What the text of each notebook says about its results, in the names of its own cells."""


QUICKER = """
import calibrant, torch
for function in (calibrant.evaluate, calibrant.Evaluator.__init__):
    function.__kwdefaults__["resamples"] = 200
torch.optim.Adam.__init__.__kwdefaults__["fused"] = True
"""
"""Before the cells: fewer resamples than a thousand, and Adam's steps without a call for each operation."""


def notebooks():
    texts = {path: path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
    return {
        path.relative_to(DOCS).with_suffix("").as_posix(): text
        for path, text in texts.items()
        if "file_format: mystnb" in text
    }


@pytest.mark.parametrize("page", notebooks())
def test_a_notebook_runs_and_its_results_are_what_it_says(page, programs, tmp_path):
    cells = re.findall(
        r"^```\{code-cell\} python\n(?::[^\n]*\n\n?)*(.*?)^```", notebooks()[page], re.M | re.S
    )
    checks = [f"assert {claim}, {claim!r}" for claim in CLAIMS[page]]
    program = tmp_path / "notebook.py"
    program.write_text("\n".join([QUICKER, *cells, *checks]), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [str(programs / "python"), str(program)]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr


def test_no_claim_is_about_a_page_that_is_gone():
    assert set(CLAIMS) == set(notebooks())


class Links(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, page):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        for key in ("href", "src"):
            if attributes.get(key):
                (self.links if tag == "a" else self.loaded).append(attributes[key])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without the results of its notebooks, which `make docs` computes. A warning fails."""
    for package in ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_design"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "--quiet", "-D", "nb_execution_mode=off"]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    return folder


def pages_of(site):
    """The pages, without the theme's own files."""
    return sorted(page for page in site.rglob("*.html") if "_static" not in page.relative_to(site).parts)


def test_every_link_inside_the_site_leads_somewhere(site):
    pages = {page: Links(page) for page in pages_of(site)}
    assert len(pages) > 40
    broken = []
    for page, found in pages.items():
        for link in [*found.links, *found.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_a_network(site):
    for page in pages_of(site):
        assert [each for each in Links(page).loaded if urlsplit(each).netloc] == [], page


@pytest.mark.parametrize(
    "name",
    [
        "calibrant",
        *(f"calibrant.{name}" for name in ("losses", "metrics", "calibrators", "evaluation", "training")),
        *(f"calibrant.{name}" for name in ("predictions", "reports.plots")),
        *(
            f"calibrant.integrations.{name}"
            for name in ("accelerate", "lightning", "sklearn", "torchmetrics", "transformers")
        ),
    ],
)
def test_every_public_name_is_in_the_reference(name, site):
    anchors = set().union(*(Links(page).anchors for page in (site / "api").glob("*.html")))
    module = import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        paths = {f"{name}.{public}", f"calibrant.{public}"}
        assert ismodule(value) or paths & anchors, public


WRAPPER = """<!doctype html><body><script>
const pages = %s, results = {};
(async () => {
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style = "width: %dpx; height: 900px; border: 0";
    frame.src = page;
    document.body.append(frame);
    await new Promise((done) => (frame.onload = done));
    const root = frame.contentDocument.documentElement;
    results[page] = [root.clientWidth, Math.max(root.scrollWidth, frame.contentDocument.body.scrollWidth)];
    frame.remove();
  }
  document.body.innerHTML = `<pre id="results">${JSON.stringify(results)}</pre>`;
})();
</script></body>"""


def widths(site, width, profile):
    """The width of each page's window and of its content, and the errors that the browser logged.

    Pages are opened in frames, because a window of chromium is never as narrow as a phone.
    """
    pages = [page.relative_to(site).as_posix() for page in pages_of(site)]
    wrapper = site / "wrapper.html"
    wrapper.write_text(WRAPPER % (json.dumps(pages), width), encoding="utf-8")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--user-data-dir={profile}", "--virtual-time-budget=120000", "--dump-dom"),
            f"http://127.0.0.1:{server.server_port}/wrapper.html",
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        server.shutdown()
    wrapper.unlink()
    (found,) = re.findall(r'<pre id="results">(.*?)</pre>', result.stdout, re.DOTALL)
    errors = ("Uncaught", "Failed to load", "ERROR:CONSOLE")  # the theme logs other lines
    return json.loads(found), [line for line in result.stderr.splitlines() if any(e in line for e in errors)]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways_or_has_a_script_error(width, site, tmp_path):
    found, log = widths(site, width, tmp_path / "profile")
    assert len(found) > 40
    assert {page: size for page, size in found.items() if size[1] > size[0]} == {}
    assert log == []
