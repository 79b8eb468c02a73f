"""Values exactly at a limit are accepted, and derived values are those that the flags imply."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_ext.config.run import transformer_fields
from megatron_ext.errors import ConfigError
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.config.positions import PositionConfig
from tests.config.runs import BF16, SMALL, with_transformer_engine
from tests.layers.test_flex_libraries import STAND_INS
from tests.training_runs import config_of, parsed, without

ROPE = "--position-embedding-type rope"
EXPERTS = "--num-experts 4 --disable-bias-linear"
STAGES = "--nproc-per-node 2 --pipeline-model-parallel-size 2"
FP8 = "--bf16 --fp8-format hybrid"

AT_THE_LIMIT = (
    "--min-lr 1e-3",
    "--lr-warmup-init 1e-3",
    "--decoupled-lr 1e-4 --decoupled-min-lr 1e-4",
    "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.1",
    "--lr-warmup-iters 11",
    f"{EXPERTS} --moe-router-topk 4",
    f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 2 --moe-router-group-scores 2",
    f"{EXPERTS} --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
    f"{EXPERTS} --moe-router-topk 1 --moe-router-score-function sigmoid",
    "--num-experts 4 --add-bias-linear --add-mlp-bias",
    *(
        f"{EXPERTS} --moe-expert-capacity-factor 1 --moe-router-load-balancing-type {kind}"
        for kind in ("seq_aux_loss", "global_aux_loss")
    ),
    f"{EXPERTS} --nproc-per-node 2 --tensor-model-parallel-size 2 --skip-train",
    f"{EXPERTS} {FP8} --nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --moe-ffn-hidden-size 48 "
    "--moe-shared-expert-intermediate-size 64",
    f"{FP8} --group-query-attention --num-query-groups 1 --kv-channels 8",
    f"{ROPE} --multi-latent-attention --rope-type rope --rotary-percent 0.03125",
    f"{ROPE} --multi-latent-attention --kv-channels 128",
    f"{ROPE} --multi-latent-attention --rope-type rope --qk-pos-emb-head-dim 4 "
    "--rotary-percent 0.5 --v-head-dim 3",
    f"{ROPE} --kv-channels 9 --rotary-percent 0.5",
    f"{ROPE} --rotary-percent 0.0625",
    "--softmax-type learnable --attention-backend local",
    "--hidden-size 66 --kv-channels 12",
    "--mtp-num-layers 1",
    f"{STAGES} --num-virtual-stages-per-pipeline-rank 2 "
    "--microbatch-group-size-per-virtual-pipeline-stage 2",
    f"{STAGES} --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule core-interleaved "
    "--microbatch-group-size-per-virtual-pipeline-stage 4 --global-batch-size 12",
    f"{STAGES} --account-for-loss-in-pipeline-split --num-layers 5",
    "--nproc-per-node 2 --context-parallel-size 2 --use-tp-pp-dp-mapping",
    "--resume-mode auto --save s --load l --finetune",
    "--save s --load s3://bucket/run --async-save",
    "--full-validation --eval-iters 0 --early-stop-patience 2",
    "--full-validation --eval-iters 0 --ema-decay 0.9 --eval-ema",
    "--decoupled-lr 1e-5 --min-lr 1e-4 --decoupled-min-lr 0",
    "--init-method-std 0",
    "--num-virtual-stages-per-pipeline-rank 1",
    "--rerun-mode validate_results",
    f"{STAGES} --decoder-first-pipeline-num-layers 1",
    f"{STAGES} --decoder-last-pipeline-num-layers 3",
    f"{STAGES} --pipeline-model-parallel-layout Ett||t|tL",
    f"{FP8} --transformer-impl torch --seq-length 63 --max-position-embeddings 63",
    "--dry-run --dry-run-gpu h100",
    "--load l --finetune --pretrained-average",
    "--ema-decay 0 --ema-start 1",
    "--moe-layer-freq [1,0]*2 --num-experts 4",
    f"{ROPE} --no-rope-freq [0,1]*2",
)


@pytest.mark.parametrize("words", AT_THE_LIMIT)
def test_a_value_at_its_limit_is_accepted(words: str) -> None:
    assert config_of(f"{SMALL} {words}", ranks=0)


def test_a_run_that_only_evaluates_needs_neither_length_nor_rate() -> None:
    config = config_of([*without(SMALL.split(), "--train-iters", "--lr"), "--skip-train"])
    assert config.training.skip_train


TE = "--transformer-impl transformer_engine"
WITH_TE = (
    "--recompute-granularity selective --recompute-modules mlp --disable-bias-linear",
    "--window-size 8 0",
    "--softmax-type learnable --attention-backend fused",
    f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-fusion",
    "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers 4 "
    f"{STAGES} --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 0",
    "--nproc-per-node 4 --context-parallel-size 4 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 2 2 --group-query-attention --num-query-groups 2",
    "--nproc-per-node 4 --context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 8 "
    "--tensor-model-parallel-size 1",
)


@pytest.mark.parametrize("words", WITH_TE)
def test_transformer_engine_accepts_a_value_at_its_limit(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_transformer_engine(monkeypatch)
    config = config_of(f"{BF16} {TE} {words}", ranks=0, device="cuda")
    assert config.model.transformer_impl == "transformer_engine"


def test_only_megatron_cores_fused_loss_needs_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rounds gradients to bf16, and Transformer Engine's does not."""
    with_transformer_engine(monkeypatch)
    fused = f"{SMALL} --cross-entropy-loss-fusion --cross-entropy-fusion-impl"
    assert config_of(f"{fused} te", ranks=0, device="cuda").loss.cross_entropy_impl == "te"
    assert config_of(f"{fused} native --bf16", ranks=0, device="cuda")
    assert config_of(f"{fused} native", ranks=0, device="cpu")
    with pytest.raises(ConfigError, match="rounds the gradient of every logit to bf16"):
        config_of(f"{fused} native", ranks=0, device="cuda")


