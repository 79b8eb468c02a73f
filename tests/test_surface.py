"""Frozen surfaces: which way imports point, and that every flag is read by something."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

from megatron.core.optimizer import OptimizerConfig

from megatron_ext.config.moe import MoEConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.video.config.run import MODES
from tests.combinations.options import every_flag

PACKAGE = Path(__file__).parent.parent / "megatron_ext"
ENGINE = (
    "train planning checkpoint schedules optim losses layers data parallel device config errors"
).split()
"""Folders of the engine; each imports only those to its right."""
TENANTS: dict[str, set[str]] = {"text": set(), "video": set(), "inspect": {"text", "video"}}
"""Folders above the engine, with the other tenants that they may import."""


def _imports(path: Path) -> set[str]:
    """Return the folders of this package that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "megatron_ext":
                names = [f"megatron_ext.{alias.name}" for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("megatron_ext.")}
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own in TENANTS:
            allowed = {own, *TENANTS[own], *ENGINE}
        elif own in ENGINE:
            allowed = set(ENGINE[ENGINE.index(own) :])
        else:
            continue
        wrong += [f"{path.relative_to(PACKAGE)} imports {x}" for x in _imports(path) - allowed]
    assert not wrong


THROUGH_THE_CONFIGURATION = {
    "num_layers_per_virtual_pipeline_stage": "gives virtual_pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank": "gives virtual_pipeline_model_parallel_size",
    "group_query_attention": "gives num_query_groups",
    "exit_signal": "read by its number",
    "sft_template_kwargs": "read as template_kwargs",
    "grad_reduce_in_bf16": "gives accumulate_allreduce_grads_in_fp32",
    "first_last_layers_bf16": "read by keeps_bf16",
    "num_layers_at_start_in_bf16": "read by keeps_bf16",
    "num_layers_at_end_in_bf16": "read by keeps_bf16",
    "mmdit_size": "gives the sizes",
    "teacher_tensor_model_parallel_size": "gives teacher_sizes",
    "teacher_pipeline_model_parallel_size": "gives teacher_sizes",
    "sample_latent_frames": "read by num_frames",
    "dry_run_nodes": "gives world_size",
    "sample_switch_frame": "read by switch_frame",
    **{f"{mode}_weight": "read by the name of the mode" for mode in MODES},
}
"""Flags that only decide the value of another field, which is read."""


UNREAD: set[str] = set()
"""Accepted flags that nothing reads: faults, to be wired or refused, and then struck off here."""


def test_every_flag_is_read_outside_the_configuration() -> None:
    """A flag that only the configuration knows would be silently ignored."""
    words = {
        word
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "config"
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    words |= set(RunConfig(moe=MoEConfig(num_experts=2)).transformer_fields())
    mapping = (PACKAGE / "config" / "transformer.py").read_text(encoding="utf-8")
    words |= set(re.findall(r"\w+", mapping))
    optimizer = {field.name for field in dataclasses.fields(OptimizerConfig)}
    unread = {
        flag.field
        for flag in every_flag()
        if flag.field not in words | set(THROUGH_THE_CONFIGURATION)
        and not (flag.section in ("precision", "optimizer") and flag.field in optimizer)
    }
    assert unread == UNREAD


def test_no_two_sections_hold_a_field_of_one_name() -> None:
    names = [f.name for s in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(
        s.default_factory) for f in dataclasses.fields(s.default_factory)]  # fmt: skip
    assert len(names) == len(set(names))
