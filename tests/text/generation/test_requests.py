"""Beginnings of prompts, as transformers makes them, and how texts are shown."""

import datetime
import io
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoTokenizer

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import DataError
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.generation.decode import Completion
from megatron_ext.text.generation.requests import (
    Encoder,
    Prompt,
    check_length,
    encoded_requests,
    end_tokens,
    read_prompts,
)
from megatron_ext.text.generation.run import SEPARATOR, Terminal
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer
from tests.text.tiny import END, hf_folder


def folder_of(folder: Path, template: str | None) -> Path:
    """Write a tokenizer that puts the tokens of ``template`` around a text."""
    shutil.copytree(hf_folder(), folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    if template is not None:
        names = [(END, backend.token_to_id(END)), ("<|pad|>", backend.token_to_id("<|pad|>"))]
        backend.post_processor = processors.TemplateProcessing(template, special_tokens=names)
        backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("text", ["The river", f"{END}The river", "a", ""])
@pytest.mark.parametrize("template", [None, f"{END} $A", f"{END} <|pad|> $A"])
def test_prompts_of_a_hugging_face_model_begin_as_in_transformers(
    tmp_path: Path, template: str | None, text: str
) -> None:
    folder = folder_of(tmp_path / "t", template)
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    tokenizer = build_tokenizer(settings)
    theirs = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    config = RunConfig().with_section(GenerationConfig(), settings)
    prompt = Prompt(text, "`--prompt`", {})
    encode = Encoder(config.with_section(HuggingFaceConfig(load_hf=str(folder))), tokenizer)
    if text and not text.startswith(END):
        assert encode(prompt) == theirs
    elif text:
        # A prompt that begins so already is left as it is.
        start = tokenizer.start_ids()
        doubled = len(start) == 1
        assert encode(prompt) == (theirs[1:] if doubled else theirs)
    else:
        # Where nothing begins a text, the begin-of-text token does, which this tokenizer has.
        assert encode(prompt) == (list(tokenizer.start_ids()) or [tokenizer.bos])
    assert (encode.note is None) == (template is None)
    # A checkpoint of an imported model stays one of Hugging Face.
    imported = HuggingFaceConfig(origin={"model_type": "llama"})
    again = Encoder(config.with_section(imported), tokenizer)
    assert (again(prompt), again.note) == (encode(prompt), encode.note)
    if text and template is not None:
        assert str(encode.note).startswith(f"prompts begin with {theirs[0]} (`{END}`)")
        scratch = Encoder(config.with_section(HuggingFaceConfig()), tokenizer)
        assert scratch(prompt) == tokenizer.tokenize(text)
        assert "prompts begin without" in str(scratch.note)
        assert "`--tokenizer-hf-include-special-tokens` adds it" in str(scratch.note)


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("given", "trained", "day", "said"),
    [
        ("2024-07-26", "2023-01-02", "26 Jul 2024", None),
        (None, "2023-01-02", "02 Jan 2023", "2023-01-02, that of the model's training; `--chat-d"),
        (None, None, f"{datetime.date.today():%d %b %Y}", ", today's, as the model keeps none; "),
    ],
)
def test_a_chat_template_writes_the_date_of_the_training(
    tmp_path: Path, given: str | None, trained: str | None, day: str, said: str | None
) -> None:
    # A chat template writes the beginning of a text itself.
    folder = folder_of(tmp_path / "t", f"{END} $A")
    (tmp_path / "dated.jinja").write_text(DATED)
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    flags = GenerationConfig(
        chat=True,
        chat_template=str(tmp_path / "dated.jinja"),
        chat_date=given,
        trained_date=trained,
    )
    config = RunConfig().with_section(flags, settings, HuggingFaceConfig())
    encode = Encoder(config, tokenizer := build_tokenizer(settings))
    assert encode(Prompt("The river", "", {})) == tokenizer.tokenize(f"{day}The river")
    assert encode.note is None if said is None else said in str(encode.note)


def test_a_date_without_use_is_told(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", None)
    (tmp_path / "plain.jinja").write_text("{{ messages }}")
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    flags = GenerationConfig(
        prompt=["a"],
        chat=True,
        chat_template=str(tmp_path / "plain.jinja"),
        chat_date="2024-07-26",
    )
    config = RunConfig().with_section(flags, settings, HuggingFaceConfig())
    note = Encoder(config, build_tokenizer(settings)).note
    assert note == "`--chat-date` (2024-07-26): the chat template writes no date"
    assert GenerationConfig(prompt=["a"], chat_date="July").own_errors() == [
        "`--chat-date` (July) has an effect only with `--chat`; add it, or leave this out.",
        "`--chat-date` (July) must be a day as YYYY-MM-DD; use 2024-07-26.",
    ]


MESSAGES = [
    {"role": "user", "content": "who?"},
    {"role": "assistant", "content": "I"},
    {"role": "user", "content": "so?"},
]


def test_a_line_parts_the_prompt_from_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [Prompt("2+2?", "", {}), Prompt(MESSAGES, "", {})]
    texts = [Completion(0, "4", (), "eos"), Completion(1, "yes", (), "eos")]
    Terminal(prompts).finish(texts)
    shown = f"\n[1] 2+2?\n→ 4\n{SEPARATOR}\n[2] so?\n→ yes\n"
    assert capsys.readouterr().out == shown
    # Of several texts that are written at once, the first is shown piece by piece.
    terminal = Terminal(prompts)
    for number, piece in ((1, "y"), (0, "4"), (1, "es"), (0, "")):
        terminal.show(number, piece)
    terminal.finish(texts)
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("given", "more"), [(None, set()), (3, {3}), ([3, 5], {3, 5})])
def test_a_text_ends_at_the_end_of_document_and_at_the_models_own_end_tokens(
    tmp_path: Path, given: int | list[int] | None, more: set[int]
) -> None:
    folder = folder_of(tmp_path / "t", None)
    entries = {} if given is None else {"eos_token_id": given}
    (folder / "generation_config.json").write_text(json.dumps(entries))
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    end = Backend.from_file(str(folder / "tokenizer.json")).token_to_id(END)
    assert end not in more
    config = RunConfig().with_section(GenerationConfig(), settings)
    assert end_tokens(config, build_tokenizer(settings)) == {end, *more}


