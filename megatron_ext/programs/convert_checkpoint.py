"""Converts public weights to a checkpoint for training, and back.

    python tools/convert_checkpoint.py import --hf FOLDER --save CHECKPOINT
    python tools/convert_checkpoint.py import --checkpoint FOLDER --save CHECKPOINT
    python tools/convert_checkpoint.py export --load CHECKPOINT --hf FOLDER --hf-like ORIGINAL

Folders are local and hold safetensors; nothing is downloaded. docs/huggingface.md lists the
families of language models. Imported weights load in any layout, with --pretrained-checkpoint
CHECKPOINT or with --load CHECKPOINT --finetune; with the latter, --use-checkpoint-args takes the
shape of the model from the checkpoint. pretrain_gpt.py --load-hf FOLDER needs no conversion.

--checkpoint reads the weights of a GPT from a checkpoint of another program, saved in any layout:
Megatron-LM's formats torch (mp_rank_00/model_optim_rng.pt) and fsdp_dtensor, and DeepSpeed's
universal checkpoints and model states. The flags of the model are read from it.

Weights of a video model may have the names of diffusers or of the original repository, or be in one
file: of safetensors, as ComfyUI has them, also in 8 bits, or of torch.save. An export goes to a
folder, or to one file if --hf ends with .safetensors. pretrain_video.py --load-weights PATH needs
no conversion; an imported checkpoint is for --pretrained-checkpoint, and in --task streaming also
for --critic-checkpoint and --teacher-checkpoint, in any layout. The network of --task flow and its
averages can be exported; of a streaming run the generator, its averages and the critic.

verify FOLDER accounts for each tensor of a language model, compares logits with transformers', and
says after which layer the first difference is. It exits with 1 if anything is wrong.

Runs in one process on the CPU. Exit code 0, or 2 after a user's error.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.flags import COUNT, NATURAL, SIZE
from megatron_ext.config.precision import PRECISIONS
from megatron_ext.disk.writing import write_error, write_text
from megatron_ext.errors import (
    CheckpointError,
    MegatronExtError,
    tell_errors,
)
from megatron_ext.train.main import silence_known_warnings
from megatron_ext.train.task import later
from megatron_ext.video.networks.network import STREAMING
from megatron_ext.video.streaming.config import STORED_ROLES

# Imported when they are called, so that help and a wrong option need no torch.
_LANGUAGE_MODELS = "megatron_ext.text.convert.huggingface"
size_errors = later("megatron_ext.checkpoint.safetensors_files:size_errors")
Export = later(f"{_LANGUAGE_MODELS}:Export")
Import = later(f"{_LANGUAGE_MODELS}:Import")
_FOREIGN = "megatron_ext.text.convert.foreign.importing"
ForeignImport = later(f"{_FOREIGN}:ForeignImport")
import_foreign = later(f"{_FOREIGN}:import_foreign")
export_model = later(f"{_LANGUAGE_MODELS}:export_model")
import_model = later(f"{_LANGUAGE_MODELS}:import_model")
_VERIFYING = "megatron_ext.text.convert.verifying"
Verify = later(f"{_VERIFYING}:Verify")
verify_folder = later(f"{_VERIFYING}:verify_folder")
_VIDEO_MODELS = "megatron_ext.video.convert"
ExportOfVideo = later(f"{_VIDEO_MODELS}.exporting:Export")
export_video = later(f"{_VIDEO_MODELS}.exporting:export_weights")
holds_video_weights = later(f"{_VIDEO_MODELS}.find:holds_video_weights")
import_video = later(f"{_VIDEO_MODELS}.importing:import_weights")
writer_of = later(f"{_VIDEO_MODELS}.find:writer_of")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_import(commands.add_parser("import", help="Hugging Face model -> checkpoint"))
    _add_export(commands.add_parser("export", help="checkpoint -> Hugging Face model"))
    for command in list(commands.choices.values()):
        command.add_argument(
            "--dtype",
            choices=PRECISIONS,
            help="dtype of the weights to write (default: the source's)",
        )
    about = "account for each tensor of a Hugging Face model, and compare it with transformers"
    _add_verify(commands.add_parser("verify", help=about))
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--hf",
        type=Path,
        help="folder of the model to read; for a video model, also a file of safetensors or "
        "torch.save",
    )
    source.add_argument(
        "--checkpoint",
        type=Path,
        help="folder of a checkpoint of Megatron-LM or DeepSpeed, or of its checkpoints",
    )
    parser.add_argument(
        "--ckpt-step",
        type=NATURAL.integer,
        help="iteration of --checkpoint to read (the latest)",
    )
    parser.add_argument("--save", required=True, type=Path, help="new folder for the checkpoint")
    language = parser.add_argument_group("language models")
    language.add_argument(
        "--target-tensor-parallel-size",
        type=SIZE.integer,
        help="pad the vocabulary for this many ranks (1); others can load it as well",
    )
    language.add_argument(
        "--make-vocab-size-divisible-by",
        type=SIZE.integer,
        help="round the vocabulary up to a multiple of this times the ranks (128)",
    )
    language.add_argument(
        "--seq-length",
        type=COUNT.integer,
        help="sequence length that --use-checkpoint-args gives (the longest position)",
    )
    language.add_argument(
        "--resize-vocabulary",
        choices=("mean", "noise", "normal"),
        help="let the vocabulary grow if the tokenizer has more entries; how new rows are made is "
        "said by the flag of this name (docs/huggingface.md)",
    )
    language.add_argument(
        "--tokenizer-model",
        type=Path,
        help="folder of the tokenizer, such as one with added tokens (that of --hf)",
    )
    language.add_argument(
        "--verify",
        action="store_true",
        help="compare logits of the imported model with those of transformers, which takes memory "
        "for the model in float32, before the import",
    )
    video = parser.add_argument_group("video models")
    video.add_argument(
        "--entry", help="entry of a .pt file to read, such as generator_ema (the only one)"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", required=True, type=Path, help="folder of the checkpoints")
    parser.add_argument(
        "--ckpt-step", type=NATURAL.integer, help="iteration of the checkpoint to read (the latest)"
    )
    parser.add_argument(
        "--hf",
        required=True,
        type=Path,
        help="new folder for the model; for a video model, also a new file NAME.safetensors",
    )
    parser.add_argument(
        "--ema", action="store_true", help="write the averaged weights of a run with --ema-decay"
    )
    parser.add_argument(
        "--max-shard-size", help="largest size of a file of weights in a folder (5GB)"
    )
    language = parser.add_argument_group("language models")
    language.add_argument(
        "--hf-like",
        type=Path,
        help="model to copy tokenizer files and the rest of config.json from",
    )
    language.add_argument(
        "--quantization",
        choices=("fp8", "mxfp4"),
        help="number format of the linear layers, in the form that transformers and vLLM load "
        "(plain values)",
    )
    language.add_argument(
        "--vocab-size",
        type=COUNT.integer,
        help="rows of the vocabulary to write (those of --hf-like)",
    )
    video = parser.add_argument_group("video models")
    video.add_argument(
        "--network", choices=STORED_ROLES, help="network of a streaming run to write (generator)"
    )
    video.add_argument(
        "--naming",
        help="tensor names to write, such as diffusers or original (diffusers for a folder, "
        "original for a file)",
    )
    video.add_argument(
        "--prefix", help="text before all names of a file, such as model.diffusion_model. (none)"
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of a language model")
    parser.add_argument(
        "--load",
        type=Path,
        help="folder of checkpoints, whose weights are compared with the folder's, and give the "
        "logits",
    )
    parser.add_argument(
        "--ckpt-step", type=NATURAL.integer, help="iteration of the checkpoint to read (the latest)"
    )
    parser.add_argument(
        "--no-logits",
        action="store_true",
        help="compare no logits, for which both models in float32 must fit into memory",
    )
    parser.add_argument("--json", type=Path, help="file for the whole report as JSON")


_LANGUAGE = (
    "target_tensor_parallel_size make_vocab_size_divisible_by seq_length hf_like vocab_size "
    "quantization resize_vocabulary tokenizer_model"
).split()
_VIDEO = "entry network naming prefix".split()


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the options, of ``names``, that were given on the command line, with their values."""
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _refuse(args: argparse.Namespace, names: Sequence[str], kind: str) -> None:
    """Raise a CheckpointError if an option without effect was given; it names the first one.

    ``names`` are the options that have no effect on a model of the kind ``kind``.
    """
    for name in _given(args, names):
        raise CheckpointError(
            f"`--{name.replace('_', '-')}` has no effect on {kind}; leave it out."
        )


