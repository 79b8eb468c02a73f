"""Reads untrusted JSON, YAML and lines of text, within limits.

Only regular files of limited size are read, so that a pipe or a device in place of a file cannot
block a program for ever. Content may be nested at most `MAX_DEPTH` deep, and integers may have at
most 128 bits. Every fault becomes an `UnreadableFile` that names the file: no error of a parser
leaves this module.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

import orjson
import yaml

from megatron_ext.errors import CheckpointError, DataError

MAX_BYTES = 256 << 20
"""Size limit of a JSON file; a large vocabulary of words has 30 MiB."""
MAX_YAML_BYTES = 4 << 20
MAX_LINES_BYTES = 4 << 30
"""Size limit of a file that is read by lines; a log of a million steps has a quarter of it."""
MAX_LINE_BYTES = 16 << 20
MAX_DEPTH = 64
"""Limit of nesting; configurations of models are nested 5 deep, and JSON schemas 20."""
MAX_JSON_VALUES = 5_000_000
"""Limit of values in a JSON file; a large vocabulary with its merge rules has 2 million."""
MAX_NODES = 2_000_000
"""Limit of values in a YAML file; each use of an alias counts all values that it repeats."""
_MAX_DIGITS = 1_000
_MAX_INTEGER = 1 << 128
"""Bound on the magnitude of integers; transformers writes int(1e30) for "no maximum length"."""
_MAX_KEY = 1 << 63
"""Bound on the magnitude of integer keys: larger ones could be chosen with equal hashes, which
makes a dict slow.
"""
_PLAIN_TAGS = ("map", "seq", "str", "int", "float", "bool", "null")
_PIPES_OF_SHELLS = ("/dev/fd", "/proc/self/fd")

StrPath = str | os.PathLike[str]


class UnreadableFile(DataError):
    """A file cannot be read, or its content breaks the limits of this module.

    Attributes:
        reason: a clause that says what is wrong.
        missing: whether the file does not exist.
    """

    def __init__(self, path: StrPath, reason: str, *, missing: bool = False) -> None:
        self.path = os.fspath(path)
        self.reason = reason
        self.missing = missing
        super().__init__(f"{self.path} cannot be used ({reason}); copy or make it again.")


def open_regular(path: StrPath) -> BinaryIO:
    """Open a regular file for reading in binary; refuse a pipe, which could block for ever.

    A pipe that a shell has made for a command, as in ``--config <(command)``, is accepted.

    Raises:
        UnreadableFile: the file does not exist, may not be read, or is not regular.
    """
    name = os.fspath(path)
    given_by_shell = os.path.dirname(name) in _PIPES_OF_SHELLS or name == "/dev/stdin"
    waits = 0 if given_by_shell else os.O_NONBLOCK
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | waits)
    except FileNotFoundError as error:
        raise UnreadableFile(name, str(error.strerror), missing=True) from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(name, getattr(error, "strerror", None) or str(error)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not (given_by_shell and stat.S_ISFIFO(mode)):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise UnreadableFile(name, f"it is {kind}, not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: StrPath, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        UnreadableFile: the file cannot be read or is larger.
    """
    with open_regular(path) as file:
        try:
            # The size is checked first, so that a sparse file of a terabyte costs nothing.
            content = b"" if os.fstat(file.fileno()).st_size > limit else file.read(limit + 1)
            size = max(len(content), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise UnreadableFile(path, error.strerror or str(error)) from None
    if size > limit:
        raise UnreadableFile(path, f"it is larger than {limit:,} bytes, the most that is read")
    return content


def read_text(path: StrPath, limit: int = MAX_BYTES) -> str:
    """Return the text of a regular UTF-8 file of at most ``limit`` bytes.

    A byte-order mark is left out. The errors are those of `read_bytes`.
    """
    return _decoded(read_bytes(path, limit), path)


def _decoded(content: bytes, path: StrPath) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFile(path, f"it is not UTF-8 at byte {error.start + 1}") from None


def read_json(path: StrPath, *, not_finite: bool = False, limit: int = MAX_BYTES) -> Any:
    """Read a JSON file of at most ``limit`` bytes.

    With ``not_finite``, accept NaN and Infinity, which strict JSON lacks.

    Raises:
        UnreadableFile: the file or its content breaks the limits of this module.
    """
    return parse_json(read_bytes(path, limit), path, not_finite=not_finite)


def read_json_object(path: StrPath, *, not_finite: bool = False) -> dict[str, Any]:
    """Read a JSON file that must hold an object; ``not_finite`` is the argument of `read_json`."""
    content = read_json(path, not_finite=not_finite)
    if not isinstance(content, dict):
        raise UnreadableFile(path, f"it holds {kind_of(content)} instead of an object")
    return content


def read_model_settings(path: StrPath, advice: str) -> dict[str, Any]:
    """Read a model's config.json; raise a CheckpointError with ``advice`` if that fails."""
    try:
        # Some configurations contain Infinity, for example as a limit, which strict JSON does not
        # allow.
        raw = read_json(path, not_finite=True)
    except UnreadableFile as error:
        raise CheckpointError(f"{path} cannot be read ({error.reason}); {advice}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold names and values; give another folder.")
    return raw


def parse_json(text: str | bytes, source: StrPath, *, not_finite: bool = False) -> Any:
    """Parse JSON text.

    Args:
        source: the file or flag from which the text comes, for errors.
        not_finite: whether to accept NaN, Infinity, and numbers that are too large for a float.

    Raises:
        UnreadableFile: the text is not JSON, repeats a key, or breaks the limits of this module.
    """
    if isinstance(text, bytes):
        text = _decoded(text, source)
    constant = None if not_finite else _refuse_constant
    # Punctuation inside strings is counted too, so this is only an upper bound.
    if sum(map(text.count, "[{,")) > MAX_JSON_VALUES:
        raise UnreadableFile(source, f"it has more than {MAX_JSON_VALUES:,} values")
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=constant)
        _check_values(content)
        if not not_finite:
            _check_finite(content)
    except RecursionError:
        raise UnreadableFile(source, _TOO_DEEP) from None
    except MemoryError:
        raise UnreadableFile(source, "it does not fit in memory") from None
    except ValueError as error:
        raise UnreadableFile(source, f"it is no valid JSON: {error}") from None
    return content


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it has the key {shortened(twice)} twice in one object")
    return content


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"it holds {word}, which is no number")


