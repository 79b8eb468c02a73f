"""Starts a run from a folder of Hugging Face weights, and writes such folders while it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.checkpoint.files import digest_of_weights
from megatron_ext.checkpoint.safetensors_files import size_errors
from megatron_ext.config.model import padded_size
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.iterations import name_of
from megatron_ext.disk.writing import write_error
from megatron_ext.errors import CheckpointError, ConfigError, FlagError
from megatron_ext.layers.transformer_config import params_dtype
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.run import Run

if TYPE_CHECKING:
    from megatron_ext.checkpoint.adapters import FrozenBase
    from megatron_ext.text.convert.config import HuggingFaceModel
    from megatron_ext.text.convert.growth import Growth
    from megatron_ext.train.batch_size import Progress


def model_of_folder(config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return the configuration fields that follow from the folder of ``--load-hf``.

    The result maps the name of each section to its fields and their values.
    """
    folder = config.section(HuggingFaceConfig).load_hf
    assert folder is not None
    from megatron_ext.text.convert.config import read_model, tokenizer_files
    from megatron_ext.text.convert.family import SECTIONS
    from megatron_ext.text.convert.reading import without_missing_depths

    fields = without_missing_depths(read_model(Path(folder))).fields
    own: dict[str, dict[str, Any]] = {
        name: {f.name: fields[f.name] for f in dataclasses.fields(kind) if f.name in fields}
        for name, kind in SECTIONS.items()
    }
    # transformers does not pad the vocabulary. Padding would change the loss, because the softmax
    # would include its logits.
    own["model"]["make_vocab_size_divisible_by"] = 1
    if any(path.name.startswith("tokenizer") for path in tokenizer_files(Path(folder))):
        own["tokenizer"] = {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(Path(folder).resolve()),
        }
    return own


def resolve_folder(config: RunConfig) -> RunConfig:
    """Return the run's configuration with the values that the folder of ``--load-hf`` determines.

    These are the padded vocabulary size, unless it is set, and ``origin``, the content of
    config.json. Set ``starts_elsewhere`` too, since the run needs no checkpoint of ours.
    """
    given = config.section(HuggingFaceConfig)
    assert given.load_hf is not None
    from megatron_ext.text.convert.config import read_model
    from megatron_ext.text.convert.family import Gpt
    from megatron_ext.text.convert.sparse_start import with_epsilon, with_indexer

    source = with_indexer(read_model(Path(given.load_hf)), Gpt.of(config))
    config = with_epsilon(config, source)
    model = config.model
    checkpoint = dataclasses.replace(config.checkpoint, starts_elsewhere=True)
    if model.padded_vocab_size is None:
        ranks = config.parallel.tensor_model_parallel_size
        padded = padded_size(source.vocab_size, model.make_vocab_size_divisible_by, ranks)
        model = dataclasses.replace(model, padded_vocab_size=padded)
    lora = config.lora
    if lora.lora_rank is not None and lora.lora_quantize_weights is not None:
        folder = Path(given.load_hf).resolve()
        published = (str(folder), digest_of_weights(folder), "--load-hf")
        checkpoint = dataclasses.replace(checkpoint, published=published)
        lora = dataclasses.replace(lora, saves_adapters_only=True)
    config = dataclasses.replace(config, model=model, checkpoint=checkpoint, lora=lora)
    return config.with_section(dataclasses.replace(given, origin=source.raw))


