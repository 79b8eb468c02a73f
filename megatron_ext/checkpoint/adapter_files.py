"""Reads and writes files of LoRA adapters in the forms in which they are published.

The forms to write are in `checkpoint.adapter_forms`. What a file to read is like is found by the
names of its tensors. Files without any scale have scale 1, as in diffusers and ComfyUI.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.checkpoint.adapter_forms import FORMS, PREFIX, WEIGHTS, AdapterForm
from megatron_ext.checkpoint.adapters import adapters_among
from megatron_ext.checkpoint.conversion import verified_folder
from megatron_ext.checkpoint.files import published
from megatron_ext.checkpoint.safetensors_files import TensorFolder, check_dtype
from megatron_ext.checkpoint.state import CRITIC
from megatron_ext.checkpoint.state import PREFIX as OF_AVERAGE
from megatron_ext.checkpoint.unpickling import plain_content, read_tensors, stored_entries
from megatron_ext.config.lora_targets import trains_whole
from megatron_ext.config.optimizer import DEFAULT_ALPHA, LoraConfig
from megatron_ext.disk.reading import UnreadableFile, parse_json, read_model_settings
from megatron_ext.disk.writing import cleared, write_text
from megatron_ext.errors import CheckpointError

CONFIG = "adapter_config.json"
_SAFETENSORS = ".safetensors"
_HEADER = "lora_adapter_metadata"
"""The entry of a safetensors header in which diffusers tells rank and alpha."""

MAGNITUDE = "lora_magnitude_vector"
"""The end of the names of DoRA's magnitudes in peft."""
_VARIANT = re.compile(r"\.lora\.(magnitude|removed\.[ab])$")
"""Matches the names of tensors that adapters have beside A and B (`layers.adapter_start`)."""
_LENGTHS = ".lora.magnitude"
_REMOVED = ".lora.removed."

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""The matrices A and B by the path of a public layer.

