"""Continues prompts with the model of a run: checks before it, and what all ranks do in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.disk.writing import write_error
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.parallel.collectives import to_one_rank
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.generation.decode import Completion, Decoder, OnText, Request
from megatron_ext.text.generation.forward import PackedForward, check_model
from megatron_ext.text.generation.requests import (
    Encoder,
    Prompt,
    check_vocabulary,
    encoded_requests,
    end_tokens,
    generation_notes,
    read_prompts,
)
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.run import with_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from megatron_ext.train.run import Run


def build_frozen_chunk(*args: Any, **kwargs: Any) -> Any:
    """Build a GPT model chunk whose parameters get no gradients, which saves their memory."""
    return build_gpt_chunk(*args, **kwargs).requires_grad_(False)


def prepare(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Check that the model, not built yet, can use a key-value cache and fits the tokenizer.

    Return the configuration with the vocabulary size filled in, and the tokenizer.
    """
    check_model(config)
    trained = config.model.unpadded_vocab_size
    config, tokenizer = with_tokenizer(config)
    check_vocabulary(trained, tokenizer)
    return config, tokenizer


def check_output(flag: str, path: str | None) -> None:
    """Raise a ConfigError if the file that ``flag`` names cannot be written; None names none."""
    error = None if path is None else write_error(flag, path, is_file=True)
    if error is not None:
        raise ConfigError(error)


