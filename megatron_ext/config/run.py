"""The resolved configuration of a run: frozen sections, derived values, all errors at once."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.config.cuda_graphs import CudaGraphConfig
from megatron_ext.config.flags import default_of, range_errors
from megatron_ext.config.lora import LoraConfig
from megatron_ext.config.loss import LossConfig
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.moe import MoEConfig
from megatron_ext.config.optimizer import EmaConfig, OptimizerConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.pipeline import interleaving_errors
from megatron_ext.config.precision import Fp8Config, PrecisionConfig
from megatron_ext.config.reporting import LoggingConfig, PlanningConfig
from megatron_ext.config.rules.build import build_errors
from megatron_ext.config.sections import named, section_name
from megatron_ext.config.te_versions import found_version
from megatron_ext.config.training import TrainingConfig
from megatron_ext.config.transformer_engine import TransformerEngineConfig, needs_torch_layers
from megatron_ext.config.transformer_fields import transformer_fields
from megatron_ext.errors import ConfigError
from megatron_ext.text.config import DataConfig, SftConfig, TokenizerConfig
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.config.mmdit import MMDiTConfig
from megatron_ext.video.config.rules import video_errors
from megatron_ext.video.config.run import (
    ConditionConfig,
    FlowConfig,
    SampleConfig,
    TextDropoutConfig,
    VideoConfig,
)
from megatron_ext.video.config.wan import VideoDiTConfig, described_by
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.teacher_config import teacher_errors

Section = TypeVar("Section")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run does, by concern.

    Attributes:
        own: sections of the user's, see `config.sections`.
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
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    mmdit: MMDiTConfig = field(default_factory=MMDiTConfig)
    video_dit: VideoDiTConfig = field(default_factory=VideoDiTConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    conditions: ConditionConfig = field(default_factory=ConditionConfig)
    text_dropout: TextDropoutConfig = field(default_factory=TextDropoutConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    text_encoder: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    streaming_sample: StreamingSampleConfig = field(default_factory=StreamingSampleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    device: str = "cpu"
    own: tuple[Any, ...] = ()

    def section(self, kind: type[Section]) -> Section:
        """Return one of the user's own sections.

        Raises:
            ConfigError: the task did not name the section.
        """
        for section in self.own:
            if isinstance(section, kind):
                return section
        raise ConfigError(
            f"The section `{kind.__name__}` is not in this configuration; name it in the task: "
            f"`Task(sections=({kind.__name__},), ...)`."
        )

    def finalize(self, world_size: int, device: str) -> RunConfig:
        """Fill in what follows from other values, and check that all of it can be run.

        Args:
            world_size: ranks that torchrun started; 0 lets ``--nproc-per-node`` decide.
            device: ``"cuda"`` or ``"cpu"``.

        Raises:
            ConfigError: with one sentence for every error.
        """
        in_range, wrong = self._within_ranges()
        run = in_range.resolved(world_size, device)
        device = run.device
        errors = video_errors(in_range, lambda bare: bare.resolved(world_size, device))
        errors += run.errors(has_te=self._has_transformer_engine(device))
        # What follows from a number that is already refused would be told as an error of its own.
        errors = [
            text
            for text in errors
            if not any(f"{name}`" in text or f"{name} " in text for name in wrong)
        ]
        if wrong or errors:
            raise ConfigError([*wrong.values(), *errors])
        return run

    def _within_ranges(self) -> tuple[RunConfig, dict[str, str]]:
        """Return the run with defaults in the place of numbers outside of their flags' ranges.

        With it comes a sentence for each of them, by the flag's name as sentences quote it.
        """
        errors: dict[str, str] = {}

        def within(section: Any) -> Any:
            wrong = range_errors(section)
            errors.update({f"`--{name.replace('_', '-')}": wrong[name] for name in wrong})
            defaults = {name: default_of(section, name) for name in wrong}
            return dataclasses.replace(section, **defaults) if wrong else section

        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        sections = {k: within(v) for k, v in values.items() if dataclasses.is_dataclass(v)}
        own = tuple(within(section) for section in self.own)
        return dataclasses.replace(self, **sections, own=own), errors

    def resolved(self, world_size: int, device: str) -> RunConfig:
        """With what follows from other values, not checked yet; see `finalize`.

        Raises:
            ConfigError: sizes of a video model that do not fit together.
        """
        planned = self.planning
        world_size = world_size or self.parallel.nproc_per_node * (planned.dry_run_nodes or 1)
        device = "cuda" if planned.dry_run_gpu else device
        model = self._described_model()
        has_te = self._has_transformer_engine(device) and not needs_torch_layers(self)
        model = model.resolved(has_te=has_te)
        parallel = self.parallel.resolved(model, world_size)
        training = self.training.resolved(parallel.data_parallel_size)
        return dataclasses.replace(
            self,
            device=device,
            model=model,
            parallel=parallel,
            lora=self.lora.resolved(streams=self.video.streams),
            precision=self.precision.resolved(device),
            fp8=self.fp8.resolved(te=model.transformer_impl == "transformer_engine"),
            ema=self.ema.resolved(streams=self.video.streams),
            training=training,
            loss=self.loss.resolved(
                fused=model.cross_entropy_loss_fusion and device == "cuda",
                fusion_impl=model.cross_entropy_fusion_impl,
            ),
            optimizer=self.optimizer.resolved(device, training),
            data=self.data.resolved(),
            checkpoint=self.checkpoint.resolved(),
            sft=self.sft.resolved(model.seq_length),
        )

    def _has_transformer_engine(self, device: str) -> bool:
        """Whether it is installed, or asked for in a plan for a GPU of another machine."""
        asked = self.model.transformer_impl == "transformer_engine"
        return bool(self.planning.dry_run_gpu and asked) or _has_transformer_engine(device)

    def _described_model(self) -> ModelConfig:
        if not self.video.video:
            return self.model
        if self.video.uses_dit:
            return described_by(self.video_dit.sizes, self.model)
        return (self.streaming if self.video.streams else self.mmdit).described(self.model)

    def errors(self, *, has_te: bool) -> list[str]:
        """All that cannot be run, one sentence each."""
        found = [
            *self.model.errors(),
            *self.parallel.errors(self.model),
            *self.moe.errors(max(1, self.parallel.expert_model_parallel_size)),
            *self.lora.errors(self.model, self.moe, self.optimizer, streams=self.video.streams),
            *self.precision.errors(),
            *self.fp8.errors(self),
            *self.cuda_graphs.errors(self),
            *self.engine.errors(self, found_version=found_version() if has_te else None),
            *self.training.errors(self.parallel.data_parallel_size),
            *interleaving_errors(self.parallel, self.training),
            *self.loss.errors(per_token=self.training.calculate_per_token_loss, has_te=has_te),
            *self.optimizer.errors(self.training),
            *self.ema.errors(self.training),
            *self.data.errors(full_validation=self.training.full_validation),
            *self.sft.errors(self),
            *self.sample.errors(self.checkpoint.save),
            *(teacher_errors(self.streaming, self.parallel) if self.video.streams else ()),
            *self.checkpoint.errors(
                evaluates=self.training.evaluates, starts_others=self.streaming.starts_others
            ),
            *self.logging.errors(),
            *self.planning.errors(),
            *build_errors(self),
            *(text for own in self.own if hasattr(own, "errors") for text in own.errors(self)),
        ]
        if self.model.transformer_impl == "transformer_engine" and not has_te:
            found.append(
                "`--transformer-impl transformer_engine` needs Transformer Engine and a GPU, and "
                "one of them was not found; use torch or auto."
            )
        stages = self.parallel.pipeline_model_parallel_size
        learned = self.model.position_embedding_type == "learned_absolute"
        if self.model.mtp_num_layers and stages > 1 and learned:
            found.append(
                "`--mtp-num-layers` with more than one pipeline stage does not go with "
                "`--position-embedding-type learned_absolute`, whose table would differ between "
                "the stages; use rope."
            )
        fused = self.model.cross_entropy_loss_fusion and self.model.cross_entropy_fusion_impl
        if self.device == "cuda" and fused == "native" and not self.precision.bf16:
            found.append(
                "`--cross-entropy-loss-fusion` rounds the gradient of every logit to bf16, so it "
                "needs `--bf16`; leave it out."
            )
        if os.environ.get("OMP_NUM_THREADS", "1") == "0":
            found.append("`OMP_NUM_THREADS` (0) must be at least 1.")
        return found

    def transformer_fields(self) -> dict[str, object]:
        """Values of megatron-core's TransformerConfig fields as plain Python."""
        return transformer_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values that YAML and JSON can hold."""
        values: dict[str, Any] = dataclasses.asdict(self)
        own = values.pop("own")
        values |= {section_name(type(x)): of_it for x, of_it in zip(self.own, own, strict=True)}
        return _plain(values)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], own: Sequence[type] = ()) -> RunConfig:
        """Read back what `to_dict` gave; fields that this version lacks are left out.

        Args:
            values: of each section.
            own: the user's sections.

        Raises:
            ConfigError: a section whose values are out of their range.
        """
        sections: dict[str, Any] = {}
        errors: list[str] = []
        kinds: dict[str, Any] = {x.name: x.default_factory for x in dataclasses.fields(cls)}
        for name, kind in (kinds | named(own)).items():
            given = values.get(name)
            if isinstance(given, Mapping):
                names = {f.name for f in dataclasses.fields(kind)}
                try:
                    sections[name] = kind(**{k: v for k, v in given.items() if k in names})
                except ConfigError as error:
                    errors += error.messages
            elif given is not None:
                sections[name] = given
        if errors:
            raise ConfigError(errors)
        mine = [sections.pop(name, None) or kind() for name, kind in named(own).items()]
        return cls(**sections, own=tuple(mine))


def _has_transformer_engine(device: str) -> bool:
    return device == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
