"""The files that a text run needs, looked for without importing torch or megatron-core.

A refused run reports missing files together with the mistakes in its flags, so these checks must be
quick. Each is a function that raises an error if its file cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import DataError
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.data.blend import SPLITS, given_lengths
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.tokenizers import TokenizerConfig, check_files
from megatron_ext.train.task import later

INDEXED = "megatron_ext.data.indexed"
SFT = "megatron_ext.text.sft"
read_settings = later("megatron_ext.text.convert.settings:read_settings")
training_blend = later("megatron_ext.text.data.prefixes:training_blend")


def plans_without_data(config: RunConfig) -> bool:
    """Return whether a dry run can do without a tokenizer and data, of which the flags name none.

    ``--padded-vocab-size``, which a plan needs, must be given; recipes give it. NullTokenizer
    without ``--vocab-size`` counts as none.
    """
    unnamed = (TokenizerConfig(), TokenizerConfig(tokenizer_type="NullTokenizer"))
    named = (
        {*config.section(DataConfig).given_sources()} - {"--mock-data"}
        or config.section(HuggingFaceConfig).load_hf is not None
        or config.section(TokenizerConfig) not in unnamed
    )
    return config.planning.dry_run and bool(config.model.padded_vocab_size) and not named


def tokenizer_inputs(config: RunConfig) -> list[Callable[[], Any]]:
    """Return functions that each raise an error if a file of the run cannot be used.

    The files are the folder of ``--load-hf`` and those of the tokenizer. With ``--load-hf``, the
    tokenizer is checked only if ``--tokenizer-type`` is given too.
    """
    checks: list[Callable[[], Any]] = []
    folder = config.section(HuggingFaceConfig).load_hf
    tokenizer = config.section(TokenizerConfig)
    if folder is not None:
        checks.append(partial(read_settings, Path(folder)))
    if folder is None or tokenizer.tokenizer_type != TokenizerConfig().tokenizer_type:
        checks.append(partial(check_files, tokenizer))
    return checks


def gpt_inputs(config: RunConfig) -> list[Callable[[], Any]]:
    """Return functions that each raise an error if a tokenizer's file or a dataset is unusable."""
    if plans_without_data(config):
        return []
    return [*tokenizer_inputs(config), *dataset_checks(config)]


def dataset_checks(config: RunConfig) -> list[Callable[[], Any]]:
    """Return functions that check the flags and files by which a run's datasets are given.

    One function for each dataset checks that its files exist; another checks the file of
    ``--per-dataset-sequences-path``. With ``--data-order direct``, datasets at network addresses
    are left out, since checking them needs the network.
    """
    data = config.section(DataConfig)
    length = config.model.seq_length or 0
    # Without `--seq-length` the lengths in a schedule cannot be checked. Its lack is reported
    # elsewhere.
    if data.mock_data or (data.data_schedule is not None and length < 1):
        return []
    try:
        if data.data_schedule is not None:
            read_schedule = later("megatron_ext.text.data.schedule:read_schedule")
            schedule = read_schedule(data.data_schedule, length)
            prefixes = [name for stage in schedule.stages for name in stage.weights]
        else:
            prefixes = training_blend(data).prefixes()
    except DataError as error:
        return [partial(_raise, error)]
    present = later(f"{INDEXED}:check_present")
    local = dict.fromkeys(prefixes)
    if data.data_order == "direct":
        is_address = later(f"{INDEXED}:is_address")
        local = {prefix: None for prefix in local if not is_address(prefix)}
    checks: list[Callable[[], Any]] = [partial(present, prefix) for prefix in local]
    if data.per_dataset_sequences_path is not None:
        checks.append(partial(given_lengths, data, training_blend(data)))
    return checks


def _raise(error: DataError) -> None:
    raise error


def conversation_inputs(config: RunConfig) -> list[Callable[[], Any]]:
    """Return functions that each raise an error if a file of the run cannot be used.

    The files are those of the tokenizer, the chat template and the conversations.
    """
    checks = tokenizer_inputs(config)
    template = config.section(SftConfig).sft_chat_template
    if template is not None:
        checks.append(partial(later(f"{SFT}.chat:read_template"), "--sft-chat-template", template))
    present = later(f"{SFT}.preprocess:check_name")
    for flag, names in names_by_flag(config.section(DataConfig)).items():
        checks += [partial(present, flag, name) for name in names or ()]
    return checks


def names_by_flag(data: DataConfig) -> dict[str, list[str] | None]:
    """Return {data flag: names that the user gives with it}; None for a flag that is not given.

    If ``--data-path`` is given, which is for all splits together, it is the only flag. Otherwise
    there is one flag for each split.
    """
    if data.data_path is not None:
        return {"--data-path": data.data_path}
    return {f"--{name}-data-path": getattr(data, f"{name}_data_path") for name in SPLITS}
