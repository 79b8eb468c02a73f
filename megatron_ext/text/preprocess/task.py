"""The program of a task of Slurm: encodes some parts of a run, or finishes the run.

    python -m megatron_ext.text.preprocess.task FOLDER [PARTS]

FOLDER is the work directory of a run that tools/preprocess_data.py has cut into parts. PARTS are
the numbers of the parts to encode, such as 0-3,7. Without PARTS, encode all missing parts and join
the datasets.
"""

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.errors import (
    ConfigError,
    DataError,
    MegatronExtError,
    run_program,
    say_to_stderr,
)
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.config.tokenizer import TokenizerConfig
from megatron_ext.text.preprocess.jobs import Build, Job, unfinished
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import read_plan, replace_file
from megatron_ext.text.preprocess.run import Report, preprocess, run_or_explain
from megatron_ext.text.preprocess.slurm import numbers_of
from megatron_ext.text.preprocess.texts import TextEncoding
from megatron_ext.text.preprocess.workers import encode_parts
from megatron_ext.text.sft.preprocess import (
    SftPreprocessOptions,
    conversation_encoding,
    preprocess_sft,
)
from megatron_ext.text.tokenizers.fast import InexactEngine


def options_of(saved: dict[str, Any]) -> PreprocessOptions:
    """Return the options that the coordinating process has saved, changed for a single machine."""
    values = {**saved["options"], "tokenizer": TokenizerConfig(**saved["options"]["tokenizer"])}
    if saved["kind"] == SftPreprocessOptions.__name__:
        values["sft"] = SftConfig(**values["sft"])
        return _local(SftPreprocessOptions(**values))
    return _local(PreprocessOptions(**values))


def _local(options: PreprocessOptions) -> PreprocessOptions:
    return replace(options, executor="local", slurm_tasks=1, slurm_args="", slurm_script=None)


def finish(options: PreprocessOptions) -> int:
    """Encode the missing parts and join the datasets; return the exit code."""
    run: Callable[[], Report] = lambda: preprocess(options)  # noqa: E731
    if isinstance(options, SftPreprocessOptions):
        run = lambda: preprocess_sft(options)  # noqa: E731
    return run_or_explain(run)


def encode(folder: Path, saved: dict[str, Any], numbers: list[int]) -> None:
    """Encode the parts with these numbers, except those that are finished.

    Raise a DataError if the plan in the folder is not the one for which this task was ``saved``, or
    if it has no such parts.
    """
    plan = read_plan(folder)
    if plan.key != saved["key"]:
        raise DataError(
            f"The parts in {folder} were cut anew after this job had been submitted; submit the "
            "job of the new parts instead."
        )
    if max(numbers, default=0) >= len(plan.parts):
        raise DataError(
            f"The job names part {max(numbers)}, but the parts in {folder} are 0 to "
            f"{len(plan.parts) - 1}; name some of these."
        )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options = options_of(saved)
    sft = isinstance(options, SftPreprocessOptions)
    build: Build = conversation_encoding if sft else TextEncoding
    encoding = build(options)
    encoder = encoding.encoder(fast=saved["fast"])
    job = Job(options, folder, plan.key, plan.parts, encoding, encoder, build, saved["fast"])
    encode_parts(job, unfinished(job, numbers), say_to_stderr)


def main(argv: list[str]) -> int:
    """Run one task, and return the exit code: 0, 1 after an error, or 2 for bad arguments.

    The coordinating process reads the error in the work directory.
    """
    if not 1 <= len(argv) <= 2:
        say_to_stderr(__doc__ or "")
        return 2
    folder = Path(argv[0])
    try:
        saved = read_json_object(folder / "job.json")
        os.chdir(saved["cwd"])
        numbers = numbers_of(argv[1]) if argv[1:] else []
    except (KeyError, TypeError) as error:
        say_to_stderr(f"error: {folder}/job.json is damaged ({error!r}); submit the job anew.")
        return 1
    except OSError as error:
        say_to_stderr(
            f"error: {error.filename} cannot be read ({error.strerror}): the run in {folder} has "
            "ended, or this machine does not share its folders; submit jobs of runs that go on."
        )
        return 1
    except UnreadableFile as error:
        say_to_stderr(
            f"error: {error.path} cannot be read ({error.reason}): the run in {folder} has ended, "
            "or this machine does not share its folders; submit jobs of runs that go on."
        )
        return 1
    except ConfigError as error:
        say_to_stderr(f"error: {error}")
        return 2
    if len(argv) == 1:
        return finish(options_of(saved))
    try:
        encode(folder, saved, numbers)
        return 0
    except InexactEngine as error:
        messages = [str(error)]
        kind = "inexact"
    except MegatronExtError as error:
        messages = list(error.messages)
        kind = "refused" if isinstance(error, (ConfigError, DataError)) else "fault"
    for message in messages:
        say_to_stderr(f"error: {message}")
    if kind != "fault":  # Another attempt would fail in the same way, so tell the coordinator.
        failed = {"kind": kind, "messages": messages, "key": saved["key"]}
        replace_file(folder / f"failed.{secrets.token_hex(6)}.json", json.dumps(failed))
    return 1


if __name__ == "__main__":
    run_program(main)
