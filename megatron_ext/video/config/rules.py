"""Rules of video runs: defaults, engine flags of no use to a video model, and flags in conflict.

A flag that a run would ignore is refused by name. Rules take the configuration twice: ``config``
has the flags as given, ``resolved`` also the values that the engine and the task fill in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from megatron_ext.config.flags import changed, changed_fields, default_of, flags_of, spelling_of
from megatron_ext.config.inapplicable import Inapplicable, longer_than_run, names_of
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.optimizer import ALL_TARGETS, FreezeConfig, LoraConfig
from megatron_ext.config.run import RunConfig, section_name
from megatron_ext.config.training import LossConfig, TrainingConfig
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.video.config.encoding import (
    UMT5,
    CodecConfig,
    EncodeConfig,
    ImageEncoderConfig,
    TextEncoderConfig,
)
from megatron_ext.video.config.run import (
    ConditionConfig,
    FlowConfig,
    SampleConfig,
    TextDropoutConfig,
    VideoConfig,
)
from megatron_ext.video.config.weights import (
    PublishedConfig,
    adapter_errors,
    starting,
    weights_errors,
    with_adapters,
)
from megatron_ext.video.networks import NETWORKS
from megatron_ext.video.networks.lookup import (
    all_networks,
    chosen,
    named_by,
    network_named,
    without_pooled,
)
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.rules import sample_errors, streaming_errors, teacher_errors

ENCODING = ("codec", "text_encoder", "encode", "image_encoder")
_OWN = tuple(dict.fromkeys(kind for network in all_networks() for kind in network.sections))
_OF_FLOW = (*_OWN, FlowConfig, ConditionConfig, TextDropoutConfig, EncodeConfig)
STREAMING_ONLY = ("streaming", "streaming_sample")
SECTIONS: tuple[type, ...] = (
    VideoConfig, *_OWN, FlowConfig, ConditionConfig, TextDropoutConfig, CodecConfig,
    TextEncoderConfig, ImageEncoderConfig, EncodeConfig, SampleConfig, StreamingConfig,
    StreamingSampleConfig, PublishedConfig,
)  # fmt: skip
"""The sections of flags that pretrain_video.py adds to the general ones of this package."""

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
"""Defaults of pretrain_video.py that differ from Megatron-LM's.

The learning rate is constant after a linear warm-up. Adam's epsilon is very small, which is stable
with normed queries and keys (arXiv:2403.03206)."""

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
"""Defaults with ``--task streaming``, which are LongLive's (arXiv:2509.22622)."""

_FOLLOWED = ("hidden_size", "num_attention_heads", "perform_initialization",
             "gradient_accumulation_fusion", "compile")  # fmt: skip
_unused = partial(Inapplicable, remedy="leave it out", says="has no effect on a video model")

UNUSED = (
    _unused(
        names_of(ModelConfig, but=_FOLLOWED),
        "its shape follows from its named size and the flags beside it",
    ),
    _unused("expert-model-parallel-size expert-tensor-parallel-size", "its blocks have no experts"),
    _unused(names_of(LossConfig), "its loss is that of its task"),
    _unused(
        "rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed",
        "a step is as large as its bucket says",
    ),
    _unused(
        "cpu-offloading-num-layers fine-grained-activation-offloading offload-modules "
        "min-offloaded-tensor-size",
        "activations wait on the host in a GPT's layers only",
    ),
    _unused("train-samples", "steps differ in their number of clips; give --train-iters"),
    _unused("full-validation", "evaluation always goes through the whole validation data"),
    _unused("log-validation-ppl-to-tensorboard", "its loss has no perplexity"),
    _unused("lora-modules-to-save", "its parts have other names; adapters alone are trained"),
    _unused(
        "decoupled-lr decoupled-min-lr", "there is no vocabulary whose embedding could have it"
    ),
    _unused(
        "pipeline-model-parallel-layout decoder-first-pipeline-num-layers "
        "decoder-last-pipeline-num-layers num-layers-per-virtual-pipeline-stage "
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
        "blocks are dealt to stages by their cost",
    ),
    longer_than_run("sample-interval"),
)
"""Flags that a video run refuses, since it would ignore them, or of which nothing follows."""

