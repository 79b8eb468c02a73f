"""The program tools/generate_text.py: continue prompts with a checkpoint's model, in any layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.flags import if_changed
from megatron_ext.config.parser import read_words
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import described, withheld_notes
from megatron_ext.disk.writing import write_error
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.config.rules import SHAPE_SECTIONS, text_rules
from megatron_ext.text.config.sft import is_date
from megatron_ext.text.convert.config import read_model
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
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
from megatron_ext.text.inputs import tokenizer_inputs
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.run import with_tokenizer
from megatron_ext.text.task import GPT, GPT_CHUNK, folder_errors
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.launch import refuse
from megatron_ext.train.main import main
from megatron_ext.train.task import Task, no_datasets

if TYPE_CHECKING:
    from megatron_ext.train.run import Run

NOT_STORED = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "mtp_num_layers")
"""Fields whose values in a checkpoint's configuration are not used for generation.

The first two limit how many tokens an expert takes, the third adds MTP depths."""
TYPING_TIMEOUT = 24 * 60.0
"""How many minutes the other ranks wait in a collective while the user types on one rank."""


def build_frozen_chunk(*args: Any, **kwargs: Any) -> Any:
    """Build a GPT model chunk whose parameters get no gradients, which saves their memory."""
    return build_gpt_chunk(*args, **kwargs).requires_grad_(False)


def inference_task(*sections: type) -> Task:
    """Return pretrain_gpt.py's task changed for inference: no data, no training, frozen weights.

    ``sections`` are configuration classes whose flags are added.
    """
    without = tuple(kind for kind in GPT.sections if kind is not TaskEvaluationConfig)
    return GPT.replace(
        sections=without,
        rules=inference_rules,
        datasets=no_datasets,
        inputs=tokenizer_inputs,
        callbacks=(),
        model_chunk=build_frozen_chunk,
        implements={**GPT.implements, build_frozen_chunk: GPT.implements[GPT_CHUNK]},
    ).with_sections(*sections)


def inference_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return the errors in the flags for the model, the tokenizer and the Hugging Face folders.

    ``given`` has the user's flags, ``run`` the flags with derived values.
    """
    return [*text_rules(given, run), *folder_errors(run)]


