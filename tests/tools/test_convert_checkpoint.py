"""Tests of convert_checkpoint.py as a user runs it."""

import io
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_ext.device import select
from megatron_ext.parallel.context import init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.programs import convert_checkpoint
from megatron_ext.train.forking import fork_ranks
from tests.text.convert.models import in_child, make
from tests.training_runs import config_of
from tests.video.networks.wan.convert import models as wan


def in_fork(scratch: Path, *argv: str | Path) -> tuple[int, str, str]:
    def main() -> tuple[int, str, str]:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = convert_checkpoint.main([str(word) for word in argv])
        return code, out.getvalue(), err.getvalue()

    return tuple(in_child(main, scratch))  # type: ignore[return-value]


def test_there_and_back(tmp_path: Path) -> None:
    source, root, back = make("qwen3", tmp_path / "hf"), tmp_path / "ours", tmp_path / "back"
    flags = ["import", "--hf", source, "--save", root, "--seq-length", "32", "--verify"]
    code, out, errors = in_fork(tmp_path / "0", *flags)
    assert (code, errors) == (0, "")
    assert "> logits differ from those of transformers by " in out
    words = shlex.split(out.splitlines()[-1])
    assert words[:2] == ["--pretrained-checkpoint", str(root)]
    words += "--micro-batch-size 1 --train-iters 1 --lr 1".split()
    model = config_of(words).model
    assert (model.seq_length, model.padded_vocab_size) == (32, 384)
    export = ["export", "--load", root, "--hf", back]
    assert in_fork(tmp_path / "1", *export, "--dtype", "bfloat16") == (0, f"{root} -> {back}\n", "")
    before, after = (load_file(x / "model.safetensors") for x in (source, back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.bfloat16(), after[name]), name
    said = f"error: `--hf` ({back}) holds something already; give a new folder.\n"
    assert in_fork(tmp_path / "2", *export) == (2, "", said)


def test_wan_there_and_back(tmp_path: Path) -> None:
    source, root, back = wan.make(tmp_path / "hf"), tmp_path / "ours", tmp_path / "back"
    flags = ["import", "--hf", source, "--save", root]
    said = "error: `--seq-length` has no effect on a video model, which has no vocabulary; "
    said += "leave it out.\n"
    assert in_fork(tmp_path / "1", *flags, "--seq-length", "8") == (2, "", said)
    code, out, errors = in_fork(tmp_path / "2", *flags, "--dtype", "bfloat16")
    assert (code, errors) == (0, "")
    _, words, others = out.splitlines()
    want = f"--task streaming --generator-size tiny --pretrained-checkpoint {root} --bf16"
    assert shlex.split(words) == want.split()
    assert f"--critic-size tiny --critic-checkpoint {root}" in others
    assert f"--teacher-size tiny --teacher-checkpoint {root}" in others
    export: list[str | Path] = ["export", "--load", root, "--hf", back]
    code, out, errors = in_fork(tmp_path / "3", *export, "--vocab-size", "8")
    assert code == 2
    assert errors.startswith("error: `--vocab-size` has no effect on a video model")
    done = in_fork(tmp_path / "4", *export, "--naming", "original", "--network", "generator")
    assert done == (0, f"{root} -> {back}\n", "")
    before, after = wan.original_tensors(source), wan.tensors_of(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.bfloat16(), after[name]), name


def test_options_of_wan_are_refused_for_language_models(tmp_path: Path) -> None:
    source, root = make("llama", tmp_path / "hf"), tmp_path / "ours"
    flags: list[str | Path] = ["import", "--hf", source, "--save", root]
    code, out, errors = in_fork(tmp_path / "1", *flags, "--entry", "generator")
    assert (code, out) == (2, "")
    assert errors == "error: `--entry` has no effect on a language model; leave it out.\n"


def test_a_failed_import_leaves_no_groups_to_ranks_that_are_forked_later(tmp_path: Path) -> None:
    source, scratch = make("llama", tmp_path / "hf"), tmp_path / "after"
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][1:].clone()
    save_file(tensors, source / "model.safetensors")

    def rank() -> None:
        init_groups(Layout(2), select("gloo")).destroy()

    def main() -> tuple[int, bool, int]:
        argv = ["import", "--hf", str(source), "--save", str(tmp_path / "ours")]
        code = convert_checkpoint.main(argv)
        left = torch.distributed.is_initialized()
        return code, left, fork_ranks(rank, 2, timeout_minutes=0.1)

    assert in_child(main, scratch) == (2, False, 0)
