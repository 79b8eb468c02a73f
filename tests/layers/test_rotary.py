"""Frequencies of rotary positions, against those that transformers computes, to equality."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from megatron_ext.config.layers import layers_without_rope, windowed_layers
from megatron_ext.layers.rope_scaling import (
    OPTIONAL,
    REQUIRED,
    RopeScaling,
    RotarySettings,
    read_scaling,
    written,
)
from megatron_ext.layers.rotary import RotaryEmbedding, inverse_frequencies
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.layers.transformer_layer import LayerRotary
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.positions import PositionConfig
from tests.ranks import ranks
from tests.training_runs import SMALL, config_of

transformers = pytest.importorskip("transformers")
ROPE: dict[str, Any] = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS

D, POSITIONS = 24, 4096
DIVISORS = {name: [1 + 0.3 * i * k for i in range(D // 4)]
            for k, name in enumerate(("short_factor", "long_factor"), start=1)}  # fmt: skip
ORIGINAL = {"original_max_position_embeddings": 512}
KINDS: list[tuple[dict[str, Any], float, float]] = [
    ({"rope_type": "linear", "factor": 3.7}, 10000.0, 1.0),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}, 500000.0, 1.0),
    ({"rope_type": "llama3", "factor": 32.5, "low_freq_factor": 1.5, "high_freq_factor": 2.5,
      **ORIGINAL}, 12345.5, 0.75),
    ({"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 10000.0, 1.0),
    ({"rope_type": "yarn", "factor": None, **ORIGINAL}, 10000.0, 1.0),
    ({"rope_type": "yarn", "factor": 40.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
      **ORIGINAL}, 150000.0, 0.5),
    # A ramp that would end before the first channel has no width.
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 90.0, "beta_slow": 82.0, **ORIGINAL},
     10000.0, 1.0),
    ({"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, **ORIGINAL},
     10000.0, 1.0),
    ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, **ORIGINAL}, 10000.0, 1.0),
    ({"rope_type": "longrope", "factor": 8.0, **DIVISORS, **ORIGINAL}, 10000.0, 0.5),
    ({"rope_type": "longrope", **DIVISORS, **ORIGINAL}, 10000.0, 0.5),
    ({"rope_type": "longrope", "attention_factor": 1.5, **DIVISORS, **ORIGINAL}, 10000.0, 0.5),
    ({"rope_type": "proportional", "factor": 2.0}, 1e6, 0.25),
]  # fmt: skip


@pytest.mark.parametrize(("values", "base", "percent"), KINDS)
@pytest.mark.parametrize("length", [300, 512, 600])
def test_every_kind_has_the_frequencies_of_transformers(
    values: dict[str, Any], base: float, percent: float, length: int
) -> None:
    parameters = {**values, "rope_theta": base, "partial_rotary_factor": percent}
    config = transformers.PretrainedConfig(
        head_dim=D, hidden_size=4 * D, num_attention_heads=4, max_position_embeddings=POSITIONS
    )
    config.rope_parameters = parameters
    config.standardize_rope_params = lambda: None
    kind = values["rope_type"]
    want, magnitude = ROPE[kind](config, torch.device("cpu"), seq_len=length)
    scaling = read_scaling(json.dumps(values), POSITIONS)
    assert scaling is not None
    assert torch.equal(inverse_frequencies(D, percent, base, scaling, length), want)
    assert scaling.magnitude == magnitude


def _with_defaults() -> Iterator[dict[str, Any]]:
    """Yield each kind with each entry that it takes, and all of them, at the default value."""
    usual = RopeScaling("linear")
    defaults = {f.name: getattr(usual, f.name) for f in fields(usual)}
    for given, _, _ in KINDS:
        kind = given["rope_type"]
        entries = [*REQUIRED[kind], *OPTIONAL.get(kind, ())]
        changes = {name: defaults[name] for name in entries if defaults[name]}
        every = {k: v for k, v in given.items() if v is not None} | changes
        yield from ({**given, name: value} for name, value in changes.items())
        yield every


@pytest.mark.parametrize("values", list(_with_defaults()), ids=json.dumps)
def test_a_scaling_that_is_written_is_read_as_the_same(values: dict[str, Any]) -> None:
    """Also in a run with other positions, and with the frequencies that transformers computes."""
    scaling = read_scaling(json.dumps(values), POSITIONS)
    assert scaling is not None
    again = read_scaling(written(scaling), 2 * POSITIONS)
    assert again == scaling
    config = transformers.PretrainedConfig(
        head_dim=D, hidden_size=4 * D, num_attention_heads=4, max_position_embeddings=POSITIONS
    )
    config.rope_parameters = {**values, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config.standardize_rope_params = lambda: None
    want, magnitude = ROPE[values["rope_type"]](config, torch.device("cpu"), seq_len=300)
    assert torch.equal(inverse_frequencies(D, 0.5, 1e4, again, 300), want)
    assert again.magnitude == magnitude


def test_every_kind_of_transformers_is_known_or_refused_in_a_sentence() -> None:
    known = {values["rope_type"] for values, _, _ in KINDS}
    assert ROPE.keys() - known == {"dynamic"}
    with pytest.raises(ValueError, match="is dynamic"):
        read_scaling('{"rope_type": "dynamic", "factor": 2}', POSITIONS)


LLAMA = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 2,
    "high_freq_factor": 4,
    **ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, **ORIGINAL}
LONG = {"rope_type": "longrope", **DIVISORS, **ORIGINAL}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ([1], "must be a JSON object; write "),
        ({"rope_type": "default", "factor": 2}, "has the rope_type default, which must be one of"),
        ({"rope_type": "linear"}, "lacks factor, but linear takes factor; mend it"),
        ({"rope_type": "linear", "factor": 2, "mscale": 1}, "has mscale, but linear takes factor"),
        ({"rope_type": "linear", "factor": True}, "has factor True, which must be a positive num"),
        ({"rope_type": "linear", "factor": "2"}, "has factor '2', which must be a positive number"),
        ({"rope_type": "linear", "factor": 0}, "has factor 0, which must be a positive number"),
        ('{"rope_type": "linear", "factor": 1e999}', "must be a JSON object; write "),
        ({**LLAMA, "high_freq_factor": 2}, "has a high_freq_factor that is not above its low_freq"),
        ({**LONG, "short_factor": []}, r"has short_factor \[\], which must be a list of numbers"),
        ({**LONG, "long_factor": 2}, "has long_factor 2, which must be a list of numbers"),
        ({**LONG, "long_factor": [1, -1]}, "has long_factor -1, which must be a positive number"),
        ({"rope_type": "yarn", "truncate": 1, **ORIGINAL}, "has truncate 1, which must be true"),
        (
            {"rope_type": "yarn", "mscale": -1, **ORIGINAL},
            "has mscale -1, which must be a pos",
        ),
    ],
)
def test_a_scaling_that_cannot_be_is_told_by_its_rule(values: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        read_scaling(values if isinstance(values, str) else json.dumps(values), POSITIONS)


def test_what_is_null_or_0_may_be_left_out() -> None:
    for text in (None, '{"rope_type": "default"}', '{"type": "default", "factor": null}', "{}"):
        assert read_scaling(text, POSITIONS) is None
    both = read_scaling(json.dumps({**YARN, "mscale": 0}), POSITIONS)
    neither = read_scaling(json.dumps({**YARN, "mscale": None}), POSITIONS)
    assert both is not None and neither is not None
    assert both.magnitude == neither.magnitude
    higher = read_scaling(json.dumps({**LLAMA, "high_freq_factor": 2.5}), POSITIONS)
    assert higher is not None and higher.high_freq_factor == 2.5


def embedding(context: ParallelContext, **changes: Any) -> RotaryEmbedding:
    """Return the angles' module of a model that rotates half of 16 channels."""
    words = "--position-embedding-type rope --rope-local-base-freq 100 --window-size 4 0"
    core = build_transformer_config(config_of([*SMALL, *words.split(), "--kv-channels", "16"]))
    core.rotary_interleaved = changes.pop("interleaved", False)
    usual: dict[str, Any] = dict(
        percent=0.5, base=1e4, local_base=None, interpolation_factor=None, llama_factor=None,
        scaling=None,
    )  # fmt: skip
    return RotaryEmbedding(RotarySettings(**{**usual, **changes}), core, context.pgs.cp)


