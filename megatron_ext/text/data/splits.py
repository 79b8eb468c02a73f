"""Checks and builds the splits for ``--data-order direct``, and plans the rest of a resumed run.

Every rank builds all splits, since building reads only a few pages of the data files.
"""

import dataclasses
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from torch.utils.data import Dataset

from megatron_ext.config.batch_size import BatchSize, number_of_iterations
from megatron_ext.config.rules.parallel import share_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.data.mixture import shares
from megatron_ext.data.order import SampleOrder, Stage
from megatron_ext.data.packed_order import PackedOrder
from megatron_ext.errors import ConfigError, DataError, FlagError
from megatron_ext.text.data.blend import SPLITS
from megatron_ext.text.data.config import DataConfig, FimConfig
from megatron_ext.text.data.direct import DirectDataset, EveryWindow, Marks
from megatron_ext.text.data.fim import FillInTheMiddle
from megatron_ext.text.data.inspect import check_ids
from megatron_ext.text.data.plan import (
    RunPlan,
    blend_of,
    checked_span,
    cuts_by_source,
    history_of,
    packing_sentence,
    packing_table,
    plan_run,
    schedule_of,
    split_span,
    use_table,
    weights_of,
)
from megatron_ext.text.data.prefixes import read_blend
from megatron_ext.text.data.separators import (
    document_ends,
    ending_warnings,
    endings_of,
    padding_id,
)
from megatron_ext.text.data.storage import index_of
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer
from megatron_ext.train.batch_size import split_sizes
from megatron_ext.train.callbacks.evaluation import check_validation
from megatron_ext.train.run import Run
from megatron_ext.train.task import Datasets

CHECKED_IDS = 1 << 16
"""The number of each train dataset's first tokens whose ids are checked before training.

Other ids are checked when they are read."""


