"""One line of the input to the texts of its keys."""

from __future__ import annotations

import json
from collections.abc import Sequence

import orjson


class BadLine(Exception):
    """A line that holds no usable document; the message is the predicate of a sentence."""


def parse_line(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """Returns, for each key, the texts of its sequences: one for a string, several for a list.

    Raises:
        BadLine: no JSON object, a key is missing, or a value is neither text nor a list of texts.
    """
    document = _load(line, keys)
    if not isinstance(document, dict):
        raise BadLine("is not a JSON object")
    texts: list[list[str]] = []
    for key in keys:
        value = document.get(key)
        if isinstance(value, str):
            texts.append([value])
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            texts.append(value)
        elif key not in document:
            raise BadLine(f"has no key {key!r}")
        else:
            kind = "null" if value is None else type(value).__name__
            raise BadLine(f"has {kind} under key {key!r}, not a text or a list of texts")
    return texts


def _load(line: bytes, keys: Sequence[str]) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not line.strip():
            raise BadLine("is blank") from None
        return _load_leniently(line, keys, str(error))


def _load_leniently(line: bytes, keys: Sequence[str], complaint: str) -> object:
    """Python's parser takes NaN, and half surrogate pairs under keys that nobody asks for."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError):
        raise BadLine(f"is not valid JSON ({complaint})") from None
    if isinstance(document, dict):
        for key in keys:
            _refuse_half_surrogates(key, document.get(key))
    return document


def _refuse_half_surrogates(key: str, value: object) -> None:
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise BadLine(f"has half a surrogate pair under key {key!r}") from None