def folder_errors(run: RunConfig) -> list[str]:
    """Return a sentence on each error in flags such as ``--load-hf`` and ``--save-hf``."""
    given = run.section(HuggingFaceConfig)
    errors: list[str] = []
    if given.load_hf is not None:
        from megatron_ext.text.convert.config import disagreements, read_model
        from megatron_ext.text.convert.family import Gpt
        from megatron_ext.text.convert.sparse_start import with_indexer

        source = with_indexer(read_model(Path(given.load_hf)), Gpt.of(run))
        errors += disagreements(Gpt.of(run), source)
        if (run.model.padded_vocab_size or 0) < source.vocab_size:
            errors.append(
                FlagError(
                    "--padded-vocab-size",
                    run.model.padded_vocab_size,
                    f"must be at least the {source.vocab_size} entries of the vocabulary of "
                    f"`--load-hf` ({given.load_hf})",
                    "leave it out",
                )
            )
        if run.checkpoint.pretrained_checkpoint is not None:
            errors.append(
                FlagError(
                    "--load-hf",
                    given.load_hf,
                    f"and `--pretrained-checkpoint` ({run.checkpoint.pretrained_checkpoint}) both "
                    "give initial weights",
                    "leave one out",
                )
            )
        if run.checkpoint.use_checkpoint_args:
            errors.append(
                FlagError(
                    "--load-hf",
                    None,
                    "and `--use-checkpoint-args` both give the shape of the model",
                    "leave one out",
                )
            )
    elif given.resize_vocabulary is not None:
        errors.append(
            FlagError(
                "--resize-vocabulary",
                given.resize_vocabulary,
                "needs `--load-hf`, whose vocabulary it lets grow",
                "give the folder of a model, or leave it out",
            )
        )
    if given.save_hf is None:
        errors += [
            FlagError(f"--save-hf-{name}", None, "needs `--save-hf`", "give a folder")
            for name in ("interval", "quantization", "shard-size")
            if getattr(given, f"save_hf_{name.replace('-', '_')}") is not None
        ]
    if given.save_hf_shard_size is not None:
        errors += size_errors("--save-hf-shard-size", given.save_hf_shard_size)
    if given.save_hf is not None:
        error = write_error("--save-hf", given.save_hf)
        if error is not None:
            errors.append(error)
        if given.load_hf is None:
            from megatron_ext.text.convert.config import fitting_family
            from megatron_ext.text.convert.family import Gpt

            try:
                fitting_family(Gpt.of(run))
            except CheckpointError as unfit:
                errors += [
                    FlagError("--save-hf", None, f"is not possible: {text.removesuffix('.')}")
                    for text in unfit.messages
                ]
                return errors
        if given.save_hf_quantization is not None:
            errors += _quantization_errors(run)
    return errors


def _quantization_errors(run: RunConfig) -> list[FlagError]:
    from megatron_ext.text.convert.config import fitting_family
    from megatron_ext.text.convert.family import Gpt
    from megatron_ext.text.convert.quantizing import Quantizer

    given = run.section(HuggingFaceConfig)
    assert given.save_hf_quantization is not None
    like = given.model()
    gpt = Gpt.of(run)
    family = fitting_family(gpt) if like is None else like.family
    error = Quantizer.of(given.save_hf_quantization, None).error(gpt, family.table(gpt, 1))
    flag = "--save-hf-quantization"
    return [] if error is None else [FlagError(flag, given.save_hf_quantization, *error)]


def fit_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """Return the configuration with a vocabulary for all ``vocab_size`` entries of the tokenizer.

    With ``--resize-vocabulary``, the vocabulary of ``--load-hf`` grows to them if it has fewer.
    Raise a ConfigError without the flag.
    """
    given = config.section(HuggingFaceConfig)
    source = given.model()
    if source is None or vocab_size <= source.vocab_size:
        return config
    if given.resize_vocabulary is None:
        raise ConfigError(
            f"The tokenizer has {vocab_size} entries, but the model of `--load-hf` "
            f"({given.load_hf}) has {source.vocab_size}; give the tokenizer that it was trained "
            "with, or `--resize-vocabulary noise` for new rows."
        )
    model = config.model
    if (model.padded_vocab_size or 0) < vocab_size:
        # It is that of the folder: one that was given is at least as large, or refused.
        ranks = config.parallel.tensor_model_parallel_size
        padded = padded_size(vocab_size, model.make_vocab_size_divisible_by, ranks)
        model = dataclasses.replace(model, padded_vocab_size=padded)
    raw = source.with_vocabulary(vocab_size).raw
    grown = dataclasses.replace(given, origin=raw, grown_vocabulary=vocab_size)
    return dataclasses.replace(config, model=model).with_section(grown)


def is_folder(path: str) -> bool:
    """Return whether a path is that of a Hugging Face folder, and not of checkpoints."""
    return (Path(path) / "config.json").is_file()


def fill_model(
    config: RunConfig, chunks: Sequence[torch.nn.Module], path: str, context: ParallelContext
) -> FrozenBase:
    """Fill the chunks of a model with the Hugging Face weights under its adapters.

    Return the identity of these weights.
    """
    from megatron_ext.checkpoint.adapters import FrozenBase
    from megatron_ext.text.convert.reading import load_folder

    folder = Path(path).resolve()
    growth = _growth(config, folder)
    more = {} if growth is None else {"growth": growth}
    load_folder(chunks, folder, context, may_lack_depths=False, **more)
    return FrozenBase(str(folder), digest_of_weights(folder), "--load-hf")