def _import(args: argparse.Namespace) -> None:
    if args.checkpoint is not None:
        _import_foreign(args)
        return
    if args.ckpt_step is not None:
        raise CheckpointError("`--ckpt-step` goes with `--checkpoint`; leave it out.")
    if holds_video_weights(args.hf):
        _import_video(args)
        return
    _refuse(args, _VIDEO, "a language model")
    given = _given(args, _LANGUAGE)
    if "target_tensor_parallel_size" in given:
        given["tensor_parallel_size"] = given.pop("target_tensor_parallel_size")
    verify = args.verify
    order = Import(source=args.hf, save=args.save, dtype=args.dtype, verify=verify, **given)
    words, notes = import_model(order)
    for note in notes:
        print(f"> {note}")
    print(f"{args.hf} -> {args.save}. Train it with these flags, in any layout:")
    print(shlex.join(["--pretrained-checkpoint", str(args.save.resolve()), *words]))


def _import_foreign(args: argparse.Namespace) -> None:
    _refuse(args, [*_VIDEO, *_LANGUAGE], "`--checkpoint`, which stores the flags of its model")
    if args.verify:
        raise CheckpointError("`--verify` goes with `--hf`; leave it out.")
    order = ForeignImport(
        source=args.checkpoint, save=args.save, step=args.ckpt_step, dtype=args.dtype
    )
    words, notes = import_foreign(order)
    for note in notes:
        print(f"> {note}")
    print(f"{args.checkpoint} -> {args.save}. Train it with these flags, in any layout:")
    print(shlex.join(words))


