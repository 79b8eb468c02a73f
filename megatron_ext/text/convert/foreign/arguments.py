"""Translates the flags of Megatron-LM's and DeepSpeed's checkpoints into a configuration.

Our fields have the names of Megatron-LM's arguments, so most values are copied.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import flags_of
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.entries import list_flag
from megatron_ext.text.convert.family import SECTIONS

_RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
"""Names of arguments in some releases of Megatron-LM -> our names."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_hybrid_model": (False,),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "spec": ([],),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "experimental_attention_variant": (),
    "linear_attention_freq": (),
    "qk_l2_norm": (False,),
    "mtp_use_repeated_layer": (False,),
    "mtp_hybrid_override_pattern": (),
    "use_mup": (False,),
    "bert_binary_head": (True, False),
    "num_tokentypes": (0,),
    "mlp_type": ("standard",),
    "attention_head_type": ("multihead",),
    "use_kronecker": (False,),
}
"""Arguments that change what a model computes and that are not flags here, each with the values,
besides None, that change nothing."""
_OF_LISTS = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq")
"""Fields that are texts such as ``[1,0]`` here, but may be lists in a checkpoint."""
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def sections_of(arguments: Namespace, place: Path) -> dict[str, dict[str, Any]]:
    """Return the values of our fields that describe the model of a run, by section and field.

    Args:
        arguments: the run's flags, as the checkpoint ``place`` stores them.

    Raises:
        CheckpointError: a flag changes the model in a way that no flag here does.
    """
    given = {_RENAMED.get(name, name): value for name, value in vars(arguments).items()}
    for name, neutral in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise CheckpointError(
                f"{place} was saved with `{name}` {value!r:.60}, which changes the model and which "
                "no flag here expresses; give a checkpoint of a plain GPT."
            )
    given |= _from_older(given)
    given["normalization"] = _NORMS.get(str(given.get("normalization")), given.get("normalization"))
    has_experts = given.get("num_experts") not in (None, 0, [1], 1)
    is_latent = bool(given.get("multi_latent_attention"))
    sections: dict[str, dict[str, Any]] = {}
    for section, kind in SECTIONS.items():
        if (section == "moe" and not has_experts) or (
            section == "latent_attention" and not is_latent
        ):
            sections[section] = {}
            continue
        fields = {flag.field for flag in flags_of(section, kind)} & given.keys() - _OF_A_RUN
        values = {name: _plain(name, given[name], place) for name in fields}
        sections[section] = {name: value for name, value in values.items() if value is not None}
    return sections


_OF_A_RUN = set(
    "transformer_impl attention_backend recompute_granularity recompute_method recompute_modules "
    "recompute_num_layers distribute_saved_activations gradient_accumulation_fusion use_cpu_"
    "initialization perform_initialization cross_entropy_loss_fusion cross_entropy_fusion_impl "
    "moe_token_dispatcher_type moe_flex_dispatcher_backend moe_shared_expert_overlap "
    "moe_layer_recompute moe_grouped_gemm moe_permute_fusion moe_router_fusion apply_rope_fusion "
    "moe_pad_expert_input_to_capacity masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion "
    "bias_dropout_fusion persist_layer_norm deterministic_dropout moe_router_force_load_balancing "
    "num_microbatches_with_partial_activation_checkpoints".split()
)
"""Fields that say how a run computed, not what: a new run chooses them."""


def _from_older(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of today's arguments that older releases say in other words."""
    values: dict[str, Any] = {}
    if "add_bias_linear" not in given and "disable_bias_linear" in given:
        values["add_bias_linear"] = not given["disable_bias_linear"]
    if given.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    elif given.get("position_embedding_type") is None:
        has_positions = given.get("add_position_embedding", True)
        values["position_embedding_type"] = "learned_absolute" if has_positions else "none"
    groups = given.get("num_query_groups") or given.get("num_key_value_heads")
    if groups and groups != given.get("num_attention_heads"):
        values |= {"group_query_attention": True, "num_query_groups": groups}
    elif not given.get("group_query_attention"):
        values["num_query_groups"] = None
    return values


def _plain(name: str, value: Any, place: Path) -> Any:
    """Return an argument's value in the form that our field has.

    Raise a CheckpointError for an object that has no plain form.
    """
    if isinstance(value, Enum):
        value = value.name
    parts = value if isinstance(value, (list, tuple)) else [value]
    if not all(part is None or isinstance(part, (str, int, float)) for part in parts):
        raise CheckpointError(
            f"{place} was saved with a `{name}` that is {type(value).__name__} of unknown values; "
            "give a checkpoint whose flags are numbers and texts."
        )
    if isinstance(value, (list, tuple)):
        return list_flag(int(part) for part in value) if name in _OF_LISTS else list(value)
    if name in _OF_LISTS and value is not None:
        return str(value)
    wants_list = name in ("moe_aux_loss_coeff", "moe_router_load_balancing_type")
    return [value] if wants_list and value is not None else value


def tokenizer_of(arguments: Namespace) -> tuple[list[str], list[str]]:
    """Return the flags of the run's tokenizer if its files are here, and notes if they are not."""
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")
    given = {name: getattr(arguments, name, None) for name in names}
    values = {name: str(x) for name, x in given.items() if isinstance(x, (str, int))}
    kind = values.get("tokenizer_type")
    missing = [x for name, x in values.items() if name in _FILES and not Path(x).exists()]
    if kind is None or missing:
        of = f" ({kind} {missing[0]})" if missing else ""
        note = f"the tokenizer of the run{of} is not here; give `--tokenizer-type` and its files"
        return [], [note]
    if kind not in ("NullTokenizer", "TikTokenizer"):
        values.pop("vocab_size", None)
    flags = {name: f"--{name.replace('_', '-')}" for name in values}
    return [word for name, value in values.items() for word in (flags[name], value)], []


_FILES = ("tokenizer_model", "vocab_file", "merge_file")
