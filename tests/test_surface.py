"""Frozen surfaces: imports, words, sizes, docstrings, and that every flag is read by something."""

import ast
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from megatron.core.optimizer import OptimizerConfig

from megatron_ext.config.finalize import TESTED_CORES
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.precision import Fp8Config
from megatron_ext.config.run import RunConfig, transformer_fields
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.task import TEXT
from megatron_ext.train.task import TaskChoice
from megatron_ext.video.config.run import MODES
from megatron_ext.video.networks import NETWORKS
from megatron_ext.video.task import VIDEO
from tests.combinations.options import every_flag

PACKAGE = Path(__file__).parent.parent / "megatron_ext"
ENGINE = (
    "train planning checkpoint schedules optim losses layers data parallel device config core "
    "disk errors limits"
).split()
"""Folders and files of the engine; each imports only those to its right."""
TENANTS: dict[str, set[str]] = {
    "text": set(),
    "video": set(),
    "inspect": {"text", "video"},
    "extras": {"text", "video", "inspect"},
}
"""Folders above the engine, with the others of them that they may import."""


TENANT_WORDS = re.compile(
    r"(?<![a-z])(videos?|mmdit|wan|streaming|sft|jsonl|tokenizers?|latents|clips)(?![a-z])",
    re.IGNORECASE,
)
FRAGMENT = re.compile(r"^(Of|That|As|With|What|Its|Their|Those)\b")
"""Words that begin a fragment instead of a sentence."""


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
        # The table of the add-ons, which imports none of them.
        allowed.add("extras")
        wrong += [f"{path.relative_to(PACKAGE)} imports {x}" for x in _imports(path) - allowed]
    assert not wrong


def test_no_add_on_is_imported_by_name() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        own = parts[1] if parts[0] == "extras" else None
        for name in re.findall(r"megatron_ext\.extras\.(\w+)", path.read_text(encoding="utf-8")):
            if name != own:
                wrong.append(f"{'/'.join(parts)} names {name}")
    assert wrong == []


def test_no_video_network_is_imported_by_name() -> None:
    """Only the table names the folders, and a folder may name itself."""
    home = PACKAGE / "video" / "networks"
    folders = {place.rpartition(".")[2] for place in NETWORKS.values()}
    root = PACKAGE.parent
    wrong = []
    for path in [*PACKAGE.rglob("*.py"), *(root / "tools").glob("*.py"), *root.glob("*.py")]:
        own = path.relative_to(home).parts[0] if path.is_relative_to(home) else ""
        names = set(re.findall(r"video\.networks\.(\w+)", path.read_text(encoding="utf-8")))
        if own != "__init__.py":
            wrong += [f"{path.relative_to(root)} names {x}" for x in names & folders - {own}]
    assert wrong == []


def test_networks_are_imported_when_a_run_names_them() -> None:
    code = "import sys, megatron_ext.video.task; print(*sys.modules)"
    words = [sys.executable, "-c", code]
    run = subprocess.run(words, cwd=PACKAGE.parent, check=True, capture_output=True, text=True)
    parts = {name.rpartition(".")[2] for name in run.stdout.split() if ".video.networks." in name}
    assert parts == {"network", "lookup", "config", "hunyuan", "mmdit", "wan"}


