"""Rules of Transformer Engine's layers, and the table of versions; it need not be installed."""

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from megatron_ext.config.rules import te_version, transformer_engine
from megatron_ext.config.rules.te_version import MINIMUM, NEEDS, Need, found_version, version_errors
from megatron_ext.config.rules.transformer_engine import OVERLAPPED
from megatron_ext.config.run import RunConfig, transformer_fields
from megatron_ext.errors import ConfigError
from megatron_ext.text.config.moe import MoEConfig
from tests.config.runs import BF16, with_transformer_engine
from tests.training_runs import check_refused, config_of

TE = "--transformer-impl transformer_engine "
SP = "--tensor-model-parallel-size 2 --sequence-parallel "
CP = "--context-parallel-size 2 "
FP8 = "--fp8-format hybrid "
TENSORWISE = f"{FP8} --fp8-recipe tensorwise "
GATHER = "--fp8-param-gather --use-distributed-optimizer "
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8 "
EXPERTS = "--num-experts 2 --disable-bias-linear "


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_transformer_engine(monkeypatch)


def run_of(words: str) -> dict[str, Any]:
    return {"words": f"{BF16} {words}", "ranks": 2 if "size 2" in words else 1, "device": "cuda"}


def configured(words: str) -> RunConfig:
    return config_of(**run_of(words))


def refused(words: str, sentence: str) -> None:
    check_refused(**run_of(words), sentence=sentence)


GOOD = [
    "",
    FP8,
    TENSORWISE + "--first-last-layers-bf16",
    "--fp8-format e4m3 --fp8-recipe blockwise",
    MXFP8,
    f"{FP8} --tp-only-amax-red",
    TENSORWISE + GATHER + "--overlap-param-gather --overlap-grad-reduce",
    MXFP8 + GATHER + "--reuse-grad-buf-for-mxfp8-param-ag",
    f"{FP8} --fp8-recipe custom --fp8-quantizer-factory recipes.quantizers.make",
    TENSORWISE + EXPERTS,
    f"{TENSORWISE} {EXPERTS} --moe-router-padding-for-fp8 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm",
    SP + "--tp-comm-overlap --disable-tp-comm-overlap-rs --tp-comm-bootstrap-backend gloo",
    CP + "--cp-comm-type a2a",
    CP + "--cp-comm-type p2p all_gather a2a p2p",
    CP + "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1",
]


@pytest.mark.parametrize("words", GOOD)
def test_accepted(words: str) -> None:
    config = configured(TE + words)
    assert config.model.transformer_impl == "transformer_engine"
    fields = transformer_fields(config)
    if "--fp8-format" in words:
        assert fields["fp8"] == config.fp8.fp8_format
        assert fields["fp8_param"] == ("--fp8-param-gather" in words)


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("NVTE_FLASH_ATTN", "", "`NVTE_FLASH_ATTN` (0) in the environment contradicts"),
        ("NVTE_FUSED_ATTN", "--attention-backend fused", "which sets it to 1; unset it."),
    ],
)
def test_the_environment_must_not_contradict_the_backend(
    name: str, words: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "0")
    refused(words, sentence)
    monkeypatch.setenv(name, "1")
    configured(words)


def test_deterministic_runs_forbid_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    configured("--deterministic-mode --transformer-impl torch")
    refused(TE + "--deterministic-mode", "contradicts `--deterministic-mode`")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[qkv_fprop]", "must hold settings by the names of products"),
        ("qkv_forward: {method: bulk}", "names qkv_forward, but products are called qkv_fprop"),
        ("qkv_fprop: {method: [", "cannot be read"),
    ],
)
def test_a_bad_file_of_overlap_settings(content: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "overlap.yaml"
    path.write_text(content)
    refused(f"{TE}{SP} --tp-comm-overlap --tp-comm-overlap-cfg {path}", sentence)
    assert len(OVERLAPPED) == 12 and {"qkv_fprop", "fc2_wgrad"} <= set(OVERLAPPED)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--reset-attention-mask",
        "--lora-rank 2",
        "--deterministic-dropout",
        f"{FP8} --fp8-recipe rowwise",
        f"{FP8} --no-fp8-wgrad",
        "--attention-backend local",
        "--cuda-graph-impl local --attention-dropout 0",
    ],
)
def test_auto_takes_the_torch_layers_where_the_others_lack_something(words: str) -> None:
    wanted = "torch" if words else "transformer_engine"
    assert configured(words).model.transformer_impl == wanted


