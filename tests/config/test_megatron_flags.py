"""Flags of Megatron-LM: each name has an answer, advice can be followed, lists are read alike."""

import re
from pathlib import Path

import pytest

from megatron_ext.config.help import Manual
from megatron_ext.config.inapplicable import answer_to, megatron_flags
from megatron_ext.config.parser import read_words
from megatron_ext.config.run import transformer_fields
from megatron_ext.config.sections import OWN_FLAGS, all_flags, spellings
from megatron_ext.text.task import GPT, TEXT
from tests.config.runs import SMALL, with_transformer_engine
from tests.training_runs import errors_of, parsed

ROOT = Path(__file__).parents[2]
LINES = [
    line.split(" ", 2)
    for line in (Path(__file__).parent / "megatron_flags.txt").read_text().splitlines()
]
NAMES = {name: releases for name, releases, *_ in LINES}
"""Every flag of Megatron-LM's parser in releases 0.16 to 0.20 -> the releases that have it."""
DEFAULTS = {name: default[0] for name, _, *default in LINES if default}
"""Each that is a flag here too -> its default in 0.19.0, as code after its parser sets it."""
ACCEPTED = spellings(all_flags(TEXT))
LACKING = megatron_flags()
PORTING = (ROOT / "docs/porting.md").read_text(encoding="utf-8")
ENTRIES = list({id(entry): entry for entry in LACKING.values()}.values())
REMEDIES = sorted({entry.remedy for entry in ENTRIES if entry.remedy})


def test_every_flag_of_megatron_lm_has_an_answer() -> None:
    assert len(NAMES) > 900
    unknown = [
        error
        for name in NAMES
        for error in read_words([name], TEXT).errors
        if "not a flag of this program" in error
    ]
    assert unknown == []


def test_defaults_are_those_of_megatron_lm_but_for_the_ones_that_a_page_lists() -> None:
    flags = {ACCEPTED[name][0].field: (name, theirs) for name, theirs in DEFAULTS.items()}
    manual = Manual(TEXT, tuple, width=100)
    different = {}
    for flag in all_flags(TEXT):
        _, theirs = flags.get(flag.field, ("", ""))
        ours = manual.default(flag) or "none"
        same = as_number(ours) == as_number(theirs) or (ours, theirs) == ("none", "0")
        if theirs and not same:
            different[flag.positive[0]] = (ours, theirs)
    rows = re.findall(r"^\| `(--[\w-]+)` \| (\S+) \| (\S+) \| .* \|$", PORTING, re.MULTILINE)
    listed = {name: (ours, theirs.replace("\\", "")) for name, ours, theirs in rows}
    assert len(flags) > 300
    assert listed == different


