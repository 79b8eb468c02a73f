"""Starts sparse attention from the weights of a dense model, as DeepSeek-V3.2 did from V3.1.

The folder of ``--load-hf`` has no indexers, so theirs start from their initial values. What is
written is a model of the family with indexers.
"""

from __future__ import annotations

import dataclasses

from megatron_ext.config.layers import mixer_of
from megatron_ext.config.run import RunConfig
from megatron_ext.text.config.hybrid import MixerConfig
from megatron_ext.text.convert.config import HuggingFaceModel, parse_model
from megatron_ext.text.convert.families import FAMILIES
from megatron_ext.text.convert.family import K_NORM_EPSILON, Gpt

SPARSE = {"deepseek_v3": "deepseek_v32"}
"""The family with indexers, by the `model_type` of the dense one."""
INDEXER = ".core_attention.indexer."
"""The text that the name of each parameter of an indexer contains."""
_SIZES = {
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}


def with_indexer(model: HuggingFaceModel, gpt: Gpt) -> HuggingFaceModel:
    """Return ``model`` as the run ``gpt`` goes on with it: with indexers, if the run adds them.

    Return it unchanged if no layer of the run has sparse attention, or the model has it already.
    """
    kind = SPARSE.get(model.family.model_type)
    adds = any(mixer_of(each) == "D" for each in gpt.kinds)
    sizes = {key: gpt.value(name) for name, key in _SIZES.items()}
    if kind is None or not adds or model.wrapping is not None or None in sizes.values():
        return model
    family = FAMILIES[kind]
    kept = {key: value for key, value in model.raw.items() if key != "rope_interleave"}
    own = {"model_type": kind, "architectures": [family.architecture], **sizes}
    changed = parse_model({**kept, **own}, model.path)
    return dataclasses.replace(changed, vocab_size=model.vocab_size)


def with_epsilon(config: RunConfig, model: HuggingFaceModel) -> RunConfig:
    """Return a run's configuration with the epsilon that transformers has in new indexers.

    A run that gives another epsilon is left as it is.
    """
    mixer = config.section(MixerConfig)
    epsilon = model.fields.get(K_NORM_EPSILON)
    if epsilon is None or mixer.dsa_indexer_k_norm_epsilon is not None:
        return config
    return config.with_section(dataclasses.replace(mixer, dsa_indexer_k_norm_epsilon=epsilon))
