"""Delayed scales against a hand computation."""

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.config.precision import Fp8Config
from megatron_ext.errors import ConfigError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.fp8.attach import attach_fp8
from megatron_ext.layers.fp8.linear import AmaxHistories
from megatron_ext.layers.fp8.scaling import DelayedScaling, ExpertParts, Parts, Role
from megatron_ext.layers.linear import ColumnParallelLinear
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.ranks import ParallelContext, ranks
from tests.training_runs import TINY, config_of, mock_data


def scaling(context: ParallelContext, **flags: object) -> DelayedScaling:
    values: dict[str, object] = {"fp8_format": "hybrid", "fp8_amax_history_len": 3, **flags}
    parts = Parts(context.pgs, cuts_input=False, cuts_sequence=False)
    return DelayedScaling(Fp8Config(**values), parts)  # type: ignore[arg-type]


def of_size(amax: float) -> Tensor:
    return torch.tensor([[0.5, -1.0], [0.25, 0.0]]) * amax


def step(histories: AmaxHistories, layer: DelayedScaling, *sizes: float) -> list[float]:
    """Run a step whose micro-batches have some sizes; return the scale that each of them had."""
    found = [float(layer.rows(of_size(size), Role.INPUT).scale) for size in sizes]
    histories.advance()
    return found


@ranks()
def test_the_most_recent_step_sets_the_scale(context: ParallelContext) -> None:
    layer = scaling(context)
    histories = AmaxHistories([layer])
    assert step(histories, layer, 2.0, 8.0) == [224.0, 56.0]  # of the tensors themselves
    assert step(histories, layer, 16.0, 1.0) == [56.0, 56.0]
    assert step(histories, layer, 4.0) == [28.0]
    assert layer.amax_history[:, Role.INPUT].tolist() == [4.0, 16.0, 8.0]
    assert step(histories, layer, 1.0) == [112.0]
    assert layer.amax_history[:, Role.INPUT].tolist() == [1.0, 4.0, 16.0]


@ranks()
def test_max_over_the_window_with_a_margin(context: ParallelContext) -> None:
    layer = scaling(context, fp8_amax_compute_algo="max", fp8_margin=1)
    histories = AmaxHistories([layer])
    for size in (8.0, 2.0, 2.0):
        step(histories, layer, size)
    assert float(layer.scale[Role.INPUT]) == 448 / 8 / 2
    step(histories, layer, 2.0)  # 8 has left the window
    assert float(layer.scale[Role.INPUT]) == 448 / 2 / 2


@ranks()
def test_each_format_has_its_limit(context: ParallelContext) -> None:
    for name, limit in (("hybrid", 57344.0), ("e4m3", 448.0)):
        layer = scaling(context, fp8_format=name)
        layer.rows(of_size(2.0), Role.GRADIENT)
        AmaxHistories([layer]).advance()
        assert float(layer.scale[Role.GRADIENT]) == limit / 2


@ranks()
def test_values_beyond_a_delayed_scale_are_cut_off(context: ParallelContext) -> None:
    layer = scaling(context)
    layer.eval()  # It leaves no trace.
    layer.rows(of_size(8.0), Role.INPUT)
    assert not layer.amax.any()
    layer.train()
    step(AmaxHistories([layer]), layer, 1.0)
    given = layer.rows(of_size(4.0), Role.INPUT).dequantized()
    assert given.tolist() == [[1.0, -1.0], [1.0, 0.0]]


@ranks()
def test_zeros_and_what_is_not_finite_leave_the_scale(context: ParallelContext) -> None:
    layer = scaling(context)
    histories = AmaxHistories([layer])
    step(histories, layer, 8.0)
    for size in (0.0, torch.inf, torch.nan):
        quantized = layer.rows(of_size(size), Role.INPUT)
        assert size == 0.0 or quantized.dequantized().isnan().all()
        histories.advance()
        assert layer.amax_history[:, Role.INPUT].tolist() == [8.0, 0.0, 0.0]
        assert float(layer.scale[Role.INPUT]) == 56.0


@pytest.mark.parametrize("first", [0.0, torch.inf])
@ranks()
def test_without_a_history_a_tensor_has_its_scale(context: ParallelContext, first: float) -> None:
    """Gates of zeros, or a skipped first step, must not lose the gradients of the next."""
    layer = scaling(context)
    histories = AmaxHistories([layer])
    for size, want in ((first, None), (2.0**-30, 57344 * 2.0**30), (2.0**-20, 57344 * 2.0**30)):
        layer.rows(of_size(1.0), Role.INPUT)
        layer.rows(of_size(1.0), Role.WEIGHT)
        found = layer.rows(of_size(size), Role.GRADIENT)
        assert want is None or float(found.scale) == want
        assert not layer.has_history
        histories.advance()
    assert layer.has_history


@ranks(tp=2, dp=2, timeout=60)
def test_the_largest_of_all_ranks_counts(context: ParallelContext) -> None:
    layer, experts = scaling(context), scaling(context)
    experts.parts = ExpertParts(context.pgs, cuts_input=False)
    experts.rows(of_size(float(context.rank + 11)), Role.INPUT)
    histories = AmaxHistories([layer, experts])
    step(histories, layer, float(context.rank + 1))
    assert float(layer.amax_history[0, Role.INPUT]) == 4.0
    assert float(experts.amax_history[0, Role.INPUT]) == 14.0


