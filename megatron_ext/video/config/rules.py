"""Rules of video runs: the engine's flags that they leave out, and what goes together.

What a run would ignore is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.config.flags import changed, default_of, spelling_of
from megatron_ext.config.lora import ALL_TARGETS
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.rules.lora import target_errors
from megatron_ext.config.run import LeftOut
from megatron_ext.video.config.encoding import UMT5, CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.config.mmdit import MMDiTConfig
from megatron_ext.video.config.run import (
    ConditionConfig,
    FlowConfig,
    SampleConfig,
    TextDropoutConfig,
    VideoConfig,
)
from megatron_ext.video.config.wan import WINDOW, VideoDiTConfig, described_by
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.teacher_config import teacher_errors

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

ENCODING = ("codec", "text_encoder", "encode")
FLOW_ONLY = ("mmdit", "video_dit", "flow", "conditions", "text_dropout", "encode")
STREAMING_ONLY = ("streaming", "streaming_sample")
SECTIONS: tuple[type, ...] = (
    VideoConfig,
    MMDiTConfig,
    VideoDiTConfig,
    FlowConfig,
    ConditionConfig,
    TextDropoutConfig,
    CodecConfig,
    TextEncoderConfig,
    EncodeConfig,
    SampleConfig,
    StreamingConfig,
    StreamingSampleConfig,
)
"""The sections that pretrain_video.py adds to the engine's flags."""

VIDEO_DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-4,
    "lr_decay_style": "constant",
    "usual_warmup_iters": 1000,
    "adam_beta2": 0.95,
    "adam_eps": 1e-15,
    "ema_decay": 0.9999,
    "bf16_on_gpu": True,
    "log_interval": 10,
    "usual_save_interval": 1000,
}
"""Defaults of pretrain_video.py that differ from Megatron-LM's: linear warm-up to a constant rate,
and an epsilon that is meant to be that small: with normed queries and keys it is stable
(arXiv:2403.03206)."""

VIDEO_DIT_DEFAULTS: Mapping[str, Any] = {
    **VIDEO_DEFAULTS,
    "i2v_head_weight": 0.0,
    "i2v_tail_weight": 0.0,
    "i2v_loop_weight": 0.0,
    "text_dropout": 0.1,
}
"""The same with a video DiT, which is given text alone: a tenth of the clips has none."""

STREAMING_DEFAULTS: Mapping[str, Any] = {
    **VIDEO_DEFAULTS,
    "lr": 1e-5,
    "usual_warmup_iters": 0,
    "adam_beta1": 0.0,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 10.0,
    "ema_decay": 0.99,
    "eval_iters": 0,
}
"""The same with ``--task streaming``, as LongLive trains (arXiv:2509.22622)."""

_FOLLOWED = ("hidden_size", "num_attention_heads", "perform_initialization",
             "gradient_accumulation_fusion", "compile")  # fmt: skip
_ON = "on a video model: "
_SHAPE = f"{_ON}its shape follows from its named size and the flags beside it"
_STEP = f"{_ON}a step is as large as its bucket says"
_EXPERTS = f"{_ON}its blocks have no experts"
_COST = f"{_ON}blocks are dealt to stages by their cost"
_VOCABULARY = f"{_ON}there is no vocabulary whose embedding could have it"

LEFT_OUT: LeftOut = {
    "model": {
        field.name: _SHAPE
        for field in dataclasses.fields(ModelConfig)
        if "help" in field.metadata and field.name not in _FOLLOWED
    },
    "moe": {"*": _EXPERTS},
    "loss": {"*": f"{_ON}its loss is that of its task"},
    "training": {
        "rampup_batch_size": _STEP,
        "step_batch_size_schedule": _STEP,
        "decrease_batch_size_if_needed": _STEP,
        "train_samples": f"{_ON}steps differ in their number of clips; give --train-iters",
        "full_validation": f"{_ON}evaluation always goes through the whole validation data",
    },
    "logging": {"log_validation_ppl_to_tensorboard": f"{_ON}its loss has no perplexity"},
    "optimizer": {"decoupled_lr": _VOCABULARY, "decoupled_min_lr": _VOCABULARY},
    "parallel": {
        "expert_model_parallel_size": _EXPERTS,
        "expert_tensor_parallel_size": _EXPERTS,
        "pipeline_model_parallel_layout": _COST,
        "decoder_first_pipeline_num_layers": _COST,
        "decoder_last_pipeline_num_layers": _COST,
        "num_layers_per_virtual_pipeline_stage": _COST,
        "account_for_embedding_in_pipeline_split": _COST,
        "account_for_loss_in_pipeline_split": _COST,
    },
}
"""Flags of the engine that no video run has a use for, and why."""