def as_number(text: str) -> float | str:
    """Return a default as a number if it is one, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def test_a_name_has_one_answer_only() -> None:
    assert ACCEPTED.keys() & LACKING.keys() == set()
    names = [f"--{name}" for entry in ENTRIES for name in entry.flags.split()]
    assert len(names) == len(set(names)) == len(LACKING)


@pytest.mark.parametrize("name", ["gpu-sniff-test-interval", "no-rl-profile", "disable-msc"])
def test_a_flag_that_changes_no_result_is_a_note(name: str) -> None:
    reading = read_words([f"--{name}", "7"], TEXT)
    (note,) = reading.notes
    assert reading.errors == []
    assert note.startswith(f"`--{name}` has no effect: ") and note.endswith(".")


@pytest.mark.parametrize("remedy", REMEDIES)
def test_advice_of_a_refusal_can_be_followed(remedy: str) -> None:
    assert re.match(r"(use|leave it out)", remedy), remedy
    for name in re.findall(r"`(--[a-z0-9-]+)", remedy):
        assert name in ACCEPTED or name in OWN_FLAGS, name
    for path in re.findall(r"(?:tools|examples)/[a-z_.]+", remedy):
        assert (ROOT / path).exists(), path


def test_flags_in_the_reasons_of_notes_exist() -> None:
    for entry in ENTRIES:
        for name in re.findall(r"`(--[a-z0-9-]+)", "" if entry.remedy else entry.reason):
            assert name in ACCEPTED or LACKING[name].remedy, name
        assert bool(entry.reason) != bool(entry.instead)
        assert set(entry.defaults) <= set(entry.flags.split())
    used = {f"--{name}" for entry in GPT.answers() for name in entry.flags.split()}
    assert used <= ACCEPTED.keys()


def test_a_refused_flag_with_megatron_lms_default_asks_for_nothing() -> None:
    found = parsed(f"{SMALL} --error-injection-rate 0 --null-tokenizer-pad-id -1")
    assert [note for note in found.notes if "it is Megatron-LM's default" in note] == found.notes
    assert len(found.notes) == 2
    (error,) = errors_of(f"{SMALL} --error-injection-rate 1")
    assert error.startswith("`--error-injection-rate` is known from Megatron-LM but refused here: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--train-mode finetune", "from Pai-Megatron-Patch but refused here: it trains on the ans"),
        ("--first-k-dense-replace 1", "from MindSpeed-LLM but refused here: it makes the first"),
        ("--ckpt-format torch", "must be one of torch_dist; leave it out, and convert"),
        ("--extra-vocab-size 467", "refused here: it adds entries to the vocabulary; use `--padd"),
        ("--optimizer hybridadam", "sgd, custom; use adam."),
    ],
)
def test_flags_of_scripts_built_on_megatron_lm_are_told_what_replaces_them(
    words: str, said: str
) -> None:
    (error,) = read_words(words.split(), TEXT).errors
    assert said in error


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            "--patch-tokenizer-type Qwen3Tokenizer --tokenizer-type NullTokenizer",
            "`--patch-tokenizer-type` has no effect with `--tokenizer-type`: it names the",
        ),
        (
            "--train-weighted-split-paths-path f --data_path d",
            "`--train-weighted-split-paths-path` has no effect with `--data-path`: it names",
        ),
        ("--main-grads-dtype bf16", "`--main-grads-dtype` has no effect: gradients and the wei"),
        ("--lr-wsd-decay-style 1-sqrt", "`--lr-wsd-decay-style` (1-sqrt) is minus_sqrt here, wh"),
    ],
)
def test_a_flag_whose_work_another_one_does_is_a_note(words: str, note: str) -> None:
    reading = read_words(words.split(), TEXT)
    assert not reading.errors
    (told,) = reading.notes
    assert told.startswith(note)


def test_names_of_values_in_forks_become_ours() -> None:
    words = "--lr-wsd-decay-style 1-sqrt"
    values = read_words(f"{words} --tokenizer-type PretrainedFromHF".split(), TEXT).values
    assert values["optimizer"]["lr_wsd_decay_style"] == "minus_sqrt"
    assert values["tokenizer"]["tokenizer_type"] == "HuggingFaceTokenizer"


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            "--optimizer lamb --optimizer sgd",
            "`--optimizer` (sgd) takes the place of the value (la",
        ),
        ("--lr fast --lr 1e-3", "`--lr` (1e-3) takes the place of the value (fast) that was given"),
        ("--data-path --data-path d", "`--data-path` (d) takes the place of the one that was gi"),
        (
            "--hybrid-mlp-ratio 0.5 --hybrid-mlp-ratio 0.0",
            "`--hybrid-mlp-ratio` (0.0) takes the place of the value (0.5) that was given before",
        ),
    ],
)
def test_a_refused_value_that_is_replaced_is_no_error(words: str, note: str) -> None:
    reading = read_words(words.split(), TEXT)
    assert not reading.errors and not reading.unread
    assert reading.notes[0].startswith(note)


def test_flags_that_multi_latent_attention_ignores_are_notes() -> None:
    latent = f"{SMALL} --multi-latent-attention --position-embedding-type rope"
    found = parsed(f"{latent} --use-rope-scaling --rotary-seq-len-interpolation-factor 2")
    assert [note.partition(":")[0] for note in found.notes] == [
        "`--use-rope-scaling` has no effect with `--multi-latent-attention`",
        "`--rotary-seq-len-interpolation-factor` has no effect with `--multi-latent-attention`",
    ]


def test_settings_that_another_machine_decides_are_notes_or_reach_the_core() -> None:
    exact = "--bf16 --disable-bf16-reduced-precision-matmul"
    found = parsed(f"{SMALL} {exact} --distributed-backend nccl")
    assert [note.partition(":")[0] for note in found.notes] == [
        "`--disable-bf16-reduced-precision-matmul` has no effect on a CPU",
        "`--distributed-backend` (nccl) is gloo on a CPU, which has no NCCL.",
    ]
    on_gpu = parsed(f"{SMALL} {exact}", device="cuda")
    assert on_gpu.notes == []
    assert transformer_fields(on_gpu.config)["disable_bf16_reduced_precision_matmul"] is True


def test_padding_of_the_router_is_a_note_without_transformer_engine() -> None:
    experts = "--num-experts 4 --disable-bias-linear --bf16 --fp8-format hybrid"
    found = parsed(f"{SMALL} {experts} --moe-router-padding-for-fp8")
    (note,) = found.notes
    assert note.endswith(
        "without Transformer Engine: the torch layers pad the tokens of an expert themselves."
    )
    assert not found.config.fp8.moe_router_padding_for_quantization


def test_moments_in_float32_need_no_optimizer_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with_transformer_engine(monkeypatch)
    words = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer"
    found = parsed(f"{SMALL} {words} --transformer-impl transformer_engine", device="cuda")
    (note,) = found.notes
    assert note.startswith(
        "`--use-precision-aware-optimizer` has no effect with moments in float32"
    )


def test_flags_of_scripts_built_on_megatron_lm_that_change_nothing_are_notes() -> None:
    words = "--train-mode pretrain --extra-vocab-size 0 --max-padding-length 128 --use-fused-swiglu"
    reading = read_words([*words.split(), "--qk-rope-head-dim", "64"], TEXT)
    assert not reading.errors
    assert "it is Pai-Megatron-Patch's default" in reading.notes[1]
    assert reading.values["latent_attention"]["qk_pos_emb_head_dim"] == 64


def test_both_negative_spellings_switch_off() -> None:
    for name in ("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"):
        assert read_words([name], TEXT).values["logging"]["log_loss_scale_to_tensorboard"] is False
    assert answer_to("--disable-spec", LACKING) is not None
    assert answer_to("--disable-nothing", LACKING) is None


LISTS = {
    "--window-size 127,0": [127, 0],
    "--window-size (127,0)": [127, 0],
    "--window-size -1,0": [-1, 0],
    "--window-size 127 0": [127, 0],
    "--window-attn-skip-freq ([1]*3+[0]*1)*3": "([1]*3+[0]*1)*3",
    "--no-rope-freq ([0]*3+[1])*2": "([0]*3+[1])*2",
    "--moe-layer-freq ([0]+[1]*23)": "([0]+[1]*23)",
    "--rampup-batch-size 16 16 5859375": [16, 16, 5859375],
    "--profile-ranks 0 1": [0, 1],
    "--cp-comm-type p2p a2a": ["p2p", "a2a"],
    "--hierarchical-context-parallel-sizes 2 4": [2, 4],
    "--recompute-modules core_attn mlp": ["core_attn", "mlp"],
    "--offload-modules core_attn moe_act": ["core_attn", "moe_act"],
    "--moe-router-load-balancing-type aux_loss seq_aux_loss": ["aux_loss", "seq_aux_loss"],
    "--moe-aux-loss-coeff 1e-2 1e-3": [0.01, 0.001],
    "--data-path 0.3 a 0.7 b": ["0.3", "a", "0.7", "b"],
    "--train-data-path 1 a": ["1", "a"],
    "--valid-data-path a": ["a"],
    "--test-data-path a b": ["a", "b"],
    "--tiktoken-special-tokens <unk> <s>": ["<unk>", "<s>"],
    "--tokenizer-special-tokens <x>": ["<x>"],
}
"""Words that Megatron-LM's launch scripts write for lists and tuples -> the value of its parser."""


