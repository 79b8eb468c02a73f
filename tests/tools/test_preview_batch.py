"""tools/preview_batch.py end to end: marks, counts, and the batches of a run."""

import json
import re
from collections.abc import Sequence
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.data.batch import Batch
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.device import select
from megatron_ext.inspect.preview.collect import collect
from megatron_ext.inspect.preview.rows import Row, Step
from megatron_ext.programs.preview_batch import main
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.run import Run
from tests.text.sft.tiny import tokenizer
from tests.training_runs import prepared

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 16 "
    "--position-embedding-type rope --lr 1e-3 --eval-iters 0 --num-workers 0 --log-interval 100 "
    "--no-gradient-accumulation-fusion --micro-batch-size 1"
).split()

HELLO = [("user", "Hi"), ("assistant", "Hö <b>\nok")]
SUM = [("system", "Be kind."), ("user", "2+2?"), ("assistant", "4"), ("user", "so?"),
       ("assistant", "\tno\x1b")]  # fmt: skip


def line(turns: Sequence[tuple[str, str]], **more: Any) -> str:
    messages = [{"role": role, "content": text, **more} for role, text in turns]
    return json.dumps({"messages": messages}) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files of conversations, tokenized by the first test that reads them."""
    folder = tmp_path_factory.mktemp("conversations")
    tokenizer("chatml").save_pretrained(folder / "tokenizer")
    (folder / "a.jsonl").write_text(line(HELLO) + line(SUM))
    (folder / "b.jsonl").write_text(line(HELLO))
    (folder / "masked.jsonl").write_text(line(HELLO, loss_mask=0))
    many = [line([("user", "x" * n), *SUM[1:]]) for n in range(9)]
    (folder / "many.jsonl").write_text("".join(many))
    return folder


def words_of(folder: Path, *files: str) -> list[str]:
    return [
        *MODEL,
        *"--sft --train-epochs 2 --global-batch-size 1 --seq-length 200".split(),
        *"--max-position-embeddings 200 --tokenizer-type HuggingFaceTokenizer".split(),
        *("--tokenizer-model", str(folder / "tokenizer")),
        *("--train-data-path", *(str(folder / file) for file in files)),
    ]


@pytest.fixture
def sft(folder: Path) -> list[str]:
    return words_of(folder, "a.jsonl", "b.jsonl")


def run(words: Sequence[str], *own: str, ranks: int = 1) -> int:
    """Run the tool in a process of its own, as its groups must not outlive a test."""
    argv = ["--no-color", "--world-size", str(ranks), *own, "--", *words]
    return fork_ranks(lambda: main(argv), 1)


MARKED = """\
      0 │ <|im_start|>user↵
      6 │ Hi<|im_end|>↵
     10 │ <|im_start|>assistant↵
     21 │ ⟦Hö <b>↵⟧
     29 │ ⟦ok<|im_end|>↵⟧
"""
MARKED_SUM = """\
      0 │ <|im_start|>system↵
      8 │ Be kind.<|im_end|>↵
     18 │ <|im_start|>user↵
     24 │ 2+2?<|im_end|>↵
     30 │ <|im_start|>assistant↵
     41 │ ⟦4<|im_end|>↵⟧
     44 │ <|im_start|>user↵
     50 │ so?<|im_end|>↵
     55 │ <|im_start|>assistant↵
     66 │ ⟦⇥no\\x1b<|im_end|>↵⟧
