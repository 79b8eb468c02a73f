"""Cuts, the shift and padding; cases worked by hand."""

import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import documents_of_positions
from megatron_ext.data.samplers import shuffled
from megatron_ext.data.step_plan import StepPlan
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.inputs import conversation_inputs
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.dataset import (
    ConversationReport,
    SftDataset,
    Truncation,
    TruncationCounts,
    _about_stores,
    build_splits,
    cost_model,
    kept_tokens,
    lay_out,
    report_conversations,
)
from megatron_ext.text.sft.masks import TokenizedConversation, tokenize_conversation
from megatron_ext.text.sft.store import about_path
from megatron_ext.text.sft.task import conversation_lines
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.train.task import Datasets
from tests import training_runs
from tests.text.sft import tiny

PLACE = Place("chats.parquet", 3)
EOS = 9
TOKENS = TokenizedConversation([10, 11, 12, 20, EOS], [0, 0, 0, 1, 1])  # p0 p1 p2 r0 r1


def test_the_response_is_trained_and_the_prompt_is_not() -> None:
    row = lay_out({0: TOKENS}, 4, 0)
    assert row["tokens"].tolist() == [10, 11, 12, 20]
    assert row["labels"].tolist() == [11, 12, 20, EOS]
    assert row["labels"][row["loss_mask"] > 0].tolist() == [20, EOS]
    assert row["loss_mask"].dtype == np.float32


def test_the_same_case_from_a_row() -> None:
    tokenizer = tiny.tokenizer("chatml", template="{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}")  # fmt: skip
    row = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]}
    tokenized = tokenize_conversation(tokenizer, read_conversation(row, PLACE))
    laid = lay_out({0: tokenized}, 4, 0)
    assert tokenizer.decode(laid["labels"][laid["loss_mask"] > 0]) == "d<|im_end|>"
    assert laid["loss_mask"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("truncation", "kept"), [("left", [12, 20, EOS]), ("right", [10, 11, 12])])
def test_truncation_keeps_the_last_or_first_tokens(truncation: Truncation, kept: list[int]) -> None:
    assert TOKENS.ids[kept_tokens(3, truncation)] == kept
    assert TOKENS.ids[kept_tokens(5, truncation)] == TOKENS.ids


def test_padding_with_the_end_token_trains_the_end_token_once() -> None:
    row = lay_out({3: TOKENS}, 7, pad_id=EOS)
    assert row["tokens"].tolist() == [10, 11, 12, 20, EOS, EOS, EOS]
    assert row["labels"].tolist() == [11, 12, 20, EOS, EOS, EOS, EOS]
    assert row["loss_mask"].tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 0, 0]
    assert row["sample_ids"].tolist() == [3, 3, 3, 3, -1, -1, -1]


def test_packed_conversations_share_no_label() -> None:
    # A second conversation cut from the left begins with a trained token, which is never a label.
    second = TokenizedConversation([21, 22, EOS], [1, 1, 1])
    row = lay_out({5: TOKENS, 2: second}, 7, pad_id=0)
    assert row["tokens"].tolist() == [10, 11, 12, 20, 21, 22, 0]
    assert row["labels"].tolist() == [11, 12, 20, EOS, 22, EOS, 0]
    assert row["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert row["sample_ids"].tolist() == [5, 5, 5, 5, 2, 2, -1]


def test_padded_and_packed_rows_give_the_same_summed_loss() -> None:
    generator = np.random.default_rng(0)
    lengths = (5, 9, 2)
    samples: dict[int, Any] = {n: [generator.integers(0, k, n) for k in (16, 2)] for n in lengths}
    table = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def summed(rows: list[dict[str, Any]]) -> float:
        total = 0.0
        for row in rows:
            logits = table[torch.from_numpy(row["tokens"])]
            labels = torch.from_numpy(row["labels"])
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            total += float((losses * torch.from_numpy(row["loss_mask"])).sum())
        return total

    padded = summed([lay_out({number: sample}, 8, 0) for number, sample in samples.items()])
    packed = summed([lay_out(samples, 16, 0)])
    assert packed == pytest.approx(padded, rel=1e-12)
    assert packed > 0


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="2 conversations of 8 positions together must fit a row o"):
        lay_out({0: TOKENS, 1: TOKENS}, 7, 0)


ROWS = tiny.chats(40)
PAD = tiny.tokenizer("chatml").pad_token_id
BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 300 --swiglu "
    "--max-position-embeddings 300 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 "
    "--train-iters 2 --sft --tokenizer-type HuggingFaceTokenizer --ffn-hidden-size 20"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    tiny.save(path / "tokenizer")
    tiny.write_jsonl(path / "a.jsonl", ROWS[:25])
    tiny.write_jsonl(path / "b.jsonl", ROWS[25:])
    return path


