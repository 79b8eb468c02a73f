"""Shows the clips of a video run's steps: frames, captions, and which latent frames are trained.

Frames are decoded from the trained latents. If the codec cannot be loaded, they are read from the
clips' own files. The HTML page needs no script and no other file; pictures are embedded as PNG.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.device import select
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.inspect.preview.main import Options, parse_run, save_page, whole_page
from megatron_ext.train.main import preflight, silence_known_warnings
from megatron_ext.video.config.encoding import PATCH, CodecConfig
from megatron_ext.video.config.run import MODES, ConditionConfig, TextDropoutConfig, VideoConfig
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.codecs import codec_from_manifest
from megatron_ext.video.data.conditions import frame_masks, loss_mask
from megatron_ext.video.data.encode import VideoSample
from megatron_ext.video.data.frames import decode, probe
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.manifest import folder_of_model
from megatron_ext.video.data.pictures import Image
from megatron_ext.video.data.randomness import draw_microbatch
from megatron_ext.video.sampling.mp4 import as_bytes
from megatron_ext.video.task import VIDEO

_STYLE = """
.clip { border-left: 4px solid var(--line); padding: .4rem .8rem; margin: .6rem 0; }
.clip img { height: 8rem; margin-right: .3rem; image-rendering: pixelated; }
.clip header { color: var(--faint); font-size: .87rem; overflow-wrap: anywhere; }
.strip span { display: inline-block; width: .8rem; height: .8rem; margin-right: 2px;
  background: #2ea043; } .strip .given { background: #1f6feb; } .strip .left { background: #888; }
.strip .given.counts { background: linear-gradient(135deg, #1f6feb 50%, #2ea043 50%); }
del { color: var(--faint); }
"""


@dataclass
class ShownClip:
    """One clip of a step, as it is trained.

    Attributes:
        number: index of the clip in the dataset.
        sample_number: index of the sample in the run; it seeds the random draws for the clip.
        mode: name of the condition mode that was drawn for the clip, one of `MODES`.
        frames: the first, middle and last frame, ``[3, H, W, 3]``, or fewer of a short clip; None
            if they cannot be decoded.
        given: for each latent frame, whether it is given to the model as a condition.
        counts: for each latent frame, whether it counts in the loss.
        notes: whether the caption is cut or replaced by the empty one; why frames are missing.
    """

    number: int
    sample_number: int
    bucket: str
    mode: str
    sample: VideoSample
    frames: NDArray[Any] | None
    given: list[bool]
    counts: list[bool]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.sample.latents.shape))
        rate = f"{self.sample.fps} FPS" if self.sample.fps else "a picture"
        return (
            f"clip {self.number}, sample {self.sample_number}: {self.bucket}, {rate}, latents "
            f"{shape}, {self.mode}"
        )

    @property
    def strip(self) -> str:
        """Return a letter per latent frame: R given, r given and trained, . trained, - neither."""
        letters = {(True, False): "R", (True, True): "r", (False, True): ".", (False, False): "-"}
        return "".join(letters[key] for key in zip(self.given, self.counts, strict=True))


def preview_videos(words: Sequence[str], options: Options, console: Console) -> list[str]:
    """Print the clips that a run with the flags ``words`` would train on.

    Return the printed warnings about the data.
    """
    kind = select().kind
    parsed = parse_run(VIDEO, words, options, kind)
    config = parsed.config
    task = parsed.task
    if config.section(VideoConfig).streams:
        raise ConfigError(
            "`--task` (streaming) trains on prompts, which hold no clips to show; leave it out."
        )
    config, assets = preflight(config, task.preflight)
    silence_known_warnings(kind)
    split: Any = task.datasets(config, assets, [], lambda: True).train
    codec, warnings = _codec(
        options.codec or config.section(CodecConfig).codec, split.clips.manifest
    )
    warnings += _never_whole(split.plan.steps)
    shown = [
        (step, [*_clips_of(config, split, codec, options, step)])
        for step in range(options.step - 1, options.step - 1 + options.steps)
    ]
    for step, clips in shown:
        console.print(f"step {step + 1}", style="bold")
        for clip in clips:
            console.print(f"  {clip}", markup=False)
            console.print(f"    {clip.sample.caption}", markup=False)
            console.print(f"    frames {clip.strip}", markup=False)
            for note in clip.notes:
                console.print(f"    {note}", markup=False)
    console.print("R: given, not trained; r: given and trained; .: trained", style="dim")
    for warning in warnings:
        console.print(f"warning: {warning}", style="bold yellow", markup=False)
    if options.html is not None:
        save_page(options.html, _page(shown, warnings, options))
        console.print(f"wrote {options.html}")
    return warnings


def _codec(folder: str, manifest: dict[str, Any]) -> tuple[VideoCodec | None, list[str]]:
    """Return the codec that ``manifest``, the dataset's description, names for its latents.

    ``folder`` is that of a VAE, or `PATCH`. If it cannot be loaded, return None instead. The second
    result is a list of warnings.
    """
    try:
        given = folder_of_model(manifest, "codec", None if folder == PATCH else folder)
        return codec_from_manifest(manifest, given), []
    except ConfigError as error:
        return None, [f"frames are those of the clips' files, not of the latents: {error}"]


def _never_whole(steps: Any) -> Iterator[str]:
    """Yield a warning for each bucket (all clips of one shape) that no epoch trains completely.

    ``steps`` is the dataset's `BucketSteps`, which leaves out clips that do not fill a unit.
    """
    for bucket, count in sorted(steps.left_out.items()):
        if count:
            whole = len(steps.buckets[bucket].clips)
            each = "all of them in each" if count == whole else "other ones in each"
            yield f"{count} of {whole} clips of {bucket} are left out of an epoch, {each}"


def _clips_of(
    config: RunConfig, split: Any, codec: VideoCodec | None, options: Options, step: int
) -> Iterator[ShownClip]:
    """Yield the clips of step ``step`` (from 0) on rank `Options.rank`, at most `Options.max_rows`.

    ``split`` is the `VideoSplit` to read. ``codec`` decodes frames from the latents; None reads the
    frames from the clips' files.
    """
    plan = split.plan
    left = options.max_rows
    consumed = sum(plan.steps.num_samples(earlier) for earlier in range(step))
    buckets = {n: bucket for bucket, members in split.clips.of_buckets.items() for n in members}
    conditions = config.section(ConditionConfig)
    dropout = config.section(TextDropoutConfig)
    for *_, clips, numbers in plan.microbatches(step, options.rank, consumed):
        for number, sample_number in zip(clips[:left], numbers, strict=False):
            bucket = buckets[number]
            sample = split.clips[number]
            shape = tuple(sample.latents.shape)
            drawn = draw_microbatch(
                config.training.seed, [sample_number], shape, conditions, dropout
            )
            masks = frame_masks(drawn.modes, shape[1], conditions)
            why_none = None
            frames: NDArray[Any] | None
            if codec is not None:
                frames = _frames(codec, sample)
            else:
                frames, why_none = _frames_of_file(split.clips.file_of(number), bucket)
            shown = ShownClip(
                number,
                sample_number,
                str(bucket),
                MODES[int(drawn.modes[0])],
                sample,
                frames,
                masks[0].tolist(),
                loss_mask(masks, 1, conditions.reference_loss)[0].bool().tolist(),
            )
            shown.notes = _notes(sample, bool(drawn.drop_text[0]), bool(drawn.drop_pooled[0]))
            if why_none is not None:
                shown.notes.append(why_none)
            yield shown
        left -= len(clips[:left])


def _frames(codec: VideoCodec, sample: VideoSample) -> NDArray[Any]:
    """Return the first, middle and last frame of a clip; a picture has only one."""
    pixels: Tensor = codec.decode(sample.latents[None].float())
    last = pixels.size(2) - 1
    frames: NDArray[Any] = as_bytes(pixels[:, :, sorted({0, last // 2, last})])[0]
    return frames


def _frames_of_file(path: str | None, bucket: Bucket) -> tuple[NDArray[Any] | None, str | None]:
    """Return the first, middle and last frame of a clip's file, and None.

    If there are no frames, because ``path`` is None or cannot be read, return None and the reason.
    """
    if path is None:
        return None, "no frames are shown: the dataset does not say which file the clip was"
    if not (Path(path).is_file() or Path(path).is_dir()):
        return None, f"no frames are shown: {path} is not on this machine"
    clip = Clip(path, "")
    try:
        shape = probe(clip)
        count = min(3, shape.num_frames)
        interval = (shape.num_frames - 1) / max(count - 1, 1)
        pixels = decode(clip, 0, interval, count, (bucket.height, bucket.width), shape=shape)
    except DataError as error:
        return None, f"no frames are shown: {error}"
    return as_bytes(pixels[None])[0], None


def _notes(sample: VideoSample, drops_text: bool, drops_pooled: bool) -> list[str]:
    used = int(sample.text.float().abs().sum(dim=-1).gt(0).sum())
    rows = sample.text.size(0)
    notes = [f"{used} of {rows} rows of text are filled"]
    if used == rows:
        notes[0] += ", so that the end of the caption may be cut"
    replaced = [n for n, yes in (("words", drops_text), ("pooled", drops_pooled)) if yes]
    if replaced:
        notes.append(f"the empty caption takes the place of this one ({' and '.join(replaced)})")
    return notes


def _page(
    shown: Sequence[tuple[int, Sequence[ShownClip]]], warnings: Sequence[str], options: Options
) -> str:
    title = f"Clips of step {options.step}, data-parallel rank {options.rank}"
    body = [
        "<p>First, middle and last frame. Squares are latent frames: "
        '<span class="strip"><span></span> trained, <span class="given"></span> given, '
        '<span class="given counts"></span> both.</span></p>',
        *(f'<p class="warning">⚠ {escape(warning)}</p>' for warning in warnings),
    ]
    for step, clips in shown:
        body.append(f"<h2>Step {step + 1}</h2>")
        body += [_section(clip) for clip in clips]
    return whole_page(title, _STYLE, body)


def _section(clip: ShownClip) -> str:
    pictures = "" if clip.frames is None else "".join(map(_picture, clip.frames))
    squares = []
    for given, counts in zip(clip.given, clip.counts, strict=True):
        names = [*(["given"] if given else []), *(["counts"] if counts else [])]
        names += [] if given or counts else ["left"]
        squares.append(f'<span class="{" ".join(names)}"></span>')
    notes = "".join(f"<div>{escape(note)}</div>" for note in clip.notes)
    return (
        f'<section class="clip"><header>{escape(str(clip))}</header>{pictures}'
        f'<div class="strip">{"".join(squares)}</div><p>{escape(clip.sample.caption)}</p>{notes}'
        "</section>"
    )


def _picture(frame: NDArray[Any]) -> str:
    stream = io.BytesIO()
    Image.fromarray(frame).save(stream, "png")
    content = base64.b64encode(stream.getvalue()).decode()
    return f'<img alt="" src="data:image/png;base64,{content}">'
