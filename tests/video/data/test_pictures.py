"""Pictures as viewers show them, compared with Pillow and with arithmetic."""

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, features

from megatron_ext.video.data.pictures import (
    composited,
    durations,
    is_animated,
    is_picture,
    picture_size,
    read_animation,
    read_picture,
)

WHITE = (255, 255, 255)


def marked() -> np.ndarray:
    """Return a picture without symmetry, ``[16, 32, 3]``."""
    made = np.full((16, 32, 3), 40, np.uint8)
    made[:4, :8] = (250, 30, 60)
    made[12:, 24:28] = (20, 220, 90)
    return made


@pytest.mark.parametrize("kind", ["png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientations(tmp_path: Path, orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{kind}"
    options = {"lossless": True} if kind == "webp" else {}
    Image.fromarray(marked()).save(path, exif=exif, **options)
    with Image.open(path) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    found = read_picture(path, WHITE)
    assert np.array_equal(found, wanted)
    assert picture_size(path) == found.shape[:2] == ((32, 16) if orientation > 4 else (16, 32))


def test_transparency_shows_the_background(tmp_path: Path) -> None:
    made = np.concatenate([marked(), np.full((16, 32, 1), 255, np.uint8)], axis=2)
    made[:, 16:, 3], made[:, 20:, 3] = 128, 0
    for mode in ("RGBA", "P", "LA"):
        Image.fromarray(made).convert(mode).save(tmp_path / "a.png")
        with Image.open(tmp_path / "a.png") as image:
            pixels = image.convert("RGBA")
            wanted = np.asarray(
                Image.alpha_composite(Image.new("RGBA", pixels.size, "red"), pixels)
            )
        found = read_picture(tmp_path / "a.png", (255, 0, 0)).astype(int)
        assert np.abs(found - wanted[..., :3]).max() <= 1, mode
    # Halves are rounded to the nearest value: (200 * 128 + 50 * 127) / 255 is 125.3.
    half = np.full((1, 1, 4), (200, 201, 0, 128), np.uint8)
    assert composited(half, (50, 50, 255)).tolist() == [[[125, 126, 127]]]
    assert composited(half, (51, 49, 254)).tolist() == [[[126, 125, 127]]]
    opaque = np.dstack([marked(), np.full((16, 32), 255, np.uint8)])
    assert np.array_equal(composited(opaque, (1, 2, 3)), marked())


@pytest.mark.parametrize("kind", ["png", "tif"])
def test_greys_of_16_bits_keep_their_range(tmp_path: Path, kind: str) -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(8, 0)
    Image.fromarray(ramp).save(tmp_path / f"a.{kind}")
    found = read_picture(tmp_path / f"a.{kind}", WHITE).astype(float)
    assert np.abs(found - ramp[..., None] / 257).max() <= 0.5


@pytest.mark.parametrize(
    ("values", "what"), [(np.float32, "floating-point numbers"), (np.int32, "whole numbers of 32")]
)
def test_pixels_without_a_white_are_named(tmp_path: Path, values: type, what: str) -> None:
    """Pillow would cut them off at 0 and 255, which makes them black or white."""
    Image.fromarray(np.ones((8, 8), values)).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=f"its pixels are {what}.*, which do not say what is wh"):
        read_picture(tmp_path / "a.tif", WHITE)


def test_a_colour_of_16_bits_that_is_transparent_shows_the_background(tmp_path: Path) -> None:
    made = np.full((8, 8), 30000, np.uint16)
    made[:4] = 5
    Image.fromarray(made).save(tmp_path / "a.png", transparency=5)
    found = read_picture(tmp_path / "a.png", (1, 2, 3))
    assert found[0, 0].tolist() == [1, 2, 3] and found[7, 7].tolist() == [117, 117, 117]


def test_colours_are_those_of_the_profile(tmp_path: Path) -> None:
    """Red and green change places in this profile, which no viewer overlooks."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    swapped = profile.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")
    image = Image.fromarray(marked())
    for content, order in ((profile, [0, 1, 2]), (swapped, [1, 0, 2]), (b"damaged", [0, 1, 2])):
        image.save(tmp_path / "a.png", icc_profile=bytes(content))
        found = read_picture(tmp_path / "a.png", WHITE).astype(int)
        assert np.abs(found - marked()[..., order]).max() <= 2


def linear_grey() -> bytes:
    """Return an ICC profile (version 2.1) of greys that are proportional to light."""
    d50 = struct.pack(">3i", 63190, 65536, 54061)
    tags = {
        b"wtpt": b"XYZ " + bytes(4) + d50,
        b"kTRC": b"curv" + bytes(4) + struct.pack(">IH2x", 1, 256),
    }
    table, body, begin = b"", b"", 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        table += name + struct.pack(">2I", begin + len(body), len(content))
        body += content
    head = struct.pack(
        ">I4xI4s4s4s12x4s24xI12s48x", begin + len(body), 0x02100000, b"mntr", b"GRAY", b"XYZ ",
        b"acsp", 0, d50,
    )  # fmt: skip
    return head + struct.pack(">I", len(tags)) + table + body


def test_greys_are_those_of_the_profile(tmp_path: Path) -> None:
    """Compare with the curve of sRGB (IEC 61966-2-1)."""
    ramp = np.arange(10, 256, 5, dtype=np.uint8)[None].repeat(4, 0)
    Image.fromarray(ramp).save(tmp_path / "a.png", icc_profile=linear_grey())
    light = ramp[0] / 255
    wanted = 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    found = read_picture(tmp_path / "a.png", WHITE)
    assert np.abs(found - wanted[None, :, None]).max() < 2
    Image.fromarray(ramp).save(tmp_path / "b.png")
    assert np.array_equal(read_picture(tmp_path / "b.png", WHITE)[..., 1], ramp)


@pytest.mark.parametrize("kind", ["webp", "png"])
def test_animated_pictures_are_clips(tmp_path: Path, kind: str) -> None:
    stills = [np.roll(marked(), 3 * number, axis=1) for number in range(4)]
    images = [Image.fromarray(still) for still in stills]
    lasts = [100, 100, 500, 100]
    options = {"lossless": True} if kind == "webp" else {}
    path = tmp_path / f"a.{kind}"
    images[0].save(path, save_all=True, append_images=images[1:], duration=lasts, **options)
    assert is_animated(path) and durations(path) == [0.1, 0.1, 0.5, 0.1]
    for found, still in zip(read_animation(path, 2, WHITE), stills[:3], strict=True):
        assert np.array_equal(found, still)
    images[0].save(tmp_path / f"b.{kind}", **options)
    assert not is_animated(tmp_path / f"b.{kind}")


def test_frames_without_a_duration_are_shown_as_browsers_do(tmp_path: Path) -> None:
    images = [Image.fromarray(np.roll(marked(), 3 * number, axis=1)) for number in range(3)]
    path = tmp_path / "a.webp"
    images[0].save(path, save_all=True, append_images=images[1:], duration=[0, 40, 0])
    assert durations(path) == [0.1, 0.04, 0.1]


def test_films_of_jpegs_are_no_pictures(tmp_path: Path) -> None:
    """The first bytes of such a film are those of a JPEG."""
    for name, is_one in (("a.jpg", True), ("a.mjpeg", False), ("a.MJPG", False), ("a", True)):
        Image.fromarray(marked()).save(tmp_path / name, "JPEG")
        assert is_picture(tmp_path / name) is is_one


@pytest.mark.parametrize(
    ("head", "is_one"),
    [
        (b"\0\0\0\x1cftypavif", True), (b"\0\0\0\x1cftypavis", True),
        (b"\0\0\0\x1cftypheic", False), (b"\0\0\0\x1cftypisom", False), (b"GIF89a", False),
        (b"RIFF0000WEBPVP8L", True), (b"RIFF0000AVI LIST", False), (b"BM", True),
        (b"\x1a\x45\xdf\xa3", False), (b"\x89PNG\r\n\x1a\n", True),
    ],
)  # fmt: skip
def test_the_first_bytes_tell_pictures_from_videos(
    head: bytes, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "check", lambda name: name == "avif")
    path = tmp_path / "a.png"
    path.write_bytes(head.ljust(64, b"\0"))
    assert is_picture(path) is is_one
    # Where they tell nothing, the suffix does.
    (tmp_path / "a.bin").write_bytes(b"BM".ljust(64, b"\0"))
    assert not is_picture(tmp_path / "a.bin")


def test_a_picture_beside_an_animation_and_pages_are_no_frames(tmp_path: Path) -> None:
    images = [Image.fromarray(np.roll(marked(), 3 * number, axis=1)) for number in range(3)]
    many = {"save_all": True, "append_images": images[1:], "duration": 100}
    images[0].save(tmp_path / "a.png", default_image=True, **many)
    frames = read_animation(tmp_path / "a.png", 5, WHITE)
    assert len(durations(tmp_path / "a.png")) == len(frames) == 2
    assert np.array_equal(frames[0], np.asarray(images[1]))
    images[0].save(tmp_path / "a.tif", save_all=True, append_images=images[1:])
    assert not is_animated(tmp_path / "a.tif")
