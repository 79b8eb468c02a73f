"""The interface for programs written for Megatron-LM: ``pretrain`` and the functions they call.

A ``pretrain_*.py`` of Megatron-LM runs if it imports from here instead of ``megatron.training``.
The program's dataset provider, model provider and forward step keep their signatures;
docs/porting.md explains how to port a program.

A data iterator yields micro-batches on the device, the same on all tensor-parallel ranks; it is
None on stages that read no data. `get_batch_on_this_cp_rank` divides a micro-batch among
context-parallel ranks.
"""

import argparse
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import core
from megatron_ext.checkpoint.state import flat_arguments
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import Provider, all_flags, section_of
from megatron_ext.data.batch import Sample
from megatron_ext.data.loader import BatchSource, build_source
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.losses.contract import LossFunction, StepCounts, non_loss_data_of, pair
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.rules import text_rules
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.data.blend import Blend
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.prefixes import read_blend
from megatron_ext.text.inputs import tokenizer_inputs
from megatron_ext.text.run import with_tokenizer
from megatron_ext.text.task import GPT
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.launch import refuse
from megatron_ext.train.main import main
from megatron_ext.train.run import Run
from megatron_ext.train.task import Datasets, ProcessNonLossData, Task

DatasetsProvider = Callable[[Sequence["int | None"]], Sequence[Any]]
T = TypeVar("T")
MegatronForwardStep = Callable[["Iterator[Sample] | None", torch.nn.Module], tuple[Tensor, Any]]


def pretrain(
    train_valid_test_dataset_provider: DatasetsProvider,
    model_provider: Callable[..., Any],
    model_type: ModelType,
    forward_step_func: MegatronForwardStep,
    process_non_loss_data_func: ProcessNonLossData | None = None,
    extra_args_provider: Provider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    non_loss_data_func: Callable[[Sequence[torch.nn.Module]], Any] | None = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
) -> None:
    """Train with the command line's flags and the given providers, like Megatron-LM's ``pretrain``.

    Some arguments have no effect: ``model_type``; ``get_embedding_ranks`` and
    ``get_position_embedding_ranks``, since the flags decide these ranks; ``store`` and
    ``inprocess_call_wrapper``, since ``--max-restarts`` replaces restarts within a process. Raise
    SystemExit if the run fails.
    """
    try:
        task = megatron_task(
            train_valid_test_dataset_provider,
            model_provider,
            forward_step_func,
            process_non_loss_data_func=process_non_loss_data_func,
            extra_args_provider=extra_args_provider,
            non_loss_data_func=non_loss_data_func,
        )
        names = {flag.field for flag in all_flags(task)}
        unknown = [
            f"`args_defaults` has `{name}`, which is not the name of a flag; leave it out."
            for name in args_defaults or {}
            if name not in names
        ]
        if unknown:
            raise ConfigError(unknown)
    except ConfigError as error:
        sys.exit(refuse(error))
    if code := main(task, sys.argv[1:], defaults=args_defaults or {}):
        sys.exit(code)


def megatron_task(
    datasets_provider: DatasetsProvider,
    model_provider: Callable[..., Any],
    forward_step: MegatronForwardStep,
    *,
    process_non_loss_data_func: ProcessNonLossData | None = None,
    extra_args_provider: Provider | None = None,
    non_loss_data_func: Callable[[Sequence[torch.nn.Module]], Any] | None = None,
) -> Task:
    """Return a task made of functions with Megatron-LM's signatures.

    The functions build the datasets, build the model and run the forward step. Raise a ConfigError
    if ``extra_args_provider`` adds an argument that cannot become a flag.
    """

    def datasets(
        _config: RunConfig, _assets: Any, sizes: Sequence[int | None], _on: Any
    ) -> Datasets:
        # All ranks build them, as megatron-core's builder waits for all.
        return Datasets(*datasets_provider(list(sizes)))

    @functools.wraps(forward_step)
    def step(
        config: RunConfig, batch: Any, model: torch.nn.Module, counts: StepCounts | None
    ) -> tuple[Tensor, LossFunction]:
        if config.model.mtp_num_layers:
            _scale_mtp_losses(config, counts)
        output, loss = forward_step(iter([batch]) if isinstance(batch, Sample) else None, model)
        return output, _of_contract(loss, config.parallel.context_parallel_size)

    sections = () if extra_args_provider is None else (section_of(extra_args_provider),)
    return dataclasses.replace(
        GPT.with_sections(*sections),
        implements={**GPT.implements, step: "mtp-num-layers"},
        step_advice="train with `pretrain_gpt.py`, whose own step knows it",
        prepare_batches=None,
        datasets=datasets,
        inputs=tokenizer_inputs,
        model_chunk=functools.partial(_model_chunk, model_provider),
        forward_step=step,
        source=_source,
        preflight=_preflight,
        rules=text_rules,
        process_non_loss_data=process_non_loss_data_func,
        non_loss_data=non_loss_data_func,
    )


