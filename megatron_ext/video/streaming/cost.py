"""Estimates a rank's memory in ``--task streaming``: networks, generator's cache, activations.

For this task the planner prints what `report` returns, since its usual plan has only one network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.planning.hardware import reserve_on, size
from megatron_ext.planning.sheet import Column, Report, Sheet
from megatron_ext.planning.stages import FP32, Ranks, Stage
from megatron_ext.planning.state import State, rank_state
from megatron_ext.planning.weights import Weight, distinct
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.cost.clip import Clip, StreamedCost
from megatron_ext.video.model.chunk import stage_blocks
from megatron_ext.video.model.window import window_of
from megatron_ext.video.networks.lookup import streamed_network
from megatron_ext.video.streaming.config import Role, StreamingConfig
from megatron_ext.video.streaming.rules import TeacherSizes, teacher_sizes


@dataclass(frozen=True)
class NetworkMemory:
    """The memory of one network on a rank; of the teacher, on the rank with its fullest stage.

    Attributes:
        name: "generator", "critic" or "teacher".
        weights: the parameters that this rank holds.
        state: bytes that the rank keeps for the network between steps.
        parameters: number of parameters of the whole network, over all its ranks.
    """

    name: str
    weights: tuple[Weight, ...]
    state: State
    parameters: int


@dataclass(frozen=True)
class StreamingMemory:
    """The memory of a rank, in bytes.

    Attributes:
        networks: the memory of generator, critic and teacher, in this order.
        cache: bytes of the generator's cache: keys and values of frames and text.
        passes: peak bytes of activations of each kind of pass, keyed by a description of the pass,
            such as "teacher, forward on a clip". Passes run one at a time, so only the largest of
            these adds to state and cache.
    """

    networks: tuple[NetworkMemory, ...]
    cache: int
    passes: Mapping[str, int]

    @property
    def state(self) -> State:
        """Return the memory that the rank keeps for all networks between steps."""
        return sum((network.state for network in self.networks), State())

    @property
    def largest(self) -> tuple[str, int]:
        """Return (description, bytes) of the pass that needs the most memory."""
        return max(self.passes.items(), key=lambda entry: entry[1])

    @property
    def total(self) -> int:
        """Return the largest number of bytes in use at one time."""
        return self.state.total + self.cache + self.largest[1]


def streaming_memory(config: RunConfig) -> StreamingMemory:
    """Return the estimated memory of the rank that needs the most.

    ``config`` must have text width and sequence length filled in, as `prepare.sized` does.
    """
    formulas = _Formulas(config)
    networks = (formulas.trained("generator"), formulas.trained("critic"), formulas.teacher())
    return StreamingMemory(networks, formulas.cache(), formulas.passes())


class _Formulas:
    """Formulas for the bytes of a run's networks, cache and passes on one rank."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._ranks = Ranks.of(config)
        self._streaming = config.section(StreamingConfig)
        self._window = window_of(self._streaming)
        self._network = streamed_network()

    def trained(self, name: Role) -> NetworkMemory:
        """Return the memory of generator or critic; the critic has no averaged weights."""
        run = self._config
        sizes = self._streaming.sizes(name)
        if name == "critic":
            run = replace(run, ema=replace(run.ema, ema_decay=None))
        weights = tuple(self._network.weights(run.lora, sizes, self._ranks.tp, self._whole(name)))
        state = rank_state(run, self._ranks, 0, [weights])
        return NetworkMemory(name, weights, state, distinct([weights]))

    def teacher(self) -> NetworkMemory:
        """Return the memory of the frozen teacher, which may have a layout of its own."""
        layout = teacher_sizes(self._streaming, self._config.parallel)
        own = layout or TeacherSizes(self._ranks.tp, 1)
        sizes = self._streaming.sizes("teacher")
        blocks = stage_blocks(sizes.num_blocks, own.pipeline)
        stages = [
            Stage.of_layers(layers, i, len(blocks), rank=i) for i, layers in enumerate(blocks)
        ]
        weights = [
            self._network.weights(LoraConfig(), sizes, own.tensor, stage) for stage in stages
        ]
        fullest = max(weights, key=lambda listed: sum(weight.numel for weight in listed))
        frozen = tuple(replace(weight, frozen=True) for weight in fullest)
        state = rank_state(self._config, self._ranks, 0, [frozen])
        return NetworkMemory("teacher", frozen, state, distinct(weights))

    def cache(self) -> int:
        """Return the bytes of the generator's cache: keys and values of all layers, and text."""
        x = self._ranks
        sizes = self._streaming.sizes()
        frame = self._clip(1)
        frames = self._window.capacity_for(self._streaming.chunk_frames)
        rows = frames * frame.num_image // x.cp + frame.num_text
        both = 2 * sizes.num_blocks * rows * x.b * sizes.hidden_size // x.tp
        # The memo also holds a copy of the text in fp32.
        return both * x.width + frame.num_text * x.b * sizes.text_width * FP32

    def passes(self) -> dict[str, int]:
        """Return the peak bytes of each pass in a step that trains generator and critic.

        The keys are descriptions of the passes, for the report.
        """
        streaming = self._streaming
        stage = self._whole("generator")
        critic = self._on_clip(self._config, "critic")
        block = self._on_block()
        learned = critic.activations(self._whole("critic"))
        cost = block.activations(stage)
        guided = 2 if streaming.guidance_scale != 1 else 1
        plain = replace(self._config, lora=LoraConfig())
        teacher = self._on_clip(plain, "teacher", samples=guided)
        size = streaming.chunk_frames
        count = 1 if streaming.two_phase else streaming.blocks.count(size)
        generated = cost.kept * count + cost.transient
        if count > 1:
            # The gradients of weights are kept until those of all blocks have been summed.
            trained = sum(x.numel for x in block.weights(stage) if not x.frozen)
            generated += trained * self._ranks.width
        peaks = {
            "critic, forward and backward on a clip": learned.kept + learned.transient,
            f"generator, forward and backward on {count} frame block(s)": generated,
            "teacher, forward on a clip": teacher.without_gradient(),
            "generator, forward on a frame block": block.without_gradient(),
        }
        if streaming.distribution_loss == "sid":
            judged = teacher.activations(self._whole("teacher"))
            peak = learned.kept + judged.kept + max(learned.transient, judged.transient)
            peaks["critic and teacher, forward and backward to a clip"] = peak
        return peaks

    def _whole(self, role: Role) -> Stage:
        """Return a pipeline stage that holds all transformer blocks of the network ``role``."""
        return Stage.of_layers(range(self._streaming.sizes(role).num_blocks), 0, 1)

    def _clip(self, frames: int, *, samples: int = 1) -> Clip:
        """Return the sizes of a micro-batch of clips with ``frames`` latent frames each.

        The batch has ``samples`` times as many clips as the run's micro-batches.
        """
        height, width = self._streaming.latent_size
        patch = self._streaming.sizes().patch_size
        length = self._config.section(TextEncoderConfig).text_length
        micro = max(1, self._ranks.b) * samples
        return Clip("", frames, height // patch, width // patch, length, micro)

    def _on_clip(self, config: RunConfig, role: Role, *, samples: int = 1) -> StreamedCost:
        """Return the cost formulas of critic or teacher, which attend to a clip in both directions.

        ``config`` is the run's configuration, which may have other LoRA flags for this network.
        ``samples`` multiplies the micro-batch size, for example by 2 for guidance.
        """
        clip = self._clip(self._streaming.chunk_frames, samples=samples)
        return self._network.on_clip(config, self._ranks, self._streaming.sizes(role), clip)

    def _on_block(self) -> StreamedCost:
        """Return the generator's cost formulas for a frame block that attends to a full cache."""
        clip = self._clip(self._streaming.frame_block)
        sizes = self._streaming.sizes()
        return self._network.on_block(self._config, self._ranks, sizes, clip, self._window)


def not_estimated(config: RunConfig) -> list[str]:
    """Return a sentence on each part of streaming whose memory the estimate leaves out."""
    streaming = config.section(StreamingConfig)
    encoder = config.section(TextEncoderConfig)
    notes = [
        f"The text encoder ({encoder.text_encoder}), which lies on the first rank of each replica, "
        "and its work are not estimated."
    ]
    if streaming.encode_first_frame or streaming.given_frames:
        notes.append(
            f"The codec ({config.section(CodecConfig).codec}), which lies on the first rank of "
            "each replica, and what it needs to decode and encode frames are not estimated."
        )
    if teacher_sizes(streaming, config.parallel) is not None:
        notes.append(
            "The teacher has a layout of its own: its weights are those of its fullest stage, its "
            "work is estimated as if it lay as the other networks."
        )
    notes.append("Time, messages and MFU of streaming are not estimated.")
    return notes


def report(config: RunConfig, gpu: Gpu | None) -> Report:
    """Return the plan of a run: its verdict, text and tables.

    If ``gpu`` is None, the run counts as fitting.
    """
    ranks = Ranks.of(config)
    memory = streaming_memory(config)
    columns = [
        Column("network", "network"),
        Column("parameters", "parameters", lambda count: f"{count / 1e6:,.1f} M"),
        Column("of a rank", "parameters_of_a_rank", "{:,}".format),
        *(
            Column(name, f"{name.lower()}_bytes", size)
            for name in ("weights", "gradients", "optimizer", "EMA")
        ),
    ]
    rows = []
    for network in memory.networks:
        state = network.state
        kinds = (state.parameters, state.gradients, state.optimizer, state.average)
        rows.append([network.name, network.parameters, state.count, *kinds])
    networks = Sheet("networks", "networks on a rank", columns, rows)
    columns = [Column("pass", "pass"), Column("holds at most", "bytes", size)]
    passes = Sheet(
        "passes", "activations, of one pass at a time", columns, list(memory.passes.items())
    )
    largest, num_bytes = memory.largest
    lines = [
        f"plan: {config.parallel.world_size} ranks (tp {ranks.tp} × cp {ranks.cp} × dp "
        f"{ranks.dp}), three networks, {ranks.b} sequence(s) at a time, "
        f"{'bf16' if ranks.half else 'fp32'}",
        f"at the peak: {size(memory.state.total)} of networks, {size(memory.cache)} of cache, "
        f"{size(num_bytes)} of {largest}: {size(memory.total)}",
    ]
    values: dict[str, Any] = {
        "ranks": config.parallel.world_size,
        "tensor_parallel_size": ranks.tp,
        "context_parallel_size": ranks.cp,
        "data_parallel_size": ranks.dp,
        "micro_batch_size": ranks.b,
        "number_format": "bf16" if ranks.half else "fp32",
        "networks_bytes": memory.state.total,
        "cache_bytes": memory.cache,
        "peak_bytes": memory.total,
    }
    fits = True
    if gpu is not None:
        kept = sum(reserve_on(gpu, ranks, num_bytes).values())
        fits = memory.total + kept <= gpu.memory
        values |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.memory, "reserve_bytes": kept}
        verdict = (
            f"{'fits' if fits else 'DOES NOT FIT'} on {gpu.name}: with an assumed reserve of "
            f"{size(kept)} it takes {size(memory.total + kept)} of {size(gpu.memory)}"
        )
        lines = [verdict, *lines]
    return Report(fits, lines, values, [networks, passes], not_estimated(config))
