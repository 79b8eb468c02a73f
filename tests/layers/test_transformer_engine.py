"""Transformer Engine's layers through the real path, by a stand-in that records what it is asked.

The runs are those of `tests.layers.te_runs`, in one process of their own, with ``tests/fake_te``
on its path.
"""

import ast
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.precision import Fp8Config
from megatron_ext.train.reporting.start import implementation_line
from tests.training_runs import ROOT, run_python

STAND_IN = ROOT / "tests" / "fake_te"
LAYERS, STEPS, MICROBATCHES = 3, 2, 2
LINEARS = 4 * LAYERS
PRODUCTS = LINEARS * STEPS * MICROBATCHES
Seen = dict[str, dict[str, Any]]

RESUMED = [
    "torch then bf16",
    "bf16 then torch",
    "delayed then delayed",
    "parameters then parameters",
    "bf16 then parameters",
]


def runs(*names: str) -> Seen:
    path = os.pathsep.join([str(STAND_IN), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = run_python("-m", "tests.layers.te_runs", *names, PYTHONPATH=path)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {one["name"]: one for one in found}


@pytest.fixture(scope="module")
def seen() -> Seen:
    return runs("torch", "bf16", "delayed", "parameters", "buffers")


@pytest.fixture(scope="module")
def others() -> Seen:
    """Return the runs of a slow session."""
    recipes = ("unfused", "tensorwise", "blockwise", "mxfp8")
    return runs("torch", *recipes, "cross entropy", "experts", "mtp", *RESUMED)


def calls(of: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [arguments for called, arguments in of["calls"] if called == name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "delayed"])
def test_losses_are_those_of_the_torch_layers(name: str, seen: Seen) -> None:
    """Both start from the same weights; bf16 rounds at other places, 3 digits over few layers."""
    assert seen[name]["losses"] == pytest.approx(seen["torch"]["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["unfused", "tensorwise", "blockwise", "mxfp8", "cross entropy", "mtp"]
)
def test_losses_of_other_runs_are_those_of_the_torch_layers(name: str, others: Seen) -> None:
    assert others[name]["losses"] == pytest.approx(others["torch"]["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_checkpoints_of_one_resume_on_another(name: str, seen: Seen, others: Seen) -> None:
    """The second row is the mean of both steps; a resumed run goes on with the first one's."""
    tolerance = 1e-3 if "parameters" in name else 1e-4
    assert others[name]["losses"] == pytest.approx(seen["torch"]["losses"], rel=tolerance)
    loads = [called for called, _ in others[name]["calls"] if called == "set_extra_state"]
    assert len(loads) == (0 if name.endswith("torch") else LINEARS)


def test_layers_are_transformer_engines(seen: Seen) -> None:
    modules = seen["bf16"]["modules"]
    assert modules["TELayerNormColumnParallelLinear"] == modules["TERowParallelLinear"] == 6
    assert modules["TEDotProductAttention"] == LAYERS
    assert "DotProductAttention" not in modules and "ColumnParallelLinear" not in modules
    assert "TEDotProductAttention" not in seen["torch"]["modules"]
    assert [x["layer"] for x in calls(seen["bf16"], "DotProductAttention")] == [1, 2, 3]


def test_positions_and_sums_of_gradients_are_fused_without_apex(seen: Seen) -> None:
    fused = calls(seen["bf16"], "apply_rotary_pos_emb")
    assert len(fused) == 2 * LAYERS * STEPS * MICROBATCHES and all(x["fused"] for x in fused)
    assert importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None
    assert len(calls(seen["bf16"], "fused gradient")) == PRODUCTS


def test_adam_is_that_of_the_layers(seen: Seen) -> None:
    """megatron-core takes Transformer Engine's wherever it is installed; ours replaces it."""
    for name, adam in (("torch", "torch AdamW fused"), ("bf16", "transformer_engine FusedAdam")):
        assert calls(seen[name], "FusedAdam") == [{"adam_w_mode": True}]
        assert f"optimizer: {adam};" in seen[name]["said"][0]


def check_products(of: dict[str, Any], recipe: str | None) -> None:
    products = calls(of, "product")
    assert len(products) == PRODUCTS and all(x["recipe"] == recipe for x in products)
    assert all(x["group"] == 1 for x in calls(of, "fp8_autocast"))


def test_products_run_in_the_recipe(seen: Seen) -> None:
    check_products(seen["bf16"], None)
    check_products(seen["delayed"], "TEDelayedScaling:hybrid")
    check_products(seen["parameters"], "Float8CurrentScaling:e4m3")


@pytest.mark.slow
def test_other_flags_reach_the_layers(others: Seen) -> None:
    check_products(others["blockwise"], "Float8BlockScaling:e4m3")
    check_products(others["mxfp8"], "MXFP8BlockScaling:e4m3")
    one_pass = [x["recipe"] for x in calls(others["tensorwise"], "product")][:LINEARS]
    assert one_pass == [None] * 4 + ["Float8CurrentScaling:hybrid"] * 4 + [None] * 4
    assert not calls(others["unfused"], "apply_rotary_pos_emb")
    assert not calls(others["unfused"], "fused gradient")
    assert calls(others["tensorwise"], "apply_rotary_pos_emb")
    assert len(calls(others["cross entropy"], "parallel_cross_entropy")) == STEPS * MICROBATCHES
    assert not calls(others["mxfp8"], "parallel_cross_entropy")


def test_the_delayed_recipe_gets_its_options(seen: Seen) -> None:
    """One context around all layers of a pass, and a weight quantized once in a step."""
    contexts = calls(seen["delayed"], "fp8_autocast")
    assert len(contexts) == STEPS * MICROBATCHES
    options = contexts[0]["options"]
    assert options["amax_history_len"] == 4 and options["amax_compute_algo"] == "max"
    firsts = [x["value"] for x in calls(seen["delayed"], "first microbatch")]
    assert firsts == ([True] * LINEARS + [False] * LINEARS) * STEPS


@pytest.mark.slow
def test_multi_token_prediction_runs_in_8_bits(others: Seen) -> None:
    """The depth has its layer, and the product that joins its two inputs."""
    assert others["mtp"]["modules"]["GradientAccumulatingLayer"] == LAYERS + 1
    products = [x["recipe"] for x in calls(others["mtp"], "product")]
    assert len(products) == (LINEARS + 5) * STEPS * MICROBATCHES
    assert set(products) == {"Float8CurrentScaling:hybrid"}


def test_weights_are_kept_in_8_bits(seen: Seen) -> None:
    """megatron-core builds them so; each update quantizes them again."""
    run = seen["parameters"]
    assert run["kept in 8 bits"] == [True] * LINEARS
    assert (
        calls(run, "fp8_model_init")
        == [{"recipe": "Float8CurrentScaling:e4m3", "keeps": True}] * LAYERS
    )
    assert all(x["quantized"] for x in calls(run, "product"))
    assert [x["count"] for x in calls(run, "cast_master_weights_to_fp8")] == [LINEARS] * STEPS
    # e4m3 without scales holds these weights to 2 digits or less.
    assert run["losses"] == pytest.approx(seen["bf16"]["losses"], rel=1e-3)
    assert run["losses"] != seen["bf16"]["losses"]


@pytest.mark.slow
def test_experts_in_8_bits_are_padded(others: Seen) -> None:
    run = others["experts"]
    assert run["modules"]["TEGroupedMLP"] == LAYERS
    # The tokens of experts, and their weights, before the two products and none after.
    unpadded = [sum(x["splits"]) for x in calls(run, "Fp8Padding")]
    padded = [x["splits"] for x in calls(run, "GroupedLinear.forward")]
    assert set(unpadded) == {128} and len(padded) == 2 * LAYERS * STEPS * MICROBATCHES
    assert all(rows % 16 == 0 for splits in padded for rows in splits)
    assert any(sum(splits) > 128 for splits in padded)


def test_buffers_are_set_up_before_the_layers(seen: Seen) -> None:
    (call,) = calls(seen["buffers"], "initialize_ub")
    size = {"shape": [2 * 64, 64], "tp_size": 2}
    assert call == {**size, "modes": ["none"], "ub_cfgs": {}, "backend": "gloo"}
    assert seen["buffers"]["environment"] == ["0", "0"]
    assert not calls(seen["bf16"], "initialize_ub")


def test_the_choice_is_said_in_one_line(seen: Seen) -> None:
    said = {name: one["said"] for name, one in seen.items() if "said" in one}
    assert all(len(lines) == 1 for lines in said.values())
    assert said["delayed"][0] == (
        "> layers: Transformer Engine 2.9.0; attention: Transformer Engine (auto); optimizer: "
        "transformer_engine FusedAdam; fp8: hybrid by the delayed recipe"
    )
    kept = "fp8: e4m3 by the tensorwise recipe, weights kept in 8 bits"
    assert said["parameters"][0].endswith(kept)
    ours = f"> layers: torch {torch.__version__}; attention: torch SDPA"
    assert said["torch"][0].startswith(ours)
    none = implementation_line(ModelConfig(), Fp8Config(), None)
    assert none.endswith("optimizer: none; fp8: none")


def arguments_of(sources: list[Path], name: str) -> set[str]:
    """Return the arguments of a function, of a constructor, or of a forward pass without one."""
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name != name:
                continue
            body = node.body if isinstance(node, ast.ClassDef) else [node]
            functions = {x.name: x.args for x in body if isinstance(x, ast.FunctionDef)}
            for wanted in (name, "__init__", "forward"):
                if wanted in functions:
                    found = functions[wanted]
                    return {x.arg for x in (*found.args, *found.kwonlyargs)}
    raise AssertionError(f"{name} is in none of {sources}")


RECORDED = json.loads((STAND_IN / "signatures.json").read_text(encoding="utf-8"))
"""Arguments in the real sources of 2.9.0 by file, as the wheel of PyPI has them."""
OTHER_NAMES = {"RMSNorm": "LayerNorm", "CrossEntropyFunction": "parallel_cross_entropy"}


@pytest.mark.parametrize("path", RECORDED)
def test_the_stand_in_has_the_keywords_of_the_real_package(path: str) -> None:
    ours = sorted((STAND_IN / "transformer_engine" / "pytorch").rglob("*.py"))
    for name, words in RECORDED[path].items():
        assert arguments_of(ours, OTHER_NAMES.get(name, name)) <= set(words.split()), name


@pytest.mark.skipif(
    "TRANSFORMER_ENGINE_SOURCES" not in os.environ,
    reason="TRANSFORMER_ENGINE_SOURCES does not name the folder of 2.9.0's Python files",
)
@pytest.mark.parametrize("path", RECORDED)
def test_the_recorded_keywords_are_those_of_the_sources(path: str) -> None:
    real = Path(os.environ["TRANSFORMER_ENGINE_SOURCES"]) / "pytorch" / path
    for name, words in RECORDED[path].items():
        assert arguments_of([real], name) == set(words.split()), name
