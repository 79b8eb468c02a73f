"""Flags and rules of text runs: tokenizer, and fine-tuning on conversations."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.flags import (
    COUNT,
    NATURAL,
    Range,
    changed_fields,
    derived,
    flag,
    spelling_of,
)
from megatron_ext.config.megatron_flags import unmet
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.optimizer import LATENT_TARGETS, TARGETS
from megatron_ext.config.rules.build import build_errors
from megatron_ext.config.rules.latent_attention import latent_attention_errors
from megatron_ext.config.rules.optimizer import target_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.reading import UnreadableFile, parse_json
from megatron_ext.errors import ConfigError
from megatron_ext.text.data.config import FIM_NEEDS, DataConfig, FimConfig, direct_errors
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.hybrid import HybridConfig, hybrid_errors, resolve_hybrid


@dataclass(frozen=True)
class TokenizerConfig:
    """The flags of tokenizers; names and defaults are Megatron-LM's."""

    tokenizer_type: str | None = flag(
        "GPT2BPETokenizer", "kind of tokenizer, such as HuggingFaceTokenizer"
    )
    tokenizer_model: str | None = flag(None, "file or folder of the tokenizer")
    tokenizer_metadata: str | None = flag(
        None, "a JSON file that names the tokenizer's library", if_changed="allow"
    )
    tokenizer_special_tokens: list[str] | None = flag(None, "further special tokens", nargs="+")
    vocab_file: str | None = flag(None, "vocabulary of GPT2BPETokenizer")
    merge_file: str | None = flag(None, "merges of GPT2BPETokenizer")
    vocab_size: int | None = flag(None, "entries of NullTokenizer or TikTokenizer", bounds=COUNT)
    vocab_extra_ids: int = flag(0, "further special tokens", bounds=NATURAL)
    tiktoken_pattern: str | None = flag(None, "pattern by which TikTokenizer cuts words")
    tiktoken_num_special_tokens: int = flag(
        1000, "number of special tokens of TikTokenizer", bounds=NATURAL
    )
    tiktoken_special_tokens: list[str] | None = flag(
        None, "names of the first special tokens of TikTokenizer", nargs="+"
    )
    tokenizer_sentencepiece_legacy: bool = flag(False, "SentencePiece with its legacy wrapper")
    tokenizer_hf_use_fast: bool = flag(
        False, "the fast tokenizer of transformers", if_changed="allow"
    )
    tokenizer_hf_include_special_tokens: bool = flag(False, "let transformers add special tokens")
    trust_remote_code: bool = flag(
        False,
        "let transformers run code of the tokenizer's folder",
        if_changed="allow",
        from_checkpoint=False,
    )


_ROW_FORMATS = ("messages", "prompt-response", "prompt-completion", "sharegpt", "alpaca")
_PROMPT_COLUMNS = {"prompt-completion": ("prompt", "completion")}
"""By row format, the columns of prompt and answer that are not `question` and `answer`."""
_BATCHING = ("packed", "padded", "token-budget")
_ARGUMENT_FORMS = ("auto", "object", "string")

_NO_EPOCHS, _NO_BLEND = "its steps would not add up to epochs", "there is no blend to build"
_NOT_WITH_SFT = {
    "rampup_batch_size": _NO_EPOCHS,
    "step_batch_size_schedule": _NO_EPOCHS,
    "decrease_batch_size_if_needed": _NO_EPOCHS,
    "mock_data": "conversations are read, not made up",
    "dataloader_type": "every epoch is shuffled anew",
    "data_args_path": "files are named by --data-path",
    "per_split_data_args_path": "files are named by --train-data-path and its likes",
    "per_dataset_sequences_path": "lengths are read from the data",
    "mmap_bin_files": "tokens are always mapped into memory",
    "data_order": "conversations have an order of their own",
    "data_schedule": "conversations have no mixture that changes",
    "document_packing": "conversations are packed by --sft-batching",
    "fim_data": "conversations are trained as they are",
    "multiple_validation_sets": "the validation files are one split",
    "data_sharding": "samples are dealt to replicas by their cost",
    "reset_position_ids": "positions always start anew with each conversation",
    "reset_attention_mask": "attention always stays within a conversation",
    "eod_mask_loss": "the mask of the conversation says what is trained",
    "num_dataset_builder_threads": _NO_BLEND,
    "mid_level_dataset_surplus": _NO_BLEND,
    "allow_ambiguous_pad_tokens": "padding is known by its place",
}
"""Flags of training and data that --sft does not allow, each with the reason."""


