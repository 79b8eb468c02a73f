"""The configuration of a run: one frozen section for each concern, as plain data.

`finalize.finalize` fills in what follows from other values and checks all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from megatron_ext.config.acceleration import CudaGraphConfig, TransformerEngineConfig
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.config.lora import LoraConfig
from megatron_ext.config.loss import LossConfig
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.moe import MoEConfig
from megatron_ext.config.optimizer import EmaConfig, OptimizerConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.precision import Fp8Config, PrecisionConfig
from megatron_ext.config.reporting import LoggingConfig, PlanningConfig
from megatron_ext.config.sections import named, section_name
from megatron_ext.config.training import TrainingConfig
from megatron_ext.errors import ConfigError

Section = TypeVar("Section")
LeftOut = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run does, by concern.

    Attributes:
        sections: what the task of the run, or its user, adds to the engine's sections.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    cuda_graphs: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    engine: TransformerEngineConfig = field(default_factory=TransformerEngineConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    device: str = "cpu"
    sections: tuple[Any, ...] = ()

    def section(self, kind: type[Section]) -> Section:
        """Return the section of a class that the task brings.

        Raises:
            ConfigError: the task does not name the section.
        """
        for section in self.sections:
            if isinstance(section, kind):
                return section
        raise ConfigError(
            f"The section `{kind.__name__}` is not in this configuration; name it in the task: "
            f"`Task(sections=({kind.__name__},), ...)`."
        )

    def has(self, kind: type) -> bool:
        """Return whether the task brings a section of this class."""
        return any(isinstance(section, kind) for section in self.sections)

    def with_section(self, *changed: Any) -> RunConfig:
        """Return the configuration with sections of the task in the place of those it has."""
        by_kind = {type(section): section for section in self.sections}
        by_kind.update({type(section): section for section in changed})
        return dataclasses.replace(self, sections=tuple(by_kind.values()))

    def by_name(self) -> dict[str, Any]:
        """Return every section, the engine's first, by its name in files."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        engine = {k: v for k, v in own.items() if dataclasses.is_dataclass(v)}
        return engine | {section_name(type(section)): section for section in self.sections}

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values that YAML and JSON can hold."""
        values = {name: dataclasses.asdict(section) for name, section in self.by_name().items()}
        return _plain({**values, "device": self.device})  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], sections: Sequence[type] = ()) -> RunConfig:
        """Read back what `to_dict` gave; fields that this version lacks are left out.

        Args:
            values: fields by section.
            sections: classes of the task's sections.

        Raises:
            ConfigError: a section whose values contradict each other.
        """
        found: dict[str, Any] = {}
        errors: list[str] = []
        for name, kind in (engine_sections() | named(sections)).items():
            names = {f.name for f in dataclasses.fields(kind)}
            given = {k: v for k, v in (values.get(name) or {}).items() if k in names}
            try:
                found[name] = kind(**given)
            except ConfigError as error:
                errors += error.messages
        if errors:
            raise ConfigError(errors)
        own = tuple(found.pop(name) for name in named(sections))
        return cls(**found, device=values.get("device", "cpu"), sections=own)


def engine_sections() -> dict[str, type]:
    """Return the classes of the sections that every run has, by name."""
    kinds: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(RunConfig)}
    return {name: kind for name, kind in kinds.items() if hasattr(kind, "__dataclass_fields__")}


class TaskFlags(Protocol):
    """The part of a configuration that a task adds to the engine's.

    Attributes:
        sections: frozen dataclasses whose fields are the task's flags.
        left_out: flags of the engine that the task has no use for, by section and field (``"*"``
            is every field), with the reason. A program does not know what all its tasks leave out.
        defaults: values of flags in the place of their usual defaults, by field.
        resolve: returns the configuration with what the task's own sections decide, before the
            engine derives the rest.
        rules: ``(given, resolved)`` to a sentence for everything that cannot be run. ``given`` is
            the configuration before anything was derived.
        stored_model: ``(stored, given)`` to the sections of a checkpoint's configuration that
            describe its weights (``--use-checkpoint-args``), by section.
    """

    @property
    def sections(self) -> tuple[type, ...]: ...
    @property
    def left_out(self) -> LeftOut: ...
    @property
    def defaults(self) -> Mapping[str, Any]: ...
    @property
    def resolve(self) -> Callable[[RunConfig], RunConfig]: ...
    @property
    def rules(self) -> Callable[[RunConfig, RunConfig], list[str]]: ...
    @property
    def stored_model(self) -> Callable[[Mapping[str, Any], RunConfig], Mapping[str, Any]]: ...


class Program(Protocol):
    """A command line: the sections that its parser knows, and the task that its flags choose."""

    @property
    def sections(self) -> tuple[type, ...]: ...
    @property
    def left_out(self) -> LeftOut: ...
    def choose(self, config: RunConfig) -> TaskFlags: ...


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
