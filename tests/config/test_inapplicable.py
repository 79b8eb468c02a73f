"""Flags that do not apply in a task of one's own, and the parts that implement them."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.flags import Flag
from megatron_ext.config.inapplicable import Inapplicable, without
from megatron_ext.config.parser import parse_args, read_words
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import all_flags
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.text.task import GPT, SFT, TEXT
from megatron_ext.train.task import STEP_FLAGS, TaskChoice
from tests.config.runs import SMALL
from tests.training_runs import errors_of, parsed

REFUSED = Inapplicable("qk-layernorm", "its heads have no norms", remedy="leave it out")
IGNORED = Inapplicable("seed", "nothing is drawn")
IN_SOME = Inapplicable(
    "weight-decay",
    remedy="use 0.01",
    says="is too large for four layers",
    holds=lambda values: values["num_layers"] == 4 and values["weight_decay"] > 0.5,
)
OWN = GPT.replace(inapplicable=(REFUSED, IGNORED, IN_SOME, *GPT.inapplicable))


def test_a_flag_that_a_task_always_refuses_is_none_of_its_program() -> None:
    sentence = "`--qk-layernorm` has no effect: its heads have no norms; leave it out."
    assert errors_of(f"{SMALL} --qk-layernorm", OWN) == (sentence,)
    assert read_words(["--disable-qk-layernorm"], OWN).errors[0].endswith("; leave it out.")
    assert "qk_layernorm" not in [flag.field for flag in all_flags(OWN)]


def test_a_program_has_the_flags_of_each_of_its_tasks() -> None:
    program = TaskChoice((OWN, SFT), lambda config: OWN)
    assert "qk_layernorm" in [flag.field for flag in all_flags(program)]
    sentence = "`--qk-layernorm` has no effect: its heads have no norms; leave it out."
    assert errors_of(f"{SMALL} --qk-layernorm", program) == (sentence,)
    assert parsed(f"{SMALL} --no-qk-layernorm", program).notes == []


def test_an_entry_without_a_remedy_is_a_note() -> None:
    assert parsed(f"{SMALL} --seed 3", OWN).notes == ["`--seed` has no effect: nothing is drawn."]


def test_an_entry_may_hold_in_some_runs_only() -> None:
    sentence = "`--weight-decay` is too large for four layers; use 0.01."
    assert errors_of(f"{SMALL} --weight-decay 0.9", OWN) == (sentence,)
    assert parsed(f"{SMALL} --weight-decay 0.2", OWN).notes == []


def test_defaults_of_a_program_come_before_those_of_its_task_and_are_not_refused() -> None:
    task = GPT.replace(
        defaults={**GPT.defaults, "weight_decay": 0.7, "clip_grad": 2.0},
        inapplicable=(IN_SOME, *GPT.inapplicable),
    )

    def read(words: str, **defaults: Any) -> RunConfig:
        flags = f"{SMALL} {words}".split()
        return parse_args(flags, task, world_size=1, device="cpu", defaults=defaults).config

    assert (read("").optimizer.weight_decay, read("").optimizer.clip_grad) == (0.7, 2.0)
    found = read("", weight_decay=0.8, seed=5)
    assert (found.optimizer.weight_decay, found.optimizer.clip_grad) == (0.8, 2.0)
    assert found.training.seed == 5 and read("--seed 6", seed=5).training.seed == 6
    assert read("--weight-decay 0.8", weight_decay=0.8).optimizer.weight_decay == 0.8
    for value in (0.7, 0.9):  # no longer the default
        with pytest.raises(ConfigError, match="is too large for four layers; use 0.01"):
            read(f"--weight-decay {value}", weight_decay=0.8)


def test_the_first_entry_that_holds_counts() -> None:
    first = without("--profile", "sgd-momentum", "it is measured alone")
    task = GPT.replace(inapplicable=(first, *GPT.inapplicable))
    told = "`--sgd-momentum` has no effect without `{}`.".format
    assert parsed(f"{SMALL} --sgd-momentum 0.5", task).notes == [
        told("--profile").replace(".", ": it is measured alone.")
    ]
    assert parsed(f"{SMALL} --sgd-momentum 0.5 --profile", task).notes == [told("--optimizer sgd")]


EXPERTS = "--num-experts 4 --disable-bias-linear"
AUTO = "--resume-mode auto --save x"
IDLE = [
    ("", "--ckpt-step 3 --finetune --exit-on-missing-checkpoint", "without `--load`"),
    (AUTO, "--exit-on-missing-checkpoint", "without `--load`"),
    ("", "--no-load-optim --no-load-rng", "without `--load` or `--resume-mode auto`"),
    ("", "--override-opt_param-scheduler", "without `--load` or `--resume-mode auto`"),
    (
        f"{AUTO} --no-load-optim",
        "--use-checkpoint-opt_param-scheduler",
        "with `--finetune` or `--no-load-optim`: the schedule starts anew",
    ),
    (
        "",
        "--dist-ckpt-strictness log_all --ckpt-fully-parallel-load",
        "without a checkpoint to load",
    ),
    (
        "",
        "--no-save-optim --no-save-rng --no-ckpt-fully-parallel-save --log-progress "
        "--no-dist-ckpt-optim-fully-reshardable",
        "without `--save`",
    ),
    (
        "",
        "--log-throughput --tensorboard-log-interval 2 --log-timers-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard",
        "without `--tensorboard-dir` or `--wandb-project`",
    ),
    ("--wandb-project p --wandb-exp-name n", "--tensorboard-queue-size 9", "without `--tensorboa"),
    ("", "--wandb-exp-name n --wandb-entity e --wandb-save-dir d", "without `--wandb-project`"),
    ("", "--recompute-num-layers 1", "without `--recompute-granularity full`"),
    ("", "--distribute-saved-activations", "without `--recompute-granularity full`"),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--distribute-saved-activations --sequence-parallel",
        "without `--tensor-model-parallel-size` above 1",
    ),
    ("", "--cp-comm-type a2a", "without `--context-parallel-size` above 1"),
    (
        "",
        "--account-for-loss-in-pipeline-split --use-tp-pp-dp-mapping",
        "without `--pipeline-model-parallel-size` above 1",
    ),
    (
        "",
        "--microbatch-group-size-per-virtual-pipeline-stage 2",
        "without `--num-virtual-stages-per-pipeline-rank` above 1",
    ),
    ("--lr-decay-style constant", "--min-lr 1e-4", "with `--lr-decay-style constant`: the rate"),
    ("", "--lr-warmup-init 1e-5", "without a warm-up"),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2",
        "--weight-decay 0.3",
        "with `--weight-decay-incr-style linear or cosine`: `--start-weight-decay` and",
    ),
    ("", "--grad-reduce-in-bf16", "without `--bf16`"),
    (
        "--bf16 --grad-reduce-in-bf16",
        "--accumulate-allreduce-grads-in-fp32",
        "with `--grad-reduce-in-bf16`",
    ),
    ("--eval-iters 0", "--eval-interval 3", ": nothing is evaluated, as `--eval-iters` is 0"),
    ("", "--apply-wd-to-qk-layernorm", "without `--qk-layernorm`"),
    (
        "--recompute-granularity selective",
        "--recompute-modules core_attn moe",
        "on moe or moe_act or shared_experts without `--num-experts`",
    ),
    (
        f"{EXPERTS} --recompute-granularity selective",
        "--recompute-modules moe shared_experts",
        "on shared_experts without `--moe-shared-expert-intermediate-size`",
    ),
    (
        f"{EXPERTS} --recompute-granularity selective",
        "--recompute-modules mlp",
        "on mlp, since each layer has experts in its place",
    ),
    (
        "--fine-grained-activation-offloading --offload-modules core_attn",
        "--offload-modules core_attn expert_fc1",
        "on expert_fc1 or moe_act without `--num-experts`",
    ),
    ("", "--no-mmap-bin-files --num-dataset-builder-threads 3", "with `--mock-data`: made-up"),
    ("", "--trust-remote-code", "without `--tokenizer-type HuggingFaceTokenizer`"),
    ("", "--tokenizer-special-tokens <x>", "with `--tokenizer-type NullTokenizer`"),
    ("", "--eval-batch-size 3", "without `--eval-tasks`"),
    (EXPERTS, "--moe-router-num-groups 2", "without `--moe-router-group-topk`"),
    (EXPERTS, "--moe-router-bias-update-rate 1", "without `--moe-router-enable-expert-bias`"),
    (EXPERTS, "--moe-token-drop-policy position", "without `--moe-expert-capacity-factor`"),
    (EXPERTS, "--moe-shared-expert-gate", "without `--moe-shared-expert-intermediate-size`"),
    (
        f"{EXPERTS} --moe-router-load-balancing-type none",
        "--moe-aux-loss-coeff 0.1",
        "with `--moe-router-load-balancing-type none`",
    ),
]
"""(flags of a run, further flags that have no effect in it, why they have none)."""


@pytest.mark.parametrize(("run", "idle", "why"), IDLE)
def test_a_flag_that_lacks_another_is_never_ignored_in_silence(
    run: str, idle: str, why: str
) -> None:
    expected = [f"`{word}` has no effect {why}" for word in idle.split() if word[:2] == "--"]
    notes = parsed(f"{SMALL} {run} {idle}").notes
    for sentence in expected:
        sentence = sentence.replace(" :", ":")
        assert [note for note in notes if note.startswith(sentence)], notes
    assert not set(notes) & set(parsed(f"{SMALL} {run}").notes)


def other_value(flag: Flag) -> list[str]:
    """Return words that give a flag another value than its default."""
    if flag.type is bool:
        return [(flag.negative if flag.default is True else flag.positive)[-1]]
    values: Iterable[Any] = flag.choices or {int: (4, 2, 8, 1), float: (0.5, 2.0)}.get(
        flag.type, ("x",)
    )
    fit = [
        str(value)
        for value in values
        if value != flag.default and [value] != flag.default
        if flag.bounds is None or flag.bounds.broken_rule(value) is None
    ]
    return [flag.positive[0], *fit[:1] * (flag.nargs if isinstance(flag.nargs, int) else 1)]


@pytest.mark.slow
def test_each_flag_alone_has_an_effect_or_a_note_or_is_refused() -> None:
    """``alone.txt`` lists the flags that have an effect in a small run without other flags.

    A flag that needs another one is no member: it gets a note, or an error.
    """
    usual = parsed(SMALL).notes
    silent = set()
    for flag in all_flags(TEXT):
        with suppress(ConfigError, CheckpointError):
            if parsed([*SMALL.split(), *other_value(flag)]).notes == usual:
                silent.add(other_value(flag)[0])
    alone = (Path(__file__).parent / "alone.txt").read_text(encoding="utf-8").split()
    assert (silent - set(alone), set(alone) - silent) == (set(), set())


def test_a_note_names_a_flag_as_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("min_lr: 1e-5\nlr_decay_style: constant\noverlap_grad_reduce: false\n")
    words = f"{SMALL} --no-overlap-grad-reduce --config {file}"
    from_file, given = parsed(words).notes
    assert given.startswith("`--no-overlap-grad-reduce` has no effect on a CPU")
    assert from_file.startswith(f"`min_lr` in `{file}` has no effect with `--lr-decay-style")


@pytest.mark.parametrize("implemented", ["", STEP_FLAGS])
def test_a_step_of_ones_own_has_the_flags_that_it_implements(implemented: str) -> None:
    def step(*_: object) -> None:
        raise AssertionError("nothing is computed")

    task = GPT.replace(forward_step=step, implements={**GPT.implements, step: implemented})
    words = f"{SMALL} --z-loss-coeff 0.1 --label-smoothing 0.1"
    if implemented:
        assert parsed(words, task).config.loss.label_smoothing == 0.1
        return
    part = "is left out of account by the forward step and the model of this task"
    assert [text.partition(" (")[0] for text in errors_of(words, task)] == [
        f"`--label-smoothing` {part}",
        f"`--z-loss-coeff` {part}",
    ]


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--mlflow-run-name n", "`--mlflow-experiment`"),
        ("--trackio-run-name n", "`--trackio-project`"),
        ("--tensorboard-log-interval 2", "`--mlflow-experiment` or `--trackio-project`"),
    ],
)
def test_a_flag_of_a_tracker_that_is_not_used_is_noted(words: str, needed: str) -> None:
    (note,) = parsed(f"{SMALL} {words}").notes
    assert note.startswith(f"`{words.split()[0]}` has no effect without `--")
    assert needed in note
    used = f"{SMALL} --tensorboard-dir t --wandb-project p --wandb-exp-name n --trackio-project p"
    assert parsed(f"{used} --mlflow-experiment e {words}").notes == []


DATA = SMALL.replace("--mock-data", "--data-path x")
NOTES = {
    "--eval-iters 2 --split 100,0,0": "`--eval-iters` has no effect: `--split` leaves no documents",
    "--eval-iters 2 --split 1": "`--eval-iters` has no effect: `--split` leaves no documents",
    "--lora-rank 2": "`--lora-rank` trains adapters beside random weights that stay as they are",
    "--profile --profile-step-start 12": "`--profile` records nothing: the run has 12 steps, and",
    "--early-stop-patience 3 --eval-iters 1 --eval-interval 4":
        "`--early-stop-patience` (3) never ends the run: its 12 steps have 3 evaluations",
    "--log-interval 13": "`--log-interval` reports no step but the first: the run ends before",
    "--log-layer-norms-interval 13":
        "`--log-layer-norms-interval` has no effect: the run ends before",
    "--sample-interval 13 --sample-texts a --save s":
        "`--sample-interval` has no effect: the run ends before",
}  # fmt: skip
FOLLOWED = [
    "--eval-iters 2 --split 98,2,0",
    "--lora-rank 2 --pretrained-checkpoint x",
    "--profile --profile-step-start 11",
    "--early-stop-patience 2 --eval-iters 1 --eval-interval 4",
    "--log-interval 12 --log-layer-norms-interval 12",
    "--sample-interval 12 --sample-texts a --save s",
]


@pytest.mark.parametrize("flags", NOTES)
def test_flags_from_which_nothing_follows_are_told(flags: str) -> None:
    assert len([x for x in parsed(f"{DATA} {flags}").notes if x.startswith(NOTES[flags])]) == 1


@pytest.mark.parametrize("flags", FOLLOWED)
def test_flags_that_do_something_are_not(flags: str) -> None:
    told = (
        " records nothing",
        " never ends",
        " beside random weights",
        "leaves no documents",
        "before",
    )
    assert not [note for note in parsed(f"{DATA} {flags}").notes if any(x in note for x in told)]