def model_defaults(
    argv: Sequence[str], program: Task, tool: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the flag defaults, by name, that follow from the model of ``--load`` or ``--load-hf``.

    Also return a list of sentences for the user, on switches that permit untrusted code to run:
    those that the checkpoint's run had on are off unless given again. ``program`` is the task that
    defines the flags in ``argv``, ``tool`` the name of the program, for errors.

    Raises:
        ConfigError: ``argv`` has neither or both of the two flags, or the checkpoint does not hold
            a text model.
        CheckpointError: the checkpoint, the folder or its configuration is missing or damaged.
    """
    reading = read_words(argv, program)
    values = reading.values
    given = values.get("checkpoint", {})
    load = given.get("load")
    folder = values.get("hugging_face", {}).get("load_hf")
    if bool(load) == bool(folder):
        raise ConfigError(
            f"`--load` ({load}) and `--load-hf` ({folder}) both give a model; leave one out."
            if load
            else f"`--load` is missing; give {tool} the --save folder of a run of "
            "pretrain_gpt.py, or the folder of a Hugging Face model as `--load-hf`."
        )
    defaults = {
        "transformer_impl": "torch",
        "skip_train": True,
        "micro_batch_size": 1,
        "eval_iters": 0,
    }
    if load is None:
        assert folder is not None
        source = read_model(Path(folder))
        return {**defaults, "seq_length": source.fields["max_position_embeddings"]}, []
    stored = read_run_config(Path(load), given.get("ckpt_step"))
    notes = withheld_notes(stored, program.sections, reading.given)
    stored = described(stored, program.sections)
    return {**defaults, **_stored_model(stored, program, load), "finetune": True}, notes


def run_model(
    argv: Sequence[str],
    program: Task,
    tool: str,
    work: Callable[[Run], None],
    defaults: Mapping[str, Any],
) -> int:
    """Load the model of ``--load`` or ``--load-hf``, and call ``work`` on the run that holds it.

    Return the exit code of the program.

    Args:
        argv: the command-line arguments.
        program: the task that defines the flags and builds the model.
        tool: name of the program, for errors.
        work: a function of the run, called on all ranks once the model is loaded.
        defaults: flag defaults, by name, that override those of `model_defaults`.
    """
    try:
        of_model: dict[str, Any] = {}
        notes: list[str] = []
        if not {"-h", "--help"} & {*argv}:
            of_model, notes = model_defaults(argv, program, tool)
    except MegatronExtError as error:
        return refuse(error)
    return main(program, argv, defaults={**of_model, **defaults}, work=work, notes=notes)


def _stored_model(stored: Mapping[str, Any], program: Task, load: str) -> dict[str, Any]:
    """Return the values, by field name, of flags that determine what a checkpoint's model computes.

    ``stored`` is the configuration in the checkpoint folder ``load``. The task ``program`` may add
    fields. Raise a ConfigError if the checkpoint holds no text model.
    """
    if "tokenizer" not in stored:
        raise ConfigError(
            f"`--load` ({load}) must be a checkpoint of pretrain_gpt.py, but holds another kind of "
            "model; give another."
        )
    flags = {}
    for section, kind in SHAPE_SECTIONS.items():
        decisive = {name for name, answer in if_changed(kind).items() if "refuse" in answer}
        flags.update({k: v for k, v in stored.get(section, {}).items() if k in decisive})
    for section in program.stored_model(stored, RunConfig()).values():
        flags.update(section)
    flags.update(stored["tokenizer"])
    date = stored.get("sft", {}).get("written_date")
    return {
        **{k: v for k, v in flags.items() if k not in NOT_STORED},
        **{name: stored["precision"].get(name) for name in ("bf16", "fp16")},
        "unpadded_vocab_size": stored["model"].get("unpadded_vocab_size"),
        "trained_date": date if isinstance(date, str) and is_date(date) else None,
        "origin": (stored.get("hugging_face") or {}).get("origin"),
    }


def prepare(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Check that the model, not built yet, can use a key-value cache and fits the tokenizer.

    Return the configuration with the vocabulary size filled in, and the tokenizer.
    """
    check_model(config)
    trained = config.model.unpadded_vocab_size
    config, tokenizer = with_tokenizer(config)
    check_vocabulary(trained, tokenizer)
    return config, tokenizer


def prepare_generation(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Check as `prepare` does, and also check the prompts and the output file.

    Return the configuration with the vocabulary size filled in, and the tokenizer.
    """
    config, tokenizer = prepare(config)
    generation = config.section(GenerationConfig)
    if generation.output_file is not None:
        error = write_error("--output-file", generation.output_file, is_file=True)
        if error is not None:
            raise ConfigError(error)
    encode = Encoder(config, tokenizer)
    if not generation.interactive and generation.prompt_file != "-":
        _requests(config, encode, read_prompts(generation))
    return config, tokenizer


def _requests(config: RunConfig, encode: Encoder, prompts: Sequence[Prompt]) -> list[Request]:
    sampling = config.section(GenerationConfig).sampling(config.training.seed)
    positions = config.section(PositionConfig).max_position_embeddings
    assert positions is not None
    return encoded_requests(prompts, encode, sampling, positions)


def generation_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return the errors in the flags of tools/generate_text.py.

    ``given`` has the user's flags, ``run`` the flags with derived values.
    """
    return [*inference_rules(given, run), *run.section(GenerationConfig).own_errors()]


GENERATION = replace(
    inference_task(GenerationConfig), rules=generation_rules, preflight=prepare_generation
)


def generate_text(argv: Sequence[str]) -> int:
    """Run tools/generate_text.py with command-line arguments; return its exit code."""
    timeout = {"distributed_timeout_minutes": TYPING_TIMEOUT} if "--interactive" in argv else {}
    return run_model(argv, GENERATION, "tools/generate_text.py", write_texts, timeout)


class Writer:
    """Completes requests with the model of a run; all ranks call it together."""

    def __init__(self, run: Run, tokenizer: Tokenizer, *, batch_size: int) -> None:
        self.context = run.context
        self.forward = PackedForward.of_run(run)
        ends = end_tokens(run.config, tokenizer)
        self._decoder = Decoder(self.forward, tokenizer, ends, batch_size=batch_size)

    def __call__(
        self, requests: Sequence[Request], on_text: OnText = lambda number, piece: None
    ) -> list[Completion]:
        """Complete requests; return the completions, sorted by request number, on one rank.

        That rank is `ParallelContext.reporting_rank`, which prints; other ranks return []. The
        requests are divided among the data-parallel replicas; the printing rank's replica takes the
        first, so that a single text can be shown while it is written. In each replica, the rank
        that chooses the tokens calls ``on_text`` with each piece of text as soon as it is written.
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
            parts: list[Any] = [None] * self.context.pgs.dp.size()
            torch.distributed.all_gather_object(parts, completions, group=self.context.pgs.dp)
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
    completions = writer(requests, shown.show if shown and streams else lambda *_: None)
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
