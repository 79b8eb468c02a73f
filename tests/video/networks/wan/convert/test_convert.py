"""Weights of Wan go to a checkpoint and back and compute the same; what does not fit is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.checkpoint.conversion import weight_shards
from megatron_ext.checkpoint.safetensors_files import TensorFolder
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.run import Run
from megatron_ext.video.convert.files import PlainTensors
from megatron_ext.video.convert.importing import import_weights
from megatron_ext.video.convert.reading import Published, fill, open_published
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION
from megatron_ext.video.networks.wan.convert.names import Naming
from tests.checkpoint.tiny import whole_tensors
from tests.ranks import on_ranks, run_on_ranks
from tests.video.networks.harness import check_weights
from tests.video.networks.wan.convert.models import (
    STEM,
    bare,
    exported,
    imported,
    inputs,
    load_ours,
    make,
    make_original,
    network,
    original_tensors,
    tensors_of,
    theirs,
)
from tests.video.streaming.runs import run, runner_of

TWO_FILES = "300KB"


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_namings_there_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """Convert a source in one file and one in several files; either naming gives both."""
    diffusers = make(tmp_path / "diffusers", dtype)
    original = make_original(tmp_path / "original", diffusers)
    for source in (diffusers, original):
        root = tmp_path / f"{source.name} imported"
        assert imported(source, root) == ("tiny", str(dtype).removeprefix("torch."))
        back = exported(root, tmp_path / f"{source.name} to diffusers", max_shard_size=TWO_FILES)
        assert len(list(back.glob(f"{STEM}*.safetensors"))) > 1
        assert_same(tensors_of(back), tensors_of(diffusers))
        back = exported(root, tmp_path / f"{source.name} to original", naming="original")
        assert [path.name for path in back.glob("*.safetensors")] == [f"{STEM}.safetensors"]
        assert_same(tensors_of(back), original_tensors(diffusers))


def test_diffusers_loads_what_is_exported(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers", max_shard_size=TWO_FILES)
    assert len(list(source.glob("*.safetensors"))) > 1
    imported(source, tmp_path / "ours")
    back = exported(tmp_path / "ours", tmp_path / "back", max_shard_size=TWO_FILES)
    model, info = WanTransformer3DModel.from_pretrained(back, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(theirs(model.eval(), inputs()), theirs(network(), inputs()))
    for name, value in network().config.items():
        if not name.startswith("_"):
            assert model.config[name] == (list(value) if isinstance(value, tuple) else value), name


def test_another_dtype(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers")
    assert imported(source, tmp_path / "ours", dtype="bfloat16") == ("tiny", "bfloat16")
    whole = whole_tensors(tmp_path / "ours" / "iter_0000000", tmp_path / "whole.pt")
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    back = tensors_of(exported(tmp_path / "ours", tmp_path / "back", dtype="float32"))
    rounded = {name: x.bfloat16().float() for name, x in tensors_of(source).items()}
    assert_same(back, rounded)


def save_pt(path: Path, diffusers: Path) -> Path:
    """Save as LongLive and Self-Forcing do: a wrapped network, and averages with names of FSDP."""
    tensors = original_tensors(diffusers)
    generator = {f"model.{name}": tensor for name, tensor in tensors.items()}
    averages = {
        f"model._fsdp_wrapped_module._orig_mod.{name.replace('.0.', '.0._fsdp_wrapped_module.')}": 2
        * tensor
        for name, tensor in tensors.items()
    }
    torch.save({"generator": generator, "generator_ema": averages, "step": 700}, path)
    return path


@pytest.mark.parametrize("entry", ["generator", "generator_ema"])
def test_a_file_of_longlive(tmp_path: Path, entry: str) -> None:
    source = make(tmp_path / "diffusers")
    path = save_pt(tmp_path / "longlive_base.pt", source)
    assert imported(path, tmp_path / "ours", entry=entry) == ("tiny", "float32")
    back = tensors_of(exported(tmp_path / "ours", tmp_path / "back"))
    factor = {"generator": 1, "generator_ema": 2}[entry]
    assert_same(back, {name: factor * tensor for name, tensor in tensors_of(source).items()})


def test_files_of_torch_with_one_entry_or_none(tmp_path: Path) -> None:
    """Read diffusers' naming too, and the form from before torch 1.6."""
    source = make(tmp_path / "diffusers")
    content = {
        "bare.pt": tensors_of(source),
        "one.pth": {"model": original_tensors(source), "optimizer": {}},
    }
    for number, (name, value) in enumerate(content.items()):
        torch.save(value, tmp_path / name, _use_new_zipfile_serialization=bool(number))
        root = tmp_path / f"{name} ours"
        assert imported(tmp_path / name, root) == ("tiny", "float32")
        assert_same(tensors_of(exported(root, tmp_path / f"{name} back")), tensors_of(source))