@ranks()
def test_angles_are_those_of_the_positions_asked_for(context: ParallelContext) -> None:
    """Angles of some positions are a part of those of all, for each kind of settings."""
    linear = read_scaling('{"rope_type": "linear", "factor": 4}', POSITIONS)
    kinds: list[dict[str, Any]] = [
        {}, {"scaling": linear}, {"scaling": linear, "local_base": 100.0},
        {"interpolation_factor": 4, "local_base": 100.0}, {"llama_factor": 8.0, "local_base": 10.0},
    ]  # fmt: skip
    for kind in kinds:
        made = embedding(context, **kind)
        whole = made.get_emb(9)
        assert torch.equal(made.get_emb(4, offset=5), whole[5:])
        neighbours = embedding(context, **kind, interleaved=True).get_emb(9)
        assert torch.equal(neighbours[..., ::2], whole[..., :4])
        assert torch.equal(neighbours[..., 1::2], whole[..., 4:])
    # Positions are divided with --rotary-seq-len-interpolation-factor, but not those of a window.
    plain = embedding(context, local_base=100.0).get_emb(9)
    divided = embedding(context, local_base=100.0, interpolation_factor=4).get_emb(9)
    assert torch.equal(divided[:, :, 0], plain[:, :, 0] / 4)
    assert torch.equal(divided[:, :, 1], plain[:, :, 1])
    factors = [
        embedding(context, base=1e6, llama_factor=x).get_emb(9)[1, 0, 0, 3] for x in (1.0, 8.0)
    ]
    assert factors[0] == pytest.approx(8 * float(factors[1]))


