"""Checks the entries in the files of a Hugging Face tokenizer, and finds those that are ignored.

Special tokens are named in tokenizer_config.json and special_tokens_map.json. As in transformers,
an entry of special_tokens_map.json overrides the same entry of tokenizer_config.json. But if
tokenizer_config.json has `added_tokens_decoder`, special_tokens_map.json is ignored.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import orjson

from megatron_ext.disk.reading import read_json
from megatron_ext.errors import DataError

NAMED = tuple(f"{name}_token" for name in ("eos", "bos", "unk", "sep", "pad", "cls", "mask"))
"""The keys of the special tokens that have a fixed role, such as `eos_token`."""
LISTED = ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder")
"""The keys of lists and mappings of further special tokens."""
DESCRIBING = tuple(
    "_commit_hash _name_or_path backend is_local local_files_only model_input_names name_or_path "
    "processor_class special_tokens_map_file tokenizer_file transformers_version".split()
)
"""Entries that only describe the origin of the files, so nothing is lost by ignoring them."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_READ = (*NAMED, *LISTED, "tokenizer_class", "auto_map", "chat_template", "split_special_tokens")
USUAL = {
    "add_bos_token": False,
    "add_eos_token": False,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "errors": "replace",
    "padding_side": "right",
    "spaces_between_special_tokens": False,
    "truncation_side": "right",
    "use_default_system_prompt": False,
}
"""Ignored entries and their default values; at these values, nothing is lost by ignoring them."""
_ENDLESS = 10**20
"""The least `model_max_length` that means no limit; transformers writes such a number."""
_BOOLEANS = ("add_prefix_space", "split_special_tokens", "add_bos_token", "add_eos_token")
_SIDES = ("padding_side", "truncation_side")
_TEMPLATES = ("default", "tool_use")
"""The names of the chat templates that are used; the second is for conversations with tools."""


def check_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Raise a DataError for an entry of a tokenizer's file whose value has a wrong type."""

    def refuse(name: str, rule: str) -> NoReturn:
        raise DataError(f"{path} has under `{name}` what {rule}; copy the tokenizer again.")

    def check_token(name: str, token: Any) -> None:
        if isinstance(token, str):
            return
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            refuse(name, "is no token: neither a text nor an object with a text as `content`")
        for key, value in token.items():
            if key in _FLAGS and not isinstance(value, bool):
                refuse(f"{name}.{key}", "must be true or false")
            if key == "__type" and value != "AddedToken":
                refuse(f"{name}.{key}", "must be AddedToken")
            if key not in (*_FLAGS, "content", "__type", "id"):
                refuse(f"{name}.{key}", "is no entry of a token")

    for name, value in entries.items():
        if name in _SIDES and value not in ("left", "right"):
            refuse(name, "must be left or right")
        if value is None:
            continue
        if name in NAMED:
            check_token(name, value)
            # Only this key makes transformers read an object as a token, except in
            # special_tokens_map.json.
            if isinstance(value, dict) and "__type" not in value and "_map" not in path.name:
                refuse(name, 'is an object without `"__type": "AddedToken"`')
        elif name in LISTED:
            is_object = isinstance(value, dict)
            if not isinstance(value, list) and not (is_object and name != LISTED[0]):
                refuse(name, "is no list of tokens")
            tokens = value.items() if is_object else enumerate(value)
            for key, token in tokens:
                place = f"{name}.{key}" if is_object else f"{name}[{key}]"
                check_token(place, token)
                if name == "added_tokens_decoder" and not (
                    str(key).isdecimal() and isinstance(token, dict)
                ):
                    refuse(place, "is no object of a token under its id")
        elif name in _BOOLEANS and not isinstance(value, bool):
            refuse(name, "must be true or false")
        elif name == "model_max_length" and not isinstance(value, int | float):
            refuse(name, "must be a number")
        elif name == "tokenizer_class" and not isinstance(value, str):
            refuse(name, "must be the name of a class")
        elif name == "chat_template":
            _check_templates(value, refuse)


def _check_templates(value: Any, refuse: Any) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list):
        refuse("chat_template", "is neither a text nor a list of named templates")
    for index, item in enumerate(value):
        name = f"chat_template[{index}]"
        if not isinstance(item, dict):
            refuse(name, "is no object with `name` and `template`")
        for key in ("name", "template"):
            if not isinstance(item.get(key), str):
                refuse(f"{name}.{key}", "must be a text")


