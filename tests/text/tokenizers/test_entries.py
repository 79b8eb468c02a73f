"""Entries of a tokenizer's files: named where they have no effect, refused where they are wrong.

The search in tests/intake changes each of them; here stands how they are named.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import DataError
from megatron_ext.text.generation.requests import generation_notes
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer, entries
from tests.text import tiny

CONFIG = {"tokenizer_class": "TokenizersBackend", "eos_token": tiny.END}


def folder_with(folder: Path, **files: Any) -> TokenizerConfig:
    """Return the settings of a tokenizer whose folder has further files, named without ending."""
    shutil.copytree(tiny.hf_folder(), folder, dirs_exist_ok=True)
    for name, content in {"tokenizer_config": CONFIG, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return TokenizerConfig("HuggingFaceTokenizer", str(folder))


def own_json() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tiny.hf_folder() / "tokenizer.json").read_bytes())
    return content


def test_entries_without_effect_are_named_by_their_file(tmp_path: Path) -> None:
    token = {"content": tiny.END, "lstrip": True}
    settings = folder_with(
        tmp_path,
        tokenizer_config={
            **CONFIG,
            "eos_token": "<|pad|>",
            "model_max_length": 2048,
            "padding_side": "right",
            "transformers_version": "5.0",
            "chat_template": [
                {"name": "default", "template": "{{ messages }}"},
                {"name": "rag", "template": "{{ documents }}"},
                {"name": "tool_use", "template": "{{ tools }}", "author": "me"},
            ],
            "additional_special_tokens": ["<|pad|>"],
        },
        special_tokens_map={"eos_token": token, "additional_special_tokens": [tiny.END]},
    )
    begin = "these entries have no effect here"
    assert build_tokenizer(settings).notes() == [
        f"{tmp_path}/tokenizer_config.json: {begin}: `eos_token`, "
        "`additional_special_tokens`, `model_max_length`, `chat_template[1]` (name rag) "
        "`template`, `chat_template[2].author`",
        f"{tmp_path}/special_tokens_map.json: {begin}: `eos_token.lstrip`",
    ]


def test_entries_that_say_what_holds_anyway_are_not_named(tmp_path: Path) -> None:
    config = {**CONFIG, "padding_side": "right", "model_max_length": 10**30, "errors": "replace"}
    assert build_tokenizer(folder_with(tmp_path, tokenizer_config=config)).notes() == []
    for entry, named in (
        ({"model_max_length": 10**20}, False),
        ({"model_max_length": 10**20 - 1}, True),
        ({"image_token": tiny.END}, False),
        ({"image_token": 3}, True),
        ({"padding_side": "left"}, True),
        ({"errors": "strict"}, True),
        ({"errors": None}, False),
    ):
        settings = folder_with(tmp_path, tokenizer_config={**CONFIG, **entry})
        notes = build_tokenizer(settings).notes()
        assert [note.rpartition(": ")[2] for note in notes] == [f"`{x}`" for x in entry if named]


def test_what_the_library_does_not_take_from_tokenizer_json_is_named(tmp_path: Path) -> None:
    content = own_json()
    content["truncation"] = {
        "max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
    }  # fmt: skip
    content["padding"] = {
        "strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
        "pad_type_id": 0, "pad_token": "<|pad|>",
    }  # fmt: skip
    content["added_tokens"][1]["id"] += 50
    content["pre_tokenizer"]["another"] = 1
    made = build_tokenizer(folder_with(tmp_path, tokenizer=content))
    [note] = made.notes()
    assert note.endswith(
        "/tokenizer.json: these entries have no effect here: `truncation`, `padding`, "
        "`added_tokens[1].id`, `pre_tokenizer.another`"
    )
    plain = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tiny.hf_folder())))
    text = " ".join(tiny.sentences()[:2])
    for ids in (made.tokenize(text), *made.encode_batch([text, text])):
        assert len(ids) > 8 and list(ids) == plain.tokenize(text)


def test_entries_of_generation_are_named_with_flags_that_take_their_place(tmp_path: Path) -> None:
    generation = {
        "_from_model_config": True, "eos_token_id": 3, "do_sample": True, "top_k": None,
        "temperature": 0.5, "transformers_version": "5.0",
    }  # fmt: skip
    settings = folder_with(tmp_path, generation_config=generation)
    config = RunConfig(sections=(settings,))
    assert generation_notes(config, build_tokenizer(settings)) == [
        f"{tmp_path}/generation_config.json: these entries have no effect here: `do_sample`, "
        "`temperature`; flags such as `--temperature` set how texts are drawn"
    ]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"pad_token": 3}, "`pad_token` what is no token: neither a text nor an object"),
    "a flag": (
        {"bos_token": {"__type": "AddedToken", "content": "a", "rstrip": 1}},
        "`bos_token.rstrip` what must be true or false",
    ),
    "another entry": (
        {"extra_special_tokens": [{"content": "a", "width": 1}]},
        "`extra_special_tokens[0].width` what is no entry of a token",
    ),
    "a type": (
        {"bos_token": {"__type": "Token", "content": "a"}},
        "`bos_token.__type` what must be AddedToken",
    ),
    "no type": (
        {"bos_token": {"content": "a"}},
        '`bos_token` what is an object without `"__type": "AddedToken"`',
    ),
    "a list": ({"additional_special_tokens": "a"}, "what is no list of tokens"),
    "an object": ({"additional_special_tokens": {"a": "b"}}, "what is no list of tokens"),
    "an id": (
        {"added_tokens_decoder": {"first": {"content": "a"}}},
        "`added_tokens_decoder.first` what is no object of a token under its id",
    ),
    "a switch": ({"split_special_tokens": 1}, "`split_special_tokens` what must be true or false"),
    "a side": ({"padding_side": "top"}, "`padding_side` what must be left or right"),
    "a length": ({"model_max_length": "long"}, "`model_max_length` what must be a number"),
    "a class": ({"tokenizer_class": 3}, "`tokenizer_class` what must be the name of a class"),
    "a template": ({"chat_template": 3}, "`chat_template` what is neither a text nor a list of na"),
    "an item": ({"chat_template": ["x"]}, "`chat_template[0]` what is no object with `name` and"),
    "a name": (
        {"chat_template": [{"name": 3, "template": "x"}]},
        "`chat_template[0].name` what must be a text",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_entry_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    entries, text = WRONG[case]
    settings = folder_with(tmp_path, tokenizer_config={**CONFIG, **entries})
    with pytest.raises(DataError) as caught:
        build_tokenizer(settings)
    assert f"{tmp_path}/tokenizer_config.json has under `" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("part", ["pre_tokenizer", "added_tokens[1]", "version", "model"])
def test_a_tokenizer_json_that_cannot_be_read_names_the_part(part: str, tmp_path: Path) -> None:
    content = own_json()
    if part.startswith("added"):
        content["added_tokens"][1]["special"] = "yes"
    else:
        content[part] = {"type": "Another"}
    with pytest.raises(
        DataError, match=r"tokenizer.json is not a tokenizer \(.*\), at fault is "
    ) as e:
        build_tokenizer(folder_with(tmp_path, tokenizer=content))
    assert f"`{part}`; copy it again." in str(e.value)


def test_a_post_processor_without_its_token_is_refused(tmp_path: Path) -> None:
    content = own_json()
    begin = {"SpecialToken": {"id": "<begin>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, text], "pair": [text], "special_tokens": {},
    }  # fmt: skip
    with pytest.raises(DataError, match="tokenizer.json"):
        build_tokenizer(folder_with(tmp_path, tokenizer=content))


class Loaded:
    """A tokenizer of transformers, whose class has an option of its own."""

    def __init__(self, own_option: int = 0) -> None:
        self.own_option = own_option


class LoadedFast(Loaded):
    pass


def test_options_of_a_class_count_where_the_class_changes_the_tokenizer(tmp_path: Path) -> None:
    content: dict[str, Any] = {"normalizer": {"type": "A"}, "added_tokens": [{"content": "a"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))

    def unused(state: dict[str, Any], loaded: Any, named: str = "Loaded") -> str:
        backend = SimpleNamespace(to_str=lambda: json.dumps(state), get_added_tokens_decoder=dict)
        config = {"own_option": 3, "tokenizer_class": named}
        files = {"tokenizer_config.json": config, "special_tokens_map.json": {}}
        return " ".join(entries.unused_entries(tmp_path, files, backend, loaded))

    assert "`own_option`" in unused(content, Loaded())
    for other in (
        {**content, "normalizer": None},
        {**content, "added_tokens": [{"content": "a"}, {"content": "b"}]},
        {**content, "added_tokens": []},
    ):
        assert unused(other, Loaded()) == ""
    # What only the loaded state has was left out of the file at its default.
    assert "`own_option`" in unused({**content, "normalizer": {"type": "A", "b": 1}}, Loaded())
    changed = {**content, "normalizer": None}
    for name in ("Loaded", "LoadedFast"):
        assert unused(changed, LoadedFast(), name) == unused(changed, Loaded(), name) == ""
    assert "`tokenizer_class`" in unused(changed, LoadedFast(), "Another")


def test_an_entry_is_left_out_of_its_own_place_alone() -> None:
    content = {"a": [{"x": 1}, {"y": 2, "z": 3}, {"y": 4}], "b": {"y": 5}}
    assert entries._without(content, ("a", 1, "y")) == {
        "a": [{"x": 1}, {"z": 3}, {"y": 4}],
        "b": {"y": 5},
    }
    assert entries._without(content, ("b",)) == {"a": content["a"]}
