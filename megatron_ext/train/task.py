"""A task: what to train, as a frozen dataclass of callables.

A program imports its task to know its flags, and answers a mistake in them or ``--help`` at once.
So this module imports neither torch nor megatron-core, and a task names the functions of its
training by `later`.

Annotations here use Any for `train.run.Run`, because its module imports this one.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_ext.config.inapplicable import ENGINE, Inapplicable
from megatron_ext.config.run import RunConfig, TaskFlags, named

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.data import Dataset

    from megatron_ext.data.batch import Batch
    from megatron_ext.data.loader import BatchSource
    from megatron_ext.layers.chunks import ModelChunk
    from megatron_ext.losses.contract import LossFunction, StepCounts
    from megatron_ext.parallel.context import ParallelContext
    from megatron_ext.planning.task_cost import TaskCost
    from megatron_ext.train.batch_size import StepStats

    # The type of a batch is known only to a task's source and its forward step.
    ForwardStep = Callable[
        [RunConfig, Any, torch.nn.Module, StepCounts | None], tuple[Tensor, LossFunction]
    ]
    PrepareBatches = Callable[[RunConfig, Sequence[Batch], ParallelContext], Sequence[Batch]]
    SourceProvider = Callable[[Any, Any, Any, int, bool], BatchSource]
    InitialWeights = Callable[
        [RunConfig, ParallelContext, Sequence[torch.nn.Module], Any], list[str] | None
    ]
    BoundaryShape = Callable[[Any, torch.nn.Module], Sequence[int]]


class Later:
    """A function or class that is imported when it is first called.

    It has a function's ``__module__``, ``__name__`` and ``__qualname__``, and ``place``, which is
    "module:name".
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.__module__, _, self.__name__ = place.partition(":")
        self.__qualname__ = self.__name__

    def load(self) -> Callable[..., Any]:
        """Import and return the function or class itself."""
        module = sys.modules.get(self.__module__) or _imported(self.__module__)
        function: Callable[..., Any] = getattr(module, self.__name__)
        return function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.load()(*args, **options)


