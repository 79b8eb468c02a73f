"""The site that mkdocs builds of the documentation: its pages, links, flags and interfaces."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from megatron_ext.config.sections import all_flags
from megatron_ext.text.task import TEXT
from megatron_ext.video.task import VIDEO

ROOT = Path(__file__).resolve().parents[1]
INTERFACES = sorted((ROOT / "docs/api").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "DECISIONS.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
COUNTED = "ul ol li table tr td pre h1 h2 h3 h4".split()


@pytest.fixture
def flag_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs/site"))
    return importlib.import_module("flag_pages")


def test_each_flag_has_one_entry_and_links_between_entries_lead_to_one(
    flag_pages: ModuleType,
) -> None:
    pages, _ = flag_pages.flag_pages(ROOT)
    anchors = {
        (path, name) for path, text in pages.items() for name in re.findall(r"{ #(\S+) }", text)
    }
    flags = {
        (f"flags/{x.section}.md", x.positive[0][2:]) for x in (*all_flags(TEXT), *all_flags(VIDEO))
    }
    assert anchors == flags
    links = [link for text in pages.values() for link in re.findall(r"\]\((\S+?)\)", text)]
    assert len(links) > 2 * len(flags)
    for link in links:
        path, _, name = link.partition("#")
        assert f"flags/{path}" in pages and (not name or (f"flags/{path}", name) in anchors), link


def test_an_entry_says_what_differs(flag_pages: ModuleType) -> None:
    expected = {
        "lr": "- **Default:** none in pretrain_gpt.py, `0.0001` in pretrain_video.py",
        "rerun-mode": "- **Megatron-LM:** the same flag, with the default `validate_results`",
        "eval-interval": "- **Megatron-LM:** the same flag, with no default",
        "muon-coefficient-type": "- **Megatron-LM:** the same flag, in releases 0.17 to 0.20",
        "on-spike": "- **Megatron-LM:** has no such flag",
        "spike-window": "- **Note:** It has no effect without [`--on-spike`](",
        "lr-decay-style": "- **Values:** `constant`, `linear`, `cosine`, ",
        "fp8-format": "- **Replaces:** `--fp8`",
        "num-layers": "- **Program:** `pretrain_gpt.py` only",
    }
    text = "\n\n".join(flag_pages.flag_pages(ROOT)[0].values())
    entries = {re.findall(r"{ #(\S+) }", x)[0]: x for x in text.split("\n## ") if " { #" in x}
    assert [flag for flag, words in expected.items() if words not in entries[flag]] == []


@pytest.mark.parametrize("page", INTERFACES, ids=lambda page: page.stem)
def test_pages_of_interfaces_name_what_exists_and_has_a_docstring(page: Path) -> None:
    places = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert places
    for place in places:
        module, _, name = place.rpartition(".")
        named = getattr(importlib.import_module(module), name)
        is_type = not inspect.isclass(named) and not inspect.isroutine(named)
        assert is_type or inspect.getdoc(named), place


class Html(HTMLParser):
    """A page: the numbers of its elements, its ids, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements[tag] += 1
        self.ids |= {given["id"] or ""} if "id" in given else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        elif tag in ("link", "script", "img"):
            self.loaded.append(given.get("href") or given.get("src") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Html]:
    """Build the site, and return its pages by their paths."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="pip install -e '.[docs]' -c constraints.txt")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout
    files = folder.rglob("*.html")
    return {path: Html(path.read_text(encoding="utf-8")) for path in files if path.stem != "404"}


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_page_and_no_page_loads_from_elsewhere(
    site: dict[Path, Html],
) -> None:
    assert len(site) > 100
    for page, html in site.items():
        for link in (*html.links, *html.loaded):
            parts = urlsplit(link)
            if parts.scheme:
                assert link not in html.loaded, f"{page} loads {link}"
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file(), f"{page} has a link to {link}"
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in {"__comments", *site[target].ids}, (
                    f"{page}: {link}"
                )


@pytest.mark.slow
def test_files_that_a_page_names_are_pages_too(site: dict[Path, Html]) -> None:
    links = {page.name: html.links for page, html in site.items()}
    assert "../megatron_ext/train/step.py.html" in links["reading_order.html"]
    assert "../pretrain_gpt.py.html" in links["reading_order.html"]
    (step,) = (page for page in site if page.name == "step.py.html" and page.parent.name == "train")
    assert "class StepRunner" in re.sub(r"<[^>]*>", "", step.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_pages_have_the_same_parts_as_on_github(site: dict[Path, Html]) -> None:
    """Compare with CommonMark, in which a list needs no empty line before it, for example."""
    root = min(site, key=lambda page: len(page.parts)).parent
    for page in PAGES:
        expected = Html(MarkdownIt("commonmark").enable("table").render(page.read_text("utf-8")))
        path = root / page.relative_to(ROOT).with_suffix(".html")
        built = path if path in site else path.with_name("index.html")
        article = built.read_text("utf-8").partition("<article")[2].partition("</article>")[0]
        for name in COUNTED:
            assert Html(article).elements[name] == expected.elements[name], (page.name, name)
