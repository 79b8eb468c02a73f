"""Values of flags are read as Megatron-LM reads them, and rules hold at their limits."""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.extras.audit.defect import RELEASES, Defect, State
from megatron_ext.extras.audit.flags import Flags, Undecided, holds
from megatron_ext.extras.audit.recipe import read_recipe
from megatron_ext.extras.audit.report import DEFECTS, audit, main
from megatron_ext.extras.audit.reproduced import Reproduced, layout_of
from megatron_ext.extras.audit.rules import RULES
from tests.extras.audit.test_audit import LATENT, MOE, MTP, PER_TOKEN, judged

STAGES = "--pipeline-model-parallel-size 2"


def flags(words: str) -> Flags:
    return Flags(words.split(), "pretrain_gpt.py")


@pytest.mark.parametrize(
    ("words", "interleaved"),
    [
        (f"{STAGES} --pipeline-model-parallel-layout Et|tL", False),
        (f"{STAGES} --pipeline-model-parallel-layout Et|t|t|tL", True),
        (f"{STAGES} --pipeline-model-parallel-layout Et|(t|)*2tL", True),
        (f"{STAGES} --num-virtual-stages-per-pipeline-rank 1", False),
        (f"{STAGES} --num-virtual-stages-per-pipeline-rank 2", True),
        (f"{STAGES} --num-layers 8 --num-layers-per-virtual-pipeline-stage 4", False),
        (f"{STAGES} --num-layers 8 --num-layers-per-virtual-pipeline-stage 2", True),
        (f"{STAGES} --decoder-num-layers 8 --num-layers-per-virtual-pipeline-stage 4", False),
        (f"{STAGES} --num-layers-per-virtual-pipeline-stage 2", True),
        (STAGES, False),
    ],
)
def test_stages_have_several_chunks_where_the_flags_make_them(
    words: str, interleaved: bool
) -> None:
    assert flags(words).interleaved is interleaved


def test_values_and_their_defaults() -> None:
    read = flags("--tensor-model-parallel-size 4 --moe_aux_loss_coeff=[0.5,0.25] --name 'a'")
    assert (read.tp, read.etp, read.pp, read.ep, read.cp) == (4, 4, 1, 1, 1)
    assert flags("--moe-aux-loss-coeff [0.5, 0.25]").number("--moe-aux-loss-coeff", 0) == 0.5
    assert read.text("--name") == "a" and read.text("--other", "b") == "b"
    assert not read.sequence_parallel
    assert flags("--sequence-parallel --tensor-model-parallel-size 2").sequence_parallel
    assert not flags("--sequence-parallel").sequence_parallel
    assert flags("--expert-tensor-parallel-size 3 --tensor-model-parallel-size 2").etp == 3
    for words, resumes in (
        ("--load x", True), ("--load x --no-load-optim", False), ("--load x --finetune", False),
        ("--finetune", False),
    ):  # fmt: skip
        assert flags(words).resumes is resumes
    for words, masked in (("--sft", True), ("--eod-mask-loss", True), ("", False)):
        assert flags(words).masked is masked
    used = flags("--sft --load x")
    assert used.has("--eod-mask-loss", "--sft") and used.used == ["--sft"]


def test_a_condition_that_fails_decides_whatever_cannot_be_read() -> None:
    def unknown() -> bool:
        raise Undecided("a variable")

    assert not holds(unknown, lambda: False) and not holds(lambda: False, unknown)
    with pytest.raises(Undecided):
        holds(unknown, lambda: True)
    assert holds(lambda: True) and holds()


EXPERTS = "--num-experts 8"


