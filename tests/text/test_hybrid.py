"""`--hybrid-layer-pattern` says the kind of each layer, or what is wrong with it."""

from dataclasses import replace

import pytest

from megatron_ext.config.precision import TE_IMPL
from megatron_ext.text.config.hybrid import HybridConfig
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.hybrid import Pattern, hybrid_errors, pattern_of_ratios, read_pattern
from tests.training_runs import SMALL, check_refused, config_of, parsed, without

BASE = without(SMALL, "--num-layers")
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
MAMBA = "--mamba-num-heads 4 --mamba-num-groups 2"
GATED = "--linear-num-key-heads 2 --linear-num-value-heads 4"


def kinds_of(flags: str) -> tuple[str, ...] | None:
    return config_of([*BASE, *flags.split()]).section(HybridConfig).layer_kinds


def test_a_mixer_and_the_mlp_after_it_are_one_layer() -> None:
    pattern = read_pattern("*-*E|*-|/*-/*-")
    assert pattern == Pattern((("*-", "*E"), ("*-",), ()), ("*-", "*-"))
    assert pattern.layout() == "Ett|t|mmL"
    assert pattern.moe_layer_freq() == "[0,1,0]"
    assert read_pattern("*E*E").layout() is None
    assert read_pattern("*E*E").moe_layer_freq() is None
    assert read_pattern("MM-+--E|-G") == Pattern((("M", "M-", "*-", "-", "E"), ("-", "G")), ())


def test_a_pattern_of_attention_with_mlps_sets_the_flags_of_its_gpt() -> None:
    words = [*BASE, "--hybrid-layer-pattern", "*-*E|*-*E", *EXPERTS.split()]
    run = config_of([*words, "--pipeline-model-parallel-size", "2"], ranks=2)
    assert (run.model.num_layers, run.section(MoEConfig).moe_layer_freq) == (4, "[0,1,0,1]")
    assert run.parallel.pipeline_model_parallel_layout == "Ett|ttL"
    assert run.section(HybridConfig).layer_kinds is None
    depths = "--hybrid-override-pattern *-*-/*-/*- --position-embedding-type rope"
    run = config_of([*BASE, *depths.split()])
    assert (run.model.num_layers, run.model.mtp_num_layers) == (2, 2)
    assert run.section(HybridConfig).hybrid_layer_pattern == "*-*-/*-/*-"
    assert config_of([*BASE, *depths.split(), "--mtp-num-layers", "0"]).model.mtp_num_layers is None
    # Megatron-LM counts each letter.
    assert config_of([*BASE, *"--hybrid-layer-pattern *-*- --num-layers 4".split()]).model


def test_other_kinds_are_kept_by_layer() -> None:
    assert kinds_of(f"--hybrid-layer-pattern M-M*-- {MAMBA}") == ("M-", "M", "*-", "-")
    variant = f"--experimental-attention-variant gated_delta_net {GATED} --num-layers 4"
    assert kinds_of(f"{variant} --linear-attention-freq 2") == ("G-", "*-", "G-", "*-")
    assert kinds_of(f"{variant} --linear-attention-freq [1,1,0,1]") == ("G-", "G-", "*-", "G-")
    experts = f"{EXPERTS} --moe-layer-freq [0,1,1,1]"
    assert kinds_of(f"{variant} --linear-attention-freq 4 {experts}") == ("G-", "GE", "GE", "*E")
    ratios = f"--num-layers 4 --hybrid-attention-ratio 0.25 --hybrid-mlp-ratio 0.25 {MAMBA}"
    assert kinds_of(ratios) == ("M", "M", "*-")


def test_ratios_give_the_pattern_of_megatron_lm() -> None:
    """The patterns are those of megatron-core's `pattern_from_ratios`."""
    assert pattern_of_ratios(10, 0.2, 0.0) == "MMM*MM*MMM"
    assert pattern_of_ratios(10, 0.2, 0.3) == "MM-*M-*MM-"
    assert pattern_of_ratios(10, 0.0, 0.5) == "M-M-M-M-M-"
    assert pattern_of_ratios(4, 1.0, 0.0) == "****"


