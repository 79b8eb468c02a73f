"""Adapters of each network, in each public form and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.checkpoint.adapter_files import read_adapters, write_adapters
from megatron_ext.checkpoint.adapter_forms import FORMS, AdapterForm
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.video.convert.adapter_training import read_for
from megatron_ext.video.convert.adapters import AdapterMap, Adapters, layers_of
from megatron_ext.video.convert.exporting import public_tensor
from megatron_ext.video.networks.hunyuan.config import SIZES as HUNYUAN
from megatron_ext.video.networks.hunyuan.convert.conversion import CONVERSION as HUNYUAN_WEIGHTS
from megatron_ext.video.networks.mmdit.config import SIZES as MMDIT
from megatron_ext.video.networks.mmdit.convert.conversion import CONVERSION as MMDIT_WEIGHTS
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION as WAN_WEIGHTS
from megatron_ext.video.task import VIDEO
from tests.training_runs import errors_of
from tests.video.clips import SHORT, write_clips
from tests.video.networks.harness import relative
from tests.video.networks.hunyuan.problem import diffusers_model
from tests.video.networks.wan.convert.models import inputs, network
from tests.video.networks.wan.convert.models import theirs as flow_of
from tests.video.wan_run import FLAGS as WAN_FLAGS
from tests.video.wan_run import KINDS, SIZES_OF_CLIPS, train

NETWORKS = {
    "wan": (WAN_WEIGHTS, SIZES_OF_CLIPS),
    "mmdit": (MMDIT_WEIGHTS, MMDIT["tiny"]),
    "hunyuan": (HUNYUAN_WEIGHTS, HUNYUAN["tiny"]),
}
RANK, ALPHA = 4, 6.0


def sample(name: str, *, separate: bool) -> dict[str, Tensor]:
    """Return random adapters on all layers of a network that take any, by our names."""
    conversion, sizes = NETWORKS[name]
    places = AdapterMap(conversion, conversion.forms[0], sizes)
    torch.manual_seed(7)
    found = dict[str, Tensor]()
    for layer in places.layers:
        outputs, inputs = places.shape(layer)
        count = len(places.projections(layer)) if separate else 1
        found[f"{layer}.lora.a"] = torch.randn(count * RANK, inputs)
        found[f"{layer}.lora.b"] = torch.randn(outputs, RANK)
    return found


def settings(*, separate: bool) -> LoraConfig:
    return LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_separate_projections=separate)


def write(name: str, form: AdapterForm, folder: Path, *, separate: bool) -> Path:
    conversion, sizes = NETWORKS[name]
    naming = next((x for x in form.naming if x in conversion.namings), None)
    layers = layers_of(conversion, sizes, RANK, naming)
    output = folder / ("adapter" if form.file else "adapter.safetensors")
    lora = settings(separate=separate)
    write_adapters(lora, sample(name, separate=separate), layers, output, form)
    return output


def matrices_of(adapters: Adapters) -> dict[str, Tensor]:
    pairs = adapters.matrices.items()
    return {f"{x}.lora.{kind}": m for x, pair in pairs for kind, m in zip("ab", pair, strict=True)}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_adapters_come_back_bit_for_bit(
    name: str, form: AdapterForm, separate: bool, tmp_path: Path
) -> None:
    conversion, sizes = NETWORKS[name]
    path = write(name, form, tmp_path, separate=separate)
    found = read_for(conversion, sizes, path)
    assert (found.rank, found.separate, found.missing) == (RANK, separate, 0)
    scale = 1 if form.name == "original" else ALPHA / RANK
    assert found.alpha == scale * RANK
    wanted = sample(name, separate=separate)
    if form.name == "original":
        wanted = {x: ALPHA / RANK * m if x.endswith("b") else m for x, m in wanted.items()}
    back = matrices_of(found)
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[x], wanted[x]) for x in wanted)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_changes_the_public_weights_as_ours(
    name: str, form: AdapterForm, separate: bool, tmp_path: Path
) -> None:
    conversion, sizes = NETWORKS[name]
    file = read_adapters(write(name, form, tmp_path, separate=separate))
    naming = next((x for x in form.naming if x in conversion.namings), None)
    places = AdapterMap(conversion, conversion.form(naming), sizes)
    ours = {x: torch.zeros(shape) for x, shape in places.mapped.parameters.items()}
    matrices = sample(name, separate=separate)
    for layer in places.layers:
        a, b = (matrices[f"{layer}.lora.{kind}"] for kind in "ab")
        if separate:
            # Rows of a projection, as the published form of diffusers tells.
            parts = places.projections(layer)
            for index, own in enumerate(parts):
                for part in own:
                    rows = slice(part.row, part.row + part.count)
                    low = a[index * RANK : (index + 1) * RANK]
                    ours[f"{layer}.weight"][rows] = ALPHA / RANK * b[rows] @ low
        else:
            ours[f"{layer}.weight"] = ALPHA / RANK * b @ a
    changed = 0
    for public in places.pieces:
        wanted = public_tensor(places.mapped, f"{public}.weight", torch.float32, ours.__getitem__)
        flat = public.replace(".", "_") if form.flat else public
        own = file.layers[flat]
        assert torch.allclose(own.scale * own.b @ own.a, wanted, atol=1e-4)
        changed += 1
    assert changed == len(file.layers)


def changed(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write a file of adapters again with other tensors, and without settings in its header."""
    save_file(change(load_file(path)), path)


