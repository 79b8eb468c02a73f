"""Lists of clips, and the sentences about bad ones."""

import json
from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from megatron_ext.video.data.clips import Clip, read_list
from tests.video.data import making


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
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


def test_folders_of_folders_are_read_and_no_folder_twice(tmp_path: Path) -> None:
    making.write_folder(tmp_path / "day" / "pictures", making.pictures(2))
    making.write_folder(tmp_path / "day" / "frames", making.pictures(2))
    making.write_folder(tmp_path / "day" / "no_caption", making.pictures(2))
    write(tmp_path / "day" / "frames.txt", "a clip of frames")
    write(tmp_path / "day" / "pictures" / "000.txt", "a picture")
    write(tmp_path / "day" / "night" / "12:30:00.mp4", "")
    write(tmp_path / "day" / "night" / "12:30:00.txt", "a cat at noon")
    (tmp_path / "day" / "night" / "above").symlink_to(tmp_path / "day")
    (tmp_path / "linked").symlink_to(tmp_path / "day")
    found = [(str(Path(c.path).relative_to(tmp_path)), c.caption) for c in read_list(tmp_path)]
    assert found == [
        ("day/frames", "a clip of frames"),
        ("day/night/12:30:00.mp4", "a cat at noon"),
        ("day/no_caption", ""),
        ("day/pictures/000.png", "a picture"),
        ("day/pictures/001.png", ""),
    ]


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
