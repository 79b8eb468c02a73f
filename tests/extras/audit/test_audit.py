"""Every persisting defect is named on flags that hit it, and clean sets are not accused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.extras.audit.defect import RELEASES
from megatron_ext.extras.audit.report import DEFECTS, audit, main
from pretrain_gpt import main as pretrain_gpt

ROOT = Path(__file__).resolve().parents[3]
MOE = "--num-experts 8 --moe-aux-loss-coeff 1e-2"
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
LATENT = "--multi-latent-attention --q-lora-rank 1536 --qk-layernorm"
PER_TOKEN = "--calculate-per-token-loss"
SEEDED = {
    "D1": f"{MOE} {PER_TOKEN} --context-parallel-size 2",
    "D2": f"{MOE} {PER_TOKEN} --eod-mask-loss",
    "D3": f"{MOE} {PER_TOKEN} --moe-router-load-balancing-type seq_aux_loss --micro-batch-size 4",
    "D4": f"{MTP} --eod-mask-loss",
    "D5": f"{MTP} {PER_TOKEN} --seq-length 4096 --sft",
    "D6": f"{MTP} --decoupled-lr 1e-4 --pipeline-model-parallel-size 2",
    "D7": f"{MTP} --pipeline-model-parallel-size 2",
    "D8": "--mtp-num-layers 1 --pipeline-model-parallel-size 2",
    "D9": f"{MTP} --sft",
    "D10": f"{MTP} --sft --context-parallel-size 2",
    "D11": f"{MTP} --sft --recompute-granularity full --recompute-method uniform",
    "D13": f"{MTP} {MOE} --sft",
    "D14": f"{MTP} --eod-mask-loss",
    "D15": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--no-overlap-p2p-communication",
    "D16": "--pipeline-model-parallel-size 4 --num-layers 16 "
    "--num-layers-per-virtual-pipeline-stage 2",
    "D20": f"--hybrid-context-parallel {PER_TOKEN}",
    "D21": "--bf16 --no-check-for-nan-in-loss-and-grad",
    "D22": "--fp16 --cross-entropy-loss-fusion",
    "D24": "--label-smoothing 0.1 --tensor-model-parallel-size 2",
    "D25": f"{MOE} --transformer-impl local",
    "D26": f"{MOE} --moe-router-enable-expert-bias --sft",
    "D27": f"{MOE} {MTP} --pipeline-model-parallel-size 2 --moe-layer-freq [0]*2+[1]*6",
    "D28": f"{MOE} {PER_TOKEN} --sft",
    "D29": "--split 99,1,0 --data-path x",
    "D30": "--data-path x --data-cache-path y",
    "D31": "--per-dataset-sequences-path x.json --vocab-size 65530",
    "D34": "--transformer-impl local --context-parallel-size 2",
    "D35": f"{MOE} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "D36": f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    "D37": "--recompute-granularity selective --recompute-modules mlp",
    "D38": "--decoupled-lr 1e-4 --load x",
    "D39": f"{MOE} --fp16 --expert-model-parallel-size 2",
    "D40": "--override-opt-param-scheduler --load x",
    "D41": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save x "
    "--overlap-grad-reduce",
    "D42": f"{LATENT} --tensor-model-parallel-size 2 --modelopt-enabled",
    "D43": f"{MOE} --moe-router-enable-expert-bias --bf16",
}
DENSE = (
    "--num-layers 16 --hidden-size 64 --seq-length 4096 --micro-batch-size 2 --bf16 --swiglu "
    "--position-embedding-type rope --disable-bias-linear --use-distributed-optimizer "
    "--overlap-grad-reduce --save x --load x --mock-data"
)
CLEAN = {
    "dense": DENSE,
    "dense, many ranks": f"{DENSE} --tensor-model-parallel-size 8 --sequence-parallel "
    "--pipeline-model-parallel-size 4 --context-parallel-size 2",
    "dense, per token, masked": f"{DENSE} {PER_TOKEN} --eod-mask-loss --context-parallel-size 2",
    "experts, mean of means": f"{DENSE} {MOE} --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-model-parallel-size 4 --eod-mask-loss",
    "experts without a loss": f"{DENSE} --num-experts 8 {PER_TOKEN} --context-parallel-size 2",
    "experts per token on whole sequences": f"{DENSE} {MOE} {PER_TOKEN}",
    "depths of prediction": f"{DENSE} {MTP} --pipeline-model-parallel-size 2",
    "a fused loss in bf16": f"{DENSE} --cross-entropy-loss-fusion",
    "Transformer Engine's fused loss": "--fp16 --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl te",
    "another schedule of rates, no optimizer": "--override-opt-param-scheduler --load x "
    "--no-load-optim",
    "compressed queries split by tokens": f"{DENSE} {LATENT} --modelopt-enabled "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "compressed queries without a norm": f"{DENSE} --multi-latent-attention --q-lora-rank 1536 "
    "--tensor-model-parallel-size 2",
    "tokens counted in fp32": f"{MOE} --moe-router-enable-expert-bias",
    "norms of heads": f"{DENSE} --qk-layernorm --tensor-model-parallel-size 2",
    "an optimizer that watches its scale": "--fp16 --no-check-for-nan-in-loss-and-grad",
}

DEEPSEEK = (
    "--expert-model-parallel-size 8 --no-check-for-nan-in-loss-and-grad --seq-length 4096 "
    "--position-embedding-type rope --num-experts 256 --moe-layer-freq [0]*3+[1]*58 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --mtp-num-layers 1 "
    "--bf16"
)
EXAMPLES = {
    "gpt3": "--num-layers 96 --attention-backend auto --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 16 --fp16 --micro-batch-size 1 --data-path x",
    "llama3": "--bf16 --decoupled-lr 5.0e-4 --cross-entropy-loss-fusion --calculate-per-token-loss "
    "--use-distributed-optimizer --overlap-grad-reduce --fp8-format hybrid --mock-data --load x",
    "mixtral": "--num-experts 8 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --log-interval 1 --load x --wandb-project Mixtral "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --bf16",
    "mamba": "--tensor-model-parallel-size 1 --sequence-parallel --hidden-size 1024 --bf16",
    "deepseek": f"{DEEPSEEK} --micro-batch-size 4 --calculate-per-token-loss",
    "deepseek, mean of means": f"{DEEPSEEK} --micro-batch-size 1",
}
"""Flags of Megatron-LM's example scripts, shortened."""


