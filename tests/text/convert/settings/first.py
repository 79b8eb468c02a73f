"""Settings of the families that other tests also use, as `models.MODELS` has them."""

from tests.text.convert.models import MODELS
from tests.text.convert.settings.kinds import Settings

_NAMES = {
    "llama": ("llama 3.1 tied", "llama with biases"),
    "mistral": ("mistral with a window", "mistral without groups"),
    "qwen2": ("qwen2 with some windows", "qwen2 tied"),
    "qwen3": ("qwen3", "qwen3"),
    "phi3": ("phi3 partly rotary", "phi3 longrope"),
    "gpt2": ("gpt2 with gelu_new", "gpt2"),
    "gemma2": ("gemma2", "gemma2"),
    "gemma3_text": ("gemma3", "gemma3"),
    "mixtral": ("mixtral", "mixtral"),
    "qwen2_moe": ("qwen2_moe", "qwen2_moe"),
    "qwen3_moe": ("qwen3_moe", "qwen3_moe unnormalized"),
    "gpt_oss": ("gpt_oss", "gpt_oss"),
    "glm4_moe": ("glm4_moe", "glm4_moe"),
    "deepseek_v2": ("deepseek_v2", "deepseek_v2 with groups"),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3"),
}
_CHANGED: dict[str, Settings] = {
    "qwen3": {"num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 14, "tie_word_embeddings": False},
    "mixtral": {"sliding_window": None, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2_moe": {"mlp_only_layers": [], "norm_topk_prob": True, "num_key_value_heads": 1},
    "gpt_oss": {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "glm4_moe": {"n_shared_experts": 2, "use_qk_norm": False, "num_key_value_heads": 1},
    "deepseek_v3": {"q_lora_rank": None, "tie_word_embeddings": True, "rope_scaling": None},
}
"""Changes of the second setting, where it has the same model as the first."""
SETTINGS: dict[str, tuple[Settings, Settings]] = {
    name: (MODELS[one], MODELS[two] | _CHANGED.get(name, {})) for name, (one, two) in _NAMES.items()
}
