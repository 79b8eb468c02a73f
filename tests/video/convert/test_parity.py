"""The bidirectional video DiT with weights of diffusers' Wan computes what diffusers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.safetensors_files import TensorFolder
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.video.config.wan import VideoDiTSizes
from megatron_ext.video.convert.names import Naming
from megatron_ext.video.convert.wan import check_tensors, fill
from tests.ranks import run_on_ranks
from tests.video.convert.models import (
    STEM,
    bare,
    imported,
    inputs,
    load_ours,
    make,
    make_original,
    network,
    theirs,
)

TOLERANCE = 1e-5
"""Largest difference in fp32, as a share of the largest number that diffusers gives."""


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
    given = {"root": root, "expected": expected}
    one, tp2 = Layout(1), Layout(2, tensor_model_parallel_size=2)
    run_on_ranks(check_loaded, one, {**given, "sequence_parallel": False})
    if naming is Naming.DIFFUSERS:
        run_on_ranks(check_loaded, tp2, {**given, "sequence_parallel": False})
        run_on_ranks(check_loaded, tp2, {**given, "sequence_parallel": True})
        cp2 = Layout(2, context_parallel_size=2)
        run_on_ranks(check_loaded, cp2, {**given, "sequence_parallel": False})


@torch.no_grad()
def check_filled(
    context: ParallelContext, sizes: VideoDiTSizes, source: Path, expected: Tensor
) -> None:
    chunk = bare(context, sizes)
    with TensorFolder(source, STEM) as tensors:
        check_tensors(sizes, Naming.DIFFUSERS, tensors)
        fill(chunk, Naming.DIFFUSERS, tensors)
    check_flow(chunk(**inputs(sizes)), expected)


def test_heads_of_wan_rotate_alike(tmp_path: Path) -> None:
    """Check heads of 128, whose axes have 44, 42 and 42 features, and 16 channels."""
    sizes = VideoDiTSizes(256, 2, 320, 1, text_width=24)
    assert sizes.axes_dim == (44, 42, 42)
    model = network(sizes)
    expected = theirs(model, inputs(sizes))
    model.save_pretrained(tmp_path)
    given = {"sizes": sizes, "source": tmp_path, "expected": expected}
    run_on_ranks(check_filled, Layout(1), given)
