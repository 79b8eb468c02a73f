"""Tiny random models of transformers, and checks of our model with their weights."""

import copy
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.config.run import RunConfig
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.convert.families import FAMILIES
from megatron_ext.text.convert.huggingface import Import, import_model
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.train.forking import fork_ranks
from tests.training_runs import config_of

# transformers 5.23 has this class, but does not find it by the config.json.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
LENGTH = 24
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rope_theta": 50000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama 3.1 tied": {
        "model_type": "llama", "tie_word_embeddings": True, "rope_scaling": LLAMA3,
        "max_position_embeddings": 32768, "rope_theta": 500000.0,
    },
    "mistral without groups": {
        "model_type": "mistral", "sliding_window": None, "head_dim": 32, "num_key_value_heads": 4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "mistral with a window": {
        "model_type": "mistral", "sliding_window": 8, "num_attention_heads": 5, "head_dim": 14,
        "num_key_value_heads": 1,
    },
    "qwen2 with a window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 0, "num_key_value_heads": 4,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 9},
    "phi3 partly rotary": {
        "model_type": "phi3", "pad_token_id": 0, "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2", "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "activation_function": "gelu", "n_inner": 112, "bos_token_id": 0, "eos_token_id": 0,
    },
    "mixtral": {
        "model_type": "mixtral", "num_local_experts": 4, "sliding_window": 8,
        "num_attention_heads": 6, "head_dim": 14,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 18,
        "tie_word_embeddings": True,
    },
    "qwen3_moe unnormalized": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": False, "head_dim": 16,
        "decoder_sparse_step": 2,
    },
    "llama with biases": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_theta": 10000.5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "qwen2 with some windows": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 1,
    },
    "phi3 longrope": {
        "model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0 + i / 10 for i in range(8)],
            "long_factor": [2.0 + i / 3 for i in range(8)],
        },
    },
    "gpt2 with gelu_new": {
        "model_type": "gpt2", "n_positions": 64, "n_embd": 60, "n_layer": 2, "n_head": 4,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "gemma2": {
        "model_type": "gemma2", "head_dim": 18, "sliding_window": 8, "query_pre_attn_scalar": 20,
        "num_key_value_heads": 2,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 16, "rope_theta": 1e6,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "sliding_window": 8, "intermediate_size": 24, "swiglu_limit": 0.5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "use_qk_norm": True,
        "attention_bias": True, "routed_scaling_factor": 1.5, "partial_rotary_factor": 0.5,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2", "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "n_shared_experts": 2, "q_lora_rank": None,
        "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "routed_scaling_factor": 1.0,
    },
    "deepseek_v2 with groups": {
        "model_type": "deepseek_v2", "n_routed_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 24, "n_shared_experts": 1, "q_lora_rank": 20,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "routed_scaling_factor": 2.0,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 24, "n_shared_experts": 1, "q_lora_rank": 20, "n_group": 4,
        "topk_group": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6,
        "v_head_dim": 10, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
        },
    },
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {
        "model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2,
        "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_chunk_size": 8, "attn_layer_indices": [1],
        "tie_word_embeddings": False,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 2,
        "ssm_state_size": 12, "head_dim": 24, "chunk_size": 8, "hybrid_override_pattern": "M-*-",
    },
}  # fmt: skip
"""Models with other mixers than attention, of which the tests of adapters train some."""
ONE_GROUP = ["mistral with a window", "gemma3"]
"""Models that tensor parallelism cannot split, since their heads share one key and value."""
EXPERTS = [x for x in MODELS if any(k in x for k in ("moe", "mixtral", "gpt_oss", "deepseek"))]


def make(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    changed: dict[str, Any] | None = None,
    **save: Any,
) -> Path:
    """Save a random model; norms and biases are random too, so that none can be mixed up."""
    torch.manual_seed(len(name))
    config = AutoConfig.for_model(**{**SIZES, **{**MODELS, **RECURRENT}[name], **(changed or {})})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            size = 0.1 if "bias" in key else 0.3
            # Gemma's norms hold the gain minus one.
            mean = 1 if "norm" in key and "gemma" not in name else 0
            parameter.copy_(size * torch.randn_like(parameter) + mean)
    model.to(dtype).save_pretrained(folder, **save)
    return folder


def make_tiny(
    settings: dict[str, Any], folder: Path, *, as_published: bool = True, **save: Any
) -> Path:
    """Save a random model of transformers' class, with entries of config.json beyond `SIZES`.

    Noise is added to the initial values of all weights, so that a norm keeps its kind of gain, and
    no two norms or biases can be mixed up.
    """
    torch.manual_seed(len(str(settings)))
    name = settings["model_type"]
    known = FAMILIES[name].known_as or name
    # Copy, since transformers changes its arguments.
    config = AutoConfig.for_model(**as_known(copy.deepcopy({**SIZES, **settings})))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    floating = [x for x in model.buffers() if x.is_floating_point() and x.requires_grad is False]
    stored = {x.data_ptr() for x in model.state_dict().values()}
    with torch.no_grad():
        for weight in (*model.parameters(), *(x for x in floating if x.data_ptr() in stored)):
            weight += (0.1 if weight.dim() < 2 else 0.15) * torch.randn_like(weight)
    model.save_pretrained(folder, **save)
    if name == "kimi_linear" and as_published:
        rename_as_published(folder / "model.safetensors")
    if known != name:
        content = json.loads((folder / "config.json").read_text())
        own = {"model_type": name, "architectures": [FAMILIES[name].architecture]}
        foreign = as_known({**SIZES, **settings}).keys() - SIZES.keys() - settings.keys()
        rest = {key: value for key, value in content.items() if key not in foreign}
        (folder / "config.json").write_text(json.dumps({**rest, **own}))
    return folder