def _values(content: Any) -> Iterator[tuple[Any, int]]:
    """Yield (value, depth) for every key and value inside parsed content, without recursion."""
    left = [(content, 0)]
    while left:
        value, depth = left.pop()
        yield value, depth
        if isinstance(value, dict):
            left += ((inner, depth + 1) for inner in value)
            left += ((inner, depth + 1) for inner in value.values())
        elif isinstance(value, list | tuple | set):
            left += ((inner, depth + 1) for inner in value)


def _check_values(content: Any) -> None:
    """Raise a ValueError or RecursionError for a value that breaks the limits of this module."""
    for value, depth in _values(content):
        if depth > MAX_DEPTH:
            raise RecursionError
        if isinstance(value, int) and not -_MAX_INTEGER < value < _MAX_INTEGER:
            raise ValueError("it holds an integer of more than 128 bits")
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError("it holds half a surrogate pair") from None


def is_too_deep(content: Any) -> bool:
    """Return whether a parsed value is nested more than `MAX_DEPTH` deep."""
    return any(depth > MAX_DEPTH for _, depth in _values(content))


def _check_finite(content: Any) -> None:
    """Raise a ValueError for a number such as 1e999, which Python reads as infinite."""
    for value, _ in _values(content):
        if isinstance(value, float) and value - value != 0.0:
            raise ValueError("it holds a number that is not finite")


def kind_of(value: Any) -> str:
    """Return the type of a parsed JSON or YAML value in words, such as "a list" or "an object"."""
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    kinds |= {int: "a number", float: "a number", type(None): "nothing"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


def shortened(value: Any, length: int = 60) -> str:
    """Return the ``repr`` of an untrusted value, truncated to ``length`` characters."""
    shown = repr(value[: 2 * length] if isinstance(value, str | bytes) else value)
    return shown if len(shown) <= length else f"{shown[: length - 3]}..."


def read_yaml(path: StrPath) -> Any:
    """Read a YAML file of mappings, lists, strings, numbers, booleans and nulls (`parse_yaml`)."""
    return parse_yaml(_decoded(read_bytes(path, MAX_YAML_BYTES), path), path)


def parse_yaml(text: str, source: StrPath) -> Any:
    """Parse YAML of mappings, lists, strings, numbers, booleans and nulls; refuse other tags.

    ``source`` is the file or flag that errors name. Values are counted in the events of libyaml's
    parser before anything is built, since a few nested aliases can stand for billions of values,
    and its loader, unlike its parser, recurses without limit.

    Raises:
        UnreadableFile: the text is not YAML, or breaks the limits of this module.
    """
    if len(text) > MAX_YAML_BYTES:
        raise UnreadableFile(source, f"it is larger than {MAX_YAML_BYTES:,} bytes")
    try:
        _check_events(text)
        content = yaml.load(text, _loader())
        _check_values(content)
    except RecursionError:
        raise UnreadableFile(source, _TOO_DEEP) from None
    except MemoryError:
        raise UnreadableFile(source, "it does not fit in memory") from None
    except yaml.MarkedYAMLError as error:
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem or error.context or "it ends too early"
        raise UnreadableFile(source, f"it is no valid YAML{place}: {problem}") from None
    except yaml.YAMLError as error:
        raise UnreadableFile(source, f"it is no valid YAML: {_one_line(error)}") from None
    # PyYAML's constructors raise these errors for a value that does not match its tag.
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise UnreadableFile(source, f"it is no valid YAML: {_one_line(error)}") from None
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@lru_cache(1)
def _loader() -> type:
    """Return a class of YAML loader that refuses repeated keys and tags outside `_PLAIN_TAGS`."""
    # The C parser is ten times as fast, but not always built.
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.MappingNode):
                self._refuse_twice(node)
            return super().construct_mapping(node, deep=deep)

        def _refuse_twice(self, node: yaml.MappingNode) -> None:
            seen = set[Any]()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                    continue
                # Compare values, not texts: 0x1 is 1, and Python treats 1, 1.0 and true as the same
                # key.
                value = self.construct_object(key)
                if isinstance(value, int) and not -_MAX_KEY < value < _MAX_KEY:
                    raise _refused(key, "it has an integer of more than 64 bits as a key")
                if value in seen:
                    raise _refused(key, f"it has the key {shortened(key.value)} twice")
                seen.add(value)

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            # Check before the keys of `<<` are merged in: the mapping's own keys may replace those.
            self._refuse_twice(node)
            super().flatten_mapping(node)

    Loader.yaml_constructors = {
        tag: make
        for tag, make in base.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _PLAIN_TAGS
    }
    # A date without quotes stays a string, as in JSON.
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    return Loader


