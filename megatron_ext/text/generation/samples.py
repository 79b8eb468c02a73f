"""Lets the model of a training run continue prompts between its steps, for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.config.run import RunConfig
from megatron_ext.disk.iterations import name_of
from megatron_ext.disk.writing import write_text
from megatron_ext.parallel.collectives import on_reporting_rank
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.config.samples import TextSampleConfig
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.generation.decode import Completion, Request
from megatron_ext.text.generation.forward import check_model
from megatron_ext.text.generation.requests import Encoder, Prompt, encoded_requests, read_prompts
from megatron_ext.text.generation.run import Writer
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.run import Run

FOLDER, LIST = "samples", "samples.jsonl"
"""The folder in ``--save`` with a folder for each set of texts, and the file in each of them."""
BATCH_SIZE = 16


def check_samples(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise an error if the model of a run, not built yet, cannot continue the run's prompts."""
    check_model(config)
    requests_of(config, tokenizer)


def requests_of(config: RunConfig, tokenizer: Tokenizer) -> tuple[list[Prompt], list[Request]]:
    """Return the prompts that a run's flags give, and the requests to continue them.

    The likeliest token is taken, so that two texts differ by what the model has learnt alone. A
    fine-tuned model gets each prompt as a user's message.
    """
    flags = config.section(TextSampleConfig)
    generation = GenerationConfig(
        prompt=flags.sample_texts,
        prompt_file=flags.sample_prompts,
        chat=config.section(SftConfig).sft,
        max_new_tokens=flags.sample_new_tokens,
    )
    prompts = read_prompts(
        generation, texts="--sample-texts", file="--sample-prompts", chat="--sft"
    )
    positions = config.section(PositionConfig).max_position_embeddings
    assert positions is not None
    encode = Encoder(config.with_section(generation), tokenizer)
    sampling = generation.sampling(config.training.seed)
    return prompts, encoded_requests(prompts, encode, sampling, positions)


class TextSamples(Callback):
    """Continues prompts every ``--sample-interval`` steps, into ``samples/iter_0000100`` and so on.

    The folders are in ``--save``. Texts of an iteration that is run again replace the earlier ones.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        tokenizer = build_tokenizer(run.config.section(TokenizerConfig))
        self._interval = run.config.section(TextSampleConfig).sample_interval
        self._prompts, self._requests = requests_of(run.config, tokenizer)
        self._writer = Writer(run, tokenizer, batch_size=BATCH_SIZE)
        self._root = Path(run.config.checkpoint.save or ".") / FOLDER

    def after_step(self) -> None:
        iteration = self.run.progress.iteration
        if not due(iteration, self._interval):
            return
        with self.run.parameter_gather.paused():
            completions = self._writer(self._requests)
        folder = self._root / name_of(iteration)

        def write() -> None:
            write_texts(folder, iteration, self._prompts, completions)
            self.run.reporters.say(f"continued {len(completions)} prompts into {folder}")

        on_reporting_rank(write, f"Writing texts into {folder}", self.run.context)


def write_texts(
    folder: Path, iteration: int, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> None:
    """Write a JSON object for each prompt, with its continuation, into a folder's `LIST`."""
    rows = [
        {
            "iteration": iteration,
            **prompt.row,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
        }
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(folder / LIST, text)
