"""Cutting text into sentences by rule, without any model to download.

A sentence ends at `. ! ? …` (with closing quotes or brackets) before white space, unless the
period closes a known abbreviation, an initial, or an ordinal number, or the next word starts in
lower case; and at the full stops of Chinese, Japanese and Hindi, which need no white space.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_COMMON = "a.m p.m etc vs no nr vol fig figs cf ca al approx resp dept inc ltd co corp st dr prof"
_ABBREVIATIONS: dict[str, str] = {
    "english": "mr mrs ms messrs jr sr rev hon gen col lt sgt capt gov sen rep pres e.g i.e viz "
    "op u.s u.k u.n jan feb mar apr jun jul aug sep sept oct nov dec mt ft",
    "german": "z.b d.h u.a bzw usw evtl ggf hr fr frl str tel abs bd hrsg inkl s.o s.u u.s.w v.a "
    "geb gest jh jhd mio mrd jan feb mär apr jun jul aug sep okt nov dez",
    "french": "m mm mme mlle av bd c.-à-d p.ex env ex éd hab janv févr avr juil sept oct nov déc",
    "spanish": "sr sra srta d dña ud uds ej p.ej pág págs aprox av avda ee.uu núm ene feb mar abr "
    "jul ago sep oct nov dic",
    "italian": "sig sig.ra sigg dott dott.ssa avv ing es p.es pag ecc art gen feb mar apr giu lug "
    "ago set ott nov dic",
    "portuguese": "sr sra srta exa d dra pág págs ex p.ex av núm jan fev mar abr jun jul ago set "
    "out nov dez",
    "dutch": "dhr mevr mw drs ir ing bijv d.w.z m.a.w o.a blz jan feb mrt apr jun jul aug sep okt "
    "nov dec",
    "russian": "г гг т.е т.д т.п и.о др проф акад стр рис им ул д кв руб коп тыс млн млрд см",
}
LANGUAGES = tuple(_ABBREVIATIONS)
_END = re.compile(
    r"""(?P<mark>[.!?…]+)(?P<close>["'”’»)\]]*)(?P<space>\s+)(?=(?P<next>\S))"""
    r"""|(?P<wide>[。！？｡।]+[”’」』）"']*)(?P<wide_space>\s*)(?=\S)"""
)
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘«„¿¡]*$")

Splitter = Callable[[str], list[str]]


def sentence_splitter(lang: str, *, keep_newlines: bool) -> Splitter:
    """Return the function from a text to its sentences.

    White space between sentences is dropped; with `keep_newlines` it stays at the end of the
    sentence before it, so that the sentences joined give the text again.

    Args:
        lang: one of `LANGUAGES`.
    """
    known = frozenset((_COMMON + " " + _ABBREVIATIONS[lang]).split())
    ordinals = lang in ("german", "dutch")

    def split(text: str) -> list[str]:
        sentences, start = [], 0
        for match in _END.finditer(text):
            if match["mark"] is not None and not _ends_here(text, match, known, ordinals):
                continue
            space = match["space"] if match["mark"] is not None else match["wide_space"]
            end = match.end() if keep_newlines else match.end() - len(space)
            sentences.append(text[start:end] if keep_newlines else text[start:end].strip())
            start = match.end()
        rest = text[start:] if keep_newlines else text[start:].strip()
        return [*sentences, rest] if rest else sentences

    return split


def _ends_here(text: str, match: re.Match[str], known: frozenset[str], ordinals: bool) -> bool:
    if match["next"].islower() and "\n\n" not in match["space"]:
        return False
    if match["mark"] != ".":
        return True
    if "\n\n" in match["space"] or match["close"]:
        return True
    # A word longer than any abbreviation needs no look further back.
    word = _LAST_WORD.search(text, max(0, match.start() - 24), match.start())
    last = word[0] if word else ""
    if len(last) == 1 and last.isalpha() and last.isupper() and last != "I":
        return False
    if ordinals and last.isdigit() and len(last) <= 2:
        return False
    return last.lower() not in known
