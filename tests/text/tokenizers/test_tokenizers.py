"""Tokenizers: ids, sizes and special ids are those of megatron-core for the same flags."""

import argparse
import base64
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess.options import add_tokenizer_flags, tokenizer_config
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer, check_files
from megatron_ext.text.tokenizers import huggingface as huggingface_module
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.text.tokenizers.huggingface import tokenizer_folder
from megatron_ext.text.tokenizers.models import SPECIAL_TOKENS
from tests.config.runs import refusals
from tests.text import tiny
from tests.text.sft import tiny as chats

TEXTS = [text for text in tiny.HARD_TEXTS if text] + tiny.sentences()[:20]


def flags(kind: str, **more: Any) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type=kind, **more)


def sentencepiece(kind: str = "SentencePieceTokenizer", **more: Any) -> TokenizerConfig:
    return flags(kind, tokenizer_model=str(tiny.sentencepiece_model()), **more)


def huggingface(**more: Any) -> TokenizerConfig:
    return flags("HuggingFaceTokenizer", tokenizer_model=str(tiny.hf_folder()), **more)


def tiktoken(**more: Any) -> TokenizerConfig:
    more = {"vocab_size": 300 + 20, "tiktoken_num_special_tokens": 20, **more}
    return flags("TikTokenizer", tokenizer_model=str(tiny.tiktoken_file()), **more)


