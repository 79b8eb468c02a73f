"""Files of clips of every kind, lists of them, and the sentences about bad ones."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.data import video_files
from megatron_ext.video.data.clips import Clip, read_list
from megatron_ext.video.data.frames import decode, fit, probe
from megatron_ext.video.data.geometry import ClipShape
from tests.video.data import making

CODECS = {"libx264": "mp4", "libvpx": "webm", "libvpx-vp9": "webm"}


def as_pixels(made: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(made.copy()).permute(3, 0, 1, 2) / 127.5 - 1


@pytest.mark.parametrize(("codec", "kind"), CODECS.items())
def test_videos(tmp_path: Path, codec: str, kind: str) -> None:
    made = making.pictures(11)
    clip = Clip(str(making.write_video(tmp_path / f"a.{kind}", made, codec=codec)), "x")
    assert probe(clip) == ClipShape(11, 32, 32, 8.0)
    pixels = decode(clip, 1, 3, 4, (32, 32))
    assert pixels.dtype == torch.float32 and pixels.shape == (3, 4, 32, 32)
    assert (pixels - as_pixels(made[[1, 4, 7, 10]])).abs().mean() < 0.02
    # A neighbouring frame differs by more than the compression does.
    assert (pixels - as_pixels(made[[0, 3, 6, 9]])).abs().mean() > 0.06


def test_gifs_images_and_folders_of_images_are_exact(tmp_path: Path) -> None:
    made = making.pictures(6)
    clip = Clip(str(making.write_gif(tmp_path / "a.gif", made)), "x")
    assert probe(clip) == ClipShape(6, 32, 32, 10.0)
    torch.testing.assert_close(decode(clip, 0, 1, 6, (32, 32)), as_pixels(made), atol=1e-6, rtol=0)
    assert probe(Clip(clip.path, "x", fps=5.0)).fps == 5.0
    still = Clip(str(making.write_gif(tmp_path / "b.gif", making.pictures(1))), "x")
    assert probe(still) == ClipShape(1, 32, 32, 0.0)
    made = making.pictures(12)
    folder = making.write_folder(tmp_path / "v1.0", made, "f_{}.png")
    (folder / "._f_0.png").write_bytes(b"what macOS leaves")
    (folder / "notes.md").write_text("no image")
    clip = Clip(str(folder), "x")
    assert probe(clip) == ClipShape(12, 32, 32, 24.0)
    # f_10.png comes after f_9.png.
    torch.testing.assert_close(decode(clip, 0, 1, 12, (32, 32)), as_pixels(made))
    still = Clip(str(folder / "f_3.png"), "x")
    assert probe(still) == ClipShape(1, 32, 32, 0.0)
    torch.testing.assert_close(decode(still, 0, 1, 1, (32, 32)), as_pixels(made[3:4]))


def test_clips_that_are_turned_or_cut_by_an_edit_stand_as_players_show_them(tmp_path: Path) -> None:
    made = np.full((3, 32, 64, 3), 20, np.uint8)
    made[:, :16, :16] = 240
    path = making.write_video(tmp_path / "phone.mp4", made)
    making.lay_on_its_side(path)
    clip = Clip(str(path), "x")
    assert probe(clip) == ClipShape(3, 64, 32, 8.0)
    pixels = decode(clip, 0, 1, 3, (64, 32))
    # Turned clockwise, the upper left corner becomes the upper right one.
    wanted = as_pixels(np.stack([np.rot90(picture, -1) for picture in made]))
    assert (pixels - wanted).abs().mean() < 0.05
    made = making.pictures(11)
    whole = making.write_video(tmp_path / "whole.mp4", made)
    clip = Clip(str(making.hide_the_beginning(whole, tmp_path / "cut.mp4", 4)), "x")
    assert probe(clip) == ClipShape(7, 32, 32, 8.0)
    assert (decode(clip, 0, 1, 7, (32, 32)) - as_pixels(made[4:])).abs().mean() < 0.02


def test_fit_covers_and_cuts_the_middle() -> None:
    wide = torch.zeros(1, 20, 60, 3, dtype=torch.uint8)
    wide[:, :, 20:40] = 255
    torch.testing.assert_close(fit(wide, (20, 20)), torch.ones(3, 1, 20, 20))
    grey = torch.full((2, 31, 47, 3), 100, dtype=torch.uint8)
    for size in ((16, 16), (64, 48), (16, 96)):
        wanted = torch.full((3, 2, *size), 100 / 127.5 - 1)
        torch.testing.assert_close(fit(grey, size), wanted, atol=1e-5, rtol=0)
    checkers = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    checkers[:, ::2] = 254
    # Reduced by two, rows average; without the filter they would be all black or all white.
    assert (fit(checkers, (16, 16))[:, :, 2:-2] + 0.004).abs().max() < 0.3


def damage(kind: str, folder: Path) -> Path:
    path, noise = folder / kind, np.random.default_rng(0)
    if kind == "folder":
        path.mkdir()
    elif kind == "cut.mp4":
        whole = making.write_video(folder / "whole.mp4", making.pictures(30, 64, 64), crf="0")
        path.write_bytes(whole.read_bytes()[:2000])
    elif kind == "cut.png":
        Image.fromarray(noise.integers(0, 255, (64, 64, 3), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:60])
    elif not kind.startswith("missing"):
        content = {"empty.mp4": b"", "noise.webm": noise.bytes(3000), "text.jpg": b"no image"}
        path.write_bytes(content[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("empty.mp4", "Invalid data"),
        ("cut.mp4", "Invalid data"),
        ("noise.webm", "Invalid data"),
        ("missing.mp4", "No such file"),
        ("missing.png", "No such file"),
        ("text.jpg", "cannot identify image"),
        ("folder", "the folder holds no images"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, kind: str, why: str) -> None:
    path = damage(kind, tmp_path)
    for read in (probe, lambda clip: decode(clip, 0, 1, 1, (32, 32))):
        with pytest.raises(DataError, match=rf"^The clip \S+{kind} cannot be read \(.*{why}") as e:
            read(Clip(str(path), "x"))
        assert e.value.messages[0].endswith("mend the file or take its row out.")


def test_damage_that_headers_do_not_show(tmp_path: Path) -> None:
    path = damage("cut.png", tmp_path)
    assert probe(Clip(str(path), "x")).height == 64
    with pytest.raises(DataError, match=r"cut.png cannot be read \("):
        decode(Clip(str(path), "x"), 0, 1, 1, (32, 32))
    folder = making.write_folder(tmp_path / "mixed", making.pictures(2))
    Image.fromarray(making.pictures(1, 16, 16)[0]).save(folder / "002.png")
    with pytest.raises(DataError, match=r"mixed cannot be read \(its frames differ in size\)"):
        decode(Clip(str(folder), "x"), 0, 1, 3, (32, 32))
    for write in (making.write_video, making.write_folder):
        path = write(tmp_path / f"{write.__name__}.mp4", making.pictures(4))
        with pytest.raises(DataError, match=r"only 2 of 3 frames could be decoded"):
            decode(Clip(str(path), "x"), 0, 2, 3, (32, 32))


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_files, "av", None)
    with pytest.raises(ConfigError, match=r"needs the package av, .* install 'megatron-ext\[video"):
        probe(Clip(str(tmp_path / "a.mp4"), "x"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_lists_and_folders_of_clips_beside_captions(tmp_path: Path) -> None:
    rows = [
        {"path": "a.mp4", "text": " a cat "},
        {"path": "/b.mp4", "caption": "a dog", "fps": 12, "motion_score": "3.5"},
        {"path": "c.mp4", "text": None, "caption": "a fox"},
        {"path": "d.mp4"},
    ]
    path = write(tmp_path / "l.jsonl", "".join(f"{json.dumps(row)}\n\n" for row in rows))
    wanted = [
        Clip(str(tmp_path / "a.mp4"), "a cat"),
        Clip("/b.mp4", "a dog", 12.0, 3.5),
        Clip(str(tmp_path / "c.mp4"), "a fox"),
        Clip(str(tmp_path / "d.mp4"), ""),
    ]
    assert read_list(path) == wanted
    names = "\ufeffpath,text,fps,motion_score"
    table = names + '\na.mp4, a cat ,,\n/b.mp4,a dog,12,3.5\n\nc.mp4,"a fox"'
    assert read_list(write(tmp_path / "l.CSV", table)) == wanted[:3]
    folder = tmp_path / "folder"
    making.write_folder(folder / "v1.5", making.pictures(2))
    captions = {"v1.5.txt": "a bar\n", "a.b.mp4": "", "a.b.txt": "a cat", "c.mp4": ""}
    for name, text in captions.items():
        write(folder / name, text)
    found = [(Path(c.path).name, c.caption) for c in read_list(folder)]
    assert found == [("a.b.mp4", "a cat"), ("c.mp4", ""), ("v1.5", "a bar")]


def test_columns_that_nothing_reads_are_named_with_their_rows(tmp_path: Path) -> None:
    both = {"path": "a.mp4", "text": "A", "caption": "B", "crop": [0, 1]}
    rows = [both, {"path": "b.mp4", "caption": "C", "crop": 1, "seed": None}]
    path = write(tmp_path / "l.jsonl", "\n".join(map(json.dumps, rows)))
    said: list[str] = []
    assert [clip.caption for clip in read_list(path, said.append)] == ["A", "C"]
    assert said == [
        f"Columns of {path} that are not used, with the rows that have them: `crop` (2), "
        "`caption` (1)."
    ]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("l.jsonl", '{"path": "a"}\n{"path": ', r"l.jsonl line 2 is no JSON \(.*\); mend the row"),
        ("l.jsonl", "[1]", r"line 1 has no `path`; mend the row or take it out\.$"),
        ("l.jsonl", '{"text": "a cat"}', r"line 1 has no `path`"),
        ("l.jsonl", '{"path": "a", "text": 3}', r"line 1 has a caption that is no text"),
        ("l.jsonl", '{"path": "a", "fps": "fast"}', r"has `fps` 'fast', which is no number"),
        ("l.jsonl", '{"path": "a", "fps": NaN}', r"has `fps` nan, which is no number"),
        ("l.jsonl", '{"path": "a", "fps": -1}', r"has `fps` -1.0, which is negative"),
        ("l.jsonl", '{"path": "a", "motion": []', r"line 1 is no JSON"),
        ("l.jsonl", '{"path": "a", "motion": []}', r"has `motion` \[\], which is no number"),
        ("l.jsonl", "\n \n", r"`--input` \(.*l.jsonl\) holds no clip; give a list with rows"),
        ("l.csv", "file,text\na,b\n", r"has the columns file, text, but needs path, and text or"),
        ("l.csv", "path,words\na,b\n", r"has the columns path, words, but needs path, and text"),
        ("l.csv", "path,text\na,one, two\n", r"line 2 has 1 cells more than the first line"),
        ("l.csv", "path,text\n,b\n", r"line 2 has no `path`"),
        ("l.csv", f'path,text\na,"{"x" * 200000}"\n', r"line \d is no csv \(field larger than"),
        ("l.csv", "", r"holds no clip"),
        ("l.csv", "path,text\n", r"holds no clip"),
    ],
)
def test_bad_lists(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_list(write(tmp_path / name, text))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("l.jsonl", r"l.jsonl line 1 is no JSON \(it is not UTF-8 at byte 1\)"),
        ("l.csv", r"`--input` .* cannot be read \(.*\); give a .* in UTF-8"),
    ],
)
def test_lists_that_are_no_text(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe,\x00\npath,text\n")
    with pytest.raises(DataError, match=sentence):
        read_list(tmp_path / name)
    with pytest.raises(DataError, match=r"`--input` \(.*none\) is neither a file nor a folder"):
        read_list(tmp_path / "none")
