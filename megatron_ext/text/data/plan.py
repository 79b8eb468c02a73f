"""Plans which tokens a run with ``--data-order direct`` reads, also when it is resumed.

A source is a dataset; a mixture gives each source a weight. A checkpoint stores in
`Progress.data_order` the mixtures with which its run has read so far. So a run that resumes with
other weights, or another schedule, continues in each source where the earlier run stopped.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from rich.table import Table

from megatron_ext.checkpoint.stored import PROGRESS, find, read_progress
from megatron_ext.config.batch_size import BatchSize, number_of_iterations
from megatron_ext.config.run import RunConfig
from megatron_ext.data.mixture import Exhausted, Planned, continued, limited, stages_of
from megatron_ext.data.order import SampleOrder, Stage, check_recorded
from megatron_ext.data.packed_order import Cuts, PackedOrder
from megatron_ext.data.packing import IndexedDocuments
from megatron_ext.data.token_spans import TokenSpan
from megatron_ext.errors import DataError
from megatron_ext.text.data.blend import SPLITS, Blend, BlendSpec
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.gpt import split_bounds
from megatron_ext.text.data.prefixes import training_blend
from megatron_ext.text.data.schedule import Schedule, read_schedule
from megatron_ext.text.data.storage import index_of, open_tokens
from megatron_ext.train.batch_size import split_sizes


@dataclass(frozen=True)
class RunPlan:
    """The training samples of a run with ``--data-order direct``.

    Attributes:
        order: the order of all samples, including those before the run was resumed.
        spans: the tokens of each source from which the run still reads, by the source's index in
            ``order``.
        total: number of samples; less than ``requested`` if a limit of epochs ends the run.
        requested: number of samples according to the flags.
        exhausted: the sources that reach their limits of epochs, the earliest first.
    """

    order: SampleOrder
    spans: Mapping[int, TokenSpan]
    total: int
    requested: int
    exhausted: Sequence[Exhausted]

    def to_dict(self) -> dict[str, Any]:
        """Return the order as JSON values: the ``history`` of `plan_run` in a resumed run."""
        return self.order.to_dict()


def schedule_of(config: RunConfig) -> Schedule:
    """Return the stages of ``--data-schedule``; without it, one stage with the given data."""
    data = config.section(DataConfig)
    length = config.model.seq_length
    assert length is not None
    if data.data_schedule is not None:
        return read_schedule(data.data_schedule, length)
    blend = blend_of(training_blend(data), 0)
    if blend is None:
        raise DataError("No training data is given; use `--train-data-path` PREFIX.")
    return Schedule((Planned(weights_of(blend, config, 0), length),))


def blend_of(spec: BlendSpec, split: int) -> Blend | None:
    """Return prefixes and weights of ``split``, an index in `SPLITS`; None if it has no data."""
    return spec.blend if spec.per_split is None else spec.per_split[split]


def weights_of(blend: Blend, config: RunConfig, split: int) -> dict[str, Fraction]:
    """Return the weight of each prefix in a blend.

    If the blend has no weights, the weight is the number of the dataset's tokens in ``split``, an
    index in `SPLITS`. The weights of a prefix that occurs several times are added.
    """
    totals: dict[str, Fraction] = {}
    prefixes, weights = blend
    for number, prefix in enumerate(prefixes):
        if weights is None:
            weight = Fraction(split_span(config, prefix, split).tokens)
        else:
            weight = Fraction(repr(weights[number]))
        totals[prefix] = totals.get(prefix, Fraction(0)) + weight
    return totals


def split_span(config: RunConfig, prefix: str, split: int) -> TokenSpan:
    """Open the tokens of a dataset that belong to ``split``, an index in `SPLITS`.

    If the dataset is given for this split alone, these are all tokens; otherwise they are the share
    that ``--split`` gives to the split.
    """
    data = config.section(DataConfig)
    first = 0
    end: int | None = None
    own = (data.train_data_path, data.valid_data_path, data.test_data_path)[split]
    if data.split is not None and not own:
        first, end = split_bounds(data.split, len(index_of(data, prefix).lengths))[split]
    return open_tokens(data, prefix, first, end)


def checked_span(span: TokenSpan, split: int, window: int) -> TokenSpan:
    """Return ``span`` unchanged; raise a DataError if it has fewer than ``window`` tokens.

    ``window`` is the length of the windows into which sources are cut for samples; ``split``, an
    index in `SPLITS`, is for the error.
    """
    if span.tokens < window:
        raise DataError(
            f"The {SPLITS[split]} split of {span.name} holds {span.tokens} tokens, but a sample of "
            f"the direct order takes {window} (`--seq-length`); give it a larger share, or leave "
            "the dataset out."
        )
    return span


def history_of(config: RunConfig) -> tuple[dict[str, Any] | None, int, int]:
    """Return (data order, consumed samples, steps) of the checkpoint from which a run resumes.

    The data order is the result of `RunPlan.to_dict`, or None if the checkpoint has none. Return
    (None, 0, 0) for a new run, and for a run that loads only weights.
    """
    checkpoint = find(config.checkpoint)
    if checkpoint is None or checkpoint.weights_only:
        return None, 0, 0
    progress = read_progress(checkpoint.path)
    order = progress.get("data_order")
    if order is not None:
        check_recorded(order, str(checkpoint.path / PROGRESS))
    return order, progress.get("consumed_train_samples", 0), checkpoint.iteration


def plan_run(
    config: RunConfig,
    history: Mapping[str, Any] | None,
    consumed: int,
    iteration: int | None = None,
) -> RunPlan:
    """Plan the training samples of a run: in which order, and from which sources they are read.

    Args:
        history: `RunPlan.to_dict` of the run that is resumed; None for a new run.
        consumed: number of samples that the run has read so far.
        iteration: number of steps so far; if None, all of them are assumed to have had the present
            batch size.

    Raises:
        DataError: a source is missing or too short, or has changed since the run began, as has
            ``--document-packing``; or a sample length neither divides nor is a multiple of the
            length with which the run began.
    """
    schedule = schedule_of(config)
    length = config.model.seq_length
    assert length is not None
    planned = schedule.stages
    replicas = config.parallel.data_parallel_size
    # The batch size rounded so that the ranks can share it. It is constant, since a schedule does
    # not go with a ramp of the batch size.
    batch = BatchSize(config.training, length, replicas).global_batch_size
    past = history if consumed else None
    # Windows keep the length with which the run began, so that each token of an epoch is read once.
    window = length if past is None else int(past["window"])
    packing = config.section(DataConfig).document_packing
    _check_lengths(planned, window, packing)
    _check_packing(past, packing)
    spans = {
        name: checked_span(split_span(config, name, 0), 0, window)
        for name in dict.fromkeys(name for stage in planned for name in stage.weights)
        if any(stage.weights.get(name) for stage in planned)
    }
    past = None if past is None else _with_new_names(past, spans)
    before: dict[str, int] = {} if past is None else dict(past["tokens"])
    stages_before = [] if past is None else [Stage.from_dict(x) for x in past["stages"]]
    for name, span in spans.items():
        if before.setdefault(name, span.tokens) != span.tokens:
            raise DataError(
                f"The train split of {name} holds {span.tokens} tokens, but held {before[name]} "
                "when the run began, so that its order cannot go on; give the same files and "
                "`--split`, or name the new ones otherwise."
            )
    seed = config.training.seed if past is None else int(past["seed"])
    if stages_before:
        # The new stages must not bring back a source that a limit has already removed.
        plan = stages_of(planned, consumed, batch)
        order = SampleOrder(before, stages_before, window, seed)
        exhausted_before = _exhausted(order, plan, schedule.limits, consumed)
        planned = tuple(_without(stage, exhausted_before) for stage in planned)
    stages = continued(stages_before, stages_of(planned, consumed, batch), consumed)
    order = SampleOrder(before, stages, window, seed)
    if packing == "best_fit":
        documents = {
            name: IndexedDocuments(partial(index_of, config.section(DataConfig), name), span.first)
            for name, span in spans.items()
        }
        order = PackedOrder(before, stages, window, seed, documents)
    steps = number_of_iterations(config.training, length, replicas)
    total = split_sizes(config.training, length, replicas)[0] or 0
    if iteration is not None and config.training.train_samples is None:
        # If earlier steps had larger batches, the run takes more samples than steps × batch size.
        total = max(total, consumed + (steps - iteration) * config.training.batch_sizes[1])
    order, end, exhausted = limited(order, schedule.limits, total, stops=schedule.stops)
    indices = {source.name: index for index, source in enumerate(order.sources)}
    own = {indices[name]: span for name, span in spans.items()}
    return RunPlan(order, own, end, total, exhausted)


def _with_new_names(past: Mapping[str, Any], spans: Mapping[str, TokenSpan]) -> Mapping[str, Any]:
    """Return the stored order of a run, with the new names of sources that have been moved.

    ``past`` is from `RunPlan.to_dict`; ``spans`` has the tokens of the present sources, by name. A
    source has been moved if it is no longer given, and exactly one new source has the same file
    name and length.
    """
    new: dict[tuple[str, int], list[str]] = {}
    for name, span in spans.items():
        if name not in past["tokens"]:
            new.setdefault((name.rpartition("/")[2], span.tokens), []).append(name)
    moved: dict[str, str] = {}
    taken = set[str]()
    for name, tokens in past["tokens"].items():
        same = new.get((name.rpartition("/")[2], tokens), [])
        if name not in spans and len(same) == 1 and same[0] not in taken:
            moved[name] = same[0]
            taken.add(same[0])
    stages = [
        {**stage, "weights": {moved.get(n, n): w for n, w in stage["weights"].items()}}
        for stage in past["stages"]
    ]
    return {
        **past,
        "tokens": {moved.get(name, name): tokens for name, tokens in past["tokens"].items()},
        "stages": stages,
    }


def _exhausted(
    order: SampleOrder, plan: Sequence[Stage], limits: Mapping[str, Fraction], consumed: int
) -> set[str]:
    """Return the sources that had reached their limit of epochs before sample ``consumed``.

    These are the sources that ``order`` has dropped in a stage in which ``plan`` still names them,
    and of which one more sample would have exceeded the limit.

    Args:
        order: the order in which the run has read so far.
        plan: the stages of the present schedule.
        limits: the largest number of epochs by source.
    """
    used = order.tokens_used(consumed)
    exhausted = set[str]()
    tokens = {source.name: source.tokens for source in order.sources}
    past = [stage for stage in order.stages if stage.start < consumed]
    for name in limits.keys() & used.keys():
        named = [index for index, stage in enumerate(past) if stage.weights.get(name)]
        if not named or named[-1] + 1 == len(past):
            continue
        left = past[named[-1] + 1]
        planned = [stage for stage in plan if stage.start <= left.start][-1]
        is_full = used[name] + left.seq_length > limits[name] * tokens[name]
        if is_full and planned.weights.get(name):
            exhausted.add(name)
    return exhausted


def _without(stage: Planned, sources: set[str]) -> Planned:
    """Return a stage without the given sources; return it unchanged if it has no others."""
    weights = {name: weight for name, weight in stage.weights.items() if name not in sources}
    return dataclasses.replace(stage, weights=weights or stage.weights)


def _check_packing(past: Mapping[str, Any] | None, packing: str) -> None:
    before = packing if past is None else past.get("packing", "concatenate")
    if before != packing:
        raise DataError.about(
            "--document-packing",
            packing,
            f"must stay {before}, as it was when the run began, so that each token of an "
            "epoch is read once",
            "give that, or start a new run from the weights alone",
        )


def _check_lengths(stages: Sequence[Planned], window: int, packing: str) -> None:
    for length in sorted({stage.seq_length for stage in stages}):
        if packing == "best_fit" and length != window:
            raise DataError(
                f"Samples of {length} tokens do not go with `--document-packing` (best_fit), which "
                f"packs the documents of this run into samples of {window} tokens; give all stages "
                "that length, or use concatenate."
            )
        if length % window and window % length:
            raise DataError(
                f"Samples of {length} tokens do not fit the windows of {window} tokens with which "
                f"the run began; use a length that divides {window}, or a multiple of it."
            )


def use_table(plan: RunPlan) -> Table:
    """Return a table of the samples, tokens and epochs that a run reads from each source."""
    table = Table(
        "source", "tokens of the split", "samples", "tokens read", "of all", "epochs",
        title=f"data of {plan.total:,} samples",
    )  # fmt: skip
    used = plan.order.tokens_used(plan.total)
    counts = [0] * len(plan.order.sources)
    for stage in plan.order.counts(plan.total):
        counts = [a + b for a, b in zip(counts, stage, strict=True)]
    everything = sum(used.values()) or 1
    for source, count in zip(plan.order.sources, counts, strict=True):
        tokens = used[source.name]
        table.add_row(
            source.name,
            f"{source.tokens:,}",
            f"{count:,}",
            f"{tokens:,}",
            f"{tokens / everything:.2%}",
            f"{tokens / source.tokens:.3f}",
        )
    starts = [f"{s.start:,} ({s.seq_length} tokens)" for s in plan.order.stages]
    shown = starts if len(starts) <= 8 else [*starts[:4], "…", *starts[-3:]]
    table.caption = f"mixtures start at samples {', '.join(shown)}"
    return table


SAMPLED_BLOCKS = 16
"""About how many blocks of samples `cuts_by_source` examines before training.

