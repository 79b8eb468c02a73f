"""Datasets: every token once, caches that notice a changed file, blends by their weights."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import MockGPTDataset

from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.text.data import checked, gpt
from megatron_ext.text.data.blend import BlendSpec, given_lengths, source_options
from megatron_ext.text.data.config import DEFAULT_SPLIT, DataConfig, FimConfig
from megatron_ext.text.data.prefixes import plain_prefix, read_blend, training_blend
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.training_runs import TINY, check_refused, config_of, train_steps, without

SEQUENCE = 8


def _write(prefix: str, documents: int, start: int = 0) -> None:
    with IndexedWriter(prefix, optimal_dtype(90)) as writer:
        for number in range(documents):
            writer.add_document(np.arange(start + number, start + number + 5) % 80, [5])


def _config(*more: str) -> Any:
    words = " ".join(TINY).replace("--seq-length 64", f"--seq-length {SEQUENCE}").split()
    null = "--train-iters 1 --tokenizer-type NullTokenizer --vocab-size 90".split()
    return config_of([*words, *null, *more])


def _dataset(
    prefix: str, cache: Path, samples: int | None = None, **changes: Any
) -> checked.KeyedGPTDataset:
    from megatron.core.datasets.utils import Split

    config = _config("--data-path", prefix, "--data-cache-path", str(cache))
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    spec = read_blend(config.section(DataConfig))
    data = config.section(DataConfig)
    files = checked.check_inputs(data, config.model, spec, tokenizer, [1, 0, 0])
    core = gpt.dataset_config(config, spec, tokenizer, files)
    for name, value in changes.items():
        setattr(core, name, value)
    low = checked.KeyedGPTDataset.build_low_level_dataset(prefix, core)
    indices = np.arange(len(low.sequence_lengths), dtype=np.int32)
    return checked.KeyedGPTDataset(low, prefix, indices, samples, Split.train, core)


def test_an_epoch_covers_every_token_and_neighbours_share_one(tmp_path: Path) -> None:
    prefix = str(tmp_path / "docs")
    _write(prefix, 33)
    dataset = _dataset(prefix, tmp_path / "cache")
    order = np.argsort(dataset.shuffle_index)
    rows = [dataset[int(i)] for i in order]
    flat = np.concatenate([row["tokens"].numpy() for row in rows] + [rows[-1]["labels"][-1:]])
    documents = dataset.dataset
    want = np.concatenate([documents[int(i)] for i in dataset.document_index])
    assert flat.tolist() == want[: len(flat)].tolist()
    assert len(rows) == (33 * 5 - 1) // SEQUENCE
    for before, after in zip(rows, rows[1:], strict=False):
        assert before["labels"][-1] == after["tokens"][0]


def test_a_replaced_file_rebuilds_the_cache(tmp_path: Path) -> None:
    prefix, cache = str(tmp_path / "docs"), tmp_path / "cache"
    _write(prefix, 33)
    first = _dataset(prefix, cache, samples=6)
    assert len(list(cache.glob("*.npy"))) == 3
    again = _dataset(prefix, cache, samples=6)
    assert again.unique_description_hash == first.unique_description_hash
    _write(prefix, 33, start=3)  # as large as before
    other = _dataset(prefix, cache, samples=6)
    _write(prefix, 20, start=3)
    changed = _dataset(prefix, cache, samples=6)
    hashes = {x.unique_description_hash for x in (first, other, changed)}
    for name in ("add_extra_token_to_sequence", "drop_last_partial_validation_sequence"):
        made = _dataset(prefix, cache, samples=6, **{name: False})
        hashes.add(made.unique_description_hash)
    assert len(hashes) == 5
    assert max(changed.document_index) < 20


def test_bounds_of_a_split_are_megatron_cores() -> None:
    assert gpt.split_bounds("90,5,5", 2400) == [(0, 2160), (2160, 2280), (2280, 2400)]
    assert gpt.split_bounds("99,1,0", 20) == [(0, 20), (20, 20), (20, 20)]


def test_an_empty_split_is_refused_only_when_it_is_asked_for(tmp_path: Path) -> None:
    prefix = str(tmp_path / "docs")
    _write(prefix, 20)
    config = _config("--data-path", prefix)
    config = config.with_section(dataclasses.replace(config.section(DataConfig), split="99,1,0"))
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    data = config.section(DataConfig)
    checked.check_inputs(data, config.model, read_blend(data), tokenizer, [4, 0, 0])
    with pytest.raises(DataError, match=r"The valid split of .*docs is empty under `--split` 99,1"):
        checked.check_inputs(data, config.model, read_blend(data), tokenizer, [4, 4, 0])


def test_splits_that_nothing_is_asked_of_are_left_out(tmp_path: Path) -> None:
    """They may be empty, whose epochs would be counted for ever."""
    prefix = str(tmp_path / "docs")
    _write(prefix, 20)
    config = _config("--data-path", prefix, "--data-cache-path", str(tmp_path / "cache"))
    config = config.with_section(dataclasses.replace(config.section(DataConfig), split="90,9,1"))
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    built = checked.build_checked_datasets(config, tokenizer, [4, 0, 0], lambda: True)
    assert built.train is not None and built.valid is None and built.test is None


@pytest.mark.parametrize("weights", [("", ""), ("1", "2")])
def test_blends_train_with_other_splits_too_short(weights: tuple[str, str], tmp_path: Path) -> None:
    words = []
    for name, weight in zip(("docs", "more"), weights, strict=True):
        _write(str(tmp_path / name), 400)
        words += [x for x in (weight, str(tmp_path / name)) if x]
    null = "--tokenizer-type NullTokenizer --vocab-size 90 --train-iters 2".split()
    flags = [*TINY, *null, "--data-path", *words, "--data-cache-path", str(tmp_path / "cache")]
    assert len(train_steps(flags, tmp_path / "save", 2)) == 2


def test_datasets_without_weights_hold_what_is_asked_of_them(tmp_path: Path) -> None:
    for name, documents in (("docs", 20), ("short", 1)):
        _write(str(tmp_path / name), documents)
    short, docs = str(tmp_path / "short"), str(tmp_path / "docs")
    checked.check_inputs(*_inputs("1", docs, "1", short), [400, 0, 0])
    with pytest.raises(
        DataError, match=r"^The dataset .*short of the train split has the weight 0"
    ):
        checked.check_inputs(*_inputs("1", docs, "0", short), [400, 0, 0])
    checked.check_inputs(*_inputs(docs, docs), [24, 0, 0])
    with pytest.raises(DataError, match=r"train split holds 24 samples, and .* but 25 are asked"):
        checked.check_inputs(*_inputs(docs, docs), [25, 0, 0])
    with pytest.raises(DataError, match=r"train split of .*short holds 5 tokens, but `--seq-len"):
        checked.check_inputs(*_inputs(docs, short), [4, 0, 0])
    exact = str(tmp_path / "exact")
    for tokens in (SEQUENCE, SEQUENCE + 1):
        with IndexedWriter(exact, optimal_dtype(90)) as writer:
            writer.add_document(np.arange(tokens), [tokens])
        if tokens == SEQUENCE:
            with pytest.raises(DataError, match=r"exact holds 8 tokens, but `--seq-length` \+ 1"):
                checked.check_inputs(*_inputs(docs, exact), [4, 0, 0])
    checked.check_inputs(*_inputs(docs, exact), [13, 0, 0])  # 12 samples and one


def test_more_datasets_than_an_index_of_a_blend_numbers_are_refused() -> None:
    """Before any file is opened: these do not exist."""
    with pytest.raises(
        DataError,
        match=r"^A blend has 32767 datasets, but .* 32766; join some .*`--data-order direct",
    ):
        checked.check_inputs(*_inputs(*["none"] * 32_767), [4, 0, 0])
    with pytest.raises(DataError, match="none"):
        checked.check_inputs(*_inputs(*["none"] * 32_766), [4, 0, 0])


def _inputs(*words: str) -> tuple[DataConfig, Any, BlendSpec, Any]:
    config = _config("--data-path", *words)
    data = dataclasses.replace(config.section(DataConfig), split="1,0,0")
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    return data, config.model, read_blend(data), tokenizer


BLENDS = {"a": (["a"], None), "a b c": (["a", "b", "c"], None), "3 a 7 b": (["a", "b"], [3.0, 7.0])}


def test_blends_from_flags_and_files_are_those_of_megatron_lm(tmp_path: Path) -> None:
    for words, blend in BLENDS.items():
        data = _config("--data-path", *words.split()).section(DataConfig)
        assert read_blend(data) == BlendSpec(blend, None)
    words = tmp_path / "words.txt"
    words.write_text("0.5 a\n0.5 b\n")
    config = _config("--data-args-path", str(words))
    assert read_blend(config.section(DataConfig)).blend == (["a", "b"], [0.5, 0.5])
    splits = tmp_path / "splits.json"
    splits.write_text('{"train": "a", "valid": ["b"], "test": ["c"]}')
    config = _config("--per-split-data-args-path", str(splits))
    assert read_blend(config.section(DataConfig)).per_split == [([x], None) for x in "abc"]
    splits.write_text('{"train": "1 a 2 b", "valid": null, "test": ""}')
    given = read_blend(config.section(DataConfig)).per_split
    assert given == [(["a", "b"], [1.0, 2.0]), None, None]
    splits.write_text("[1]")
    with pytest.raises(DataError, match="must be a JSON object with the keys train, valid"):
        read_blend(config.section(DataConfig))


def test_the_length_of_made_up_validation_data_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config("--mock-data", "--full-validation")
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    gpt.check_mock_data(config, tokenizer)
    datasets = gpt.build_mock_datasets(config, tokenizer, [0, None, 0], lambda: True)
    assert isinstance(datasets.valid, MockGPTDataset)
    samples = len(datasets.valid)
    told = f"goes through all {samples} samples of the made-up validation data, {samples // 16} st"
    assert told in capsys.readouterr().out
    gpt.check_mock_data(_config("--mock-data"), tokenizer)
    monkeypatch.setenv("RANK", "1")
    gpt.check_mock_data(config, tokenizer)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("seed", range(20))
def test_megatrons_order_is_megatron_cores_own(seed: int, tmp_path: Path) -> None:
    """Random lengths, seeds, splits and blends give the samples of a plain GPTDataset."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    rng = np.random.default_rng(seed)
    words = []
    for name in "abc"[: rng.integers(1, 4)]:
        _write(str(tmp_path / name), int(rng.integers(60, 200)), int(rng.integers(80)))
        words += [str(round(float(rng.uniform(0.1, 1)), 2)), str(tmp_path / name)]
    split = ("80,15,5", "70,30,0", "90,5,5")[rng.integers(3)]
    length, run_seed = int(rng.integers(4, 20)), int(rng.integers(1, 10**6))
    more = ["--eod-mask-loss"] if rng.integers(2) else []
    flags = f"--seq-length {length} --seed {run_seed} --split {split}".split()
    config = _config("--data-path", *words, *flags, *more)
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sizes = [int(rng.integers(1, 300)), 0, 0]
        ours = checked.build_checked_datasets(config, tokenizer, sizes, lambda: True).train
        plain = GPTDatasetConfig(
            random_seed=run_seed,
            sequence_length=length,
            blend=(words[1::2], [float(word) for word in words[::2]]),
            split=split,
            path_to_cache=str(tmp_path / "cache"),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=bool(more),
            create_attention_mask=False,
        )
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, plain)
        theirs = builder.build()[0]
    finally:
        torch.distributed.destroy_process_group()
    for index in range(sizes[0]):
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert ours[index][name].tolist() == theirs[index][name].tolist()