FIRST = "blocks.0.self_attn.q"
"""A layer of Wan as the original code names it, whose adapter files of ComfyUI have."""


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def with_tensor(name: str, values: Tensor) -> Change:
    return lambda tensors: {**tensors, name: values}


def without(part: str) -> Change:
    return lambda tensors: {name: x for name, x in tensors.items() if part not in name}


def only(*parts: str) -> Change:
    return lambda tensors: {n: x for n, x in tensors.items() if any(part in n for part in parts)}


def narrow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        n: x[:, :32].clone() if n.endswith("q.lora_A.weight") else x for n, x in tensors.items()
    }


def renamed(name: str) -> Change:
    return lambda tensors: {n.replace(FIRST, name): x for n, x in tensors.items()}


OWN = f"diffusion_model.{FIRST}"
WRONG: dict[str, tuple[Change, str]] = {
    "dora": (with_tensor(f"{OWN}.dora_scale", torch.ones(4)), "a magnitude of DoRA"),
    "loha": (with_tensor(f"{OWN}.hada_w1_a", torch.ones(4, 4)), "a matrix of LoHa"),
    "lokr": (with_tensor(f"{OWN}.lokr_w1", torch.ones(4, 4)), "a matrix of LoKr"),
    "bias": (with_tensor(f"{OWN}.diff_b", torch.ones(4)), "a change of a whole tensor"),
    "text": (with_tensor("lora_te1_x.lora_down.weight", torch.ones(4, 4)), "a text encoder"),
    "other": (with_tensor("blocks.0.norm.weight", torch.ones(4)), "is part of no LoRA adapter"),
    "half": (without(f"{FIRST}.lora_B"), f"matrix A of `{OWN}` without matrix B"),
    "alpha": (with_tensor(f"{OWN}.alpha", torch.tensor(0.0)), "must be one number above 0"),
    "scale": (with_tensor(f"{OWN}.alpha", torch.tensor(2.0)), "would be rounded; give"),
    "rank": (with_tensor(f"{OWN}.lora_A.weight", torch.ones(3, 64)), "must be [rank, in] and"),
    "size": (narrow, "with shape [64, 32], but this Wan 2.1 or 2.2 has [64, 64]"),
    "outer": (renamed("head.head"), "of `head.head`, which is none of the linear layers in the"),
    "unknown": (renamed("blocks.9.q"), "`blocks.9.q`, which this Wan 2.1 or 2.2 does not have"),
    "none": (lambda _: {"blocks.0.weight": torch.ones(2)}, "holds no LoRA adapters, but tensors"),
    "8 bits": (
        lambda tensors: {n: x.to(torch.float8_e4m3fn) for n, x in tensors.items()},
        "which is no float32, bfloat16 or float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_held_is_refused(name: str, tmp_path: Path) -> None:
    change, said = WRONG[name]
    path = write("wan", FORMS["comfyui"], tmp_path, separate=True)
    changed(path, change)
    with pytest.raises(CheckpointError, match=re.escape(said)) as error:
        read_for(WAN_WEIGHTS, SIZES_OF_CLIPS, path)
    assert len(error.value.messages) == 1 and str(error.value).endswith(".")


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    folder = write("wan", FORMS["peft"], tmp_path, separate=True)
    settings_file = folder / "adapter_config.json"
    content = json.loads(settings_file.read_text())
    for changes, said in (
        ({"use_dora": True}, "holds adapters of DoRA"),
        ({"peft_type": "LOHA"}, "holds adapters of LOHA"),
        ({"init_lora_weights": "pissa_niter_4"}, "with which peft has changed the weights"),
        ({"r": 8}, "of rank 4, but its settings say 8"),
        ({"lora_alpha": 0}, "says `lora_alpha` 0, which must be above 0"),
        ({"alpha_pattern": {"(a+)+": 1}}, "must be the name of a layer"),
    ):
        settings_file.write_text(json.dumps({**content, **changes}))
        with pytest.raises(CheckpointError, match=re.escape(said)):
            read_adapters(folder)
    settings_file.unlink()
    (folder / "adapter_model.safetensors").rename(folder / "x.txt")
    for path, said in (
        (folder, "holds no LoRA adapters."),
        (folder / "x.txt", "must be a folder, or a file of safetensors"),
        (folder / "y", "does not exist"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(said)):
            read_adapters(path)


def test_ranks_and_scales_that_differ_are_held_exactly(tmp_path: Path) -> None:
    """Missing products are zeros; a scale that is twice the others' doubles B."""
    path = write("wan", FORMS["comfyui"], tmp_path, separate=True)
    before = load_file(path)
    low = {
        f"{OWN}.lora_A.weight": before[f"{OWN}.lora_A.weight"][:2].clone(),
        f"{OWN}.lora_B.weight": before[f"{OWN}.lora_B.weight"][:, :2].clone(),
        f"{OWN}.alpha": torch.tensor(2 * ALPHA / RANK * 2),
    }
    changed(path, lambda tensors: {**tensors, **low})
    found = read_for(WAN_WEIGHTS, SIZES_OF_CLIPS, path)
    layers = layers_of(WAN_WEIGHTS, SIZES_OF_CLIPS, RANK, "original")
    a, b = layers.pairs(matrices_of(found))[FIRST]
    assert torch.equal(a, low[f"{OWN}.lora_A.weight"])
    assert torch.equal(b, 2 * low[f"{OWN}.lora_B.weight"])
    assert (found.rank, found.alpha) == (RANK, ALPHA)


def test_a_file_names_the_layers_of_the_run(tmp_path: Path) -> None:
    path = write("wan", FORMS["kohya"], tmp_path, separate=True)
    changed(path, only("self_attn_q", "self_attn_v"))
    found = read_for(WAN_WEIGHTS, SIZES_OF_CLIPS, path)
    assert (found.targets, found.missing) == (["linear_qkv"], 2)
    a, b = found.matrices["blocks.0.self_attention.linear_qkv"]
    assert found.given["blocks.0.self_attention.linear_qkv"].view(3, RANK).tolist() == [
        [True] * RANK, [False] * RANK, [True] * RANK
    ]  # fmt: skip
    assert not b.view(4, 3, 16, RANK)[:, 1].any() and not a.view(3, RANK, 64)[1].any()
    path.unlink()
    path = write("wan", FORMS["diffusers"], tmp_path, separate=True)
    changed(path / "pytorch_lora_weights.safetensors", only("attn1"))
    found = read_for(WAN_WEIGHTS, SIZES_OF_CLIPS, path)
    assert found.targets == ["linear_qkv", "self_attention.linear_proj"]


def test_names_of_other_programs_are_those_of_kohya(tmp_path: Path) -> None:
    """Read VideoX-Fun's names, those with one dot less, and Tencent's for HunyuanVideo."""
    for name, kohyas, theirs in (
        ("wan", "lora_unet_", "lora_unet__"),
        ("wan", "_(self|cross)_attn_(.)", r".\1_attn.\2"),
        ("hunyuan", "lora_unet_", "Hunyuan_video_I2V_lora_"),
    ):
        conversion, sizes = NETWORKS[name]
        path = write(name, FORMS["kohya"], tmp_path, separate=False)
        wanted = matrices_of(read_for(conversion, sizes, path))
        before = load_file(path)
        renamed = {re.sub(kohyas, theirs, x): values for x, values in before.items()}
        assert renamed.keys() != before.keys()
        save_file(renamed, path)
        found = matrices_of(read_for(conversion, sizes, path))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[x], wanted[x]) for x in wanted)
        path.unlink()


def test_diffusers_loads_files_of_each_form(tmp_path: Path) -> None:
    """Files of kohya and ComfyUI go through its converters, and compute as its own form does."""
    wanted = diffusers_output(write("wan", FORMS["diffusers"], tmp_path / "own", separate=True))
    for form in ("kohya", "comfyui"):
        path = write("wan", FORMS[form], tmp_path, separate=True)
        found = diffusers_output(path)
        assert relative(found, wanted) <= 1e-5
        path.unlink()
    plain = flow_of(network(SIZES_OF_CLIPS), inputs(SIZES_OF_CLIPS))
    assert relative(plain, wanted) > 1e-2


def diffusers_output(path: Path) -> Tensor:
    """Return what diffusers computes with the adapters that `WanPipeline` finds in a file."""
    model = network(SIZES_OF_CLIPS)
    kind = {} if path.is_dir() else {"weight_name": path.name}
    place = path if path.is_dir() else path.parent
    state, metadata = WanPipeline.lora_state_dict(place, return_lora_metadata=True, **kind)
    WanPipeline.load_lora_into_transformer(state, model, adapter_name="x", metadata=metadata)
    return flow_of(model, inputs(SIZES_OF_CLIPS))


FLAGS = [*WAN_FLAGS, *KINDS["video-dit"].split(), "--video-data-path", "x"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lora-rank 8", "`--lora-rank` (8) contradicts `--adapter-path` ("),
        ("--lora-alpha 2", "`--lora-alpha` (2.0) contradicts `--adapter-path` ("),
        ("--lora-rslora", "`--lora-rslora` contradicts `--adapter-path` ("),
        ("--lora-target-modules mlp", "leaves out `blocks.0.self_attention.linear_qkv`, which has"),
    ],
)
def test_flags_that_contradict_a_file_are_refused(words: str, said: str, tmp_path: Path) -> None:
    path = write("wan", FORMS["diffusers"], tmp_path, separate=True)
    (error,) = errors_of([*FLAGS, "--adapter-path", str(path), *words.split()], VIDEO)
    assert said in error


def test_adapters_on_random_weights_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write("wan", FORMS["kohya"], tmp_path, separate=True)
    data = write_clips(tmp_path / "clips", {SHORT: 4})
    train(data, tmp_path / "save", f"{KINDS['video-dit']} --adapter-path {path}")
    assert "> warning: the weights under the adapters are random; give" in capfd.readouterr().out


@pytest.mark.parametrize(
    "name", ["modulation", "self_attention.linear_fc1", "attn2", "linear_vision_kv"]
)
def test_targets_that_are_no_layers_of_the_network_are_refused(name: str) -> None:
    (error,) = errors_of([*FLAGS, "--lora-rank", "4", "--lora-target-modules", "attn", name], VIDEO)
    assert error.startswith(f"`--lora-target-modules` ({name}) must be names among attn, mlp, line")


def test_settings_of_peft_name_no_layers_without_adapters(tmp_path: Path) -> None:
    """The refiner of HunyuanVideo has layers of the same names as its blocks."""
    path = write("hunyuan", FORMS["peft"], tmp_path, separate=True)
    targets = json.loads((path / "adapter_config.json").read_text())["target_modules"]
    names = [name for name, _ in diffusers_model(HUNYUAN["tiny"]).named_modules()]
    found = {n for n in names if any(f".{n}".endswith(f".{target}") for target in targets)}
    assert found == set(read_adapters(path).layers)
