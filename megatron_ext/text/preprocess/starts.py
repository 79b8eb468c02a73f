"""How a file of lines begins: byte-order marks, other encodings than UTF-8, and JSON arrays.

A JSON array of rows is a common form of small chat sets. Its items are written one in a line, and
these lines are read as those of any jsonl file.
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
# UTF-32's mark begins with UTF-16's, so it is looked for first.
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
"""An item whose error is so near to the end of what was read may be cut there, not wrong."""


def is_blank(line: bytes) -> bool:
    """Tell whether a line holds nothing but white space, and perhaps a byte-order mark."""
    return not line.removeprefix(BYTE_ORDER_MARK).strip()


def check_encoding(source: str, piece: bytes) -> None:
    """Raise a DataError if the first bytes of a text are of UTF-16 or UTF-32."""
    for start, name in _OTHER_ENCODINGS.items():
        if piece.startswith(start):
            raise DataError(
                f"{source} is text in {name}, but UTF-8 is needed; convert it, for example by "
                f"`iconv -f {name} -t UTF-8`."
            )


def is_array(path: str, packing: str) -> bool:
    """Tell whether a file, plain or packed, is a JSON array of objects, or an empty one."""
    if packing not in ("plain", "gzip", "zstd"):
        return False
    head, _ = next(_pieces(path, packing, _HEAD_BYTES), (b"", 0))
    return _ARRAY.match(head.removeprefix(BYTE_ORDER_MARK)[:_HEAD_BYTES]) is not None


def write_items(path: str, packing: str, source: str, out: BinaryIO) -> None:
    """Write each item of a JSON array as a line; raise a DataError for a damaged array."""
    for item in _items(path, packing, source):
        # JSON has line ends between its values only, never within a text.
        out.write(item.replace("\r", " ").replace("\n", " ").encode("utf-8") + b"\n")


def _pieces(path: str, packing: str, size: int) -> Iterator[tuple[bytes, int]]:
    if packing != "plain":
        yield from unpacked(path, packing, size)
        return
    with open(path, "rb") as stream:
        while piece := stream.read(size):
            yield piece, len(piece)


def _items(path: str, packing: str, source: str) -> Iterator[str]:
    """Yield the text of each item; read on where an item is cut, each time as much again."""
    decoder = json.JSONDecoder()
    texts = _texts(path, packing, source)
    text, at, number, ended = "", 0, 0, False

    def more() -> None:
        nonlocal text, at, ended
        parts = [text[at:]]
        size = 0
        least = len(text) - at
        while size <= least and not ended:
            piece = next(texts, None)
            ended = piece is None
            parts.append(piece or "")
            size += len(piece or "")
        text = "".join(parts)
        at = 0

    def next_character() -> str:
        nonlocal at
        while True:
            space = _SPACE.match(text, at)
            at = space.end() if space is not None else at
            if at < len(text) or ended:
                return text[at : at + 1]
            more()

    def damaged(why: str) -> DataError:
        return DataError(
            f"{source} begins as a JSON array, but {why}; mend it, or give one object in a line."
        )

    next_character()
    at += 1  # the bracket, which `is_array` has seen
    if next_character() == "]":
        at += 1
    else:
        while True:
            number += 1
            next_character()
            try:
                _, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                cut = error.pos >= len(text) - _CUT_WITHIN or error.msg.startswith("Unterminated")
                if ended or not cut:
                    raise damaged(f"its item {number} is not valid JSON ({error.msg})") from None
                more()
                number -= 1
                continue
            except RecursionError:
                raise damaged(f"its item {number} is nested too deeply") from None
            if end == len(text) and not ended:  # a number may go on
                more()
                number -= 1
                continue
            yield text[at:end]
            at = end
            mark = next_character()
            at += 1
            if mark == "]":
                break
            if mark != ",":
                what = f"{mark!r} follows" if mark else "the file ends after"
                raise damaged(f"{what} its item {number}, not a comma or a bracket")
    if next_character():
        raise damaged(f"it goes on after the end of the array ({number} items)")


def _texts(path: str, packing: str, source: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    at = 0
    try:
        for piece, _ in _pieces(path, packing, BLOCK_BYTES):
            yield decoder.decode(piece)
            at += len(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8 (byte {at + error.start + 1}); convert it by `iconv`."
        ) from None


def unpack_array(path: str, packing: str, source: str, target: Path) -> None:
    """Write the items of a JSON array to ``target``, which appears when it is whole."""
    temporary = target.with_suffix(".unpacking")
    with open_new(temporary, "wb") as out:
        write_items(path, packing, source, out)
    temporary.replace(target)
