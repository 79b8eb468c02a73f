"""Looks at the beginning of a file of lines: byte-order marks, encodings, and JSON arrays.

Small sets of conversations are often a JSON array of rows. Its items are written to a file, one per
line, which is then read like any jsonl file.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_ext.disk.writing import open_new
from megatron_ext.errors import DataError
from megatron_ext.text.preprocess.packed import BLOCK_BYTES, unpacked

BYTE_ORDER_MARK = codecs.BOM_UTF8
_HEAD_BYTES = 4096
# UTF-32 comes first, because its mark begins with the mark of UTF-16.
_OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b'{\x00"\x00': "UTF-16LE",
    b'\x00{\x00"': "UTF-16BE",
    b"[\x00{\x00": "UTF-16LE",
    b"\x00[\x00{": "UTF-16BE",
}
_ARRAY = re.compile(rb"\s*\[\s*(\{|\]|$)")
_SPACE = re.compile(r"[ \t\r\n]*")
_CUT_WITHIN = 16
"""A number of characters: a syntax error this close to the end of the text read so far is no fault.

It may only mean that more text must be read. An error farther from the end means that a JSON item
is invalid.
"""


def is_blank(line: bytes) -> bool:
    """Tell whether a line holds only white space, and perhaps a byte-order mark."""
    return not line.removeprefix(BYTE_ORDER_MARK).strip()


def check_encoding(source: str, piece: bytes) -> None:
    """Raise a DataError if ``piece``, the beginning of a text, is in UTF-16 or UTF-32.

    Its message calls the text ``source``.
    """
    for start, name in _OTHER_ENCODINGS.items():
        if piece.startswith(start):
            raise DataError(
                f"{source} is text in {name}, but UTF-8 is needed; convert it, for example by "
                f"`iconv -f {name} -t UTF-8`."
            )


def is_array(path: str, packing: str) -> bool:
    """Tell whether a file, plain or compressed, is a JSON array that is empty or holds objects.

    ``packing`` is the kind of the file, such as "gzip" (`packing_of`). Only its beginning is read.
    """
    if packing not in ("plain", "gzip", "zstd"):
        return False
    head, _ = next(_pieces(path, packing, _HEAD_BYTES), (b"", 0))
    return _ARRAY.match(head.removeprefix(BYTE_ORDER_MARK)[:_HEAD_BYTES]) is not None


def write_items(path: str, packing: str, source: str, out: BinaryIO) -> None:
    """Write each item of the JSON array in the file ``path`` as a line to ``out``.

    ``packing`` is the kind of the file, such as "gzip" (`packing_of`); errors call it ``source``.
    Raise a DataError for a damaged array.
    """
    for item in _items(path, packing, source):
        # In JSON, line ends can only be white space between values; texts have them escaped.
        out.write(item.replace("\r", " ").replace("\n", " ").encode("utf-8") + b"\n")


def _pieces(path: str, packing: str, size: int) -> Iterator[tuple[bytes, int]]:
    if packing != "plain":
        yield from unpacked(path, packing, size)
        return
    with open(path, "rb") as stream:
        while piece := stream.read(size):
            yield piece, len(piece)


def _items(path: str, packing: str, source: str) -> Iterator[str]:
    """Yield the text of each item of a JSON array in a file, which is read piece by piece.

    If the text read so far ends within an item, at least as much again is read before the item is
    parsed anew, so that the time for a long item is linear in its length.
    """
    decoder = json.JSONDecoder()
    texts = _texts(path, packing, source)
    text = ""
    position = 0
    number = 0
    ended = False

    def more() -> None:
        nonlocal text, position, ended
        parts = [text[position:]]
        size = 0
        least = len(text) - position
        while size <= least and not ended:
            piece = next(texts, None)
            ended = piece is None
            parts.append(piece or "")
            size += len(piece or "")
        text = "".join(parts)
        position = 0

    def next_character() -> str:
        nonlocal position
        while True:
            space = _SPACE.match(text, position)
            position = space.end() if space is not None else position
            if position < len(text) or ended:
                return text[position : position + 1]
            more()

    def damaged(why: str) -> DataError:
        return DataError(
            f"{source} begins as a JSON array, but {why}; mend it, or give one object in a line."
        )

    next_character()
    position += 1  # Skip the opening bracket, which `is_array` has seen.
    if next_character() == "]":
        position += 1
    else:
        while True:
            number += 1
            next_character()
            try:
                _, end = decoder.raw_decode(text, position)
            except json.JSONDecodeError as error:
                cut = error.pos >= len(text) - _CUT_WITHIN or error.msg.startswith("Unterminated")
                if ended or not cut:
                    raise damaged(f"its item {number} is not valid JSON ({error.msg})") from None
                more()
                number -= 1
                continue
            except RecursionError:
                raise damaged(f"its item {number} is nested too deeply") from None
            if end == len(text) and not ended:  # If the item is a number, more digits may follow.
                more()
                number -= 1
                continue
            yield text[position:end]
            position = end
            mark = next_character()
            position += 1
            if mark == "]":
                break
            if mark != ",":
                what = f"{mark!r} follows" if mark else "the file ends after"
                raise damaged(f"{what} its item {number}, not a comma or a bracket")
    if next_character():
        raise damaged(f"it goes on after the end of the array ({number} items)")


def _texts(path: str, packing: str, source: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    decoded = 0
    try:
        for piece, _ in _pieces(path, packing, BLOCK_BYTES):
            yield decoder.decode(piece)
            decoded += len(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8 (byte {decoded + error.start + 1}); convert it by `iconv`."
        ) from None


def unpack_array(path: str, packing: str, source: str, target: Path) -> None:
    """Write the items of the JSON array in the file ``path`` to the file ``target``, one per line.

    ``packing`` is the kind of the file, such as "gzip" (`packing_of`); errors call it ``source``.
    ``target`` appears only when it is complete.
    """
    temporary = target.with_suffix(".unpacking")
    with open_new(temporary, "wb") as out:
        write_items(path, packing, source, out)
    temporary.replace(target)
