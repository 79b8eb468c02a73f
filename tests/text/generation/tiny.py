"""Prompts for tiny models, transformers' texts for them, and ours in any layout."""

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.config.run import RunConfig
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.generation.decode import Completion, Decoder, Request
from megatron_ext.text.generation.forward import PackedForward
from megatron_ext.text.generation.run import build_frozen_chunk
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.generation.tool import inference_task, model_defaults
from megatron_ext.text.run import weights_of_folder
from megatron_ext.text.tokenizers.base import NullTokenizer
from tests.ranks import on_ranks
from tests.text.convert.models import MODELS, SIZES
from tests.text.tiny import hf_folder
from tests.training_runs import config_of

VOCABULARY = 300
NEW_TOKENS = 12


def speaking_model(folder: Path, name: str = "qwen3") -> Path:
    """Save a random model of a family like Qwen3's, with a tokenizer of as many tokens."""
    torch.manual_seed(11)
    sizes = {**SIZES, **MODELS[name], "vocab_size": 600, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (1 if "norm" in key else 0))
    model.save_pretrained(folder)
    for path in hf_folder().iterdir():
        shutil.copy(path, folder)
    return folder


def prompts(count: int = 7) -> list[tuple[int, ...]]:
    """Return prompts of unequal lengths, from 1 token on."""
    draw = torch.Generator().manual_seed(3)
    lengths = [1, 5, 2, 9, 17, 3, 12, 8][:count]
    return [tuple(torch.randint(2, VOCABULARY, (n,), generator=draw).tolist()) for n in lengths]


def theirs(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    """Return the tokens that transformers' `generate` adds to a batch of the prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows, most = prompts(), max(map(len, prompts()))
    ids = torch.tensor([[0] * (most - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (most - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        **{"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options},
    )
    return [tuple(row[most:].tolist()) for row in out]


def run_config(context: Any, root: Path, flags: Sequence[str] = ()) -> RunConfig:
    """Return the configuration to load a checkpoint or a folder in the layout of the ranks."""
    layout = context.layout
    is_folder = (root / "config.json").is_file()
    words = ["--load-hf" if is_folder else "--load", str(root), *flags]
    sizes = {
        "--tensor-model-parallel-size": layout.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": layout.pipeline_model_parallel_size,
        "--expert-model-parallel-size": layout.expert_model_parallel_size,
    }
    words += [str(word) for pair in sizes.items() for word in pair]
    if layout.virtual_pipeline_model_parallel_size:
        words += ["--num-virtual-stages-per-pipeline-rank", "2"]
    task = inference_task()
    defaults, _ = model_defaults(words, task, "the test")
    return config_of(words, task, ranks=layout.world_size, defaults=defaults)


def forward_of(context: Any, config: RunConfig) -> PackedForward:
    """Load the model of a configuration, as tools/generate_text.py does."""
    transformer_config = build_transformer_config(config)
    chunks = build_chunks(build_frozen_chunk, config, transformer_config, context, VOCABULARY)
    device = torch.device("cpu")
    wrapped = wrap_chunks(chunks, config, transformer_config, context, device)
    if weights_of_folder(config, context, wrapped, None) is None:
        manager = CheckpointManager(config.checkpoint, context)
        manager.load(model=wrapped, optimizer=None, scheduler=None)
    return PackedForward(wrapped, transformer_config, config, context, device)


def complete(
    context: Any, forward: PackedForward, sampling: Sampling, *, batch_size: int = 8
) -> list[Completion]:
    """Return the completions of this replica's share of the prompts, on the rank that decides."""
    decoder = Decoder(forward, NullTokenizer(VOCABULARY), (), batch_size=batch_size)
    requests = [Request(i, ids, sampling) for i, ids in enumerate(prompts())]
    own = requests[context.dp_rank :: context.layout.data_parallel_size]
    return decoder.complete(own)


def write(
    context: Any, root: Path, samplings: list[Sampling], folder: Path, flags: Sequence[str] = ()
) -> None:
    """Complete the prompts with each of some options, and write the tokens by request."""
    forward = forward_of(context, run_config(context, root, flags))
    # Texts take the places of others. Of two replicas, the second has none left in the end after
    # batches of 3, and one text less than the first after batches of 2.
    for index, sampling in enumerate(samplings):
        found = complete(context, forward, sampling, batch_size=(3, 2, 8)[index % 3])
        if forward.decides:
            path = folder / f"{index}_{context.dp_rank}"
            path.write_bytes(pickle.dumps({each.number: each.ids for each in found}))


def write_plainly(context: Any, root: Path, path: Path) -> None:
    """Continue each prompt by a whole forward pass for each token, without a cache."""
    forward = forward_of(context, run_config(context, root))
    (chunk,), texts = forward.chunks, [list(ids) for ids in prompts()]
    chunk.eval()
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            for ids in texts:
                logits = chunk(torch.tensor([ids]), torch.arange(len(ids))[None], None)
                ids.append(int(logits[0, -1, :VOCABULARY].argmax()))
    path.write_bytes(pickle.dumps([tuple(ids[-NEW_TOKENS:]) for ids in texts]))


def plainly(root: Path, path: Path) -> list[tuple[int, ...]]:
    """Return the likeliest tokens after the prompts, by our model without a cache."""
    on_ranks(write_plainly, {}, root=root, path=path)
    return list(pickle.loads(path.read_bytes()))


def ours(
    root: Path, samplings: list[Sampling], folder: Path, flags: Sequence[str] = (), **sizes: int
) -> list[list[tuple[int, ...]]]:
    """Return, for each of some options, the tokens that the model adds to the prompts."""
    folder.mkdir()
    arguments = {"root": root, "samplings": samplings, "folder": folder, "flags": flags}
    on_ranks(write, sizes, **arguments)
    found = []
    for index in range(len(samplings)):
        by_number: dict[int, tuple[int, ...]] = {}
        for path in folder.glob(f"{index}_*"):
            by_number |= pickle.loads(path.read_bytes())
        found.append([by_number[i] for i in range(len(by_number))])
    return found
