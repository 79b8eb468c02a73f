"""DeepSeek-V3.2's two stages of training: one rank against many layouts, and what is trained.

Its arithmetic is compared with transformers in tests/layers/mixers/test_sparse_attention.py, and
its families in tests/text/convert/test_families.py.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.tiny import whole_tensors
from tests.text.convert.models import class_of, make_tiny, theirs
from tests.text.convert.settings import SETTINGS
from tests.text.model.test_deepseek import RECIPE, TRAINED, train_alike
from tests.training_runs import train_steps

INDEXER = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 8 "
    "--dsa-indexer-topk 8 --dsa-indexer-loss-coeff 0.1"
)
"""The scores of chosen and of left out keys are far apart with 8 keys.

Rounding differs from layout to layout, so that either might be chosen otherwise.
"""
SHARES = "--dsa-indexer-use-sparse-loss --reset-attention-mask"
FEW = "tp2spcp2ep2etp1,pp2vpp2cp2ep2"
MANY = (
    "tp2sp,tp2spep2etp2dp2,tp4spep4etp1,pp2ep2dp2do,pp4dp2,pp2vpp2tp2spep2etp1,cp2agep2,cp4,"
    "cp2tp2spep4etp1,pp2zbh1tp2spep2etp1,pp2cp2tp2spep2etp1,dp8ep8do,"
    "pp2dp2[--recompute-granularity full --recompute-method uniform --recompute-num-layers 1],"
    "tp2spcp2[--recompute-granularity selective --recompute-modules core_attn moe]"
)
OF_DOCUMENTS = (
    "tp2,cp2tp2sp,cp4,"
    "pp2zbh1cp2[--recompute-granularity selective --recompute-modules mla_up_proj core_attn]"
)
STEPS = "--train-iters 3 --log-interval 1 --eval-iters 0 --save-interval 3"


@pytest.mark.parametrize("layouts", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_layouts_train_alike(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    train_alike(layouts, f"{RECIPE} {INDEXER}", capfd)


@pytest.mark.slow
def test_documents_and_the_loss_of_the_chosen_keys(capfd: pytest.CaptureFixture[str]) -> None:
    train_alike(OF_DOCUMENTS, f"{TRAINED} {INDEXER} {SHARES} --lr 0.1", capfd)


def test_the_warm_up_trains_the_indexer_alone_and_the_next_stage_goes_on(tmp_path: Path) -> None:
    """Attention is dense in the warm-up, so that its loss is that of the dense model."""
    first = tmp_path / "first"
    # The norms of both stages need an optimizer without the state of the other.
    warm = f"{INDEXER} --dsa-indexer-topk 32 --freeze-all-but indexer --lr 0.1"
    steps = train_steps(f"{TRAINED} {warm} {STEPS}".split(), first)
    losses = [step["indexer loss"] for step in steps]
    assert losses[-1] < losses[0]
    second = tmp_path / "second"
    goes_on = f"--load {first} --finetune --tensor-model-parallel-size 2 --sequence-parallel"
    sparse = f"{INDEXER} --dsa-indexer-use-sparse-loss --lr 0.1 {goes_on}"
    later = train_steps(f"{TRAINED} {sparse} {STEPS}".split(), second, ranks=2)
    assert all(step["indexer loss"] > 0 for step in later)
    before, after = (
        whole_tensors(folder / "iter_0000003", tmp_path / f"{folder.name}.pt")
        for folder in (first, second)
    )
    prefix = "decoder.layers.self_attention."
    for name in ("core_attention.indexer.linear_wk.weight", "linear_kv_up_proj.layer_norm_weight"):
        assert not before[prefix + name].equal(after[prefix + name]), name


def test_a_dense_model_gets_indexers(tmp_path: Path) -> None:
    """DeepSeek-V3.2 began with the weights of DeepSeek-V3.1; what is written is the former."""
    dense = {**SETTINGS["deepseek_v32"][0], "model_type": "deepseek_v3"}
    dense = {key: value for key, value in dense.items() if not key.startswith("index_")}
    source = make_tiny(dense, tmp_path / "dense")
    words = (
        f"--load-hf {source} --seq-length 24 --micro-batch-size 2 --global-batch-size 2 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 299 --num-workers 0 --lr 1e-3 "
        "--train-iters 2 --log-interval 1 --eval-iters 0 --save-interval 2"
    )
    (first, _) = train_steps(words.split(), tmp_path / "plain")
    saved = tmp_path / "sparse_hf"
    sizes = INDEXER.replace("--dsa-indexer-topk 8", "--dsa-indexer-topk 24")
    warm = f"{words} {sizes} --freeze-all-but indexer --save-hf {saved}"
    warm += " --tensor-model-parallel-size 2 --sequence-parallel"
    (same, later) = train_steps(warm.split(), tmp_path / "warm", ranks=2)
    assert same["lm loss"] == pytest.approx(first["lm loss"], rel=1e-6)
    assert same["indexer loss"] > 0 and later["indexer loss"] > 0
    (folder,) = (path.parent for path in saved.rglob("config.json"))
    content = json.loads((folder / "config.json").read_text())
    assert content["model_type"] == "deepseek_v32" and content["index_topk"] == 24
    # With as many keys as tokens, transformers' class computes what the dense one does.
    torch.testing.assert_close(theirs(folder), theirs(source))
    assert type(class_of(folder)).__name__ == "DeepseekV32ForCausalLM"