CASES = {
    "sentencepiece": sentencepiece,
    "gpt_sentencepiece": lambda: sentencepiece("GPTSentencePieceTokenizer"),
    "llama2": lambda: sentencepiece("Llama2Tokenizer"),
    "huggingface": huggingface,
    "huggingface_special": lambda: huggingface(tokenizer_special_tokens=["<new>", "world"]),
    "huggingface_include": lambda: huggingface(tokenizer_hf_include_special_tokens=True),
    "tiktoken_v2": tiktoken,
    "tiktoken_v1": lambda: tiktoken(tiktoken_pattern="v1"),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_core(case: str) -> None:
    chosen = CASES[case]()
    ours, theirs = build_tokenizer(chosen), tiny.cores_tokenizer(chosen)
    assert isinstance(ours, Tokenizer)
    texts = [*TEXTS, "a <new> world", "<new><new>"]
    assert [ours.tokenize(text) for text in texts] == [theirs.tokenize(text) for text in texts]
    assert [list(ids) for ids in ours.encode_batch(texts)] == [ours.tokenize(t) for t in texts]
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    assert (ours.eos, ours.pad) == (theirs.eos, theirs.pad)
    assert ours.bos == (-1 if theirs.bos is None else theirs.bos)


def test_tiktoken_cuts_words_before_capitals_unless_v1_is_asked_for(tmp_path: Path) -> None:
    """Replace a merge by one of a small and a capital letter, which only v1 leaves together."""
    entries = json.loads(tiny.tiktoken_file().read_text())
    merged = entries[-1]["rank"]
    entries[-1]["token_bytes"] = base64.b64encode(b"aB").decode()
    model = tmp_path / "tiktoken.json"
    model.write_text(json.dumps(entries))
    for pattern, count in ((None, 2), ("v2", 2), ("v1", 1)):
        chosen = dataclasses.replace(tiktoken(tiktoken_pattern=pattern), tokenizer_model=str(model))
        ours, theirs = build_tokenizer(chosen), tiny.cores_tokenizer(chosen)
        assert len(ours.tokenize("aB")) == count
        assert (merged + 20 in ours.tokenize("xaBy aB")) == (count == 1)
        assert ours.tokenize("xaBy aB") == theirs.tokenize("xaBy aB")


def test_null_equals_core() -> None:
    chosen = flags("NullTokenizer", vocab_size=100)
    ours, theirs = build_tokenizer(chosen), tiny.cores_tokenizer(chosen)
    assert ours.tokenize("3 1 100") == theirs.tokenize("3 1 100") == [3, 1, 100]
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (101, 100)
    assert ours.detokenize([3, 1]) == "3 1"
    for text in ("3  1", "a", "101", "-1", ""):
        with pytest.raises(ValueError, match="NullTokenizer"):
            ours.tokenize(text)


def test_byte_level_equals_core() -> None:
    from megatron.core.tokenizers.text.libraries import ByteLevelTokenizer

    ours, theirs = build_tokenizer(flags("ByteLevelTokenizer")), ByteLevelTokenizer()
    assert [ours.tokenize(t) for t in TEXTS] == [theirs.text_to_ids(t) for t in TEXTS]
    assert [list(ids) for ids in ours.encode_batch(TEXTS)] == [ours.tokenize(t) for t in TEXTS]
    assert (ours.vocab_size, ours.eod, ours.pad) == (theirs.vocab_size, theirs.eod, theirs.pad_id)


def test_gpt2_equals_transformers() -> None:
    from transformers import GPT2Tokenizer

    vocab, merges = tiny.gpt2_files()
    ours = build_tokenizer(flags("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges)))
    theirs = GPT2Tokenizer(vocab=str(vocab), merges=str(merges))
    want = [theirs.convert_tokens_to_ids(theirs.tokenize(t)) for t in TEXTS]
    assert [ours.tokenize(t) for t in TEXTS] == want
    assert (ours.eod, ours.vocab_size) == (theirs.eos_token_id, 600)
    assert ours.bos == ours.unk == ours.eod


def test_sentencepiece_special_tokens_equal_core_legacy() -> None:
    special = ["<new>", "<user>", "[INST]"]
    chosen = sentencepiece(tokenizer_sentencepiece_legacy=True, tokenizer_special_tokens=special)
    ours, theirs = build_tokenizer(chosen), tiny.cores_tokenizer(chosen)
    texts = [*TEXTS, "a <new> b", "<new><user> [INST] who", "<new>", "x<user>y[INST]"]
    assert [ours.tokenize(text) for text in texts] == [theirs.tokenize(text) for text in texts]
    assert ours.vocab_size == theirs.vocab_size == 502


def test_a_class_that_rebuilds_itself_goes_through_transformers(tmp_path: Path) -> None:
    """Qwen2's class splits digits and contractions its own way, whatever tokenizer.json says."""
    from transformers import AutoTokenizer

    folder = tmp_path / "qwen"
    shutil.copytree(tiny.hf_folder(), folder)
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": tiny.END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours = build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(folder)))
    theirs = AutoTokenizer.from_pretrained(str(folder))
    texts = [*TEXTS, "1234567 we'LL"]
    want = [theirs.convert_tokens_to_ids(theirs.tokenize(t)) for t in texts]
    assert [ours.tokenize(t) for t in texts] == want
    assert ours.eod == theirs.eos_token_id


@pytest.mark.parametrize("case", CASES)
def test_detokenize_gives_the_text_back(case: str) -> None:
    tokenizer = build_tokenizer(CASES[case]())
    text = tiny.sentences()[0]
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_detokenize_shows_special_tokens_on_request() -> None:
    ends = ((huggingface(), tiny.END), (sentencepiece(), "</s>"), (tiktoken(), "</s>"))
    for chosen, text in ends:
        tokenizer = build_tokenizer(chosen)
        ids = [*tokenizer.tokenize("ba"), tokenizer.eod]
        assert tokenizer.detokenize(ids) == "ba"
        assert tokenizer.detokenize(ids, skip_special_tokens=False) == f"ba{text}"


ADDED = {"0": {"content": tiny.END, "lstrip": False, "rstrip": False, "special": True}}
ALONE = {"content": "<|pad|>", "single_word": True, "special": True}


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<eos>"},
        {"eos_token": tiny.END, "extra_special_tokens": ["<a>", "<b>"]},
        {"eos_token": tiny.END, "extra_special_tokens": {"image_token": "<a>"}},
        {"eos_token": tiny.END, "bos_token": "<|pad|>", "add_bos_token": True},
        {"eos_token": tiny.END, "add_eos_token": True},
        {"sep_token": "<|pad|>"},
        {"eos_token": tiny.END, "image_token": "<a>"},
        {"eos_token": "who"},
        {"eos_token": "<|pad|>", "map": {"eos_token": tiny.END}},
        {"eos_token": "<|pad|>", "map": {"eos_token": tiny.END}, "added_tokens_decoder": ADDED},
        {"eos_token": tiny.END, "added_tokens_decoder": {**ADDED, "1": ALONE}},
    ],
)
def test_what_the_config_adds_is_what_core_sees(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(tiny.hf_folder(), folder)
    config = {"tokenizer_class": "TokenizersBackend", **config}
    if "map" in config:
        (folder / "special_tokens_map.json").write_text(json.dumps(config.pop("map")))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for include in (False, True):
        chosen = huggingface(tokenizer_hf_include_special_tokens=include)
        chosen = dataclasses.replace(chosen, tokenizer_model=str(folder))
        ours, theirs = build_tokenizer(chosen), tiny.cores_tokenizer(chosen)
        texts = [*TEXTS, "x <a><b> <eos>", f"who {tiny.END} who x<|pad|>y <|pad|> who"]
        assert [ours.tokenize(text) for text in texts] == [theirs.tokenize(t) for t in texts]
        assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)


def test_identity_is_plain_and_follows_the_file(tmp_path: Path) -> None:
    model = tmp_path / "m.model"
    shutil.copy(tiny.sentencepiece_model(), model)

    def identity() -> dict[str, str]:
        chosen = flags("SentencePieceTokenizer", tokenizer_model=str(model))
        return build_tokenizer(chosen).unique_identifiers

    first = identity()
    assert json.loads(json.dumps(first)) == first == identity()
    model.write_bytes(model.read_bytes().replace(b"<user>", b"<uses>"))
    assert identity() != first
    folder = tmp_path / "hf"
    shutil.copytree(tiny.hf_folder(), folder)
    chosen = flags("HuggingFaceTokenizer", tokenizer_model=str(folder))
    of_folder = build_tokenizer(chosen).unique_identifiers
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace("<|pad|>", "<|PAD|>"), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tiny.END}))
    assert build_tokenizer(chosen).unique_identifiers != of_folder


