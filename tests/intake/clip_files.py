"""Facts of clips and pictures: how fast, how turned, which colours, what is seen through.

Each input is a small file without loss. What is trained is what `ClipEncoder` returns with a codec
that keeps every pixel, so that a change of the file that a player shows must change the latents.
"""

import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from megatron_ext.video.config.encoding import EncodeConfig
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.encode import plan_clips, rate_report, report
from megatron_ext.video.data.geometry import parse_plan
from tests.intake.judge import Heard
from tests.intake.leaves import Change
from tests.video.data.making import encoder, set_matrix

PLAN = parse_plan({"32px": {"1": [1, 2], "25": [1, 2]}})
FRAMES = 34
MATRICES = {
    "upright": (1, 0, 0, 1), "clockwise": (0, 1, -1, 0), "upside down": (-1, 0, 0, -1),
    "counterclockwise": (0, -1, 1, 0), "mirrored": (-1, 0, 0, 1), "flipped": (1, 0, 0, -1),
    "transposed": (0, 1, 1, 0), "transversed": (0, -1, -1, 0),
}  # fmt: skip
"""Display matrices by the turn or the mirror with which players show a picture."""
COLOURS = {"bt709": 1, "bt470bg": 5, "bt2020": 9}
RANGES = {"limited": 1, "full": 2}
TRANSFERS = {"bt709": 1, "PQ": 16, "HLG": 18}
VALUES: dict[str, list[Any]] = {
    "rate": [12, 16, "24000/1001", 25, 30],
    "matrix": [name for name in MATRICES if name != "upright"],
    "aspect": ["3/2", "2/3"],
    "colours": ["bt470bg", "bt2020"],
    "value range": ["full"],
    "transfer": ["PQ", "HLG"],
    "pause": [1, 2, 5],
    "fields": ["top first", "bottom first"],
    "caption": ["A ball.", "A bar moves, slowly."],
    "alpha": [0, 128],
    "hidden": [[250, 250, 0]],
    "orientation": [2, 3, 4, 5, 6, 7, 8],
    "duration": [50, 200],
    "last duration": [400],
}
"""Other values of each fact."""


def bases() -> Iterator[tuple[str, Any]]:
    yield (
        "clip",
        {
            "kind": "clip", "rate": 24, "matrix": "upright", "aspect": "1", "colours": "bt709",
            "value range": "limited", "transfer": "bt709", "pause": 0, "fields": "none",
            "caption": "A bar moves.",
        },
    )  # fmt: skip
    yield "transparent clip", {"kind": "transparent", "alpha": 255, "rate": 24, "caption": "A bar."}
    yield (
        "picture",
        {"kind": "picture", "alpha": 255, "hidden": [0, 0, 0], "orientation": 1, "caption": "Bar."},
    )
    yield (
        "animation",
        {"kind": "animation", "duration": 100, "last duration": 100, "alpha": 255, "caption": "B."},
    )


def changes(content: Any, dice: random.Random) -> Iterator[Change]:
    for fact, values in VALUES.items():
        if fact in content:
            yield from (Change((fact,), "other", value) for value in values)


def says_what_is(change: Change, usual: Heard) -> bool:
    """Return whether a player shows the same frames in the time that is trained."""
    # 25 frames at 24000/1001 a second are the nearest ones to 25 at 24 a second.
    return change.name in ("hidden", "last duration") or change.value == "24000/1001"


def hear(content: Any, folder: Path) -> Heard:
    facts = dict(content)
    path = _WRITERS[facts.pop("kind")](folder, **{k.replace(" ", "_"): v for k, v in facts.items()})
    config = EncodeConfig(video_fps=24.0, temporal_crop="start")
    clips = [Clip(str(path), content["caption"])]
    planned, dropped = plan_clips(clips, PLAN, config)
    sample = encoder(config).sample(planned[0])
    trained = (sample.latents.numpy().tobytes(), sample.fps, sample.caption, sample.text.tolist())
    return Heard(trained, "\n".join([*report(dropped, 1), *rate_report(planned, config)]))


def _shown(number: int, alpha: int = 255, hidden: tuple[int, ...] = (0, 0, 0)) -> np.ndarray:
    """Return frame ``number``, ``[48, 64, 4]``: no turn and no mirror leaves it as it is."""
    pixels = np.zeros((48, 64, 4), np.uint8)
    pixels[..., :3] = np.linspace(30, 200, 64, dtype=np.uint8)[None, :, None]
    pixels[:16, :24, :3] = (200, 40, 60)
    pixels[30:, number : number + 10, :3] = (40, 90, 220)
    pixels[..., 3] = 255
    pixels[20:40, 40:, 3] = alpha
    if alpha == 0:
        pixels[20:40, 40:, :3] = hidden
    return pixels


def _clip(
    folder: Path, *, rate: Any, matrix: str, aspect: str, colours: str, value_range: str,
    transfer: str, pause: int, fields: str, caption: str,
) -> Path:  # fmt: skip
    path = folder / "clip.mp4"
    options = {"qp": "0"}
    if fields != "none":
        options["x264-params"] = {"top first": "tff=1", "bottom first": "bff=1"}[fields]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(rate), options=options)
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuv444p"
        context = stream.codec_context
        context.sample_aspect_ratio = Fraction(aspect)
        context.colorspace = context.color_primaries = COLOURS[colours]
        context.color_range = RANGES[value_range]
        context.color_trc = TRANSFERS[transfer]
        for number in range(FRAMES):
            # The numbers of the file stay, whatever the tags say that they mean.
            planes = av.VideoFrame.from_ndarray(_shown(number)[..., :3], format="rgb24")
            frame = av.VideoFrame.from_ndarray(
                planes.reformat(format="yuv444p").to_ndarray(), format="yuv444p"
            )
            frame.pts = number + (pause if number > 2 else 0)
            frame.time_base = 1 / Fraction(rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    set_matrix(path, MATRICES[matrix])
    return path


def _transparent(folder: Path, *, alpha: int, rate: int, caption: str) -> Path:
    path = folder / "clip.mov"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=Fraction(rate))
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "rgba"
        for number in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(_shown(number, alpha), format="rgba")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def _picture(
    folder: Path, *, alpha: int, hidden: tuple[int, ...], orientation: int, caption: str
) -> Path:
    path = folder / "picture.png"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(_shown(0, alpha, hidden)).save(path, exif=exif)
    return path


def _animation(
    folder: Path, *, duration: int, last_duration: int, alpha: int, caption: str
) -> Path:
    path = folder / "animation.png"
    frames = [Image.fromarray(_shown(number, alpha)) for number in range(FRAMES)]
    lengths = [duration] * (FRAMES - 1) + [last_duration]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=lengths)
    return path


_WRITERS = {
    "clip": _clip,
    "transparent": _transparent,
    "picture": _picture,
    "animation": _animation,
}