@pytest.mark.parametrize(
    ("words", "number", "hit"),
    [
        (f"{MOE} {PER_TOKEN} --tensor-model-parallel-size 2 --sequence-parallel", "D1", True),
        (f"{EXPERTS} {PER_TOKEN} --moe-z-loss-coeff 1e-3 --context-parallel-size 2", "D1", True),
        (
            f"{EXPERTS} {PER_TOKEN} --moe-router-load-balancing-type aux_loss seq_aux_loss "
            "--moe-aux-loss-coeff 0 0.1 --context-parallel-size 2",
            "D1", True,
        ),
        (
            f"{EXPERTS} {PER_TOKEN} --moe-router-load-balancing-type aux_loss seq_aux_loss "
            "--moe-aux-loss-coeff 0 0.0 --context-parallel-size 2",
            "D1", False,
        ),
        (f"{MOE} {PER_TOKEN} --moe-router-load-balancing-type sinkhorn --context-parallel-size 2",
         "D1", False),
        (f"{MOE} {PER_TOKEN} --moe-router-load-balancing-type seq_aux_loss --micro-batch-size 2",
         "D3", True),
        (f"{MTP} {STAGES} --use-rotary-position-embeddings", "D8", False),
        (f"--mtp-num-layers 1 {STAGES} --use-rotary-position-embeddings", "D8", False),
        (f"{STAGES} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
         "D15", True),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
         "--no-overlap-p2p-communication", "D15", False),
        ("--per-dataset-sequences-path x --vocab-size 65500", "D31", True),
        ("--per-dataset-sequences-path x --vocab-size 65535", "D31", True),
        ("--per-dataset-sequences-path x --vocab-size 65499", "D31", False),
        ("--per-dataset-sequences-path x --vocab-size 65536", "D31", False),
        (f"{MOE} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
         "--expert-model-parallel-size 2", "D35", False),
        (f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size "
         "4 --expert-model-parallel-size 2", "D36", False),
        ("--recompute-granularity selective --recompute-modules mlp --disable-bias-linear",
         "D37", False),
        ("--recompute-activations --recompute-modules mlp", "D37", True),
        (f"{MTP} --recompute-granularity full --recompute-num-layers 2", "D37", True),
        ("--recompute-granularity full --recompute-num-layers 2", "D37", False),
        (f"{MOE} --fp16 --expert-model-parallel-size 2 --loss-scale 8", "D39", False),
        (f"--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save x {STAGES}",
         "D41", True),
        (f"--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save x {STAGES} "
         "--untie-embeddings-and-output-weights", "D41", False),
        (f"--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save x {STAGES} "
         f"--untie-embeddings-and-output-weights {MTP}", "D41", True),
        (f"{LATENT} --tensor-model-parallel-size 2 --sequence-parallel", "D42", False),
        ("--split 99,1,0 --data-path x --eval-iters 0", "D29", False),
        ("--split 99,1,0 --data-path x --eval-iters 1", "D29", True),
        (f"{MOE} --moe-router-enable-expert-bias --fp16", "D43", True),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
         "--no-overlap-p2p-communication", "D16", False),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", "D16", True),
        ("--decoupled-lr 1e-4 --load x --no-load-optim", "D38", False),
        ("--dist-ckpt-optim-fully-reshardable --save x --overlap-grad-reduce", "D41", False),
        (f"{MTP} --decoupled-lr 1e-4", "D6", False),
        (f"{MTP} --decoupled-lr 1e-4 {STAGES}", "D6", True),
    ],
)  # fmt: skip
def test_rules_hold_for_these_flags_and_not_for_those(words: str, number: str, hit: bool) -> None:
    certain, depends = judged(words, "0.16.1")
    assert (number in certain | depends) is hit


@pytest.mark.parametrize(
    ("words", "hit"),
    [
        ("--num-layers 8 --recompute-num-layers 4", False),
        (f"--num-layers 8 --recompute-num-layers 4 {STAGES}", False),
        ("--num-layers 8 --recompute-num-layers 8 --pipeline-model-parallel-size 2", True),
        (f"--num-layers 8 --recompute-num-layers 4 {STAGES} "
         "--num-virtual-stages-per-pipeline-rank 2", True),
        ("--num-layers 8 --recompute-num-layers 3", True),
    ],
)  # fmt: skip
def test_recomputed_pieces_must_divide_the_layers_of_a_chunk(words: str, hit: bool) -> None:
    full = "--recompute-granularity full --recompute-method uniform"
    assert ("D37" in judged(f"{full} {words}", "0.16.1")[0]) is hit
    assert "D37" not in judged(f"{full} {words}", "0.19.2")[0]


