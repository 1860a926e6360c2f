"""Sphinx settings of the documentation site: `make docs` builds it."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from posixpath import normpath, relpath
from pydoc import locate
from typing import Any

from docutils import nodes
from jupyter_client.manager import KernelManager
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import calibrant

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "calibrant"
author = "The calibrant authors"
copyright = author  # noqa: A001 - the name is Sphinx's
release = calibrant.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]

# Pages. Anchors of headings are those of the repository's pages, so links to them work in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Tutorials run during the build. With -W, a cell that fails stops it.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_merge_streams = True
if hasattr(KernelManager, "transport_encryption"):  # without it, every kernel warns about its open port
    KernelManager.transport_encryption.default_value = "auto"

# The reference. Types are in the descriptions, which keeps signatures short enough for narrow screens.
default_role = "py:obj"
add_module_names = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = "calibrant"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "getting-started": [], "changelog": []}

# Pages of the site that show a file from elsewhere in the repository.
INCLUDED = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "benchmarks/README.md": "benchmarks",
    "benchmarks/results/README.md": "results",
}

_URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
REPOSITORY = _URLS.get("Repository", "https://github.com/calibrant/calibrant")
if "Repository" in _URLS:
    html_theme_options["icon_links"] = [
        {"name": "Repository", "url": REPOSITORY, "icon": "fa-brands fa-github", "type": "fontawesome"}
    ]


def site_links(text: str, source: Path, page: str) -> str:
    """Turn relative links of a Markdown file into links of the site.

    Args:
        text: the content of the file.
        source: the file.
        page: the name of the page that shows it, such as "how-to/timm".
    """

    def link(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = (source.parent / path).resolve()
        if re.match(r"[a-z]+:", path) or not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        file = target.relative_to(ROOT).as_posix()
        if file in INCLUDED:
            inside = f"{INCLUDED[file]}.md"
        elif target.is_relative_to(DOCS):
            inside = target.relative_to(DOCS).as_posix()
        else:
            kind = "tree" if target.is_dir() else "blob"
            return f"]({REPOSITORY}/{kind}/main/{file}{anchor})"
        return f"]({relpath(inside, normpath(str(Path(page).parent)))}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", link, text)


def read_page(app: Sphinx, page: str, content: list[str]) -> None:
    """Adapt the links of a page."""
    content[0] = site_links(content[0], app.env.doc2path(page), page)


def read_included(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """Adapt the links of a file that a page includes."""
    content[0] = site_links(content[0], (DOCS / path).resolve(), page)


class Api(SphinxDirective):
    """The reference of a module: a table of its public names, then their docstrings.

    The argument is the module. The content lists the names of a module without ``__all__``. A name that a
    page with a shorter path has described, such as `calibrant.evaluate`, is only linked.
    """

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The nodes of the table and the docstrings."""
        name = self.arguments[0]
        module = import_module(name)
        public = sorted(list(self.content) or module.__all__, key=str.lower)
        found = {each: getattr(module, each) for each in public}
        found = {each: value for each, value in found.items() if not inspect.ismodule(value)}
        table = [".. list-table::", "   :widths: auto", ""]
        described = []
        for each, value in found.items():
            described_there = name != "calibrant" and getattr(calibrant, each, None) is value
            summary = (docstring(module, each, value) or [""])[0]
            table += [f"   * - `~{'calibrant' if described_there else name}.{each}`", f"     - {summary}"]
            if not described_there:
                described += ["", *self.description(module, each, value)]
        lines = ["```{eval-rst}", f".. py:currentmodule:: {name}", "", *table, *described, "```"]
        return self.parse_text_to_nodes("\n".join(lines))

    def description(self, module: Any, name: str, value: Any) -> list[str]:
        """The directive for one name, in reStructuredText."""
        path = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            # Members that a base class of the library describes are not repeated.
            bases = [base for base in value.__mro__[1:] if base.__module__.startswith("calibrant.")]
            known = {member for base in bases for member in vars(base)} | {"extra_repr"}
            made_by_sklearn = {each for each in dir(value) if each.endswith("_request")}
            hidden = ", ".join(sorted(known & set(vars(value)) | made_by_sklearn))
            shown = ["   :members:", "   :show-inheritance:"]
            return [f".. autoclass:: {path}", *shown, *([f"   :exclude-members: {hidden}"] if hidden else [])]
        if callable(value) and hasattr(value, "__qualname__"):
            return [f".. autofunction:: {path}"]
        return [f".. py:data:: {name}", "", *(f"   {line}" for line in docstring(module, name, value))]


def docstring(module: Any, name: str, value: Any) -> list[str]:
    """The lines of a docstring; for data, those of the string below the assignment."""
    if hasattr(value, "__qualname__"):
        return (inspect.getdoc(value) or "").splitlines()
    for candidate in (m for m in sys.modules if m.startswith(module.__name__)):
        found = ModuleAnalyzer.for_module(candidate).find_attr_docs()
        if ("", name) in found:
            return found["", name]
    return []


def keep_initials(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escape a description that is a single letter, such as "K.", which would begin a numbered list."""
    lines[:] = [re.sub(r"^( *\w+: )([A-Z]\.)$", r"\1\\\2", line) for line in lines]


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Link a name that is described under another path: ``Loss``, ``calibrant.losses.base.Loss``."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removesuffix("()")
    objects = env.domains.python_domain.objects
    if target.startswith("calibrant."):
        same = target.rpartition(".")[2]
        paths = [path for path in objects if path.endswith(f".{same}") and locate(path) is locate(target)]
    else:
        paths = [path for path in objects if path.endswith(f".{target}")]
    if not paths:
        return None
    entry = objects[min(paths, key=lambda path: (path.count("."), path))]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the handlers of links."""
    app.add_directive("api", Api)
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("autodoc-process-docstring", keep_initials, priority=100)  # before the arguments are read
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
