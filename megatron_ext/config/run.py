"""The configuration of a run: one section, a frozen dataclass of plain data, for each concern.

`finalize.finalize` fills in derived values and checks the whole configuration. `transformer_fields`
returns the fields of megatron-core's TransformerConfig.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import yaml

from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.flags import Changeable
from megatron_ext.config.inapplicable import ENGINE, Inapplicable
from megatron_ext.config.model import ACTIVATIONS, ModelConfig
from megatron_ext.config.offload import OffloadConfig
from megatron_ext.config.optimizer import EmaConfig, FreezeConfig, LoraConfig, OptimizerConfig
from megatron_ext.config.output import CheckpointConfig, LoggingConfig, PlanningConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.precision import (
    TE_IMPL,
    CudaGraphConfig,
    Fp8Config,
    PrecisionConfig,
    TransformerEngineConfig,
)
from megatron_ext.config.training import LossConfig, TrainingConfig
from megatron_ext.errors import ConfigError

Section = TypeVar("Section")
Side = tuple[str, "int | None", int]
"""A dimension of a weight matrix: name, total width (None if the model has no such matrix), and
number of ranks that split the width."""

_OF_WRONG_TYPES = TypeError, ValueError, LookupError, AttributeError, ArithmeticError
"""Exceptions with which a check fails if a value has another type than its flag."""


@dataclass(frozen=True)
class RunConfig:
    """The whole configuration of a run.

    ``device`` is "cpu" or "cuda", and ``sections`` holds the sections that the task and the user
    add. Each other field is a section that every run has.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    freeze: FreezeConfig = field(default_factory=FreezeConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    cuda_graphs: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    engine: TransformerEngineConfig = field(default_factory=TransformerEngineConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    device: str = "cpu"
    sections: tuple[Any, ...] = ()

    def section(self, kind: type[Section]) -> Section:
        """Return the task's section of this class; raise a ConfigError if there is none."""
        for section in self.sections:
            if isinstance(section, kind):
                return section
        raise ConfigError(
            f"The section `{kind.__name__}` is not in this configuration; name it in the task: "
            f"`Task(sections=({kind.__name__},), ...)`."
        )

    def has(self, kind: type) -> bool:
        """Return whether the task has a section of this class."""
        return any(isinstance(section, kind) for section in self.sections)

    def with_section(self, *changed: Any) -> RunConfig:
        """Return a copy with the given sections; each is added, or replaces one of its class."""
        by_kind = {type(section): section for section in self.sections}
        by_kind.update({type(section): section for section in changed})
        return dataclasses.replace(self, sections=tuple(by_kind.values()))

    def with_values(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a copy with the given values of fields, whichever sections have these fields."""
        changed: dict[str, Any] = {}
        for name, section in self.by_name().items():
            mine = {key: value for key, value in values.items() if key in vars(section)}
            changed[name] = dataclasses.replace(section, **mine) if mine else section
        engine = {name: changed.pop(name) for name in engine_sections()}
        return dataclasses.replace(self, **engine, sections=tuple(changed.values()))

    @property
    def layer_sections(self) -> list[LayerSection]:
        """Return the task's sections that say what its transformer layers compute."""
        return [section for section in self.sections if isinstance(section, LayerSection)]

    def attention_sides(self) -> Sequence[Side] | None:
        """Return the dimensions of attention's weight matrices as the task's sections set them.

        The hidden size is left out. The result is None if no section sets them.
        """
        sides = (section.attention_sides(self) for section in self.layer_sections)
        return next((own for own in sides if own is not None), None)

    def by_name(self) -> dict[str, Any]:
        """Return all sections by name: first those of every run, then the task's."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        engine = {k: v for k, v in own.items() if dataclasses.is_dataclass(v)}
        return engine | {section_name(type(section)): section for section in self.sections}

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested dictionaries and lists, for YAML or JSON."""
        sections = self.by_name() | {"checkpoint": self.checkpoint.as_given()}
        values = {name: dataclasses.asdict(section) for name, section in sections.items()}
        return _plain({**values, "device": self.device})  # type: ignore[no-any-return]

    def to_yaml(self) -> str:
        """Return the whole configuration as YAML, which ``--config`` can read."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], sections: Sequence[type] = ()) -> RunConfig:
        """Build a configuration from `to_dict`'s values; unknown fields are ignored.

        ``sections`` are the classes of the task's sections. A field that an earlier version stored
        in another section is found too (`in_present_sections`).
        """
        built: dict[str, Any] = {}
        errors: list[str] = []
        values = in_present_sections(values, sections)
        for name, kind in (engine_sections() | named(sections)).items():
            names = {f.name for f in dataclasses.fields(kind)}
            stored = values.get(name) or {}
            if not isinstance(stored, Mapping):
                errors.append(
                    f"The section `{name}` of a stored configuration must hold names and values; "
                    "correct it, or use another file."
                )
                stored = {}
            given = {k: v for k, v in stored.items() if k in names}
            try:
                built[name] = kind(**given)
            except ConfigError as error:
                errors += error.messages
            except _OF_WRONG_TYPES as error:
                errors.append(
                    f"The section `{name}` of a stored configuration holds a value of another "
                    f"type than its flag ({error}); correct it, or use another file."
                )
        if errors:
            raise ConfigError(errors)
        own = tuple(built.pop(name) for name in named(sections))
        return cls(**built, device=values.get("device", "cpu"), sections=own)


def section_name(kind: type) -> str:
    """Return a section's name in files: its ``SECTION``, or "my_flags" for MyFlagsConfig."""
    named = getattr(kind, "SECTION", None)
    plain = kind.__name__.removesuffix("Config")
    return str(named or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower())


def named(sections: Sequence[type]) -> dict[str, type]:
    """Return the given section classes by the names that they have in files."""
    return {section_name(kind): kind for kind in sections}


def engine_sections() -> dict[str, type]:
    """Return the classes of the sections that every run has, by name."""
    kinds: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(RunConfig)}
    return {name: kind for name, kind in kinds.items() if hasattr(kind, "__dataclass_fields__")}


def in_present_sections(stored: Mapping[str, Any], sections: Sequence[type]) -> dict[str, Any]:
    """Return stored values with each field moved to the section that declares it now.

    An earlier version may have stored a field in another section. No two sections have a field of
    the same name, so the name alone tells where a value belongs. If the present section has a value
    for the field already, this value is kept.

    Args:
        stored: values by section and field, such as `RunConfig.to_dict` returns.
        sections: classes of the task's sections.
    """
    kinds = engine_sections() | named(sections)
    home = {field.name: name for name, kind in kinds.items() for field in dataclasses.fields(kind)}
    placed = dict(stored)
    for name in kinds.keys() & stored.keys():
        values = stored[name]
        if not isinstance(values, Mapping):
            continue
        strays = [key for key in values if home.get(key, name) != name]
        placed[name] = {k: v for k, v in placed[name].items() if k not in strays}
        for key in strays:
            present = placed.get(home[key]) or {}
            if isinstance(present, Mapping):
                placed[home[key]] = {key: values[key], **present}
    return placed


class LayerSection(Changeable):
    """The base class of a task's sections that say what its transformer layers compute.

    The engine itself knows only the parts that every transformer has; for all else it calls these
    methods.
    """

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Return values by field of `StepTransformerConfig`; they replace the engine's."""
        return {}

    def resolved_model(self, model: ModelConfig) -> ModelConfig:
        """Return ``model`` with the values that follow from this section in place."""
        return model

    def torch_only(self) -> list[str]:
        """Return this section's flags that are set and that only the torch layers support."""
        return []

    def attention_sides(self, config: RunConfig) -> Sequence[Side] | None:
        """Return the dimensions of attention's weight matrices, apart from the hidden size.

        None means that this section does not change them.
        """
        return None

    def unused_fields(self) -> frozenset[str]:
        """Return the names of this section's fields that have no effect, given its other values.

        When a checkpoint is loaded, these fields may differ from the checkpoint's.
        """
        return frozenset()

    def te_versions(self, config: RunConfig) -> Mapping[str, str]:
        """Return, for each flag in use, the oldest Transformer Engine version that supports it."""
        return {}


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskFlags:
    """The flags of a task, and how it completes and checks the configuration.

    Attributes:
        sections: frozen dataclasses whose fields are the task's flags.
        inapplicable: the flags that do not apply in this task, or in some of its runs. A flag that
            all tasks of a program always refuse is not a flag of that program.
        defaults: by field, the task's defaults, which replace those that the flags declare.
        resolve: returns a configuration with the task's decisions filled in; the engine then
            derives the other values.
        rules: takes ``(given, resolved)`` and returns a sentence for each fault. ``given`` is the
            configuration before anything was derived.
        stored_model: called with ``--use-checkpoint-args``; takes ``(stored, given)`` and returns,
            by name, the sections of the stored configuration that describe the checkpoint's
            weights.
        described_model: takes the configuration as given. If its flags name a file that describes
            the model, returns that file's values by section and field, else {}. Given flags
            override these values.
    """

    sections: tuple[type, ...] = ()
    inapplicable: tuple[Inapplicable, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    resolve: Callable[[RunConfig], RunConfig] = lambda config: config
    rules: Callable[[RunConfig, RunConfig], Sequence[str]] = lambda given, run: []
    stored_model: Callable[[Mapping[str, Any], RunConfig], Mapping[str, Any]] = (
        lambda stored, given: {"model": stored["model"]}
    )
    described_model: Callable[[RunConfig], Mapping[str, Mapping[str, Any]]] = lambda given: {}

    def answers(self) -> tuple[Inapplicable, ...]:
        """Return the entries of flags that do not apply: the task's, then the engine's."""
        return (*self.inapplicable, *ENGINE)


class Program(Protocol):
    """A command-line program, whose flags choose one of its tasks (``choose``).

    ``sections`` declare its flags beside the engine's; ``inapplicable`` are the entries about flags
    that never apply in it.
    """

    @property
    def sections(self) -> tuple[type, ...]: ...
    @property
    def inapplicable(self) -> tuple[Inapplicable, ...]: ...
    def choose(self, config: RunConfig) -> TaskFlags: ...


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


SAME_NAME = {
    "model": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
        "normalization add_bias_linear add_qkv_bias qk_layernorm attention_dropout hidden_dropout "
        "init_method_std embedding_init_method_std "
        "activation_func_clamp_value glu_linear_offset "
        "attention_softmax_in_fp32 "
        "apply_query_key_layer_scaling apply_residual_connection_post_layernorm "
        "fp32_residual_connection mtp_num_layers mtp_loss_scaling_factor use_cpu_initialization "
        "perform_initialization recompute_granularity recompute_method recompute_num_layers "
        "recompute_modules distribute_saved_activations variable_seq_lengths "
        "num_microbatches_with_partial_activation_checkpoints"
    ),
    "parallel": (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
        "virtual_pipeline_model_parallel_size account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split"
    ),
    "precision": "fp16 bf16 disable_bf16_reduced_precision_matmul",
    "training": "calculate_per_token_loss deterministic_mode",
}

APEX_KERNEL = "fused_weight_gradient_mlp_cuda"

FUSIONS = (
    "masked_softmax_fusion bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion "
    "persist_layer_norm cross_entropy_loss_fusion"
)


def transformer_fields(run: RunConfig) -> dict[str, object]:
    """Return values of megatron-core's TransformerConfig; dtypes and activations are names.

    A task's sections add their own fields (`LayerSection.transformer_fields`). Fused kernels of
    megatron-core are enabled only where they exist.
    """
    fields: dict[str, object] = {
        name: getattr(getattr(run, section), name)
        for section, names in SAME_NAME.items()
        for name in names.split()
    }
    model = run.model
    parallel = run.parallel
    kinds = run.parallel.cp_comm_type
    activation = next((ACTIVATIONS[name] for name in ACTIVATIONS if getattr(model, name)), "gelu")
    fields.update(
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.apply_layernorm_1p,
        gated_linear_unit=model.gated,
        activation_func=activation,
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        cp_comm_type=kinds[0] if len(kinds) == 1 else kinds,
        attention_backend=model.attention_backend,
        **_fusions(run),
    )
    if parallel.microbatch_group_size_per_vp_stage is not None:
        fields["microbatch_group_size_per_vp_stage"] = parallel.microbatch_group_size_per_vp_stage
    if model.transformer_impl == TE_IMPL:
        fields |= dataclasses.asdict(run.engine)
        del fields["tp_comm_overlap_cfg"]
    # megatron-core asks Transformer Engine for its version where experts compute in 8 bits.
    if has_te_layers(run) and run.fp8.fp8_format is not None:
        fields |= dataclasses.asdict(run.fp8)
        fields.update(fp8=fields.pop("fp8_format"), fp8_param=fields.pop("fp8_param_gather"))
        del fields["reuse_grad_buf_for_mxfp8_param_ag"]
    for section in run.layer_sections:
        fields.update(section.transformer_fields(run))
    return fields


def _fusions(run: RunConfig) -> dict[str, object]:
    model = run.model
    gpu = run.device == "cuda"
    te = has_te_layers(run)
    fusions = {name: bool(getattr(model, name)) and te for name in FUSIONS.split()}
    # The output head is megatron-core's own layer, whose kernel is apex's.
    fusions["gradient_accumulation_fusion"] &= find_spec(APEX_KERNEL) is not None
    fusions["bias_activation_fusion"] = gpu and te and _fuses_activation(model)
    fusions["bias_dropout_fusion"] = model.bias_dropout_fusion and (gpu or not te)
    impl = run.loss.cross_entropy_impl
    native = model.cross_entropy_loss_fusion and model.cross_entropy_fusion_impl == "native"
    fusions["cross_entropy_loss_fusion"] = gpu and (impl == "te" or (impl == "eager" and native))
    return {**fusions, "cross_entropy_fusion_impl": "te" if impl == "te" else "native"}


def has_te_layers(run: RunConfig) -> bool:
    """Return whether to build Transformer Engine's layers.

    ``--transformer-impl`` decides; but a dry run without Transformer Engine builds torch's layers.
    """
    te = run.model.transformer_impl == TE_IMPL
    return te and (not run.planning.dry_run or find_spec("transformer_engine") is not None)


def _fuses_activation(model: ModelConfig) -> bool:
    """Return whether megatron-core's MLP is to fuse the activation with the bias."""
    if model.swiglu:
        return model.bias_swiglu_fusion
    is_gelu = not any(getattr(model, name) for name in ACTIVATIONS)
    return model.bias_gelu_fusion and is_gelu and model.add_bias_linear