@pytest.mark.parametrize(
    ("pattern", "layout", "chunks", "more"),
    [
        ("*-|*-|*-|*-", "Et|t|t|tL", 2, ""),
        ("*-|*-|*-|*-/*-/*-", "Et|t|t|tmmL", 2, "--position-embedding-type rope"),
        ("*-|*-/*-", "Et|tmL", None, "--position-embedding-type rope"),
        ("|*-*-*-", "E|tttL", None, ""),
        ("*-|*-*-", "Et|ttL", None, "--pipeline-model-parallel-layout Et|ttL"),
        ("*|-*-", "Et|ttL", None, ""),
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
        layout.count("t"),
        pattern.count("/"),
    )


def test_the_same_experts_may_be_given_twice() -> None:
    words = [*BASE, "--hybrid-layer-pattern", "*-*E", *EXPERTS.split()]
    run = config_of([*words, "--moe-layer-freq", "[0,1]"])
    assert run.section(MoEConfig).moe_layer_freq == "[0,1]"


def test_layers_of_transformer_engine_are_refused() -> None:
    run = config_of([*BASE, "--hybrid-layer-pattern", "**-"])
    assert [*hybrid_errors(run, run)] == []
    engine = replace(run.model, transformer_impl=TE_IMPL)
    (error,) = hybrid_errors(run, replace(run, model=engine))
    assert str(error) == (
        "`--transformer-impl` (transformer_engine) does not support layers with one part; use "
        "torch."
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("*-x", "has x, which is no layer; use * M G K D + - E | and /."),
        ("*-x --num-layers 2 --pipeline-model-parallel-size 2", "has x, which is no layer;"),
        ("|", "must have at least one layer;"),
        ("+-+-", "has +, which needs `--multi-latent-attention`; give it, or write *."),
        ("*-*-/*-/*E", "must have the same layer, with a mixer, in each depth"),
        ("*-*-/-", "must have the same layer, with a mixer, in each depth"),
        ("*-*-/*-*-", "must have the same layer, with a mixer, in each depth"),
        ("*-*-/*-|*-", "must have its | before the first /; move it there."),
        ("*-*- --num-layers 3", "has 4 layers, or 2 with mixer and MLP as one, but "
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
        ("*- --hybrid-attention-ratio 0.5",
         "`--hybrid-layer-pattern` and `--hybrid-attention-ratio` exclude each other"),
        ("**- --cuda-graph-impl local", "`--cuda-graph-impl` (local) does not support layers with "
         "one part; use none."),
        ("M-", "`--mamba-num-groups` (8) must divide the heads of a Mamba-2 layer (1)"),
        (f"M- {MAMBA} --tensor-model-parallel-size 4 --num-attention-heads 4",
         "`--mamba-num-groups` (2) must be divisible by `--tensor-model-parallel-size` (4)"),
        (f"M- {MAMBA} --mamba-time-step-max 0.1 --mamba-time-step-min 0.2",
         "`--mamba-time-step-max` (0.1) must be at least `--mamba-time-step-min` (0.2); leave it"),
        ("G- --linear-num-key-heads 3", "`--linear-num-value-heads` (32) must be divisible by "
         "`--linear-num-key-heads` (3); use 33."),
        (f"G- {GATED} --lora-rank 2 --lora-target-modules linear_qkv", "linear_qkv"),
        (f"G- {GATED} --qk-clip", "`--qk-clip` needs attention, but no layer of the model has it; "
         "leave it out."),
        (f"G- {GATED} --bf16 --fp8-format hybrid", "but the width of `in_proj` in gated DeltaNet "
         "(1544) over 1 rank(s) does not; use a multiple of 16."),
        ("K-", "`--linear-num-value-heads` (32) must equal `--linear-num-key-heads` (16) in Kimi "
         "Delta Attention; use 16."),
        ("D-", "`--multi-latent-attention` is missing, and DeepSeek's sparse attention (D) is"),
        ("D- --position-embedding-type none", "`--position-embedding-type` (none) does not go "
         "with DeepSeek's sparse attention (D), whose indexer rotates its queries and keys;"),
        ("D-", "`--dsa-indexer-topk` is missing, and DeepSeek's sparse attention (D) needs it;"),
    ],
)  # fmt: skip
def test_what_a_pattern_cannot_be_is_said(flags: str, sentence: str) -> None:
    check_refused([*BASE, "--hybrid-layer-pattern", *flags.split()], sentence, ranks=4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--experimental-attention-variant gated_delta_net", "needs `--linear-attention-freq`"),
        ("--experimental-attention-variant gated_delta_net --linear-attention-freq [1,0,1]",
         "`--linear-attention-freq` has 3 entries, but must have one for each of the 4 layers"),
        ("--hybrid-attention-ratio 0.6 --hybrid-mlp-ratio 0.6", "must add up to at most 1"),
        ("--experimental-attention-variant dsa --hybrid-attention-ratio 0.5", "exclude each other"),
    ],
)  # fmt: skip
def test_what_other_flags_of_layers_cannot_be_is_said(flags: str, sentence: str) -> None:
    check_refused([*BASE, "--num-layers", "4", *flags.split()], sentence)


def test_sizes_of_mixers_that_no_layer_has_are_named() -> None:
    words = "--hybrid-layer-pattern **- --mamba-state-dim 16 --linear-attention-freq 2"
    notes = " ".join(parsed([*BASE, *words.split()]).notes)
    assert "`--mamba-state-dim` has no effect: no layer of the model has Mamba-2" in notes
    assert "`--linear-attention-freq` has no effect without" in notes
