"""Texts equal those of transformers' `generate`, and are the same in every layout."""

from pathlib import Path

import pytest

from megatron_ext.text.generation.sampling import Sampling
from tests.text.convert.models import imported, make, make_tiny
from tests.text.convert.settings import SETTINGS
from tests.text.generation.tiny import NEW_TOKENS, ours, plainly, theirs
from tests.text.model.test_families import FAMILIES as PARTS
from tests.training_runs import train

GREEDY = Sampling(max_new_tokens=NEW_TOKENS)
PENALIZED = Sampling(max_new_tokens=NEW_TOKENS, repetition_penalty=1.3)
DRAWN = Sampling(
    max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.5, top_k=50, top_p=0.9
)  # fmt: skip
OPTIONS = [GREEDY, PENALIZED, DRAWN]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3") / "hf")


def test_texts_are_those_of_transformers_in_every_layout(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "ours"
    imported(source, root)
    one = ours(root, OPTIONS, tmp_path / "one")
    assert one[0] == theirs(source)
    assert one[1] == theirs(source, repetition_penalty=1.3)
    layouts = [{"tp": 2, "pp": 2}, {"dp": 2}]
    for index, sizes in enumerate(layouts):
        assert ours(root, OPTIONS, tmp_path / str(index), **sizes) == one, sizes
    parallel = ["--sequence-parallel"]
    assert ours(root, OPTIONS, tmp_path / "sp", parallel, tp=2) == one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "llama 3.1 tied"])
def test_families_in_all_layouts(name: str, tmp_path: Path) -> None:
    source, root = make(name, tmp_path / "hf"), tmp_path / "ours"
    imported(source, root)
    one = ours(root, OPTIONS, tmp_path / "one")
    assert one[0] == theirs(source)
    layouts = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}]
    for index, sizes in enumerate(layouts):
        assert ours(root, OPTIONS, tmp_path / str(index), **sizes) == one, sizes


EXPERTS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --num-experts 4 --moe-ffn-hidden-size 24 --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.3 "
    "--window-size 6 0 --window-attn-skip-freq 2 --mtp-num-layers 1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 299 --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 1 --lr 1e-3 --num-workers 0 --eval-iters 0"
).split()


@pytest.mark.slow
def test_experts_windows_and_learned_positions(tmp_path: Path) -> None:
    """A model with experts, windows in every second layer, learned positions and an MTP depth."""
    root = tmp_path / "run"
    train(EXPERTS, root)
    one = ours(root, OPTIONS, tmp_path / "one")
    assert one[0] == plainly(root, tmp_path / "plain")
    for index, sizes in enumerate([{"ep": 2, "dp": 2}, {"pp": 2, "ep": 2, "dp": 2}]):
        assert ours(root, OPTIONS, tmp_path / str(index), **sizes) == one, sizes
    virtual = {"pp": 2, "vpp": 2}
    assert ours(root, OPTIONS, tmp_path / "vpp", **virtual) == one


LATENT = (
    "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 12 --position-embedding-type rope --mscale-all-dim 0.7 "
    "--rotary-scaling-factor 4 --original-max-position-embeddings 8 --normalization RMSNorm "
    "--llama-4-scaling-beta 0.5"
).split()


@pytest.mark.slow
def test_multi_latent_attention(tmp_path: Path) -> None:
    """Keys and values are kept as its heads get them; layers share one rotary embedding."""
    root = tmp_path / "run"
    train([*EXPERTS, *LATENT], root)
    one = ours(root, OPTIONS, tmp_path / "one")
    assert one[0] == plainly(root, tmp_path / "plain")
    assert ours(root, OPTIONS, tmp_path / "vpp", pp=2, vpp=2) == one
    words = ["--sequence-parallel", "--expert-tensor-parallel-size", "1"]
    assert ours(root, OPTIONS, tmp_path / "tp", words, tp=2, ep=2, etp=1) == one


FAMILIES = {
    "mistral with a window": {"pp": 2},
    "gpt2": {"tp": 2},
    "mixtral": {"ep": 2, "dp": 2},
    "qwen2_moe": {"ep": 2, "dp": 2, "pp": 2},
    "phi3": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_folders_of_hugging_face_models_write_what_transformers_writes(
    name: str, tmp_path: Path
) -> None:
    source = make(name, tmp_path / "hf")
    found = ours(source, [GREEDY, GREEDY], tmp_path / "parallel", **FAMILIES[name])
    assert found == [theirs(source)] * 2


ON_TWO_RANKS = {"ep": 2, "dp": 2}
SPLIT_EXPERTS = {"tp": 2, "ep": 2, "etp": 1}
LATER_FAMILIES = {
    "gpt_oss": SPLIT_EXPERTS,
    "deepseek_v3": ON_TWO_RANKS,
    "gemma2": {"tp": 2},
    "gemma3": {"pp": 2},
    "glm4_moe": ON_TWO_RANKS,
    "deepseek_v2": {"pp": 2},
}
FAST = ("gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in LATER_FAMILIES]
)
def test_later_families_write_the_same_on_one_rank_and_in_parallel(
    name: str, tmp_path: Path
) -> None:
    # With tied embeddings a random Gemma writes nothing but its last token.
    untied = {"tie_word_embeddings": False} if "gemma" in name else {}
    source, sizes = make(name, tmp_path / "hf", changed=untied), LATER_FAMILIES[name]
    expected = theirs(source)
    assert min(len(set(text)) for text in expected) > NEW_TOKENS // 2
    words = ["--sequence-parallel", "--expert-tensor-parallel-size", "1"] if "etp" in sizes else []
    assert ours(source, [GREEDY], tmp_path / "one")[0] == expected
    assert ours(source, [GREEDY], tmp_path / "parallel", words, **sizes)[0] == expected


@pytest.mark.parametrize("name", ["falcon", pytest.param("cohere", marks=pytest.mark.slow)])
def test_layers_side_by_side_write_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = make_tiny({"model_type": name, **SETTINGS[name][0]}, tmp_path / "hf")
    sizes = {"tp": 2} if name == "falcon" else {"pp": 2}
    assert ours(source, [GREEDY], tmp_path / "parallel", **sizes)[0] == theirs(source)


IN_PARTS = ("gpt_oss", "gemma2", "gemma3", "phi3")


@pytest.mark.parametrize("name", IN_PARTS)
def test_the_cache_holds_what_every_kind_of_attention_needs(name: str, tmp_path: Path) -> None:
    """Sinks, soft caps, windows, two rotary bases, LongRoPE: as without cache."""
    root = tmp_path / "run"
    sizes = "--vocab-size 299 --padded-vocab-size 300 --train-iters 1 --init-method-std 0.25"
    train([*PARTS[name].flags, *sizes.split(), "--lr", "1e-3", "--eval-iters", "0"], root)
    expected = plainly(root, tmp_path / "plain")
    assert len(set(expected)) == len(expected)
    assert ours(root, [GREEDY], tmp_path / "pp2", pp=2)[0] == expected