def test_each_defect_is_told_once_and_each_note_too() -> None:
    words = f"{MTP} {PER_TOKEN} --eod-mask-loss --recompute-granularity full".split()
    numbers = [x.number for x in audit(words, "0.18.2").findings]
    assert len(numbers) == len(set(numbers))
    result = audit(
        "--num-experts 8 --moe-aux-loss-coeff $A --moe-z-loss-coeff $B".split(), "0.16.1"
    )
    assert len(result.notes) == len(set(result.notes))
    sizes = f"{MTP} {PER_TOKEN} --seq-length 64".replace("layers 1", "layers 2").split()
    (finding,) = [x for x in audit(sizes, "0.16.1").findings if x.number == "D5"]
    assert finding.error.startswith("Depth 2 weighs 0.968750 of")
    assert set(finding.flags) == {
        "--mtp-num-layers", "--calculate-per-token-loss", "--seq-length",
    }  # fmt: skip


def test_a_finding_that_depends_on_more_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--core", "0.19.2", "--", "--data-path", "x", "--data-cache-path", "y"]
    assert main(words, "") == 0
    assert "D30 only if the files of the data changed" in capsys.readouterr().out


def test_the_list_has_the_state_of_each_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"], "") == 0
    rows: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if cells and re.fullmatch(r"D\d+", cells[0]):
            rows[cells[0]] = cells
    for defect in DEFECTS:
        states = [defect.state(release).kind for release in RELEASES]
        assert rows[defect.number][2:-1] == states, defect.number
    assert rows["D4"][2:-1] == ["there", "fixed", "fixed", "fixed"]
    assert rows["D12"][-1].startswith("no flag") and rows["D4"][-1].startswith("judged")


def test_the_length_that_samples_need_is_told() -> None:
    words = f"{MTP} --sft --context-parallel-size 3".split()
    (finding,) = [x for x in audit(words, "0.16.1").findings if x.number == "D10"]
    assert finding.error == "IndexError on samples shorter than 6 tokens per depth."


def test_a_value_with_spaces_stays_with_its_flag() -> None:
    read = Flags(["--data-path=0.5 x", "--lr 0.1", "--name", "a b"], "pretrain_gpt.py")
    assert read.values == {"--data-path": ("0.5 x",), "--lr": ("0.1",), "--name": ("a b",)}


def test_a_value_of_nothing_is_left_out_and_a_zero_is_not(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "MODEL_ARGS:\n  --seed: 0\n  --a: null\n  --b: false\n  --data-path: 0.5 x 0.5 y\n  --c:\n"
    )
    assert read_recipe(recipe) == "--seed 0 --data-path 0.5 x 0.5 y".split()


def test_states_follow_the_releases() -> None:
    entry: dict[str, Any] = {
        **dict.fromkeys(("affected", "stock", "ours", "test"), "x"),
        "since": {"kind": "fixed"}, "began": "0.18", "between": {"0.17": {"kind": "changed"}},
    }  # fmt: skip
    defect = Defect.of("D1", entry, RULES["D1"])
    kinds = [defect.state(release).kind for release in ("0.16", "0.17", "0.18", "0.19")]
    assert kinds == ["there", "changed", "fixed", "fixed"]
    assert str(State("there", "half")) == "there: half" and str(State("fixed", "")) == "fixed"


@pytest.mark.parametrize(
    ("stock", "right", "ratio"),
    [
        (3.0, 2.0, 1.5), (0.0, 0.0, 1.0), (2.0, 0.0, float("inf")), (-2.0, 0.0, -float("inf")),
        (float("nan"), 0.0, float("nan")), (float("nan"), 1.0, float("nan")), (0.0, 2.0, 0.0),
    ],
)  # fmt: skip
def test_the_ratio_of_two_figures(stock: float, right: float, ratio: float) -> None:
    assert Reproduced(stock, right, "").ratio == pytest.approx(ratio, nan_ok=True)


def test_a_layout_has_the_ranks_of_its_sizes() -> None:
    layout = layout_of(tp=2, pp=3, cp=5, dp=7, ep=7, etp=1, vpp=6)
    assert layout.world_size == 210 and layout.context_parallel_size == 5
    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (2, 3)
    assert (layout.expert_model_parallel_size, layout.expert_tensor_parallel_size) == (7, 1)
    assert layout.virtual_pipeline_model_parallel_size == 6