UNUSED_IN_FLOW = (
    *UNUSED,
    _unused(
        names_of(LoraConfig),
        f"only {named_by(n for n in NETWORKS if network_named(n).takes_adapters)} takes adapters",
        holds=lambda values: not network_named(values["video_model"]).takes_adapters,
    ),
)

UNUSED_IN_STREAMING = (
    *UNUSED,
    _unused(
        names_of(VideoConfig, *_OF_FLOW, but=("task",)),
        says="has no effect with `--task streaming`, whose data is prompts",
    ),
    _unused(
        names_of(FreezeConfig),
        says="does not go with `--task streaming`, which trains whole networks or LoRA adapters",
    ),
    _unused(
        "sample-steps sample-text-scale sample-image-scale sample-oscillation "
        "sample-scale-by-frame sample-size sample-frames sample-negative-prompt sample-scheduler "
        "sample-shift sample-guidance-range sample-low-noise-text-scale sample-low-noise-expert "
        "sample-boundary sample-offload",
        says="has no effect with `--task streaming`, whose videos follow the flags of training",
    ),
)

_SHIFTS = "shift_base_tokens shift_base shift_max_tokens shift_max shift_by_length".split()

SHAPE_FLAGS = ("hidden_size", "num_attention_heads")
"""General flags that are refused because a named size, such as ``--generator-size``, sets them."""
QK_NORMS = "the norms of its queries and keys never decay"
"""The reason that messages give for refusing ``--apply-wd-to-qk-layernorm``."""

STREAMING_START = 200
"""The default of ``--ema-start`` in streaming: the step at which LongLive begins to average."""


def resolve_flow(config: RunConfig) -> RunConfig:
    """Return the configuration with general settings filled in from the network's flags.

    It sets the section ``model``; with LoRA, the layers that get adapters, and that only adapters
    are saved. Sizes that do not fit together raise ConfigError.
    """
    config = starting(config)
    network = chosen(config)
    resolved = network.resolve(config)
    if not network.takes_adapters:
        return resolved
    resolved = with_adapters(resolved)
    return dataclasses.replace(resolved, lora=_adapters(resolved.lora))


PARTS = {
    "attn": ("linear_qkv", "linear_proj", "linear_q", "linear_kv", "linear_vision_kv"),
    "mlp": ("linear_fc1", "linear_fc2"),
    "modulation": ("modulation",),
}
"""The linear layers of a part of a video network's blocks, by the part's name."""


def without_parts(targets: Iterable[str]) -> list[str]:
    """Return targets with the layers of a part in its place, each once."""
    return list(dict.fromkeys(x for target in targets for x in PARTS.get(target, (target,))))


def _adapters(lora: LoraConfig) -> LoraConfig:
    """Return flags of adapters that name the layers which get some; only adapters are saved."""
    if lora.lora_rank is None:
        return lora
    targets = lora.lora_target_modules
    return dataclasses.replace(
        lora,
        lora_target_modules=list(ALL_TARGETS) if targets is None else without_parts(targets),
        saves_adapters_only=True,
    )


def resolve_streaming(config: RunConfig) -> RunConfig:
    """Return the configuration with general settings filled in from the flags of streaming.

    It sets the section ``model``; with LoRA, the layers that get adapters, and that only adapters
    are saved; with averaged weights, the first step of the average, and whether it warms up; and
    whether a checkpoint gives the critic's or the teacher's initial weights.
    """
    config = starting(config)
    streaming = config.section(StreamingConfig)
    ema = config.ema
    if ema.ema_decay:
        start = STREAMING_START if ema.ema_start is None else ema.ema_start
        # As in LongLive, whose average starts from weights that are trained already.
        warmup = False if ema.ema_warmup is None else ema.ema_warmup
        ema = dataclasses.replace(ema, ema_start=start, ema_warmup=warmup)
    checkpoint = dataclasses.replace(config.checkpoint, starts_others=streaming.starts_others)
    model = streaming.described(config.model)
    config = with_adapters(dataclasses.replace(config, model=model))
    lora = _adapters(config.lora)
    return dataclasses.replace(config, lora=lora, ema=ema, checkpoint=checkpoint)