def in_eight_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as ComfyUI quantizes them: matrices of blocks in 8 bits, each with a scale."""
    found: dict[str, Tensor] = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        if not (name.startswith("blocks.") and tensor.dim() == 2):
            found[name] = tensor.bfloat16()
            continue
        layer = name.removesuffix(".weight")
        found[name] = tensor.mul(8).to(torch.float8_e4m3fn)
        found[f"{layer}.scale_weight"] = torch.tensor(0.125)
        found[f"{layer}.scale_input"] = torch.tensor(1.0)
    return found


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_single_files_of_safetensors(tmp_path: Path, prefix: str) -> None:
    """Read the original's names, alone or with the prefix that ComfyUI gives them."""
    tensors = original_tensors(make(tmp_path / "diffusers"))
    path = tmp_path / "wan2.1_t2v_1.3B.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, path)
    with open_published(path) as model:
        assert (model.conversion, model.form.name) == (CONVERSION, "original")
    assert imported(path, tmp_path / "ours") == ("tiny", "float32")
    back = exported(tmp_path / "ours", tmp_path / "back", naming="original")
    assert_same(tensors_of(back), tensors)
    assert "is a file of safetensors; leave it out" in refusal(path, entry="model")


def test_a_single_file_in_eight_bits(tmp_path: Path) -> None:
    tensors = in_eight_bits(original_tensors(make(tmp_path / "diffusers")))
    path = tmp_path / "wan_fp8_scaled.safetensors"
    save_file({f"diffusion_model.{name}": tensor for name, tensor in tensors.items()}, path)
    assert "tensors in bfloat16 and float8_e4m3fn, but a checkpoint has one" in refusal(path)
    assert imported(path, tmp_path / "ours", dtype="float32") == ("tiny", "float32")
    back = exported(tmp_path / "ours", tmp_path / "back", naming="original")
    beside = (".scale_weight", ".scale_input", "scaled_fp8")
    scale = {name: 0.125 for name, x in tensors.items() if x.dtype == torch.float8_e4m3fn}
    wanted = {n: x.float() * scale.get(n, 1) for n, x in tensors.items() if not n.endswith(beside)}
    assert_same(tensors_of(back), wanted)
    blocks = {name: torch.ones(2, 3) for name in tensors if name.endswith("ffn.0.scale_weight")}
    save_file({**tensors, **blocks}, path)
    assert "with shape [2, 3], which must be one number or one for each output" in refusal(
        path, dtype="float32"
    )


def refusal(source: Path, **options: Any) -> str:
    target = source.parent / "refused"
    with pytest.raises(CheckpointError) as caught:
        import_weights(source, target, **options)
    assert not target.exists()
    (sentence,) = caught.value.messages
    return str(sentence)


