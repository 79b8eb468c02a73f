"""Flags of a video run: its data, sampled clips, conditions, and flow matching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import (
    BELOW_ONE,
    COUNT,
    FACTOR,
    NATURAL,
    SHARE,
    SIZE,
    WEIGHT,
    Range,
    UsersOwn,
    check_ranges,
    derived,
    flag,
    range_errors,
)
from megatron_ext.errors import ConfigError, FlagError, exclusive
from megatron_ext.video.networks import NETWORKS


@dataclass(frozen=True)
class VideoConfig:
    """The flags of task, network and data of pretrain_video.py.

    Attributes:
        video: always True; it marks a stored configuration as one of a video run.
    """

    task: str = flag(
        "flow",
        "flow matching on clips, or streaming long-tuning on prompts",
        choices=("flow", "streaming"),
        if_changed="refuse_to_resume",
    )
    video_model: str = flag(
        next(iter(NETWORKS)),
        "network that flow matching trains; streaming starts from the video DiTs",
        choices=tuple(NETWORKS),
        if_changed="allow",
    )
    video_data_path: list[str] | None = flag(
        None,
        "folder that tools/preprocess_video.py wrote, with --online-encoding a list of clips; or "
        "several, each as often as it is named, or weights and folders in turn",
        nargs="+",
    )
    online_encoding: bool = flag(False, "decode and encode clips in the data loader")
    video_valid_path: list[str] | None = flag(
        None,
        "folders or lists of validation clips, as --video-data-path; each clip counts once; "
        "default: none",
        nargs="+",
    )
    video_buckets: str | None = flag(
        None,
        'JSON {resolution: {frames: [probability, micro-batch size]}}, such as {"256px": {"17": '
        "[1.0, 4]}}; default: as the data was preprocessed",
    )
    mixed_buckets: bool | None = flag(
        None,
        "clips of different buckets in one step; default: if a bucket has too few clips for a step "
        "of its own, and would never be trained",
    )
    dry_run_shape: str | None = flag(
        None,
        "price clips of this height, width and number of frames, such as 768x768x129, with "
        "--dry-run; no data is needed, and the flags of codec and text encoder give the widths",
        from_checkpoint=False,
    )
    video: bool = derived(True)

    def __post_init__(self) -> None:
        for name in ("video_data_path", "video_valid_path"):
            path = getattr(self, name)
            if isinstance(path, str):  # as older checkpoints have it
                object.__setattr__(self, name, [path])

    @property
    def streams(self) -> bool:
        """Return whether ``--task`` is streaming, which trains on prompts instead of clips."""
        return self.task == "streaming"

    def shape_to_price(self) -> tuple[int, int, int]:
        """Return (height, width, number of frames) of ``--dry-run-shape``, the clip to be costed.

        ConfigError is raised if these are not three whole numbers above 0.
        """
        parts = str(self.dry_run_shape).lower().split("x")
        if len(parts) != 3 or not all(x.isascii() and x.isdigit() and int(x) for x in parts):
            raise ConfigError.about(
                "--dry-run-shape",
                self.dry_run_shape,
                "must be height, width and number of frames, such as 768x768x129",
                "correct it",
            )
        height, width, frames = map(int, parts)
        return height, width, frames

    def own_errors(self) -> list[FlagError]:
        """Return a list of one error for the first fault in these flags; [] if there is none.

        A fault is a missing flag, or a validation set that is given twice.
        """
        if self.dry_run_shape is not None:
            return []
        if self.video_data_path is None:
            return [
                FlagError(
                    "--video-data-path",
                    None,
                    "is missing",
                    "give the folder that tools/preprocess_video.py wrote",
                )
            ]
        valid = self.video_valid_path or []
        if len(set(valid)) < len(valid):
            return [
                FlagError(
                    "--video-valid-path",
                    " ".join(valid),
                    "names a set twice, but each clip counts once in validation",
                    "name it once",
                )
            ]
        if self.online_encoding and self.video_buckets is None:
            return [
                FlagError(
                    "--online-encoding",
                    None,
                    "needs `--video-buckets`",
                    'give the resolutions and lengths, such as {"256px": {"17": [1.0, 4]}}',
                )
            ]
        return []


SCHEDULERS = ("euler", "unipc", "dpm++")
"""The values of --sample-scheduler."""


@dataclass(frozen=True)
class SampleConfig(UsersOwn):
    """The flags of sampling clips from captions, during training and by tools/sample_video.py.

    Attributes:
        sample_scheduler_folder: folder of the scheduler beside the weights of ``--load-weights``.
    """

    sample_interval: int | None = flag(
        None, "sample clips after each multiple of this many steps", COUNT, "steps"
    )
    sample_prompts: str | None = flag(
        None,
        "file of captions: text, one a line, or jsonl with text, image or video, mode, "
        "negative_prompt, seed, steps and size; with --task streaming text and switches, "
        "[{frame, text}]",
    )
    sample_texts: list[str] | None = flag(
        None, "captions to sample, in the place of --sample-prompts", nargs="+"
    )
    sample_image: list[str] | None = flag(
        None,
        "images that clips begin with: one for all --sample-texts, or one for each; with --task "
        "streaming an image fills the first frame block, which is one frame with "
        "--independent-first-frame",
        nargs="+",
    )
    sample_video: list[str] | None = flag(
        None,
        "videos or folders of images whose first frames clips begin with, likewise; with --task "
        "streaming they give the first frame block alone, a single frame with "
        "--independent-first-frame",
        nargs="+",
    )
    sample_negative_prompt: str | None = flag(
        None, "what the guidance leads away from, in the place of the empty caption"
    )
    sample_dir: str | None = flag(None, "folder of the clips; default: samples in --save")
    sample_steps: int = flag(50, "steps from noise to data when clips are sampled", SIZE, "steps")
    sample_scheduler: str | None = flag(
        None,
        "method of the steps: euler, or unipc or dpm++ as diffusers has them; default: the "
        "scheduler of the folder of --load-weights, else euler",
        choices=SCHEDULERS,
    )
    sample_scheduler_folder: str | None = derived(None)
    sample_shift: float | None = flag(
        None,
        "factor that moves the times of the steps towards the noise; default: that of the folder's "
        "scheduler, else that of training",
        FACTOR,
    )
    sample_guidance_range: tuple[float, float] | None = flag(
        None,
        "times between which there is guidance, from 0 (data) to 1 (noise), the lower first; "
        "default: all",
        Range(0, 1),
        nargs=2,
    )
    sample_text_scale: float = flag(7.5, "guidance by the caption; 1 is none", Range(0, 1000))
    sample_low_noise_text_scale: float | None = flag(
        None,
        "guidance by the caption in the steps of --sample-low-noise-expert; default: "
        "--sample-text-scale",
        Range(0, 1000),
    )
    sample_image_scale: float = flag(3.0, "guidance by the references; 1 is none", Range(0, 1000))
    sample_oscillation: bool = flag(True, "rest the guidance in odd steps from the tenth on")
    sample_scale_by_frame: bool = flag(
        True, "let the guidance by the references rise over the frames"
    )
    sample_size: tuple[int, int] | None = flag(
        None,
        "height and width of sampled clips; default: the largest bucket of the data",
        SIZE,
        "pixels",
        nargs=2,
    )
    sample_frames: int | None = flag(
        None, "frames of sampled clips; default: the largest bucket of the data", SIZE, "frames"
    )
    sample_fps: float | None = flag(
        None,
        "frames per second; default: of the data, 16 with --task streaming",
        Range(0, 1000, above=True),
    )
    sample_seed: int = flag(42, "seed of the noise that sampling starts from", NATURAL)
    sample_batch_size: int = flag(4, "clips that a replica samples at once", SIZE, "clips")
    sample_ema: bool = flag(True, "sample with the averaged weights, where they are kept")
    sample_low_noise_expert: str | None = flag(
        None,
        "weights that take over at --sample-boundary: the --save folder of a run, or published "
        "weights; default: transformer_2 in the folder of --load-weights, if it is there",
    )
    sample_boundary: float | None = flag(
        None,
        "time from 0 to 1 below which the low-noise expert takes the steps, such as 0.875; "
        "default: boundary_ratio in model_index.json in the folder of --load-weights",
        Range(0, 1, above=True),
    )
    sample_offload: bool = flag(
        False,
        "keep one model at a time: the text encoder is freed before the network is built, the "
        "network before clips are decoded (tools/sample_video.py)",
    )

    def own_errors(self, save: str | None) -> list[FlagError]:
        """Return an error for each fault in the sampling flags.

        ``save``, the value of ``--save``, is where clips go if ``--sample-dir`` is not given.
        """
        errors = []
        if self.sample_prompts is not None and self.sample_texts is not None:
            errors.append(
                exclusive("--sample-prompts", "--sample-texts", remedy="give a file or captions")
            )
        given = {"--sample-image": self.sample_image, "--sample-video": self.sample_video}
        starts = {name: paths for name, paths in given.items() if paths is not None}
        if len(starts) > 1:
            errors.append(
                exclusive(
                    "--sample-image",
                    "--sample-video",
                    remedy="give one, or rows with `image` or `video` in a jsonl as "
                    "`--sample-prompts`",
                )
            )
        for name, paths in starts.items():
            if self.sample_texts is None:
                errors.append(
                    FlagError(
                        name,
                        None,
                        "needs `--sample-texts`",
                        "rows of a jsonl as `--sample-prompts` have "
                        f"`{name.removeprefix('--sample-')}`",
                    )
                )
            elif len(paths) not in (1, len(self.sample_texts)):
                errors.append(
                    FlagError(
                        name,
                        None,
                        f"has {len(paths)} paths, but must have 1 or {len(self.sample_texts)}, "
                        "one for each of `--sample-texts`",
                    )
                )
        errors += self._guidance_errors() + self._expert_errors()
        if self.sample_interval is None:
            return errors
        if not self.sample_prompts and not self.sample_texts:
            errors.append(
                FlagError(
                    "--sample-interval",
                    self.sample_interval,
                    "needs captions",
                    "give `--sample-prompts` with a file of them, or `--sample-texts`",
                )
            )
        if self.sample_dir is None and save is None:
            errors.append(
                FlagError(
                    "--sample-interval",
                    self.sample_interval,
                    "needs a folder for the clips",
                    "give `--sample-dir` or `--save`",
                )
            )
        return errors

    def _guidance_errors(self) -> list[FlagError]:
        """Return an error for each flag of guidance that is out of order or has no effect."""
        errors = []
        low, high = self.sample_guidance_range or (0.0, 1.0)
        if low >= high:
            errors.append(
                FlagError(
                    "--sample-guidance-range",
                    f"{low:g} {high:g}",
                    "must be two times, the lower first",
                    "turn them round, or give the flag no such range",
                )
            )
        return errors

    def _expert_errors(self) -> list[FlagError]:
        """Return an error for each flag of the low-noise expert that lacks another one."""
        expert = self.sample_low_noise_expert
        errors = []
        if expert is None:
            alone = {
                "--sample-boundary": self.sample_boundary,
                "--sample-low-noise-text-scale": self.sample_low_noise_text_scale,
            }
            errors += [
                FlagError(
                    name,
                    f"{value:g}",
                    "has an effect only with two networks",
                    "give the second one as `--sample-low-noise-expert`, or leave this out",
                )
                for name, value in alone.items()
                if value is not None
            ]
        elif self.sample_boundary is None:
            errors.append(
                FlagError(
                    "--sample-low-noise-expert",
                    expert,
                    "needs `--sample-boundary`, the time at which it takes over",
                    "give it; Wan 2.2 has 0.875 for text to video and 0.9 for image to video",
                )
            )
        if expert is not None and self.sample_interval is not None:
            errors.append(
                FlagError(
                    "--sample-low-noise-expert",
                    expert,
                    "has an effect only in tools/sample_video.py: a run trains one network",
                    "leave it out, and sample both afterwards",
                )
            )
        return errors


MODES = tuple(
    (
        "t2v i2v_head i2v_tail i2v_loop v2v_head v2v_tail v2v_head_easy v2v_tail_easy i2v_middle"
    ).split()
)
"""The names of the condition modes (`ConditionConfig`); a tensor holds a mode as its index here."""

REFERENCE_LOSSES = ("masked", "all", "trimmed")


@dataclass(frozen=True)
class ConditionConfig:
    """The flags for condition modes: how often each is drawn, and the loss on reference frames.

    A condition mode says which frames of a clip the model is given: none (t2v), one frame at one or
    both ends or in the middle (i2v), or several frames at one end (v2v). The default lengths of
    v2v, 9 and 17 latent frames, are 33 and 65 frames of a VAE with temporal stride 4. ConfigError
    is raised for a value out of range, for weights that are all 0, and for an unknown
    ``reference_loss``.
    """

    SECTION: ClassVar[str] = "conditions"

    t2v_weight: float = flag(1.0, "relative frequency of clips without references", WEIGHT)
    i2v_head_weight: float = flag(
        5.0, "relative frequency of clips whose first latent frame is given", WEIGHT
    )
    i2v_tail_weight: float = flag(
        1.0, "relative frequency of clips whose last latent frame is given", WEIGHT
    )
    i2v_loop_weight: float = flag(
        1.0, "relative frequency of clips whose first and last latent frame are given", WEIGHT
    )
    v2v_head_weight: float = flag(
        0.0, "relative frequency of clips whose first --v2v-frames are given", WEIGHT
    )
    v2v_tail_weight: float = flag(
        0.0, "relative frequency of clips whose last --v2v-frames are given", WEIGHT
    )
    v2v_head_easy_weight: float = flag(
        0.0, "relative frequency of clips whose first --v2v-easy-frames are given", WEIGHT
    )
    v2v_tail_easy_weight: float = flag(
        0.0, "relative frequency of clips whose last --v2v-easy-frames are given", WEIGHT
    )
    i2v_middle_weight: float = flag(
        0.0, "relative frequency of clips whose middle latent frame is given", WEIGHT
    )
    v2v_frames: int = flag(
        9, "latent frames given in the v2v condition modes", COUNT, "latent frames"
    )
    v2v_easy_frames: int = flag(
        17, "latent frames given in the easy v2v condition modes", COUNT, "latent frames"
    )
    reference_loss: str = flag(
        "masked",
        "masked: no reference frame counts in the loss; all: they count as any other; trimmed: "
        "only a first and a last frame are left out, in clips without references in between",
        choices=REFERENCE_LOSSES,
    )

    def __post_init__(self) -> None:
        errors = list(range_errors(self).values())
        if not errors and not self.modes:
            errors.append(
                FlagError(
                    "The weights of all condition modes",
                    None,
                    "are 0, but one must be drawn",
                    "give `--t2v-weight 1` to train without references",
                )
            )
        if self.reference_loss not in REFERENCE_LOSSES:
            errors.append(
                FlagError(
                    "--reference-loss",
                    self.reference_loss,
                    f"must be one of {', '.join(REFERENCE_LOSSES)}",
                    "choose masked to train on new frames only",
                )
            )
        if errors:
            raise ConfigError(errors)

    def weight(self, mode: str) -> float:
        """Return the relative frequency of a condition mode, such as ``i2v_head``."""
        return float(getattr(self, f"{mode}_weight"))

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the modes with a weight above 0."""
        return tuple(mode for mode in MODES if self.weight(mode) > 0)