A path may be that of a parameter that stacks the weights of e experts. Then A ``[e * r, in]`` holds
the experts one after the other, and column ``i * e + j`` of B ``[out, r * e]`` is column i of that
of expert j, as in peft.
"""


@dataclass(frozen=True)
class PublicLayers:
    """Maps a model's adapters to the layers of the same model as it is published.

    Attributes:
        name: pattern that matches the names of the adapter matrices to export. Other adapters have
            no counterpart in the public model.
        pairs: takes our adapter matrices by name, and returns those that replace them in the public
            model. Some may have a higher rank than ours.
        target: takes the path of a public layer, and returns peft's name for it
            (``target_modules``), or that of its weight (``target_parameters``).
        task: peft's ``task_type``.
        every: the paths of all layers of the public model, if peft's name of one with an adapter
            can be that of one without; the former then goes by its path.
        experts: takes a path, and returns the number of experts that its parameter stacks; 1 for a
            layer.
        whole: takes a weight of ours that is trained whole, by name, and returns the public tensors
            that it is, by name.
        module: takes the name of such a tensor, and returns peft's name for its module
            (``modules_to_save``); "" for a copy of another one.
    """

    name: re.Pattern[str]
    pairs: Callable[[Mapping[str, Tensor]], Pairs]
    target: Callable[[str], str]
    task: str | None
    every: frozenset[str] = frozenset()
    experts: Callable[[str], int] = lambda _path: 1
    whole: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, values: {name: values}
    module: Callable[[str], str] = lambda name: name.rpartition(".")[0]


def check_output(output: Path, form: AdapterForm) -> None:
    """Raise a CheckpointError unless ``output`` is new, and a folder or file as the form needs."""
    is_file = output.suffix == _SAFETENSORS
    if is_file != (form.file is None):
        kind = "single file, whose name ends with" if form.file is None else "folder, not a file"
        ending = f"{kind} {_SAFETENSORS}" if form.file is None else kind
        raise CheckpointError(f"`--output` ({output}) must be a {ending} for `{form.name}`.")
    if output.exists() and (is_file or not output.is_dir() or any(output.iterdir())):
        what = "exists" if is_file else "is not empty"
        raise CheckpointError(f"`--output` ({output}) {what}; give a new {_kind(is_file)}.")


def _kind(is_file: bool) -> str:
    return "file" if is_file else "folder"


def export_adapters(
    lora: LoraConfig,
    root: Path,
    output: Path,
    layers: PublicLayers,
    *,
    form: AdapterForm = FORMS["peft"],
    section: str | None = None,
    step: int | None = None,
    base_model: str = "",
) -> list[str]:
    """Write a checkpoint's adapters in a public form; needs no process group.

    Args:
        lora: the adapter settings of the run that saved the checkpoint.
        root: folder of checkpoints.
        output: folder or file to write to.
        layers: maps our adapters to the layers of the public model.
        section: `CRITIC` for the second network, None for the model of the run.
        step: iteration of the checkpoint; None for the latest.
        base_model: name or path of the Hugging Face model that the adapters belong to.

    Returns:
        Names of adapters that have no place in the public model and were left out.
    """
    path = verified_folder(root, step)
    is_critic = section == CRITIC
    critic = f"{CRITIC}."
    names = [
        name
        for name in adapters_among(stored_entries(path))
        if name.startswith(critic) == is_critic
    ]
    if lora.lora_rank is None or not names:
        raise CheckpointError(
            f"`--load` ({root}) holds a model without adapters; give a run with `--lora-rank`."
        )
    check_output(output, form)
    placed = [x for x in names if layers.name.match(_VARIANT.sub(".lora.a", x))]
    whole = whole_among(lora, stored_entries(path))
    tensors = read_tensors(path, placed + whole)
    public: dict[str, Tensor] = {}
    left_out = sorted({*names} - {*placed})
    for name in whole:
        found = layers.whole(name, tensors.pop(name))
        public |= found
        left_out += [] if found else [name]
    write_adapters(lora, tensors, layers, output, form, base_model, public)
    return left_out


def whole_among(lora: LoraConfig, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are weights trained whole beside adapters, sorted."""
    apart = (OF_AVERAGE, f"{CRITIC}.")
    weights = (n for n in names if "optimizer." not in n and not n.startswith(apart))
    return sorted(name for name in weights if trains_whole(lora, name))


