"""Checkpoints of Megatron-LM and DeepSpeed are imported; megatron-core's own saves are the truth.

megatron-core's model is saved by megatron-core in `torch_dist`, whose tensors are whole. The same
model is written in the other forms, as their programs name files and entries.
"""

import datetime
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.activations import squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from megatron_ext.checkpoint.unpickling import read_tensors, stored_entries
from megatron_ext.errors import CheckpointError, MegatronExtError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.foreign import importing
from megatron_ext.text.convert.foreign.arguments import sections_of
from megatron_ext.text.convert.foreign.importing import ForeignImport, import_foreign
from megatron_ext.text.convert.foreign.rank_files import read_file
from tests.ranks import on_ranks

ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 64,
    "make_vocab_size_divisible_by": 8,
    "num_experts": None,
    "multi_latent_attention": False,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 63,
    "bf16": False,
    "lr": 1e-3,
    "optimizer": "adam",
}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": [0, 1, 0, 1],
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
TIED = {
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "group_query_attention": False,
    "num_query_groups": None,
}


def core_chunks(context: ParallelContext, args: Namespace) -> list[Any]:
    """Return this rank's chunks of megatron-core's own model of the flags."""
    layout = context.layout
    experts = {}
    if args.num_experts:
        experts = {
            "num_moe_experts": args.num_experts,
            "moe_router_topk": args.moe_router_topk,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_layer_freq": args.moe_layer_freq,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "expert_model_parallel_size": layout.expert_model_parallel_size,
            "moe_token_dispatcher_type": "alltoall",
        }
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups or args.num_attention_heads,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        add_bias_linear=args.add_bias_linear,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        **experts,
    )
    chunks = []
    virtual = layout.virtual_pipeline_model_parallel_size
    for index in range(virtual or 1):
        number = index if virtual else None
        chunk: Any = GPTModel(
            config,
            get_gpt_decoder_block_spec(
                config,
                use_transformer_engine=False,
                normalization=args.normalization,
                vp_stage=number,
            ),
            args.padded_vocab_size,
            args.max_position_embeddings,
            pre_process=context.pp_rank == 0 and index == 0,
            post_process=context.pp_rank == layout.pipeline_model_parallel_size - 1
            and index == (virtual or 1) - 1,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            vp_stage=number,
        )
        with torch.no_grad():
            # Norms and biases start with the same values everywhere, which would hide a mistake.
            generator = torch.Generator().manual_seed(7 + context.pp_rank * 10 + index)
            for name, parameter in sorted(chunk.named_parameters()):
                if "norm" in name or (name.endswith("bias") and "fc1" not in name):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        chunks.append(chunk)
    return chunks


def save_whole(path: Path, chunks: list[Any], args: Namespace) -> None:
    """Save chunks of megatron-core's model in its own format, as Megatron-LM does."""
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 40}
    for index, chunk in enumerate(chunks):
        state[f"model{index}" if len(chunks) > 1 else "model"] = chunk.sharded_state_dict()
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(path))


def save_both(context: ParallelContext, args: Namespace, folder: Path) -> None:
    """Save megatron-core's model in its own format and, as Megatron-LM does, in `torch`."""
    chunks = core_chunks(context, args)
    save_whole(folder / "whole" / "iter_0000040", chunks, args)
    layout = context.layout
    name = f"mp_rank_{context.tp_rank:02d}"
    if layout.pipeline_model_parallel_size > 1:
        name += f"_{context.pp_rank:03d}"
    expert = 0
    if layout.expert_model_parallel_size > 1:
        expert = torch.distributed.get_rank(context.pgs.ep)
        name += f"_{expert:03d}"
    entries = [chunk.state_dict_for_save_checkpoint() for chunk in chunks]
    names = ["model"] if len(entries) == 1 else [f"model{i}" for i in range(len(entries))]
    content = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 40,
        **dict(zip(names, entries, strict=True)),
        "opt_param_scheduler": {"num_steps": 40},
    }
    place = folder / "run" / "iter_0000040" / name
    place.mkdir(parents=True, exist_ok=True)
    # All replicas of a file have the same content; the first of them writes it.
    if not (place / "model_optim_rng.pt").exists():
        temporary = place / f"{context.rank}.tmp"
        torch.save(content, temporary)
        temporary.rename(place / "model_optim_rng.pt")
    torch.distributed.barrier()