SENTENCEPIECE = "sentencepiece"
LIBRARIES = {SENTENCEPIECE: SENTENCEPIECE, "huggingface": "tokenizers", "tiktoken_v2": "tiktoken"}


@pytest.mark.parametrize("case", LIBRARIES)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    chosen, package = CASES[case](), LIBRARIES[case]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(chosen)
    needs = f"`--tokenizer-type {chosen.tokenizer_type}` needs the package {package}, which is not "
    assert str(caught.value).startswith(needs)


def test_a_hub_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    told = r"model\) is neither a folder here nor .* \(ConnectionError: no route to host\); check"
    with pytest.raises(DataError, match=told):
        build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model="someone/model"))


def test_all_files_of_a_tokenizer_are_fetched_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    saved = tmp_path / "saved"
    loaded = chats.tokenizer("chatml")
    loaded.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    loaded.save_pretrained(saved)
    files = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    assert {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"} <= files
    weights = ["model.safetensors", "pytorch_model.bin", "consolidated.00.pth", "a/model.gguf"]

    def fetched(name: str, allow_patterns: list[str]) -> str:
        kept = filter_repo_objects([*files, *weights], allow_patterns=allow_patterns)
        assert set(kept) == files
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert tokenizer_folder("someone/model") == saved


def test_core_accepts_it_as_a_dataset_tokenizer() -> None:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    tokenizer = build_tokenizer(sentencepiece())
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        split="1,0,0",
        tokenizer=tokenizer,  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    assert config.token_dtype_code == 8


@pytest.mark.parametrize(("_section", "case", "sentence"), refusals("tokenizers"))
def test_bad_settings_are_told(tmp_path: Path, _section: str, case: str, sentence: str) -> None:
    """A case names the kind of error (ConfigError or DataError), the tokenizer and its flags."""
    (tmp_path / "junk").write_bytes(b"\xff\x00 no model")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "metadata.json").write_text('{"library": "huggingface"}')
    (tmp_path / "bad_hf").mkdir()
    (tmp_path / "bad_hf" / "tokenizer.json").write_text('{"version": "1.0"}')
    places = {
        "junk": tmp_path / "junk", "empty": tmp_path / "empty.json",
        "metadata": tmp_path / "metadata.json", "bad_hf": tmp_path / "bad_hf",
        "vocab": tiny.gpt2_files()[0], "sp": tiny.sentencepiece_model(),
        "tik": tiny.tiktoken_file(),
    }  # fmt: skip
    letter, name, *words = case.format(**places).split()
    parser = argparse.ArgumentParser()
    add_tokenizer_flags(parser)
    words += ["--tokenizer-type", name] if name != "none" else []
    with pytest.raises({"C": ConfigError, "D": DataError}[letter]) as caught:
        build_tokenizer(tokenizer_config(vars(parser.parse_args(words))))
    assert str(caught.value).startswith(sentence.format(**places))
    assert "\n" not in str(caught.value)


