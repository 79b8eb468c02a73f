"""`--hybrid-layer-pattern` sets the flags of the GPT that it spells, or says what is wrong."""

from dataclasses import replace

import pytest

from megatron_ext.config.precision import TE_IMPL
from megatron_ext.errors import ConfigError
from megatron_ext.text import hybrid
from megatron_ext.text.config.hybrid import HybridConfig
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.hybrid import Pattern, hybrid_errors, read_pattern
from megatron_ext.text.model import gpt
from megatron_ext.text.task import GPT
from tests.training_runs import SMALL, check_refused, config_of, errors_of, prepared, without

BASE = without(SMALL, "--num-layers")
NEEDED = "needs the HybridModel of newer releases of megatron-core"
HAS = pytest.mark.skipif(
    not hybrid.HAS_HYBRID_MODEL, reason="this release of megatron-core has no HybridModel"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"


def test_a_pattern_is_read_as_pairs() -> None:
    pattern = read_pattern("*-*E|*-|/*-/*-")
    assert pattern == Pattern((("*-", "*E"), ("*-",), ()), ("*-", "*-"))
    assert pattern.layout() == "Ett|t|mmL"
    assert pattern.moe_layer_freq() == "[0,1,0]"
    assert read_pattern("*E*E").layout() is None
    assert read_pattern("*E*E").moe_layer_freq() is None


@pytest.fixture
def _has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read flags as with a release of megatron-core that has HybridModel."""
    monkeypatch.setattr(hybrid, "HAS_HYBRID_MODEL", True)


@pytest.mark.usefixtures("_has")
def test_a_pattern_sets_the_flags_of_its_gpt() -> None:
    words = [*BASE, "--hybrid-layer-pattern", "*-*E|*-*E", *EXPERTS.split()]
    run = config_of([*words, "--pipeline-model-parallel-size", "2"], ranks=2)
    assert (run.model.num_layers, run.section(MoEConfig).moe_layer_freq) == (4, "[0,1,0,1]")
    assert run.parallel.pipeline_model_parallel_layout == "Ett|ttL"
    depths = "--hybrid-override-pattern *-*-/*-/*- --position-embedding-type rope"
    run = config_of([*BASE, *depths.split()])
    assert (run.model.num_layers, run.model.mtp_num_layers) == (2, 2)
    assert run.section(HybridConfig).hybrid_layer_pattern == "*-*-/*-/*-"
    # Megatron-LM counts each letter.
    assert config_of([*BASE, *"--hybrid-layer-pattern *-*- --num-layers 4".split()]).model


@pytest.mark.usefixtures("_has")
@pytest.mark.parametrize(
    ("pattern", "layout", "chunks", "more"),
    [
        ("*-|*-|*-|*-", "Et|t|t|tL", 2, ""),
        ("*-|*-|*-|*-/*-/*-", "Et|t|t|tmmL", 2, "--position-embedding-type rope"),
        ("*-|*-/*-", "Et|tmL", None, "--position-embedding-type rope"),
        ("|*-*-*-", "E|tttL", None, ""),
        ("*-|*-*-", "Et|ttL", None, "--pipeline-model-parallel-layout Et|ttL"),
    ],
)
def test_the_stages_of_a_pattern_are_those_of_a_layout(
    pattern: str, layout: str, chunks: int | None, more: str
) -> None:
    words = [*BASE, "--hybrid-layer-pattern", pattern, *more.split()]
    run = config_of([*words, "--pipeline-model-parallel-size", "2"], ranks=2)
    assert run.parallel.pipeline_model_parallel_layout == layout
    assert run.parallel.virtual_pipeline_model_parallel_size == chunks
    assert (run.model.num_layers, run.model.mtp_num_layers or 0) == (
        pattern.split("/")[0].count("*"),
        pattern.count("/"),
    )


@pytest.mark.usefixtures("_has")
def test_layers_of_transformer_engine_are_refused() -> None:
    model = replace(config_of([*BASE, "--num-layers", "2"]).model, transformer_impl=TE_IMPL)
    run = config_of([*BASE, "--hybrid-layer-pattern", "*-*-"])
    assert [*hybrid_errors(run, run)] == []
    (error,) = hybrid_errors(run, replace(run, model=model))
    assert str(error).startswith(
        "`--hybrid-layer-pattern` needs our own layers, which `--transformer-impl transformer_engin"
    )


@pytest.mark.usefixtures("_has")
def test_the_same_experts_may_be_given_twice() -> None:
    words = [*BASE, "--hybrid-layer-pattern", "*-*E", *EXPERTS.split()]
    run = config_of([*words, "--moe-layer-freq", "[0,1]"])
    assert run.section(MoEConfig).moe_layer_freq == "[0,1]"


@pytest.mark.skipif(hybrid.HAS_HYBRID_MODEL, reason="this release of megatron-core has HybridModel")
def test_a_release_without_hybrid_model_is_named() -> None:
    (error,) = errors_of([*BASE, "--hybrid-layer-pattern", "*-*-"])
    assert error.startswith(f"`--hybrid-layer-pattern` {NEEDED}, which the installed one (0.16.1)")
    assert "use Python 3.12, for which pip installs a newer one." in error


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("M-*-", "(M-*-) has M, but Mamba layers have kernels for GPUs only; use *, - and E."),
        ("G-*-", "has G, but gated-delta layers have kernels for GPUs only;"),
        ("D-D-", "has D, but sparse attention of DeepSeek has kernels for GPUs only;"),
        ("+-+-", "has +, but multi-latent attention is not among the layers of a pattern;"),
        ("*-x", "has x, which is no layer; use *, -, E, | and /."),
        ("*-x --num-layers 2 --pipeline-model-parallel-size 2", "has x, which is no layer;"),
        ("**--", "must be pairs of *- or *E in each stage, which are the layers of a GPT;"),
        ("*|-*-", "must be pairs of *- or *E in each stage"),
        ("*-*-/*-/*E", "must have depths of multi-token prediction like its last layers (*-);"),
        ("*-*-/*E", "must have depths of multi-token prediction like its last layers (*-);"),
        ("*-*- --num-layers 3", "has 4 layers, or 2 with attention and MLP as one, but "
         "`--num-layers` is 3; leave it out."),
        ("*-*-/*- --mtp-num-layers 2", "has 1 depth of multi-token prediction, but "
         "`--mtp-num-layers` is 2; write /*- for each."),
        ("*E*E", "has layers of experts (E), and `--num-experts` is missing; give both or "
         "neither."),
        (f"*-*- {EXPERTS}", "has no layers of experts (E), and `--num-experts` is 4;"),
        (f"*-*E {EXPERTS} --moe-layer-freq [1,0]", "says which layers hold experts, and so does "
         "`--moe-layer-freq` ([1,0]); leave it out."),
        ("*-|*-", "has 2 stages, but `--pipeline-model-parallel-size` is 1; use 2, or leave out "
         "|."),
        ("*-|*-|*- --pipeline-model-parallel-size 2", "has 3 stages, which must be a multiple of "
         "`--pipeline-model-parallel-size` (2); write 4."),
        ("*-*- --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
         "is cut into stages by |, not by `--decoder-first-pipeline-num-layers`; leave it out."),
        ("*-|*- --pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
         "is cut into stages by |, and also by `--account-for-loss-in-pipeline-split`; leave out "
         "one of them."),
        ("*-*- --multi-latent-attention --position-embedding-type rope", "has layers of halves, "
         "which `--multi-latent-attention` is not among; give `--num-layers` instead."),
        ("*-*- --cuda-graph-impl local", "`--hybrid-layer-pattern` has layers of halves, but "
         "`--cuda-graph-impl local` captures whole layers; use none."),
    ],
)  # fmt: skip
def test_what_a_pattern_cannot_be_is_said(flags: str, sentence: str) -> None:
    check_refused([*BASE, "--hybrid-layer-pattern", *flags.split()], sentence, ranks=2)


@HAS
def test_a_model_of_the_users_own_is_refused_before_ranks_start() -> None:
    def own_chunk(*_: object, **__: object) -> None:
        raise AssertionError("nothing is built")

    words = [*BASE, "--train-iters", "1", "--hybrid-layer-pattern", "*-*-"]
    task = GPT.replace(model_chunk=own_chunk)
    _, config, _ = prepared(words, GPT)
    with pytest.raises(ConfigError) as caught:
        prepared(words, task)
    (sentence,) = caught.value.messages
    assert sentence.startswith(
        "`--hybrid-layer-pattern` is left out of account by the forward step and the model of this "
        "task (`gpt_forward_step` and `own_chunk`); leave it out, or "
    )
    own = type("Own", (gpt.GPTModel,), {})
    assert gpt._model_class(config, own) is own
    assert gpt._model_class(config, gpt.GPTModel).__name__ == "HybridModel"


def test_a_model_class_of_ones_own_is_kept_under_a_pattern() -> None:
    config = config_of(SMALL)
    pattern = config.with_section(HybridConfig(hybrid_layer_pattern="*-*-"))
    own = type("Own", (gpt.GPTModel,), {})
    for given in (config, pattern):
        assert gpt._model_class(given, own) is own
    assert gpt._model_class(config, gpt.GPTModel) is gpt.GPTModel