def saved(tmp_path: Path, layout: dict[str, int], **changes: Any) -> tuple[Path, Namespace]:
    """Save a model of changed flags on a layout; return the folder of checkpoints and its flags."""
    sizes = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}
    parallel = {f"{name}_model_parallel_size": layout.get(axis, 1) for axis, name in sizes.items()}
    args = Namespace(**ARGS | changes | parallel)
    on_ranks(save_both, layout, args=args, folder=tmp_path)
    root = tmp_path / "run"
    (root / "latest_checkpointed_iteration.txt").write_text("40")
    return root, args


def check_equal(save: Path, whole: Path) -> None:
    """Check that an imported checkpoint holds the tensors that megatron-core saved, bit for bit."""
    ours = values_in(save / "iter_0000000")
    truth = values_in(whole)
    for name in list(truth):
        # megatron-core's layers without Transformer Engine name the norm before experts as if it
        # were joined to the first layer of an MLP.
        other = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        if name not in ours:
            truth[other] = truth.pop(name)
    assert len(truth) > 8
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        rows = value.shape[0] if "embedding.word" in name or "output_layer" in name else None
        assert torch.equal(ours[name][:rows], value), name


def values_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name."""
    entries = stored_entries(folder)
    return read_tensors(folder, [name for name, entry in entries.items() if hasattr(entry, "size")])


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"tp": 2, "pp": 2, "vpp": 2}, {}),
        ({"tp": 2, "pp": 2}, TIED),
        ({"tp": 2, "ep": 2, "dp": 2}, EXPERTS),
        ({"pp": 2, "ep": 2, "dp": 2}, EXPERTS),
        ({}, EXPERTS | {"untie_embeddings_and_output_weights": False}),
    ],
    ids=["interleaved", "tied", "experts-tensor", "experts-pipeline", "one rank"],
)
def test_torch_format(tmp_path: Path, layout: dict[str, int], changes: dict[str, Any]) -> None:
    root, _ = saved(tmp_path, layout, **changes)
    words, notes = import_foreign(ForeignImport(root, tmp_path / "ours"))
    given = "--finetune --use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size 63"
    assert words == ["--load", str(tmp_path / "ours"), *given.split()]
    assert notes[0].endswith(
        "is Megatron-LM's `torch` of iteration 40; only its weights are imported"
    )
    assert "left out (not imported: only the weights are): `opt_param_scheduler`" in notes
    check_equal(tmp_path / "ours", whole_of(tmp_path))
    if changes.get("num_experts"):
        # megatron-core's layers without Transformer Engine name a norm otherwise: `check_equal`.
        return
    _, notes = import_foreign(ForeignImport(whole_of(tmp_path), tmp_path / "again"))
    assert notes[0].endswith("`torch_dist` of iteration 40; only its weights are imported")
    check_equal(tmp_path / "again", whole_of(tmp_path))


def whole_of(folder: Path) -> Path:
    """Return the folder of what megatron-core saved."""
    return folder / "whole" / "iter_0000040"


def whole_weights(tmp_path: Path) -> dict[str, Tensor]:
    """Return the tensors that megatron-core saved whole, with the number of the layer in a name."""
    weights = {}
    for name, value in values_in(whole_of(tmp_path)).items():
        if name.startswith("decoder.layers.") and not re.search(r"layers\.\d", name):
            rest = name.removeprefix("decoder.layers.")
            weights |= {f"decoder.layers.{i}.{rest}": each for i, each in enumerate(value)}
        else:
            weights[name] = value
    return weights


LEGACY = (
    ("embedding.", "language_model.embedding."),
    ("output_layer.", "language_model.output_layer."),
    ("decoder.final_layernorm.", "language_model.encoder.final_layernorm."),
    ("decoder.layers.", "language_model.encoder.layers."),
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.linear_qkv.", "self_attention.query_key_value."),
    ("self_attention.linear_proj.", "self_attention.dense."),
    ("mlp.linear_fc1.layer_norm_", "post_attention_layernorm."),
    ("mlp.linear_fc1.", "mlp.dense_h_to_4h."),
    ("mlp.linear_fc2.", "mlp.dense_4h_to_h."),
)
"""Parts of megatron-core's names, and what Megatron-LM wrote before it."""


