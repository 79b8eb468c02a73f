"""Merges the adapters of a run with --lora-rank into its weights, exports or adds up adapters.

python tools/lora.py merge --load RUN --save MERGED
python tools/lora.py export --load RUN --output ADAPTER --base-model meta-llama/Llama-3.2-1B
python tools/lora.py combine --adapters ADAPTER OTHER --weights 0.7 0.3 --output BOTH

Adapters of a video run (pretrain_video.py) have the names of diffusers' class of its network, or,
by --format, those of kohya's programs, of ComfyUI or of the original code. With --task streaming
two networks have adapters, of which --network chooses one; the default is the generator.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.checkpoint.adapter_forms import FORMS
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.flags import FINITE, NATURAL, SIZE
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import described
from megatron_ext.device import select
from megatron_ext.errors import (
    CheckpointError,
    MegatronExtError,
    tell_errors,
)
from megatron_ext.text.task import GPT
from megatron_ext.train.main import silence_known_warnings
from megatron_ext.train.task import Task, later
from megatron_ext.video.config.weights import FILL, is_published
from megatron_ext.video.streaming.config import STORED_ROLES
from megatron_ext.video.streaming.task import STREAMING
from megatron_ext.video.task import FLOW

# Imported when they are called, so that help and a wrong option need no torch.
_CONVERSION = "megatron_ext.checkpoint.conversion"
_FILES = "megatron_ext.checkpoint.adapter_files"
add_weighted = later("megatron_ext.checkpoint.weighted_adapters:add_weighted")
export_adapters = later(f"{_FILES}:export_adapters")
adapters_of = later("megatron_ext.video.convert.adapters:adapters_of")
is_streaming = later("megatron_ext.video.convert.find:is_streaming")
merge_checkpoint = later(f"{_CONVERSION}:merge_checkpoint")
fill_model = later("megatron_ext.text.convert.training:fill_model")
is_folder = later("megatron_ext.text.convert.training:is_folder")
network_of = later("megatron_ext.video.streaming.networks:network_of")
network_alone = later(f"{_CONVERSION}:Network")
peft_layers = later("megatron_ext.text.convert.adapters:peft_layers")


def parser() -> argparse.ArgumentParser:
    """Build the parser of the commands merge, export and combine."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="write a checkpoint without adapters")
    export = commands.add_parser("export", help="write adapters that other programs load")
    _add_options_of_sums(commands.add_parser("combine", help="add adapters of peft's with weights"))
    for command in (merge, export):
        command.add_argument(
            "--load", type=Path, required=True, help="folder of the run's checkpoints"
        )
        command.add_argument(
            "--ckpt-step",
            type=NATURAL.integer,
            help="iteration of the checkpoint to read; default: the latest",
        )
        command.add_argument(
            "--network",
            choices=STORED_ROLES,
            help="network of a streaming run; default: the generator",
        )
    merge.add_argument("--save", type=Path, required=True, help="folder for the new checkpoint")
    merge.add_argument(
        "--pretrained-checkpoint",
        help="weights under adapters that were saved alone, as of a streaming run; default: where "
        "the run found them",
    )
    export.add_argument(
        "--output",
        type=Path,
        required=True,
        help="new folder for the adapters; for kohya, comfyui and original a new .safetensors file",
    )
    export.add_argument(
        "--format",
        choices=FORMS,
        default="peft",
        help="form of the adapters: a folder that peft or diffusers loads, peft's with a layer for "
        "each expert, or a file of kohya (musubi-tuner), of ComfyUI, or with the original code's "
        "names; default: peft",
    )
    export.add_argument(
        "--base-model", default="", help="the model's name on Hugging Face, or path"
    )
    return top


def _add_options_of_sums(combine: argparse.ArgumentParser) -> None:
    combine.add_argument(
        "--adapters", type=Path, nargs="+", required=True, help="folders of peft, as export writes"
    )
    combine.add_argument(
        "--weights",
        type=FINITE.number,
        nargs="+",
        required=True,
        help="a factor for each, which may be negative",
    )
    combine.add_argument(
        "--combination-type",
        choices=("linear", "cat", "svd"),
        default="svd",
        help="cat is exact, its rank the sum of the ranks; svd is the nearest of --svd-rank; "
        "linear adds A and B, which is a rough approximation; default: svd",
    )
    combine.add_argument(
        "--svd-rank", type=SIZE.integer, help="rank of svd; default: the largest of the ranks"
    )
    combine.add_argument("--output", type=Path, required=True, help="new folder for the sum")


def main(argv: Sequence[str]) -> int:
    """Merge, export or combine adapters; return the exit code."""
    args = parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    silence_known_warnings(select().kind)
    try:
        {"merge": _merge, "export": _export, "combine": _combine}[args.command](args)
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 1
    return 0


def _merge(args: argparse.Namespace) -> None:
    run, task = _saved_run(args)
    if task is STREAMING:
        network = network_of(args.network)
    else:
        published = {"fill": FILL, "is_published": is_published}
        if task is GPT:
            published = {"fill": fill_model, "is_published": is_folder}
        network = network_alone(task.model_chunk, **published)
    base = args.pretrained_checkpoint
    print(
        merge_checkpoint(
            run, network, args.load, args.save, select(), step=args.ckpt_step, base=base
        )
    )


def _combine(args: argparse.Namespace) -> None:
    if args.svd_rank is not None and args.combination_type != "svd":
        raise CheckpointError(
            f"`--svd-rank` ({args.svd_rank}) has no effect with `--combination-type "
            f"{args.combination_type}`; leave it out."
        )
    add_weighted(args.adapters, args.weights, args.output, args.combination_type, args.svd_rank)
    print(args.output)


def _export(args: argparse.Namespace) -> None:
    run, task = _saved_run(args)
    video = task is not GPT
    text_forms = ("peft", "peft-experts")
    if video and args.format == "peft-experts":
        raise CheckpointError(
            f"`--format {args.format}` is for language models with experts, but `--load` "
            f"({args.load}) holds a video model; give peft."
        )
    if not video and args.format not in text_forms:
        raise CheckpointError(
            f"`--format {args.format}` is for runs of `pretrain_video.py`, but `--load` "
            f"({args.load}) holds a language model; leave it out."
        )
    if args.base_model and args.format not in (*text_forms, "diffusers"):
        raise CheckpointError(
            f"`--base-model` ({args.base_model}) has no effect with `--format {args.format}`, "
            "whose files name no model; leave it out."
        )
    form = FORMS[args.format]
    if video:
        layers = adapters_of(run, form, args.network)
    else:
        layers = peft_layers(run, args.load, per_expert=args.format == "peft-experts")
    left_out = export_adapters(
        run.lora,
        args.load,
        args.output,
        layers,
        form=form,
        section="critic" if args.network == "critic" else None,
        step=args.ckpt_step,
        base_model=args.base_model,
    )
    for name in left_out:
        print(f"> `{name}` has no place in a Hugging Face model and was left out")
    print(args.output)


def _saved_run(args: argparse.Namespace) -> tuple[RunConfig, Task]:
    """Return the configuration of the saved run, and its task."""
    stored = read_run_config(args.load, args.ckpt_step)
    task = GPT
    if stored.get("video"):
        task = STREAMING if is_streaming(stored) else FLOW
    if args.network is not None and task is not STREAMING:
        raise CheckpointError(
            f"`--network` ({args.network}) is for runs of `pretrain_video.py --task streaming`, "
            f"but `--load` ({args.load}) holds one model; leave it out."
        )
    return RunConfig.from_dict(described(stored, task.sections), task.sections), task
