"""Preparation of a run with Transformer Engine's layers: GPUs, buffers, groups, kinds of CP."""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.config import finalize
from megatron_ext.config.rules import te_version
from megatron_ext.config.run import transformer_fields
from megatron_ext.core import MTP_LAYER
from megatron_ext.device import Device
from megatron_ext.errors import ConfigError
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.layers.transformer_engine import (
    buffer_arguments,
    prepare_transformer_engine,
    recipe_error,
)
from megatron_ext.parallel.context import ParallelContext, init_groups
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.config.runs import BF16, SMALL, with_transformer_engine
from tests.ranks import ranks
from tests.training_runs import config_of

CAPABILITIES = {
    (8, 0): set(),
    (8, 9): {"delayed", "tensorwise"},
    (9, 0): {"delayed", "tensorwise", "blockwise"},
    (10, 0): {"delayed", "tensorwise", "blockwise", "mxfp8"},
    (12, 0): {"delayed", "tensorwise", "blockwise"},
}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_each_gpu_has(capability: tuple[int, int]) -> None:
    recipes = ("delayed", "tensorwise", "blockwise", "mxfp8")
    fitting = {name for name in recipes if recipe_error(name, capability, (12, 9)) is None}
    assert fitting == CAPABILITIES[capability]
    assert recipe_error("custom", capability) is None


def test_what_a_gpu_lacks_is_said_in_a_sentence() -> None:
    capability = "needs a GPU of compute capability"
    for recipe, versions, said in (
        ("mxfp8", ((9, 0),), f"{capability} 10.0 and below 12.0, but this one has 9.0; use delayed "
         "or tensorwise or blockwise."),
        ("delayed", ((8, 0),), f"{capability} 8.9 or above, but this one has 8.0; leave out "
         "`--fp8-format`."),
        ("blockwise", ((9, 0), (12, 8)), "needs CUDA 12.9 or newer, but torch was built with 12.8; "
         "use tensorwise, or another build of torch."),
    ):  # fmt: skip
        assert recipe_error(recipe, *versions) == f"`--fp8-recipe` ({recipe}) {said}"


@ranks(cp=2)
def test_each_layer_has_its_own_kind_of_context_parallelism(context: ParallelContext) -> None:
    """Depths of multi-token prediction communicate like the decoder's last layer."""
    kinds = ["p2p", "a2a", "p2p", "all_gather"]
    words = f"{BF16} --padded-vocab-size 128 --mtp-num-layers 2 --context-parallel-size 2"
    config = config_of([*words.split(), "--cp-comm-type", *kinds], ranks=2)
    places = {"pre_process": True, "post_process": True}
    chunk = build_gpt_chunk(config, build_transformer_config(config), context, **places)
    layers = [*chunk.decoder.layers, *(getattr(depth, MTP_LAYER) for depth in chunk.mtp.layers)]
    found = [layer.self_attention.core_attention.cp_comm_type for layer in layers]
    assert found == [*kinds, "all_gather", "all_gather"]


@pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="einops is not installed")
@ranks(cp=4)
def test_groups_of_hierarchical_parallelism(context: ParallelContext, tmp_path: Path) -> None:
    layout = context.layout
    context.destroy()
    again = init_groups(
        layout,
        Device("cpu", "gloo"),
        init_method=f"file://{tmp_path}/rendezvous",
        hierarchical_context_parallel_sizes=[2, 2],
    )
    heads, rings = (torch.distributed.get_process_group_ranks(g) for g in again.pgs.hcp)
    rank = again.rank
    assert heads == [rank // 2 * 2, rank // 2 * 2 + 1] and rings == [rank % 2, rank % 2 + 2]


MODES = SimpleNamespace(FP8="fp8", NONE="none")


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ("", ["none"]),
        ("--fp8-format hybrid", ["fp8"]),
        ("--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16", ["fp8", "none"]),
        (
            "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 "
            "--num-layers-at-start-in-bf16 0",
            ["fp8", "none"],
        ),
        (
            "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 "
            "--num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0",
            ["fp8"],
        ),
    ],
)
def test_buffers_of_overlapped_communication(
    words: str, modes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM's ``_initialize_tp_communicators`` calls them so."""
    monkeypatch.setattr(finalize, "_has_transformer_engine", lambda *_: True)
    monkeypatch.setattr(te_version, "found_version", lambda: "2.9.0")
    path = tmp_path / "overlap.yaml"
    path.write_text("qkv_fprop: {method: ring_exchange, aggregate: 0}\n")
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"
    overlap = f"--tp-comm-overlap --tp-comm-overlap-cfg {path} --tp-comm-bootstrap-backend gloo"
    flags = f"{BF16} --transformer-impl transformer_engine {layout} {overlap} {words}"
    config = config_of(flags, ranks=4, device="cuda")
    assert buffer_arguments(config, MODES) == {
        "shape": [2 * 64 // 2, 64],
        "tp_size": 2,
        "ub_cfgs": {"qkv_fprop": {"method": "ring_exchange", "aggregate": 0}},
        "bootstrap_backend": "gloo",
        "quantization_modes": modes,
    }
    assert buffer_arguments(config)["use_fp8"] is bool(words)
    assert transformer_fields(config)["tp_comm_overlap"] is True


@pytest.mark.parametrize(
    ("words", "scaling", "deterministic"),
    [
        ("--bf16", "0", None),
        ("--fp16 --apply-query-key-layer-scaling", "1", None),
        ("--bf16 --deterministic-mode", "0", "0"),
    ],
)
def test_options_that_are_read_from_the_environment(
    words: str, scaling: str, deterministic: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_transformer_engine(monkeypatch)
    flags = f"{SMALL} --transformer-impl transformer_engine {words}"
    prepare_transformer_engine(config_of(flags, device="cuda"))
    assert os.environ["NVTE_APPLY_QK_LAYER_SCALING"] == scaling
    assert os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == deterministic


def test_a_build_of_torch_without_the_backend_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_transformer_engine(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda backend: False)
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
    flags = f"{BF16} --transformer-impl transformer_engine {layout}"
    message = r"`--tp-comm-bootstrap-backend` \(nccl\) is not in this build of torch; use nccl"
    with pytest.raises(ConfigError, match=message):
        prepare_transformer_engine(config_of(flags, ranks=2, device="cuda"))
