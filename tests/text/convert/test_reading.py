"""Folders are read slice by slice: bytes and memory are counted, and faults are sentences."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.initialization import shards_of
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.reading import load_folder
from megatron_ext.text.convert.training import write_run
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.ranks import on_ranks, ranks
from tests.text import tiny
from tests.text.convert.models import make, make_tiny
from tests.text.convert.settings import SETTINGS
from tests.text.convert.stored_models import in_mxfp4
from tests.training_runs import config_of

PLAIN = (
    "--seq-length 16 --micro-batch-size 1 --skip-train --tokenizer-type NullTokenizer "
    "--vocab-size 299"
).split()
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "tp2pp2": ("qwen2 tied", {"tp": 2, "pp": 2}),
    "tp2ep2": ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}),
    "ep2": ("gpt_oss", {"ep": 2, "dp": 2}),
    "tp2": ("gpt2 with gelu_new", {"tp": 2}),
}
SIZES = {
    "tp": "--tensor-model-parallel-size {} --sequence-parallel",
    "pp": "--pipeline-model-parallel-size {}",
    "ep": "--expert-model-parallel-size {}",
    "etp": "--expert-tensor-parallel-size {}",
    "dp": "",
}


def build(context: ParallelContext, source: Path, *words: str, **sizes: int) -> tuple[Any, Any]:
    """Return the configuration and this rank's chunk of the model of a folder."""
    layout = [word for name, x in sizes.items() for word in SIZES[name].format(x).split()]
    flags = ["--load-hf", str(source), *PLAIN, *layout, *words]
    config = config_of(flags, ranks=context.layout.world_size)
    (chunk,) = build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)
    return config, chunk


