"""Which flags a video run follows: what it would ignore is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.config.flags import changed, default_of, spelling_of
from megatron_ext.config.model import ModelConfig
from megatron_ext.video.config.encoding import UMT5
from megatron_ext.video.config.wan import WINDOW

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

ENCODING = ("codec", "text_encoder", "encode")
FLOW_ONLY = ("mmdit", "video_dit", "flow", "conditions", "text_dropout", "encode")
STREAMING_ONLY = ("streaming", "streaming_sample")
SECTIONS = ("video", *FLOW_ONLY, "sample", "codec", "text_encoder", *STREAMING_ONLY)
"""Sections of which a text run follows nothing."""

VIDEO_DEFAULTS: Mapping[str, Any] = {
    "video": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1,
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
"""What pretrain_video.py starts from where it differs from Megatron-LM: linear warm-up to a
constant rate, and an epsilon that is meant to be that small: with normed queries and keys it is
stable (arXiv:2403.03206)."""

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

_WHOLE = {
    "tokenizer": "captions are encoded by the text encoder of the data",
    "moe": "its blocks have no experts",
    "lora": "its layers take no adapters",
    "loss": "its loss is the flow-matching loss",
    "sft": "there are no conversations",
}
_ALLOWED = {
    "model": {
        "hidden_size",
        "num_attention_heads",
        "perform_initialization",
        "gradient_accumulation_fusion",
        "compile",
    },
    "data": {"num_workers"},
}
_SAMPLES_OF_FLOW = (
    "sample_steps sample_text_scale sample_image_scale sample_oscillation sample_scale_by_frame "
    "sample_size sample_frames"
).split()
_SHIFTS = "shift_base_tokens shift_base shift_max_tokens shift_max shift_by_length".split()
_REFUSED: tuple[tuple[str, str, str], ...] = (
    ("training", "rampup_batch_size", "a step is as large as its bucket says"),
    ("training", "step_batch_size_schedule", "a step is as large as its bucket says"),
    ("training", "decrease_batch_size_if_needed", "a step is as large as its bucket says"),
    ("training", "train_samples", "steps differ in their number of clips; give --train-iters"),
    ("training", "full_validation", "evaluation always goes through the whole validation data"),
    ("logging", "log_validation_ppl_to_tensorboard", "its loss has no perplexity"),
    ("optimizer", "decoupled_lr", "there is no vocabulary whose embedding could have it"),
    ("optimizer", "decoupled_min_lr", "there is no vocabulary whose embedding could have it"),
    ("parallel", "expert_model_parallel_size", "its blocks have no experts"),
    ("parallel", "expert_tensor_parallel_size", "its blocks have no experts"),
    ("parallel", "pipeline_model_parallel_layout", "blocks are dealt to stages by their cost"),
    ("parallel", "decoder_first_pipeline_num_layers", "blocks are dealt to stages by their cost"),
    ("parallel", "decoder_last_pipeline_num_layers", "blocks are dealt to stages by their cost"),
    ("parallel", "num_layers_per_virtual_pipeline_stage", "blocks are dealt to stages by cost"),
    (
        "parallel",
        "account_for_embedding_in_pipeline_split",
        "blocks are dealt to stages by their cost",
    ),
    ("parallel", "account_for_loss_in_pipeline_split", "blocks are dealt to stages by their cost"),
)


def video_errors(given: RunConfig, resolve: Callable[[RunConfig], RunConfig]) -> list[str]:
    """Flags that this kind of run would ignore.

    Args:
        given: before anything was derived.
        resolve: derives. What it makes of a run without such flags may be given too, as a printed
            configuration does.
    """
    if not given.video.video:
        return [
            f"`{spelled}` has an effect only in pretrain_video.py; leave it out."
            for spelled in changed(given, SECTIONS)
        ]
    found = [
        f"`{spelling_of(getattr(given, name), field)}` has no effect on a video model: {reason}; "
        "leave it out."
        for name, field, reason in (*_listed(given), *_settled(given, resolve(_bare(given))))
    ]
    schedule = given.parallel.pipeline_schedule or ""
    if schedule.startswith("core-"):
        found.append(
            f"`--pipeline-schedule {schedule}` takes sequences of one length only; use "
            f"{schedule.removeprefix('core-')}."
        )
    if given.video.streams:
        found += [*_streaming_errors(given), *_sample_errors(given, STREAMING_ONLY[1:])]
        sampling = given.streaming_sample.errors(given.sample, given.streaming)
        return [*found, *given.streaming.errors(), *sampling]
    found += _dit_errors(given) if given.video.uses_dit else _mmdit_errors(given)
    found += [*_without_their_switch(given), *_encoding_errors(given), *_sample_errors(given)]
    return [*found, *given.video.errors()]


def _streaming_errors(run: RunConfig) -> list[str]:
    """Flags that streaming long-tuning would ignore or cannot follow."""
    described = run.streaming.described(run.model)
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
        ("data", "num_workers", "no clips are read; leave it out"),
        ("text_encoder", "pooled_width", "its networks take no pooled text; leave it out"),
    )  # fmt: skip
    usual = {
        "pipeline_model_parallel_size": 1,
        "eval_iters": 0,
        "num_workers": default_of(run.data, "num_workers"),
        "pooled_width": default_of(run.text_encoder, "pooled_width"),
        "skip_train": run.streaming_sample.only_samples,
    }
    found += [
        f"`--{name.replace('_', '-')}` ({getattr(getattr(run, section), name)}) does not go with "
        f"`--task streaming`: {reason}."
        for section, name, reason in refused
        if getattr(getattr(run, section), name) not in (usual.get(name, False), None)
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
    if run.text_encoder.text_encoder == UMT5:
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
    shared = {*_OF_DIT, *(WINDOW if run.video.is_causal else ())}
    model = f"`--video-model {run.video.video_model}`"
    reasons = [
        ("streaming", shared, "it decides nothing but what `--task streaming` does"),
        ("streaming_sample", set[str](), "it decides nothing but what `--task streaming` does"),
        ("mmdit", set[str](), "it is one of the MMDiT"),
        ("conditions", {"t2v_weight"}, "a video DiT is given no reference frames"),
    ]
    found = [
        f"`{spelling_of(section, field.name)}` has no effect with {model}: {reason}; leave it out."
        for name, kept, reason in reasons
        for section in (getattr(run, name),)
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
    if run.text_dropout.pooled_dropout != default_of(run.text_dropout, "pooled_dropout"):
        found.append(
            f"`--pooled-dropout` ({run.text_dropout.pooled_dropout}) has no effect with {model}, "
            "which is given no pooled embedding; leave it out."
        )
    if run.video_dit.independent_block_timesteps and not run.video.is_causal:
        found.append(
            "`--independent-block-timesteps` has an effect only with `--video-model "
            "causal-video-dit`, which has frame blocks; leave it out."
        )
    return found


def _without_their_switch(run: RunConfig) -> list[str]:
    """Flags that another one leaves without effect."""
    modes, by_size = set(run.conditions.modes), run.flow.flow_shift is None
    evaluates = run.video.video_valid_path is not None or run.training.eval_iters == 0
    long, easy = modes & {"v2v_head", "v2v_tail"}, modes & {"v2v_head_easy", "v2v_tail_easy"}
    rules = [
        ("mmdit", "guidance", "needs `--guidance-embed`; give both", run.mmdit.guidance_embed),
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
        f"`{spelling_of(getattr(run, section), name)}` {why}."
        for section, name, why, works in rules
        if not works
        and getattr(getattr(run, section), name) != default_of(getattr(run, section), name)
    ]


def _encoding_errors(run: RunConfig) -> list[str]:
    """Encoding that does not take place: preprocessed data says itself how it was encoded."""
    if run.video.online_encoding:
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
    return run.sample.sample_interval is not None or run.training.skip_train


def _listed(run: RunConfig) -> list[tuple[str, str, str]]:
    """Single flags of sections that are followed otherwise."""
    return [
        (name, field, reason)
        for name, field, reason in _REFUSED
        if getattr(getattr(run, name), field) != default_of(getattr(run, name), field)
    ]


def _bare(run: RunConfig) -> RunConfig:
    """The run without any flag of the sections of which it follows (almost) nothing."""
    kept = {name: getattr(run.model, name) for name in _ALLOWED["model"]}
    changes: dict[str, Any] = {name: type(getattr(run, name))() for name in (*_WHOLE, "data")}
    return dataclasses.replace(run, model=ModelConfig(**kept), **changes)


def _settled(run: RunConfig, bare: RunConfig) -> list[tuple[str, str, str]]:
    """What the model and the data of a video run do not leave open."""
    shape = "its shape follows from `--mmdit-size` and the flags beside it"
    if run.video.uses_dit:
        shape = "its shape follows from `--video-dit-size`"
    reasons = {**_WHOLE, "model": shape, "data": "its data is `--video-data-path`"}
    if run.video.streams:
        del reasons["lora"]
    return [
        (name, field.name, reason)
        for name, reason in reasons.items()
        for section in (getattr(run, name),)
        for field in dataclasses.fields(section)
        if field.name not in _ALLOWED.get(name, ())
        and getattr(section, field.name)
        not in (
            default_of(section, field.name),
            VIDEO_DEFAULTS.get(field.name),
            getattr(getattr(bare, name), field.name),
        )
    ]