@dataclass(frozen=True)
class SftConfig:
    """The flags of supervised fine-tuning on conversations.

    A conversation of n tokens takes n - 1 positions of a batch row, since its labels are its tokens
    shifted by one. ``sft_max_length`` counts tokens; ``--seq-length`` counts positions.
    """

    sft: bool = flag(False, "fine-tune on conversations: jsonl, parquet or preprocessed")
    sft_row_format: str = flag(
        "messages", "columns that hold a row's conversation", choices=_ROW_FORMATS
    )
    sft_messages_key: str = flag("messages", "column of messages, each with role and content")
    sft_prompt_key: str | None = flag(
        None,
        "column of the prompt; default: question (prompt-response), prompt (prompt-completion)",
    )
    sft_response_key: str | None = flag(
        None,
        "column of the response; default: answer (prompt-response), completion (prompt-completion)",
    )
    sft_conversations_key: str = flag("conversations", "column of from/value pairs (sharegpt)")
    sft_instruction_key: str = flag("instruction", "column of the instruction (alpaca)")
    sft_input_key: str = flag("input", "optional column of the instruction's input (alpaca)")
    sft_output_key: str = flag("output", "column of the answer (alpaca)")
    sft_history_key: str = flag(
        "history", "optional column of earlier turns, pairs of instruction and answer (alpaca)"
    )
    sft_system_key: str = flag("system", "optional column of the system text")
    sft_tools_key: str = flag("tools", "optional column of tool schemas")
    sft_enable_thinking_key: str = flag("enable_thinking", "optional column of booleans")
    sft_chat_template: str | None = flag(
        None, "a Jinja file; default: the chat template of the tokenizer", from_checkpoint=False
    )
    sft_template_kwargs: str | None = flag(
        None, 'JSON object for the template, such as {"enable_thinking": false}'
    )
    sft_date: str | None = flag(
        None,
        "the date, as YYYY-MM-DD, that a template with strftime_now writes; default: the day on "
        "which the conversations are tokenized",
    )
    sft_tool_arguments: str = flag(
        "auto",
        "the form in which the template gets the arguments of tool calls: as an object, as JSON "
        "text (string), or as it needs them, found by a trial (auto)",
        choices=_ARGUMENT_FORMS,
    )
    sft_on_unrendered: str = flag(
        "refuse",
        "a message, tool, tool call or reasoning that the template leaves out of the text is "
        "refused, or counted in the report (note)",
        choices=("refuse", "note"),
    )
    sft_split_turns: bool = flag(
        False,
        "make one sample of each trained assistant turn, which ends with it, so that a template "
        "that shortens earlier turns writes each as it is generated",
    )
    sft_on_mismatch: str = flag(
        "error",
        "a turn that the template writes otherwise once messages follow is refused (error) or "
        "looked for (realign)",
        choices=("error", "realign"),
    )
    sft_max_length: int | None = flag(
        None, "longest conversation; default: --seq-length", unit="tokens", bounds=Range(2)
    )
    sft_truncation: str = flag(
        "error",
        "conversations longer than --sft-max-length are refused, or keep their last (left) or "
        "first tokens (right)",
        choices=("error", "left", "right"),
    )
    sft_batching: str = flag(
        "packed",
        "rows of several conversations, one conversation in each row, or as many micro-batches of "
        "--seq-length tokens as the conversations of a step need",
        choices=_BATCHING,
    )

    def resolved(self, seq_length: int | None) -> "SftConfig":
        """Return these flags; under ``--sft``, ``sft_max_length`` defaults to ``seq_length``."""
        if self.sft_max_length is not None or not self.sft:
            return self
        return dataclasses.replace(self, sft_max_length=seq_length)

    @property
    def prompt_column(self) -> str:
        return self.sft_prompt_key or _PROMPT_COLUMNS.get(self.sft_row_format, ("question",))[0]

    @property
    def response_column(self) -> str:
        return self.sft_response_key or _PROMPT_COLUMNS.get(self.sft_row_format, ("answer",))[-1]

    written_date: str | None = derived()
    """The date that the chat template writes in this run; None if it writes none."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return dict(parse_json(self.sft_template_kwargs or "{}", "--sft-template-kwargs"))

    def row_errors(self) -> list[str]:
        """Return an error for each flag about rows and templates that has a bad value."""
        errors = []
        if self.sft_row_format not in _ROW_FORMATS:
            errors.append(
                f"`--sft-row-format` ({self.sft_row_format}) must be one of "
                f"{', '.join(_ROW_FORMATS)}."
            )
        if self.sft_date is not None and not is_date(self.sft_date):
            errors.append(
                f"`--sft-date` ({self.sft_date}) must be a day as YYYY-MM-DD; use 2024-07-26."
            )
        try:
            kwargs = parse_json(self.sft_template_kwargs or "{}", "--sft-template-kwargs")
        except UnreadableFile:
            kwargs = None
        if not isinstance(kwargs, dict):
            errors.append(
                f"`--sft-template-kwargs` ({self.sft_template_kwargs}) must be a JSON object; "
                """use '{"enable_thinking": false}'."""
            )
        return errors


def is_date(text: str) -> bool:
    """Tell whether a text is a day as YYYY-MM-DD."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _sft_errors(sft: SftConfig, run: RunConfig) -> list[str]:
    """Return an error for each flag that does not go with ``--sft``, or that needs ``--sft``."""
    training = run.training
    seq_length = run.model.seq_length
    if not sft.sft:
        errors = [
            f"`{spelling_of(sft, name)}` has an effect only with `--sft`; add it, or leave this "
            "out."
            for name in changed_fields(sft)
        ]
        if training.train_epochs is not None:
            errors.append("`--train-epochs` needs `--sft`; give `--train-iters`.")
        return errors
    sections = training, run.section(DataConfig), run.section(FimConfig)
    changes = {name: section for section in sections for name in changed_fields(section)}
    errors = [
        f"`{spelling_of(changes[name], name)}` does not go with `--sft`: {reason}; leave it out."
        for name, reason in _NOT_WITH_SFT.items()
        if name in changes
    ]
    errors += sft.row_errors()
    longest = sft.sft_max_length
    batching = sft.sft_batching
    if seq_length is not None and longest is not None and not 2 <= longest <= seq_length + 1:
        errors.append(
            f"`--sft-max-length` ({longest}) must be from 2 to `--seq-length` + 1 "
            f"({seq_length + 1}), since n tokens take n - 1 positions; change either."
        )
    if batching not in _BATCHING:
        return [*errors, f"`--sft-batching` ({batching}) must be one of {', '.join(_BATCHING)}."]
    if run.model.deterministic_dropout and batching != "padded":
        errors.append(
            "`--deterministic-dropout` numbers the samples of a step by their place, which "
            f"`--sft-batching {batching}` changes with the layout; use padded."
        )
    if batching == "token-budget" and training.micro_batch_size not in (None, 1):
        errors.append(
            f"`--micro-batch-size` ({training.micro_batch_size}) must be 1 with "
            "`--sft-batching token-budget`, whose micro-batches are rows of --seq-length "
            "tokens; give `--micro-batch-size 1`."
        )
    return errors


