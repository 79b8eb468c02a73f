"""Recipes of Megatron-LM's functional tests give the flags that they hold."""

from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from megatron_ext.extras.audit.recipe import read_recipe
from megatron_ext.extras.audit.report import main


def test_a_recipe_gives_its_flags(tmp_path: Path) -> None:
    recipe = tmp_path / "model_config.yaml"
    recipe.write_text(
        "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n  --fp16: false\n"
        "  --save: ${OUT}\n  --data-path: 1 a\n  --rampup-batch-size: [2, 2, 8]\n"
    )
    assert read_recipe(recipe) == (
        "--num-layers 4 --bf16 --save ${OUT} --data-path 1 a --rampup-batch-size 2 2 8".split()
    )


def test_the_flags_of_a_recipe_are_audited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "model_config.yaml"
    for value, code in {"true": 1, "false": 0}.items():
        recipe.write_text(
            f"MODEL_ARGS:\n  --bf16: true\n  --no-check-for-nan-in-loss-and-grad: {value}\n"
        )
        assert main(["--core", "0.19.2", str(recipe)]) == code
        assert ("D21" in capsys.readouterr().out) == bool(code)


def test_a_file_without_flags_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "other.yml"
    recipe.write_text("- 1\n")
    with pytest.raises(DataError, match="has no `MODEL_ARGS`, a mapping of flags to values"):
        read_recipe(recipe)