def _imported(name: str) -> ModuleType:
    """Import a module without collecting garbage meanwhile.

    The imports of torch and megatron-core make many objects that stay. Going through them again and
    again would take a fifth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if collects:
            gc.enable()


def later(place: str) -> Later:
    """Return a stand-in for ``place`` ("module:name") that imports it when it is called."""
    return Later(place)


def definition_of(function: Callable[..., Any]) -> object:
    """Return where a function is defined: equal for a `Later` and the function that it names.

    A callable without a definition of its own, such as a partial, is returned itself.
    """
    name = getattr(function, "__qualname__", None)
    return function if name is None else (function.__module__, name)


@dataclass(frozen=True)
class Datasets:
    """The datasets of the three splits: training, validation and test.

    A split is None if it has no samples, or if this rank reads no data.
    """

    train: Dataset[Any] | None
    valid: Dataset[Any] | list[Dataset[Any]] | None
    test: Dataset[Any] | None


DatasetsProvider = Callable[[RunConfig, Any, Sequence["int | None"], Callable[[], bool]], Datasets]
Preflight = Callable[[RunConfig], tuple[RunConfig, Any]]
InputChecks = Callable[[RunConfig], Sequence[Callable[[], Any]]]
ProcessNonLossData = Callable[[Any, int, Any], None]

STEP_FLAGS = "loss loss-args label-smoothing z-loss-coeff cross-entropy-chunk-size"
"""Flags of the loss, which only work if the forward step implements them, as GPT's does."""
OF_STEP_RUNNER = Inapplicable(
    "rerun-mode rerun-interval check-state-interval on-spike",
    remedy="leave it out",
    says="looks into the steps of one network, but this task takes steps of its own",
)
"""Flags that only `step.StepRunner` supports: tasks with their own ``step_runner`` refuse them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Task(TaskFlags):
    """Everything that a program trains: flags (see `TaskFlags`), data, model, step and cost.

    Below, "``(a, b)`` to c" stands for a function that takes a and b and returns c.

    Attributes:
        datasets: ``(config, assets, sizes, is_built_on_rank)`` to the three splits; ``sizes`` are
            the numbers of samples (`split_sizes`), and ``is_built_on_rank()`` says whether this
            rank reads data.
        model_chunk: ``(config, transformer_config, context, pre_process=, post_process=,
            vp_stage=)`` to one pipeline chunk.
        forward_step: ``(config, batch, model, counts)`` to the output of the chunk and the loss
            function, which is called only on the last stage. There, ``counts`` is the target counts
            of the whole training step; it is None on other stages and in evaluation.
        auxiliary_losses: whether the model attaches its own losses with
            `layers.auxiliary_loss.attach_microbatch_loss`.
        prepare_batches: ``(config, batches, context)`` to the batches, called on the last stage
            with all micro-batches of a step before its first forward pass.
        source: ``(run, dataset, assets, consumed_samples, full_epoch)`` to the batches of one
            split, grouped by step, from sample ``consumed_samples`` on; ``full_epoch`` is true if
            each evaluation reads the whole split.
        step_stats: ``(run, num_microbatches)`` to the `StepStats` of the next training step.
        boundary_shape: ``(batch, chunk)`` to the shape ``[s, b, h]`` of a micro-batch's activations
            between pipeline stages; None if the flags determine it.
        callbacks: each ``(run)`` to a `callbacks.callback.Callback`, or to None if the run does not
            need it; called when training begins.
        sample_name: noun for samples in the log, such as "images"; None to log no sample rate.
        perplexity: whether the loss named "lm loss" is a cross-entropy; evaluation then also
            reports its exponential.
        initial_weights: ``(config, context, chunks, loaded)`` to notes, called at iteration 0. It
            may change weights, which may be those of the checkpoint ``loaded``; None if it did not.
        step_runner: ``(config, task, context, transformer_config, chunks, optimizer, scheduler)``
            to the `step.StepRunner` that runs the steps; None for `step.StepRunner` itself.
        preflight: ``(config)`` to the configuration, completed from the data, and the task's
            assets, which its data and steps need. It checks the data on every rank before any
            process group exists.
        inputs: ``(config)`` to checks, one for each file and folder that flags name; a check raises
            an error if the input does not exist. They are called for a run that was refused, to
            report missing inputs as well, so they use only the flags as given.
        data_lines: ``(config, assets)`` to lines that say which data the run reads and which it
            does not use; the first rank prints them at the start.
        cost: the cost model for plans (``--dry-run``, tools/plan.py); None if there is none.
        implements: by forward step or model chunk (the function), the names of the optional flags
            that it implements, separated by spaces. The flags listed for any function, and
            `STEP_FLAGS`, are refused unless this task's own forward step or model chunk implements
            them.
        step_advice: the remedy, besides leaving the flag out, in the error about a flag that
            forward step and model chunk do not implement.
        process_non_loss_data: ``(collected, iteration, writer)``, called after each evaluation on
            the reporting rank of a run with ``--tensorboard-dir``, as Megatron-LM's
            ``process_non_loss_data_func``. ``collected`` holds the result of the loss function with
            ``non_loss_data=True`` for each micro-batch of the last evaluation step.
        non_loss_data: ``(chunks)`` to data that replaces ``collected``; called on all ranks.
    """

    datasets: DatasetsProvider
    model_chunk: ModelChunk
    source: SourceProvider
    step_stats: Callable[[Any, int], StepStats]
    forward_step: ForwardStep | None = None
    preflight: Preflight = lambda config: (config, None)
    inputs: InputChecks = lambda config: ()
    auxiliary_losses: bool = False
    prepare_batches: PrepareBatches | None = None
    boundary_shape: BoundaryShape | None = None
    callbacks: Sequence[Callable[[Any], Any]] = ()
    sample_name: str | None = None
    perplexity: bool = False
    initial_weights: InitialWeights | None = None
    step_runner: Callable[..., Any] | None = None
    data_lines: Callable[[RunConfig, Any], Sequence[str]] = lambda config, assets: ()
    cost: TaskCost | None = None
    implements: Mapping[ForwardStep | ModelChunk, str] = field(default_factory=dict)
    step_advice: str = "say in `Task.implements` which of them implements it"
    process_non_loss_data: ProcessNonLossData | None = None
    non_loss_data: Callable[[Sequence[torch.nn.Module]], Any] | None = None

    def choose(self, config: RunConfig) -> Task:
        return self

    def answers(self) -> tuple[Inapplicable, ...]:
        """Return an entry for each group of flags that this task refuses.

        A flag is refused if it does not apply to the task, or if the task's forward step, model
        chunk or step runner does not implement it.
        """
        parts = [part for part in (self.forward_step, self.model_chunk) if part is not None]
        listed = {definition_of(part): names for part, names in self.implements.items()}
        own = {name for part in parts for name in listed.get(definition_of(part), "").split()}
        names = " ".join([STEP_FLAGS, *self.implements.values()]).split()
        lacking = " ".join(dict.fromkeys(name for name in names if name not in own))
        named = " and ".join(f"`{getattr(part, '__name__', 'one of its own')}`" for part in parts)
        ignored = Inapplicable(
            lacking,
            remedy=f"leave it out, or {self.step_advice}",
            says=f"is left out of account by the forward step and the model of this task ({named})",
        )
        of_runner = [] if self.step_runner is None else [OF_STEP_RUNNER]
        return (*self.inapplicable, ignored, *of_runner, *ENGINE)

    def loaded(self) -> Task:
        """Return a copy of the task in which each `Later` is replaced by what it names."""
        values = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        loaded: dict[str, Any] = {k: x.load() for k, x in values.items() if isinstance(x, Later)}
        return dataclasses.replace(self, **loaded)

    def replace(self, **changes: Any) -> Task:
        """Return a copy of the task with other values of some attributes.

        If ``datasets`` is replaced and `inputs` is not, the copy checks no inputs.
        """
        if "datasets" in changes:
            changes.setdefault("inputs", Task.inputs)
        return dataclasses.replace(self, **changes)

    def with_sections(self, *kinds: type) -> Task:
        """Return a copy with further sections of flags, given as their dataclasses.

        With ``--use-checkpoint-args``, these flags are read from the checkpoint like the model's.
        """

        def stored_model(stored: Mapping[str, Any], given: RunConfig) -> Mapping[str, Any]:
            own = {name: stored.get(name, {}) for name in named(kinds)}
            return {**self.stored_model(stored, given), **own}

        return self.replace(sections=(*self.sections, *kinds), stored_model=stored_model)


@dataclass(frozen=True)
class TaskChoice:
    """The tasks of a program; ``pick`` chooses one of them by the user's configuration."""

    tasks: tuple[Task, ...]
    pick: Callable[[RunConfig], Task]

    @property
    def sections(self) -> tuple[type, ...]:
        return tuple(dict.fromkeys(kind for task in self.tasks for kind in task.sections))

    @functools.cached_property
    def inapplicable(self) -> tuple[Inapplicable, ...]:
        """Return an entry for each group of flags that applies to none of the tasks."""
        first, *others = (task.inapplicable for task in self.tasks)
        return tuple(entry for entry in first if all(entry in other for other in others))

    def choose(self, config: RunConfig) -> Task:
        return self.pick(config)

    def replace(self, **changes: Any) -> TaskChoice:
        """Return this choice, with some attributes of every task changed."""
        return self._each(lambda task: task.replace(**changes))

    def with_sections(self, *kinds: type) -> TaskChoice:
        """Return this choice, with further sections of flags in every task."""
        return self._each(lambda task: task.with_sections(*kinds))

    def _each(self, change: Callable[[Task], Task]) -> TaskChoice:
        changed = functools.cache(change)  # so that a task stays one object
        return TaskChoice(
            tuple(map(changed, self.tasks)), lambda config: changed(self.pick(config))
        )


def no_datasets(*_: Any) -> Datasets:
    """Return no datasets; a task that reads no samples has this function as `Task.datasets`."""
    return Datasets(None, None, None)
