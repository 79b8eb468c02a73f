"""Flags of ``--task streaming``, which tunes a causal network to make long videos.

The method is streaming long-tuning (arXiv:2509.22622).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.config.flags import (
    COUNT,
    FACTOR,
    NORM,
    RATE,
    SIZE,
    Range,
    UsersOwn,
    derived,
    flag,
)
from megatron_ext.video.config.sizes import StreamedSizes, model_of
from megatron_ext.video.config.window import WindowConfig
from megatron_ext.video.networks.lookup import streamed

if TYPE_CHECKING:
    from megatron_ext.config.model import ModelConfig

Role = Literal["generator", "critic", "teacher"]
"""The name of one of the three networks of a streaming run."""
STORED_ROLES = {"generator": "", "critic": "critic."}
"""Networks in a checkpoint of a streaming run, with the prefixes of their parameters' names."""

_frames = partial(flag, unit="latent frames", bounds=SIZE)
_SIZES = streamed().streamed_sizes
_named_size = partial(flag, choices=tuple(_SIZES), if_changed="allow")


@dataclass(frozen=True)
class StreamingConfig(WindowConfig):
    """The flags of generator, critic and teacher of ``--task streaming``, their data and losses.

    `video.streaming.rules` checks that the values of these flags fit together.

    Attributes:
        generator_sizes: sizes of the generator, by name, that replace those of ``generator_size``,
            for a generator from published weights or from a checkpoint whose sizes have no name.
        text_features: width of the text encoder's output, a vector per token that all three
            networks take as input; None until the encoder is known.
        switches: whether prompts come with second prompts, to which sequences switch midway.
        given_frames: number of latent frames at the start of a sequence that are given rather than
            generated: 0, or the frames of the first block.
    """

    generator_size: str = _named_size("tiny", "named size of the generator")
    critic_size: str | None = _named_size(
        None, "named size of the critic; default: as the generator"
    )
    teacher_size: str | None = _named_size(
        None, "named size of the teacher; default: as the generator"
    )
    critic_checkpoint: str | None = flag(None, "weights that the critic starts from")
    teacher_checkpoint: str | None = flag(None, "weights of the teacher")
    teacher_tensor_model_parallel_size: int | None = flag(
        None,
        "share each matrix of the teacher over this many, and its sequences over none; default: "
        "both as the run",
        unit="ranks",
        bounds=SIZE,
        if_changed="allow",
    )
    teacher_pipeline_model_parallel_size: int = flag(
        1,
        "cut the blocks of the teacher into this many; its sequences are then shared over none",
        unit="stages",
        bounds=SIZE,
        if_changed="allow",
    )
    prompts_path: str | None = flag(
        None,
        "file of prompts, one a line, or jsonl with text and perhaps second_text, and image or "
        "video, whose first frames a sequence begins with",
    )
    second_prompts_path: str | None = flag(
        None, "prompts after the switch, in the order of the first; default: no switch"
    )
    negative_prompt: str = flag("", "what the teacher's guidance leads away from")
    latent_channels: int | None = flag(
        None,
        "channels of the latents; default: of the named size of the generator",
        bounds=SIZE,
        if_changed="allow",
    )
    latent_size: tuple[int, int] = flag(
        (60, 104), "height and width of the latents", nargs=2, bounds=SIZE
    )
    chunk_frames: int = _frames(21, "latent frames of the chunks that critic and teacher see")
    min_new_frames: int = _frames(
        18, "least latent frames that a chunk adds, the first chunk excepted"
    )
    max_new_frames: int = _frames(
        18,
        "most latent frames that a chunk adds; above --min-new-frames the number is drawn in "
        "whole blocks",
    )
    sequence_lengths: tuple[int, ...] = _frames(
        (240,), "latent frames at which sequences end at the latest; one length is drawn", nargs="+"
    )
    train_first_chunk: bool = flag(
        True, "train on the first chunk of a sequence too; otherwise it is generated without a loss"
    )
    switch_frames: tuple[int, ...] | None = _frames(
        None, "latent frames where prompts may switch; default: where chunks begin", nargs="+"
    )
    recache_frames: int = _frames(21, "latent frames that are encoded anew at a switch")
    sink_at_switch: str = flag(
        "rebuild",
        "encode the sinks under the new prompt at a switch, or keep them",
        choices=("rebuild", "keep"),
    )
    same_exit_across_blocks: bool = flag(True, "one exit step for all blocks of a chunk")
    last_step_only: bool = flag(False, "blocks always end at the last denoising step")
    two_phase: bool = flag(True, "run exit steps again with gradient, one block at a time")
    encode_first_frame: bool = flag(True, "the codec makes an image of a chunk's first frame")
    decode_history: bool = flag(
        True,
        "with --encode-first-frame, decode all of the previous chunk before its last frame is "
        "encoded",
    )
    generator_interval: int = flag(
        5, "the generator is trained in one of so many", unit="steps", bounds=COUNT
    )
    timestep_shift: float = flag(5.0, "shift of noise levels towards the noise", bounds=FACTOR)
    denoising_steps: tuple[int, ...] = flag(
        (1000, 750, 500, 250),
        "denoising steps of the generator, as timesteps before the shift",
        nargs="+",
        bounds=Range(1, 1000),
    )
    warp_denoising_steps: bool = flag(
        True,
        "apply --timestep-shift to --denoising-steps; otherwise they are the timesteps themselves",
    )
    min_timestep: float = flag(
        20.0,
        "lowest timestep at which critic and teacher look at chunks",
        bounds=Range(0, 1000, above=True),
    )
    max_timestep: float = flag(
        980.0,
        "highest timestep at which critic and teacher look at chunks",
        bounds=Range(0, 1000, above=True),
    )
    ts_schedule: bool = flag(
        False, "look at chunks at no less noise than the denoising step after their exit step"
    )
    ts_schedule_max: bool = flag(False, "look at chunks at no more noise than their exit step")
    context_noise: float = flag(
        0.0,
        "timestep of frames that the generator sees as its past",
        bounds=Range(0, 1000, below=True),
    )
    context_noise_from_table: bool = flag(
        False, "frames of the past get the noise of the table, 0.5% at timestep 0, as in LongLive"
    )
    distribution_loss: str = flag(
        "dmd",
        "how critic and teacher train the generator: by their difference (dmd), or by the gradient "
        "of score identity distillation through both (sid)",
        choices=("dmd", "sid"),
    )
    sid_alpha: float = flag(
        1.0, "weight of the squared difference that sid takes off", bounds=Range(0, 1000)
    )
    denoising_loss: str = flag(
        "flow",
        "quantity that the critic is to predict of chunks",
        choices=("flow", "x0", "noise", "v"),
    )
    guidance_scale: float = flag(
        4.0, "strength s of the teacher's guidance, u + s * (c - u)", bounds=Range(0, 1000)
    )
    critic_lr: float | None = flag(
        None,
        "learning rate of the critic; default: --lr / 5",
        bounds=Range(0, RATE.high, above=True),
    )
    critic_clip_grad: float = flag(
        10.0, "largest gradient norm of the critic, 0 for no clipping", bounds=NORM
    )
    generator_sizes: dict[str, int] | None = derived(None)
    text_features: int | None = derived(None)
    switches: bool = derived(False)
    given_frames: int = derived(0)

    def __post_init__(self) -> None:
        for name in ("latent_size", "sequence_lengths", "switch_frames", "denoising_steps"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))

    @property
    def starts_others(self) -> bool:
        """Tell whether a checkpoint is given for the initial weights of critic or teacher."""
        return self.critic_checkpoint is not None or self.teacher_checkpoint is not None

    def can_grow(self, current: int, length: int) -> bool:
        """Tell whether a sequence of ``current`` frames can get another clip.

        It can if ``min_new_frames`` more frames do not make it longer than ``length`` frames.
        """
        return current + self.min_new_frames <= length

    def sizes(self, role: Role = "generator") -> StreamedSizes:
        """Return the sizes of the network ``role``.

        By default critic and teacher have the generator's size. All three networks have the same
        number of latent channels, that of the generator or of ``--latent-channels``.
        """
        changes: dict[str, Any] = self.generator_sizes or {}
        generator = dataclasses.replace(_SIZES[self.generator_size], **changes)
        name = None if role == "generator" else getattr(self, f"{role}_size")
        own = generator if name is None else _SIZES[name]
        channels = self.latent_channels or generator.channels
        width = self.text_features or own.text_width
        sizes: StreamedSizes = dataclasses.replace(own, channels=channels, text_width=width)
        return sizes

    def described(self, model: ModelConfig, role: Role = "generator") -> ModelConfig:
        """Return the flags ``model`` with the shape flags set to the sizes of network ``role``."""
        return model_of(self.sizes(role).transformer_fields(), model)


