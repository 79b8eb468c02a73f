"""The direct order over files: GPTDataset's labels and masks, no sample lost or repeated."""

import dataclasses
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.utils import Split
from torch.utils.data import DataLoader

from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.object_store import RemoteSpan
from megatron_ext.data.order import SampleOrder
from megatron_ext.data.samplers import SequentialSampler
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.data import checked, gpt
from megatron_ext.text.data import plan as planning
from megatron_ext.text.data.blend import BlendSpec
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.direct import DirectDataset, EveryWindow
from megatron_ext.text.data.plan import RunPlan, plan_run
from megatron_ext.text.data.prefixes import read_blend
from megatron_ext.text.data.splits import (
    _check_lengths,
    _shortened,
    build_direct,
    build_held_out,
    continued_split,
    marks_of,
    prepare_direct,
)
from megatron_ext.text.inputs import dataset_checks
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.training_runs import TINY, check_refused, config_of, prepared, without

EOD = 90
WORDS = [
    *without(
        TINY,
        "--seq-length",
        "--split",
        "--global-batch-size",
        "--micro-batch-size",
        "--max-position-embeddings",
    )
]


def _config(*more: str, length: int = 16, batch: int = 24, vocabulary: int = 90) -> Any:
    words = [*WORDS, *f"--seq-length {length} --global-batch-size {batch}".split()]
    words += ["--max-position-embeddings", "16384"]
    words += f"--tokenizer-type NullTokenizer --vocab-size {vocabulary}".split()
    given = {"--micro-batch-size": "1", "--split": "100,0,0", "--train-iters": "5000"}
    for name, value in given.items():
        words += [] if name in more else [name, value]
    return config_of([*words, "--data-order", "direct", *more])


def _plan(config: Any, history: Any = None, consumed: int = 0) -> tuple[RunPlan, DirectDataset]:
    plan = plan_run(config, history, consumed)
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    return plan, DirectDataset(plan.order, plan.spans, marks_of(config, tokenizer), plan.total)


def _documents(prefix: Path, seed: int = 0) -> str:
    """Write documents of 1 to 30 tokens that end with the end-of-document id."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(300):
            ids = [*rng.integers(0, 90, int(rng.integers(0, 30))), EOD]
            writer.add_document(np.array(ids), [len(ids)])
    return str(prefix)


class _Given(checked.KeyedGPTDataset):
    """megatron-core's dataset with given texts in place of those of its index."""

    texts: np.ndarray

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        _, *others = super()._query_document_sample_shuffle_indices(idx)
        return self.texts[idx], *others


@pytest.mark.parametrize("flags", ["", "--eod-mask-loss", "--eod-mask-loss --reset-position-ids"])
def test_labels_masks_and_positions_are_those_of_megatron_cores_dataset(
    flags: str, tmp_path: Path
) -> None:
    prefix = _documents(tmp_path / "docs")
    config = _config("--data-path", prefix, *flags.split())
    _, dataset = _plan(config)
    batch = dataset.batch(5, 45)
    ours = torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1)
    megatron = config.with_section(
        dataclasses.replace(config.section(DataConfig), data_cache_path=str(tmp_path / "cache"))
    )
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    core = gpt.dataset_config(megatron, BlendSpec(([prefix], None), None), tokenizer, "")
    low = _Given.build_low_level_dataset(prefix, core)
    theirs = _Given(low, prefix, np.arange(300, dtype=np.int32), 50, Split.train, core)
    theirs.texts = ours.numpy()
    for row in range(40):
        wanted = theirs[row]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert batch[name][row].tolist() == wanted[name].tolist(), (name, row)
    assert (ours == EOD).any()


