"""Converts Hugging Face models to our checkpoints, and back.

The peak memory is one copy of the weights plus twice the largest tensor.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint import conversion, safetensors_files
from megatron_ext.checkpoint.files import standing_folder_of
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.state import PREFIX, holds_averages
from megatron_ext.checkpoint.stored import choose, read_progress, read_run_config
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.config.model import padded_size
from megatron_ext.config.parser import parse_args
from megatron_ext.config.precision import PRECISIONS
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError, FlagError, MegatronExtError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.fp8.scaling import HISTORY
from megatron_ext.layers.initialization import shards_of
from megatron_ext.layers.transformer_config import build_transformer_config, params_dtype
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.convert.card import Training, model_card
from megatron_ext.text.convert.config import (
    HuggingFaceModel,
    config_json,
    files_to_copy,
    fitting_family,
    read_model,
    tokenizer_files,
)
from megatron_ext.text.convert.family import Gpt, words_of
from megatron_ext.text.convert.growth import Growth
from megatron_ext.text.convert.quantizing import Quantizer
from megatron_ext.text.convert.reading import check_one_dtype, load_folder, without_missing_depths
from megatron_ext.text.convert.table import Table
from megatron_ext.text.convert.training import ids_of, special_tokens, tokenizer_of
from megatron_ext.text.convert.writing import write_model
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.task import TEXT
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer

NO_TRAINING = "--micro-batch-size 1 --skip-train".split()
"""Flags for a run that does not train; every configuration needs a micro-batch size."""
_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", PREFIX)


@dataclass(frozen=True)
class Export:
    """The options of an export from the checkpoint folder ``load`` to the new folder ``target``.

    Attributes:
        like: Hugging Face folder from which to copy the tokenizer files and those entries of
            config.json that our flags do not determine. None copies no files, and takes the entries
            from the Hugging Face model from which the run began, if there is one.
        dtype: dtype to write; None keeps the dtype of the checkpoint.
        step: iteration of the checkpoint; None takes the latest.
        vocab_size: number of vocabulary rows to write. None takes the number of ``like``, or else
            of the Hugging Face model from which the run began, or else all rows, including padding.
        max_shard_size: the largest size of a file, in bytes or as text like ``"5GB"``.
        ema: whether to write the averaged weights (``--ema-decay``) instead of the last ones.
        quantization: number format of the linear layers, "fp8" or "mxfp4"; None writes plain
            values.
    """

    load: Path
    target: Path
    step: int | None = None
    like: Path | None = None
    dtype: str | None = None
    vocab_size: int | None = None
    max_shard_size: int | str = "5GB"
    ema: bool = False
    quantization: str | None = None


def export_model(order: Export) -> list[str]:
    """Write a checkpoint as a Hugging Face model; return notes for the user.

    Raise a CheckpointError for a model that fits none of `FAMILIES`, or an unusable folder.
    """
    stored = read_run_config(order.load, order.step)
    if stored.get("lora", {}).get("lora_quantize_weights"):
        raise CheckpointError(
            f"{order.load} holds adapters without the weights under them, which the run kept in 4 "
            "bits (`--lora-quantize-weights`); merge both with `tools/lora.py merge` first."
        )
    config = stored_run(order, stored)
    origin = config.section(HuggingFaceConfig).model()
    like = None if origin is None else origin.alone()
    copied: list[Path] = []
    if order.like is not None:
        like = read_model(order.like)
        copied = files_to_copy(like)
        if origin is not None and origin.vocab_size > like.vocab_size:
            # The run's vocabulary has grown, and so has its tokenizer.
            like = like.with_vocabulary(origin.vocab_size)
            own = tokenizer_of(TokenizerConfig(**stored.get("tokenizer") or {}))
            copied = own + [x for x in copied if x.name not in {path.name for path in own}]
    vocab_size, notes = _vocab_size(order, config.model.padded_vocab_size or 0, like)
    safetensors_files.check_target(order.target)
    dtype = params_dtype(config.precision)
    if order.dtype:
        dtype = safetensors_files.torch_dtype(order.dtype)
    gpt = Gpt.of(config)
    tokens: dict[str, int] = {}
    if like is None:
        try:
            tokens = special_tokens(TokenizerConfig(**stored.get("tokenizer") or {}), vocab_size)
        except MegatronExtError as error:
            notes.append(f"config.json names no end of a text, for want of the tokenizer: {error}")
    content = config_json(gpt, vocab_size=vocab_size, dtype=dtype, like=like, special_tokens=tokens)
    if like is None:
        table = fitting_family(gpt).table(gpt, vocab_size)
    else:
        table = like.table_of(gpt, vocab_size)
    quantizer = _quantizer(order, gpt, table, like)
    with conversion.one_rank(config.training.seed) as context:
        chunk = build_bare(config, context)
        _check_nothing_is_lost(order, chunk)
        # Averages are stored in float32, whatever the dtype of the model.
        ema = ShardedEMA([chunk], None) if order.ema else None
        manager = CheckpointManager(config.checkpoint, context)
        manager.load(model=[chunk], optimizer=None, scheduler=None, ema=ema)
        averages = {} if ema is None else {id(p): x for p, x in ema.gathered()}
        write_model(
            order.target,
            [chunk],
            context,
            table,
            content,
            num_layers=config.model.num_layers or 0,
            dtype=dtype,
            copied=copied,
            generation=ids_of(content),
            like=like,
            card=partial(_card, order, content["model_type"], stored, like),
            max_shard_size=order.max_shard_size,
            quantizer=quantizer,
            value_of=lambda parameter: averages.get(id(parameter), parameter),
        )
    return notes


def _card(
    order: Export, model_type: str, stored: dict[str, Any], like: HuggingFaceModel | None
) -> str:
    iteration = choose(order.load, order.step) or 0
    progress = read_progress(standing_folder_of(order.load, iteration))
    samples = progress.get("consumed_train_samples", 0)
    training = Training(stored, iteration, samples, order.load, like)
    return model_card(order.target.name, model_type, training, order.quantization)


def _quantizer(
    order: Export, gpt: Gpt, table: Table, like: HuggingFaceModel | None
) -> Quantizer | None:
    if order.quantization is None:
        return None
    quantizer = Quantizer.of(order.quantization, None if like is None else like.raw)
    error = quantizer.error(gpt, table)
    if error is not None:
        raise CheckpointError(str(FlagError("--quantization", order.quantization, *error)))
    return quantizer


def build_bare(config: RunConfig, context: ParallelContext) -> Any:
    """Build the whole model on one rank on the CPU, in the run's dtype; initialize no weights."""
    model = dataclasses.replace(
        config.model, use_cpu_initialization=True, perform_initialization=False
    )
    config = dataclasses.replace(config, model=model)
    transformer_config = build_transformer_config(config)
    (chunk,) = build_chunks(build_gpt_chunk, config, transformer_config, context)
    for parameter in chunk.parameters():
        # Only parameters: buffers, such as the bias of experts, stay in float32.
        parameter.data = parameter.data.to(params_dtype(config.precision))
    return chunk


