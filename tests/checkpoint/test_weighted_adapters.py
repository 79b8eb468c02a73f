"""Weighted sums of adapters are those of peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.programs.lora import main
from tests.text.convert.test_lora import hugging_face_llama

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TARGETS = ["q_proj", "down_proj"]


def write_adapter(folder: Path, seed: int, **settings: Any) -> None:
    peft = pytest.importorskip("peft")
    described = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **settings}
    model = peft.get_peft_model(hugging_face_llama(), peft.LoraConfig(**described))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)


def combine(output: Path, *words: str | Path) -> int:
    return main(["combine", *map(str, words), "--output", str(output)])


CASES = {
    "linear": ({}, "linear", {}),
    "cat": ({"r": 2, "use_rslora": True}, "cat", {}),
    "svd": ({"r": 6, "rank_pattern": {"down_proj": 3}, "alpha_pattern": {"q_proj": 2}}, "svd", {}),
    "small svd": ({"target_modules": ["v_proj", "q_proj"]}, "svd", {"svd_rank": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_peft(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    settings, kind, more = CASES[case]
    folders = [tmp_path / "one", tmp_path / "two"]
    write_adapter(folders[0], 1)
    write_adapter(folders[1], 2, **settings)
    options = [word for key, value in more.items() for word in ("--svd-rank", str(value))]
    words = ["--adapters", *folders, "--weights", "0.7", "-0.4", "--combination-type", kind]
    assert combine(tmp_path / "sum", *words, *options) == 0
    base = hugging_face_llama()
    theirs = peft.PeftModel.from_pretrained(base, folders[0], adapter_name="one")
    theirs.load_adapter(folders[1], adapter_name="two")
    theirs.add_weighted_adapter(["one", "two"], [0.7, -0.4], "sum", kind, **more)
    theirs.set_adapter("sum")
    ours = peft.PeftModel.from_pretrained(hugging_face_llama(), tmp_path / "sum")
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        want = theirs.eval()(tokens).logits
        got = ours.eval()(tokens).logits
        plain = hugging_face_llama()(tokens).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert (want - plain).abs().max() > 0.01 * want.abs().max()


def test_what_cannot_be_added_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, dora = (tmp_path / name for name in ("one", "two", "dora"))
    write_adapter(one, 1)
    write_adapter(two, 2, r=2)
    write_adapter(dora, 3, use_dora=True)
    refused = {
        ("--adapters", one, two, "--weights", "1"): "has 1 numbers for 2 folders",
        ("--adapters", one, two, "--weights", "1", "1", "--combination-type", "linear"): (
            "needs adapters of one rank, but they have 2, 4"
        ),
        ("--adapters", one, dora, "--weights", "1", "1"): "holds adapters of DoRA",
        ("--adapters", one, "--weights", "1", "--combination-type", "cat", "--svd-rank", "2"): (
            "`--svd-rank` (2) has no effect with `--combination-type cat`"
        ),
        ("--adapters", one, tmp_path, "--weights", "1", "1"): "adapter_config.json",
    }
    for words, sentence in refused.items():
        assert combine(tmp_path / "sum", *words) == 1
        error = capsys.readouterr().err
        assert sentence in error and error.count("error: ") == 1, error
    settings = json.loads((two / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "another"
    (two / "adapter_config.json").write_text(json.dumps(settings))
    assert combine(tmp_path / "sum", "--adapters", one, two, "--weights", "1", "1") == 1
    assert "says `base_model_name_or_path`" in capsys.readouterr().err
    assert not (tmp_path / "sum").exists()