def test_blends_that_cannot_be_meant_are_refused() -> None:
    for words, rule in (
        ("0.3 a b", r"`--data-path` \(0.3 a b\) mixes weights and prefixes; give only prefixes"),
        ("0.3 a 0.7", "mixes weights and prefixes"),
        ("a 3 b 7", "mixes weights and prefixes"),
        ("-1 a 3 b", r"has the weights \[-1.0, 3.0\]; they must be finite, at least 0 and not all"),
        ("0 a 0 b", r"has the weights \[0.0, 0.0\]; they must be finite"),
        ("inf a 1 b", r"has the weights \[inf, 1.0\]; they must be finite"),
    ):
        with pytest.raises(DataError, match=rule):
            read_blend(DataConfig(data_path=words.split()))
    with pytest.raises(
        DataError, match=r"\(0.3 a 0.7 b\) is one word, .* in a file write \[0.3, a,"
    ):
        read_blend(DataConfig(data_path=["0.3 a 0.7 b"]))


def test_each_dataset_of_several_splits_is_named_once() -> None:
    data = DataConfig(train_data_path=["b", "file:///a"], test_data_path=["1", "/a", "2", "c"])
    spec = read_blend(data)
    assert spec.per_split == [(["b", "/a"], None), None, (["/a", "c"], [1.0, 2.0])]
    assert spec.prefixes() == ["b", "/a", "c"]
    assert training_blend(data) == spec
    with pytest.raises(DataError, match=r"^No training data is given; use `--data-path` PREFIX, "):
        training_blend(DataConfig())


