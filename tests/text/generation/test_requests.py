"""Beginnings of prompts, as transformers makes them, and how texts are shown."""

import datetime
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoTokenizer

from megatron_ext.config.run import RunConfig
from megatron_ext.text.convert.training import HuggingFaceConfig
from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.generation.decode import Completion
from megatron_ext.text.generation.requests import Encoder, Prompt, end_tokens
from megatron_ext.text.generation.tool import Terminal
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
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
    assert (encode.note is None) == (template is None)
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
    folder = folder_of(tmp_path / "t", None)
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


def test_a_line_parts_the_prompt_from_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [Prompt("2+2?", "", {}), Prompt([{"role": "user", "content": "so?"}], "", {})]
    texts = [Completion(0, "4", (), "eos"), Completion(1, "yes", (), "eos")]
    Terminal(prompts, streams=False).finish(texts)
    assert capsys.readouterr().out == "\n[1] 2+2?\n→ 4\n\n[2] so?\n→ yes\n"


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