def test_a_tokenizer_without_an_end_of_document_gives_no_end_token() -> None:
    config = RunConfig().with_section(GenerationConfig(), TokenizerConfig("ByteLevelTokenizer"))
    tokenizer = ByteLevelTokenizer()
    assert end_tokens(config, tokenizer) == {tokenizer.eod}
    tokenizer.eos = -1
    assert end_tokens(config, tokenizer) == set()


def test_an_empty_prompt_needs_a_token_that_begins_a_text() -> None:
    config = RunConfig().with_section(GenerationConfig(), HuggingFaceConfig())
    tokenizer = ByteLevelTokenizer()
    tokenizer.bos = -1
    encode = Encoder(config, tokenizer)
    with pytest.raises(DataError, match="`--prompt` is empty, and no token begins a text; give a"):
        encode(Prompt("", "`--prompt`", {}))
    tokenizer.bos = 300
    assert encode(Prompt("", "`--prompt`", {})) == [300]


ROWS = '{"prompt": "a", "id": 3}\n\n  \n{"prompt": "b", "messages": [{"role": "user"}]}\n'


def test_prompts_of_a_file_keep_their_rows_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(ROWS, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(ROWS))
    for name in (str(path), "-"):
        first, second = read_prompts(GenerationConfig(prompt_file=name))
        assert (first.content, first.row) == ("a", {"prompt": "a", "id": 3})
        assert (second.content, second.place) == ("b", f"`--prompt-file` ({name}), line 4")
    chat = GenerationConfig(prompt_file=str(path), chat=True)
    assert [prompt.content for prompt in read_prompts(chat)] == ["a", [{"role": "user"}]]
    given = read_prompts(GenerationConfig(prompt=["x" * 50, "y"]))
    assert [(x.content, x.place) for x in given] == [
        ("x" * 50, f"`--prompt` ({'x' * 40})"),
        ("y", "`--prompt` (y)"),
    ]
    assert given[1].row == {"prompt": "y"}


@pytest.mark.parametrize(
    ("text", "chat", "sentence"),
    [
        ("\n \n", False, "holds no row; give at least one prompt."),
        (
            '{"prompt": 3}',
            False,
            'must be an object with "prompt", a text; for messages give `--ch',
        ),
        ('["a"]', False, 'line 1 must be an object with "prompt"'),
        ('{"messages": []}', True, 'with "messages", a list of objects, or "prompt", a text.'),
        ('{"messages": ["a"]}', True, 'with "messages", a list of objects, or "prompt", a text.'),
        ('{"messages": [{"role": "user"}]}', False, "a text; for messages give `--chat`."),
    ],
)
def test_a_row_that_is_no_prompt_is_told(
    text: str, chat: bool, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_prompts(GenerationConfig(prompt_file=str(path), chat=chat))
    assert f"`--prompt-file` ({path})" in str(caught.value)
    assert sentence in str(caught.value)


def test_a_prompt_must_leave_a_position_for_a_token() -> None:
    check_length(range(7), "`--prompt` (a)", 8)
    with pytest.raises(DataError, match=r"\(a\) has 8 tokens, but must have fewer than the model"):
        check_length(range(8), "`--prompt` (a)", 8)
    sampling = Sampling(seed=3)
    prompts = [Prompt(text, "", {}) for text in ("abc", "de")]
    requests = encoded_requests(prompts, lambda prompt: [*map(ord, prompt.content)], sampling, 4)
    assert [(each.number, bytes(each.ids)) for each in requests] == [(0, b"abc"), (1, b"de")]
    assert requests[0].sampling is sampling


def test_messages_that_the_template_refuses_are_told_with_their_place(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", None)
    refusing = "{{ raise_exception('roles must\\nalternate') }}"
    (tmp_path / "refusing.jinja").write_text(refusing)
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    flags = GenerationConfig(chat=True, chat_template=str(tmp_path / "refusing.jinja"))
    config = RunConfig().with_section(flags, settings, HuggingFaceConfig())
    encode = Encoder(config, build_tokenizer(settings))
    with pytest.raises(DataError, match=r"^line 3: the chat template refuses the messages \(roles"):
        encode(Prompt("The river", "line 3", {}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"eos_token_id": "end"}', "gives `eos_token_id` as 'end', but it must be a number of a"),
        ('{"eos_token_id": [3, -1]}', "but it must be a number of a token or a list of such; copy"),
        ('{"eos_token_id": [3, 4.5]}', "but it must be a number of a token or a list of such"),
        ("[1]", "is not a JSON object"),
        ("{", "is not a JSON object"),
    ],
)
def test_a_file_of_generation_that_cannot_be_followed_is_told(
    content: str, said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "t", None)
    (folder / "generation_config.json").write_text(content)
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    config = RunConfig().with_section(GenerationConfig(), settings)
    with pytest.raises(DataError) as caught:
        end_tokens(config, build_tokenizer(settings))
    assert said in str(caught.value)
    assert str(folder / "generation_config.json") in str(caught.value)