@pytest.mark.parametrize(
    "words",
    [
        "--fp32-residual-connection",
        "--recompute-granularity selective --recompute-modules mlp",
        "--use-precision-aware-optimizer --use-distributed-optimizer",
        f"{STAGES} --pipeline-schedule zb-h1",
        "--transformer-impl local",
        "--lora-rank 2",
        "--deterministic-dropout",
        "--attention-backend local",
        "--reset-attention-mask",
        "--fp8-format hybrid --fp8-recipe rowwise",
        "--fp8-format hybrid --no-fp8-wgrad",
        "--cuda-graph-impl local --attention-dropout 0",
    ],
)
def test_a_gpu_takes_the_torch_layers_for_what_the_others_lack(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_transformer_engine(monkeypatch)
    config = config_of(f"{BF16} {words}", ranks=0, device="cuda")
    assert config.model.transformer_impl == "torch"
    plain = config_of(f"{BF16} --fp8-format hybrid", ranks=0, device="cuda")
    assert plain.model.transformer_impl == "transformer_engine"


def _model(words: str, **how: Any) -> Any:
    return config_of(f"{SMALL} {words}", **how).model


def test_sizes_that_follow_from_others() -> None:
    assert _model("").ffn_hidden_size == 256
    # 8/3 of 64 is 170.7, and the next lower multiple of 64 is 128.
    assert _model("--swiglu").ffn_hidden_size == 128
    assert _model("--geglu").ffn_hidden_size == _model("--quick-geglu").ffn_hidden_size == 256
    assert _model("").kv_channels == 16 and _model("--kv-channels 8").kv_channels == 8
    assert _model("").num_query_groups is None
    assert _model("--group-query-attention").num_query_groups == 1
    biased = ("--add-qkv-bias", "--add-proj-bias", "--add-mlp-bias")
    for flag in ("", *biased):
        model = _model(f"--disable-bias-linear {flag}")
        found = model.add_qkv_bias, model.add_proj_bias, model.has_mlp_bias
        assert found == tuple(flag == name for name in biased)
    assert [_model(x).gated for x in ("--geglu", "--quick-geglu", "--swiglu", "--openai-gelu")] == [
        True, True, True, False,
    ]  # fmt: skip


def test_layouts_that_follow_from_sizes() -> None:
    def parallel(words: str) -> Any:
        return config_of(f"{SMALL} {words}", ranks=0).parallel

    found = parallel("--nproc-per-node 8 --tensor-model-parallel-size 2 --context-parallel-size 2")
    assert (found.data_parallel_size, found.pipeline_schedule) == (2, "no-pipelining")
    assert not parallel("--sequence-parallel").sequence_parallel
    for words, chunks, schedule in (
        ("", None, "1f1b"),
        ("--num-layers-per-virtual-pipeline-stage 1", 2, "interleaved"),
        ("--num-layers-per-virtual-pipeline-stage 2", None, "1f1b"),
        ("--num-virtual-stages-per-pipeline-rank 1", None, "1f1b"),
        ("--num-virtual-stages-per-pipeline-rank 2", 2, "interleaved"),
        ("--pipeline-model-parallel-layout Et|t|t|tL", 2, "interleaved"),
        ("--pipeline-schedule zb-v --untie-embeddings-and-output-weights", 2, "zb-v"),
    ):
        found = parallel(f"{STAGES} {words}")
        assert found.virtual_pipeline_model_parallel_size == chunks, words
        assert found.pipeline_schedule == schedule, words
    ends = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    for words, layers, count in (
        ("", 4, 0),
        (ends[0], 5, 1),
        (ends[1], 5, 1),
        (" ".join(ends), 6, 2),
    ):
        assert parallel(f"{STAGES} --num-layers {layers} {words}").counted_ends == count


def fields_of(words: str, device: str = "cpu") -> dict[str, Any]:
    return transformer_fields(config_of(f"{BF16} {words}", ranks=0, device=device))


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a stand-in for DeepEP."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setattr("megatron_ext.text.config.flex.has_flex_backend", lambda name: True)
    yield
    for name in ("deep_ep", "deep_ep.utils"):
        sys.modules.pop(name, None)


FLEX = (
    "--nproc-per-node 4 --num-experts 12 --disable-bias-linear --moe-permute-fusion "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type flex --moe-enable-deepep"
)


def dispatcher_of(words: str = "", device: str = "cuda") -> tuple[str, int | None]:
    fields = fields_of(f"{FLEX} {words}", device)
    assert not fields["moe_permute_fusion"]
    return fields["moe_token_dispatcher_type"], fields["moe_ranks_per_node"]


def test_flex_is_two_hops_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatcher_of() == ("alltoall", 4)
    assert dispatcher_of("--moe-ranks-per-node 2 --moe-token-dispatcher-type alltoall")[1] is None
    assert dispatcher_of("--moe-ranks-per-node 2") == ("alltoall", 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert dispatcher_of() == ("alltoall", 2)


NO_LIBRARY = (
    "has no effect without a GPU and a library that fits the run: tokens make the same hops by "
    "torch's collectives."
)
KEPT = "--moe-keep-dispatched-tokens"
HYBRID = "--moe-flex-dispatcher-backend hybridep"
PADDED = "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"


@pytest.mark.usefixtures("with_library")
def test_flex_is_its_library_where_that_fits_the_run() -> None:
    for words in ("", KEPT, "--moe-layer-recompute", f"{PADDED} {HYBRID}"):
        assert dispatcher_of(words) == ("flex", None), words
    notes = parsed(f"{BF16} {FLEX}", ranks=4, device="cuda").notes
    assert not any(NO_LIBRARY in note for note in notes)
    assert dispatcher_of(device="cpu") == ("alltoall", 4)
    unfit = (
        "--no-bf16 --fp16",
        PADDED,
        f"{KEPT} --moe-layer-recompute",
        "--overlap-moe-expert-parallel-comm",
        # DeepEP has no settings for 12 ranks.
        "--nproc-per-node 12 --expert-model-parallel-size 12 --global-batch-size 24",
    )
    for words in unfit:
        assert dispatcher_of(words)[0] == "alltoall", words
        given = parsed(f"{BF16} {FLEX} {words}", ranks=12 if "12" in words else 4, device="cuda")
        (note,) = (x for x in given.notes if x.startswith("`--moe-flex-dispatcher-backend`"))
        assert note.endswith(NO_LIBRARY), words


def test_fields_of_the_core_are_named_as_it_names_them() -> None:
    fields = fields_of(
        "--nproc-per-node 3 --pipeline-model-parallel-size 3 --num-layers 6 --apply-layernorm-1p "
        "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 --swiglu "
        "--global-batch-size 18"
    )
    assert fields["num_layers_in_first_pipeline_stage"] == 1
    assert fields["num_layers_in_last_pipeline_stage"] == 3
    assert fields["layernorm_zero_centered_gamma"] and fields["gated_linear_unit"]
    assert fields["activation_func"] == "silu" and fields["cp_comm_type"] == "p2p"
    # None of these is a default, of the core or of ours.
    others = fields_of(
        "--hidden-dropout 0.3 --attention-dropout 0.2 --init-method-std 0.5 --no-bf16 --fp16 "
        "--embedding-init-method-std 0.7 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.6 "
        "--deterministic-mode --no-initialization --use-cpu-initialization --qk-layernorm "
        "--normalization RMSNorm --disable-bias-linear --add-qkv-bias --kv-channels 8 "
        "--ffn-hidden-size 96 --group-query-attention --num-query-groups 2 "
        "--no-calculate-per-token-loss --apply-query-key-layer-scaling "
        "--no-attention-softmax-in-fp32 --apply-residual-connection-post-layernorm "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3 "
        "--layernorm-epsilon 1e-3"
    )
    wanted = {
        "hidden_dropout": 0.3, "attention_dropout": 0.2, "init_method_std": 0.5, "fp16": True,
        "embedding_init_method_std": 0.7, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.6,
        "deterministic_mode": True, "perform_initialization": False,
        "use_cpu_initialization": True, "qk_layernorm": True, "normalization": "RMSNorm",
        "add_bias_linear": False, "add_qkv_bias": True, "kv_channels": 8, "ffn_hidden_size": 96,
        "num_query_groups": 2, "calculate_per_token_loss": False, "num_attention_heads": 4,
        "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": False,
        "apply_residual_connection_post_layernorm": True, "recompute_granularity": "full",
        "recompute_method": "block", "recompute_num_layers": 3, "layernorm_epsilon": 1e-3,
        "num_layers": 4, "hidden_size": 64, "bf16": False,
    }  # fmt: skip
    assert {name: others[name] for name in wanted} == wanted
    kinds = "--cp-comm-type p2p all_gather p2p a2a"
    assert fields_of(kinds)["cp_comm_type"] == ["p2p", "all_gather", "p2p", "a2a"]
    grouped = "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-vp-stage 4"
    assert fields_of(f"{STAGES} {grouped}")["microbatch_group_size_per_vp_stage"] == 4
    assert "microbatch_group_size_per_vp_stage" not in fields_of(STAGES)


def test_fields_of_layouts_and_of_special_layers_reach_the_core() -> None:
    config = config_of(SMALL)
    model: dict[str, Any] = {
        "variable_seq_lengths": True,
        "distribute_saved_activations": True,
        "recompute_modules": ["mlp"],
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "fp32_residual_connection": True,
    }
    parallel: dict[str, Any] = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 3,
        "context_parallel_size": 4,
        "expert_model_parallel_size": 5,
        "expert_tensor_parallel_size": 6,
        "virtual_pipeline_model_parallel_size": 7,
        "sequence_parallel": True,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    before = transformer_fields(config)
    changed = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        parallel=dataclasses.replace(config.parallel, **parallel),
    )
    fields = transformer_fields(changed)
    for name, value in (model | parallel).items():
        assert fields[name] == value != before[name], name


@pytest.mark.parametrize(
    ("words", "fused"),
    [
        ("", True),
        ("--disable-bias-linear", False),
        ("--openai-gelu", False),
        ("--no-bias-gelu-fusion", False),
        ("--swiglu --disable-bias-linear", True),
        ("--swiglu --no-bias-swiglu-fusion", False),
        ("--swiglu --no-bias-gelu-fusion", True),
    ],
)
def test_activations_are_fused_where_the_core_has_a_kernel(
    words: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_transformer_engine(monkeypatch)
    assert fields_of(f"{TE} {words}", "cuda")["bias_activation_fusion"] is fused
    assert fields_of(f"--transformer-impl torch {words}", "cuda")["bias_activation_fusion"] is False
    assert fields_of(words)["bias_activation_fusion"] is False


def test_fused_parts_of_the_layers_and_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with_transformer_engine(monkeypatch)
    dropout = "bias_dropout_fusion"
    torch_layers = "--transformer-impl torch"
    for words, device in (("", "cpu"), (torch_layers, "cuda"), (TE, "cuda")):
        assert fields_of(words, device)[dropout] is True
        assert fields_of(f"{words} --no-bias-dropout-fusion", device)[dropout] is False
        assert fields_of(words, device)["apply_rope_fusion"] is (TE in words)
    loss = "cross_entropy_loss_fusion"
    fusion = "--cross-entropy-loss-fusion"
    for words, device, fused, impl in (
        ("", "cuda", False, "chunked"),
        (fusion, "cuda", True, "eager"),
        (fusion, "cpu", False, "chunked"),
        (f"{fusion} --cross-entropy-impl chunked", "cuda", False, "chunked"),
        (f"{fusion} --cross-entropy-fusion-impl te", "cuda", True, "te"),
        ("--cross-entropy-impl eager", "cuda", False, "eager"),
        ("--cross-entropy-impl te", "cuda", True, "te"),
        (
            f"{fusion} --loss examples/custom_loss/focal.py:FocalLossConfig",
            "cuda",
            False,
            "chunked",
        ),
    ):
        config = config_of(f"{BF16} {TE} {words}", device=device)
        assert config.loss.cross_entropy_impl == impl, words
        assert transformer_fields(config)[loss] is fused, words


def test_fields_of_experts_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    with_transformer_engine(monkeypatch)
    grouped = f"{EXPERTS} --swiglu --moe-grouped-gemm"
    for words, device, ours, core in (
        (grouped, "cpu", False, False),
        (f"--transformer-impl torch {grouped}", "cuda", True, False),
        (f"{TE} {grouped}", "cuda", False, True),
    ):
        fields = fields_of(words, device)
        assert (fields["groups_experts"], fields["moe_grouped_gemm"]) == (ours, core)
    assert "bias_activation_fusion" in fields
    assert fields["bias_activation_fusion"] is True
    gelu = fields_of(f"{TE} --num-experts 4 --disable-bias-linear --geglu", "cuda")
    assert gelu["bias_activation_fusion"] is False
    two = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2"
    fields = fields_of(f"{EXPERTS} {two}")
    assert fields["moe_router_load_balancing_type"] == ["aux_loss", "seq_aux_loss"]
    assert fields["moe_aux_loss_coeff"] == [0.1, 0.2]
    fields = fields_of(f"{EXPERTS} --moe-aux-loss-coeff 0.3 --moe-layer-freq 2")
    assert (fields["moe_aux_loss_coeff"], fields["moe_layer_freq"]) == (0.3, 2)
    assert MoEConfig(num_experts=2, moe_layer_freq="2").expert_layers(4) == [True, False] * 2
    windowed = "--window-size 8 0 --window-attn-skip-freq [1,0,1,0] --mtp-num-layers 2"
    assert fields_of(windowed)["window_attn_skip_freq"] == [1, 0, 1, 0, 0, 0]
    every = fields_of("--window-size 8 0 --window-attn-skip-freq 2")["window_attn_skip_freq"]
    assert every == [1, 0, 1, 0]
    assert fields_of(f"{ROPE} --no-rope-freq 2")["no_rope_freq"] == [0, 1, 0, 1]


def rotary_of(words: str) -> Any:
    return config_of(f"{SMALL} {ROPE} {words}").section(PositionConfig).own_rotary()


def test_each_flag_of_rotary_positions_reaches_its_setting() -> None:
    assert rotary_of("") is None
    local = rotary_of("--rotary-base 500 --rope-local-base-freq 70 --window-size 8 0")
    assert (local.base, local.local_base, local.llama_factor) == (500, 70, None)
    llama = rotary_of(
        "--rope-local-base-freq 70 --window-size 8 0 --use-rope-scaling --rope-scaling-factor 4"
    )
    assert llama.llama_factor == 4
    factor = rotary_of(
        "--rope-local-base-freq 70 --window-size 8 0 --rotary-seq-len-interpolation-factor 3"
    )
    assert factor.interpolation_factor == 3
    assert (
        rotary_of("--rope-local-base-freq 70 --window-size 8 0 --rotary-percent 0.5").percent == 0.5
    )


def test_latent_attention_takes_the_base_and_the_share_of_rotary_positions() -> None:
    latent = "--multi-latent-attention --rope-type rope --rotary-percent 0.5 --rotary-base 500"
    fields = fields_of(f"{ROPE} {latent}")
    assert (fields["rotary_percent"], fields["rotary_base"]) == (0.5, 500)


def test_only_models_with_experts_need_an_engine_for_their_router() -> None:
    config = config_of(f"{SMALL} {EXPERTS}")
    for impl, experts, found in (
        ("transformer_engine", 4, {"--moe-router-fusion": "2.7.0"}),
        ("transformer_engine", None, {}),
        ("torch", 4, {}),
    ):
        model = dataclasses.replace(config.model, transformer_impl=impl)
        moe = MoEConfig(num_experts=experts, moe_router_fusion=True)
        assert moe.te_versions(dataclasses.replace(config, model=model)) == found


def test_each_flag_of_yarn_reaches_the_scaling() -> None:
    words = (
        "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 16 --yarn-beta-fast 20 --yarn-beta-slow 2 "
        "--yarn-mscale 0.5 --yarn-mscale-all-dim 0.25"
    )
    rounded, exact = (
        config_of(f"{SMALL} {words} {more}").section(PositionConfig).scaling()
        for more in ("", "--no-yarn-correction-range-round-to-int")
    )
    for scaling in (rounded, exact):
        assert (scaling.beta_fast, scaling.beta_slow) == (20, 2)
        # The quotient of 0.1 m ln(4) + 1 for the two weights m, 0.5 and 0.25.
        assert scaling.magnitude == pytest.approx(1.0693147 / 1.0346574)
    assert (rounded.truncate, exact.truncate) == (True, False)