def load_initial_weights(
    config: RunConfig, context: ParallelContext, chunks: Sequence[torch.nn.Module]
) -> list[str]:
    """Load the weights in the folder of ``--load-hf`` into the model chunks of this rank.

    Return notes for the user.
    """
    folder = config.section(HuggingFaceConfig).load_hf
    assert folder is not None
    from megatron_ext.text.convert.reading import load_folder

    draws = config.model.perform_initialization and config.lora.lora_quantize_weights is None
    growth = _growth(config, Path(folder))
    more = {} if growth is None else {"growth": growth}
    loaded = load_folder(chunks, Path(folder), context, may_lack_depths=draws, **more)
    notes = [f"loaded {folder} (Hugging Face)", *loaded.notes]
    return notes if growth is None else [*notes, *_growth_notes(growth, chunks)]


def _growth(config: RunConfig, folder: Path) -> Growth | None:
    """Return how the vocabulary of the model in ``folder`` grows in a run; None if it does not."""
    given = config.section(HuggingFaceConfig)
    if given.grown_vocabulary is None:
        return None
    from megatron_ext.text.convert.growth import Growth

    assert given.resize_vocabulary is not None
    seed = config.training.seed
    return Growth.of(folder, given.grown_vocabulary, given.resize_vocabulary, seed)


