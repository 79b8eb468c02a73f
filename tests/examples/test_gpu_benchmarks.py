"""The benchmarks of GPUs at their smallest, on whatever is here; nothing looks at a clock."""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from benchmarks import (
    attention,
    cross_entropy,
    fp8_linear,
    gpu_peers,
    gpu_throughput,
    layer_traffic,
    mmdit_block,
)
from benchmarks.gpu_setup import LLAMAS, Ceiling, config_of
from benchmarks.peers import PEERS, Place, hugging_face_config
from benchmarks.targets import LOSS_TIME, MFU, over, verdict
from benchmarks.torch_llama import TorchLlama, token_loss
from benchmarks.traffic import compiled_traffic, eager_traffic
from megatron_ext.layers.fp8.scaling import RECIPES
from megatron_ext.layers.pointwise import activated
from megatron_ext.text.cost.products import flops_per_sample
from megatron_ext.train.forking import fork_ranks
from megatron_ext.video.cost.joint import flops_of_clip
from megatron_ext.video.networks.mmdit.config import SIZES
from tests.ranks import ParallelContext, ranks

CPU = torch.device("cpu")
TINY = LLAMAS["tiny"]
ON_A_CPU = argparse.Namespace(device="cpu", tiny=True)
ON_A_GPU = argparse.Namespace(device="cuda", tiny=False)


def run_apart(main: Callable[[Sequence[str]], int], *words: str) -> int:
    """Return a script's exit code, in a process that may change its settings."""
    return fork_ranks(lambda: main(words), 1)


def table_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("size", LLAMAS)
def test_operations_are_counted_as_the_package_counts_them(size: str) -> None:
    sizes, length = LLAMAS[size], 64
    config, _ = config_of(sizes.flags(length, 2), CPU)
    assert config.model.padded_vocab_size == sizes.vocab
    counted = flops_per_sample(config)
    assert sizes.flops_per_token(length) * length == pytest.approx(counted)


def test_sizes_are_the_published_ones() -> None:
    """Llama 3.2 1B and 3B have 1.24 and 3.21 billion weights with tied embeddings."""
    for size, tied in (("1b", 1_235_814_400), ("3b", 3_212_749_824)):
        sizes = LLAMAS[size]
        assert sizes.parameters - sizes.vocab * sizes.hidden == tied


