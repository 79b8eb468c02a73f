#!/usr/bin/env python3
"""Adapters of a trained run (--lora-rank): merged into its weights, or exported for peft.

python tools/lora.py merge --load RUN --save MERGED
python tools/lora.py export --load RUN --output ADAPTER --base-model meta-llama/Llama-3.2-1B
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

from megatron_ext.checkpoint.lora_export import export_adapters
from megatron_ext.checkpoint.lora_merge import merge_checkpoint
from megatron_ext.device import select
from megatron_ext.errors import MegatronExtError
from megatron_ext.training.known_warnings import silence_known_warnings


def parser() -> argparse.ArgumentParser:
    """The flags of both commands."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="a checkpoint without adapters")
    export = commands.add_parser("export", help="a folder that peft loads")
    for command in (merge, export):
        command.add_argument("--load", type=Path, required=True, help="folder of the run")
        command.add_argument("--ckpt-step", type=int, help="iteration; default: the latest")
    merge.add_argument("--save", type=Path, required=True, help="folder for the new checkpoint")
    export.add_argument("--output", type=Path, required=True, help="new folder")
    export.add_argument(
        "--base-model", default="", help="the model's name on Hugging Face, or path"
    )
    return top


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    device = select()
    silence_known_warnings(device.kind)
    try:
        if args.command == "merge":
            print(merge_checkpoint(args.load, args.save, device, step=args.ckpt_step))
            return 0
        left_out = export_adapters(
            args.load, args.output, step=args.ckpt_step, base_model=args.base_model
        )
    except MegatronExtError as error:
        for sentence in error.messages:
            print(f"error: {sentence}", file=sys.stderr)
        return 1
    for name in left_out:
        print(f"> `{name}` has no place in a Hugging Face model and was left out")
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
