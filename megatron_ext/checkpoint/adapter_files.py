"""Reads and writes files of LoRA adapters in the forms in which they are published.

The forms to write are in `checkpoint.adapter_forms`. What a file to read is like is found by the
names of its tensors. Files without any scale have scale 1, as in diffusers and ComfyUI.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from megatron_ext.checkpoint.unpickling import plain_content, read_tensors, stored_entries
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
"""The matrices A and B by the path of a public layer."""


Part = tuple[str, str, Tensor]
"""A LoRA matrix in a public model: path of its layer, ``A`` or ``B``, and its values."""


@dataclass(frozen=True)
class PublicLayers:
    """Maps a model's adapters to the layers of the same model as it is published.

    Attributes:
        name: pattern that matches the names of the adapter matrices to export. Other adapters have
            no counterpart in the public model.
        pairs: takes our adapter matrices by name, and returns those that replace them in the public
            model. Some may have a higher rank than ours.
        target: takes the path of a public layer, and returns peft's name for it
            (``target_modules``).
        task: peft's ``task_type``.
        every: the paths of all layers of the public model, if peft's name of one with an adapter
            can be that of one without; the former then goes by its path.
    """

    name: re.Pattern[str]
    pairs: Callable[[Mapping[str, Tensor]], Pairs]
    target: Callable[[str], str]
    task: str | None
    every: frozenset[str] = frozenset()


def joined_parts(
    parts: Callable[[str, Tensor], Iterator[Part]], matrices: Mapping[str, Tensor]
) -> Pairs:
    """Return our matrices as those of public layers; ``parts`` takes one and yields its parts.

    Adapters of ours on several parts of one layer are together one of a higher rank.
    """
    found: dict[str, dict[str, list[Tensor]]] = {}
    for name, matrix in matrices.items():
        for layer, kind, values in parts(name, matrix):
            found.setdefault(layer, {"A": [], "B": []})[kind].append(values)
    return {layer: (torch.cat(x["A"]), torch.cat(x["B"], dim=1)) for layer, x in found.items()}


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
    placed = [name for name in names if layers.name.match(_VARIANT.sub(".lora.a", name))]
    write_adapters(lora, read_tensors(path, placed), layers, output, form, base_model)
    return sorted({*names} - {*placed})


def write_adapters(
    lora: LoraConfig,
    matrices: Mapping[str, Tensor],
    layers: PublicLayers,
    output: Path,
    form: AdapterForm,
    base_model: str = "",
) -> None:
    """Write our adapter matrices, given by name, in a public form; see `export_adapters`."""
    from safetensors.torch import save_file

    own = {name: values for name, values in matrices.items() if not _VARIANT.search(name)}
    pairs = layers.pairs(own)
    magnitudes: Mapping[str, Tensor] = {}
    if len(own) < len(matrices):
        magnitudes = _public_magnitudes(matrices, layers, output, form)
        lora, pairs = _with_removed(lora, matrices, layers, pairs)
    tensors = dict(_tensors(pairs, form, lora.scale))
    tensors |= {f"{form.before}{x}.{MAGNITUDE}": values for x, values in magnitudes.items()}
    header = {"format": "pt"}
    folder = output.parent if form.file is None else output
    folder.mkdir(parents=True, exist_ok=True)
    if form.file is not None:
        ranks = {layer: len(a) for layer, (a, _) in pairs.items()}
        description = _peft_config(lora, ranks, layers, base_model)
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
    joined = {
        layer: (torch.cat([a, starts[layer][0]]), torch.cat([b, -starts[layer][1]], dim=1))
        for layer, (a, b) in pairs.items()
    }
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
        if bool(((columns != 0).sum(dim=1) > 1).any()):
            raise CheckpointError(
                f"`{layer}` adds up several layers with magnitudes (`--lora-use-dora`) each, so "
                "that it has none of its own; merge the adapters with `tools/lora.py merge`."
            )
        found[layer] = columns.sum(dim=1)
    return found


def _tensors(pairs: Pairs, form: AdapterForm, scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each tensor of a file."""
    down, up = form.matrices
    folded = form.file is None and not form.alphas
    for layer, (a, b) in pairs.items():
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
        "lora_dropout": lora.lora_dropout,
        "use_rslora": lora.lora_rslora,
        "use_dora": lora.lora_use_dora,
        "target_modules": sorted(named),
        "bias": "none",
        "fan_in_fan_out": False,
    }


@dataclass(frozen=True)
class LowRank:
    """The change ``scale * B A`` of a layer's weight; A is ``[r, in]``, B ``[out, r]``."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


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


@dataclass(frozen=True)
class AdapterFile:
    """Adapters as a file holds them.

    Attributes:
        path: its folder or file.
        layers: the adapters by name of the layer in the public model; names have ``_`` in place of
            dots if the file has none.
    """

    path: Path
    layers: Mapping[str, LowRank]


def read_adapters(path: Path, flat: tuple[str, ...] = ()) -> AdapterFile:
    """Read adapters in any public form, which is found by the names of the tensors.

    Args:
        path: folder of peft or diffusers, or file of safetensors or torch.save.
        flat: further text, beside `_BEFORE_FLAT`, that programs for this kind of network put before
            names that have ``_`` in place of dots.

    Raises:
        CheckpointError: they cannot be read, or are of a kind that cannot be trained here.
    """
    file, settings = _place(path)
    tensors, header = _content(file)
    if settings is None and _HEADER in header:
        settings = _settings_in(header[_HEADER], file)
    if settings is not None:
        check_settings(settings, path)
    return AdapterFile(path, dict(_layers(tensors, settings, file, flat)))


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
        name = _bare(layer, flat)
        if name in seen:
            raise CheckpointError(
                f"{file} holds several adapters of `{name}`; save one of them alone."
            )
        seen.add(name)
        yield name, LowRank(a, b, scale_of(alphas.get(layer), name, len(a), settings, file))


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


def _bare(layer: str, flat: tuple[str, ...]) -> str:
    """Return a layer's name without what programs put before it."""
    for text in (*_BEFORE_FLAT, *flat):
        if layer.startswith(text):
            return layer.removeprefix(text).replace(".", "_")
    before = next((text for text in _BEFORE if layer.startswith(text)), None)
    return layer if before is None else _bare(layer.removeprefix(before), flat)


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
    return pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")


def flattened(names: Iterable[str]) -> dict[str, str]:
    """Return each name by itself, and by its form with ``_`` in place of dots."""
    found = {name.replace(".", "_"): name for name in names}
    return {**found, **{name: name for name in found.values()}}
