"""Folders in training: which values are read into which rows, and what is written when."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.checkpoint.adapters import MARK
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert import reading, training, writing
from megatron_ext.text.convert.adapters import peft_layers
from megatron_ext.text.convert.config import config_json, read_model
from megatron_ext.text.convert.huggingface import Export, _vocab_size, stored_run
from megatron_ext.text.convert.reading import (
    WeightFolder,
    beyond_decoder,
    check_one_dtype,
    check_tensors,
    load_folder,
    without_missing_depths,
)
from megatron_ext.text.convert.training import (
    HuggingFaceConfig,
    HuggingFaceFolders,
    load_initial_weights,
    special_tokens,
    write_run,
)
from megatron_ext.text.convert.writing import write_model
from megatron_ext.text.tokenizers import TokenizerConfig
from tests.ranks import ranks
from tests.text.convert.models import SIZES, make
from tests.text.convert.test_reading import build, scaled
from tests.training_runs import SMALL, config_of


def model_of(folder: Path, tensors: dict[str, Tensor], **changed: Any) -> Any:
    folder.mkdir(exist_ok=True)
    content = {"model_type": "llama", **SIZES, **changed}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return read_model(folder)


@pytest.mark.parametrize("transposed", [False, True])
def test_scales_of_fp8_are_those_of_the_blocks_of_each_value(
    transposed: bool, tmp_path: Path
) -> None:
    """More rows than are converted at a time, from a place within a block on."""
    weight = torch.randn(400, 50) * torch.arange(1, 401)[:, None]
    stored, scales = scaled(weight, 16)
    tensors = {"w": stored, "w_scale_inv": scales, "plain": weight}
    quantized = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    model = model_of(tmp_path, tensors, quantization_config=quantized)
    whole = scales.repeat_interleave(16, 0)[:400].repeat_interleave(16, 1)[:, :50]
    truth = stored.float() * whole
    for rows, columns in ((slice(0, 400), slice(0, 50)), (slice(37, 390), slice(9, 43)),
                          (slice(33, 397, 4), slice(20, 21))):  # fmt: skip
        want = truth[rows, columns].t() if transposed else truth[rows, columns]
        target = torch.empty(want.shape)
        with WeightFolder(model) as source:
            source.copy("w", (rows, columns), target, transposed=transposed)
        assert torch.equal(target, want)
    with WeightFolder(model) as source:
        assert source.names == {"w", "plain"}
        source.copy(
            "plain", (slice(1, 3), slice(0, 50)), part := torch.empty(2, 50), transposed=False
        )
        assert torch.equal(part, weight[1:3])
    assert (
        check_one_dtype_of(tmp_path / "mixed", {"w": stored, "w_scale_inv": scales}) == "bfloat16"
    )


def check_one_dtype_of(folder: Path, tensors: dict[str, Tensor]) -> str:
    quantized = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    return check_one_dtype(model_of(folder, tensors, quantization_config=quantized))


def test_the_dtype_of_a_model_is_that_of_its_weights(tmp_path: Path) -> None:
    """Scales and biases of experts stay in float32, and 8 bits become 16."""
    weight = torch.randn(32, 32)
    stored, scales = scaled(weight, 16)
    half = {"a": weight.bfloat16(), "w": stored, "w_scale_inv": scales}
    assert check_one_dtype_of(tmp_path / "a", half) == "bfloat16"
    with pytest.raises(CheckpointError, match="in bfloat16 and float32, but a checkpoint has one"):
        check_one_dtype_of(tmp_path / "b", {**half, "b": weight})
    folder = make("deepseek_v3", tmp_path / "c", torch.bfloat16)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    biases = {x: y.float() for x, y in tensors.items() if x.endswith("e_score_correction_bias")}
    assert biases
    save_file({**tensors, **biases}, path, metadata={"format": "pt"})
    assert check_one_dtype(read_model(folder)) == "bfloat16"


def test_depths_are_the_layers_after_the_last_one(tmp_path: Path) -> None:
    names = {
        "model.layers.1.a.weight",
        "model.layers.2.a.weight",
        "transformer.h.3.b",
        "model.norm",
    }
    assert beyond_decoder(names, 2) == {"model.layers.2.a.weight", "transformer.h.3.b"}
    model = read_model(make("deepseek_v3", tmp_path / "hf"))
    assert model.fields["mtp_num_layers"] == 1
    assert without_missing_depths(model).fields == {**model.fields, "mtp_num_layers": None}


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2 tied"])
def test_files_may_leave_out_the_root_of_names_and_hold_masks(name: str, tmp_path: Path) -> None:
    """The files of the first GPT-2 do, and those of a part that was saved alone."""
    folder = make(name, tmp_path / "hf", torch.float16)
    path = folder / "model.safetensors"
    whole = load_file(path)
    root = "transformer." if name == "gpt2" else "model."
    layer = "h.0.attn" if name == "gpt2" else "layers.0.attention"
    masks = {f"{layer}.bias": torch.ones(1, 1, 8, 8).bool(), f"{layer}.masked_bias": torch.ones(())}
    bare = {x.removeprefix(root): y for x, y in whole.items()}
    save_file({**bare, **masks}, path, metadata={"format": "pt"})
    model = read_model(folder)
    assert check_one_dtype(model) == "float16"
    with WeightFolder(model) as source:
        assert source.names == whole.keys() | {root + x for x in masks}
        assert all(torch.equal(source.whole(x), y) for x, y in whole.items())
        shapes = {x: tuple(y.shape) for x, y in whole.items()}
        check_tensors(source, model.table(source.shapes()), shapes, model)


def test_layers_after_the_last_one_of_a_model_without_depths_are_refused(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "hf")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 1}))
    model = read_model(folder)
    with WeightFolder(model) as source:
        shapes = {x: y for x, y in source.shapes().items() if ".layers.1." not in x}
        with pytest.raises(CheckpointError, match=r"there are 1 layers \(`num_hidden_layers`\)"):
            check_tensors(source, model.table(source.shapes()), shapes, model)


def test_folders_with_two_models_or_without_an_index(tmp_path: Path) -> None:
    """Adapters beside weights are named; transformers applies them."""
    folder = make("llama", tmp_path / "hf", max_shard_size="60KB")
    model = read_model(folder)
    (folder / "adapter_config.json").write_text("{}")
    with WeightFolder(model) as source:
        assert "holds adapters of peft beside the whole weights" in source.notes()[0]
    index = folder / "model.safetensors.index.json"
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="programs differ in which they read"):
        WeightFolder(model)
    (folder / "model.safetensors").unlink()
    index.unlink()
    with pytest.raises(CheckpointError, match="holds model-00001-of-.*, but not model.safetensors"):
        WeightFolder(model)


@ranks(tp=2)
def test_padding_of_the_vocabulary_is_zero_on_the_ranks_that_hold_it(
    context: ParallelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank has rows 192 to 384 of 384, and the model has 300.

    Files of older releases hold the frequencies of rotary positions too.
    """
    source = tmp_path / "hf"
    if context.rank == 0:
        make("llama", source)
        path = source / "model.safetensors"
        old = {f"model.layers.{x}.self_attn.rotary_emb.inv_freq": torch.ones(8) for x in (0, 1)}
        save_file({**load_file(path), **old}, path, metadata={"format": "pt"})
    torch.distributed.barrier()
    closed: list[str] = []
    close = WeightFolder.close
    monkeypatch.setattr(WeightFolder, "close", lambda self: (closed.append("x"), close(self))[1])
    config, chunk = build(context, source, "--padded-vocab-size", "384", tp=2)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.fill_(7.0)
    closed.clear()
    load_folder([chunk], source, context)
    assert closed == ["x"]
    words = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    want = torch.cat([words, torch.zeros(84, 64)]).chunk(2)[context.rank]
    assert torch.equal(chunk.embedding.word_embeddings.weight, want)
    for name, parameter in chunk.named_parameters():
        assert not (parameter == 7).any(), name
    # A folder that cannot be written is an error on every rank, and none waits for another.
    with pytest.raises(CheckpointError, match=r"`--save-hf` \(/proc/x/iter\)"):
        write_run(Path("/proc/x/iter"), config, [chunk], context)
    # Values may lie anywhere in a buffer; a copied file of generation stays as it is.
    own = tmp_path / "generation_config.json"
    own.write_text('{"own": 1}')
    model = read_model(source)
    options: dict[str, Any] = {"num_layers": 2, "dtype": torch.float32, "copied": [own]}

    def buffered(parameter: Tensor) -> Tensor:
        buffer = torch.cat([torch.full((5,), torch.nan), 2 * parameter.detach().flatten()])
        return buffer[5:].view(parameter.shape)

    content = config_json(model.sections(), vocab_size=300, dtype=torch.float32, like=model)
    write_model(
        tmp_path / "back", [chunk], context, model.table(), content,
        generation={"eos_token_id": 3}, value_of=buffered, **options,
    )  # fmt: skip
    torch.distributed.barrier()
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        assert "inv_freq" in name or torch.equal(found[name], 2 * tensor), name
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == {"own": 1}


