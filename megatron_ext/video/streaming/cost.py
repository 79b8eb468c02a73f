"""Streaming long-tuning as a plan sees it: three networks, the cache, and the passes of a step.

Its report takes the place of the usual one, see `STREAMING_COST`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

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
    generator, critic = _trained(config, "generator"), _trained(config, "critic")
    return StreamingMemory(
        (generator, critic, _teacher(config)), cache_bytes(config), tuple(_passes(config))
    )


def _whole(config: RunConfig, size: str | None) -> Stage:
    """Return one stage that holds all blocks of a network."""
    return Stage.of_layers(range(config.section(StreamingConfig).sizes(size).num_blocks), 0, 1)


def _trained(config: RunConfig, name: str) -> NetworkMemory:
    """Return the generator, which is averaged too, or the critic."""
    size = config.section(StreamingConfig).critic_size if name == "critic" else None
    ranks, sizes = Ranks.of(config), config.section(StreamingConfig).sizes(size)
    weights = tuple(dit_weights(config.lora, sizes, ranks.tp, _whole(config, size)))
    run = config
    if name == "critic":
        run = dataclasses.replace(config, ema=dataclasses.replace(config.ema, ema_decay=None))
    return NetworkMemory(name, weights, rank_state(run, ranks, 0, [weights]), distinct([weights]))


def _teacher(config: RunConfig) -> NetworkMemory:
    """Return the teacher: frozen, without adapters, perhaps on ranks of its own."""
    streaming, parallel = config.section(StreamingConfig), config.parallel
    own = teacher_sizes(streaming, parallel)
    own = own or TeacherSizes(parallel.tensor_model_parallel_size, 1)
    sizes = streaming.sizes(streaming.teacher_size)
    blocks = stage_blocks(sizes.num_blocks, own.pipeline)
    stages = [Stage.of_layers(held, i, len(blocks), rank=i) for i, held in enumerate(blocks)]
    chunks = [dit_weights(LoraConfig(), sizes, own.tensor, stage) for stage in stages]
    fullest = max(chunks, key=lambda chunk: sum(weight.numel for weight in chunk))
    frozen = tuple(dataclasses.replace(weight, frozen=True) for weight in fullest)
    count, width = sum(weight.numel for weight in frozen), Ranks.of(config).width
    state = State(count=count, parameters=count * width, frozen=count * width)
    return NetworkMemory("teacher", frozen, state, distinct(chunks))


def _window(config: RunConfig) -> FrameWindow:
    streaming = config.section(StreamingConfig)
    return FrameWindow(streaming.frame_block, streaming.window_frames, streaming.sink_frames)


def cache_bytes(config: RunConfig) -> int:
    """Return keys and values of the frames that a step needs, and of one text, in all blocks."""
    streaming, ranks = config.section(StreamingConfig), Ranks.of(config)
    sizes, clip = streaming.sizes(None), _clip(config, "", 1)
    frames = _window(config).capacity_for(streaming.chunk_frames)
    rows = frames * clip.num_image // ranks.cp + clip.num_text
    both = 2 * sizes.num_blocks * rows * ranks.b * sizes.hidden_size // ranks.tp
    # The memo holds a copy of the text itself in fp32 too.
    return both * ranks.width + clip.num_text * ranks.b * sizes.text_width * FP32


def _clip(config: RunConfig, name: str, frames: int, *, samples: int = 1) -> Clip:
    """Return latent frames as a clip."""
    height, width = config.section(StreamingConfig).latent_size
    patch = config.section(StreamingConfig).sizes(None).patch_size
    micro = (config.training.micro_batch_size or 1) * samples
    length = config.section(TextEncoderConfig).text_length
    return Clip(name, frames, height // patch, width // patch, length, micro)


def _network(config: RunConfig, size: str | None, clip: Clip) -> DiTNetwork:
    """Return critic or teacher on a clip: all frames see each other, and have one timestep."""
    ranks = dataclasses.replace(Ranks.of(config), b=clip.micro_batch_size)
    plan = AttentionPlan.bidirectional(clip.frames)
    return DiTNetwork(config, ranks, config.section(StreamingConfig).sizes(size), clip, plan)


def _block(config: RunConfig) -> DiTNetwork:
    """Return the generator on one frame block behind a full window."""
    window, clip = (
        _window(config),
        _clip(config, "block", config.section(StreamingConfig).frame_block),
    )
    # The block is so far on that the window is full of cached frames.
    first = window.block * (1 + window.window // window.block)
    seen = sorted(f for part in window.visible(first) for f in part if f < first)
    plan = AttentionPlan.causal(window, first, clip.frames, seen)
    ranks = Ranks.of(config)
    sizes = config.section(StreamingConfig).sizes(None)
    return DiTNetwork(config, ranks, sizes, clip, plan, num_times=clip.frames)


def _passes(config: RunConfig) -> list[Pass]:
    """Return the passes of a step that trains both networks."""
    streaming = config.section(StreamingConfig)
    chunk = _clip(config, "chunk", streaming.chunk_frames)
    critic = _network(config, streaming.critic_size, chunk)
    block, found = _block(config), list[Pass]()
    blocks = streaming.chunk_frames // streaming.frame_block
    together = 1 if streaming.two_phase else blocks
    for name, network, given, count in (
        ("critic, forward and backward on a chunk", critic, streaming.critic_size, 1),
        (f"generator, forward and backward on {together} frame block(s)", block, None, together),
    ):
        cost = network.activations(_whole(config, given))
        held = cost.kept * count + cost.transient
        if count > 1:
            # A weight's gradient waits until those of all blocks have been summed.
            held += sum(x.numel for x in network.weights(_whole(config, given)) if not x.frozen) * (
                network.sizes.width
            )
        found.append(Pass(name, held))
    guided = 2 if streaming.guidance_scale != 1 else 1
    seen = _network(
        dataclasses.replace(config, lora=LoraConfig()),
        streaming.teacher_size,
        _clip(config, "teacher", streaming.chunk_frames, samples=guided),
    )
    found.append(Pass("teacher, forward on a chunk", seen.without_gradient()))
    if streaming.distribution_loss == "sid":
        costs = [
            critic.activations(_whole(config, streaming.critic_size)),
            seen.activations(_whole(config, streaming.teacher_size)),
        ]
        held = sum(cost.kept for cost in costs) + max(cost.transient for cost in costs)
        found.append(Pass("critic and teacher, forward and backward to a chunk", held))
    found.append(Pass("generator, forward on a frame block", block.without_gradient()))
    return found


def not_estimated(config: RunConfig) -> list[str]:
    """Say what a plan of streaming leaves out, one sentence each."""
    encoder, streaming = (
        config.section(TextEncoderConfig).text_encoder,
        config.section(StreamingConfig),
    )
    found = [
        f"The text encoder ({encoder}), which lies on the first rank of each replica, and its work "
        "are not estimated."
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