def write_adapters(
    lora: LoraConfig,
    matrices: Mapping[str, Tensor],
    layers: PublicLayers,
    output: Path,
    form: AdapterForm,
    base_model: str = "",
    whole: Mapping[str, Tensor] | None = None,
) -> None:
    """Write our adapter matrices, given by name, in a public form; see `export_adapters`.

    ``whole`` has the tensors of the public model that are trained whole, by name.
    """
    from safetensors.torch import save_file

    own = {name: values for name, values in matrices.items() if not _VARIANT.search(name)}
    pairs = layers.pairs(own)
    magnitudes: Mapping[str, Tensor] = {}
    if len(own) < len(matrices):
        magnitudes = _public_magnitudes(matrices, layers, output, form)
        lora, pairs = _with_removed(lora, matrices, layers, pairs)
    tensors = dict(_tensors(pairs, form, lora.scale, _nested(pairs, layers)))
    tensors |= {f"{form.before}{x}.{MAGNITUDE}": values for x, values in magnitudes.items()}
    for name, values in (whole or {}).items():
        tensors[f"{form.before}{name}"] = values.contiguous()
    header = {"format": "pt"}
    folder = output.parent if form.file is None else output
    folder.mkdir(parents=True, exist_ok=True)
    if form.file is not None:
        ranks = {layer: len(a) // layers.experts(layer) for layer, (a, _) in pairs.items()}
        description = _peft_config(lora, ranks, layers, base_model)
        modules = sorted({layers.module(name) for name in whole or {}} - {""})
        if modules:
            description |= {"modules_to_save": modules, "ensure_weight_tying": True}
        # diffusers reads the configuration from the file's header, under names like those of
        # tensors.
        own = {f"{form.before}{name}": value for name, value in description.items()}
        header[_HEADER] = json.dumps(own)
        if form.file == WEIGHTS:
            write_text(output / CONFIG, json.dumps(description, indent=2))
    save_file(tensors, cleared(folder / (form.file or output.name)), metadata=header)


def _with_removed(
    lora: LoraConfig, matrices: Mapping[str, Tensor], layers: PublicLayers, pairs: Pairs
) -> tuple[LoraConfig, Pairs]:
    """Return settings and matrices of plain adapters ``[A | A0], [B | -B0]`` on published weights.

    A0 and B0 are the start that PiSSA has removed from the weights. The rank is twice ours, as in
    peft's conversion. Without such parts, return the arguments.

    Args:
        matrices: all tensors of our adapters, by name.
        pairs: A and B by public layer.
    """
    removed = {
        name.replace(_REMOVED, ".lora."): values
        for name, values in matrices.items()
        if _REMOVED in name
    }
    if not removed:
        return lora, pairs
    starts = layers.pairs(removed)
    joined = {}
    for layer, (a, b) in pairs.items():
        low, high = starts[layer]
        count = layers.experts(layer)
        rows = [x.unflatten(0, (count, -1)) for x in (a, low)]  # type: ignore[no-untyped-call]
        columns = [x.unflatten(1, (-1, count)) for x in (b, -high)]  # type: ignore[no-untyped-call]
        joined[layer] = torch.cat(rows, dim=1).flatten(0, 1), torch.cat(columns, dim=1).flatten(1)
    assert lora.lora_rank is not None
    alpha = DEFAULT_ALPHA if lora.lora_alpha is None else lora.lora_alpha
    alpha *= math.sqrt(2) if lora.lora_rslora else 2
    return dataclasses.replace(lora, lora_rank=2 * lora.lora_rank, lora_alpha=alpha), joined


def _public_magnitudes(
    matrices: Mapping[str, Tensor], layers: PublicLayers, output: Path, form: AdapterForm
) -> dict[str, Tensor]:
    """Return DoRA's magnitudes ``[out]`` by public layer; {} without any.

    Args:
        matrices: all tensors of our adapters, by name.

    Raises:
        CheckpointError: the form has no place for them, or a public layer adds up several of ours.
    """
    rows = {}
    for name, values in matrices.items():
        if name.endswith(_LENGTHS):
            layer = name.removesuffix("magnitude")
            rank = matrices[f"{layer}b"].size(-1)
            # They are cut and joined as the rows of B are: let them be its first column.
            rows[f"{layer}b"] = F.pad(values.unsqueeze(-1), (0, rank - 1))
            rows[f"{layer}a"] = matrices[f"{layer}a"]
    if not rows:
        return {}
    if form.file is None:
        raise CheckpointError(
            f"`--output` ({output}) cannot have magnitudes of `--lora-use-dora` in the form "
            f"`{form.name}`; give `--format peft`, or merge them with `tools/lora.py merge`."
        )
    found = {}
    for layer, (_, columns) in layers.pairs(rows).items():
        if layers.experts(layer) > 1:
            raise CheckpointError(
                f"`{layer}` stacks experts, whose magnitudes (`--lora-use-dora`) have no form in "
                "peft; merge the adapters with `tools/lora.py merge`."
            )
        if bool(((columns != 0).sum(dim=1) > 1).any()):
            raise CheckpointError(
                f"`{layer}` adds up several layers with magnitudes (`--lora-use-dora`) each, so "
                "that it has none of its own; merge the adapters with `tools/lora.py merge`."
            )
        found[layer] = columns.sum(dim=1)
    return found


LAST_PARAMETER = "down_proj"
"""The last of the parameters in which a module stacks the weights of experts."""
_INNER = ".base_layer"


def _nested(pairs: Pairs, layers: PublicLayers) -> dict[str, str]:
    """Return the names under which adapters of stacked experts are written, by their path.

    peft wraps a module once for each of its parameters, the first one innermost.
    """
    stacked = [path for path in pairs if layers.experts(path) > 1]
    names = {}
    for path in stacked:
        module = path.rpartition(".")[0]
        last = f"{module}.{LAST_PARAMETER}"
        names[path] = module + (_INNER if last in stacked and last != path else "")
    return names


def _tensors(
    pairs: Pairs, form: AdapterForm, scale: float, places: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each tensor of a file.

    ``places`` has the names of adapters that are not written under their paths.
    """
    down, up = form.matrices
    folded = form.file is None and not form.alphas
    for path, (a, b) in pairs.items():
        layer = places.get(path, path)
        name = form.before + (layer.replace(".", "_") if form.flat else layer)
        yield f"{name}.{down}.weight", a.contiguous()
        yield f"{name}.{up}.weight", (b * scale if folded else b).contiguous()
        if form.alphas:
            yield f"{name}.alpha", torch.tensor(scale * len(a))


def _peft_config(
    lora: LoraConfig,
    ranks: Mapping[str, int],
    layers: PublicLayers,
    base_model: str,
) -> dict[str, Any]:
    """Return peft's description of adapters, whose ranks are given by path of their layers."""
    assert lora.lora_rank is not None
    alpha = DEFAULT_ALPHA if lora.lora_alpha is None else lora.lora_alpha
    without = [f".{layer}" for layer in layers.every - ranks.keys()]
    clear = {
        name: not any(layer.endswith(f".{name}") for layer in without)
        for name in map(layers.target, ranks)
    }
    targets = {x: layers.target(x) if clear[layers.target(x)] else x for x in ranks}
    named: dict[str, set[int]] = {}
    for layer, rank in ranks.items():
        named.setdefault(targets[layer], set()).add(rank)
    others: dict[str, int] = {}
    for layer, rank in ranks.items():
        # peft knows a pattern as an ending of paths, so a whole path is one layer's alone.
        name = targets[layer] if len(named[targets[layer]]) == 1 else f"^{layer}$"
        if rank != lora.lora_rank:
            others[name] = rank
    parameters = sorted(
        {x for path, x in targets.items() if layers.experts(path) > 1 or x.endswith(".weight")}
    )
    stacked = {"target_parameters": parameters} if parameters else {}
    return {
        "peft_type": "LORA",
        "task_type": layers.task,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.lora_rank,
        "lora_alpha": alpha,
        "rank_pattern": others,
        # What alpha is divided by, the rank or its root, is another for them.
        "alpha_pattern": {
            name: alpha * (rank / lora.lora_rank) ** (0.5 if lora.lora_rslora else 1.0)
            for name, rank in others.items()
        },
        # peft has no dropout of the inputs of parameters.
        "lora_dropout": 0.0 if parameters else lora.lora_dropout,
        "use_rslora": lora.lora_rslora,
        "use_dora": lora.lora_use_dora,
        "target_modules": sorted({*named} - {*parameters}),
        **stacked,
        "bias": "none",
        "fan_in_fan_out": False,
    }


@dataclass(frozen=True)
class LowRank:
    """The change ``scale * B A`` of a layer's weight; A is ``[r, in]``, B ``[out, r]``.

    If it changes a parameter that stacks several ``experts``, A and B are as in `Pairs`.
    """

    a: Tensor
    b: Tensor
    scale: float
    experts: int = 1

    @property
    def rank(self) -> int:
        return len(self.a) // self.experts

    def of_expert(self, index: int) -> LowRank:
        """Return the change of one expert's weight."""
        a = self.a.view(self.experts, self.rank, -1)[index]
        return LowRank(a, self.b.view(-1, self.rank, self.experts)[:, :, index], self.scale)


_MATRIX = re.compile(
    r"^(?P<layer>.+?)[._](?:lora_(?P<new>A|B|down|up)|lora(?:_linear_layer)?\.(?P<old>down|up))"
    r"(?:\.(?!weight$|bias$)\w+)?\.weight$"
)
"""Matches the names of A and B; peft's may also have the name of the adapter, "default"."""
_BEFORE = (
    f"{PREFIX}.", "transformer.", "model.diffusion_model.", "diffusion_model.", "unet.",
    "pipe.dit.", "dit.", "net.", "model.",
)  # fmt: skip
"""Text that programs put before the names of a network's layers."""
_BEFORE_FLAT = ("lora_unet__", "lora_unet_", "lora_transformer_")
"""Text before names that have ``_`` in place of all dots, or in some programs of the first alone.

The first is VideoX-Fun's.
"""
_OTHER_MODELS = ("text_encoder", "lora_te", "text_encoders.", "conditioner.", "cond_stage_model.")
"""Beginnings of names of adapters on a text encoder."""
_OTHER_KINDS = (
    (re.compile(r"dora_scale|lora_magnitude_vector"), "a magnitude of DoRA"),
    (re.compile(r"\.hada_"), "a matrix of LoHa"),
    (re.compile(r"\.lokr_"), "a matrix of LoKr"),
    (re.compile(r"\.(oft|boft)_|oft_diag|oft_blocks"), "a matrix of OFT"),
    (re.compile(r"lora_mid|\.lora_embedding"), "a matrix of a convolution or an embedding"),
    (re.compile(r"\.diff(_b)?$|\.set_weight$|\.reshape_weight$"), "a change of a whole tensor"),
    (re.compile(r"lora_(B|up)(\.\w+)?\.bias$"), "a bias of an adapter"),
)
"""Patterns of the names of tensors that other kinds of adapters have, with words for these."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "eva_", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which peft changes the weights under the adapters."""


_EFFECTS = {
    "bias": "none", "lora_bias": False, "layer_replication": None, "use_qalora": False,
    "use_bdlora": None, "velora_config": None, "kasa_config": None, "monteclora_config": None,
    "arrow_config": None, "alora_invocation_tokens": None, "trainable_token_indices": None,
}  # fmt: skip
"""Settings of peft that change what adapters compute or which weights they have, and the value with
which they do not."""
_KNOWN_SETTINGS = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path corda_config ensure_weight_tying "
    "eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern "
    "layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config megatron_config "
    "megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern "
    "revision runtime_config target_modules target_parameters task_type use_dora use_rslora "
    "auto_map".split()
)
"""Settings of peft that are used here, or that the names of the tensors make clear."""


@dataclass(frozen=True)
class AdapterFile:
    """Adapters as a file holds them.

    Attributes:
        path: its folder or file.
        layers: the adapters by name of the layer in the public model; names have ``_`` in place of
            dots if the file has none.
        whole: the tensors of peft's ``modules_to_save``, by name.
        dropout: peft's ``lora_dropout``; 0 where the file does not say it.
        notes: sentences on settings that have no effect here.
    """

    path: Path
    layers: Mapping[str, LowRank]
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    dropout: float = 0.0
    notes: Sequence[str] = ()


def read_adapters(
    path: Path, flat: tuple[str, ...] = (), *, takes_whole: bool = False
) -> AdapterFile:
    """Read adapters in any public form, which is found by the names of the tensors.

    Args:
        path: folder of peft or diffusers, or file of safetensors or torch.save.
        flat: further text, beside `_BEFORE_FLAT`, that programs for this kind of network put before
            names that have ``_`` in place of dots.
        takes_whole: whether the file may have whole tensors, as peft's ``modules_to_save`` say.

    Raises:
        CheckpointError: they cannot be read, or are of a kind that cannot be trained here.
    """
    file, settings = _place(path)
    tensors, header = _content(file)
    if settings is None and _HEADER in header:
        settings = _settings_in(header[_HEADER], file)
    if settings is None:
        return AdapterFile(path, dict(_layers(tensors, settings, file, flat)))
    check_settings(settings, path)
    saved = [str(name) for name in settings.get("modules_to_save") or ()] if takes_whole else []
    whole = {
        name: tensors.pop(name)
        for name in sorted(tensors)
        if not _MATRIX.match(name) and name.rpartition(".")[0].endswith(tuple(saved))
    }
    # Where modules are tied, peft saves copies.
    copies = [
        name
        for name, values in tensors.items()
        if not _MATRIX.match(name) and any(torch.equal(values, x) for x in whole.values())
    ]
    for name in copies:
        del tensors[name]
    return AdapterFile(
        path,
        dict(_layers(tensors, settings, file, flat)),
        {bare(name, flat): values for name, values in whole.items()},
        float(settings.get("lora_dropout") or 0.0),
        [
            f"{path / CONFIG} says `{name}`, which is not known and has no effect."
            for name in sorted(settings.keys() - _KNOWN_SETTINGS - _EFFECTS.keys())
        ],
    )


def _place(path: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return the file of the adapters' tensors, and the content of peft's configuration, if any."""
    if not path.exists():
        raise CheckpointError(
            f"`--adapter-path` ({path}) does not exist; give a file or folder of LoRA adapters."
        )
    if path.is_file():
        if path.name == CONFIG:
            raise CheckpointError(
                f"`--adapter-path` ({path}) describes adapters; give its folder, {path.parent}."
            )
        return path, None
    if (path / CONFIG).is_file():
        settings = read_model_settings(path / CONFIG, "save the adapters again with peft.")
        for name in (WEIGHTS, "adapter_model.bin"):
            if (path / name).is_file():
                return path / name, settings
        raise CheckpointError(f"{path} holds {CONFIG} without {WEIGHTS}; copy the folder again.")
    if published(path):
        raise CheckpointError(
            f"`--adapter-path` ({path}) is a folder of checkpoints; give it as `--load`, or export "
            "its adapters with `tools/lora.py export`."
        )
    files = sorted(x for x in path.iterdir() if x.suffix == _SAFETENSORS)
    usual = path / "pytorch_lora_weights.safetensors"
    if usual in files:
        return usual, None
    if len(files) == 1:
        return files[0], None
    shown = ", ".join(x.name for x in files[:4])
    raise CheckpointError(
        f"`--adapter-path` ({path}) holds "
        + (f"several files ({shown}); give one of them." if files else "no LoRA adapters.")
    )


def _content(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file by name, and the texts in its header."""
    if file.suffix != _SAFETENSORS:
        if file.suffix not in (".bin", ".pt", ".pth", ".ckpt"):
            raise CheckpointError(
                f"`--adapter-path` ({file}) must be a folder, or a file of safetensors or "
                "torch.save; give another."
            )
        content = plain_content(file, file)
        if not isinstance(content, Mapping) or not all(map(torch.is_tensor, content.values())):
            raise CheckpointError(f"{file} must hold names and tensors alone; give another file.")
        return {str(name): value for name, value in content.items()}, {}
    with TensorFolder(file.parent, file.name.removesuffix(_SAFETENSORS)) as folder:
        for name in folder.names:
            kind = folder.dtype(name)
            if not name.endswith(".alpha"):
                check_dtype(file, name, kind, kind)
        tensors = {name: folder.tensor(name) for name in sorted(folder.names)}
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return tensors, opened.metadata() or {}


def _settings_in(text: str, file: Path) -> dict[str, Any]:
    """Return peft's settings from the header of a file of diffusers.

    Each has a beginning, the name of the model that it is for.
    """
    try:
        content = parse_json(text, file, not_finite=True)
        return {str(name).rpartition(".")[2]: value for name, value in content.items()}
    except (UnreadableFile, AttributeError) as error:
        raise CheckpointError(
            f"{file} says `{_HEADER}` in its header, which is no JSON object; save it again."
        ) from error


def check_settings(settings: Mapping[str, Any], path: Path) -> None:
    kind = settings.get("peft_type", "LORA")
    start = settings.get("init_lora_weights")
    if kind != "LORA" or settings.get("use_dora"):
        name = "DoRA" if kind == "LORA" else str(kind)
        raise CheckpointError(f"{path} holds adapters of {name}; only LoRA can be continued.")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise CheckpointError(
            f"{path} says `init_lora_weights` {start!r}, with which peft has changed the weights "
            "under the adapters; convert them to plain LoRA with peft."
        )
    for name, usual in _EFFECTS.items():
        if settings.get(name) not in (None, False, usual):
            raise CheckpointError(
                f"{path} says `{name}` {settings[name]!r}, which no layer here computes; only LoRA "
                f"with `{name}` {usual!r} can be continued."
            )
    for name in ("r", "lora_alpha"):
        value = settings.get(name)
        if value is not None and not _is_positive(value):
            raise CheckpointError(f"{path} says `{name}` {value!r}, which must be above 0.")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = settings.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
            raise CheckpointError(
                f"{path} says `{name}` {pattern!r}, which must map names to numbers above 0."
            )
        for key in pattern:
            # A regular expression of a stranger's file could take for ever.
            if not re.fullmatch(r"[\w.-]+", _plain(key)):
                raise CheckpointError(
                    f"{path} says `{name}` for {key!r}, which must be the name of a layer; save "
                    "the adapters with names."
                )


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _layers(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any] | None,
    file: Path,
    flat: tuple[str, ...],
) -> Iterator[tuple[str, LowRank]]:
    """Yield each layer's name and adapter; each tensor must be part of one."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, values in tensors.items():
        _refuse_other(name, file)
        match = _MATRIX.match(name)
        if match is not None:
            kind = "a" if (match["new"] or match["old"]) in ("A", "down") else "b"
            half = halves.setdefault(match["layer"], {})
            if kind in half:
                raise CheckpointError(
                    f"{file} holds several adapters of `{match['layer']}`; save one of them alone."
                )
            half[kind] = values
    if not halves:
        example = f", but tensors such as `{min(tensors)}`" if tensors else ""
        raise CheckpointError(f"{file} holds no LoRA adapters{example}; give a file of adapters.")
    alphas = {
        name.removesuffix(".alpha"): values
        for name, values in tensors.items()
        if name.endswith(".alpha")
    }
    for name in tensors:
        if not _MATRIX.match(name) and name.removesuffix(".alpha") not in halves:
            raise CheckpointError(
                f"{file} holds `{name}`, which is part of no LoRA adapter; save the adapters alone."
            )
    seen = set[str]()
    parameters = _parameters([bare(layer, flat) for layer in halves], settings or {}, file)
    for layer, half in halves.items():
        if len(half) < 2:
            both = (
                "matrix A of `{}` without matrix B" if "a" in half else "matrix B of `{}` without A"
            )
            raise CheckpointError(f"{file} holds {both.format(layer)}; copy the file again.")
        is_convolution = all(x.dim() == 4 and x.shape[2:] == (1, 1) for x in half.values())
        a, b = (x.flatten(1) if is_convolution else x for x in (half["a"], half["b"]))
        if a.dim() != 2 or b.dim() != 2 or b.size(1) != len(a) or not len(a):
            raise CheckpointError(
                f"{file} holds matrices of `{layer}` with shapes {list(a.shape)} and "
                f"{list(b.shape)}, which must be [rank, in] and [out, rank]; copy the file again."
            )
        name = bare(layer, flat)
        experts = 1
        if name in parameters:
            name = parameters[name]
            experts = _experts(name, len(a), settings or {}, file)
        if name in seen:
            raise CheckpointError(
                f"{file} holds several adapters of `{name}`; save one of them alone."
            )
        seen.add(name)
        rank = len(a) // experts
        yield name, LowRank(a, b, scale_of(alphas.get(layer), name, rank, settings, file), experts)


def _parameters(layers: Iterable[str], settings: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Return the parameters that adapters of stacked experts change, by name of the layer.

    peft gives them the name of the module; with several in a module, see `_nested`. A name of a
    parameter without its module is one of experts.
    """
    targets = {str(name) for name in settings.get("target_parameters") or ()}
    targets = {name for name in targets if not name.endswith(".weight")}
    targets = {name if "." in name else f"experts.{name}" for name in targets}
    ends = {name.rpartition(".")[2] for name in targets}
    found = {}
    known = set(layers)
    for layer in known:
        module = layer
        depth = 0
        while module.endswith(_INNER):
            module = module.removesuffix(_INNER)
            depth += 1
        own = [x for x in ends if f".{module}.{x}".endswith(tuple(f".{y}" for y in targets))]
        own.sort(key=lambda name: name == LAST_PARAMETER)
        if own:
            wrapped = sum(x == module or x.startswith(module + _INNER) for x in known)
            if wrapped != len(own) or len(own) > 2:
                raise CheckpointError(
                    f"{file} holds {wrapped} adapters of parameters of `{module}`, but its "
                    f"`target_parameters` name {len(own)}; save the adapters again with peft."
                )
            found[layer] = f"{module}.{own[len(own) - 1 - depth]}"
    return found


def _experts(name: str, rows: int, settings: Mapping[str, Any], file: Path) -> int:
    """Return the number of experts whose matrices A together have so many rows."""
    rank = _by_pattern(settings.get("rank_pattern"), name, settings.get("r", rows))
    if rows % int(rank):
        raise CheckpointError(
            f"{file} holds an adapter of `{name}` with {rows} rows, which must be divisible by its "
            f"rank ({rank}); save both again."
        )
    return rows // int(rank)


def _refuse_other(name: str, file: Path) -> None:
    """Raise a CheckpointError for a tensor of another model, or of another kind of adapter."""
    if name.startswith(_OTHER_MODELS):
        raise CheckpointError(
            f"{file} holds `{name}`, an adapter of a text encoder, which is not trained; save the "
            "network's adapters alone."
        )
    if name.startswith("transformer_2."):
        raise CheckpointError(
            f"{file} holds `{name}`, an adapter of a second expert; save each expert's adapters "
            "alone."
        )
    for pattern, what in _OTHER_KINDS:
        if pattern.search(name):
            raise CheckpointError(
                f"{file} holds `{name}`, {what}, which no layer here takes; only the matrices of "
                "LoRA can be continued."
            )


def bare(layer: str, flat: tuple[str, ...] = ()) -> str:
    """Return a layer's name without what programs put before it."""
    for text in (*_BEFORE_FLAT, *flat):
        if layer.startswith(text):
            return layer.removeprefix(text).replace(".", "_")
    before = next((text for text in _BEFORE if layer.startswith(text)), None)
    return layer if before is None else bare(layer.removeprefix(before), flat)


def scale_of(
    alpha: Tensor | None, layer: str, rank: int, settings: Mapping[str, Any] | None, file: Path
) -> float:
    """Return the scale of a layer's adapter, from its own tensor or from peft's settings."""
    if alpha is not None:
        if alpha.numel() != 1 or not math.isfinite(float(alpha)) or float(alpha) <= 0:
            raise CheckpointError(
                f"{file} holds `{layer}.alpha` {alpha.tolist()}, which must be one number above 0."
            )
        return float(alpha) / rank
    if settings is None:
        return 1.0
    said = _by_pattern(settings.get("rank_pattern"), layer, settings.get("r", rank))
    if said != rank:
        raise CheckpointError(
            f"{file} holds an adapter of `{layer}` of rank {rank}, but its settings say {said}; "
            "save both again."
        )
    value = _by_pattern(settings.get("alpha_pattern"), layer, settings.get("lora_alpha", rank))
    return float(value) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any] | None, layer: str, usual: Any) -> Any:
    """Return the value of the first pattern that matches the end of a layer's name, as in peft."""
    for pattern, value in (patterns or {}).items():
        name = _plain(pattern)
        if layer == name or (not pattern.startswith("^") and layer.endswith(f".{name}")):
            return value
    return usual


def _plain(pattern: str) -> str:
    """Return the name that a pattern of peft's settings stands for."""
    return pattern.removeprefix("^").removeprefix(".*\\.").removesuffix("$").replace("\\.", ".")


def flattened(names: Iterable[str]) -> dict[str, str]:
    """Return each name by itself, and by its form with ``_`` in place of dots."""
    found = {name.replace(".", "_"): name for name in names}
    return {**found, **{name: name for name in found.values()}}