def hugging_face_twin() -> tuple[Any, TorchLlama]:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(hugging_face_config(TINY, 32)).float()
    mine = TorchLlama(TINY)
    state: dict[str, Tensor] = theirs.state_dict()
    outer = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    named = {f"{new}.weight": state[f"{old}.weight"] for new, old in outer.items()}
    for number in range(TINY.layers):
        old, new = f"model.layers.{number}", f"layers.{number}"
        parts = [state[f"{old}.self_attn.{x}_proj.weight"] for x in "qkv"]
        named[f"{new}.attention.qkv.weight"] = torch.cat(parts)
        named[f"{new}.attention.out.weight"] = state[f"{old}.self_attn.o_proj.weight"]
        named[f"{new}.attention_norm.weight"] = state[f"{old}.input_layernorm.weight"]
        named[f"{new}.mlp_norm.weight"] = state[f"{old}.post_attention_layernorm.weight"]
        parts = [state[f"{old}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        named[f"{new}.gate_up.weight"] = torch.cat(parts)
        named[f"{new}.down.weight"] = state[f"{old}.mlp.down_proj.weight"]
    mine.load_state_dict(named)
    return theirs, mine


def test_plain_torch_computes_what_transformers_does() -> None:
    theirs, mine = hugging_face_twin()
    tokens, labels = gpu_peers.make_data(TINY, 32, 2, CPU)
    with torch.no_grad():
        want = theirs(input_ids=tokens, labels=labels, shift_labels=labels)
        logits = mine(tokens)
    torch.testing.assert_close(logits, want.logits, rtol=1e-5, atol=1e-5)
    assert float(token_loss(logits, labels)) == pytest.approx(float(want.loss), rel=1e-6)


@ranks()
def test_peers_train_the_same_sizes(context: ParallelContext) -> None:
    data = gpu_peers.make_data(TINY, 32, 2, CPU)
    place = Place(context, CPU, compiled=False, length=32, batch=2)
    for name in ("ours", "plain torch", "Hugging Face", "megatron-core"):
        peer = PEERS[name](TINY, place)
        assert peer.parameters == TINY.parameters, name
        losses = [float(peer.step(*data)) for _ in range(3)]
        # ln(256) is 5.545: weights are small at the start, so that all ids are about as likely.
        assert losses[0] == pytest.approx(5.545, abs=0.2), name
        assert losses[2] < losses[0], name


def test_ours_is_held_against_the_best_of_the_peers(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--device cpu --tiny --peers ours megatron-core".split()
    assert run_apart(gpu_peers.main, *words) == 0
    rows = table_of(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["megatron-core", "ours"]
    assert [row[-1] for row in rows] == ["no target", "not judged: cpu"]
    place: Any = None
    comparison = gpu_peers.Comparison(
        argparse.Namespace(**vars(ON_A_GPU), size="3b", speeds=None), place
    )
    comparison._tokens = {"plain torch": 900.0, "Hugging Face": 1000.0, "ours": 1200.0}
    want = "G1 MFU MISSED: 0.500 < 0.6; G1 over the best peer met: 1.200 ≥ 1.1"
    assert comparison._verdict("ours", 0.5) == want


def test_absent_peers(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import peers

    monkeypatch.setitem(peers.PACKAGES, "torchtitan", "no-such-package")
    assert run_apart(gpu_peers.main, "--device", "cpu", "--tiny", "--peers", "torchtitan") == 0
    assert table_of(capfd.readouterr().out) == [["torchtitan", "not installed"]]


def test_throughput_of_what_runs_or_why_it_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--device cpu --tiny --precisions bf16 fp8-tensorwise -- --label-smoothing 0.1"
    assert run_apart(gpu_throughput.main, *words.split()) == 0
    torch_row, fp8_row, te_row, _ = table_of(capfd.readouterr().out)
    assert torch_row[:5] == ["tiny", "torch", "bf16", "32", "2"]
    assert fp8_row[2] == "fp8-tensorwise"
    for row in (torch_row, fp8_row):
        assert len(row) == len(gpu_throughput.HEAD)
        assert row[9:11] == ["n/a", "n/a"]
        assert re.fullmatch(r"\d+\.\d%", row[8])
        assert float(row[11]) == pytest.approx(5.5, abs=0.3)
    assert torch_row[12] == "n/a"
    # Tokens per second are printed without decimals.
    speeds = [float(row[6].replace(",", "")) for row in (torch_row, fp8_row)]
    assert float(fp8_row[12]) == pytest.approx(speeds[1] / speeds[0], rel=2e-3)
    assert te_row[1] == "te"
    assert te_row[5].startswith("refused: `--transformer-impl transformer_engine` has no")
    assert Ceiling(8e14, 1e15).shares(4e14) == ("50.0%", "40.0%")
    assert Ceiling(8e14, None).shares(4e14) == ("50.0%", "n/a")


@ranks()
def test_attention_agrees_with_every_backend_that_runs(context: ParallelContext) -> None:
    for shape in attention.TINY:
        found = attention.measure(shape, context, CPU, torch.float32, repeats=1)
        assert next(iter(found)) == "math"
        assert found["math"].difference == 0
        assert found["ours"].refusal == ""
        assert found["ours"].difference < 1e-5
        assert found["flash"].difference < 1e-5
        assert found["cuDNN"].refusal
        lines = attention.rows(shape, found, ON_A_CPU)
        assert len(lines) == len(found)
        assert all(line.count("|") == len(attention.HEAD) + 1 for line in lines if "n/a" in line)


def test_operations_of_attention() -> None:
    """Two products forward and five backward of b n s s d each, half under a causal mask."""
    shape = attention.Shape(8, 2, 4, 2, 16)
    assert shape.flops == 7 * 2 * 2 * 4 * 8 * 8 * 16 / 2
    assert dataclasses.replace(shape, causal=False).flops == 2 * shape.flops


def test_fp8_products_are_those_of_a_linear_layer() -> None:
    forward, of_input, of_weight = fp8_linear.products(64, 32, 48, CPU)
    x, w = forward.left.double(), forward.right.t().double()
    x.requires_grad_()
    w.requires_grad_()
    y = x @ w.t()
    y.backward(of_input.left.double())
    torch.testing.assert_close(of_input.left.double() @ of_input.right.double(), x.grad)
    torch.testing.assert_close(of_weight.left.double() @ of_weight.right.double(), w.grad)


@pytest.mark.parametrize(("dtype", "bits"), [(fp8_linear.E4M3, 3), (fp8_linear.E5M2, 2)])
def test_quantising_keeps_the_largest_entry_and_rounds_once(dtype: torch.dtype, bits: int) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    eight, back = fp8_linear.quantised(x, dtype)
    restored = eight.float() * back
    assert float(restored.abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-6)
    large = x.abs() > 0.05
    off = ((restored - x).abs() / x.abs())[large].max()
    assert float(off) <= 2.0 ** -(bits + 1) * 1.001


def test_fp8_linear_prints_each_product(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_apart(fp8_linear.main, "--device", "cpu", "--tiny") == 0
    found = table_of(capfd.readouterr().out)
    products, layers = found[:3], found[3:]
    assert [row[0] for row in products] == ["forward", "gradient of input", "gradient of weight"]
    for row in products:
        assert row[4].startswith("refused") or 1e-3 < float(row[10]) < 0.1
    assert [row[0] for row in layers] == [f"layer, {recipe}" for recipe in RECIPES]
    for row in layers:
        assert float(row[8]) == pytest.approx(float(row[4]) / float(row[6]), abs=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_not_invented() -> None:
    with pytest.raises(SystemExit, match="computes on cpu, not cuda; give `--device cpu`"):
        attention.main(["--tiny"])


def test_targets_are_judged_on_a_gpu_at_full_size_only() -> None:
    below, above = (LOSS_TIME, 0.84), (LOSS_TIME, 0.86)
    assert verdict(ON_A_GPU, [below]) == "G3 time met: 0.840 ≤ 0.85"
    assert verdict(ON_A_GPU, [above]) == "G3 time MISSED: 0.860 > 0.85"
    want = "G1 MFU met: 0.600 ≥ 0.6; G3 time not judged: nothing to compare with"
    assert verdict(ON_A_GPU, [(MFU, 0.6), (LOSS_TIME, None)]) == want
    assert verdict(ON_A_GPU, []) == verdict(ON_A_CPU, []) == "no target"
    assert verdict(ON_A_CPU, [below]) == "not judged: cpu"
    assert (over(1.0, 4.0), over(1.0, 0.0)) == (0.25, None)
    tiny = argparse.Namespace(device="cuda", tiny=True)
    assert verdict(tiny, [below]) == "not judged: tiny"


def test_which_runs_have_a_target() -> None:
    def of(size: str, implementation: str, precision: str, length: int) -> list[str]:
        variant = gpu_throughput.Variant(size, implementation, precision, length, 2)
        return [target.name for target, _ in gpu_throughput.targets(variant, 0.6, 1.3)]

    assert of("3b", "torch", "bf16", 4096) == of("4b", "torch", "bf16", 8192) == ["G1 MFU"]
    assert of("4b", "torch", "fp8-delayed", 4096) == ["G2 fp8 over bf16"]
    # Too short, too narrow, too small, and Transformer Engine's.
    assert of("3b", "torch", "bf16", 2048) == of("3b", "torch", "fp8-delayed", 4096) == []
    assert of("1b", "torch", "bf16", 4096) == of("4b", "te", "fp8-delayed", 4096) == []


def test_cross_entropy_beside_eager(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The table is in the file as it is printed, with the date, the versions and the command."""
    out = tmp_path / "results" / "table.md"
    words = f"--tokens 256 --hidden 16 --vocab 8192 --ways eager weighted --out {out}".split()
    assert run_apart(cross_entropy.main, *words) == 0
    text = capfd.readouterr().out
    assert out.read_text(encoding="utf-8") == text
    assert re.match(r"\d{4}-\d\d-\d\d  python [\d.]+  torch \S+  megatron-core [\d.]+", text)
    assert f"python benchmarks/cross_entropy.py {' '.join(words)}\n" in text
    eager, chunked = table_of(text)
    assert chunked[2] == eager[2]
    assert eager[7] == "1.000"
    assert [eager[-1], chunked[-1]] == ["no target", "not judged: cpu"]
    cost, whole = cross_entropy.Cost(15, 4.0, 4.0, 1.0), cross_entropy.Cost(100, 5.0, 5.0, 1.0)
    judged = verdict(ON_A_GPU, cross_entropy.targets("weighted", cost, whole, [4.1, 3.9]))
    assert judged == (
        "G3 memory met: 0.150 ≤ 0.15; G3 time met: 0.800 ≤ 0.85; "
        "G3 time over Liger and torch.compile MISSED: 1.026 > 1"
    )


def test_blocks_of_a_video_transformer(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_apart(mmdit_block.main, "--device", "cpu", "--tiny") == 0
    rows = table_of(capfd.readouterr().out)
    assert [row[:4] for row in rows] == [[kind, "64", "64", "8"] for kind in ("double", "single")]
    assert all(len(row) == len(mmdit_block.HEAD) for row in rows)
    assert all(row[-1] == "not judged: cpu" for row in rows)


@pytest.mark.parametrize("kind", mmdit_block.BLOCKS)
def test_operations_of_a_block_are_those_that_it_adds_to_a_model(kind: str) -> None:
    sizes = SIZES["tiny"]
    field = f"num_{kind}_blocks"
    more = dataclasses.replace(sizes, **{field: getattr(sizes, field) + 1})
    added = flops_of_clip(more, 8, 64) - flops_of_clip(sizes, 8, 64)
    assert mmdit_block.Case(kind, sizes, num_image=64, num_text=8).flops == added


UNIT = 4 * 6 * 2 * 8
X = torch.randn(6, 2, 8)


def test_views_move_nothing_operations_their_tensors_and_products_stand_apart() -> None:
    def step() -> None:
        y = X.view(12, 8).t()
        (y + y).sum()

    counted = eager_traffic(step)
    assert [kernel.name for kernel in counted.kernels] == ["add", "sum"]
    assert counted.num_bytes("pointwise") == 2 * UNIT + UNIT + 4
    counted = eager_traffic(lambda: X.view(12, 8) @ X.view(12, 8).t())
    assert counted.count("products") == 1 and counted.count("pointwise") == 0


def test_a_norm_is_one_kernel_each_way_as_on_gpus() -> None:
    x, gain = X.clone().requires_grad_(), torch.ones(8, requires_grad=True)
    upstream = torch.randn_like(X)
    inputs = (x, gain)
    counted = eager_traffic(lambda: grad(F.rms_norm(x, (8,), gain, 1e-5), inputs, upstream))
    sizes = {kernel.name: kernel.num_bytes for kernel in counted.kernels}
    assert sizes == {"rms_norm": 2 * UNIT + 32, "rms_norm_backward": 3 * UNIT + 64}


def test_a_compiled_activation_moves_its_inputs_and_outputs_once() -> None:
    wide = torch.randn(6, 2, 16, requires_grad=True)
    upstream = torch.randn(6, 2, 8)

    def step() -> None:
        grad(activated(wide, None, None, "silu", True), wide, upstream)

    counted = compiled_traffic(step)
    assert [kernel.num_bytes / UNIT for kernel in counted.kernels] == [3, 5]


@pytest.mark.slow
def test_compiled_layers_move_less_than_half(capfd: pytest.CaptureFixture[str]) -> None:
    words: Sequence[str] = ("--sequence", "64", "--hidden", "512")

    def main() -> int:
        layer_traffic.main(words)
        return 0

    assert fork_ranks(main, 1) == 0
    rows = [x for x in capfd.readouterr().out.splitlines() if re.match(r"\| \w.*\d \|$", x)]
    assert len(rows) == 6
    assert all(float(row.rsplit("|", 2)[1]) < 0.5 for row in rows)


def test_peers_of_other_calls_count_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    speeds = tmp_path / "speeds.json"
    for peer in ("megatron-core", "ours"):
        words = ["--device", "cpu", "--tiny", "--peers", peer, "--speeds", str(speeds)]
        assert run_apart(gpu_peers.main, *words) == 0
    assert set(json.loads(speeds.read_text())) == {"megatron-core", "ours"}
    place: Any = None
    given = argparse.Namespace(**vars(ON_A_GPU), size="3b", speeds=speeds)
    speeds.write_text('{"plain torch": 1000.0}')
    comparison = gpu_peers.Comparison(given, place)
    comparison._remember("ours", 1200.0)
    assert "over the best peer met: 1.200" in comparison._verdict("ours", 0.7)