def stored_run(order: Export, stored: dict[str, Any]) -> RunConfig:
    precision = stored.get("precision") or {}
    words = [f"--{name}" for name in ("bf16", "fp16") if precision.get(name)]
    words += [*NO_TRAINING, "--load", str(order.load)]
    # With --finetune only the weights would be loaded; averages belong to the state of a run.
    words += ["--no-load-optim", "--no-load-rng"] if order.ema else ["--finetune"]
    words += [] if order.step is None else ["--ckpt-step", str(order.step)]
    config = parse_args(words, TEXT, world_size=1, device="cpu", checkpoint_config=stored).config
    origin = (stored.get("hugging_face") or {}).get("origin")
    return config.with_section(HuggingFaceConfig(origin=origin))


def _vocab_size(order: Export, padded: int, like: HuggingFaceModel | None) -> tuple[int, list[str]]:
    size = like.vocab_size if like is not None else padded
    size = size if order.vocab_size is None else order.vocab_size
    if not 0 < size <= padded:
        raise CheckpointError(
            f"The vocabulary to export ({size}) must be at least 1 and at most the "
            f"checkpoint's with padding ({padded}); give `--vocab-size`."
        )
    note = "The padding of the vocabulary is exported too; `--vocab-size` leaves it out."
    return size, [note] if order.vocab_size is None and like is None else []