def legacy_name(name: str) -> str:
    for ours, theirs in LEGACY:
        name = name.replace(ours, theirs)
    return name


def nested(flat: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return a mapping of mappings, in which the first ``depth`` parts of names are apart."""
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".", depth)
        inner = result
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return result


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Namespace, dict[str, Tensor]]:
    """Return the folder of a dense model that is saved whole, its flags and its tensors."""
    folder = tmp_path_factory.mktemp("dense")
    _, args = saved(folder, {})
    return whole_of(folder), args, whole_weights(folder)


Dense = tuple[Path, Namespace, dict[str, Tensor]]


def write_legacy(folder: Path, args: Namespace, weights: dict[str, Tensor]) -> Path:
    """Write a checkpoint as Megatron-LM did before megatron-core, on two tensor-parallel ranks."""
    args = Namespace(**{**vars(args), "tensor_model_parallel_size": 2})
    # Older releases had these instead.
    del args.position_embedding_type, args.add_bias_linear
    args.use_rotary_position_embeddings = True
    args.disable_bias_linear = True
    args.layernorm_epsilon = args.norm_epsilon
    del args.norm_epsilon
    for rank in range(2):
        part = {legacy_name(name): tensor_part(name, x, rank) for name, x in weights.items()}
        place = folder / "release" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        content = {"args": args, "checkpoint_version": 3.0, "model": nested(part, 2)}
        torch.save(content, place / "model_optim_rng.pt", _use_new_zipfile_serialization=False)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def tensor_part(name: str, value: Tensor, rank: int) -> Tensor:
    """Return a rank's part of a tensor, of two tensor-parallel ranks."""
    if "norm" in name:
        return value
    if "linear_proj" in name or "linear_fc2" in name:
        return value.chunk(2, dim=1)[rank].clone()
    if "linear_fc1" in name:
        gate, up = value.chunk(2)
        return torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
    return value.chunk(2)[rank].clone()


def write_fsdp(folder: Path, args: Namespace, weights: dict[str, Tensor]) -> Path:
    """Write a checkpoint in the format `fsdp_dtensor`."""
    state: dict[str, Any] = {"args": args, "iteration": 12, "checkpoint_version": 3.0}
    for name, value in weights.items():
        key = f"model.module.{name}"
        if "linear_fc1.weight" in name:
            state[f"{key}_w"], state[f"{key}_v"] = (half.clone() for half in value.chunk(2))
        else:
            state[key] = value
    state["optimizer.state.module.embedding.word_embeddings.weight.exp_avg"] = torch.zeros(2)
    place = folder / "iter_0000012"
    save_sharded(state, storage_writer=FileSystemWriter(place), no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    return folder


def pipeline_name(name: str) -> str:
    """Return the name of a parameter in a pipeline of Megatron-DeepSpeed with four layers."""
    legacy = legacy_name(name)
    layer = re.match(r"language_model\.encoder\.layers\.(\d+)\.(.*)", legacy)
    if layer is not None:
        return f"{int(layer[1]) + 2}.{layer[2]}"
    return {
        "embedding.word_embeddings.weight": "1.word_embeddings.weight",
        "decoder.final_layernorm.weight": "6.weight",
        "output_layer.weight": "7.lm_head.weight",
    }[name]


def write_universal(folder: Path, args: Namespace, weights: dict[str, Tensor]) -> Path:
    """Write a universal checkpoint of a pipeline, without the vocabulary's padding."""
    place = folder / "global_step9_universal"
    for name, value in weights.items():
        file = place / "zero" / pipeline_name(name) / "fp32.pt"
        file.parent.mkdir(parents=True)
        is_vocabulary = "word_embeddings" in name or "output_layer" in name
        rows = value[:61].clone() if is_vocabulary else value
        torch.save({"param": rows, "cat_dim": 0}, file)
        torch.save({"param": value}, file.with_name("exp_avg.pt"))
    torch.save({"args": args, "iteration": 9, "module": None}, place / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(place.name)
    return folder


def write_modules(folder: Path, args: Namespace, weights: dict[str, Tensor]) -> Path:
    """Write the files of a DeepSpeed pipeline's modules, on two tensor-parallel ranks."""
    args = Namespace(**{**vars(args), "tensor_model_parallel_size": 2})
    place = folder / "global_step9"
    place.mkdir(parents=True)
    for rank in range(2):
        modules: dict[str, dict[str, Tensor]] = {}
        for name, value in weights.items():
            number, _, rest = pipeline_name(name).partition(".")
            modules.setdefault(number, {})[rest] = tensor_part(name, value, rank)
        for number, held in modules.items():
            torch.save(held, place / f"layer_{int(number):02d}-model_{rank:02d}-model_states.pt")
        states = {"args": args, "iteration": 9, "module": None, "ds_config": {"zero": 1}}
        torch.save(states, place / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest").write_text(place.name)
    return folder


def write_module(folder: Path, args: Namespace, weights: dict[str, Tensor]) -> Path:
    """Write DeepSpeed's one file of a rank, in which the model is nested as Megatron-LM had it."""
    module = nested({legacy_name(name): value for name, value in weights.items()}, 2)
    folder.mkdir(exist_ok=True)
    torch.save({"args": args, "module": module}, folder / "mp_rank_00_model_states.pt")
    return folder


WRITERS = (write_legacy, write_fsdp, write_universal, write_modules, write_module)


@pytest.mark.parametrize("write", WRITERS)
def test_other_forms(dense: Dense, tmp_path: Path, write: Callable[..., Path]) -> None:
    whole, args, weights = dense
    root = write(tmp_path / "theirs", args, weights)
    import_foreign(ForeignImport(root, tmp_path / "ours"))
    if write is write_universal:
        # Rows 61 to 63 are padding, which the checkpoint does not have.
        ours = values_in(tmp_path / "ours" / "iter_0000000")
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert torch.equal(ours[name][:61], weights[name][:61])
            assert not ours[name][61:].any()
        gate = "decoder.layers.mlp.linear_fc1.weight"
        assert torch.equal(ours[gate], values_in(whole)[gate])
        return
    check_equal(tmp_path / "ours", whole)


class Evil:
    """Runs code when it is unpickled by an ordinary reader."""

    def __reduce__(self) -> Any:
        return print, ("it ran",)


Change = Callable[[Path], object]


def changed(path: str, edit: Callable[[dict[str, Any]], object]) -> Change:
    """Return a change of a file of `torch.save` in a folder of checkpoints."""

    def change(root: Path) -> None:
        file = root / path
        content = torch.load(file, weights_only=False)
        edit(content)
        torch.save(content, file)

    return change


def with_args(**values: Any) -> Change:
    file = "iter_0000040/mp_rank_00/model_optim_rng.pt"
    return changed(file, lambda content: vars(content["args"]).update(values))


def in_model(edit: Callable[[dict[str, Any]], object], rank: int = 0) -> Change:
    file = f"iter_0000040/mp_rank_{rank:02d}/model_optim_rng.pt"
    return changed(file, lambda content: edit(content["model"]))


QKV = "decoder.layers.2.self_attention.linear_qkv.weight"
NORM = "decoder.final_layernorm.weight"
RANK_1 = "iter_0000040/mp_rank_01"
BAD: dict[str, tuple[Change, str]] = {
    "no rank": (
        lambda root: shutil.rmtree(root / RANK_1),
        r"mp_rank_01/model_optim_rng.pt is missing, which the flags of the run that saved",
    ),
    "another rank": (
        lambda root: shutil.copytree(root / RANK_1, root / "iter_0000040" / "mp_rank_02"),
        r"holds mp_rank_02, but its flags say tensor × pipeline × expert 2 × 1 × 1, in which",
    ),
    "larger layout": (
        with_args(pipeline_model_parallel_size=2),
        r"holds mp_rank_00, but its flags say tensor × pipeline × expert 2 × 2 × 1",
    ),
    "expert tensor": (
        with_args(expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        r"was saved with `--expert-tensor-parallel-size` 1, which differs .* `--ckpt-format torch_",
    ),
    "no args": (
        changed("iter_0000040/mp_rank_00/model_optim_rng.pt", lambda content: content.pop("args")),
        r"holds no `args`, the flags of the run that saved it, without which the model is not",
    ),
    "oldest": (
        changed(
            "iter_0000040/mp_rank_00/model_optim_rng.pt",
            lambda content: content.update(checkpoint_version=1.0),
        ),
        r"has `checkpoint_version` 1.0, whose weights have another order than those since 2.0;",
    ),
    "no model": (
        changed("iter_0000040/mp_rank_00/model_optim_rng.pt", lambda content: content.pop("model")),
        r"mp_rank_00/model_optim_rng.pt holds no weights \(`model`\); give another checkpoint",
    ),
    "hybrid": (
        with_args(hybrid_layer_pattern="M*-"),
        r"was saved with `hybrid_layer_pattern` 'M\*-', which changes the model and which no flag",
    ),
    "no such flags": (
        with_args(num_attention_heads=5, num_query_groups=None, group_query_attention=False),
        r"`--hidden-size` \(32\) must be divisible by|shape its flags imply|which do not make up",
    ),
    "cut part": (
        in_model(lambda model: model.update({QKV: model[QKV][:8]})),
        r"`decoder.layers.2.self_attention.linear_qkv.weight` has \[8, 32\], \[32, 32\] on the",
    ),
    "unequal": (
        in_model(lambda model: model.update({NORM: model[NORM] + 1})),
        r"`decoder.final_layernorm.weight` is the same on all tensor-parallel ranks, but the",
    ),
    "more": (
        in_model(lambda model: model.update({"decoder.extra.weight": torch.zeros(2)})),
        r"holds 1 weight\(s\) for which the model of its flags has no place, such as `decoder",
    ),
    "gap": (
        in_model(lambda model: [model.pop(name) for name in list(model) if "layers.1." in name]),
        r"holds the layers \[0, 2, 3\] of its stage, which must begin at 0 without a gap",
    ),
    "less": (
        in_model(lambda model: model.pop("decoder.layers.3.mlp.linear_fc2.weight")),
        r"`decoder.layers.3.mlp.linear_fc2.weight` has \[32, 24\] on the tensor-parallel ranks",
    ),
    "hugging face": (
        in_model(lambda model: model.update({"model.layers.0.mlp.up_proj.weight": torch.ones(1)})),
        r"holds a Hugging Face model \(`model.layers`\); write it as safetensors with DeepSpeed's",
    ),
    "torn": (
        lambda root: (root / RANK_1 / "model_optim_rng.pt").write_bytes(b"PK\x03\x04 torn"),
        r"mp_rank_01/model_optim_rng.pt cannot be read \(",
    ),
    "code": (
        lambda root: (root / RANK_1 / "model_optim_rng.pt").write_bytes(pickle.dumps(Evil())),
        r"mp_rank_01/model_optim_rng.pt (names `builtins.print`|cannot be read)",
    ),
    "tracker": (
        lambda root: (root / "latest_checkpointed_iteration.txt").write_text("41"),
        r"latest_checkpointed_iteration.txt names '41', but .*iter_0000041 does not exist; give",
    ),
    "other form": (
        lambda root: (root / "latest_checkpointed_iteration.txt").unlink(),
        r"run is none of the forms that can be imported \(Megatron-LM's `torch_dist`, Mega",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, _ = saved(tmp_path_factory.mktemp("two"), {"tp": 2})
    return root


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints(
    on_two: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change, sentence = BAD[name]
    root = tmp_path / "run"
    shutil.copytree(on_two, root)
    change(root)
    with pytest.raises(MegatronExtError) as caught:
        import_foreign(ForeignImport(root, tmp_path / "ours"))
    (message,) = caught.value.messages
    assert re.search(sentence, message), message
    assert not (tmp_path / "ours").exists()
    assert "it ran" not in capfd.readouterr().out


def test_bad_folders(dense: Dense, tmp_path: Path) -> None:
    _, args, weights = dense
    save = tmp_path / "ours"
    fsdp = write_fsdp(tmp_path / "fsdp", args, dict(weights))
    for source, step, sentence in (
        (tmp_path / "none", None, "is no folder; give one with a checkpoint"),
        (fsdp, 13, r"`--ckpt-step` \(13\) is no checkpoint in .*fsdp; give another iteration"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            import_foreign(ForeignImport(source, save, step=step))
    halves = write_universal(tmp_path / "universal", args, weights)
    (halves / "global_step9_universal" / "zero" / "6.weight" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"zero/6.weight holds no fp32.pt; copy the whole"):
        import_foreign(ForeignImport(halves, save))
    modules = write_modules(tmp_path / "modules", args, weights)
    (modules / "global_step9" / "layer_03-model_01-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks some files layer_NN-model_TT-model"):
        import_foreign(ForeignImport(modules, save))
    one = write_module(tmp_path / "one", args, weights)
    changed("mp_rank_00_model_states.pt", lambda content: content.update(module=None))(one)
    with pytest.raises(CheckpointError, match=r"holds no weights \(`module`\), as with ZeRO-3"):
        import_foreign(ForeignImport(one, save))


ODD = {
    "rotary_base": 500,
    "rotary_percent": 0.5,
    "norm_epsilon": 0.3,
    "swiglu": False,
    "squared_relu": True,
    "qk_layernorm": True,
    "add_qkv_bias": True,
}


def save_logits(context: ParallelContext, args: Namespace, folder: Path) -> None:
    """Save a model of megatron-core with odd flags, and its logits of some tokens."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="LayerNorm",
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=False,
        add_qkv_bias=True,
        qk_layernorm=True,
        activation_func=squared_relu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.3,
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="LayerNorm"),
        64,
        32,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )
    tokens = torch.arange(12).remainder(7)[None]
    mask = torch.ones(12, 12).triu(1).bool()[None, None]
    logits = model.eval()(tokens, torch.arange(12)[None], mask)
    place = folder / "mp_rank_00"
    place.mkdir()
    content = {"args": args, "checkpoint_version": 3.0, "model": model.state_dict()}
    torch.save(content, place / "model_optim_rng.pt")
    torch.save(logits, folder / "logits.pt")


def test_flags_are_those_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights alone do not tell the rotary base, epsilons or the activation."""
    changes = ODD | {"normalization": "LayerNorm", "num_layers": 2}
    tied = {"untie_embeddings_and_output_weights": False}
    args = Namespace(**ARGS | changes | tied)
    on_ranks(save_logits, {}, args=args, folder=tmp_path)
    found: list[Tensor] = []

    def compare(chunk: Any, *_: Any) -> None:
        tokens = torch.arange(12).remainder(7)[None]
        found.append(chunk.eval()(tokens, torch.arange(12)[None], None).detach())

    monkeypatch.setattr(importing.conversion, "save_imported", compare)
    import_foreign(ForeignImport(tmp_path, tmp_path / "ours"))
    theirs = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(found[0], theirs, rtol=1e-5, atol=1e-5)


def test_flags_of_other_releases(tmp_path: Path) -> None:
    """Objects of packages that may not be here are passed over, unless the model needs them."""
    args = Namespace(
        **ARGS | {"layernorm_zero_centered_gamma": True, "moe_layer_freq": 2, "num_experts": 4},
        timeout=datetime.timedelta(minutes=3),
        momentum=np.float64(0.9),
    )
    path = tmp_path / "args.pt"
    torch.save({"args": args}, path)
    found = sections_of(read_file(path)["args"], path)
    assert found["model"]["apply_layernorm_1p"] is True
    assert found["model"]["swiglu"] is True
    assert found["moe"]["moe_layer_freq"] == "2"
    assert found["latent_attention"] == {}
    args.hidden_size = datetime.timedelta(minutes=3)
    torch.save({"args": args}, path)
    with pytest.raises(CheckpointError, match="with a `hidden_size` that is Inert of unknown val"):
        sections_of(read_file(path)["args"], path)