def _shared_errors(config: RunConfig, resolved: RunConfig) -> list[FlagError]:
    """Return an error for each fault in flags that flow matching and streaming share.

    ``config`` has the flags as given, ``resolved`` also values derived from them.
    """
    errors = resolved.section(SampleConfig).own_errors(resolved.checkpoint.save)
    errors += weights_errors(config, resolved)
    errors += adapter_errors(config, resolved)
    if config.lora.lora_quantize_weights is not None:
        errors.append(
            FlagError(
                "--lora-quantize-weights",
                config.lora.lora_quantize_weights,
                "is for language models, whose weights `--load-hf` reads",
                "leave it out",
            )
        )
    schedule = config.parallel.pipeline_schedule or ""
    if schedule.startswith("core-"):
        errors.append(
            FlagError(
                f"--pipeline-schedule {schedule}",
                None,
                "takes sequences of one length only",
                f"use {schedule.removeprefix('core-')}",
            )
        )
    kinds = resolved.parallel.cp_comm_type
    if len(kinds) > 1:
        errors.append(
            FlagError(
                "--cp-comm-type",
                None,
                f"has {len(kinds)} values, but a video model has one for all its blocks",
                "give one",
            )
        )
    if not _samples(config.section(SampleConfig), config.training):
        streams = config.section(VideoConfig).streams
        usual = {} if streams else chosen(config).flow_defaults(config)
        sections = config.by_name()
        errors += [
            FlagError(
                spelling_of(sections[name], field),
                None,
                "has an effect only with `--sample-interval`",
                "give it too, or leave this out",
            )
            for name in (("sample", "streaming_sample") if streams else ("sample",))
            for field in changed_fields(sections[name])
            if field not in usual or getattr(sections[name], field) != usual[field]
        ]
    return errors


def _samples(sample: SampleConfig, training: TrainingConfig) -> bool:
    """Return whether the run samples clips: every ``--sample-interval`` steps, or without training.

    tools/sample_video.py, which samples without training, sets ``skip_train``.
    """
    return sample.sample_interval is not None or training.skip_train


def streaming_rules(config: RunConfig, resolved: RunConfig) -> list[FlagError]:
    """Return an error for each fault in the flags of a streaming run.

    ``config`` has the flags as given, ``resolved`` also values derived from them.
    """
    streaming = config.section(StreamingConfig)
    sample = config.section(SampleConfig)
    errors = [
        *_shared_errors(config, resolved),
        *_left_out_of_streaming(config),
        *streaming_errors(streaming),
        *sample_errors(config.section(StreamingSampleConfig), sample, streaming),
        *teacher_errors(streaming, resolved.parallel),
    ]
    if resolved.lora.starts_from_weights:
        flag = "--lora-use-dora" if resolved.lora.lora_use_dora else "--lora-init"
        errors.append(
            FlagError(
                flag,
                None,
                "does not go with `--task streaming`, whose second network has no such start",
                "leave it out",
            )
        )
    if resolved.lora.lora_rank is not None and resolved.lora.lora_dropout:
        errors.append(
            FlagError(
                "--lora-dropout",
                f"{resolved.lora.lora_dropout:g}",
                "does not go with `--task streaming`, whose blocks are run again for their "
                "gradients and must give the same",
                "use 0",
            )
        )
    return errors