def rename_as_published(path: Path) -> None:
    """Rename the MLPs without experts of Kimi Linear, which transformers writes like the others."""
    names = {f"block_sparse_moe.{kind}_proj": f"mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    tensors = load_file(path)
    for written, published in names.items():
        tensors = {name.replace(written, published): x for name, x in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def as_known(content: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a config.json by which transformers' class computes the same.

    They differ for models whose code comes with their folder. MiniCPM's factors are computed as in
    its ``modeling_minicpm.py``.
    """
    name = content["model_type"]
    known = {**content, "model_type": FAMILIES[name].known_as or name}
    if name == "minicpm":
        hidden = content["hidden_size"]
        size = hidden // content["num_attention_heads"]
        known |= {
            "embedding_multiplier": content["scale_emb"],
            "residual_multiplier": content["scale_depth"] / content["num_hidden_layers"] ** 0.5,
            "attention_multiplier": size**-0.5,
            "logits_scaling": hidden / content["dim_model_base"],
        }
    return known


def class_of(folder: Path) -> Any:
    """Return transformers' model with the weights of a folder, in float32.

    If transformers knows its `model_type` under another name, the model is read under that name.
    """
    content = json.loads((folder / "config.json").read_text())
    known = FAMILIES[content["model_type"]].known_as or content["model_type"]
    config = None
    if known != content["model_type"]:
        config = AutoConfig.for_model(**as_known(content))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, config=config)


def tokens() -> Tensor:
    """Return tokens ``[b, s]``."""
    return torch.randint(0, 300, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def theirs(folder: Path) -> Tensor:
    """Return the logits ``[b, s, v]`` of transformers."""
    model = class_of(folder)
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
    return logits


def in_child(function: Callable[[], Any], scratch: Path) -> Any:
    """Run a function that builds process groups, which pytest's process must not build."""

    def main() -> int:
        scratch.write_bytes(pickle.dumps(function()))
        return 0

    assert fork_ranks(main, 1) == 0
    return pickle.loads(scratch.read_bytes())


def imported(source: Path, target: Path, **options: Any) -> list[str]:
    order = Import(source, target, **options)
    return list(in_child(lambda: import_model(order), target.with_suffix(".words"))[0])


def run_config(context: Any, words: list[str], stored: dict[str, Any] | None = None) -> RunConfig:
    layout = context.layout
    sizes = {
        "--tensor-model-parallel-size": layout.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": layout.pipeline_model_parallel_size,
        "--expert-model-parallel-size": layout.expert_model_parallel_size,
    }
    flags = [str(word) for pair in sizes.items() for word in pair]
    words = [*words, *flags, *"--micro-batch-size 1 --skip-train".split()]
    return config_of(words, ranks=layout.world_size, checkpoint_config=stored)


def check_logits(context: Any, config: RunConfig, expected: Tensor) -> None:
    """Check that our model, loaded as a run loads it, gives the logits ``[b, s, v]``."""
    core = build_transformer_config(config)
    (chunk,) = build_chunks(build_gpt_chunk, config, core, context)
    manager = CheckpointManager(config.checkpoint, context)
    manager.load(model=[chunk], optimizer=None, scheduler=None)
    chunk.eval()
    ids, group = tokens(), context.pgs.pp
    if not context.is_first_stage:
        hidden = torch.empty(LENGTH, len(ids), config.model.hidden_size or 0)
        torch.distributed.recv(hidden, group=group, group_src=context.pp_rank - 1)
        chunk.set_input_tensor(hidden)
    with torch.no_grad():
        output = chunk(ids, torch.arange(LENGTH).expand_as(ids), None)
    if not context.is_last_stage:
        torch.distributed.send(output, group=group, group_dst=context.pp_rank + 1)
        return
    parts = [torch.empty_like(output) for _ in range(context.pgs.tp.size())]
    torch.distributed.all_gather(parts, output, group=context.pgs.tp)
    logits = torch.cat(parts, dim=-1)
    assert logits.shape[-1] == config.model.padded_vocab_size
    vocabulary = expected.shape[-1]
    scale = expected.abs().max().item()
    torch.testing.assert_close(logits[..., :vocabulary], expected, rtol=0, atol=1e-5 * scale)


def main() -> None:
    """Write tiny folders: ``python -m tests.text.convert.models FAMILY... FOLDER``."""
    from tests.text.convert.settings import SETTINGS

    *names, folder = sys.argv[1:]
    for name in names or SETTINGS:
        for number, settings in enumerate(SETTINGS[name]):
            print(make_tiny({"model_type": name, **settings}, Path(folder) / f"{name}_{number}"))


if __name__ == "__main__":
    main()