def _check_nothing_is_lost(order: Export, chunk: Any) -> None:
    """Raise a CheckpointError if the checkpoint holds weights that the exported model would lack.

    Raise one too if averaged weights are to be exported, but the checkpoint has none.
    """
    iteration = choose(order.load, order.step)
    assert iteration is not None
    path = standing_folder_of(order.load, iteration)
    if order.ema and not holds_averages(path):
        raise CheckpointError(
            f"{path} holds no averaged weights, which only a run with `--ema-decay` saves; leave "
            "out `--ema`."
        )
    exported = {shard.name.split("[")[0] for shard in shards_of(chunk, buffers=True)}
    for name, entry in stored_entries(path).items():
        is_weight = isinstance(entry, TensorStorageMetadata) and not name.startswith(_NOT_WEIGHTS)
        if is_weight and name not in exported and not name.endswith(HISTORY):
            raise CheckpointError(
                f"{path} holds `{name}`, which the exported model would not have; export a "
                "checkpoint of the plain model."
            )


@dataclass(frozen=True)
class Import:
    """The options of an import from the Hugging Face folder ``source`` to the new folder ``save``.

    Attributes:
        dtype: dtype of the checkpoint; None keeps the dtype of the source.
        tensor_parallel_size: number of tensor-parallel ranks that will share the vocabulary rows,
            which are padded so that each rank gets the same number.
        make_vocab_size_divisible_by: after padding, each rank's number of vocabulary rows is a
            multiple of this.
        seq_length: ``--seq-length`` to store for ``--use-checkpoint-args``; None stores the model's
            max_position_embeddings.
        verify: whether to compare logits with transformers before anything is written.
        resize_vocabulary: how the vocabulary gets new rows if the tokenizer has more entries, as
            the flag of this name says; None lets it be.
        tokenizer_model: folder of the tokenizer; None takes that of the source, if it has one.
    """

    source: Path
    save: Path
    dtype: str | None = None
    tensor_parallel_size: int = 1
    make_vocab_size_divisible_by: int = 128
    seq_length: int | None = None
    verify: bool = False
    resize_vocabulary: str | None = None
    tokenizer_model: Path | None = None

    @property
    def tokenizer(self) -> Path | None:
        """Return the folder of the tokenizer; None if there is none."""
        if self.tokenizer_model is not None:
            return self.tokenizer_model
        files = tokenizer_files(self.source)
        return self.source if any(path.name.startswith("tokenizer") for path in files) else None


def import_model(order: Import) -> tuple[list[str], list[str]]:
    """Write a Hugging Face model as a checkpoint of iteration 0.

    Return the command-line flags with which the model can be trained, and notes for the user. Raise
    a CheckpointError if the model cannot be converted or a folder is unusable.
    """
    model = without_missing_depths(read_model(order.source))
    conversion.refuse_checkpoints(order.save)
    dtype = order.dtype or check_one_dtype(model)
    growth = _growth(order)
    grown = model if growth is None else model.with_vocabulary(growth.new)
    words = words_of_model(grown, order, dtype)
    keeping = ["--save", str(order.save), "--no-save-optim", "--no-save-rng"]
    flags = [*words, *NO_TRAINING, *keeping]
    config = parse_args(flags, TEXT, world_size=1, device="cpu").config
    expected = reference_logits(model) if order.verify else None
    with conversion.one_rank(config.training.seed) as context:
        chunk = build_bare(config, context)
        notes = load_folder([chunk], order.source, context, growth=growth).notes
        notes += [] if growth is None else [growth.note()]
        if expected is not None:
            notes.append(compare_logits(chunk, model, *expected))
        stored = config.with_section(HuggingFaceConfig(origin=grown.raw)).to_dict()
        conversion.save_imported(chunk, config.checkpoint, context, stored)
    return words, notes