"""


def test_marks_and_counts(sft: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """HELLO has 33 tokens, 12 of them trained; SUM 72, of them 3 and 6."""
    assert run(sft, "--strict") == 0
    shown = capfd.readouterr().out
    assert shown.count(MARKED) == 2 and shown.count(MARKED_SUM) == 1
    assert "⟦" not in shown.replace(MARKED, "").replace(MARKED_SUM, "")
    assert "columns" in shown and f"number 2 of {folder}/a.jsonl" in shown
    cells = [re.findall(r"[^│\s]+", text) for text in shown.splitlines() if text[:1] == "│"]
    table = ["1 12 20 37.5 12", "2 21 82 20.4 21", "3 33 102 24.4 33"]
    assert sorted(" ".join(row[1:]) for row in cells[-3:]) == table
    assert "1 rows, 0 of them empty; 200 positions, 67.5% filled, 65 padding" in shown
    assert "step 1: N = 33 targets, D = 33 weight, 1 micro-batches on each rank" in shown


def test_reduced_weights_and_mtp(sft: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*sft, "--loss-reduction", "sample", "--mtp-num-layers", "1"], "--strict") == 0
    shown = capfd.readouterr().out
    assert "│ ⟦0.111|4<|im_end|>↵⟧" in shown
    assert shown.count("MTP 1 │ ⟦0.111|4<|im_end|>↵⟧") == 1
    assert shown.count("MTP 1 │ ∅∅") == 3
    assert "D = 3 weight, 1 micro-batches on each rank; of the MTP depths 3" in shown


class Spans(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tokens: list[dict[str, Any]] = []
        self._inside = False
        self.text = ""
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self._inside = tag == "span" and "data-ids" in named
        if self._inside:
            self.tokens.append({**named, "text": ""})
        self.addresses += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside:
            self.tokens[-1]["text"] += data


def test_the_page_shows_tokens_and_weights(sft: list[str], folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert run([*sft, "--mtp-num-layers", "1"], "--html", str(path)) == 0
    page = path.read_text(encoding="utf-8")
    found = Spans(page)
    loaded: Any = tokenizer("chatml")
    conversations = {}
    for turns in (HELLO, SUM):
        messages = [{"role": role, "content": text} for role, text in turns]
        conversations[len(turns)] = loaded.apply_chat_template(messages, return_dict=True)
    ids = [int(i) for token in found.tokens for i in token["data-ids"].split(",")]
    begins = [i for i, token in enumerate(found.tokens) if token["data-weight"] == ""]
    assert len(begins) == 3
    want = [list(conversations[n]["input_ids"]) for n in (2, 2, 5)]
    parts = [found.tokens[a:b] for a, b in zip(begins, [*begins[1:], None], strict=True)]
    got = [[int(i) for token in part for i in token["data-ids"].split(",")] for part in parts]
    assert sorted(got) == sorted(want) and len(ids) == sum(map(len, want))
    texts = sorted("".join(t["text"] for t in part if t["data-weight"] == "1") for part in parts)
    assert texts == ["4<|im_end|>↵⇥no\\x1b<|im_end|>↵", *["Hö <b>↵ok<|im_end|>↵"] * 2]
    assert {t["data-weight"] for t in found.tokens} == {"", "0", "1"}
    four = next(token for token in found.tokens if token["text"] == "4")
    assert four["data-position"] == "41"
    _, _, weight, _, *lines = four["title"].splitlines()
    assert weight == "weight 1"
    assert lines == [f"sample 1, number 2 of {folder}/a.jsonl", "MTP 1: “↵” (198), weight 1"]
    assert "<script" not in page and "<b>ok" not in page and not found.addresses
    assert "color-scheme: light dark" in page and "light-dark(" in page


def test_suspicious_data_fails_if_strict(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = words_of(folder, "a.jsonl", "masked.jsonl")
    assert run(words) == 0
    assert run(words, "--strict") == 1
    shown = capfd.readouterr().out
    assert shown.count("warning: dropped: conversations without a trained token, by their l") == 2


def test_what_is_not_used_of_the_rows_fails_if_strict(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line(HELLO, score=1)), json.loads(line(SUM))]
    (folder / "unused.jsonl").write_text(
        "".join(json.dumps({**row, "id": i}) + "\n" for i, row in enumerate(rows))
    )
    words = [*words_of(folder, "unused.jsonl"), *"--sft-max-length 40".split()]
    assert run([*words, "--sft-truncation", "left"], "--strict") == 1
    shown = capfd.readouterr().out.replace("\n", " ")
    assert "warning: ignored, because neither this program nor the chat template uses it" in shown
    assert "`messages[].score` (2)" in shown and "column `id` (2)" in shown
    assert "`--sft-truncation left` cuts 1 of 2 conversations of the train split to" in shown
    assert "(40), and 32 tokens are lost" in shown
    assert "conversations: 2 rows, 7 messages, 3 assistant turns" in shown


@pytest.mark.parametrize(
    ("own", "more", "sentence"),
    [
        ("--step 9", "", "`--step` (9) and `--steps` (1) must lie within the 2 steps of the run"),
        ("--rank 1", "", "`--rank` (1) must be one of the 1 data-parallel ranks"),
        ("--html /nowhere/x.html", "", "`--html` (/nowhere/x.html) cannot be written"),
        ("", "--sft-max-length 20", "are longer than `--sft-max-length` (20)"),
        ("", "--micro-batch-sizes 2", "--micro-batch-size"),
    ],
)
def test_bad_flags_end_with_a_sentence(
    sft: list[str], own: str, more: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*sft, *more.split()], *own.split()) == 2
    assert sentence in capfd.readouterr().err


def test_a_launched_rank_beyond_the_first_is_silent(
    sft: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(sft) == 0
    assert capfd.readouterr().out == ""


def trained(words: Sequence[str], ranks: int, folder: Path) -> dict[int, list[list[Batch]]]:
    """Return the steps of a run by data-parallel rank, as its last stage gets them."""
    device = select()
    task, config, made = prepared(words, ranks=ranks, device=device.kind)

    def prepare(run: Run) -> None:
        draw, steps = run.train_source.next_step, []

        def keep(num_microbatches: int, seq_length: int | None) -> list[Batch] | None:
            batches = draw(num_microbatches, seq_length)
            steps.append(batches)
            torch.save(steps, folder / f"{run.context.dp_rank}.pt")
            return batches

        run.train_source.next_step = keep  # type: ignore[method-assign]

    main = partial(pretrain, task, config, device=device, assets=made, prepare=prepare)
    assert fork_ranks(main, ranks) == 0
    return {int(p.stem): torch.load(p, weights_only=False) for p in folder.glob("*.pt")}


def previewed(words: Sequence[str], ranks: int, folder: Path, first: int, count: int) -> list[Step]:
    def draw() -> None:
        task, config, made = prepared(words, ranks=ranks, device=select().kind)
        torch.save(collect(config, task, made, first=first, count=count), folder / "steps")

    assert fork_ranks(draw, 1) == 0
    steps: list[Step] = torch.load(folder / "steps", weights_only=False)
    return steps


def assert_same(row: Row, batch: Batch) -> None:
    i = row.number
    pairs = [
        (row.tokens, batch.tokens), (row.labels, batch.labels), (row.weights, batch.loss_weights),
        (row.positions, batch.position_ids),
    ]  # fmt: skip
    for mine, theirs in pairs:
        np.testing.assert_array_equal(mine, theirs[i].numpy())
    assert len(row.mtp_labels) == len(batch.mtp_labels)
    for k, (labels, masks) in enumerate(zip(batch.mtp_labels, batch.mtp_loss_weights, strict=True)):
        np.testing.assert_array_equal(row.mtp_labels[k], labels[i].numpy())
        np.testing.assert_array_equal(row.mtp_weights[k], masks[i].numpy())
    if row.samples is not None:
        np.testing.assert_array_equal(row.samples, batch.sample_ids[i].numpy())


def compare(words: Sequence[str], folder: Path, first: int, count: int) -> list[Step]:
    """Compare the rows of a run on two replicas with the preview; return the previewed steps."""
    theirs = trained(words, 2, folder)
    steps = previewed(words, 2, folder, first, count)
    assert len(steps) == count and set(theirs) == {0, 1}
    for step in steps:
        batches = {rank: drawn[step.iteration - 1] for rank, drawn in theirs.items()}
        size = batches[0][0].tokens.size(0)
        assert step.num_microbatches == len(batches[1])
        assert len(step.rows) == size * sum(map(len, batches.values()))
        for row in step.rows:
            assert_same(row, batches[row.dp_rank][row.microbatch])
        masks = torch.cat([b.loss_weights for drawn in batches.values() for b in drawn]).double()
        assert step.targets == int(masks.count_nonzero())
        assert step.weight == pytest.approx(float(masks.sum()), rel=1e-6)
    return steps


@pytest.mark.parametrize("batching", ["packed", "padded", "token-budget"])
def test_rows_are_those_of_a_run(folder: Path, tmp_path: Path, batching: str) -> None:
    epochs = 3 if batching == "packed" else 1
    words = f"--global-batch-size 4 --sft-batching {batching} --train-epochs {epochs}".split()
    more = "--loss-reduction square --mtp-num-layers 2".split()
    words = [*words_of(folder, "many.jsonl"), *words, *more]
    steps = compare(words, tmp_path, 2, 2)
    assert all(row.samples is not None for step in steps for row in step.rows)


@pytest.mark.parametrize(
    "more",
    [
        "--rampup-batch-size 4 4 8 --reset-position-ids --reset-attention-mask --eod-mask-loss "
        "--mtp-num-layers 1 --loss-reduction sample",
        "--dataloader-type cyclic --micro-batch-size 2",
    ],
)
def test_the_rows_are_those_of_a_run_on_a_blend(tmp_path: Path, more: str) -> None:
    for index, name in enumerate(("one", "two")):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            for length in (9, 5, 14, 3, 30, 17) * 5:
                document = [*range(100 * index, 100 * index + length - 1), 500]
                writer.add_document(np.array(document), [length])
    flags = (
        f"--data-path 0.7 {tmp_path / 'one'} 0.3 {tmp_path / 'two'} --split 100,0,0 "
        "--data-cache-path cache --tokenizer-type NullTokenizer --vocab-size 500 "
        "--seq-length 16 --max-position-embeddings 16 --global-batch-size 8 "
    ).replace("cache ", f"{tmp_path / 'cache'} ")
    iterations = "--train-samples 28" if "rampup" in more else "--train-iters 4"
    words = [*MODEL, *flags.split(), *more.split(), *iterations.split()]
    steps = compare(words, tmp_path, 2, 3)
    assert [step.consumed for step in steps] == ([4, 8, 16] if "rampup" in more else [8, 16, 24])
    for row in (row for step in steps for row in step.rows):
        high = bool((row.tokens[row.tokens < 500] >= 100).all())
        assert row.provenance.source == str(tmp_path / ("two" if high else "one"))
    for step in steps:
        assert len({row.provenance.sample for row in step.rows}) == len(step.rows)


def test_the_program_is_known_by_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.inspect.preview import videos
    from megatron_ext.programs import preview_batch

    monkeypatch.setattr(videos, "preview_videos", lambda words, *_: ["a warning"])
    monkeypatch.setattr(preview_batch, "preview", lambda *_: [])
    for word, is_video in (
        ("--video-data-path", True), ("--video_data_path", True), ("--video-data-path=x", True),
        ("--data-path", False), ("--video", False),
    ):  # fmt: skip
        assert preview_batch.main(["--strict", "--", word, "x"]) == int(is_video), word
