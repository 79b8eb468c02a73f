"""Flags of a video run: its data, its buckets, and the clips that it samples on the way."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import flag
from megatron_ext.config.ranges import COUNT, NATURAL, SIZE, Range
from megatron_ext.config.video_dit import CAUSAL, VIDEO_MODELS


@dataclass(frozen=True)
class VideoConfig:
    """The data of pretrain_video.py.

    Attributes:
        video: this is a run of pretrain_video.py.
    """

    task: str = flag(
        "flow",
        "flow matching on clips, or streaming long-tuning on prompts",
        choices=("flow", "streaming"),
    )
    video_model: str = flag(
        "mmdit",
        "what flow matching trains; video DiTs are what streaming starts from",
        choices=VIDEO_MODELS,
    )
    video_data_path: str | None = flag(
        None,
        "folder that tools/preprocess_video.py wrote; with --online-encoding a list of clips",
    )
    online_encoding: bool = flag(False, "decode and encode clips in the data loader")
    video_valid_path: str | None = flag(None, "the same for validation; default: none")
    video_buckets: str | None = flag(
        None,
        'JSON {resolution: {frames: [probability, micro-batch size]}}, such as {"256px": {"17": '
        "[1.0, 4]}}; default: as the data was preprocessed",
    )
    mixed_buckets: bool = flag(
        False, "clips of different buckets in one step; without pipeline stages only"
    )
    video: bool = False

    @property
    def streams(self) -> bool:
        """Streaming long-tuning, whose data is prompts."""
        return self.video and self.task == "streaming"

    @property
    def uses_dit(self) -> bool:
        """Flow matching with a video DiT, causal or not."""
        return self.video and self.task == "flow" and self.video_model != "mmdit"

    @property
    def is_causal(self) -> bool:
        """Flow matching with a video DiT that sees no later frames."""
        return self.uses_dit and self.video_model == CAUSAL

    def errors(self) -> list[str]:
        """What is missing, one sentence each."""
        if self.streams:
            return []
        if self.video_data_path is None:
            return [
                "`--video-data-path` is missing; give the folder that tools/preprocess_video.py "
                "wrote."
            ]
        if self.online_encoding and self.video_buckets is None:
            return [
                "`--online-encoding` needs `--video-buckets`; give the resolutions and lengths, "
                'such as {"256px": {"17": [1.0, 4]}}.'
            ]
        return []


@dataclass(frozen=True)
class SampleConfig:
    """Clips sampled from captions, during training and by tools/sample_video.py."""

    sample_interval: int | None = flag(
        None, "sample clips after each multiple of this", unit="steps", bounds=COUNT
    )
    sample_prompts: str | None = flag(
        None,
        "file of captions: text, one a line, or jsonl with text, reference and mode; with --task "
        "streaming text and switches, [{frame, text}]",
    )
    sample_texts: list[str] | None = flag(
        None, "captions themselves, in the place of a file", nargs="+"
    )
    sample_dir: str | None = flag(None, "folder of the clips; default: samples in --save")
    sample_steps: int = flag(50, "of Euler's method", unit="steps", bounds=SIZE)
    sample_text_scale: float = flag(
        7.5, "guidance by the caption; 1 is none", bounds=Range(0, 1000)
    )
    sample_image_scale: float = flag(
        3.0, "guidance by the references; 1 is none", bounds=Range(0, 1000)
    )
    sample_oscillation: bool = flag(True, "rest the guidance in odd steps from the tenth on")
    sample_scale_by_frame: bool = flag(
        True, "let the guidance by the references rise over the frames"
    )
    sample_size: tuple[int, int] | None = flag(
        None,
        "height and width; default: of the largest bucket of the data",
        nargs=2,
        unit="pixels",
        bounds=SIZE,
    )
    sample_frames: int | None = flag(
        None, "length; default: of the largest bucket", unit="frames", bounds=SIZE
    )
    sample_fps: int | None = flag(
        None, "frames per second; default: of the data, 16 with --task streaming", bounds=SIZE
    )
    sample_seed: int = flag(42, "of the noise that sampling starts from", bounds=NATURAL)
    sample_batch_size: int = flag(
        4, "clips that a replica samples at once", unit="clips", bounds=SIZE
    )
    sample_ema: bool = flag(True, "sample with the averaged weights, where they are kept")

    def errors(self, save: str | None) -> list[str]:
        """What cannot be sampled, one sentence each."""
        found = []
        if self.sample_prompts is not None and self.sample_texts is not None:
            found.append(
                "`--sample-prompts` and `--sample-texts` exclude each other; give a file or "
                "captions."
            )
        if self.sample_interval is None:
            return found
        if self.sample_prompts is None and self.sample_texts is None:
            found.append(
                f"`--sample-interval` ({self.sample_interval}) needs captions; give "
                "`--sample-prompts` with a file of them, or `--sample-texts`."
            )
        if self.sample_dir is None and save is None:
            found.append(
                f"`--sample-interval` ({self.sample_interval}) needs a folder for the clips; give "
                "`--sample-dir` or `--save`."
            )
        return found
