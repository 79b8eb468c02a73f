"""Reads a page back, and checks that it is whole and runs no code of others."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "img", "input", "br", "link"}


class WholePage(HTMLParser):
    """Checks that each tag is closed in order, and collects texts, ids and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), (name, value)
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "data", "srcset"):
                self.addresses.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script", re.DOTALL)


def curves_of(text: str) -> dict[str, Any]:
    """Return the data of the curves in a page."""
    (block,) = (body for kind, body in SCRIPT.findall(text) if "application/json" in kind)
    content: dict[str, Any] = json.loads(block)
    return content


def check_page(text: str, *, live: bool = False) -> None:
    """Check what holds for every page with curves, which only a ``live`` one may renew."""
    found = WholePage(text)
    assert len(found.ids) == len(set(found.ids))
    for address in found.addresses:
        assert re.match(r"#[\w-]+$|\./|data:image/(svg\+xml|png);base64,", address), address
        if address.startswith("#"):
            assert address[1:] in found.ids
    for mark in curves_of(text)["marks"] if "curves" in found.ids else []:
        assert mark["target"] in found.ids
    own = SCRIPT.sub("", text)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org)", own)
    # A browser runs exactly the scripts whose digests the page names, and they are ours.
    bodies = [body for kind, body in SCRIPT.findall(text) if "application/json" not in kind]
    assert len(bodies) == (3 if live else 2)
    digests = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in bodies]
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert f"script-src {' '.join(f'&#39;sha256-{x}&#39;' for x in digests)};" in policy
    assert ("connect-src" in policy) is ("fetch(" in "".join(bodies)) is live
    assert "Permission is hereby granted, free of charge" in bodies[0]
