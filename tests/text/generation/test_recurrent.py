"""Models with recurrent layers write the texts of transformers' `generate`, in every layout.

The states of a layer take the place of keys and values; prompts have unequal lengths. With Mamba-2
transformers computes all tokens again for each new one, since its torch code for one token knows no
limits of the steps.
"""

from functools import partial
from pathlib import Path

import pytest

from megatron_ext.text.generation.sampling import Sampling
from tests.text.convert.models import make_tiny
from tests.text.convert.settings import SETTINGS
from tests.text.generation import tiny
from tests.text.generation.tiny import NEW_TOKENS, ours, theirs

GREEDY = Sampling(max_new_tokens=NEW_TOKENS)
MAMBA = ("nemotron_h", "bamba", "granitemoehybrid")
DELTA = ("qwen3_next", "kimi_linear", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    "name",
    [*MAMBA, *(pytest.param(x, marks=[pytest.mark.slow] * ("3_5" in x)) for x in DELTA)],
)
def test_texts_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "prompts", partial(tiny.prompts, 8))
    source = make_tiny({"model_type": name, **SETTINGS[name][0]}, tmp_path / "hf")
    want = theirs(source, use_cache=name in DELTA)
    assert len(want) == 8
    if name in DELTA:
        assert min(len(set(text)) for text in want) > NEW_TOKENS // 2
    # Two batch sizes: texts take the places of others.
    assert ours(source, [GREEDY, GREEDY], tmp_path / "one") == [want, want]
    assert ours(source, [GREEDY], tmp_path / "four", tp=2, pp=2) == [want]
    sequence = ["--sequence-parallel"]
    assert ours(source, [GREEDY], tmp_path / "sp", sequence, tp=2) == [want]