def _growth_notes(growth: Growth, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Return what is new in the vocabulary, and a note if it is not trained.

    The rank that prints it has the word embedding.
    """
    notes = [growth.note()]
    tables = [
        parameter
        for chunk in chunks
        for parameter in chunk.parameters()
        if getattr(parameter, "is_embedding_or_output_parameter", False)
    ]
    if tables and not any(table.requires_grad for table in tables):
        notes.append(
            "The new rows of the vocabulary are not trained, since the word embedding is frozen; "
            "what new tokens mean is learnt only if it is trained."
        )
    return notes


class HuggingFaceFolders(Callback):
    """A callback that writes the model to ``--save-hf`` at the end of training.

    It also writes the model every ``--save-hf-interval`` steps, if that flag is given. Each
    iteration gets its own folder. LoRA adapters are merged into the weights.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        given = run.config.section(HuggingFaceConfig)
        assert given.save_hf is not None
        self._folder = Path(given.save_hf)
        self._interval = given.save_hf_interval
        self._written: int | None = None
        changed = any(x.has_changed_layers for x in unwrap_model(list(run.chunks)))
        if changed and run.context.rank == 0:
            print(
                "> --save-hf writes the weights that a model of this family has; transformers "
                "computes with its own layers, and not as `change_layers` changed them",
                flush=True,
            )

    def after_step(self) -> None:
        if due(self.run.progress.iteration, self._interval):
            self._write()

    def on_train_end(self) -> None:
        if self._written != self.run.progress.iteration:
            self._write()

    def _write(self) -> None:
        run = self.run
        iteration = self.run.progress.iteration
        target = self._folder / name_of(iteration)
        whole: AbstractContextManager[None] = nullcontext()
        if run.config.optimizer.shards_weights:
            from megatron_ext.layers.weight_shards import whole_weights

            whole = whole_weights(run.chunks)
        with run.parameter_gather.paused(), whole:
            write_run(target, run.config, run.chunks, run.context, run.progress)
        self._written = iteration
        if run.context.rank == 0:
            print(f"> wrote {target} (Hugging Face)", flush=True)


def write_run(
    target: Path,
    config: RunConfig,
    chunks: Sequence[torch.nn.Module],
    context: ParallelContext,
    progress: Progress | None = None,
) -> None:
    """Write the model of a run as a Hugging Face folder; all ranks call this together.

    The model card says how far the run has come, by its ``progress``; None writes no card.
    """
    from megatron_ext.text.convert.config import config_json, files_to_copy, fitting_family
    from megatron_ext.text.convert.family import Gpt
    from megatron_ext.text.convert.quantizing import Quantizer
    from megatron_ext.text.convert.writing import write_model

    model = config.model
    gpt = Gpt.of(config)
    like = config.section(HuggingFaceConfig).model()
    like = None if like is None else like.alone()
    given = config.section(HuggingFaceConfig)
    quantization = given.save_hf_quantization
    raw = None if like is None else like.raw
    dtype = params_dtype(config.precision)
    vocab_size = model.unpadded_vocab_size or model.padded_vocab_size or 0
    vocab_size = vocab_size if like is None else like.vocab_size
    tokens = special_tokens(config.section(TokenizerConfig), vocab_size)
    content = config_json(gpt, vocab_size=vocab_size, dtype=dtype, like=like, special_tokens=tokens)
    if like is not None and like.wrapping is None:
        content |= other_tokens(config, like.raw, tokens)
    table = fitting_family(gpt).table(gpt, vocab_size) if like is None else None
    copied = tokenizer_of(config.section(TokenizerConfig))
    if like is not None:
        table = like.table_of(gpt, vocab_size)
        own = {path.name for path in copied}
        others = files_to_copy(like) if like.wrapping is not None else []
        copied += [path for path in others if path.name not in own]
    assert table is not None
    write_model(
        target,
        chunks,
        context,
        table,
        content,
        num_layers=model.num_layers or 0,
        dtype=dtype,
        copied=copied,
        value_of=merged_weights(chunks),
        generation=ids_of(content),
        max_shard_size=given.save_hf_shard_size or "5GB",
        quantizer=None if quantization is None else Quantizer.of(quantization, raw),
        like=like,
        card=None if progress is None else partial(_card, target, config, progress, content, like),
        template=_template_of(config),
        flag="--save-hf",
    )


def _card(
    target: Path,
    config: RunConfig,
    progress: Progress,
    content: Mapping[str, Any],
    like: HuggingFaceModel | None,
) -> str:
    from megatron_ext.text.convert.card import Training, model_card

    given = config.section(HuggingFaceConfig)
    save = config.checkpoint.save
    training = Training(
        config.to_dict(),
        progress.iteration,
        progress.consumed_train_samples,
        None if save is None else Path(save),
        like,
    )
    name = f"{target.parent.name}/{target.name}"
    return model_card(name, content["model_type"], training, given.save_hf_quantization)


def _template_of(config: RunConfig) -> Path | None:
    """Return the file of the chat template that ``--sft-chat-template`` gives, if any."""
    template = config.section(SftConfig).sft_chat_template if config.has(SftConfig) else None
    return None if template is None else Path(template)


def other_tokens(
    config: RunConfig, raw: Mapping[str, Any], tokens: Mapping[str, int]
) -> dict[str, int]:
    """Return the ids of special tokens that replace those in ``raw``, the config.json of a folder.

    They are those of the run's tokenizer where it is not the folder's own. An id that the folder
    lists beside others, such as one of several ends of a text, stays as it is.
    """
    folder = config.section(HuggingFaceConfig).load_hf
    given = config.section(TokenizerConfig)
    if folder is None or given.tokenizer_type == "NullTokenizer":
        return {}
    if given.tokenizer_model is not None and Path(given.tokenizer_model).exists():
        if Path(given.tokenizer_model).samefile(folder):
            return {}
    listed = {x: value if isinstance(value, list) else [value] for x, value in raw.items()}
    return {name: number for name, number in tokens.items() if number not in listed.get(name, [])}


def ids_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens in the content of a config.json, for generation."""
    text = content.get("text_config") or {}
    ids = {name: content.get(name, text.get(name)) for name in _IDS}
    return {name: value for name, value in ids.items() if value is not None}


_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def special_tokens(settings: TokenizerConfig, vocab_size: int) -> dict[str, int]:
    """Return the ids of the tokenizer's special tokens, by their names such as ``bos_token_id``.

    Leave out tokens that the tokenizer lacks, and ids that are not below ``vocab_size``. Return {}
    if there is no tokenizer.
    """
    if settings.tokenizer_type is None:
        return {}
    tokenizer = build_tokenizer(settings)
    ids = {"bos": tokenizer.bos, "eos": tokenizer.eos, "pad": tokenizer.pad}
    return {f"{name}_token_id": n for name, n in ids.items() if 0 <= n < vocab_size}


def merged_weights(chunks: Sequence[torch.nn.Module]) -> Callable[[Tensor], Tensor]:
    """Return a function that maps a parameter to its values with any LoRA adapter merged in."""
    from megatron_ext.layers.lora import merged_weight_of

    merged = merged_weight_of(unwrap_model(list(chunks)))
    return lambda parameter: merged[id(parameter)]() if id(parameter) in merged else parameter


def tokenizer_of(tokenizer: TokenizerConfig) -> list[Path]:
    """Return the tokenizer's files if it is a Hugging Face tokenizer in a local folder, else []."""
    folder = tokenizer.tokenizer_model
    if tokenizer.tokenizer_type != "HuggingFaceTokenizer" or folder is None:
        return []
    from megatron_ext.text.convert.config import tokenizer_files

    return tokenizer_files(Path(folder)) if Path(folder).is_dir() else []