def check_bytes(context: ParallelContext, *, source: Path, split: dict[str, int]) -> None:
    _, chunk = build(context, source, **split)
    loaded = load_folder([chunk], source, context)
    own = sum(shard.tensor.numel() * 4 for shard in shards_of(chunk, buffers=True))
    assert 0.9 * own < loaded.bytes_read <= 1.1 * own, (loaded.bytes_read, own)
    for name, parameter in chunk.named_parameters():
        assert not parameter.isnan().any(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_reads_its_own_bytes(layout: str, tmp_path: Path) -> None:
    name, sizes = LAYOUTS[layout]
    on_ranks(check_bytes, sizes, source=make(name, tmp_path / "hf"), split=sizes)


def anonymous() -> int:
    """Return this process's memory that is no mapped file, in bytes."""
    with Path("/proc/self/status").open(encoding="utf-8") as file:
        line = next(x for x in file if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def check_memory(
    context: ParallelContext,
    source: Path,
    largest: int,
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
) -> None:
    """Check that reading and writing take at most twice the largest tensor above the model."""
    config, chunk = build(context, source, "--bf16", *more)
    peak, copy_ = [anonymous()], Tensor.copy_

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = copy_(self, *args, **kwargs)
        peak.append(anonymous())
        return result

    monkeypatch.setattr(Tensor, "copy_", counted)
    monkeypatch.setattr(Tensor, "__setitem__", lambda self, i, value: counted(self[i], value))
    load_folder([chunk], source, context)
    assert len(peak) > 10
    assert max(peak) - peak[0] <= 2 * largest
    peak[:] = [anonymous()]
    write_run(source.with_name("back"), config, [chunk], context)
    assert len(peak) > 10
    assert max(peak) - peak[0] <= 2 * largest


@ranks()
def test_memory_is_that_of_the_model_and_the_largest_tensor(
    context: ParallelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 4096}
    source = make("llama", tmp_path / "hf", changed=sizes)
    check_memory(context, source, 2 * 4096 * 512 * 2, monkeypatch)


@pytest.mark.slow
@ranks()
def test_quantized_weights_take_no_more_memory(
    context: ParallelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    source = in_mxfp4(make("gpt_oss", tmp_path / "hf", changed=sizes))
    more = ["--save-hf", str(tmp_path / "x"), "--save-hf-quantization", "mxfp4"]
    check_memory(context, source, 4 * 2 * 1024 * 512 * 2, monkeypatch, *more)


def scaled(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return a weight in fp8 and the scale of each of its blocks."""
    rows, columns = (-(-size // block) for size in weight.shape)
    scales = torch.empty(rows, columns)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            own = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = weight[own].abs().max() / 448
            stored[own] = (weight[own] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def quantize(folder: Path, block: int) -> None:
    """Store the projections of a folder in fp8, and put their rounded values beside it."""
    path = folder / "model.safetensors"
    tensors, plain = load_file(path), {}
    for name, weight in list(tensors.items()):
        if "proj" in name and weight.dim() == 2:
            stored, scales = scaled(weight, block)
            whole = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
            plain[name] = stored.float() * whole[: weight.shape[0], : weight.shape[1]]
            tensors[name], tensors[f"{name}_scale_inv"] = stored, scales
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    target = folder.with_name("plain")
    target.mkdir()
    save_file({**load_file(path), **plain}, target / path.name, metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, path, metadata={"format": "pt"})


def check_fp8(context: ParallelContext, *, source: Path, split: dict[str, int]) -> None:
    _, chunk = build(context, source, **split)
    load_folder([chunk], source, context)
    found = {name: parameter.clone() for name, parameter in chunk.named_parameters()}
    load_folder([chunk], source.with_name("plain"), context)
    for name, parameter in chunk.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_weights_in_fp8_get_their_scales(tmp_path: Path) -> None:
    source = make("deepseek_v3", tmp_path / "hf")
    quantize(source, 16)
    sizes = {"tp": 2, "ep": 2, "etp": 1}
    on_ranks(check_fp8, sizes, source=source, split=sizes)


def check_mxfp4(context: ParallelContext, *, source: Path, split: dict[str, int]) -> None:
    _, chunk = build(context, source.with_name("plain"), **split)
    load_folder([chunk], source.with_name("plain"), context)
    plain = {name: parameter.clone() for name, parameter in chunk.named_parameters()}
    loaded = load_folder([chunk], source, context)
    for name, parameter in chunk.named_parameters():
        assert torch.equal(plain[name], parameter), name
    shards = list(shards_of(chunk, buffers=True))
    experts = [x for x in shards if "experts" in x.name and ".weight" in x.name]
    values = sum(shard.tensor.numel() for shard in experts)
    others = sum(shard.tensor.numel() for shard in shards) - values
    # Four bits for a value, and a byte for 32 of them.
    own = values / 2 + values / 32 + 4 * others
    assert 0.9 * own < loaded.bytes_read <= 1.1 * own, (loaded.bytes_read, own)


def test_experts_in_mxfp4_are_read_in_slices(tmp_path: Path) -> None:
    source = in_mxfp4(make("gpt_oss", tmp_path / "hf", changed={"intermediate_size": 64}))
    sizes = {"ep": 2, "dp": 2}
    on_ranks(check_mxfp4, sizes, source=source, split=sizes)


def add_depth(folder: Path) -> None:
    """Add the weights of a depth of multi-token prediction, as DeepSeek's folders have them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = "model.layers.1."
    depth = {x.replace(last, "model.layers.2."): y + 0.5 for x, y in tensors.items() if last in x}
    hidden = tensors["model.norm.weight"].shape[0]
    own = {
        "enorm.weight": torch.randn(hidden),
        "hnorm.weight": torch.randn(hidden),
        "eh_proj.weight": torch.randn(hidden, 2 * hidden),
        "shared_head.norm.weight": torch.randn(hidden),
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    depth |= {f"model.layers.2.{name}": tensor for name, tensor in own.items()}
    save_file(tensors | depth, path, metadata={"format": "pt"})


def add_depth_apart(folder: Path) -> None:
    """Add the weights of a depth of multi-token prediction, as Qwen3-Next's folders have them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = "model.layers.3."
    depth = {x.replace(last, "mtp.layers.0."): y + 0.5 for x, y in tensors.items() if last in x}
    hidden = tensors["model.norm.weight"].shape[0]
    depth |= {
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden),
        "mtp.norm.weight": torch.randn(hidden),
        "mtp.pre_fc_norm_embedding.weight": torch.randn(hidden),
        "mtp.pre_fc_norm_hidden.weight": torch.randn(hidden),
    }
    save_file(tensors | depth, path, metadata={"format": "pt"})


def check_depths_apart(context: ParallelContext, *, root: Path, split: dict[str, int]) -> None:
    source = root / "hf"
    config, chunk = build(context, source, **split)
    assert config.model.mtp_num_layers is None
    note = " ".join(load_folder([chunk], source, context).notes)
    assert "holds weights of multi-token prediction, which a run without" in note
    content = json.loads((source / "config.json").read_text())
    key = next(x for x in ("mtp_num_hidden_layers", "num_nextn_predict_layers") if x in content)
    if context.rank == 0:
        (source / "config.json").write_text(json.dumps({**content, key: 1}))
    torch.distributed.barrier()
    config, chunk = build(context, source, **split)
    assert config.model.mtp_num_layers == 1
    assert "multi-token" not in " ".join(load_folder([chunk], source, context).notes)
    write_run(root / "back", config, [chunk], context)
    if context.rank == 0:
        (root / "without" / "config.json").write_text(json.dumps({**content, key: 1}))
    torch.distributed.barrier()
    config, _ = build(context, root / "without", **split)
    assert config.model.mtp_num_layers is None
    config, _ = build(context, source, "--mtp-num-layers", "0", **split)
    assert not config.model.mtp_num_layers


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_text"])
def test_depths_with_a_path_of_their_own(name: str, tmp_path: Path) -> None:
    settings = {"model_type": name, **SETTINGS[name][0]}
    key = "mtp_num_hidden_layers" if "3_5" in name else "num_nextn_predict_layers"
    for folder in ("hf", "without"):
        make_tiny({**settings, key: 0}, tmp_path / folder)
    add_depth_apart(tmp_path / "hf")
    on_ranks(check_depths_apart, {"tp": 2}, root=tmp_path, split={"tp": 2})
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("hf", "back"))
    assert before.keys() == after.keys()
    for tensor in before:
        assert torch.equal(before[tensor], after[tensor]), tensor
    assert json.loads((tmp_path / "back" / "config.json").read_text())[key] == 1


def check_depths(context: ParallelContext, *, root: Path, split: dict[str, int]) -> None:
    config, chunk = build(context, root / "hf", **split)
    assert config.model.mtp_num_layers == 1
    (note,) = load_folder([chunk], root / "hf", context).notes
    assert "these entries have no effect here: `head_dim`, " in note
    write_run(root / "back", config, [chunk], context)
    _, chunk = build(context, root / "hf", "--mtp-num-layers", "0", **split)
    note = " ".join(load_folder([chunk], root / "hf", context).notes)
    assert "holds weights of multi-token prediction, which a run without" in note
    _, chunk = build(context, root / "without", "--mtp-num-layers", "1", **split)
    before = {x: y.clone() for x, y in chunk.named_parameters() if x.startswith("mtp.")}
    note = " ".join(load_folder([chunk], root / "without", context).notes)
    assert "holds no weights of multi-token prediction, so its depths start from" in note
    after = dict(chunk.named_parameters())
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with pytest.raises(CheckpointError, match="`--lora-quantize-weights` gives them no values"):
        load_folder([chunk], root / "without", context, may_lack_depths=False)


def test_depths_of_multi_token_prediction(tmp_path: Path) -> None:
    source = make("deepseek_v3", tmp_path / "hf")
    make("deepseek_v3", tmp_path / "without")
    add_depth(source)
    on_ranks(check_depths, {"tp": 2}, root=tmp_path, split={"tp": 2})
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("hf", "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_only_folders_of_hugging_face_need_its_packages(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    script = (
        "import sys\n"
        "for name in ('safetensors', 'transformers', 'tokenizers'): sys.modules[name] = None\n"
        "import pathlib, megatron_ext.text.run\n"
        "from megatron_ext.checkpoint.safetensors_files import CheckpointError, TensorFolder\n"
        "try: TensorFolder(pathlib.Path(sys.argv[1]))\n"
        "except CheckpointError as error: print(error)"
    )
    words = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tiny.ROOT, timeout=120)
    assert "run `pip install safetensors`" in done.stdout, done.stderr


def check_notes(context: ParallelContext, *, source: Path) -> None:
    """Routers in float32 are rounded to a run's 16 bits, and tensors of depths left out."""
    for words, rounds in (((), False), (("--bf16",), True)):
        _, chunk = build(context, source, *words)
        notes = " ".join(load_folder([chunk], source, context).notes)
        gate = "such as `model.layers.0.mlp.gate.weight`; they are rounded to the model's dtype"
        assert (gate in notes) is rounds
        assert "holds 1 tensors such as `model.mtp_linear_proj.0.weight`, which have no" in notes


def test_what_is_rounded_or_left_out_is_named(tmp_path: Path) -> None:
    content = {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "pad_token_id": 0}
    source = make_tiny({**content, "moe_layer_start_index": 0}, tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    tensors["model.mtp_linear_proj.0.weight"] = torch.zeros(2, 2)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    on_ranks(check_notes, {}, source=source)
