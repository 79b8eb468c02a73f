"""Chooses the pages of the site, which lie at the same paths as in the repository.

The site has README.md as its first page, the pages that docs/README.md lists, the pages of flags,
and each file of the repository that one of its pages links to or names between backticks. A file
that is not Markdown becomes a page that shows its text.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from flag_pages import flag_pages  # noqa: E402 - it needs the package of this repository

HOME = "README.md"
LIST = "docs/README.md"
"""The page that lists the others: its headings are the sections of the navigation."""
PROJECT = ["CONTRIBUTING.md", "DECISIONS.md", "CHANGELOG.md"]
"""The last pages, also in the results of a search."""
ASSETS = ["docs/site/site.css", "docs/site/search.js"]
FLAG_PAGES, FLAG_NAV = flag_pages(ROOT)

LISTED = re.compile(r"^## (.+)|\]\(([\w./]+\.md)\)", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#]+)(?=[)#])")
NAMED = re.compile(
    r"(?<![\[`\w])`(?P<name>[\w.-]+(?:/[\w.-]+)*\.(?:md|py|sh|sbatch|txt|yaml|yml))`(?![`\]])"
)
PROSE = re.compile(r"(^ *```.*?^ *```$|^#.*?$)", re.MULTILINE | re.DOTALL)
"""Splits a page into its prose, and code and headings between it."""
CODE = re.compile(r"<code>[^<]*</code>")
DASHES = re.compile(r"--\w+")
PLACES = (".", "megatron_ext")
"""The folders from which pages name files."""
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".yml": "yaml"}
UNCHANGED = (".md", ".png", ".svg", ".css", ".js")
"""Suffixes of files that are part of the site as they are; of others it has a page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    nav: list[dict[str, Any]] = [{"Home": HOME}]
    for heading, path in LISTED.findall((ROOT / LIST).read_text(encoding="utf-8")):
        if heading:
            nav.append({heading: []})
        else:
            next(iter(nav[-1].values())).append(posixpath.join("docs", path))
    next(iter(nav[1].values())).insert(0, LIST)
    config.nav = [*nav, {"Flags": FLAG_NAV}, {"Project": PROJECT}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme and of the site's pages."""
    chosen = Files([file for file in files if file.src_dir != config.docs_dir])
    for path, text in FLAG_PAGES.items():
        chosen.append(File.generated(config, path, content=text))
    in_nav = [path for path in _paths_in(config.nav) if path not in FLAG_PAGES]
    waiting = [*ASSETS, *in_nav]
    while waiting:
        path = waiting.pop()
        if chosen.get_file_from_path(_page_of(path)) is None:
            chosen.append(_file(path, config, in_nav))
            waiting += _files_in(path)
    return chosen


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the page link to the pages of the files that it links to or names."""
    path = page.file.src_uri
    if path in PROJECT:
        page.meta["search"] = {"boost": 0.3}
    if page.file.generated_by is not None:
        return markdown
    folder = posixpath.dirname(path) or "."

    def replaced(match: re.Match[str]) -> str:
        target = _target(match, path)
        if target is None:
            return match[0]
        place = posixpath.relpath(_page_of(target), folder)
        return place if match.re is LINK else f"[{match[0]}]({place})"

    parts = PROSE.split(markdown)
    parts[::2] = [NAMED.sub(replaced, LINK.sub(replaced, part)) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the dashes of a flag on one line with its first word."""
    return CODE.sub(lambda code: DASHES.sub(r'<span class="kept">\g<0></span>', code[0]), html)


def _files_in(path: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to or names."""
    if path.endswith(".md"):
        for part in PROSE.split((ROOT / path).read_text(encoding="utf-8"))[::2]:
            for match in (*LINK.finditer(part), *NAMED.finditer(part)):
                target = _target(match, path)
                if target is not None:
                    yield target


def _target(match: re.Match[str], page: str) -> str | None:
    """Return the file that a match of `LINK` or `NAMED` means; None if it is not another file."""
    if match.re is LINK:
        paths = [posixpath.join(posixpath.dirname(page), match["path"])]
    else:
        paths = [posixpath.join(place, match["name"]) for place in PLACES]
    found = (posixpath.normpath(path) for path in paths if (ROOT / path).is_file())
    target = next(found, None)
    return None if target == page else target


def _page_of(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    return path if path.endswith(UNCHANGED) else f"{path}.md"


def _file(path: str, config: MkDocsConfig, in_nav: list[str]) -> File:
    """Return the file of the site for a file of the repository."""
    inclusion = InclusionLevel.INCLUDED if path in in_nav else InclusionLevel.NOT_IN_NAV
    if path.endswith(UNCHANGED):
        urls = config.use_directory_urls
        return File(path, str(ROOT), config.site_dir, urls, inclusion=inclusion)
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    front = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n"
    content = f"{front}\n# {path}\n\n``````{language}\n{text}\n``````\n"
    return File.generated(config, _page_of(path), content=content, inclusion=inclusion)


def _paths_in(nav: Any) -> list[str]:
    """Return the paths of the pages in a navigation."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [path for item in items for path in _paths_in(item)]
