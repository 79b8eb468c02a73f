"""Streaming long-tuning as a plan sees it: three networks, the cache, and the passes of a step.

Its report takes the place of the usual one, see `STREAMING_COST`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.table import Table

from megatron_ext.config.lora import LoraConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.planning.hardware import Reserve, size
from megatron_ext.planning.network import Report, TaskCost
from megatron_ext.planning.stages import FP32, Ranks, Stage
from megatron_ext.planning.state import State, Weight, distinct, rank_state
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.cost.wan import DiTNetwork, dit_weights
from megatron_ext.video.model.wan.attention import AttentionPlan, FrameWindow
from megatron_ext.video.model.wan.options import stage_blocks
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.teacher_config import TeacherSizes, teacher_sizes


@dataclass(frozen=True)
class NetworkMemory:
    """A network of the run on one rank.

    Attributes:
        name: generator, critic or teacher.
        weights: its weights on the rank that holds most of it.
        state: what the rank keeps of it between steps.
        parameters: number of parameters of the whole network.
    """

    name: str
    weights: tuple[Weight, ...]
    state: State
    parameters: int


@dataclass(frozen=True)
class Pass:
    """One pass of a step, and the bytes that it holds at most besides state and cache."""

    name: str
    size: int


@dataclass(frozen=True)
class StreamingMemory:
    """Bytes on a rank.

    Attributes:
        networks: generator, critic, teacher.
        cache: keys and values of the frames and of the text that the generator keeps.
        passes: the passes of a step, which run one at a time.
    """

    networks: tuple[NetworkMemory, ...]
    cache: int
    passes: tuple[Pass, ...]

    @property
    def state(self) -> State:
        """Return the state of all networks."""
        return sum((network.state for network in self.networks), State())

    @property
    def largest(self) -> Pass:
        """Return the pass that holds most."""
        return max(self.passes, key=lambda work: work.size)

    @property
    def total(self) -> int:
        """Return the bytes at the peak of the largest pass."""
        return self.state.total + self.cache + self.largest.size


def streaming_memory(config: RunConfig) -> StreamingMemory:
    """Return what a rank of a checked run holds, whose text encoder has decided the networks."""
    formulas = _Formulas(config)
    networks = (formulas.trained("generator"), formulas.trained("critic"), formulas.teacher())
    return StreamingMemory(networks, formulas.cache(), tuple(formulas.passes()))


class _Formulas:
    """Bytes of the parts of one run."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._ranks = config, Ranks.of(config)
        self._streaming = streaming = config.section(StreamingConfig)
        self._window = FrameWindow(
            streaming.frame_block, streaming.window_frames, streaming.sink_frames
        )

    def trained(self, name: str) -> NetworkMemory:
        """Return the generator, which is averaged too, or the critic."""
        run, size = self._config, None
        if name == "critic":
            size = self._streaming.critic_size
            run = replace(run, ema=replace(run.ema, ema_decay=None))
        sizes = self._streaming.sizes(size)
        weights = tuple(dit_weights(run.lora, sizes, self._ranks.tp, self._whole(size)))
        state = rank_state(run, self._ranks, 0, [weights])
        return NetworkMemory(name, weights, state, distinct([weights]))

    def teacher(self) -> NetworkMemory:
        """Return the teacher: frozen, without adapters, perhaps on ranks of its own."""
        own = teacher_sizes(self._streaming, self._config.parallel)
        own = own or TeacherSizes(self._ranks.tp, 1)
        sizes = self._streaming.sizes(self._streaming.teacher_size)
        blocks = stage_blocks(sizes.num_blocks, own.pipeline)
        stages = [Stage.of_layers(held, i, len(blocks), rank=i) for i, held in enumerate(blocks)]
        weights = [dit_weights(LoraConfig(), sizes, own.tensor, stage) for stage in stages]
        fullest = max(weights, key=lambda held: sum(weight.numel for weight in held))
        frozen = tuple(replace(weight, frozen=True) for weight in fullest)
        state = rank_state(self._config, self._ranks, 0, [frozen])
        return NetworkMemory("teacher", frozen, state, distinct(weights))

    def cache(self) -> int:
        """Return keys and values of a clip's frames and of one text, in all blocks."""
        x, sizes, frame = self._ranks, self._streaming.sizes(None), self._clip(1)
        frames = self._window.capacity_for(self._streaming.chunk_frames)
        rows = frames * frame.num_image // x.cp + frame.num_text
        both = 2 * sizes.num_blocks * rows * x.b * sizes.hidden_size // x.tp
        # The memo holds a copy of the text itself in fp32 too.
        return both * x.width + frame.num_text * x.b * sizes.text_width * FP32

    def passes(self) -> list[Pass]:
        """Return the passes of a step that trains both networks."""
        streaming = self._streaming
        critic, block = self._on_clip(self._config, streaming.critic_size), self._on_block()
        learned = critic.activations(self._whole(streaming.critic_size))
        guided = 2 if streaming.guidance_scale != 1 else 1
        plain = replace(self._config, lora=LoraConfig())
        teacher = self._on_clip(plain, streaming.teacher_size, samples=guided)
        count = 1 if streaming.two_phase else streaming.chunk_frames // streaming.frame_block
        found = [
            Pass("critic, forward and backward on a clip", learned.kept + learned.transient),
            Pass(
                f"generator, forward and backward on {count} frame block(s)",
                self._generator(block, count),
            ),
            Pass("teacher, forward on a clip", teacher.without_gradient()),
        ]
        if streaming.distribution_loss == "sid":
            judged = teacher.activations(self._whole(streaming.teacher_size))
            held = learned.kept + judged.kept + max(learned.transient, judged.transient)
            found.append(Pass("critic and teacher, forward and backward to a clip", held))
        return [*found, Pass("generator, forward on a frame block", block.without_gradient())]

    def _generator(self, block: DiTNetwork, count: int) -> int:
        """Return forward and backward of the generator on some frame blocks at once."""
        stage = self._whole(None)
        cost = block.activations(stage)
        held = cost.kept * count + cost.transient
        if count > 1:
            # A weight's gradient waits until those of all blocks have been summed.
            trained = sum(x.numel for x in block.weights(stage) if not x.frozen)
            held += trained * self._ranks.width
        return held

    def _whole(self, size: str | None) -> Stage:
        """Return one stage that holds all blocks of a network."""
        return Stage.of_layers(range(self._streaming.sizes(size).num_blocks), 0, 1)

    def _clip(self, frames: int, *, samples: int = 1) -> Clip:
        """Return latent frames of the run's sequences as a clip."""
        height, width = self._streaming.latent_size
        patch = self._streaming.sizes(None).patch_size
        length = self._config.section(TextEncoderConfig).text_length
        micro = max(1, self._ranks.b) * samples
        return Clip("", frames, height // patch, width // patch, length, micro)

    def _on_clip(self, config: RunConfig, size: str | None, *, samples: int = 1) -> DiTNetwork:
        """Return critic or teacher on a clip: all frames see each other, and have one timestep."""
        clip = self._clip(self._streaming.chunk_frames, samples=samples)
        ranks = replace(self._ranks, b=clip.micro_batch_size)
        plan = AttentionPlan.bidirectional(clip.frames)
        return DiTNetwork(config, ranks, self._streaming.sizes(size), clip, plan)

    def _on_block(self) -> DiTNetwork:
        """Return the generator on one frame block behind a full window."""
        window, clip = self._window, self._clip(self._streaming.frame_block)
        # The block is so far on that the window is full of cached frames.
        first = window.block * (1 + window.window // window.block)
        seen = sorted(f for part in window.visible(first) for f in part if f < first)
        plan = AttentionPlan.causal(window, first, clip.frames, seen)
        sizes = self._streaming.sizes(None)
        return DiTNetwork(self._config, self._ranks, sizes, clip, plan, num_times=clip.frames)


def not_estimated(config: RunConfig) -> list[str]:
    """Say what a plan of streaming leaves out, one sentence each."""
    streaming, encoder = config.section(StreamingConfig), config.section(TextEncoderConfig)
    found = [
        f"The text encoder ({encoder.text_encoder}), which lies on the first rank of each replica, "
        "and its work are not estimated."
    ]
    if streaming.encode_first_frame or streaming.given_frames:
        found.append(
            f"The codec ({config.section(CodecConfig).codec}), which lies on the first rank of "
            "each replica, and what it needs to decode and encode frames are not estimated."
        )
    if teacher_sizes(streaming, config.parallel) is not None:
        found.append(
            "The teacher has a layout of its own: its weights are those of its fullest stage, its "
            "work is estimated as if it lay as the other networks."
        )
    found.append("Time, messages and MFU of streaming are not estimated.")
    return found


def report(config: RunConfig, gpu: Gpu | None) -> Report:
    """Return the plan of a checked run in tables; see `TaskCost.report`."""
    ranks, found = Ranks.of(config), streaming_memory(config)
    parts: list[Table | str] = [
        f"plan: {config.parallel.world_size} ranks (tp {ranks.tp} × cp {ranks.cp} × dp "
        f"{ranks.dp}), three networks, {ranks.b} sequence(s) at a time, "
        f"{'bf16' if ranks.half else 'fp32'}",
        network_table(found),
        pass_table(found),
        f"at the peak: {size(found.state.total)} of networks, {size(found.cache)} of cache, "
        f"{size(found.largest.size)} of {found.largest.name}: {size(found.total)}",
    ]
    fits = True
    if gpu is not None:
        kept = Reserve.of(gpu, ranks, found.largest.size).total
        fits = found.total + kept <= gpu.memory
        parts.append(
            f"{'fits' if fits else 'DOES NOT FIT'} on {gpu.name}: with an assumed reserve of "
            f"{size(kept)} it takes {size(found.total + kept)} of {size(gpu.memory)}"
        )
    return [*parts, *not_estimated(config)], fits


def network_table(found: StreamingMemory) -> Table:
    """Return one row for each network."""
    table = Table(
        "network", "parameters", "of a rank", "weights", "gradients", "optimizer", "EMA",
        title="networks on a rank",
    )  # fmt: skip
    for network in found.networks:
        state = network.state
        parts = (state.parameters, state.gradients, state.optimizer, state.average)
        table.add_row(
            network.name,
            f"{network.parameters / 1e6:,.1f} M",
            f"{state.count:,}",
            *(size(part) for part in parts),
        )
    return table


def pass_table(found: StreamingMemory) -> Table:
    """Return one row for each pass."""
    table = Table("pass", "holds at most", title="activations, of one pass at a time")
    for work in found.passes:
        table.add_row(work.name, size(work.size))
    return table


STREAMING_COST = TaskCost(report=report)