def _left_out_of_streaming(config: RunConfig) -> list[FlagError]:
    """Return an error for each flag that streaming would ignore or does not support."""
    sections = config.by_name()
    described = config.section(StreamingConfig).described(config.model)
    errors = [
        FlagError(
            spelling_of(config.model, name),
            None,
            "has no effect with `--task streaming`: `--generator-size` and the flags beside it "
            "decide",
            "leave it out",
        )
        for name in SHAPE_FLAGS
        if getattr(config.model, name) not in (None, getattr(described, name))
    ]
    refused = (
        ("parallel", "pipeline_model_parallel_size", "a chunk is generated block after block, so "
         "that pipeline stages would wait for one another", "use tensor parallelism"),
        ("optimizer", "overlap_grad_reduce", "blocks are trained one by one", "leave it out"),
        ("optimizer", "overlap_param_gather", "blocks are generated one by one", "leave it out"),
        ("optimizer", "apply_wd_to_qk_layernorm", QK_NORMS, "leave it out"),
        ("precision", "fp16", "three networks have no common loss scale", "use --bf16"),
        ("fp8", "fp8_format", "a step changes several networks, each of which would need scales "
         "of its own", "leave it out"),
        ("training", "skip_train", "there is nothing to evaluate", "leave it out"),
        ("training", "train_epochs", "prompts follow one another without end",
         "give --train-iters"),
        ("training", "eval_iters", "there is nothing to evaluate", "use 0"),
        ("training", "num_workers", "no clips are read", "leave it out"),
        ("text_encoder", "pooled_width", "its networks take no pooled text", "leave it out"),
    )  # fmt: skip
    usual = {
        "pipeline_model_parallel_size": 1,
        "eval_iters": 0,
        "num_workers": default_of(config.training, "num_workers"),
        "pooled_width": default_of(config.section(TextEncoderConfig), "pooled_width"),
        "skip_train": config.section(StreamingSampleConfig).only_samples,
    }
    errors += [
        FlagError(
            f"--{name.replace('_', '-')}",
            getattr(sections[section], name),
            f"does not go with `--task streaming`: {reason}",
            remedy,
        )
        for section, name, reason, remedy in refused
        if getattr(sections[section], name) not in (usual.get(name, False), None)
    ]
    if config.optimizer.shards_gradients:
        errors.append(
            FlagError(
                "--data-parallel-sharding-strategy",
                config.optimizer.data_parallel_sharding_strategy,
                "does not go with `--task streaming`: blocks are trained one by one",
                "use optim",
            )
        )
    return errors


def flow_rules(config: RunConfig, resolved: RunConfig) -> list[str]:
    """Return an error for each fault in the flags of a flow matching run.

    ``config`` has the flags as given, ``resolved`` also values derived from them.
    """
    return [
        *_unknown_to_network(config),
        *chosen(config).rules(config, resolved),
        *_flow_errors(config, resolved),
    ]


def _unknown_to_network(config: RunConfig) -> list[FlagError]:
    """Return an error for each given flag that the network of a flow matching run ignores."""
    network = chosen(config)
    sections = config.by_name()
    name = config.section(VideoConfig).video_model
    errors = [
        FlagError(spelled, None, f"has an effect only with {_with_section(kind)}", "leave it out")
        for kind in _OWN
        if kind not in network.sections
        for spelled in changed(config, [section_name(kind)])
    ]
    errors += [
        FlagError(
            spelling_of(sections[section], field),
            None,
            f"has an effect only with {_streaming_or(field)}",
            "leave it out",
        )
        for section in STREAMING_ONLY
        for field in changed_fields(sections[section])
        if field not in network.streaming_flags.get(name, ())
    ]
    title = network.titles[name]
    usual_of = network.flow_defaults(config)
    if not network.is_given_references(config):
        flag = network.conditions_flag
        remedy = "leave it out" if flag is None else f"leave it out, or give `{flag}`"
        conditions = config.section(ConditionConfig)
        errors += [
            FlagError(
                spelling_of(conditions, x.field),
                None,
                f"has no effect with `--video-model {name}`: {title} is given no reference frames",
                remedy,
            )
            for x in flags_of("", ConditionConfig)
            if x.field != "t2v_weight"
            and getattr(conditions, x.field) != usual_of.get(x.field, x.default)
        ]
    text = config.section(TextEncoderConfig).text_encoder
    if network.takes_pooled and text == UMT5:
        errors.append(
            FlagError(
                "--text-encoder",
                UMT5,
                f"gives no pooled vectors, which {title} needs",
                f"use t5-clip, or give {without_pooled()}",
            )
        )
    dropout = config.section(TextDropoutConfig)
    usual = default_of(dropout, "pooled_dropout")
    if not network.takes_pooled and dropout.pooled_dropout != usual:
        errors.append(
            FlagError(
                "--pooled-dropout",
                dropout.pooled_dropout,
                f"has no effect with `--video-model {name}`, which is given no pooled embedding",
                "leave it out",
            )
        )
    return errors