FLOW_LEFT_OUT: LeftOut = {**LEFT_OUT, "lora": {"*": f"{_ON}its layers take no adapters"}}

_SAMPLES_OF_FLOW = (
    "sample_steps sample_text_scale sample_image_scale sample_oscillation sample_scale_by_frame "
    "sample_size sample_frames"
).split()
_SHIFTS = "shift_base_tokens shift_base shift_max_tokens shift_max shift_by_length".split()

STREAMING_START = 200
"""The first averaged step of streaming, as LongLive has it."""


def resolve_flow(config: RunConfig) -> RunConfig:
    """Return the configuration with the model's section as the named size decides it.

    Raises:
        ConfigError: sizes that do not fit together.
    """
    if config.section(VideoConfig).uses_dit:
        model = described_by(config.section(VideoDiTConfig).sizes, config.model)
    else:
        model = config.section(MMDiTConfig).described(config.model)
    return dataclasses.replace(config, model=model)


def resolve_streaming(config: RunConfig) -> RunConfig:
    """Return the configuration with what the flags of streaming decide of the engine's sections."""
    streaming, lora, ema = config.section(StreamingConfig), config.lora, config.ema
    if lora.lora_rank is not None:
        targets = lora.lora_target_modules
        lora = dataclasses.replace(
            lora,
            lora_target_modules=list(ALL_TARGETS) if targets is None else targets,
            saves_adapters_only=True,
        )
    if ema.ema_decay and ema.ema_start is None:
        ema = dataclasses.replace(ema, ema_start=STREAMING_START)
    checkpoint = dataclasses.replace(config.checkpoint, starts_others=streaming.starts_others)
    model = streaming.described(config.model)
    return dataclasses.replace(config, model=model, lora=lora, ema=ema, checkpoint=checkpoint)


def flow_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return a sentence for everything that flow matching cannot do; see `TaskFlags`."""
    uses_dit = given.section(VideoConfig).uses_dit
    return [
        *_shared_rules(given, run),
        *(_dit_errors(given) if uses_dit else _mmdit_errors(given)),
        *_without_their_switch(given),
        *_encoding_errors(given),
        *_sample_errors(given),
        *given.section(VideoConfig).own_errors(),
    ]


def streaming_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return a sentence for everything that streaming cannot do; see `TaskFlags`."""
    streaming, sample = given.section(StreamingConfig), given.section(SampleConfig)
    found = [
        *_shared_rules(given, run),
        *_streaming_errors(given),
        *_sample_errors(given, STREAMING_ONLY[1:]),
        *streaming.own_errors(),
        *given.section(StreamingSampleConfig).own_errors(sample, streaming),
        *teacher_errors(streaming, run.parallel),
        *target_errors(run.lora, ALL_TARGETS),
    ]
    if run.lora.lora_rank is not None and run.lora.lora_dropout:
        found.append(
            f"`--lora-dropout` ({run.lora.lora_dropout:g}) does not go with `--task streaming`, "
            "whose blocks are run again for their gradients and must give the same; use 0."
        )
    return found


