"""Reads the entry `quantization_config` of a config.json, which says how weights are stored.

Sources: the classes in transformers' ``utils/quantization_config.py``, the README of AutoFP8 for
scales of whole tensors, and ``QuantizationArgs`` of the package compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.errors import CheckpointError

ENTRY = "quantization_config"
FP8_METHODS = ("fp8", "fbgemm_fp8", "modelopt")
"""Values of `quant_method` whose weights are stored in fp8 beside their scales."""
MXFP4 = "mxfp4"
COMPRESSED = "compressed-tensors"
SCALED_FORMATS = ("float-quantized", "naive-quantized", "int-quantized")
"""compressed-tensors' formats that store one value of 8 bits for each weight."""
PACKED_FORMAT = "pack-quantized"
"""compressed-tensors' format that stores several integers in each word of 32 bits."""
UNQUANTIZED = "use the folder of the model before it was quantized"
_ADVICE = {
    "awq": f"AWQ's weights of 4 bits were rounded for inference; {UNQUANTIZED}",
    "gptq": f"GPTQ's weights were rounded for inference; {UNQUANTIZED}",
    "bitsandbytes": "the layout of bitsandbytes' weights is known to that package alone; save the "
    "result of transformers' `model.dequantize()`, or use the folder before it was quantized",
}
"""Value of `quant_method` -> why it is refused, and what to do."""
_EFFECTIVE = {
    **dict.fromkeys(
        FP8_METHODS,
        "quant_method weight_block_size modules_to_not_convert ignored_layers ignore "
        "exclude_modules scale_fmt fmt quant_algo dequantize",
    ),
    MXFP4: "quant_method modules_to_not_convert dequantize",
    COMPRESSED: "quant_method format config_groups ignore quantization_status",
}
"""Value of `quant_method` -> keys of the entry that have an effect here, or describe the file."""
_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Names under which programs list the modules that are not quantized."""


@dataclass(frozen=True)
class Group:
    """How compressed-tensors stores the weights of some modules.

    Attributes:
        targets: which modules: names, patterns after ``re:``, or names of classes.
        format: one of `SCALED_FORMATS`, or `PACKED_FORMAT`.
        num_bits: bits of a weight.
        symmetric: whether weights have no zero points.
        block: rows and columns of a block of weights that share a scale; None if it follows from
            the shape of the scales.
    """

    targets: tuple[str, ...]
    format: str
    num_bits: int
    symmetric: bool
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Quantization:
    """The entry `quantization_config` of a config.json.

    Attributes:
        method: its `quant_method`; "" if config.json has no such entry.
        path: the path of config.json, for messages.
        block: rows and columns of a block of weights that share a scale; None if not given.
        skipped: names or patterns of the modules that are not quantized.
        skipped_key: the key that lists them.
        groups: the groups of compressed-tensors; () for other methods.
        unused: keys of the entry that have no effect here.
    """

    method: str
    path: Path
    block: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()
    skipped_key: str = _LISTS[0]
    groups: tuple[Group, ...] = ()
    unused: tuple[str, ...] = ()

    def skips(self, module: str) -> bool:
        """Tell whether the module of this name is listed as not quantized.

        The rule is that of transformers' `should_convert_module`, or compressed-tensors' `ignore`.
        """
        if self.method == COMPRESSED:
            return any(_targets(entry, module) for entry in self.skipped)
        return any(_lists(entry, module) for entry in self.skipped)

    def group_of(self, module: str) -> Group | None:
        """Return the first group of compressed-tensors whose targets name the module.

        A class's name, such as "Linear", stands for all modules that no other target names.
        """
        for group in self.groups:
            if any(_targets(entry, module) for entry in group.targets):
                return group
        of_classes = (x for x in self.groups if any(_is_class(entry) for entry in x.targets))
        return next(of_classes, None)


def entry_of(raw: Mapping[str, Any]) -> Any:
    """Return the entry in the content of a config.json, or in its part for the text model."""
    text = raw.get("text_config")
    inner = text.get(ENTRY) if isinstance(text, Mapping) else None
    return raw.get(ENTRY, inner)


def read_quantization(raw: Mapping[str, Any], path: Path) -> Quantization:
    """Return how a model stores its weights, by ``raw``, the content of the config.json at `path`.

    Raise a CheckpointError for a method or a format that cannot be read, and for a broken entry.
    """
    entry = entry_of(raw)
    if entry is None or entry == {}:
        return Quantization("", path)
    if not isinstance(entry, Mapping):
        _refuse(path, f"`{ENTRY}` {entry!r}", "must be an object; copy config.json again")
    method = entry.get("quant_method")
    if method in FP8_METHODS:
        given = _read_fp8(entry, path)
    elif method == MXFP4:
        given = {}
    elif method == COMPRESSED:
        given = {"groups": _read_groups(entry, path)}
    else:
        advice = _ADVICE.get(str(method), f"it can read {_KNOWN}; {UNQUANTIZED}")
        _refuse(path, f"`{ENTRY}.quant_method` {method!r}", f"cannot be read: {advice}")
    key = next((key for key in _LISTS if entry.get(key)), _LISTS[0])
    skipped = entry.get(key) or []
    if not isinstance(skipped, list) or not all(isinstance(x, str) for x in skipped):
        _refuse(path, f"`{ENTRY}.{key}` {skipped!r}", "must be a list of names; mend it")
    used = _EFFECTIVE[method].split()
    unused = tuple(key for key, value in entry.items() if key not in used and value is not None)
    return Quantization(
        method, path, skipped=tuple(skipped), skipped_key=key, unused=unused, **given
    )


_KNOWN = "fp8, mxfp4 and compressed-tensors"


def _refuse(path: Path, what: str, rule: str) -> NoReturn:
    raise CheckpointError(f"{path} says {what}, which {rule}.")


def _read_fp8(entry: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if entry.get("quant_method") == "modelopt" and entry.get("quant_algo") != "FP8":
        algorithm = f"`{ENTRY}.quant_algo` {entry.get('quant_algo')!r}"
        _refuse(path, algorithm, f"cannot be read, since of modelopt's only FP8 can; {UNQUANTIZED}")
    if entry.get("expert_dtype") not in (None, "fp8"):
        _refuse(path, f"`{ENTRY}.expert_dtype` {entry['expert_dtype']!r}", "must be 'fp8'")
    block = entry.get("weight_block_size")
    return {"block": _sizes(f"{ENTRY}.weight_block_size", block, path)}


def _sizes(name: str, block: Any, path: Path) -> tuple[int, int] | None:
    if block is None:
        return None
    # Older versions of compressed-tensors write "128x128".
    texts = block.split("x") if isinstance(block, str) else []
    sizes = block if isinstance(block, list | tuple) else [int(x) for x in texts if x.isdigit()]
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        _refuse(
            path,
            f"`{name}` {block!r}",
            "must be two numbers of at least 1, the rows and columns of a block; copy config.json "
            "again",
        )
    return sizes[0], sizes[1]


def _read_groups(entry: Mapping[str, Any], path: Path) -> tuple[Group, ...]:
    groups = entry.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _refuse(path, f"`{ENTRY}.config_groups` {groups!r}", "must be an object; copy it again")
    return tuple(_read_group(f"{ENTRY}.config_groups.{name}", group, entry.get("format"), path)
                 for name, group in groups.items())  # fmt: skip


def _read_group(name: str, group: Any, usual: Any, path: Path) -> Group:
    """Return a group of compressed-tensors; ``usual`` is the format if it has none of its own."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        _refuse(path, f"`{name}.weights` {weights!r}", "must be an object; copy config.json again")
    kind = group.get("format") or usual
    bits: Any = weights.get("num_bits")
    if kind not in (*SCALED_FORMATS, PACKED_FORMAT):
        known = ", ".join((*SCALED_FORMATS, PACKED_FORMAT))
        _refuse(path, f"`{name}.format` {kind!r}", f"must be one of {known}; {UNQUANTIZED}")
    if bits not in ((4, 8) if kind == PACKED_FORMAT else (8,)):
        least = "4 or 8" if kind == PACKED_FORMAT else "8"
        _refuse(path, f"`{name}.weights.num_bits` {bits!r}", f"must be {least}; {UNQUANTIZED}")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        # Columns in another order than their groups need a table, `weight_g_idx`.
        order = f"`{name}.weights.actorder` {weights['actorder']!r}"
        _refuse(path, order, f"cannot be read; {UNQUANTIZED}")
    targets = group.get("targets") or []
    if not isinstance(targets, list) or not all(isinstance(x, str) for x in targets):
        _refuse(path, f"`{name}.targets` {targets!r}", "must be a list of names; mend it")
    block = _sizes(f"{name}.weights.block_structure", weights.get("block_structure"), path)
    symmetric = weights.get("symmetric", True) is not False
    return Group(tuple(targets), kind, bits, symmetric, block)


def _is_class(target: str) -> bool:
    return "." not in target and not target.startswith("re:") and target[:1].isupper()


def _targets(target: str, module: str) -> bool:
    """Tell whether an entry of compressed-tensors' lists names a module."""
    if target.startswith("re:"):
        return _matches(target.removeprefix("re:"), module)
    return target == module


def _lists(entry: str, module: str) -> bool:
    """Tell whether an entry of transformers' list names a module, by its beginning or its end."""
    return module.endswith(entry) or _matches(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False