def _with_section(kind: type) -> str:
    """Return text for a message: "--video-model A or B", the networks that have the flags."""
    return named_by(name for name in NETWORKS if kind in network_named(name).sections)


def _streaming_or(field: str) -> str:
    """Return text for a message that says in which runs a flag of streaming has an effect.

    These are runs with ``--task streaming``, and flow matching of certain networks, which the text
    names. ``field`` is the configuration field of the flag.
    """
    names = [
        name for name in NETWORKS if field in network_named(name).streaming_flags.get(name, ())
    ]
    task = "`--task streaming`"
    return f"{task} or {named_by(names)}" if names else task


def _flow_errors(config: RunConfig, resolved: RunConfig) -> list[str]:
    """Return an error for each fault that does not depend on the network of a flow matching run.

    ``config`` has the flags as given, ``resolved`` also values derived from them.
    """
    sections = config.by_name()
    video = config.section(VideoConfig)
    modes = set(config.section(ConditionConfig).modes)
    evaluates = video.video_valid_path is not None or config.training.eval_iters == 0
    long = modes & {"v2v_head", "v2v_tail"}
    easy = modes & {"v2v_head_easy", "v2v_tail_easy"}
    one_shift = config.section(FlowConfig).flow_shift is not None
    rules = [
        ("conditions", "v2v_frames", "needs a weight of v2v_head or v2v_tail", "give one", long),
        ("conditions", "v2v_easy_frames", "needs a weight of an easy v2v mode", "give one", easy),
        ("training", "eval_iters", "needs `--video-valid-path`", "give it, or 0", evaluates),
        ("training", "eval_interval", "needs `--video-valid-path`", "give it too", evaluates),
        *(("flow", name, "has no effect beside `--flow-shift`", "leave one of them out",
           not one_shift) for name in _SHIFTS),
    ]  # fmt: skip
    errors: list[str] = [
        FlagError(spelling_of(sections[section], name), None, rule, remedy)
        for section, name, rule, remedy, works in rules
        if not works and getattr(sections[section], name) != default_of(sections[section], name)
    ]
    ranged = config.section(FlowConfig).timestep_range is not None
    if ranged and config.section(SampleConfig).sample_interval is not None:
        errors.append(
            FlagError(
                "--sample-interval",
                config.section(SampleConfig).sample_interval,
                "does not go with `--timestep-range`: clips are sampled over all times, of which "
                "this network learns a part",
                "sample with all experts by tools/sample_video.py",
            )
        )
    if video.dry_run_shape is not None:
        errors += _shape_errors(config, video)
    elif _samples_without_data(config):
        return [*_shared_errors(config, resolved), *errors]
    elif not video.online_encoding:
        # Preprocessed data says itself how it was encoded, but sampling finds the weights of a VAE
        # and of text encoders by these flags.
        samples = _samples(config.section(SampleConfig), config.training)
        errors += [
            FlagError(spelled, None, "has an effect only with `--online-encoding`", "leave it out")
            for spelled in changed(config, ("encode",) if samples else ENCODING)
        ]
    return [*_shared_errors(config, resolved), *errors, *video.own_errors()]


def _samples_without_data(config: RunConfig) -> bool:
    """Return whether the run samples clips from published weights, by the encoders of its flags."""
    weights = config.section(PublishedConfig).load_weights
    has_data = config.section(VideoConfig).video_data_path is not None
    return config.training.skip_train and weights is not None and not has_data


def _shape_errors(config: RunConfig, video: VideoConfig) -> list[str]:
    """Return an error for each fault in the flags given together with ``--dry-run-shape``."""
    errors: list[str] = []
    given = f"`--dry-run-shape` ({video.dry_run_shape})"
    if not config.planning.dry_run:
        errors.append(FlagError(given, None, "needs `--dry-run`", "give both"))
    try:
        video.shape_to_price()
    except ConfigError as error:
        errors += error.messages
    others = (*changed(config, ("video",)), *changed(config, ("encode",)))
    errors += [
        FlagError(
            spelled,
            None,
            f"has no effect beside {given}, which prices one shape without data",
            "leave one of them out",
        )
        for spelled in others
        if spelled not in ("--task", "--video-model", "--dry-run-shape")
    ]
    return errors
