"""Sparse attention writes what transformers' `generate` writes, with caches, in every layout."""

from functools import partial
from pathlib import Path

import pytest

from megatron_ext.text.generation.sampling import Sampling
from tests.text.convert.models import make_tiny
from tests.text.convert.settings import SETTINGS
from tests.text.generation import tiny
from tests.text.generation.tiny import NEW_TOKENS, ours, theirs

GREEDY = Sampling(max_new_tokens=NEW_TOKENS)
SPLIT = ["--sequence-parallel", "--expert-tensor-parallel-size", "1"]


@pytest.mark.parametrize(
    "name", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)]
)
def test_texts_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts have unequal lengths, shorter and longer than the number of keys."""
    monkeypatch.setattr(tiny, "prompts", partial(tiny.prompts, 8))
    source = make_tiny({"model_type": name, **SETTINGS[name][0]}, tmp_path / "hf")
    expected = theirs(source)
    assert len(expected) == 8
    assert min(len(set(text)) for text in expected) > NEW_TOKENS // 3
    assert ours(source, [GREEDY] * 2, tmp_path / "one") == [expected] * 2
    assert ours(source, [GREEDY], tmp_path / "tp", SPLIT, tp=2, ep=2, etp=1)[0] == expected
    assert ours(source, [GREEDY], tmp_path / "pp", pp=2, ep=2, dp=2)[0] == expected