@pytest.mark.parametrize("words", LISTS)
def test_lists_and_tuples_are_read_as_megatron_lm_reads_them(words: str) -> None:
    reading = read_words(words.split(), TEXT)
    assert reading.errors == []
    ((flag, _),) = reading.given.values()
    assert reading.values[flag.section][flag.field] == LISTS[words]


def test_every_list_of_megatron_lm_is_compared() -> None:
    compared = {words.split()[0] for words in LISTS}
    lists = {f.positive[0] for f in all_flags(TEXT) if f.nargs is not None}
    assert {name for name in lists if name in NAMES} <= compared


@pytest.mark.parametrize("words", [["(127,", "0)"], ["(127, 0)"], ["[127,0]"], ["127,", "0"]])
def test_a_tuple_may_hold_spaces(words: list[str]) -> None:
    assert read_words(["--window-size", *words], TEXT).values["attention"]["window_size"] == [
        127,
        0,
    ]


def test_wrong_values_have_no_consequences() -> None:
    without = SMALL.replace("--lr 1e-2", "")
    assert errors_of(f"{without} --lr abc") == ("`--lr` (abc) must be a number.",)
    words = f"{SMALL} --num-layers x --lr-warmup-iters 1 --recompute-modules foo"
    first, second = errors_of(words)
    assert first == "`--num-layers` (x) must be an integer."
    assert second.startswith("`--recompute-modules` (foo) must be names among core_attn, mlp")


def test_a_near_name_is_one_that_is_accepted() -> None:
    (error,) = errors_of(f"{SMALL} --num-layer 3")
    assert error.startswith("`--num-layer` is not a flag of this program; did you mean")
    for name in re.findall(r"`(--[a-z-]+)`", error)[1:]:
        assert name in ACCEPTED or LACKING[name].instead


def test_a_text_without_quotes_is_joined_where_spaces_belong_to_it_or_told_to_be_quoted() -> None:
    reading = read_words(["--step-batch-size-schedule", "0:2", "8:4"], TEXT)
    assert reading.values["training"]["step_batch_size_schedule"] == "0:2 8:4"
    (error,) = errors_of([*SMALL.split(), "--data-cache-path", "my", "folder"])
    assert error.endswith("but got 2; quote it: --data-cache-path 'my folder'.")


def test_transformer_engine_on_a_cpu_is_a_note() -> None:
    more = (
        "--transformer-impl transformer_engine --tp-comm-overlap --recompute-granularity "
        "selective --recompute-modules core_attn layernorm"
    )
    found = parsed(f"{SMALL} {more}")
    assert found.config.model.transformer_impl == "torch"
    assert found.config.model.recompute_modules == ["core_attn"]
    engine, overlap = sorted(found.notes, key=lambda note: "overlap" in note)
    assert engine.startswith("`--transformer-impl` (transformer_engine) has no effect on a CPU")
    assert overlap.startswith("`--tp-comm-overlap` has no effect on a CPU: ")