def config_of(folder: Path, *words: str) -> RunConfig:
    tokenizer = ["--tokenizer-model", str(folder / "tokenizer")]
    return training_runs.config_of([*BASE, *tokenizer, *words], ranks=0)


def splits(folder: Path, *words: str) -> Datasets:
    config = config_of(folder, *words)
    return build_splits(config, build_tokenizer(config.section(TokenizerConfig)))


@pytest.fixture(scope="module")
def train(folder: Path) -> SftDataset:
    files = ["--train-data-path", str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    found = splits(folder, *files).train
    assert isinstance(found, SftDataset)
    return found


def tokenized(number: int) -> tuple[list[int], list[int]]:
    conversation = read_conversation(ROWS[number], Place("f", number))
    ids, mask = tokenize_conversation(tiny.tokenizer("chatml"), conversation)
    return ids, mask


@pytest.mark.parametrize("row", [(), (3,), (30, 2), (7, 39, 0)])
def test_a_row_lays_conversations_side_by_side(row: tuple[int, ...], train: SftDataset) -> None:
    made = train[row]
    want: dict[str, list[Any]] = {name: [] for name in made}
    for sample in row:
        ids, mask = tokenized(sample)
        assert train.lengths[sample] == len(ids) - 1
        want["tokens"] += ids[:-1]
        want["labels"] += ids[1:]
        want["loss_mask"] += mask[1:]
        want["position_ids"] += range(len(ids) - 1)
        want["sample_ids"] += [sample] * (len(ids) - 1)
    used = len(want["tokens"])
    pad = tiny.tokenizer("chatml").pad_token_id
    filled = {"tokens": pad, "labels": pad, "loss_mask": 0, "position_ids": 0, "sample_ids": -1}
    for name, values in want.items():
        assert made[name].tolist() == values + [filled[name]] * (300 - used), name
        assert made[name].dtype == (torch.float32 if name == "loss_mask" else torch.int64)


def test_each_position_of_padding_is_a_document_of_its_own(train: SftDataset) -> None:
    documents = documents_of_positions(train[(1, 2)]["position_ids"][None])[0]
    one, two = train.lengths[1], train.lengths[2]
    assert documents[:one].unique().tolist() == [0]
    assert documents[one : one + two].unique().tolist() == [1]
    assert documents[one + two :].diff().unique().tolist() == [1]


def test_a_sample_knows_its_file(train: SftDataset) -> None:
    sources = [store.source_of(row)[0] for store, row in map(train.place_of, (0, 24, 25, 39))]
    assert [Path(source).name for source in sources] == ["a.jsonl"] * 2 + ["b.jsonl"] * 2


def test_a_loader_process_gets_a_small_dataset(train: SftDataset) -> None:
    _ = train[(0,)]
    copy = pickle.loads(pickle.dumps(train))
    assert copy.plan is None
    assert train.plan is not None
    assert all(torch.equal(copy[(5, 1)][name], value) for name, value in train[(5, 1)].items())


def test_splits_share_the_conversations_out(folder: Path) -> None:
    def firsts(dataset: Any) -> set[tuple[int, ...]]:
        return {tuple(dataset[(i,)]["tokens"].tolist()) for i in range(len(dataset))}

    paths = ["--data-path", str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    one = splits(folder, *paths, "--split", "80,15,5")
    again = splits(folder, *paths, "--split", "80,15,5")
    other = splits(folder, *paths, "--split", "80,15,5", "--seed", "5")
    parts = [firsts(split) for split in (one.train, one.valid, one.test)]
    assert [len(part) for part in parts] == [32, 6, 2]
    assert len(set.union(*parts)) == 40
    assert firsts(again.train) == parts[0]
    assert firsts(other.train) != parts[0]
    assert splits(folder, *paths, "--split", "1,0,0").valid is None
    # Which ones they are must not change: a run that goes on would validate what it has trained.
    order = shuffled(40, 1234, 2)
    for part, chosen in zip(parts, (order[:32], order[32:38], order[38:]), strict=True):
        assert part == {tuple((tokenized(n)[0][:-1] + [PAD] * 300)[:300]) for n in chosen.tolist()}


def test_training_is_shuffled_and_held_out_conversations_keep_their_order(folder: Path) -> None:
    paths = [f"--{name}-data-path={folder}/{file}.jsonl"
             for name, file in (("train", "a"), ("valid", "b"), ("test", "b"))]  # fmt: skip
    built = splits(folder, *paths, "--sft-batching", "padded")

    def read(dataset: Any) -> list[int]:
        plan = dataset.plan
        steps = range(plan.steps_per_epoch)
        return [n for s in steps for batch in plan.microbatches(s, 0) for row in batch for n in row]

    assert sorted(read(built.train)) == list(range(25)) != read(built.train)
    assert read(built.valid) == read(built.test) == list(range(15))
    assert splits(folder, *paths[1:], "--skip-train").train is None
    with pytest.raises(ConfigError, match="`--sft` needs conversations to train on"):
        splits(folder, *paths[1:])


def test_a_tokenizer_without_padding_fills_up_with_zeros(tmp_path: Path) -> None:
    made = tiny.tokenizer("chatml")
    made.pad_token = None
    made.save_pretrained(tmp_path / "tokenizer")
    path = tiny.write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    found = splits(tmp_path, "--train-data-path", str(path)).train
    assert isinstance(found, SftDataset)
    assert found[()]["tokens"].tolist() == [0] * 300


def report(folder: Path, *words: str) -> ConversationReport:
    config = config_of(folder, *words)
    return report_conversations(config, build_tokenizer(config.section(TokenizerConfig)))


def test_conversations_without_a_trained_token_after_truncation_are_dropped(folder: Path) -> None:
    tokens = [tokenized(number) for number in range(25)]
    for truncation, length in (("right", 60), ("left", 12)):
        kept = kept_tokens(length, truncation)  # type: ignore[arg-type]
        trains = [number for number, (_, mask) in enumerate(tokens) if any(mask[kept][1:])]
        words = ["--train-data-path", str(folder / "a.jsonl"), "--sft-max-length", str(length)]
        words += ["--sft-truncation", truncation]
        found = splits(folder, *words).train
        assert isinstance(found, SftDataset) and len(found) == len(trains)
        for sample, number in enumerate(trains):
            size = len(tokens[number][0][kept]) - 1
            assert found[(sample,)]["tokens"][:size].tolist() == tokens[number][0][kept][:-1]
        long = [len(ids) - length for ids, _ in tokens if len(ids) > length]
        sentence = (
            f"`--sft-truncation {truncation}` cuts {len(long)} of 25 conversations of the train "
            f"split to `--sft-max-length` ({length}), and {sum(long):,} tokens are lost"
        )
        assert any(text.startswith(sentence) for text in report(folder, *words).warnings)


def test_a_run_of_which_nothing_is_trained_is_refused(folder: Path) -> None:
    words = ["--train-data-path", str(folder / "a.jsonl"), "--sft-max-length", "5"]
    sentence = r"None of the 25 conversations of the train split has a trained token within `--sft-"
    with pytest.raises(DataError, match=sentence):
        splits(folder, *words, "--sft-truncation", "right")
    masked = [{"messages": [{**m, "loss_mask": 0} for m in ROWS[0]["messages"]]}]
    path = tiny.write_jsonl(folder / "masked.jsonl", masked)
    with pytest.raises(DataError, match=r"No conversation has a trained token \(1 rows, "):
        splits(folder, "--train-data-path", str(path))
    both = ["--train-data-path", str(path), str(folder / "a.jsonl")]
    found = splits(folder, *both).train
    assert isinstance(found, SftDataset) and len(found) == 25
    assert report(folder, *both).warnings == [
        "dropped: conversations without a trained token, by their loss masks (1)"
    ]


def test_a_valid_split_that_is_empty_is_noted(folder: Path) -> None:
    path = tiny.write_jsonl(folder / "few.jsonl", ROWS[:5])
    words = ["--data-path", str(path), "--eval-iters", "1"]
    (line,) = [
        text for text in report(folder, *words, "--split", "98,2,0").notes if "split" in text
    ]
    assert line.startswith("the valid split is empty, so nothing is validated: `--split` (98,2,0)")
    assert line.endswith("leaves it none of 5 conversations")
    assert len(report(folder, *words, "--split", "1,0,0").notes) == 1
    assert report(folder, *words, "--split", "1,1,0").notes[0].startswith("conversations: 5 rows, ")
    never = ["--data-path", str(path), "--eval-iters", "0", "--split", "98,2,0"]
    assert len(report(folder, *never).notes) == 1
    masked = [{"messages": [{**m, "loss_mask": 0} for m in row["messages"]]} for row in ROWS[:3]]
    both = ["--train-data-path", str(path), "--eval-iters", "1", "--valid-data-path"]
    long = [f"--sft-max-length={len(tokenized(0)[0])}", "--sft-truncation", "right"]
    asked = {"role": "user", "content": "x" * 200}
    cut = [{"messages": [asked, *row["messages"]]} for row in ROWS[:3]]
    for rows, more in ((masked, []), (cut, long)):
        held_out = str(tiny.write_jsonl(folder / "held_out.jsonl", rows))
        assert splits(folder, *both, held_out, *more).valid is None
    assert report(folder, *both, held_out, *long).notes[-1] == (
        "the valid split has no conversation with a trained token, so nothing is validated"
    )


def test_a_preprocessed_prefix_and_its_file_are_the_same(folder: Path, train: SftDataset) -> None:
    prefixes = [store.prefix for store in train._stores]
    words = ["--train-data-path", f"{prefixes[0]}_sft_document", str(folder / "b.jsonl")]
    other = splits(folder, *words).train
    assert isinstance(other, SftDataset)
    for sample in range(len(train)):
        assert torch.equal(train[(sample,)]["tokens"], other[(sample,)]["tokens"])


def test_the_cost_is_that_of_the_model(folder: Path) -> None:
    """h 8, n 2, d 4, f 20 gated, 2 layers, v 258: 2 (4 * 64 + 3 * 160) + 8 v, and 2 * 2 * 4."""
    config = config_of(folder, "--data-path", "f", "--make-vocab-size-divisible-by", "1")
    from megatron_ext.text.run import padded_to_ranks

    padded = padded_to_ranks(config.model, config.parallel, 258)
    model = cost_model(dataclasses.replace(config, model=padded))
    linear, quadratic = 2 * (4 * 64 + 3 * 160) + 8 * 258, 2 * 2 * 4
    assert model.linear * quadratic == model.quadratic * linear


def test_a_conversation_of_exactly_the_greatest_length_is_whole(folder: Path) -> None:
    longest = max(len(tokenized(number)[0]) for number in range(25))
    words = ["--train-data-path", str(folder / "a.jsonl"), "--sft-max-length"]
    found = splits(folder, *words, str(longest)).train
    assert isinstance(found, SftDataset)
    assert (found.cut.shortened, found.cut.tokens, int(found.lengths.max())) == (0, 0, longest - 1)
    assert found.cut.sentences("train") == []
    with pytest.raises(
        DataError, match=rf"a.jsonl: 1 of 25 .* such as number \d+ .* {longest} tok"
    ):
        splits(folder, *words, str(longest - 1))


def test_rows_are_planned_for_the_schedule_and_known_by_what_determines_them(folder: Path) -> None:
    words = ["--train-data-path", str(folder / "a.jsonl"), "--sft-batching", "token-budget"]
    words += ["--global-batch-size", "3"]
    interleaved = "--num-layers 4 --pipeline-model-parallel-size 2 "
    interleaved += "--num-layers-per-virtual-pipeline-stage 1"
    own = training_runs.without(BASE, "--num-layers")
    tokenizer = ["--tokenizer-model", str(folder / "tokenizer")]

    def plan_of(*more: str, ranks: int = 0) -> StepPlan:
        config = training_runs.config_of([*own, *tokenizer, *words, *more], ranks=ranks)
        found = build_splits(config, build_tokenizer(config.section(TokenizerConfig))).train
        assert isinstance(found, SftDataset) and found.plan is not None
        return found.plan

    plain = plan_of("--num-layers", "2")
    steps = range(plain.steps_per_epoch)
    counts = [plain.num_microbatches(step) for step in steps]
    assert any(count % 2 for count in counts)
    split = plan_of(*interleaved.split(), ranks=2)
    assert [split.num_microbatches(step) for step in steps] == [n + n % 2 for n in counts]
    assert split.identity == plan_of("--num-layers", "4").identity == plain.identity
    others = ["--seq-length 290", "--seed 5", "--sft-batching packed", "--global-batch-size 4"]
    changed = {plan_of("--num-layers", "2", *other.split()).identity for other in others}
    assert len({plain.identity, *changed}) == 5
    kinds = {"padded": False, "packed": True, "token-budget": True}
    for kind, packs in kinds.items():
        assert plan_of("--num-layers", "2", "--sft-batching", kind).packs_documents == packs


def test_stores_of_earlier_versions_are_looked_through_and_told(folder: Path) -> None:
    """They may hold conversations without a trained token, which are not trained now."""
    chats = tiny.write_jsonl(folder / "early.jsonl", ROWS[:6])
    words = ["--train-data-path", str(chats)]
    store = splits(folder, *words).train._stores[0]  # type: ignore[union-attr]
    mask = Path(f"{store.prefix}_sft_mask.bin")
    content = bytearray(mask.read_bytes())
    first = int(store.lengths[0])
    # The first conversation trains nothing, the second its first token alone, which is no label.
    second = int(store.lengths[1])
    content[: first + second] = bytes(first) + b"\1" + bytes(second - 1)
    mask.write_bytes(content)
    prefix = ["--train-data-path", store.prefix]
    assert len(splits(folder, *prefix).train) == 6  # type: ignore[arg-type]
    about = json.loads(about_path(store.prefix).read_bytes())
    about.pop("intake")
    about_path(store.prefix).write_text(json.dumps({**about, "date": "2024-07-26"}))
    found = splits(folder, *prefix).train
    assert isinstance(found, SftDataset) and len(found) == 4 and found.cut.dropped == 2
    told = report(folder, *prefix).warnings
    assert (
        told[0] == "2 of 6 conversations of the train split have no trained token, and are dropped"
    )
    assert told[1].startswith(f"{store.prefix} was made by an earlier version") and len(told) == 2
    found = splits(folder, *prefix, str(folder / "a.jsonl")).train
    assert isinstance(found, SftDataset) and len(found) == 4 + 25 and found.cut.dropped == 2


def test_texts_of_several_days_are_told() -> None:
    def told(*dates: str | None) -> list[str]:
        stores = [SimpleNamespace(intake=1, about={"date": date}) for date in dates]
        return list(_about_stores(SimpleNamespace(stores=stores)))  # type: ignore[arg-type]

    assert told("2024-07-26", None, "2024-07-26") == told(None) == []
    (sentence,) = told("2024-07-27", None, "2024-07-26")
    assert sentence.startswith(
        "the texts were made on several days (2024-07-26, 2024-07-27), which"
    )


def test_the_cost_of_experts_is_that_of_those_that_a_token_visits(folder: Path) -> None:
    """Two of four gated experts of width 12 and a shared one of 5, in place of an MLP of 20."""
    moe = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12"
    moe += " --moe-shared-expert-intermediate-size 5 --disable-bias-linear"
    config = config_of(folder, "--data-path", "f", *moe.split())
    model = cost_model(config)
    logits = 8 * (config.model.padded_vocab_size or 0)
    linear, quadratic = 2 * (4 * 64 + 3 * 8 * (2 * 12 + 5)) + logits, 2 * 2 * 4
    assert model.linear * quadratic == model.quadratic * linear


def test_what_truncation_cuts_and_what_it_drops_is_one_sentence() -> None:
    counts = TruncationCounts(5000, 1234, 98_765, 1000, 300, "left")
    cut = (
        "`--sft-truncation left` cuts 1,234 of 5,000 conversations of the valid split to "
        "`--sft-max-length` (300), and 98,765 tokens are lost"
    )
    dropped = "1,000 of 5,000 conversations of the valid split have no trained token, and are drop"
    assert counts.sentences("valid") == [f"{cut}; {dropped}ped"]
    assert dataclasses.replace(counts, dropped=0).sentences("valid") == [cut]
    assert dataclasses.replace(counts, shortened=0).sentences("valid") == [f"{dropped}ped"]


def test_all_files_of_a_run_are_looked_for_before_any_is_read(folder: Path, tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("t.jinja", "a", "b", "c", "d")]
    words = ["--train-data-path", *names[1:3], str(folder / "a.jsonl"), "--valid-data-path"]
    words += [names[3], "--test-data-path", names[4], "--sft-chat-template", names[0]]
    missing = []
    for check in conversation_inputs(config_of(folder, *words)):
        try:
            check()
        except DataError as error:
            missing.append(str(error).partition("(")[2].partition(")")[0])
    assert missing == names
    assert len(conversation_inputs(config_of(folder, "--data-path", names[1]))) == 2


def test_lines_on_the_data_tell_first_what_is_read_and_then_what_is_not(folder: Path) -> None:
    rows = [{**ROWS[0], "id": 1}, ROWS[1]]
    path = tiny.write_jsonl(folder / "extra.jsonl", rows)
    config = config_of(folder, "--train-data-path", str(path), "--sft-date", "2024-07-26")
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    tokenizer.notes = lambda: ["of the tokenizer"]  # type: ignore[method-assign]
    lines = conversation_lines(config, tokenizer)
    assert [line.split(": ")[0] for line in lines] == [
        "of the tokenizer", "conversations", "`--sft-date` (2024-07-26)",
        "ignored, because neither this program nor the chat template uses it",
    ]  # fmt: skip