DEFAULT_FPS = 16
"""Default of ``--sample-fps`` in ``--task streaming``, the frame rate of Wan 2.1 and LongLive."""


@dataclass(frozen=True)
class StreamingSampleConfig(UsersOwn):
    """The flags that set length and prompt switches of videos sampled in ``--task streaming``.

    Attributes:
        only_samples: whether this is a run of tools/sample_video.py, which does not train.
    """

    sample_latent_frames: int | None = _frames(
        None, "latent frames of sampled videos; default: the longest of --sequence-lengths"
    )
    sample_second_texts: list[str] | None = flag(
        None, "captions after the switch, one for each of --sample-texts", nargs="+"
    )
    sample_switch_frame: int | None = flag(
        None,
        "latent frame where --sample-second-texts begin; default: in the middle",
        unit="latent frame",
        bounds=SIZE,
    )
    only_samples: bool = derived(False)

    def num_frames(self, streaming: StreamingConfig) -> int:
        """Return the number of latent frames of each video.

        By default it is the length of the longest training sequence, rounded down to whole blocks.
        """
        blocks = streaming.blocks
        longest = max(streaming.sequence_lengths, default=blocks.block)
        return self.sample_latent_frames or blocks.at_or_before(longest)

    def switch_frame(self, streaming: StreamingConfig) -> int:
        """Return the index of the latent frame from which on second captions apply.

        By default it is the start of the first block that begins in the second half of the video.
        """
        middle = streaming.blocks.at_or_after(-(-self.num_frames(streaming) // 2))
        return middle if self.sample_switch_frame is None else self.sample_switch_frame
