"""Encodes parts of a run in a task of Slurm, which runs this program, or in a task of Ray.

    python -m megatron_ext.text.preprocess.task FOLDER [PARTS]

FOLDER is the work directory of a run that tools/preprocess_data.py has cut into parts. PARTS are
the numbers of the parts to encode, such as 0-3,7. Without PARTS, encode all missing parts and join
the datasets.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.errors import (
    ConfigError,
    DataError,
    MegatronExtError,
    run_program,
    say_to_stderr,
    tell_errors,
)
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.preprocess.cluster import numbers_of
from megatron_ext.text.preprocess.jobs import Build, Job, encode_part, unfinished
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import Failure, read_plan, write_failure
from megatron_ext.text.preprocess.run import Report, preprocess, run_or_explain
from megatron_ext.text.preprocess.texts import TextEncoding
from megatron_ext.text.preprocess.workers import encode_parts
from megatron_ext.text.sft.preprocess import (
    SftPreprocessOptions,
    conversation_encoding,
    preprocess_sft,
)
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.fast import InexactEngine


def options_of(saved: dict[str, Any]) -> PreprocessOptions:
    """Return the saved options of a run, changed so that everything runs on this machine.

    ``saved`` is the content of ``job.json``, which `save_job` wrote to the work directory.
    """
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


def job_of(folder: Path, saved: dict[str, Any]) -> Job:
    """Build the `Job` of a run from ``saved``, the content of ``job.json`` in its work directory.

    Raise a DataError if the input has been cut into parts anew since the job was saved.
    """
    plan = read_plan(folder)
    if plan.key != saved["key"]:
        raise DataError(
            f"The parts in {folder} were cut anew after this job had been submitted; submit the "
            "job of the new parts instead."
        )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options = options_of(saved)
    sft = isinstance(options, SftPreprocessOptions)
    build: Build = conversation_encoding if sft else TextEncoding
    encoding = build(options)
    encoder = encoding.encoder(fast=saved["fast"])
    return Job(options, folder, plan.key, plan.parts, encoding, encoder, saved["fast"])


def encode(folder: Path, saved: dict[str, Any], numbers: list[int]) -> None:
    """Encode those of the parts ``numbers`` that are not finished.

    Args:
        folder: the work directory.
        saved: the content of ``job.json`` in it, which the run's coordinating process wrote.

    Raises:
        DataError: a number is too large, the input has been cut into parts anew since the job was
            saved, or the input cannot be used.
    """
    job = job_of(folder, saved)
    if max(numbers, default=0) >= len(job.parts):
        raise DataError(
            f"The job names part {max(numbers)}, but the parts in {folder} are 0 to "
            f"{len(job.parts) - 1}; name some of these."
        )
    encode_parts(job, unfinished(job, numbers), say_to_stderr)


def attempt(folder: Path, key: str, work: Callable[[], None]) -> Sequence[str]:
    """Call ``work``; return the messages of the error that ended it, [] if none did.

    If another attempt would fail in the same way, also write the error to a file in ``folder``, for
    the process that started the run. ``key`` tells which run's parts were encoded (`Job.key`).
    """
    try:
        work()
        return []
    except InexactEngine as error:
        failure = Failure("inexact", [str(error)], key)
    except (ConfigError, DataError) as error:
        failure = Failure("refused", list(error.messages), key)
    except MegatronExtError as error:
        return error.messages
    write_failure(folder, failure)
    return failure.messages


def encode_by_ray(folder: str, key: str, number: int) -> str:
    """Encode one part in a process of Ray; return "", or why a file could not be read or written.

    ``folder`` is the work directory; ``key`` tells which run's parts are meant (`Job.key`). If
    another attempt would fail in the same way, write the error to a file in ``folder`` and return
    "".
    """

    def work() -> None:
        encode_part(_job_by_ray(folder, key), number, lambda _read, _documents: None)

    try:
        attempt(Path(folder), key, work)
    except OSError as error:
        return str(error)
    return ""


@lru_cache(maxsize=1)
def _job_by_ray(folder: str, key: str) -> Job:
    """Build the job saved in ``folder``, once for all Ray tasks of a run that this process runs.

    ``key`` is the `Job.key` of the run; raise a DataError if the parts in ``folder`` have another.
    The current folder becomes that of the process that started the run.
    """
    saved = read_json_object(Path(folder) / "job.json")
    os.chdir(saved["cwd"])
    return job_of(Path(folder), {**saved, "key": key})


def main(argv: list[str]) -> int:
    """Run one task with the arguments FOLDER [PARTS]; return the exit code.

    The code is 0 after success, 2 for bad arguments, and 1 after other errors of the package. With
    PARTS, an error that another attempt would meet again is also written to a file in FOLDER, for
    the process that started the run. Without PARTS, the code is that of `run_or_explain`.
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
        tell_errors(error.messages)
        return 2
    if len(argv) == 1:
        return finish(options_of(saved))
    messages = attempt(folder, saved["key"], lambda: encode(folder, saved, numbers))
    tell_errors(messages)
    return 1 if messages else 0


if __name__ == "__main__":
    run_program(main)