The documents of a block, some hundreds of samples, are packed together (`data.packed_order`)."""


def cuts_by_source(order: PackedOrder, spans: Mapping[int, TokenSpan]) -> dict[int, Cuts]:
    """Estimate for each source how many documents packing spreads over several samples.

    Return the counts by the index of the source. About `SAMPLED_BLOCKS` blocks of samples are
    examined, spread evenly over the sources. If there are more sources than `SAMPLED_BLOCKS`, some
    of them are skipped and have no counts.
    """
    chosen = list(spans)[:: -(-len(spans) // SAMPLED_BLOCKS)]
    most = max(1, SAMPLED_BLOCKS // len(chosen))
    return {source: order.cuts(source, most) for source in chosen}


def packing_sentence(order: PackedOrder, cuts: Mapping[int, Cuts]) -> str:
    """Return a sentence with the shares of documents that packing and concatenation cut.

    ``cuts`` is the result of `cuts_by_source`.
    """
    total = sum(cuts.values(), Cuts(0, 0, 0, 0))
    documents = max(1, total.documents)
    shares = (total.packed, total.concatenated, total.longer)
    packed, concatenated, longer = (f"{share / documents:.1%}" for share in shares)
    return (
        f"> best-fit packing cuts {packed} of the documents, concatenation would cut "
        f"{concatenated}; {longer} are longer than a sample. No sample has padding. (Counted on "
        f"{total.documents:,} documents in blocks of {order.block_samples} samples.)"
    )


def packing_table(plan: RunPlan, cuts: Mapping[int, Cuts]) -> Table:
    """Return a table of the shares of each source's documents that packing and concatenation cut.

    ``cuts`` is the result of `cuts_by_source`.
    """
    table = Table(
        "source", "documents counted", "longer than a sample", "cut by best-fit packing",
        "cut by concatenation", title="packing of documents",
    )  # fmt: skip
    for source, each in cuts.items():
        shares = (each.longer, each.packed, each.concatenated)
        shown = (f"{share / max(1, each.documents):.2%}" for share in shares)
        table.add_row(plan.order.sources[source].name, f"{each.documents:,}", *shown)
    return table
