"""Ends of documents that a run misreads: training, preview and inspection say so."""

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from megatron_ext.data.indexed import read_index
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.errors import ConfigError
from megatron_ext.programs import inspect_dataset, preview_batch
from megatron_ext.text.data.blend import BlendSpec
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.gpt import dataset_config
from megatron_ext.text.data.separators import (
    appended_warnings,
    document_ends,
    ending_warnings,
    endings_of,
    first_endings,
    padding_id,
    spelled,
)
from megatron_ext.text.data.splits import build_direct
from megatron_ext.text.preprocess.cli import main
from megatron_ext.text.run import prepare_gpt
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import NullTokenizer
from tests.text import tiny
from tests.training_runs import TINY, config_of, without

PAD = "<|pad|>"


def folder_of(folder: Path, *, eos: str = tiny.END, pad: str | None = PAD) -> Path:
    """Write a tokenizer whose end of sequence and padding are the given tokens."""
    shutil.copytree(tiny.hf_folder(), folder)
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": eos}
    config |= {} if pad is None else {"pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    return folder


def preprocess(folder: Path, tokenizer: Path, *more: str) -> int:
    documents: list[dict[str, object]] = [{"text": f"The river {i} runs."} for i in range(60)]
    tiny.write_jsonl(folder / "in.jsonl", documents)
    words = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "out")]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    return main([*words, "--append-eod", *more])


def words_of(folder: Path, tokenizer: Path, *more: str) -> list[str]:
    words = without(TINY, "--split")
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    data = ["--data-path", str(folder / "out_text_document"), "--split", "100,0,0"]
    return [*words, *data, "--train-iters", "2", "--eval-iters", "0", *more]


def test_the_data_ends_with_the_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model's end of text is the padding of an instruct tokenizer."""
    tokenizer = folder_of(tmp_path / "t")
    assert preprocess(tmp_path, tokenizer, "--eod-token", PAD) == 0
    told = capsys.readouterr().err
    ids = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tokenizer)))
    pad, eod = ids.pad, ids.eod
    assert pad >= 0 and pad != eod
    assert f"Documents end with {pad} (`{PAD}`), which is the padding of this tokenizer" in told
    stored = np.fromfile(tmp_path / "out_text_document.bin", np.uint16)
    assert (stored == pad).sum() == 60 and (stored == eod).sum() == 0

    words = words_of(tmp_path, tokenizer)
    prepare_gpt(config_of(words))
    said = capsys.readouterr().out
    where = f"{tmp_path}/out_text_document holds the token {pad} (`{PAD}`) 60 times in its first"
    assert where in said and "and 60 of the first 60 documents end with it" in said
    assert "use `--data-order direct`, which trains it" in said
    ends = f"60 of the first 60 documents of {tmp_path}/out_text_document end with {pad}"
    assert ends in said

    direct, _ = prepare_gpt(config_of([*words, "--data-order", "direct"]))
    said = capsys.readouterr().out
    assert where not in said and ends in said
    train = build_direct(direct, ids).train
    batch = train.batch(0, 8)  # type: ignore[union-attr]
    assert int((batch["labels"] == pad).sum()) > 0 and bool((batch["loss_mask"] == 1).all())
    assert set(np.unique(batch["tokens"])) <= set(stored.tolist())

    monkeypatch.chdir(tmp_path)
    assert preview_batch.main(["--strict", "--no-color", "--", *words]) == 1
    shown = capsys.readouterr().out
    assert "warning: " in shown and "is the padding of the" in " ".join(shown.split())
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    assert inspect_dataset.main([str(tmp_path / "out_text_document"), *flags]) == 0
    assert where in capsys.readouterr().err


def test_good_data_needs_no_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = folder_of(tmp_path / "t")
    assert preprocess(tmp_path, tokenizer) == 0
    assert "Documents end with" not in capsys.readouterr().err
    flags = "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"
    prepare_gpt(config_of(words_of(tmp_path, tokenizer, *flags)))
    assert capsys.readouterr().out == ""


def test_data_without_ends_is_told_to_flags_that_need_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexedWriter(str(tmp_path / "out_text_document"), np.dtype(np.uint16)) as writer:
        for number in range(200):
            writer.add_document(np.full(9, 20 + number % 40), [9])
    words = words_of(tmp_path, folder_of(tmp_path / "t"))
    prepare_gpt(config_of(words))
    assert capsys.readouterr().out == ""
    prepare_gpt(config_of([*words, "--eod-mask-loss"]))
    said = capsys.readouterr().out
    assert f"> 0 of the first 200 documents of {tmp_path}/out_text_document end with" in said
    assert "by which `--eod-mask-loss` knows where one ends" in said
    monkeypatch.setenv("RANK", "1")
    for order in ([], ["--data-order", "direct"]):
        prepare_gpt(config_of([*words, "--eod-mask-loss", *order]))
    assert capsys.readouterr().out == "", "one rank has told it"


