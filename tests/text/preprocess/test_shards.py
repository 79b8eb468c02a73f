"""Shards hold all documents in order, cut by the documents alone."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.indexed import check_indexed_dataset, read_index
from megatron_ext.errors import ConfigError
from megatron_ext.text.preprocess.datasets import _shards
from megatron_ext.text.preprocess.encode import Encoded
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import PartMarker, PartWriter, read_marker
from tests.text import tiny
from tests.text.preprocess.runs import left_in, run, sentencepiece


def greedy(lengths: list[int], limit: int) -> list[int]:
    """Return the number of documents of each shard, one document after the other."""
    counts, filled = [0], 0
    for length in lengths:
        if filled and filled + length > limit:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += length
    return counts


def lengths_of(prefix: Path | str) -> list[int]:
    index = read_index(prefix)
    ends = np.concatenate([[0], np.cumsum(index.lengths)])[index.documents]
    return [int(length) for length in np.diff(ends)]


@pytest.mark.parametrize("limit", [1, 150, 1000, 10**9])
def test_shards_are_cut_at_documents_whatever_the_parts(tmp_path: Path, limit: int) -> None:
    documents = tiny.corpus(60)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    run(tmp_path, path, json_keys=("text", "title"))
    whole = {key: lengths_of(tmp_path / f"out_{key}_document") for key in ("text", "title")}
    wanted = greedy(whole["text"], limit)
    found = set()
    for workers, size in ((1, 1.0), (2, 0.001)):
        report, _ = run(
            tmp_path, path, json_keys=("text", "title"), shard_tokens=limit, workers=workers,
            part_megabytes=size, output_prefix=str(tmp_path / "s"),
        )  # fmt: skip
        names = [f"s_{n:05}_{key}_document" for key in whole for n in range(len(wanted))]
        assert [Path(prefix).name for prefix in report.prefixes] == names
        number = "00000" if len(wanted) == 1 else f"{{00000..{len(wanted) - 1:05}}}"
        assert report.shown == [f"{tmp_path}/s_{number}_{key}_document" for key in whole]
        for key in whole:
            shards = [p for p in report.prefixes if p.endswith(f"_{key}_document")]
            assert [check_indexed_dataset(p).num_documents for p in shards] == wanted
            assert [length for p in shards for length in lengths_of(p)] == whole[key]
            data = b"".join(Path(f"{p}.bin").read_bytes() for p in shards)
            assert data == (tmp_path / f"out_{key}_document.bin").read_bytes()
        files = sorted(tmp_path.glob("s_*"))
        assert len(files) == 4 * len(wanted)
        found.add(tuple(file.read_bytes() for file in files))
    assert len(found) == 1


def test_shards_of_an_earlier_run_are_removed_and_the_way_to_use_them_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_ext.text.preprocess.run import run_or_explain

    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(60))
    of_others = ["out_00090_sub_text_document.bin", "out_00090_title_document.bin"]
    of_others += ["out_77_text_document.bin", "out_987654_text_document.idx"]  # of partitions
    for name in of_others:
        (tmp_path / name).touch()
    keys: dict[str, Any] = {"json_keys": ("text", "head")}
    rows = [{"text": row["text"], "head": row["title"]} for row in tiny.corpus(60)]
    path = tiny.write_jsonl(tmp_path / "in.jsonl", rows)
    report, _ = run(tmp_path, path, shard_tokens=150, **keys)
    assert len(report.prefixes) > 20
    report, _ = run(tmp_path, path, shard_tokens=1000, **keys)
    count = len(report.prefixes) // 2
    names = [
        f"out_{n:05}_{key}_document.{kind}"
        for n in range(count) for key in ("head", "text") for kind in ("bin", "idx")
    ]  # fmt: skip
    assert left_in(tmp_path) == [*names, *of_others]
    for name in names:
        (tmp_path / name).unlink()
    report, _ = run(tmp_path, path, shard_tokens=1000)
    assert run_or_explain(lambda: report) == 0
    last = f"{tmp_path}/out_{{00000..{count - 1:05}}}_text_document"
    said = capsys.readouterr().err
    assert f"-> {last}\n" in said
    one, _ = run(tmp_path, path, shard_tokens=10**9)
    assert one.shown == one.prefixes == [f"{tmp_path}/out_00000_text_document"]
    assert run_or_explain(lambda: one) == 0
    assert "Train on the shards" not in capsys.readouterr().err
    assert f"Train on the shards with `--data-path {last}`; bash writes them out." in said


def test_too_many_shards_and_shards_of_partitions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ext.text.preprocess import datasets

    with pytest.raises(ConfigError, match="`--shard-tokens` does not go with `--partitions`; give"):
        PreprocessOptions(["a"], "x", sentencepiece(), partitions=2, shard_tokens=5)
    monkeypatch.setattr(datasets, "_MOST_SHARDS", 10)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(60))
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, path, shard_tokens=10)
    found = re.fullmatch(
        r"`--shard-tokens` \(10\) makes more than 10 shards of \d+ tokens; give at least (\d+)\.",
        str(caught.value),
    )
    assert found is not None
    assert len(run(tmp_path, path, shard_tokens=int(found[1]))[0].prefixes) <= 10


def part_of(folder: Path, number: int, lengths: list[int]) -> PartMarker:
    """Write a part whose documents have the given numbers of tokens, of one sequence if any."""
    writer = PartWriter(folder, "key", number, 1, [np.dtype(np.uint16)])
    sequences = np.array([length for length in lengths if length], np.int32)
    counts = np.array([int(length > 0) for length in lengths], np.int32)
    writer.write(0, 0, Encoded(np.zeros(sum(lengths), np.int64), sequences, counts))
    writer.count(len(lengths), len(lengths))
    writer.finish()
    marker = read_marker(folder, "key", number)
    assert marker is not None
    return marker


def test_a_shard_may_be_full_and_empty_documents_fill_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small numbers, whose sums often are exactly the limit; the last shard may be the most."""
    from megatron_ext.text.preprocess import datasets

    dice = np.random.default_rng(4)
    cases = [([0, 0, 9, 1, 4], 5), ([3, 2, 5, 0, 1], 5), ([5, 0, 0, 5], 5)]
    cases += [(dice.integers(0, 4, 12).tolist(), int(dice.integers(1, 7))) for _ in range(20)]
    for number, (lengths, limit) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        markers = [part_of(folder, 0, lengths[:3]), part_of(folder, 1, lengths[3:])]
        wanted = greedy(lengths, limit)
        monkeypatch.setattr(datasets, "_MOST_SHARDS", len(wanted))
        options = PreprocessOptions(["a"], "x", sentencepiece(), shard_tokens=limit)
        shards = _shards(options, folder, markers)
        found = [sum((s.end or 0) - (s.start or 0) for s in shard) for shard in shards]
        assert found == wanted, (lengths, limit)