def test_lengths_of_datasets_are_two_counts_for_each(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    data = DataConfig(data_path=["a", "b"], per_dataset_sequences_path=str(path))
    spec = read_blend(data)
    assert given_lengths(DataConfig(), spec) is None
    path.write_text('{"a": [3, 4], "b": [0, 1], "c": 7}')
    assert (given_lengths(data, spec) or {})["b"] == [0, 1]
    for bad in ("[3]", "[3, 4, 5]", "[3, -1]", "[3, 1.5]", "[true, 1]"):
        path.write_text(f'{{"a": [3, 4], "b": {bad}}}')
        with pytest.raises(DataError, match=r"must give two counts, .* for b\."):
            given_lengths(data, spec)
    for bad in ('{"a": [3, 4]}', "[1]", '{"a": 1, "b": 2}'):
        path.write_text(bad)
        with pytest.raises(DataError, match="must be a JSON object from each prefix to"):
            given_lengths(data, spec)
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):
        given_lengths(dataclasses.replace(data, per_dataset_sequences_path="none"), spec)


def test_flags_of_loading_reach_the_loader_and_megatron_core() -> None:
    words = "--dataloader-type cyclic --no-data-sharding --reset-attention-mask --data-path a"
    data = _config(*words.split()).section(DataConfig)
    assert source_options(data, 7) == {
        "mask_documents_at": 7, "cyclic": True, "data_sharding": False
    }  # fmt: skip
    assert source_options(DataConfig(), 7) == {
        "mask_documents_at": None, "cyclic": False, "data_sharding": True
    }  # fmt: skip
    words = "--data-path a --no-mmap-bin-files --mid-level-dataset-surplus 0.25"
    words += " --num-dataset-builder-threads 3 --allow-ambiguous-pad-tokens --reset-position-ids"
    config = _config(*words.split())
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    made = gpt.dataset_config(config, BlendSpec((["a"], None), None), tokenizer, "")
    assert (made.mmap_bin_files, made.mid_level_dataset_surplus) == (False, 0.25)
    assert (made.num_dataset_builder_threads, made.allow_ambiguous_pad_tokens) == (3, True)
    assert (made.reset_position_ids, made.eod_mask_loss) == (True, False)