@dataclass
class _Current:
    """The state of a run that Megatron-LM keeps in globals; all values are None before the run."""

    tokenizer: Tokenizer | None = None
    args: argparse.Namespace | None = None
    transformer_config: TransformerConfig | None = None
    cp_group: ProcessGroup | None = None
    pp_group: ProcessGroup | None = None


_current = _Current()


MEGATRON_DEFAULTS: dict[str, Any] = {
    # A step with a non-finite gradient is skipped and counted, whatever the loss function checks.
    "check_for_nan_in_loss_and_grad": False,
    "check_for_spiky_loss": False,
    # The program then takes `get_tokenizer`, which is the tokenizer of the flags.
    "legacy_tokenizer": True,
    "use_legacy_models": False,
    "dataloader_fast_cache_load": False,
    "dataloader_defer_npy_index_mmap": False,
    "dataloader_inter_document_masking": False,
    "hybrid_context_parallel": False,
    "modelopt_enabled": False,
    "yaml_cfg": None,
    "spec": None,
    "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None,
    "qk_l2_norm": False,
    "fp16_lm_cross_entropy": False,
    "logit_dtype": None,
    "moe_use_legacy_grouped_gemm": False,
    "record_memory_history": False,
    "memory_snapshot_path": "snapshot.pickle",
    "logits_load_dir": None,
    "logits_load_decode_threads": 4,
    "logits_load_prefetch_factor": 3,
    "logits_load_msc_prefetch_depth": 2,
    "logits_load_kd_loss_alpha": 1.0,
    "logits_load_ignore_errors": False,
}
"""Attributes that `get_args` adds, with values: Megatron-LM's programs read them, but no flag sets
them."""


