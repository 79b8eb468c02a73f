"""The program tools/generate_text.py: jsonl in and out, chats, typed prompts, and bad input."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.errors import ConfigError
from megatron_ext.text.generation import run as writing
from megatron_ext.text.generation import tool
from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.generation.decode import Completion, PartialText, Request
from megatron_ext.text.generation.requests import Prompt, check_vocabulary
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.generation.tool import generate_text
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer
from megatron_ext.train.forking import fork_ranks
from tests.text.convert.models import imported
from tests.text.generation.tiny import speaking_model
from tests.text.tiny import ROOT, sentences, write_jsonl
from tests.training_runs import SMALL, config_of

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("tool") / "hf")


@pytest.fixture(scope="module")
def root(source: Path) -> Path:
    imported(source, source.parent / "ours")
    return source.parent / "ours"


def expected(source: Path, text: str, count: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(source)
    out = model.generate(ids, max_new_tokens=count, do_sample=False)
    return str(tokenizer.decode(out[0, ids.size(1) :], skip_special_tokens=True))


def run(words: list[str], ranks: int = 1) -> int:
    if ranks == 1:
        return fork_ranks(lambda: generate_text(words), 1)
    return generate_text([*words, "--nproc-per-node", str(ranks)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_of_a_file_get_completions_in_their_order(
    source: Path, root: Path, tmp_path: Path
) -> None:
    texts = [" ".join(text.split()[: 2 + i]) for i, text in enumerate(sentences()[:5])]
    file = write_jsonl(
        tmp_path / "in.jsonl",
        [{"completion": "an older one", "id": i, "prompt": t} for i, t in enumerate(texts)],
    )
    words = ["--load", str(root), "--prompt-file", str(file), "--max-new-tokens", "8"]
    words += ["--output-file", str(tmp_path / "out.jsonl"), "--generation-batch-size", "2"]
    assert run([*words, "--tensor-model-parallel-size", "2"], ranks=4) == 0
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4]
    for row, text in zip(rows, texts, strict=True):
        assert row["completion"] == expected(source, text, 8)
        assert row["finish_reason"] in ("length", "eos")


def test_plain_prompts_for_a_model_of_conversations_are_told(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tool.read_run_config(root)
    for sft, words, count in ((True, [], 1), (True, ["--chat"], 0), (False, [], 0)):
        content = {**stored, "sft": {**stored.get("sft", {}), "sft": sft}}
        monkeypatch.setattr(tool, "read_run_config", lambda *_, content=content: content)
        given = ["--load", str(root), "--prompt", "a", *words]
        _, notes = tool.model_defaults(given, tool.GENERATION, "tools/generate_text.py")
        assert len([note for note in notes if "`--chat`" in note]) == count


def test_messages_go_through_the_chat_template_and_stop_strings_end_texts(
    source: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [{"role": "user", "content": sentences()[3]}]
    templated = f"user: {sentences()[3]}\nassistant:"
    whole = expected(source, templated, 10)
    stop = whole[4:7]
    rows = [{"messages": said}, {"prompt": sentences()[3]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    words = ["--load", str(root), "--prompt-file", "-", "--max-new-tokens", "10", "--chat"]
    words += ["--chat-template", str(tmp_path / "template.jinja")]
    words += ["--output-file", str(tmp_path / "out.jsonl"), "--stop-strings", stop]
    assert run(words) == 0
    found = rows_of(tmp_path / "out.jsonl")
    assert found == [
        {**row, "completion": whole[: whole.index(stop)], "finish_reason": "stop"} for row in rows
    ]


def test_texts_of_prompts_are_shown_on_the_terminal(
    source: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    texts = sentences()[:2]
    assert run(["--load", str(root), "--max-new-tokens", "6", "--prompt", *texts]) == 0
    told = [f"\n[{i}] {x}\n→ {expected(source, x, 6)}" for i, x in enumerate(texts, start=1)]
    assert f"\n{writing.SEPARATOR}".join(told) in capfd.readouterr().out
    monkeypatch.setattr(writing.Terminal, "show", lambda *_: print("piece"))
    words = ["--load", str(root), "--max-new-tokens", "2", "--prompt", texts[0]]
    for stream, count in (("--stream", 2), ("--no-stream", 0)):
        assert run([*words, stream]) == 0
        assert capfd.readouterr().out.count("piece") == count


def test_typed_prompts_are_answered_one_after_the_other(source: Path, root: Path) -> None:
    words = ["--load", str(root), "--interactive", "--max-new-tokens", "6", "--nproc-per-node", "2"]
    words += ["--pipeline-model-parallel-size", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tools/generate_text.py", *words],
        input=f"{sentences()[0]}\n\n{'word ' * 100}\n{sentences()[1]}\n",
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=True,
    )  # fmt: skip
    for text in sentences()[:2]:
        assert expected(source, text, 6).strip("\ufffd") in done.stdout
    assert "must have fewer than the model has positions" in done.stdout


def test_pieces_of_a_text_add_up_and_hold_back_what_may_change() -> None:
    sampling = Sampling(max_new_tokens=20, stop_strings=("end",))
    prompt = tuple(b"abc")
    writing = PartialText(Request(0, prompt, sampling), ByteLevelTokenizer(), ())
    pieces, ids = [], list(prompt)
    for byte in "d\u00e9 e enx end of".encode():
        logits = torch.zeros(512).scatter(0, torch.tensor([byte]), 1.0)
        ids.append(writing.choose(logits, ids))
        pieces.append(writing.further_text())
        if writing.reason:
            break
    assert writing.reason == "stop"
    assert "".join(pieces) == writing.text == "d\u00e9 e enx "
    assert "\ufffd" not in "".join(pieces)
    # An "e" may begin the stop string.
    assert pieces[4:6] == ["", "e "]


BAD = {
    "no checkpoint": ([], "`--load` is missing; give tools/generate_text.py the --save folder"),
    "missing checkpoint": (["--load", "nowhere"], "nowhere"),
    "no prompt": (["--load", "ROOT"], "There is nothing to continue; give `--prompt`"),
    "two sources": (
        ["--load", "ROOT", "--prompt", "a", "--interactive"],
        "`--prompt` and `--interactive` exclude each other",
    ),
    "temperature 0": (
        ["--load", "ROOT", "--prompt", "a", "--do-sample", "--temperature", "0"],
        "`--temperature` (0.0) must be above 0 and at most 1000; for the likeliest token, leave",
    ),
    "negative temperature": (
        ["--load", "ROOT", "--prompt", "a", "--do-sample", "--temperature", "-1"],
        "`--temperature` (-1.0) must be above 0",
    ),
    "temperature without draws": (
        ["--load", "ROOT", "--prompt", "a", "--temperature", "0.5"],
        "`--temperature` (0.5) has an effect only with `--do-sample`",
    ),
    "top p": (
        ["--load", "ROOT", "--prompt", "a", "--do-sample", "--top-p", "1.5"],
        "`--top-p` (1.5) must be above 0 and at most 1; use 0.9",
    ),
    "top k": (
        ["--load", "ROOT", "--prompt", "a", "--do-sample", "--top-k", "0"],
        "`--top-k` (0) must be at least 1",
    ),
    "penalty": (
        ["--load", "ROOT", "--prompt", "a", "--repetition-penalty", "0"],
        "`--repetition-penalty` (0.0) must be above 0",
    ),
    "no new tokens": (
        ["--load", "ROOT", "--prompt", "a", "--max-new-tokens", "0"],
        "`--max-new-tokens` (0) must be at least 1",
    ),
    "long prompt": (
        ["--load", "ROOT", "--prompt", "word " * 100],
        "must have fewer than the model has positions (`--max-position-embeddings` 64)",
    ),
    "no file": (["--load", "ROOT", "--prompt-file", "nowhere"], "`--prompt-file` (nowhere) cannot"),
    "not JSON": (["--load", "ROOT", "--prompt-file", "BAD"], "line 2 is not JSON"),
    "no prompt in a row": (["--load", "ROOT", "--prompt-file", "LACKS"], 'object with "prompt"'),
    "no template": (
        ["--load", "ROOT", "--prompt", "a", "--chat"],
        "has no chat template, so conversations cannot be tokenized; give one with "
        "`--chat-template`",
    ),
    "a template without a chat": (
        ["--load", "ROOT", "--prompt", "a", "--chat-template", "x"],
        "`--chat-template` (x) has an effect only with `--chat`",
    ),
    "context parallelism": (
        [
            "--load",
            "ROOT",
            "--prompt",
            "a",
            "--context-parallel-size",
            "2",
            "--nproc-per-node",
            "2",
        ],
        "`--context-parallel-size` (2) must be 1 where text is generated",
    ),
    "output of typed prompts": (
        ["--load", "ROOT", "--interactive", "--output-file", "x"],
        "`--output-file` (x) does not go with `--interactive`",
    ),
    "two models": (
        ["--load", "ROOT", "--load-hf", "x", "--prompt", "a"],
        "and `--load-hf` (x) both give a model; leave one out.",
    ),
    "output that cannot be written": (
        ["--load", "ROOT", "--prompt", "a", "--output-file", "/proc/x/y"],
        "`--output-file` (/proc/x/y) cannot be written",
    ),
    "empty stop string": (
        ["--load", "ROOT", "--prompt", "a", "--stop-strings", ""],
        "`--stop-strings` () must not be empty, as it is where a variable of the script is not set",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_sentence(
    case: str, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, sentence = BAD[case]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{\n')
    (tmp_path / "lacks.jsonl").write_text('{"text": "a"}\n')
    named = {
        "ROOT": str(root),
        "BAD": str(tmp_path / "bad.jsonl"),
        "LACKS": str(tmp_path / "lacks.jsonl"),
    }
    assert generate_text([named.get(word, word) for word in words]) == 2
    told = capfd.readouterr().err.strip()
    assert sentence in told
    assert len(told.splitlines()) == 1, told


@pytest.mark.parametrize(
    ("date", "origin"), [("2024-07-26", {"model_type": "llama"}), ("July", None), (None, None)]
)
def test_a_checkpoint_gives_the_flags_of_its_model(
    date: str | None, origin: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--fp16 --mtp-num-layers 1 --position-embedding-type rope --rotary-base 500 "
    flags += "--num-experts 4 --disable-bias-linear --moe-expert-capacity-factor 2 "
    flags += "--moe-pad-expert-input-to-capacity"
    stored = config_of([*SMALL, *flags.split()]).to_dict()
    stored["sft"]["written_date"] = date
    stored["model"]["unpadded_vocab_size"] = 126
    stored["hugging_face"] = None if origin is None else {"origin": origin}
    asked = []

    def read(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return stored

    monkeypatch.setattr(tool, "read_run_config", read)
    words = ["--load", "run", "--ckpt-step", "7"]
    defaults, notes = tool.model_defaults(words, tool.inference_task(), "the test")
    assert (asked, notes) == ([(Path("run"), 7)], [])
    assert (defaults["fp16"], defaults["bf16"]) == (True, False)
    assert (defaults["num_layers"], defaults["rotary_base"]) == (2, 500)
    assert defaults["unpadded_vocab_size"] == 126
    assert (defaults["tokenizer_type"], defaults["vocab_size"]) == ("NullTokenizer", 127)
    assert defaults["trained_date"] == (date if date == "2024-07-26" else None)
    assert defaults["origin"] == origin
    assert defaults["finetune"] and defaults["num_experts"] == 4
    # Generation predicts one token at a time, and drops none.
    dropped = {"mtp_num_layers", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"}
    assert not dropped & defaults.keys()


def test_ranks_wait_for_a_user_who_types(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def run_model(*arguments: Any) -> int:
        given.append(arguments[-1])
        return 0

    monkeypatch.setattr(tool, "run_model", run_model)
    assert generate_text(["--interactive"]) == generate_text(["--prompt", "a"]) == 0
    assert given == [{"distributed_timeout_minutes": 1440.0}, {}]


@pytest.mark.parametrize("chat", [False, True])
def test_a_conversation_keeps_what_was_asked_and_answered(
    chat: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that cannot be continued is told, and does not stay in the conversation."""
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntoo long\n  two \n"))
    seen: list[Any] = []

    def encode(prompt: Prompt) -> list[int]:
        seen.append(prompt.content)
        last = prompt.content if isinstance(prompt.content, str) else prompt.content[-1]["content"]
        return [1] * (99 if last == "too long" else 3)

    def write(requests: Any, on_text: Any) -> list[Completion]:
        on_text(0, f"text {len(seen)}")
        return [Completion(0, f"text {len(seen)}", (), "eos")]

    writer: Any = write
    writer.context = SimpleNamespace(is_reporting_rank=True, reporting_rank=0)
    config = config_of(SMALL).with_section(GenerationConfig(interactive=True, chat=chat))
    encoder: Any = encode
    writing._converse(config, encoder, writer)
    if chat:
        one = {"role": "user", "content": "one"}
        answered = [one, {"role": "assistant", "content": "text 1"}]
        two = [*answered, {"role": "user", "content": "  two "}]
        assert seen == [[one], [*answered, {"role": "user", "content": "too long"}], two]
    else:
        assert seen == ["one", "too long", "  two "]
    shown = capsys.readouterr().out
    assert "> text 1\n> The prompt has 99 tokens, but must have" in shown
    assert shown.endswith("> text 3\n> ")


def test_a_checkpoint_of_another_program_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "read_run_config", lambda *_: {"model": {}, "video": {}})
    assert generate_text(["--load", "other", "--prompt", "a"]) == 2
    assert "(other) must be a checkpoint of pretrain_gpt.py" in capfd.readouterr().err


def test_a_tokenizer_with_fewer_tokens_than_the_trained_one_is_refused() -> None:
    for trained in (512, 300):
        check_vocabulary(trained, ByteLevelTokenizer())
    check_vocabulary(None, ByteLevelTokenizer())
    with pytest.raises(ConfigError, match=r"has 600 tokens, but the tokenizer \(ByteLevelToken"):
        check_vocabulary(600, ByteLevelTokenizer())
    model = dataclasses.replace(config_of([*SMALL]).model, unpadded_vocab_size=600)
    config = dataclasses.replace(config_of([*SMALL]), model=model)
    with pytest.raises(ConfigError, match="has 600 tokens, but the tokenizer"):
        writing.prepare(config)