@dataclass(frozen=True)
class TextDropoutConfig:
    """The flags that say how often training replaces a clip's text by the empty caption.

    Token embeddings and pooled embedding are replaced independently, each for 32% of the clips by
    default, so both for 10%. A network may have other defaults. A value outside [0, 1] raises
    ConfigError.
    """

    text_dropout: float = flag(
        math.sqrt(0.1),
        "probability that the text embeddings of a clip are the empty caption's",
        SHARE,
    )
    pooled_dropout: float = flag(
        math.sqrt(0.1),
        "probability that the pooled text embedding of a clip is the empty caption's",
        SHARE,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


NORMALIZATIONS = ("per_token", "per_sample")


@dataclass(frozen=True)
class FlowConfig:
    """The flags of rectified flow: training times, their shift, and the weights of the loss.

    Training times are ``shift(sigmoid(timestep_mean + timestep_std * u))``, where u is standard
    normal, and ``shift`` is `video.loss.shift`. The factor that ``shift`` takes is linear in the
    number of tokens of a latent frame: ``shift_base`` at ``shift_base_tokens``, ``shift_max`` at
    ``shift_max_tokens``, and on the same line beyond. With ``shift_by_length`` this factor is
    multiplied by the square root of the number of latent frames. ``flow_shift``, if given, is the
    factor for all clips instead. With ``timestep_range``, times outside of it are never drawn, and
    those inside keep their relative frequencies. A value out of range raises ConfigError.
    """

    sigma_min: float = flag(1e-5, "noise that is left at t = 0", BELOW_ONE)
    timestep_mean: float = flag(
        0.0, "mean of the logit of a training time before the shift", Range(-100, 100)
    )
    timestep_std: float = flag(
        1.0,
        "standard deviation of the logit of a training time before the shift",
        Range(0, 100, above=True),
    )
    shift_base_tokens: int = flag(
        256, "tokens of a latent frame at which the shift is the base", NATURAL
    )
    shift_base: float = flag(1.0, "shift of times towards noise for small frames", FACTOR)
    shift_max_tokens: int = flag(
        4096, "tokens of a latent frame at which the shift is the maximum", COUNT
    )
    shift_max: float = flag(3.0, "shift of times towards noise for large frames", FACTOR)
    shift_by_length: bool = flag(
        True, "multiply the shift by the square root of the number of latent frames"
    )
    flow_shift: float | None = flag(
        None,
        "one shift of times for clips of any size, instead of --shift-base and --shift-max",
        FACTOR,
    )
    timestep_range: tuple[float, float] | None = flag(
        None,
        "lowest and highest training time, from 0 for data to 1 for noise, after the shift: train "
        "one of several experts, such as 0.875 1 and 0 0.875 for Wan 2.2 T2V-A14B; default: 0 1",
        Range(0, 1),
        nargs=2,
    )
    loss_normalization: str = flag(
        "per_token", "give every token the same weight, or every clip", choices=NORMALIZATIONS
    )

    def __post_init__(self) -> None:
        if self.timestep_range is not None:
            object.__setattr__(self, "timestep_range", tuple(self.timestep_range))
        check_ranges(self)
        tokens = self.shift_max_tokens - self.shift_base_tokens
        rise = self.shift_max - self.shift_base
        wrong = []
        remedy = "leave it out to get the default"
        # A frame without tokens has the smallest shift, which must be positive as well.
        if tokens <= 0 or rise < 0 or self.shift_base * tokens <= self.shift_base_tokens * rise:
            rule = "must be such that the shift rises and is above 0 for any tokens"
            wrong.append(FlagError("--shift-max", self.shift_max, rule, remedy))
        if self.loss_normalization not in NORMALIZATIONS:
            rule = f"must be one of {', '.join(NORMALIZATIONS)}"
            wrong.append(FlagError("--loss-normalization", self.loss_normalization, rule, remedy))
        if self.timestep_range is not None and self.timestep_range[0] >= self.timestep_range[1]:
            low, high = self.timestep_range
            rule = "must be the lowest, then a higher time"
            wrong.append(
                FlagError("--timestep-range", f"{low:g} {high:g}", rule, "turn them round")
            )
        if wrong:
            raise ConfigError(wrong)