def prepare_direct(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Check the data of a run with ``--data-order direct``; return the run's configuration.

    If a limit of epochs ends the run early, the returned configuration has fewer steps.
    ``--dry-run`` prints how much is read from each source.
    """
    history, consumed, iteration = history_of(config)
    plan = plan_run(config, history, consumed, iteration)
    entries = config.model.padded_vocab_size or tokenizer.vocab_size
    first = int(os.environ.get("RANK", "0")) == 0
    for span in plan.spans.values():
        first_ids = span.read(np.zeros(1, dtype=np.int64), min(CHECKED_IDS, span.tokens))
        check_ids(span.name, first_ids, entries)
    for sentence in separator_warnings(config, tokenizer, plan) if first else ():
        print(f"> {sentence}", flush=True)
    valid, _ = build_held_out(config, tokenizer)
    check_validation(config, given=valid is not None)
    fim_of(config, tokenizer, 0)
    for each in plan.exhausted if first else ():
        print(f"> {each.name} reaches its limit of epochs at sample {each.number}", flush=True)
    _check_lengths(config, plan, consumed)
    config = _shortened(config, plan, consumed, iteration, tell=first)
    if first:
        _report(config, plan)
    return config


def separator_warnings(
    config: RunConfig, tokenizer: Tokenizer, plan: RunPlan | None = None
) -> list[str]:
    """Return warnings about end-of-document tokens that a run would misread.

    ``plan`` has the run's training samples; if it is None, plan the run first.
    """
    plan = plan_run(config, *history_of(config)) if plan is None else plan
    data = config.section(DataConfig)
    padding = marks_of(config, tokenizer).pad
    sentences = []
    for span in plan.spans.values():
        ids = span.read(np.zeros(1, dtype=np.int64), min(CHECKED_IDS, span.tokens)).reshape(-1)
        ends = document_ends(index_of(data, span.name), span.first, len(ids))
        endings = endings_of(ids, ends)
        sentences += ending_warnings(span.name, endings, tokenizer, padding, data.document_flags)
    return sentences


def _report(config: RunConfig, plan: RunPlan) -> None:
    """Print the share of documents that packing cuts, if samples are packed.

    With ``--dry-run``, also print tables of what is read from each source.
    """
    tables = [use_table(plan)]
    if isinstance(plan.order, PackedOrder):
        cuts = cuts_by_source(plan.order, plan.spans)
        print(packing_sentence(plan.order, cuts), flush=True)
        tables.append(packing_table(plan, cuts))
    if config.planning.dry_run:
        from megatron_ext.planning.sheet import console

        for table in tables:
            console().print(table)


def _check_lengths(config: RunConfig, plan: RunPlan, consumed: int) -> None:
    """Raise a ConfigError for a sample length in ``--data-schedule`` that the run cannot use.

    Parallel ranks must be able to divide a sequence of this length. If a length differs from
    ``--seq-length``, no flag may be given that fixes the length for the whole run, such as
    ``--tp-comm-overlap``. Stages that end before sample ``consumed`` are not checked.
    """
    path = config.section(DataConfig).data_schedule
    stages = plan.order.stages[plan.order.stage_at(consumed) :]
    lengths = {stage.seq_length for stage in stages if stage.start < plan.total}
    if path is None or lengths == {config.model.seq_length}:
        return
    errors = [
        f"`--data-schedule` ({path}): {error}"
        for length in sorted(lengths)
        for error in share_errors(
            config.parallel, dataclasses.replace(config.model, seq_length=length)
        )
    ]
    fixed = {
        "--cuda-graph-impl": config.cuda_graphs.cuda_graph_impl != "none",
        "--tp-comm-overlap": config.engine.tp_comm_overlap,
    }
    errors += [
        FlagError(
            "--data-schedule",
            path,
            f"changes the length of samples, which `{flag}` fixes when the run starts",
            "give all stages one `seq_length`, or leave the flag out",
        )
        for flag, given in fixed.items()
        if given
    ]
    if errors:
        raise ConfigError(errors)


def _shortened(
    config: RunConfig, plan: RunPlan, consumed: int, iteration: int, *, tell: bool
) -> RunConfig:
    """Return the configuration, with fewer steps if a limit of epochs leaves too few samples.

    The reduced number counts whole steps only. ``consumed`` and ``iteration`` are the samples and
    steps so far. With ``tell``, print a sentence if the number of steps is reduced.
    """
    if plan.total >= plan.requested:
        return config
    batches = config.training, config.model.seq_length, config.parallel.data_parallel_size
    steps = number_of_iterations(*batches)
    batch = BatchSize(*batches).global_batch_size
    kept = iteration + max(0, plan.total - consumed) // batch
    if not kept:
        raise DataError.about(
            "--data-schedule",
            config.section(DataConfig).data_schedule,
            f"ends the run at sample {plan.total}, before its first step is full",
            "raise `max_epochs`, or give more data",
        )
    if tell:
        print(f"> the run ends after {kept} of {steps} steps, where its data ends", flush=True)
    if config.training.train_samples is not None:
        training = dataclasses.replace(config.training, train_samples=plan.total)
    else:
        training = dataclasses.replace(config.training, train_iters=kept)
    return dataclasses.replace(config, training=training)


def marks_of(config: RunConfig, tokenizer: Tokenizer) -> Marks:
    """Return the ids and flags that determine loss masks and positions.

    By default the padding id is an ordinary token wherever it occurs in a text, since padding is
    known by its position. With ``--allow-ambiguous-pad-tokens`` every such id is padding, as in
    megatron-core.
    """
    data = config.section(DataConfig)
    ambiguous = data.allow_ambiguous_pad_tokens
    return Marks(
        eod=tokenizer.eod,
        pad=padding_id(tokenizer, allow_ambiguous=True) if ambiguous else NO_TOKEN,
        vocab_size=config.model.padded_vocab_size or tokenizer.vocab_size,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
    )


def fim_of(config: RunConfig, tokenizer: Tokenizer, split: int) -> FillInTheMiddle | None:
    """Return the object that applies fill-in-the-middle to a split; None without ``--fim-data``.

    ``split`` is an index in `SPLITS`.
    """
    fim = config.section(FimConfig)
    if not fim.fim_data:
        return None
    return FillInTheMiddle(fim, tokenizer, config.training.seed, SPLITS[split])


def build_held_out(
    config: RunConfig, tokenizer: Tokenizer
) -> tuple[Dataset[Any] | list[Dataset[Any]] | None, Dataset[Any] | None]:
    """Return the validation split and the test split; None for one that has no data or needs none.

    With ``--multiple-validation-sets`` the validation split is a list of datasets.
    """
    training = config.training
    length = config.model.seq_length
    assert length is not None
    data = config.section(DataConfig)
    marks = marks_of(config, tokenizer)
    _, *sizes = split_sizes(training, length, config.parallel.data_parallel_size)

    def build(split: int, prefixes: Mapping[str, Fraction], size: int | None) -> DirectDataset:
        spans = [checked_span(split_span(config, name, split), split, length) for name in prefixes]
        fim = fim_of(config, tokenizer, split)
        if size is None:
            windows = EveryWindow(spans, length)
            return DirectDataset(windows, dict(enumerate(spans)), marks, len(windows), fim)
        tokens = {f"{SPLITS[split]} {span.name}": span.tokens for span in spans}
        weights = dict(zip(tokens, prefixes.values(), strict=True))
        order = SampleOrder(tokens, [Stage(0, length, weights)], length, training.seed)
        return DirectDataset(order, dict(enumerate(spans)), marks, size, fim)

    built: list[Any] = []
    for split, size in enumerate(sizes, 1):
        weights = _held_out_weights(config, split)
        if size == 0 or not weights:
            built.append(None)
        elif split == 1 and data.multiple_validation_sets:
            built.append([build(split, {name: Fraction(1)}, size) for name in weights])
        else:
            built.append(build(split, weights, size))
    return built[0], built[1]


def _held_out_weights(config: RunConfig, split: int) -> dict[str, Fraction]:
    """Return the weights of the sources of ``split``, 1 for valid and 2 for test; {} without data.

    With ``--data-schedule`` a split without data of its own has the mixture of the first stage.
    """
    data = config.section(DataConfig)
    own = (None, data.valid_data_path, data.test_data_path)[split]
    if data.data_schedule is not None and not own:
        first = schedule_of(config).stages[0].weights
        weights = {name: weight for name, weight in first.items() if weight}
    else:
        blend = blend_of(read_blend(data), split)
        weights = {} if blend is None else weights_of(blend, config, split)
    if data.split is not None and not own and not parse_and_normalize_split(data.split)[split]:
        return {}
    return weights


def build_direct(config: RunConfig, tokenizer: Tokenizer) -> Datasets:
    """Build all splits of a run with ``--data-order direct``; call this on every rank.

    The train split of a resumed run is replaced later, by `continued_split`.
    """
    plan = plan_run(config, *history_of(config))
    fim = fim_of(config, tokenizer, 0)
    train = DirectDataset(plan.order, plan.spans, marks_of(config, tokenizer), plan.total, fim)
    train.is_training = True
    return Datasets(train, *build_held_out(config, tokenizer))


def continued_split(run: Run, dataset: Any) -> Any:
    """Return the train split of a run, with its samples planned anew from the present one on.

    If ``dataset`` is not a train split with ``--data-order direct``, return it unchanged. The order
    of the samples consumed so far is read from ``run.progress.data_order``, where the new order of
    all samples is then stored.
    """
    if not isinstance(dataset, DirectDataset) or not dataset.is_training:
        return dataset
    progress = run.progress
    consumed = progress.consumed_train_samples
    history = progress.data_order
    plan = plan_run(run.config, history, consumed, progress.iteration)
    stage = plan.order.stage_at(consumed)
    if consumed and run.context.rank == 0:
        if history is None:
            print("> the samples so far were in another order; the direct one takes its place "
                  f"from sample {consumed} on", flush=True)  # fmt: skip
        elif plan.order.stages[stage].start == consumed:
            mixed = shares(plan.order.stages[stage].weights)
            shown = ", ".join(f"{name} {float(share):.4g}" for name, share in mixed.items())
            print(f"> the mixture changes at sample {consumed}: {shown}", flush=True)
    progress.data_order = plan.to_dict()
    return DirectDataset(plan.order, plan.spans, dataset.marks, plan.total, dataset.fim)
