"""Frozen weights in 4 bits train as peft does on a model that bitsandbytes has quantized."""

from pathlib import Path

import pytest
import torch

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.huggingface import Export, export_model
from megatron_ext.text.convert.reading import load_folder
from megatron_ext.text.generation.tool import GENERATION, model_defaults
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.numerics.stock import LENGTH, VOCABULARY, gpt_config, whole_batch
from tests.ranks import ranks
from tests.text.convert.test_lora import export, save, tool
from tests.text.convert.test_lora_variants import STEPS, WORDS, trained_by_peft
from tests.training_runs import train_on_ranks, training_rows

pytest.importorskip("bitsandbytes")


def write_llama(folder: Path, hidden: int = 128) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


BATCH = (
    f"--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --min-lr 1e-2 "
    "--lr-decay-style constant --clip-grad 0 --log-interval 1 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}"
).split()
LORA = (
    "--lora-rank 4 --lora-alpha 8 --lora-separate-projections --lora-quantize-weights nf4"
).split()
KEYS = ("iteration", "lm loss", "grad_norm")


def train(save: Path, folder: Path, *words: str, ranks: int = 1, steps: int = 4) -> list[float]:
    flags = [*BATCH, *LORA, "--eval-iters", "0", "--train-iters", str(steps)]
    flags += ["--load-hf", str(folder), *words]
    code, rows = train_on_ranks(flags, ranks=ranks, save=save)
    assert code == 0
    return [row[key] for row in training_rows(rows) for key in KEYS]


def evaluated(save: Path, *words: str) -> float:
    flags = [*BATCH, "--train-iters", "4", "--eval-iters", "2", "--skip-train", *words]
    code, rows = train_on_ranks(flags, save=save)
    assert code == 0
    return float(rows[-1]["lm loss"])


def test_merged_weights_evaluate_like_the_adapters(tmp_path: Path) -> None:
    source, saved, merged = (tmp_path / name for name in ("hf", "saved", "merged"))
    write_llama(source)
    train(saved, source, "--lr", "0.1", "--save-hf", str(tmp_path / "out"))
    folder = ["--load-hf", str(source)]
    want = evaluated(tmp_path / "adapters", *LORA, *folder, "--load", str(saved))
    with pytest.raises(CheckpointError, match="merge both with `tools/lora.py merge` first"):
        export_model(Export(load=saved, target=tmp_path / "exported"))
    with pytest.raises(ConfigError, match="merge both with `tools/lora.py merge`, and give"):
        model_defaults(
            ["--load", str(saved), "--prompt", "x"], GENERATION, "tools/generate_text.py"
        )
    assert tool("merge", "--load", saved, "--save", merged) == 0
    load = ["--load", str(merged)]
    assert evaluated(tmp_path / "whole", *folder, *load) == pytest.approx(want, rel=2e-6)
    # A new run evaluates on other samples than one that goes on.
    want = evaluated(tmp_path / "new", *folder, *load, "--finetune")
    assert abs(want / evaluated(tmp_path / "base", *folder) - 1) > 1e-4
    folder = ["--load-hf", str(tmp_path / "out" / "iter_0000004")]
    assert evaluated(tmp_path / "written", *folder) == pytest.approx(want, rel=2e-6)


def test_goes_on_from_adapters_alone_in_other_layouts(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf")
    truth = train(tmp_path / "one", tmp_path / "hf")
    first = train(tmp_path / "saved", tmp_path / "hf", "--exit-interval", "2")
    more = train(tmp_path / "again", tmp_path / "hf", "--load", str(tmp_path / "saved"))
    assert [*first, *more] == truth
    tp = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    assert train(tmp_path / "tp", tmp_path / "hf", *tp, ranks=2) == pytest.approx(truth, rel=1e-5)
    pp = "--pipeline-model-parallel-size 2 --load".split()
    more = train(tmp_path / "pp", tmp_path / "hf", *pp, str(tmp_path / "saved"), ranks=2)
    assert [*first, *more] == pytest.approx(truth, rel=1e-5)


SIZES = "--hidden-size 128 --ffn-hidden-size 256".split()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "variant", ["--lora-quantize-weights nf4", "--lora-quantize-weights fp4 --lora-use-dora"]
)
@ranks()
def test_three_steps_are_those_of_peft_on_bitsandbytes(
    context: ParallelContext, tmp_path: Path, variant: str
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    source = tmp_path / "hf"
    write_llama(source)
    run = gpt_config(*WORDS, *SIZES, *variant.split(), "--load-hf", str(source))
    transformer_config = build_transformer_config(run)
    (chunk,) = build_chunks(build_gpt_chunk, run, transformer_config, context)
    load_folder([chunk], source, context)
    if run.lora.starts_from_weights:
        from megatron_ext.layers.adapter_start import start_adapters

        start_adapters([chunk], run.lora, context, 1)
    save(run, context, chunk, tmp_path / "start")
    assert export(run, tmp_path / "start", tmp_path / "adapter") == []
    (ddp,) = wrap_chunks([chunk], run, transformer_config, context, torch.device("cpu"))
    optimizer = build_optimizer(run, [ddp], context.pgs)
    build_scheduler(run, optimizer)
    batch = whole_batch(run)
    losses = []
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(batch.tokens, batch.position_ids, None, labels=batch.labels).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    kind = variant.split()[1]
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.float32
    )
    llama = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=bits, dtype=torch.float32, device_map="cpu"
    )
    model = peft.PeftModel.from_pretrained(llama, tmp_path / "adapter", is_trainable=True).train()
    own = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in own if p.dim() == 1], "weight_decay": 0.0},
    ]
    want, _ = trained_by_peft(model, [group for group in groups if group["params"]], batch)
    assert losses[0] == pytest.approx(want[0], rel=1e-5)
    assert losses == pytest.approx(want, rel=1e-4)