SECTIONS = (
    DataConfig,
    FimConfig,
    SftConfig,
    TokenizerConfig,
    HybridConfig,
    TaskEvaluationConfig,
)
"""The sections that pretrain_gpt.py adds to the engine's flags."""

_SENTENCE_PIECE = "SentencePieceTokenizer or GPTSentencePieceTokenizer or Llama2Tokenizer"
TOKENIZER_NEEDS = {
    "--tokenizer-type GPT2BPETokenizer": "vocab_file merge_file",
    "--tokenizer-type NullTokenizer or TikTokenizer or ByteLevelTokenizer": "vocab_size",
    "--tokenizer-type TikTokenizer": (
        "tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens"
    ),
    f"--tokenizer-type {_SENTENCE_PIECE}": "tokenizer_sentencepiece_legacy",
    "--tokenizer-type HuggingFaceTokenizer": "tokenizer_hf_include_special_tokens",
    f"--tokenizer-type HuggingFaceTokenizer or TikTokenizer or {_SENTENCE_PIECE}": (
        "tokenizer_model"
    ),
}
"""Fields of the tokenizer without effect unless it is of the type that the key names."""


def idle_tokenizer_flags(settings: TokenizerConfig) -> list[str]:
    """Return a note for each flag that a tokenizer of this type does not read."""
    given = changed_fields(settings)
    return [
        f"`{spelling_of(settings, name)}` ({getattr(settings, name)}) has no effect without "
        f"`{needed}`."
        for needed, names in unmet(TOKENIZER_NEEDS, vars(settings))
        for name in names
        if name in given
    ]