def _modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def _edges(tree: ast.Module, modules: Collection[str]) -> set[str]:
    """Return the modules that a file imports at any depth, those for types only included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & set(modules)


def test_the_tested_releases_of_core_are_those_that_pip_installs() -> None:
    asked = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"megatron-core{TESTED_CORES}"' in asked


def test_no_import_circle() -> None:
    modules = _modules()
    graph = {name: _edges(tree, modules) - {name} for name, tree in modules.items()}
    while leaves := {name for name, edges in graph.items() if not edges & graph.keys()}:
        graph = {name: edges for name, edges in graph.items() if name not in leaves}
    # What is left lies on a circle, or imports one; drop what nobody imports.
    while roots := graph.keys() - set().union(*graph.values()) if graph else set():
        graph = {name: edges for name, edges in graph.items() if name not in roots}
    assert sorted(graph) == []


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of a file, those below assignments included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for before, entry in pairwise([None, *node.body]):
            if not isinstance(entry, ast.Expr) or not isinstance(entry.value, ast.Constant):
                continue
            if before is None or isinstance(before, ast.Assign | ast.AnnAssign):
                if isinstance(entry.value.value, str):
                    yield entry.lineno, entry.value.value


@pytest.mark.parametrize("folder", ["megatron_ext", "tools", "examples", "benchmarks", "tests"])
def test_no_docstring_is_a_fragment(folder: str) -> None:
    root = PACKAGE.parent
    wrong = [
        f"{path.relative_to(root)}:{line}: {text.splitlines()[0]}"
        for path in sorted((root / folder).rglob("*.py"))
        for line, text in _docstrings(path)
        if FRAGMENT.match(text)
    ]
    assert wrong == []


def _texts() -> Iterator[tuple[Path, str]]:
    """Yield each text file of the repository that is no build output, with its content."""
    made = {"__pycache__", "out", ".git"}
    for folder, folders, files in os.walk(PACKAGE.parent):
        folders[:] = [x for x in folders if x not in made and not x.startswith((".venv", ".mypy"))]
        for path in (Path(folder, name) for name in files):
            with contextlib.suppress(UnicodeDecodeError):
                yield path, path.read_text(encoding="utf-8")


def test_nothing_names_a_folder_outside_of_the_repository() -> None:
    root = PACKAGE.parent
    outside = []
    for path, text in _texts():
        climbing = re.findall(r"(?:\.\./)+[\w./-]*", text)
        outside += [
            f"{path.relative_to(root)} names {name}"
            for name in climbing
            if not (path.parent / name).resolve().is_relative_to(root)
        ]
        # The tests and the programs may climb to the root of the repository, not above it.
        if re.search(r"\bROOT\.parent\b|\broot\.parent / \"", text):
            outside.append(f"{path.relative_to(root)} looks beside the repository")
    assert outside == []


@pytest.mark.parametrize("folder", ENGINE)
def test_the_engine_has_no_word_of_a_tenant(folder: str) -> None:
    paths = [*(PACKAGE / folder).rglob("*.py"), *PACKAGE.glob(f"{folder}.py")]
    wrong = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(paths)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if TENANT_WORDS.search(re.sub(r"(metrics|faults)\.jsonl|\.jsonl\.tmp", "", line))
    ]
    assert wrong == []


@pytest.mark.parametrize("tenant", ["text", "video"])
def test_tenants_have_one_floor_plan(tenant: str) -> None:
    rooms = {path.stem for path in (PACKAGE / tenant).iterdir()}
    assert {"config", "data", "model", "step", "cost", "convert", "task"} <= rooms


@pytest.mark.parametrize(
    ("program", "others"), [(TEXT, "video.config"), (VIDEO, "text.config")], ids=["text", "video"]
)
def test_a_program_has_no_flag_of_another_tenant(program: TaskChoice, others: str) -> None:
    kinds = [kind.__module__ for task in program.tasks for kind in task.sections]
    assert [kind for kind in kinds if f"megatron_ext.{others}" in kind] == []


THROUGH_THE_CONFIGURATION = {
    "freeze_all_but": "gives trained_alone",
    "freeze_base_for_mtp": "gives trained_alone",
    "num_layers_per_virtual_pipeline_stage": "gives virtual_pipeline_model_parallel_size",
    "allow_untested_core": "decides whether finalize refuses the release of megatron-core",
    "num_virtual_stages_per_pipeline_rank": "gives virtual_pipeline_model_parallel_size",
    "group_query_attention": "gives num_query_groups",
    "openai_gelu": "gives activation_func",
    "yarn_rotary_scaling_factor": "gives rope_scaling",
    "yarn_original_max_position_embeddings": "gives rope_scaling",
    "yarn_beta_fast": "gives rope_scaling",
    "yarn_beta_slow": "gives rope_scaling",
    "yarn_mscale": "gives rope_scaling",
    "yarn_mscale_all_dim": "gives rope_scaling",
    "yarn_correction_range_round_to_int": "gives rope_scaling",
    "mlp_ratio": "gives mlp_size",
    "dit_hidden_size": "gives VideoDiTConfig.sizes",
    "dit_num_heads": "gives VideoDiTConfig.sizes",
    "dit_ffn_size": "gives VideoDiTConfig.sizes",
    "dit_num_blocks": "gives VideoDiTConfig.sizes",
    "exit_signal": "read by its number",
    "decrease_batch_size_if_needed": "read by microbatches",
    "sft_template_kwargs": "read as template_kwargs",
    "sft_prompt_key": "read as prompt_column",
    "sft_response_key": "read as response_column",
    "grad_reduce_in_bf16": "gives accumulate_allreduce_grads_in_fp32",
    "first_last_layers_bf16": "read by keeps_bf16",
    "num_layers_at_start_in_bf16": "read by keeps_bf16",
    "num_layers_at_end_in_bf16": "read by keeps_bf16",
    "mmdit_size": "gives the sizes",
    "hunyuan_size": "gives the sizes",
    "critic_size": "gives the sizes",
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
        if "config" not in (path.parent.name, path.stem)
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    run = RunConfig(
        model=ModelConfig(transformer_impl="transformer_engine"),
        sections=(MoEConfig(num_experts=2),),
        fp8=Fp8Config(fp8_format="e4m3"),
    )
    words |= set(transformer_fields(run))
    mapping = (PACKAGE / "config" / "run.py").read_text(encoding="utf-8")
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
    sections = [s.default_factory for s in dataclasses.fields(RunConfig)]
    for kinds in (TEXT.sections, VIDEO.sections):
        own = [kind for kind in (*sections, *kinds) if dataclasses.is_dataclass(kind)]
        names = [field.name for kind in own for field in dataclasses.fields(kind)]
        assert len(names) == len(set(names))