def prepare_generation(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Check as `prepare` does, and also check the prompts and the output file.

    Return the configuration with the vocabulary size filled in, and the tokenizer.
    """
    config, tokenizer = prepare(config)
    generation = config.section(GenerationConfig)
    check_output("--output-file", generation.output_file)
    encode = Encoder(config, tokenizer)
    if not generation.interactive and generation.prompt_file != "-":
        _requests(config, encode, read_prompts(generation))
    return config, tokenizer


def _requests(config: RunConfig, encode: Encoder, prompts: Sequence[Prompt]) -> list[Request]:
    sampling = config.section(GenerationConfig).sampling(config.training.seed)
    positions = config.section(PositionConfig).max_position_embeddings
    assert positions is not None
    return encoded_requests(prompts, encode, sampling, positions)


class Writer:
    """Completes requests with the model of a run; all ranks call it together."""

    def __init__(self, run: Run, tokenizer: Tokenizer, *, batch_size: int) -> None:
        self.context = run.context
        self.forward = PackedForward.of_run(run)
        ends = end_tokens(run.config, tokenizer)
        self._decoder = Decoder(self.forward, tokenizer, ends, batch_size=batch_size)

    def __call__(
        self, requests: Sequence[Request], on_text: OnText | None = None
    ) -> list[Completion]:
        """Complete requests; return the completions, sorted by request number, on one rank.

        That rank is `ParallelContext.reporting_rank`, which prints; other ranks return []. The
        requests are divided among the data-parallel replicas; the printing rank's replica takes the
        first, so that a single text can be shown while it is written. In each replica, the rank
        that chooses the tokens calls ``on_text``, if given, with each piece of text as soon as it
        is written.
        """
        replicas = self.context.layout.data_parallel_size
        turn = replicas - 1 - self.context.dp_rank
        completions = self._decoder.complete(requests[turn::replicas], on_text)
        return self.gathered(completions)

    def gathered(self, completions: list[Completion]) -> list[Completion]:
        """Gather the completions of all replicas; return them sorted by request number.

        Only the rank that prints (`ParallelContext.reporting_rank`) gets them; others return [].
        """
        if self.forward.decides and self.context.pgs.dp.size() > 1:
            parts = to_one_rank(completions, self.context.reporting_rank, self.context.pgs.dp)
            completions = [completion for part in parts for completion in part]
        if not self.context.is_reporting_rank:
            return []
        return sorted(completions, key=lambda completion: completion.number)


def write_texts(run: Run) -> None:
    """Complete the prompts that the flags give; print or save the texts. All ranks call this."""
    config = run.config
    context = run.context
    generation = config.section(GenerationConfig)
    config, tokenizer = with_tokenizer(config)
    encode = Encoder(config, tokenizer)
    notes = [*tokenizer.notes(), *generation_notes(config, tokenizer)]
    notes += [] if encode.note is None else [encode.note]
    for note in notes if context.is_reporting_rank else ():
        print(f"> {note}", flush=True)
    writer = Writer(run, tokenizer, batch_size=generation.generation_batch_size)
    if generation.interactive:
        _converse(config, encode, writer)
        return
    prompts: Any = [read_prompts(generation) if context.is_reporting_rank else None]
    torch.distributed.broadcast_object_list(prompts, src=context.reporting_rank)
    requests = _requests(config, encode, prompts[0])
    streams = generation.stream and context.layout.data_parallel_size == 1
    to_terminal = generation.output_file is None
    shown = Terminal(prompts[0]) if to_terminal else None
    completions = writer(requests, shown.show if shown and streams else None)
    if not context.is_reporting_rank:
        return
    if shown is not None:
        shown.finish(completions)
        return
    assert generation.output_file is not None
    rows = [
        {**prompt.row, "completion": completion.text, "finish_reason": completion.finish_reason}
        for prompt, completion in zip(prompts[0], completions, strict=True)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(generation.output_file).write_text(text, encoding="utf-8")


SEPARATOR = "-" * 40
"""The line between two texts on the terminal, since a text may hold empty lines."""


class Terminal:
    """Prints prompts with their completions, in order.

    `show` can print the first completion piece by piece while it is written.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._current = -1

    def show(self, number: int, piece: str) -> None:
        """Print a piece of completion ``number`` if that is 0; `finish` prints the others."""
        if self._current < 0:
            self._begin(0)
        if number == 0:
            print(piece, end="", flush=True)

    def finish(self, completions: Sequence[Completion]) -> None:
        """Print the texts that have not been printed."""
        for completion in completions:
            if completion.number > self._current:
                if self._current >= 0:
                    print(f"\n{SEPARATOR}", end="")
                self._begin(completion.number)
                print(completion.text, end="")
        print(flush=True)

    def _begin(self, number: int) -> None:
        self._current = number
        content = self._prompts[number].content
        head = content if isinstance(content, str) else content[-1].get("content", "")
        print(f"\n[{number + 1}] {head}\n→ ", end="", flush=True)


def _converse(config: RunConfig, encode: Encoder, writer: Writer) -> None:
    """Continue each line that the user types, until the input ends.

    With ``--chat`` the lines and answers form one conversation.
    """
    context = writer.context
    chat = config.section(GenerationConfig).chat
    messages: list[dict[str, str]] = []
    if context.is_reporting_rank:
        print("Type a prompt and Enter; end with Ctrl-D.", flush=True)
    while (line := _next_line(context.is_reporting_rank, context.reporting_rank)) is not None:
        asked = [*messages, {"role": "user", "content": line}]
        prompt = Prompt(asked if chat else line, "The prompt", {})
        try:
            (request,) = _requests(config, encode, [prompt])
        except MegatronExtError as error:
            if context.is_reporting_rank:
                print(error, flush=True)
            continue
        written = writer([request], lambda _, piece: print(piece, end="", flush=True))
        if context.is_reporting_rank:
            print(flush=True)
        answer: list[Any] = [written[0].text if written else None]
        torch.distributed.broadcast_object_list(answer, src=context.reporting_rank)
        if chat:
            messages = [*asked, {"role": "assistant", "content": answer[0]}]


def _next_line(reads: bool, source: int) -> str | None:
    """Read the user's next line that is not empty, and return it on every rank.

    Return None at the end of the input. ``source`` is the only rank that reads; ``reads`` tells
    whether this rank is ``source``.
    """
    line: list[Any] = [None]
    if reads:
        print("> ", end="", flush=True)
        line = [next((text.rstrip("\n") for text in sys.stdin if text.strip()), None)]
    torch.distributed.broadcast_object_list(line, src=source)
    return line[0]  # type: ignore[no-any-return]