NEEDS = {"--dataloader-type cyclic": "data_sharding", **TOKENIZER_NEEDS, **FIM_NEEDS}
"""Fields without effect unless the flag that is the key is given (`megatron_flags.NEEDS`)."""


def resolve_text(config: RunConfig) -> RunConfig:
    """Return the configuration with the values that the text tenant derives from others."""
    config = resolve_hybrid(config)
    data = config.section(DataConfig)
    sft = config.section(SftConfig)
    packs = sft.sft and sft.sft_batching != "padded"
    model = dataclasses.replace(config.model, document_masks=data.reset_attention_mask or packs)
    lora = config.lora
    if lora.lora_rank is not None and lora.lora_target_modules is None:
        lora = dataclasses.replace(lora, lora_target_modules=list(_targets(model)))
    config = dataclasses.replace(config, model=model, lora=lora)
    return config.with_section(data.resolved(), sft.resolved(config.model.seq_length))


def _targets(model: ModelConfig) -> Sequence[str]:
    """Return the names of the linear layers of a GPT's blocks that may have adapters."""
    return LATENT_TARGETS if model.multi_latent_attention else TARGETS


def text_rules(given: RunConfig, run: RunConfig) -> list[str]:
    data = run.section(DataConfig)
    sft = run.section(SftConfig)
    return [
        *hybrid_errors(given, run),
        *data.own_errors(full_validation=run.training.full_validation),
        *direct_errors(data, run, sft=sft.sft),
        *run.section(FimConfig).own_errors(),
        *_sft_errors(sft, run),
        *target_errors(run.lora, _targets(run.model)),
        *_mask_errors(data, sft, run.model.transformer_impl),
        *latent_attention_errors(given.model, run.model),
        *build_errors(run.model, run.moe, run.parallel, run.training),
    ]


def _mask_errors(data: DataConfig, sft: SftConfig, transformer_impl: str) -> list[str]:
    """Return an error for each flag whose mask Transformer Engine's causal attention ignores."""
    if transformer_impl != "transformer_engine":
        return []
    errors = []
    if data.reset_attention_mask:
        errors.append(
            "`--reset-attention-mask` needs masks that Transformer Engine's causal attention "
            "ignores; use `--transformer-impl torch`."
        )
    if sft.sft and sft.sft_batching != "padded":
        errors.append(
            f"`--sft-batching` ({sft.sft_batching}) needs masks that Transformer Engine's "
            "causal attention ignores; use padded, or `--transformer-impl torch`."
        )
    return errors


def stored_text_model(stored: Mapping[str, Any], given: RunConfig) -> dict[str, Any]:
    """Return the sections of a checkpoint's configuration that describe the weights of its GPT.

    Raise a ConfigError if the checkpoint is of another kind of model.
    """
    if stored.get("model", {}).get("blocks_dealt_by_cost"):
        raise ConfigError(
            "The checkpoint is of a model that this program does not train; give another "
            "checkpoint, or leave out `--use-checkpoint-args`."
        )
    keep = SHAPE.split()
    shape = {name: value for name, value in stored["model"].items() if name in keep}
    return {"model": shape, "moe": stored["moe"], "lora": stored.get("lora", {})}


SHAPE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
    "group_query_attention max_position_embeddings position_embedding_type rotary_base "
    "rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling "
    "rope_scaling_factor rope_scaling rope_local_base_freq no_rope_freq window_size "
    "window_attn_skip_freq softmax_type softmax_scale attn_logit_softcapping "
    "final_logit_softcapping normalization norm_epsilon apply_layernorm_1p swiglu squared_relu "
    "quick_geglu geglu openai_gelu activation_func_clamp_value glu_linear_offset add_bias_linear "
    "add_qkv_bias add_proj_bias add_mlp_bias qk_layernorm sandwich_norm embedding_multiplier "
    "untie_embeddings_and_output_weights "
    "padded_vocab_size mtp_num_layers seq_length multi_latent_attention q_lora_rank kv_lora_rank "
    "qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor "
    "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
)
"""Fields of the stored section ``model`` that are restored, since the weights depend on them."""