@pytest.mark.parametrize("words", ["--tp-comm-overlap", "--fp8-recipe mxfp8 --fp8-format e4m3"])
def test_the_torch_layers_refuse_what_they_lack(words: str) -> None:
    refused(f"--transformer-impl torch {SP} {words}", "--transformer-impl transformer_engine")


@pytest.mark.parametrize("words", ["--tp-comm-overlap", f"{FP8} --fp8-recipe mxfp8"])
def test_no_sentence_names_layers_that_other_flags_would_refuse(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(f"--lora-rank 2 {SP} {words}")
    assert "Transformer Engine's layers" in str(caught.value)
    assert "--transformer-impl transformer_engine" not in str(caught.value)


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_version, "DISTRIBUTION", "no-such-package-is-installed")
    assert found_version() is None
    monkeypatch.setattr(transformer_engine, "find_spec", lambda name: None)
    words = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1"
    refused(f"{TE}{CP}{words}", "needs the package einops")


def test_every_feature_names_its_version() -> None:
    """A run that asks for all of them, under each version: one sentence for each it lacks."""
    config = configured(
        f"{TE} {EXPERTS} --moe-router-fusion --softmax-type learnable --fp8-format e4m3 "
        "--fp8-recipe custom --fp8-quantizer-factory a.b --cross-entropy-impl te "
        "--recompute-granularity selective --recompute-modules layernorm moe_act"
    )
    assert all(need.used(config) for need in NEEDS)
    assert config.section(MoEConfig).te_versions(config)
    numbers = {"2.4.0": 5, "2.6.1": 3, "2.7.0+cu12": 2, "2.8.0": 1, "2.9.0.dev0": 0, "2.18": 0}
    for found, count in numbers.items():
        errors = version_errors(config, found)
        assert len(errors) == count, (found, errors)
        assert all(found in error and "pip install" in error for error in errors)
        assert all('[pytorch]>=2.9.0"`.' in error for error in errors)


def test_the_newest_of_the_needed_versions_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(TE)
    needs = [Need(f"--needs-{minimum}", minimum, lambda _: True) for minimum in ("2.9.0", "2.10.0")]
    monkeypatch.setattr(te_version, "NEEDS", tuple(needs))
    errors = version_errors(config, "2.8.1")
    assert len(errors) == 2
    assert all('[pytorch]>=2.10.0"`.' in error for error in errors)
    assert version_errors(config, "2.10.0") == []


def test_what_is_recomputed_needs_a_newer_version_in_8_bits_alone() -> None:
    words = (
        f"{TE} {EXPERTS} --recompute-granularity selective --recompute-modules layernorm moe_act"
    )
    assert version_errors(configured(words), MINIMUM) == []
    assert len(version_errors(configured(f"{words} {TENSORWISE}"), MINIMUM)) == 2


def test_a_version_too_old_for_the_layers_is_said_once() -> None:
    config = configured(TE + TENSORWISE)
    for found in ("1.13.0", "2.3.0", "not a version"):
        (error,) = version_errors(config, found)
        assert error == (
            f"`--transformer-impl transformer_engine` needs Transformer Engine {MINIMUM} or newer, "
            f"but the installed one is {found}; run `pip install -U --no-build-isolation "
            '"transformer-engine[pytorch]>=2.4.0"`.'
        )
    assert version_errors(config, MINIMUM) == []


def test_the_version_is_checked_with_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_version, "found_version", lambda: "2.3.0")
    refused(TE, "needs Transformer Engine 2.4.0 or newer")
    configured("--transformer-impl torch")
    torch_layers = "--transformer-impl torch --cross-entropy-impl te"
    refused(torch_layers, "`--cross-entropy-impl te` needs Transformer Engine")


def test_needs_are_in_the_order_of_their_versions_from_the_requirements() -> None:
    minima = [need.minimum for need in NEEDS]
    assert minima == sorted(minima, key=Version) and minima[0] == MINIMUM
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^te = \["transformer-engine\[pytorch\]>=([\d.]+)"\]$', text, re.MULTILINE)
    assert found is not None and Version(found[1]) == Version(MINIMUM)