def test_files_of_torch_that_are_refused(tmp_path: Path) -> None:
    path = save_pt(tmp_path / "a.pt", make(tmp_path / "diffusers"))
    assert "those that do are: generator, generator_ema; choose by `--entry`" in refusal(path)
    sentence = refusal(path, entry="critic")
    assert "no weights under `--entry critic`; those that hold any: generator, gen" in sentence
    torch.save({"generator_lora": {"a": torch.ones(2)}}, path)
    assert "such as `a`, of no network that can be read; give weights of" in refusal(path)
    torch.save({"code": Path}, path)
    assert "names `pathlib.Path`, which does not belong into a checkpoint" in refusal(path)
    path.write_bytes(b"not what torch writes")
    assert "a.pt cannot be read" in refusal(path)
    tensors = original_tensors(path.parent / "diffusers")
    torch.save({**tensors, "head.head.bias": tensors["head.head.bias"].to(torch.int8)}, path)
    assert "`head.head.bias` as int8, which is no float32" in refusal(path, dtype="float32")
    torch.save([torch.ones(2)], path)
    assert "must hold names and tensors" in refusal(path)


def change(folder: Path, **changed: Tensor | None) -> None:
    path = folder / f"{STEM}.safetensors"
    tensors = {**load_file(path), **{k.replace("__", "."): v for k, v in changed.items()}}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers")
    whole = tensors_of(source)
    change(source, blocks__1__norm2__bias=None)
    assert f"{source} holds no `blocks.1.norm2.bias`, which" in refusal(source)
    change(source, blocks__1__norm2__bias=torch.ones(3))
    sentence = refusal(source)
    assert "`blocks.1.norm2.bias` with shape [3], but the sizes of the model imply [64]" in sentence
    change(source, blocks__1__norm2__bias=whole["blocks.1.norm2.bias"].bfloat16())
    assert "tensors in bfloat16 and float32, but a checkpoint has one dtype" in refusal(source)
    change(source, blocks__1__norm2__bias=torch.ones(64, dtype=torch.int8))
    sentence = refusal(source, dtype="bfloat16")
    assert "as I8, which is no float32, bfloat16 or float16; use the model before" in sentence
    change(source, blocks__1__attn2__add_k_proj__bias=torch.ones(64))
    assert "holds `blocks.1.attn2.add_k_proj.bias`, which Wan 2.1 or 2.2 does" in refusal(source)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers")
    assert "`--entry model` is for a file of torch.save" in refusal(source, entry="model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_layers": 3}))
    assert "holds no `blocks.2.scale_shift_table`, which Wan 2.1 or 2.2 has" in refusal(source)
    (source / "config.json").unlink()
    file = source / f"{STEM}.safetensors"
    assert refusal(source) == f"{source} has no config.json; give the file {file}."


TOLERANCE = 1e-5
"""The largest difference in fp32, as a share of the largest number that diffusers gives."""


def check_flow(ours: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE * scale)


@torch.no_grad()
def check_loaded(
    context: ParallelContext, root: Path, expected: dict[bool, Tensor], sequence_parallel: bool
) -> None:
    chunk = load_ours(context, root, sequence_parallel=sequence_parallel)
    for per_frame, flow in expected.items():
        check_flow(chunk(**inputs(per_frame=per_frame)), flow)


@pytest.mark.parametrize("naming", Naming)
def test_imported_weights_compute_what_diffusers_does(tmp_path: Path, naming: Naming) -> None:
    """Check a timestep for each sample, and one for each frame as in Wan 2.2, in four layouts."""
    source, root = make(tmp_path / "diffusers"), tmp_path / "ours"
    expected = {p: theirs(network(), inputs(per_frame=p)) for p in (False, True)}
    assert not torch.allclose(expected[False], expected[True], atol=1e-2)
    if naming is Naming.ORIGINAL:
        source = make_original(tmp_path / "original", source)
    assert imported(source, root) == ("tiny", "float32")
    layouts = [({}, False), ({"tp": 2}, False), ({"tp": 2}, True), ({"cp": 2}, False)]
    for sizes, parallel in layouts if naming is Naming.DIFFUSERS else layouts[:1]:
        on_ranks(check_loaded, sizes, root=root, expected=expected, sequence_parallel=parallel)