def _refused(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _check_events(text: str) -> None:
    """Raise an error if YAML is nested too deeply, stands for too many values or contains itself.

    The errors are RecursionError and ValueError. Values behind an alias count each time it is used.
    """
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    total = 0
    sizes = dict[str, tuple[int, int]]()
    """Anchor -> (number of values in the content that it names, levels of nesting in it)."""
    opened: list[list[Any]] = []
    """Each list or mapping whose end is still to come, outermost first: [anchor or None, number of
    values so far, levels of nesting in it so far].
    """
    for event in yaml.parse(text, base):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, count, deepest = opened.pop()
            deepest += 1
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append([event.anchor, 1, 0])
            if len(opened) > MAX_DEPTH:
                raise RecursionError
            continue
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias {shortened(event.anchor)} refers to no whole value")
            anchor = None
            count, deepest = sizes[event.anchor]
            total += count
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event)
            anchor = event.anchor
            count = 1
            deepest = 0
            total += 1
        else:
            continue
        if anchor is not None:
            sizes[anchor] = count, deepest
        if opened:
            opened[-1][1] += count
            opened[-1][2] = max(opened[-1][2], deepest)
        if len(opened) + deepest > MAX_DEPTH:
            raise RecursionError
        if total > MAX_NODES:
            raise ValueError(f"it stands for more than {MAX_NODES:,} values")


def _check_scalar(event: yaml.ScalarEvent) -> None:
    """Raise a ValueError for a number with many digits, which Python parses in quadratic time."""
    # A quoted scalar is a number only if it has a tag.
    is_text = not event.implicit[0] and event.tag in (None, "!", "tag:yaml.org,2002:str")
    if len(event.value) > _MAX_DIGITS and not is_text:
        if event.value.lstrip("+-")[:1].isdigit() or event.tag is not None:
            raise ValueError(f"it holds a number of {len(event.value):,} characters")


def lines_of(
    path: StrPath, *, line_bytes: int = MAX_LINE_BYTES, limit: int = MAX_LINES_BYTES
) -> Iterator[bytes | None]:
    """Yield the lines of a regular file, with their line ends.

    None takes the place of a line longer than ``line_bytes``. Only one line is in memory at a time.

    Raises:
        UnreadableFile: the file cannot be read, or is larger than ``limit`` bytes.
    """
    with open_regular(path) as file:
        try:
            if os.fstat(file.fileno()).st_size > limit:
                raise UnreadableFile(path, f"it is larger than {limit:,} bytes")
            while line := file.readline(line_bytes):
                if len(line) < line_bytes or line.endswith(b"\n"):
                    yield line
                    continue
                while (rest := file.readline(line_bytes)) and not rest.endswith(b"\n"):
                    pass
                yield None
        except OSError as error:
            raise UnreadableFile(path, error.strerror or str(error)) from None


def row_of(line: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if the line is no object or breaks the limits."""
    if line is None:
        return None
    row: Any = None
    try:
        row = orjson.loads(line)
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH:
            _check_values(row)
    except RecursionError:
        return None
    except ValueError:
        with suppress(UnreadableFile):
            row = parse_json(line, "a line", not_finite=True)  # Old files have bare NaNs.
    return row if isinstance(row, dict) else None


def rows_of(path: StrPath, is_row: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects for which ``is_row`` is true, from a file with one object per line.

    Other lines are skipped. A missing file yields nothing.

    Raises:
        UnreadableFile: the file cannot be read.
    """
    if not os.path.exists(path):
        return
    for line in lines_of(path):
        row = row_of(line)
        if row is not None and is_row(row):
            yield row


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 to 2**53, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 53