def test_a_file_that_the_library_gives_up_on_is_a_sentence(tmp_path: Path) -> None:
    content = json.loads((tiny.hf_folder() / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "//////////8="}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"is not a tokenizer .* at fault is `normali"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))


@pytest.mark.parametrize("case", LIBRARIES)
def test_building_imports_no_torch(case: str) -> None:
    script = (
        "import sys; from megatron_ext.text.tokenizers import build_tokenizer\n"
        "from megatron_ext.text.tokenizers import TokenizerConfig\n"
        f"chosen = TokenizerConfig(**{dataclasses.asdict(CASES[case]())!r})\n"
        "build_tokenizer(chosen).tokenize('a b')\n"
        "print([m for m in ('torch', 'transformers', 'megatron') if m in sys.modules])"
    )
    how = {"capture_output": True, "text": True, "cwd": tiny.ROOT, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", script], **how)
    assert done.stdout.strip() == "[]", done.stderr


def test_special_tokens_of_tiktoken_are_those_that_are_named() -> None:
    named = [*SPECIAL_TOKENS, "<more>"]
    for chosen, number in (
        (tiktoken(tokenizer_special_tokens=named), 7),
        (tiktoken(tiktoken_special_tokens=named), 7),
        (tiktoken(tokenizer_special_tokens=named[::-1], tiktoken_special_tokens=named), 0),
        (tiktoken(), -1),
    ):
        made = build_tokenizer(chosen)
        assert made.token_id("<more>") == number
        assert made.token_id("<SPECIAL_19>") == 19 and made.token_id("<SPECIAL_20>") == -1
    # As many special tokens as there is room for, and 300 others.
    for count, vocab_size in ((7, 307), (319, 320)):
        whole = tiktoken(vocab_size=vocab_size, tiktoken_num_special_tokens=count)
        assert build_tokenizer(whole).vocab_size == vocab_size
    for count in (6, 320, 321):
        with pytest.raises(ConfigError, match=rf"`--tiktoken-num-special-tokens` \({count}\) must"):
            build_tokenizer(tiktoken(vocab_size=320, tiktoken_num_special_tokens=count))


def test_a_vocabulary_out_of_order_is_refused(tmp_path: Path) -> None:
    entries = json.loads(tiny.tiktoken_file().read_text())
    entries[270], entries[271] = entries[271], entries[270]
    model = tmp_path / "tiktoken.json"
    model.write_text(json.dumps(entries))
    chosen = dataclasses.replace(tiktoken(), tokenizer_model=str(model))
    with pytest.raises(DataError, match="must list its tokens by rank, the 256 single bytes first"):
        build_tokenizer(chosen)


def test_bytes_leave_out_padding_and_ends() -> None:
    made = build_tokenizer(flags("ByteLevelTokenizer", vocab_size=256))
    assert made.vocab_size == 256
    assert made.detokenize([0, 1, 2, 97, 300]) == "\x02a"
    assert made.detokenize([0, 1, 97], skip_special_tokens=False) == "\x00\x01a"
    assert made.detokenize([97, 0xC3]) == "a\ufffd"
    with pytest.raises(ConfigError, match=r"`--vocab-size` \(255\) must be at least 256"):
        build_tokenizer(flags("ByteLevelTokenizer", vocab_size=255))


def test_sentencepiece_finds_the_first_special_token_and_keeps_the_first_id() -> None:
    special = ["<b>", "<a>", "<b>"]
    chosen = sentencepiece(tokenizer_sentencepiece_legacy=True, tokenizer_special_tokens=special)
    made = build_tokenizer(chosen)
    assert [made.token_id(text) for text in special] == [500, 501, 500]
    ids = made.tokenize("<a>ba<b>")
    assert (ids[0], ids[-1]) == (501, 500) and made.detokenize(ids) == "<a>ba<b>"


def test_the_identity_of_a_folder_follows_its_tokenizer_json_alone(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(tiny.hf_folder(), folder)
    chosen = flags("HuggingFaceTokenizer", tokenizer_model=str(folder))
    before = build_tokenizer(chosen).unique_identifiers
    (folder / "README.md").write_text("a")
    assert build_tokenizer(chosen).unique_identifiers == before
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert build_tokenizer(chosen).unique_identifiers != before


@pytest.mark.parametrize(
    ("given", "complete"),
    [
        ({"sep_token": "a"}, {"sep_token": "a", "eos_token": "a"}),
        ({"eos_token": "a"}, {"sep_token": "a", "eos_token": "a"}),
        ({"eos_token": "a", "sep_token": "b"}, {"eos_token": "a", "sep_token": "b"}),
        ({"cls_token": "c"}, {"cls_token": "c", "bos_token": "c"}),
        (
            {"bos_token": "c", "pad_token": "p"},
            {"cls_token": "c", "bos_token": "c", "pad_token": "p"},
        ),
        ({}, {}),
    ],
)
def test_pairs_of_special_tokens_complete_each_other(
    given: dict[str, str], complete: dict[str, str]
) -> None:
    assert huggingface_module._complete(given) == complete


@pytest.mark.parametrize("name", ["add_prefix_space", "split_special_tokens"])
def test_entries_that_change_the_ids_are_read_by_transformers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(tiny.hf_folder(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for value, direct in ((False, True), (True, False)):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, name: value}))
        files = {"tokenizer_config.json": {**config, name: value}, "special_tokens_map.json": {}}
        assert (huggingface_module._load_direct(folder, files) is not None) == direct


@pytest.mark.parametrize("name", ["add_bos_token", "add_eos_token"])
def test_entries_that_change_the_ends_of_a_text_are_read_by_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They matter only where the tokens around a text are included."""
    folder = tmp_path / "hf"
    shutil.copytree(tiny.hf_folder(), folder)
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": tiny.END}
    load = huggingface_module.load_pretrained
    asked: list[Path] = []

    def loaded(folder: Path, **options: Any) -> Any:
        asked.append(folder)
        return load(folder, **options)

    monkeypatch.setattr(huggingface_module, "load_pretrained", loaded)
    plain = flags("HuggingFaceTokenizer", tokenizer_model=str(folder))
    including = dataclasses.replace(plain, tokenizer_hf_include_special_tokens=True)
    for entry, chosen, theirs in (
        ({}, including, []),
        ({name: False}, plain, []),
        ({name: False}, including, [folder]),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, **entry}))
        asked.clear()
        build_tokenizer(chosen)
        assert asked == theirs


def test_a_tokenizer_with_code_of_its_own_is_not_loaded_without_it(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(tiny.hf_folder(), folder)
    code = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    for config, direct in (({}, True), (code, False)):
        files = {"tokenizer_config.json": config, "special_tokens_map.json": {}}
        assert (huggingface_module._load_direct(folder, files) is not None) == direct


def test_the_start_of_a_text_is_told_where_the_ids_lack_it(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(tiny.hf_folder(), folder)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    number = content["model"]["vocab"].get(tiny.END, 0)
    begin = {"SpecialToken": {"id": tiny.END, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {tiny.END: {"id": tiny.END, "ids": [number], "tokens": [tiny.END]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    plain = flags("HuggingFaceTokenizer", tokenizer_model=str(folder))
    including = dataclasses.replace(plain, tokenizer_hf_include_special_tokens=True)
    assert build_tokenizer(plain).start_ids() == (number,)
    assert build_tokenizer(including).start_ids() == ()
    assert build_tokenizer(including).fast_source() is None
    assert build_tokenizer(plain).fast_source() is not None
    for chosen in (plain, including):
        made = build_tokenizer(chosen)
        assert [list(ids) for ids in made.encode_batch(["ba", "a"])] == [
            made.tokenize(text) for text in ("ba", "a")
        ]
    assert build_tokenizer(including).tokenize("ba") == [
        number,
        *build_tokenizer(plain).tokenize("ba"),
    ]


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="does not exist; give a folder with tokenizer.json"):
        huggingface_module.local_folder(name)


def test_a_folder_a_file_in_it_and_a_name_on_the_hub_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    assert huggingface_module.local_folder(str(tmp_path)) == tmp_path
    assert huggingface_module.local_folder(str(tmp_path / "tokenizer.json")) == tmp_path
    assert huggingface_module.local_folder("someone/model") is None
    assert huggingface_module.local_folder("gpt2") is None


def test_files_are_checked_before_the_tokenizer_is_built(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"library": "huggingface"}')
    for chosen, sentence in (
        (flags("NullTokenizer", vocab_size=9, tokenizer_metadata="/none"), "`--tokenizer-metadata"),
        (
            flags("NullTokenizer", vocab_size=9, tokenizer_metadata=str(tmp_path / "other.json")),
            "names the library huggingface, but `--tokenizer-type NullTokenizer` uses null",
        ),
        (flags("HuggingFaceTokenizer", tokenizer_model="./none"), "(./none) does not exist"),
        (flags("TikTokenizer", tokenizer_model="./none"), "(./none) is not a file"),
    ):
        with pytest.raises((ConfigError, DataError)) as caught:
            check_files(chosen)
        assert sentence in str(caught.value)
    for chosen in (huggingface(), tiktoken(), flags("HuggingFaceTokenizer", tokenizer_model="a/b")):
        check_files(chosen)


def test_options_are_part_of_the_identity() -> None:
    made = [
        flags("ByteLevelTokenizer"),
        flags("ByteLevelTokenizer", vocab_size=600),
        flags("ByteLevelTokenizer", tokenizer_special_tokens=["<a>"]),
        flags("NullTokenizer", vocab_size=600),
        huggingface(),
        huggingface(tokenizer_special_tokens=["<a>"]),
        huggingface(tokenizer_hf_include_special_tokens=True),
        tiktoken(),
        tiktoken(tiktoken_pattern="v1"),
    ]
    identities = [json.dumps(build_tokenizer(each).unique_identifiers) for each in made]
    assert len({*identities}) == len(made)


def test_a_token_has_an_id_where_the_tokenizer_has_the_token() -> None:
    special = ["<new>", "<user>"]
    legacy = sentencepiece(tokenizer_sentencepiece_legacy=True, tokenizer_special_tokens=special)
    for chosen, text, number in (
        (huggingface(), tiny.END, 0),
        (huggingface(), "<none>", -1),
        (flags("ByteLevelTokenizer", tokenizer_special_tokens=["<a>"]), "<a>", 512),
        (flags("ByteLevelTokenizer", tokenizer_special_tokens=["<a>"]), "<b>", -1),
        (legacy, "<new>", 500),
        (legacy, "<none>", -1),
        (sentencepiece(), "<new>", -1),
        (tiktoken(), "<none>", -1),
    ):
        assert build_tokenizer(chosen).token_id(text) == number
    assert build_tokenizer(legacy).fast_source() is None
    assert build_tokenizer(sentencepiece()).fast_source() is not None


def test_a_vocabulary_may_be_the_beginning_of_a_file() -> None:
    """The last of the 300 tokens of the file have no ids then."""
    chosen = tiktoken(vocab_size=290 + 20)
    ours, theirs = build_tokenizer(chosen), tiny.cores_tokenizer(chosen)
    whole = build_tokenizer(tiktoken())
    assert max(i for text in TEXTS for i in whole.tokenize(text)) >= 310
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.tokenize(text)
        assert max(ours.tokenize(text)) < ours.vocab_size == 310