@torch.no_grad()
def check_fill(context: ParallelContext, sizes: VideoDiTSizes, source: Path, want: Tensor) -> None:
    chunk = bare(context, sizes)
    with TensorFolder(source, STEM) as folder:
        tensors = PlainTensors(folder, source)
        model = Published(source, CONVERSION, CONVERSION.form("diffusers"), sizes, tensors)
        model.check()
        fill(weight_shards(chunk), model)
    check_flow(chunk(**inputs(sizes)), want)


def test_heads_of_wan_rotate_alike(tmp_path: Path) -> None:
    """Check heads of 128, whose axes have 44, 42 and 42 features, and 16 channels."""
    sizes = VideoDiTSizes(256, 2, 320, 1, text_width=24)
    assert sizes.axes_dim == (44, 42, 42)
    model = network(sizes)
    given = {"sizes": sizes, "source": tmp_path, "want": theirs(model, inputs(sizes))}
    model.save_pretrained(tmp_path)
    run_on_ranks(check_fill, Layout(1), given)


STEPS = 3
"""The training steps; the first and the last train the generator, averages begin after two."""


def whole(root: Path, step: int = STEPS) -> dict[str, Tensor]:
    folder = root / f"iter_{step:07d}"
    return whole_tensors(folder, root.with_suffix(f".{step}.pt"))


def starts_from_them(run: Run, wanted: dict[str, Tensor]) -> None:
    runner = runner_of(run)
    check_weights(unwrap_model([*runner.chunks, *runner.critic.chunks, runner.teacher]), wanted)


def test_a_run_starts_from_imported_weights_and_is_exported(tmp_path: Path) -> None:
    """Train on two tensor-parallel ranks; exported weights are imported again as the same."""
    source, root = make(tmp_path / "diffusers", torch.bfloat16), tmp_path / "ours"
    imported(source, root)
    wanted = whole(root, 0)
    words = f"--train-iters {STEPS} --tensor-model-parallel-size 2 --bf16 " + " ".join(
        f"--{flag}-checkpoint {root}" for flag in ("pretrained", "critic", "teacher")
    )
    run(tmp_path, words, ranks=2, prepare=partial(starts_from_them, wanted=wanted))
    trained = whole(tmp_path / "save")
    orders: dict[str, dict[str, Any]] = {
        "": {},
        "ema.": {"ema": True, "dtype": "float32"},
        "critic.": {"network": "critic", "naming": "original"},
    }
    for prefix, options in orders.items():
        target = exported(tmp_path / "save", tmp_path / f"exported {prefix}", **options)
        imported(target, tmp_path / f"again {prefix}")
        again = whole(tmp_path / f"again {prefix}", 0)
        assert again.keys() == wanted.keys()
        for name, tensor in again.items():
            assert torch.equal(tensor, trained[prefix + name]), name
            assert not torch.equal(tensor, wanted[name].to(tensor)), name
    assert WanTransformer3DModel.from_pretrained(tmp_path / "exported ").config.num_layers == 2


def test_what_is_not_there_or_damaged_is_not_exported(tmp_path: Path) -> None:
    root = tmp_path / "ours"
    imported(make(tmp_path / "diffusers"), root)
    both = "`--ema` is for the generator, but `--network` is critic"
    for sentence, options in (
        ("holds no averages of weights, which .*; leave out `--ema`", {"ema": True}),
        ("holds no critic, which .*; leave out `--network`", {"network": "critic"}),
        (both, {"ema": True, "network": "critic"}),
        ("holds no checkpoint of iteration 4|iter_0000004 does not exist", {"step": 4}),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            exported(root, tmp_path / "back", **options)
    (path, *_) = (root / "iter_0000000").glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        exported(root, tmp_path / "back")
    assert not (tmp_path / "back").exists()
