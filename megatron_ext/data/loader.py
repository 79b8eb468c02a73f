"""Data loaders of the training, validation and test splits on the ranks that read data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.data.batch import MappingLoader, StepLoader
from megatron_ext.data.samplers import Announced, RandomSampler, SequentialSampler
from megatron_ext.data.workers import worker_context
from megatron_ext.disk.bus import cut_file, mapped_sizes, worker_setup
from megatron_ext.errors import DataError, MachineFault, MegatronExtError
from megatron_ext.parallel.context import ParallelContext, mtp_rank

if TYPE_CHECKING:
    from megatron_ext.data.step_plan import StepPlan


def stage_reads_data(
    model: ModelConfig, parallel: ParallelConfig, context: ParallelContext
) -> bool:
    """Return whether this pipeline stage needs token ids, labels, or masks made from token ids."""
    if context.is_first_stage or context.is_last_stage or model.document_masks:
        return True
    return context.pp_rank == mtp_rank(model, parallel)


def reads_dataset(model: ModelConfig, parallel: ParallelConfig, context: ParallelContext) -> bool:
    """Return whether this rank opens the dataset and broadcasts samples to its TP peers."""
    return stage_reads_data(model, parallel, context) and context.tp_rank == 0


class StepDataset(Dataset[Any]):
    """The base class of datasets that tell the loader how to draw their samples.

    The defaults are those of any other torch dataset: a sampler gives indices, and torch collates
    the samples. All ranks that have the dataset must get the same answers from it.

    Attributes:
        plan: which samples form the micro-batches of each step; batches must then have the key
            ``sample_ids`` (see `Batch`). None lets a sampler decide.
        packs_documents: whether one sample may hold several documents; ``sample_ids`` number them.
    """

    plan: StepPlan | None = None
    packs_documents: bool = False

    @property
    def seq_length_of(self) -> Callable[[int], int] | None:
        """Return a function from a sample's number in the run to the sample's length in tokens.

        None means that all samples have the same length.
        """
        return None

    @property
    def expect(self) -> Callable[[Sequence[int]], None] | None:
        """Return a function that takes the indices of coming samples and starts to fetch them.

        None means that samples need not be fetched in advance.
        """
        return None

    @property
    def collate(self) -> Callable[[Any], dict[str, Tensor]] | None:
        """Return the function that makes a batch from the result of ``__getitems__``.

        None lets torch collate the samples.
        """
        return None


_PLAIN = StepDataset()


def as_step_dataset(dataset: Any) -> StepDataset:
    """Return the `StepDataset` that tells how to draw the samples of ``dataset``.

    Return ``dataset`` itself if it is one, otherwise a `StepDataset` with the defaults.
    """
    return dataset if isinstance(dataset, StepDataset) else _PLAIN


class Loader(Protocol):
    """A reader of the micro-batches of one split on this rank, one step at a time."""

    def next_step(self, num_microbatches: int, seq_length: int | None = None) -> list[Any]:
        """Return the micro-batches of the next step.

        ``seq_length`` is the number of tokens of each sample; None means ``--seq-length``.

        Raises:
            StopIteration: the data has ended.
        """
        ...


class BatchSource:
    """The micro-batches of one split on this rank, grouped by step.

    Args:
        loader: reads the micro-batches; None on stages that read no data.
        num_samples: length of the split; None on ranks that do not open it.
        plan: which samples form the micro-batches of each step; None if the dataset has no plan.
        first_step: index in the plan of the next step.
        whole_epochs: whether the steps repeat the whole split in order without end. The last step
            of each pass is padded with samples whose loss mask is 0.
        seq_length_of: function from a sample's number in the run to its length in tokens; None if
            all samples have ``--seq-length``.
    """

    def __init__(
        self,
        loader: Loader | None,
        num_samples: int | None,
        plan: StepPlan | None = None,
        first_step: int = 0,
        *,
        whole_epochs: bool = False,
        seq_length_of: Callable[[int], int] | None = None,
    ) -> None:
        self.loader = loader
        self.plan = plan
        self.seq_length_of = seq_length_of
        self.num_samples = num_samples
        self.whole_epochs = whole_epochs
        self._coming = first_step

    def num_microbatches(self, usual: int) -> int:
        """Return the plan's number of micro-batches for the next step; ``usual`` without a plan."""
        return usual if self.plan is None else self.plan.num_microbatches(self._coming)

    def next_step(self, num_microbatches: int, seq_length: int | None = None) -> list[Any] | None:
        """Return the micro-batches of the next step; None on stages that read no data.

        ``seq_length`` is the number of tokens of this step's samples; None means ``--seq-length``.

        Raises:
            DataError: the data has ended, one of its files was truncated, or the dataset raised a
                DataError.
        """
        self._coming += 1
        if self.loader is None:
            return None
        try:
            batches = self.loader.next_step(num_microbatches, seq_length)
        except StopIteration:
            raise DataError(
                f"The data ended in the middle of a step (the split holds {self.num_samples} "
                "samples); give more data or fewer iterations."
            ) from None
        except (DataError, MachineFault) as error:
            raise without_traceback(error) from None
        except Exception:
            # The random content of a truncated file can raise errors of many classes.
            if (cut := cut_file()) is not None:
                raise cut from None
            raise
        if mapped_sizes and (cut := cut_file(self._coming)) is not None:
            raise cut
        return batches


