"""Writes HTML pages that need no other file; jinja2 escapes each string that is filled in."""

from __future__ import annotations

import importlib.resources
import os
from functools import cache
from pathlib import Path

from markupsafe import Markup

from megatron_ext.disk.writing import write_text


@cache
def style_sheet() -> str:
    """Return the CSS that all HTML reports share, from `page.css`."""
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def write_page(path: Path, text: str) -> None:
    """Write the HTML ``text`` to ``path``, either whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_text(temporary, text, errors="replace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def page_of(package: str, template: str, /, *parts: str, **facts: object) -> str:
    """Render a jinja2 template to an HTML page; ``facts`` are the template's variables.

    ``template`` is the name of a file in the Python package ``package``. The template extends
    `layout.html`, the layout of all reports, and may use macros from `macros.html` and from the
    files ``parts`` of the package; it can read no other file. Each string of ``facts`` is escaped.
    """
    # Imported here, since only pages need it.
    from jinja2 import DictLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    places = {"layout.html": __package__, "macros.html": __package__}
    places |= dict.fromkeys((template, *parts), package)
    templates = {
        file: importlib.resources.files(place).joinpath(file).read_text(encoding="utf-8")
        for file, place in places.items()
    }
    environment = ImmutableSandboxedEnvironment(
        loader=DictLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(style=Markup(style_sheet()), **facts)