def judged(flags: str, core: str, name: str = "pretrain_gpt.py") -> tuple[set[str], set[str]]:
    """Return the numbers of findings, and of those that depend on more than flags."""
    result = audit(flags.split(), core, name)
    certain = {x.number for x in result.certain}
    return certain, {x.number for x in result.findings} - certain


@pytest.mark.parametrize("core", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("number", SEEDED)
def test_seeded_flags_are_named(number: str, core: str) -> None:
    program = "pretrain_hybrid.py" if number == "D7" else "pretrain_gpt.py"
    found, depends = judged(SEEDED[number], core, program)
    (defect,) = [x for x in DEFECTS if x.number == number]
    there = defect.state(core[:4]).kind != "fixed"
    assert (number in found | depends) == there
    assert (number in depends) == (there and number in ("D13", "D26", "D29", "D30"))


IDLE = {
    "--position-embedding-type": "D4 D5 D6 D7 D9 D10 D11 D13 D14 D27",
    "--moe-aux-loss-coeff": "D13 D25 D26 D35 D36 D39 D43",
    "--recompute-method": "D11",
    "--num-layers": "D16",
    "--calculate-per-token-loss": "D20",
    "--bf16": "D21",
    "--fp16": "D22",
    "--data-path": "D29 D30",
    "--seq-length": "D5",
    "--sft": "D5",
    "--vocab-size": "D31",
    "--modelopt-enabled": "D42",
}
"""Flags of seeds that do not decide alone, and the defects that the other flags hit without them.

The last three make a defect certain or larger.
"""


@pytest.mark.parametrize("number", SEEDED)
def test_a_defect_is_named_only_if_all_its_flags_are_given(number: str) -> None:
    program = "pretrain_hybrid.py" if number == "D7" else "pretrain_gpt.py"
    (defect,) = [x for x in DEFECTS if x.number == number]
    core = "0.16.1" if defect.state("0.16").kind != "fixed" else "0.19.2"
    flags = [f"--{each}" for each in SEEDED[number].split("--")[1:]]
    for flag in flags:
        others = " ".join(each for each in flags if each != flag)
        named = number in set.union(*judged(others, core, program))
        assert named is (number in IDLE.get(flag.split()[0], "").split()), flag


def test_norms_of_compressed_queries_depend_on_the_layers() -> None:
    flags = f"{DENSE} {LATENT} --tensor-model-parallel-size 2"
    assert judged(flags, "0.19.2") == (set(), {"D42"})
    assert judged(f"{flags} --export-kd-teacher-load x", "0.19.2") == ({"D42"}, set())


def test_every_rule_is_seeded() -> None:
    assert set(SEEDED) == {x.number for x in DEFECTS if x.rules}


@pytest.mark.parametrize("core", ["0.16.1", "0.18.2", "0.19.2"])
@pytest.mark.parametrize("name", CLEAN)
def test_clean_flags_are_not_accused(name: str, core: str) -> None:
    assert judged(CLEAN[name], core) == (set(), set())


@pytest.mark.parametrize(
    ("name", "on_16", "on_19"),
    [
        ("gpt3", set(), set()),
        ("llama3", {"D38"}, set()),
        ("mixtral", set(), set()),
        ("mamba", set(), set()),
        ("deepseek", {"D3", "D5", "D21"}, {"D21"}),
        ("deepseek, mean of means", {"D21"}, {"D21"}),
    ],
)
def test_examples_are_accused_of_what_they_hit_alone(
    name: str, on_16: set[str], on_19: set[str]
) -> None:
    program = "pretrain_mamba.py" if name == "mamba" else "pretrain_gpt.py"
    assert judged(EXAMPLES[name], "0.16.1", program)[0] == on_16
    assert judged(EXAMPLES[name], "0.19.2", program)[0] == on_19


@pytest.mark.parametrize(
    ("flags", "states"),
    [
        (f"{MTP} --eod-mask-loss", {"D4": "0.16", "D14": "0.16 0.17 0.18 0.19"}),
        (f"{MTP} --recompute-granularity full", {"D37": "0.18"}),
        (f"{SEEDED['D16']}", {"D16": "0.16 0.17"}),
        (f"{SEEDED['D1']}", {"D1": "0.16 0.17 0.18"}),
    ],
)
def test_each_release_has_the_defects_that_were_measured_on_it(
    flags: str, states: dict[str, str]
) -> None:
    for number, releases in states.items():
        named = [x for x in RELEASES if number in judged(flags, f"{x}.0")[0]]
        assert " ".join(named) == releases, number


@pytest.mark.parametrize(
    ("flags", "number", "sentence"),
    [
        (f"{SEEDED['D1']} --tensor-model-parallel-size 2 --sequence-parallel", "D1", "0.25 of"),
        (SEEDED["D3"], "D3", "0.25 of"),
        (f"{MTP} {PER_TOKEN} --seq-length 64", "D5", "0.984375 of"),
        (SEEDED["D24"], "D24", "1/2 of the vocabulary"),
        (f"{LATENT} --tensor-model-parallel-size 4", "D42", "4 times too large"),
    ],
)
def test_the_size_of_an_error_comes_from_the_flags(flags: str, number: str, sentence: str) -> None:
    result = audit(flags.split(), "0.16.1")
    assert sentence in {x.number: x.error for x in result.findings}[number]


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (
            "--context-parallel-size ${CP}",
            "D1 is not judged: `--context-parallel-size` (${CP}) is a variable; give its value.",
        ),
        (
            "--context-parallel-size two",
            "D1 is not judged: `--context-parallel-size` (two) must be a number; give one.",
        ),
        (
            "--use-checkpoint-args --load x",
            "Flags that come from a checkpoint or from a YAML file are not audited.",
        ),
    ],
)
def test_what_cannot_be_judged_is_a_note_and_not_guessed(flags: str, note: str) -> None:
    result = audit(f"{MOE} {PER_TOKEN} {flags}".split(), "0.16.1")
    assert result.findings == ()
    assert note in result.notes


