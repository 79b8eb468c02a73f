"""A chunk of a GPT is built with every flag of its own, and runs as its flags say."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.model import gpt
from megatron_ext.text.model.gpt import TransformerBlock, build_gpt_chunk
from tests.ranks import ParallelContext, ranks
from tests.training_runs import SMALL, config_of

POSITIONS = (
    "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 500 --use-rope-scaling "
    "--rope-scaling-factor 3 --rotary-seq-len-interpolation-factor 5 --max-position-embeddings 48"
)


def arguments_of(monkeypatch: pytest.MonkeyPatch, *words: str, **stage: Any) -> dict[str, Any]:
    """Return the arguments with which the model of a run's flags is built."""
    config = config_of([*SMALL, "--padded-vocab-size", "160", *words])
    given: dict[str, Any] = {}
    monkeypatch.setattr(gpt, "layer_spec", lambda *_, **more: ("layers", more["vp_stage"]))
    monkeypatch.setattr(gpt, "mtp_block_spec", lambda *_, **more: ("depths", more["vp_stage"]))

    def model(**arguments: Any) -> Any:
        given.update(arguments)
        return SimpleNamespace()

    core_config: Any = SimpleNamespace()
    context: Any = SimpleNamespace(pgs="groups")
    build_gpt_chunk(config, core_config, context, model_class=model, **stage)
    return given


def test_every_flag_of_positions_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = {"pre_process": True, "post_process": False, "vp_stage": 1}
    given = arguments_of(monkeypatch, *POSITIONS.split(), **stage)
    assert {name: given[name] for name in stage} == stage
    assert given["position_embedding_type"] == "rope"
    assert (given["rotary_percent"], given["rotary_base"]) == (0.5, 500)
    assert (given["rope_scaling"], given["rope_scaling_factor"]) == (True, 3)
    assert given["seq_len_interpolation_factor"] == 5
    assert (given["vocab_size"], given["max_sequence_length"]) == (160, 48)
    assert given["share_embeddings_and_output_weights"]
    assert given["transformer_layer_spec"] == ("layers", 1)
    assert (given["mtp_block_spec"], given["pg_collection"]) == (None, "groups")
    untied = arguments_of(
        monkeypatch, "--untie-embeddings-and-output-weights", pre_process=True, post_process=True
    )
    assert not untied["share_embeddings_and_output_weights"]
    assert (untied["rope_scaling"], untied["position_embedding_type"]) == (
        False,
        "learned_absolute",
    )


def test_depths_are_built_on_their_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt.core, "mtp_on_this_chunk", lambda _, vp_stage: vp_stage == 2)
    words = "--mtp-num-layers 1 --position-embedding-type rope".split()
    for chunk in range(3):
        given = arguments_of(
            monkeypatch, *words, pre_process=False, post_process=False, vp_stage=chunk
        )
        assert given["mtp_block_spec"] == (("depths", 2) if chunk == 2 else None)


def test_a_model_needs_a_vocabulary() -> None:
    config: Any = SimpleNamespace(
        model=SimpleNamespace(padded_vocab_size=None), section=lambda _: PositionConfig()
    )
    nothing: Any = None
    with pytest.raises(ConfigError, match="`--vocab-size` is not known: give a tokenizer or"):
        build_gpt_chunk(config, nothing, nothing, pre_process=True, post_process=True)


def built(context: ParallelContext, *words: str) -> Any:
    config = config_of([*SMALL, "--padded-vocab-size", "128", *words])
    torch.manual_seed(0)
    (chunk,) = build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)
    return chunk


def losses_of(chunk: Any) -> Tensor:
    """Return the losses of one sequence after a backward pass."""
    tokens = torch.arange(16)[None] % 7
    positions = torch.arange(16)[None]
    losses: Tensor = chunk(tokens, positions, None, labels=tokens.roll(-1, 1))
    losses.sum().backward()
    return losses.detach()


