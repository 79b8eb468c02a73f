"""The program tools/generate_text.py: continues prompts with a checkpoint's model, in any layout.

What needs torch is in `text.generation.run`, so that the flags are read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.flags import if_changed
from megatron_ext.config.parser import read_words
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import described, help_question, withheld_notes
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.text.config.rules import SHAPE_SECTIONS, text_rules
from megatron_ext.text.config.samples import TextSampleConfig
from megatron_ext.text.config.sft_rules import is_date
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.inputs import tokenizer_inputs
from megatron_ext.text.task import GPT, GPT_CHUNK, folder_errors
from megatron_ext.train.launch import refuse
from megatron_ext.train.main import main
from megatron_ext.train.task import Task, later, no_datasets

if TYPE_CHECKING:
    from megatron_ext.train.run import Run

RUN = "megatron_ext.text.generation.run"
"""The module of the functions that need torch."""
build_frozen_chunk = later(f"{RUN}:build_frozen_chunk")
read_model = later("megatron_ext.text.convert.config:read_model")

NOT_STORED = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "mtp_num_layers")
"""Fields whose values in a checkpoint's configuration are not used for generation.

The first two limit how many tokens an expert takes, the third adds MTP depths."""
TYPING_TIMEOUT = 24 * 60.0
"""How many minutes the other ranks wait in a collective while the user types on one rank."""


def inference_task(*sections: type) -> Task:
    """Return pretrain_gpt.py's task changed for inference: no data, no training, frozen weights.

    ``sections`` are configuration classes whose flags are added.
    """
    of_training = (TaskEvaluationConfig, TextSampleConfig)
    return GPT.replace(
        sections=tuple(kind for kind in GPT.sections if kind not in of_training),
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

    Also return a list of sentences for the user: on switches that permit untrusted code to run,
    since those that the checkpoint's run had on are off unless given again, and on plain prompts
    for a model of conversations. ``program`` is the task that
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
    asks_plainly = GenerationConfig in program.sections and "chat" not in reading.given
    if asks_plainly and stored.get("sft", {}).get("sft"):
        notes.append(
            "The checkpoint was fine-tuned on conversations, but prompts are continued as plain "
            "texts; `--chat` asks them as a user's messages."
        )
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
        if help_question(argv) is None:
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
    if stored.get("lora", {}).get("lora_quantize_weights"):
        raise ConfigError(
            f"`--load` ({load}) holds adapters without the weights under them, which the run kept "
            "in 4 bits (`--lora-quantize-weights`); merge both with `tools/lora.py merge`, and "
            "give the result."
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


def generation_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return the errors in the flags of tools/generate_text.py.

    ``given`` has the user's flags, ``run`` the flags with derived values.
    """
    return [*inference_rules(given, run), *run.section(GenerationConfig).own_errors()]


GENERATION = replace(
    inference_task(GenerationConfig),
    rules=generation_rules,
    preflight=later(f"{RUN}:prepare_generation"),
)


def generate_text(argv: Sequence[str]) -> int:
    """Run tools/generate_text.py with command-line arguments; return its exit code."""
    timeout = {"distributed_timeout_minutes": TYPING_TIMEOUT} if "--interactive" in argv else {}
    work = later(f"{RUN}:write_texts")
    return run_model(argv, GENERATION, "tools/generate_text.py", work, timeout)
