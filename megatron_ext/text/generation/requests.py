"""Turns the prompts in flags and files into requests, with chat templates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.disk.reading import (
    UnreadableFile,
    is_count,
    parse_json,
    read_json_object,
    read_text,
    shortened,
)
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.data.separators import spelled
from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.generation.decode import Request
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.sft.chat import (
    ChatTokenizer,
    dated_tokenizer,
    load_chat_tokenizer,
    with_known_date,
    writes_date,
)
from megatron_ext.text.sft.templates import TooCostly, apply_template
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer
from megatron_ext.text.tokenizers.entries import DESCRIBING
from megatron_ext.text.tokenizers.huggingface import tokenizer_folder

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A text or messages to continue.

    Attributes:
        content: the text or the messages.
        place: the flag or file line that gave the prompt, for errors.
        row: the JSON object that holds the prompt; ``--output-file`` repeats it with the
            completion.
    """

    content: str | Messages
    place: str
    row: Mapping[str, Any]


def read_prompts(
    generation: GenerationConfig,
    *,
    texts: str = "--prompt",
    file: str = "--prompt-file",
    chat: str = "--chat",
) -> list[Prompt]:
    """Return the prompts of ``--prompt``, or those in ``--prompt-file``.

    ``texts`` and ``file`` are the flags that gave them, and ``chat`` is the flag with which prompts
    may be messages, for errors. Raise a DataError if the file
    cannot be read, is empty, or has a line that is not a prompt.
    """
    if generation.prompt is not None:
        return [
            Prompt(text, f"`{texts}` ({text[:40]})", {"prompt": text}) for text in generation.prompt
        ]
    name = generation.prompt_file
    assert name is not None
    try:
        text = sys.stdin.read() if name == "-" else read_text(name)
    except (OSError, UnicodeDecodeError, UnreadableFile) as error:
        why = error.reason if isinstance(error, UnreadableFile) else error
        raise DataError(f"`{file}` ({name}) cannot be read ({why}); give a jsonl file.") from None
    lines = [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise DataError(f"`{file}` ({name}) holds no row; give at least one prompt.")
    return [_prompt(line, f"`{file}` ({name}), line {i}", generation, chat) for i, line in lines]


def _prompt(line: str, place: str, generation: GenerationConfig, chat: str) -> Prompt:
    try:
        row = parse_json(line, place)
    except UnreadableFile as error:
        raise DataError(
            f"{place} is not JSON ({error.reason}); give an object on each line."
        ) from None
    content = None
    if isinstance(row, dict):
        content = row.get("messages") if generation.chat else None
        content = row.get("prompt") if content is None else content
    is_messages = isinstance(content, list) and all(isinstance(each, dict) for each in content)
    if not isinstance(content, str) and not (is_messages and content):
        keys = '"messages", a list of objects, or "prompt"' if generation.chat else '"prompt"'
        hint = "" if generation.chat else f"; for messages give `{chat}`"
        raise DataError(f"{place} must be an object with {keys}, a text{hint}.")
    assert content is not None
    return Prompt(content, place, row)


class Encoder:
    """Turns prompts into token ids; with ``--chat`` it puts them into the chat template first.

    Without ``--chat``, prompts for a model that comes from Hugging Face begin with the tokens that
    transformers adds, such as ``<s>``. Prompts for a model trained here from scratch do not,
    because its training data lacks these tokens.

    Attributes:
        note: a sentence to show to the user, or None. With ``--chat`` it tells which date the chat
            template writes, otherwise how prompts begin.

    Raises:
        ConfigError: ``--chat`` is given, but neither the tokenizer nor ``--chat-template`` gives a
            chat template.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._generation = config.section(GenerationConfig)
        self._tokenizer = tokenizer
        self._chat: ChatTokenizer | None = None
        start = () if self._generation.chat else tokenizer.start_ids()
        origin = config.section(HuggingFaceConfig)
        is_theirs = origin.load_hf is not None or origin.origin is not None
        self._start = start if is_theirs else ()
        self.note: str | None = None
        if start:
            names = " ".join(spelled(tokenizer, number) for number in start)
            self.note = f"prompts begin with {names}, as in transformers"
            if not is_theirs:
                self.note = (
                    f"prompts begin without {names}, which transformers would add, as the texts of "
                    "the training did; `--tokenizer-hf-include-special-tokens` adds it"
                )
        if self._generation.chat:
            loaded = load_chat_tokenizer(
                tokenizer,
                config.section(TokenizerConfig),
                self._generation.chat_template,
                flag="--chat",
                template_flag="--chat-template",
            )
            self._chat = self._with_date(loaded)

    def _with_date(self, chat: ChatTokenizer) -> ChatTokenizer:
        """Return ``chat`` made to write a fixed date instead of today's; set `note` about it."""
        given = self._generation.chat_date
        if given is None:
            dated, sentence = with_known_date(chat, self._generation.trained_date)
            self.note = sentence and f"{sentence}; `--chat-date` sets it"
            return dated
        if not writes_date(chat):
            self.note = f"`--chat-date` ({given}): the chat template writes no date"
        return dated_tokenizer(chat, given)

    def __call__(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; raise a DataError for an empty or unusable prompt."""
        if self._chat is not None:
            content = prompt.content
            messages = content
            if isinstance(content, str):
                messages = [{"role": "user", "content": content}]
            try:
                encoded = apply_template(
                    self._chat,
                    messages,
                    tokenize=True,
                    return_dict=True,
                    add_generation_prompt=True,
                )
            except TooCostly:
                raise
            except Exception as error:  # A template can raise anything.
                reason = " ".join(str(error).split())[:200]
                raise DataError(
                    f"{prompt.place}: the chat template refuses the messages ({reason}); correct "
                    "them."
                ) from None
            return list(encoded["input_ids"])
        assert isinstance(prompt.content, str)
        try:
            ids = self._tokenizer.tokenize(prompt.content)
        except ValueError as error:
            raise DataError(f"{prompt.place}: {error}; correct the prompt.") from None
        if tuple(ids[: len(self._start)]) != self._start:
            ids = [*self._start, *ids]
        if not ids and self._tokenizer.bos != NO_TOKEN:
            ids = [self._tokenizer.bos]
        if not ids:
            raise DataError(f"{prompt.place} is empty, and no token begins a text; give a word.")
        return ids


def check_length(ids: Sequence[int], place: str, positions: int) -> None:
    """Raise a DataError if a prompt leaves no position for a further token.

    Args:
        ids: tokens of the prompt.
        place: the flag or file line that gave the prompt, for the message.
        positions: number of positions of the model.
    """
    if len(ids) >= positions:
        raise DataError(
            f"{place} has {len(ids)} tokens, but must have fewer than the model has positions "
            f"(`--max-position-embeddings` {positions}); shorten it."
        )


def encoded_requests(
    prompts: Iterable[Prompt],
    encode: Callable[[Prompt], list[int]],
    sampling: Sampling,
    positions: int,
) -> list[Request]:
    """Return a request, numbered from 0, for each prompt; ``encode`` gives a prompt's token ids.

    All requests share ``sampling``. Raise a DataError for a prompt with as many tokens as the
    model has ``positions``, or more.
    """
    requests = []
    for number, prompt in enumerate(prompts):
        ids = encode(prompt)
        check_length(ids, prompt.place, positions)
        requests.append(Request(number, tuple(ids), sampling))
    return requests


def end_tokens(config: RunConfig, tokenizer: Tokenizer) -> set[int]:
    """Return the ids of the tokens that end a text.

    They are the tokenizer's end-of-document token and the end tokens in the generation_config.json
    of a Hugging Face model. A chat model may end its answers with a token that only this file
    names. Raise a DataError if the file is damaged.
    """
    ends = {tokenizer.eod} - {NO_TOKEN}
    path, entries = _generation_config(config, tokenizer)
    given = entries.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(map(is_count, ids)):
        raise DataError(
            f"{path} gives `eos_token_id` as {shortened(given)}, but it must be a number of a "
            "token or a list of such; copy the model again."
        )
    return ends | set(ids)


def generation_notes(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Return a list with one sentence for the user, or an empty list.

    The sentence names the settings in the model's generation_config.json that have no effect here.
    """
    path, entries = _generation_config(config, tokenizer)
    skipped = (*DESCRIBING, "_from_model_config", "eos_token_id")
    # Entries that say what holds without them.
    same = {"bos_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
    given = [key for key, value in entries.items() if value not in (None, same.get(key))]
    names = ", ".join(f"`{key}`" for key in given if key not in skipped)
    if not names:
        return []
    return [
        f"{path}: these entries have no effect here: {names}; flags such as `--temperature` set "
        "how texts are drawn"
    ]


def _generation_config(config: RunConfig, tokenizer: Tokenizer) -> tuple[Path, dict[str, Any]]:
    """Return (path, content) of the generation_config.json in the tokenizer's folder.

    The content is {} if there is no such file.
    """
    name = config.section(TokenizerConfig).tokenizer_model
    if tokenizer.kind != "HuggingFaceTokenizer" or name is None:
        return Path("generation_config.json"), {}
    path = tokenizer_folder(name) / "generation_config.json"
    if not path.is_file():
        return path, {}
    try:
        return path, read_json_object(path, not_finite=True)
    except UnreadableFile as error:
        raise DataError(
            f"{path} is not a JSON object ({error.reason}); copy the model again."
        ) from None


def check_vocabulary(trained: int | None, tokenizer: Tokenizer) -> None:
    """Raise a ConfigError if the model's vocabulary is larger than the tokenizer's.

    ``trained`` is the model's vocabulary size, without padding; nothing is checked if it is None.
    """
    if trained is not None and trained > tokenizer.vocab_size:
        raise ConfigError(
            f"The model's vocabulary has {trained} tokens, but the tokenizer ({tokenizer.kind}) "
            f"has only {tokenizer.vocab_size}; give the tokenizer that the model was trained with."
        )