def _import_video(args: argparse.Namespace) -> None:
    _refuse(args, _LANGUAGE, "a video model, which has no vocabulary")
    if args.verify:
        raise CheckpointError("`--verify` is for language models; leave it out.")
    imported = import_video(args.hf, args.save, args.dtype, args.entry)
    print(f"{args.hf} -> {args.save}. Train it with these flags, in any layout:")
    root = str(args.save.resolve())
    words = [*imported.words, "--pretrained-checkpoint", root, *PRECISIONS[imported.dtype]]
    print(shlex.join(words))
    if imported.kind == STREAMING:
        size = imported.sections["streaming"]["generator_size"]
        others = (f"--{x}-size {size} --{x}-checkpoint {shlex.quote(root)}" for x in _OTHERS)
        print(f"or as another network of a run: {', '.join(others)}")


_OTHERS = ("critic", "teacher")


def _export(args: argparse.Namespace) -> None:
    order: dict[str, Any] = {
        "load": args.load,
        "target": args.hf,
        "step": args.ckpt_step,
        "dtype": args.dtype,
        "ema": args.ema,
    }
    notes: list[str] = []
    if args.max_shard_size is not None:
        for error in size_errors("--max-shard-size", args.max_shard_size):
            raise CheckpointError(str(error))
    conversion = writer_of(read_run_config(args.load, args.ckpt_step))
    if conversion is not None:
        _refuse(args, _LANGUAGE, "a video model, which has no vocabulary")
        if args.naming not in (None, *conversion.namings):
            known = ", ".join(conversion.namings)
            raise CheckpointError(f"`--naming` ({args.naming}) must be one of {known}.")
        order |= {"network": args.network, "naming": args.naming, "prefix": args.prefix or ""}
        order["max_shard_size"] = args.max_shard_size
        export_video(conversion, ExportOfVideo(**order))
    else:
        _refuse(args, _VIDEO, "a language model")
        order["max_shard_size"] = args.max_shard_size or "5GB"
        order |= {"like": args.hf_like, "quantization": args.quantization}
        notes = export_model(Export(**order, vocab_size=args.vocab_size))
    for note in notes:
        print(f"> {note}")
    print(f"{args.load} -> {args.hf}")


def _verify(args: argparse.Namespace) -> int:
    """Verify a folder; return 0 if it is right, else 1."""
    if holds_video_weights(args.folder):
        raise CheckpointError(
            f"{args.folder} is a video model, but `verify` is for language models; import it, "
            "which accounts for its tensors too."
        )
    if args.json is not None:
        error = write_error("--json", str(args.json), is_file=True)
        if error is not None:
            raise CheckpointError(str(error))
    order = Verify(args.folder, args.load, args.ckpt_step, logits=not args.no_logits)
    found = verify_folder(order)
    for line in found.lines():
        print(line)
    if args.json is not None:
        write_text(args.json, json.dumps(found.as_json(), indent=2) + "\n")
    return 0 if found.is_right else 1


def main(argv: Sequence[str]) -> int:
    """Convert a model; return the exit code."""
    args = _parser().parse_args(argv)
    # Conversion runs on the CPU, so that the weights need not fit into the memory of a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    silence_known_warnings("cpu")
    try:
        if args.command == "verify":
            return _verify(args)
        (_import if args.command == "import" else _export)(args)
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 2
    return 0
