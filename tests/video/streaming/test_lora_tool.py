"""Adapters of a streaming run are merged into its networks, and given to diffusers and peft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.programs.lora import main
from megatron_ext.video.convert.exporting import public_tensor
from megatron_ext.video.networks.published import Mapped
from megatron_ext.video.networks.wan.config import SIZES
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION
from megatron_ext.video.streaming.networks import network_of
from megatron_ext.video.streaming.task import STREAMING
from tests.checkpoint.tiny import whole_tensors
from tests.ranks import ranks
from tests.text.convert.test_lora import tool
from tests.video.streaming.runs import NETWORKS, PREFIXES, STEPS, Tuned, inputs, output, run


def export(load: Path, output: Path, *words: str) -> int:
    return main(["export", "--load", str(load), "--output", str(output), *words])


@pytest.fixture(scope="module")
def merged(tuned: Tuned) -> Tuned:
    for network in NETWORKS:
        words = ["--load", tuned.saved, "--save", tuned.root / network, "--network", network]
        assert tool("merge", *words) == 0
    return tuned


@ranks()
def test_merged_networks_give_the_same(context: ParallelContext, merged: Tuned) -> None:
    for network in NETWORKS:
        root = merged.root / network
        stored = RunConfig.from_dict(read_run_config(root), STREAMING.sections)
        assert stored.lora.lora_rank is None
        build = network_of(network).build
        (chunk,) = build_chunks(build, stored, build_transformer_config(stored), context)
        manager = CheckpointManager(CheckpointConfig(pretrained_checkpoint=str(root)), context)
        manager.load(model=[chunk], optimizer=None, scheduler=None)  # type: ignore[list-item]
        want = merged.seen["outputs"][network]
        assert (output(chunk) - want).abs().max() <= 1e-5 * want.abs().max()


def test_merged_networks_start_a_run(merged: Tuned, tmp_path: Path) -> None:
    words = f"--pretrained-checkpoint {merged.root / 'generator'}"
    words += f" --critic-checkpoint {merged.root / 'critic'} --train-iters 1"
    (row,) = run(tmp_path, words)
    assert row["iteration"] == 1


def test_merging_needs_the_weights_under_the_adapters(
    tuned: Tuned, merged: Tuned, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--load", tuned.saved, "--save", tmp_path / "merged"]
    for network in NETWORKS:
        other = ["--network", network, "--pretrained-checkpoint", merged.root / network]
        assert tool("merge", *words, *other) == 1
        assert "must be the weights under the adapters in" in capfd.readouterr().err
    assert not (tmp_path / "merged").exists()
    # Elsewhere than where the run found them.
    moved = tmp_path / "moved"
    tuned.base.rename(moved)
    try:
        assert tool("merge", *words) == 1
        capfd.readouterr()
        assert tool("merge", *words, "--pretrained-checkpoint", moved) == 0
    finally:
        moved.rename(tuned.base)
    whole = tmp_path / "again"
    assert tool("merge", "--load", tmp_path / "merged", "--save", whole) == 1
    assert "there is nothing to merge" in capfd.readouterr().err


@pytest.fixture
def wan() -> Any:
    pytest.importorskip("peft")
    diffusers = pytest.importorskip("diffusers")
    return diffusers.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32,
        ffn_dim=128, num_layers=2, cross_attn_norm=True,
    )  # fmt: skip


def in_wans_names(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of one of our networks, without adapters, as diffusers names them."""
    plain = {name: tensor for name, tensor in ours.items() if ".lora." not in name}
    shapes = {name: tuple(tensor.shape) for name, tensor in plain.items()}
    mapped = Mapped.of(CONVERSION.form("diffusers"), SIZES["tiny"], shapes)
    return {
        name: public_tensor(mapped, name, torch.float32, plain.__getitem__)
        for name in mapped.shapes
    }


def by_peft(model: Any, folder: Path) -> None:
    import peft

    peft.PeftModel.from_pretrained(model, folder)


def by_diffusers(model: Any, folder: Path) -> None:
    weights = {"prefix": "base_model.model", "weight_name": "adapter_model.safetensors"}
    model.load_lora_adapter(folder, **weights, adapter_name="default")


def added(merged: Tuned, network: str) -> dict[str, Tensor]:
    """Return the change of the weights by merging, by Wan's layers."""
    folder = merged.root / network / f"iter_{STEPS:07d}"
    after = whole_tensors(folder, merged.root / "after.pt")
    before = whole_tensors(merged.base / "iter_0000001", merged.root / "before.pt")
    changes = {name: after[name] - before[f"{PREFIXES[network]}{name}"] for name in after}
    changed = {name: change for name, change in changes.items() if change.any()}
    return {n.removesuffix(".weight"): part for n, part in in_wans_names(changed).items()}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("load", [by_peft, by_diffusers])
def test_peft_and_diffusers_add_the_same(
    merged: Tuned, tmp_path: Path, load: Callable[[Any, Path], None], network: str, wan: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "adapter"
    assert export(merged.saved, folder, "--network", network) == 0
    assert "was left out" not in capsys.readouterr().out
    load(wan, folder)
    want = added(merged, network)
    layers = {n: m for n, m in wan.named_modules() if hasattr(m, "get_delta_weight")}
    assert layers.keys() == want.keys() and len(layers) == 2 * 10
    for name, layer in layers.items():
        delta = layer.get_delta_weight("default")
        assert want[name].abs().max() > 1e-4, name
        # Merging rounds weights of up to 0.5.
        assert (delta - want[name]).abs().max() <= 1e-7, name


def test_diffusers_computes_as_the_tuned_critic(tuned: Tuned, tmp_path: Path, wan: Any) -> None:
    """Check the weights under the adapters, and then both."""
    model = wan.eval()
    model.load_state_dict(in_wans_names(tuned.seen["before"]["critic"]))

    def flow() -> Tensor:
        given = inputs()
        x, times = given["x"].transpose(1, 2), given["timesteps"][:, 0]
        with torch.no_grad():
            found: Tensor = model(x, times, given["text"], return_dict=False)[0]
        return found.transpose(1, 2)

    base, want = (tuned.seen[name]["critic"] for name in ("outputs_before", "outputs"))
    assert (flow() - base).abs().max() <= 1e-5 * base.abs().max()
    assert export(tuned.saved, tmp_path / "adapter", "--network", "critic") == 0
    by_diffusers(model, tmp_path / "adapter")
    assert (want - base).abs().max() > 0.01 * want.abs().max()
    assert (flow() - want).abs().max() <= 1e-5 * want.abs().max()


def test_without_adapters(tuned: Tuned, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert export(tuned.base, tmp_path / "adapter") == 1
    assert f"`--load` ({tuned.base}) holds a model without adapters" in capfd.readouterr().err
    words = ["--load", tuned.base, "--save", tmp_path / "merged", "--pretrained-checkpoint", "x"]
    assert tool("merge", *words) == 1
    assert "`--pretrained-checkpoint` (x) has no effect: `--load` (" in capfd.readouterr().err
    assert export(tuned.saved, tmp_path / "own") == 0
    assert (tmp_path / "own" / "adapter_config.json").is_file()