def special_entries(config: Mapping[str, Any], map_: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a tokenizer's two files that decide its special tokens.

    ``config`` is the content of tokenizer_config.json, ``map_`` that of special_tokens_map.json. An
    entry of ``map_`` overrides the same entry of ``config``. But if ``config`` has
    `added_tokens_decoder`, ``map_`` is ignored.
    """
    return {**config} if "added_tokens_decoder" in config else {**config, **map_}


def text_of(token: Any) -> str:
    """Return the text of a token that a file gives as a string or as an object with `content`."""
    return str(token.get("content", token) if isinstance(token, dict) else token)


def flags_differ(token: Mapping[str, Any], added: Any) -> bool:
    """Tell whether a loaded token has other flags, such as `lstrip`, than its file gives it.

    ``token`` is its object in the file, ``added`` the loaded `tokenizers.AddedToken`.
    """
    return any(key in token and token[key] != getattr(added, key) for key in _FLAGS)


def unused_entries(folder: Path, files: Mapping[str, Any], backend: Any, loaded: Any) -> list[str]:
    """Return one sentence for each file of a tokenizer that has entries without effect.

    Args:
        files: the contents of tokenizer_config.json and special_tokens_map.json, by file name.
        backend: the loaded `tokenizers.Tokenizer`.
        loaded: the tokenizer of transformers that holds ``backend``; None if it was loaded without
            transformers.
    """
    config = files["tokenizer_config.json"]
    map_ = files["special_tokens_map.json"]
    in_use = special_entries(config, map_)
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    unused: dict[str, list[str]] = {}
    own = folder / "tokenizer.json"
    state = orjson.loads(backend.to_str())
    raw = read_json(own, not_finite=True) if own.is_file() else None
    reads = set(_READ)
    if loaded is not None and not (raw is not None and _tokenizes_alike(raw, state)):
        reads |= {*inspect.signature(type(loaded).__init__).parameters, "add_prefix_space"}
    for name, entries in files.items():
        unused[name] = [*_special_without_effect(entries, in_use, added)]
        for key, value in entries.items():
            if value is None or key in (*DESCRIBING, *NAMED, *LISTED):
                continue
            of_config = name == "tokenizer_config.json"
            # Every other `..._token` is a special token too, and a variable of the chat template.
            if key.endswith("_token") and isinstance(value, str):
                continue
            if not of_config or (key not in reads and not _is_default(key, value)):
                unused[name].append(key)
    unused["tokenizer_config.json"] += _templates_without_effect(folder, config)
    named = config.get("tokenizer_class")
    if loaded is not None and named is not None:
        # transformers may choose another class than the file names.
        class_name = type(loaded).__name__
        if named.removesuffix("Fast") != class_name.removesuffix("Fast"):
            unused["tokenizer_config.json"].append("tokenizer_class")
    if raw is not None and loaded is None:
        unused["tokenizer.json"] = [
            *(key for key in ("truncation", "padding") if raw.get(key) is not None),
            *_lost(raw, state, type(backend)),
        ]
    return [
        f"{folder / name}: these entries have no effect here: "
        + ", ".join(f"`{key}`" for key in dict.fromkeys(keys))
        for name, keys in unused.items()
        if keys
    ]


def _is_default(key: str, value: Any) -> bool:
    if key == "model_max_length" and isinstance(value, int | float):
        return value >= _ENDLESS
    return key in USUAL and value == USUAL[key]


def _special_without_effect(
    entries: Mapping[str, Any], in_use: Mapping[str, Any], added: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the names of a file's special-token entries, and of flags in them, without effect.

    An entry has no effect if another file overrides it, or if the loaded tokenizer ignores it.

    Args:
        entries: the entries of the file that is checked.
        in_use: the entries that take effect when both files are combined.
        added: the added tokens of the loaded tokenizer, by text.
    """
    for key in (*NAMED, *LISTED):
        value = entries.get(key)
        if value is None:
            continue
        if key in NAMED and text_of(value) != text_of(in_use.get(key)):
            yield key
            continue
        if key in LISTED and value != in_use.get(key):
            yield key
            continue
        for name, token in _tokens_of(key, value):
            added_token = added.get(text_of(token))
            if added_token is None:
                yield name
            elif isinstance(token, dict):
                yield from (
                    f"{name}.{flag}"
                    for flag in _FLAGS
                    if flag in token and token[flag] != getattr(added_token, flag)
                )


def _tokens_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in NAMED:
        yield key, value
    elif isinstance(value, dict):
        yield from ((f"{key}.{name}", token) for name, token in value.items())
    else:
        yield from ((f"{key}[{index}]", token) for index, token in enumerate(value))


def _templates_without_effect(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of entries on chat templates in tokenizer_config.json that are never used.

    ``config`` is the content of that file. If ``folder`` has a chat_template.jinja, the
    templates of ``config`` are never used.
    """
    given = config.get("chat_template")
    if given is None:
        return
    if (folder / "chat_template.jinja").is_file():
        yield "chat_template"
    elif isinstance(given, list):
        for index, item in enumerate(given):
            if item["name"] not in _TEMPLATES:
                yield f"chat_template[{index}]` (name {item['name']}) `template"
            yield from (
                f"chat_template[{index}].{key}" for key in item if key not in ("name", "template")
            )


def _tokenizes_alike(raw: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Tell whether a loaded tokenizer's normalizer, decoder and so on are those of its file.

    Model, truncation and padding are not compared. ``raw`` is the content of the file, ``state``
    the content that the tokenizer would save.
    """
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")
    return all(_agree(raw.get(part), state.get(part)) for part in parts)


def _agree(raw: Any, state: Any) -> bool:
    if isinstance(raw, dict) and isinstance(state, dict):
        return all(_agree(value, state[key]) for key, value in raw.items() if key in state)
    if isinstance(raw, list) and isinstance(state, list):
        return len(raw) == len(state) and all(map(_agree, raw, state))
    return bool(raw == state)


def part_at_fault(raw: Any, kind: Any) -> str | None:
    """Return the name of the part that makes a tokenizer.json unreadable, such as `normalizer`.

    ``raw`` is the content of the file, ``kind`` the class `tokenizers.Tokenizer`. Errors of this
    class seldom name the part, so the parts are left out one at a time, until the class can read
    the rest. Return None if this finds no part, as when several parts are at fault.
    """
    if not isinstance(raw, dict):
        return None
    for key, value in raw.items():
        if key == "added_tokens" and isinstance(value, list):
            for index in range(len(value)):
                others = [*value[:index], *value[index + 1 :]]
                if _state(kind, {**raw, key: others}) is not None:
                    return f"{key}[{index}]"
        else:
            rest = {name: part for name, part in raw.items() if name != key}
            if _state(kind, rest) is not None:
                return str(key)
    if _state(kind, {**raw, "model": {"type": "BPE", "vocab": {}, "merges": []}}) is not None:
        return "model"
    return None


def _state(kind: Any, content: Any) -> Any:
    """Return what `tokenizers` saves after it has loaded the content of a tokenizer.json.

    Return None if `tokenizers` cannot load it. ``kind`` is the class `tokenizers.Tokenizer`.
    """
    try:
        return json.loads(kind.from_str(json.dumps(content)).to_str())
    except BaseException as error:  # Panics of `tokenizers` do not derive from Exception.
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        return None


_LARGE = ("vocab", "merges")


def _lost(raw: Any, state: Any, kind: Any) -> Iterator[str]:
    """Yield the paths of a tokenizer.json's entries that `tokenizers` ignores, such as ``model.x``.

    ``raw`` is the content of the file, ``state`` the content that `tokenizers` would save, ``kind``
    the class `tokenizers.Tokenizer`. An entry that ``state`` lacks may have been read, but
    saved under a new name. It is therefore yielded only if `tokenizers` loads the same tokenizer
    from the file without it.
    """
    whole: Any = None
    for path, is_there in _not_kept(raw, state):
        if not is_there:
            whole = whole or _state(kind, raw)
        if is_there or _state(kind, _without(raw, path)) == whole:
            yield "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".")


def _not_kept(
    raw: Any, state: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Yield the path of each entry of ``raw`` that ``state`` lacks or has with another value.

    Each path comes with a bool: whether ``state`` has the entry. ``raw`` and ``state`` are nested
    JSON values; ``path`` is where they are in the whole file.
    """
    if isinstance(raw, dict) and isinstance(state, dict):
        for key, value in raw.items():
            if key not in state:
                if value is not None:
                    yield (*path, key), False
            elif key not in _APART:
                yield from _not_kept(value, state[key], (*path, key))
    elif isinstance(raw, list) and isinstance(state, list):
        kept: Any = state
        if path == ("added_tokens",):  # They are sorted when saved, so match them by their texts.
            by_text = {token["content"]: token for token in state}
            kept = [by_text.get(token["content"]) for token in raw]
        if len(raw) == len(kept):
            for index, (value, other) in enumerate(zip(raw, kept, strict=True)):
                yield from _not_kept(value, other, (*path, index))
    elif raw != state:
        yield path, True


_APART = ("vocab", "merges", "truncation", "padding")
"""Keys that `_not_kept` does not compare: they are large, or this package switches them off."""


def _without(content: Any, path: tuple[Any, ...]) -> Any:
    """Return a copy of nested JSON without the entry at ``path``, a tuple of keys and indices."""
    first, *rest = path
    if rest:
        inner = _without(content[first], tuple(rest))
        if isinstance(content, list):
            return [*content[:first], inner, *content[first + 1 :]]
        return {**content, first: inner}
    return {key: value for key, value in content.items() if key != first}
