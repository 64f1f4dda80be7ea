"""Sphinx configuration of the documentation site.

    uv run --group docs sphinx-build -W -b html docs build/docs

The build needs no network and no accelerator. Pages are MyST Markdown. The pages of the Python API
are written to docs/reference/api/ at the start of a build, one per package; autodoc renders them.
At the end of a build, every link of its pages to another file or section must exist.
"""

import os
import pkgutil
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.errors import SphinxError

DOCS = Path(__file__).parent
ROOT = DOCS.parent
API = DOCS / "reference" / "api"
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "jaxrl"
copyright = "the jaxrl authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["plans/*.txt", "plans/*.json"]
templates_path = []

html_theme = "sphinx_book_theme"
html_title = "jaxrl"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "navbar_persistent": [],  # the search field is in the sidebar
}
copybutton_exclude = ".linenos, .gp"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_mock_imports = [
    "gguf",
    "gymnasium",
    "mlflow",
    "prometheus_client",
    "ray",
    "reasoning_gym",
    "wandb",
]
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "ignore-module-all": True}

PACKAGES = {  # page -> what it is; the pages of the Python API in reading order
    "jaxrl.notebook": "functions for notebooks and scripts",
    "jaxrl.types": "data types that cross package borders",
    "jaxrl.config": "configuration keys, checks and the command line",
    "jaxrl.algorithms": "advantages, losses and importance correction",
    "jaxrl.data": "datasets, chat templates, iteration and packing",
    "jaxrl.rewards": "reward functions and their worker processes",
    "jaxrl.environments": "environments of multi-turn episodes",
    "jaxrl.subprocesses": "worker processes: their start, channel, output and end",
    "jaxrl.checkpoint": "checkpoints: states, checksums, weights",
    "jaxrl.tracking": "loggers and trackers",
    "jaxrl.http": "HTTP connections, bodies and errors",
    "jaxrl.kernels": "attention, logprob and grouped matmul kernels",
    "jaxrl.models": "the decoder, its families and file formats",
    "jaxrl.layout": "mesh and sharding rules of each role",
    "jaxrl.engine": "the inference engine",
    "jaxrl.rollout": "from prompts to rollouts",
    "jaxrl.learner": "loss, optimizer and the compiled update",
    "jaxrl.trainer": "the training loop",
    "jaxrl.runtime": "several hosts, signals, compilation and host memory",
    "jaxrl.planner": "memory and time of a run on absent devices",
    "jaxrl.report": "the HTML report of a run",
    "jaxrl.serve": "the OpenAI-compatible server",
    "jaxrl.api": "the training API",
    "sharding": "mesh, logical axes and sharding rules",
}


def modules_of(package: str) -> list[str]:
    """The package's public modules, itself first, without entry points."""
    found = [package]
    folder = ROOT / package.replace(".", "/")
    for info in pkgutil.walk_packages([str(folder)], prefix=package + "."):
        if not info.name.rpartition(".")[2].startswith("_"):
            found.append(info.name)
    return [found[0], *sorted(found[1:])]


def write_api_pages(app) -> None:
    """Write one page per package; a page that is up to date is left alone."""
    API.mkdir(exist_ok=True)
    wanted = {
        API / f"{package}.md": api_page(package, words) for package, words in PACKAGES.items()
    }
    for page in API.glob("*.md"):
        if page not in wanted:
            page.unlink()
    for page, text in wanted.items():
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def api_page(package: str, words: str) -> str:
    lines = [f"# `{package}`: {words}", ""]
    for module in modules_of(package):
        if module != package:
            lines += [f"## `{module}`", ""]
        lines += ["```{eval-rst}", f".. automodule:: {module}", "```", ""]
    return "\n".join(lines)


def markdown_to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Turn a docstring of plain text into reStructuredText, in place.

    Prose keeps its words with special characters escaped, `code` becomes ``code``, and indented
    paragraphs (equations, tables, commands) become literal blocks.
    """
    out: list[str] = []
    paragraph: list[str] = []

    def flush() -> None:
        if not paragraph:
            return
        if any(line[:1] in (" ", "\t") for line in paragraph) or is_list(paragraph):
            out.extend(["::", ""])
            out.extend("    " + line for line in paragraph)
        else:
            out.extend(escaped(line) for line in paragraph)
        out.append("")
        paragraph.clear()

    for line in lines:
        if line.strip():
            paragraph.append(line)
        else:
            flush()
    flush()
    lines[:] = out


def is_list(paragraph: list[str]) -> bool:
    return any(re.match(r"([-*|]|\d+\.) ?", line) for line in paragraph)


def escaped(line: str) -> str:
    parts = re.split(r"`+([^`]+)`+", line)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*|_`<>])", r"\\\1", parts[i])
    for i in range(1, len(parts), 2):
        joined = re.match(r"\w", parts[i + 1])  # inline markup must end at a word boundary
        parts[i] = f"``{parts[i].strip()}``" + ("\\ " if joined else "")
    return "".join(parts)


class Page(HTMLParser):
    """The sections and links of a page of the site."""

    def __init__(self, text: str):
        super().__init__()
        self.sections: set[str | None] = {""}
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.sections |= {given.get("id"), given.get("name")}
        self.links += [link for name in ("href", "src") if (link := given.get(name))]


def check_links(app, exception) -> None:
    """Raises SphinxError with the links inside the site that lead to no file or section."""
    if exception or app.builder.format != "html":
        return
    files = [f for f in Path(app.outdir).resolve().rglob("*.html") if "_static" not in f.parts]
    pages = {file: Page(file.read_text()) for file in files}
    broken = [
        f"{f.name}: {link}" for f in files for link in pages[f].links if not leads(f, link, pages)
    ]
    if broken:
        raise SphinxError("links that lead nowhere:\n  " + "\n  ".join(sorted(set(broken))))


def leads(file: Path, link: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    sections = pages[target].sections if target in pages else {unquote(parts.fragment)}
    return target.exists() and unquote(parts.fragment) in sections


def setup(app) -> dict:
    app.connect("build-finished", check_links)
    app.connect("builder-inited", write_api_pages)
    app.connect("autodoc-process-docstring", markdown_to_rst)
    return {"parallel_read_safe": True}