def test_flags_may_be_written_in_several_ways() -> None:
    for words in (
        ["--label-smoothing 0.1", "--tensor-model-parallel-size", "2"],
        ["--label-smoothing=0.1", "--tensor-model-parallel-size=2"],
        ["--label_smoothing", "0.1", "--tensor_model_parallel_size=2"],
        ["--tensor-model-parallel-size", "1", *SEEDED["D24"].split()],
    ):
        assert [x.number for x in audit(words, "0.19.2").findings] == ["D24"]


def test_the_table_of_the_manual_is_that_of_the_audit() -> None:
    lines = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8").splitlines()
    assert [x for x in lines if x.startswith("| D")] == [x.row() for x in DEFECTS]
    assert [x.number for x in DEFECTS] == [f"D{i}" for i in range(1, 44)]


def test_the_program_exits_with_0_1_or_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--core", "0.19.2", "--", *CLEAN["dense"].split()], "") == 0
    assert "no known defect" in capsys.readouterr().out
    assert main(["--core", "0.19.2", "--json", "--", *SEEDED["D21"].split()], "") == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["number"] == "D21"
    for words, message in {
        ("--core", "0.3", "--", "--bf16"): "--core (0.3) must be a version of 0.16, 0.17",
        (): "Give either flags of a training program after `--`, or a recipe.",
        ("x.yaml", "--", "--bf16"): "Give either flags of a training program after `--`, or",
        ("run.sh",): "`recipe` (run.sh) must be a YAML file, as launch scripts are not read; to "
        "audit a script, put this package's pretrain_gpt.py in the place of its training program, "
        "add `--audit` to the flags and run it, or give the flags after `--`.",
        (str(tmp_path / "gone.yaml"),): "cannot be read",
        ("--reproduce", "D99"): "--reproduce (D99) is no defect",
    }.items():
        assert main(list(words), "") == 2
        assert message in capsys.readouterr().err


def test_flags_may_follow_the_name_of_their_program() -> None:
    for name, code in {"pretrain_gpt.py": 0, "examples/pretrain_mamba.py": 1}.items():
        assert main(["--core", "0.19.2", "--", name, *SEEDED["D7"].split()], "") == code


@pytest.mark.parametrize(("flags", "code"), [(CLEAN["dense"], 0), (SEEDED["D21"], 1)])
def test_the_training_program_audits_its_flags_on_the_first_rank(
    flags: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--nproc-per-node", "2", "--audit", *flags.split()]
    for rank in ("", "0"):
        monkeypatch.setenv("RANK", rank)
        assert pretrain_gpt(words) == code
        assert ("D21" in capsys.readouterr().out) == bool(code)
    monkeypatch.setenv("RANK", "1")
    assert pretrain_gpt(words) == 0
    assert capsys.readouterr() == ("", "")


def test_the_help_of_the_training_program_names_the_audit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        pretrain_gpt(["--audit", "--help"])
    assert end.value.code == 0
    assert "``--audit`` it does not train: it names" in capsys.readouterr().out


def test_an_audit_needs_no_torch() -> None:
    code = "import sys; import megatron_ext.extras.audit.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
