"""Fill-in-the-middle: as a plain implementation makes it, and the same for every reader."""

from typing import Any

import numpy as np
import pytest

from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.permutation import key_of
from megatron_ext.errors import ConfigError
from megatron_ext.text.data.direct import DirectDataset
from megatron_ext.text.data.plan import plan_run
from megatron_ext.text.data.splits import build_direct, fim_of, marks_of
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.training_runs import TINY, check_refused, config_of, prepared, without

LENGTH, EOD = 96, 0
SPECIAL = "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <file_sep>".split()
PREFIX, MIDDLE, SUFFIX, PAD, FILE = range(512, 517)
WORDS = [
    *without(TINY, "--seq-length", "--split", "--max-position-embeddings"),
    *f"--data-order direct --seq-length {LENGTH} --train-iters 20".split(),
    *"--split 100,0,0 --max-position-embeddings 128 --tokenizer-type ByteLevelTokenizer".split(),
    *("--tokenizer-special-tokens", *SPECIAL, "--padded-vocab-size", "640"),
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write documents of up to 80 letters, a third of them in some fragments, and empty ones."""
    path = tmp_path_factory.mktemp("data") / "docs"
    rng = np.random.default_rng(0)
    with IndexedWriter(str(path), np.dtype(np.uint16)) as writer:
        for number in range(600):
            ids = rng.integers(97, 123, int(rng.integers(0, 80)))
            if number % 3 == 0:
                ids[int(rng.integers(0, 4)) :: 6] = FILE
            if number % 5 == 0:
                ids[:2] = ord("z")
            writer.add_document(np.array([*ids, EOD]), [len(ids) + 1])
    return str(path)


def _dataset(*more: str) -> DirectDataset:
    config: Any = config_of([*WORDS, *more])
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    plan, fim = plan_run(config, None, 0), fim_of(config, tokenizer, 0)
    return DirectDataset(plan.order, plan.spans, marks_of(config, tokenizer), plan.total, fim)


def _parts(ids: list[int], mark: int = EOD) -> list[list[int]]:
    """Return the parts between marks, such as ends of documents, each mark a part of its own."""
    found: list[list[int]] = [[]]
    for each in ids:
        if each == mark:
            found += [[mark], []]
        else:
            found[-1].append(each)
    return [part for part in found if part]


class _Numbers:
    def __init__(self, *seeds: int) -> None:
        self._bits = np.random.PCG64(list(seeds))

    def share(self) -> float:
        return (int(self._bits.random_raw()) // 2**11) / 2.0**53

    def place(self, length: int) -> int:
        return int(self._bits.random_raw()) % (length + 1)


def _plain(ids: list[int], rate: float, spm: float, numbers: _Numbers, skip: str) -> list[int]:
    """Move the middle of a document; bytes are characters here."""
    if numbers.share() >= rate:
        return ids
    text = bytes(x for x in ids if 2 <= x < 256).decode()
    if skip and text.startswith(skip):
        return ids
    one, other = numbers.place(len(text)), numbers.place(len(text))
    first, last = min(one, other), max(one, other)
    before, middle, after = (
        list(x.encode()) for x in (text[:first], text[first:last], text[last:])
    )
    if numbers.share() < spm:
        return [PREFIX, SUFFIX, *after, MIDDLE, *before, *middle]
    return [PREFIX, *before, SUFFIX, *after, MIDDLE, *middle]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_samples_are_those_of_a_plain_implementation(
    packing: str, split: bool, prefix: str
) -> None:
    words = ["--data-path", prefix, "--document-packing", packing]
    fim = "--fim-data --fim-rate 0.8 --fim-spm-rate 0.3 --fim-no-prefix zz".split()
    if split:
        fim += "--fim-split-sample <file_sep> --fim-fragment-rate 0.5".split()
    plain, moved = _dataset(*words).batch(0, 60), _dataset(*words, *fim).batch(0, 60)
    key = key_of("fim", 1234, "train")
    for row in range(60):
        ids = plain["tokens"][row].tolist()
        if plain["loss_mask"][row, -1]:
            ids.append(int(plain["labels"][row, -1]))
        found: list[int] = []
        for number, part in enumerate(_parts(ids)):
            draws = _Numbers(key, row, number)
            if part == [EOD]:
                found += part
            elif split and FILE in part:
                chosen = draws.share() < 0.8
                for each in _parts(part, FILE):
                    keep = not chosen or each == [FILE]
                    found += each if keep else _plain(each, 0.5, 0.3, draws, "zz")
            else:
                found += _plain(part, 0.8, 0.3, draws, "zz")
        found = found[: LENGTH + 1]
        tokens, labels = moved["tokens"][row].tolist(), moved["labels"][row].tolist()
        assert tokens == [*found[:LENGTH], *[PAD] * (LENGTH - len(found))]
        targets = moved["loss_mask"][row].bool().tolist()
        assert targets == [column < len(found) - 1 for column in range(LENGTH)]
        assert [x for x, is_target in zip(labels, targets, strict=True) if is_target] == found[1:]


@pytest.mark.parametrize("spm", ["0", "1"])
def test_a_moved_middle_can_be_put_back(spm: str, prefix: str) -> None:
    words = ["--data-path", prefix, "--document-packing", "best_fit"]
    plain = _dataset(*words).batch(0, 200)
    moved = _dataset(*words, *f"--fim-data --fim-rate 1 --fim-spm-rate {spm}".split()).batch(0, 200)
    restored = 0
    for before, after in zip(plain["tokens"].tolist(), moved["tokens"].tolist(), strict=True):
        # The last document may have lost its end, to keep the length of the sample.
        for ids, own in zip(_parts(before), _parts(after)[:-1], strict=False):
            if ids == [EOD]:
                assert own == ids
                continue
            suffix, middle = own.index(SUFFIX), own.index(MIDDLE)
            if spm == "1":
                assert own[:2] == [PREFIX, SUFFIX]
                text = own[middle + 1 :] + own[2:middle]
            else:
                text = own[1:suffix] + own[middle + 1 :] + own[suffix + 1 : middle]
            assert text == [x for x in ids if x != FILE], "special tokens are left out"
            restored += 1
    assert restored > 200


def test_rates_are_kept(prefix: str) -> None:
    words = "--fim-data --fim-rate 0.4 --fim-spm-rate 0.25".split()
    tokens = _dataset("--data-path", prefix, *words).batch(0, 320)["tokens"]
    parts = [part for row in tokens.tolist() for part in _parts(row)[:-1] if part != [EOD]]
    moved = [part for part in parts if part[0] == PREFIX]
    assert abs(len(moved) / len(parts) - 0.4) < 0.1
    # In the other order too, the suffix comes first where the prefix is empty.
    sizes = np.array([len(part) - 3 for part in moved])
    empty = float((1 - (sizes / (sizes + 1)) ** 2).mean())
    first = sum(part[1] == SUFFIX for part in moved) / len(moved)
    assert abs(first - (0.25 + 0.75 * empty)) < 0.14


def test_samples_do_not_depend_on_who_reads_them(prefix: str) -> None:
    words = ["--data-path", prefix, "--fim-data", "--document-packing", "best_fit"]
    whole = _dataset(*words).batch(0, 64)
    fresh = _dataset(*words, "--no-mmap-bin-files")
    for numbers in ([40], [7, 8, 9], [3, 60]):
        part = fresh.__getitems__(numbers)
        for name, values in part.items():
            assert values.tolist() == whole[name][numbers].tolist()
    other = _dataset(*words, "--seed", "4")
    assert (other.batch(0, 64)["tokens"] != whole["tokens"]).any()


def test_packed_documents_are_told_apart_and_padding_is_none(prefix: str) -> None:
    """A sample whose text has become shorter is filled up; documents keep to themselves."""
    words = ["--data-path", prefix, "--fim-data", "--fim-rate", "1", "--reset-position-ids"]
    batch = _dataset(*words, "--document-packing", "best_fit").batch(0, 200)
    numbers, tokens = batch["sample_ids"], batch["tokens"]
    assert (numbers < 0).any()
    assert ((numbers < 0) == (tokens == PAD)).all()
    ends = (tokens[:, :-1] == EOD) & (numbers[:, 1:] >= 0)
    assert (numbers[:, 1:][ends] == numbers[:, :-1][ends] + 1).all()
    assert (batch["position_ids"][:, 1:][ends] == 0).all()
    assert not batch["loss_mask"][numbers < 0].any()


def test_held_out_documents_are_moved_too(prefix: str) -> None:
    words = ["--data-path", prefix, "--split", "80,20,0", "--full-validation", "--fim-data"]
    config = config_of([*WORDS, *words, "--eval-iters", "1"])
    built = build_direct(config, build_tokenizer(config.section(TokenizerConfig)))
    assert isinstance(built.valid, DirectDataset)
    tokens = built.valid.batch(0, len(built.valid))["tokens"]
    assert (tokens == PREFIX).any() and (tokens == MIDDLE).any()
    config = config_of([*WORDS, *words[:2], "--split", "60,20,20", "--fim-data", "--eval-iters=1"])
    built = build_direct(config, build_tokenizer(config.section(TokenizerConfig)))
    for name in ("train", "valid", "test"):
        dataset = getattr(built, name)
        assert dataset.fim._key == key_of("fim", 1234, name)


def test_tokens_that_the_vocabulary_lacks_are_told(prefix: str) -> None:
    words = ["--data-path", prefix, *"--fim-data --fim-pad-token <none>".split()]
    with pytest.raises(ConfigError, match=r"`--fim-pad-token` \(<none>\) is no token of the voc"):
        prepared([*WORDS, *words])


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--data-order megatron --fim-data", "needs an order whose samples do not depend on who"),
        ("--fim-data --fim-split-sample <file_sep>", "needs `--fim-fragment-rate`, the share of"),
        ("--fim-data --sft", "`--fim-data` does not go with `--sft`"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(more: str, sentence: str) -> None:
    check_refused([*WORDS, *more.split()], sentence)


def test_splits_have_numbers_of_their_own_and_the_end_of_a_document_may_be_named(
    prefix: str,
) -> None:
    config: Any = config_of([*WORDS, "--data-path", prefix, "--fim-data"])
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    splits = [fim_of(config, tokenizer, split) for split in range(3)]
    names = ("train", "valid", "test")
    assert [each._key for each in splits if each] == [key_of("fim", 1234, x) for x in names]
    tokens = _dataset("--data-path", prefix, "--fim-data", "--fim-rate", "1",
                      "--fim-eod-token", "<file_sep>").batch(0, 40)["tokens"]  # fmt: skip
    parts = [part for row in tokens.tolist() for part in _parts(row, FILE)[:-1] if part != [FILE]]
    # Each text between two such tokens is moved as a whole, ends of documents included.
    assert all((part[0], part.count(MIDDLE)) == (PREFIX, 1) for part in parts)
    assert len(parts) > 40
