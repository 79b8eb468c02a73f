"""Weights are written in fp8 and MXFP4 so that transformers reads the values that we mean."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.config import read_model
from megatron_ext.text.convert.quantizing import Quantizer, in_mxfp4
from megatron_ext.text.convert.reading import WeightFolder, load_folder
from megatron_ext.text.convert.training import write_run
from tests.ranks import on_ranks
from tests.text.convert.models import make, theirs, tokens
from tests.text.convert.stored_models import by_transformers, fp8
from tests.text.convert.stored_models import in_mxfp4 as store_in_mxfp4
from tests.text.convert.test_reading import PLAIN, build, quantize
from tests.training_runs import check_refused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def nearest_in_fp4(values: list[float]) -> list[float]:
    """Return what MXFP4 makes of 32 values, by trying all values that it has."""
    largest = max(abs(value) for value in values)
    scale = min(2.0**x for x in range(-60, 60) if largest <= 6 * 2.0**x) if largest else 1.0
    known = [scale * x for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    found = []
    for value in values:
        # Of two values at the same distance the larger one.
        size = min(reversed(known), key=lambda x: abs(x - abs(value)))
        found.append(-size if value < 0 else size)
    return found


def read_mxfp4(stored: tuple[Tensor, Tensor]) -> Tensor:
    """Return the values ``[rows, columns]`` that transformers reads from a matrix in MXFP4."""
    blocks, exponents = (part[None] for part in stored)
    return convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)[0].t()


def test_mxfp4_has_the_nearest_values_under_the_least_exponent() -> None:
    torch.manual_seed(1)
    weight = torch.randn(6, 64).bfloat16() * torch.logspace(-6, 2, 6)[:, None].bfloat16()
    weight[0, :32] = 0
    weight[1, :5] = torch.tensor([0.25, -0.75, 2.5, 5.0, 6.0])
    truth = torch.tensor([
        nearest_in_fp4(row[half : half + 32].tolist()) for row in weight for half in (0, 32)
    ])  # fmt: skip
    found = read_mxfp4(in_mxfp4(weight))
    assert torch.equal(found, truth.view(6, 64))
    # What was read from MXFP4 does not change, down to the sign of a zero.
    again = read_mxfp4(in_mxfp4(found.bfloat16()))
    assert torch.equal(again.view(torch.int32), found.view(torch.int32))


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_came_from_fp8_become_the_same_again(dtype: torch.dtype, powers: bool) -> None:
    torch.manual_seed(2)
    stored = fp8(96, 80)
    scales = torch.exp2(torch.randn(6, 5) * 3 - 6)
    scales = torch.exp2(scales.log2().round()) if powers else scales
    for i, j in itertools.product(range(6), range(5)):
        # A published block reaches the largest value of fp8.
        stored[16 * i + i, 16 * j + j] = 448.0 if i % 2 else -448.0
    stored[:16, :16] = 0
    weight = by_transformers(stored, scales).to(dtype)
    quantizer = Quantizer("fp8", (16, 16), powers)
    found = quantizer.stored("w", weight)
    assert (
        found.keys() == quantizer.described("w", weight.to("meta")).keys() == {"w", "w_scale_inv"}
    )
    assert torch.equal(found["w"].view(torch.uint8), stored.view(torch.uint8))
    again = by_transformers(found["w"], found["w_scale_inv"])
    assert torch.equal(again.to(dtype), weight)
    if powers:
        assert torch.equal(found["w_scale_inv"].log2() % 1, torch.zeros(6, 5))


def test_other_weights_are_rounded_under_a_scale_of_their_block() -> None:
    torch.manual_seed(3)
    weight = torch.randn(40, 50).bfloat16()
    found = Quantizer("fp8", (16, 16)).stored("w", weight)
    assert found["w"].shape == (40, 50) and found["w_scale_inv"].shape == (3, 4)
    scales = found["w_scale_inv"].repeat_interleave(16, 0)[:40].repeat_interleave(16, 1)[:, :50]
    difference = (found["w"].float() * scales - weight.float()).abs()
    # fp8 has three bits behind the leading one; below 2**-6 of its range its steps are equal.
    assert bool((difference <= (weight.abs().float() / 16).clamp(min=2.0**-10 * scales)).all())
    for method in ("fp8", "mxfp4"):
        weight = (
            torch.full((1, 32, 4), torch.inf) if method == "mxfp4" else torch.tensor([[torch.nan]])
        )
        with pytest.raises(CheckpointError, match="`w` holds values that are not finite, which"):
            Quantizer(method).stored("w", weight)


def check_written(
    context: ParallelContext, *, source: Path, split: dict[str, int], method: str
) -> None:
    more = ["--save-hf", str(source.with_name("x")), "--save-hf-quantization", method]
    config, chunk = build(context, source, *more, "--save-hf-shard-size", "60KB", **split)
    load_folder([chunk], source, context)
    write_run(source.with_name("back"), config, [chunk], context)


def plain_of(folder: Path) -> dict[str, Tensor]:
    with WeightFolder(read_model(folder)) as source:
        return {name: source.whole(name) for name in source.names}


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_quantized_folder_is_written_as_it_was_read(method: str, tmp_path: Path) -> None:
    """In several files, from several ranks; transformers computes the same with both folders."""
    if method == "fp8":
        source = make("deepseek_v3", tmp_path / "hf", changed={"vocab_size": 288})
        quantize(source, 8)
        sizes = {"tp": 2, "ep": 2, "etp": 1}
    else:
        source = store_in_mxfp4(make("gpt_oss", tmp_path / "hf", changed={"intermediate_size": 64}))
        sizes = {"ep": 2, "dp": 2}
    on_ranks(check_written, sizes, source=source, split=sizes, method=method)
    back = tmp_path / "back"
    before, after = plain_of(source), plain_of(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    index = json.loads((back / "model.safetensors.index.json").read_text())
    with WeightFolder(read_model(source)) as folder:
        assert index["weight_map"].keys() == folder.stored_names
    entry = json.loads((back / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == method
    if method == "fp8":
        assert entry["weight_block_size"] == [8, 8]
        assert {"lm_head", "model.embed_tokens"} <= {*entry["modules_to_not_convert"]}
        assert "model.layers.1.mlp.gate" in entry["modules_to_not_convert"]


def by_dequantizing(folder: Path, settings: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=settings
    )
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "changed"),
    [
        ("llama", "fp8", {"hidden_size": 128, "intermediate_size": 256}),
        ("qwen3_moe", "fp8", {"moe_intermediate_size": 32}),
        ("gpt_oss", "mxfp4", {"intermediate_size": 64}),
    ],
)
def test_transformers_loads_what_is_written(
    name: str, method: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """Both read the same values, from a folder whose source was plain."""
    source = make(name, tmp_path / "hf", changed=changed)
    on_ranks(check_written, {}, source=source, split={}, method=method)
    back = tmp_path / "back"
    kinds: dict[str, Any] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
    found = by_dequantizing(back, kinds[method](dequantize=True))
    plain = tmp_path / "plain"
    on_ranks(check_plain, {}, source=back, target=plain)
    assert torch.equal(found, theirs(plain))
    assert not torch.equal(found, theirs(source))


def check_plain(context: ParallelContext, *, source: Path, target: Path) -> None:
    config, chunk = build(context, source)
    load_folder([chunk], source, context)
    write_run(target, config, [chunk], context)


REFUSED = [
    ("llama", "--save-hf-quantization fp8", "`--save-hf-quantization` needs `--save-hf`; give a"),
    ("llama", "--save-hf-shard-size 5GB", "`--save-hf-shard-size` needs `--save-hf`; give a"),
    ("llama", "--save-hf x --save-hf-shard-size 5", "(5) must be a number of KB, MB, GB or TB; gi"),
    ("llama", "--save-hf x --save-hf-quantization mxfp4",
     "(mxfp4) is for stacked experts, which gpt_oss alone has; give fp8"),
    ("gpt_oss", "--save-hf x --save-hf-quantization mxfp4",
     "(mxfp4) stores 32 values together, but `--moe-ffn-hidden-size` is 24; leave it out"),
    ("gpt_oss", "--save-hf x --save-hf-quantization fp8",
     "(fp8) stores a matrix `[out, in]` for each linear layer, but this model's files hold some of "
     "them in another form; leave it out, or give mxfp4"),
    ("gpt2", "--save-hf x --save-hf-quantization fp8", "in another form; leave it out."),
]  # fmt: skip


def test_formats_that_a_model_does_not_have_are_refused(tmp_path: Path) -> None:
    for name in ("llama", "gpt_oss", "gpt2"):
        make(name, tmp_path / name)
    for name, words, said in REFUSED:
        given = words.replace(" x", f" {tmp_path / 'x'}").split()
        check_refused(["--load-hf", str(tmp_path / name), *PLAIN, *given], said)


def test_blocks_of_the_source_are_kept() -> None:
    fp8_entry = {"quant_method": "fp8", "weight_block_size": [32, 64], "scale_fmt": "ue8m0"}
    like = {"quantization_config": fp8_entry}
    assert Quantizer.of("fp8", like) == Quantizer("fp8", (32, 64), powers=True)
    assert Quantizer.of("mxfp4", like) == Quantizer("mxfp4")
    assert Quantizer.of("fp8", None) == Quantizer("fp8")
    assert Quantizer.of("fp8", {"quantization_config": {"quant_method": "mxfp4"}}).block == (
        128,
        128,
    )
    assert "scale_fmt" not in Quantizer("fp8").entry([])
    assert Quantizer("fp8", powers=True).entry(["a"])["modules_to_not_convert"] == ["a"]
