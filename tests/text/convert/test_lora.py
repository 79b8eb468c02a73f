"""Adapters of a checkpoint are resumed in another layout, started anew, merged, and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import MegatronModule

from megatron_ext.checkpoint.adapter_files import export_adapters
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.programs.lora import main
from megatron_ext.text.convert.adapters import peft_layers
from megatron_ext.text.convert.reading import load_folder
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.train.forking import fork_ranks
from tests.layers import plain
from tests.numerics.stock import LENGTH, VOCABULARY, gpt_config, whole_batch
from tests.ranks import ranks
from tests.training_runs import SAME_WEIGHTS, mock_data, train_on_ranks, training_rows

LORA = "--lora-rank 4 --lora-alpha 8".split()
GPT2 = (
    "--normalization LayerNorm --no-swiglu --position-embedding-type learned_absolute "
    "--add-bias-linear --no-group-query-attention --no-untie-embeddings-and-output-weights"
).split()
MODEL = [*SAME_WEIGHTS, "--global-batch-size", "4"]
KEYS = ("iteration", "lm loss", "grad_norm")


def train(save: Path, *words: str, ranks: int = 1, steps: int = 4) -> list[float]:
    flags = [*MODEL, *mock_data(), "--train-iters", str(steps), *words]
    code, rows = train_on_ranks(flags, ranks=ranks, save=save)
    assert code == 0
    return [row[key] for row in training_rows(rows) for key in KEYS]


def tool(*words: str | Path) -> int:
    """Run tools/lora.py in a process of its own, from which no ranks are forked later."""
    return fork_ranks(lambda: main([str(word) for word in words]), 1)


def test_goes_on_in_another_layout(tmp_path: Path) -> None:
    truth = train(tmp_path / "truth", *LORA)
    saved = tmp_path / "saved"
    first = train(saved, *LORA, "--exit-interval", "2")
    layout = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    more = train(tmp_path / "more", *LORA, "--load", str(saved), *layout, ranks=2)
    assert [*first, *more] == pytest.approx(truth, rel=1e-6)


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall --lora-modules-to-save router norm embedding"
).split()


def test_experts_go_on_in_another_layout_and_merge(tmp_path: Path) -> None:
    """And to the same bits in their own."""
    words = [*LORA, *EXPERTS]
    split = "--expert-model-parallel-size 2".split()
    saved = tmp_path / "saved"
    truth = train(tmp_path / "truth", *words, *split, ranks=2)
    first = train(saved, *words, *split, "--exit-interval", "2", ranks=2)
    again = train(tmp_path / "again", *words, *split, "--load", str(saved), ranks=2)
    assert [*first, *again] == truth
    layout = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    more = train(tmp_path / "more", *words, "--load", str(saved), *layout, ranks=2)
    assert [*first, *more] == pytest.approx(truth, rel=1e-6)
    assert tool("merge", "--load", tmp_path / "truth", "--save", tmp_path / "merged") == 0
    flags = [*MODEL, *mock_data(), *EXPERTS[:-4], "--eval-iters", "2", "--skip-train"]
    losses = []
    for name, more_words in (("truth", words), ("merged", [])):
        load = ["--load", str(tmp_path / name), "--train-iters", "4", *more_words]
        code, rows = train_on_ranks([*flags, *load], save=tmp_path / f"evaluated {name}")
        assert code == 0
        losses.append(float(rows[-1]["lm loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)


def test_ranks_that_train_only_experts_or_nothing_are_saved(tmp_path: Path) -> None:
    """The first two layers have no experts, and so no adapters."""
    words = [*LORA, *EXPERTS[:-4], "--moe-layer-freq", "[0,0,1,1]", "--lora-target-modules"]
    words += ["experts.linear_fc2"]
    truth = train(tmp_path / "truth", *words)
    layout = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2".split()
    saved = tmp_path / "saved"
    first = train(saved, *words, *layout, "--exit-interval", "2", ranks=4)
    more = train(tmp_path / "more", *words, *layout, "--load", str(saved), ranks=4)
    assert [*first, *more] == pytest.approx(truth, rel=1e-6)


def test_starts_without_saved_adapters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base"
    losses = train(base, "--exit-interval", "2")
    pretrained = ["--pretrained-checkpoint", str(base)]
    # The first step of either sees the same model and the same samples.
    plain_first = train(tmp_path / "plain", *pretrained)[1]
    assert train(tmp_path / "new", *LORA, *pretrained)[1] == plain_first != losses[1]
    flags = [*MODEL, *mock_data(), *LORA, "--train-iters", "4", "--load", str(base)]
    assert train_on_ranks(flags, save=tmp_path / "resumed")[0] != 0
    assert "give `--finetune` to start new adapters" in capfd.readouterr().err


def test_adapters_are_not_dropped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "saved", *LORA, "--exit-interval", "2")
    flags = [*MODEL, *mock_data(), "--train-iters", "4", "--load", str(tmp_path / "saved")]
    assert train_on_ranks([*flags, "--finetune"], save=tmp_path / "more")[0] != 0
    assert "which the model would drop; give the `--lora-rank`" in capfd.readouterr().err


@pytest.mark.parametrize("precision", [[], ["--bf16"]])
def test_merged_checkpoint_evaluates_like_the_adapters(
    precision: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # In 16 bits a merged weight is rounded once more, which large weights would multiply; how
    # much of it reaches the loss depends on the processor's kernels (up to 3e-5 seen).
    rate = "0.03" if precision else "1"
    much = f"--tensor-model-parallel-size 2 --lr {rate} --lr-warmup-iters 0 --lora-alpha 64".split()
    saved, merged = tmp_path / "saved", tmp_path / "merged"
    train(saved, *LORA, *precision, *much, ranks=2)
    assert tool("merge", "--load", saved, "--save", merged) == 0
    flags = [*MODEL, *mock_data(), *precision, "--eval-iters", "2", "--skip-train"]

    def evaluated(name: str, *words: str) -> float:
        code, rows = train_on_ranks([*flags, *words, "--train-iters", "4"], save=tmp_path / name)
        assert code == 0
        return float(rows[-1]["lm loss"])

    base = evaluated("base")
    want = evaluated("adapters", *LORA, "--lora-alpha", "64", "--load", str(saved))
    tolerance = 1e-4 if precision else 2e-6
    assert evaluated("whole", "--load", str(merged)) == pytest.approx(want, rel=tolerance)
    assert abs(want / base - 1) > 5 * tolerance
    config = json.loads((merged / "iter_0000004" / "run_config.json").read_text())
    assert config["lora"]["lora_rank"] is None
    assert tool("merge", "--load", merged, "--save", tmp_path / "again") == 1
    assert "there is nothing to merge" in capfd.readouterr().err
    assert tool("merge", "--load", saved, "--save", saved) == 1
    assert "must be another folder than `--load`" in capfd.readouterr().err


HEADS, GROUPS, HIDDEN = 4, 2, 32


def hugging_face_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def llama_like(run: RunConfig, context: ParallelContext, folder: Path | None = None) -> Any:
    """Return our model with the weights of a folder, and adapters drawn by their names."""
    (chunk,) = build_chunks(build_gpt_chunk, run, build_transformer_config(run), context)
    gated = (".linear_fc1.weight", ".linear_fc1.lora.b")
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            shard = plain.shard_of(name, parameter, context)
            full = plain.full_weight(name, shard.shape).float()
            halves = full.chunk(2) if name.endswith(gated) else [full]
            parameter.copy_(torch.cat([shard.of(half) for half in halves]))
    if folder is not None:
        load_folder([chunk], folder, context)
    return chunk


def save(run: RunConfig, context: ParallelContext, chunk: MegatronModule, folder: Path) -> None:
    manager = CheckpointManager(CheckpointConfig(save=str(folder)), context)
    manager.save(
        7, model=[chunk], optimizer=None, scheduler=None, progress={}, run_config=run.to_dict()
    )  # fmt: skip


def export(run: RunConfig, root: Path, output: Path, **options: Any) -> list[str]:
    return export_adapters(run.lora, root, output, peft_layers(run, root), **options)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("more", ["", "--lora-rslora", "--lora-separate-projections"])
@ranks(tp=2)
def test_peft_gives_our_logits(context: ParallelContext, tmp_path: Path, more: str) -> None:
    peft = pytest.importorskip("peft")
    llama = hugging_face_llama()
    grouped = f"--group-query-attention --num-query-groups {GROUPS}".split()
    words = [*LORA, *more.split(), *grouped, "--tensor-model-parallel-size", "2"]
    run = gpt_config(*words, world_size=2)
    source = tmp_path / "hf"
    if context.rank == 0:
        llama.save_pretrained(source)
    torch.distributed.barrier()
    chunk = llama_like(run, context, source).eval()
    save(run, context, chunk, tmp_path / "run")
    batch = whole_batch(run)
    with torch.no_grad():
        ours = chunk(batch.tokens, batch.position_ids, None)
        base = llama(batch.tokens).logits
        output = tmp_path / f"adapter{context.rank}"
        assert export(run, tmp_path / "run", output, base_model="tiny") == []
        theirs = peft.PeftModel.from_pretrained(llama, output).eval()(batch.tokens).logits
    assert (theirs - base).norm() > 0.1 * base.norm()
    want = theirs.chunk(2, dim=-1)[context.tp_rank]
    assert (ours - want).abs().max() <= 1e-5 * want.abs().max()
    with pytest.raises(CheckpointError, match=r"`--output` \(.*\) is not empty; give a new folder"):
        export(run, tmp_path / "run", output)


@ranks()
def test_adapters_without_a_place_in_peft_are_named(
    context: ParallelContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors = pytest.importorskip("safetensors")
    run = gpt_config(*LORA, "--mtp-num-layers", "1")
    save(run, context, llama_like(run, context), tmp_path / "run")
    words = ["--load", str(tmp_path / "run"), "--output", str(tmp_path / "adapter")]
    assert main(["export", *words, "--network", "critic"]) == 1
    assert "`--network` (critic) is for runs of" in capsys.readouterr().err
    left_out = export(run, tmp_path / "run", tmp_path / "adapter")
    assert len(left_out) == 8 and all(name.startswith("mtp.") for name in left_out)
    with safetensors.safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == 2 * 7 * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "holds a model without adapters; give a run with `--lora-rank`"),
        ([*LORA, "--no-swiglu"], "adapters on an MLP without `--swiglu`"),
        (
            [*LORA, "--lora-separate-projections", *GPT2],
            "a model of `gpt2` has one layer for them; merge the adapters",
        ),
    ],
)
@ranks()
def test_what_cannot_be_exported_is_a_sentence(
    context: ParallelContext, tmp_path: Path, words: list[str], message: str
) -> None:
    run = gpt_config(*words)
    save(run, context, llama_like(run, context), tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        export(run, tmp_path / "run", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_stage_that_trains_nothing_is_saved(tmp_path: Path) -> None:
    """The first of three stages holds the embedding alone, and the last the output layer."""
    truth = train(tmp_path / "truth", *LORA)
    layout = "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout E|tttt|L".split()
    saved = tmp_path / "saved"
    first = train(saved, *LORA, *layout, "--exit-interval", "2", ranks=3)
    more = train(tmp_path / "more", *LORA, "--load", str(saved))
    assert [*first, *more] == pytest.approx(truth, rel=1e-6)