def _preflight(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Return the configuration with the padded vocabulary size filled in, and the tokenizer.

    Raise a ConfigError for flags that do nothing in a program with its own datasets and loss, and
    for a model with MTP that megatron-core's GPTModel cannot save.
    """
    given = {
        "--sft": config.section(SftConfig).sft,
        "--loss-reduction": config.loss.loss_reduction != "token",
    }
    errors = [
        FlagError(
            flag,
            None,
            "does nothing in a program whose datasets and loss are its own",
            "leave it out, or do so there",
        )
        for flag, is_given in given.items()
        if is_given
    ]
    model = config.model
    stages = config.parallel.pipeline_model_parallel_size
    if model.mtp_num_layers and stages > 1 and not model.untie_embeddings_and_output_weights:
        errors.append(
            FlagError(
                f"--mtp-num-layers {model.mtp_num_layers}",
                None,
                f"with {stages} pipeline stages and tied embeddings cannot be saved by "
                "megatron-core's GPTModel",
                "add `--untie-embeddings-and-output-weights`, or use one stage or "
                "`pretrain_gpt.py`",
            )
        )
    if errors:
        raise ConfigError(errors)
    config, _current.tokenizer = with_tokenizer(config)
    return config, _current.tokenizer


def _model_chunk(
    provider: Callable[..., Any],
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    **stage: Any,
) -> Any:
    more = {
        **MEGATRON_DEFAULTS,
        "rank": context.rank,
        "params_dtype": transformer_config.params_dtype,
        "create_attention_mask_in_dataloader": config.section(DataConfig).reset_attention_mask,
    }
    _current.args = flat_arguments(config.to_dict(), more)
    _current.transformer_config = transformer_config
    _current.cp_group = context.pgs.cp
    _current.pp_group = context.pgs.pp
    given = {**stage, "config": transformer_config, "pg_collection": context.pgs}
    parameters = inspect.signature(provider).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = {p.name for p in parameters}
        given = {name: value for name, value in given.items() if name in taken}
    return provider(**given)


def _scale_mtp_losses(config: RunConfig, counts: StepCounts | None) -> None:
    """Set the factor by which megatron-core's models scale the gradients of the MTP losses.

    With ``--calculate-per-token-loss``, and in evaluation, where ``counts`` is None, the factor is
    the loss scale, which is 1 except in fp16. Otherwise it is the loss scale times the
    context-parallel size over the number of micro-batches: a step averages over micro-batches, and
    megatron-core has divided each loss by the tokens of only one context-parallel rank.
    """
    core_config = _begun(_current.transformer_config, "forward_step")
    scale = torch.ones((), device=torch.cuda.current_device())
    if counts is not None and not config.training.calculate_per_token_loss:
        scale *= config.parallel.context_parallel_size / counts.num_microbatches
    start = core_config.grad_scale_func
    core.scale_mtp_losses(scale if start is None else start(scale))


def _source(run: Run, dataset: Any, _: Tokenizer, consumed: int, full_epoch: bool) -> BatchSource:
    parts = run.config, run.context, run.device
    return build_source(dataset, *parts, consumed, full_epoch, as_mappings=True)


def _of_contract(loss: Callable[..., Any], cp_size: int) -> LossFunction:
    """Wrap a loss function of Megatron-LM so that it returns ``(sum, count, report)``.

    A loss without a count is taken as the mean over a micro-batch, equal on all context-parallel
    ranks. As in Megatron-LM, it is multiplied by the number ``cp_size`` of these ranks; it counts
    as 1, so that a step averages the means of its micro-batches.
    """

    @functools.wraps(loss)
    def wrapper(output: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return non_loss_data_of(loss, output)
        result = loss(output)
        result = result if isinstance(result, tuple) else (result,)
        if len(result) > 3:
            return result
        one = torch.ones((), dtype=torch.int, device=output.device)
        report = result[-1] if len(result) > 1 else {"loss": result[0]}
        entries = {name: torch.as_tensor(value) for name, value in report.items()}
        entries = {x: pair(v.view([]), one) if v.numel() == 1 else v for x, v in entries.items()}
        if (depths := core.take_mtp_losses()) is not None and torch.is_grad_enabled():
            entries |= {f"mtp_{k} loss": pair(v, one) for k, v in enumerate(depths, start=1)}
        if len(result) == 3:
            return result[0], result[1], entries
        return result[0] * cp_size, one, entries

    return wrapper


def get_args() -> argparse.Namespace:
    """Return the run's flags as a namespace; raise a ConfigError if the run has not started yet."""
    return _begun(_current.args, "get_args")


def get_tokenizer() -> Tokenizer:
    return _begun(_current.tokenizer, "get_tokenizer")


def _begun(value: T | None, name: str) -> T:
    """Return ``value``; raise a ConfigError if it is None because the run has not started yet.

    ``name`` is the function that was called too early.
    """
    if value is None:
        raise ConfigError(
            f"`{name}` was called before the run has begun; call it in a provider or in the "
            "forward step."
        )
    return value


def core_transformer_config_from_args(_args: argparse.Namespace) -> Any:
    """Return the TransformerConfig of this run; the argument is not used."""
    return _current.transformer_config


def get_batch_on_this_tp_rank(
    data_iterator: Iterator[Sample] | None, mtp_on_this_rank: bool = False
) -> dict[str, Any]:
    """Return the next micro-batch as a mapping with Megatron-LM's keys, such as "tokens".

    A key that the micro-batch lacks has the value None. Without an iterator, all values are None.
    ``mtp_on_this_rank`` is not used.
    """
    batch = {} if data_iterator is None else next(data_iterator)
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    return dict.fromkeys(names) | dict(batch)


def get_batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Return this context-parallel rank's slices of a micro-batch's tensors ``[b, s, ...]``."""
    return core.slice_batch(batch, _begun(_current.cp_group, "get_batch_on_this_cp_rank"))


def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
    """Return whether this rank's chunk ``vp_stage`` is the first or the last chunk of the model."""
    group = _begun(_current.pp_group, "is_first_or_last_pipeline_stage")
    config = _begun(_current.transformer_config, "is_first_or_last_pipeline_stage")
    last_chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1
    chunk = vp_stage or 0
    return (group.rank() == 0 and chunk == 0) or (
        group.rank() == group.size() - 1 and chunk == last_chunk
    )


def get_blend_and_blend_per_split(
    args: argparse.Namespace,
) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return (one blend for all splits, a list with a blend for each split), as the flags give it.

    A blend is a weighted mixture of datasets. At least one of the two values is None. If the first
    is given, ``--split`` divides its datasets into splits. ``args`` is the result of `get_args`.
    """
    names = [field.name for field in dataclasses.fields(DataConfig)]
    spec = read_blend(DataConfig(**{name: getattr(args, name) for name in names}))
    return spec.blend, spec.per_split


def build_tokenizer(_args: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer of the run; the argument is not used."""
    return get_tokenizer()


def core_transformer_config_from_yaml(*_: Any, **__: Any) -> Any:
    raise ConfigError("Megatron-LM's YAML is not read here; use `--config`, with names of flags.")


class _NotHere:
    """The base class of stand-ins for unsupported dataset classes of Megatron-LM.

    Creating an instance raises a ConfigError that gives the class's ``ADVICE``.
    """

    ADVICE = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(f"`{type(self).__name__}` is not here; {self.ADVICE}.")


class SFTDataset(_NotHere):
    ADVICE = "use `pretrain_gpt.py --sft`"


class GPTFIMDataset(_NotHere):
    ADVICE = "use `pretrain_gpt.py --fim-data`"


class GPTFIMDatasetConfig(_NotHere):
    ADVICE = "use `pretrain_gpt.py --fim-data`"


def set_startup_timestamps(*_: Any, **__: Any) -> None:
    """Do nothing; metrics.jsonl has the times of a run's start instead."""


class inprocess_restart:  # noqa: N801 - the name of Megatron-LM's module
    """A stand-in for Megatron-LM's module of this name: it does not restart anything."""

    @staticmethod
    def maybe_wrap_for_inprocess_restart(function: T) -> tuple[T, None]:
        """Return ``function`` unchanged, and None where Megatron-LM returns a store.

        ``--max-restarts`` restarts a failed run instead.
        """
        return function, None


def print_rank_0(message: object) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(message, flush=True)


class _NoTimer:
    """A stand-in for a timer of Megatron-LM that does nothing; use ``--profile`` to time a step."""

    def __call__(self, *_: Any, **__: Any) -> "_NoTimer":
        return self

    start = stop = __call__


def get_timers() -> _NoTimer:
    return _NoTimer()
