"""Lists of clips, and the sentences about bad ones."""

import gzip
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.data import archives
from megatron_ext.video.data.clips import Clip, read_list
from megatron_ext.video.data.frames import decode, probe
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
        {"path": "e.mp4", "fps": 0, "motion": 0, "motion_score": 5},
    ]
    path = write(tmp_path / "l.jsonl", "".join(f"{json.dumps(row)}\n\n" for row in rows))
    wanted = [
        Clip(str(tmp_path / "a.mp4"), "a cat"),
        Clip("/b.mp4", "a dog", 12.0, 3.5),
        Clip(str(tmp_path / "c.mp4"), "a fox"),
        Clip(str(tmp_path / "d.mp4"), ""),
        Clip(str(tmp_path / "e.mp4"), "", 0.0, 0.0),
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
    # A folder of pictures and folders is no clip of frames, unless the folders are hidden.
    making.write_folder(tmp_path / "day" / "trip", making.pictures(1))
    making.write_folder(tmp_path / "day" / "trip" / "later", making.pictures(1))
    making.write_folder(tmp_path / "day" / "no_caption" / ".small", making.pictures(1))
    for name in (".DS_Store", ".hidden.mp4"):
        write(tmp_path / "day" / name, "")
    (tmp_path / "day" / "night" / "above").symlink_to(tmp_path / "day")
    (tmp_path / "linked").symlink_to(tmp_path / "day")
    found = [(str(Path(c.path).relative_to(tmp_path)), c.caption) for c in read_list(tmp_path)]
    assert found == [
        ("day/frames", "a clip of frames"),
        ("day/night/12:30:00.mp4", "a cat at noon"),
        ("day/no_caption", ""),
        ("day/pictures/000.png", "a picture"),
        ("day/pictures/001.png", ""),
        ("day/trip/000.png", ""),
        ("day/trip/later", ""),
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
        ("l.jsonl", "[1]", r"item 1 is no row of columns; it needs path, file_name or video, w"),
        (
            "l.jsonl",
            '{"text": "a cat"}',
            r"line 1 has no path: it has text, but needs path, file_n",
        ),
        (
            "l.jsonl",
            '{"video": {"bytes": 1}}',
            r"has `video` {'bytes': 1}, which is no text: it has",
        ),
        (
            "l.json",
            '[{"path": "a"}, {"file": "a"}]',
            r"item 2 has no path: it has file, but needs pa",
        ),
        (
            "l.json",
            '[{"path": "a"}',
            r"cannot be read \(it is no valid JSON: .*\); give a csv, tsv",
        ),
        (
            "l.jsonl",
            '{"path": "a", "text": 3}',
            r"line 1 has the caption `text` 3, which is no text",
        ),
        ("l.jsonl", '{"path": "a", "fps": "fast"}', r"has `fps` 'fast', which is no number"),
        ("l.jsonl", '{"path": "a", "fps": NaN}', r"has `fps` nan, which is no number"),
        ("l.jsonl", '{"path": "a", "fps": -1}', r"has `fps` -1.0, which is negative"),
        ("l.jsonl", '{"path": "a", "motion": []', r"line 1 is no JSON"),
        ("l.jsonl", '{"path": "a", "motion": []}', r"has `motion` \[\], which is no number"),
        ("l.jsonl", "\n \n", r"`--input` \(.*l.jsonl\) holds no clip; give a list with rows"),
        ("l.csv", "file,text\na,b\n", r"has the columns file, text in its first line, but needs"),
        ("l.csv", "path,words\na,b\n", r"has the columns path, words in its first line, but need"),
        ("l.csv", "path,text\na,one, two\n", r"line 2 has 1 cells more than the first line"),
        (
            "l.csv",
            "path;words\na;b\n",
            r"columns path, words in its first line, but needs path, fil",
        ),
        (
            "l.tsv",
            "path,text\na,b\n",
            r"has the columns path,text in its first line, but needs path, f",
        ),
        (
            "l.csv",
            "path,text\n,b\n",
            r"line 2 has no path: it has text, but needs path, file_name or",
        ),
        ("l.csv", f'path,text\na,"{"x" * 200000}"\n', r"line \d is no csv \(field larger than"),
        (
            "l.csv",
            'path,text\na,b\nc,"A cat\nd,A dog\n',
            r"l.csv line 3 is no csv \(unexpected end of data\); a quote in a cell in quotes is",
        ),
        ("l.tsv", 'path\ttext\na\t"Hello" she said\n', r"l.tsv line 2 is no csv \("),
        (
            "l.csv",
            "path,text,text\na,b,c\n",
            r"l.csv has the column `text` 2 times in its first line; rename all but one",
        ),
        (
            "l.csv",
            "path,text,fps,fps\na,b,1,2\n",
            r"has the column `fps` 2 times in its first line",
        ),
        ("l.csv", "", r"holds no clip"),
        ("l.csv", "path,text\n", r"holds no clip"),
    ],
)
def test_bad_lists(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_list(write(tmp_path / name, text))


WORLD = [
    ("l.csv", "file_name;text;fps\na.mp4;a cat, a dog;12\n"),
    ("l.csv", 'video,prompt,fps\na.mp4,"a cat, a dog",12\n'),
    ("l.csv", "fps|caption|path\n12|a cat, a dog|a.mp4\n"),
    ("l.tsv", "video\tcaption\tfps\na.mp4\ta cat, a dog\t12\n"),
    ("l.json", '[{"file_name": "a.mp4", "prompt": "a cat, a dog", "fps": 12}]'),
    ("l.json", '\ufeff \n[{"file_name": "a.mp4", "prompt": "a cat, a dog", "fps": 12}]'),
    ("l.txt", '{"video": "a.mp4", "caption": "a cat, a dog", "fps": 12}\n'),
    ("l.jsonl", '\ufeff{"path": "a.mp4", "text": "a cat, a dog", "fps": 12}\n  \n'),
    ("metadata.csv", 'file_name,text,fps\na.mp4,"a cat, a dog",12\n'),
    ("metadata.jsonl", '{"file_name": "a.mp4", "text": "a cat, a dog", "fps": 12}\n'),
]
"""Lists as Hugging Face's datasets, DiffSynth and spreadsheets write them."""


@pytest.mark.parametrize(("name", "text"), WORLD)
def test_lists_as_the_world_writes_them(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, text)
    said: list[str] = []
    for given in (path, tmp_path) if name.startswith("metadata") else (path,):
        wanted = [Clip(str(tmp_path / "a.mp4"), "a cat, a dog", 12.0)]
        assert read_list(given, said.append) == wanted
    assert not said


def test_parquet_is_read_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"video": ["a.mp4", "b.mp4"], "prompt": ["a cat", None], "seed": [3, None]}
    path = tmp_path / "l.parquet"
    parquet.write_table(pa.table(columns), path)
    said: list[str] = []
    wanted = [Clip(str(tmp_path / "a.mp4"), "a cat"), Clip(str(tmp_path / "b.mp4"), "")]
    assert read_list(path, said.append) == wanted
    assert said == [
        f"Columns of {path} that are not used, with the rows that have them: `seed` (1)."
    ]
    unnamed = tmp_path / "list"
    unnamed.write_bytes(path.read_bytes())
    assert read_list(unnamed) == wanted
    parquet.write_table(pa.table({"path": ["a", None], "text": ["b", "c"]}), unnamed)
    with pytest.raises(DataError, match=r"list row 2 has no path: it has text, but needs path, fi"):
        read_list(unnamed)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cannot be read \(it is no whole parquet file: "):
        read_list(path)
    parquet.write_table(pa.table({"file": ["a"], "text": ["b"]}), path)
    with pytest.raises(
        DataError, match=r"has the columns file, text, but needs path, file_name or"
    ):
        read_list(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs the package pyarrow, which is not installed; ru"):
        read_list(path)


def test_a_cell_keeps_its_own_line_ends_and_lines_are_counted_with_them(tmp_path: Path) -> None:
    """Write a table as Windows does, with a caption of two lines, and a row of too many cells."""
    path = tmp_path / "l.csv"
    path.write_bytes(b'path,text\r\na.mp4,"a cat\r\non a mat"\r\n"b.mp4",a dog\r\n')
    assert [clip.caption for clip in read_list(path)] == ["a cat\r\non a mat", "a dog"]
    path.write_bytes(path.read_bytes() + b"c.mp4,a,bird\r\n")
    with pytest.raises(DataError, match="line 5 has 1 cells more than the first line"):
        read_list(path)


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 7
            tar.addfile(member, io.BytesIO(content))
    return path


def test_clips_in_tar_files_are_those_of_files(tmp_path: Path) -> None:
    """Pixels, and size and rate, are read in place, of videos, animations and pictures."""
    folder = tmp_path / "files"
    folder.mkdir()
    making.write_video(folder / "a.mp4", making.pictures(9))
    making.write_gif(folder / "b.c.gif", making.pictures(5))
    Image.fromarray(making.pictures(1)[0]).save(folder / "d.png")
    a, b, d = ((folder / name).read_bytes() for name in ("a.mp4", "b.c.gif", "d.png"))
    files = {
        "x/a.mp4": a, "x/a.json": b'{"caption": "from json", "fps": 4, "crop": 1, "path": "z"}',
        "x/b.c.gif": b, "x/b.txt": b" beside ", "x/b.cls": b"3", "x/lonely.txt": b"no clip",
        "y/d.png": d, "y/d.json": b"{}",
    }  # fmt: skip
    archive = write_tar(tmp_path / "0.tar", files)
    said: list[str] = []
    clips = read_list(archive, said.append)
    assert [(clip.path, clip.caption, clip.fps) for clip in clips] == [
        (f"{archive}/x/a.mp4", "from json", 4.0),
        (f"{archive}/x/b.c.gif", "beside", None),
        (f"{archive}/y/d.png", "", None),
    ]
    names = "`crop` (1), `path` (1), `.cls` (1), `.txt` (1)"
    assert said == [
        f"Columns of {archive} that are not used, with the rows that have them: {names}."
    ]
    for clip, name in zip(clips, ("a.mp4", "b.c.gif", "d.png"), strict=True):
        own = Clip(str(folder / name), clip.caption, clip.fps)
        assert probe(clip) == probe(own)
        count = min(5, probe(own).num_frames)
        assert decode(clip, 0, 1, count, (32, 32)).equal(decode(own, 0, 1, count, (32, 32)))
    (tmp_path / "0.txt").write_text("a caption of nothing")
    in_folder = [clip.path for clip in read_list(tmp_path)]
    assert [path for path in in_folder if path.startswith(f"{archive}/")] == [c.path for c in clips]


def test_members_of_a_sample_may_lie_apart_and_be_links(tmp_path: Path) -> None:
    """``tar`` writes a folder in no order, and equal files once."""
    archive = tmp_path / "0.tar"
    with tarfile.open(archive, "w") as tar:
        files = {
            "1.wmv": b"a",
            "2.txt": "\ufeffa dog".encode(),
            "3.txt": b"a fox",
            "1.txt": b"a cat",
        }
        links = {"2.mp4": (tarfile.LNKTYPE, "x/1.wmv"), "3.mp4": (tarfile.SYMTYPE, "2.mp4"),
                 "4.mp4": (tarfile.SYMTYPE, "4.mp4")}  # fmt: skip
        for name, content in files.items():
            member = tarfile.TarInfo(f"x/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, (kind, target) in links.items():
            member = tarfile.TarInfo(f"x/{name}")
            member.type = kind
            member.linkname = target
            tar.addfile(member)
    clips = read_list(archive)
    captions = {Path(clip.path).name: clip.caption for clip in clips}
    assert captions == {"1.wmv": "a cat", "2.mp4": "a dog", "3.mp4": "a fox"}
    contents = [clip.member.opened().readall() for clip in clips if clip.member is not None]
    assert contents == [b"a", b"a", b"a"]


def test_a_sample_is_of_one_folder_and_takes_the_first_of_each_kind(tmp_path: Path) -> None:
    """The text takes precedence over the JSON, as for clips in a folder."""
    archive = write_tar(
        tmp_path / "0.tar",
        {
            "x/1.mp4": b"a", "x/1.gif": b"b", "x/1.txt": b"a cat", "x/1.en.txt": b"a dog",
            "x/1.json": b'{"text": "a fox", "file_name": "z", "fps": 4}',
            "x/1.b.json": b'{"fps": 9}',
            "y/1.mp4": b"c", "y/1.txt": b"a hen", "y/1": b"?", "y/README": b"?",
        },
    )  # fmt: skip
    with tarfile.open(archive, "a") as tar:
        member = tarfile.TarInfo("y/2.mp4")
        member.type = tarfile.SYMTYPE
        member.linkname = "../x/1.mp4"
        tar.addfile(member)
    said: list[str] = []
    clips = read_list(archive, said.append)
    found = [(clip.path.removeprefix(f"{archive}/"), clip.caption, clip.fps) for clip in clips]
    assert found == [("x/1.mp4", "a cat", 4.0), ("y/1.mp4", "a hen", None), ("y/2.mp4", "", None)]
    members = [clip.member for clip in clips if clip.member is not None]
    assert [member.opened().readall() for member in members] == [b"a", b"c", b"a"]
    # Not the time of the archive, which changes when a file is appended.
    assert {member.modified for member in members} == {7.0}
    names = "`file_name` (1), `.gif` (1), `.txt` (1), `.json` (1), `y/1` (1), `y/README` (1)"
    assert said[0].endswith(f": {names}.")


def test_a_member_is_read_like_a_file_of_its_own(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "0.tar", {"a": b"before", "b.mp4": b"0123456789", "c": b"after"})
    (clip,) = read_list(archive)
    assert clip.member is not None
    stream = clip.member.opened()
    (tmp_path / "b").write_bytes(b"0123456789")
    with open(tmp_path / "b", "rb", buffering=0) as truth:
        for offset, whence, count in (
            (3, os.SEEK_SET, 4), (1, os.SEEK_CUR, 1), (-2, os.SEEK_CUR, 3), (-3, os.SEEK_END, 2),
            (0, os.SEEK_CUR, 9), (5, os.SEEK_END, 4), (10, os.SEEK_SET, 1), (0, os.SEEK_SET, 99),
        ):  # fmt: skip
            assert stream.seek(offset, whence) == truth.seek(offset, whence)
            assert stream.read(count) == truth.read(count)
            assert stream.tell() == truth.tell()


def test_an_error_names_the_file_and_the_flag_that_leads_to_it(tmp_path: Path) -> None:
    write(tmp_path / "inner" / "0.tar", "no archive")
    with pytest.raises(DataError, match=r"`--video-data-path` \(.*inner/0.tar\) cannot be read \("):
        read_list(tmp_path, flag="--video-data-path")
    (tmp_path / "inner" / "0.tar").unlink()
    for source, why in ((tmp_path, "holds no clip"), (tmp_path / "x", "is neither a file nor a")):
        with pytest.raises(DataError, match=rf"`--video-data-path` \({source}\) {why}"):
            read_list(source, flag="--video-data-path")


def test_captions_of_windows_are_read(tmp_path: Path) -> None:
    """A file may begin with a byte-order mark, and have an ending in capitals."""
    write(tmp_path / "a.mp4", "")
    write(tmp_path / "a.txt", "\ufeffa cat")
    write(tmp_path / "b.mp4", "")
    write(tmp_path / "b.TXT", "a dog")
    assert [clip.caption for clip in read_list(tmp_path)] == ["a cat", "a dog"]


def test_bad_tar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_tar(tmp_path / "0.tar", {"a.mp4": b"no video", "a.txt": b"a cat"})
    with pytest.raises(DataError, match=r"The clip .*0.tar/a.mp4 cannot be read \("):
        probe(read_list(archive)[0])
    packed = tmp_path / "1.tar"
    packed.write_bytes(gzip.compress(archive.read_bytes()))
    with pytest.raises(
        DataError, match=r"1.tar\) cannot be read \(it is no whole tar file \(.*must"
    ):
        read_list(packed)
    archive.write_bytes(archive.read_bytes()[:600])
    with pytest.raises(DataError, match=r"0.tar\) cannot be read \(it is no whole tar file \("):
        read_list(archive)
    for name, content, why in (
        ("a.json", b"[3]", r"a.json holds \[3\], no object"),
        ("a.json", b'{"text": 3}', r"0.tar a.mp4 has the caption `text` 3, which is no"),
        ("a.txt", b"\xff", r"a.txt is not UTF-8"),
    ):
        write_tar(archive, {"a.mp4": b"", name: content})
        with pytest.raises(DataError, match=why):
            read_list(archive)
    monkeypatch.setattr(archives, "MAX_LINE_BYTES", 30)
    for name in ("a.json", "a.txt"):
        for size in (30, 31):
            files = {"a.mp4": bytes(99), name: b'{"text": "a cat"}'.ljust(size)}
            write_tar(archive, files)
            if size == 30:
                assert len(read_list(archive)) == 1
                continue
            with pytest.raises(DataError, match=rf"{name} has more than 30 bytes"):
                read_list(archive)


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