def without_traceback(error: MegatronExtError) -> MegatronExtError:
    """Return a worker process's error without the worker's traceback, which torch prepends."""
    return type(error)(str(error).rpartition(f"{type(error).__name__}: ")[2].strip())


def build_source(
    dataset: Dataset[Any] | None,
    config: RunConfig,
    context: ParallelContext,
    device: torch.device,
    consumed_samples: int,
    full_epoch: bool = False,
    *,
    mask_documents_at: int | None = None,
    cyclic: bool = False,
    data_sharding: bool = True,
    as_mappings: bool = False,
) -> BatchSource:
    """Return the micro-batches of one split, grouped by step, after ``consumed_samples`` samples.

    Args:
        dataset: the split; may be None on ranks that do not read it, unless it is a `StepDataset`
            with a plan, a ``seq_length_of`` or packed documents.
        consumed_samples: samples used so far by all data-parallel ranks together.
        mask_documents_at: the end-of-document id that attention may not cross; None lets attention
            cross documents.
        cyclic: shuffle anew in each epoch; otherwise take the samples in order.
        data_sharding: with ``cyclic``, let each replica shuffle its own shard; otherwise all
            replicas share one permutation of the split.
        full_epoch: repeat the whole split in order without end (full validation).
        as_mappings: return micro-batches as dicts with the dataset's own keys (`MappingLoader`).
    """
    traits = as_step_dataset(dataset)
    plan = traits.plan
    first_step = 0 if plan is None else _steps_done(config.training, consumed_samples)
    packs = plan is not None and plan.packs_documents
    source = partial(BatchSource, plan=plan, first_step=first_step, whole_epochs=full_epoch)
    source = partial(source, seq_length_of=traits.seq_length_of)
    if not packs and not stage_reads_data(config.model, config.parallel, context):
        return source(None, None)
    if not full_epoch:
        # Megatron-LM's loaders draw a number from torch's global generator when they start, which
        # changes its dropout on a CPU. Ours have their own generator: only one of the
        # tensor-parallel ranks has a loader, but all of them must drop the same values.
        torch.empty((), dtype=torch.int64).random_()
    samples: Iterator[dict[str, Tensor]] | None = None
    length = None
    if dataset is not None and context.tp_rank == 0:
        length = len(dataset)  # type: ignore[arg-type]
        if plan is not None:
            from megatron_ext.data.step_plan import StepSampler

            sampler = StepSampler(plan, context.dp_rank, first_step)
            samples = iter(_loader(dataset, sampler, config.training, device))
        else:
            samples = _samples(
                dataset, config.training, context, device, consumed_samples,
                full_epoch=full_epoch, sharded=data_sharding if cyclic else None,
            )  # fmt: skip
    if as_mappings:
        return source(MappingLoader(samples, context, device), length)
    micro_batch_size, _ = config.training.batch_sizes
    assert config.model.seq_length is not None
    loader = StepLoader(
        samples,
        context,
        (micro_batch_size, config.model.seq_length),
        device,
        mask_documents_at=mask_documents_at,
        documents_by_position=packs,
        mtp_depths=config.model.mtp_num_layers or 0,
        reduction=config.loss.loss_reduction,
        ignore_index=config.loss.ignore_index,
        with_sample_ids=plan is not None or traits.packs_documents,
    )
    return source(loader, length)