def _growth(order: Import) -> Growth | None:
    """Return how the vocabulary grows to the tokenizer's; None if it does not."""
    method = order.resize_vocabulary
    if method is None:
        return None
    folder = order.tokenizer
    if folder is None:
        raise CheckpointError(
            f"`--resize-vocabulary` needs a tokenizer, which {order.source} has not; give its "
            "folder by `--tokenizer-model`."
        )
    settings = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder.resolve())
    )
    size = build_tokenizer(settings).vocab_size
    growth = Growth.of(order.source, size, method, RunConfig().training.seed)
    return growth if growth.count > 0 else None


TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest allowed difference between our logits and transformers', by dtype of the weights.

It is relative to the largest logit.
"""


@torch.no_grad()
def reference_logits(model: HuggingFaceModel) -> tuple[Tensor, Tensor]:
    """Return random tokens ``[1, s]``, and transformers' float32 logits ``[1, s, v]`` for them."""
    tokens = reference_tokens(model)
    return tokens, reference_model(model).eval()(tokens).logits


def reference_tokens(model: HuggingFaceModel) -> Tensor:
    """Return random tokens of the model's vocabulary, ``[1, s]``, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (1, 16), generator=generator)


def reference_model(model: HuggingFaceModel) -> Any:
    """Return transformers' model of a folder in float32.

    Raise a CheckpointError if the folder's own code would have to run.
    """
    if model.family.known_as is not None:
        raise CheckpointError(
            f"{model.path} says `model_type` '{model.family.model_type}', whose code comes with "
            "the folder and is not run, so no logits can be compared; leave `--verify` out."
        )
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = AutoModelForCausalLM if model.wrapping is None else AutoModelForImageTextToText
    changed = model.family.as_published
    entries = {} if changed is None else changed(model.sections())
    return kind.from_pretrained(
        model.path.parent, dtype=torch.float32, local_files_only=True, **entries
    )


@torch.no_grad()
def compare_logits(chunk: Any, model: HuggingFaceModel, tokens: Tensor, theirs: Tensor) -> str:
    """Compare our logits of ``tokens`` with ``theirs``; return a note on the difference.

    ``theirs`` are ``[1, s, v]``. Raise a CheckpointError if the logits differ by more than rounding
    explains (`TOLERANCES`).
    """
    positions = torch.arange(tokens.shape[1])[None]
    ours = chunk.eval()(tokens, positions, None)[..., : model.vocab_size]
    difference = float((ours.float() - theirs).abs().max() / theirs.abs().max())
    dtype = next(chunk.parameters()).dtype
    if not difference <= TOLERANCES[dtype]:
        raise CheckpointError(
            f"The logits of {model.path.parent} differ from those of transformers by "
            f"{difference:.1e} of the largest, more than {TOLERANCES[dtype]:g}; do not use the "
            "imported model, and report its config.json."
        )
    return f"logits differ from those of transformers by {difference:.1e} of the largest"


def words_of_model(model: HuggingFaceModel, order: Import, dtype: str) -> list[str]:
    if min(order.make_vocab_size_divisible_by, order.tensor_parallel_size) < 1:
        raise CheckpointError(
            f"`--make-vocab-size-divisible-by` ({order.make_vocab_size_divisible_by}) and "
            f"`--target-tensor-parallel-size` ({order.tensor_parallel_size}) must be at least 1."
        )
    fields = {
        **model.fields,
        "seq_length": order.seq_length or model.fields["max_position_embeddings"],
        "make_vocab_size_divisible_by": order.make_vocab_size_divisible_by,
        "padded_vocab_size": padded_size(
            model.vocab_size, order.make_vocab_size_divisible_by, order.tensor_parallel_size
        ),
    }
    words = [*words_of(fields), *PRECISIONS[dtype]]
    if order.tokenizer is not None:
        folder = str(order.tokenizer.resolve())
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    return words