@pytest.mark.parametrize("ambiguous", [False, True])
@pytest.mark.parametrize("pad", [PAD, tiny.END, None])
def test_padding_is_what_megatron_core_takes_for_it(
    tmp_path: Path, pad: str | None, ambiguous: bool
) -> None:
    tokenizer = folder_of(tmp_path / "t", pad=pad)
    assert preprocess(tmp_path, tokenizer) == 0
    more = ["--allow-ambiguous-pad-tokens"] if ambiguous else []
    config = config_of(words_of(tmp_path, tokenizer, *more))
    ids = build_tokenizer(config.section(TokenizerConfig))
    prefix = str(tmp_path / "out_text_document")
    core = dataset_config(config, BlendSpec(([prefix], None), None), ids, "")
    low = GPTDataset.build_low_level_dataset(prefix, core)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = GPTDataset(low, prefix, np.arange(60), 1, Split.train, core)
    allowed = config.section(DataConfig).allow_ambiguous_pad_tokens
    assert padding_id(ids, allow_ambiguous=allowed) == dataset._pad_token_id


def test_ends_are_found_in_a_part_of_a_file(tmp_path: Path) -> None:
    lengths = [[3], [], [2, 0, 4], [0], [5], [1]]
    with IndexedWriter(str(tmp_path / "d"), np.dtype(np.int32)) as writer:
        for each in lengths:
            writer.add_document(np.arange(sum(each)), each)
    index = read_index(str(tmp_path / "d"))
    assert document_ends(index, 0, 15).tolist() == [2, 8, 13, 14]
    assert document_ends(index, 0, 10).tolist() == [2, 8]
    assert document_ends(index, 3, 6).tolist() == [5]
    assert document_ends(index, 3, 12).tolist() == [5, 10, 11]
    endings = first_endings(str(tmp_path / "d"), index)
    assert (endings.documents, dict(endings.last_ids)) == (4, {2: 1, 5: 1, 4: 1, 0: 1})


def test_an_end_of_document_token_must_be_known(tmp_path: Path) -> None:
    from megatron_ext.text.preprocess.options import PreprocessOptions
    from megatron_ext.text.preprocess.texts import TextEncoding

    settings = TokenizerConfig("HuggingFaceTokenizer", str(tiny.hf_folder()))
    options = PreprocessOptions(["in"], str(tmp_path / "out"), settings, append_eod=True,
                                eod_token="<none>")  # fmt: skip
    with pytest.raises(ConfigError, match=r"`--eod-token` \(<none>\) is no token of HuggingFaceT"):
        TextEncoding(options)
    with pytest.raises(ConfigError, match=r"`--eod-token` \(x\) has an effect only with `--app"):
        PreprocessOptions(["in"], str(tmp_path / "out"), settings, eod_token="x")


class Named(NullTokenizer):
    """Ids with special tokens of given numbers; 7 is spelled as white space."""

    def __init__(self, eod: int, bos: int) -> None:
        super().__init__(90)
        self.eos, self.bos = eod, bos

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " " if list(ids) == [7] else super().detokenize(ids)


def test_documents_are_warned_of_if_less_than_half_of_them_end_as_the_run_expects() -> None:
    tokenizer = Named(eod=5, bos=6)

    def warned(*last: int) -> list[str]:
        endings = endings_of(np.array(last), np.arange(len(last)))
        return ending_warnings("docs", endings, tokenizer, -1)

    assert warned(5, 6) == warned(5, 5, 6, 6) == warned() == []
    (sentence,) = warned(5, 5, 6, 6, 6)
    assert sentence.startswith(
        "3 of the first 5 documents of docs end with 6 (`6`), but the run's e"
    )
    # Half of the documents with another special token are enough, less are not.
    assert warned(6, 6, 1, 2)[0].startswith("2 of the first 4 documents of docs end with 6")
    assert warned(6, 6, 1, 2, 3) == warned(1, 1, 1) == []


def test_ids_are_spelled_where_there_is_something_to_see() -> None:
    tokenizer = Named(eod=5, bos=6)
    assert [spelled(tokenizer, n) for n in (6, 7, -1, 90, 91)] == [
        "6 (`6`)",
        "7",
        "-1",
        "90 (`90`)",
        "91",
    ]


def test_appended_ends_that_a_run_would_not_know_are_told() -> None:
    tokenizer = Named(eod=5, bos=6)
    assert appended_warnings(tokenizer, 5) == []
    (other,) = appended_warnings(tokenizer, 6)
    assert other.startswith("Documents end with 6 (`6`), but the end of document of this tokenizer")
    tokenizer.pad = 6
    padded, again = appended_warnings(tokenizer, 6)
    assert padded.startswith("Documents end with 6 (`6`), which is the padding") and again == other
    tokenizer.pad = 5  # which is taken for an end, not for padding
    assert appended_warnings(tokenizer, 5) == []
    for pad, allowed, padding in ((3, False, -1), (5, False, -1), (4, False, 4), (3, True, 3)):
        ends: Any = SimpleNamespace(pad=pad, eos=3, eod=5)
        assert padding_id(ends, allow_ambiguous=allowed) == padding