@ranks()
def test_a_shorter_last_group_of_layers_is_recomputed(context: ParallelContext) -> None:
    """Groups of 2 of 3 layers: the second has one layer."""
    words = "--num-layers 3 --recompute-granularity full --recompute-method uniform"
    plain = built(context, "--num-layers", "3")
    again = built(context, *words.split(), "--recompute-num-layers", "2")
    again.load_state_dict(plain.state_dict())
    torch.testing.assert_close(losses_of(again), losses_of(plain))
    for one, two in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    layers = again.decoder.layers
    block: Any = SimpleNamespace(layers=layers)
    assert TransformerBlock._get_layer(block, 2) is layers[2]
    past = TransformerBlock._get_layer(block, 3)
    assert past.layer_number == 3
    assert past(hidden_states="h", context="c", attention_mask=None) == ("h", "c")


@ranks()
def test_depths_are_recomputed_one_by_one_and_marked_as_embeddings(
    context: ParallelContext,
) -> None:
    """A stage of depths without the first layers holds a copy of the embedding."""
    words = "--mtp-num-layers 2 --position-embedding-type rope --recompute-granularity full "
    words += "--recompute-method uniform --recompute-num-layers 2 --padded-vocab-size 128 "
    words += "--untie-embeddings-and-output-weights"
    config = config_of([*SMALL, *words.split()])
    transformer_config = build_transformer_config(config)
    transformer_config.distribute_saved_activations = True
    stage = {"pre_process": False, "post_process": True}
    chunk: Any = build_gpt_chunk(config, transformer_config, context, **stage)
    assert [depth.config.recompute_num_layers for depth in chunk.mtp.layers] == [1, 1]
    assert not any(depth.config.distribute_saved_activations for depth in chunk.mtp.layers)
    assert chunk.config.recompute_num_layers == 2
    assert chunk.config.distribute_saved_activations
    assert chunk.embedding.word_embeddings.weight.is_embedding_or_output_parameter


@pytest.mark.parametrize(
    ("post_process", "mtp_process", "entering", "leaving"),
    [
        (True, False, [torch.bfloat16], torch.bfloat16),
        (False, True, [torch.bfloat16], torch.float32),
        (True, True, [torch.bfloat16] * 2, torch.bfloat16),
        (False, False, [], torch.float32),
    ],
)
def test_a_residual_stream_in_float32_ends_before_depths_and_head(
    post_process: bool, mtp_process: bool, entering: list[torch.dtype], leaving: torch.dtype
) -> None:
    """A stage with depths of multi-token prediction but no head ends it too."""
    seen: list[torch.dtype] = []

    def enter(hidden: Tensor) -> Tensor:
        seen.append(hidden.dtype)
        return hidden

    stage: Any = SimpleNamespace(
        post_process=post_process,
        mtp_process=mtp_process,
        config=SimpleNamespace(params_dtype=torch.bfloat16, pipeline_dtype=torch.float32),
        embedding=None,
        _preprocess=lambda **_: (None,) * 6,
        decoder=lambda **_: torch.ones(4, 1, 2),
        _has_depths=lambda _: mtp_process,
        mtp=lambda hidden_states, **_: enter(hidden_states),
        before_head=enter,
        logits_divisor=1.0,
    )
    ids = torch.zeros(1, 4, dtype=torch.int64)
    found = gpt.TextModel.forward(stage, ids, ids, None, hidden_states_only=True)
    assert (seen, found.dtype) == (entering, leaving)


def test_a_stage_of_depths_alone_runs_them_while_it_trains() -> None:
    model: Any = SimpleNamespace(
        config=SimpleNamespace(mtp_standalone=True), mtp_process=True, training=True
    )
    has = gpt.TextModel._has_depths
    targets: Any = object()
    assert has(model, None)
    model.training = False
    assert not has(model, None)
    model.config.mtp_standalone = False
    assert [has(model, given) for given in (None, targets)] == [False, True]
    model.mtp_process = False
    assert not has(model, targets)