def folders_of(
    interval: int | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[str]]:
    """Return a callback whose run has no model, and what it does."""
    done: list[str] = []
    monkeypatch.setattr(training, "write_run", lambda target, *_: done.append(target.name))
    run: Any = SimpleNamespace(
        config=config_of(SMALL).with_section(
            HuggingFaceConfig(save_hf="/hf", save_hf_interval=interval)
        ),
        progress=SimpleNamespace(iteration=0),
        parameter_gather=SimpleNamespace(paused=lambda: done.append("paused") or nullcontext()),
        chunks=[],
        context=SimpleNamespace(rank=rank),
    )
    return HuggingFaceFolders(run), done


@pytest.mark.parametrize(
    ("interval", "steps", "found"),
    [(2, 4, [2, 4]), (2, 5, [2, 4, 5]), (None, 3, [3])],
)
def test_folders_are_written_at_intervals_and_once_at_the_end(
    interval: int | None, steps: int, found: list[int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for rank in (0, 1):
        callback, done = folders_of(interval, rank, monkeypatch)
        for step in range(1, steps + 1):
            callback.run.progress.iteration = step
            callback.after_step()
        callback.on_train_end()
        assert done == [x for step in found for x in ("paused", f"iter_{step:07d}")]
        told = [f"> wrote /hf/iter_{step:07d} (Hugging Face)" for step in found]
        assert capsys.readouterr().out.splitlines() == (told if rank == 0 else [])


def test_special_tokens_are_those_within_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(bos=0, eos=9, pad=10)
    monkeypatch.setattr(training, "build_tokenizer", lambda settings: tokenizer)
    settings = TokenizerConfig("NullTokenizer")
    assert special_tokens(settings, 10) == {"bos_token_id": 0, "eos_token_id": 9}
    assert special_tokens(settings, 11) == {
        "bos_token_id": 0,
        "eos_token_id": 9,
        "pad_token_id": 10,
    }
    tokenizer.bos = -1
    assert special_tokens(settings, 10) == {"eos_token_id": 9}


@pytest.mark.parametrize("has_source", [True, False])
def test_a_folder_like_its_source_has_its_vocabulary_and_generation(
    has_source: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model from scratch has the tokenizer's entries, and names its special tokens."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(writing, "write_model", lambda *_, **options: given.update(options, all=_))
    monkeypatch.setattr(
        training, "special_tokens", lambda settings, size: {"eos_token_id": size - 1}
    )
    monkeypatch.setattr(training, "merged_weights", lambda chunks: "merged")
    source = model_of(tmp_path / "hf", {})
    words = ["--load-hf", str(tmp_path / "hf"), *PLAIN]
    config = config_of([*words, "--padded-vocab-size", "512"])
    if not has_source:
        config = config.with_section(HuggingFaceConfig())
    config = config.__class__(**{**vars(config), "model": _with_vocabulary(config.model, 290)})
    nothing: Any = None
    write_run(tmp_path / "back", config, [], nothing)
    content = given["all"][4]
    assert content["vocab_size"] == (300 if has_source else 290)
    assert given["generation"] == ({} if has_source else {"eos_token_id": 289})
    assert (given["flag"], given["value_of"], given["num_layers"]) == ("--save-hf", "merged", 2)
    assert source.vocab_size == 300


def _with_vocabulary(model: Any, size: int) -> Any:
    return model.__class__(**{**vars(model), "unpadded_vocab_size": size})


PLAIN = (
    "--seq-length 16 --micro-batch-size 1 --skip-train --tokenizer-type NullTokenizer "
    "--vocab-size 289"
).split()


@pytest.mark.parametrize("draws", [True, False])
def test_depths_may_lack_weights_where_they_are_drawn(
    draws: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def load(*_: Any, **options: Any) -> Any:
        given.update(options)
        return SimpleNamespace(notes=["a note"])

    monkeypatch.setattr(reading, "load_folder", load)
    model_of(tmp_path, {})
    words = ["--load-hf", str(tmp_path), *PLAIN, *([] if draws else ["--no-initialization"])]
    nothing: Any = None
    notes = load_initial_weights(config_of(words), nothing, [])
    assert notes == [f"loaded {tmp_path} (Hugging Face)", "a note"]
    assert given == {"may_lack_depths": draws}


def test_an_export_reads_what_was_asked_for(tmp_path: Path) -> None:
    """Averages belong to the state of a run, so that a run is resumed for them."""
    stored = config_of([*SMALL, "--fp16"]).to_dict()
    plain = stored_run(Export(tmp_path, tmp_path), stored)
    assert (plain.precision.fp16, plain.checkpoint.finetune) == (True, True)
    assert plain.checkpoint.ckpt_step is None
    averaged = stored_run(Export(tmp_path, tmp_path, step=0, ema=True), stored)
    assert not averaged.checkpoint.finetune
    assert averaged.checkpoint.no_load_optim and averaged.checkpoint.no_load_rng
    assert averaged.checkpoint.ckpt_step == 0


def test_an_export_has_as_many_rows_as_asked_for(tmp_path: Path) -> None:
    like = model_of(tmp_path, {})
    here = Path()
    assert _vocab_size(Export(here, here), 512, like) == (300, [])
    size, notes = _vocab_size(Export(here, here), 512, None)
    assert size == 512 and notes[0].startswith("The padding of the vocabulary is exported too;")
    for rows in (1, 200, 512):
        for given in (like, None):
            assert _vocab_size(Export(here, here, vocab_size=rows), 512, given) == (rows, [])
    assert _vocab_size(Export(here, here), 300, like) == (300, [])
    for rows in (0, 513):
        with pytest.raises(
            CheckpointError, match=rf"\({rows}\) must be at least 1 and at most the"
        ):
            _vocab_size(Export(here, here, vocab_size=rows), 512, None)


LLAMA_LIKE = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
).split()


@pytest.mark.parametrize("more", [[], ["--normalization", "LayerNorm"]])
def test_adapters_of_each_layer_have_its_number_and_heads(more: list[str], tmp_path: Path) -> None:
    """A model of no family has Llama's names. 4 heads of 8 channels share 2 keys and values."""
    layers = peft_layers(config_of([*SMALL, *LLAMA_LIKE, *more, "--lora-rank", "3"]), tmp_path)
    rows = torch.arange(64.0)[:, None].repeat(1, 3)
    groups = rows.view(2, 4, 8, 3)
    want = {"q": groups[:, :2], "k": groups[:, 2:3], "v": groups[:, 3:]}
    stem = "self_attn.{}_proj"
    name = f"decoder.layers.1.self_attention.linear_qkv{MARK}b"
    for given, matrix in (
        (name, rows),
        (name.replace("s.1.", "s."), torch.stack([0 * rows, rows])),
    ):
        low = torch.randn(*matrix.shape[:-2], 3, 32)
        found = layers.pairs({f"{given[:-1]}a": low, given: matrix})
        assert len(found) == (3 if given is name else 6)
        for part, values in want.items():
            a, b = found[f"model.layers.1.{stem.format(part)}"]
            assert torch.equal(b, values.reshape(-1, 3))
            assert torch.equal(a, low if given is name else low[1])
        assert len({a.data_ptr() for a, _ in found.values()}) == len(found)