@ranks()
def test_state_stays_in_float32_and_survives(context: ParallelContext) -> None:
    layer, other = scaling(context), scaling(context)
    step(AmaxHistories([layer]), layer, 1.0 + 2.0**-20)
    want = layer.scale.clone()
    layer.bfloat16()
    assert layer.amax_history.dtype == layer.scale.dtype == torch.float32
    assert torch.equal(layer.scale, want)
    assert list(layer.state_dict()) == ["amax_history"]
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.scale, want)
    assert getattr(layer.amax_history, "new_branch", False)


@pytest.mark.parametrize("length", [1, 4])
@ranks()
def test_a_history_forgets_after_its_length(context: ParallelContext, length: int) -> None:
    layer = scaling(context, fp8_amax_history_len=length, fp8_amax_compute_algo="max")
    histories = AmaxHistories([layer])
    for size in (64.0, 4.0, 2.0, 1.0):
        step(histories, layer, size)
    assert float(layer.scale[Role.INPUT]) == 448 / (64.0 if length == 4 else 1.0)


HYBRID = Fp8Config(fp8_format="hybrid")
ON_A_CPU: dict[str, Any] = {"num_layers": None, "on_gpu": False, "varies": False}


def chunk_of(flags: str, context: ParallelContext) -> torch.nn.Module:
    words = [*TINY, *mock_data(), *"--bf16 --ffn-hidden-size 192 --train-iters 1".split()]
    words += f"--padded-vocab-size 2048 {flags}".split()
    config = config_of(words, ranks=context.layout.world_size)
    return build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)[0]


@ranks()
def test_the_linear_layers_of_the_decoder_are_attached(context: ParallelContext) -> None:
    chunk = chunk_of("--fp8-format hybrid --mtp-num-layers 1", context)
    found = {name for name, module in chunk.named_modules() if name.endswith(".fp8")}
    kinds = "self_attention.linear_qkv self_attention.linear_proj mlp.linear_fc1 mlp.linear_fc2"
    assert found == {f"decoder.layers.{n}.{kind}.fp8" for n in range(4) for kind in kinds.split()}
    assert any(name.startswith("mtp.") for name, _ in chunk.named_modules())


@ranks()
def test_a_model_without_such_layers_and_an_old_gpu_are_refused(
    context: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(16, 16)])})
    with pytest.raises(ConfigError, match="of which this model has none; leave it out"):
        attach_fp8([foreign], HYBRID, context.pgs, **ON_A_CPU)
    # A stage may hold the ends of a model only.
    attach_fp8([torch.nn.Linear(16, 16)], HYBRID, context.pgs, **ON_A_CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"capability 8\.9 or above, but this one has 8\.0"):
        attach_fp8([], Fp8Config(), context.pgs, num_layers=4, on_gpu=True, varies=False)


@ranks()
def test_sides_that_no_product_can_have_are_refused(context: ParallelContext) -> None:
    transformer_config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    for sides in ((16, 24), (24, 16)):
        layer = ColumnParallelLinear(
            *sides,
            config=transformer_config,
            init_method=torch.nn.init.zeros_,
            tp_group=context.pgs.tp,
        )
        model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([layer])})
        with pytest.raises(ConfigError, match=r"those of `blocks.0` are \(.*24.*\); change its"):
            attach_fp8([model], HYBRID, context.pgs, **ON_A_CPU)


@ranks(tp=2, dp=2, ep=2, etp=1)
def test_experts_are_completed_over_ranks_that_hold_them(context: ParallelContext) -> None:
    """Experts have another tensor-parallel group and other replicas."""
    pgs = context.pgs
    parts = ExpertParts(pgs, cuts_input=True, varies=True)
    assert [parts.of_tensor(role) for role in Role] == [None] * 3
    assert parts.of_step() == (pgs.expt_tp, pgs.expt_dp)
    whole = Parts(pgs, cuts_input=True)
    assert whole.of_tensor(Role.WEIGHT) is pgs.tp and whole.of_step() == (pgs.tp_dp_cp,)


@ranks()
def test_layers_of_experts_vary_in_tokens(context: ParallelContext) -> None:
    flags = "--fp8-format hybrid --num-experts 2 --moe-shared-expert-intermediate-size 64"
    chunk = chunk_of(flags, context)
    kinds = {name: m.fp8.parts for name, m in chunk.named_modules() if getattr(m, "fp8", None)}
    experts = {name for name, parts in kinds.items() if isinstance(parts, ExpertParts)}
    assert experts == {name for name in kinds if ".local_experts." in name}
    assert len(experts) == 4 * 2 * 2 and any(".shared_experts." in name for name in kinds)
    assert all(parts.varies == (name in experts) for name, parts in kinds.items())