@ranks()
def test_longrope_counts_all_positions_up_to_the_last(context: ParallelContext) -> None:
    divisors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    values = {"rope_type": "longrope", **divisors, "original_max_position_embeddings": 8}
    made = embedding(context, scaling=read_scaling(json.dumps(values), POSITIONS))
    assert made.short_length == 8 and embedding(context).short_length is None
    short, long = (made.get_emb(4, offset=offset) for offset in (4, 5))
    assert torch.equal(made.get_emb(8)[4:], short)
    assert torch.equal(2 * long[:3], short[1:])


def test_yarn_by_flags_has_megatron_cores_magnitude() -> None:
    words = (
        "--position-embedding-type yarn --yarn-rotary-scaling-factor 8 --yarn-mscale 2 "
        "--yarn-mscale-all-dim 0 --yarn-original-max-position-embeddings 16 --yarn-beta-fast 20"
    )
    positions = config_of([*SMALL, *words.split()]).section(PositionConfig)
    assert positions.position_embedding_type == "rope"
    scaling = read_scaling(positions.rope_scaling, 32)
    assert scaling is not None and (scaling.factor, scaling.beta_fast) == (8, 20)
    assert scaling.magnitude == pytest.approx(1 + 0.2 * torch.log(torch.tensor(8.0)).item())


@ranks()
def test_layers_with_a_window_have_angles_of_their_own(context: ParallelContext) -> None:
    words = (
        "--position-embedding-type rope --rotary-base 1000000 --rope-local-base-freq 10000 "
        "--window-size 4 0 --window-attn-skip-freq [1,0] --no-rope-freq [0,1] --rotary-percent 0.5"
    )
    config = config_of([*SMALL, *words.split()])
    core = build_transformer_config(config)
    settings = config.section(PositionConfig).own_rotary()
    assert settings is not None
    angles = RotaryEmbedding(settings, core, context.pgs.cp)(9)
    assert angles.shape == (9, 1, 2, 4)
    for index, base in enumerate((1e6, 1e4)):
        once = torch.outer(torch.arange(9.0), 1.0 / base ** (torch.arange(0, 4, 2) / 4))
        assert torch.equal(angles[:, 0, index], torch.cat((once, once), -1))
    found = [LayerRotary.of(core, number, windowed=number == 1) for number in (1, 2, 3)]
    assert [rotary.index for rotary in found] == [1, None, None]
    # The magnitude belongs to the scaling, which angles of a window do not have.
    core.rotary_magnitude, core.no_rope_freq = 1.3, None
    found = [LayerRotary.of(core, 1, windowed=windowed) for windowed in (False, True)]
    assert found == [LayerRotary(0, 1.3), LayerRotary(1, 1.0)]
    core.has_local_rotary = False
    assert LayerRotary.of(core, 1, windowed=True) == LayerRotary(0, 1.3)


def test_lists_and_numbers_say_which_layers() -> None:
    assert windowed_layers("2", 4) == [True, False, True, False]
    assert windowed_layers("([1]*3+[0])", 4) == [True, True, True, False]
    assert layers_without_rope("4", 4) == [False, False, False, True]
    assert layers_without_rope(None, 2) == [False, False]
