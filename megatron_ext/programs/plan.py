"""Plan a run on any number of GPUs, without a GPU and without starting anything.

Prints all errors of the flags. If there are none, prints whether the run fits into memory, the
estimated step time and MFU, parameters and memory of each pipeline stage, the bubble of the
schedule, the bytes of each kind of communication, and the time of each class of kernels with the
assumed rates.

    python tools/plan.py --world-size 64 --gpu H100 [--png plan.png] -- <flags of pretrain_gpt.py>
    python tools/plan.py --world-size 64 --gpu H100 --search --flags 2 -- <flags of pretrain_gpt.py>
    python tools/plan.py --world-size 64 --gpu H200 --video -- <flags of pretrain_video.py>

``--gpu`` also takes a file that ``tools/doctor.py --json`` has written, whose measured rates then
replace the assumed ones. ``--search`` tries tensor, pipeline, virtual, context and expert sizes,
micro-batches and recomputation in place of those that the flags give, with and without sharded
gradients and weights, optimizer state and activations on the host, pairs of passes, two hops and
kept tokens, and lists the fastest layouts that fit; ``--flags N`` prints the whole commands of the
first N. ``--json`` prints all figures as JSON. The vocabulary size comes from the tokenizer, or
from ``--padded-vocab-size``; the lengths of videos come from their data or ``--dry-run-shape``,
which a search needs.
Exit code 0: the run fits; 1: it does not; 2: the flags have errors.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.flags import COUNT, NATURAL, SIZE
from megatron_ext.config.output import GPU_NAMES
from megatron_ext.config.tool_options import own_options
from megatron_ext.errors import ConfigError, MegatronExtError, tell_errors

if TYPE_CHECKING:
    from megatron_ext.config.parser import ParsedArgs
    from megatron_ext.config.run import RunConfig
    from megatron_ext.planning.sheet import Report
    from megatron_ext.planning.step_time import Estimate


def main(argv: Sequence[str]) -> int:
    """Print the plan of a run; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--world-size", type=SIZE.integer, required=True, metavar="N", help="number of GPUs"
    )
    parser.add_argument(
        "--gpu", default="H100", help=f"kind of GPU: {', '.join(GPU_NAMES)}, or a .json file (H100)"
    )
    parser.add_argument("--search", action="store_true", help="list the fastest layouts")
    parser.add_argument("--video", action="store_true", help="read flags of pretrain_video.py")
    parser.add_argument(
        "--count", type=COUNT.integer, default=10, metavar="N", help="layouts to list (10)"
    )
    parser.add_argument(
        "--flags", type=NATURAL.integer, default=0, metavar="N",
        help="with --search: print the whole commands of the N fastest layouts",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--png", type=Path, help="draw schedule and memory")
    args, words = own_options(parser, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_ext.planning.hardware import gpu_named
    from megatron_ext.train.main import silence_known_warnings

    silence_known_warnings("cpu")
    try:
        gpu_named(args.gpu, "--gpu")
        refuse_options(args)
        planner = Planner(args, tuple(words))
        return propose(planner) if args.search else plan(planner)
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 2


def refuse_options(args: argparse.Namespace) -> None:
    """Raise a ConfigError with a sentence on each given option that has no effect here."""
    errors = []
    if args.video and args.png is not None:
        errors.append("`--png` is there for text models alone; leave it out with `--video`.")
    if args.search and args.png is not None:
        errors.append("`--png` draws one plan; leave it out with `--search`.")
    if args.flags and not args.search:
        errors.append(f"`--flags` ({args.flags}) needs `--search`; give both.")
    if errors:
        raise ConfigError(errors)


@dataclass(frozen=True)
class Planner:
    """Reads the flags of runs as their program would, for a dry run without its GPUs.

    Attributes:
        args: the options of this tool.
        words: the flags of the run.
    """

    args: argparse.Namespace
    words: tuple[str, ...]

    @property
    def script(self) -> str:
        """Return the name of the program whose flags are read."""
        return "pretrain_video.py" if self.args.video else "pretrain_gpt.py"

    @property
    def program(self) -> Any:
        """Return the program whose flags are read."""
        if self.args.video:
            from megatron_ext.video.task import VIDEO

            return VIDEO
        from megatron_ext.text.task import TEXT

        return TEXT

    def parsed(self, words: Sequence[str], world_size: int) -> ParsedArgs:
        """Parse flags; raise a ConfigError with a sentence for each error."""
        from megatron_ext.config.parser import parse_args

        planned = {"dry_run": True, "dry_run_gpu": self.args.gpu}
        return parse_args(
            words, self.program, world_size=world_size, device="cuda", defaults=planned
        )

    def completed(self, config: RunConfig, task: Any) -> RunConfig:
        """Return a run's configuration with what follows from its tokenizer or its clips.

        Raises:
            ConfigError, DataError: flags or data have errors; it has a sentence for each.
        """
        with redirect_stdout(sys.stderr if self.args.json else sys.stdout):
            if self.args.video:
                from megatron_ext.train.main import preflight

                return preflight(config, task.preflight)[0]
            if config.model.padded_vocab_size:
                return config
            from megatron_ext.text.run import with_tokenizer

            return with_tokenizer(config)[0]


def plan(planner: Planner) -> int:
    """Print the plan, draw its pictures if asked, and return the exit code."""
    from megatron_ext.layers.transformer_config import check_core
    from megatron_ext.planning.hardware import gpu_named
    from megatron_ext.planning.memory import worst_case
    from megatron_ext.planning.report import report_of, save_pictures

    args = planner.args
    gpu = gpu_named(args.gpu, "--gpu")
    arguments = planner.parsed(planner.words, args.world_size)
    tell(args, arguments.notes)
    config = planner.completed(arguments.config, arguments.task)
    cost = arguments.task.cost
    check_core(config)
    report = report_of(config, gpu, cost)
    print_report(args, report)
    if args.png is not None and cost is not None:
        network, _ = worst_case(cost.cases(config))
        written = save_pictures(network, args.png, gpu)
        tell(args, ["wrote " + " and ".join(str(path) for path in written)])
    return 0 if report.fits else 1


def propose(planner: Planner) -> int:
    """Print the fastest layouts that fit and, if asked, their commands.

    Return the exit code: 1 if no layout fits, else 0.
    """
    from megatron_ext.planning.hardware import gpu_named
    from megatron_ext.planning.layouts import (
        PARALLEL,
        START,
        LayoutFlags,
        decided_fields,
        fixed_errors,
        no_layout,
        one_rank,
        without,
    )
    from megatron_ext.planning.proposal import check_line, command, fewest_words, proposal
    from megatron_ext.planning.search import search

    args = planner.args
    program = planner.program
    gpu = gpu_named(args.gpu, "--gpu")
    alone = one_rank(program)
    # A search decides the layout: a file with layouts gives the model alone.
    unchosen = no_layout(planner.words, program)
    started = [*without(planner.words, program, {*START, *PARALLEL}), *unchosen]
    arguments = planner.parsed([*started, *alone], 1)
    check_searchable(planner, [*started, *alone], arguments)
    cost = arguments.task.cost
    decided = decided_fields(arguments.config, cost)
    kept = [*without(planner.words, program, decided), *unchosen]
    arguments = planner.parsed([*kept, *alone], 1)
    if errors := fixed_errors(arguments.config, arguments.task.defaults, decided):
        raise ConfigError(errors)
    notes = arguments.notes
    base = planner.completed(arguments.config, arguments.task)
    complete = completion(planner, base, arguments.task)
    with_values = arguments.with_values
    assert with_values is not None

    def parse(words: Sequence[str]) -> RunConfig:
        return complete(planner.parsed([*kept, *words], args.world_size).config)

    def completed(values: Mapping[str, Any]) -> RunConfig:
        return complete(with_values(values, args.world_size))

    flags = LayoutFlags(program, cost, base)
    kept = [*without(kept, program, {"micro_batch_size"}), *unchosen]
    # Collections would go through all layouts again and again, and find next to nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        result = search(base, flags, completed, args.world_size, gpu, count=args.count)
    finally:
        if collects:
            gc.enable()
    if result.best:
        # What has no effect on one rank may have some in the layout.
        words = [word for entry in result.best[0].words for word in entry]
        of_best = planner.parsed([*kept, *words], args.world_size).notes
        notes = [note for note in notes if note in of_best]
    tell(args, notes)
    report = proposal(result, args.world_size, gpu, given_estimate(planner, complete))
    commands = []
    for layout in result.best[: len(result.best) if args.json else args.flags]:
        words = [word for entry in fewest_words(layout, parse) for word in entry]
        commands.append(command(planner.script, [*kept, *words], args.world_size, gpu))
    if args.json:
        print(json.dumps({**report.as_json(), "commands": commands}, indent=1))
        return 0 if result.best else 1
    report.show()
    for number, text in enumerate(commands):
        layout = result.best[number]
        print(f"\n# {number + 1}. {layout.candidate}: {layout.cost.seconds:.3g} s a step")
        print(text)
    if commands:
        print("\n" + check_line(planner.script, args.world_size, args.gpu, gpu))
    elif result.best:
        print("\n`--flags 1` prints the whole command of the first layout.")
    return 0 if result.best else 1


def check_searchable(planner: Planner, words: Sequence[str], arguments: ParsedArgs) -> None:
    """Raise a ConfigError if the layouts of a run cannot be compared from its flags alone.

    ``arguments`` are those of ``words`` on one rank.
    """
    errors = []
    cost = arguments.task.cost
    if cost is None or cost.report is not None:
        errors.append(
            "`--search` compares runs that train one network, and this task trains several or "
            "names no `cost`; leave `--search` out."
        )
    elif planner.args.video:
        from megatron_ext.video.config.run import VideoConfig

        if arguments.config.section(VideoConfig).dry_run_shape is None:
            errors.append(
                "`--search` with `--video` needs `--dry-run-shape`, since it does not open the "
                "data for each layout; give one, such as `--dry-run-shape 768x768x129`."
            )
    if not has_batch(planner, words, arguments.config):
        errors.append(
            "`--search` needs `--global-batch-size`, the same for all layouts, since it compares "
            "the time of a step; give it."
        )
    if errors:
        raise ConfigError(errors)


def has_batch(planner: Planner, words: Sequence[str], config: RunConfig) -> bool:
    """Return whether the flags give the global batch size, which otherwise grows with the ranks.

    ``config`` is that of ``words`` on one rank.
    """
    try:
        other = planner.parsed(words, 2).config
    except ConfigError:
        return True
    return bool(other.training.global_batch_size == config.training.global_batch_size)


def completion(planner: Planner, base: RunConfig, task: Any) -> Callable[[RunConfig], RunConfig]:
    """Return a function that does for each layout what `Planner.completed` does for ``base``.

    It opens no tokenizer again.
    """
    if planner.args.video:
        return partial(planner.completed, task=task)
    size = base.model.unpadded_vocab_size

    def padded(config: RunConfig) -> RunConfig:
        if config.model.padded_vocab_size or not size:
            return config
        from megatron_ext.text.run import padded_to_ranks

        return replace(config, model=padded_to_ranks(config.model, config.parallel, size))

    return padded


def given_estimate(planner: Planner, complete: Callable[[RunConfig], RunConfig]) -> Estimate | None:
    """Return the estimate of the run with the user's own layout; None if that cannot run."""
    from megatron_ext.planning.hardware import gpu_named
    from megatron_ext.planning.memory import worst_case
    from megatron_ext.planning.step_time import estimate

    try:
        arguments = planner.parsed(planner.words, planner.args.world_size)
        network, ranks = worst_case(arguments.task.cost.cases(complete(arguments.config)))
    except MegatronExtError:
        return None
    return estimate(network, gpu_named(planner.args.gpu, "--gpu"), ranks=ranks)


def print_report(args: argparse.Namespace, report: Report) -> None:
    """Print a report as tables or as JSON."""
    if args.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        report.show()


def tell(args: argparse.Namespace, notes: Sequence[str]) -> None:
    """Print notes; beside JSON, to stderr."""
    for note in notes:
        print(f"> {note}", file=sys.stderr if args.json else sys.stdout)