def _steps_done(training: TrainingConfig, consumed_samples: int) -> int:
    """Return the number of global batches in ``consumed_samples``.

    Raises:
        DataError: the samples are not a whole number of global batches.
    """
    _, batch = training.batch_sizes
    if consumed_samples % batch:
        raise DataError(
            f"The run has consumed {consumed_samples} samples, which is no whole number of steps "
            f"of `--global-batch-size` ({batch}), so it cannot go on in the middle of an epoch; "
            "give the batch size of the checkpoint."
        )
    return consumed_samples // batch


class FilledUp(Dataset[dict[str, Any]]):
    """A dataset padded to whole global batches by its first sample with a loss mask of 0."""

    def __init__(self, dataset: Dataset[Any], global_batch_size: int) -> None:
        self._dataset = dataset
        self._length: int = len(dataset)  # type: ignore[arg-type]
        self._filled = -(-self._length // global_batch_size) * global_batch_size

    def __len__(self) -> int:
        return self._filled

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = self._dataset[index if index < self._length else 0]
        if index < self._length:
            return sample
        if "loss_mask" not in sample:
            raise DataError(
                "`--full-validation` fills up the last batch with samples whose `loss_mask` is 0, "
                "but the samples of this dataset have none; give them one of ones, or use "
                "`--eval-iters` alone."
            )
        return {**sample, "loss_mask": sample["loss_mask"] * 0}


def _samples(
    dataset: Dataset[Any],
    training: TrainingConfig,
    context: ParallelContext,
    device: torch.device,
    consumed_samples: int,
    *,
    full_epoch: bool,
    sharded: bool | None,
) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's collated micro-batches from a dataset that has no `StepPlan`.

    Args:
        full_epoch: repeat the dataset in order without end, whatever ``sharded`` is.
        sharded: True shuffles each replica's own shard in each epoch, False shuffles the dataset
            with one permutation for all replicas, and None takes the samples in order.
    """
    micro_batch_size, global_batch_size = training.batch_sizes
    if full_epoch:
        # The split is padded to whole global batches, so that every pass starts at its beginning.
        dataset = FilledUp(dataset, global_batch_size)
    length: int = len(dataset)  # type: ignore[arg-type]
    replicas = context.dp_rank, context.layout.data_parallel_size
    share = (length, consumed_samples, micro_batch_size, *replicas)
    sampler: SequentialSampler | RandomSampler
    if sharded is not None and not full_epoch:
        sampler = RandomSampler(*share, data_sharding=sharded)
    else:
        sampler = SequentialSampler(*share)
    loader = _loader(dataset, sampler, training, device)
    return itertools.chain.from_iterable(itertools.repeat(loader)) if full_epoch else iter(loader)


def _loader(
    dataset: Dataset[Any], sampler: Sampler[Any], training: TrainingConfig, device: torch.device
) -> DataLoader[Any]:
    traits = as_step_dataset(dataset)
    expect = traits.expect
    if expect is not None and not training.num_workers:
        # Worker processes prefetch by themselves.
        sampler = Announced(sampler, expect)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=training.num_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=training.num_workers > 0,
        generator=torch.Generator(),
        worker_init_fn=worker_setup(),
        multiprocessing_context=worker_context(training.num_workers),
        collate_fn=traits.collate,
    )
