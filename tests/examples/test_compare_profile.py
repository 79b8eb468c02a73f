"""Kernels of a made-up trace, sorted into the classes of the plan and laid beside it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare_profile
from benchmarks.compare_profile import NAMES, OTHER, kind_of, read_profile
from benchmarks.gpu_setup import LLAMAS
from megatron_ext.errors import DataError
from megatron_ext.planning.kernels import KINDS

VOCABULARY = LLAMAS["3b"].vocab
KERNELS = {
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT": "linear",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "linear",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm>>":
    "linear",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_14_64x128x128": "attention",
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<traits>": "attention",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<Main>>>":
    "attention",
    "triton_tem_fused_flex_attention_1": "attention",
    "triton_red_fused__to_copy_amax_exp_prepare_softmax_online_sub_sum_0": "logits",
    "triton_poi_fused__to_copy_add_arange_eq_exp_mul_sub_where_0": "logits",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "pointwise",
    "triton_poi_fused_mul_silu_split_1": "pointwise",
    "triton_per_fused_native_layer_norm_backward_2": "pointwise",
    "triton_poi_fused__to_copy_clamp_mul_0": "casts",
    "_cast_kernel": "casts",
    "_activation_kernel": "casts",
    "_gradient_kernel": "casts",
    "adam_kernel": "optimizer",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "
    "FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, "
    "LpNormFunctor<float, NormType::L2>>": "optimizer",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "plumbing",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>":
    "plumbing",
    "Memset (Device)": "plumbing",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)":
    "communication",
    "some_kernel_of_tomorrow": OTHER,
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_belongs_to_a_class(name: str) -> None:
    assert kind_of(name) == KERNELS[name]


def test_every_class_of_the_plan_can_be_found() -> None:
    named = {*NAMES, "head", "gaps", "weight gradients"}
    assert named == set(KINDS)


def test_a_product_with_the_vocabulary_is_the_heads() -> None:
    name, shapes = "nvjet_hsh_256x128", [[2048, 3072], [3072, VOCABULARY], []]
    assert kind_of(name, shapes, VOCABULARY) == "head"
    assert kind_of(name, [[8192, 3072], [3072, 5120]], VOCABULARY) == "linear"
    assert kind_of("triton_poi_fused_mul_0", shapes, VOCABULARY) == "pointwise"


def write_trace(path: Path, kernels: dict[str, float], head: str) -> Path:
    """Write a trace of two steps; kernels are 2 microseconds apart, ``head`` has the vocabulary."""
    shapes = [[2048, 3072], [3072, VOCABULARY]]
    operation = {"External id": 7, "Input Dims": shapes}
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9, "args": operation},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    now = 100.0
    for name, duration in [*kernels.items()] * 2:
        given = {"External id": 7 if name == head else 8}
        event = {"ph": "X", "cat": "kernel", "name": name, "ts": now, "dur": duration}
        events.append({**event, "args": given})
        now += duration + 2
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_times_of_a_step_by_class(tmp_path: Path) -> None:
    head = "sm90_xmma_gemm_of_the_head"
    durations = dict.fromkeys(KERNELS, 10.0) | {head: 40.0}
    profile = read_profile(write_trace(tmp_path / "t.json", durations, head), 2, VOCABULARY)
    assert profile.seconds("linear") == pytest.approx(30e-6)
    assert profile.seconds("head") == pytest.approx(40e-6)
    assert profile.seconds("attention") == pytest.approx(50e-6)
    assert profile.seconds("gaps") == pytest.approx(2e-6 * (2 * len(durations) - 1) / 2)
    first = profile.kernels[0]
    assert (first.name, first.kind, first.count) == (head, "head", 1.0)
    kinds = [*NAMES, "head", OTHER]
    assert sum(map(profile.seconds, kinds)) == pytest.approx(1e-6 * sum(durations.values()))


def test_planned_beside_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t.json", {"nvjet_a": 97_300.0, "odd": 1000.0}, "")
    flags = [*LLAMAS["3b"].flags(4096, 1), "--bf16"]
    words = [str(trace), "--steps", "2", "--gpu", "H200", "--longest", "1", "--", *flags]
    assert compare_profile.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {x.strip("| ").split(" | ")[0]: x.strip("| ").split(" | ") for x in lines}
    planned, measured, ratio = (float(cell) for cell in rows["linear"][1:4])
    assert measured == 97.3
    assert 0.9 < planned / measured < 1.1
    assert ratio == pytest.approx(measured / planned, abs=0.006)
    assert rows["attention"][2:4] == ["0.0", "n/a"]
    assert rows["other"][1:3] == ["n/a", "1.0"]
    assert rows["nvjet_a"][1] == "linear" and "odd" not in rows
    total = sum(float(row[1]) for kind, row in rows.items() if kind in KINDS)
    assert float(rows["sum"][1]) == pytest.approx(total, abs=0.5)


def test_what_is_no_trace_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    assert compare_profile.main([str(path)]) == 2
    assert "cannot be read as one of torch's profiler" in capsys.readouterr().err
    path.write_text('{"traceEvents": []}')
    with pytest.raises(DataError, match="has no kernels; record a run on a GPU"):
        read_profile(path, 1)
