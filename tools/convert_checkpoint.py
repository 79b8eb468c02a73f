#!/usr/bin/env python3
"""Turns a Hugging Face model into a checkpoint that training starts from, and back.

    python tools/convert_checkpoint.py import --hf FOLDER --save CHECKPOINT
    python tools/convert_checkpoint.py export --load CHECKPOINT --hf FOLDER --hf-like ORIGINAL

Folders are local and hold safetensors; nothing is fetched. Models are dense llama, mistral, qwen2
and qwen3. What is imported loads in any layout, with --pretrained-checkpoint CHECKPOINT or with
--load CHECKPOINT --finetune; add --use-checkpoint-args to the latter to take the model's shape from
it. Runs in one process on the CPU. Exit code 0, or 2 after a user's error.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# One copy of the weights must fit into memory, not into that of a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from megatron_ext.checkpoint.huggingface.exporting import Export, export_model
from megatron_ext.checkpoint.huggingface.importing import Import, import_model
from megatron_ext.checkpoint.huggingface.single_rank import PRECISIONS
from megatron_ext.errors import MegatronExtError
from megatron_ext.training.known_warnings import silence_known_warnings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_import(commands.add_parser("import", help="Hugging Face model -> checkpoint"))
    _add_export(commands.add_parser("export", help="checkpoint -> Hugging Face model"))
    for command in commands.choices.values():
        command.add_argument(
            "--dtype", choices=PRECISIONS, help="of the weights to write (default: the source's)"
        )
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf", required=True, type=Path, help="folder of the model")
    parser.add_argument("--save", required=True, type=Path, help="folder for the checkpoint")
    parser.add_argument(
        "--target-tensor-parallel-size",
        type=int,
        default=1,
        help="pad the vocabulary for as many ranks (1); others can load it as well",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        help="round the vocabulary up to a multiple of this times the ranks (128)",
    )
    parser.add_argument(
        "--seq-length", type=int, help="that --use-checkpoint-args gives (the longest position)"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", required=True, type=Path, help="folder of the checkpoints")
    parser.add_argument("--ckpt-step", type=int, help="iteration (the latest)")
    parser.add_argument("--hf", required=True, type=Path, help="new folder for the model")
    parser.add_argument(
        "--hf-like", type=Path, help="model whose config.json and tokenizer files are followed"
    )
    parser.add_argument(
        "--vocab-size", type=int, help="rows of the vocabulary to write (those of --hf-like)"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the averaged weights of a run with --ema-decay"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="of one file (5GB)")


def _import(args: argparse.Namespace) -> None:
    words = import_model(
        Import(
            source=args.hf,
            save=args.save,
            dtype=args.dtype,
            tensor_parallel_size=args.target_tensor_parallel_size,
            make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
            seq_length=args.seq_length,
        )
    )
    print(f"{args.hf} -> {args.save}. Train it with these flags, in any layout:")
    print(shlex.join(["--pretrained-checkpoint", str(args.save.resolve()), *words]))


def _export(args: argparse.Namespace) -> None:
    notes = export_model(
        Export(
            load=args.load,
            target=args.hf,
            step=args.ckpt_step,
            like=args.hf_like,
            dtype=args.dtype,
            vocab_size=args.vocab_size,
            max_shard_size=args.max_shard_size,
            ema=args.ema,
        )
    )
    for note in notes:
        print(f"> {note}")
    print(f"{args.load} -> {args.hf}")


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    silence_known_warnings("cpu")
    try:
        (_import if args.command == "import" else _export)(args)
    except MegatronExtError as error:
        for sentence in error.messages:
            print(f"error: {sentence}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
