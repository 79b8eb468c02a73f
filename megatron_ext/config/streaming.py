"""Flags of streaming long-tuning: its networks, sequences, noise levels and losses."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ext.config.flags import flag
from megatron_ext.config.video_dit import WINDOW, described_by
from megatron_ext.config.video_dit_sizes import SIZES, VideoDiTSizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.config.model import ModelConfig

_FRAMES = "latent frames"
_NETWORKS = ("generator_size", "critic_size", "teacher_size", "latent_channels", *WINDOW)
"""Flags that decide the three networks, besides codec, text encoder and adapters."""


@dataclass(frozen=True)
class StreamingConfig:
    """The three networks of ``--task streaming``, and what they are trained on.

    `streaming.options.StreamingOptions`, `losses.noise_schedule.NoiseConfig` and
    `losses.dmd.DMDConfig` explain the fields that they share, and check them.

    Attributes:
        text_features: width of the text encoder's rows, which decides that of the networks.
        switches: there are prompts after the switch.
        given_frames: that sequences begin with, a block or none.
    """

    generator_size: str = flag("tiny", "named size of the generator", choices=tuple(SIZES))
    critic_size: str | None = flag(
        None, "of the critic; default: as the generator", choices=tuple(SIZES)
    )
    teacher_size: str | None = flag(
        None, "of the teacher; default: as the generator", choices=tuple(SIZES)
    )
    critic_checkpoint: str | None = flag(None, "weights that the critic starts from")
    teacher_checkpoint: str | None = flag(None, "weights of the teacher")
    teacher_tensor_model_parallel_size: int | None = flag(
        None,
        "share each matrix of the teacher over this many, and its sequences over none; default: "
        "both as the run",
        unit="ranks",
    )
    teacher_pipeline_model_parallel_size: int = flag(
        1,
        "cut the blocks of the teacher into this many; its sequences are then shared over none",
        unit="stages",
    )
    zero_head: bool = flag(True, "the last layers of new networks start at zero")
    recompute_blocks: int = flag(0, "first blocks that keep only their inputs")
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
        None, "channels of the latents; default: of the named size of the generator"
    )
    latent_size: tuple[int, int] = flag((60, 104), "height and width of the latents", nargs=2)
    frame_block: int = flag(3, "frames that are denoised together", unit=_FRAMES)
    window_frames: int = flag(12, "frames that a frame sees, sinks included", unit=_FRAMES)
    sink_frames: int = flag(3, "first frames of a video, which are always seen", unit=_FRAMES)
    chunk_frames: int = flag(21, "of the chunks that critic and teacher see", unit=_FRAMES)
    min_new_frames: int = flag(18, "of a chunk but the first", unit=_FRAMES)
    max_new_frames: int = flag(18, "of a chunk but the first", unit=_FRAMES)
    sequence_lengths: tuple[int, ...] = flag(
        (240,), "at which sequences end at the latest; one is drawn", nargs="+", unit=_FRAMES
    )
    train_first_chunk: bool = flag(True, "else it is generated without a loss")
    switch_frames: tuple[int, ...] | None = flag(
        None, "where prompts may switch; default: where chunks begin", nargs="+", unit=_FRAMES
    )
    recache_frames: int = flag(21, "that are encoded anew at a switch", unit=_FRAMES)
    sink_at_switch: str = flag(
        "rebuild", "sinks under the new prompt, or as they are", choices=("rebuild", "keep")
    )
    same_exit_across_blocks: bool = flag(True, "one exit step for all blocks of a chunk")
    last_step_only: bool = flag(False, "blocks always end at the last denoising step")
    two_phase: bool = flag(True, "run exit steps again with gradient, one block at a time")
    encode_first_frame: bool = flag(True, "the codec makes an image of a chunk's first frame")
    decode_history: bool = flag(True, "the codec then decodes all of the previous chunk")
    generator_interval: int = flag(5, "the generator is trained in one of so many", unit="steps")
    timestep_shift: float = flag(5.0, "shift of noise levels towards the noise")
    denoising_steps: tuple[int, ...] = flag(
        (1000, 750, 500, 250), "of the generator, before the shift", nargs="+"
    )
    warp_denoising_steps: bool = flag(True, "else the denoising steps are timesteps")
    min_timestep: float = flag(20.0, "at which critic and teacher look at chunks")
    max_timestep: float = flag(980.0, "at which critic and teacher look at chunks")
    context_noise: float = flag(0.0, "timestep of frames that the generator sees as its past")
    context_noise_from_table: bool = flag(
        False, "frames of the past get the noise of the table, 0.5% at timestep 0, as in LongLive"
    )
    guidance_scale: float = flag(4.0, "of the teacher, u + w * (c - u)")
    critic_lr: float | None = flag(None, "learning rate of the critic; default: --lr / 5")
    critic_clip_grad: float = flag(10.0, "largest gradient norm of the critic, 0 for no clipping")
    text_features: int | None = None
    switches: bool = False
    given_frames: int = 0

    def __post_init__(self) -> None:
        for name in ("latent_size", "sequence_lengths", "switch_frames", "denoising_steps"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))

    @property
    def starts_others(self) -> bool:
        """Critic or teacher take the weights of a checkpoint."""
        return self.critic_checkpoint is not None or self.teacher_checkpoint is not None

    def sizes(self, size: str | None) -> VideoDiTSizes:
        """Sizes of a network, None as the generator's."""
        named = SIZES[size or self.generator_size]
        width = self.text_features or named.text_width
        channels = self.latent_channels
        if channels is None:
            channels = SIZES[self.generator_size].channels
        return dataclasses.replace(named, channels=channels, text_width=width)

    def described(self, model: ModelConfig, size: str | None = None) -> ModelConfig:
        """The model's section for one of the networks, None for the generator."""
        return described_by(self.sizes(size), model)

    def errors(self) -> list[str]:
        """What cannot be run, one sentence each."""
        found = [
            f"`--{field.name.replace('_', '-')}` ({value}) must be a finite number; leave it out "
            "to get the default."
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), float) and not math.isfinite(value)
        ]
        if self.prompts_path is None:
            found.append("`--prompts-path` is missing; give a file with one prompt a line.")
        if self.critic_lr is not None and self.critic_lr <= 0:
            found.append(f"`--critic-lr` ({self.critic_lr}) must be above 0; 2e-6 is LongLive's.")
        if self.critic_clip_grad < 0:
            found.append(
                f"`--critic-clip-grad` ({self.critic_clip_grad}) must be 0 or more; 0 means none."
            )
        if self.recompute_blocks < 0:
            found.append(
                f"`--recompute-blocks` ({self.recompute_blocks}) must be 0 or more; 0 recomputes "
                "nothing."
            )
        if self.encode_first_frame and self.chunk_frames == 1:
            found.append(
                "`--chunk-frames` (1) leaves no frame to train, since the codec makes a chunk's "
                "first; give longer chunks, or `--no-encode-first-frame`."
            )
        return found + self._ignored()

    def _ignored(self) -> list[str]:
        """Flags that others leave without effect."""
        rules = (
            ("no_decode_history", not self.decode_history, "no_encode_first_frame",
             not self.encode_first_frame),
            ("no_same_exit_across_blocks", not self.same_exit_across_blocks, "last_step_only",
             self.last_step_only),
            ("negative_prompt", self.negative_prompt != "", "guidance_scale 1",
             self.guidance_scale == 1),
        )  # fmt: skip
        return [
            f"`--{name.replace('_', '-')}` has no effect with `--{other.replace('_', '-')}`; leave "
            "one of them out."
            for name, given, other, works in rules
            if given and works
        ]


def stored_streaming(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """What of a stored configuration describes the networks, by section; None of another task."""
    if stored.get("video", {}).get("task") != "streaming":
        return None
    networks = {name: stored["streaming"][name] for name in _NETWORKS}
    others = {name: dict(stored[name]) for name in ("codec", "text_encoder", "lora")}
    return {"streaming": networks, **others}