def test_the_first_id_beyond_the_vocabulary_is_refused_when_it_is_read(tmp_path: Path) -> None:
    prefix = str(tmp_path / "docs")
    _write(prefix, 33)
    dataset = _dataset(prefix, tmp_path / "cache")
    dataset.config.vocab_size = 80
    largest = [int(dataset[i]["tokens"].max()) for i in range(len(dataset))]
    dataset.config.vocab_size = max(largest)
    with pytest.raises(DataError, match=f"docs.bin holds the token id {max(largest)}, but the voc"):
        [dataset[i] for i in range(len(dataset))]
    # The last label of a sample is an id that it reads too.
    dataset.config.vocab_size = 80
    rows = [[*row["tokens"].tolist(), int(row["labels"][-1])] for row in map(dataset.__getitem__,
            range(len(dataset)))]  # fmt: skip
    sample = next(number for number, row in enumerate(rows) if row[-1] > max(row[:-1]))
    dataset.config.vocab_size = rows[sample][-1]
    with pytest.raises(DataError, match=f"holds the token id {rows[sample][-1]}, but the voc"):
        dataset[sample]


def test_indices_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes for each sample, and again for each document in a sample: here three."""
    for memory, fits in ((16 * 4 * 110, True), (16 * 4 * 110 - 1, False)):
        monkeypatch.setattr(gpt, "this_host", lambda memory=memory: SimpleNamespace(memory=memory))
        gpt.check_index_memory(10.0, 30, [None, None, None])
        if fits:
            gpt.check_index_memory(10.0, 30, [100, None, 10])
        else:
            with pytest.raises(DataError, match=r"\(train 100, valid 0, test 10\) need indices of"):
                gpt.check_index_memory(10.0, 30, [100, None, 10])


def test_warnings_of_megatron_core_come_again_after_a_build(tmp_path: Path) -> None:
    logger = logging.getLogger("megatron.core.datasets.gpt_dataset")
    before = list(logger.filters)
    prefix = str(tmp_path / "docs")
    _write(prefix, 20)
    config = _config("--data-path", prefix, "--data-cache-path", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    with pytest.raises(DataError, match="The indices of samples cannot be written or read"):
        checked.build_checked_datasets(config, tokenizer, [4, 0, 0], lambda: True)
    assert logger.filters == before


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--split 1,2,3,4", "must be one to three shares that are finite and not negative"),
        ("--split 1,-2", "must be one to three shares"),
        ("--split 0,0", "must be one to three shares"),
        ("--split x", "must be one to three shares"),
        ("--multiple-validation-sets", "`--multiple-validation-sets` needs `--full-validation`"),
        ("--valid-data-path b", "`--data-path` and `--valid-data-path` exclude each other, since"),
        ("--test-data-path b", "`--data-path` and `--test-data-path` exclude each other, since"),
        ("--mock-data", "`--data-path` and `--mock-data` exclude each other"),
    ],
)
def test_flags_of_data_that_cannot_be_meant_are_refused(words: str, rule: str) -> None:
    own = without(TINY, "--split")
    null = "--train-iters 1 --tokenizer-type NullTokenizer --vocab-size 90 --data-path a".split()
    check_refused([*own, *null, *words.split()], rule)


def test_shares_of_splits_may_be_written_in_several_ways() -> None:
    own = without(TINY, "--split")
    null = "--train-iters 1 --tokenizer-type NullTokenizer --vocab-size 90".split()
    for given, kept in (
        ("8/1/1", "8/1/1"), ("'7,3'", "7,3"), ('"7,3"', "7,3"), (None, DEFAULT_SPLIT), ("1", "1")
    ):  # fmt: skip
        words = [] if given is None else ["--split", given]
        config = config_of([*own, *null, "--data-path", "a", *words])
        assert config.section(DataConfig).split == kept
    assert config_of([*own, *null, "--train-data-path", "a"]).section(DataConfig).split is None
    for way in ({"data_args_path": "a"}, {"data_schedule": "a"}, {"mock_data": True}):
        assert DataConfig(**way).resolved().split == DEFAULT_SPLIT
    assert DataConfig(per_split_data_args_path="a").resolved().split is None


def test_addresses_of_files_are_paths() -> None:
    for given, path in (("file:///a/b", "/a/b"), ("file:////a", "/a"), ("a", "a"), ("/a", "/a")):
        assert plain_prefix(given) == path


def test_datasets_without_weights_hold_what_is_asked_of_each_split(tmp_path: Path) -> None:
    """Half of 20 documents of 5 tokens has 6 samples of 8 and a last label: not 50 / 8."""
    _write(str(tmp_path / "docs"), 20)
    data, *rest = _inputs(str(tmp_path / "docs"), str(tmp_path / "docs"))
    data = dataclasses.replace(data, split="50,50,0")
    checked.check_inputs(data, *rest, [12, 12, 0])
    several = dataclasses.replace(data, multiple_validation_sets=True)
    checked.check_inputs(several, *rest, [12, 13, 0])
    for given, sizes, name in (
        (data, [13, 0, 0], "train"), (data, [12, 13, 0], "valid"), (several, [13, 13, 0], "train"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"The {name} split holds 12 samples, and .* but 13"):
            checked.check_inputs(given, *rest, sizes)


def test_the_memory_of_indices_is_that_of_documents_of_the_mean_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, documents in (("docs", 40), ("more", 20)):
        _write(str(tmp_path / name), documents)
    words = ["--data-path", "1", str(tmp_path / "docs"), "1", str(tmp_path / "more")]
    config = _config(*words, "--data-cache-path", str(tmp_path / "cache"))
    seen: list[Any] = []
    monkeypatch.setattr(checked, "check_index_memory", lambda *given, elsewhere: seen.append(given))
    checked.check_files(config, build_tokenizer(config.section(TokenizerConfig)))
    assert seen[0][:2] == (5.0, SEQUENCE)


def test_fragments_may_be_left_as_they_are() -> None:
    fim = FimConfig(fim_data=True, fim_split_sample="x")
    assert len(fim.own_errors()) == 1
    assert dataclasses.replace(fim, fim_fragment_rate=0.0).own_errors() == []