def test_a_sample_is_a_piece_of_its_split_and_the_split_is_megatrons(tmp_path: Path) -> None:
    prefix = _documents(tmp_path / "docs")
    config = _config("--data-path", prefix, "--split", "80,15,5", "--eval-iters", "2")
    data, tokenizer = config.section(DataConfig), build_tokenizer(config.section(TokenizerConfig))
    built = build_direct(config, tokenizer)
    core = gpt.dataset_config(config, read_blend(data), tokenizer, "")
    low = checked.KeyedGPTDataset.build_low_level_dataset(prefix, core)
    bounds = gpt.split_bounds("80,15,5", 300)
    for dataset, (first, end) in zip((built.train, built.valid, built.test), bounds, strict=True):
        text = np.concatenate([low[i] for i in range(first, end)])
        circle = np.concatenate([text, text[:17]]).tolist()
        assert isinstance(dataset, DirectDataset)
        rows = dataset.batch(0, min(30, len(dataset)))
        for tokens, labels in zip(rows["tokens"].tolist(), rows["labels"].tolist(), strict=True):
            sample = [*tokens, labels[-1]]
            assert tokens[1:] == labels[:-1]
            assert any(circle[i : i + 17] == sample for i in range(len(text)))


def test_full_validation_reads_the_whole_split_in_order(tmp_path: Path) -> None:
    prefix = _documents(tmp_path / "docs")
    config = _config("--data-path", prefix, "--split", "80,20,0", "--full-validation")
    built = build_direct(config, build_tokenizer(config.section(TokenizerConfig)))
    assert isinstance(built.valid, DirectDataset) and built.test is None
    (span,) = built.valid.spans.values()
    count = len(built.valid)
    assert count == (span.tokens - 1) // 16
    text = span.gather(np.array([0]), count * 16)[0]
    assert built.valid.batch(0, count)["tokens"].ravel().tolist() == text.tolist()


def _numbered(prefix: Path, first: int, windows: int) -> str:
    """Write documents whose tokens are all different: each is its own number."""
    tokens = np.arange(first, first + 64 * windows, dtype=np.int32)
    with IndexedWriter(str(prefix), np.dtype(np.int32)) as writer:
        for at in range(0, len(tokens), 32):
            writer.add_document(tokens[at : at + 32], [32])
    return str(prefix)