def groups_of(context: ParallelContext, words: str) -> dict[str, list[list[str | None]]]:
    """Return the groups of each kind of 8-bit layer: for tensors, rows and columns, by role."""
    pgs = context.pgs
    names = {id(pgs.tp): "tp", id(pgs.tp_cp): "tp_cp", id(pgs.cp): "cp", id(pgs.expt_tp): "etp"}

    def name(group: Any) -> str | None:
        return None if group is None else names[id(group)]

    chunk = chunk_of(f"--fp8-format hybrid {words}", context)
    return {
        layer.rpartition(".")[2]: [
            [name(of(role)) for role in Role]
            for of in (
                module.fp8.parts.of_tensor, module.fp8.parts.of_rows, module.fp8.parts.of_columns,
            )
        ]
        for layer, module in chunk.named_modules()
        if getattr(module, "fp8", None) is not None
    }  # fmt: skip


COLUMN = [["{tokens}", "tp", "tp_cp"], [None, None, "tp"], ["{tokens}", "tp", "cp"]]
ROW = [["tp_cp", "tp", "cp"], ["tp", "tp", None], ["cp", None, "cp"]]
LATENT = (
    "--multi-latent-attention --no-group-query-attention --qk-layernorm --q-lora-rank 32 "
    "--kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16"
)


@pytest.mark.parametrize("cut", [False, True])
@ranks(tp=2, cp=2)
def test_scales_are_agreed_on_by_the_ranks_that_hold_parts(
    context: ParallelContext, cut: bool
) -> None:
    """Check input, weight and gradient; ``cut`` cuts the sequence over tensor-parallel ranks."""
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    words = f"{layout} --sequence-parallel" if cut else layout
    tokens = "tp_cp" if cut else "cp"
    column = [[tokens if x == "{tokens}" else x for x in groups] for groups in COLUMN]
    whole = [[tokens, None, tokens], [None] * 3, [tokens, None, tokens]]
    mlp = {"linear_fc1": column, "linear_proj": ROW, "linear_fc2": ROW}
    assert groups_of(context, words) == {"linear_qkv": column, **mlp}
    ups, downs = ("linear_q_up_proj", "linear_kv_up_proj"), ("linear_q_down_proj",)
    found = groups_of(context, f"{words} {LATENT}")
    want = {**dict.fromkeys(ups, column), **dict.fromkeys(downs, whole), **mlp}
    want["linear_kv_down_proj"] = whole
    assert found == want


@ranks(tp=2, dp=2, ep=2, etp=2)
def test_scales_of_cut_experts_are_agreed_on_by_their_parts(context: ParallelContext) -> None:
    """The tokens of an expert are those of this rank, whatever the others have."""
    words = (
        "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2"
    )
    found = groups_of(context, words)
    etp = "tp" if context.pgs.expt_tp is context.pgs.tp else "etp"
    assert found["linear_fc1"] == [[None, etp, etp], [None, None, etp], [None, etp, None]]
    assert found["linear_fc2"] == [[etp, etp, None], [etp, etp, None], [None, None, None]]


@ranks()
def test_first_and_last_layers_stay_in_bf16(context: ParallelContext) -> None:
    flags = (
        "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 2"
    )
    chunk = chunk_of(flags, context)
    found = {name.split(".")[2] for name, _ in chunk.named_modules() if name.endswith(".fp8")}
    assert found == {"1"}


@ranks(tp=2)
def test_all_ranks_see_what_is_not_finite_on_one(context: ParallelContext) -> None:
    for bad in (torch.nan, torch.inf):
        layer = scaling(context)
        x = of_size(bad if context.tp_rank == 1 else 2.0)
        assert layer.rows(x, Role.WEIGHT).scale.isnan()
        AmaxHistories([layer]).advance()
        assert not layer.amax_history.any()


@ranks()
def test_a_loaded_history_counts_where_all_tensors_have_one(context: ParallelContext) -> None:
    """A tensor without one is scaled by its own largest magnitude."""
    for roles, whole in (((Role.INPUT,), False), ((Role.INPUT, Role.WEIGHT), False), (Role, True)):
        layer, other = scaling(context), scaling(context)
        for role in roles:
            layer.rows(of_size(2.0), role)
        AmaxHistories([layer]).advance()
        other.load_state_dict(layer.state_dict())
        assert other.has_history is whole
        assert torch.equal(other.scale, layer.scale)
        assert torch.equal(other.inverse, 1 / other.scale)
        want = 57344 / 2 if whole else 57344 / 8
        assert float(other.rows(of_size(8.0), Role.GRADIENT).scale) == want


@ranks()
def test_marks_and_answers_are_those_of_the_state_they_belong_to(context: ParallelContext) -> None:
    """A step that is computed again starts from the marks of before; a load drops an answer."""
    layer = scaling(context)
    histories = AmaxHistories([layer])
    for role in Role:
        layer.rows(of_size(2.0), role)
    histories.advance()  # asks whether all have histories now
    before = histories.marks()
    assert before[1] == [False]
    histories.advance()
    assert layer.has_history and histories.marks() == (None, [True])
    histories.set_marks(before)
    assert not layer.has_history and histories.marks() == before
    histories.forget()
    histories.advance()
    assert not layer.has_history
