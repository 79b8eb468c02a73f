"""The stand-in of Transformer Engine takes no argument that the real package does not take."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

STAND_IN = Path(__file__).resolve().parents[1] / "fake_te"

SIGNATURES = {
    "module/linear.py": {"Linear": "Linear"},
    "module/layernorm_linear.py": {"LayerNormLinear": "LayerNormLinear"},
    "module/grouped_linear.py": {"GroupedLinear": "GroupedLinear"},
    "module/rmsnorm.py": {"RMSNorm": "LayerNorm"},
    "module/layernorm.py": {"LayerNorm": "LayerNorm"},
    "attention/dot_product_attention/dot_product_attention.py": {
        "DotProductAttention": "DotProductAttention"
    },
    "module/fp8_padding.py": {"Fp8Padding": "Fp8Padding"},
    "module/fp8_unpadding.py": {"Fp8Unpadding": "Fp8Unpadding"},
    "optimizers/fused_adam.py": {"FusedAdam": "FusedAdam"},
    "cross_entropy.py": {"CrossEntropyFunction": "parallel_cross_entropy"},
    "attention/rope.py": {"apply_rotary_pos_emb": "apply_rotary_pos_emb"},
    "module/base.py": {"initialize_ub": "initialize_ub"},
    "quantization.py": {"fp8_autocast": "fp8_autocast", "fp8_model_init": "fp8_model_init"},
    "tensor/utils.py": {
        "cast_master_weights_to_fp8": "cast_master_weights_to_fp8",
        "replace_raw_data": "replace_raw_data",
    },
}
"""Files of the real sources, and in each the real names and those of the stand-in."""


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
"""Arguments in the real sources of 2.9.0, as the wheel of PyPI has them."""


@pytest.mark.parametrize("path", SIGNATURES)
def test_the_stand_in_has_the_keywords_of_the_real_package(path: str) -> None:
    """Every argument that the stand-in takes is one of the real one's."""
    ours = sorted((STAND_IN / "transformer_engine" / "pytorch").rglob("*.py"))
    for name, stand_in in SIGNATURES[path].items():
        assert arguments_of(ours, stand_in) <= set(RECORDED[path][name].split()), name


@pytest.mark.skipif(
    "TRANSFORMER_ENGINE_SOURCES" not in os.environ,
    reason="TRANSFORMER_ENGINE_SOURCES does not name the folder of 2.9.0's Python files",
)
@pytest.mark.parametrize("path", SIGNATURES)
def test_the_recorded_keywords_are_those_of_the_sources(path: str) -> None:
    real = Path(os.environ["TRANSFORMER_ENGINE_SOURCES"]) / "pytorch" / path
    for name in SIGNATURES[path]:
        assert arguments_of([real], name) == set(RECORDED[path][name].split()), name