def _shared_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return a sentence for everything that neither task can do."""
    found = list(run.section(SampleConfig).own_errors(run.checkpoint.save))
    schedule = given.parallel.pipeline_schedule or ""
    if schedule.startswith("core-"):
        found.append(
            f"`--pipeline-schedule {schedule}` takes sequences of one length only; use "
            f"{schedule.removeprefix('core-')}."
        )
    kinds = run.parallel.cp_comm_type
    if len(kinds) > 1:
        found.append(
            f"`--cp-comm-type` has {len(kinds)} values, but a video model has one for all its "
            "blocks; give one."
        )
    return found


def _streaming_errors(run: RunConfig) -> list[str]:
    """Flags that streaming long-tuning would ignore or cannot follow."""
    described, sections = run.section(StreamingConfig).described(run.model), run.by_name()
    ignored = [x for x in changed(run, ("video", *FLOW_ONLY)) if x != "--task"]
    found = [
        f"`{spelled}` has no effect with `--task streaming`, whose data is prompts; leave it out."
        for spelled in ignored
    ]
    found += [
        f"`{spelled}` has no effect with `--task streaming`, whose videos follow the flags of "
        "training; leave it out."
        for spelled in changed(run, ("sample",), _SAMPLES_OF_FLOW)
    ]
    found += [
        f"`{spelling_of(run.model, name)}` has no effect with `--task streaming`: "
        "`--generator-size` and the flags beside it decide; leave it out."
        for name in ("hidden_size", "num_attention_heads")
        if getattr(run.model, name) not in (None, getattr(described, name))
    ]
    refused = (
        ("parallel", "pipeline_model_parallel_size", "a chunk is generated block after block, so "
         "that pipeline stages would wait for one another; use tensor parallelism"),
        ("optimizer", "overlap_grad_reduce", "blocks are trained one by one; leave it out"),
        ("optimizer", "overlap_param_gather", "blocks are generated one by one; leave it out"),
        ("optimizer", "apply_wd_to_qk_layernorm", _QK_NORMS),
        ("precision", "fp16", "three networks have no common loss scale; use --bf16"),
        ("fp8", "fp8_format", "a step changes several networks, each of which would need scales "
         "of its own; leave it out"),
        ("training", "skip_train", "there is nothing to evaluate; leave it out"),
        ("training", "train_epochs", "prompts follow one another without end; give --train-iters"),
        ("training", "eval_iters", "there is nothing to evaluate; use 0"),
        ("training", "num_workers", "no clips are read; leave it out"),
        ("text_encoder", "pooled_width", "its networks take no pooled text; leave it out"),
    )  # fmt: skip
    usual = {
        "pipeline_model_parallel_size": 1,
        "eval_iters": 0,
        "num_workers": default_of(run.training, "num_workers"),
        "pooled_width": default_of(run.section(TextEncoderConfig), "pooled_width"),
        "skip_train": run.section(StreamingSampleConfig).only_samples,
    }
    found += [
        f"`--{name.replace('_', '-')}` ({getattr(sections[section], name)}) does not go with "
        f"`--task streaming`: {reason}."
        for section, name, reason in refused
        if getattr(sections[section], name) not in (usual.get(name, False), None)
    ]
    return found


def _mmdit_errors(run: RunConfig) -> list[str]:
    """Flags of video DiTs, and text without what the MMDiT needs of it."""
    dit = "`--video-model video-dit` or causal-video-dit"
    found = [
        f"`{spelled}` has an effect only with {kind}; leave it out."
        for kind, sections in ((dit, ("video_dit",)), ("`--task streaming`", STREAMING_ONLY))
        for spelled in changed(run, sections)
    ]
    if run.section(TextEncoderConfig).text_encoder == UMT5:
        found.append(
            f"`--text-encoder` ({UMT5}) gives no pooled vectors, which the MMDiT needs; use "
            f"t5-clip, or give {dit}."
        )
    return found


_QK_NORMS = "the norms of its queries and keys never decay; leave it out"
_OF_DIT = {"zero_head", "recompute_blocks"}
"""Flags of streaming that a video DiT follows, besides those of its window."""


def _dit_errors(run: RunConfig) -> list[str]:
    """Flags that flow matching with a video DiT would ignore."""
    sections = run.by_name()
    shared = {*_OF_DIT, *(WINDOW if run.section(VideoConfig).is_causal else ())}
    model = f"`--video-model {run.section(VideoConfig).video_model}`"
    reasons = [
        ("streaming", shared, "it decides nothing but what `--task streaming` does"),
        ("streaming_sample", set[str](), "it decides nothing but what `--task streaming` does"),
        ("mmdit", set[str](), "it is one of the MMDiT"),
        ("conditions", {"t2v_weight"}, "a video DiT is given no reference frames"),
    ]
    found = [
        f"`{spelling_of(section, field.name)}` has no effect with {model}: {reason}; leave it out."
        for name, kept, reason in reasons
        for section in (sections[name],)
        for field in dataclasses.fields(section)
        if "help" in field.metadata
        and field.name not in kept
        and getattr(section, field.name) != VIDEO_DIT_DEFAULTS.get(field.name, field.default)
    ]
    found += [
        f"`{spelling_of(run.model, name)}` has no effect with {model}: `--video-dit-size` decides; "
        "leave it out."
        for name in ("hidden_size", "num_attention_heads")
        if getattr(run.model, name) is not None
    ]
    if run.optimizer.apply_wd_to_qk_layernorm:
        found.append(f"`--apply-wd-to-qk-layernorm` has no effect with {model}: {_QK_NORMS}.")
    dropout = run.section(TextDropoutConfig)
    if dropout.pooled_dropout != default_of(dropout, "pooled_dropout"):
        found.append(
            f"`--pooled-dropout` ({dropout.pooled_dropout}) has no effect with {model}, "
            "which is given no pooled embedding; leave it out."
        )
    if (
        run.section(VideoDiTConfig).independent_block_timesteps
        and not run.section(VideoConfig).is_causal
    ):
        found.append(
            "`--independent-block-timesteps` has an effect only with `--video-model "
            "causal-video-dit`, which has frame blocks; leave it out."
        )
    return found


def _without_their_switch(run: RunConfig) -> list[str]:
    """Flags that another one leaves without effect."""
    sections = run.by_name()
    modes, by_size = (
        set(run.section(ConditionConfig).modes),
        run.section(FlowConfig).flow_shift is None,
    )
    evaluates = (
        run.section(VideoConfig).video_valid_path is not None or run.training.eval_iters == 0
    )
    long, easy = modes & {"v2v_head", "v2v_tail"}, modes & {"v2v_head_easy", "v2v_tail_easy"}
    rules = [
        (
            "mmdit",
            "guidance",
            "needs `--guidance-embed`; give both",
            run.section(MMDiTConfig).guidance_embed,
        ),
        ("conditions", "v2v_frames", "needs a weight of v2v_head or v2v_tail; give one", long),
        ("conditions", "v2v_easy_frames", "needs a weight of an easy v2v mode; give one", easy),
        ("training", "eval_iters", "needs `--video-valid-path`; give it, or 0", evaluates),
        ("training", "eval_interval", "needs `--video-valid-path`; give it too", evaluates),
    ]
    rules += [
        ("flow", name, "has no effect beside `--flow-shift`; leave one of them out", by_size)
        for name in _SHIFTS
    ]
    return [
        f"`{spelling_of(sections[section], name)}` {why}."
        for section, name, why, works in rules
        if not works and getattr(sections[section], name) != default_of(sections[section], name)
    ]


def _encoding_errors(run: RunConfig) -> list[str]:
    """Encoding that does not take place: preprocessed data says itself how it was encoded."""
    if run.section(VideoConfig).online_encoding:
        return []
    # Sampling finds the weights of a VAE and of text encoders by them.
    sections = ("encode",) if _samples(run) else ENCODING
    return [
        f"`{spelled}` has an effect only with `--online-encoding`; leave it out."
        for spelled in changed(run, sections)
    ]


def _sample_errors(run: RunConfig, more: Sequence[str] = ()) -> list[str]:
    """Samples that are described, in one section or more, but not asked for."""
    return [
        f"`{spelled}` has an effect only with `--sample-interval`; give it too, or leave this out."
        for spelled in ([] if _samples(run) else changed(run, ("sample", *more)))
    ]


def _samples(run: RunConfig) -> bool:
    """Whether clips are sampled, while training or, without training, at once."""
    return run.section(SampleConfig).sample_interval is not None or run.training.skip_train