def test_fifty_changes_of_layout_workers_mixture_and_length_lose_and_repeat_nothing(
    tmp_path: Path,
) -> None:
    """Each token tells what it is, so the batches of all replicas show what was read how often."""
    rng = np.random.default_rng(11)
    counts = [90, 40, 7, 150]
    firsts = np.concatenate([[0], np.cumsum(counts)]) * 64
    prefixes = [
        _numbered(tmp_path / f"docs{i}", int(firsts[i]), count) for i, count in enumerate(counts)
    ]
    visits = np.zeros(int(firsts[-1]), dtype=int)
    history, consumed = None, 0
    for change in range(50):
        length = 64 if change == 0 else int(rng.choice([8, 16, 32, 64, 128]))
        words = ["--data-path"]
        for prefix in rng.permutation(prefixes)[: rng.integers(1, 5)].tolist():
            words += [str(round(float(rng.uniform(0.1, 1)), 2)), prefix]
        words += [] if rng.integers(2) else ["--no-mmap-bin-files"]
        config = _config(*words, length=length, vocabulary=20_000)
        plan, dataset = _plan(config, history, consumed)
        history = plan.to_dict()
        replicas, rows = int(rng.choice([1, 2, 3, 4])), int(rng.choice([1, 2]))
        workers = 2 if change % 17 == 3 else 0
        steps = int(rng.integers(1, 5))
        loaders = [
            iter(
                DataLoader(
                    dataset,
                    batch_sampler=SequentialSampler(len(dataset), consumed, rows, rank, replicas),
                    num_workers=workers,
                    collate_fn=dataset.collate,
                )
            )
            for rank in range(replicas)
        ]
        for _ in range(steps * 24 // (rows * replicas)):
            for loader in loaders:
                batch = next(loader)
                assert batch["tokens"].shape == (rows, length)
                real = batch["tokens"][batch["loss_mask"] > 0]
                np.add.at(visits, real.numpy(), 1)
        consumed += 24 * steps
        for first, end in zip(firsts, firsts[1:], strict=False):
            own = visits[first:end]
            assert own.max() - own.min() <= 1, change
    assert visits.min() >= 1 and visits.max() > 3


def _schedule(path: Path, *stages: str, more: str = "") -> list[str]:
    lines = "".join(f"  - {{{stage}}}\n" for stage in stages)
    path.write_text(f"stages:\n{lines}{more}\n")
    return ["--data-schedule", str(path), "--train-iters", "40"]


def test_a_resume_at_any_step_has_the_order_of_the_unbroken_run(tmp_path: Path) -> None:
    """Also where stages have equal weights, and where shorter samples follow the end of a source.

    After the limit a shorter sample of the source would fit, for which an unbroken run does not
    look either.
    """
    a, b = _numbered(tmp_path / "a", 0, 40), _numbered(tmp_path / "b", 9000, 9)
    weights = f"weights: {{{a}: 3, {b}: 7}}"
    limit = f"max_epochs: {{{b}: {410 / 576}}}"
    words = _schedule(
        tmp_path / "mixture.yaml", f"samples: 12, {weights}", f"samples: 18, {weights}",
        f"samples: 33, {weights}", f"seq_length: 4, {weights}", more=limit,
    )  # fmt: skip
    config = _config(*words, length=16, batch=6, vocabulary=20_000)
    whole, _ = _plan(config)
    assert whole.exhausted and whole.exhausted[0].number < 63
    assert whole.order.tokens_used(63)[b] + 4 <= 410
    history = whole.to_dict()
    for consumed in range(6, 240, 6):
        plan, _ = _plan(config, history, consumed)
        assert plan.to_dict() == history, consumed


def test_a_change_of_length_waits_for_a_step_of_the_ranks(tmp_path: Path) -> None:
    """The run takes 8 of 10 samples in a step, since micro-batches have 4."""
    a = _numbered(tmp_path / "a", 0, 90)
    words = _schedule(
        tmp_path / "mixture.yaml", f"samples: 20, weights: {{{a}: 1}}",
        f"seq_length: 8, weights: {{{a}: 1}}",
    )  # fmt: skip
    words += "--decrease-batch-size-if-needed --micro-batch-size 4".split()
    plan, _ = _plan(_config(*words, batch=10, vocabulary=20_000))
    assert [stage.start for stage in plan.order.stages] == [0, 24]


def test_a_run_that_goes_on_with_another_length_is_not_asked_for_those_before(
    tmp_path: Path,
) -> None:
    """Two ranks cannot share a sample of 6 tokens, but such samples do not come again."""
    a = _numbered(tmp_path / "a", 0, 40)
    words = ["--data-path", a]
    before, _ = _plan(_config(*words, length=6, vocabulary=20_000))
    config = _config(*words, length=12, vocabulary=20_000)
    parallel = dataclasses.replace(config.parallel, context_parallel_size=2)
    config = dataclasses.replace(config, parallel=parallel)
    _check_lengths(config, _plan(config, before.to_dict(), 24)[0], 24)


def test_a_batch_tells_which_tokens_of_which_file_it_holds(tmp_path: Path) -> None:
    prefix = _numbered(tmp_path / "docs", 0, 50)
    words = ["--data-path", prefix, "--split", "50,50,0", "--eval-iters", "1"]
    config = _config(*words, vocabulary=20_000)
    valid, _ = build_held_out(config, build_tokenizer(config.section(TokenizerConfig)))
    for dataset, end in ((_plan(config)[1], 1600), (valid, 3200)):
        assert isinstance(dataset, DirectDataset)
        tokens = dataset.batch(7, 12)["tokens"]
        for sample, name, first, count in dataset.token_ranges(7, 12):
            assert name == prefix
            row = tokens[sample - 7].tolist()
            assert row[: min(count, end - first)] == list(range(first, min(first + count, end)))


def test_other_files_under_the_same_name_do_not_go_on(tmp_path: Path) -> None:
    prefix = _numbered(tmp_path / "docs", 0, 50)
    config = _config("--data-path", prefix, vocabulary=20_000)
    history = _plan(config)[0].to_dict()
    _numbered(tmp_path / "docs", 0, 60)
    with pytest.raises(DataError, match=r"docs holds 3840 tokens, but held 3200 when the run beg"):
        _plan(config, history, 24)
    with pytest.raises(DataError, match=r"Samples of 12 tokens do not fit the windows of 16"):
        _plan(_config("--data-path", prefix, length=12, vocabulary=20_000), history, 24)


def test_datasets_without_weights_count_by_their_tokens(tmp_path: Path) -> None:
    prefixes = [_numbered(tmp_path / name, 0, size) for name, size in (("a", 30), ("b", 90))]
    plan, _ = _plan(_config("--data-path", *prefixes, vocabulary=20_000))
    used = plan.order.tokens_used(4 * 1000)
    assert used == {prefixes[0]: 16_000, prefixes[1]: 48_000}


def test_faults_of_the_data_are_told_before_training(tmp_path: Path) -> None:
    prefix = _documents(tmp_path / "docs")
    words = [*WORDS, *"--micro-batch-size 1 --train-iters 2 --data-order direct".split()]
    words += ["--max-position-embeddings", "16384"]
    words += ["--tokenizer-type", "NullTokenizer", "--data-path", prefix]
    with pytest.raises(DataError, match=r"holds the token id 90, but the vocabulary has 90 entr"):
        prepared([*words, *"--seq-length 16 --vocab-size 89 --padded-vocab-size 90".split()])
    with pytest.raises(DataError, match=r"The train split of .*docs holds \d+ tokens, but a sam"):
        prepared([*words, *"--seq-length 16000 --vocab-size 90 --split 1,0,0".split()])
    with pytest.raises(DataError, match=r"The valid split of .*docs holds \d+ tokens, but a sam"):
        more = "--seq-length 256 --vocab-size 90 --split 99,1,0 --eval-iters 1"
        prepared([*without(words, "--eval-iters"), *more.split()])


def test_ids_that_only_training_meets_are_told_with_their_file(tmp_path: Path) -> None:
    prefix = _documents(tmp_path / "docs")
    _, dataset = _plan(_config("--data-path", prefix, vocabulary=90))
    dataset.marks = dataclasses.replace(dataset.marks, vocab_size=90)
    with pytest.raises(DataError, match=r"docs.bin holds the token id 90, but the vocabulary has"):
        dataset.batch(0, 50)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--data-order direct --mock-data", "`--mock-data` does not go with `--data-order direct`"),
        ("--data-order direct --dataloader-type cyclic", "every epoch is permuted anew"),
        ("--data-order direct --data-cache-path x", "no indices are built"),
        ("--data-schedule x.yaml", "needs an order that can change during a run"),
        ("--data-order direct --data-schedule x.yaml --data-path y", "exclude each other"),
        *(
            (
                f"--data-order direct --data-schedule x.yaml {changing}",
                "`--data-schedule` counts whole steps of one size",
            )
            for changing in (
                "--rampup-batch-size 8 8 10",
                "--step-batch-size-schedule 0:4,64:8 --global-batch-size 8",
            )
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(more: str, sentence: str) -> None:
    words = [*TINY, *"--train-iters 2 --tokenizer-type NullTokenizer --vocab-size 90".split()]
    check_refused([*words, *more.split()], sentence)


def test_one_pass_reads_all_windows_of_each_dataset_in_turn() -> None:
    """A dataset of 9 tokens has one window of 8 and its last label; one of 8 has none."""
    spans: list[Any] = [SimpleNamespace(tokens=count) for count in (9, 8, 0, 24, 25)]
    order = EveryWindow(spans, 8)
    pieces = order.locate(0, len(order))
    found = list(zip(pieces.sources.tolist(), pieces.begins.tolist(), strict=True))
    assert found == [(0, 0), (3, 0), (3, 8), (4, 0), (4, 8), (4, 16)]
    assert order.locate(2, 4).begins.tolist() == [8, 0]


def test_the_label_after_a_sample_is_fetched_ahead_and_must_be_in_the_vocabulary(
    tmp_path: Path,
) -> None:
    prefix = _numbered(tmp_path / "docs", 0, 50)
    _, dataset = _plan(_config("--data-path", prefix, vocabulary=20_000))
    last = int(dataset.batch(3, 4)["labels"].max())
    dataset.marks = dataclasses.replace(dataset.marks, vocab_size=last + 1)
    dataset.batch(3, 4)
    dataset.marks = dataclasses.replace(dataset.marks, vocab_size=last)
    with pytest.raises(DataError, match=f"docs.bin holds the token id {last}, but the vocabulary"):
        dataset.batch(3, 4)

    class Remote(RemoteSpan):
        def __init__(self) -> None:
            self.asked: list[tuple[list[int], list[int]]] = []

        def expect(self, begins: Any, lengths: Any) -> None:
            self.asked.append((begins.tolist(), lengths.tolist()))

    span = Remote()
    remote = DirectDataset(dataset.order, {0: span}, dataset.marks, len(dataset))
    assert dataset.expect is None and remote.expect is not None
    remote.expect([3, 4])
    begins = dataset.order.locate(3, 5).begins.tolist()
    assert span.asked == [(begins, [17, 17])]


def test_a_dataset_that_is_named_twice_has_the_sum_of_its_weights(tmp_path: Path) -> None:
    a, b = (_numbered(tmp_path / name, 0, 30) for name in "ab")
    config = _config("--data-path", "1", a, "2", b, "4", a)
    weights = planning.weights_of(([a, b, a], [1.0, 2.0, 4.0]), config, 0)
    assert weights == {a: 5, b: 2}
    assert planning.weights_of(([a, b, a], None), config, 0) == {a: 2 * 1920, b: 1920}


def test_a_dataset_of_exactly_one_sample_is_enough(tmp_path: Path) -> None:
    for tokens in (16, 15):
        with IndexedWriter(str(tmp_path / "docs"), np.dtype(np.uint16)) as writer:
            writer.add_document(np.arange(tokens), [tokens])
        config = _config("--data-path", str(tmp_path / "docs"))
        if tokens == 16:
            _, dataset = _plan(config)
            assert sorted(dataset.batch(3, 4)["tokens"][0].tolist()) == list(range(16))
        else:
            with pytest.raises(
                DataError, match=r"docs holds 15 tokens, but a sample of the direct"
            ):
                _plan(config)


def test_a_run_whose_earlier_steps_were_larger_takes_as_many_more(tmp_path: Path) -> None:
    config = _config("--data-path", _numbered(tmp_path / "docs", 0, 50), "--train-iters", "30")
    history = _plan(config)[0].to_dict()
    assert _plan(config)[0].total == 720
    assert plan_run(config, history, 960, 10).total == 960 + 20 * 24
    assert plan_run(config, history, 240, 10).total == 720
    assert plan_run(config, history, 960).total == 720


def test_sources_that_have_moved_are_known_by_file_name_and_length() -> None:
    past = {
        "seed": 1,
        "tokens": {"x/a": 10, "y/a": 10, "x/b": 5, "x/c": 7},
        "stages": [{"start": 0, "weights": {"x/a": "1", "y/a": "2", "x/b": "3", "x/c": "4"}}],
    }
    spans: dict[str, Any] = {
        name: SimpleNamespace(tokens=count)
        for name, count in (("n/a", 10), ("n/b", 6), ("x/c", 7), ("n/c", 7))
    }
    found = planning._with_new_names(past, spans)
    # One of two equal sources, none of another length, and none that is still there.
    assert found["tokens"] == {"n/a": 10, "y/a": 10, "x/b": 5, "x/c": 7}
    assert found["stages"][0]["weights"] == {"n/a": "1", "y/a": "2", "x/b": "3", "x/c": "4"}
    spans["m/a"] = SimpleNamespace(tokens=10)
    assert planning._with_new_names(past, spans)["tokens"] == past["tokens"], "either may be meant"


def test_a_run_that_its_data_ends_has_the_whole_steps_that_are_left(tmp_path: Path) -> None:
    prefix = _numbered(tmp_path / "docs", 0, 50)
    ends: Any = SimpleNamespace(total=100, requested=240)
    config = _config("--data-path", prefix, "--train-iters", "10")
    # Of the steps so far some were larger: 48 samples in 3 steps, and 52 are left.
    assert _shortened(config, ends, 48, 3, tell=False).training.train_iters == 5
    assert _shortened(config, ends, 0, 0, tell=False).training.train_iters == 4
    whole: Any = SimpleNamespace(total=240, requested=240)
    assert _shortened(config, whole, 48, 3, tell=False) is config
    with pytest.raises(DataError, match="ends the run at sample 23, before its first step is full"):
        _shortened(config, SimpleNamespace(total=23, requested=240), 0, 0, tell=False)  # type: ignore[arg-type]
    training = dataclasses.replace(config.training, train_iters=None, train_samples=240)
    by_samples = dataclasses.replace(config, training=training)
    found = _shortened(by_samples, ends, 48, 2, tell=False).training
    assert (found.train_iters, found.train_samples) == (None, 100)


def test_held_out_data_has_the_first_mixture_and_an_order_of_its_own(tmp_path: Path) -> None:
    a, b, c = (_numbered(tmp_path / name, 0, 100) for name in "abc")
    words = _schedule(
        tmp_path / "mixture.yaml", f"samples: 20, weights: {{{a}: 1, {b}: 3, {c}: 0}}",
        f"weights: {{{c}: 1}}",
    )  # fmt: skip
    words += ["--split", "60,20,20", "--eval-iters", "1"]
    config = _config(*words, vocabulary=20_000)
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    valid, test = build_held_out(config, tokenizer)
    for name, dataset in (("valid", valid), ("test", test)):
        assert isinstance(dataset, DirectDataset) and isinstance(dataset.order, SampleOrder)
        assert [source.name for source in dataset.order.sources] == [f"{name} {a}", f"{name} {b}"]
        assert dataset.order.stages[0].weights == {f"{name} {a}": 1, f"{name} {b}": 3}
    several = ["--full-validation", "--multiple-validation-sets", "--data-path", "1", a, "2", b]
    config = _config(*several, "--split", "60,20,20", "--eval-iters", "1", vocabulary=20_000)
    sets, test = build_held_out(config, tokenizer)
    assert isinstance(sets, list)
    assert [each.spans[0].name for each in sets] == [a, b]  # type: ignore[attr-defined]
    assert not isinstance(test, list)


def test_ambiguous_padding_is_no_target_and_the_id_that_the_embedding_has(tmp_path: Path) -> None:
    prefix = _documents(tmp_path / "docs")
    _, dataset = _plan(_config("--data-path", prefix))
    plain = dataset.batch(0, 40)
    assert (plain["tokens"] == 7).any() and bool((plain["loss_mask"] == 1).all())
    dataset.marks = dataclasses.replace(dataset.marks, pad=7)
    padded = dataset.batch(0, 40)
    for name in ("tokens", "labels"):
        assert padded[name].tolist() == torch.where(plain[name] == 7, 0, plain[name]).tolist()
    assert padded["loss_mask"].tolist() == (plain["labels"] != 7).float().tolist()


def test_the_table_of_data_says_how_much_of_each_source_is_read(tmp_path: Path) -> None:
    """In 30 samples: 24 of the first source, which has 48 windows, and 6 of the second, of 4."""
    a, b = _numbered(tmp_path / "a", 0, 12), _numbered(tmp_path / "b", 900, 1)
    words = ["--data-path", "4", a, "1", b, "--train-iters", "5"]
    whole, _ = _plan(_config(*words, batch=6, vocabulary=20_000))
    table = planning.use_table(whole)
    assert [list(column.cells) for column in table.columns] == [
        [a, b], ["768", "64"], ["24", "6"], ["384", "96"], ["80.00%", "20.00%"], ["0.500", "1.500"],
    ]  # fmt: skip
    assert table.caption == "mixtures start at samples 0 (16 tokens)"


def test_about_sixteen_blocks_are_counted_of_all_sources_together() -> None:
    order: Any = SimpleNamespace(cuts=lambda source, most: (source, most))
    for number, sources, most in ((1, 1, 16), (5, 5, 3), (16, 16, 1), (17, 9, 1), (40, 14, 1)):
        found = planning.cuts_by_source(order, dict.fromkeys(range(number)))  # type: ignore[arg-type]
        assert len(found) == sources
        assert all(value == (source, most) for source, value in found.items())


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_negative_ids_are_told_with_their_file(packing: str, tmp_path: Path) -> None:
    """They would look like the places of a sample that hold no token."""
    with IndexedWriter(str(tmp_path / "docs"), np.dtype(np.int32)) as writer:
        for number in range(40):
            writer.add_document(np.arange(20) - 5 * (number == 39), [20])
    config = _config("--data-path", str(tmp_path / "docs"), "--document-packing", packing)
    _, dataset = _plan(config)
    with pytest.raises(DataError, match=r"docs.bin holds the token id -5, but the vocabulary has"):
        dataset.batch(0, 50)


def test_a_run_that_has_read_nothing_is_bound_to_no_order(tmp_path: Path) -> None:
    """It was killed before its first step, and goes on with another length and seed."""
    prefix = _numbered(tmp_path / "docs", 0, 50)
    before = _plan(_config("--data-path", prefix, vocabulary=20_000))[0].to_dict()
    config = _config("--data-path", prefix, "--seed", "5", length=12, vocabulary=20_000)
    assert _plan(config, before, 0)[0].to_dict() == _plan(config)[0].to_dict()


def test_data_of_a_split_are_whole_whatever_the_shares(tmp_path: Path) -> None:
    a, b = _numbered(tmp_path / "a", 0, 30), _numbered(tmp_path / "b", 5000, 20)
    words = ["--train-data-path", a, "--valid-data-path", b, "--split", "50,0,50"]
    config = _config(*words, "--eval-iters", "1", vocabulary=20_000)
    assert planning.split_span(config, a, 0).tokens == 30 * 64
    assert planning.split_span(config, b, 1).tokens == 20 * 64
    valid, test = build_held_out(config, build_tokenizer(config.section(TokenizerConfig)))
    assert isinstance(valid, DirectDataset) and test is None
    assert [span.tokens for span in valid.spans.values()] == [20 * 64]


def test_datasets_at_addresses_are_looked_up_later_in_the_direct_order_alone(
    tmp_path: Path,
) -> None:
    a = _numbered(tmp_path / "a", 0, 3)
    config = _config("--data-path", a, "s3://bucket/b", a)
    assert len(dataset_checks(config)) == 1
    data = dataclasses.replace(config.section(DataConfig), data_order="megatron")
    checks = dataset_checks(config.with_section(data))
    assert len(checks) == 2
    with pytest.raises(DataError, match="^s3://bucket/b is an address, which only pretraining"):
        [check() for check in checks]


def test_lengths_that_a_run_reaches_fit_its_flags(tmp_path: Path) -> None:
    """The second stage begins at sample 240, after ten steps of 24."""
    a = _numbered(tmp_path / "a", 0, 90)
    words = _schedule(
        tmp_path / "mixture.yaml", f"samples: 240, weights: {{{a}: 1}}",
        f"seq_length: 8, weights: {{{a}: 1}}",
    )  # fmt: skip
    config = _config(*words, vocabulary=20_000)

    def checked_with(steps: int, config: Any) -> None:
        training = dataclasses.replace(config.training, train_iters=steps)
        config = dataclasses.replace(config, training=training)
        _check_lengths(config, _plan(config)[0], 0)

    overlap = dataclasses.replace(config.engine, tp_comm_overlap=True)
    graphs = dataclasses.replace(config.cuda_graphs, cuda_graph_impl="local")
    for changed, flag in (
        (dataclasses.replace(config, engine=overlap), "--tp-comm-overlap"),
        (dataclasses.replace(config, cuda_graphs=graphs), "--cuda-graph-impl"),
    ):
        checked_with(10, changed)
        with pytest.raises(ConfigError, match=f"which `{flag}` fixes when the run starts"):
            checked_with(11, changed)
    checked_with(11, config)


def test_a_run_goes_on_with_its_new_mixture_and_its_way_to_fill_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (_numbered(tmp_path / name, 0, 60) for name in "ab")
    first, second = (
        _config("--data-path", "1", a, weight, b, "--train-iters", "20", vocabulary=20_000)
        for weight in ("1", "3")
    )
    progress = SimpleNamespace(consumed_train_samples=0, data_order=None, iteration=0)
    _, dataset = _plan(first)
    dataset.is_training = True
    dataset.fim = fim = SimpleNamespace()  # type: ignore[assignment]

    def go_on(config: Any, consumed: int, rank: int = 0) -> list[tuple[int, float]]:
        progress.consumed_train_samples = consumed
        progress.iteration = consumed // 24
        run: Any = SimpleNamespace(
            config=config, progress=progress, context=SimpleNamespace(rank=rank)
        )
        found = continued_split(run, dataset)
        assert isinstance(found, DirectDataset) and found is not dataset
        assert found.fim is fim and found.marks is dataset.marks and len(found) == 480
        stored = progress.data_order["stages"]
        assert found.order.to_dict() == progress.data_order  # type: ignore[attr-defined]
        return [(stage["start"], float(Fraction(stage["weights"][b]))) for stage in stored]

    assert go_on(first, 0) == go_on(first, 24) == [(0, 1.0)]
    assert capsys.readouterr().out == ""
    assert go_on(second, 48) == [(0, 1.0), (48, 3.0)]
    said = f"> the mixture changes at sample 48: {a} 0.25, {b} 0.75\n"
    assert capsys.readouterr().out == said
    assert go_on(second, 96) == [(0, 1.0), (48, 3.0)]
    assert go_on(second, 48, rank=1) == [(0, 1.0), (48, 3.0)]
    assert capsys.readouterr().out == ""
    progress.data_order = None
    go_on(second, 72)
    assert "> the samples so far were in another order; the direct one takes its" in (
        capsys.readouterr().out
    )
    dataset.is_training = False
    assert continued_split(SimpleNamespace(), dataset) is dataset  # type: ignore[arg-type]


def test_one_rank_tells_where_the_data_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 windows of 64 tokens are 200 samples of 16, which are 8 whole steps of 24."""
    a = _numbered(tmp_path / "a", 0, 50)
    more = f"max_epochs: {{{a}: 1}}\nwhen_exhausted: stop"
    words = _schedule(tmp_path / "mixture.yaml", f"weights: {{{a}: 1}}", more=more)
    config = _config(*words, "--eval-iters", "0", vocabulary=20_000)
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    for rank, told in (("0", True), ("3", False)):
        monkeypatch.setenv("RANK", rank)
        assert prepare_direct(config, tokenizer).training.train_iters == 8
        said = capsys.readouterr().out.splitlines()
        assert said == [
            f"> {a} reaches its limit of epochs at sample 200",
            "> the run ends after 8 of 40 steps, where its data ends",
        ] * told  # fmt: skip
