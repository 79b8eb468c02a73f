"""Entries in the files of a Hugging Face tokenizer: checks them, and names those without effect.

Two files name special tokens. As in transformers, special_tokens_map.json goes before
tokenizer_config.json, unless the latter has `added_tokens_decoder`, which makes the former obsolete.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.errors import DataError

NAMED = tuple(f"{name}_token" for name in ("eos", "bos", "unk", "sep", "pad", "cls", "mask"))
"""Keys of the special tokens that have a name."""
LISTED = ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder")
"""Keys of further special tokens."""
DESCRIBING = tuple(
    "_commit_hash _name_or_path backend is_local local_files_only model_input_names name_or_path "
    "processor_class special_tokens_map_file tokenizer_file transformers_version".split()
)
"""Entries that tell who wrote the files, of what, and with which classes."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_READ = (*NAMED, *LISTED, "tokenizer_class", "auto_map", "chat_template", "split_special_tokens")
_USUAL = {
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
"""The defaults of entries that have no effect here; these values ask for nothing."""
_ENDLESS = 10**20
"""A `model_max_length` from here on says that there is none."""
_BOOLEANS = ("add_prefix_space", "split_special_tokens", "add_bos_token", "add_eos_token")
_TEMPLATES = ("default", "tool_use")
"""Names of the templates that conversations get, the second where there are tools."""


def check_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Raise a DataError for an entry of a tokenizer's file that has a value of a wrong type."""

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
            if key not in (*_FLAGS, "content", "__type", "id"):
                refuse(f"{name}.{key}", "is no entry of a token")

    for name, value in entries.items():
        if value is None:
            continue
        if name in NAMED:
            check_token(name, value)
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
    """Return the entries on special tokens that are in use, of the two files that have some."""
    return {**config} if "added_tokens_decoder" in config else {**config, **map_}


def text_of(token: Any) -> str:
    """Return the text of a token that is given as a text or an object."""
    return str(token.get("content", token) if isinstance(token, dict) else token)


def flags_differ(token: Mapping[str, Any], added: Any) -> bool:
    """Tell whether an object of a token says other flags than a loaded `AddedToken` has."""
    return any(key in token and token[key] != getattr(added, key) for key in _FLAGS)


def unused_entries(folder: Path, files: Mapping[str, Any], backend: Any, loaded: Any) -> list[str]:
    """Return a sentence for each file of a tokenizer with entries that have no effect here.

    Args:
        files: the contents of tokenizer_config.json and special_tokens_map.json.
        backend: the loaded `tokenizers.Tokenizer`.
        loaded: the tokenizer of transformers that it belongs to; None if it was loaded directly.
    """
    config, map_ = files["tokenizer_config.json"], files["special_tokens_map.json"]
    in_use = special_entries(config, map_)
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    unused: dict[str, list[str]] = {}
    own = folder / "tokenizer.json"
    state = json.loads(backend.to_str())
    raw = json.loads(own.read_bytes()) if own.is_file() else None
    reads = set(_READ)
    if loaded is not None and not (raw is not None and _tokenizes_alike(raw, state)):
        reads |= {*inspect.signature(type(loaded).__init__).parameters, "add_prefix_space"}
    for name, entries in files.items():
        unused[name] = [*_special_without_effect(entries, in_use, added)]
        for key, value in entries.items():
            if value is None or key in (*DESCRIBING, *NAMED, *LISTED):
                continue
            of_config = name == "tokenizer_config.json"
            # Any further `..._token` is a special token, and a variable of the chat template.
            if key.endswith("_token") and isinstance(value, str):
                continue
            if not of_config or (key not in reads and not _asks_nothing(key, value)):
                unused[name].append(key)
    unused["tokenizer_config.json"] += _templates_without_effect(folder, config)
    named = config.get("tokenizer_class")
    if loaded is not None and named is not None:
        its = type(loaded).__name__
        if named.removesuffix("Fast") != its.removesuffix("Fast"):
            unused["tokenizer_config.json"].append("tokenizer_class")
    if raw is not None:
        unused["tokenizer.json"] = [
            *(key for key in ("truncation", "padding") if raw.get(key) is not None),
            *_lost(raw, state),
        ]
    return [
        f"{folder / name}: these entries have no effect here: "
        + ", ".join(f"`{key}`" for key in dict.fromkeys(keys))
        for name, keys in unused.items()
        if keys
    ]


def _asks_nothing(key: str, value: Any) -> bool:
    if key == "model_max_length" and isinstance(value, int | float):
        return value >= _ENDLESS
    return key in _USUAL and value == _USUAL[key]


def _special_without_effect(
    entries: Mapping[str, Any], in_use: Mapping[str, Any], added: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the entries on special tokens that another file overrides, or that are not heeded."""
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
            known = added.get(text_of(token))
            if known is None:
                yield name
            elif isinstance(token, dict):
                yield from (
                    f"{name}.{flag}"
                    for flag in _FLAGS
                    if flag in token and token[flag] != getattr(known, flag)
                )


def _tokens_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in NAMED:
        yield key, value
    elif isinstance(value, dict):
        yield from ((f"{key}.{name}", token) for name, token in value.items())
    else:
        yield from ((f"{key}[{index}]", token) for index, token in enumerate(value))


def _templates_without_effect(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the templates of tokenizer_config.json that no conversation gets."""
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
    """Tell whether a loaded tokenizer is that of its file, but for entries that the file lacks."""
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")
    return all(_agree(raw.get(part), state.get(part)) for part in parts)


def _agree(raw: Any, state: Any) -> bool:
    if isinstance(raw, dict) and isinstance(state, dict):
        return all(_agree(value, state[key]) for key, value in raw.items() if key in state)
    if isinstance(raw, list) and isinstance(state, list):
        return len(raw) == len(state) and all(map(_agree, raw, state))
    return bool(raw == state)


_LARGE = ("vocab", "merges")


def _lost(raw: Any, state: Any, name: str = "") -> Iterator[str]:
    """Yield the names of entries that the library of tokenizers has not taken from its file."""
    if isinstance(raw, dict) and isinstance(state, dict):
        for key, value in raw.items():
            inside = f"{name}.{key}" if name else str(key)
            if key not in state:
                if value is not None:
                    yield inside
            elif key not in _LARGE:
                yield from _lost(value, state[key], inside)
    elif isinstance(raw, list) and isinstance(state, list) and len(raw) == len(state):
        for index, (value, kept) in enumerate(zip(raw, state, strict=True)):
            yield from _lost(value, kept, f"{name}[{index}]")


def generation_notes(path: Path, entries: Mapping[str, Any], read: Sequence[str]) -> list[str]:
    """Return a sentence on the entries of a generation_config.json that have no effect here."""
    skipped = (*read, *DESCRIBING, "_from_model_config")
    names = [f"`{key}`" for key, value in entries.items() if value is not None if key not in skipped]
    if not names:
        return []
    return [
        f"{path}: these entries have no effect here: {', '.join(names)}; flags such as "
        "`--temperature` set how texts are drawn"
    ]
